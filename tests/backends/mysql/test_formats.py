"""Clients of two versions of the data format refuse each other, whichever came first."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack, suppress

import pymysql.err
import pytest

import aiolock
from aiolock import UnsafeBackend
from aiolock.backends.mysql import context, schema
from aiolock.backends.mysql.context import FORMAT
from aiolock.mysql import ddl
from aiolock.types import Level
from tests.backends.mysql.tools import as_root, sessions
from tests.faults.staging import gets_the_lock, until

MODES = ["lease", "session", "row"]
TABLE = "given"


@pytest.fixture(autouse=True)
async def _tables(mariadb):
    drop = f"DROP TABLE IF EXISTS {TABLE}, {TABLE}_requests, {TABLE}_registers"
    await as_root(mariadb, drop)
    yield
    await as_root(mariadb, drop)


@pytest.fixture
def of_format(monkeypatch, deployment):
    """Makes clients of a version of the format, which are not open yet."""

    def make(version: int, mode: str, **options) -> aiolock.Client:
        with monkeypatch.context() as patch:
            patch.setattr(context, "FORMAT", version)
            patch.setattr(
                context,
                "SCHEMA",
                context.SCHEMA.replace(f"data format {FORMAT}", f"data format {version}"),
            )
            return deployment.connect(mode, table=TABLE, **options)

    return make


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("others", [1, FORMAT + 1, 57])
@pytest.mark.parametrize("first", ["ours", "theirs"])
async def test_a_client_of_another_version_is_refused(of_format, deployment, mode, others, first):
    versions = (FORMAT, others) if first == "ours" else (others, FORMAT)
    async with of_format(versions[0], mode) as one, of_format(versions[0], mode) as two:
        lease = await one.lock("x").acquire()
        for _ in range(2):
            with pytest.raises(
                UnsafeBackend,
                match=f"data format {versions[0]}\\b.* this client has format {versions[1]}\\b",
            ):
                await of_format(versions[1], mode).open()
        # Those that were there go on.
        assert await two.lock("x").try_acquire() is None
        await lease.renew()
        await lease.release()
        await gets_the_lock(two, "x")

    async def none() -> bool:
        return not await sessions(deployment.server)

    # Those that were refused have closed theirs.
    await until(none)


@pytest.mark.parametrize("mode", ["lease", "row"])
async def test_tables_keep_their_version_when_nobody_uses_them(of_format, deployment, mariadb, mode):
    async with of_format(FORMAT + 1, mode) as client:
        await gets_the_lock(client, "x")
    for way in ("auto", "manual"):
        with pytest.raises(UnsafeBackend) as caught:
            await of_format(FORMAT, mode, schema=way).open()
    [found] = [one for one in await of_format(FORMAT, mode).diagnose() if one.subject == "tables"]
    assert found.level is Level.ERROR
    assert f"data format {FORMAT + 1}" in found.text
    # What the message says makes them ours.
    _, _, told = str(caught.value).partition("\n")
    for statement in told.split(";\n"):
        await as_root(mariadb, statement)
    async with of_format(FORMAT, mode) as client:
        await gets_the_lock(client, "x")


async def test_tables_without_a_mark_are_of_the_first_version(of_format, mariadb):
    for statement in ddl(TABLE).replace(f" COMMENT='aiolock data format {FORMAT}'", "").split(";\n"):
        if statement:
            await as_root(mariadb, statement)
    for mode in ("lease", "row"):
        with pytest.raises(UnsafeBackend, match=f"data format 1, and this client has format {FORMAT}"):
            await of_format(FORMAT, mode).open()
    # A remark of an administrator's may stand beside the mark.
    for table in (TABLE, f"{TABLE}_requests", f"{TABLE}_registers"):
        await as_root(
            mariadb, f"ALTER TABLE {table} COMMENT='locks; aiolock data format {FORMAT} (see wiki)'"
        )
    async with of_format(FORMAT, "lease") as client:
        await gets_the_lock(client, "x")


@pytest.mark.parametrize("mode", ["lease", "row"])
async def test_a_client_that_reconnects_looks_again(of_format, mariadb, mode):
    async with of_format(FORMAT, mode) as client:
        await gets_the_lock(client, "x")
        for table in (TABLE, f"{TABLE}_requests", f"{TABLE}_registers"):
            await as_root(mariadb, f"ALTER TABLE {table} COMMENT='aiolock data format {FORMAT + 1}'")
        for number, *_ in await sessions(mariadb):
            await as_root(mariadb, f"KILL {number}")

        async def refused() -> bool:
            try:
                # A name that is new: in the row mode, others are asked for on connections of their own.
                await gets_the_lock(client, secrets.token_hex(8))
            except UnsafeBackend as error:
                return f"data format {FORMAT + 1}" in str(error)
            except aiolock.BackendUnavailable:
                return False
            return False

        await until(refused)


async def test_in_session_mode_every_client_is_seen(of_format, deployment, mariadb):
    """However many there are, and whichever of them leave."""
    async with AsyncExitStack() as stack, AsyncExitStack() as early:
        for _ in range(20):
            await early.enter_async_context(of_format(FORMAT, "session"))
        late = [
            await stack.enter_async_context(of_format(FORMAT, "session", ttl=1, command_timeout=10))
            for _ in range(2)
        ]
        await early.aclose()
        with pytest.raises(UnsafeBackend, match=f"data format {FORMAT} uses"):
            await of_format(FORMAT + 1, "session").open()
        # Also when its connection was another one in between.
        for number, *_ in await sessions(mariadb):
            # Those of the clients that left may end by themselves.
            with suppress(pymysql.err.OperationalError):
                await as_root(mariadb, f"KILL {number}")
        await asyncio.gather(*(again(client) for client in late))
        with pytest.raises(UnsafeBackend, match=f"data format {FORMAT} uses"):
            await of_format(FORMAT + 1, "session").open()
        # Other namespaces are others'.
        async with of_format(FORMAT + 1, "session", namespace=f"{deployment.namespace}-other") as client:
            await gets_the_lock(client, "x")
    async with of_format(FORMAT + 1, "session") as client:
        await gets_the_lock(client, "x")


async def test_in_session_mode_a_hold_of_a_client_whose_first_connection_broke_is_seen(of_format, mariadb):
    async with of_format(FORMAT, "session") as other, of_format(FORMAT, "session") as client:
        first = await other.lock("x").acquire()
        waiting = asyncio.create_task(client.lock("x").acquire())

        async def waits() -> bool:
            return bool((await other.lock("x").inspect()).waiters)

        await until(waits)
        await first.release()
        lease = await waiting
        await other.aclose()
        main = await client._backend.sessions.main()
        assert lease._hold.validity.claim.session is not main
        await as_root(mariadb, f"KILL {main.id}")
        for _ in range(3):
            with pytest.raises(UnsafeBackend, match=f"data format {FORMAT} uses"):
                await of_format(FORMAT + 1, "session").open()
        await lease.release()


async def test_in_session_mode_a_client_that_others_could_not_see_is_refused(of_format, monkeypatch):
    monkeypatch.setattr(schema, "SLOTS", 1)
    async with of_format(FORMAT, "session") as client:
        with pytest.raises(aiolock.BackendUnavailable, match="1 connections use the namespace"):
            await of_format(FORMAT, "session").open()
        await gets_the_lock(client, "x")
    async with of_format(FORMAT, "session") as client:
        await gets_the_lock(client, "x")


async def again(client: aiolock.Client) -> None:
    async def answers() -> bool:
        try:
            await gets_the_lock(client, "own")
        except aiolock.BackendUnavailable:
            return False
        return True

    await until(answers)


async def test_clients_that_come_and_go_at_once_do_not_take_each_other_for_strangers(of_format):
    async def come_and_go() -> None:
        for _ in range(5):
            async with of_format(FORMAT, "session", command_timeout=30):
                pass

    await asyncio.gather(*(come_and_go() for _ in range(20)))
