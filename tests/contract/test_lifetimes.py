"""The life of a hold: one ttl that is not renewed, and a loss that comes earlier than it has to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import aiolock
from aiolock import Client, Lease, LockLost
from aiolock.core.backend import certain_until
from tests.faults.staging import PATIENCE, gets_the_lock, nothing_remains, queued, until

Act = Callable[..., Any]
ACTS: dict[str, Act] = {
    "mutex": lambda client, **options: client.lock("x", **options),
    "reentrant": lambda client, **options: client.reentrant_lock("x", **options),
    "read": lambda client, **options: client.rwlock("x").read(**options),
    "write": lambda client, **options: client.rwlock("x").write(**options),
    "permits": lambda client, **options: client.semaphore("x", 2, permits=2, **options),
    "election": lambda client, **options: client.election("x", **options).campaign(),
    "several": lambda client, **options: aiolock.lock_all(client.lock("a", **options), client.lock("b")),
}
NEEDS = {"read": {"read-write"}, "write": {"read-write"}, "permits": {"semaphore"}}


def now() -> float:
    return asyncio.get_running_loop().time()


def validity(lease: Lease) -> Any:
    return lease._hold.validity


async def settled(lease: Lease) -> None:
    """Wait until the life of a hold has begun: that of one that was pushed begins with its confirmation."""
    await until(lambda: validity(lease).claim.fixed, "the confirmation")


# --- a hold of one ttl


@pytest.mark.parametrize("act", ACTS)
async def test_a_hold_that_is_not_renewed_ends_after_its_ttl(deployment, client, rival, act):
    ttl = deployment.seconds(0.6)
    lock, begun = ACTS[act](client, ttl=ttl, renew=False), now()
    lease = await lock.acquire()
    for part in getattr(lease, "parts", [lease])[:1]:
        await settled(part)
    assert lease.held
    if act != "read":
        assert await ACTS[act](rival).try_acquire() is None
    assert await lease.wait_lost() == "expired"
    assert now() - begun > certain_until(0, ttl) - 0.05
    await lease.release()
    async with asyncio.timeout(PATIENCE):
        await (await ACTS[act](rival).acquire()).release()


async def test_a_block_under_it_is_cancelled_at_its_end(deployment, client, rival):
    with pytest.raises(LockLost) as caught:
        async with client.lock("x", ttl=deployment.seconds(0.5), renew=False):
            await asyncio.Event().wait()
    assert caught.value.reason == "expired"
    await gets_the_lock(rival, "x")


async def test_a_block_that_ends_earlier_gives_it_back(client, rival):
    async with client.lock("x", ttl=100, renew=False) as lease:
        assert lease.held
    assert not lease.lost
    await gets_the_lock(rival, "x")
    await nothing_remains(client, "x")


@pytest.mark.parametrize("act", [act for act in ACTS if act not in ("several", "read")])
async def test_who_waited_for_it_has_it_for_a_whole_ttl(deployment, client, rival, act):
    """A grant that is pushed is confirmed once, and not prolonged after that."""
    ttl = deployment.seconds(20)
    holder = await ACTS[act](rival).acquire()
    waiting = asyncio.create_task(ACTS[act](client, ttl=ttl, renew=False).acquire())
    await queued(ACTS[act](rival), 1)
    await holder.release()
    lease = await waiting
    granted = now()
    await settled(lease)
    left = lease.remaining()
    if deployment.prolongs:
        assert left > certain_until(0, ttl) - (now() - granted) - 0.1 * ttl
    assert left <= ttl
    end = validity(lease).end
    await client._runtime.scheduler.renew(validity(lease))
    assert validity(lease).end == end, "verifying has prolonged it"
    await lease.release()


async def test_no_task_of_the_client_gets_what_is_left_of_another_ones_life(deployment, client):
    ttl = deployment.seconds(2)
    lock = client.lock("x", ttl=ttl, renew=False)
    first = await lock.acquire()
    waiting = asyncio.create_task(lock.acquire())
    await queued(lock, 1)
    await asyncio.sleep(ttl / 3)
    await first.release()
    second = await waiting
    granted = now()
    await settled(second)
    if deployment.prolongs:
        assert second.remaining() > certain_until(0, ttl) - (now() - granted) - 0.1 * ttl
    assert validity(second).claim is not validity(first).claim
    assert second.token > first.token
    await second.release()


async def test_max_hold_ends_it_if_it_is_shorter(deployment, client):
    lease = await client.lock("x", ttl=100, renew=False, max_hold=0.05).acquire()
    assert await lease.wait_lost() == "max_hold"
    await lease.release()
    lease = await client.lock("x", ttl=deployment.seconds(0.5), renew=False, max_hold=100).acquire()
    assert await lease.wait_lost() == "expired"
    await lease.release()


async def test_a_further_level_prolongs_nothing(deployment, client):
    lock = client.reentrant_lock("x", ttl=deployment.seconds(1), renew=False)
    async with lock as outer:
        await settled(outer)
        until_then = validity(outer).end
        async with client.reentrant_lock("x") as inner:
            assert validity(inner).end == until_then
            for lease in (outer, inner):
                with pytest.raises(TypeError, match="renew=False"):
                    await lease.renew()


async def test_several_locks_keep_their_own_lives_and_are_lost_with_the_first(deployment, client):
    first = client.lock("a", ttl=deployment.seconds(0.5), renew=False)
    with pytest.raises(LockLost) as caught:
        async with aiolock.lock_all(first, client.lock("b")) as lease:
            assert [validity(part).claim.request.life < 100 for part in lease.parts] == [True, False]
            with pytest.raises(TypeError, match="'a' was acquired with renew=False"):
                await lease.renew()
            await asyncio.Event().wait()
    assert (caught.value.name, caught.value.reason) == ("a", "expired")


async def test_of_one_lock_twice_the_one_that_is_not_renewed_counts(client):
    locks = aiolock.lock_all(client.lock("x", ttl=50, grace=2), client.lock("x", ttl=40, renew=False))
    async with locks as lease:
        [part] = lease.parts
        request = validity(part).claim.request
        assert (request.life, request.grace) == (40, 2)


async def test_a_function_is_lost_at_the_end_of_its_time(deployment, client):
    @client.locked("x", ttl=deployment.seconds(0.5), renew=False)
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(LockLost, match="expired"):
        await work()


# --- grace


def graceful(deployment: Any) -> dict[str, float]:
    """A ttl, and a grace that a session that lives longer leaves room for."""
    return {
        "ttl": deployment.seconds(1.5),
        "grace": deployment.seconds(1.5) / (3 if deployment.prolongs else 30),
    }


@pytest.mark.parametrize("act", [act for act in ACTS if act != "several"])
@pytest.mark.parametrize("renew", [True, False])
async def test_it_is_certain_for_so_much_less(deployment, client, act, renew):
    options = graceful(deployment)
    begun = now()
    lease = await ACTS[act](client, **options, renew=renew).acquire()
    if not renew:
        await settled(lease)
    most = lease.ttl if renew or deployment.prolongs else options["ttl"]
    assert 0 < lease.remaining() <= most - options["grace"] - (0 if renew else now() - begun) * 0.9
    lease.check()
    with lease.guard():
        pass
    await lease.release()


async def test_the_end_of_a_block_has_time_before_the_server_gives_the_lock_away(deployment, client, rival):
    """The hold of a client that is silent ends by itself; until then it is nobody else's."""
    options = graceful(deployment)
    with pytest.raises(LockLost) as caught:
        async with client.lock("x", **options, renew=False) as lease:
            try:
                await asyncio.Event().wait()
            finally:
                lost = now()
                with pytest.raises(LockLost):
                    lease.check()
                assert lease.remaining() == 0
                taken = await rival.lock("x").try_acquire() is None
                # A loop that was late may have asked after the end of the grace.
                assert taken or now() - lost > options["grace"] / 2
    assert caught.value.reason == "expired"
    await gets_the_lock(rival, "x")


async def test_it_is_renewed_in_time_all_the_same(deployment, client, rival):
    options = graceful(deployment)
    lease = await client.lock("x", **options).acquire()
    end = now() + 2 * options["ttl"]
    while now() < end:
        lease.check()
        assert await rival.lock("x").try_acquire() is None
        await asyncio.sleep(options["ttl"] / 10)
    await lease.release()


@pytest.mark.parametrize("act", [act for act in ACTS if act not in ("several", "read")])
async def test_a_grant_that_was_waited_for_leaves_the_grace(deployment, client, rival, act):
    """A confirmation window may be shorter than the grace: then the grant is confirmed before it is given out."""
    options = {
        "ttl": deployment.seconds(20),
        "grace": deployment.seconds(20) / (3 if deployment.prolongs else 300),
    }
    holder = await ACTS[act](rival).acquire()
    waiting = asyncio.create_task(ACTS[act](client, **options).acquire())
    await queued(ACTS[act](rival), 1)
    await holder.release()
    async with asyncio.timeout(PATIENCE):
        lease = await waiting
    assert lease.held
    lease.check()
    await lease.release()


async def test_tasks_with_another_grace_have_a_hold_of_their_own(deployment, client: Client):
    options = graceful(deployment)
    grace = options.pop("grace")
    lease = await client.lock("x", **options).acquire()
    waiting = asyncio.create_task(client.lock("x", **options, grace=grace).acquire())
    await queued(client.lock("x"), 1)
    await lease.release()
    other = await waiting
    assert validity(other).claim is not validity(lease).claim
    await other.release()
