"""A lease: what it knows about itself, how it is renewed, given back, and worked under."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import warnings

import pytest

from aiolock import LockLost, UnsupportedKind
from tests.faults.staging import (
    PATIENCE,
    gets_the_lock,
    nothing_remains,
    outcome,
    passes,
    queued,
    shown_token,
    until,
    verdict,
    waiting,
)

# --- what it knows


async def test_a_lease_knows_its_name_kind_ttl_and_token(deployment, client):
    async with client.lock("x", ttl=5) as lease:
        assert (lease.name, lease.ttl, str(lease.kind)) == ("x", deployment.ttl_of(5), "mutex")
        token = shown_token(lease)
        assert isinstance(token, int)
        assert (token > 0) == (not lease._hold.parent.runtime.backend.dialect)
        assert lease.held
        assert not lease.lost
        assert 0 < lease.remaining() < deployment.ttl_of(5)
        lease.check()
        assert "'x'" in repr(lease)
        assert f"token={token or '-'}" in repr(lease)


async def test_a_released_lease_is_neither_held_nor_lost(client):
    async with client.lock("x") as lease:
        pass
    assert not lease.held
    assert not lease.lost
    assert lease.remaining() == 0
    assert "released" in repr(lease)
    with pytest.raises(RuntimeError, match="was released"):
        lease.check()
    with pytest.raises(RuntimeError, match="was released"):
        await lease.renew()


async def test_a_lost_lease_says_so_everywhere(deployment, client):
    lease = await client.lock("x").acquire()
    await deployment.lose(lease)
    assert await lease.wait_lost() == deployment.reason
    assert lease.lost
    assert not lease.held
    assert lease.remaining() == 0
    assert "lost" in repr(lease)
    for look in (lease.check, lambda: lease.guard().__enter__()):
        with pytest.raises(LockLost) as caught:
            look()
        assert (caught.value.name, caught.value.reason) == ("x", deployment.reason)
    with pytest.raises(LockLost):
        await lease.renew()
    await lease.release()
    with pytest.raises(LockLost):
        lease.check()


async def test_a_lease_cannot_be_copied_or_pickled(client):
    async with client.lock("x") as lease:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="one hold"):
                attempt(lease)


# --- renewal


async def test_a_lease_is_renewed_for_as_long_as_it_is_held(deployment, client, rival):
    ttl = deployment.ttl_of(deployment.lasting(0.8))
    lease = await client.lock("x", ttl=ttl).acquire()
    end = asyncio.get_running_loop().time() + 1.4 * ttl
    while asyncio.get_running_loop().time() < end:
        assert await rival.lock("x").try_acquire() is None
        await asyncio.sleep(ttl / 10)
    assert lease.held
    assert client.stats()["renewals"] >= 2
    await lease.release()
    before = client.stats()["renewals"]
    await asyncio.sleep(ttl / 2)
    assert client.stats()["renewals"] == before


async def test_what_remains_is_counted_from_before_the_request(deployment, client):
    loop = asyncio.get_running_loop()
    lease = await client.lock("x", ttl=5).acquire()
    first = lease.remaining()
    begin = loop.time()
    await until(lambda: loop.time() > begin + 0.02)
    assert lease.remaining() < first
    before = loop.time()
    await lease.renew()
    assert lease.remaining() <= deployment.ttl_of(5) - (loop.time() - before)
    took = loop.time() - before
    assert lease.remaining() > first - 0.02 - took or not deployment.prolongs
    await lease.release()


async def test_max_hold_ends_a_lease_that_is_kept_too_long(client):
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(LockLost) as caught:
            async with client.lock("x", max_hold=0.05) as lease:
                await asyncio.Event().wait()
        assert caught.value.reason == "max_hold"
        assert lease.lost
    await gets_the_lock(client, "x")


async def test_an_overstayed_hold_ends_by_its_ttl_even_if_its_holder_never_leaves(deployment, client, rival):
    lease = await client.lock("x", ttl=deployment.seconds(0.8), max_hold=0.05).acquire()
    await gets_the_lock(rival, "x")
    assert await lease.wait_lost() == "max_hold"
    await lease.release()


async def test_max_hold_is_each_holders_own(client):
    lock = client.lock("x", ttl=5)
    brief = client.lock("x", ttl=5, max_hold=0.03)

    async def overstay() -> None:
        with pytest.raises(LockLost) as caught:
            async with brief:
                await asyncio.Event().wait()
        assert caught.value.reason == "max_hold"

    first = await lock.acquire()
    second = asyncio.create_task(overstay())
    await waiting(client, 1)
    await first.release()
    third = await lock.acquire(timeout=PATIENCE)
    await second
    await asyncio.sleep(0.06)
    third.check()
    await third.release()


# --- giving it back


async def test_releasing_twice_is_releasing_once(client, rival):
    lease = await client.lock("x").acquire()
    await lease.release()
    other = await rival.lock("x").acquire(timeout=PATIENCE)
    await lease.release()
    await passes(5)
    assert await client.lock("x").try_acquire() is None
    other.check()
    await other.release()


async def test_releasing_from_two_tasks_at_once_is_releasing_once(client, rival):
    lease = await client.lock("x").acquire()
    await asyncio.gather(lease.release(), lease.release())
    await gets_the_lock(rival, "x")


async def test_a_lease_may_be_released_inside_its_block(client):
    async with client.lock("x") as lease:
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            await asyncio.create_task(gets_the_lock(client, "x"))
    assert not lease.lost
    await nothing_remains(client, "x")


async def test_release_keep_holds_the_lock_for_nobody(deployment, client, rival):
    lease = await client.lock("x").acquire()
    if "keep" not in deployment.promises:
        with pytest.raises(UnsupportedKind):
            await lease.release(keep=1)
        assert lease.held
        await lease.release()
        return
    keep = deployment.seconds(0.2)
    begin = asyncio.get_running_loop().time()
    await lease.release(keep=keep)
    assert not lease.held
    assert await client.lock("x").try_acquire() is None
    await gets_the_lock(rival, "x")
    assert asyncio.get_running_loop().time() - begin > 0.9 * keep


async def test_who_waits_enters_when_a_lock_is_kept_for_less_than_the_ttl(deployment, client, rival):
    if "keep" not in deployment.promises:
        return
    lease = await client.lock("x", ttl=600).acquire()
    waiter = asyncio.create_task(gets_the_lock(rival, "x"))
    await queued(rival.lock("x"), 1)
    await lease.release(keep=deployment.seconds(0.2))
    async with asyncio.timeout(PATIENCE):
        await waiter


async def test_release_keep_is_not_passed_on_locally(deployment, client):
    if "keep" not in deployment.promises:
        assert "keep" not in client.capabilities
        return
    keep = deployment.seconds(0.2)
    lease = await client.lock("x").acquire()
    waiter = asyncio.create_task(gets_the_lock(client, "x"))
    await waiting(client, 1)
    begin = asyncio.get_running_loop().time()
    await lease.release(keep=keep)
    await waiter
    assert asyncio.get_running_loop().time() - begin > 0.9 * keep


# --- working under it


async def test_a_bare_acquire_signals_and_cancels_nobody(deployment, client):
    async def work() -> None:
        lease = await client.lock("x").acquire()
        await deployment.lose(lease)
        await until(lambda: lease.lost)
        await passes(10)

    error, before, after = await outcome(work())
    assert error is None
    assert before == after == 0


async def test_async_with_lease_releases_at_the_end(client):
    async with await client.lock("x").acquire() as lease:
        assert lease.held
    assert not lease.held
    await gets_the_lock(client, "x")


async def test_async_with_lease_is_cancelled_on_loss(client):
    async def work() -> None:
        async with await client.lock("x").acquire() as lease:
            asyncio.get_running_loop().call_soon(verdict, lease)
            await asyncio.Event().wait()

    error, _, after = await outcome(work())
    assert isinstance(error, LockLost)
    assert after == 0
    await gets_the_lock(client, "x")


async def test_a_lease_can_be_entered_once(client):
    async with client.lock("x") as lease:
        with pytest.raises(RuntimeError, match="entered already"):
            async with lease:
                pass
        assert lease.held


async def test_entering_a_lost_lease_is_refused(client):
    lease = await client.lock("x").acquire()
    verdict(lease)
    with pytest.raises(LockLost):
        async with lease:
            raise AssertionError("entered")


async def test_guard_does_not_release(client):
    lease = await client.lock("x").acquire()
    with lease.guard() as same:
        assert same is lease
    assert lease.held
    await lease.release()


async def test_wait_lost_returns_none_after_an_orderly_release(client):
    lease = await client.lock("x").acquire()
    watchers = [asyncio.create_task(lease.wait_lost()) for _ in range(3)]
    await passes(2)
    await lease.release()
    assert await asyncio.gather(*watchers) == [None, None, None]
    assert await lease.wait_lost() is None


async def test_wait_lost_tells_every_watcher_why(deployment, client):
    lease = await client.lock("x").acquire()
    watchers = [asyncio.create_task(lease.wait_lost()) for _ in range(3)]
    await passes(2)
    await deployment.lose(lease)
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.gather(*watchers) == [deployment.reason] * 3
    assert await lease.wait_lost() == deployment.reason


async def test_cancelling_wait_lost_changes_nothing(client):
    lease = await client.lock("x").acquire()
    watcher = asyncio.create_task(lease.wait_lost())
    await passes(2)
    watcher.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watcher
    assert lease.held
    await lease.release()


# --- losing sight of it


@pytest.mark.parametrize("waiter", ["nobody waits", "somebody here waits", "somebody elsewhere waits"])
@pytest.mark.parametrize("kind", ["lock", "reentrant_lock"])
async def test_a_lease_that_was_dropped_warns_and_is_given_back(client, rival, waiter, kind):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # As a task of its own, so that nothing here refers to the lease.
        waiters = await asyncio.create_task(drop(client, rival, waiter, kind))
        gc.collect()
        await until(lambda: caught)
        await asyncio.gather(*waiters)
        await gets_the_lock(rival, "x")
        await until(lambda: client.stats()["held"] == 0)
    assert [warning.category for warning in caught] == [ResourceWarning]
    assert "'x'" in str(caught[0].message)


async def test_a_lease_that_max_hold_ended_is_given_back_when_it_is_dropped(client, rival):
    async def lose() -> None:
        lease = await client.lock("x", ttl=300, max_hold=0.05).acquire()
        assert await lease.wait_lost() == "max_hold"

    # As a task of its own, so that nothing here refers to the lease.
    await asyncio.create_task(lose())
    gc.collect()
    await gets_the_lock(rival, "x")


async def drop(client, rival, waiter: str, kind: str) -> list[asyncio.Task]:
    lease = await getattr(client, kind)("x").acquire()
    waiters = []
    if waiter == "somebody here waits":
        waiters.append(asyncio.create_task(gets_the_lock(client, "x")))
        await waiting(client, 1)
    elif waiter == "somebody elsewhere waits":
        waiters.append(asyncio.create_task(gets_the_lock(rival, "x")))
        await queued(client.lock("x"), 1)
    assert lease.held
    return waiters


async def test_a_lease_under_a_block_is_kept_even_if_nobody_names_it(client, rival):
    async with client.lock("x"):
        gc.collect()
        await passes(5)
        assert await rival.lock("x").try_acquire() is None


# --- many


async def test_thousands_of_leases_are_held_and_renewed_by_one_client(deployment):
    many, ttl = deployment.many, deployment.seconds(6)
    # A server that does one thing at a time answers hundreds of requests one after the other.
    async with deployment.connect(ttl=ttl, command_timeout=PATIENCE) as client:
        locks = [client.lock(f"lock {number}") for number in range(many)]
        leases = []
        for start in range(0, len(locks), 500):
            leases += await asyncio.gather(*(lock.acquire() for lock in locks[start : start + 500]))
        if deployment.distinct and "fencing" in deployment.promises:
            assert len({lease.token for lease in leases}) == many
        await until(lambda: client.stats()["renewals"] >= many)
        await until(lambda: all(lease.remaining() > deployment.ttl_of(ttl) / 3 for lease in leases))
        assert client.stats()["held"] == many
        assert client.stats()["lost"] == 0
        for start in range(0, len(leases), 500):
            await asyncio.gather(*(lease.release() for lease in leases[start : start + 500]))
        assert client.stats()["held"] == 0
        for number in (0, many // 2, many - 1):
            await nothing_remains(client, f"lock {number}")
