"""The lock inside an application's own transaction: taken on its connection, gone with its commit or rollback."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets

import anyio
import asyncpg
import pytest

import aiolock
from aiolock import (
    AcquireTimeout,
    BackendUnavailable,
    ConfigError,
    DeadlockDetected,
    LockLost,
    UnsupportedKind,
)
from aiolock.backends import callers
from aiolock.backends.postgresql.caller import PostgreSQLConnection
from aiolock.backends.postgresql.transaction_lock import advisory_key
from aiolock.core.backend import Request
from aiolock.types import MUTEX
from tests.faults.staging import PATIENCE, until
from tests.servers import PgBouncer, PostgreSQL

WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"


@pytest.fixture
def namespace():
    return secrets.token_hex(6)


@pytest.fixture
async def connect(server):
    """Connections of the application."""
    opened = []

    async def one(url=server.url, **options):
        connection = await asyncpg.connect(url, **options)
        opened.append(connection)
        return connection

    yield one
    for connection in opened:
        connection.terminate()


@pytest.fixture
async def begin(connect):
    """Connections with an open transaction, which has done some work."""

    async def one(**options):
        connection = await connect(**options)
        await connection.execute("BEGIN")
        await connection.execute("CREATE TEMPORARY TABLE work (n int); INSERT INTO work VALUES (1)")
        return connection

    return one


@pytest.fixture
async def client(server, namespace):
    async with aiolock.connect(server.url, namespace=namespace, ttl=30) as opened:
        yield opened


@pytest.fixture
async def look(connect):
    """Whether transactions wait for a lock."""
    connection = await connect()

    async def waits():
        return await connection.fetchval(WAITING) > 0

    return waits


async def goes_on(connection) -> None:
    """The transaction is as it was, and answers come to their questions."""
    assert connection.is_in_transaction()
    for number in range(3):
        assert await connection.fetchval(f"SELECT {number}") == number
    assert await connection.fetchval("SELECT count(*) FROM work") == 1


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "READ UNCOMMITTED"])
async def test_the_lock_is_the_transaction_s_until_it_ends(client, connect, look, end, isolation):
    mine, other = await connect(), await connect()
    for connection in (mine, other):
        await connection.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        await connection.fetch("SELECT count(*) FROM pg_class")
    async with client.lock("x", connection=mine) as nothing:
        assert nothing is None
        assert not await client.lock("x", connection=other).try_acquire()
        assert await client.lock("x", connection=mine).try_acquire()
    lock = client.lock("x", connection=other)
    assert await lock.locked()
    waiter = asyncio.create_task(lock.acquire())
    await until(look)
    info = await lock.inspect()
    assert [holder.label for holder in info.holders] == [f"connection {mine.get_server_pid()}"]
    assert [holder.remaining for holder in info.holders] == [math.inf]
    assert [waiting.label for waiting in info.waiters] == [f"connection {other.get_server_pid()}"]
    await mine.execute(end)
    async with asyncio.timeout(PATIENCE):
        await waiter
    assert await client.lock("x", connection=other).try_acquire() is not False
    await other.execute("ROLLBACK")
    assert not await lock.locked()


async def test_each_turn_sees_what_the_turn_before_has_committed(client, connect, server):
    server.ask("CREATE TABLE turns (n int)")

    async def take_turns():
        connection = await connect()
        for _ in range(5):
            async with connection.transaction():
                # A transaction that has read before it locks is served as well.
                await connection.fetchval("SELECT count(*) FROM turns")
                async with client.lock("turns", timeout=PATIENCE, connection=connection):
                    number = await connection.fetchval("SELECT count(*) FROM turns")
                    await connection.execute("INSERT INTO turns VALUES ($1)", number)

    await asyncio.gather(*(take_turns() for _ in range(4)))
    assert server.ask("SELECT count(*), count(DISTINCT n) FROM turns") == [["20", "20"]]


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_transaction_that_would_not_see_the_holder_before_is_refused_without_a_wait(
    client, connect, begin, isolation, taken
):
    holder, mine = await begin(), await connect()
    if taken:
        await client.lock("x", connection=holder).acquire()
    await mine.execute(f"BEGIN ISOLATION LEVEL {isolation}")
    await mine.execute("CREATE TEMPORARY TABLE work (n int); INSERT INTO work VALUES (1)")
    lock = client.lock("x", timeout=2 * PATIENCE, connection=mine)
    async with asyncio.timeout(PATIENCE):
        for attempt in (lock.acquire, lock.try_acquire, lock.__aenter__):
            with pytest.raises(ConfigError, match=f"is {isolation}.*begin it as READ COMMITTED") as caught:
                await attempt()
            assert "or take the lock without connection=" in str(caught.value)
    # Nothing was taken, and the transaction goes on.
    assert await lock.locked() is taken
    await goes_on(mine)
    await mine.execute("COMMIT; BEGIN")
    if not taken:
        assert await lock.try_acquire()


async def test_it_is_a_family_of_its_own(client, begin):
    mine = await begin()
    async with client.lock("x", connection=mine), client.lock("x", timeout=PATIENCE):
        assert (await client.lock("x").inspect()).locked
    assert await client.lock("x", connection=mine).locked()
    assert not await client.lock("x").locked()
    assert [info.name for info in await client.locks()] == []


async def test_names_and_namespaces_are_different_locks(client, server, begin):
    mine, other = await begin(), await begin()
    async with aiolock.connect(server.url, namespace="another") as elsewhere:
        assert await client.lock("x", connection=mine).try_acquire()
        assert not await client.lock("x", connection=other).try_acquire()
        for lock in (client.lock("X", connection=other), client.lock("x ", connection=other)):
            assert await lock.try_acquire()
        assert await elsewhere.lock("x", connection=other).try_acquire()
        assert await client.lock("'; DROP TABLE x; --\0%s{}$1🔒", connection=other).try_acquire()


def test_the_key_is_the_documented_one():
    """Another program may compute it: SELECT of the page."""
    request = Request("order:42", MUTEX, 30.0, "label", fair=True)
    assert advisory_key("shop", request, "aiolock") == 6306435141258192021


async def test_work_of_the_transaction_stays_when_the_wait_is_over(client, begin, look):
    holder, mine = await begin(), await begin()
    async with client.lock("x", connection=holder):
        with pytest.raises(AcquireTimeout):
            await client.lock("x", timeout=0.1, connection=mine).acquire()
        await goes_on(mine)
        waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
        await until(look)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert not await look()
        await goes_on(mine)
    await holder.execute("ROLLBACK")
    # The transaction that gave up has not got it later.
    assert not await client.lock("x", connection=holder).locked()


async def test_a_wait_that_is_given_up_keeps_an_earlier_hold(client, begin, look):
    holder, mine = await begin(), await begin()
    await client.lock("mine", connection=mine).acquire()
    await client.lock("x", connection=holder).acquire()
    waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
    await until(look)
    waiter.cancel()
    await asyncio.wait([waiter])
    assert await client.lock("mine", connection=mine).locked()
    await goes_on(mine)


async def test_a_cancellation_that_races_the_commit_leaves_the_connection_in_step(client, begin, look):
    mine, holder = await begin(), await begin()
    for number in range(30):
        await client.lock("x", connection=holder).acquire()
        waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
        await until(look)
        ending = asyncio.create_task(holder.execute("COMMIT; BEGIN"))
        await asyncio.sleep(number * 0.00005)
        waiter.cancel()
        await asyncio.wait([ending, waiter])
        await goes_on(mine)
        await mine.execute("COMMIT; BEGIN")
    await client.lock("x", connection=holder).acquire()


@pytest.mark.parametrize("passes", range(6))
async def test_a_cancellation_before_the_server_waits_is_not_lost(client, begin, passes):
    """The server ignores a request to cancel while no statement is under way."""
    mine, holder = await begin(), await begin()
    await client.lock("x", connection=holder).acquire()
    for _ in range(20):
        waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
        for _ in range(passes * 5):
            await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait([waiter])
        assert waiter.cancelled()
        await goes_on(mine)


@pytest.mark.parametrize(
    "ending",
    [
        "COMMIT",
        "ROLLBACK",
        "COMMIT AND CHAIN",
        "COMMIT; BEGIN",
        "ROLLBACK TO SAVEPOINT before_the_lock",
    ],
)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("waited", [False, True])
async def test_a_lock_that_ends_inside_its_block_is_told_at_the_end_of_it(
    client, connect, look, ending, again, waited
):
    mine = await connect()
    await mine.execute("BEGIN; CREATE TABLE IF NOT EXISTS work (n int); SAVEPOINT before_the_lock")
    holder = await connect()
    if waited:
        await holder.execute("BEGIN")
        await client.lock("x", connection=holder).acquire()

    async def release():
        await until(look)
        await holder.execute("COMMIT")

    releasing = asyncio.create_task(release()) if waited else None
    with pytest.raises(LockLost, match="transaction") as caught:
        async with client.lock("x", connection=mine, timeout=PATIENCE):
            await mine.execute(ending)
            if again:
                # A lock that was taken anew is another hold: others may have been inside in between.
                if not mine.is_in_transaction():
                    await mine.execute("BEGIN")
                await client.lock("x", connection=mine).acquire()
    if releasing is not None:
        await releasing
    assert (caught.value.name, caught.value.reason) == ("x", "transaction")
    assert await mine.fetchval("SELECT 7") == 7


async def test_a_prepared_transaction_has_the_lock_until_its_end(namespace):
    with PostgreSQL(settings=["max_prepared_transactions = 5"]) as server:
        mine, other = [await asyncpg.connect(server.url) for _ in range(2)]
        async with aiolock.connect(server.url, namespace=namespace) as client:
            await mine.execute("BEGIN")
            with pytest.raises(LockLost):
                async with client.lock("x", connection=mine):
                    await mine.execute("PREPARE TRANSACTION 'x'")
            await other.execute("BEGIN")
            lock = client.lock("x", connection=other)
            assert not await lock.try_acquire()
            assert [holder.label for holder in (await lock.inspect()).holders] == ["a prepared transaction"]
            await mine.execute("COMMIT PREPARED 'x'")
            assert await lock.try_acquire()
        mine.terminate()
        other.terminate()


async def test_looking_back_does_not_disturb_the_next_transaction(client, begin):
    mine = await begin()
    with pytest.raises(LockLost):
        async with client.lock("x", connection=mine):
            await mine.execute("COMMIT; BEGIN; INSERT INTO work VALUES (2)")
    assert await mine.fetchval("SELECT count(*) FROM work") == 2
    await mine.execute("COMMIT")
    assert await mine.fetchval("SELECT count(*) FROM work") == 2


async def test_an_error_that_the_block_swallows_has_cost_the_lock(client, begin):
    """PostgreSQL gives the locks of a transaction back when it fails, not when it is rolled back."""
    mine, other = await begin(), await begin()
    with pytest.raises(LockLost):
        async with client.lock("x", connection=mine):
            with contextlib.suppress(asyncpg.PostgresError):
                await mine.execute("SELECT 1 / 0")
            assert await client.lock("x", connection=other).try_acquire()


async def test_the_end_of_the_connection_inside_a_block_is_told_as_well(client, begin, connect):
    mine, other = await begin(), await connect()
    with pytest.raises(LockLost):
        async with client.lock("x", connection=mine):
            await other.fetchval("SELECT pg_terminate_backend($1)", mine.get_server_pid())

            async def free():
                return not await client.lock("x", connection=other).locked()

            await until(free)
    with pytest.raises(BackendUnavailable, match="your connection is closed"):
        await client.lock("x", connection=mine).acquire()


async def test_savepoints_of_the_block_and_blocks_in_the_block_do_not_end_the_lock(client, connect, begin):
    mine, other = await connect(), await begin()
    transaction = mine.transaction()
    await transaction.start()
    await mine.execute("CREATE TEMPORARY TABLE work (n int); INSERT INTO work VALUES (1)")
    lock = client.lock("x", connection=mine)
    await mine.execute("SAVEPOINT before")
    async with lock, lock, client.lock("y", connection=mine), client.lock("x", connection=mine):
        await mine.execute("SAVEPOINT mine; INSERT INTO work VALUES (1)")
        async with client.lock("z", connection=mine):
            await mine.execute("SAVEPOINT deeper; ROLLBACK TO SAVEPOINT deeper")
        await mine.execute("ROLLBACK TO SAVEPOINT mine; RELEASE SAVEPOINT mine")
        # Its locks go to the transaction.
        await mine.execute("RELEASE SAVEPOINT before")
        async with mine.transaction():
            pass
        assert not await client.lock("x", connection=other).try_acquire()
    await goes_on(mine)
    await transaction.rollback()


async def test_an_exception_of_the_block_is_raised_as_it_is_and_nothing_is_sent(client, begin):
    mine = await begin()
    error = ValueError("of the block")
    with pytest.raises(ValueError, match="of the block") as caught:
        async with client.lock("x", connection=mine):
            await mine.execute("ROLLBACK")
            raise error
    assert caught.value is error


async def test_a_read_only_transaction_can_have_it(client, connect):
    mine, other = await connect(), await connect()
    for connection in (mine, other):
        await connection.execute("BEGIN READ ONLY")
    async with client.lock("x", connection=mine):
        assert not await client.lock("x", connection=other).try_acquire()


async def test_without_a_transaction_it_says_so_at_once(client, connect, begin):
    mine, holder = await connect(), await begin()
    for _ in range(2):
        # The second time, another transaction has it: there is nothing to wait for all the same.
        for taking in (
            client.lock("x", connection=mine).acquire(),
            client.lock("x", connection=mine).try_acquire(),
        ):
            with pytest.raises(RuntimeError, match="no transaction is open"):
                async with asyncio.timeout(PATIENCE):
                    await taking
        assert await client.lock("x", connection=holder).try_acquire()


async def test_a_transaction_that_has_failed_is_told_so(client, begin):
    mine = await begin()
    with pytest.raises(asyncpg.PostgresError):
        await mine.execute("SELECT 1 / 0")
    with pytest.raises(RuntimeError, match="the transaction of this connection has failed"):
        await client.lock("x", connection=mine).acquire()


async def test_a_connection_that_is_in_use_or_back_in_its_pool_is_told_so(client, server, begin):
    mine = await begin()
    busy = asyncio.create_task(mine.execute("SELECT pg_sleep(1)"))
    await asyncio.sleep(0.1)
    with pytest.raises(RuntimeError, match="cannot be used now"):
        await client.lock("x", connection=mine).acquire()
    await busy
    async with asyncpg.create_pool(server.url, min_size=1, max_size=1) as pool:
        async with (
            pool.acquire() as pooled,
            pooled.transaction(),
            client.lock("x", connection=pooled),
        ):
            assert not await client.lock("x", connection=mine).try_acquire()
        lock = client.lock("x", connection=pooled)
        with pytest.raises(RuntimeError, match="cannot be used now"):
            await lock.acquire()
        with pytest.raises(LockLost):
            async with pool.acquire() as pooled:
                await pooled.execute("BEGIN")
                async with client.lock("x", connection=pooled):
                    await pooled.execute("COMMIT")
                    await pool.release(pooled)


async def test_another_server_or_database_is_noticed_before_anything_is_locked(client, server, connect, own):
    server.ask("CREATE DATABASE elsewhere")
    for url in (own.url, server.url.removesuffix("/test") + "/elsewhere"):
        connection = await connect(url)
        await connection.execute("BEGIN")
        for taking in (
            client.lock("x", connection=connection).acquire(),
            client.lock("x", connection=connection).try_acquire(),
        ):
            with pytest.raises(ConfigError, match="must be to the server and the database"):
                await taking
        assert await connection.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0


@pytest.mark.parametrize("how", ["twice", "thrice", "scope"])
async def test_however_often_it_is_cancelled_the_connection_comes_back_in_step(client, begin, look, how):
    holder = await begin()
    await client.lock("x", connection=holder).acquire()
    mine = await begin()
    for passes in range(8):

        async def wait(scope: anyio.CancelScope) -> None:
            with scope:
                await client.lock("x", connection=mine).acquire()

        scope = anyio.CancelScope()
        waiter = asyncio.create_task(wait(scope))
        await until(look)
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
        assert not await look()


async def test_transactions_that_wait_for_each_other_are_told_and_go_on(client, begin, look):
    first, second = await begin(), await begin()
    await client.lock("a", connection=first).acquire()
    await client.lock("b", connection=second).acquire()
    waiter = asyncio.create_task(client.lock("b", connection=first).acquire())
    await until(look)
    other = asyncio.create_task(client.lock("a", connection=second).acquire())
    done, _ = await asyncio.wait([waiter, other], return_when=asyncio.FIRST_COMPLETED)
    [told] = done
    assert isinstance(told.exception(), DeadlockDetected)
    loser, winner = (first, other) if told is waiter else (second, waiter)
    await goes_on(loser)
    await loser.execute("ROLLBACK")
    async with asyncio.timeout(PATIENCE):
        await winner


async def test_waiters_are_served_in_their_order(client, begin, look):
    holder, waiters = await begin(), [await begin() for _ in range(5)]
    await client.lock("x", connection=holder).acquire()
    served = []

    async def wait(number, connection):
        async with client.lock("x", connection=connection):
            served.append(number)
        await connection.execute("COMMIT")

    tasks = []
    for number, connection in enumerate(waiters):
        tasks.append(asyncio.create_task(wait(number, connection)))

        async def queued(expected=number + 1):
            return len((await client.lock("x", connection=holder).inspect()).waiters) == expected

        await until(queued)
    await holder.execute("COMMIT")
    await asyncio.gather(*tasks)
    assert served == list(range(5))


@pytest.mark.parametrize("setting", ["lock_timeout", "statement_timeout"])
async def test_the_session_s_own_limit_for_waits_is_not_the_limit(client, begin, setting):
    holder, mine = await begin(), await begin()
    await mine.execute(f"SET LOCAL {setting} = '300ms'")
    await client.lock("x", connection=holder).acquire()
    waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
    await asyncio.sleep(1)
    assert not waiter.done()
    await holder.execute("ROLLBACK")
    async with asyncio.timeout(PATIENCE):
        await waiter
    await goes_on(mine)
    assert await mine.fetchval(f"SHOW {setting}") == "300ms"


async def test_the_driver_s_limit_for_statements_is_not_the_limit(client, begin, look):
    holder, mine = await begin(), await begin(command_timeout=0.3)
    await client.lock("x", connection=holder).acquire()
    waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
    await asyncio.sleep(1)
    assert await look()
    await holder.execute("ROLLBACK")
    async with asyncio.timeout(PATIENCE):
        await waiter
    await goes_on(mine)


async def test_a_session_without_patience_is_not_asked_all_the_time(client, begin, monkeypatch):
    holder, mine = await begin(), await begin()
    await mine.execute("SET LOCAL lock_timeout = '1ms'")
    await client.lock("x", connection=holder).acquire()
    tries = []
    wait = PostgreSQLConnection.wait
    monkeypatch.setattr(PostgreSQLConnection, "wait", lambda *words: tries.append(1) or wait(*words))
    with pytest.raises(AcquireTimeout):
        await client.lock("x", timeout=1, connection=mine).acquire()
    assert 0 < len(tries) < 30
    await goes_on(mine)


async def test_hostile_settings_of_the_caller_s_session_do_not_matter(client, connect, look):
    mine, holder = await connect(), await connect()
    await mine.execute(
        "CREATE SCHEMA IF NOT EXISTS evil; CREATE OR REPLACE FUNCTION evil.pg_try_advisory_xact_lock(bigint) "
        "RETURNS boolean LANGUAGE sql AS 'SELECT true'; SET search_path = evil, pg_catalog; SET TimeZone = 'Asia/Tokyo'; "
        "SET DateStyle = 'German'; SET IntervalStyle = 'iso_8601'; SET extra_float_digits = 0; "
        "SET standard_conforming_strings = off; SET quote_all_identifiers = on; SET bytea_output = 'escape'"
    )
    for connection in (mine, holder):
        await connection.execute("BEGIN")
    async with client.lock("x", connection=holder):
        assert not await client.lock("x", connection=mine).try_acquire()
        waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
        await until(look)
    await holder.execute("COMMIT")
    await waiter
    async with client.lock("x", connection=mine):
        pass


async def test_an_account_without_any_privilege_may_take_it_and_give_it_up(client, server, connect, look):
    server.ask("CREATE ROLE bare LOGIN")
    holder, mine = await connect(), await connect(server.url.replace("postgres@", "bare@"))
    for connection in (mine, holder):
        await connection.execute("BEGIN")
    async with client.lock("x", connection=mine):
        assert not await client.lock("x", connection=holder).try_acquire()
    await mine.execute("COMMIT; BEGIN")
    async with client.lock("x", connection=holder):
        waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
        await until(look)
        waiter.cancel()
        await asyncio.wait([waiter])
        assert await mine.fetchval("SELECT 1") == 1


async def test_a_wait_is_ended_even_if_the_client_has_lost_its_connections(client, begin, connect, look):
    holder, mine, other = await begin(), await begin(), await connect()
    await client.lock("x", connection=holder).acquire()
    waiter = asyncio.create_task(client.lock("x", connection=mine).acquire())
    await until(look)
    await other.fetch(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'aiolock'"
    )
    waiter.cancel()
    await asyncio.wait([waiter])
    assert waiter.cancelled()
    await goes_on(mine)


async def test_a_wait_that_does_not_end_closes_the_connection(client, begin, look, monkeypatch):
    """As the last resort: what came next on it would get the answer to our statement."""
    monkeypatch.setattr(callers, "GIVE_UP", 0.3)
    holder, other = await begin(), await begin()
    await client.lock("x", connection=holder).acquire()
    for cancelled in (False, True):
        mine = await begin()
        waiter = asyncio.create_task(client.lock("x", timeout=2, connection=mine).acquire())
        await until(look)
        with monkeypatch.context() as patch:

            async def nothing(_, left):
                """The server is not asked to end it."""

            patch.setattr(PostgreSQLConnection, "interrupt", nothing)
            if cancelled:
                waiter.cancel()
            await asyncio.wait([waiter])
        if cancelled:
            assert waiter.cancelled()
        else:
            with pytest.raises(BackendUnavailable, match="your connection was closed"):
                waiter.result()
        assert mine.is_closed()
        # The server does not notice while it waits.
        await other.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        )

        async def none():
            return not await look()

        await until(none)


async def test_who_closes_the_client_leaves_the_connection_to_its_owner(server, namespace, begin, look):
    holder, mine = await begin(), await begin()
    async with aiolock.connect(server.url, namespace=namespace) as client:
        lock = client.lock("x", connection=mine)
        await client.lock("x", connection=holder).acquire()
        waiter = asyncio.create_task(lock.acquire())
        await until(look)
        await client.aclose()
        with pytest.raises(RuntimeError, match="client was closed"):
            await waiter
        assert not await look()
        await goes_on(mine)
        with pytest.raises(RuntimeError, match="closed"):
            await lock.acquire()
    async with client:
        await holder.execute("ROLLBACK")
        await lock.acquire()


async def test_a_client_that_could_not_be_opened_at_first_has_it_later(own, namespace):
    own.stop()
    client = aiolock.connect(own.url, namespace=namespace)
    with pytest.raises(BackendUnavailable):
        await client.open()
    own.start()
    mine = await asyncpg.connect(own.url)
    async with client, mine.transaction(), client.lock("x", connection=mine):
        pass
    await mine.close()


async def test_a_block_goes_on_when_its_client_is_closed(server, namespace, begin):
    mine = await begin()
    client = aiolock.connect(server.url, namespace=namespace)
    await client.open()
    async with client.lock("x", connection=mine):
        await client.aclose()
    await goes_on(mine)


async def test_a_server_that_stands_still_is_not_waited_for(namespace):
    with PostgreSQL() as server:
        mine = await asyncpg.connect(server.url)
        await mine.execute("BEGIN")
        async with aiolock.connect(server.url, namespace=namespace, command_timeout=1) as client:
            assert await client.lock("y", connection=mine).try_acquire()
            server.freeze()
            try:
                async with asyncio.timeout(PATIENCE):
                    with pytest.raises(BackendUnavailable):
                        await client.lock("x", connection=mine).try_acquire()
            finally:
                server.thaw()
        mine.terminate()


async def test_what_cannot_be_is_refused_before_any_io():
    client = aiolock.connect("postgresql://u@h/db")
    for connection in (object(), "connection", 7):
        with pytest.raises(ConfigError, match="asyncpg"):
            client.lock("x", connection=connection)
    for options in (
        *({"ttl": 3}, {"fair": True}, {"max_hold": 3}, {"on_loss": "signal"}),
        *({"renew": False}, {"grace": 1}),
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            client.lock("x", connection=object(), **options)
    for url in ("sqlite:///tmp/x.db", "memory://"):
        with pytest.raises(UnsupportedKind, match="PostgreSQL"):
            aiolock.connect(url).lock("x", connection=object())


@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_a_transaction_through_pgbouncer_can_have_it_and_confirm(own, namespace, mode):
    with PgBouncer(own, mode) as pooler:
        mine, other = [
            await asyncpg.connect(pooler.url, statement_cache_size=0),
            await asyncpg.connect(own.url),
        ]
        await other.execute("BEGIN")
        async with aiolock.connect(own.url, namespace=namespace) as client:
            async with mine.transaction(), client.lock("x", connection=mine):
                assert not await client.lock("x", connection=other).try_acquire()
            async with client.lock("x", connection=other), mine.transaction():
                lock = client.lock("x", connection=mine)
                with pytest.raises(AcquireTimeout):
                    await lock.acquire(timeout=0.2)
                waiter = asyncio.create_task(lock.acquire())

                async def waits():
                    return bool((await lock.inspect()).waiters)

                await until(waits)
                waiter.cancel()
                await asyncio.wait([waiter])
                assert waiter.cancelled()
                assert await mine.fetchval("SELECT 1") == 1
                async with client.lock("y") as lease:
                    await lease.confirm(mine)
        mine.terminate()
        other.terminate()


# --- SQLAlchemy


@pytest.fixture
async def engine(server):
    sqlalchemy = pytest.importorskip("sqlalchemy.ext.asyncio", reason="pip install --group test")
    made = sqlalchemy.create_async_engine(server.url.replace("postgresql:", "postgresql+asyncpg:"))
    yield made
    await made.dispose()


async def test_a_connection_of_sqlalchemy_has_it_for_its_transaction(client, engine, begin, look):
    from sqlalchemy import text

    other = await begin()
    async with engine.connect() as connection:
        lock = client.lock("x", connection=connection)
        with pytest.raises(RuntimeError, match="no transaction is open"):
            await lock.acquire()
        async with connection.begin():
            # No statement was sent in it yet.
            async with lock:
                assert not await client.lock("x", connection=other).try_acquire()
                async with connection.begin_nested():
                    assert (await connection.execute(text("SELECT 7"))).scalar() == 7
            waiter = asyncio.create_task(client.lock("x", connection=other).acquire())
            await until(look)
        await waiter
        async with connection.begin():
            await connection.execute(text("CREATE TEMPORARY TABLE work (n int)"))
            waiter = asyncio.create_task(lock.acquire())
            await until(look)
            waiter.cancel()
            await asyncio.wait([waiter])
            assert waiter.cancelled()
            assert not await lock.try_acquire()
            assert (await connection.execute(text("SELECT count(*) FROM work"))).scalar() == 0


async def test_a_connection_of_sqlalchemy_with_another_isolation_is_refused(client, engine):
    from sqlalchemy.ext.asyncio import AsyncSession

    for isolation in ("REPEATABLE READ", "SERIALIZABLE"):
        other = engine.execution_options(isolation_level=isolation)
        async with other.connect() as connection, connection.begin():
            with pytest.raises(ConfigError, match=f"is {isolation}.*isolation_level='READ COMMITTED'"):
                await client.lock("x", connection=connection).acquire()
        async with AsyncSession(other) as session, session.begin():
            with pytest.raises(ConfigError, match=f"is {isolation}"):
                await client.lock("x", connection=session).acquire()
    async with engine.connect() as connection, connection.begin():
        assert await client.lock("x", connection=connection).try_acquire()


async def test_a_session_of_sqlalchemy_has_it_for_its_transaction(client, engine, begin):
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import AsyncSession

    other = await begin()
    async with AsyncSession(engine) as session:
        lock = client.lock("x", connection=session)
        with pytest.raises(RuntimeError, match="no transaction is open"):
            await lock.acquire()
        async with session.begin(), lock:
            assert (await session.execute(text("SELECT 7"))).scalar() == 7
            assert not await client.lock("x", connection=other).try_acquire()
        assert await client.lock("x", connection=other).try_acquire()
        await other.execute("COMMIT; BEGIN")
        async with session.begin():
            with pytest.raises(LockLost):
                async with lock:
                    await session.commit()
        await session.execute(text("SELECT 7"))
        with pytest.raises(LockLost):
            async with lock:
                await session.rollback()
                # The next transaction of the session is another one, whichever connection it has.
                await session.execute(text("SELECT 7"))


async def test_what_sqlalchemy_has_that_is_no_transaction_over_asyncpg_is_refused(client, engine):
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    with pytest.raises(ConfigError, match="asyncpg"):
        client.lock("x", connection=engine)
    async with engine.connect() as connection:
        connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
        async with connection.begin():
            with pytest.raises(RuntimeError, match="no transaction is open"):
                await client.lock("x", connection=connection).acquire()
    async with AsyncSession() as unbound, unbound.begin():
        with pytest.raises(RuntimeError, match="cannot be used now"):
            await client.lock("x", connection=unbound).acquire()
    pytest.importorskip("aiosqlite", reason="pip install --group test")
    other = create_async_engine("sqlite+aiosqlite://")
    async with other.connect() as connection, connection.begin():
        with pytest.raises(ConfigError, match="over asyncpg"):
            await client.lock("x", connection=connection).acquire()
    await other.dispose()
