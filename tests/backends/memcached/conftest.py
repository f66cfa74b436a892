"""Stores on real memcached servers, and what they report."""

from __future__ import annotations

import socket

import pytest

from aiolock.backends.memcached.store import MemcachedStore
from aiolock.backends.urls import Host
from tests.backends.stores import Reporting, key, opener, private  # noqa: F401 - a fixture
from tests.faults.staging import PATIENCE
from tests.servers import Memcached


class Opened(Reporting, MemcachedStore):
    def __init__(self, port: int) -> None:
        super().__init__(Host("127.0.0.1", port))


opened = opener(Opened)
server = private(Memcached, "module")
own = private(Memcached)


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
