"""A caller's connection that ends while it waits, in every form: told as what it is, and SQLAlchemy learns of it."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import asynccontextmanager

import asyncpg
import pytest

import aiolock
from aiolock import BackendUnavailable, LockLost
from tests.faults.proxy import Proxy
from tests.faults.staging import PATIENCE, until

FORMS = ["plain", "pool", "connection", "session"]
# Before asyncpg 0.32, a pool may wait for ever for a connection that the server has ended, also without this library.
POOLS_END = asyncpg.__version__ >= "0.32"


@pytest.fixture
async def way(server):
    """The way of the caller's connection, which can be cut."""
    async with Proxy("127.0.0.1", server.port) as proxy:
        yield proxy


@pytest.fixture
async def client(server):
    async with aiolock.connect(server.url, namespace=secrets.token_hex(6), ttl=30) as opened:
        yield opened


@pytest.fixture
async def other(server):
    """A connection of another program."""
    connection = await asyncpg.connect(server.url)
    yield connection
    connection.terminate()


@asynccontextmanager
async def begun(form, url):
    """A connection of this form with an open transaction; what is raised in its block is raised behind it."""
    if form == "plain":
        connection = await asyncpg.connect(url)
        await connection.execute("BEGIN")
        yield connection
    elif form == "pool":
        async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool:
            try:
                async with pool.acquire() as connection:
                    # A transaction of asyncpg's raises its own error at its end.
                    await connection.execute("BEGIN")
                    yield connection
            finally:
                assert await pool.fetchval("SELECT 7") == 7
    else:
        sqlalchemy = pytest.importorskip("sqlalchemy.ext.asyncio", reason="pip install --group test")
        engine = sqlalchemy.create_async_engine(
            url.replace("postgresql:", "postgresql+asyncpg:"), pool_size=1, max_overflow=0
        )
        try:
            if form == "connection":
                async with engine.begin() as connection:
                    try:
                        yield connection
                    finally:
                        assert connection.invalidated
            else:
                async with sqlalchemy.AsyncSession(engine) as session, session.begin():
                    connection = await session.connection()
                    try:
                        yield session
                    finally:
                        assert connection.invalidated
            async with engine.begin() as again:
                assert (await again.exec_driver_sql("SELECT 7")).scalar() == 7
        finally:
            await engine.dispose()


WAITING = "SELECT pid FROM pg_locks WHERE NOT granted"


async def cut(how, way, other):
    """End the connection that waits."""
    await until(lambda: other.fetchval(WAITING))
    pid = await other.fetchval(WAITING)
    if how == "terminated":
        await other.fetch("SELECT pg_terminate_backend($1)", pid)
    else:
        way.reset_all()
        await other.fetch("SELECT pg_terminate_backend($1)", pid)


@pytest.mark.parametrize("how", ["terminated", "reset"])
@pytest.mark.parametrize("what", ["lock", "confirm"])
@pytest.mark.parametrize("form", FORMS)
async def test_a_connection_that_ends_while_it_waits_is_told_as_what_it_is(
    client, server, way, other, form, what, how
):
    url = server.url.replace(str(server.port), str(way.port))
    await other.execute("BEGIN")
    async with client.lock("y") as lease:
        with pytest.raises(BackendUnavailable, match="your connection is closed") as caught:
            async with begun(form, url) as mine:
                if what == "lock":
                    await client.lock("x", connection=other).acquire()
                    waiting = asyncio.create_task(client.lock("x", connection=mine).acquire())
                else:
                    await other.execute("SELECT FROM aiolock FOR UPDATE")
                    waiting = asyncio.create_task(lease.confirm(mine))
                await cut(how, way, other)
                async with asyncio.timeout(PATIENCE):
                    await waiting
        assert isinstance(caught.value.__cause__, (asyncpg.PostgresError, OSError))
        await other.execute("ROLLBACK")
        assert lease.held


@pytest.mark.parametrize("form", FORMS if POOLS_END else [form for form in FORMS if form != "pool"])
async def test_a_connection_that_ended_inside_a_block_is_told_at_its_end(client, server, other, form):
    with pytest.raises(LockLost, match="transaction"):
        async with begun(form, server.url) as mine, client.lock("x", connection=mine):
            await other.fetch(
                "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"
            )
