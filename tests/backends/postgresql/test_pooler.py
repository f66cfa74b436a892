"""A PgBouncer in between: one that pools sessions is used, any other is refused, by clients that are open as well."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import asyncpg
import pytest

import aiolock
from aiolock.backends.postgresql import connection
from aiolock.backends.postgresql.connection import Driver
from aiolock.errors import BackendUnavailable, UnsafeBackend
from aiolock.types import Level
from tests.backends.postgresql.test_diagnosis import found
from tests.backends.postgresql.test_faults import SESSIONS, ask
from tests.backends.postgresql.tools import Heard, key, opened, put
from tests.faults.staging import PATIENCE, until
from tests.servers import PgBouncer

WORDS = r"PgBouncer.*pool_mode = session"


@pytest.fixture
def pooler(own):
    with PgBouncer(own, "session") as pooler:
        yield pooler


async def test_a_pooler_of_sessions_is_a_way_to_the_same_locks(own, pooler):
    options = {"namespace": secrets.token_hex(6), "ttl": 30.0}
    async with (
        aiolock.connect(pooler.url, **options) as client,
        aiolock.connect(own.url, **options) as other,
    ):
        lease = await client.lock("x").acquire()
        waiter = asyncio.create_task(other.lock("x").acquire(timeout=PATIENCE))

        async def queued():
            return bool((await client.lock("x").inspect()).waiters)

        await until(queued)
        await lease.release()
        following = await waiter
        # The other way round it hears of its turn.
        waiter = asyncio.create_task(client.lock("x").acquire(timeout=PATIENCE))
        await until(queued)
        await following.release()
        await (await waiter).release()
    assert (await found(pooler.url))["pooler"].level is Level.OK


async def test_the_end_of_a_session_behind_a_pooler_is_the_end_of_the_connection(own, pooler):
    heard = Heard()
    async with opened(pooler.url, heard) as store:
        await put(store, one := key())
        [[pid], _] = await ask(own, SESSIONS)
        await ask(own, f"SELECT pg_terminate_backend({pid})")
        async with asyncio.timeout(PATIENCE):
            while not heard.interruptions:
                with contextlib.suppress(BackendUnavailable):
                    await store.get([one])
                await asyncio.sleep(0.01)
        await put(store, one)


@pytest.mark.parametrize(
    "settings",
    [
        ["default_pool_size = 1"],
        ["max_db_connections = 1"],
        ["default_pool_size = 1", "query_wait_timeout = 1"],
    ],
)
async def test_a_pool_with_one_session_is_said_to_be_too_small(own, settings):
    with PgBouncer(own, "session", settings) as pooler:
        words = r"one session and no second one.*needs two.*default_pool_size"
        client = aiolock.connect(pooler.url, ttl=5, command_timeout=2)
        with pytest.raises(BackendUnavailable, match=words) as caught:
            await client.open()
        # Another client may close.
        assert caught.value.retryable
        with pytest.raises(BackendUnavailable, match=words):
            await aiolock.connect(pooler.url, ttl=5, command_timeout=2).diagnose()
        # The session is free again.
        program = await asyncpg.connect(pooler.url, statement_cache_size=0)
        program.terminate()


@pytest.mark.parametrize("mode", ["transaction", "statement"])
@pytest.mark.parametrize("settings", [[], ["server_round_robin = 1"]], ids=["lifo", "round robin"])
@pytest.mark.parametrize("numbers", ["made up", "of the server"])
async def test_a_pooler_that_swaps_sessions_is_refused(own, mode, settings, numbers, monkeypatch):
    if numbers == "of the server":
        # Other poolers pass on the number of the process that answered the login.
        monkeypatch.setattr(Driver, "get_server_pid", lambda driver: driver.process)
    with PgBouncer(own, mode, settings) as pooler:
        # Several sessions are there, between which it can choose.
        programs = [await asyncpg.connect(pooler.url, statement_cache_size=0) for _ in range(4)]
        await asyncio.gather(*(program.execute("SELECT pg_sleep(0.2)") for program in programs))
        try:
            with pytest.raises(UnsafeBackend, match=WORDS):
                async with opened(pooler.url):
                    pass
            if settings:
                # The statement of a finding is prepared in one session and looked for in another.
                with pytest.raises(UnsafeBackend, match=WORDS):
                    await found(pooler.url)
            else:
                assert (await found(pooler.url))["pooler"].level is Level.ERROR
        finally:
            for program in programs:
                program.terminate()


async def test_a_pooler_that_swaps_sessions_is_found_out_by_a_client_that_is_open(own, monkeypatch):
    with PgBouncer(own, "transaction") as pooler:

        async def by_chance(*_):
            return False

        monkeypatch.setattr(f"{connection.__name__}.swaps_sessions", by_chance)
        async with opened(pooler.url) as store:
            monkeypatch.undo()
            program = await asyncpg.connect(pooler.url, statement_cache_size=0)
            await program.execute("BEGIN")
            with pytest.raises(UnsafeBackend, match=WORDS):
                await store.get([key()])
            # Nor does it come back.
            with pytest.raises(UnsafeBackend, match=WORDS):
                await store.get([key()])
            program.terminate()


async def test_a_read_that_another_session_has_answered_ends_the_connection(own):
    heard = Heard()
    async with opened(own.url, heard) as store:
        one = key()
        await put(store, one)
        # Newer poolers prepare a statement in whichever session they choose: its number alone tells.
        store._open()._pipelines[0].driver.process += 1
        with pytest.raises(UnsafeBackend, match=WORDS):
            await store.get([one])
        assert heard.interruptions == 1
        await put(store, one)
