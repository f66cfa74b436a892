"""`lease.confirm(connection)`: what a transaction writes is committed before a later holder, or not at all."""

from __future__ import annotations

import asyncio
import secrets

import asyncpg
import pytest

import aiolock
from aiolock import (
    BackendRefused,
    BackendUnavailable,
    ConfigError,
    DeadlockDetected,
    LockLost,
    UnsafeBackend,
    UnsupportedKind,
)
from aiolock.backends import callers
from aiolock.backends.postgresql.caller import PostgreSQLConnection
from tests.faults.staging import PATIENCE, until


@pytest.fixture
def namespace():
    return secrets.token_hex(6)


@pytest.fixture
async def connect(server):
    """Connections of the application, whose table is empty."""
    opened = []
    server.ask("CREATE TABLE IF NOT EXISTS work (n int)", "TRUNCATE work")

    async def one(url=server.url, **options):
        connection = await asyncpg.connect(url, **options)
        opened.append(connection)
        return connection

    yield one
    for connection in opened:
        connection.terminate()


@pytest.fixture
async def client(server, namespace):
    async with aiolock.connect(server.url, namespace=namespace, ttl=30, on_loss="signal") as opened:
        yield opened


@pytest.fixture
async def rival(server, namespace):
    async with aiolock.connect(server.url, namespace=namespace, ttl=30) as opened:
        yield opened


async def work(connection):
    return await connection.fetchval("SELECT count(*) FROM work")


async def test_no_other_client_enters_before_the_commit(client, rival, connect):
    mine, other = await connect(), await connect()
    lease = await client.lock("x").acquire()
    async with mine.transaction():
        await mine.execute("INSERT INTO work VALUES (1)")
        await lease.confirm(mine)
        taking = asyncio.create_task(rival.lock("x").force_release())
        entering = asyncio.create_task(rival.lock("x").acquire())
        await asyncio.sleep(1)
        assert not taking.done()
        assert not entering.done()
    assert await taking
    async with asyncio.timeout(PATIENCE):
        following = await entering
    assert await work(other) == 1
    with pytest.raises(LockLost):
        async with mine.transaction():
            await mine.execute("INSERT INTO work VALUES (2)")
            await lease.confirm(mine)
    assert lease.lost
    assert await work(other) == 1
    await following.release()


async def test_no_other_task_of_the_client_enters_before_the_commit(client, connect):
    mine, other = await connect(), await connect()
    lock = client.lock("x")
    leases = [asyncio.create_task(lock.acquire()) for _ in range(3)]
    # The second has the lock from the first, with tokens that would do for the third as well.
    await (await leases[0]).release()
    lease = await leases[1]
    async with mine.transaction():
        await mine.execute("INSERT INTO work VALUES (1)")
        await lease.confirm(mine)
        leaving = asyncio.create_task(lease.release())
        await asyncio.sleep(0.5)
        assert not leases[2].done()
    await leaving
    async with asyncio.timeout(PATIENCE):
        following = await leases[2]
    assert await work(other) == 1
    await following.release()


async def test_a_dead_holder_s_transaction_is_still_before_the_next_holder(server, namespace, rival, connect):
    """It could not renew for longer than its ttl: others know that it is dead, and wait for its transaction."""
    mine, other = await connect(), await connect()
    async with aiolock.connect(
        server.url, namespace=namespace, ttl=2, command_timeout=10, on_loss="signal"
    ) as client:
        lease = await client.lock("x").acquire()
        async with mine.transaction():
            await lease.confirm(mine)
            await client._backend.store.aclose()
            entering = asyncio.create_task(rival.lock("x").acquire())
            await asyncio.sleep(3)
            assert not entering.done()
            await mine.execute("INSERT INTO work VALUES (1)")
        async with asyncio.timeout(PATIENCE):
            await (await entering).release()
        assert await work(other) == 1
        with pytest.raises(LockLost):
            lease.check()


async def test_a_hold_of_every_kind_can_be_confirmed(client, rival, connect):
    mine, name = await connect(), "order:42 🔒"
    election = client.election(name)
    async with (
        client.lock(name) as lock,
        client.lock(name + "fair", fair=True) as fair,
        client.reentrant_lock("again") as outer,
        client.reentrant_lock("again") as inner,
        client.rwlock(name).read() as reader,
        rival.rwlock(name).read() as other_reader,
        client.rwlock("other").write() as writer,
        client.semaphore(name, 3) as permit,
        aiolock.lock_all(client.lock("a"), client.lock("b")) as joint,
        election.campaign() as term,
        await client.lock("kept").acquire() as other,
        mine.transaction(),
    ):
        for lease in (lock, fair, outer, inner, reader, other_reader, writer, permit, joint, term, other):
            await lease.confirm(mine)
    async with mine.transaction():
        with pytest.raises(RuntimeError, match="was released"):
            await lock.confirm(mine)


async def test_a_part_of_several_that_is_lost_is_told(client, rival, connect):
    mine = await connect()
    with pytest.raises(LockLost):
        async with aiolock.lock_all(client.lock("a"), client.lock("b")) as joint, mine.transaction():
            assert await rival.lock("b").force_release()
            await joint.confirm(mine)


async def test_a_row_that_is_gone_or_foreign_is_no_hold(client, connect, server):
    mine = await connect()
    lease = await client.lock("x").acquire()
    server.ask("DELETE FROM aiolock")
    async with mine.transaction():
        with pytest.raises(LockLost):
            await lease.confirm(mine)
    lease = await client.lock("y").acquire()
    server.ask("UPDATE aiolock SET value = 'nonsense'")
    async with mine.transaction():
        with pytest.raises(UnsafeBackend, match="was not written by this version"):
            await lease.confirm(mine)
    server.ask("DELETE FROM aiolock")


async def test_a_hold_of_another_client_is_not_taken_for_its_own(client, connect, server):
    """Nothing was told to the client, and it believes that it holds the lock."""
    mine = await connect()
    lease = await client.lock("x").acquire()
    owner = lease._hold.validity.claim.member.id
    assert lease.held
    server.ask(
        "UPDATE aiolock SET value = convert_to(replace(convert_from(value, 'UTF8'), "
        f"'{owner}', '{owner[::-1]}'), 'UTF8') WHERE key LIKE '%/lock/x'"
    )
    async with mine.transaction():
        assert lease.held
        with pytest.raises(LockLost, match="revoked"):
            await lease.confirm(mine)
    assert lease.lost


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
@pytest.mark.parametrize("there", [True, False])
async def test_a_snapshot_that_is_too_old_is_no_loss(client, rival, connect, isolation, there):
    mine = await connect()
    if there:
        await (await rival.lock("x").acquire()).release()
    with pytest.raises(BackendUnavailable, match="snapshot of the transaction is older"):
        async with mine.transaction(isolation=isolation):
            await work(mine)
            lease = await client.lock("x").acquire()
            await lease.confirm(mine)
    assert lease.held
    async with mine.transaction(isolation=isolation):
        await work(mine)
        await lease.confirm(mine)
    await lease.release()


@pytest.mark.parametrize("fair", [False, True])
@pytest.mark.parametrize("isolation", ["read_committed", "repeatable_read", "serializable"])
async def test_a_transaction_from_before_a_hand_over_inside_the_client_is_not_confirmed_on_what_it_cannot_see(
    client, connect, server, isolation, fair
):
    """The holder before has committed without a confirmation of its own, and its hand-over wrote nothing to the row."""
    first, second = await connect(), await connect()
    await (await client.lock("x").acquire()).release()
    begun, inside = asyncio.Event(), asyncio.Event()

    async def turn(connection):
        count = await work(connection)
        await connection.execute("INSERT INTO work VALUES ($1)", count)

    async def before():
        async with client.lock("x", fair=fair):
            inside.set()
            await begun.wait()
            async with first.transaction():
                await turn(first)

    async def after():
        await inside.wait()
        transaction = second.transaction(isolation=isolation)
        await transaction.start()
        await work(second)
        begun.set()
        lease = await client.lock("x", fair=fair).acquire()
        try:
            await turn(second)
            await lease.confirm(second)
            await transaction.commit()
        except BaseException:
            await transaction.rollback()
            raise
        finally:
            await lease.release()

    (_, error) = await asyncio.gather(before(), after(), return_exceptions=True)
    if isolation == "read_committed":
        assert error is None
        assert server.ask("SELECT n FROM work ORDER BY n") == [["0"], ["1"]]
    else:
        assert isinstance(error, BackendUnavailable)
        assert ("snapshot of the transaction is older" if fair else "lock with fair=True") in str(error)
        assert server.ask("SELECT n FROM work") == [["0"]]


async def test_what_the_transaction_cannot_do_is_told(client, connect, server):
    mine = await connect()
    async with client.lock("x") as lease:
        with pytest.raises(RuntimeError, match="no transaction is open"):
            await lease.confirm(mine)
        for connection in (None, object(), "connection"):
            with pytest.raises(ConfigError, match="asyncpg"):
                await lease.confirm(connection)
        await mine.execute("BEGIN READ ONLY")
        with pytest.raises(BackendRefused, match="READ ONLY"):
            await lease.confirm(mine)
        with pytest.raises(RuntimeError, match="has failed"):
            await lease.confirm(mine)
        server.ask("CREATE ROLE few LOGIN")
        few = await connect(server.url.replace("postgres@", "few@"))
        await few.execute("BEGIN")
        with pytest.raises(BackendRefused, match="permission denied"):
            await lease.confirm(few)
        server.ask("GRANT SELECT, UPDATE ON aiolock TO few")
        await few.execute("ROLLBACK; BEGIN")
        await lease.confirm(few)
        await few.close()
        with pytest.raises(BackendUnavailable, match="your connection is closed"):
            await lease.confirm(few)
        assert lease.held


async def test_another_server_or_database_is_noticed_before_anything_is_locked(client, server, connect, own):
    server.ask("CREATE DATABASE elsewhere")
    async with client.lock("x") as lease:
        for url in (own.url, server.url.removesuffix("/test") + "/elsewhere"):
            connection = await connect(url)
            async with connection.transaction():
                with pytest.raises(ConfigError, match="must be to the server and the database"):
                    await lease.confirm(connection)
                assert await connection.fetchval("SELECT 1") == 1


async def test_servers_without_it_say_so():
    async with aiolock.connect("memory://") as client, client.lock("x") as lease:
        with pytest.raises(UnsupportedKind, match="fencing token"):
            await lease.confirm(object())


async def blocked(connection):
    return await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted") > 0


@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_a_row_that_is_locked_is_waited_for_and_the_wait_can_be_given_up(
    server, namespace, connect, how
):
    mine, admin, look = await connect(), await connect(), await connect()
    options = {"namespace": namespace, "ttl": 30, "command_timeout": 30 if how == "cancel" else 8}
    async with aiolock.connect(server.url, **options) as client, client.lock("x") as lease:
        for give_up in (True, False):
            await admin.execute("BEGIN")
            await admin.fetch("SELECT * FROM aiolock FOR UPDATE")
            await mine.execute("BEGIN; INSERT INTO work VALUES (1)")
            confirming = asyncio.create_task(lease.confirm(mine))
            await until(lambda: blocked(look))
            if give_up and how == "cancel":
                confirming.cancel()
            elif not give_up:
                await admin.execute("ROLLBACK")
            await asyncio.wait([confirming])
            if give_up and how == "cancel":
                assert confirming.cancelled()
            elif give_up:
                assert isinstance(confirming.exception(), BackendUnavailable)
            else:
                confirming.result()
            assert await work(mine) == 1
            assert lease.held
            await admin.execute("ROLLBACK")
            await lease.confirm(mine)
            await mine.execute("ROLLBACK")


async def test_it_ends_in_time_on_a_server_that_does_not_end_the_wait(
    server, namespace, connect, monkeypatch
):
    monkeypatch.setattr(callers, "GIVE_UP", 10 * PATIENCE)
    monkeypatch.setattr(PostgreSQLConnection, "interrupt", lambda _, left: asyncio.sleep(0.01))
    mine, admin = await connect(), await connect()
    options = {"namespace": namespace, "ttl": 2 * PATIENCE, "command_timeout": 2, "on_loss": "signal"}
    async with aiolock.connect(server.url, **options) as client, client.lock("x") as lease:
        await admin.execute("BEGIN")
        await admin.fetch("SELECT * FROM aiolock FOR UPDATE")
        await mine.execute("BEGIN")
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(BackendUnavailable, match="your connection was closed"):
                await lease.confirm(mine)
        assert mine.is_closed()
        await admin.execute("ROLLBACK")


async def test_a_deadlock_leaves_the_transaction_and_the_lease_as_they_were(client, connect):
    mine, other, look = await connect(), await connect(), await connect()
    # The one that looks first gives up.
    await mine.execute("SET deadlock_timeout = '10ms'")
    await other.execute("SET deadlock_timeout = '1min'; INSERT INTO work VALUES (1)")
    async with client.lock("x") as lease:
        await other.execute("BEGIN; SELECT FROM aiolock FOR UPDATE")
        await mine.execute("BEGIN; UPDATE work SET n = 2")
        waiting = asyncio.create_task(other.execute("UPDATE work SET n = 3"))
        await until(lambda: blocked(look))
        with pytest.raises(DeadlockDetected) as caught:
            await lease.confirm(mine)
        assert caught.value.cycle == ("x",)
        assert await mine.fetchval("SELECT n FROM work") == 2
        assert lease.held
        await mine.execute("COMMIT")
        await waiting
        await other.execute("ROLLBACK")
        await mine.execute("BEGIN")
        await lease.confirm(mine)
        await mine.execute("COMMIT")


@pytest.mark.parametrize("ttl", [4, 30])
async def test_a_transaction_that_stays_open_costs_no_other_lease(server, namespace, connect, ttl):
    """Others wait to queue up for its lock, and go on renewing what they hold."""
    mine = await connect()
    options = {"namespace": namespace, "on_loss": "signal", "command_timeout": 10}
    async with (
        aiolock.connect(server.url, ttl=30, **options) as client,
        aiolock.connect(server.url, ttl=ttl, **options) as rival,
    ):
        theirs = await rival.lock("y").acquire()
        lease = await client.lock("x").acquire()
        same = await client.lock("z", ttl=4).acquire()
        await mine.execute("BEGIN")
        await lease.confirm(mine)

        async def take_turn(lock) -> None:
            async with lock:
                pass

        waiters = [
            asyncio.create_task(take_turn(lock))
            for lock in (
                rival.rwlock("w").write(),
                rival.lock("x"),
                client.lock("x", fair=True),
            )
        ]
        await asyncio.sleep(7)
        assert [theirs.lost, same.lost, lease.lost] == [False, False, False]
        assert waiters[0].done()
        assert not await rival.lock("x").try_acquire()
        await mine.execute("COMMIT")
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            done, _ = await asyncio.wait(waiters)
        # One that could not queue up within its command timeout says so.
        assert {type(task.exception()) for task in done} <= {type(None), BackendUnavailable}
        assert waiters[0].exception() is None
        await theirs.release()
        await same.release()


async def test_sqlalchemy_s_transactions_can_be_confirmed_in(client, rival, server):
    pytest.importorskip("sqlalchemy", reason="pip install --group test")
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    server.ask("CREATE TABLE IF NOT EXISTS work (n int)", "TRUNCATE work")
    engine = create_async_engine(server.url.replace("postgresql:", "postgresql+asyncpg:"))
    async with client.lock("x") as lease:
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(text("INSERT INTO work VALUES (1)"))
            await lease.confirm(session)
        async with engine.connect() as connection:
            with pytest.raises(RuntimeError, match="no transaction is open"):
                await lease.confirm(connection)
            async with connection.begin():
                await lease.confirm(connection)
    lease = await client.lock("x").acquire()
    assert await rival.lock("x").force_release()
    with pytest.raises(LockLost):
        async with engine.begin() as connection:
            await connection.execute(text("INSERT INTO work VALUES (2)"))
            await lease.confirm(connection)
    async with engine.connect() as connection:
        assert (await connection.execute(text("SELECT n FROM work"))).all() == [(1,)]
    await engine.dispose()
