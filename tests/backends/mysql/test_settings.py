"""Sessions have the settings that locks need, whatever the server begins them with; connections of callers keep theirs."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiomysql
import pytest

import aiolock
from aiolock import BackendRefused, ConfigError, UnsafeBackend
from aiolock.mysql import compare_and_set, fenced_update
from aiolock.types import Level
from tests import servers
from tests.backends.mysql.conftest import ACCOUNT, PASSWORD, Deployment
from tests.backends.mysql.tools import Deaf, as_root
from tests.faults.proxy import Proxy, mysql_frames
from tests.faults.staging import PATIENCE, gets_the_lock, queued, until

MODES = ["lease", "session", "row"]
ALL = [*MODES, "rows"]
"""With the engine over rows."""

EVERYWHERE = {
    "autocommit": "SET autocommit=0",
    "an open transaction": "START TRANSACTION",
    "one that may only read": "START TRANSACTION READ ONLY",
    "transactions that may only read": "SET SESSION TRANSACTION READ ONLY",
    "the next one that may only read": "SET TRANSACTION READ ONLY",
    "chains of transactions": "SET completion_type=1",
    "the end with a transaction": "SET completion_type=2",
    "chains and one that is open": "SET autocommit=0, completion_type=1; START TRANSACTION",
    "serializable": "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    "uncommitted": "SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED",
    "safe updates": "SET sql_safe_updates=1",
    "small joins": "SET sql_big_selects=0, max_join_size=1",
    "no rows": "SET sql_select_limit=0",
    "modes": "SET sql_mode='ANSI,NO_BACKSLASH_ESCAPES,HIGH_NOT_PRECEDENCE,PAD_CHAR_TO_FULL_LENGTH'",
    "lax": "SET sql_mode=''",
    "time zone": "SET time_zone='-11:00'",
    "a clock that stands": "SET timestamp=1",
    "another database": "USE information_schema",
    "patience": "SET innodb_lock_wait_timeout=50, lock_wait_timeout=1000, wait_timeout=1",
    "latin1": "SET NAMES latin1",
    "utf8": "SET NAMES utf8mb3",
    "gbk": "SET NAMES gbk",
    "a wide character set": "SET collation_connection=utf16_bin, character_set_results=utf16",
}
"""What `init_connect` may do to a session."""
MARIADB = {
    "time": "SET max_statement_time=0.000001",
    "the language of Oracle": "SET sql_mode='ORACLE'",
    "assignments at once": "SET sql_mode='SIMULTANEOUS_ASSIGNMENT'",
    "idle transactions": "SET idle_transaction_timeout=1, idle_write_transaction_timeout=1",
}
MYSQL = {"time": "SET max_execution_time=1"}

NAMES = [
    # The last byte of the first letter swallows a backslash that is written before the quotation mark.
    *(
        f"{letter}', NULL, 0x00, 0, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6)); CREATE TABLE pwned (a INT); -- "
        for letter in ("€", "é", "\u00bf", "🔒", "許", "\u0081", "")
    ),
    "\\",
    "\\'; CREATE TABLE pwned (a INT); -- ",
    "€\\'; CREATE TABLE pwned (a INT); -- ",
    "€\\",
    "€",
    '"`\'"; CREATE TABLE pwned (a INT) /*',
    "*/ CREATE TABLE pwned (a INT); /*",
    "\0",
    "a\0b\n\r\x1a\t",
    "%s %(x)s {id} {{",
    "ä",
    "Ä",
    "a",
    "A",
    "a ",
    "表'\\",
    "🔒",
    "_utf8mb4 X''",
]
"""Names that end a literal early in some character set, and some that a server may take for one."""


def printable(name: str) -> str:
    """What a reason may consist of."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


@asynccontextmanager
async def beginning(server, init: str) -> AsyncIterator[None]:
    """Within it, sessions of accounts that may not do everything begin with ``init``."""
    text = init.replace("\\", "\\\\").replace("'", "\\'")
    await as_root(server, f"SET GLOBAL init_connect='{text}'")
    try:
        yield
    finally:
        await as_root(server, "SET GLOBAL init_connect=''")


async def is_mariadb(server) -> bool:
    return "MariaDB" in str(await as_root(server, "SELECT VERSION()"))


async def transactions(deployment: Deployment) -> list[tuple]:
    # The server copies what this view shows only after 0.1 s in which nobody read it: who asks more often
    # sees the first answer for ever.
    await asyncio.sleep(0.15)
    rows = await as_root(
        deployment.server,
        "SELECT t.trx_mysql_thread_id, t.trx_query FROM information_schema.innodb_trx AS t JOIN "
        "information_schema.processlist AS p ON p.ID = t.trx_mysql_thread_id WHERE p.USER = 'app' "
        # A listening connection, which writes nothing.
        "AND IFNULL(t.trx_query, '') NOT LIKE '%GET_LOCK(%' AND IFNULL(t.trx_query, '') NOT LIKE '%SKIP LOCKED%'",
    )
    return list(rows)


async def works(deployment: Deployment, mode: str) -> None:
    """Exclusion, waiting and every kind of session, seen by others than the client."""
    async with (
        deployment.connect(mode, command_timeout=15) as one,
        deployment.connect(mode, command_timeout=15) as two,
    ):
        lease = await one.lock("x").acquire(timeout=PATIENCE)
        assert await two.lock("x").try_acquire() is None
        waiter = asyncio.create_task(two.lock("x").acquire())
        gone = asyncio.create_task(two.lock("x", fair=True).acquire())
        await queued(one.lock("x"), 2)
        gone.cancel()
        await asyncio.wait([gone])
        await lease.renew()
        if mode == "lease":
            rows = await as_root(
                deployment.server,
                f"SELECT owner IS NULL FROM aiolock WHERE namespace = '{deployment.namespace}' AND name = 'x'",
            )
            assert rows == ((0,),)
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            lease = await waiter
        assert await one.lock("x").try_acquire() is None
        await lease.release()
        if mode in ("lease", "rows"):
            await shares(deployment, one, two, mode)
        if mode != "row":
            # Nothing of ours goes on that others cannot see.
            async def none() -> bool:
                return not await transactions(deployment)

            await until(none)


async def shares(deployment: Deployment, one: aiolock.Client, two: aiolock.Client, mode: str) -> None:
    async with one.semaphore("s", 2), two.semaphore("s", 2):
        assert await one.semaphore("s", 2).try_acquire() is None
        waiter = asyncio.create_task(one.semaphore("s", 2).acquire())
        await queued(two.semaphore("s", 2), 1)
    async with asyncio.timeout(PATIENCE):
        await (await waiter).release()
    async with one.rwlock("r").write():
        assert await two.rwlock("r").read().try_acquire() is None
    # What follows a decision on its session is seen by others as well.
    lease = await one.lock("after").acquire()
    assert await two.lock("after").try_acquire() is None
    found = f"SELECT COUNT(*) FROM aiolock WHERE namespace = '{deployment.namespace}' AND name = 'after' AND owner IS NOT NULL"
    if mode == "rows":
        found = f"SELECT COUNT(*) FROM aiolock_rows WHERE k = '{deployment.namespace}/l/lock/after'"
    assert await as_root(deployment.server, found) == ((1,),)
    await lease.release()
    latch = two.latch("l", 1)
    waiter = asyncio.create_task(latch.wait(PATIENCE))
    await one.latch("l", 1).count_down()
    await waiter


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("what", EVERYWHERE | MARIADB | MYSQL)
async def test_sessions_do_not_begin_as_the_server_has_it(deployment, mariadb, what, mode):
    own = MARIADB if await is_mariadb(mariadb) else MYSQL
    if what not in EVERYWHERE | own:
        pytest.skip(f"there is no such setting on this server: {what}")
    async with beginning(mariadb, (own | EVERYWHERE)[what]):
        await works(deployment, mode)


GLOBALS = {
    "completion_type": ("CHAIN", "NO_CHAIN"),
    "autocommit": ("0", "1"),
    "sql_safe_updates": ("1", "0"),
    "sql_select_limit": ("1", "18446744073709551615"),
    "sql_mode": ("'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'", "DEFAULT"),
}


@pytest.mark.parametrize("mode", ALL)
async def test_settings_of_the_whole_server_do_not_matter_either(deployment, mariadb, mode):
    for name, (value, _) in GLOBALS.items():
        await as_root(mariadb, f"SET GLOBAL {name}={value}")
    try:
        await works(deployment, mode)
        found = {one.subject: one for one in await deployment.connect(mode).diagnose()}
        for name in ("completion_type", "autocommit", "sql_safe_updates"):
            assert found[name].level is Level.OK
            assert "overridden" in found[name].text
    finally:
        for name, (_, usual) in GLOBALS.items():
            await as_root(mariadb, f"SET GLOBAL {name}={usual}")


async def test_doctor_names_what_sessions_begin_with(deployment, mariadb):
    async with beginning(mariadb, "SET autocommit=0, sql_select_limit=0"):
        found = {one.subject: one for one in await deployment.connect().diagnose()}
        assert "SET autocommit=0" in found["init_connect"].text
        assert "overridden" in found["init_connect"].text
        assert "tables" in found
    found = {one.subject for one in await deployment.connect().diagnose()}
    assert "init_connect" not in found
    assert "session settings" in found


async def test_a_lost_connection_leaves_the_lease_where_nothing_is_committed_by_itself(deployment, mariadb):
    """The grant is durable when it has been told: what the server undoes with a connection is not it."""
    async with (
        beginning(mariadb, "SET autocommit=0"),
        deployment.connect() as one,
        deployment.connect() as two,
    ):
        lease = await one.lock("x").acquire()
        for number, *_ in await as_root(
            mariadb, "SELECT ID FROM information_schema.processlist WHERE USER = 'app'"
        ):
            await as_root(mariadb, f"KILL {number}")

        async def answers() -> bool:
            try:
                return await two.lock("x").try_acquire() is None
            except aiolock.BackendUnavailable:
                return False

        await until(answers)
        await lease.renew()
        lease.check()
        assert await two.lock("x").try_acquire() is None
        await lease.release()


# --- the binary log


@pytest.mark.parametrize("form", ["STATEMENT", "ROW", "MIXED"])
async def test_a_binary_log_of_statements_is_refused_where_rows_are_written(form):
    extra = ["--log-bin=b", "--server-id=7", f"--binlog-format={form}"]
    with servers.MariaDB(init=ACCOUNT, extra=extra) as server:
        deployment = Deployment(server)
        for mode in ALL:
            if form == "STATEMENT" and mode != "session":
                with pytest.raises(UnsafeBackend, match=r"binlog_format is STATEMENT.*set binlog_format=ROW"):
                    await deployment.connect(mode).open()
                level = Level.ERROR
            else:
                await works(deployment, mode)
                level = Level.OK
            [found] = [
                one for one in await deployment.connect(mode).diagnose() if one.subject == "binlog_format"
            ]
            assert found.level is level
            assert form in found.text


# --- hostile texts


async def charsets(server) -> list[str]:
    """The character sets that a session may have."""
    usable = []
    for charset, *_ in await as_root(server, "SHOW CHARACTER SET"):
        try:
            await as_root(server, f"SET NAMES {charset}")
        except aiomysql.Error:
            continue
        usable.append(str(charset))
    assert {"utf8mb4", "gbk", "big5", "sjis", "latin1"} <= set(usable)
    return usable


async def tables(server) -> set[str]:
    return {str(name) for (name,) in await as_root(server, "SHOW TABLES")}


@pytest.mark.parametrize("mode", MODES)
async def test_hostile_names_are_names_in_every_character_set(deployment, mariadb, mode):
    async with deployment.connect(mode, namespace=deployment.namespace):
        before = await tables(mariadb)
    for charset in await charsets(mariadb):
        own = f"{deployment.namespace}-{charset}"
        options = {"mode": mode, "namespace": own, "connections": len(NAMES) + 2, "ttl": 60}
        async with (
            beginning(mariadb, f"SET NAMES {charset}"),
            deployment.connect(**options, label="Björn 🔒 €' \\'") as one,
            deployment.connect(**options) as two,
        ):
            leases = [await one.lock(name).try_acquire() for name in NAMES]
            # Each is a lock of its own.
            assert None not in leases, charset
            for name in NAMES:
                assert await two.lock(name).try_acquire() is None, (charset, name)
            if mode == "lease":
                assert {info.name for info in await two.locks()} == set(NAMES), charset
                for name, lease in zip(NAMES, leases, strict=True):
                    [holder] = (await two.lock(name).inspect()).holders
                    assert holder.label == "Björn 🔒 €' \\'"
                    assert await two.lock(name).request_release(printable(name))
                    await lease.renew()
                await until(functools.partial(asked, leases))
                rows = await as_root(
                    mariadb, f"SELECT COUNT(*), COUNT(requested) FROM aiolock WHERE namespace = '{own}'"
                )
                assert rows == ((len(NAMES), len(NAMES)),), charset
            for lease in leases:
                await lease.release()
            for lease in [await two.lock(name).try_acquire() for name in NAMES]:
                await lease.release()
        assert await tables(mariadb) == before, charset


async def asked(leases) -> bool:
    """Each holder has been told the reason that is its name."""
    return [lease.release_requested.reason for lease in leases] == [printable(name) for name in NAMES]


async def test_hostile_names_of_every_kind_are_names(deployment, mariadb):
    async with deployment.connect():
        before = await tables(mariadb)
    for charset in ("gbk", "sjis", "big5", "utf8mb4"):
        own = f"{deployment.namespace}-{charset}"
        async with (
            beginning(mariadb, f"SET NAMES {charset}"),
            deployment.connect(namespace=own, label="€'") as one,
            deployment.connect(namespace=own, label="€\\'") as two,
        ):
            for name in NAMES:
                async with one.semaphore(name, 1), one.rwlock(name).write(), one.lock(name):
                    assert await two.semaphore(name, 1).try_acquire() is None
                    assert await two.rwlock(name).read().try_acquire() is None
                    [holder] = (await two.semaphore(name, 1).inspect()).holders
                    assert holder.label == "€'"
                    assert await two.semaphore(name, 1).request_release(printable(name))
                latch = one.latch(name, 2)
                assert await latch.count_down() == 1
                assert await two.latch(name, 2).count() == 1
                async with one.election(name).campaign():
                    leader = await two.election(name).leader()
                    assert leader is not None
            rows = await as_root(
                mariadb, f"SELECT COUNT(DISTINCT HEX(name)) FROM aiolock_registers WHERE namespace = '{own}'"
            )
            assert rows == ((len(NAMES),),)
        assert await tables(mariadb) == before


@pytest.mark.parametrize("mode", MODES)
async def test_hostile_names_are_names_where_the_server_does_not_ask_for_the_character_set(mariadb, mode):
    if not await is_mariadb(mariadb):
        pytest.skip("MySQL 9 has no such option")
    extra = ["--skip-character-set-client-handshake", "--character-set-server=gbk"]
    with servers.MariaDB(init=ACCOUNT, extra=extra) as server:
        deployment = Deployment(server)
        async with deployment.connect(mode, connections=40) as one, deployment.connect(mode) as two:
            before = await tables(server)
            leases = [await one.lock(name).try_acquire() for name in NAMES]
            assert None not in leases
            for name in NAMES:
                assert await two.lock(name).try_acquire() is None
            for lease in leases:
                await lease.release()
        assert await tables(server) == before


@pytest.mark.parametrize("mode", MODES)
async def test_no_statement_contains_a_text_of_a_user_as_it_is(mariadb, mode):
    """It is sent as hexadecimal digits: what an escape means depends on the settings of the session."""
    mark = b"Zq7Zq7"
    statements: list[bytes] = []

    def sent(way: str, frame: bytes) -> None:
        # The first packet of a command, and that command a query.
        if way == "up" and frame[3:5] == b"\0\3":
            statements.append(frame[5:])

    async with Proxy(mariadb.host, mariadb.port, framing=mysql_frames, on_frame=sent) as proxy:
        deployment, text = Deployment(mariadb), f"{mark.decode()}'\"\\`%_\0 🔒"
        options = {"mode": mode, "port": proxy.port, "label": printable(text)}
        async with deployment.connect(**options) as one, deployment.connect(**options) as two:
            lock = one.lock(text)
            async with lock:
                waiter = asyncio.create_task(two.lock(text).acquire(timeout=PATIENCE))
                await queued(lock, 1)
            await (await waiter).release()
            if mode == "lease":
                for every in (lock, one.semaphore(text, 1), one.rwlock(text).write()):
                    async with every:
                        await every.request_release(printable(text))
                        await every.inspect()
                await one.locks(text)
                await one.latch(text, 2).count_down()
                async with one.election(text).campaign():
                    await two.election(text).leader()
    assert len(statements) > 10
    assert [each for each in statements if mark in each or not each.isascii()] == []


# --- connections of callers


@pytest.fixture
async def borrow(deployment):
    """Connections of the application, in the account of the client."""
    opened = []

    async def one(**options):
        connection = await aiomysql.connect(
            host=deployment.server.host,
            port=deployment.server.port,
            user="app",
            password=PASSWORD,
            **{"db": "test", **options},
        )
        opened.append(connection)
        return connection

    yield one
    for connection in opened:
        connection.close()


async def run(connection, statement: str) -> tuple:
    async with connection.cursor(Deaf) as cursor:
        await cursor.execute(statement)
        return tuple(await cursor.fetchall())


SETTINGS = (
    "@@SESSION.autocommit, @@SESSION.completion_type, @@SESSION.sql_mode, @@SESSION.sql_safe_updates, "
    "@@SESSION.sql_select_limit, @@SESSION.character_set_client, @@SESSION.collation_connection, "
    "@@SESSION.character_set_results, @@SESSION.time_zone, @@SESSION.innodb_lock_wait_timeout, @@SESSION.wait_timeout, "
    "DATABASE()"
)


async def settings(connection) -> tuple:
    [row] = await run(connection, f"SELECT {SETTINGS} LIMIT 1")
    return row


THEIRS = {
    "nothing": "DO 0",
    "autocommit": "SET autocommit=0",
    "chains": "SET completion_type=1",
    "safe updates": "SET sql_safe_updates=1",
    "no rows": "SET sql_select_limit=0",
    "modes": EVERYWHERE["modes"],
    "serializable": EVERYWHERE["serializable"],
    "another database": "USE information_schema",
    "results": "SET character_set_results=NULL",
    "a wide character set": "SET collation_connection=utf16_bin",
}


@pytest.mark.parametrize("what", THEIRS)
async def test_a_lock_in_a_transaction_needs_no_settings_and_changes_none(deployment, mariadb, borrow, what):
    async with deployment.connect("row") as client:
        for name in NAMES[:5]:
            # Newer MariaDBs refuse a SERIALIZABLE transaction the rows that were made since its first lock.
            async with client.lock(name):
                pass
        mine, other = await borrow(), await borrow()
        for connection in (mine, other):
            await run(connection, THEIRS[what])
            await connection.begin()
        before = await settings(mine)
        for number, name in enumerate(NAMES[:5]):
            async with client.lock(name, connection=mine):
                assert not await client.lock(name, connection=other).try_acquire(), number
                assert await client.lock(name).try_acquire() is None
        assert await settings(mine) == before
        await mine.rollback()
        for name in NAMES[:5]:
            assert await client.lock(name, connection=other).try_acquire()
        await other.rollback()


async def test_a_lock_in_a_transaction_has_its_name_in_every_character_set(deployment, mariadb, borrow):
    async with deployment.connect("row") as client:
        before = await tables(mariadb)
        mine, other = await borrow(), await borrow()
        for charset in await charsets(mariadb):
            for connection in (mine, other):
                await run(connection, f"SET NAMES {charset}")
                await connection.begin()
            for name in NAMES[:4]:
                assert await client.lock(name, connection=mine).try_acquire(), charset
                assert not await client.lock(name, connection=other).try_acquire(), charset
            await mine.rollback()
            await other.rollback()
        assert await tables(mariadb) == before


async def test_a_database_beyond_ascii_needs_a_connection_that_can_say_its_name(mariadb, borrow):
    await as_root(mariadb, "CREATE DATABASE IF NOT EXISTS `läger`")
    await as_root(mariadb, "GRANT ALL ON `läger`.* TO app@'%'")
    try:
        deployment = Deployment(mariadb)
        url = deployment.url().replace("/test", "/l%C3%A4ger")
        async with aiolock.connect(url, mode="row", namespace=deployment.namespace) as client:
            await gets_the_lock(client, "x")
            for options, init, message in (
                ({"charset": "utf8mb4"}, "SET NAMES gbk", "its character set is gbk"),
                ({"charset": "latin1"}, "DO 0", "its character set is latin1"),
            ):
                connection = await borrow(**options)
                await run(connection, init)
                await connection.begin()
                with pytest.raises(UnsafeBackend, match=message):
                    await client.lock("x", connection=connection).acquire()
                connection.close()
            connection = await borrow(charset="utf8mb4")
            await connection.begin()
            async with client.lock("x", connection=connection):
                assert await client.lock("x").try_acquire() is None
            connection.close()
        async with aiolock.connect(url, mode="lease", namespace=deployment.namespace) as client:
            await gets_the_lock(client, "x")
    finally:
        await as_root(mariadb, "DROP DATABASE `läger`")
        await as_root(mariadb, "REVOKE ALL ON `läger`.* FROM app@'%'")


@pytest.mark.parametrize("mode", ["", "NO_BACKSLASH_ESCAPES", "ANSI", "STRICT_ALL_TABLES"])
async def test_values_of_writes_are_values_in_every_character_set(mariadb, borrow, mode):
    await as_root(
        mariadb,
        "CREATE TABLE work (name VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PRIMARY KEY, "
        "state VARCHAR(200) CHARACTER SET utf8mb4, raw BLOB, version BIGINT NOT NULL DEFAULT 0, "
        "fence_token BIGINT UNSIGNED NOT NULL DEFAULT 0)",
    )
    try:
        before = await tables(mariadb)
        # To a collation that pads, some of them are the same.
        names = [name for name in NAMES if name != "a "]
        root = await aiomysql.connect(**{**mariadb.admin, "db": "test"}, autocommit=True, charset="utf8mb4")
        async with root.cursor() as cursor:
            await cursor.executemany("INSERT INTO work (name) VALUES (%s)", [(name,) for name in names])
        # As the driver knows it, and behind its back.
        everywhere = [({}, charset) for charset in await charsets(mariadb)]
        told = [({"charset": charset}, "") for charset in ("latin1", "gbk", "big5", "sjis")]
        for step, (options, charset) in enumerate(everywhere + told):
            connection = await borrow(autocommit=True, **options)
            await run(connection, f"SET sql_mode='{mode}'")
            if charset:
                await run(connection, f"SET NAMES {charset}")
            for name in names[step % 5 :: 5]:
                key, raw = {"name": name}, name.encode() + b"\\'\0\xff"
                async with root.cursor() as cursor:
                    await cursor.execute("SELECT version FROM work WHERE name = %s", (name,))
                    [version] = await cursor.fetchone()
                    assert await compare_and_set(
                        connection, "work", key, version, {"state": name, "raw": raw}
                    )
                    await cursor.execute("SELECT state, raw FROM work WHERE name = %s", (name,))
                    assert await cursor.fetchone() == (name, raw), (options, charset)
                    assert await fenced_update(connection, "work", key, {"state": name[::-1]}, token=step + 1)
                    await cursor.execute("SELECT state, COUNT(*) OVER () FROM work WHERE name = %s", (name,))
                    assert await cursor.fetchone() == (name[::-1], 1)
            connection.close()
        root.close()
        assert await tables(mariadb) == before
        assert await as_root(mariadb, "SELECT COUNT(*) FROM work") == ((len(names),),)
    finally:
        await as_root(mariadb, "DROP TABLE work")


async def test_values_that_only_a_driver_could_write_are_refused():
    for value in ([1], {"a": 1}, {1}, object()):
        for call in (
            compare_and_set(None, "t", {"id": 1}, 0, {"n": value}),
            fenced_update(None, "t", {"id": value}, {"n": 1}, token=1),
        ):
            with pytest.raises(ConfigError, match="must be text, bytes, a number"):
                await call
    with pytest.raises(ConfigError, match="no valid Unicode"):
        await compare_and_set(None, "t", {"id": "\ud800"}, 0, {"n": 1})


# --- several databases of one server


@pytest.mark.parametrize("mode", MODES)
async def test_databases_and_tables_of_one_server_have_nothing_to_do_with_each_other(
    deployment, mariadb, mode
):
    await as_root(mariadb, "CREATE DATABASE IF NOT EXISTS elsewhere")
    await as_root(mariadb, "GRANT ALL ON elsewhere.* TO app@'%'")
    there = deployment.url().replace("/test", "/elsewhere")
    options = {"namespace": deployment.namespace, "mode": mode, "ttl": 5}
    try:
        async with (
            deployment.connect(mode) as here,
            aiolock.connect(there, **options) as other,
            aiolock.connect(there, **options) as rival,
            aiolock.connect(deployment.url(), table="given", **options) as beside,
        ):
            held = await here.lock("x").acquire()
            for _ in range(3):
                # Also right after a release.
                for client in (other, beside):
                    lease = await client.lock("x").try_acquire()
                    assert lease is not None
                    await lease.release()
            lease = await other.lock("x").acquire()
            waiter = asyncio.create_task(rival.lock("x").acquire())
            await queued(other.lock("x"), 1)
            assert [len((await one.lock("x").inspect()).waiters) for one in (here, beside)] == [0, 0]
            await lease.release()
            async with asyncio.timeout(PATIENCE):
                await (await waiter).release()
            # Nobody has ended our sessions.
            held.check()
            await held.renew()
            await held.release()
    finally:
        await as_root(mariadb, "DROP DATABASE elsewhere")
        await as_root(mariadb, "DROP TABLE IF EXISTS given, given_requests, given_registers")


@pytest.mark.parametrize("mode", MODES)
async def test_a_server_that_is_blind_to_case_has_one_lock_for_all_spellings(mode):
    with servers.MariaDB(init=ACCOUNT, extra=["--lower-case-table-names=1"]) as server:
        deployment = Deployment(server)
        shouting = deployment.url().replace("/test", "/TEST")
        options = {"namespace": deployment.namespace, "mode": mode, "ttl": 5}
        async with (
            aiolock.connect(deployment.url(), table="locks", **options) as one,
            aiolock.connect(shouting, table="Locks", **options) as two,
        ):
            async with one.lock("x"):
                assert await two.lock("x").try_acquire() is None
                waiter = asyncio.create_task(two.lock("x").acquire())
                await queued(one.lock("x"), 1)
            async with asyncio.timeout(PATIENCE):
                lease = await waiter
            assert await one.lock("x").try_acquire() is None
            await lease.release()


async def test_tables_that_differ_in_case_are_told_apart(deployment, mariadb):
    if str((await as_root(mariadb, "SELECT @@lower_case_table_names"))[0][0]) != "0":
        pytest.skip("this server is blind to case")
    try:
        async with deployment.connect(table="given") as one:
            await as_root(mariadb, "CREATE TABLE Given (a INT) ENGINE=MyISAM COMMENT='not for locks'")
            await gets_the_lock(one, "x")
            async with deployment.connect(table="given") as two:
                await gets_the_lock(two, "x")
            with pytest.raises((UnsafeBackend, BackendRefused)):
                await deployment.connect(table="Given", schema="manual").open()
    finally:
        await as_root(
            mariadb,
            "DROP TABLE IF EXISTS given, given_requests, given_registers, Given, Given_requests, Given_registers",
        )
