"""The driver's client for one opening, and commands sent to the primary: each once, in a task that is never cancelled.

The driver closes its connection when a caller is cancelled, and leaves a socket open that is being connected just then. So
callers wait for tasks, which the driver's own time limit ends, and closing waits until no socket is being connected."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from pymongo import AsyncMongoClient, timeout
from pymongo.errors import NotPrimaryError, PyMongoError
from pymongo.monitoring import ConnectionClosedReason, ConnectionPoolListener, ServerHeartbeatListener

from aiolock.backends.mongodb.errors import translate
from aiolock.backends.mongodb.url import Address
from aiolock.core.backend import Settings
from aiolock.core.tasks import TaskSet, end, start
from aiolock.errors import BackendUnavailable, ConfigError

__all__ = ["CONNECT", "PAUSE", "Connection", "connect_time"]

CONNECTIONS = 16
"""Connections of a client, at most: that many commands are under way at once."""
CONNECT = 3.0
"""Seconds, at most, in which a member has to accept a connection and to say hello."""
PAUSE = 0.5
"""Seconds between two attempts of the driver to connect to a member that a command waits for."""
BUSY = 1.0
"""Seconds, at most, by which the driver may notice later that the time to connect is over; no more than that time itself."""
HEARTBEAT = 1.0
"""Seconds between two heartbeats to each member: so soon is noticed that an idle connection was lost."""
CLOSE_WITHIN = 0.3
"""Seconds for which closing waits for the server; shorter than the driver's pause between two tries to connect."""
CLOSED = "the client is closed"


def connect_time(limit: float) -> float:
    """Return the seconds in which a member has to accept a connection, so that no attempt goes on ``limit`` seconds after the first.

    Closing waits for an attempt under way, because the driver cannot end it, and so does ``open`` when it fails. Two attempts
    or more, unless there is no time for a second one.
    """
    if limit <= 2 * PAUSE:
        return limit / 2
    attempts = max(2, math.ceil((limit + PAUSE) / (CONNECT + PAUSE)))
    return (limit + PAUSE) / attempts - PAUSE


class _Driver(AsyncMongoClient[dict[str, Any]]):
    """A client of the driver, whose owner closes it."""

    def __del__(self) -> None:
        """Do nothing: the driver complains of clients that a forked child or the end of a loop has dropped."""


class _Events(ConnectionPoolListener, ServerHeartbeatListener):
    """The reports of the driver about its connections."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._ready: set[tuple[Any, int]] = set()
        self.connecting: dict[Any, float] = {}
        """Members, and connections to them, that are being connected: since when, by the clock of the event loop."""

    def _begins(self, attempt: Any) -> None:
        self.connecting[attempt] = asyncio.get_running_loop().time()

    def _ignore(self, event: Any) -> None:
        """Do nothing."""

    pool_created = pool_ready = pool_cleared = pool_closed = _ignore
    connection_check_out_started = connection_check_out_failed = _ignore
    connection_checked_out = connection_checked_in = _ignore

    def connection_created(self, event: Any) -> None:
        self._begins((event.address, event.connection_id))

    def connection_ready(self, event: Any) -> None:
        self.connecting.pop(key := (event.address, event.connection_id), None)
        self._ready.add(key)

    def connection_closed(self, event: Any) -> None:
        self.connecting.pop(key := (event.address, event.connection_id), None)
        if key in self._ready:
            self._ready.discard(key)
            if event.reason != ConnectionClosedReason.POOL_CLOSED:
                self._lost()

    def started(self, event: Any) -> None:
        self._begins(event.connection_id)

    def succeeded(self, event: Any) -> None:
        self.connecting.pop(event.connection_id, None)

    failed = succeeded


class _Opened:
    """A client of the driver, its connections, and the beginning of its tasks."""

    def __init__(self, address: Address, limit: float, connect: float, lost: Callable[[], None]) -> None:
        self._connect = connect
        self.events = _Events(lost)
        self._opening: asyncio.Task[None] | None = None
        try:
            self.driver = _Driver(
                [str(host) for host in address.hosts],
                **address.arguments,
                appname="aiolock",
                connect=False,
                # A command is sent once; the engine finds out what became of it.
                retryReads=False,
                retryWrites=False,
                maxPoolSize=CONNECTIONS,
                # Otherwise it makes connections of which it reports nothing.
                serverMonitoringMode="poll",
                heartbeatFrequencyMS=round(1000 * HEARTBEAT),
                connectTimeoutMS=round(1000 * connect),
                # The driver reads the clock twice a second.
                serverSelectionTimeoutMS=round(1000 * max(0.1, limit - 0.6)),
                event_listeners=[self.events],
            )
        except (PyMongoError, ValueError, TypeError, OSError) as error:
            # Without the frames of the driver, among whose local variables is the password.
            cause = error.with_traceback(None)
            raise ConfigError(f"{address.text}: the driver refuses these options: {error}") from cause
        self._limit = limit
        self._database = self.driver[address.database]

    def begin(self) -> None:
        """Have its tasks begin, once; cancelled meanwhile, the driver would leave some of them."""
        if self._opening is None:
            self._opening = start(self.driver.aconnect(), "aiolock-mongodb-open")

    async def send(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command. It is not to be cancelled."""
        assert self._opening is not None  # noqa: S101 - it was begun
        await asyncio.shield(self._opening)
        with timeout(self._limit):
            return await self._database.command(command)

    async def idle(self) -> None:
        """Wait until no socket is being connected. It is not to be cancelled."""
        if self._opening is not None:
            await asyncio.wait([self._opening])
            # Its tasks begin to connect in their first step.
            await asyncio.sleep(0)
        # Later than that an attempt has its connection, and waits for TLS, for which the driver has no limit: it can be ended.
        time, limit = asyncio.get_running_loop().time, self._connect + min(BUSY, self._connect)
        late = time() + limit
        # Not by an event: the driver reports that an attempt has failed before it is done with the socket.
        while any(time() < min(late, began + limit) for began in self.events.connecting.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Close all connections. It is not to be cancelled."""
        with suppress(Exception), timeout(CLOSE_WITHIN):
            await self.driver.close()


class Connection:
    """The connections of one opening; the driver makes them when they are needed, and again when they were lost.

    With several members, or without ``directConnection``, the driver follows the primary. A direct connection it keeps also to a
    member that is not the primary any more, although the name may lead to another one by now; so it is made anew.
    """

    def __init__(self, address: Address, settings: Settings, interrupted: Callable[[], None]) -> None:
        self.address = address.text
        self._limit = 0.9 * settings.command_timeout
        self._outages = settings.outages
        self._interrupted = interrupted
        self._losses = 0
        self._tasks = TaskSet(awaited=True)
        self._closing: asyncio.Task[None] | None = None
        self._direct = bool(address.arguments.get("directConnection"))
        self._make = partial(_Opened, address, self._limit, connect_time(self._limit), self._lost)
        self._opened = self._make()
        self._left: set[asyncio.Task[None]] = set()
        """The closings of connections to members that were left."""

    async def ask(self, command: Mapping[str, Any], *, write: bool = False) -> dict[str, Any]:
        """Send a command, and return its answer or raise :class:`BackendError`, within the command timeout.

        A ``write`` raises as well if a connection was lost meanwhile: it relies on what was read before. Cancelling it ends
        the wait; the command may be carried out.
        """
        if self._closing is not None:
            raise BackendUnavailable(f"{self.address}: {CLOSED}")
        opened = self._opened
        opened.begin()
        losses, outages, answer = self._losses, self._outages, None
        task = self._tasks.spawn(opened.send(dict(command)), "aiolock-mongodb-command")
        await asyncio.wait([task], timeout=self._limit)
        error: BaseException | None
        if not task.done():
            error = TimeoutError(f"no answer in time{self._trouble()}")
        elif task.cancelled():
            error = ConnectionError(CLOSED)
        elif (error := task.exception()) is None:
            answer = task.result()
        if answer is None:
            assert isinstance(error, Exception)  # noqa: S101 - others end the event loop
            translated = translate(error, self.address)
            if self._direct and isinstance(error, NotPrimaryError):
                self._leave(opened)
            if outages is not None and isinstance(translated, BackendUnavailable):
                outages.down(self, self.address, str(translated).removeprefix(f"{self.address}: "))
            raise translated from error
        if outages is not None:
            outages.up(self, self.address)
        if concern := answer.get("writeConcernError"):
            raise BackendUnavailable(
                f"{self.address}: no majority has confirmed the write: {concern['errmsg']}"
            )
        if write and losses != self._losses:
            raise BackendUnavailable(f"{self.address}: a connection was lost meanwhile")
        return answer

    def _leave(self, opened: _Opened) -> None:
        """Make connections anew, if these are still in use; those that are left end in the background."""
        if opened is self._opened and self._closing is None:
            self._opened = self._make()
            self._losses += 1
            leaving = start(self._end(opened), "aiolock-mongodb-leave")
            self._left.add(leaving)
            leaving.add_done_callback(self._left.discard)
            self._interrupted()

    async def _end(self, opened: _Opened) -> None:
        await opened.idle()
        await opened.close()

    def _trouble(self) -> str:
        members = self._opened.driver.topology_description.server_descriptions().values()
        return "".join(f"; {member.error}" for member in members if member.error)

    def _lost(self) -> None:
        self._losses += 1
        if self._closing is None:
            if self._outages is not None:
                self._outages.down(self, self.address, "the connection was closed")
            self._interrupted()

    async def aclose(self) -> None:
        """Close all connections. Cancelling it ends the wait."""
        if self._closing is None:
            if self._outages is not None:
                self._outages.forget(self, self.address)
            self._closing = start(self._close(), "aiolock-mongodb-close")
        await asyncio.wait([self._closing])

    async def _close(self) -> None:
        await self._opened.idle()
        await end(self._tasks)
        await self._opened.close()
        if self._left:
            await asyncio.wait(self._left)
