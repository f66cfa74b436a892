"""Connections are few, the account needs little, rows are made and purged, and what is misspelt is refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiomysql
import pytest

import aiolock
from aiolock import BackendRefused, ConfigError, UnsafeBackend, UnsupportedKind
from aiolock.backends.mysql import MySQLBackend
from aiolock.backends.mysql.diagnosis import capabilities, processlist, refuse, variables
from aiolock.backends.mysql.protocol import Result
from aiolock.backends.mysql.queue import GRACE, MOMENT, PollAction, judge
from aiolock.core.backend import Request
from aiolock.mysql import check_purge, ddl, purge
from aiolock.types import READ, WRITE, Family, Level, permits
from tests.backends.mysql.conftest import PASSWORD
from tests.backends.mysql.tools import as_root, sessions
from tests.faults.staging import PATIENCE, gets_the_lock, nothing_remains, queued, until, waiting

PAGE = Path(__file__).parents[3] / "docs" / "backends" / "mysql.md"


def granted() -> list[str]:
    """Return the GRANT statements of the page."""
    return re.findall(r"^GRANT .*?;$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


async def count(deployment) -> int:
    return len(await sessions(deployment.server))


# --- connections


@pytest.mark.parametrize("mode", ["lease", "session"])
async def test_five_thousand_waiting_tasks_cost_two_connections(deployment, mode):
    async with deployment.connect(mode) as client, deployment.connect(mode) as rival:
        lease = await rival.lock("x").acquire()
        assert await count(deployment) == 2
        waiters = [asyncio.create_task(client.lock("x").acquire()) for _ in range(5000)]
        await waiting(client, 5000)
        await queued(rival.lock("x"), 1)
        assert await count(deployment) == 3
        for waiter in waiters[::2]:
            waiter.cancel()
        await waiting(client, 2500)
        await asyncio.wait(waiters[::2])
        assert await count(deployment) == 3
        for waiter in waiters:
            waiter.cancel()
        await asyncio.wait(waiters)
        await nothing_queued(rival)
        assert await count(deployment) <= 4
        await lease.release()
    await until_none(deployment)


async def nothing_queued(client) -> None:
    async def empty() -> bool:
        return not (await client.lock("x").inspect()).waiters

    await until(empty)


async def until_none(deployment) -> None:
    async def none() -> bool:
        return await count(deployment) == 0

    await until(none)


@pytest.mark.parametrize("mode", ["lease", "session"])
async def test_any_number_of_free_locks_cost_one_connection(deployment, mode):
    # A hundred requests at once go out one after the other; on a loaded machine that takes its time.
    async with deployment.connect(mode, ttl=60, command_timeout=20) as client:
        leases = [await client.lock(f"x{number}").acquire() for number in range(100)]
        await asyncio.gather(*(lease.renew() for lease in leases))
        assert await count(deployment) == 1
        for lease in leases:
            await lease.release()
    await until_none(deployment)


@pytest.mark.parametrize("mode", ["lease", "session", "row"])
async def test_beyond_the_cap_waiters_try_again_and_again(deployment, mode):
    async with (
        deployment.connect(mode, connections=12) as client,
        deployment.connect(mode, connections=3) as rival,
    ):
        held = [await client.lock(f"x{number}").acquire() for number in range(10)]
        waiters = [asyncio.create_task(rival.lock(f"x{number}").acquire()) for number in range(10)]
        await waiting(rival, 10)
        await asyncio.sleep(0.3)
        own = 11 if mode == "row" else 1
        assert await count(deployment) <= own + 5

        async def pass_on(waiter) -> None:
            await (await waiter).release()

        for lease in held:
            await lease.release()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*map(pass_on, waiters))


async def test_sessions_that_nobody_needs_are_ended_by_the_server(deployment):
    async with deployment.connect(ttl=1, command_timeout=10) as client, deployment.connect(ttl=60) as rival:
        lease = await rival.lock("x").acquire()
        waiter = asyncio.create_task(client.lock("x").acquire())
        await queued(rival.lock("x"), 1)
        waiter.cancel()
        await nothing_queued(rival)

        async def few() -> bool:
            # The main sessions, and the one that ends statements.
            return await count(deployment) <= 3

        await until(few)
        await lease.release()
        await gets_the_lock(client, "x")


async def test_an_idle_client_keeps_its_session(deployment):
    async with deployment.connect(ttl=4, command_timeout=10) as client:
        [before] = await sessions(deployment.server)
        await asyncio.sleep(6)
        [after] = await sessions(deployment.server)
        assert before[0] == after[0]
        await gets_the_lock(client, "x")


# --- the schema and the account


async def test_the_least_rights_are_enough(deployment, mariadb):
    """With the tables made by an administrator, in an account that has the rights that the page gives and no others."""
    await as_root(mariadb, ddl("given"))
    grants = [grant for grant in granted() if "`database`" in grant]
    assert len(grants) == 3
    for grant in grants:
        await as_root(
            mariadb,
            grant.replace("`database`", "test").replace("`aiolock", "`given").replace("app@", "bare@"),
        )
    url = deployment.url().replace("//app", "//bare")
    for mode in ("lease", "session", "row"):
        options = {"mode": mode, "table": "given", "schema": "manual", "namespace": deployment.namespace}
        async with aiolock.connect(url, **options) as client, aiolock.connect(url, **options) as rival:
            lease = await client.lock("x").acquire()
            waiter = asyncio.create_task(rival.lock("x").acquire())
            await queued(client.lock("x"), 1)
            gone = asyncio.create_task(rival.lock("x").acquire())
            await waiting(rival, 2)
            gone.cancel()
            await lease.renew()
            await lease.release()
            await (await waiter).release()
            await asyncio.wait([gone])


async def test_the_session_mode_needs_the_right_to_name_a_database_and_no_other(deployment, mariadb):
    await as_root(mariadb, f"CREATE USER stranger@'%' IDENTIFIED BY '{PASSWORD}'")
    try:
        url = deployment.url(query="?mode=session").replace("//app", "//stranger")
        with pytest.raises(BackendRefused, match="denied"):
            await aiolock.connect(url).open()
        async with aiolock.connect(url.replace("/test?", "/information_schema?")) as client:
            await gets_the_lock(client, "x")
    finally:
        await as_root(mariadb, "DROP USER stranger@'%'")


async def test_a_missing_table_is_refused_with_the_statement_that_makes_it(deployment):
    client = aiolock.connect(deployment.url(), table="absent", schema="manual")
    with pytest.raises(BackendRefused, match="CREATE TABLE IF NOT EXISTS `absent`"):
        await client.open()
    # An account that may not make it.
    with pytest.raises(BackendRefused, match="denied"):
        await aiolock.connect(deployment.url().replace("//app", "//bare"), table="absent").open()


BROKEN = {
    "a column": ("ALTER TABLE given DROP COLUMN forced", "ADD COLUMN forced CHAR(32)"),
    "a column of another table": (
        "ALTER TABLE given_requests DROP COLUMN ttl",
        "ADD COLUMN ttl BIGINT UNSIGNED",
    ),
    "the key of locks": ("ALTER TABLE given DROP PRIMARY KEY", "ADD PRIMARY KEY (id)"),
    "another key": (
        "ALTER TABLE given_requests DROP PRIMARY KEY, ADD PRIMARY KEY (owner, lock_id)",
        "DROP PRIMARY KEY, ADD PRIMARY KEY (owner)",
    ),
    "a key of another name": (
        "ALTER TABLE given_registers DROP PRIMARY KEY, ADD UNIQUE KEY id (id)",
        "ADD PRIMARY KEY (id)",
    ),
    "a key by which rows are locked": (
        "ALTER TABLE given_requests DROP KEY lock_id",
        "ADD KEY lock_id (lock_id)",
    ),
    "microseconds": (
        "ALTER TABLE given MODIFY expires_at DATETIME NOT NULL",
        "MODIFY COLUMN expires_at DATETIME(6) NOT NULL",
    ),
    "milliseconds": (
        "ALTER TABLE given_requests MODIFY expires_at DATETIME(3) NOT NULL",
        "MODIFY COLUMN expires_at DATETIME(6) NOT NULL",
    ),
    "room for names": (
        "ALTER TABLE given MODIFY name VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL",
        "MODIFY COLUMN name VARCHAR(1024) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL",
    ),
    "letters of labels": (
        "ALTER TABLE given MODIFY label VARCHAR(400) CHARACTER SET latin1 COLLATE latin1_bin NOT NULL",
        "MODIFY COLUMN label VARCHAR(400) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL",
    ),
    "case of namespaces": (
        "ALTER TABLE given MODIFY namespace VARCHAR(64) CHARACTER SET ascii COLLATE ascii_general_ci NOT NULL",
        "MODIFY COLUMN namespace VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL",
    ),
    "room for tokens": (
        "ALTER TABLE given MODIFY token INT UNSIGNED NOT NULL",
        "MODIFY COLUMN token BIGINT UNSIGNED",
    ),
    "nobody as owner": (
        "ALTER TABLE given MODIFY owner CHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL",
        "MODIFY COLUMN owner CHAR(32) CHARACTER SET ascii COLLATE ascii_bin NULL",
    ),
    "room for values": (
        "ALTER TABLE given_registers MODIFY value BLOB NOT NULL",
        "MODIFY COLUMN value MEDIUMBLOB",
    ),
    "transactions": ("ALTER TABLE given_requests ENGINE=MyISAM", "ENGINE=InnoDB"),
    "transactions of locks": ("ALTER TABLE given ENGINE=MyISAM", "ENGINE=InnoDB"),
    "several things": (
        "ALTER TABLE given ENGINE=MyISAM, DROP PRIMARY KEY, MODIFY since DATETIME NOT NULL, DROP COLUMN capacity",
        "ADD PRIMARY KEY (id), ENGINE=InnoDB",
    ),
}


@pytest.fixture
async def given(mariadb) -> AsyncIterator[None]:
    """Tables that an administrator has made."""
    drop = "DROP TABLE IF EXISTS given, given_requests, given_registers"
    await as_root(mariadb, drop)
    for statement in ddl("given").split(";\n"):
        if statement:
            await as_root(mariadb, statement)
    yield
    await as_root(mariadb, drop)


async def test_what_stands_in_tables_beside_does_not_matter(deployment, mariadb, given):
    label = "label VARCHAR(500) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL"
    await as_root(mariadb, f"ALTER TABLE given ADD COLUMN note TEXT, MODIFY {label}, ADD KEY name (name(50))")
    for mode in ("lease", "row"):
        for schema in ("manual", "auto"):
            async with deployment.connect(mode, table="given", schema=schema) as client:
                await gets_the_lock(client, "x")


@pytest.mark.parametrize("schema", ["auto", "manual"])
@pytest.mark.parametrize("what", BROKEN)
async def test_tables_must_be_whole_and_the_statement_that_is_named_makes_them_so(
    deployment, mariadb, given, what, schema
):
    statement, named = BROKEN[what]
    await as_root(mariadb, statement)
    for mode in ("lease", "row"):
        with pytest.raises(UnsafeBackend) as caught:
            await deployment.connect(mode, table="given", schema=schema).open()
    [alter] = re.findall(r"^ALTER TABLE `given\w*` .*;$", str(caught.value), re.MULTILINE)
    assert named in alter
    [found] = [one for one in await deployment.connect(table="given").diagnose() if one.subject == "tables"]
    assert found.level is Level.ERROR
    assert alter in found.text
    await as_root(mariadb, alter)
    for mode in ("lease", "row"):
        async with deployment.connect(mode, table="given", schema=schema) as client:
            await gets_the_lock(client, "x")


async def test_tables_of_an_engine_without_transactions_are_refused(deployment, mariadb, given):
    """Aria is MariaDB's alone."""
    if "MariaDB" not in str(await as_root(mariadb, "SELECT VERSION()")):
        pytest.skip("MySQL has no engine Aria")
    for table in ("given", "given_requests", "given_registers"):
        await as_root(mariadb, f"ALTER TABLE {table} ENGINE=Aria")
    for mode in ("lease", "row"):
        with pytest.raises(
            UnsafeBackend, match="ALTER TABLE `given` ENGINE=InnoDB;\nALTER TABLE `given_requests`"
        ):
            await deployment.connect(mode, table="given").open()


async def test_purging_forgets_rows_and_tokens_go_on_rising(deployment, mariadb):
    async with deployment.connect() as client, deployment.connect() as other:
        last = await gets_the_lock(client, "x")
        held = await client.lock("held").acquire()
        assert await purge(client, idle=3600) == 0
        await as_root(
            mariadb,
            f"UPDATE aiolock SET expires_at = expires_at - INTERVAL 2 HOUR WHERE namespace = '{deployment.namespace}' AND name = 'x'",
        )
        # A row stays for some milliseconds, until the clock is certainly ahead of its token.
        async with asyncio.timeout(PATIENCE):
            while (gone := await purge(client, idle=3600)) == 0:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.001)
        assert gone == 1
        rows = await as_root(mariadb, f"SELECT name FROM aiolock WHERE namespace = '{deployment.namespace}'")
        assert rows == (("held",),)
        assert await gets_the_lock(other, "x") > last
        held.check()
        await held.release()


async def test_purging_finds_any_number_of_rows_and_spares_those_of_others(deployment, mariadb):
    """A statement is about some hundred of them."""
    count = 1201
    async with deployment.connect() as client:
        held = await client.lock("held").acquire()
        for namespace in (deployment.namespace, "others"):
            rows = ", ".join(
                f"(LEFT(SHA2('{deployment.namespace}/{namespace}/{number}', 256), 40), '{namespace}', 'lock', '{number}', '', {number}, "
                "'2020-01-01', '2020-01-01')"
                for number in range(count)
            )
            columns = "id, namespace, family, name, label, token, since, expires_at"
            await as_root(mariadb, f"INSERT INTO aiolock ({columns}) VALUES {rows}")
            rows = rows.replace("'lock'", "'latch'").replace(
                ", '2020-01-01', '2020-01-01')", ", '2020-01-01')"
            )
            columns = "id, namespace, family, name, value, version, expires_at"
            await as_root(mariadb, f"INSERT INTO aiolock_registers ({columns}) VALUES {rows}")
        # A watch of a client that is gone.
        await as_root(
            mariadb,
            "INSERT INTO aiolock_requests SELECT REPEAT('0', 32), id, '', 5, 0, '', 0, 0, '', 1, 0, 0, expires_at, expires_at, "
            f"NULL, NULL, 0 FROM aiolock_registers WHERE namespace = '{deployment.namespace}' AND name = '7'",
        )
        assert await purge(client, idle=3600) == count
        for table, namespace, left in (
            ("aiolock", deployment.namespace, 1),
            ("aiolock", "others", count),
            ("aiolock_registers", deployment.namespace, 0),
            ("aiolock_registers", "others", count),
        ):
            where = f"FROM {table} WHERE namespace = '{namespace}'"
            assert await as_root(mariadb, f"SELECT COUNT(*) {where}") == ((left,),)
            if namespace == "others":
                await as_root(mariadb, f"DELETE {where}")
        assert await as_root(mariadb, "SELECT COUNT(*) FROM aiolock_requests WHERE state = 5") == ((0,),)
        held.check()
        await held.release()


async def test_the_example_of_the_page_purges(deployment, mariadb):
    [example] = re.findall(
        r"^```python\n(from aiolock.mysql import purge.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    names = {"aiolock": aiolock}
    exec(example, names)
    async with deployment.connect() as client:
        await gets_the_lock(client, "x")
    assert await names["once_a_day"](deployment.url(), deployment.namespace) == 0
    await as_root(
        mariadb,
        "UPDATE aiolock SET expires_at = expires_at - INTERVAL 2 DAY, token = 1 "
        f"WHERE namespace = '{deployment.namespace}'",
    )
    assert await names["once_a_day"](deployment.url(), deployment.namespace) == 1


@pytest.mark.parametrize("idle", [60, 3599.9, "86400", None, True, float("inf"), float("nan"), -1, 1e12])
async def test_a_time_that_cannot_be_meant_purges_nothing(idle):
    client = aiolock.connect("mysql://u@127.0.0.1:1/db")
    with pytest.raises(ConfigError, match="idle must be a number of seconds from 3600 to"):
        await purge(client, idle=idle)
    with pytest.raises(ConfigError, match="idle must be"):
        await client._backend.purge(idle)


async def test_purging_is_for_open_clients_of_servers_that_have_rows():
    for url in ("memory://", "mysql://u@127.0.0.1:1/db?mode=session"):
        client = aiolock.connect(url)
        for refused in (purge(client, idle=3600), asyncio.to_thread(check_purge, client, idle=3600)):
            with pytest.raises(UnsupportedKind, match="no rows to purge"):
                await refused
    client = aiolock.connect("mysql://u@127.0.0.1:1/db")
    check_purge(client, idle=3600)
    with pytest.raises(RuntimeError, match="async with"):
        await purge(client, idle=3600)
    with pytest.raises(RuntimeError, match="async with"):
        await client._backend.purge(3600)
    with pytest.raises(ConfigError, match="a client is needed"):
        await purge("mysql://u@127.0.0.1:1/db", idle=3600)


async def test_a_token_goes_on_from_the_row_when_the_clock_does_not(deployment, mariadb):
    async with deployment.connect() as client:
        await gets_the_lock(client, "x")
        future = 1 << 60
        await as_root(
            mariadb,
            f"UPDATE aiolock SET token = {future} WHERE namespace = '{deployment.namespace}' AND name = 'x'",
        )
        tokens = [await gets_the_lock(client, "x") for _ in range(3)]
        assert future < tokens[0] < tokens[1] < tokens[2]


async def test_the_time_zone_of_the_server_does_not_matter(deployment, mariadb):
    for zone in ("+00:00", "+08:00", "-11:00"):
        await as_root(mariadb, f"SET GLOBAL time_zone = '{zone}'")
        async with deployment.connect() as client, deployment.connect() as rival:
            lease = await client.lock("x").acquire()
            assert await rival.lock("x").try_acquire() is None
            await lease.release()
    await as_root(mariadb, "SET GLOBAL time_zone = 'SYSTEM'")


async def test_modes_do_not_share_locks(deployment):
    async with (
        deployment.connect("lease") as one,
        deployment.connect("session") as two,
        deployment.connect("row") as three,
    ):
        async with one.lock("x"), two.lock("x"), three.lock("x"):
            pass
        await nothing_remains(one, "x")


# --- what is said about servers


def test_only_servers_that_take_writes_are_accepted():
    refuse({"read_only": "OFF", "wsrep_on": "OFF"}, "session", "here")
    refuse({"wsrep_on": "ON"}, "lease", "here")
    refuse({"group_replication_single_primary_mode": "ON"}, "row", "here")
    for facts in ({"read_only": "ON"}, {"super_read_only": "ON"}, {"innodb_read_only": "1"}):
        with pytest.raises(BackendRefused) as caught:
            refuse(facts, "lease", "here")
        assert caught.value.retryable, "a replica may be promoted"
    for mode in ("session", "row"):
        for facts in ({"wsrep_on": "ON"}, {"group_replication_single_primary_mode": "OFF"}):
            with pytest.raises(UnsafeBackend):
                refuse(facts, mode, "here")


def test_what_is_promised_depends_on_mode_and_server():
    maria, mysql = {"version": "10.11.19-MariaDB"}, {"version": "8.4.0"}
    assert capabilities(maria, "lease") == {"exclusion", "no-eviction", "push", "fifo", "fencing", "keep"}
    assert capabilities(mysql | {"innodb_flush_log_at_trx_commit": "1"}, "lease") >= {
        "survives-restart",
        "fifo",
    }
    assert capabilities(maria, "session") == {"exclusion", "no-eviction", "push", "fifo"}
    assert capabilities(mysql, "row") == {"exclusion", "no-eviction", "push"}
    assert variables([Result((), 0), Result((("a", "b"),), 0), Result(((7,),), 0)]) == {"a": "b"}


def test_a_look_at_a_lock_leads_to_one_of_three_things():
    mine, other = 5, 9
    assert judge(3.0, other, mine, again=True) == (PollAction.WAIT, 3.0 + GRACE)
    assert judge(0.0, other, mine, again=True) == (PollAction.WAIT, GRACE)
    assert judge(-2 * GRACE, other, mine, again=False) == (PollAction.WAIT, MOMENT)
    assert judge(-2 * GRACE, other, mine, again=True)[0] is PollAction.KILL
    for nobody_or_we in (0, mine):
        assert judge(3.0, nobody_or_we, mine, again=False)[0] is PollAction.WAIT
        assert judge(3.0, nobody_or_we, mine, again=True)[0] is PollAction.REQUEUE


# --- what is misspelt


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("mysql://u:p@h", {}, "must name a database"),
        ("mysql://u:p@h/db?speed=9", {}, "no parameter"),
        ("mysql://u:p@h/db?mode=fast", {}, "mode must be one of"),
        ("mysql://u:p@h/db", {"mode": 3}, "mode must be one of"),
        ("mysql://u:p@h/db?mode=row", {"mode": "row"}, "say it once"),
        ("mysql://u:p@h/db?mode=row&mode=lease", {}, "twice"),
        ("mysql://u:p@h/db", {"table": "a`b"}, "table must be"),
        ("mysql://u:p@h/db?connections=0", {}, "connections must be"),
        ("mysql://u:p@h/db?schema=perhaps", {}, "schema must be one of"),
        ("mysql://u:p@h/db?tls=maybe", {}, "tls must be one of"),
        ("mysql://u:p@h/db?tls_ca=/x", {}, "tls=verify"),
        ("mysql://u:p@h/db?tls=verify&tls_ca=/nowhere", {}, "cannot be read"),
        ("mysql://u:p@h/db?tls=encrypt&unix_socket=/run/x.sock", {}, "needs no TLS"),
        ("mysql://u:p@/db?unix_socket=x.sock", {}, "must be the path of a socket"),
        ("mysql://u:hunter2/x@h/db", {}, "not a URL"),
        ("mysql://u:hunter2#x@h/db", {}, "not a URL"),
        ("mysql://u:hunter2@h:99999/db", {}, "not a URL"),
        ("mysql://u:p@h/db", {"speed": 9}, "no option speed"),
    ],
)
def test_a_wrong_address_is_refused_without_its_password(url, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        aiolock.connect(url, **options)
    assert "hunter2" not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_passwords_are_not_shown():
    backend = MySQLBackend("mariadb://u:hunter2@h/db")
    assert repr(backend) == "<MySQLBackend mysql://u@h:3306/db lease>"
    assert "hunter2" not in f"{backend!r} {vars(backend)!r}"


@pytest.mark.parametrize("mode", ["session", "row"])
async def test_other_kinds_are_refused_before_any_io(mode):
    backend = aiolock.connect(f"mysql://u@h/db?mode={mode}")._backend
    for kind in (READ, WRITE, permits(1, 2)):
        with pytest.raises(UnsupportedKind, match=r"use \?mode=lease"):
            backend.claim(Request("x", kind, 1.0, "me"))
    with pytest.raises(UnsupportedKind):
        backend.register("x", Family.LATCH)
    for asked in (
        backend.request_release("x", Family.LOCK, "why"),
        backend.set_limit("x", 3),
        backend.names("*"),
    ):
        with pytest.raises(UnsupportedKind, match=r"use \?mode=lease"):
            await asked


@pytest.mark.parametrize(
    ("version", "schema", "asked"),
    [
        ("8.0.46", "ON", "performance_schema"),
        ("8.0.46", "1", "performance_schema"),
        ("8.0.22-log", "ON", "performance_schema"),
        ("8.0.21", "ON", "information_schema"),
        ("9.7.0", "ON", "performance_schema"),
        ("9.7.0", "OFF", "information_schema"),
        ("9.7.0", "", "information_schema"),
        ("10.11.19-MariaDB-0+deb12u1", "ON", "information_schema"),
        ("11.8.3-MariaDB", "OFF", "information_schema"),
    ],
)
def test_the_table_of_sessions_is_the_one_that_no_statement_makes_unreadable(version, schema, asked):
    """That of `information_schema` is good for MariaDB alone; there the other one has other columns."""
    assert processlist({"version": version, "performance_schema": schema}) == f"{asked}.processlist"


@pytest.mark.parametrize("user", ["app", "root"])
@pytest.mark.parametrize("mode", ["lease", "session", "row"])
async def test_looks_are_answered_while_a_statement_with_an_emoji_runs(deployment, mariadb, mode, user):
    """MySQL's information_schema.processlist is refused then, if the account may see that statement."""
    statement = "SELECT GET_LOCK('elsewhere', 30) /* \U0001f512 */"
    login = {**mariadb.admin, "db": "test", "charset": "utf8mb4"}
    if user == "app":
        login |= {"user": "app", "password": PASSWORD}
    holder, other = await aiomysql.connect(**login), await aiomysql.connect(**login)
    async with (
        deployment.connect(mode) as client,
        deployment.connect(mode, label="\U0001f511") as rival,
        holder.cursor() as cursor,
        other.cursor() as busy,
    ):
        await cursor.execute(statement)
        task = asyncio.create_task(busy.execute(statement))
        await until(lambda: runs(mariadb, user, statement))
        lease = await client.lock("\U0001f512").acquire()
        waiter = asyncio.create_task(rival.lock("\U0001f512").acquire())
        await until(lambda: waits(client.lock("\U0001f512")))
        info = await client.lock("\U0001f512").inspect()
        assert [one.label for one in info.waiters] == ["\U0001f511"]
        assert len(info.holders) == 1
        if mode == "lease":
            assert [one.name for one in await client.locks()] == ["\U0001f512"]
        assert not task.done()
        await lease.release()
        await (await waiter).release()
        await cursor.execute("SELECT RELEASE_ALL_LOCKS()")
        await task
    holder.close()
    other.close()


@pytest.mark.parametrize("mode", ["lease", "session"])
async def test_with_the_rights_of_the_page_waiters_are_shown_in_the_order_of_their_coming(
    deployment, mariadb, mode
):
    """Also those that came within one second, on connections that are in another order."""
    await as_root(mariadb, "CREATE USER seer@'%'")
    try:
        for grant in ["GRANT ALL ON test.* TO app@'%'", *granted()]:
            if "`database`" not in grant:
                await as_root(mariadb, grant.replace("app@", "seer@"))
        url = f"mysql://seer@{mariadb.host}:{mariadb.port}/test?mode={mode}"
        options = {"namespace": deployment.namespace, "ttl": 10}
        async with (
            deployment.connect(mode) as holder,
            aiolock.connect(url, label="0", **options) as first,
            aiolock.connect(url, label="1", **options) as second,
            aiolock.connect(url, label="2", **options) as third,
        ):
            for order in ([first, second, third], [third, first, second]):
                lease = await holder.lock("x").acquire()
                waiters = []
                for place_in_line, client in enumerate(order, start=1):
                    waiters.append(asyncio.create_task(gets_the_lock(client, "x")))
                    await queued(first.lock("x"), place_in_line)
                shown = [one.label for one in (await first.lock("x").inspect()).waiters]
                assert shown == (["0", "1", "2"] if order[0] is first else ["2", "0", "1"])
                await lease.release()
                await asyncio.gather(*waiters)
    finally:
        await as_root(mariadb, "DROP USER seer@'%'")


async def runs(mariadb, user: str, statement: str) -> bool:
    return any(
        text and text[:40] == statement[:40] for _, state, text in await sessions(mariadb, user) if state
    )


async def waits(lock) -> bool:
    return bool((await lock.inspect()).waiters)
