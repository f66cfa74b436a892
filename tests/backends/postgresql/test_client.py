"""Locks on a PostgreSQL server that something happens to: holders keep what they hold, and waiters get it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from contextlib import asynccontextmanager
from functools import partial

import asyncpg
import pytest

import aiolock
from aiolock.errors import BackendRefused, BackendUnavailable
from tests.backends.postgresql.test_faults import ask
from tests.faults.staging import PATIENCE, in_line, until


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+asyncpg"])
async def test_every_scheme_is_a_way_to_the_same_locks(url, scheme):
    namespace = secrets.token_hex(6)
    async with (
        aiolock.connect(url, namespace=namespace) as client,
        aiolock.connect(f"{scheme}{url[url.index('://') :]}", namespace=namespace) as other,
    ):
        async with client.lock("x") as lease:
            assert await other.lock("x").try_acquire() is None
        async with other.lock("x") as next_lease:
            assert next_lease.token > lease.token


async def test_findings_are_had_through_the_client(url):
    async with aiolock.connect(url, namespace=secrets.token_hex(6)) as client:
        assert {"version", "recovery", "durability", "table"} <= {
            one.subject for one in await client.diagnose()
        }


@pytest.mark.parametrize(("privilege", "ttl"), [("ALL", 60.0), ("UPDATE", 3.0)])
async def test_a_waiter_whose_privileges_are_taken_away_hears_it_soon(own, privilege, ttl):
    """Without those to read, from the next poll; without those to write alone, from the next heartbeat."""
    await ask(own, "CREATE ROLE app LOGIN")
    namespace = secrets.token_hex(6)
    async with aiolock.connect(own.url, namespace=namespace) as client, client.lock("x") as lease:
        await ask(own, "GRANT SELECT, INSERT, UPDATE, DELETE ON aiolock TO app")
        app = own.url.replace("postgres@", "app@")
        async with aiolock.connect(app, namespace=namespace, ttl=ttl) as other:
            waiter = asyncio.create_task(other.lock("x").acquire(timeout=2 * PATIENCE))

            async def queued():
                return bool((await client.lock("x").inspect()).waiters)

            await until(queued)
            await ask(own, f"REVOKE {privilege} ON aiolock FROM app")
            with pytest.raises(BackendRefused, match="permission denied"):
                async with asyncio.timeout(PATIENCE / 4):
                    await waiter
        assert lease.held


@pytest.mark.parametrize("accident", ["terminate", "restart", "kill"])
async def test_a_holder_keeps_its_lock_and_a_waiter_gets_it_afterwards(own, accident):
    loop = asyncio.get_running_loop()
    namespace = secrets.token_hex(6)
    options = {"namespace": namespace, "ttl": 30.0}
    async with aiolock.connect(own.url, **options) as client, aiolock.connect(own.url, **options) as other:
        lease = await client.lock("x").acquire()
        waiter = asyncio.create_task(other.lock("x").acquire(timeout=90))

        async def queued():
            return bool((await client.lock("x").inspect()).waiters)

        await until(queued)
        await in_line(other)
        if accident == "terminate":
            await ask(own, END)
        else:
            if accident == "kill":
                own.kill()
            await loop.run_in_executor(None, own.restart if accident == "restart" else own.start)
        # A request that was under way ends with the connection.
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(aiolock.BackendUnavailable):
                    await lease.renew()
                    break
        assert lease.held
        assert not waiter.done()
        await lease.release()
        following = await waiter
        assert following.token > lease.token
        await following.release()


@asynccontextmanager
async def told(server, statement, undo):
    """The administrator does something, and takes it back."""
    # What is refused at the login only is noticed by sessions that begin.
    await asyncio.to_thread(server.ask, statement, END, database="postgres")
    yield
    await asyncio.to_thread(server.ask, undo, database="postgres")


@asynccontextmanager
async def revoked(server):
    await ask(server, "REVOKE ALL ON aiolock FROM app")
    yield
    await ask(server, "GRANT ALL ON aiolock TO app")


@asynccontextmanager
async def busy(server, statement):
    """A transaction of another program does not come to its end."""
    program = await asyncpg.connect(
        host=str(server.folder), port=server.port, user="postgres", database="test"
    )
    async with program.transaction(isolation="repeatable_read"):
        await program.execute(statement)
        yield
    await program.close()


@asynccontextmanager
async def full(server):
    # What was there before the last changes is still needed, so that the next ones need space.
    async with busy(server, "SELECT FROM aiolock"):
        server.fill()
        yield
        server.empty()


@asynccontextmanager
async def frozen(server):
    server.freeze()
    yield
    server.thaw()


async def tried(client, name):
    """Take a lock and release it; return why that is impossible."""
    try:
        await (await client.lock(name).acquire(timeout=30)).release()
    except aiolock.BackendError as error:
        return error
    return None


END = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'aiolock'"
BAD_LUCK = {
    "the login is refused": (
        partial(told, statement="ALTER ROLE app NOLOGIN", undo="ALTER ROLE app LOGIN"),
        BackendRefused,
        "not permitted to log in",
    ),
    "no login is left": (
        partial(
            told, statement="ALTER ROLE app CONNECTION LIMIT 0", undo="ALTER ROLE app CONNECTION LIMIT -1"
        ),
        BackendUnavailable,
        "too many connections",
    ),
    "the database is closed": (
        partial(
            told,
            statement="ALTER DATABASE test ALLOW_CONNECTIONS false",
            undo="ALTER DATABASE test ALLOW_CONNECTIONS true",
        ),
        BackendRefused,
        "not currently accepting connections",
    ),
    "privileges are revoked": (revoked, BackendRefused, "permission denied"),
    "the table is locked": (
        partial(busy, statement="LOCK TABLE aiolock"),
        BackendUnavailable,
        "lock timeout|no answer",
    ),
    "the disk is full": (full, BackendRefused, "could not extend file"),
    "the server is frozen": (frozen, BackendUnavailable, "no answer|connection was lost"),
}


@pytest.mark.parametrize("what", BAD_LUCK)
async def test_bad_luck_is_told_in_time_and_costs_no_lock(own, what):
    misfortune, error, words = BAD_LUCK[what]
    if what == "the disk is full" and not own.confine():
        pytest.skip("nothing can be mounted here")
    own.ask("CREATE ROLE app LOGIN", "GRANT ALL ON SCHEMA public TO app")
    options = {"namespace": secrets.token_hex(6), "ttl": 120.0, "command_timeout": 2.0}
    url = own.url.replace("postgres@", "app@")
    async with aiolock.connect(url, **options) as client:
        lease = await client.lock("x").acquire()
        async with misfortune(own):
            async with asyncio.timeout(2 * PATIENCE):
                answer = None
                while not isinstance(answer, error) or not re.search(words, str(answer)):
                    # At first it may be the end of a connection, and a full disk has space for some rows.
                    assert answer is None or isinstance(answer, BackendUnavailable)
                    began = time.monotonic()
                    answer = await tried(client, f"y {secrets.token_hex(6)}")
                    assert time.monotonic() - began < 20
            assert lease.held
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(aiolock.BackendError):
                    await lease.renew()
                    break
                await asyncio.sleep(0.05)
        async with aiolock.connect(url, **options) as other:
            assert await other.lock("x").try_acquire() is None
            await lease.release()
            following = await other.lock("x").acquire(timeout=PATIENCE)
            assert following.token > lease.token
            await following.release()
