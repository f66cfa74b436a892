"""Members that die, stand still or run out of space, while clients hold locks."""

from __future__ import annotations

import asyncio

import pytest

import aiolock
from aiolock import BackendError, BackendRefused, BackendUnavailable
from aiolock.backends.etcd.leases import for_session
from aiolock.types import Level
from tests.faults.proxy import Proxy
from tests.faults.staging import PATIENCE, gets_the_lock, in_time, queued, until
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


async def test_a_name_that_leads_to_a_member_without_a_leader_is_followed_to_another_one(cluster, caplog):
    async with (
        Proxy("127.0.0.1", cluster.ports[0]) as name,
        aiolock.connect(
            f"etcd://127.0.0.1:{name.port}", namespace="moved", ttl=60, command_timeout=1
        ) as client,
    ):
        lease = await client.lock("held").acquire()
        try:
            cluster.kill(1)
            cluster.kill(2)

            async def is_told():
                with pytest.raises(BackendUnavailable) as caught:
                    await client.lock("new").acquire()
                return "knows of no leader" in str(caught.value)

            await until(is_told)
            stale = set(name.ends)
        finally:
            for member in (1, 2):
                cluster.start(member)  # it ends with the thread that starts it
        name.upstream = ("127.0.0.1", cluster.ports[1])
        await in_time(lambda: gets_the_lock(client, "new"))
        await in_time(lease.renew)
        assert not stale & name.ends
        assert lease.held
    told = [
        record
        for record in caplog.records
        if (record.name, record.levelname) == ("aiolock.connection", "WARNING")
    ]
    assert len(told) == 1


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


async def test_leases_that_a_member_ends_which_stood_still_end_no_session_that_was_renewed_meanwhile(own):
    """The leader of a cluster whose disk hangs counts leases down without the renewals that another one gets by then. When it
    goes on, it has those revoked that were due by its count (etcd-io/etcd#15247); here, an administrator does it at that moment.
    """
    ttl = 3 * pace()
    loop = asyncio.get_running_loop()
    async with (
        Proxy("127.0.0.1", own.port) as proxy,
        aiolock.connect(f"etcd://127.0.0.1:{proxy.port}", namespace="tests", ttl=ttl) as client,
        aiolock.connect(own.url, namespace="tests", ttl=ttl) as rival,
    ):
        lease = await client.lock("x").acquire()
        leases = await asyncio.to_thread(own.leases)
        due = loop.time() + for_session(ttl)
        # Those that rows share are not due for a long time.
        leases -= {
            each for each in leases if "granted with TTL(1200s)" in own.ctl("lease", "timetolive", each)
        }
        assert leases
        while loop.time() < due:
            await asyncio.sleep(0.05)
            assert lease.held
        await lease.renew()
        proxy.up.blackhole()
        for each in leases & await asyncio.to_thread(own.leases):
            await asyncio.to_thread(own.ctl, "lease", "revoke", each)
        asked = 0
        while lease.held:
            following = await rival.lock("x").try_acquire()
            assert following is None or not lease.held
            asked += 1
        assert asked
        proxy.up.heal()
        if following is None:
            following = await rival.lock("x").acquire(timeout=PATIENCE)
        assert following.token > lease.token
        await following.release()


async def test_the_first_request_after_leases_were_revoked_succeeds(own):
    async with aiolock.connect(own.url, namespace="tests", ttl=30) as client:
        for name in ("x", "y"):
            async with client.lock(name):
                pass
            await asyncio.to_thread(own.revoke_leases)
        async with client.lock("x", timeout=PATIENCE):
            pass
