"""Renewals of the lease mode: a row that somebody has locked is nobody else's trouble."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import aiomysql
import pytest

from aiolock import BackendUnavailable
from aiolock.backends.mysql import renewal as renewal_module
from aiolock.backends.mysql.renewal import FRESH, verdict
from aiolock.core.backend import Grant, expires_at
from tests.backends.mysql.tools import as_root, sessions
from tests.faults.staging import PATIENCE, gets_the_lock, until


@asynccontextmanager
async def locked_by_an_administrator(deployment, name: str, *, shared: bool = False):
    """The row of a lock, or that of the only request for it, in a transaction that is open until the block ends."""
    table, column = ("aiolock_requests", "owner") if shared else ("aiolock", "id")
    [[key]] = await as_root(
        deployment.server,
        f"SELECT {column} FROM {table} WHERE {'lock_id' if shared else 'id'} = "
        f"(SELECT id FROM aiolock WHERE namespace = '{deployment.namespace}' AND name = '{name}')",
    )
    admin = await aiomysql.connect(**{**deployment.server.admin, "db": "test"})
    try:
        async with admin.cursor() as cursor:
            await cursor.execute(f"SELECT {column} FROM {table} WHERE {column} = '{key}' FOR UPDATE")
            assert await cursor.fetchall() == ((key,),)
        yield
    finally:
        await admin.rollback()
        await admin.ensure_closed()


def mutexes(client) -> list:
    return [client.lock(f"x{number}") for number in range(15)]


def kinds(client) -> list:
    """Locks that several may be in, each of a name of its own."""
    locks = [client.rwlock(f"x{number}").read() for number in range(5)]
    locks += [client.rwlock(f"x{number}").write() for number in range(5, 10)]
    return [*locks, *(client.semaphore(f"x{number}", 3) for number in range(10, 15))]


@pytest.mark.parametrize("ttl", [3, 7])
@pytest.mark.parametrize("of", [mutexes, kinds])
async def test_a_row_that_stays_locked_loses_its_own_lease_alone(deployment, of, ttl):
    async with deployment.connect(ttl=ttl) as client:
        leases = [await lock.acquire() for lock in of(client)]
        main = await client._backend.sessions.main()
        async with locked_by_an_administrator(deployment, "x7", shared=of is kinds):
            async with asyncio.timeout(PATIENCE):
                await leases[7].wait_lost()
            # By its term: nobody has said that it is gone.
            assert (client.stats()["lost"], client.stats()["losses"]["expired"]) == (1, 1)
            del leases[7]
            before = client.stats()["renewals"]
            await until(lambda: client.stats()["renewals"] >= before + 14)
            for lease in leases:
                lease.check()
            # It did not wait, and was not given up for being late.
            assert await client._backend.sessions.main() is main
        for lease in leases:
            await lease.release()


async def test_a_bid_that_is_locked_for_a_while_keeps_its_lease(deployment):
    async with deployment.connect(ttl=7) as client:
        lease, other = await client.semaphore("x", 2).acquire(), await client.rwlock("y").read().acquire()
        async with locked_by_an_administrator(deployment, "x", shared=True):
            await until(lambda: client.stats()["renewal_failures"] >= 2)
        lease.check()
        await until(lambda: lease.remaining() > FRESH * 7)
        await lease.renew()
        for each in (lease, other):
            each.check()
            await each.release()


async def test_a_row_that_is_locked_for_a_while_keeps_its_lease(deployment):
    async with deployment.connect(ttl=6) as client, deployment.connect() as rival:
        lease, other = await client.lock("x").acquire(), await client.lock("y").acquire()
        async with locked_by_an_administrator(deployment, "x"):
            # Unknown is not lost.
            await until(lambda: client.stats()["renewal_failures"] >= 2)
        lease.check()
        await until(lambda: lease.remaining() > FRESH * 6)
        lease.check()
        other.check()
        await lease.release()
        assert await gets_the_lock(rival, "x") > lease.token
        await other.release()


async def test_a_renewal_of_a_locked_row_holds_up_nothing_else(deployment, monkeypatch):
    monkeypatch.setattr(renewal_module, "FRESH", 2.0)
    # So long that it is still asked for when the row is free, also on a busy machine.
    async with deployment.connect(ttl=60 * PATIENCE) as client:
        lease = await client.lock("x").acquire()
        async with locked_by_an_administrator(deployment, "x"):
            renewal = asyncio.create_task(lease.renew())
            await gets_the_lock(client, "y")
            assert not renewal.done()
        # It goes on as soon as the row is free; nothing has failed.
        async with asyncio.timeout(PATIENCE):
            await renewal
        assert lease.remaining() > FRESH * 60 * PATIENCE
        await lease.release()


async def test_a_renewal_of_a_row_that_stays_locked_is_not_known(deployment, monkeypatch):
    monkeypatch.setattr(renewal_module, "FRESH", 2.0)
    async with deployment.connect(ttl=10) as client:
        lease = await client.lock("x").acquire()
        async with locked_by_an_administrator(deployment, "x"):
            with pytest.raises(BackendUnavailable, match="has its row locked"):
                await lease.renew()
        await lease.renew()
        lease.check()
        await lease.release()


async def test_cancelling_a_renewal_that_waits_leaves_nothing_behind(deployment, monkeypatch):
    monkeypatch.setattr(renewal_module, "FRESH", 2.0)
    async with deployment.connect(ttl=60 * PATIENCE) as client:
        lease = await client.lock("x").acquire()
        async with locked_by_an_administrator(deployment, "x"):
            renewal = asyncio.create_task(lease.renew())
            await gets_the_lock(client, "y")
            assert not renewal.done()
            renewal.cancel()
            with pytest.raises(asyncio.CancelledError):
                await renewal
        await lease.renew()
        await lease.release()
        assert len(await sessions(deployment.server)) == 1


def test_a_row_says_what_has_become_of_a_hold():
    def grant(until: float) -> Grant:
        return Grant(0, 0, until, demand=True)

    # Prolonged half a second before it was asked for.
    assert verdict("me", ("me", None, 9_500_000), 10.0, 100.0) == grant(expires_at(99.5, 10.0))
    assert verdict("me", ("me", None, 10_000_000), 10.0, 100.0) == grant(expires_at(100.0, 10.0))
    # Ours, and nobody has prolonged it.
    assert verdict("me", ("me", None, 8_000_000), 10.0, 100.0) is None
    assert verdict("me", ("me", None, 1), 10.0, 100.0) is None
    assert verdict("me", ("me", None, 0), 10.0, 100.0) == "revoked"
    assert verdict("me", ("you", None, 10_000_000), 10.0, 100.0) == "revoked"
    assert verdict("me", (None, "me", 0), 10.0, 100.0) == "force-released"
    assert verdict("me", ("you", "me", 10_000_000), 10.0, 100.0) == "force-released"
    assert verdict("me", None, 10.0, 100.0) == "revoked"
