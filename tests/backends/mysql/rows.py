"""Stores and listeners for the tests of rows on MySQL."""

from __future__ import annotations

import os
import secrets
from contextlib import asynccontextmanager

import aiomysql

from aiolock.backends.mysql.store import MySQLStore
from aiolock.backends.mysql.url import parameters
from aiolock.backends.rows.store import Edit, Listener
from aiolock.clock import system_clock
from aiolock.core.backend import Settings

OVER_ROWS = (
    ["rows"] if any("engine" in each for each in os.environ.get("AIOLOCK_DEPLOYMENTS", "").split()) else []
)
"""The engine over rows, which users do not get yet: only runs that name a deployment of it have its parameter."""


class Heard:
    """Notes what a store reports."""

    def __init__(self):
        self.address = secrets.token_hex(8)
        self.changed = []
        self.interruptions = 0

    def interrupted(self):
        self.interruptions += 1

    def replaced(self):
        raise AssertionError("a table is not replaced")

    @property
    def listener(self):
        return Listener(self.address, self.changed.append, self.interrupted, self.replaced)


def settings(**options):
    defaults = {
        "namespace": "tests",
        "label": "test",
        "ttl": 10.0,
        "command_timeout": 15.0,
        "clock": system_clock,
    }
    return Settings(**{**defaults, **options})


@asynccontextmanager
async def opened(url, heard=None, *, table="aiolock", create=True, **options):
    """An open store: `async with opened(url) as store`."""
    address, _ = parameters(url, {})
    store = MySQLStore(address, table, create=create)
    try:
        await store.open(settings(**options), (heard or Heard()).listener)
        yield store
    finally:
        await store.aclose()


@asynccontextmanager
async def administrator(server):
    """A cursor of root's, in a transaction that is rolled back."""
    connection = await aiomysql.connect(**{**server.admin, "db": "test"})
    try:
        async with connection.cursor() as cursor:
            yield cursor
    finally:
        await connection.rollback()
        await connection.ensure_closed()


def key(name=""):
    """A key that no other test uses."""
    return f"tests/{name}{secrets.token_hex(8)}"


def edit(key, expected="", version=None, value=b"value", **options):
    return Edit(key, expected, secrets.token_urlsafe(12) if version is None else version, value, **options)


async def put(store, key, value=b"value", **options):
    """Write a row whatever is there; return its version."""
    [row] = await store.get([key])
    [made] = await store.compare_and_set([edit(key, row.version, value=value, **options)])
    assert made is not None
    return made.version
