"""Members that die, stand still or run out of space, while clients hold locks."""

from __future__ import annotations

import asyncio

import pytest

import aiolock
from aiolock import BackendError, BackendRefused
from aiolock.types import Level
from tests.faults.staging import PATIENCE, queued, until
from tests.pace import pace
from tests.servers import Etcd, ServerFailed


@pytest.fixture(scope="module")
def cluster():
    """Three members; a test that hurts one of them has it whole again afterwards."""
    with Etcd(3) as running:
        yield running


async def acquired(client, name):
    """Whether a lock can be acquired and released."""
    try:
        async with client.lock(name, timeout=2):
            return True
    except (BackendError, aiolock.AcquireTimeout):
        return False


@pytest.mark.parametrize("way", ["kill", "freeze"])
async def test_the_leader_goes_and_holds_stay(cluster, way):
    async with (
        aiolock.connect(cluster.url, namespace=way, ttl=20, require={"survives-failover"}) as client,
        aiolock.connect(cluster.url, namespace=way, ttl=20) as other,
    ):
        lease = await client.lock("x").acquire()
        waiting = asyncio.create_task(other.lock("x").acquire())
        await queued(client.lock("x"), 1)
        leader = await asyncio.to_thread(cluster.leader)
        getattr(cluster, way)(leader)
        try:

            async def both():
                return await acquired(client, "y") and await acquired(other, "z")

            await until(both)
            assert lease.held
            assert not waiting.done()
            await lease.release()
            following = await waiting
            assert following.token > lease.token
            await following.release()
        finally:
            if way == "kill":
                cluster.start(leader)  # it ends with the thread that starts it
            else:
                cluster.thaw(leader)


async def test_a_majority_that_is_away_ends_holds_by_their_ttl_and_locks_work_when_it_is_back(cluster):
    async with aiolock.connect(cluster.url, namespace="majority", ttl=3, command_timeout=2) as client:
        lease = await client.lock("x").acquire()
        for index in (0, 1):
            cluster.freeze(index)
        try:
            assert await lease.wait_lost() == "expired"
            with pytest.raises(BackendError):
                await client.lock("y").acquire()
        finally:
            for index in (0, 1):
                cluster.thaw(index)
        await until(lambda: acquired(client, "y"))


async def test_a_cluster_without_space_takes_no_writes_and_says_so():
    with Etcd(extra=["--quota-backend-bytes=200000"]) as server:
        async with aiolock.connect(server.url, namespace="tests", ttl=3, command_timeout=15) as client:
            lease = await client.lock("x").acquire()

            def fill() -> bool:
                try:
                    server.ctl("put", "others", data=b"x" * 60_000)
                except ServerFailed as error:
                    return "space exceeded" in str(error)
                return False

            await until(lambda: asyncio.to_thread(fill))
            assert await lease.wait_lost() == "expired"
            with pytest.raises(BackendRefused, match="no writes until its database is compacted") as refusal:
                await client.lock("y").acquire()
            assert refusal.value.retryable
            findings = await client.diagnose()
            [alarm] = [finding for finding in findings if finding.subject == "alarm"]
            assert alarm.level is Level.ERROR
            assert "NOSPACE" in alarm.text


async def test_a_holder_that_died_is_followed_by_a_client_that_starts_later(own):
    """The lease of its session has ended: one try is enough."""
    ttl = pace()
    holder = aiolock.connect(own.url, namespace="tests", ttl=ttl, command_timeout=PATIENCE)
    await holder.open()
    lease = await holder.lock("x").acquire()
    backend = holder._runtime.backend
    # As if the process had died: nothing more is sent.
    backend.store._connection.ask = lambda *_, **__: (_ for _ in ()).throw(aiolock.BackendUnavailable("dead"))
    assert await lease.wait_lost() == "expired"

    async def taken():
        async with aiolock.connect(own.url, namespace="tests", ttl=ttl, command_timeout=PATIENCE) as client:
            if (following := await client.lock("x").try_acquire()) is None:
                return False
            await following.release()
            return True

    await until(taken)
    await lease.release()
    await holder.aclose()
