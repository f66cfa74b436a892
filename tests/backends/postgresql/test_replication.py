"""What ``survives-failover`` takes: each standby that may take over has what the client was told."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

import aiolock
from aiolock.backends.postgresql.backend import PostgreSQLBackend
from aiolock.backends.postgresql.replication import Replication, gap, synchronous
from aiolock.errors import ConfigError, UnsafeBackend
from tests.backends.postgresql.test_store import until
from tests.servers import PostgreSQL

FOLLOWS = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"


@pytest.mark.parametrize(
    ("setting", "number", "names"),
    [
        ("", 1, ()),
        ("  ", 1, ()),
        ("*", 1, ("*",)),
        ("a", 1, ("a",)),
        ("a, B", 1, ("a", "b")),
        ("2 (a,b,c)", 2, ("a", "b", "c")),
        ("FIRST 2 (a, b)", 2, ("a", "b")),
        ("any 1 ( a , b )", 1, ("a", "b")),
        ('ANY 1("first (1), ""x""" , "*")', 1, ('first (1), "x"', "*")),
        ("first", 1, ("first",)),
        ("FIRST 1 (1, any_2)", 1, ("1", "any_2")),
    ],
)
def test_the_setting_is_read_as_the_server_reads_it(setting, number, names):
    assert synchronous(setting) == (number, frozenset(names))


@pytest.mark.parametrize(
    ("names", "followers", "missing"),
    [
        ("", (), "it is empty"),
        ("*", ("a",), r"contains \*"),
        ('FIRST 2 (a, "*")', ("a",), r"contains \*"),
        ("a, b", ("a", "b"), "waits for 1 of the 2"),
        ("ANY 1 (a, b)", ("a",), "waits for 1 of the 2"),
        ("FIRST 2 (a, b, c)", (), "waits for 2 of the 3"),
        ("a", ("a", "b"), "does not list follows the server, and may take over: 'b'"),
        ("a", ("A", "a"), "does not list"),
        ("a", ("",), "does not list"),
        ("a", (), ""),
        ("a", ("a",), ""),
        ("a", ("A",), ""),
        ("a", ("a", "pg_basebackup", "pg_receivewal"), ""),
        ("FIRST 2 (a, b)", ("a", "b"), ""),
        ("ANY 2 (a, b)", ("b",), ""),
    ],
)
def test_each_standby_that_may_take_over_has_to_be_waited_for(names, followers, missing):
    why = gap(Replication(names, followers), furthest=False)
    if missing:
        with pytest.raises(AssertionError, match=missing):
            raise AssertionError(why)
    else:
        assert why == ""
    assert (gap(Replication(names, followers), furthest=True) == "") is bool(names)


@pytest.mark.parametrize("value", ["", "latest", "Furthest", 1])
def test_another_declaration_is_refused_before_any_input_or_output(value):
    with pytest.raises(ConfigError, match="failover must be furthest, not"):
        PostgreSQLBackend("postgresql://app@127.0.0.1:1/x", failover=value)
    with pytest.raises(ConfigError, match="failover must be furthest, not"):
        aiolock.connect(f"postgresql://app@127.0.0.1:1/x?failover={value}")


@pytest.fixture
def primary():
    """A server with a standby of the name ``standby`` that follows it; the first is yielded."""
    init = ["CREATE ROLE app LOGIN", "GRANT CREATE ON SCHEMA public TO app"]
    with PostgreSQL(init=init) as server, PostgreSQL(primary=server):
        while server.ask(FOLLOWS) != [["1"]]:
            time.sleep(0.01)
        yield server


async def change(server, names):
    """Change the setting; new sessions have it."""
    await asyncio.to_thread(
        server.ask, f"ALTER SYSTEM SET synchronous_standby_names = '{names}'", "SELECT pg_reload_conf()"
    )


async def test_the_standbys_of_a_server_decide_and_each_connection_looks_again(primary, caplog):
    caplog.set_level(logging.WARNING)
    # A role that may read nothing about replication sees the names nevertheless.
    url = primary.url.replace("postgres@", "app@")
    asked = {"require": {"survives-failover"}}
    for names, options, promised in (
        ("standby", "", True),
        ("standby, other", "", False),
        ("other", "", False),
        ("*", "", False),
        ("*", "?failover=furthest", True),
        ("", "?failover=furthest", False),
    ):
        await change(primary, names)
        async with aiolock.connect(url + options) as client:
            assert ("survives-failover" in client.capabilities) is promised, (names, options)
    with pytest.raises(UnsafeBackend, match="survives-failover"):
        await aiolock.connect(url, **asked).open()
    await change(primary, "standby")
    async with aiolock.connect(url, **asked) as client:
        await (await client.lock("x").acquire()).release()
        ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'aiolock'"
        for names, promised in (("*", False), ("standby", True)):
            await change(primary, names)
            # Nothing looks while the connections last.
            assert ("survives-failover" in client.capabilities) is not promised
            await asyncio.to_thread(primary.ask, ended)
            await until(lambda promised=promised: ("survives-failover" in client.capabilities) is promised)
        told = [text for text in caplog.messages if "no longer promises" in text]
        assert len(told) == 1
        assert "survives-failover (synchronous_standby_names: it contains *" in told[0]
        # What is held has to be renewed, so the server is used all the same.
        await (await client.lock("x").acquire()).release()
