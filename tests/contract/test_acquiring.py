"""Ways to ask for a lock: for a while, as a block; and what a task knows of what it has."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import AcquireTimeout, ConfigError, LockLost
from tests.faults.staging import PATIENCE, nothing_remains, passes, queued, token_of, until, verdict

# --- try_acquire(timeout)


async def test_a_try_may_wait_for_some_time(client, rival):
    lock, holder = client.lock("x"), await rival.lock("x").acquire()

    async def nothing_waits() -> bool:
        return not (await rival.lock("x").inspect()).waiters

    assert await lock.try_acquire(timeout=0.05) is None
    assert client.stats()["timeouts"] == 0
    await until(nothing_waits)
    trying = asyncio.create_task(lock.try_acquire(PATIENCE))
    await queued(rival.lock("x"), 1)
    await holder.release()
    async with asyncio.timeout(PATIENCE):
        lease = await trying
    assert lease is not None
    assert token_of(lease) > token_of(holder)
    await lease.release()
    await nothing_remains(client, "x")


async def test_a_try_may_wait_for_ever(client, rival):
    holder = await rival.lock("x").acquire()
    trying = asyncio.create_task(client.lock("x", timeout=0).try_acquire(timeout=None))
    await queued(rival.lock("x"), 1)
    await holder.release()
    async with asyncio.timeout(PATIENCE):
        lease = await trying
    assert lease is not None
    await lease.release()


async def test_the_lock_s_own_timeout_is_not_that_of_a_try(client, rival):
    async with rival.lock("x"), asyncio.timeout(PATIENCE):
        assert await client.lock("x", timeout=10 * PATIENCE).try_acquire() is None


async def test_a_try_inside_ones_own_block_is_over_at_once(client):
    for lock in (client.lock("x"), client.lock("x", fair=True)):
        async with lock, asyncio.timeout(PATIENCE):
            assert await lock.try_acquire(timeout=None) is None
    await nothing_remains(client, "x")


async def test_a_try_for_another_level_needs_no_time(client):
    lock = client.reentrant_lock("x")
    async with lock as outer:
        level = await lock.try_acquire(timeout=PATIENCE)
        assert level is not None
        assert token_of(level) == token_of(outer)
        await level.release()


@pytest.mark.parametrize("timeout", [-1, "1", True, float("nan"), float("inf")])
async def test_a_time_that_cannot_be_meant_is_refused(client, timeout):
    for lock in (client.lock("x"), client.reentrant_lock("x")):
        with pytest.raises(ConfigError, match=r"^timeout must be a number of seconds"):
            await lock.try_acquire(timeout)


# --- async with lock.acquire(…)


async def test_an_acquire_is_a_block(client, rival):
    lock = client.lock("x")
    async with lock.acquire(timeout=PATIENCE) as lease:
        assert lease.held
        assert await rival.lock("x").try_acquire() is None
        with pytest.raises(RuntimeError, match="own block"):
            await lock.acquire()
    assert not lease.held
    assert not lease.lost
    await nothing_remains(client, "x")


async def test_an_acquire_in_vain_enters_no_block(client, rival):
    async with rival.lock("x"):
        with pytest.raises(AcquireTimeout):
            async with client.lock("x").acquire(timeout=0):
                raise AssertionError("the lock is not free")
    await nothing_remains(client, "x")


async def test_the_loss_cancels_the_block_of_an_acquire(client):
    with pytest.raises(LockLost):
        async with client.lock("x").acquire() as lease:
            verdict(lease)
            await asyncio.sleep(PATIENCE)
    with pytest.raises(LockLost):
        async with client.lock("x", on_loss="signal").acquire() as lease:
            verdict(lease)
            await asyncio.sleep(0)
            assert lease.lost


async def test_an_acquire_in_an_async_generator_does_not_cancel_its_consumer(client):
    async def numbers():
        async with client.lock("x").acquire() as lease:
            yield lease

    steps = numbers()
    verdict(await anext(steps))
    await passes(5)
    with pytest.raises(LockLost):
        await anext(steps)


async def test_an_acquire_runs_as_a_task_and_counts_once(client):
    acquiring = client.lock("x").acquire()
    lease = await asyncio.create_task(acquiring)
    assert lease.held
    await lease.release()
    with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
        await acquiring


async def test_an_acquire_that_is_closed_asks_for_nothing(client):
    client.lock("x").acquire().close()
    await nothing_remains(client, "x")


# --- owned(), depth


async def test_a_task_knows_whether_it_is_inside(client, rival):
    lock = client.lock("x")

    async def elsewhere() -> list[bool]:
        return [lock.owned(), rival.lock("x").owned()]

    assert not lock.owned()
    for block in (lock, lock.acquire(), client.reentrant_lock("x")):
        async with block as lease:
            assert lock.owned()
            assert client.lock("x", ttl=3).owned()
            assert not client.lock("y").owned()
            assert await asyncio.create_task(elsewhere()) == [False, False]
            assert lease.depth == 1
        assert not lock.owned()
        assert lease.depth == 0


async def test_a_lease_without_a_block_is_not_inside(client):
    lock = client.lock("x")
    lease = await lock.acquire()
    assert not lock.owned()
    async with lease:
        assert lock.owned()
        await lease.release()
        assert not lock.owned()


async def test_a_lost_hold_is_not_owned(client):
    for lock in (client.lock("x", on_loss="signal"), client.reentrant_lock("y", on_loss="signal")):
        with pytest.raises(LockLost):
            async with lock as lease:
                assert lock.owned()
                verdict(lease)
                assert not lock.owned()


async def test_levels_are_counted(client):
    lock = client.reentrant_lock("x")
    assert not lock.owned()
    first = await lock.acquire()
    assert lock.owned()
    async with lock as second, lock as third:
        assert [each.depth for each in (first, second, third)] == [3, 3, 3]
        await first.release()
        assert [each.depth for each in (first, second, third)] == [2, 2, 2]
        assert lock.owned()
    assert [each.depth for each in (first, second, third)] == [0, 0, 0]
    assert not lock.owned()
    await nothing_remains(client, "x")


async def test_a_closed_client_says_so(deployment):
    lock = deployment.connect().lock("x")
    with pytest.raises(RuntimeError, match="not open"):
        lock.owned()
