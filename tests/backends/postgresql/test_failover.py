"""A standby takes the place of its primary, which has died: with a synchronous one holds go on, without one they may be lost."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from contextlib import asynccontextmanager

import pytest

import aiolock
from aiolock.errors import BackendRefused, UnsafeBackend
from tests.backends.postgresql.tools import opened
from tests.faults.clocks import stepped
from tests.faults.proxy import Proxy
from tests.faults.staging import in_line
from tests.servers import PostgreSQL

PATIENCE = 60.0
"""Seconds after which something that has to happen counts as never."""


@pytest.fixture
def primary():
    with PostgreSQL() as server:
        yield server


@pytest.fixture
def standby(primary):
    with PostgreSQL(primary=primary) as server:
        yield server


async def until(condition):
    """Wait until something holds that a server is asked for."""
    async with asyncio.timeout(PATIENCE):
        while not await condition():  # noqa: ASYNC110 - it is known by asking only
            await asyncio.sleep(0.02)


async def replicates(primary, how):
    """Wait until the standby follows the primary in this way, and has all that is there."""
    state = "SELECT sync_state, replay_lsn >= pg_current_wal_flush_lsn() FROM pg_stat_replication"

    async def follows():
        return await asyncio.to_thread(primary.ask, state) == [[how, "t"]]

    await until(follows)


@asynccontextmanager
async def address(server):
    """The one address at which clients find the primary, whichever that is."""
    async with Proxy("127.0.0.1", server.port) as proxy:

        def lead_to(other):
            proxy.upstream = ("127.0.0.1", other.port)
            proxy.reset_all()

        yield f"postgresql://postgres@127.0.0.1:{proxy.port}/test", lead_to


async def fail_over(primary, standby, lead_to):
    """The primary dies for good, and the standby becomes the primary."""
    primary.kill()
    await asyncio.to_thread(standby.promote)
    lead_to(standby)


async def looked(lease):
    """Renew a lease as soon as there is a server that answers; raises what it learns."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(aiolock.BackendUnavailable):
                return await lease.renew()
            await asyncio.sleep(0.02)


async def test_a_real_standby_is_refused_until_it_is_promoted(primary, standby):
    with pytest.raises(BackendRefused, match="is a standby or recovers"):
        async with opened(standby.url):
            pass
    await asyncio.to_thread(standby.promote)
    async with opened(standby.url):
        pass


async def test_after_a_failover_to_a_synchronous_standby_a_hold_still_excludes(primary, standby):
    primary.ask("ALTER SYSTEM SET synchronous_standby_names = 'standby'", "SELECT pg_reload_conf()")
    await replicates(primary, "sync")
    async with address(primary) as (url, lead_to):
        options = {"namespace": secrets.token_hex(6), "ttl": 60.0}
        asked = {**options, "require": {"survives-failover"}}
        async with aiolock.connect(url, **asked) as client, aiolock.connect(url, **asked) as other:
            leases = [await client.lock(f"lock {number}").acquire() for number in range(20)]
            waiter = asyncio.create_task(other.lock("lock 0").acquire(timeout=2 * PATIENCE))

            async def queued():
                return (await client.lock("lock 0").inspect()).waiters

            await until(queued)
            # It knows of its place: an attempt that is not answered would end in an error.
            await in_line(other)
            await fail_over(primary, standby, lead_to)
            for lease in leases:
                await looked(lease)
                assert lease.held
            async with aiolock.connect(url, **options) as third:
                assert await third.lock("lock 1").try_acquire() is None
                await leases[1].release()
                following = await third.lock("lock 1").acquire(timeout=PATIENCE)
                assert following.token > leases[1].token
                await following.release()
            assert not waiter.done()
            await leases[0].release()
            await (await waiter).release()


async def test_after_a_failover_to_an_asynchronous_standby_a_hold_can_be_lost_as_the_page_says(
    primary, standby
):
    async with address(primary) as (url, lead_to):
        options = {"namespace": secrets.token_hex(6), "ttl": 60.0}
        with pytest.raises(UnsafeBackend, match="survives-failover"):
            await aiolock.connect(url, **options, require={"survives-failover"}).open()
        async with aiolock.connect(url, **options) as client:
            earlier = await client.lock("y").acquire()
            await replicates(primary, "async")
            await asyncio.to_thread(standby.stop)
            lease = await client.lock("x").acquire()
            primary.kill()
            await asyncio.to_thread(standby.start)
            await fail_over(primary, standby, lead_to)
            async with aiolock.connect(url, **options) as other:
                following = await other.lock("x").acquire(timeout=0)
                assert following.token > lease.token
                with pytest.raises(aiolock.LockLost):
                    await looked(lease)
                assert not lease.held
                # What the standby had goes on.
                await looked(earlier)
                assert await other.lock("y").try_acquire() is None
                await following.release()
            await earlier.release()


async def test_a_promoted_server_whose_clock_is_ahead_ends_no_hold_early(primary):
    """Its clock says that the holder's session has expired: a session of another timeline is observed for a whole ttl instead."""
    ttl = 4.0
    with stepped(lambda: PostgreSQL(primary=primary)) as (standby, step):
        step(3600)
        primary.ask("ALTER SYSTEM SET synchronous_standby_names = 'standby'", "SELECT pg_reload_conf()")
        await replicates(primary, "sync")
        namespace = secrets.token_hex(6)
        # This one is left with the address of the primary: it can renew nothing any more.
        async with aiolock.connect(primary.url, namespace=namespace, ttl=ttl) as client:
            lease = await client.lock("x").acquire()
            primary.kill()
            await asyncio.to_thread(standby.promote)
            async with aiolock.connect(standby.url, namespace=namespace, ttl=ttl) as other:
                assert await other.lock("x").try_acquire() is None
                [holder] = (await other.lock("x").inspect()).holders
                assert holder.remaining == ttl
                following = await other.lock("x").acquire(timeout=PATIENCE)
                assert not lease.held
                assert following.token > lease.token
                # Within the new timeline its clock is used again.
                async with aiolock.connect(standby.url, namespace=namespace) as third:
                    [holder] = (await third.lock("x").inspect()).holders
                    assert holder.remaining < ttl
                await following.release()


async def test_a_server_that_does_not_tell_its_timeline_is_known_by_its_run():
    revoked = "REVOKE EXECUTE ON FUNCTION pg_walfile_name(pg_lsn) FROM PUBLIC"
    with PostgreSQL(init=["CREATE ROLE app LOGIN SUPERUSER", "CREATE ROLE less LOGIN", revoked]) as server:
        zones = []
        for role in ("app", "less", "less"):
            async with opened(server.url.replace("postgres@", f"{role}@"), table="public.t") as store:
                [row] = await store.get(["tests/x"])
                zones.append(row.clock.zone)
            server.ask("GRANT ALL ON t TO less")
            if role == "less":
                server.stop()
                server.start()
        assert zones[0] == "00000001"
        assert zones[1].startswith("run ")
        assert zones[2].startswith("run ")
        assert len(set(zones)) == 3


async def test_heartbeats_whose_wait_for_the_standby_was_cancelled_prolong_nothing(primary, standby):
    """They are on the primary alone, which shows them to everybody: the standby would grant the lock again."""
    primary.ask("ALTER SYSTEM SET synchronous_standby_names = 'standby'", "SELECT pg_reload_conf()")
    await replicates(primary, "sync")
    options = {"namespace": secrets.token_hex(6), "ttl": 3.0, "on_loss": "signal"}
    async with aiolock.connect(primary.url, **options) as client:
        lease = await client.lock("x").acquire()
        standby.kill()
        ended, waits = 0, "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        async with asyncio.timeout(PATIENCE):
            while not lease.lost:
                found = await asyncio.to_thread(primary.ask, f"SELECT pg_cancel_backend(pid) {waits}")
                ended += len(found)
                await asyncio.sleep(0.02)
        assert ended
        primary.kill()
        await asyncio.to_thread(standby.start)
        await asyncio.to_thread(standby.promote)
        async with aiolock.connect(standby.url, **options) as other:
            following = await other.lock("x").acquire(timeout=PATIENCE)
            assert following.token > lease.token
            await following.release()
