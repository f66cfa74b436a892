"""The driver's connections: none is left open, whenever a client is closed, and what is lost is noticed."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pymongo
import pytest

import aiolock
from aiolock import BackendError, BackendUnavailable
from aiolock.backends.mongodb.connection import CONNECT, PAUSE, Connection, connect_time
from aiolock.backends.mongodb.url import parameters
from aiolock.clock import system_clock
from aiolock.core.backend import Settings
from tests.backends.mongodb.conftest import Opened, opened, through
from tests.faults.proxy import Proxy, mongodb_frames
from tests.faults.staging import in_time, until
from tests.servers import MongoStandIn


def sockets() -> set[str]:
    """The sockets of this process."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if (link := str(file.readlink())).startswith("socket:"):
                found.add(link)
    return found


@pytest.fixture
def silent():
    """A port at which a connection is neither accepted nor refused: its queue is full, and further SYNs are dropped."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(listening.getsockname())
        yield listening.getsockname()[1]


async def closes_all(store: Opened, before: set[str]) -> None:
    await store.aclose()
    assert sockets() <= before


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144])
async def test_no_socket_is_left_when_a_client_is_closed_while_it_connects(server, steps):
    before, store = sockets(), Opened(server.url)
    opening = asyncio.ensure_future(store.begin())
    await asyncio.sleep(0)
    for _ in range(steps):
        await asyncio.sleep(0)
    await closes_all(store, before)
    with suppress(BackendError):
        await opening


@pytest.mark.parametrize("steps", [1, 2, 5, 13, 34, 89])
async def test_no_socket_is_left_when_an_opening_is_cancelled(server, steps):
    before, store = sockets(), Opened(server.url)
    opening = asyncio.ensure_future(store.begin())
    for _ in range(steps):
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait([opening])
    await closes_all(store, before)


@pytest.mark.parametrize("after", [0, 0.1, 0.7])
async def test_no_socket_is_left_where_a_connection_is_neither_accepted_nor_refused(silent, after):
    before, store = sockets(), Opened(through("", silent))
    opening = asyncio.ensure_future(store.begin(timeout=30))
    await asyncio.sleep(0)
    await asyncio.sleep(after)
    assert len(sockets() - before) == (1 if after else 0)
    await closes_all(store, before)
    with pytest.raises(BackendUnavailable):
        await opening


async def test_a_server_that_says_nothing_to_a_tls_client_is_given_up_in_time():
    """The driver itself would wait for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        before = sockets()
        url = f"mongodb://127.0.0.1:{listening.getsockname()[1]}/test?directConnection=true&tls=true"
        store, begun = Opened(url), time.monotonic()
        with pytest.raises(BackendUnavailable, match="no answer in time"):
            await store.begin(timeout=3.0)
        await store.aclose()
        assert time.monotonic() - begun < 30
        await until(lambda: sockets() <= before)


@pytest.mark.parametrize("timeout", [0.05, 0.5, 1.0, 1.1, 1.2, 2.0, 3.0, 5.0, 7.5, 8.0, 15.0, 60.0])
def test_no_attempt_to_connect_goes_on_when_a_command_is_given_up(timeout):
    limit, begun = 0.9 * timeout, 0.0
    assert 0 < connect_time(limit) <= CONNECT
    while begun < limit - 1e-9:
        assert begun + connect_time(limit) < limit + 1e-9
        begun += connect_time(limit) + PAUSE


async def test_no_socket_is_left_when_a_server_accepts_and_says_nothing(server):
    port = int(server.url.partition("127.0.0.1:")[2].partition("/")[0])
    async with Proxy("127.0.0.1", port, framing=mongodb_frames) as proxy:
        before, store = sockets(), Opened(through(server.url, proxy.port))
        await store.begin(timeout=60)
        proxy.up.blackhole()
        calls = [asyncio.ensure_future(store.read(f"tests/{number}")) for number in range(40)]
        await asyncio.sleep(0.2)
        await store.aclose()
        assert all(
            isinstance(each, BackendUnavailable)
            for each in await asyncio.gather(*calls, return_exceptions=True)
        )
        proxy.up.heal()
        await until(lambda: sockets() <= before)


async def test_many_calls_at_once_use_few_connections(server):
    before = sockets()
    async with opened(server.url) as store:
        await asyncio.gather(*(store.change(f"tests/{number}", "") for number in range(100)))
        # Those of the pool, and the one by which the driver looks at the member.
        assert len(sockets() - before) <= 17
    assert sockets() <= before


async def test_a_connection_that_is_lost_while_it_is_idle_is_noticed(server):
    port = int(server.url.partition("127.0.0.1:")[2].partition("/")[0])
    async with (
        Proxy("127.0.0.1", port, framing=mongodb_frames) as proxy,
        opened(through(server.url, proxy.port)) as store,
    ):
        await store.read("tests/x")
        proxy.reset_all()
        await until(lambda: store.interruptions)
        await store.read("tests/x")


async def test_a_closed_store_refuses_everything_and_closes_again(server):
    store = await Opened(server.url).begin()
    await asyncio.gather(store.aclose(), store.aclose())
    with pytest.raises(BackendUnavailable, match="the client is closed"):
        await store.read("tests/x")
    await store.aclose()
    # Never opened.
    await Opened(server.url).aclose()
    with pytest.raises(BackendUnavailable, match="not open"):
        await Opened(server.url).read("tests/x")


async def test_a_connection_that_was_never_used_is_closed():
    before = sockets()
    settings = Settings("tests", "label", 10.0, 5.0, system_clock)
    connection = Connection(parameters("mongodb://127.0.0.1:1/x", {}), settings, lambda: None)
    await connection.aclose()
    assert sockets() <= before


@pytest.mark.skipif(
    pymongo.version_tuple < (4, 20), reason="asyncio complains of generators of older drivers"
)
def test_a_client_whose_loop_was_closed_first_complains_of_nothing(server):
    async def use() -> None:
        client = await aiolock.connect(server.url).open()
        async with client.lock("x"):
            pass
        await until(lambda: not client._runtime.backend.store._connection._tasks)

    asyncio.run(use())


@pytest.mark.ends_server
async def test_a_name_that_leads_to_another_primary_is_followed(own):
    """The driver keeps a direct connection to a member that has stepped down."""
    with MongoStandIn() as successor:
        async with opened(successor.url):
            pass  # it has the collection
        async with Proxy("127.0.0.1", own.port) as name, opened(through(own.url, name.port)) as store:
            one = "tests/x"
            await store.change(one, "")
            stale = set(name.ends)
            own.ask({"replSetStepDown": 3600, "force": True}, database="admin")
            for _ in range(2):
                with pytest.raises(BackendUnavailable) as caught:
                    await store.change(one, "")
                assert caught.value.retryable
            name.upstream = ("127.0.0.1", successor.port)
            await in_time(lambda: store.change(one, ""))
            await until(lambda: not stale & name.ends, "the end of the connections to the member of before")
