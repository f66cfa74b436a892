"""The connections to one memcached server: a new one, which checks it, and the pipelined one that replaces it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Unpack

from aiolock.backends.diagnosis import numbers
from aiolock.backends.dial import dial
from aiolock.backends.memcached.protocol import (
    ERRORS,
    NOOP,
    Parser,
    ProtocolError,
    Response,
    fits,
    read,
    refusal,
    write,
)
from aiolock.backends.rows.store import MOST_KEY, MOST_VALUE
from aiolock.backends.transport import ConnectionState, Hook, Options, Slot, WaitingTransport
from aiolock.backends.urls import Host
from aiolock.core.tasks import settle
from aiolock.core.wakeup import LITTLE
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, UnsafeBackend, shorten

__all__ = ["FORMAT", "OLDEST", "Connection", "NewConnection", "Reply", "new_connection"]

OLDEST = 1, 6, 13
"""Before it, the CAS id in the answer to a write can be that of another write."""
ITEM = MOST_KEY + MOST_VALUE + 256
"""Bytes of the longest item, with what memcached stores beside its value."""
FORMAT = b"1"
"""The version of the keys, the mark of every namespace, as long as the server remembers it."""


class NewConnection:
    """A connection on which one command at a time is sent, until it ends or is handed on to a :class:`Connection`.

    It checks the server, and serves for commands whose answers are lines. A method that is cancelled leaves the rest of its
    answer unread: the connection is of no use afterwards.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.version = ""
        self.transport: asyncio.WriteTransport | None = None
        self._reader = asyncio.StreamReader(limit=65_536)

    async def open(self) -> None:
        """Connect, and check that the server is a memcached that this library can use."""
        self.transport, _ = await dial(
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
        """Send a command."""
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
async def new_connection(host: Host, timeout: float) -> AsyncIterator[NewConnection]:
    """Connect, and check the server; the connection can be used for ``timeout`` seconds, the opening included.

    Raises :class:`BackendError`. Cancelling it leaves no socket behind.
    """
    new = NewConnection(host)
    try:
        async with asyncio.timeout(timeout):
            await new.open()
            yield new
    except (OSError, EOFError, ValueError, LookupError, asyncio.LimitOverrunError) as error:
        raise new.translated(error) from error
    finally:
        if new.transport is not None:
            new.transport.abort()


class Reply(NamedTuple):
    """The answers to commands that were sent together."""

    answers: list[Response]
    generation: int
    """The connection on which they were given."""
    started: int
    """When the server was started, in seconds since 1970: a constant of its run."""


class _Batch(NamedTuple):
    """Commands that are sent together, and their answers so far."""

    commands: Sequence[bytes]
    answers: list[Response]


class Connection(WaitingTransport[_Batch]):
    """A pipelined connection: what tasks ask in one pass of the loop leaves together, and answers come in the same order.

    A caller that stops waiting leaves its batch in place, whose answers are discarded, and the others stay in step.

    :param namespace: is marked whenever the server is connected.
    """

    def __init__(self, host: Host, namespace: str, on_down: Hook, **options: Unpack[Options]) -> None:
        super().__init__(f"memcached://{host}", self._dial, on_down=on_down, **options)
        self._host = host
        self._namespace = namespace
        self._parser = Parser()
        self._time = self._read_at = 0.0
        self._started = 0

    @property
    def now(self) -> float:
        """The clock of the server, or up to a second more, and one per cent of the time that it is connected."""
        return self._time + 1 + 1.01 * (self._clock() - self._read_at)

    def ask(self, commands: Sequence[bytes], *, write: bool = False) -> asyncio.Future[Reply]:
        """Send commands; the future gets their answers, or an error within the command timeout.

        Without a connection, reads wait for one, and a ``write`` is refused. Cancelling the future takes nothing back.
        """
        future: asyncio.Future[Reply] = self._guard().create_future()
        slot = future, _Batch(commands, []), self._clock()
        if self._transport is not None and self.state is ConnectionState.READY:
            self._send(self._transport, slot)
        else:
            self._park(slot, write=write)
        return future

    def _send(self, transport: asyncio.WriteTransport, slot: Slot[_Batch]) -> None:
        alone = not self._pending
        self._pending.append(slot)
        self._write_together(transport, b"".join(slot[1].commands), alone=alone)

    def data_received(self, data: bytes) -> None:
        """Hand answers to their batches, in order."""
        self.received = self._clock()
        self.full = len(data) >= LITTLE
        try:
            for answer in self._parser.feed(data):
                future, batch, _ = self._pending[0]
                if not fits(batch.commands[len(batch.answers)], answer):
                    raise ProtocolError
                batch.answers.append(answer)
                if len(batch.answers) == len(batch.commands):
                    self._pending.popleft()
                    settle(future, Reply(batch.answers, self.generation, self._started))
        except (ProtocolError, IndexError) as error:
            garbage = BackendUnavailable(f"{self.address} answered something that no command had asked for")
            garbage.__cause__ = error
            self._lost(garbage)

    # --- the life of the connection

    async def _dial(self, timeout: float, protocol: asyncio.Protocol) -> asyncio.WriteTransport:
        """Connect and check the server; ``protocol`` receives what it sends afterwards."""
        try:
            async with new_connection(self._host, timeout) as new:
                figures = await new.stats()
                await new.check()
                await new.mark(self._namespace)
                self._time, self._read_at = float(figures["time"]), self._clock()
                self._started = int(figures["time"]) - int(figures["uptime"])
                transport, new.transport = new.transport, None
        except BackendRefused as error:
            if self.generation and error.retryable:
                # It was a memcached without TLS before: it is being restarted, or the network is at fault.
                raise BackendUnavailable(str(error)) from error
            raise
        assert transport is not None  # noqa: S101 - it was connected
        transport.set_protocol(protocol)
        return transport

    def _greet(self, transport: asyncio.WriteTransport) -> None:
        self._parser = Parser()
        self._up()
        for slot in self._unpark():
            self._send(transport, slot)

    def _ping(self, transport: asyncio.WriteTransport) -> None:
        assert self._loop is not None  # noqa: S101 - it is open
        self._send(transport, (self._loop.create_future(), _Batch([NOOP], []), self._clock()))
