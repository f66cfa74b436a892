"""Tasks that ask in the same moment wait in the process, in order, for as long as the server answers."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

import aiolock
from aiolock import BackendUnavailable
from aiolock.backends.mysql import gate, turns
from aiolock.backends.mysql.gate import Gate
from tests.contract.staging import PATIENCE
from tests.faults.proxy import Proxy


@pytest.fixture
def narrow(monkeypatch) -> Gate:
    """Lets two through."""
    monkeypatch.setattr(gate, "MOST", 2)
    return Gate(Clock(), 1.0)


class Clock:
    """Stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Works:
    """What is let through, under way until it is told to end."""

    def __init__(self) -> None:
        self.ends: dict[int, asyncio.Future[int]] = {}
        self.order: list[int] = []

    async def __call__(self, number: int) -> int:
        self.order.append(number)
        self.ends[number] = asyncio.get_running_loop().create_future()
        return await self.ends[number]


async def passes() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def begin(narrow: Gate, works: Works, count: int) -> list[asyncio.Task[int]]:
    return [
        asyncio.create_task(narrow.through(lambda _, number=number: works(number))) for number in range(count)
    ]


async def test_so_many_are_under_way_and_the_others_follow_in_order(narrow):
    works = Works()
    tasks = begin(narrow, works, 5)
    await passes()
    assert works.order == [0, 1]
    for number in range(5):
        works.ends[number].set_result(number)
        await passes()
    assert works.order == [0, 1, 2, 3, 4]
    assert await asyncio.gather(*tasks) == [0, 1, 2, 3, 4]


async def test_whoever_is_cancelled_lets_the_next_one_through(narrow):
    works = Works()
    tasks = begin(narrow, works, 6)
    await passes()
    tasks[0].cancel()
    tasks[2].cancel()
    await passes()
    assert works.order == [0, 1, 3]
    works.ends[1].set_result(1)
    # It is let through and cancelled in the same moment.
    await asyncio.sleep(0)
    tasks[4].cancel()
    await passes()
    works.ends[3].set_result(3)
    await passes()
    works.ends[5].set_result(5)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [one if isinstance(one, int) else type(one) for one in results] == [
        *(asyncio.CancelledError, 1, asyncio.CancelledError, 3, asyncio.CancelledError, 5)
    ]
    # Nothing is counted twice, nor forgotten.
    more = begin(narrow, works, 3)
    await passes()
    assert works.order[-2:] == [0, 1]
    for number in range(3):
        works.ends[number].set_result(number)
        await passes()
    assert await asyncio.gather(*more) == [0, 1, 2]


async def test_a_server_that_is_silent_for_a_whole_timeout_refuses_all_who_wait(narrow):
    works = Works()
    tasks = begin(narrow, works, 5)
    await passes()
    works.ends[0].set_exception(BackendUnavailable("refused at once"))
    await passes()
    assert works.order == [0, 1, 2]
    narrow._clock.now = 0.9
    works.ends[1].set_exception(BackendUnavailable("no answer"))
    await passes()
    assert [task.done() for task in tasks] == [True, True, False, True, True]
    for task in tasks[3:]:
        with pytest.raises(BackendUnavailable, match="no answer"):
            task.result()
    works.ends[2].set_result(2)
    assert await tasks[2] == 2
    for task in tasks[:2]:
        with pytest.raises(BackendUnavailable):
            task.result()


async def test_a_turn_that_does_not_come_is_none(monkeypatch):
    monkeypatch.setattr(gate, "MOST", 1)
    narrow, works = Gate(time.monotonic, 0.1), Works()
    tasks = begin(narrow, works, 3)
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.gather(*tasks[1:]) == [None, None]
        works.ends[0].set_result(0)
        assert await tasks[0] == 0
    assert works.order == [0]
    [last] = begin(narrow, works, 1)
    await passes()
    works.ends[0].set_result(7)
    assert await last == 7


async def test_a_crowd_is_not_kept_longer_than_it_wants_to_wait(place, monkeypatch):
    """Their timeout is longer than that of a command, and shorter than their line."""
    monkeypatch.setattr(gate, "MOST", 1)
    real = turns.TurnClaim._attempt

    async def slow(claim, *, wait: bool):
        await asyncio.sleep(0.05)
        return await real(claim, wait=wait)

    monkeypatch.setattr(turns.TurnClaim, "_attempt", slow)
    async with place.connect(ttl=10, command_timeout=0.5) as client:

        async def ask(number: int) -> float:
            begun = time.monotonic()
            with contextlib.suppress(aiolock.LockError):
                await (await client.lock(f"x{number}").acquire(timeout=0.6)).release()
            return time.monotonic() - begun

        async with asyncio.timeout(PATIENCE):
            times = await asyncio.gather(*(ask(number) for number in range(200)))
        # One after the other it would be ten seconds and more.
        assert max(times) < 8


@pytest.mark.parametrize("mode", ["lease", "session"])
async def test_a_crowd_gets_its_locks_and_the_others_of_its_client_are_kept(place, mode):
    """More than the server does within a command timeout, however busy the machine is."""
    async with place.connect(mode, ttl=60, command_timeout=20) as client:
        begun = time.monotonic()
        few = await asyncio.gather(*(client.lock(f"few {number}").acquire() for number in range(64)))
        timeout = max(1.0, 8 * (time.monotonic() - begun))
        await asyncio.gather(*(lease.release() for lease in few))
    async with place.connect(mode, ttl=max(10.0, 3 * timeout), command_timeout=timeout) as client:
        kept = [await client.lock(f"kept {number}").acquire() for number in range(3)]
        async with asyncio.timeout(PATIENCE):
            leases = await asyncio.gather(*(client.lock(f"x{number}").acquire() for number in range(2000)))
        assert all(lease.open for lease in kept)
        assert client.stats()["lost"] == 0
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(lease.release() for lease in [*leases, *kept]))


async def test_a_server_that_is_gone_refuses_a_crowd_at_once(place):
    async with (
        Proxy(place.server.host, place.server.port) as proxy,
        place.connect(port=proxy.port, command_timeout=0.5) as client,
    ):
        lock = client.lock("first")
        await (await lock.acquire()).release()
        proxy.blackhole()
        tasks = [asyncio.create_task(client.lock(f"x{number}").acquire()) for number in range(300)]
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait(tasks)
        assert all(isinstance(task.exception(), aiolock.BackendUnavailable) for task in tasks)
        proxy.reset_all()
