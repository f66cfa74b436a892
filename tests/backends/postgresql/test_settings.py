"""Hostile settings of roles, databases and servers: no connection for locks is affected by them."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import connect
from aiolock.clock import system_clock
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, UnsafeBackend
from tests.backends.postgresql.test_store import until
from tests.backends.postgresql.test_warnings import end_wait
from tests.backends.postgresql.tools import Heard, edit, key, opened, put
from tests.servers import PostgreSQL

HOSTILE = {
    "statement_timeout": "'20ms'",
    "lock_timeout": "'1ms'",
    "idle_session_timeout": "'100ms'",
    "idle_in_transaction_session_timeout": "'1ms'",
    "default_transaction_read_only": "on",
    "default_transaction_isolation": "'serializable'",
    "default_transaction_deferrable": "on",
    "synchronous_commit": "off",
    "search_path": "hostile, public",
    "client_min_messages": "error",
    "client_encoding": "'LATIN1'",
    "standard_conforming_strings": "off",
    "row_security": "on",
    "bytea_output": "'escape'",
    "DateStyle": "'SQL, DMY'",
    "IntervalStyle": "'sql_standard'",
    "TimeZone": "'Pacific/Kiritimati'",
    "extra_float_digits": "-15",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "enable_indexscan": "off",
    "enable_nestloop": "off",
    "enable_material": "off",
    "plan_cache_mode": "force_custom_plan",
    "jit": "on",
    "jit_above_cost": "0",
    "work_mem": "'64kB'",
    "backslash_quote": "on",
    "quote_all_identifiers": "on",
}
NEWER = {"transaction_timeout": "'500ms'"}
"""Settings of version 17 and later. With a shorter one nobody could log in: the login is a transaction, too."""

INIT = (
    "CREATE SCHEMA hostile",
    "CREATE ROLE app LOGIN",
    "GRANT ALL ON SCHEMA public TO app",
    "GRANT USAGE ON SCHEMA hostile TO app",
    # What a careless search path would find before the server's own.
    "CREATE FUNCTION hostile.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT NULL::timestamptz'",
    "CREATE FUNCTION hostile.decode(text, text) RETURNS bytea LANGUAGE sql AS 'SELECT NULL::bytea'",
    "CREATE FUNCTION hostile.pg_notify(text, text) RETURNS void LANGUAGE sql AS 'SELECT NULL::void'",
    "CREATE TABLE hostile.aiolock (nothing int)",
)


@pytest.fixture(scope="module", params=["role", "database", "server"])
def hostile(request):
    """A server with such settings of the role, the database, or itself."""
    probe = PostgreSQL()
    newer = NEWER if probe.version >= 17 else {}
    probe.close()
    words = HOSTILE | newer
    if request.param == "server":
        settings, init = [f"{name} = {value}" for name, value in words.items() if name != "search_path"], INIT
    else:
        place = "ROLE app" if request.param == "role" else "DATABASE test"
        settings, init = (
            [],
            [*INIT, *(f"ALTER {place} SET {name} = {value}" for name, value in words.items())],
        )
    with PostgreSQL(settings=settings, init=init) as server:
        yield server


def url_of(server, role="app"):
    return server.url.replace("postgres@", f"{role}@")


async def test_every_verb_works_whatever_the_settings_are(hostile):
    mine, theirs = Heard(), Heard()
    async with opened(url_of(hostile), mine) as store, opened(url_of(hostile), theirs) as other:
        one, two = key(), key()
        version = await put(store, one, "é\\'\0".encode(), ttl=60)
        [row] = await other.get([one])
        assert (row.value, row.version) == ("é\\'\0".encode(), version)
        assert row.tick > 1_600_000_000_000_000
        made = await store.compare_and_set(
            [edit(one, version, notify=frozenset({theirs.address})), edit(two, value=None, expected="absent")]
        )
        assert [answer is not None for answer in made] == [True, False]
        await until(lambda: theirs.changed == [one])
        assert [each async for each, _ in store.scan(one)] == [one]
        assert await store.purge("", 0) == 0


async def test_an_idle_session_lives_on(hostile):
    heard = Heard()
    async with opened(url_of(hostile), heard) as store:
        await asyncio.sleep(0.5)
        await put(store, key())
    assert heard.interruptions == 0


async def test_a_write_waits_for_a_row_as_long_as_we_say(hostile):
    async with opened(url_of(hostile)) as store, opened(url_of(hostile)) as other:
        one = key()
        version = await put(store, one)
        holder = other._open()._pipelines[0].driver
        async with holder.transaction():
            await holder.execute(f"SELECT 1 FROM {store._statements.table} WHERE key = $1 FOR UPDATE", one)
            start = system_clock()
            # The server's own setting is a millisecond, and an error.
            assert await store.compare_and_set([edit(one, version, "next")]) == [None]
            assert system_clock() - start > 0.09
        [made] = await store.compare_and_set([edit(one, version, "next")])
        assert made.version == "next"


async def test_a_lock_whose_row_another_transaction_has_is_acquired_afterwards(hostile):
    async with connect(url_of(hostile), namespace="rows", command_timeout=30) as client:
        await (await client.lock("x").acquire()).release()
        async with opened(url_of(hostile)) as other:
            holder = other._open()._pipelines[0].driver
            async with holder.transaction():
                await holder.execute(f"SELECT 1 FROM {other._statements.table} FOR UPDATE")
                entering = asyncio.create_task(client.lock("x").acquire())
                await asyncio.sleep(1.0)
                assert not entering.done()
            await (await entering).release()


async def test_the_settings_of_both_connections_are_ours(hostile):
    async with opened(url_of(hostile)) as store:
        for pipeline in store._open()._pipelines:
            rows = await pipeline.fetch(
                "SELECT name, setting FROM pg_settings WHERE name = ANY (ARRAY['statement_timeout', 'idle_session_timeout', "
                "'transaction_timeout', 'default_transaction_isolation', 'default_transaction_read_only', "
                "'synchronous_commit', 'search_path'])"
            )
            found = dict(rows)
            found.pop("transaction_timeout", None)
            assert found == {
                "statement_timeout": "0",
                "idle_session_timeout": "0",
                "default_transaction_isolation": "read committed",
                "default_transaction_read_only": "off",
                "synchronous_commit": "on",
                "search_path": "pg_catalog, pg_temp",
            }


# --- durability


async def test_a_commit_that_did_not_reach_its_replica_is_no_success(own):
    # No standby of that name exists: every commit waits until an administrator cancels the wait, and then it is answered
    # with a warning only, although it is not on the standby.
    async with opened(own.url) as store:
        one, after, write = await end_wait(own, store, "pg_cancel_backend")
        with pytest.raises(BackendUnavailable, match="synchronous replication"):
            await write
        # An unflushed write waits for no standby, and the read tells what became of the other one.
        [row] = await store.get([one])
        assert row.version == after
        [made] = await store.compare_and_set([edit(one, after, "last", flush=False)])
        assert made.version == "last"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], {"survives-restart"}),
        (["fsync = off"], set()),
        (["full_page_writes = off"], set()),
        (["synchronous_standby_names = ''"], {"survives-restart"}),
    ],
)
async def test_capabilities_tell_how_durable_a_commit_is(settings, words):
    with PostgreSQL(settings=settings) as server:
        async with opened(server.url) as store:
            durable = {word for word in store.capabilities if word.startswith("survives")}
            assert durable == words
            assert {"exclusion", "fencing", "fifo", "keep", "no-eviction", "push"} <= store.capabilities


# --- the table


async def test_row_level_security_is_an_error_and_hides_no_row(server):
    server.ask(
        "CREATE ROLE secured LOGIN",
        "CREATE SCHEMA secured",
        "GRANT ALL ON SCHEMA secured TO secured",
    )
    table = "secured.rows"
    async with opened(server.url, table=table):
        pass
    server.ask(
        "GRANT ALL ON secured.rows TO secured",
        "ALTER TABLE secured.rows ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY none ON secured.rows USING (false)",
    )
    async with opened(url_of(server, "secured"), table=table) as store:
        with pytest.raises(BackendRefused, match="row-level security"):
            await store.get([key()])


@pytest.mark.parametrize(
    ("definition", "error", "words"),
    [
        ("(key text) ; COMMENT ON TABLE {} IS 'aiolock data format 1'", UnsafeBackend, "not as it must be"),
        ("(nothing int)", UnsafeBackend, "has the comment None"),
        (
            "(nothing int); COMMENT ON TABLE {} IS 'aiolock data format 7'",
            UnsafeBackend,
            "has data format 7, and this client has data format 1",
        ),
    ],
)
async def test_another_table_of_that_name_is_refused(server, definition, error, words):
    table = f"public.other{key()[-6:].lower()}"
    server.ask(*f"CREATE TABLE {table} {definition}".replace("{}", table).split(";"))
    with pytest.raises(error, match=words):
        async with opened(server.url, table=table):
            pass


async def test_a_table_that_a_crash_would_empty_is_refused(server):
    async with opened(server.url, table="unlogged"):
        pass
    server.ask("ALTER TABLE unlogged SET UNLOGGED")
    with pytest.raises(UnsafeBackend, match="not as it must be"):
        async with opened(server.url, table="unlogged"):
            pass


async def test_many_clients_create_the_table_at_once(server):
    tables = [f"many{number}" for number in range(3)]

    async def use(table):
        async with opened(server.url, table=table) as store:
            await put(store, key())

    results = await asyncio.gather(
        *(use(table) for table in tables for _ in range(4)), return_exceptions=True
    )
    assert [result for result in results if isinstance(result, BackendError)] == []
    assert results == [None] * 12


async def test_a_missing_table_is_told_with_the_statements_that_make_it(server):
    with pytest.raises(
        BackendRefused, match=r"(?s)is missing; have an administrator run:\nCREATE TABLE"
    ) as caught:
        async with opened(server.url, table="absent", schema="check"):
            pass
    statements = str(caught.value).partition("run:\n")[2]
    server.ask(*statements.strip().rstrip(";").split(";"))
    async with opened(server.url, table="absent", schema="check") as store:
        await put(store, key())


async def test_the_least_privileges_are_enough_and_each_of_them_is_needed(server):
    server.ask("CREATE ROLE least LOGIN")
    async with opened(server.url, table="least"):
        pass
    server.ask("GRANT SELECT, INSERT, UPDATE, DELETE ON least TO least")
    least = url_of(server, "least")
    async with opened(least, table="least") as store:
        one = key()
        version = await put(store, one, ttl=1, notify=frozenset({"x"}))
        await store.compare_and_set([edit(one, version, "", None)])
        await store.purge("", 0)
        assert [each async for each in store.scan("tests/")] == []
    for privilege in ("SELECT", "INSERT", "UPDATE", "DELETE"):
        server.ask(f"REVOKE {privilege} ON least FROM least")
        with pytest.raises(BackendRefused, match=f"GRANT {privilege} ON"):
            async with opened(least, table="least"):
                pass
        server.ask(f"GRANT {privilege} ON least TO least")


async def test_a_role_that_may_not_create_the_table_is_told_what_to_run(server):
    server.ask("CREATE ROLE reader LOGIN", "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    with pytest.raises(BackendRefused, match=r"(?s)permission denied.*have an administrator run"):
        async with opened(url_of(server, "reader"), table="forbidden"):
            pass
