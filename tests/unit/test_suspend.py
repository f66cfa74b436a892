"""The timer that runs while the machine is suspended: it tells of losses when those of the loop are late, and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import runpy
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiolock
from aiolock import clock
from aiolock.core import suspend
from tests.stops import LOOPS, late

LINUX = pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="needs CLOCK_BOOTTIME")
TTL = 0.3
MAX_HOLD = 0.2
PATIENCE = 20.0


@pytest.fixture(params=LOOPS)
def kind(request) -> type[Any]:
    """A class of event loops."""
    if request.param == "asyncio":
        return asyncio.SelectorEventLoop
    return pytest.importorskip("uvloop").Loop


def run(kind: type[Any], main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=kind) as runner:
        return runner.run(main)


def timers() -> list[str]:
    """The descriptors of this process that are timers of the kernel."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if str(path.readlink()) == "anon_inode:[timerfd]":
                found.append(path.name)
    return found


@pytest.fixture
def none_left() -> Iterator[None]:
    before = timers()
    yield
    assert timers() == before


async def lose(client: aiolock.Client) -> None:
    """Hold a lock for `MAX_HOLD` seconds, and be told then; not at the end of the block, which comes too late."""
    begin, gate, told = clock.system_clock(), asyncio.Event(), False
    late = threading.Timer(PATIENCE, asyncio.get_running_loop().call_soon_threadsafe, [gate.set])
    late.start()
    try:
        with pytest.raises(aiolock.LockLost):
            async with client.lock("x", ttl=TTL, max_hold=MAX_HOLD):
                try:
                    await gate.wait()
                except asyncio.CancelledError:
                    told = True
                    raise
    finally:
        late.cancel()
    assert told
    assert clock.system_clock() - begin >= MAX_HOLD


@LINUX
def test_a_lease_ends_in_time_although_the_timers_of_the_loop_are_late(kind, none_left):
    async def main() -> None:
        async with aiolock.connect("memory://") as client:
            await lose(client)

    run(late(kind), main())


@LINUX
def test_a_lease_is_renewed_although_the_timers_of_the_loop_are_late(kind, none_left):
    async def main() -> None:
        async with aiolock.connect("memory://") as client, client.lock("x", ttl=TTL) as lease:
            while client.stats()["renewals"] < 5:
                await asyncio.to_thread(time.sleep, 0.01)
                lease.check()

    run(late(kind), main())


@LINUX
def test_no_descriptor_is_left_by_a_closed_client(kind, none_left):
    before = timers()
    client = aiolock.connect("memory://")

    async def main() -> None:
        for _ in range(20):
            async with client, client.lock("x"):
                await asyncio.sleep(0)
                assert len(timers()) == len(before) + 1
        assert timers() == before

    run(kind, main())
    run(kind, main())


@LINUX
def test_no_descriptor_is_left_if_the_program_cancelled_the_task_that_listens(kind, none_left):
    async def main() -> None:
        async with aiolock.connect("memory://") as client:
            await asyncio.sleep(0)
            [task] = [each for each in client._runtime.tasks if "scheduler" in each.get_name()]
            task.cancel()
            await asyncio.wait([task])

    run(kind, main())


@LINUX
def test_no_descriptor_is_left_by_a_client_whose_loop_was_closed_first(kind, none_left):
    client = aiolock.connect("memory://", ttl=TTL)

    async def leave_open() -> aiolock.Lease:
        await client.open()
        lease = await client.lock("x").acquire()
        await asyncio.sleep(0)
        assert len(timers()) == 1
        return lease

    async def again() -> None:
        async with client, client.lock("x"):
            await asyncio.sleep(0)
            assert len(timers()) == 1

    lease = run(kind, leave_open())
    run(kind, again())
    assert lease.lost


@LINUX
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_ends_leaves_the_timer_of_its_parent_alone():
    """Both have one epoll object: what the child removes from it is gone for the parent as well."""

    async def main() -> None:
        async with aiolock.connect("memory://") as client:
            await asyncio.sleep(0)
            child = os.fork()
            if not child:
                client._runtime.scheduler.close()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0  # noqa: ASYNC222 - it ends at once
            await lose(client)

    run(late(asyncio.SelectorEventLoop), main())


@pytest.mark.parametrize("missing", ["clock", "function", "reader"])
def test_without_it_the_timers_of_the_loop_do(monkeypatch, missing):
    class Without(asyncio.SelectorEventLoop):
        def add_reader(self, fd, callback, *what):
            # The loop itself has another way.
            raise NotImplementedError

    if missing == "clock":
        monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    elif missing == "function":
        ctypes = pytest.importorskip("ctypes")
        monkeypatch.setattr(ctypes, "CDLL", lambda *_: object())

    async def main() -> None:
        async with aiolock.connect("memory://") as client:
            await asyncio.sleep(0)
            assert client._runtime.scheduler._boot_timer is None
            await lose(client)

    run(Without if missing == "reader" else asyncio.SelectorEventLoop, main())


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (["CLOCK_BOOTTIME", "CLOCK_MONOTONIC"], "CLOCK_BOOTTIME"),
        # macOS, where it goes on during sleep and time.monotonic() does not.
        (["CLOCK_MONOTONIC"], "CLOCK_MONOTONIC"),
        ([], None),
    ],
)
def test_the_clock_is_one_that_runs_during_suspend(monkeypatch, there, chosen):
    for number, name in enumerate(("CLOCK_BOOTTIME", "CLOCK_MONOTONIC")):
        if name in there:
            monkeypatch.setattr(time, name, 100 + number, raising=False)
        else:
            monkeypatch.delattr(time, name, raising=False)
    asked: list[int] = []
    monkeypatch.setattr(time, "clock_gettime", asked.append, raising=False)
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    now = runpy.run_path(clock.__file__)["system_clock"]()
    assert asked == ([] if chosen is None else [getattr(time, chosen)])
    assert chosen is not None or now == 7.0


def test_a_timer_for_another_clock_is_none():
    async def main() -> None:
        assert suspend.open_timer(asyncio.get_running_loop(), time.monotonic, print) is None

    asyncio.run(main())
