"""The lock inside an application's own transaction: taken on its connection, gone with its commit or rollback."""

from __future__ import annotations

import asyncio
import pickle
import re
import warnings

import aiomysql
import anyio
import pymysql.err
import pytest

import aiolock
from aiolock import (
    AcquireTimeout,
    BackendRefused,
    BackendUnavailable,
    ConfigError,
    DeadlockDetected,
    LockLost,
    UnsafeBackend,
    UnsupportedKind,
)
from aiolock.backends import callers
from aiolock.backends.mysql import transaction_lock
from aiolock.backends.mysql.errors import translate
from aiolock.backends.mysql.transaction_lock import CallerRowLock
from aiolock.errors import LockError
from aiolock.mysql import retry_on_conflict
from aiolock.types import Finding, Level
from tests import servers
from tests.backends.mysql.conftest import PASSWORD
from tests.backends.mysql.tools import Deaf, as_root, sessions
from tests.faults.staging import PATIENCE, until


@pytest.fixture
async def connect(deployment):
    """Connections of the application, which has the account of the client unless it says otherwise."""
    opened = []

    async def one(user: str = "app", **options):
        password = "" if user == "root" else PASSWORD
        connection = await aiomysql.connect(
            host=deployment.server.host,
            port=deployment.server.port,
            user=user,
            password=password,
            db="test",
            **options,
        )
        opened.append(connection)
        return connection

    yield one
    for connection in opened:
        connection.close()


@pytest.fixture
async def client(deployment):
    async with deployment.connect("row", connections=40) as opened:
        yield opened


async def blocked(deployment, user: str = "app") -> list:
    return [row for row in await sessions(deployment.server, user) if row[2] and "FOR UPDATE /*" in row[2]]


async def none_blocked(deployment) -> bool:
    return not await blocked(deployment)


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
        if await run(connection, "SHOW VARIABLES LIKE 'innodb_snapshot_isolation'"):
            # On in newer MariaDBs; with it such a transaction is refused, which a test below is about.
            await run(connection, "SET SESSION innodb_snapshot_isolation = OFF")
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


LOCKING = re.compile(r"\bFOR UPDATE\b|\bFOR SHARE\b|\bLOCK IN SHARE MODE\b")


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
async def test_the_first_read_after_the_lock_sees_what_the_holder_before_has_committed(
    client, connect, deployment, isolation, waits
):
    """InnoDB's snapshot begins with the first plain read of a table, and none of ours is one."""
    await as_root(deployment.server, "CREATE TABLE IF NOT EXISTS seen (n INT)")
    await as_root(deployment.server, "TRUNCATE seen")
    holder, mine = await connect(), await connect()
    await run(mine, f"SET SESSION TRANSACTION ISOLATION LEVEL {isolation}")
    sent: list[str] = []
    query = mine.query

    async def recorded(statement, *rest):
        sent.append(statement)
        return await query(statement, *rest)

    mine.query = recorded
    await holder.begin()
    await mine.begin()
    await client.lock("x", connection=holder).acquire()
    lock = client.lock("x", timeout=PATIENCE, connection=mine)
    assert not await lock.try_acquire()
    # A block, which sends something to find its lock again.
    waiter = asyncio.create_task(lock.__aenter__())
    if waits:
        await until(lambda: blocked(deployment))
    await run(holder, "INSERT INTO seen VALUES (1)")
    await holder.commit()
    await waiter
    assert sent
    reads = [statement for statement in sent if re.search(r"\bFROM\b", statement, re.IGNORECASE)]
    assert [statement for statement in reads if not LOCKING.search(statement)] == []
    assert any(LOCKING.search(statement) for statement in reads)
    assert await run(mine, "SELECT COUNT(*) FROM seen") == ((1,),)
    await lock.__aexit__(None, None, None)
    await mine.rollback()


async def test_work_of_the_transaction_stays_when_the_wait_is_over(client, connect, deployment):
    holder, mine = await connect(), await connect()
    await as_root(deployment.server, "CREATE TABLE IF NOT EXISTS work (n INT)")
    async with client.lock("x", connection=holder):
        await mine.begin()
        await run(mine, "INSERT INTO work VALUES (1)")
        with pytest.raises(AcquireTimeout):
            await client.lock("x", timeout=0.1, connection=mine).acquire()
        waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
        await until(lambda: blocked(deployment))
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert not await blocked(deployment)
        assert await run(mine, "SELECT COUNT(*) FROM work") == ((1,),)
        await mine.commit()
        assert await run(mine, "SELECT COUNT(*) FROM work") == ((1,),)
    await holder.rollback()


async def test_a_cancellation_that_races_the_commit_leaves_the_connection_in_step(
    client, connect, deployment
):
    holder, mine = await connect(), await connect()
    for number in range(30):
        await client.lock("x", connection=holder).acquire()
        waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
        await until(lambda: blocked(deployment))
        ending = asyncio.create_task(holder.commit())
        await asyncio.sleep(number * 0.00005)
        waiter.cancel()
        await asyncio.wait([ending, waiter])
        assert await run(mine, f"SELECT {number}") == ((number,),)
        await mine.rollback()
    await client.lock("x", connection=holder).acquire()


@pytest.mark.parametrize("autocommit", [True, False])
@pytest.mark.parametrize(
    "ending",
    [
        "COMMIT",
        "ROLLBACK",
        "COMMIT AND CHAIN",
        "CREATE TABLE {table} (a INT)",
        "ROLLBACK TO SAVEPOINT before_the_lock",
        "BEGIN",
    ],
)
async def test_a_lock_that_ends_inside_its_block_is_told_at_the_end_of_it(
    client, connect, ending, autocommit
):
    mine = await connect(autocommit=autocommit)
    await mine.begin()
    await run(mine, "SAVEPOINT before_the_lock")
    with pytest.raises(LockLost, match="savepoint") as caught:
        async with client.lock("x", connection=mine):
            await run(mine, ending.format(table=f"early{'_requests' * autocommit}"))
            # Others may be inside already, also with a transaction of ours.
            if not autocommit:
                await run(mine, "SELECT 1 FROM aiolock")
    assert (caught.value.name, caught.value.reason) == ("x", "transaction")
    assert await run(mine, "SELECT 7") == ((7,),)


async def test_the_end_of_the_connection_inside_a_block_is_told_as_well(client, connect, mariadb):
    mine = await connect()
    with pytest.raises(LockLost):
        async with client.lock("x", connection=mine):
            await as_root(mariadb, f"KILL {mine.thread_id()}")
            await until(lambda: free(client, "x"))


async def free(client, name: str) -> bool:
    return not await client.lock(name).locked()


async def test_savepoints_of_the_block_and_blocks_in_the_block_do_not_end_the_lock(client, connect, mariadb):
    mine = await connect()
    await as_root(mariadb, "CREATE TABLE IF NOT EXISTS work (n INT)")
    await mine.begin()
    lock = client.lock("x", connection=mine)
    async with lock, lock, client.lock("y", connection=mine), client.lock("x", connection=mine):
        await run(mine, "SAVEPOINT mine")
        await run(mine, "INSERT INTO work VALUES (1)")
        async with client.lock("z", connection=mine):
            await run(mine, "SAVEPOINT deeper")
            await run(mine, "INSERT INTO work VALUES (2)")
            await run(mine, "ROLLBACK TO SAVEPOINT deeper")
        await run(mine, "ROLLBACK TO SAVEPOINT mine")
        await run(mine, "RELEASE SAVEPOINT mine")
        assert await client.lock("x").try_acquire() is None
    await mine.rollback()


async def test_an_exception_of_the_block_is_raised_as_it_is_and_nothing_is_sent(client, connect):
    mine = await connect()
    error = ValueError("of the block")
    with pytest.raises(ValueError, match="of the block") as caught:
        async with client.lock("x", connection=mine):
            await mine.rollback()
            raise error
    assert caught.value is error


async def test_a_transaction_that_is_read_only_is_told_so(client, connect):
    mine = await connect()
    async with client.lock("x", connection=await connect()):
        pass
    await run(mine, "START TRANSACTION READ ONLY")
    with pytest.raises(BackendRefused, match="the transaction is READ ONLY"):
        await client.lock("x", connection=mine).acquire()
    await mine.rollback()


async def test_an_xa_transaction_has_the_lock_until_its_end(client, connect, deployment):
    mine = await connect(autocommit=True)
    await run(mine, f"XA START '{deployment.namespace}'")
    async with client.lock("x", connection=mine):
        await run(mine, f"XA END '{deployment.namespace}'")
    assert await client.lock("x").try_acquire() is None
    await run(mine, f"XA ROLLBACK '{deployment.namespace}'")
    assert await free(client, "x")


async def test_nothing_is_sent_on_the_connection_but_to_take_the_lock(client, connect, deployment):
    mine = await connect()
    lock = client.lock("x", connection=mine)

    async def questions() -> int:
        rows = await run(mine, "SHOW SESSION STATUS LIKE 'Questions'")
        return int(rows[0][1])

    before = await questions()
    async with lock:
        await asyncio.sleep(2)
    # The lock's two statements, its savepoint, the look at the end of the block, and the question itself.
    assert await questions() - before == 5
    before = await questions()
    await lock.acquire()
    assert await questions() - before == 3
    settings = await run(mine, "SELECT @@SESSION.wait_timeout, @@GLOBAL.wait_timeout")
    assert settings[0][0] == settings[0][1]


async def test_without_a_transaction_it_says_so_at_once(client, connect):
    mine, holder = await connect(autocommit=True), await connect()
    for _ in range(2):
        # The second time, somebody has it: there is nothing to wait for all the same.
        for taking in (
            client.lock("x", connection=mine).acquire(),
            client.lock("x", connection=mine).try_acquire(),
        ):
            with pytest.raises(RuntimeError, match="no transaction is open"):
                async with asyncio.timeout(PATIENCE):
                    await taking
        assert await client.lock("x", connection=holder).try_acquire()
    await holder.rollback()
    assert not await client.lock("x").locked()
    # A statement opens a transaction where autocommit is off, and the driver has not heard of any yet.
    async with mine.cursor(aiomysql.SSCursor) as cursor:
        await cursor.execute("SET autocommit = 0")
    assert await client.lock("x", connection=mine).try_acquire()
    assert await client.lock("x").try_acquire() is None
    await mine.rollback()


async def test_transactions_that_wait_for_each_other_are_told(client, connect, deployment):
    first, second = await connect(), await connect()
    await client.lock("a", connection=first).acquire()
    await client.lock("b", connection=second).acquire()
    waiter = asyncio.create_task(client.lock("b", connection=first).acquire())
    await until(lambda: blocked(deployment))
    results = await asyncio.gather(
        waiter, client.lock("a", connection=second).acquire(), return_exceptions=True
    )
    [error] = [result for result in results if result is not None]
    assert type(error) is DeadlockDetected
    assert error.cycle[0] in {"a", "b"}


async def test_the_session_s_own_limit_for_waits_is_not_the_limit(client, connect, deployment):
    holder, mine = await connect(), await connect()
    await run(mine, "SET SESSION innodb_lock_wait_timeout = 1")
    await client.lock("x", connection=holder).acquire()
    waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
    await asyncio.sleep(1.5)
    assert not waiter.done()
    await holder.rollback()
    async with asyncio.timeout(PATIENCE):
        await waiter


async def test_a_session_without_patience_is_not_asked_all_the_time(client, connect):
    holder, mine = await connect(), await connect()
    async with mine.cursor(Deaf) as cursor:
        # On MySQL that is a second.
        await cursor.execute("SET SESSION innodb_lock_wait_timeout = 0")
    await client.lock("x", connection=holder).acquire()
    before = int((await run(mine, "SHOW SESSION STATUS LIKE 'Questions'"))[0][1])
    with pytest.raises(AcquireTimeout):
        await client.lock("x", timeout=1, connection=mine).acquire()
    assert int((await run(mine, "SHOW SESSION STATUS LIKE 'Questions'"))[0][1]) - before < 60
    await holder.rollback()
    assert await client.lock("x", connection=mine).try_acquire()


async def begun(deployment, connection) -> None:
    """A transaction that has something to lose."""
    await as_root(deployment.server, "CREATE TABLE IF NOT EXISTS work (n INT)")
    await run(connection, "DELETE FROM work")
    await connection.commit()
    await connection.begin()
    await run(connection, "INSERT INTO work VALUES (1)")


async def goes_on(connection) -> None:
    """The transaction is as it was, and answers come to their questions."""
    assert connection.get_transaction_status()
    for number in range(3):
        assert await run(connection, f"SELECT {number}") == ((number,),)
    assert await run(connection, "SELECT COUNT(*) FROM work") == ((1,),)
    await connection.rollback()
    assert await run(connection, "SELECT COUNT(*) FROM work") == ((0,),)


@pytest.mark.parametrize("how", ["twice", "thrice", "scope"])
async def test_however_often_it_is_cancelled_the_connection_comes_back_in_step(
    client, connect, deployment, how
):
    holder, mine = await connect(), await connect()
    await client.lock("x", connection=holder).acquire()
    for passes in range(8):
        await begun(deployment, mine)

        async def wait(scope: anyio.CancelScope) -> None:
            with scope:
                await client.lock("x", connection=mine).acquire()

        scope = anyio.CancelScope()
        waiter = asyncio.create_task(wait(scope))
        await until(lambda: blocked(deployment))
        if how == "scope":
            scope.cancel()
        else:
            waiter.cancel()
            for _ in range(1 if how == "twice" else 2):
                for _ in range(passes):
                    await asyncio.sleep(0)
                waiter.cancel()
        await asyncio.wait([waiter])
        assert waiter.cancelled() is (how != "scope")
        # At once: nothing of ours may be on its way to the next statement.
        await goes_on(mine)
        assert not await blocked(deployment)
    await holder.rollback()


async def test_who_cannot_end_a_wait_does_not_begin_it(client, connect, deployment):
    """Another account's statements are not ours to end."""
    await as_root(deployment.server, "GRANT SELECT, UPDATE ON test.aiolock TO bare@'%'")
    await as_root(deployment.server, "GRANT SELECT, INSERT, DELETE, CREATE ON test.work TO bare@'%'")
    holder, mine = await connect(), await connect("bare")
    await begun(deployment, mine)
    await client.lock("x", connection=holder).acquire()
    for timeout in (PATIENCE, None):
        with pytest.raises(BackendRefused, match="another account"):
            await client.lock("x", timeout=timeout, connection=mine).acquire()
    assert not await client.lock("x", connection=mine).try_acquire()
    await holder.rollback()
    await client.lock("x", timeout=PATIENCE, connection=mine).acquire()
    assert await client.lock("x").try_acquire() is None
    await goes_on(mine)


async def test_without_room_for_a_connection_that_ends_waits_none_begins(connect, deployment):
    await as_root(deployment.server, "DROP USER IF EXISTS few@'%'")
    await as_root(
        deployment.server, f"CREATE USER few@'%' IDENTIFIED BY '{PASSWORD}' WITH MAX_USER_CONNECTIONS 2"
    )
    await as_root(
        deployment.server, "GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, DROP ON test.* TO few@'%'"
    )
    try:
        holder, mine = await connect(), await connect("few")
        url = deployment.url().replace("app:", "few:")
        async with aiolock.connect(url, namespace=deployment.namespace, mode="row", ttl=5) as client:
            async with client.lock("x", connection=holder):
                await begun(deployment, mine)
                for timeout in (PATIENCE, None):
                    with pytest.raises(BackendUnavailable, match="has no connection for that"):
                        await client.lock("x", timeout=timeout, connection=mine).acquire()
            await holder.rollback()
            await client.lock("x", timeout=PATIENCE, connection=mine).acquire()
            await goes_on(mine)
    finally:
        await as_root(deployment.server, "DROP USER few@'%'")


async def test_a_wait_is_ended_even_if_the_client_has_lost_its_connections(client, connect, deployment):
    holder, mine = await connect(), await connect()
    await client.lock("x", connection=holder).acquire()
    await begun(deployment, mine)
    waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
    await until(lambda: blocked(deployment))
    for number, _, _ in await sessions(deployment.server):
        if number not in (holder.thread_id(), mine.thread_id()):
            await as_root(deployment.server, f"KILL {number}")
    waiter.cancel()
    await asyncio.wait([waiter])
    assert waiter.cancelled()
    await goes_on(mine)
    await holder.rollback()


async def test_a_wait_that_does_not_end_closes_the_connection(client, connect, deployment, monkeypatch):
    """As the last resort: what came next on it would get the answer to our statement."""
    monkeypatch.setattr(callers, "GIVE_UP", 0.3)
    holder = await connect()
    await client.lock("x", connection=holder).acquire()
    for cancelled in (False, True):
        mine = await connect()
        waiter = asyncio.create_task(client.lock("x", timeout=2, connection=mine).acquire())
        await until(lambda: blocked(deployment))
        with monkeypatch.context() as patch:
            # Whom it asks to end the statement does so to nobody.
            patch.setattr(
                transaction_lock.MySQLConnection, "_end_statement", lambda _, control: control.run("DO 0")
            )
            if cancelled:
                waiter.cancel()
            await asyncio.wait([waiter])
        if cancelled:
            assert waiter.cancelled()
        else:
            with pytest.raises(BackendUnavailable, match="your connection was closed"):
                waiter.result()
        assert mine.closed
        # The server has not noticed.
        for number, _, _ in await blocked(deployment):
            await as_root(deployment.server, f"KILL {number}")
        await until(lambda: none_blocked(deployment))
    await holder.rollback()


async def test_who_closes_the_client_leaves_the_connection_to_its_owner(connect, deployment):
    holder, mine = await connect(), await connect()
    async with deployment.connect("row") as other, deployment.connect("row") as client:
        await other.lock("x", connection=holder).acquire()
        await begun(deployment, mine)
        waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
        await until(lambda: blocked(deployment))
        await client.aclose()
        with pytest.raises(RuntimeError, match="client was closed"):
            await waiter
        assert not await blocked(deployment)
        await goes_on(mine)


async def test_another_server_is_noticed_before_anything_is_locked_or_waited_for(client, connect):
    with servers.MariaDB() as elsewhere:
        theirs = [await aiomysql.connect(**{**elsewhere.admin, "db": "test"}) for _ in range(2)]
        try:
            async with aiolock.connect(elsewhere.url, mode="row") as there:
                # The row is missing there at first; then it is there, and free; then it is locked.
                for step in range(3):
                    for lock in (
                        client.lock("x", connection=theirs[0]),
                        client.lock("y", connection=theirs[0]),
                    ):
                        for taking in (lock.try_acquire(), lock.acquire()):
                            with pytest.raises(ConfigError, match="must be to the server that the client"):
                                async with asyncio.timeout(PATIENCE):
                                    await taking
                        assert not theirs[0].get_transaction_status()
                    if step:
                        await there.lock("x", connection=theirs[1]).acquire()
                    else:
                        async with there.lock("x"):
                            pass
                await theirs[1].rollback()
                assert await there.lock("x", connection=theirs[0]).try_acquire()
        finally:
            for connection in theirs:
                connection.close()


async def test_servers_of_different_versions_are_different_servers(client, connect, monkeypatch):
    """One has not the variable that the other says which one it is by."""
    lock = client.lock("x", connection=await connect())
    assert await lock.try_acquire()
    sessions = client._backend.sessions
    facts = sessions.facts
    with monkeypatch.context() as patch:
        prepare = CallerRowLock._prepare

        async def then(lock):
            where = await prepare(lock)
            sessions.facts = facts._replace(server="@@own_number")
            return where

        patch.setattr(CallerRowLock, "_prepare", then)
        with pytest.raises(ConfigError, match="must be to the server that the client"):
            await lock.try_acquire()
    # The client has to connect again, and comes to another one.
    sessions.main_now.abort()
    with pytest.raises(BackendUnavailable, match="another server than before"):
        await lock.try_acquire()
    assert await lock.try_acquire()
    assert sessions.facts == facts


async def test_a_row_that_is_never_found_is_an_error(client, connect, deployment):
    connection = await aiomysql.connect(**{**deployment.server.admin, "db": "test"})
    try:
        # Only this connection sees it, instead of the other.
        await run(connection, "CREATE TEMPORARY TABLE aiolock (id CHAR(40) PRIMARY KEY)")
        before = int((await run(connection, "SHOW SESSION STATUS LIKE 'Questions'"))[0][1])
        for taking in (
            client.lock("x", connection=connection).acquire(),
            client.lock("x", connection=connection).try_acquire(),
        ):
            with pytest.raises(BackendRefused, match="does not find it"):
                async with asyncio.timeout(PATIENCE):
                    await taking
        assert int((await run(connection, "SHOW SESSION STATUS LIKE 'Questions'"))[0][1]) - before < 20
        assert not await client.lock("x").locked()
    finally:
        connection.close()


async def test_a_server_that_numbers_connections_otherwise_is_refused(client, connect, monkeypatch):
    """A proxy in between may swap sessions; the number is a stranger's."""
    mine = await connect()
    monkeypatch.setattr(mine, "thread_id", lambda: 1)
    with pytest.raises(UnsafeBackend, match="proxy"):
        await client.lock("x", connection=mine).acquire()
    assert not await client.lock("x").locked()


@pytest.mark.parametrize("kind", [aiomysql.SSCursor, aiomysql.DictCursor, aiomysql.SSDictCursor])
async def test_any_kind_of_cursor_may_be_the_connection_s_own(client, connect, kind):
    mine, holder = await connect(cursorclass=kind), await connect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert await client.lock("x", connection=mine).try_acquire()
        await mine.rollback()
        async with client.lock("x", connection=holder):
            assert not await client.lock("x", connection=mine).try_acquire()
        await holder.rollback()
        async with client.lock("x", connection=mine, timeout=PATIENCE):
            assert await client.lock("x").try_acquire() is None
        await mine.rollback()


async def test_a_transaction_that_is_too_old_for_a_new_row_is_told_and_may_be_repeated():
    """With innodb_snapshot_isolation, which MySQL has not, the server undoes it as a whole."""
    with servers.MariaDB(extra=["--loose-innodb-snapshot-isolation=ON"]) as server:
        connection = await aiomysql.connect(**{**server.admin, "db": "test"})
        try:
            async with aiolock.connect(server.url, mode="row") as client:
                await run(connection, "CREATE TABLE work (n INT)")
                strict = bool(await run(connection, "SHOW VARIABLES LIKE 'innodb_snapshot_isolation'"))
                failures: list[LockError] = []

                async def work(name: str, *, first: bool = False) -> None:
                    await connection.begin()
                    lock = client.lock(name, connection=connection)
                    try:
                        if first:
                            await lock.acquire()
                        await run(connection, "INSERT INTO work VALUES (1)")
                        await run(connection, "SELECT * FROM work")
                        await lock.acquire()
                    except LockError as error:
                        failures.append(error)
                        raise
                    await connection.commit()

                await retry_on_conflict(lambda: work("x"))
                assert [type(error).__mro__[1] for error in failures] == [DeadlockDetected] * strict
                for error in failures:
                    assert "innodb_snapshot_isolation" in str(error)
                    assert str(pickle.loads(pickle.dumps(error))) == str(error)
                # The doctor says so, to those whom it may happen to.
                for mode, told in (("row", [Level.NOTE] * strict), ("lease", [])):
                    doctor = aiolock.connect(server.url, mode=mode)
                    found = [
                        one for one in await doctor.diagnose() if one.subject == "innodb_snapshot_isolation"
                    ]
                    assert [one.level for one in found] == told
                    assert all("retry_on_conflict" in one.advice for one in found)
                # So it is for transactions of the client's own, which are repeated.
                undone = translate(
                    pymysql.err.OperationalError(1020, "Record has changed since last read"), "x"
                )
                assert isinstance(undone, DeadlockDetected)
                # The row is there now; and who takes the lock first has no snapshot yet.
                await work("x")
                await work("y", first=True)
                assert len(failures) == strict
                await connection.begin()
                assert await run(connection, "SELECT COUNT(*) FROM work") == ((3,),)
        finally:
            connection.close()


async def test_the_current_database_of_the_connection_does_not_matter(client, connect, deployment):
    await as_root(deployment.server, "CREATE DATABASE IF NOT EXISTS elsewhere")
    await as_root(deployment.server, "CREATE TABLE IF NOT EXISTS elsewhere.aiolock LIKE test.aiolock")
    await as_root(deployment.server, "GRANT ALL ON elsewhere.* TO app@'%'")
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
async def test_a_row_that_was_deleted_is_made_anew_for_a_transaction(client, connect, deployment, isolation):
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
        await as_root(deployment.server, f"DELETE FROM aiolock WHERE namespace = '{deployment.namespace}'")


@pytest.fixture(scope="module")
def severe():
    """A server that ends a whole transaction when a lock in it was waited for too long."""
    with servers.MariaDB(extra=["--innodb-rollback-on-timeout=1"]) as server:
        yield server


async def test_a_server_that_ends_transactions_for_a_lock_that_waited_too_long_is_refused(severe):
    connection = await aiomysql.connect(**{**severe.admin, "db": "test"})
    try:
        async with aiolock.connect(severe.url, mode="row") as client:
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


async def test_the_doctor_says_so_of_such_a_server_in_the_row_mode_alone(deployment, severe):
    async def warnings_of(client: aiolock.Client) -> list[Finding]:
        return [one for one in await client.diagnose() if one.subject == "innodb_rollback_on_timeout"]

    [found] = await warnings_of(aiolock.connect(severe.url, mode="row"))
    assert found.level is Level.NOTE
    assert "connection= is refused" in found.text
    assert "restart" in found.advice
    assert await warnings_of(aiolock.connect(severe.url, mode="lease")) == []
    [found] = await warnings_of(deployment.connect("row"))
    assert found.level is Level.OK


async def test_what_cannot_be_is_refused_before_any_io():
    client = aiolock.connect("mysql://u@h/db?mode=row")
    for connection in (object(), "connection", 7):
        with pytest.raises(ConfigError, match="aiomysql"):
            client.lock("x", connection=connection)
    for options in (
        *({"ttl": 3}, {"fair": True}, {"max_hold": 3}, {"on_loss": "signal"}),
        *({"renew": False}, {"grace": 1}),
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            client.lock("x", connection=object(), **options)
    for url in ("mysql://u@h/db", "mysql://u@h/db?mode=session", "memory://"):
        with pytest.raises(UnsupportedKind, match="mode=row"):
            aiolock.connect(url).lock("x", connection=object())
