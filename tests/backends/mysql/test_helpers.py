"""Optimistic locking and the fencing check, on an application's own connection."""

from __future__ import annotations

import asyncio
from random import Random

import aiomysql
import pymysql.err
import pytest

from aiolock import ConfigError, DeadlockDetected
from aiolock.mysql import Conflict, compare_and_set, fenced_update, retry_on_conflict
from tests.backends.mysql.tools import as_root


@pytest.fixture
async def connect(mariadb):
    """Connections of the application, with one table."""
    opened = []

    async def one():
        connection = await aiomysql.connect(**{**mariadb.admin, "db": "test"}, autocommit=True)
        opened.append(connection)
        return connection

    async with (await one()).cursor() as cursor:
        await cursor.execute(
            "CREATE TABLE orders (id INT PRIMARY KEY, state VARCHAR(20), n INT NOT NULL DEFAULT 0, "
            "version INT NOT NULL DEFAULT 0, fence_token BIGINT UNSIGNED NOT NULL DEFAULT 0)"
        )
        await cursor.execute("INSERT INTO orders (id, state) VALUES (1, 'new'), (2, 'new')")
    yield one
    for connection in opened:
        await connection.ensure_closed()
    await as_root(mariadb, "DROP TABLE orders")


async def read(connection, columns: str = "state, version, fence_token", number: int = 1) -> tuple:
    async with connection.cursor() as cursor:
        await cursor.execute(f"SELECT {columns} FROM orders WHERE id = {number}")
        return await cursor.fetchone()


async def test_a_version_that_was_read_can_be_changed_once(connect):
    connection = await connect()
    assert await compare_and_set(connection, "orders", {"id": 1}, 0, {"state": "paid"})
    assert not await compare_and_set(connection, "test.orders", {"id": 1}, 0, {"state": "void"})
    assert await read(connection) == ("paid", 1, 0)
    # Setting what is there already is a change as well: the version counts it.
    assert await compare_and_set(connection, "orders", {"id": 1, "state": "paid"}, 1, {"state": "paid"})
    assert (await read(connection, number=2))[1] == 0


async def test_counting_by_many_loses_no_step(connect):
    async def step(connection) -> None:
        n, version = await read(connection, "n, version")
        if not await compare_and_set(connection, "orders", {"id": 1}, version, {"n": n + 1}):
            raise Conflict

    async def worker() -> None:
        connection = await connect()
        for _ in range(10):
            await retry_on_conflict(lambda: step(connection), attempts=200, pause=0.001, longest=0.01)

    await asyncio.gather(*(worker() for _ in range(5)))
    assert await read(await connect(), "n, version") == (50, 50)


async def test_the_last_conflict_is_raised_and_other_errors_at_once():
    tries: list[BaseException] = []

    async def work(error: BaseException) -> None:
        tries.append(error)
        raise error

    for error, expected in (
        (Conflict("seen"), 3),
        (aiomysql.OperationalError(1213, "deadlock"), 3),
        (aiomysql.OperationalError(1205, "lock wait"), 3),
        (aiomysql.OperationalError(1064, "syntax"), 1),
        (ValueError(), 1),
    ):
        tries.clear()
        with pytest.raises(type(error)):
            await retry_on_conflict(
                lambda error=error: work(error), attempts=3, pause=0.001, random=Random(1)
            )
        assert len(tries) == expected


async def test_a_deadlock_of_the_server_is_tried_again(connect):
    first, second = await connect(), await connect()
    met = asyncio.Barrier(2)
    tries: list[tuple[int, int]] = []

    async def both(connection, one: int, other: int) -> None:
        tries.append((one, other))
        await connection.begin()
        try:
            async with connection.cursor() as cursor:
                await cursor.execute(f"UPDATE orders SET n = n + 1 WHERE id = {one}")
                if tries.count((one, other)) == 1:
                    await met.wait()
                await cursor.execute(f"UPDATE orders SET n = n + 1 WHERE id = {other}")
            await connection.commit()
        except BaseException:
            await connection.rollback()
            raise

    async with asyncio.timeout(30):
        await asyncio.gather(
            retry_on_conflict(lambda: both(first, 1, 2)), retry_on_conflict(lambda: both(second, 2, 1))
        )
    assert len(tries) > 2
    assert await read(first, "n") == await read(first, "n", 2) == (2,)


async def test_a_later_token_shuts_out_an_earlier_one(connect):
    connection = await connect()
    assert await fenced_update(connection, "orders", {"id": 1}, {"state": "b"}, token=20)
    assert not await fenced_update(connection, "orders", {"id": 1}, {"state": "a"}, token=10)
    assert await read(connection) == ("b", 0, 20)
    # The same holder again, also when it changes nothing.
    assert await fenced_update(connection, "orders", {"id": 1}, {"state": "b"}, token=20)
    assert await fenced_update(connection, "orders", {"id": 1}, {"state": "c"}, token=2**63)
    assert not await fenced_update(connection, "orders", {"id": 99}, {"state": "c"}, token=2**63)


async def test_a_late_write_is_refused_also_in_a_transaction_that_still_sees_its_own_token(connect):
    old, new = await connect(), await connect()
    assert await fenced_update(old, "orders", {"id": 1}, {"state": "a"}, token=10)
    await old.begin()
    assert (await read(old))[2] == 10
    assert await fenced_update(new, "orders", {"id": 1}, {"state": "b"}, token=20)
    assert not await fenced_update(old, "orders", {"id": 1}, {"state": "c"}, token=10)
    await old.rollback()
    assert await read(old) == ("b", 0, 20)


async def test_a_conflict_is_told_from_any_other_failure():
    for failure, attempts in (
        (DeadlockDetected(["x", "y"]), 3),
        (Conflict("x"), 3),
        (pymysql.err.OperationalError(1213, "Deadlock"), 3),
        (ValueError(["a"]), 1),
        (ValueError({}), 1),
        (ValueError(), 1),
        # Whoever has such a number among its arguments need not be a driver.
        (KeyError(1205), 1),
        (ValueError(1213), 1),
        (OSError(1020, "no such"), 1),
        (aiomysql.IntegrityError(1062, "Duplicate entry"), 1),
        (aiomysql.OperationalError("1205"), 1),
    ):
        tries = []

        async def work(failure=failure, tries=tries):
            tries.append(failure)
            raise failure

        with pytest.raises(type(failure)) as caught:
            await retry_on_conflict(work, attempts=3, pause=0.001)
        assert caught.value is failure
        assert len(tries) == attempts


async def test_a_holder_that_lost_its_lock_writes_nothing(connect, place):
    connection = await connect()
    async with place.connect() as client, place.connect() as rival:
        old = await client.lock("orders:1").acquire()
        assert await rival.lock("orders:1").force_release()
        new = await rival.lock("orders:1").acquire()
        assert await fenced_update(connection, "orders", {"id": 1}, {"state": "new holder"}, token=new.token)
        assert not await fenced_update(
            connection, "orders", {"id": 1}, {"state": "old holder"}, token=old.token
        )
        await new.release()
        await old.release()


async def test_names_that_could_be_statements_are_refused():
    for table, key, values in (
        ("orders; DROP", {"id": 1}, {"n": 1}),
        ("orders", {"id = 1 OR 1": 1}, {"n": 1}),
        ("orders", {"id": 1}, {"n`": 1}),
        ("orders", {}, {"n": 1}),
    ):
        with pytest.raises(ConfigError):
            await compare_and_set(None, table, key, 0, values)
        with pytest.raises(ConfigError):
            await fenced_update(None, table, key, values, token=1)
    with pytest.raises(ConfigError, match="token"):
        await fenced_update(None, "orders", {"id": 1}, {"n": 1}, token="7")


@pytest.mark.parametrize("table", [None, 5, b"orders", "", ".", "a.b.c", ["orders"]])
async def test_what_is_no_table_is_refused(table):
    with pytest.raises(ConfigError, match="table"):
        await compare_and_set(None, table, {"id": 1}, 0, {"n": 1})
    with pytest.raises(ConfigError, match="table"):
        await fenced_update(None, table, {"id": 1}, {"n": 1}, token=1)


async def test_a_write_that_cannot_be_meant_is_refused():
    for version in (None, "1", True, 1.0):
        with pytest.raises(ConfigError, match="version must be the whole number"):
            await compare_and_set(None, "orders", {"id": 1}, version, {"n": 1})
    for token in (None, True, 1.0):
        with pytest.raises(ConfigError, match="token must be"):
            await fenced_update(None, "orders", {"id": 1}, {"n": 1}, token=token)
    for key in (None, {}, "id", {"id": None}, {"id": 1, "state": None}, {1: 1}):
        with pytest.raises(ConfigError, match=r"key must name|column is"):
            await compare_and_set(None, "orders", key, 0, {"n": 1})
        with pytest.raises(ConfigError, match=r"key must name|column is"):
            await fenced_update(None, "orders", key, {"n": 1}, token=1)
    for column in (None, 5, b"version", "a b"):
        with pytest.raises(ConfigError, match="column"):
            await compare_and_set(None, "orders", {"id": 1}, 0, {"n": 1}, column=column)
        with pytest.raises(ConfigError, match="column"):
            await fenced_update(None, "orders", {"id": 1}, {"n": 1}, token=1, column=column)
    for values in (None, "n", ["n"], {5: 1}):
        with pytest.raises(ConfigError, match=r"values must be|column is"):
            await compare_and_set(None, "orders", {"id": 1}, 0, values)
    # The column that counts, and the one that fences, are the helper's own.
    for name in ("version", "VERSION"):
        with pytest.raises(ConfigError, match="must not name the column 'version'"):
            await compare_and_set(None, "orders", {"id": 1}, 0, {"n": 1, name: 100})
    with pytest.raises(ConfigError, match="must not name the column 'mark'"):
        await fenced_update(None, "orders", {"id": 1}, {"mark": 100}, token=1, column="mark")
