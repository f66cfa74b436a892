"""Several locks as one: how they are put together, and what is sent to the server and when."""

from __future__ import annotations

import asyncio

import pytest

import aiolock
from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.core.hold import BLOCKS
from aiolock.kinds.multi import LockAll, lock_all, merged
from tests.faults.staging import passes, until, verdict


class Wire:
    """Counts what is sent, answers while it is open, and fails while it is broken."""

    def __init__(self) -> None:
        self.sent = 0
        self.open = asyncio.Event()
        self.open.set()
        self.broken = False

    async def __call__(self, step):
        self.sent += 1
        if self.broken:
            raise aiolock.BackendUnavailable("no route")
        await self.open.wait()
        return step()


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
async def client(wire):
    async with aiolock.Client(MemoryBackend(server=MemoryServer(), transport=wire)) as opened:
        yield opened


async def test_all_are_asked_for_and_given_back_at_once(client, wire):
    wire.open.clear()
    asking = asyncio.create_task(lock_all(*(client.lock(str(number)) for number in range(5))).acquire())
    await until(lambda: wire.sent == 5)
    wire.open.set()
    lease = await asking
    assert wire.sent == 5
    wire.open.clear()
    ending = asyncio.create_task(lease.release())
    await until(lambda: wire.sent == 10)
    wire.open.set()
    await ending
    assert wire.sent == 10


async def test_a_frozen_server_does_not_outlive_the_timeout(client, wire):
    wire.open.clear()
    for count in (1, 3):
        loop = asyncio.get_running_loop()
        begin = loop.time()
        with pytest.raises(aiolock.AcquireTimeout):
            await lock_all(*(client.lock(str(number)) for number in range(count))).acquire(timeout=0.1)
        assert loop.time() - begin < 5
    wire.open.set()
    await until(lambda: not client._runtime.cleanups)
    for number in range(3):
        assert not await client.lock(str(number)).locked()


async def test_they_are_sorted_by_name_and_family(client):
    locks = [client.semaphore("b", 2), client.lock("b"), client.rwlock("a").read(), client.lock("a")]
    assert [(request.name, request.kind.family.value) for _, request, _ in merged(locks)] == [
        ("a", "lock"),
        ("a", "rw"),
        ("b", "lock"),
        ("b", "sem"),
    ]


async def test_options_are_put_together(client):
    locks = [
        client.lock("a", ttl=9, max_hold=50, on_loss="signal"),
        client.lock("a", ttl=7, fair=True),
        client.lock("a", ttl=8, max_hold=40),
    ]
    [(_, request, options)] = merged(locks)
    assert (request.ttl, request.fair) == (7, True)
    assert (options.max_hold, options.on_loss) == (40, "cancel")
    assert lock_all(client.lock("a", on_loss="signal"))._on_loss == "signal"
    assert lock_all(*locks)._on_loss == "cancel"
    assert lock_all(*locks, on_loss="signal")._on_loss == "signal"


@pytest.mark.parametrize(
    ("timeouts", "given", "expected"),
    [
        ([None, 5, 3], {}, 3),
        ([None, None], {}, None),
        ([5, 3], {"timeout": None}, None),
        ([5, 3], {"timeout": 7}, 7),
    ],
)
async def test_which_timeout_counts(client, timeouts, given, expected):
    locks = [client.lock(str(number), timeout=timeout) for number, timeout in enumerate(timeouts)]
    assert lock_all(*locks, **given)._timeout == expected


async def test_what_it_is_made_of_can_be_seen_and_used_again(client):
    inner = lock_all(client.lock("b"), client.lock("a"))
    outer = lock_all(inner, client.lock("c"))
    assert [lock.name for lock in outer.locks] == ["b", "a", "c"]
    assert repr(outer) == "<LockAll 'a, b, c'>"
    assert isinstance(outer, LockAll)
    for thing in (
        outer,
        client.rwlock("a"),
        client.latch("a", 1),
        client.barrier("a", 1),
        client.election("a"),
    ):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            thing.__reduce__()
        assert "'a" in repr(thing)


async def test_a_block_is_left_once_and_in_its_task(client):
    both = lock_all(client.lock("a"), client.lock("b"))
    with pytest.raises(RuntimeError, match="no block"):
        await both.__aexit__(None, None, None)
    await both.__aenter__()

    async def leave() -> None:
        await both.__aexit__(None, None, None)

    with pytest.raises(RuntimeError, match="another task"):
        await asyncio.create_task(leave())
    assert not await client.lock("a").locked()
    assert not any(BLOCKS.of(client._runtime).values())


async def test_the_server_that_cannot_be_reached_is_told(client, wire):
    wire.broken = True
    for count in (1, 3):
        with pytest.raises(aiolock.BackendUnavailable):
            await lock_all(*(client.lock(str(number)) for number in range(count))).acquire()
    wire.broken = False
    await until(lambda: not client._runtime.cleanups)


@pytest.mark.parametrize("steps", range(1, 6))
async def test_a_cancelled_release_is_finished_by_the_client(client, wire, steps):
    lease = await lock_all(client.lock("a", ttl=90), client.lock("b", ttl=90)).acquire()
    wire.open.clear()
    ending = asyncio.create_task(lease.release())
    await passes(steps)
    ending.cancel()
    await asyncio.wait([ending])
    assert ending.cancelled()
    wire.open.set()
    await until(lambda: not client._runtime.cleanups)
    assert [await client.lock(name).locked() for name in "ab"] == [False, False]


async def test_what_could_not_be_released_at_once_is_tried_again_by_the_client(client, wire):
    lease = await lock_all(client.lock("a", ttl=90), client.lock("b", ttl=90)).acquire()
    wire.broken = True
    await lease.release()
    assert client._runtime.cleanups
    wire.broken = False
    await until(lambda: not client._runtime.cleanups)
    assert [await client.lock(name).locked() for name in "ab"] == [False, False]


async def test_an_attempt_in_vain_is_no_timeout_and_an_acquire_is(client):
    both = lock_all(client.lock("a"), client.lock("b"))
    async with client.lock("b"):
        other = asyncio.create_task(both.try_acquire(0.01))
        assert await other is None
        assert client.stats()["timeouts"] == 0
        for vain in (both.acquire(timeout=0), lock_all(both, timeout=0).__aenter__()):
            with pytest.raises(aiolock.AcquireTimeout):
                await asyncio.create_task(vain)
        assert client.stats()["timeouts"] == 2


async def test_a_block_is_cancelled_at_once_when_one_of_its_locks_is_lost(client):
    with pytest.raises(aiolock.LockLost):
        async with lock_all(client.lock("a"), client.lock("b")) as lease:
            verdict(lease.parts[1])
            await passes(5)
            raise AssertionError("the block was not cancelled")
