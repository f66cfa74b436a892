"""`lease.confirm(connection)`: what a transaction writes is committed before a later holder, or not at all."""

from __future__ import annotations

import asyncio

import aiomysql
import pytest

import aiolock
from aiolock import BackendUnavailable, ConfigError, LockLost, UnsafeBackend, UnsupportedKind
from tests import servers
from tests.backends.mysql.conftest import PASSWORD
from tests.backends.mysql.tools import as_root
from tests.faults.staging import PATIENCE, until


@pytest.fixture
async def connect(place):
    """Connections of the application, whose table is empty."""
    opened = []

    async def one(user: str = "app", **options):
        password = "" if user == "root" else PASSWORD
        connection = await aiomysql.connect(
            host=place.server.host, port=place.server.port, user=user, password=password, db="test", **options
        )
        opened.append(connection)
        return connection

    await as_root(place.server, "CREATE TABLE IF NOT EXISTS work (n INT)")
    await as_root(place.server, "DELETE FROM work")
    yield one
    for connection in opened:
        connection.close()


@pytest.fixture
async def client(place):
    async with place.connect(ttl=30, on_loss="signal") as opened:
        yield opened


@pytest.fixture
async def rival(place):
    async with place.connect(ttl=30) as opened:
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
    place, rival, connect, kind
):
    """Its hold was not renewed, and the time of the server is over: others wait for the row all the same."""
    mine, other = await connect(), await connect()

    def lock(client):
        return {
            "mutex": lambda: client.lock("x"),
            "write": lambda: client.rwlock("x").write(),
            "permit": lambda: client.semaphore("x", 1),
        }[kind]()

    async with place.connect(ttl=1, on_loss="signal") as client:
        lease = await lock(client).acquire()
        await mine.begin()
        await lease.confirm(mine)
        entering = asyncio.create_task(lock(rival).acquire())
        await asyncio.sleep(4)
        assert not entering.done()
        await run(mine, "INSERT INTO work VALUES (1)")
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
async def test_other_modes_have_no_row_to_confirm(place, connect, mode, advice):
    mine = await connect()
    await mine.begin()
    async with place.connect(mode) as client, client.lock("x") as lease:
        with pytest.raises(UnsupportedKind, match=advice):
            await lease.confirm(mine)


async def test_a_node_of_a_cluster_refuses(client, connect, monkeypatch):
    mine = await connect()
    await mine.begin()
    async with client.lock("x") as lease:
        with monkeypatch.context() as patch:
            sessions = client._backend.sessions
            patch.setattr(sessions, "site", sessions.site._replace(across=True))
            with pytest.raises(UnsafeBackend, match="cluster"):
                await lease.confirm(mine)
        await lease.confirm(mine)
        await mine.rollback()


@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_a_row_that_is_locked_is_waited_for_and_the_wait_can_be_given_up(place, connect, how):
    mine, admin = await connect(), await connect("root")

    async def blocked() -> bool:
        rows = await as_root(place.server, "SELECT info FROM information_schema.processlist")
        return any("LOCK IN SHARE MODE" in (row[0] or "") for row in rows)

    options = {"ttl": 60, "command_timeout": 20 if how == "cancel" else 2}
    async with place.connect(**options) as client, client.lock("x") as lease:
        for give_up in (True, False):
            await admin.begin()
            await run(admin, "SELECT * FROM aiolock FOR UPDATE")
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
