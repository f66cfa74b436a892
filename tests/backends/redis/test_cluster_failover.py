"""Nodes of a cluster that die, hang, come back and hand over: what their holders and waiters see, and what others do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
import redis.asyncio

import aiolock
from aiolock import BackendError, BackendUnavailable
from aiolock.backends.redis.commands import load
from tests.backends.redis.test_cluster_slots import neighbour
from tests.backends.redis.test_scripts import LIFE, TTL, Lock
from tests.contract.deployments import Detoured
from tests.faults.cluster_slots import Move, named, nothing_is_left, owner, slot_of_name
from tests.faults.proxy import Proxy
from tests.faults.staging import PATIENCE, queued, until
from tests.servers import Redis, RedisCluster


@pytest.fixture(scope="module")
def doubled():
    """Three primaries, each with a replica; tests leave all six running, in whatever roles."""
    with RedisCluster(3, 1, node_timeout=500) as running:
        yield running


def replica_of(cluster: RedisCluster, primary: int) -> int:
    """The one replica of a node."""
    me = cluster.id(primary)
    for index in range(len(cluster.ports)):
        for words in cluster.known(index):
            if "myself" in words[2] and len(words) > 3 and words[3] == me:
                return index
    raise AssertionError("it has no replica")


def copied(cluster: RedisCluster, primary: int) -> None:
    """Until the replica has what the primary has."""
    assert cluster.ask(primary, "WAIT", 1, 5000) == 1


def cut(cluster: RedisCluster, primary: int) -> int:
    """What is written from now on is not copied; the replica has to be thawed."""
    replica = replica_of(cluster, primary)
    copied(cluster, primary)
    cluster.freeze(replica)
    cluster.ask(primary, "CLIENT", "KILL", "TYPE", "replica")
    return replica


def back(cluster: RedisCluster, index: int) -> None:
    """A node comes back; on return everything is as whole as it was."""
    cluster.start(index)
    everybody = range(len(cluster.ports))
    cluster.until(lambda: all(cluster.sound(one) for one in everybody))

    def whole() -> bool:
        masters = [one for one in everybody if cluster.ask(one, "ROLE")[0] == "master"]
        return len(masters) == 3 and all(
            len(cluster.ask(one, "ROLE")[2]) == len(everybody) // 3 - 1 for one in masters
        )

    cluster.until(whole)


async def answers(client: aiolock.Client, name: str) -> None:
    """Until a lock can be asked for again."""

    async def asked() -> bool:
        with contextlib.suppress(BackendError):
            await client.lock(name).inspect()
            return True
        return False

    await until(asked)


@pytest.mark.parametrize("way", ["ordered", "killed"])
async def test_what_was_copied_outlives_the_primary(doubled, connect, namespace, way):
    async with connect(doubled.url, ttl=30) as client, connect(doubled.url, ttl=30) as rival:
        name = named(doubled, 0 if way == "ordered" else owner(doubled, 0))
        primary = owner(doubled, slot_of_name(name))
        async with client.lock(name) as lease:
            waiter = asyncio.create_task(rival.lock(name).acquire())
            await queued(client.lock(name), 1)
            copied(doubled, primary)
            replica = replica_of(doubled, primary)
            if way == "ordered":
                doubled.ask(replica, "CLUSTER", "FAILOVER")
            else:
                doubled.kill(primary)
                node = client._backend._server.router.node(f"{{{name}}}")
                await until(lambda: not node.ready)
                # Asked while there is nobody to ask: answered by whoever takes over.
                asked = asyncio.create_task(client.lock(name).inspect())
            await until(lambda: doubled.ask(replica, "ROLE")[0] == "master")
            if way == "killed":
                assert (await asked).locked
            await answers(client, name)
            await lease.renew()
            [holder] = (await rival.lock(name).inspect()).holders
            assert holder.token == lease.token
            assert not waiter.done()
        async with asyncio.timeout(PATIENCE):
            following = await waiter
        assert following.token > lease.token
        await following.release()
        assert client.stats()["lost"] == rival.stats()["lost"] == 0
    await nothing_is_left(doubled, namespace)
    if way == "killed":
        back(doubled, primary)


@contextlib.contextmanager
def silent(cluster: RedisCluster, primary: int) -> Iterator[None]:
    """The replica of a primary stands still."""
    replica = replica_of(cluster, primary)
    copied(cluster, primary)
    cluster.freeze(replica)
    try:
        yield
    finally:
        cluster.thaw(replica)
        cluster.until(lambda: all(cluster.sound(one) for one in range(len(cluster.ports))))
        copied(cluster, primary)


async def test_the_replicas_of_the_primary_that_has_answered_confirm(doubled, connect, namespace):
    async with connect(doubled.url, ttl=30, replicas=1, command_timeout=2.0) as client:
        source, target = owner(doubled, 0), owner(doubled, 16383)
        name = named(doubled, source)
        with silent(doubled, source):
            with pytest.raises(BackendUnavailable, match="0 of replicas=1 have confirmed"):
                await client.lock(name).acquire()
            async with client.lock(named(doubled, target), timeout=PATIENCE) as lease:
                assert lease.held
        async with client.lock(name, timeout=PATIENCE) as lease:
            move = Move(doubled, name, target).begin()
            # A new name of that slot is locked where the slot goes.
            new = neighbour(name)
            with silent(doubled, target):
                await lease.renew()
                with pytest.raises(BackendUnavailable, match="0 of replicas=1 have confirmed"):
                    await client.lock(new).acquire()
            async with client.lock(new, timeout=PATIENCE) as other:
                assert other.held
            move.keys().end()
            await lease.renew()
        assert client.stats()["lost"] == 0
    await nothing_is_left(doubled, namespace)


async def test_what_was_not_copied_is_lost_or_said_again(doubled, connect):
    async with connect(doubled.url, ttl=60) as client, connect(doubled.url, ttl=60) as rival:
        primary = owner(doubled, 16383)
        name, other = named(doubled, primary), named(doubled, primary)
        given_back = await client.lock(name).acquire()
        permit = await client.semaphore(name, 1).acquire()
        replica = cut(doubled, primary)
        await given_back.release()
        await permit.release()
        kept = await client.lock(other).acquire()
        doubled.kill(primary)
        doubled.thaw(replica)
        async with asyncio.timeout(PATIENCE):
            assert await kept.wait_lost() == "revoked"
            await answers(rival, name)
            # Far less than the ttl for which the new primary would keep what it believes to be held.
            async with rival.lock(name) as lease, rival.semaphore(name, 1), rival.lock(other) as following:
                assert lease.token > given_back.token
                assert following.token > kept.token
        back(doubled, primary)


@pytest.mark.parametrize("way", ["killed", "frozen"])
async def test_a_node_that_is_away_disturbs_nobody_who_needs_another(cluster, connect, way):
    options = {"ttl": 1.2, "command_timeout": 4}
    async with (
        connect(cluster.url, **options) as client,
        connect(cluster.url, ttl=30, command_timeout=2) as rival,
    ):
        away, other, another = named(cluster, 1), named(cluster, 2), named(cluster, 0)
        gone = await client.lock(away, ttl=60).acquire()
        waiter = asyncio.create_task(rival.lock(away).acquire())
        await queued(rival.lock(away), 1)
        # Taken together, so they are renewed together, for as long as both can be.
        short, lease = await asyncio.gather(
            *(client.lock(name).acquire() for name in (named(cluster, 1), other))
        )
        async with lease:
            (cluster.kill if way == "killed" else cluster.freeze)(1)
            asked = asyncio.create_task(client.lock(away).inspect())
            # For more than its ttl.
            terms = {lease._hold.validity.until}
            async with asyncio.timeout(PATIENCE):
                while len(terms) < 5:
                    terms.add(lease._hold.validity.until)
                    async with rival.lock(another):
                        await asyncio.sleep(0.01)
            assert lease.held
            assert await short.wait_lost() == "expired"
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError, BackendUnavailable):
                await asked
            if way == "killed":
                with pytest.raises(BackendUnavailable):
                    await rival.lock(away).inspect()
        assert not waiter.done()
        async with connect(cluster.url, command_timeout=2) as late, late.lock(other):
            assert "no-eviction" not in late._backend.capabilities
        if way == "killed":
            back(cluster, 1)
        else:
            cluster.thaw(1)
            await answers(client, away)
            assert gone.held
            await gone.release()
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()


async def test_only_who_is_subscribed_at_the_node_of_the_lock_is_granted_it(
    doubled, connect, namespace, monkeypatch
):
    index = next(number for number in range(6) if doubled.ask(number, "ROLE")[0] == "master")
    other = replica_of(doubled, index)
    name = named(doubled, index)
    async with (
        redis.asyncio.Redis(port=doubled.ports[index]) as admin,
        redis.asyncio.Redis(port=doubled.ports[other]) as admin_there,
        connect(doubled.url, ttl=5) as one,
        connect(doubled.url, ttl=5) as two,
    ):
        # By script: who is subscribed at another node hears nothing and is granted nothing, whatever the channel.
        lock, there, scripts = Lock(admin, namespace, name), Lock(admin_there, namespace), load(cluster=True)
        channels = [f"b@{doubled.id(number)}" for number in (index, other)]
        await there.listen(*channels)
        for request in ("a:1", "b:1"):
            await lock.call(scripts["enter"], request, TTL, 1, 0, "me", f"{LIFE} s -1")
        assert await lock.call(scripts["release"], "a:1", 0) == 0
        assert await lock.owner() is None
        for channel in channels:
            await admin.publish(f"{namespace}:1:to:{channel}", "behind it")
            assert await there.heard() == (channel, "behind it")
        await there.close()
        await admin.delete(lock.key)
        # By client: a subscription that ends up at the replica is to a channel of that node.
        backend = two._backend
        [node] = [
            one for one in backend._server.router.nodes.all.values() if one.host.port == doubled.ports[index]
        ]
        monkeypatch.setattr(node, "_agree", lambda _: None)
        node._endpoints[1]._kwargs["port"] = doubled.ports[other]
        node.subscriber.leave()
        await until(lambda: node.subscriber.subscribed and node._endpoints[1].node == doubled.id(other))
        heard = []
        monkeypatch.setattr(backend._messages, "dispatch", lambda *both: heard.append(both))
        held = await one.lock(name).acquire()
        waiter = asyncio.create_task(two.lock(name).acquire())
        await queued(one.lock(name), 1)
        await held.release()
        async with asyncio.timeout(PATIENCE):
            lease = await waiter
        assert lease.token > held.token
        assert heard == []
        await lease.release()


async def test_without_any_node_there_is_no_cluster(connect):
    with Redis() as gone:
        url = f"redis+cluster://127.0.0.1:{gone.port}"
    with pytest.raises(BackendUnavailable, match="no node says who serves what"):
        await connect(url, command_timeout=0.5).open()


async def test_an_answer_that_is_late_counts_all_the_same(cluster, namespace):
    """Two nodes that are far away: each renewal waits for them for a moment only, and finds their answers the next time."""
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(Proxy("127.0.0.1", port)) for port in cluster.ports]
        ways = {port: proxy.port for port, proxy in zip(cluster.ports, proxies, strict=True)}
        options = {"namespace": namespace, "ttl": 2.0, "command_timeout": 10}
        async with aiolock.Client(Detoured(cluster.url, ways), **options) as client:
            names = [named(cluster, index) for index in range(3)]
            leases = await asyncio.gather(*(client.lock(name).acquire() for name in names))
            for far in proxies[1:]:
                far.up.delay = 0.4
            terms: list[set[float]] = [set() for _ in leases]
            async with asyncio.timeout(PATIENCE):
                while min(map(len, terms)) < 4:
                    for lease, seen in zip(leases, terms, strict=True):
                        assert lease.held
                        seen.add(lease._hold.validity.until)
                    await asyncio.sleep(0.01)
            for far in proxies[1:]:
                far.up.delay = 0
            for lease in leases:
                await lease.release()
