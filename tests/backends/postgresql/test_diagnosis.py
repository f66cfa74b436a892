"""Findings of `aiolock doctor` about a PostgreSQL server."""

from __future__ import annotations

import asyncpg
import pytest

from aiolock.backends.postgresql import diagnosis
from aiolock.backends.postgresql.connection import Facts
from aiolock.backends.postgresql.diagnosis import diagnose, findings
from aiolock.backends.postgresql.replication import Replication
from aiolock.backends.postgresql.schema import Statements
from aiolock.backends.postgresql.url import parameters
from aiolock.errors import BackendRefused
from aiolock.types import Level
from tests.backends.postgresql.tools import opened, settings

GOOD = Facts("PostgreSQL 18.1 (Debian 18.1-1) on x86_64", False, 7, "on", "on", Replication(""), "run 1")


def levels(facts=GOOD, **variables):
    return {one.subject: one.level for one in findings(facts, {"max_connections": "100", **variables})}


@pytest.mark.parametrize(
    ("changes", "subject", "level"),
    [
        ({}, "version", Level.OK),
        ({"version": "PostgreSQL 13.2 on x86_64"}, "version", Level.ERROR),
        ({"version": "CockroachDB CCL v23.1"}, "version", Level.ERROR),
        ({}, "recovery", Level.OK),
        ({"recovering": True}, "recovery", Level.ERROR),
        ({}, "durability", Level.OK),
        ({"fsync": "off"}, "fsync", Level.WARNING),
        ({"full_page_writes": "off"}, "full_page_writes", Level.WARNING),
        ({}, "synchronous_standby_names", Level.NOTE),
        ({"replication": Replication("b")}, "synchronous_standby_names", Level.OK),
        ({"replication": Replication("ANY 1 (a, b)")}, "synchronous_standby_names", Level.NOTE),
    ],
)
def test_each_fact_is_judged(changes, subject, level):
    assert levels(GOOD._replace(**changes))[subject] is level


def test_a_declared_failover_is_judged_by_the_declaration():
    some = GOOD._replace(replication=Replication("*", ("a", "b")))
    [one] = [
        one
        for one in findings(some, {"max_connections": "100"}, furthest=True)
        if one.subject == "synchronous_standby_names"
    ]
    assert one.level is Level.OK
    assert "the one that has most takes over" in one.text


def test_few_connections_are_noted():
    assert levels(max_connections="20")["max_connections"] is Level.NOTE


async def found(url, **options):
    address, _ = parameters(url, {})
    return {
        one.subject: one
        for one in await diagnose(
            address, Statements(options.pop("table", "public.aiolock")), settings(**options)
        )
    }


async def test_a_server_is_diagnosed_before_and_after_its_table_is_there(own):
    before = await found(own.url)
    assert before["table"].level is Level.NOTE
    async with opened(own.url):
        pass
    after = await found(own.url)
    assert {one.level for one in after.values()} <= {Level.OK, Level.NOTE}
    assert after["table"].level is Level.OK
    assert after["tls"].level is Level.OK


async def test_a_transaction_that_stays_open_is_found(own, monkeypatch):
    assert (await found(own.url))["transactions"].level is Level.OK
    monkeypatch.setattr(diagnosis, "OLD", 0.0)
    other = await asyncpg.connect(own.url, server_settings={"application_name": "a report"})
    async with other.transaction(isolation="repeatable_read"):
        await other.fetchval("SELECT 1")
        one = (await found(own.url))["transactions"]
        assert one.level is Level.WARNING
        assert f"process {other.get_server_pid()} (a report)" in one.text
    # One without a snapshot keeps nothing.
    async with other.transaction():
        assert (await found(own.url))["transactions"].level is Level.OK
    await other.close()


async def test_a_table_that_is_refused_is_a_failure(server):
    server.ask("CREATE TABLE foreign_one (a int)")
    findings = await found(server.url, table="public.foreign_one")
    assert findings["table"].level is Level.ERROR


async def test_a_standby_is_diagnosed_as_well(own):
    async with opened(own.url):
        pass
    own.stop()
    (own.data / "standby.signal").touch(mode=0o644)
    own.start()
    assert (await found(own.url))["recovery"].level is Level.ERROR


async def test_a_server_that_refuses_the_login_is_an_error(server):
    with pytest.raises(BackendRefused):
        await found(server.url.replace("postgres@", "nobody@"))
