"""Slots that move from node to node: nothing is lost, nobody is stuck, no two are inside, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

import aiolock
from aiolock.backends.redis.cluster.router import Router
from aiolock.core.backend import Request
from aiolock.types import MUTEX, permits
from tests.faults.cluster_slots import Move, named, nothing_is_left, slot_of_name
from tests.faults.staging import PATIENCE, passes, queued, until
from tests.servers import RedisCluster


@pytest.fixture
async def two(cluster, connect):
    """Two clients, who find nothing left afterwards."""
    async with connect(cluster.url, ttl=30) as one, connect(cluster.url, ttl=30) as other:
        yield one, other
    await nothing_is_left(cluster, one._backend._prefix.partition(":")[0])


def neighbour(name: str) -> str:
    """Another name of the same slot."""
    slot = slot_of_name(name)
    number = 0
    while slot_of_name(f"n{number}") != slot:
        number += 1
    return f"n{number}"


async def test_a_hold_goes_along_and_is_renewed_where_it_is(cluster, two):
    one, other = two
    name = named(cluster, 0)
    async with one.lock(name) as lease:
        move = Move(cluster, name).all()
        await lease.renew()
        [holder] = (await other.lock(name).inspect()).holders
        assert holder.token == lease.token
        assert not (await other.lock(name).try_acquire())
        Move(cluster, name, move.source).all()
        await lease.renew()
    async with other.lock(name) as following:
        assert following.token > lease.token
    assert one.stats()["lost"] == 0


async def test_a_short_hold_is_kept_while_its_slot_goes_round(cluster, connect):
    async with connect(cluster.url, ttl=3) as client, connect(cluster.url) as rival:
        name = named(cluster, 1)
        async with client.lock(name) as lease:
            before = client.stats()["renewals"]
            for _ in range(3):
                # The loop goes on: it has to renew meanwhile.
                await asyncio.to_thread(lambda: Move(cluster, name).all())
                wanted = client.stats()["renewals"] + 1
                await until(lambda wanted=wanted: client.stats()["renewals"] > wanted)
                assert lease.held
            assert client.stats()["renewals"] > before
            assert not (await rival.lock(name).try_acquire())
        assert client.stats()["lost"] == 0


@pytest.mark.parametrize("step", ["in the middle", "over"])
async def test_what_is_given_back_after_its_slot_has_moved_is_given_back_there(cluster, two, step):
    one, other = two
    name = named(cluster, 0)
    lease = await one.lock(name).acquire()
    permit = await one.semaphore(name, 1).acquire()
    move = Move(cluster, name).begin().keys()
    if step == "over":
        move.end()
    await lease.release()
    await permit.release()
    async with asyncio.timeout(PATIENCE), other.lock(name) as following, other.semaphore(name, 1):
        assert following.token > lease.token
    if step != "over":
        move.end()


@pytest.mark.parametrize("fair", [True, False])
async def test_twenty_who_wait_are_served_in_order_while_the_slot_moves(cluster, two, fair):
    one, other = two
    name = named(cluster, 2)
    served: list[int] = []
    inside = 0

    async def wants(number: int, client: aiolock.Client) -> None:
        nonlocal inside
        async with client.lock(name, fair=fair):
            inside += 1
            assert inside == 1
            served.append(number)
            if number == 5:
                # The others' places are on their way while this one holds.
                Move(cluster, name).begin().keys()
                await asyncio.sleep(0.01)
            if number == 9:
                move.begin().keys().end()
            await passes(3)
            inside -= 1

    async with one.lock(name, fair=fair):
        tasks = []
        for number in range(20):
            client = (one, other)[number % 2]
            tasks.append(asyncio.create_task(wants(number, client)))
            if fair:
                await queued(one.lock(name), number + 1)
            else:
                await passes(5)
        move = Move(cluster, name).all()
        move = Move(cluster, name)
    async with asyncio.timeout(2 * PATIENCE):
        await asyncio.gather(*tasks)
    assert sorted(served) == list(range(20))
    if fair:
        assert served == list(range(20))
    assert one.stats()["lost"] == other.stats()["lost"] == 0


async def test_hand_overs_after_a_move_are_pushed_again_and_not_asked_for(cluster, two):
    one, other = two
    name = named(cluster, 0)
    heard: list[bytes] = []
    for node in other._backend._server.router.nodes.all.values():

        def listen(payload: bytes, take=node.subscriber._on_message) -> None:
            heard.append(payload)
            take(payload)

        node.subscriber._on_message = listen
    async with one.lock(name):
        waiter = asyncio.create_task(other.lock(name).acquire())
        await queued(one.lock(name), 1)
        Move(cluster, name).all()
        # Nothing is told to those who wait: their client listens at every node already.
    async with asyncio.timeout(PATIENCE):
        await (await waiter).release()
    # A heartbeat may have been quicker, but the place was served, and that by a message that somebody heard.
    await until(lambda: [payload for payload in heard if payload.startswith(b"g ")])


async def test_permits_readers_and_registers_go_along(cluster, two):
    one, other = two
    name = named(cluster, 1)
    latch = asyncio.create_task(one.latch(name, 1).wait())
    permits = await one.semaphore(name, 2).acquire(permits=2)
    waiting = asyncio.create_task(other.semaphore(name, 2).acquire())
    await queued(one.semaphore(name, 2), 1)
    async with one.rwlock(name).write() as writer:
        reader = asyncio.create_task(other.rwlock(name).read().acquire())
        await queued(one.rwlock(name).read(), 1)
        move = Move(cluster, name).begin().keys()
        await writer.downgrade()
        async with asyncio.timeout(PATIENCE):
            await (await reader).release()
        move.end()
        await permits.release()
        async with asyncio.timeout(PATIENCE):
            await (await waiting).release()
    assert await one.semaphore(name, 2).available() == 2
    await other.latch(name, 1).count_down()
    async with asyncio.timeout(PATIENCE):
        await latch


async def test_in_the_middle_of_a_move_names_old_and_new_are_locked_as_ever(cluster, two):
    one, other = two
    old = named(cluster, 0)
    new = neighbour(old)
    async with one.lock(old) as held:
        move = Move(cluster, old).begin()
        # The one is still where it was, the other one never was there.
        async with one.lock(new) as lease:
            assert not await other.lock(new).try_acquire()
            assert not await other.lock(old).try_acquire()
            await asyncio.gather(held.renew(), lease.renew())
            waiter = asyncio.create_task(other.lock(new).acquire())
            await queued(one.lock(new), 1)
            move.keys()
            await asyncio.gather(held.renew(), lease.renew())
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()
        assert [info.name for info in await other.locks()] == [old]
        move.end()
        await asyncio.gather(held.renew())
    for name in (old, new):
        async with other.lock(name):
            pass


async def test_a_hold_whose_slot_moves_to_a_silent_node_costs_no_other_its_renewal(connect):
    """Both are asked for at the same node, in one write; the answer about one has to come from the silent node."""
    with RedisCluster(extra=["--cluster-require-full-coverage", "no"]) as cluster:
        async with connect(cluster.url, ttl=30) as client:
            moving, other = named(cluster, 0), named(cluster, 0)
            lease, healthy = (
                await client.lock(moving, ttl=3).acquire(),
                await client.lock(other, ttl=3).acquire(),
            )
            move = Move(cluster, moving).begin().keys()
            cluster.freeze(move.target)
            try:
                await lease.wait_lost()
                wanted = client.stats()["renewals"] + 3
                await until(lambda: client.stats()["renewals"] >= wanted)
                assert healthy.held
            finally:
                cluster.thaw(move.target)
            await healthy.release()


async def test_a_slot_that_both_nodes_refuse_is_waited_for(cluster, two):
    one, _ = two
    name = named(cluster, 0)
    move = Move(cluster, name).begin()
    # The source says that it is the target's, and the target, which was not told, that it is the source's.
    target = cluster.id(move.target)
    cluster.ask(move.source, "CLUSTER", "SETSLOT", move.slot, "NODE", target)
    getting = asyncio.create_task(one.lock(name).acquire())
    await asyncio.sleep(0.3)
    # Some servers find the way out by themselves; of the others the target has to be told.
    cluster.ask(move.target, "CLUSTER", "SETSLOT", move.slot, "NODE", target)
    async with asyncio.timeout(PATIENCE):
        await (await getting).release()


async def test_who_waits_no_longer_leaves_nothing_wherever_the_slot_is(cluster, two):
    """Cancelled after every number of passes of the loop, before, in the middle of and after a move."""
    one, other = two
    random_ = random.Random(5)
    cancelled = 0
    for number in range(40):
        name = f"c{number % 7}"
        move = Move(cluster, name)
        held = await other.lock(name).acquire() if number % 3 else None
        acquiring = asyncio.create_task(one.lock(name).acquire())
        steps = [move.begin, move.keys, move.end]
        for step in steps:
            await passes(random_.randrange(12))
            await asyncio.sleep(random_.choice((0, 0.0005)))
            step()
            if random_.random() < 0.3:
                acquiring.cancel()
        acquiring.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await acquiring).release()
        cancelled += acquiring.cancelled()
        if held is not None:
            await held.release()
        async with asyncio.timeout(PATIENCE):
            await (await other.lock(name).acquire()).release()
    assert cancelled > 20
    await until(lambda: not one._runtime.cleanups)
    assert one.stats()["lost"] == other.stats()["lost"] == 0


async def test_what_was_sent_on_is_forgotten(cluster, two):
    one, other = two
    for name in ("a", "b", "c"):
        Move(cluster, name).all()
    for client in (one, other):
        for name in ("a", "b", "c"):
            async with client.lock(name):
                pass
        router = client._backend._server.router
        assert isinstance(router, Router)
        await passes(3)
        assert not router._rerouted


@pytest.mark.parametrize("kind", [MUTEX, permits(1, 1)], ids=["lock", "semaphore"])
async def test_a_release_that_nobody_waits_for_reaches_the_new_home(cluster, two, kind):
    """By the backend's own means: what a client cleans up would be asked for again."""
    one, other = two
    name = named(cluster, 0)
    claim = one._backend.claim(Request(name, kind, 60.0, "somebody"))
    assert await claim.acquire(wait=False)
    Move(cluster, name).all()
    releasing = asyncio.create_task(claim.release())
    await passes(1)
    releasing.cancel()
    await asyncio.wait([releasing])
    assert releasing.cancelled()
    lock = other.lock(name) if kind is MUTEX else other.semaphore(name, 1)
    async with asyncio.timeout(PATIENCE), lock:
        pass


async def test_who_holds_a_lock_that_did_not_come_along_is_told(cluster, two):
    one, other = two
    name = named(cluster, 0)
    lease = await one.lock(name, ttl=60).acquire()
    move = Move(cluster, name).begin()
    cluster.ask(move.source, "DEL", one._backend._prefix + f"lock:{{{name}}}")
    move.end()
    # Far from its next renewal; the first command that is sent on tells that the slot is elsewhere.
    async with asyncio.timeout(PATIENCE / 4):
        assert not (await one.lock(neighbour(name)).inspect()).locked
        assert await lease.wait_lost() == "revoked"
    async with other.lock(name) as following:
        assert following.token > lease.token
