"""Accidents of a server that a store is open at: the documented error in bounded time, and it goes on by itself afterwards."""

from __future__ import annotations

import asyncio
import time

import asyncpg
import pytest

from aiolock.backends.postgresql.errors import translate
from aiolock.backends.postgresql.store import PostgreSQLStore
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable
from tests.backends.postgresql.test_store import until
from tests.backends.postgresql.tools import Heard, edit, key, opened, put

SESSIONS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'aiolock' ORDER BY backend_start"


async def ask(server, *statements):
    """Ask without blocking the loop."""
    return await asyncio.get_running_loop().run_in_executor(None, server.ask, *statements)


async def again(store, one, seconds=20.0):
    """Read until it works again; return the row."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            [row] = await store.get([one])
            return row
        except BackendUnavailable:
            assert time.monotonic() < deadline


@pytest.mark.parametrize("which", [0, 1])
async def test_a_session_that_is_terminated_is_reported_and_replaced(own, which):
    heard = Heard()
    async with opened(own.url, heard) as store:
        one = key()
        version = await put(store, one)
        pids = await ask(own, SESSIONS)
        await ask(own, f"SELECT pg_terminate_backend({pids[which][0]})")
        await until(lambda: heard.interruptions == 1)
        # The other one was closed with it.
        row = await again(store, one)
        assert row.version == version
        found = await ask(own, SESSIONS)
        while len(found) > 2:
            found = await ask(own, SESSIONS)
        assert {pid for [pid] in found} & {pid for [pid] in pids} == set()
        await store.compare_and_set([edit(one, version, notify=frozenset({heard.address}))])
        await until(lambda: heard.changed == [one])
        assert heard.interruptions == 1


def test_a_statement_that_meets_the_end_of_its_session_says_so():
    """The driver has read what the server said, and not yet that the connection is closed: a moment that cannot be staged."""
    error = translate(
        asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress"), "h:1"
    )
    assert type(error) is BackendUnavailable
    assert str(error).startswith(
        "h:1: the connection is out of step, as it is when the server has ended it: "
    )


@pytest.mark.parametrize("which", [0, 1])
async def test_a_session_that_is_terminated_while_it_is_opened_is_unavailable(own, monkeypatch, which):
    subscribe = PostgreSQLStore._subscribe
    drivers = []
    connect = asyncpg.connect

    async def connected(*words, **options):
        drivers.append(await connect(*words, **options))
        return drivers[-1]

    async def slow(store, driver, facts):
        await subscribe(store, driver, facts)
        await ask(own, f"SELECT pg_terminate_backend({drivers[which].get_server_pid()})")
        await until(drivers[which].is_closed)

    monkeypatch.setattr(asyncpg, "connect", connected)
    monkeypatch.setattr(PostgreSQLStore, "_subscribe", slow)
    with pytest.raises(BackendUnavailable, match=r"connection (was lost|is closed)"):
        async with opened(own.url):
            pass
    assert all(driver.is_closed() for driver in drivers)


async def test_a_write_raises_while_the_connection_is_away_and_a_read_waits(own):
    heard = Heard()
    async with opened(own.url, heard) as store:
        one = key()
        version = await put(store, one)
        own.stop()
        await until(lambda: heard.interruptions == 1)
        with pytest.raises(BackendUnavailable):
            await store.compare_and_set([edit(one, version)])
        read = asyncio.create_task(store.get([one]))
        await asyncio.get_running_loop().run_in_executor(None, own.start)
        [row] = await read
        assert row.version == version


async def test_a_call_ends_within_its_timeout_while_the_server_is_away(own):
    async with opened(own.url, command_timeout=0.5) as store:
        own.kill()
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(BackendUnavailable):
                await store.get([key()])
            assert time.monotonic() - began < 10


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_flushed_write_survives_the_end_of_the_server(own, how):
    heard = Heard()
    async with opened(own.url, heard) as store:
        keys = [key() for _ in range(20)]
        versions = [await put(store, one) for one in keys]
        getattr(own, how)()
        await until(lambda: heard.interruptions == 1)
        await asyncio.get_running_loop().run_in_executor(None, own.start)
        await again(store, keys[0])
        rows = await store.versions(keys)
        assert [row.version for row in rows] == versions


async def test_a_flushed_write_makes_earlier_unflushed_ones_durable(own):
    heard = Heard()
    async with opened(own.url, heard) as store:
        keys = [key() for _ in range(20)]
        versions = [await put(store, one, flush=False) for one in keys]
        await put(store, key())
        own.kill()
        await until(lambda: heard.interruptions == 1)
        await asyncio.get_running_loop().run_in_executor(None, own.start)
        await again(store, keys[0])
        assert [row.version for row in await store.versions(keys)] == versions


async def test_a_frozen_server_costs_the_timeout_and_no_more(own):
    heard = Heard()
    async with opened(own.url, heard, command_timeout=0.5) as store:
        one = key()
        version = await put(store, one)
        own.freeze()
        try:
            began = time.monotonic()
            calls = await asyncio.gather(
                store.get([one]),
                store.compare_and_set([edit(one, version)]),
                *(store.compare_and_set([edit(key())]) for _ in range(5)),
                return_exceptions=True,
            )
            assert time.monotonic() - began < 10
            assert all(isinstance(call, BackendUnavailable) for call in calls)
            assert heard.interruptions == 1
        finally:
            own.thaw()
        row = await again(store, one)
        # The write that raised may have been made or not, and nothing else.
        assert row.version
        [made] = await store.compare_and_set([edit(one, row.version)])
        assert made is not None


async def test_a_row_that_another_transaction_has_costs_the_timeout_and_no_more(own):
    async with opened(own.url) as other, opened(own.url, command_timeout=0.5) as store:
        one = key()
        version = await put(store, one)
        holder = other._open()._pipelines[1].driver
        async with holder.transaction():
            await holder.execute(f"SELECT 1 FROM {store._statements.table} WHERE key = $1 FOR UPDATE", one)
            began = time.monotonic()
            # As if another client had been faster: the statement was rolled back.
            assert await store.compare_and_set([edit(one, version, "next")]) == [None]
            assert time.monotonic() - began < 10
        row = await again(store, one)
        assert row.version == version


async def test_a_full_disk_is_told(own):
    # What the server says of one, also where no file system can be mounted; a real one is in test_client.py.
    async with opened(own.url) as store:
        await put(store, key())
        full = "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'could not extend file' USING ERRCODE = 'disk_full'; END $$"
        await ask(own, full, "CREATE TRIGGER full_disk BEFORE INSERT ON aiolock EXECUTE FUNCTION full_disk()")
        with pytest.raises(BackendRefused, match=r"could not extend file \[53100\]") as refusal:
            await store.compare_and_set([edit(key())])
        assert refusal.value.retryable
        await ask(own, "DROP TRIGGER full_disk ON aiolock")
        await put(store, key())


async def test_a_read_only_transaction_ends_the_connections(own):
    """Its server may have been demoted: they are made anew."""
    heard = Heard()
    async with opened(own.url, heard) as store:
        await store._open().writer().driver.execute("SET default_transaction_read_only = on")
        with pytest.raises(BackendUnavailable, match="need a server that takes writes"):
            await store.compare_and_set([edit(key())])
        assert heard.interruptions == 1
        await store.get([key()])
        await put(store, key())


async def test_privileges_that_are_taken_away_are_told(own):
    own.ask("CREATE ROLE app LOGIN", "GRANT ALL ON SCHEMA public TO app")
    async with opened(own.url):
        pass
    own.ask("GRANT SELECT, INSERT, UPDATE, DELETE ON aiolock TO app")
    async with opened(own.url.replace("postgres@", "app@")) as store:
        one = key()
        version = await put(store, one)
        await ask(own, "REVOKE UPDATE ON aiolock FROM app")
        with pytest.raises(BackendRefused, match="permission denied"):
            await store.compare_and_set([edit(one, version)])
        [row] = await store.get([one])
        assert row.version == version


async def test_a_table_that_is_dropped_is_told(own):
    async with opened(own.url) as store:
        await put(store, key())
        await ask(own, "DROP TABLE aiolock")
        with pytest.raises(BackendRefused, match="does not exist"):
            await store.get([key()])


async def test_sessions_that_end_all_the_time_give_no_wrong_answer(own):
    heard = Heard()
    async with opened(own.url, heard, command_timeout=5.0) as store:
        one = key()
        known = {await put(store, one)}
        stop, reads, made = False, 0, 0

        async def terminate():
            while not stop:
                await until(lambda goal=reads + 3: stop or reads >= goal, seconds=60)
                await ask(
                    own,
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'aiolock'",
                )

        killer = asyncio.create_task(terminate())
        try:
            deadline = time.monotonic() + 60
            # On a busy machine the listener may be between two connections whenever all sessions are ended.
            while (made < 40 or not heard.interruptions) and time.monotonic() < deadline:
                try:
                    [row] = await store.get([one])
                    reads += 1
                    assert row.version in known
                    [row] = await store.compare_and_set([attempt := edit(one, row.version)])
                    known.add(attempt.version)
                    assert row is not None
                    made += 1
                except BackendError:
                    [row] = [await again(store, one)]
                    known.add(row.version)
        finally:
            stop = True
            await killer
        assert made >= 40
        assert heard.interruptions
