"""Runs of a lock inside a run of the same lock: they take turns under the hold of the outer run, and never outlive it.

The outer run listens on a Unix socket in a directory that only its user may enter; the address is in the environment of its
command. An inner run connects and asks. From the grant on it is a run like any other, with a guard process of its own, but
its hold is that connection: the outer run says again and again until when the lock is certain, and the end of the connection
is the end of the hold, also if the outer run was killed. The outer run gives the lock back only after every connection has
ended. The guard of the inner run has it open as well: if the inner run is killed, it ends after the command is dead.

The lines: ``alone`` or ``shared`` to the outer run; ``wait``, ``granted TTL``, ``until SECONDS`` (on the clock of
:mod:`aiolock.clock`) and ``lost REASON`` to the inner run.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable

from aiolock.cli.guard import DYING
from aiolock.clock import system_clock
from aiolock.errors import AcquireTimeout, ConfigError, LockLost, LossReason, shorten
from aiolock.lease import Lease

__all__ = ["InnerRuns", "OuterHold", "borrow"]

TELL = 0.25
"""Seconds between two words about how long the lock is certain."""

ANSWER = 5.0
"""Seconds that an outer run has for its first answer."""

LONGEST = 100
"""Bytes of a socket's address that every system takes."""


class InnerRuns:
    """The outer side, for the time of one command.

    :param changed: called when an inner run has ended.
    """

    def __init__(self, lease: Lease | OuterHold, changed: Callable[[], None]) -> None:
        self._lease = lease
        self._changed = changed
        self._server: asyncio.Server | None = None
        self._folder = ""
        self._visitors: dict[_Visitor, None] = {}
        """In the order in which they came."""
        self._losing: asyncio.Task[LossReason | None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> str:
        """Begin to listen; the address. Cancelling it leaves nothing."""
        self._folder = tempfile.mkdtemp(prefix="aiolock-")
        if len(self._folder) + 2 > LONGEST:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = tempfile.mkdtemp(prefix="aiolock-", dir="/tmp")  # noqa: S108 - only its user may enter it
        try:
            address = f"{self._folder}/s"
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(lambda: _Visitor(self), address)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._losing = asyncio.create_task(self._lease.wait_lost())
        self._losing.add_done_callback(lambda _: self._tell())
        return address

    async def __aexit__(self, *_: object) -> None:
        """End the hold of every inner run that is left, and give it a moment to kill its command."""
        self.close_door()
        for visitor in self._visitors:
            visitor.say("lost closed")
        give_up = system_clock() + DYING
        # The ends of several connections, and a moment.
        while self._visitors and system_clock() < give_up:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert self._losing is not None  # noqa: S101 - set on entry
        self._losing.cancel()
        await asyncio.wait([self._losing])
        if self._timer is not None:
            self._timer.cancel()
        for visitor in list(self._visitors):
            visitor.close()

    def __len__(self) -> int:
        return len(self._visitors)

    def close_door(self) -> None:
        """Let in no more: who comes now asks the server."""
        if self._server is not None:
            self._server.close()
            self._server = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def came(self, visitor: _Visitor) -> None:
        """Somebody has connected and said what it wants."""
        self._visitors[visitor] = None
        self._serve()
        if not visitor.granted:
            visitor.say("wait")

    def left(self, visitor: _Visitor) -> None:
        """A connection has ended."""
        if visitor in self._visitors:
            del self._visitors[visitor]
            self._serve()
            self._changed()

    def _serve(self) -> None:
        """Grant in the order of arrival: one alone, or neighbours that share."""
        for place, visitor in enumerate(list(self._visitors)):
            if place and not visitor.shared:
                break
            if not visitor.granted:
                visitor.granted = True
                visitor.say(f"granted {self._lease.ttl!r}")
                self._tell()
            if not visitor.shared:
                break

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            self._lease.check()
        except (LockLost, RuntimeError) as error:
            reason = error.reason if isinstance(error, LockLost) else "closed"
            for visitor in list(self._visitors):
                visitor.say(f"lost {reason}")
            return
        until = system_clock() + self._lease.remaining()
        for visitor in list(self._visitors):
            if visitor.granted:
                visitor.say(f"until {until!r}")
        if self._visitors:
            self._timer = asyncio.get_running_loop().call_later(TELL, self._tell)


class _Visitor(asyncio.Protocol):
    """The connection of one inner run."""

    def __init__(self, runs: InnerRuns) -> None:
        self._runs = runs
        self._transport: asyncio.WriteTransport | None = None
        self._heard = b""
        self.shared = False
        self.granted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)  # noqa: S101 - a stream
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard += data
        if self._heard in (b"shared\n", b"alone\n"):
            self.shared = self._heard == b"shared\n"
            self._runs.came(self)
        elif len(self._heard) > len(b"shared\n"):
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - whatever the reason
        self._runs.left(self)

    def say(self, line: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(f"{line}\n".encode())

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def borrow(
    address: str, name: str, token: int, *, shared: bool, refusal: str, timeout: float | None
) -> OuterHold | None:
    """The hold of the outer run at ``address``, when it is this run's turn; ``None`` if there is no such run any more.

    Raises :class:`AcquireTimeout` after ``timeout`` seconds, and :class:`ConfigError` with ``refusal``, if there is one, or
    if the outer run belongs to another user. Cancelling it leaves nothing.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(address)
    except PermissionError:
        raise ConfigError(
            f"the run around this one holds {shorten(name)} and belongs to another user: only its own user's runs pass through"
        ) from None
    except OSError:
        # It has ended: its word is old.
        return None
    hold = None
    try:
        if refusal:
            raise ConfigError(refusal)
        writer.write(b"shared\n" if shared else b"alone\n")
        try:
            async with asyncio.timeout(timeout or (ANSWER if timeout == 0 else None)):
                line = await reader.readline()
                while line == b"wait\n" and timeout != 0:
                    line = await reader.readline()
        except TimeoutError:
            line = b"wait\n"
        except OSError:
            return None
        if line == b"wait\n":
            raise AcquireTimeout(name, timeout or 0.0)
        word, _, ttl = line.decode("ascii", "replace").strip().partition(" ")
        if word == "granted":
            hold = OuterHold(name, token, float(ttl), reader, writer)
            await hold.begin()
            if not hold.held:
                await hold.release()
                hold = None
        return hold
    except BaseException:
        writer.transport.abort()
        raise
    finally:
        if hold is None:
            writer.transport.abort()


class OuterHold:
    """The hold of an outer run as the lease of an inner one."""

    def __init__(
        self, name: str, token: int, ttl: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.name = name
        self.token = token
        self.ttl = ttl
        self._reader = reader
        self._writer = writer
        self._until = 0.0
        self._reason: LossReason | None = None
        self._lost: asyncio.Future[LossReason] = asyncio.get_running_loop().create_future()
        self._hearing: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Hear until when the hold is certain, and listen on. Cancelling it leaves the connection to the caller."""
        self._take(await self._reader.readline())
        self._hearing = asyncio.create_task(self._hear())

    @property
    def connection(self) -> int:
        """The descriptor of the connection: while any process has it open, the outer run does not give the lock back."""
        descriptor: int = self._writer.get_extra_info("socket").fileno()
        return descriptor

    def remaining(self) -> float:
        """Seconds for which the lock is certain."""
        return 0.0 if self._reason is not None else max(0.0, self._until - system_clock())

    @property
    def held(self) -> bool:
        """Whether the lock is certain at this moment."""
        return self.remaining() > 0

    def check(self) -> None:
        """Raise :class:`LockLost` if the lock is not certain."""
        if not self.held:
            raise LockLost(self.name, self._reason or "expired")

    async def wait_lost(self) -> LossReason:
        """Wait for the end of the outer hold. Cancelling it changes nothing."""
        return await asyncio.shield(self._lost)

    async def release(self) -> None:
        """The command has ended: let the next inner run, or the outer one, go on. Idempotent."""
        self._writer.transport.abort()
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.wait([self._hearing])
        self._lost.cancel()

    async def _hear(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := await self._reader.readline():
                self._take(line)
        self._lose("closed")

    def _take(self, line: bytes) -> None:
        word, _, value = line.decode("ascii", "replace").strip().partition(" ")
        if word == "until":
            self._until = float(value)
        else:
            self._lose(value if word == "lost" else "closed")  # type: ignore[arg-type] # one of ours wrote it

    def _lose(self, reason: LossReason) -> None:
        if self._reason is None:
            self._reason = reason
            if not self._lost.done():
                self._lost.set_result(reason)
