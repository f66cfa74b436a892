"""Stores on a MongoDB, or on what stands in for one, and what they report."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from aiolock.backends.mongodb.store import MongoDBStore
from aiolock.backends.mongodb.url import parameters
from aiolock.backends.rows.store import Edit, Listener
from aiolock.clock import system_clock
from aiolock.core.backend import Settings
from tests.servers import EXTERNAL, MongoStandIn, mongodb_ask


class External:
    """A MongoDB of other people's."""

    url = EXTERNAL.get("mongodb", "")

    def ask(self, command, **login):
        return mongodb_ask(self.url, command, **login)


class Opened(MongoDBStore):
    """A store that keeps what it reports."""

    def __init__(self, url: str, **options) -> None:
        super().__init__(parameters(url, options))
        self.interruptions = 0
        self.versions_made = 0

    def _interrupted(self) -> None:
        self.interruptions += 1

    async def begin(self, timeout: float = 15.0, namespace: str = "tests") -> Opened:
        settings = Settings(namespace, "label", 10.0, timeout, system_clock)
        await self.open(settings, Listener("me", lambda _: None, self._interrupted))
        return self

    def version(self) -> str:
        self.versions_made += 1
        return f"{id(self)}-{self.versions_made}"

    async def change(self, key, expected, value=b"", **more):
        [row] = await self.compare_and_set([Edit(key, expected, self.version(), value, **more)])
        return row

    async def read(self, key):
        [row] = await self.get([key])
        return row


@asynccontextmanager
async def opened(url: str, collection: str | None = None, **options):
    store = Opened(url, collection=collection)
    try:
        yield await store.begin(**options)
    finally:
        await store.aclose()


def through(url: str, port: int) -> str:
    """The address of a server behind a proxy."""
    return f"mongodb://127.0.0.1:{port}/test?directConnection=true"


@pytest.fixture(scope="module")
def server():
    """A server that nothing is done to."""
    if "mongodb" in EXTERNAL:
        yield External()
        return
    with MongoStandIn() as running:
        yield running


@pytest.fixture
def own():
    """A server for one test; marked `ends_server`."""
    with MongoStandIn() as running:
        yield running


@pytest.fixture
async def store(server):
    async with opened(server.url) as store:
        yield store


@pytest.fixture
async def other(server):
    async with opened(server.url) as store:
        yield store
