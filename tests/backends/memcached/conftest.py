"""Stores on real memcached servers, and what they report."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager

import pytest

from aiolock.backends.memcached.store import MemcachedStore
from aiolock.backends.rows.store import Edit, Listener
from aiolock.backends.urls import Host
from aiolock.clock import system_clock
from aiolock.core.backend import Settings
from tests.faults.staging import PATIENCE
from tests.servers import Memcached


class Opened(MemcachedStore):
    """A store that keeps what it reports."""

    def __init__(self, port: int) -> None:
        super().__init__(Host("127.0.0.1", port))
        self.interruptions = 0

    def _interrupted(self) -> None:
        self.interruptions += 1

    async def begin(self, timeout: float = 15.0, namespace: str = "tests") -> Opened:
        settings = Settings(namespace, "label", 10.0, timeout, system_clock)
        await self.open(settings, Listener("me", lambda _: None, self._interrupted))
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
async def opened(port: int, **options):
    store = Opened(port)
    try:
        yield await store.begin(**options)
    finally:
        await store.aclose()


@pytest.fixture(scope="module")
def server():
    """A server that nothing is done to."""
    with Memcached() as running:
        yield running


@pytest.fixture
def own():
    """A server for one test, which may end it."""
    with Memcached() as running:
        yield running


@pytest.fixture
async def store(server):
    async with opened(server.port) as store:
        yield store


@pytest.fixture
async def other(server):
    async with opened(server.port) as store:
        yield store


def say(server: Memcached, request: bytes, end: bytes) -> bytes:
    """Send something as an administrator would; return the answer up to `end`."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        connection.sendall(request)
        answer = b""
        while not answer.endswith(end):
            more = connection.recv(65_536)
            assert more, answer
            answer += more
    return answer


def figure(server: Memcached, name: str, *what: str) -> str:
    """One of the figures of a server."""
    lines = say(server, " ".join(("stats", *what)).encode() + b"\r\n", b"END\r\n").decode().splitlines()
    return next(line.split(" ", 2)[2] for line in lines if line.startswith(f"STAT {name} "))
