"""Somebody has a row of ours locked, or a gap between rows: it costs that lock time, and nobody else anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiomysql
import pytest

from aiolock import AcquireTimeout, BackendUnavailable
from tests.backends.mysql.tools import as_root
from tests.faults.staging import PATIENCE, gets_the_lock, queued, until

SHORT = 3
"""A ttl, in seconds, of which a third is no more than what the server waits for a row."""


@asynccontextmanager
async def locked(deployment, statement: str) -> AsyncIterator[None]:
    """What `statement` selects, in an administrator's transaction that is open until the block ends."""
    admin = await aiomysql.connect(**{**deployment.server.admin, "db": "test"})
    try:
        async with admin.cursor() as cursor:
            await cursor.execute(f"{statement} FOR UPDATE")
        yield
    finally:
        await admin.rollback()
        await admin.ensure_closed()


async def row(deployment, name: str) -> str:
    """The row of a lock, by its key, so that nothing else is locked."""
    where = f"namespace = '{deployment.namespace}' AND name = '{name}'"
    [[key]] = await as_root(deployment.server, f"SELECT id FROM aiolock WHERE {where}")
    return f"SELECT id FROM aiolock WHERE id = '{key}'"


async def request(deployment, name: str) -> str:
    """The row of the only one who is in line, else of the only one who is inside."""
    look = (
        "SELECT b.owner FROM aiolock_requests AS b JOIN aiolock AS t ON t.id = b.lock_id "
        f"WHERE t.namespace = '{deployment.namespace}' AND t.name = '{name}' ORDER BY b.state"
    )
    [owner, *_] = [row[0] for row in await as_root(deployment.server, look)]
    return f"SELECT owner FROM aiolock_requests WHERE owner = '{owner}'"


EVERYTHING = "SELECT owner FROM aiolock_requests"
"""All requests, and all gaps between them."""


async def in_vain(lock) -> None:
    """It cannot be had, and that is all."""
    with pytest.raises((BackendUnavailable, AcquireTimeout)):
        await lock.acquire(timeout=0.1)


@pytest.mark.parametrize("what", ["row of a mutex", "row of another", "request", "gap"])
async def test_whoever_asks_for_a_locked_row_holds_up_nobody_else(deployment, what):
    async with deployment.connect(ttl=SHORT) as client, deployment.connect(ttl=SHORT) as rival:
        # The rows of all locks are there.
        asked, other = client.rwlock("x").read(), client.semaphore("free", 2)
        if what == "row of a mutex":
            asked = client.lock("x")
        for lock in (asked, other, client.lock("y")):
            await (await lock.acquire()).release()
        kept = [await client.lock(f"kept{number}").acquire() for number in range(5)]
        if what != "gap":
            kept += [await client.semaphore(f"kept{number}", 2).acquire() for number in range(5, 10)]
        held = await rival.rwlock("x").read().acquire() if what == "request" else None
        main = await client._backend.sessions.main()
        statement = (
            EVERYTHING if what == "gap" else await (request if what == "request" else row)(deployment, "x")
        )
        async with locked(deployment, statement):
            before = client.stats()["renewals"]
            while client.stats()["renewals"] < before + 2 * len(kept):
                await asyncio.gather(*(in_vain(asked) for _ in range(3)))
            # Once it is known, others do not wait for it any more.
            await gets_the_lock(client, "y")
            if what != "gap":
                await (await other.acquire()).release()
            assert await client._backend.sessions.main() is main
            for lease in kept:
                lease.check()
        assert client.stats()["lost"] == 0
        # What was wanted in vain is cleaned up, and the lock can be had again.
        async with asyncio.timeout(PATIENCE):
            lease = await asked.acquire()
        for one in (lease, *kept, *([held] if held is not None else [])):
            await one.release()
        assert not (await asked.inspect()).locked


async def test_a_place_in_line_that_is_locked_holds_up_no_other_of_its_client(deployment):
    async with deployment.connect(ttl=SHORT) as client, deployment.connect(ttl=60) as rival:
        held = {name: await rival.rwlock(name).write().acquire() for name in "xyz"}
        waiters = {name: asyncio.create_task(client.rwlock(name).write().acquire()) for name in "xyz"}
        for name in "xyz":
            await queued(rival.rwlock(name).write(), 1)
        session = await client._backend.sessions.listener()
        owners = {claim.owner for claim in client._backend.mode.sharing.listener._claims.values()}
        async with locked(deployment, await request(deployment, "x")):
            # Long enough for places that nobody prolongs to be over.
            clock = client._backend.settings.clock
            late = clock() + 2 * SHORT
            await until(lambda: clock() > late)
            for name in "yz":
                await held[name].release()
                async with asyncio.timeout(PATIENCE):
                    await (await waiters[name]).release()
            assert await client._backend.sessions.listener() is session
            kept = {claim.owner for claim in client._backend.mode.sharing.listener._claims.values()}
            assert len(kept) == 1
            assert kept < owners
        await held["x"].release()
        async with asyncio.timeout(PATIENCE):
            await (await waiters["x"]).release()


async def test_a_grant_that_is_locked_holds_up_no_other_of_its_client(deployment):
    """Two were let in by another client, and somebody has one of them locked before it is confirmed."""
    async with deployment.connect(ttl=SHORT) as client, deployment.connect(ttl=60) as rival:
        held = [await rival.semaphore(name, 1).acquire() for name in "xy"]
        waiters = [asyncio.create_task(client.semaphore(name, 1).acquire()) for name in "xy"]
        for name in "xy":
            await queued(rival.semaphore(name, 1), 1)
        sharing = client._backend.mode.sharing
        owners = {claim.request.name: claim.owner for claim in sharing.listener._claims.values()}
        admin = await aiomysql.connect(**{**deployment.server.admin, "db": "test"}, autocommit=True)
        try:
            async with admin.cursor() as cursor:
                # As a decision does that lets them in, but the one of them stays locked.
                granted = "UPDATE aiolock_requests SET state = 1, token = 1 << 62, expires_at = UTC_TIMESTAMP(6) + INTERVAL 60 SECOND "
                await cursor.execute("SET autocommit = 0")
                await cursor.execute(f"{granted} WHERE owner IN ('{owners['x']}', '{owners['y']}')")
                await cursor.execute("COMMIT")
                await cursor.execute(
                    f"SELECT 1 FROM aiolock_requests WHERE owner = '{owners['x']}' FOR UPDATE"
                )
                async with asyncio.timeout(PATIENCE):
                    lease = await waiters[1]
                assert not waiters[0].done() or waiters[0].result()
        finally:
            await admin.rollback()
            await admin.ensure_closed()
        async with asyncio.timeout(PATIENCE):
            await (await waiters[0]).release()
        await lease.release()
        for one in held:
            await one.release()
