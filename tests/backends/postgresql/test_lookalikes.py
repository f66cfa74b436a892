"""Servers that speak PostgreSQL's protocol and are another product: a PostgreSQL says, or shows, that it is one of them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
import warnings

import pytest

import aiolock
from aiolock.errors import BackendRefused, ExperimentalWarning, UnsafeBackend
from aiolock.types import Level

SAYS = (
    "SET allow_system_table_mods = on; "
    "CREATE OR REPLACE FUNCTION pg_catalog.version() RETURNS text LANGUAGE sql STABLE AS $$ SELECT '{version}'::text $$"
)
COCKROACH = SAYS.format(version="CockroachDB CCL v24.3.10 (x86_64-pc-linux-gnu, built 2025/04/09, go1.22)")
DSQL = "CREATE SCHEMA sys; CREATE VIEW sys.iam_pg_role_mappings AS SELECT 'arn' AS arn"
YUGABYTE = SAYS.format(version="PostgreSQL 15.12-YB-2025.2.3.0-b1 on x86_64-pc-linux-gnu, 64-bit")


@pytest.fixture
async def pretends(server):
    """A database of its own, whose catalogue is changed; functions and schemas are each database's own."""
    made = []

    async def make(statements):
        made.append(name := f"like_{secrets.token_hex(4)}")
        await asyncio.to_thread(server.ask, f"CREATE DATABASE {name}")
        await asyncio.to_thread(server.ask, statements, database=name)
        return server.url.replace("/test", f"/{name}")

    yield make
    for name in made:
        await asyncio.to_thread(server.ask, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.parametrize(("statements", "name"), [(COCKROACH, "CockroachDB"), (DSQL, "Aurora DSQL")])
async def test_another_product_is_refused_by_name(pretends, statements, name):
    url = await pretends(statements)
    with pytest.raises(BackendRefused, match=f"this is {name}") as caught:
        await aiolock.connect(url).open()
    assert not caught.value.retryable
    with pytest.raises(BackendRefused, match=f"this is {name}"):
        await aiolock.connect(url).diagnose()


async def test_a_setting_that_another_product_does_not_know_says_less_than_its_name(pretends, monkeypatch):
    from aiolock.backends.postgresql.schema import Statements  # noqa: PLC0415 - only this test changes it

    call = Statements.__call__

    def unknown(self, name, *args):
        return "SET no_such_setting_at_all = 1" if name == "settings" else call(self, name, *args)

    monkeypatch.setattr(Statements, "__call__", unknown)
    with pytest.raises(BackendRefused, match="this is CockroachDB"):
        await aiolock.connect(await pretends(COCKROACH)).open()


async def test_an_experimental_product_is_used_with_a_warning_and_promises_less(pretends):
    url = await pretends(YUGABYTE)
    client, line = aiolock.connect(url), inspect.currentframe().f_lineno + 2
    with pytest.warns(ExperimentalWarning, match="YugabyteDB") as told:
        await client.open()
    async with contextlib.aclosing(client):
        assert "exclusion" not in client.capabilities
        async with client.lock("x"):
            pass
        found = {finding.subject: finding for finding in await client.diagnose()}
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, line)]
    assert found["version"].level is Level.WARNING
    assert "YugabyteDB" in found["version"].text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        with pytest.raises(UnsafeBackend, match="does not promise exclusion"):
            await aiolock.connect(url, require={"exclusion"}).open()
