"""`lease.confirm(connection)`: what a transaction writes is committed before a later holder, or not at all."""

from __future__ import annotations

import asyncio

import aiomysql
import pytest

import aiolock
from aiolock import (
    BackendUnavailable,
    ConfigError,
    DeadlockDetected,
    LockLost,
    UnsafeBackend,
    UnsupportedKind,
)
from aiolock.backends import callers
from aiolock.backends.mysql.caller import MySQLConnection
from aiolock.backends.mysql.confirmation import ConfirmingConnection
from tests import servers
from tests.backends.mysql.conftest import PASSWORD
from tests.backends.mysql.tools import as_root
from tests.faults.staging import PATIENCE, until

TABLES = {"lease": "aiolock", "rows": "aiolock_rows"}
CALLERS = {"lease": MySQLConnection, "rows": ConfirmingConnection}
SCHEMES = {"lease": "mysql:", "rows": "mysql+rows:"}


@pytest.fixture
async def connect(deployment):
    """Connections of the application, whose table is empty."""
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

    await as_root(deployment.server, "CREATE TABLE IF NOT EXISTS work (n INT)")
    await as_root(deployment.server, "DELETE FROM work")
    yield one
    for connection in opened:
        connection.close()


@pytest.fixture(params=["lease", "rows"])
def mode(request):
    return request.param


@pytest.fixture
async def client(deployment, mode):
    async with deployment.connect(mode, ttl=30, on_loss="signal") as opened:
        yield opened


@pytest.fixture
async def rival(deployment, mode):
    async with deployment.connect(mode, ttl=30) as opened:
        yield opened


async def run(connection, statement: str) -> tuple:
    async with connection.cursor() as cursor:
        await cursor.execute(statement)
        return await cursor.fetchall()


async def work(connection) -> int:
    [[count]] = await run(connection, "SELECT COUNT(*) FROM work")
    await connection.rollback()
    return count


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("kind", ["mutex", "write"])
async def test_no_other_client_enters_before_the_commit(client, rival, connect, kind, isolation):
    mine, other = await connect(), await connect()
    await run(mine, f"SET SESSION TRANSACTION ISOLATION LEVEL {isolation}")

    def lock(client):
        return client.lock("x") if kind == "mutex" else client.rwlock("x").write()

    lease = await lock(client).acquire()
    await mine.begin()
    await run(mine, "INSERT INTO work VALUES (1)")
    await lease.confirm(mine)

    async def take() -> None:
        # While the row is locked, that is refused, or takes its time.
        while True:
            try:
                assert await lock(rival).force_release()
            except BackendUnavailable:
                continue
            return

    taking, entering = asyncio.create_task(take()), asyncio.create_task(lock(rival).acquire())
    await asyncio.sleep(1)
    assert not taking.done()
    assert not entering.done()
    await mine.commit()
    async with asyncio.timeout(PATIENCE):
        await taking
        following = await entering
    assert await work(other) == 1
    await mine.begin()
    await run(mine, "INSERT INTO work VALUES (2)")
    with pytest.raises(LockLost):
        await lease.confirm(mine)
    await mine.rollback()
    assert lease.lost
    assert await work(other) == 1
    await following.release()


@pytest.mark.parametrize("kind", ["mutex", "write", "permit"])
async def test_a_transaction_that_outlasts_the_ttl_is_still_before_the_next_holder(
    deployment, rival, connect, kind, mode
):
    """Its hold was not renewed, and the time of the server is over: others wait for the row all the same."""
    mine, other = await connect(), await connect()

    def lock(client):
        return {
            "mutex": lambda: client.lock("x"),
            "write": lambda: client.rwlock("x").write(),
            "permit": lambda: client.semaphore("x", 1),
        }[kind]()

    async with deployment.connect(mode, ttl=2.5, on_loss="signal") as client:
        lease = await lock(client).acquire()
        await mine.begin()
        await lease.confirm(mine)
        entering = asyncio.create_task(lock(rival).acquire())
        await asyncio.sleep(4)
        assert not entering.done()
        await run(mine, "INSERT INTO work VALUES (1)")
        if mode == "rows":
            # The heartbeats of the client go on.
            assert lease.held
            leaving = asyncio.create_task(lease.release())
            await asyncio.sleep(0.5)
            assert not entering.done()
            await mine.commit()
            await leaving
        else:
            await mine.commit()
        async with asyncio.timeout(PATIENCE):
            await (await entering).release()
        assert await work(other) == 1


async def test_a_hold_of_every_kind_can_be_confirmed(client, rival, connect):
    mine, name = await connect(), "order:42 🔒"
    async with (
        client.lock(name) as lock,
        client.reentrant_lock("again") as outer,
        client.reentrant_lock("again") as inner,
        client.rwlock(name).read() as reader,
        rival.rwlock(name).read() as other_reader,
        client.rwlock("other").write() as writer,
        client.semaphore(name, 3) as permit,
        aiolock.lock_all(client.lock("a"), client.lock("b")) as joint,
        client.election(name).campaign() as term,
    ):
        await mine.begin()
        for lease in (lock, outer, inner, reader, writer, permit, joint, term, other_reader):
            await lease.confirm(mine)
        await mine.commit()


async def test_what_the_transaction_cannot_do_is_told(client, connect):
    mine = await connect(autocommit=True)
    async with client.lock("x") as lease:
        with pytest.raises(RuntimeError, match="no transaction is open"):
            await lease.confirm(mine)
        for connection in (None, object(), "connection"):
            with pytest.raises(ConfigError, match="aiomysql"):
                await lease.confirm(connection)
        with servers.MariaDB() as elsewhere:
            theirs = await aiomysql.connect(**{**elsewhere.admin, "db": "test"})
            await theirs.begin()
            with pytest.raises(ConfigError, match="must be to the server that the client"):
                await lease.confirm(theirs)
            theirs.close()
        # The database that is current does not matter.
        await mine.select_db("information_schema")
        await mine.begin()
        await lease.confirm(mine)
        await mine.commit()
        mine.close()
        with pytest.raises(BackendUnavailable):
            await lease.confirm(mine)
        assert lease.held


@pytest.mark.parametrize(("mode", "advice"), [("row", "connection="), ("session", "mode=lease")])
async def test_other_modes_have_no_row_to_confirm(deployment, connect, mode, advice):
    mine = await connect()
    await mine.begin()
    async with deployment.connect(mode) as client, client.lock("x") as lease:
        with pytest.raises(UnsupportedKind, match=advice):
            await lease.confirm(mine)


async def test_a_node_of_a_cluster_refuses(client, connect, monkeypatch, mode):
    mine = await connect()
    await mine.begin()
    async with client.lock("x") as lease:
        with monkeypatch.context() as patch:
            if mode == "rows":
                patch.setattr(client._backend.store, "galera", True)
            else:
                sessions = client._backend.sessions
                patch.setattr(sessions, "facts", sessions.facts._replace(across=True))
            with pytest.raises(UnsafeBackend, match="cluster"):
                await lease.confirm(mine)
        await lease.confirm(mine)
        await mine.rollback()


@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_a_row_that_is_locked_is_waited_for_and_the_wait_can_be_given_up(
    deployment, connect, how, mode
):
    mine, admin = await connect(), await connect("root")

    async def blocked() -> bool:
        rows = await as_root(deployment.server, "SELECT info FROM information_schema.processlist")
        return any("LOCK IN SHARE MODE" in (row[0] or "") for row in rows)

    options = {"ttl": 60, "command_timeout": 20 if how == "cancel" else 2}
    async with deployment.connect(mode, **options) as client, client.lock("x") as lease:
        for give_up in (True, False):
            await admin.begin()
            await run(admin, f"SELECT * FROM {TABLES[mode]} FOR UPDATE")
            await mine.begin()
            await run(mine, "INSERT INTO work VALUES (1)")
            confirming = asyncio.create_task(lease.confirm(mine))
            await until(blocked)
            if give_up and how == "cancel":
                confirming.cancel()
            elif not give_up:
                await admin.rollback()
            await asyncio.wait([confirming])
            if give_up and how == "cancel":
                assert confirming.cancelled()
            elif give_up:
                assert isinstance(confirming.exception(), BackendUnavailable)
            else:
                confirming.result()
            assert await run(mine, "SELECT COUNT(*) FROM work") == ((1,),)
            assert lease.held
            await admin.rollback()
            await lease.confirm(mine)
            await mine.rollback()


async def test_it_ends_in_time_on_a_server_that_does_not_end_the_wait(deployment, connect, monkeypatch, mode):
    monkeypatch.setattr(callers, "GIVE_UP", 10 * PATIENCE)
    monkeypatch.setattr(CALLERS[mode], "interrupt", lambda _, left: asyncio.sleep(0.01))
    mine, admin = await connect(), await connect("root")
    options = {"ttl": 2 * PATIENCE, "command_timeout": 2, "on_loss": "signal"}
    async with deployment.connect(mode, **options) as client, client.lock("x") as lease:
        await admin.begin()
        await run(admin, f"SELECT * FROM {TABLES[mode]} FOR UPDATE")
        await mine.begin()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(BackendUnavailable, match="your connection was closed"):
                await lease.confirm(mine)
        assert mine.closed
        await admin.rollback()


@pytest.mark.parametrize("kind", ["mutex", "write"])
async def test_a_deadlock_costs_the_transaction_and_not_the_lease(deployment, client, connect, kind, mode):
    mine, admin = await connect(), await connect("root")
    lease = await (client.lock("x") if kind == "mutex" else client.rwlock("x").write()).acquire()
    await run(mine, "INSERT INTO work VALUES (1)")
    await mine.commit()
    await admin.begin()
    # The server undoes the transaction that has changed less.
    await run(admin, f"INSERT INTO work VALUES {', '.join(['(2)'] * 500)}")
    await run(admin, f"SELECT * FROM {TABLES[mode]} FOR UPDATE")
    await mine.begin()
    await run(mine, "UPDATE work SET n = 3 WHERE n = 1 LIMIT 1")
    waiting = asyncio.create_task(run(admin, "UPDATE work SET n = 4 WHERE n = 1 LIMIT 1"))

    async def waits() -> bool:
        # The server does not renew this table while it is read more often than every 0.1 s.
        await asyncio.sleep(0.15)
        [[count]] = await as_root(
            deployment.server,
            "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
        )
        return int(count) > 0

    await until(waits)
    with pytest.raises(DeadlockDetected) as caught:
        await lease.confirm(mine)
    assert caught.value.cycle == ("x",)
    assert caught.value.__cause__.args[0] == 1213
    await waiting
    await admin.rollback()
    # All of it is undone, and the connection is in step.
    assert await run(mine, "SELECT n FROM work") == ((1,),)
    await mine.rollback()
    assert lease.held
    await mine.begin()
    await lease.confirm(mine)
    await mine.commit()
    await lease.release()
    assert not lease.lost


async def test_a_confirmation_that_is_too_late_to_ask_is_no_loss(client, connect, monkeypatch, mode):
    mine = await connect()
    check = CALLERS[mode].check

    async def late(caller, *args):
        await check(caller, *args)
        caller.leave()

    async with client.lock("x") as lease:
        await mine.begin()
        with monkeypatch.context() as patch:
            patch.setattr(CALLERS[mode], "check", late)
            with pytest.raises(BackendUnavailable, match="no answer within"):
                await lease.confirm(mine)
        assert lease.held
        await lease.confirm(mine)
        await mine.commit()


@pytest.mark.parametrize("kind", ["mutex", "write"])
async def test_no_other_task_of_the_client_enters_before_the_commit(client, connect, kind):
    mine, other = await connect(), await connect()
    lock = client.lock("x") if kind == "mutex" else client.rwlock("x").write()
    leases = [asyncio.create_task(lock.acquire()) for _ in range(3)]
    # The second has the lock from the first, with tokens that would do for the third as well.
    await (await leases[0]).release()
    lease = await leases[1]
    await mine.begin()
    await run(mine, "INSERT INTO work VALUES (1)")
    await lease.confirm(mine)
    leaving = asyncio.create_task(lease.release())
    await asyncio.sleep(0.5)
    assert not leases[2].done()
    await mine.commit()
    await leaving
    async with asyncio.timeout(PATIENCE):
        following = await leases[2]
    assert await work(other) == 1
    await following.release()


async def test_a_server_that_ends_transactions_for_a_row_that_waited_too_long_is_refused(mode):
    with servers.MariaDB(extra=["--innodb-rollback-on-timeout=1"]) as severe:
        mine = await aiomysql.connect(**{**severe.admin, "db": "test"})
        url = severe.url.replace("mysql:", SCHEMES[mode])
        async with aiolock.connect(url) as client, client.lock("x") as lease:
            await run(mine, "CREATE TABLE work (n INT)")
            await mine.begin()
            await run(mine, "INSERT INTO work VALUES (1)")
            with pytest.raises(UnsafeBackend, match="innodb_rollback_on_timeout"):
                await lease.confirm(mine)
            await mine.commit()
            assert await run(mine, "SELECT n FROM work") == ((1,),)
            assert lease.held
        mine.close()
