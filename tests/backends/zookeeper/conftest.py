"""One ZooKeeper for all of these tests, a proxy before it, and sessions and clients that reach it through either."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import pytest
from aiozk import exc
from aiozk import protocol as aiozk_protocol

import aiolock
from aiolock import Client
from aiolock.backends.zookeeper import protocol
from aiolock.backends.zookeeper.claim import QueueClaim
from aiolock.backends.zookeeper.session import Session
from aiolock.backends.zookeeper.url import parse
from aiolock.clock import system_clock
from tests.faults.proxy import Proxy, length_frames
from tests.pace import pace
from tests.servers import ZooKeeper

PATIENCE = 60.0
"""Seconds after which something that has to happen counts as never."""
TIMEOUT = 3.0 * pace()
"""Of sessions, where a test says nothing else; a waiter that is not woken looks for itself no earlier than that."""


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


class Replies:
    """Knows which answer that passes a proxy belongs to which kind of request."""

    def __init__(self, proxy: Proxy) -> None:
        self._asked: dict[int, int] = {}
        proxy.on_frame = self._see

    def _see(self, direction: str, frame: bytes) -> None:
        if direction == "up" and len(frame) >= 12:
            xid, opcode = struct.unpack_from("!ii", frame, 4)
            self._asked[xid] = opcode

    def to(self, opcode: int) -> Callable[[bytes], bool]:
        """Whether a frame answers a request with this opcode."""
        return lambda frame: self._asked.get(struct.unpack_from("!i", frame, 4)[0]) == opcode


def end_session(session: Session, port: int) -> None:
    """Take a session over on another connection and close it there, back to back."""
    connect = aiozk_protocol.ConnectRequest(
        protocol_version=0,
        last_seen_zxid=0,
        timeout=3000,
        session_id=session.session_id,
        password=session.password,
        read_only=False,
    ).serialize()
    payloads = [connect, aiozk_protocol.CloseRequest().serialize(1)]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as other:
        other.sendall(b"".join(struct.pack("!i", len(payload)) + payload for payload in payloads))
        while other.recv(4096):
            pass


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
                changes.append(session.state.value)

        address = parse(url, tick_time=0.5, **options)
        session = Session(
            address, timeout, command_timeout=5.0, clock=system_clock, random=Random(), on_change=note
        )
        try:
            async with asyncio.timeout(within):
                await session.start()
            yield session
        finally:
            await session.close()

    def session_of(self, client: Client) -> Session:
        """The session under a client."""
        return client._backend.session

    def replies(self, proxy: Proxy) -> Replies:
        """Tells the replies that pass a proxy apart."""
        return Replies(proxy)

    async def expire(self, session: Session, port: int) -> None:
        """End a session at the server, as if it had expired."""
        await asyncio.to_thread(end_session, session, port)

    async def nodes(self, client: Client, name: str, family: str = "lock") -> list[str]:
        """The children of a lock's node, in their order; none if it is not there."""
        session = self.session_of(client)
        await session.ready()
        await session.ask(protocol.sync())
        try:
            children = (await session.ask(protocol.listing(self.path(name, family), watch=False))).children
        except exc.NoNode:
            return []
        return sorted(children, key=lambda child: child[-10:])

    def path(self, name: str, family: str = "lock") -> str:
        """Where a lock is."""
        return f"/{self.namespace}/{family}/{name}"

    def four_letters(self, server: ZooKeeper, word: bytes) -> str:
        """What the server answers to one of its four-letter words."""
        answer = b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(word)
            while piece := connection.recv(4096):
                answer += piece
        return answer.decode()

    async def empty(self, client: Client, name: str, family: str = "lock") -> None:
        """Wait until nobody is in a queue."""

        async def nobody() -> bool:
            return [node for node in await self.nodes(client, name, family) if node[-10:].isdigit()] == []

        await self.until(nobody, "an empty queue")

    async def waiting(self, client: Client, lock: Any, count: int = 1) -> asyncio.Task[Any]:
        """A task that waits for `lock`, once so many wait."""
        task = asyncio.create_task(lock.acquire())

        async def in_line() -> bool:
            info = await client._backend.inspect(lock.name, lock.kind.family)
            return len(info.waiters) >= count

        await self.until(in_line, "a position in the queue")
        return task

    async def watching(self, client: Client, name: str, family: str = "lock", count: int = 1) -> list[Any]:
        """The claims of this client that wait for a lock, once they are so many: whatever happened before wakes none of them.

        The server knows a waiter before the client has its answer, and sets its watches.
        """
        path, found = self.path(name, family), []

        def watch() -> bool:
            claims = [getattr(listener, "__self__", None) for listener in self.session_of(client).listeners]
            found[:] = [claim for claim in claims if isinstance(claim, QueueClaim) and claim._path == path]
            found[:] = [claim for claim in found if not claim.held and claim.inbox._waiter is not None]
            return len(found) >= count

        await self.until(watch, "a waiter that watches")
        return found

    async def cut(self, client: Client, proxy: Proxy) -> None:
        """The client knows that it has no connection, and gets none for now."""
        proxy.refuse = True
        proxy.reset_all()
        await self.until(lambda: not self.session_of(client).connected)


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
