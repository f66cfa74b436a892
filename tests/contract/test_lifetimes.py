"""The life of a hold: one ttl that is not renewed, another that is set, and a loss that comes earlier than it has to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

import aiolock
from aiolock import BackendUnavailable, Client, ConfigError, Lease, LockLost
from aiolock.backends.rows.claim import RowClaim
from aiolock.core.backend import Grant, expires_at
from tests.faults.staging import PATIENCE, gets_the_lock, nothing_remains, queued, token_of, until

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
NEEDS = {"read": {"read-write"}, "write": {"read-write"}, "permits": {"semaphore"}, "election": {"elections"}}


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
    assert now() - begun > expires_at(0, ttl) - 0.05
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
        assert left > expires_at(0, ttl) - (now() - granted) - 0.1 * ttl
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
        assert second.remaining() > expires_at(0, ttl) - (now() - granted) - 0.1 * ttl
    assert validity(second).claim is not validity(first).claim
    assert token_of(second) > token_of(first)
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
    locks = aiolock.lock_all(client.lock("x", ttl=50, grace=0.2), client.lock("x", ttl=40, renew=False))
    async with locks as lease:
        [part] = lease.parts
        request = validity(part).claim.request
        assert (request.life, request.grace) == (40, 0.2)


async def test_a_function_is_lost_at_the_end_of_its_time(deployment, client):
    @client.locked("x", ttl=deployment.seconds(0.5), renew=False)
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(LockLost, match="expired"):
        await work()


# --- grace


def graceful(deployment: Any, quick: float = 1.5) -> dict[str, float]:
    """A ttl, and the longest grace; a session that lives longer has less room for it."""
    ttl = deployment.lasting(quick)
    return {"ttl": ttl, "grace": ttl / 3 if deployment.prolongs else deployment.ttl_of(ttl) / 10}


@pytest.mark.parametrize("act", [act for act in ACTS if act != "several"])
@pytest.mark.parametrize("renew", [True, False])
async def test_it_is_certain_for_so_much_less(deployment, client, act, renew):
    options = graceful(deployment)
    lease = await ACTS[act](client, **options, renew=renew).acquire()
    if not renew:
        await settled(lease)
    most = lease.ttl if renew or deployment.prolongs else options["ttl"]
    assert 0 < lease.remaining() <= most - options["grace"]
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
    end = now() + 1.2 * options["ttl"]
    while now() < end:
        lease.check()
        assert await rival.lock("x").try_acquire() is None
        await asyncio.sleep(options["ttl"] / 10)
    await lease.release()


@pytest.mark.parametrize("act", [act for act in ACTS if act not in ("several", "read")])
async def test_a_grant_that_was_waited_for_leaves_the_grace(deployment, client, rival, act):
    """A confirmation window may be shorter than the grace: then the grant is confirmed before it is given out."""
    options = graceful(deployment, 20)
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


# --- another life


def extending(deployment: Any) -> bool:
    """Whether this deployment has what these tests are about; that the others refuse it is in `test_kinds.py`."""
    return "extension" in deployment.kinds


@pytest.mark.parametrize("act", [act for act in ACTS if act != "several"])
async def test_a_hold_that_is_extended_has_so_much_longer_at_the_server(deployment, client, rival, act):
    if not extending(deployment):
        return
    lock = ACTS[act](client, ttl=50, renew=False)
    lease = await lock.acquire()
    await lease.extend(200)
    assert 150 < lease.remaining() < 200
    if deployment.tells:
        [holder] = (await ACTS[act](rival).inspect()).holders
        assert 150 < holder.remaining <= 200
    if act != "read":
        assert await ACTS[act](rival).try_acquire() is None
    await lease.release()


@pytest.mark.parametrize("act", ["mutex", "several"])
async def test_a_hold_that_is_extended_lives_for_so_much_longer(deployment, client, rival, act):
    if not extending(deployment):
        return
    ttl = deployment.lasting(1)
    lock = ACTS[act](client, ttl=ttl, renew=False)
    if act == "several":
        lock = aiolock.lock_all(*(client.lock(name, ttl=ttl, renew=False) for name in ("a", "b")))
    lease = await lock.acquire()
    begun = now()
    await lease.extend(2 * ttl)
    assert lease.remaining() > ttl
    while now() < begun + 1.2 * ttl:
        assert await ACTS[act](rival).try_acquire() is None
        await asyncio.sleep(ttl / 10)
    lease.check()
    assert await lease.wait_lost() == "expired"
    assert now() - begun > expires_at(0, 2 * ttl) - 0.05
    await lease.release()
    await (await ACTS[act](rival).acquire(timeout=PATIENCE)).release()


async def test_a_hold_that_is_extended_by_less_ends_earlier(deployment, client, rival):
    if not extending(deployment):
        return
    lease = await client.lock("x", ttl=100, renew=False).acquire()
    begun, short = now(), deployment.seconds(0.5)
    await lease.extend(short)
    assert lease.remaining() <= expires_at(0, short)
    assert await lease.wait_lost() == "expired"
    assert now() - begun > expires_at(0, short) - 0.05
    await gets_the_lock(rival, "x")


async def test_the_server_ends_the_hold_of_a_silent_client_by_the_life_that_was_set(deployment, rival):
    if not extending(deployment):
        return
    short = deployment.seconds(0.6)
    async with deployment.over(label="client") as (client, way):
        lease = await client.lock("x", ttl=100, renew=False).acquire()
        await lease.extend(short)
        way.cut(refused=True)
        async with asyncio.timeout(PATIENCE):
            other = await rival.lock("x").acquire()
        assert lease.lost
        await other.release()
        await lease.release()


@pytest.mark.parametrize("act", ["mutex", "write", "permits"])
async def test_who_waits_enters_when_a_hold_ends_earlier_than_it_was_known_to(deployment, rival, act):
    """The holder is silent, so that the end of its life is all that lets the next one in."""
    if not extending(deployment) or not NEEDS.get(act, set()) <= deployment.kinds:
        return
    async with deployment.over(label="client") as (client, way):
        lease = await ACTS[act](client, ttl=600, renew=False).acquire()
        waiting = asyncio.create_task(ACTS[act](rival).acquire())
        await queued(ACTS[act](rival), 1)
        await lease.extend(deployment.seconds(0.6))
        way.cut(refused=True)
        async with asyncio.timeout(PATIENCE):
            other = await waiting
        assert lease.lost
        await other.release()
        await lease.release()


async def test_the_server_keeps_the_hold_of_a_silent_client_for_the_life_that_was_set(deployment, rival):
    if not extending(deployment):
        return
    ttl = deployment.seconds(0.5)
    async with deployment.over(label="client") as (client, way):
        lease = await client.lock("x", ttl=ttl, renew=False).acquire()
        await lease.extend(100)
        way.cut(refused=True)
        end = now() + 2.5 * ttl
        while now() < end:
            assert await rival.lock("x").try_acquire() is None
            await asyncio.sleep(ttl / 4)
        assert lease.held
        await lease.release()


async def test_an_earlier_end_counts_before_the_server_has_answered(deployment, rival):
    if not extending(deployment):
        return
    async with deployment.over(label="client") as (client, way):
        lease = await client.lock("x", ttl=100, renew=False).acquire()
        way.hold()
        extending_it = asyncio.create_task(lease.extend(20))
        await asyncio.sleep(0.02)
        assert not extending_it.done()
        end = validity(lease).until
        assert end <= expires_at(now(), 20)
        assert lease.remaining() <= expires_at(0, 20)
        way.let_go()
        await extending_it
        assert validity(lease).until == pytest.approx(end, abs=1e-6), "its own answer has raised it"
        await lease.release()


async def test_a_later_end_does_not_count_before_the_server_has_answered(deployment, rival):
    if not extending(deployment):
        return
    async with deployment.over(label="client") as (client, way):
        lease = await client.lock("x", ttl=50, renew=False).acquire()
        end = validity(lease).until
        way.hold()
        extending_it = asyncio.create_task(lease.extend(100))
        await asyncio.sleep(0.02)
        assert validity(lease).until == end
        way.let_go()
        await extending_it
        assert lease.remaining() > 60
        await lease.release()


async def test_after_a_lost_answer_the_earlier_end_counts_and_it_may_be_tried_again(deployment, rival):
    if not extending(deployment):
        return
    async with deployment.over(label="client", command_timeout=deployment.seconds(1)) as (client, way):
        lease, failed, end = await client.lock("x", ttl=100, renew=False).acquire(), 0, 100
        for seconds in (60, 90):
            before = validity(lease).until
            way.cut(refused=True)
            try:
                await lease.extend(seconds)
                end = seconds
            except BackendUnavailable:
                failed += 1
                end = min(end, seconds)
                assert validity(lease).until <= before
            way.mend()
            assert lease.held
        # A minority that is away costs a quorum nothing.
        assert failed == 2 or "quorum" in deployment.name
        assert lease.remaining() < end

        async def again() -> bool:
            try:
                await lease.extend(80)
            except BackendUnavailable:
                return False
            return True

        await until(again)
        assert 60 < lease.remaining() < 80
        await lease.release()


async def test_of_several_requests_the_last_one_counts(deployment, client):
    if not extending(deployment):
        return
    lease = await client.lock("x", ttl=50, renew=False).acquire()
    await asyncio.gather(*(lease.extend(seconds) for seconds in (90, 20, 60, 30)))
    assert 15 < lease.remaining() < 30
    await asyncio.gather(*(lease.extend(seconds) for seconds in (20, 70)))
    assert 30 < lease.remaining() < 70
    await client._runtime.scheduler.renew(validity(lease))
    assert lease.held
    await lease.release()


@pytest.mark.parametrize("act", ["mutex", "read", "permits"])
async def test_a_late_copy_of_an_older_request_changes_nothing(deployment, client, rival, act):
    if not extending(deployment):
        return
    lease = await ACTS[act](client, ttl=50, renew=False).acquire()
    claim = validity(lease).claim
    if isinstance(claim, RowClaim):
        # There it is a late write, which `test_rows_engine.py` stages.
        await lease.release()
        return
    await claim.extend(0.3, 1)
    await claim.extend(80, 2)
    for number in (1, 2):
        await claim.extend(0.3, number)
    claim.fixed = False
    [renewal] = await client._runtime.backend.renew([claim])
    claim.fixed = True
    await asyncio.sleep(0.6)
    if act != "read":
        assert await ACTS[act](rival).try_acquire() is None
    [renewal] = await client._runtime.backend.renew([claim])
    assert isinstance(renewal, Grant)
    if deployment.tells:
        [holder] = (await ACTS[act](client).inspect()).holders
        assert holder.remaining > 60, "a late copy of a request or of a renewal has ended it earlier"
    await lease.release()


async def test_a_hold_that_is_gone_cannot_be_extended(deployment, client):
    if not extending(deployment):
        return
    lease = await client.lock("x", ttl=50, renew=False).acquire()
    await deployment.forget(lease)
    with pytest.raises(LockLost) as caught:
        await lease.extend(100)
    assert caught.value.reason in ("revoked", "force-released")
    assert lease.lost
    await lease.release()
    lease = await client.lock("y", ttl=50, renew=False).acquire()
    await lease.release()
    with pytest.raises(RuntimeError, match="was released"):
        await lease.extend(100)


@pytest.mark.parametrize("passes", [0, 1, 2, 3])
async def test_a_release_beside_a_request_to_extend_ends_the_hold(deployment, client, rival, passes):
    if not extending(deployment):
        return
    lease = await client.lock("x", ttl=50, renew=False).acquire()
    begun = asyncio.create_task(lease.extend(80))
    for _ in range(passes):
        await asyncio.sleep(0)
    await lease.release()
    async with asyncio.timeout(PATIENCE):
        with contextlib.suppress(RuntimeError, LockLost):
            await begun
    assert not lease.held
    assert not len(client._runtime.scheduler), "a hold that was released is watched"
    await gets_the_lock(rival, "x")
    await nothing_remains(client, "x")


@pytest.mark.parametrize("act", ACTS)
async def test_a_lease_that_is_renewed_has_no_life_to_set(deployment, client, act):
    lease = await ACTS[act](client).acquire()
    with pytest.raises(TypeError, match="renew=False"):
        await lease.extend(20)
    await lease.release()


async def test_a_hold_that_was_just_waited_for_can_be_extended_at_once(deployment, client, rival):
    if not extending(deployment):
        return
    holder = await rival.lock("x").acquire()
    waiting = asyncio.create_task(client.lock("x", ttl=20, renew=False).acquire())
    await queued(rival.lock("x"), 1)
    await holder.release()
    lease = await waiting
    await lease.extend(60)
    assert 30 < lease.remaining() < 60
    await lease.extend(15)
    assert lease.remaining() < 15
    await asyncio.sleep(0.1)
    assert lease.remaining() < 15
    await lease.release()


async def test_every_level_of_a_hold_has_the_life_that_was_set(deployment, client):
    if not extending(deployment):
        return
    async with client.reentrant_lock("x", ttl=20, renew=False) as outer, client.reentrant_lock("x") as inner:
        await inner.extend(80)
        assert outer.remaining() > 60
        assert validity(outer).end == validity(inner).end


async def test_the_grace_and_max_hold_of_a_lock_stay_when_it_is_extended(deployment, client):
    if not extending(deployment):
        return
    lease = await client.lock("x", ttl=30, grace=10, renew=False).acquire()
    await lease.extend(60)
    assert 30 < lease.remaining() <= expires_at(0, 60) - 10
    with pytest.raises(ConfigError, match="seconds must be"):
        await lease.extend(29)
    await lease.release()
    lease = await client.lock("x", ttl=30, max_hold=deployment.seconds(0.3), renew=False).acquire()
    await lease.extend(60)
    assert await lease.wait_lost() == "max_hold"
    await lease.release()


async def test_a_downgrade_keeps_the_life_of_a_hold(deployment, client, rival):
    if not extending(deployment) or "downgrade" not in deployment.kinds:
        return
    lease = await client.rwlock("x").write(ttl=50, renew=False).acquire()
    await lease.extend(90)
    end = validity(lease).until
    await lease.downgrade()
    assert validity(lease).until == end
    if deployment.tells:
        [holder] = (await rival.rwlock("x").read().inspect()).holders
        assert 50 < holder.remaining <= 90
    await lease.extend(20)
    assert lease.remaining() < 20
    await lease.release()
