"""Conversations with a memcached server: check it, and ask what the lock protocol does not.

A conversation has a connection of its own; one that has checked the server can be taken over by a :class:`Connection`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiolock.backends.diagnosis import numbers
from aiolock.backends.memcached.protocol import ERRORS, NOOP, read, refusal, write
from aiolock.backends.rows.store import MOST_KEY, MOST_VALUE
from aiolock.backends.urls import Host
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, UnsafeBackend, shorten

__all__ = ["FORMAT", "OLDEST", "Conversation", "conversation"]

OLDEST = 1, 6, 13
"""Before it, the CAS id in the answer to a write can be that of another write."""
ITEM = MOST_KEY + MOST_VALUE + 256
"""Bytes of the longest item, with what memcached stores beside its value."""
FORMAT = b"1"
"""The version of the keys, the mark of every namespace, as long as the server remembers it."""


class Conversation:
    """Questions on a connection, one after the other, with answers of lines."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.version = ""
        self.transport: asyncio.WriteTransport | None = None
        self._reader = asyncio.StreamReader(limit=65_536)

    async def open(self) -> None:
        """Connect, and check that the server is a memcached that this library can use."""
        loop = asyncio.get_running_loop()
        self.transport, _ = await loop.create_connection(
            lambda: asyncio.StreamReaderProtocol(self._reader), self.host.name, self.host.port
        )
        # Longer than the header of the binary protocol, so that a server that speaks no other ends the connection.
        self.send(b"version\r\n" + 4 * NOOP)
        line = await self.line()
        word, _, self.version = line.decode(errors="replace").partition(" ")
        if line.startswith(ERRORS):
            raise refusal(str(self.host), line)
        if word != "VERSION" or len(numbers(self.version)) < 3:
            raise BackendRefused(f"{self.host} is no memcached: it answers {shorten(line[:80])} to `version`")
        if numbers(self.version) < OLDEST:
            raise BackendRefused(
                f"{self.host} is memcached {shorten(self.version)}; locks need {'.'.join(map(str, OLDEST))} or later"
            )
        for _ in range(4):
            if not (line := await self.line()).startswith(b"MN"):
                raise refusal(str(self.host), line)

    def send(self, data: bytes) -> None:
        """Send a question."""
        assert self.transport is not None  # noqa: S101 - it is open
        self.transport.write(data)

    async def line(self) -> bytes:
        """Return the next line of an answer; those of a list of keys end without a carriage return."""
        return (await self._reader.readuntil(b"\n")).rstrip(b"\r\n")

    async def stats(self, *what: str) -> dict[str, str]:
        """Return the figures of the server about ``what``."""
        self.send(" ".join(("stats", *what)).encode() + b"\r\n")
        found = {}
        while (line := await self.line()) != b"END":
            word, name, value = [*line.decode(errors="replace").split(" ", 2), "", ""][:3]
            if word != "STAT":
                raise refusal(str(self.host), line)
            found[name] = value
        return found

    async def check(self) -> None:
        """Check settings that cannot be worked with: a write that is too long deletes what was to be replaced."""
        settings = await self.stats("settings")
        if settings.get("cas_enabled") == "no":
            raise BackendRefused(f"{self.host}: it was started with -C, and locks need CAS ids")
        if (size := int(settings.get("item_size_max", ITEM))) < ITEM:
            raise BackendRefused(
                f"{self.host}: it stores at most {size:,} bytes under a key, and the row of a lock with many waiters has up "
                "to 65,536; start it with -I 128k or more"
            )

    async def mark(self, namespace: str) -> None:
        """Mark a namespace with the version of its keys. Raises :class:`UnsafeBackend` if it has the mark of another one."""
        key = f"{namespace}/format"
        self.send(write(key, FORMAT, "", 0) + read(key))
        added = await self.line()
        found = await self.line()
        if not found.startswith(b"VA "):
            raise refusal(str(self.host), added if b"ERROR" in added else found)
        there = await self.line()
        if there != FORMAT:
            raise UnsafeBackend(
                f"{self.host}: namespace {namespace} has keys of version {shorten(there.decode(errors='replace'))}, and "
                f"this library writes version {FORMAT.decode()}: use one version of the library everywhere, or another namespace"
            )

    def translated(self, error: Exception) -> BackendError:
        """Return the error of this library for one of the connection; the caller chains it."""
        if isinstance(error, TimeoutError):
            return BackendUnavailable(f"{self.host} did not answer in time")
        if isinstance(error, EOFError | ConnectionResetError | BrokenPipeError) and not self.version:
            return BackendRefused(
                f"{self.host} closed the connection instead of answering: it may demand TLS (-Z) or SASL (-S), which are "
                "not supported, have too many connections (-c), or be no memcached",
                retryable=True,
            )
        if isinstance(error, OSError | EOFError):
            return BackendUnavailable(f"{self.host}: {error}")
        return BackendRefused(f"{self.host} is no memcached: its answer is not understood")


@asynccontextmanager
async def conversation(host: Host, timeout: float) -> AsyncIterator[Conversation]:
    """Have a conversation of at most ``timeout`` seconds on a connection of its own.

    Raises :class:`BackendError`. Cancelling it leaves no socket behind.
    """
    talk = Conversation(host)
    try:
        async with asyncio.timeout(timeout):
            await talk.open()
            yield talk
    except (OSError, EOFError, ValueError, LookupError, asyncio.LimitOverrunError) as error:
        raise talk.translated(error) from error
    finally:
        if talk.transport is not None:
            talk.transport.abort()
