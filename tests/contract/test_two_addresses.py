"""A name with two addresses, of which the first is silent: clients are connected long before their time to connect is over."""

from __future__ import annotations

import asyncio
import secrets
import socket
from contextlib import closing

import pytest

import aiolock
from aiolock.backends.dial import first, interleaved
from tests.faults.silence import NAME, SILENT, black_hole, two_addresses
from tests.servers import Etcd, MariaDB, Memcached, PostgreSQL, Redis, ZooKeeper

COMMAND_TIMEOUT = 40.0
LIMIT = COMMAND_TIMEOUT / 4
"""Seconds in which a client is connected, on a busy machine; without a silent address it takes a fraction of one."""

SERVERS = {
    "redis": Redis,
    "memcached": Memcached,
    "etcd": Etcd,
    "postgresql": PostgreSQL,
    "mariadb": MariaDB,
    "zookeeper": ZooKeeper,
}


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.filterwarnings("ignore::aiolock.errors.ExperimentalWarning")
async def test_a_silent_address_does_not_keep_from_the_other(kind):
    with SERVERS[kind]() as server:
        url = server.url.replace("127.0.0.1", NAME)
        assert NAME in url
        with two_addresses(*server.ports):
            async with (
                asyncio.timeout(LIMIT),
                aiolock.connect(url, command_timeout=COMMAND_TIMEOUT, ttl=130) as client,
                client.lock(secrets.token_hex(6)),
            ):
                pass


def where(*names):
    families = {True: socket.AF_INET6, False: socket.AF_INET}
    return [(families[":" in name], socket.SOCK_STREAM, 6, "", (name, 1)) for name in names]


def test_families_take_turns():
    found = interleaved(where("::1", "::2", "::2", "::3", "10.0.0.1"))
    assert [address[-1][0] for address in found] == ["::1", "10.0.0.1", "::2", "::3"]


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def at(port, *hosts):
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]


async def test_an_address_that_refuses_is_left_at_once(listener, monkeypatch):
    monkeypatch.setattr("aiolock.backends.dial.DELAY", 1000.0)
    async with asyncio.timeout(LIMIT):
        with closing(await first(at(listener, "127.0.0.8", "127.0.0.1"))) as opened:
            assert opened.getpeername() == ("127.0.0.1", listener)


async def test_errors_of_all_addresses_are_named(listener):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        await first(at(port, "127.0.0.1"))
    with pytest.raises(OSError, match=r"no address answers: .*127\.0\.0\.7.*127\.0\.0\.8"):
        await first(at(port, "127.0.0.7", "127.0.0.8"))


@pytest.mark.parametrize("steps", range(8))
async def test_a_cancelled_dial_leaves_no_socket(listener, steps, monkeypatch):
    made = []
    real = socket.socket

    def socket_of(*arguments):
        made.append(real(*arguments))
        return made[-1]

    monkeypatch.setattr("aiolock.backends.dial.DELAY", 0.0)
    with black_hole(listener):
        monkeypatch.setattr("aiolock.backends.dial.socket.socket", socket_of)
        task = asyncio.create_task(first(at(listener, SILENT, SILENT, "127.0.0.1")))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        try:
            opened = await task
        except asyncio.CancelledError:
            pass
        else:
            opened.close()
    assert [each.fileno() for each in made] == [-1] * len(made)


async def test_a_dial_that_is_cancelled_once_it_has_a_socket_leaves_none(listener, monkeypatch):
    """While the attempts that came too late are ended."""
    made: list[socket.socket] = []
    real, gather, stay = socket.socket, asyncio.gather, asyncio.Event()

    def socket_of(*arguments):
        made.append(real(*arguments))
        return made[-1]

    async def gather_later(*tasks, **options):
        await gather(*tasks, **options)
        stay.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("aiolock.backends.dial.DELAY", 0.0)
    with black_hole(listener):
        monkeypatch.setattr("aiolock.backends.dial.socket.socket", socket_of)
        monkeypatch.setattr("aiolock.backends.dial.asyncio.gather", gather_later)
        task = asyncio.create_task(first(at(listener, SILENT, "127.0.0.1")))
        async with asyncio.timeout(LIMIT):
            await stay.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert made
    assert [each.fileno() for each in made] == [-1] * len(made)
