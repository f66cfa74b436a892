"""Stores on a MongoDB, or on what stands in for one, and what they report."""

from __future__ import annotations

import pytest

from aiolock.backends.mongodb.store import MongoDBStore
from aiolock.backends.mongodb.url import parameters
from tests.backends.stores import Reporting, key, opener, private  # noqa: F401 - a fixture
from tests.servers import EXTERNAL, MongoStandIn, mongodb_ask


class External:
    """A MongoDB of other people's."""

    url = EXTERNAL.get("mongodb", "")

    def ask(self, command, **login):
        return mongodb_ask(self.url, command, **login)


class Opened(Reporting, MongoDBStore):
    def __init__(self, url: str, collection: str | None = None, **options) -> None:
        super().__init__(parameters(url, {"collection": collection, **options}))


opened = opener(Opened)


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


own = private(MongoStandIn)
"""Tests of it are marked `ends_server`."""


@pytest.fixture
async def store(server):
    async with opened(server.url) as store:
        yield store


@pytest.fixture
async def other(server):
    async with opened(server.url) as store:
        yield store
