"""The lock inside an application's own transaction: taken on its connection, gone with its commit or rollback."""

from __future__ import annotations

import asyncio

import aiomysql
import pytest

import aiolock
from aiolock import (
    AcquireTimeout,
    BackendUnavailable,
    ConfigError,
    DeadlockDetected,
    UnsafeBackend,
    UnsupportedKind,
)
from tests import servers
from tests.backends.mysql.conftest import PASSWORD
from tests.backends.mysql.tools import as_root, sessions
from tests.contract.staging import PATIENCE, until


@pytest.fixture
async def connect(place):
    """Connections of the application, which has the account of the client unless it says otherwise."""
    opened = []

    async def one(user: str = "app", **options):
        password = {"app": PASSWORD, "bare": PASSWORD}.get(user, "")
        connection = await aiomysql.connect(
            host=place.server.host, port=place.server.port, user=user, password=password, db="test", **options
        )
        opened.append(connection)
        return connection

    yield one
    for connection in opened:
        connection.close()


@pytest.fixture
async def client(place):
    async with place.connect("row", connections=40) as opened:
        yield opened


async def blocked(place, user: str = "app") -> list:
    return [row for row in await sessions(place.server, user) if row[2] and "FOR UPDATE /*" in row[2]]


async def run(connection, statement: str) -> tuple:
    async with connection.cursor() as cursor:
        await cursor.execute(statement)
        return await cursor.fetchall()


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
async def test_the_lock_is_the_transaction_s_until_it_ends(client, connect, end, isolation):
    mine, other = await connect(autocommit=True), await connect(autocommit=True)
    for connection in (mine, other):
        await run(connection, f"SET SESSION TRANSACTION ISOLATION LEVEL {isolation}")
        await connection.begin()
        # A snapshot that is older than the row of the lock.
        await run(connection, "SELECT COUNT(*) FROM aiolock")
    async with client.lock("x", connection=mine) as nothing:
        assert nothing is None
        assert not await client.lock("x", connection=other).try_acquire()
        assert await client.lock("x").try_acquire() is None
        assert await client.lock("x", connection=mine).try_acquire()
    assert await client.lock("x", connection=other).locked()
    waiter = asyncio.create_task(client.lock("x", connection=other).acquire())
    await asyncio.sleep(0.05)
    assert not waiter.done()
    await getattr(mine, end)()
    async with asyncio.timeout(PATIENCE):
        await waiter
    await other.rollback()
    assert not await client.lock("x", connection=other).locked()


async def test_work_of_the_transaction_stays_when_the_wait_is_over(client, connect, place):
    holder, mine = await connect(), await connect()
    await run(mine, "CREATE TABLE IF NOT EXISTS work (n INT)")
    async with client.lock("x", connection=holder):
        await mine.begin()
        await run(mine, "INSERT INTO work VALUES (1)")
        with pytest.raises(AcquireTimeout):
            await client.lock("x", timeout=0.1, connection=mine).acquire()
        waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
        await until(lambda: blocked(place))
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert not await blocked(place)
        assert await run(mine, "SELECT COUNT(*) FROM work") == ((1,),)
        await mine.commit()
        assert await run(mine, "SELECT COUNT(*) FROM work") == ((1,),)
    await holder.rollback()


async def test_a_cancellation_that_races_the_commit_leaves_the_connection_in_step(client, connect, place):
    holder, mine = await connect(), await connect()
    for number in range(30):
        await client.lock("x", connection=holder).acquire()
        waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
        await until(lambda: blocked(place))
        ending = asyncio.create_task(holder.commit())
        await asyncio.sleep(number * 0.00005)
        waiter.cancel()
        await asyncio.wait([ending, waiter])
        assert await run(mine, f"SELECT {number}") == ((number,),)
        await mine.rollback()
    await client.lock("x", connection=holder).acquire()


async def test_nothing_is_sent_on_the_connection_but_to_take_the_lock(client, connect, place):
    mine = await connect()
    lock = client.lock("x", connection=mine)

    async def questions() -> int:
        rows = await run(mine, "SHOW SESSION STATUS LIKE 'Questions'")
        return int(rows[0][1])

    before = await questions()
    async with lock:
        await asyncio.sleep(2)
    # The lock's two statements and the question itself.
    assert await questions() - before == 3
    settings = await run(mine, "SELECT @@SESSION.wait_timeout, @@GLOBAL.wait_timeout")
    assert settings[0][0] == settings[0][1]


async def test_without_a_transaction_it_says_so(client, connect):
    connection = await connect(autocommit=True)
    with pytest.raises(RuntimeError, match="no transaction is open"):
        await client.lock("x", connection=connection).acquire()
    assert not await client.lock("x").locked()


async def test_transactions_that_wait_for_each_other_are_told(client, connect, place):
    first, second = await connect(), await connect()
    await client.lock("a", connection=first).acquire()
    await client.lock("b", connection=second).acquire()
    waiter = asyncio.create_task(client.lock("b", connection=first).acquire())
    await until(lambda: blocked(place))
    results = await asyncio.gather(
        waiter, client.lock("a", connection=second).acquire(), return_exceptions=True
    )
    assert [type(result) for result in results if result is not None] == [DeadlockDetected]


async def test_the_session_s_own_limit_for_waits_is_not_the_limit(client, connect, place):
    holder, mine = await connect(), await connect()
    await run(mine, "SET SESSION innodb_lock_wait_timeout = 1")
    await client.lock("x", connection=holder).acquire()
    waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
    await asyncio.sleep(1.5)
    assert not waiter.done()
    await holder.rollback()
    async with asyncio.timeout(PATIENCE):
        await waiter


async def test_a_wait_that_cannot_be_ended_closes_the_connection(client, connect, place):
    """Another account's statements are not ours to end."""
    await as_root(place.server, "GRANT SELECT, UPDATE ON test.aiolock TO bare@'%'")
    holder, mine = await connect(), await connect("bare")
    await client.lock("x", connection=holder).acquire()
    with pytest.raises(BackendUnavailable, match="your connection was closed"):
        await client.lock("x", timeout=0.1, connection=mine).acquire()
    assert mine.closed


async def test_the_current_database_of_the_connection_does_not_matter(client, connect, place):
    await as_root(place.server, "CREATE DATABASE IF NOT EXISTS elsewhere")
    await as_root(place.server, "CREATE TABLE IF NOT EXISTS elsewhere.aiolock LIKE test.aiolock")
    await as_root(place.server, "GRANT ALL ON elsewhere.* TO app@'%'")
    mine, other = await connect(), await connect()
    await run(mine, "USE elsewhere")
    for connection in (mine, other):
        await connection.begin()
    assert await client.lock("x", connection=mine).try_acquire()
    assert not await client.lock("x", connection=other).try_acquire()
    assert await client.lock("x").try_acquire() is None
    await mine.rollback()
    assert await client.lock("x", connection=other).try_acquire()


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
async def test_a_row_that_was_deleted_is_made_anew_for_a_transaction(client, connect, place, isolation):
    mine, other = await connect(), await connect()
    for connection in (mine, other):
        await run(connection, f"SET SESSION TRANSACTION ISOLATION LEVEL {isolation}")
    for _ in range(3):
        for connection in (mine, other):
            await connection.begin()
        assert await client.lock("x", connection=mine).try_acquire()
        assert not await client.lock("x", connection=other).try_acquire()
        await mine.rollback()
        await other.rollback()
        await as_root(place.server, f"DELETE FROM aiolock WHERE namespace = '{place.namespace}'")


async def test_a_server_that_ends_transactions_for_a_lock_that_waited_too_long_is_refused():
    with servers.MariaDB(extra=["--innodb-rollback-on-timeout=1"]) as server:
        connection = await aiomysql.connect(**{**server.admin, "db": "test"})
        try:
            async with aiolock.connect(server.url, mode="row") as client:
                await run(connection, "CREATE TABLE work (n INT)")
                lease = await client.lock("x").acquire()
                await connection.begin()
                await run(connection, "INSERT INTO work VALUES (1)")
                with pytest.raises(UnsafeBackend, match="innodb_rollback_on_timeout"):
                    await client.lock("x", connection=connection).try_acquire()
                await connection.commit()
                assert await run(connection, "SELECT n FROM work") == ((1,),)
                # Transactions of our own have nothing to lose.
                waiter = asyncio.create_task(client.lock("x", fair=True).acquire())
                await asyncio.sleep(0.1)
                await lease.release()
                async with asyncio.timeout(PATIENCE):
                    await (await waiter).release()
        finally:
            connection.close()


async def test_what_cannot_be_is_refused_before_any_io():
    client = aiolock.connect("mysql://u@h/db?mode=row")
    for connection in (object(), "connection", 7):
        with pytest.raises(ConfigError, match="aiomysql"):
            client.lock("x", connection=connection)
    for options in ({"ttl": 3}, {"fair": True}, {"max_hold": 3}, {"on_loss": "signal"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            client.lock("x", connection=object(), **options)
    for url in ("mysql://u@h/db", "mysql://u@h/db?mode=session", "memory://"):
        with pytest.raises(UnsupportedKind, match="mode=row"):
            aiolock.connect(url).lock("x", connection=object())
