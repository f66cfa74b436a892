"""One ZooKeeper for all of these tests, a proxy before it, and sessions and clients that reach it through either."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import pytest

import aiolock
from aiolock import Client
from aiolock.backends.zookeeper.address import parse
from aiolock.backends.zookeeper.session import Session
from aiolock.clock import system_clock
from tests.faults.proxy import Proxy, length_frames
from tests.servers import ZooKeeper

PATIENCE = 30.0
"""Seconds after which something that has to happen counts as never."""
TIMEOUT = 3.0
"""Of sessions, where a test says nothing else."""


@pytest.fixture(scope="session")
def server():
    with ZooKeeper() as running:
        yield running


@pytest.fixture
async def proxy(server) -> AsyncIterator[Proxy]:
    async with Proxy("127.0.0.1", server.port, framing=length_frames) as between:
        yield between


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


class Tools:
    """What these tests share; a fixture, because test folders are no packages."""

    PATIENCE = PATIENCE
    TIMEOUT = TIMEOUT

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    async def until(self, condition: Callable[[], Any], what: str = "the condition") -> None:
        """Wait until `condition` holds, also if it has to be awaited."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + PATIENCE
        while True:
            answer = condition()
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer:
                return
            assert loop.time() < give_up, f"{what} did not come"
            await asyncio.sleep(0.005)

    def connect(self, *ports: int, query: str = "", **options: Any) -> Client:
        """A client that knows these servers."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        fixed = f"session_timeout={TIMEOUT}&tick_time=0.5"
        url = f"zookeeper://{hosts}?{query or fixed}"
        return aiolock.connect(url, **{"namespace": self.namespace, "ttl": 30, **options})

    @contextlib.asynccontextmanager
    async def session(
        self,
        url: str,
        timeout: float = TIMEOUT,
        changes: list[str] | None = None,
        within: float = PATIENCE,
        **options: Any,
    ) -> AsyncIterator[Session]:
        """An open session; every state that it goes through is added to `changes`."""

        def note() -> None:
            if changes is not None:
                changes.append(session.state.current_state)

        address = parse(url, tick_time=0.5, **options)
        session = Session(address, timeout, clock=system_clock, random=Random(), on_change=note)
        try:
            async with asyncio.timeout(within):
                await session.start()
            yield session
        finally:
            await session.close()

    def session_of(self, client: Client) -> Session:
        """The session under a client."""
        return client._backend.session

    def path(self, name: str) -> str:
        """Where a lock is."""
        return f"/{self.namespace}/lock/{name}"


@pytest.fixture
def tools(namespace) -> Tools:
    return Tools(namespace)


@pytest.fixture
async def client(server, tools) -> AsyncIterator[Client]:
    async with tools.connect(server.port, label="client") as opened:
        yield opened


@pytest.fixture
async def rival(server, tools) -> AsyncIterator[Client]:
    async with tools.connect(server.port, label="rival") as opened:
        yield opened
