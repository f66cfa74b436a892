"""Peers on memcached: a lock by ``add`` that people write by hand, and the commands that a lock costs at least.

They share one connection for each process, on which the commands of all tasks travel together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self
from urllib.parse import urlsplit

from benchmarks.contestants.base import RENEWALS, InBlocks, Polling, again_and_again

__all__ = ["AddDelete", "PollingAdd", "Touching"]


class Wire(asyncio.Protocol):
    """Commands out, lines of answers in, in order."""

    def __init__(self) -> None:
        self._pending: deque[asyncio.Future[bytes]] = deque()
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def call(self, command: str) -> asyncio.Future[bytes]:
        """Send a command whose answer is one line."""
        future = asyncio.get_running_loop().create_future()
        self._pending.append(future)
        self._transport.write(command.encode() + b"\r\n")
        return future

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\r\n")
        for line in lines:
            # Whoever asked may have been cancelled; the answer is still its own.
            if not (asked := self._pending.popleft()).done():
                asked.set_result(line)

    def close(self) -> None:
        self._transport.close()


class _ByHand(InBlocks):
    async def __aenter__(self) -> Self:
        parts, loop = urlsplit(self.url), asyncio.get_running_loop()
        _, self.wire = await loop.create_connection(Wire, parts.hostname, parts.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.wire.close()

    async def enter(self, name: str) -> bool:
        """Add an item that expires after the ttl, unless there is one."""
        return await self.wire.call(f"add by-hand:{name} 0 {self.ttl:.0f} 1\r\n1") == b"STORED"

    async def exit(self, name: str) -> None:
        await self.wire.call(f"delete by-hand:{name}")


class AddDelete(_ByHand):
    """No lock: one bare ``add`` and one bare ``delete``, the least that a lock costs."""

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        await self.enter(name)
        yield
        await self.exit(name)


class PollingAdd(_ByHand, Polling):
    """``add`` every ``interval`` seconds until there was no item, and ``delete``, whoever's item it is by then."""


class Touching(_ByHand):
    """Items that expire, of which each is prolonged by itself."""

    @asynccontextmanager
    async def keep(self, names: Sequence[str]) -> AsyncIterator[None]:
        await asyncio.gather(*(self.enter(name) for name in names))

        async def renew() -> None:
            await asyncio.gather(*(self.wire.call(f"touch by-hand:{name} {self.ttl:.0f}") for name in names))

        async with again_and_again(renew, self.ttl / RENEWALS):
            yield
        await asyncio.gather(*(self.exit(name) for name in names))
