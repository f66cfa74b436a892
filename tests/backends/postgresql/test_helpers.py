"""Optimistic locking, the fencing check and purging: the helpers of `aiolock.postgresql`."""

from __future__ import annotations

import asyncio
import decimal
import secrets
from random import Random

import asyncpg
import pytest

import aiolock
from aiolock import BackendUnavailable, ConfigError, DeadlockDetected, UnsupportedKind
from aiolock.postgresql import (
    Conflict,
    check_purge,
    compare_and_set,
    ddl,
    fenced_update,
    purge,
    retry_on_conflict,
)

TOKEN = 1_795_404_909_151_308
"""As they are: a time in µs."""


@pytest.fixture
async def connect(server):
    """Connections of the application, with one table."""
    server.ask(
        "CREATE TABLE orders (id int PRIMARY KEY, state varchar(20), n int NOT NULL DEFAULT 0, "
        "version int NOT NULL DEFAULT 0, fence_token bigint NOT NULL DEFAULT 0)",
        "INSERT INTO orders (id, state) VALUES (1, 'new'), (2, 'new')",
    )
    opened = []

    async def one():
        connection = await asyncpg.connect(server.url)
        opened.append(connection)
        return connection

    yield one
    for connection in opened:
        connection.terminate()
    server.ask("DROP TABLE orders")


async def read(connection, columns="state, version, fence_token", number=1):
    return tuple(await connection.fetchrow(f"SELECT {columns} FROM orders WHERE id = {number}"))


async def test_a_version_that_was_read_can_be_changed_once(connect):
    connection = await connect()
    assert await compare_and_set(connection, "orders", {"id": 1}, 0, {"state": "paid"})
    assert not await compare_and_set(connection, "public.orders", {"id": 1}, 0, {"state": "void"})
    assert await read(connection) == ("paid", 1, 0)
    # Setting what is there already is a change as well: the version counts it.
    assert await compare_and_set(connection, "orders", {"id": 1, "state": "paid"}, 1, {"state": "paid"})
    assert not await compare_and_set(connection, "orders", {"id": 99}, 0, {"state": "paid"})
    assert (await read(connection, number=2))[1] == 0


async def test_counting_by_many_loses_no_step(connect):
    async def step(connection) -> None:
        n, version = await read(connection, "n, version")
        if not await compare_and_set(connection, "orders", {"id": 1}, version, {"n": n + 1}):
            raise Conflict

    async def worker() -> None:
        connection = await connect()
        for _ in range(10):
            await retry_on_conflict(lambda: step(connection), attempts=500, pause=0.001, longest=0.01)

    await asyncio.gather(*(worker() for _ in range(5)))
    assert await read(await connect(), "n, version") == (50, 50)


async def test_a_later_token_shuts_out_an_earlier_one(connect):
    connection = await connect()
    assert await fenced_update(connection, "orders", {"id": 1}, {"state": "b"}, token=20)
    assert not await fenced_update(connection, "orders", {"id": 1}, {"state": "a"}, token=10)
    assert await read(connection) == ("b", 0, 20)
    # The same holder again, also when it changes nothing.
    assert await fenced_update(connection, "orders", {"id": 1}, {"state": "b"}, token=20)
    assert await fenced_update(connection, "orders", {"id": 1}, {"state": "c"}, token=2**63 - 1)
    assert not await fenced_update(connection, "orders", {"id": 99}, {"state": "c"}, token=2**63 - 1)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_a_row_that_changed_under_a_transaction_is_a_conflict(connect, isolation):
    old, new = await connect(), await connect()
    seen: list[tuple] = []

    async def step() -> None:
        async with old.transaction(isolation=isolation):
            n, version = await read(old, "n, version")
            seen.append((n, version))
            if len(seen) == 1:
                assert await compare_and_set(new, "orders", {"id": 1}, version, {"n": n + 1})
            if not await compare_and_set(old, "orders", {"id": 1}, version, {"n": n + 1}):
                raise Conflict("orders 1")

    await retry_on_conflict(step, attempts=3, pause=0.001)
    assert seen == [(0, 0), (1, 1)]
    assert await read(new, "n, version") == (2, 2)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_a_late_write_is_an_error_where_the_snapshot_shows_its_own_token(connect, isolation):
    """Neither accepted nor silently based on the row as it was."""
    old, new = await connect(), await connect()
    assert await fenced_update(old, "orders", {"id": 1}, {"state": "a"}, token=10)
    for token in (10, 30):
        with pytest.raises(asyncpg.SerializationError):
            async with old.transaction(isolation=isolation):
                assert (await read(old))[2] < 30
                assert await fenced_update(new, "orders", {"id": 1}, {"state": "b"}, token=20)
                await fenced_update(old, "orders", {"id": 1}, {"state": "c"}, token=token)
        assert await read(new) == ("b", 0, 20)


async def test_a_late_write_is_refused_also_beside_a_write_that_is_not_committed_yet(connect):
    old, new = await connect(), await connect()
    async with new.transaction():
        assert await fenced_update(new, "orders", {"id": 1}, {"state": "b"}, token=20)
        late = asyncio.create_task(fenced_update(old, "orders", {"id": 1}, {"state": "a"}, token=10))
        await asyncio.sleep(0.2)
        assert not late.done()
    assert not await late
    assert await read(old) == ("b", 0, 20)


async def test_a_deadlock_of_the_server_is_tried_again(connect):
    first, second = await connect(), await connect()
    met = asyncio.Barrier(2)
    tries: list[tuple[int, int]] = []

    async def both(connection, one: int, other: int) -> None:
        tries.append((one, other))
        async with connection.transaction():
            await connection.execute(f"UPDATE orders SET n = n + 1 WHERE id = {one}")
            if tries.count((one, other)) == 1:
                await met.wait()
            await connection.execute(f"UPDATE orders SET n = n + 1 WHERE id = {other}")

    async with asyncio.timeout(60):
        await asyncio.gather(
            retry_on_conflict(lambda: both(first, 1, 2)), retry_on_conflict(lambda: both(second, 2, 1))
        )
    assert len(tries) > 2
    assert await read(first, "n") == await read(first, "n", 2) == (2,)


@pytest.mark.parametrize("kind", ["smallint", "int", "real", "numeric(20,-3)"])
async def test_a_column_that_does_not_keep_a_token_is_an_error_and_writes_nothing(connect, kind):
    connection = await connect()
    await connection.execute(f"ALTER TABLE orders ADD mark {kind} NOT NULL DEFAULT 0")
    with pytest.raises(ConfigError, match=r"column 'mark' cannot hold tokens.*bigint NOT NULL"):
        await fenced_update(connection, "orders", {"id": 1}, {"state": "b"}, token=TOKEN, column="mark")
    async with connection.transaction():
        with pytest.raises(ConfigError, match=r"column 'mark' cannot hold tokens"):
            async with connection.transaction():
                await fenced_update(
                    connection, "orders", {"id": 1}, {"state": "b"}, token=TOKEN + 1, column="mark"
                )
    assert [float(number) for number in await read(connection, "mark")] == [0]
    assert (await read(connection))[0] == "new"


@pytest.mark.parametrize(
    "kind", ["bigint", "numeric(20)", "numeric(20, 2)", "numeric", "text", "varchar(32)"]
)
async def test_a_column_that_is_large_enough_has_the_token(connect, kind):
    connection = await connect()
    await connection.execute(f"ALTER TABLE orders ADD mark {kind} NOT NULL DEFAULT '0'")
    options = {"column": "mark"}
    assert await fenced_update(connection, "orders", {"id": 1}, {"state": "b"}, token=TOKEN, **options)
    assert not await fenced_update(
        connection, "orders", {"id": 1}, {"state": "a"}, token=TOKEN - 1, **options
    )
    # Not only what was there first counts.
    assert await fenced_update(connection, "orders", {"id": 1}, {"state": "c"}, token=TOKEN + 1, **options)
    assert not await fenced_update(connection, "orders", {"id": 1}, {"state": "d"}, token=TOKEN, **options)
    state, mark = await read(connection, "state, mark")
    assert (state, decimal.Decimal(mark)) == ("c", TOKEN + 1)
    assert not await compare_and_set(connection, "orders", {"id": 1}, TOKEN, {"n": 1}, **options)
    assert await compare_and_set(connection, "orders", {"id": 1}, TOKEN + 1, {"n": 1}, **options)


async def test_a_version_that_has_come_to_its_end_is_an_error_and_not_the_same_again(connect):
    connection = await connect()
    await connection.execute("ALTER TABLE orders ADD changes smallint NOT NULL DEFAULT 32766")
    assert await compare_and_set(connection, "orders", {"id": 1}, 32766, {"n": 1}, column="changes")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"column 'changes' cannot hold the version 32768.*bigint"):
            await compare_and_set(connection, "orders", {"id": 1}, 32767, {"n": 2}, column="changes")
    with pytest.raises(ConfigError, match="cannot hold the version"):
        await compare_and_set(connection, "orders", {"id": 1}, 2**63 - 1, {"n": 2})
    assert await read(connection, "n, changes") == (1, 32767)


async def test_an_error_about_another_column_is_the_driver_s_own(connect):
    connection = await connect()
    with pytest.raises(asyncpg.DataError):
        await fenced_update(connection, "orders", {"id": 1}, {"n": 2**40}, token=5)
    with pytest.raises(asyncpg.StringDataRightTruncationError):
        await compare_and_set(connection, "orders", {"id": 1}, 0, {"state": "x" * 21})
    with pytest.raises(asyncpg.UndefinedTableError):
        await compare_and_set(connection, "Orders", {"id": 1}, 0, {"n": 1})


async def test_a_holder_that_lost_its_lock_writes_nothing(connect, server):
    connection, namespace = await connect(), secrets.token_hex(6)
    async with (
        aiolock.connect(server.url, namespace=namespace) as client,
        aiolock.connect(server.url, namespace=namespace) as rival,
    ):
        old = await client.lock("orders:1").acquire()
        assert await rival.lock("orders:1").force_release()
        new = await rival.lock("orders:1").acquire()
        assert await fenced_update(connection, "orders", {"id": 1}, {"state": "new"}, token=new.token)
        assert not await fenced_update(connection, "orders", {"id": 1}, {"state": "old"}, token=old.token)
        await new.release()
        await old.release()


async def test_a_conflict_is_told_from_any_other_failure():
    def wrapped(error: Exception) -> BackendUnavailable:
        unavailable = BackendUnavailable("x")
        unavailable.__cause__ = error
        return unavailable

    class OfSqlalchemy(Exception):
        orig = asyncpg.SerializationError("x")

    for failure, attempts in (
        (DeadlockDetected(["x", "y"]), 3),
        (Conflict("x"), 3),
        (asyncpg.DeadlockDetectedError("x"), 3),
        (asyncpg.LockNotAvailableError("x"), 3),
        (wrapped(asyncpg.SerializationError("x")), 3),
        (OfSqlalchemy(), 3),
        (wrapped(OSError()), 1),
        (asyncpg.UniqueViolationError("x"), 1),
        (ValueError("40001"), 1),
    ):
        tries = []

        async def work(failure=failure, tries=tries):
            tries.append(failure)
            raise failure

        with pytest.raises(type(failure)) as caught:
            await retry_on_conflict(work, attempts=3, pause=0.001, random=Random(1))
        assert caught.value is failure
        assert len(tries) == attempts
    with pytest.raises(ConfigError, match="attempts"):
        await retry_on_conflict(work, attempts=0)


async def test_a_snapshot_that_is_too_old_to_confirm_in_is_a_conflict(connect, server):
    connection = await connect()
    async with aiolock.connect(server.url, namespace=secrets.token_hex(6)) as client:
        leases = []

        async def work() -> None:
            async with connection.transaction(isolation="repeatable_read"):
                await read(connection)
                if not leases:
                    leases.append(await client.lock("x").acquire())
                await leases[0].confirm(connection)

        await retry_on_conflict(work)
        await leases[0].release()


async def test_what_cannot_be_meant_is_refused():
    for table, key, values in (
        ("orders; DROP", {"id": 1}, {"n": 1}),
        ("orders", {"id = 1 OR 1": 1}, {"n": 1}),
        ("orders", {"id": 1}, {'n"': 1}),
        ("orders", {}, {"n": 1}),
        (None, {"id": 1}, {"n": 1}),
        ("a.b.c", {"id": 1}, {"n": 1}),
        ("1orders", {"id": 1}, {"n": 1}),
        ("orders", {"id": None}, {"n": 1}),
        ("orders", {"id": 1}, ["n"]),
        ("orders", {"id": 1}, {5: 1}),
    ):
        with pytest.raises(ConfigError):
            await compare_and_set(None, table, key, 0, values)
        with pytest.raises(ConfigError):
            await fenced_update(None, table, key, values, token=1)
    for version in (None, "1", True, 1.0):
        with pytest.raises(ConfigError, match="version must be the whole number"):
            await compare_and_set(None, "orders", {"id": 1}, version, {"n": 1})
    for token in (None, True, 1.0, -1, 2**63):
        with pytest.raises(ConfigError, match="token must be"):
            await fenced_update(None, "orders", {"id": 1}, {"n": 1}, token=token)
    for name in ("version", "VERSION"):
        with pytest.raises(ConfigError, match="must not name the column 'version'"):
            await compare_and_set(None, "orders", {"id": 1}, 0, {"n": 1, name: 100})
    with pytest.raises(ConfigError, match="asyncpg"):
        await compare_and_set(object(), "orders", {"id": 1}, 0, {"n": 1})


# --- the table


def test_the_statements_make_the_table_that_clients_take(own):
    for table, option in (("aiolock", ""), ("locks.Other", "?table=locks.Other&schema=check")):
        own.ask("CREATE SCHEMA IF NOT EXISTS locks", *filter(None, map(str.strip, ddl(table).split(";\n"))))
        own.ask(*filter(None, map(str.strip, ddl(table).split(";\n"))))

        async def use(option=option):
            async with aiolock.connect(own.url + option) as client, client.lock("x"):
                pass

        asyncio.run(use())
    for table in ("", "a.b.c", 'x"', "1x", "x" * 49, None):
        with pytest.raises(ConfigError, match="table must be"):
            ddl(table)


async def test_a_purge_deletes_what_was_not_used_and_lowers_no_token(own):
    namespace = secrets.token_hex(6)
    async with aiolock.connect(own.url, namespace=namespace) as client:
        async with client.lock("old") as lease:
            before = lease.token
        held = await client.lock("held").acquire()
        for idle in (0, 60, None, True, float("nan"), 1e10):
            with pytest.raises(ConfigError, match="idle"):
                await purge(client, idle=idle)
        assert await purge(client, idle=3600) == 0
        own.ask("UPDATE aiolock SET expires = expires - interval '2 days' WHERE key LIKE '%/old'")
        for other in (f"{namespace}0", namespace[:-1]):
            async with aiolock.connect(own.url, namespace=other) as beside:
                assert await purge(beside, idle=3600) == 0
        assert await purge(client, idle=3600) == 1
        assert own.ask("SELECT count(*) FROM aiolock WHERE key LIKE '%/old'") == [["0"]]
        async with client.lock("old") as lease:
            assert lease.token > before
        held.check()
        await held.release()
    with pytest.raises(RuntimeError):
        await purge(client, idle=3600)
    check_purge(client, idle=3600)
    with pytest.raises(UnsupportedKind, match="postgresql://"):
        check_purge(aiolock.connect("memory://"), idle=3600)
    with pytest.raises(ConfigError, match="a client is needed"):
        check_purge(object(), idle=3600)
