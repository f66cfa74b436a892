"""Optimistic locking and the fencing check, on an application's own connection."""

from __future__ import annotations

import asyncio
import warnings
from random import Random

import aiomysql
import pymysql.err
import pytest

from aiolock import ConfigError, DeadlockDetected
from aiolock.mysql import Conflict, compare_and_set, fenced_update, retry_on_conflict
from tests.backends.mysql.tools import Deaf, as_root


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
    try:
        assert not await fenced_update(old, "orders", {"id": 1}, {"state": "c"}, token=10)
    except aiomysql.OperationalError as error:
        # So it is with innodb_snapshot_isolation, which newer MariaDBs have on.
        assert error.args[0] == 1020  # noqa: PT017 - most servers raise nothing
    await old.rollback()
    assert await read(old) == ("b", 0, 20)


async def strictly(connection, mode: str) -> None:
    """Whether values that are too large are refused; MySQL warns of each change of it."""
    async with connection.cursor(Deaf) as cursor:
        await cursor.execute(f"SET SESSION sql_mode = '{mode}'")


SMALL = ["TINYINT UNSIGNED", "INT", "INT UNSIGNED", "DOUBLE", "VARCHAR(5)"]
"""Kinds of columns in which no token has room."""
TOKEN = 114_900_000_000_000_065
"""As they are: 64 times a time in µs, and one more."""


@pytest.mark.parametrize("mode", ["", "STRICT_TRANS_TABLES"])
@pytest.mark.parametrize("kind", SMALL)
async def test_a_column_that_is_too_small_for_a_token_is_an_error_and_writes_nothing(connect, kind, mode):
    connection = await connect()
    await strictly(connection, mode)
    async with connection.cursor() as cursor:
        await cursor.execute(f"ALTER TABLE orders ADD mark {kind} NOT NULL DEFAULT 0")
    await connection.begin()
    assert await fenced_update(connection, "orders", {"id": 2}, {"state": "a"}, token=5)
    with warnings.catch_warnings():
        # The driver says what the server says of values that it clips.
        warnings.simplefilter("ignore")
        for token in (TOKEN, TOKEN + 1):
            with pytest.raises(ConfigError, match=r"column 'mark' cannot hold tokens.*BIGINT UNSIGNED"):
                await fenced_update(
                    connection, "orders", {"id": 1}, {"state": "b"}, token=token, column="mark"
                )
    # The transaction goes on.
    await connection.commit()
    assert [float(number) for number in await read(connection, "mark")] == [0]
    assert (await read(connection))[0] == "new"
    assert (await read(connection, number=2))[0] == "a"


LARGE = [
    "BIGINT",
    "BIGINT UNSIGNED",
    "DECIMAL(20)",
    "DECIMAL(20, 2)",
    "VARCHAR(32)",
    "CHAR(40)",
    "VARBINARY(30)",
]
"""Kinds of columns in which a token has room; servers compare the last three with numbers as doubles."""


@pytest.mark.parametrize("kind", LARGE)
async def test_a_column_that_is_large_enough_has_the_token(connect, kind):
    connection = await connect()
    await strictly(connection, "")
    async with connection.cursor() as cursor:
        await cursor.execute(f"ALTER TABLE orders ADD mark {kind} NOT NULL DEFAULT 0")
    assert await fenced_update(connection, "orders", {"id": 1}, {"state": "b"}, token=TOKEN, column="mark")
    assert not await fenced_update(
        connection, "orders", {"id": 1}, {"state": "a"}, token=TOKEN - 1, column="mark"
    )
    assert [int(number) for number in await read(connection, "mark")] == [TOKEN]
    # Not only what was there first counts.
    assert await fenced_update(
        connection, "orders", {"id": 1}, {"state": "c"}, token=TOKEN + 1, column="mark"
    )
    assert not await fenced_update(
        connection, "orders", {"id": 1}, {"state": "c"}, token=TOKEN, column="mark"
    )
    state, mark = await read(connection, "state, mark")
    assert (state, int(mark)) == ("c", TOKEN + 1)


@pytest.mark.parametrize("kind", LARGE)
async def test_a_version_is_compared_to_its_last_digit(connect, kind):
    connection = await connect()
    await strictly(connection, "")
    async with connection.cursor() as cursor:
        await cursor.execute(f"ALTER TABLE orders ADD mark {kind} NOT NULL DEFAULT {TOKEN}")
    assert not await compare_and_set(
        connection, "orders", {"id": 1}, TOKEN - 1, {"state": "b"}, column="mark"
    )
    assert [int(number) for number in await read(connection, "mark")] == [TOKEN]
    assert (await read(connection))[0] == "new"


@pytest.mark.parametrize("mode", ["", "STRICT_TRANS_TABLES"])
async def test_a_version_that_has_come_to_its_end_is_an_error_and_not_the_same_again(connect, mode):
    connection = await connect()
    await strictly(connection, mode)
    async with connection.cursor() as cursor:
        await cursor.execute("ALTER TABLE orders ADD changes TINYINT NOT NULL DEFAULT 126")
    assert await compare_and_set(connection, "orders", {"id": 1}, 126, {"n": 1}, column="changes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"column 'changes' cannot hold the version 128.*BIGINT"):
                await compare_and_set(connection, "orders", {"id": 1}, 127, {"n": 2}, column="changes")
    assert await read(connection, "n, changes") == (1, 127)


async def test_a_mode_in_which_it_is_not_seen_what_was_stored_is_refused(connect, mariadb):
    connection = await connect()
    async with connection.cursor() as cursor:
        [[version]] = await as_root(mariadb, "SELECT VERSION()")
        if "MariaDB" not in version:
            # Others do not have it.
            with pytest.raises(pymysql.err.Error):
                await cursor.execute("SET SESSION sql_mode = 'SIMULTANEOUS_ASSIGNMENT'")
            return
        await cursor.execute("SET SESSION sql_mode = 'SIMULTANEOUS_ASSIGNMENT'")
    with pytest.raises(ConfigError, match="SIMULTANEOUS_ASSIGNMENT"):
        await fenced_update(connection, "orders", {"id": 1}, {"state": "b"}, token=TOKEN)
    with pytest.raises(ConfigError, match="SIMULTANEOUS_ASSIGNMENT"):
        await compare_and_set(connection, "orders", {"id": 1}, 0, {"state": "b"})
    assert await read(connection) == ("new", 0, 0)


async def test_an_error_about_another_column_is_the_servers_own(connect):
    connection = await connect()
    await strictly(connection, "STRICT_TRANS_TABLES")
    with pytest.raises(aiomysql.DataError, match="'n'"):
        await fenced_update(connection, "orders", {"id": 1}, {"n": 2**40}, token=5)
    with pytest.raises(aiomysql.DataError, match="'n'"):
        await compare_and_set(connection, "orders", {"id": 1}, 0, {"n": 2**40})


async def test_a_row_that_changed_under_a_transaction_is_a_conflict_also_with_snapshot_isolation(connect):
    """False by itself; with innodb_snapshot_isolation, which MySQL has not, the server's error 1020. Both end in one success."""
    old, new = await connect(), await connect()
    async with old.cursor() as cursor:
        await cursor.execute("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'")
        if await cursor.fetchall():
            await cursor.execute("SET SESSION innodb_snapshot_isolation = ON")
    seen: list[tuple] = []

    async def step() -> None:
        await old.begin()
        try:
            n, version = await read(old, "n, version")
            seen.append((n, version))
            if len(seen) == 1:
                assert await compare_and_set(new, "orders", {"id": 1}, version, {"n": n + 1})
            if not await compare_and_set(old, "orders", {"id": 1}, version, {"n": n + 1}):
                raise Conflict("orders 1")
            await old.commit()
        except BaseException:
            await old.rollback()
            raise

    await retry_on_conflict(step, attempts=3, pause=0.001)
    assert seen == [(0, 0), (1, 1)]
    assert await read(new, "n, version") == (2, 2)


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


async def test_a_holder_that_lost_its_lock_writes_nothing(connect, deployment):
    connection = await connect()
    async with deployment.connect() as client, deployment.connect() as rival:
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
