"""Stores on real etcd clusters, and what they report."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from aiolock.backends.etcd.store import EtcdStore
from aiolock.backends.etcd.url import parameters
from aiolock.backends.rows.store import Edit, Listener
from aiolock.clock import system_clock
from aiolock.core.backend import Settings
from tests.servers import Etcd


class Opened(EtcdStore):
    """A store that keeps what it reports."""

    def __init__(self, url: str) -> None:
        super().__init__(parameters(url, {}))
        self.interruptions = 0
        self.changed: list[str | None] = []

    def _interrupted(self) -> None:
        self.interruptions += 1

    async def begin(self, timeout: float = 15.0, namespace: str = "tests", address: str = "me") -> Opened:
        settings = Settings(namespace, "label", 10.0, timeout, system_clock)
        await self.open(settings, Listener(address, self.changed.append, self._interrupted))
        return self

    async def insert(self, key, value=b"", **more):
        [row] = await self.compare_and_set([Edit(key, "", "ignored", value, **more)])
        return row

    async def update(self, key, expected, value=b"", **more):
        [row] = await self.compare_and_set([Edit(key, expected, "ignored", value, **more)])
        return row

    async def read(self, key):
        [row] = await self.get([key])
        return row


@asynccontextmanager
async def opened(url: str, **options):
    store = Opened(url)
    try:
        yield await store.begin(**options)
    finally:
        await store.aclose()


def demand_login(server: Etcd, *, prefix: str = "tests/", right: str = "readwrite") -> str:
    """Have the cluster demand a login; return the address of a user with one right to the keys of a prefix."""
    for words in (
        "user add root:password",
        "user grant-role root root",
        "role add locks",
        f"role grant-permission locks {right} --prefix=true {prefix}",
        "user add app:pass%word",
        "user grant-role app locks",
        "auth enable",
    ):
        server.ctl(*words.split())
    return server.url.replace("etcd://", "etcd://app:pass%25word@")


@pytest.fixture(scope="module")
def server():
    """An etcd that nothing is done to."""
    with Etcd() as running:
        yield running


@pytest.fixture
def own():
    """An etcd for one test."""
    with Etcd() as running:
        yield running


@pytest.fixture
async def store(server):
    async with opened(server.url) as store:
        yield store


@pytest.fixture
async def other(server):
    async with opened(server.url, address="other") as store:
        yield store
