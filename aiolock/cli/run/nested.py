"""Runs inside a run of the same lock, which would wait for themselves and work under its hold instead.

A run lists in the environment of its command the locks that it holds, and listens on a Unix socket in a directory that only its
user may enter. An inner run connects and asks; inner runs take turns. From the grant on, the connection is its hold: the outer
run reports every quarter of a second until when the lock is certain, and the hold ends with the connection, also if a process was killed. The
outer run releases the lock after every connection has ended. The guard of the inner run has the connection open as well, so that
it ends after the death of the inner command.

The lines: ``alone`` or ``shared`` to the outer run; ``wait``, ``granted TTL``, ``until SECONDS`` (on the clock of
:mod:`aiolock.clock`) and ``lost REASON`` to the inner run."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import shutil
import tempfile
from dataclasses import dataclass
from typing import NamedTuple, cast
from urllib.parse import quote, unquote

from aiolock.cli.run.guard import DYING
from aiolock.cli.run.signals import SignalQueue
from aiolock.clock import system_clock
from aiolock.errors import AcquireTimeout, ConfigError, LockLost, LossReason, shorten
from aiolock.lease import Lease
from aiolock.types import READ, Kind

__all__ = ["VARIABLE", "Entry", "InnerRuns", "OuterHold", "borrow", "check", "find", "identity"]

VARIABLE = "AIOLOCK_HELD"
"""Entries for all locks that are held around a command, innermost last. An entry can be old: it counts while its run answers."""

REPORT = 0.25
"""Seconds between two lines ``until``."""

ANSWER = 5.0
"""Seconds for the first answer of the outer run to an inner run that does not wait."""

LONGEST = 100
"""Bytes of a socket address that every system takes."""


class Entry(NamedTuple):
    """The hold of an outer run, as in the environment of its command."""

    identity: str
    token: int
    mode: str
    permits: int
    address: str
    """The path of its socket."""

    def __str__(self) -> str:
        return f"{self.identity}:{self.token}:{self.mode}:{self.permits}:{quote(self.address)}"


_ENTRY = re.compile(r"([0-9a-f]+):([0-9]{1,19}):([a-z]+):([0-9]{1,19}):(\S+)")


def identity(url: str, namespace: str, kind: Kind, name: str) -> str:
    """Return a digest of the lock's server, namespace, family and name, without passwords."""
    servers = sorted(
        scheme.lower() + mark + rest.rpartition("@")[2]
        for scheme, mark, rest in (address.partition("://") for address in url.split())
    )
    parts = (" ".join(servers), namespace, kind.family.value, name)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def find(held: str, wanted: str, kind: Kind) -> Entry | None:
    """Return the innermost entry for one lock; malformed ones are ignored.

    ``None`` also if that hold has too few permits: the server is asked then, which may have more.
    """
    for text in reversed(held.split()):
        match = _ENTRY.fullmatch(text)
        if match is not None and match[1] == wanted:
            entry = Entry(match[1], int(match[2]), match[3], int(match[4]), unquote(match[5]))
            return entry if entry.permits >= kind.permits else None
    return None


def check(entry: Entry, kind: Kind, name: str) -> None:
    """Raise :class:`ConfigError` for a request that is stronger than the outer hold."""
    if kind.exclusive and entry.mode == READ.mode.value:
        raise ConfigError(
            f"{shorten(name)} is held shared by the run around this one, and exclusive use would wait for that for ever: "
            "use -x outside as well"
        )


@dataclass(eq=False)
class _InnerRun:
    """An inner run, as the outer run sees it."""

    writer: asyncio.StreamWriter
    shared: bool
    granted: bool = False

    def send(self, line: str) -> None:
        if not self.writer.is_closing():
            self.writer.write(f"{line}\n".encode())


class InnerRuns:
    """The outer side, as a context manager for the time of one command. The end of an inner run wakes ``queue``."""

    def __init__(self, lease: Lease | OuterHold, queue: SignalQueue) -> None:
        self._lease = lease
        self._queue = queue
        self._runs: list[_InnerRun] = []
        """In the order of arrival."""
        self.outlived = False
        """True if one was left when the lock was not held any more, or ended unseen before that was noticed."""

    async def __aenter__(self) -> str:
        """Begin to listen; return the address. Cancelling it leaves nothing."""
        folder = tempfile.mkdtemp(prefix="aiolock-")
        if len(folder) + 2 > LONGEST:
            shutil.rmtree(folder, ignore_errors=True)
            folder = tempfile.mkdtemp(prefix="aiolock-", dir="/tmp")  # noqa: S108 - only its user may enter it
        self._folder = folder
        try:
            self._server = await asyncio.start_unix_server(self._connected, f"{folder}/s")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._reporting = asyncio.create_task(self._report())
        return f"{folder}/s"

    async def __aexit__(self, *_: object) -> None:
        """End the holds of the inner runs that are left, and give them a moment to kill their commands."""
        self.stop_listening()
        self._reporting.cancel()
        self._send("lost closed")
        give_up = system_clock() + DYING
        while self._runs and (left := give_up - system_clock()) > 0:
            await self._queue.wait(left)
        for run in self._runs:
            run.writer.transport.abort()
        await asyncio.wait([self._reporting])

    def __len__(self) -> int:
        return len(self._runs)

    def stop_listening(self) -> None:
        """Accept no more inner runs: later ones ask the server."""
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):
                wanted = await reader.readline()
                if wanted not in (b"alone\n", b"shared\n"):
                    return
                run = _InnerRun(writer, shared=wanted == b"shared\n")
                self._runs.append(run)
                try:
                    self._serve()
                    if not run.granted:
                        run.send("wait")
                    # The next event is the end of the connection.
                    await reader.read(1)
                finally:
                    self._runs.remove(run)
                    self.outlived |= not self._lease.held
                    self._serve()
                    self._queue.wake.set()
        finally:
            writer.transport.abort()

    def _serve(self) -> None:
        """Grant in the order of arrival: one alone, or neighbours that share."""
        for position, run in enumerate(self._runs):
            if position and not run.shared:
                break
            if not run.granted:
                run.granted = True
                run.send(f"granted {self._lease.ttl!r}\n{self._state()}")
            if not run.shared:
                break

    def _state(self) -> str:
        try:
            self._lease.check()
        except LockLost as loss:
            return f"lost {loss.reason}"
        return f"until {system_clock() + self._lease.remaining()!r}"

    def _send(self, line: str, *, granted: bool = False) -> None:
        for run in self._runs:
            if run.granted or not granted:
                run.send(line)

    async def _report(self) -> None:
        losing = asyncio.create_task(self._lease.wait_lost())
        try:
            while not losing.done():
                self._send(self._state(), granted=True)
                await asyncio.wait([losing], timeout=REPORT)
            self._send(self._state())
        finally:
            losing.cancel()


class OuterHold(asyncio.Protocol):
    """The hold of an outer run as the lease of an inner one: a connection to the outer run.

    :param wait: whether to wait for a turn.
    """

    _transport: asyncio.Transport

    def __init__(self, name: str, token: int, *, wait: bool) -> None:
        self.name = name
        self.token = token
        self.ttl = 0.0
        self._wait = wait
        self._received = b""
        self._until = 0.0
        loop = asyncio.get_running_loop()
        self.turn: asyncio.Future[bool] = loop.create_future()
        """Done with ``True`` when the lock is granted, with ``False`` if it cannot be."""
        self._lost: asyncio.Future[LossReason] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - a stream
        self._transport = transport

    def ask(self, *, shared: bool) -> None:
        """Ask for a turn."""
        self._transport.write(b"shared\n" if shared else b"alone\n")

    def data_received(self, data: bytes) -> None:
        """Follow what the outer run says."""
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            word, _, value = line.decode("ascii", "replace").partition(" ")
            if word == "granted":
                self.ttl = float(value)
            elif word == "until":
                self._until = float(value)
                if not self.turn.done():
                    self.turn.set_result(self.held)
            elif word != "wait":
                self._lose(cast("LossReason", value))
            elif not self._wait and not self.turn.done():
                self.turn.set_exception(AcquireTimeout(self.name, 0.0))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - whatever the reason
        """Lose the hold: the outer run has ended, or this run has released it."""
        self._lose("closed")

    def _lose(self, reason: LossReason) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)
            if not self.turn.done():
                self.turn.set_result(False)

    @property
    def connection(self) -> int:
        """The descriptor of the connection: while any process has it open, the outer run keeps the lock."""
        descriptor: int = self._transport.get_extra_info("socket").fileno()
        return descriptor

    def remaining(self) -> float:
        """Return the seconds for which the lock is certain."""
        return 0.0 if self._lost.done() else max(0.0, self._until - system_clock())

    @property
    def held(self) -> bool:
        """True if the lock is certain at this moment."""
        return self.remaining() > 0

    def check(self) -> None:
        """Raise :class:`LockLost` if the lock is not certain."""
        if not self.held:
            raise LockLost(self.name, self._lost.result() if self._lost.done() else "expired")

    async def wait_lost(self) -> LossReason:
        """Wait for the end of the outer hold. Cancelling it changes nothing."""
        return await asyncio.shield(self._lost)

    async def release(self) -> None:
        """Let the next inner run, or the outer one, go on. Idempotent."""
        self._transport.abort()


async def borrow(entry: Entry, kind: Kind, name: str, timeout: float | None) -> OuterHold | None:
    """Wait for the turn of this run under the hold of the outer run; ``None`` if there is no such run any more.

    Raises :class:`AcquireTimeout` after ``timeout`` seconds, and :class:`ConfigError` if the hold is too weak or the outer run
    belongs to another user. Cancelling it leaves nothing.
    """
    try:
        _, hold = await asyncio.get_running_loop().create_unix_connection(
            lambda: OuterHold(name, entry.token, wait=timeout != 0), entry.address
        )
    except PermissionError:
        raise ConfigError(
            f"the run around this one holds {shorten(name)} and belongs to another user: only its own user's runs pass through"
        ) from None
    except OSError:
        # It has ended: its entry is old.
        return None
    granted = False
    try:
        check(entry, kind, name)
        hold.ask(shared=kind == READ)
        async with asyncio.timeout(timeout or (ANSWER if timeout == 0 else None)):
            granted = await hold.turn
    except TimeoutError:
        raise AcquireTimeout(name, timeout or 0.0) from None
    finally:
        if not granted:
            await hold.release()
    return hold if granted else None
