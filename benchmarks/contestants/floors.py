"""The least that a lock on Redis can cost: scripts on a bare protocol, without any library above it.

The *raw floor* is the least that deserves to be called a lock: SET NX PX, and a script that compares and deletes. The
*script floor* runs the very scripts of aiolock, so the difference to it is the price of our Python.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
from collections import deque
from collections.abc import Iterator
from typing import Any, Self
from urllib.parse import urlsplit

import hiredis

from aiolock.backends.redis.commands import SCRIPTS, MutexCommands, Script, Tokens
from aiolock.core.backend import Request
from aiolock.types import MUTEX
from benchmarks.contestants.base import Contestant

__all__ = ["Ear", "RawFloor", "ScriptFloor", "Wire"]

COMPARE_AND_DELETE = (
    b"if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end"
)

_SCRIPTS = {script.sha.encode(): script for script in (SCRIPTS["enter"], SCRIPTS["release"])}


class Wire(asyncio.Protocol):
    """Commands out, replies in, in order; what is issued in one pass of the loop by several tasks leaves together."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._pending: deque[asyncio.Future[Any]] = deque()
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._burst = False
        self._transport: Any = None

    @classmethod
    async def open(cls, url: str) -> Self:
        parts = urlsplit(url)
        _, wire = await asyncio.get_running_loop().create_connection(cls, parts.hostname, parts.port)
        return wire

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def call(self, command: bytes) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        self._pending.append(future)
        self._out.append(command)
        if not self._scheduled:
            if self._burst or len(self._pending) > 1:
                self._scheduled = True
                self._loop.call_soon(self._flush)
            else:
                self._flush()
        return future

    def _flush(self) -> None:
        self._scheduled = False
        self._transport.write(b"".join(self._out))
        self._out.clear()

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        count = 0
        while (reply := self._reader.gets()) is not False:
            count += 1
            # Whoever asked may have been cancelled; the answer is still its own.
            if not (asked := self._pending.popleft()).done():
                asked.set_result(reply)
        self._burst = count > 1


class Ear(Wire):
    """A subscriber with nothing around it, which listens for grants."""

    def __init__(self) -> None:
        super().__init__()
        self._grants = 0
        self._heard: asyncio.Future[None] | None = None

    @classmethod
    async def subscribed(cls, url: str, channel: str) -> Self:
        ear = await cls.open(url)
        ear._transport.write(hiredis.pack_command(("SUBSCRIBE", channel)))
        return ear

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            if reply[0] == b"message" and reply[2].startswith(b"g"):
                self._grants += 1
                if self._heard is not None and not self._heard.done():
                    self._heard.set_result(None)

    async def hear(self) -> None:
        """Wait for the next grant."""
        if not self._grants:
            self._heard = self._loop.create_future()
            await self._heard
        self._grants -= 1


class _Floor(Contestant):
    """One connection, and as many turns as are wanted."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._requests = (f"{number:x}" for number in itertools.count(1))

    async def __aenter__(self) -> Self:
        self._wire = await Wire.open(self.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._wire.close()


class RawFloor(_Floor):
    """SET NX PX, compare and delete."""

    async def turns(self, name: str, count: int) -> None:
        call, pack, requests = self._wire.call, hiredis.pack_command, self._requests
        await call(pack(("SCRIPT", "LOAD", COMPARE_AND_DELETE)))
        sha = hashlib.sha1(COMPARE_AND_DELETE, usedforsecurity=False).hexdigest()
        key = f"floor:{{{name}}}"
        for _ in range(count):
            request = next(requests)
            if await call(pack(("SET", key, request, "NX", "PX", "30000"))) != b"OK":
                raise RuntimeError("somebody else holds the lock of a floor")
            await call(pack(("EVALSHA", sha, "1", key, request)))


class ScriptFloor(_Floor):
    """aiolock's scripts with the arguments that its backend gives them."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        for script in _SCRIPTS.values():
            await self._wire.call(script.load)
        return self

    async def turns(self, name: str, count: int) -> None:
        lock = self.lock(name)
        call, renamed = self._wire.call, lock.renamed
        for _ in range(count):
            request = renamed()
            if (await call(lock.enter(request)))[0] != 1:
                raise RuntimeError("somebody else holds the lock of a floor")
            await call(lock.release(request))

    def lock(self, name: str) -> _BareLock:
        """For ``async with``; who waits is pushed the grant."""
        return _BareLock(self._wire, self.url, name, self._requests)


class _BareLock:
    """One lock: its two commands, and waiting for a push."""

    def __init__(self, wire: Wire, url: str, name: str, requests: Iterator[str]) -> None:
        # The backend's own code encodes the two commands, once; only the request changes after that.
        tape = _Tape()
        self._process = secrets.token_hex(16)
        commands = MutexCommands(tape.issue, SCRIPTS, Tokens(), "floor:1:", self._process)  # type: ignore[arg-type]
        request = Request(name, MUTEX, 30.0, "floor:1")
        commands.enter(request, 1, wait=True, ticket=-1, terms="6000 s")
        commands.release(request, 1)
        self._enter, self._release = tape.calls
        self._channel = f"floor:1:to:{self._process}"
        self._wire, self._url, self._requests = wire, url, requests
        self._request = ""
        self._ear: Ear | None = None

    def renamed(self) -> str:
        """A new request."""
        return f"{self._process}:{next(self._requests)}"

    def enter(self, request: str) -> bytes:
        script, keys, args = self._enter
        return script.encode(keys, (request, *args[1:]))

    def release(self, request: str) -> bytes:
        script, keys, args = self._release
        return script.encode(keys, (request, *args[1:]))

    async def __aenter__(self) -> None:
        if self._ear is None:
            self._ear = await Ear.subscribed(self._url, self._channel)
        self._request = self.renamed()
        if (await self._wire.call(self.enter(self._request)))[0] != 1:
            await self._ear.hear()

    async def __aexit__(self, *_: object) -> None:
        await self._wire.call(self.release(self._request))


class _Tape:
    """Stands where the connection stands, and keeps what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Script, Any, Any]] = []

    def issue(self, command: bytes) -> None:
        reader = hiredis.Reader()
        reader.feed(command)
        _, sha, _, key, *args = reader.gets()
        self.calls.append((_SCRIPTS[sha], (key,), args))
