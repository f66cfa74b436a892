"""A session as those see it who use it: whether it lives, requests in it, what the server says unasked, and its changes.

A request is sent once, on one session, and is answered, in doubt, or not sent; nothing is repeated here. What died
with a connection (watches) is not set up again either: whoever waits is woken at every change, and looks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiozk import session
from aiozk.states import States

from aiolock.backends.zookeeper.connecting import Connection
from aiolock.backends.zookeeper.frames import Event
from aiolock.backends.zookeeper.heartbeats import Heartbeats
from aiolock.backends.zookeeper.outcomes import NotSent, SessionChanged
from aiolock.clock import Clock
from aiolock.errors import BackendError
from aiolock.logs import Log, get_logger

__all__ = ["Asking"]

log: Log = get_logger("aiolock.zookeeper")

Future = asyncio.Future[Any]


class Asking(session.Session):  # type: ignore[misc]
    """aiozk's session with its own way to send and to wait."""

    conn: Connection | None
    session_id: int | None
    last_zxid: int | None
    timeout: float
    """What was asked for, and then what the server granted."""
    password: bytes
    xid: int

    def __init__(self, timeout: float, clock: Clock, on_change: Callable[[], None]) -> None:
        super().__init__("replaced", timeout, None, False, None)  # noqa: FBT003 - aiozk's signature
        self._clock = clock
        self._on_change = on_change
        self._heartbeats: Heartbeats | None = None
        self._waiting: set[Future] = set()
        self.failure: BackendError | None = None
        """Why no further attempt to connect is made."""

    @property
    def connected(self) -> bool:
        """Whether requests can be sent at this moment."""
        return bool(self.state.current_state == States.CONNECTED)

    @property
    def deadline(self) -> float:
        """The last instant, on the clock, at which the session certainly lives."""
        return self._heartbeats.deadline if self._heartbeats is not None else 0.0

    @property
    def certain(self) -> bool:
        """Whether the session certainly lives at this moment."""
        return self._heartbeats is not None and self._clock() < self._heartbeats.deadline

    def ask(self, request: Any, owner: int | None = None) -> Future:
        """Send ``request`` once and return the future of its reply.

        The future fails with :class:`InDoubt` if the connection ends first, and with an error of ``aiozk.exc`` if the
        server refuses. Raises :class:`SessionChanged` if ``owner`` is not the present session, :class:`NotSent` if
        there is no connection. Cancelling the future leaves open whether the server has done it.
        """
        return self._usable(owner).send(request, self._number())

    def ask_all(self, *requests: Any, owner: int | None = None) -> Future:
        """Send several at once: the future of a list of their replies, each of which may be an exception instead.

        Raises as :meth:`ask` does, and then none was sent. The future itself does not fail.
        """
        conn = self._usable(owner)
        xid = self._number(len(requests))
        return conn.send_all(requests, xid)

    def _usable(self, owner: int | None) -> Connection:
        if owner is not None and owner != self.session_id:
            raise SessionChanged
        conn = self.conn
        if self.closing or conn is None or not self.connected:
            raise NotSent
        if conn.broken:
            # The state is told at once, so that nobody who tries again meets the same connection.
            conn.die()
            raise NotSent
        return conn

    def _number(self, count: int = 1) -> int:
        """The number of the next request, of so many."""
        if self.xid > 0x7FFF0000:
            self.xid = 0
        first = self.xid + 1
        self.xid += count
        return first

    def watched(self, path: str) -> bool:
        """Whether anybody here wants to be told of what happens at ``path``."""
        return any(where == path for _, where in self.watch_callbacks)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; looked at after every change. Raises when the session is closed for good."""
        while not condition():
            if self.failure is not None:
                # One for each task: exceptions collect tracebacks, and must not be shared.
                raise type(self.failure)(str(self.failure)) from self.failure.__cause__
            if self.closing:
                raise NotSent
            future: Future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)

    async def ready(self) -> int:
        """Wait for a connection; the id of the present session."""
        if not self.connected:
            await self.until(lambda: self.connected)
        assert self.session_id is not None  # noqa: S101 - connected says so
        return self.session_id

    def _tell(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._on_change()

    def _move(self, state: str) -> None:
        if self.state.current_state != state:
            log.info("session %#x is %s", self.session_id or 0, state)
            self.state.transition_to(state)
            self._tell()

    # --- what a server says unasked

    def _saw(self, zxid: int) -> None:
        if zxid > (self.last_zxid or 0):
            self.last_zxid = zxid

    def event_dispatch(self, event: Event) -> None:
        """Call whoever watches this path for this kind of event."""
        if event.type < 0:
            log.info("the server says that the connection's state is %s", event.state)
            return
        for callback in tuple(self.watch_callbacks.get((event.type, event.path), ())):
            callback(event.path)
