"""The lock that its own task may enter again: levels, shared by objects, not inherited by tasks."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest

from aiolock import Lease, LockAll, LockLost, lock_all
from tests.faults.staging import (
    PATIENCE,
    gets_the_lock,
    nothing_remains,
    passes,
    token_of,
    until,
    verdict,
    waiting,
)


async def test_levels_share_one_hold_and_one_token(client, rival):
    lock = client.reentrant_lock("x")
    async with lock as first:
        async with lock as second, lock as third:
            assert token_of(first) == token_of(second) == token_of(third)
            assert client.stats()["held"] == 1
            assert len((await rival.lock("x").inspect()).holders) == 1
        assert not third.held
        assert first.held
        assert await rival.lock("x").try_acquire() is None
    await gets_the_lock(rival, "x")


async def test_two_lock_objects_of_one_name_share_the_hold(client):
    async with client.reentrant_lock("x") as first, client.reentrant_lock("x", fair=True, ttl=3) as second:
        assert token_of(first) == token_of(second)
    await nothing_remains(client, "x")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
async def test_the_last_release_releases_whatever_the_order(client, rival, order):
    lock = client.reentrant_lock("x")
    leases = [await lock.acquire() for _ in range(3)]
    for number in order:
        assert await rival.lock("x").try_acquire() is None
        await leases[number].release()
        # A second release of one level does not count as another level's.
        await leases[number].release()
        assert not leases[number].held
    await gets_the_lock(rival, "x")
    await nothing_remains(client, "x")


async def test_a_level_needs_no_server(client):
    lock = client.reentrant_lock("x")
    async with lock:
        entering = lock.acquire()
        with pytest.raises(StopIteration) as caught:
            entering.send(None)
        await caught.value.value.release()
        level = await lock.try_acquire()
        assert level is not None
        await level.release()


async def test_tasks_do_not_inherit_the_hold(client):
    lock = client.reentrant_lock("x")
    async with lock:

        async def child() -> None:
            assert await lock.try_acquire() is None
            async with lock:
                pass

        task = asyncio.create_task(child())
        await waiting(client, 1)
        assert not task.done()
    async with asyncio.timeout(PATIENCE):
        await task


async def test_a_hold_that_was_released_is_not_entered_again(client, rival):
    lock = client.reentrant_lock("x")
    async with lock:
        pass
    other = await rival.lock("x").acquire(timeout=PATIENCE)
    assert await lock.try_acquire() is None
    await other.release()


async def test_a_lost_hold_cannot_be_entered_again(client):
    lock = client.reentrant_lock("x")
    lease = await lock.acquire()
    verdict(lease)
    for again in (lock.acquire, lock.try_acquire):
        with pytest.raises(LockLost):
            await again()
    await lease.release()
    # Every level was given back: the task starts anew.
    await (await lock.acquire(timeout=PATIENCE)).release()


async def test_a_hold_that_was_kept_too_long_is_not_entered_again(client):
    """The server keeps it until its ttl ends, and nobody would tell a new level when that is."""
    lock = client.reentrant_lock("x", ttl=60, max_hold=0.03, on_loss="signal")
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(LockLost, match="max_hold"):
            async with lock as lease:
                assert await lease.wait_lost() == "max_hold"
                for again in (client.reentrant_lock("x").acquire, client.reentrant_lock("x").try_acquire):
                    with pytest.raises(LockLost, match="max_hold"):
                        await again()
    # The hold was given back at the end of the block, and can be had.
    async with client.reentrant_lock("x", timeout=PATIENCE):
        pass


async def test_a_loss_is_seen_by_every_level(client):
    lock = client.reentrant_lock("x")
    leases = [await lock.acquire() for _ in range(3)]
    watchers = [asyncio.create_task(lease.wait_lost()) for lease in leases]
    await passes(2)
    verdict(leases[1])
    assert [lease.lost for lease in leases] == [True, True, True]
    assert await asyncio.gather(*watchers) == ["expired"] * 3
    for lease in leases:
        with pytest.raises(LockLost):
            lease.check()
        await lease.release()
    await gets_the_lock(client, "x")


async def test_a_level_that_was_released_before_is_not_lost(client):
    lock = client.reentrant_lock("x")
    first, second = await lock.acquire(), await lock.acquire()
    await first.release()
    verdict(second)
    assert not first.lost
    assert second.lost
    await second.release()


async def test_renewing_a_level_renews_the_hold(deployment, client):
    lock = client.reentrant_lock("x", ttl=60)
    first, second = await lock.acquire(), await lock.acquire()
    for seconds in (0.02, 0.2, 2, 10):
        # The time is counted from before the request, so the pause must be longer than the request takes.
        await asyncio.sleep(seconds)
        before = first.remaining()
        await second.renew()
        if first.remaining() > before or not deployment.prolongs:
            break
    else:
        raise AssertionError("a renewal does not prolong the hold")
    await first.release()
    await second.renew()
    await second.release()


async def test_keep_counts_with_the_last_level(deployment, client):
    if "keep" not in deployment.promises:
        assert "keep" not in client.capabilities
        return
    keep = deployment.seconds(0.2)
    lock = client.reentrant_lock("x")
    first, second = await lock.acquire(), await lock.acquire()
    begin = asyncio.get_running_loop().time()
    await second.release()
    await first.release(keep=keep)
    await gets_the_lock(client, "x")
    assert asyncio.get_running_loop().time() - begin > 0.9 * keep


async def test_the_plain_lock_is_another_kind_of_object_but_the_same_lock(client):
    async with client.reentrant_lock("x"):
        assert await client.lock("x").try_acquire() is None
    async with client.lock("x"):
        assert await client.reentrant_lock("x").try_acquire() is None


@pytest.fixture
def no_collector():
    """The collector of cycles does not run: what is freed is freed because nobody refers to it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def take_two_levels(client, how: str) -> list[Lease | LockAll]:
    lock = client.reentrant_lock("x")
    if how == "as a part":
        return [await lock_all(lock, client.lock("y")).acquire(), await lock.acquire()]
    return [await lock.acquire(), await lock.acquire()]


@pytest.mark.parametrize("order", [0, -1])
@pytest.mark.parametrize("how", ["by itself", "as a part"])
async def test_levels_that_were_dropped_are_given_back_without_the_collector(
    client, rival, no_collector, how, order
):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        leases = await asyncio.create_task(take_two_levels(client, how))
        del leases[order]
        await passes(5)
        # One level is there still, and is as good as before.
        assert leases[0].held
        leases[0].check()
        assert await rival.lock("x").try_acquire() is None
        leases.clear()
        await until(lambda: client.stats()["held"] == 0)
        await gets_the_lock(rival, "x")
        await gets_the_lock(rival, "y")
    assert {warning.category for warning in caught} == {ResourceWarning}


async def test_read_levels_that_were_dropped_are_given_back_without_the_collector(
    deployment, client, no_collector
):
    if "read-write" not in deployment.kinds:
        return
    lock = client.rwlock("x").read()

    async def take() -> list[Lease]:
        async with lock:
            return [await lock.acquire()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        leases = await asyncio.create_task(take())
        assert leases[0].held
        leases.clear()
        await until(lambda: client.stats()["held"] == 0)
