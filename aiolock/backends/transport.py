"""Reconnecting transport: states, back-off and keepalive of one connection to a server.

One state machine; two files would share all of its state.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum
from random import Random
from typing import Any, Generic, Required, TypedDict, TypeVar, Unpack

from aiolock.clock import Clock
from aiolock.core.forks import OneProcess
from aiolock.core.logs import Log, Outages, get_logger
from aiolock.core.tasks import Backoff, reject, settle, start
from aiolock.core.wakeup import read_little
from aiolock.errors import BackendError, BackendUnavailable, copy_of

__all__ = [
    "STABLE",
    "Connect",
    "ConnectionState",
    "Hook",
    "Options",
    "Slot",
    "Transport",
    "WaitingTransport",
]

log: Log = get_logger("aiolock")

PING_EVERY = 2.0
"""Seconds of silence after which the server is sent a ping."""
PING_WITHIN = 2.0
"""Seconds the server has to answer it."""
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.4
"""Seconds between attempts to connect: doubled from the first to the longest, and jittered. A server that is back
should be in use within half a second, and a refused attempt costs next to nothing."""
REFUSED_PAUSE = 2.0
"""Seconds before the next attempt after a refusal that an administrator has to act on."""
STABLE = 2.0
"""Seconds after which a connection counts as stable: the back-off then starts from the first pause again."""
LATE = 0.05
"""A timer that fires later than this many seconds was delayed by this process, not by the server."""
GRACE = 0.1
"""Seconds of silence after which a server that a late process has kept waiting counts as having nothing more to send. A busy machine
may take some of them to run a server that could not send the rest before."""
ATTEMPT = 0.95
"""Share of the time to open that one attempt may take, so that ``open`` can report why it failed."""
CLOSE_WITHIN = 0.5

Hook = Callable[[], object]
Connect = Callable[[float, asyncio.Protocol], Awaitable[asyncio.WriteTransport]]
"""Connect and log in within so many seconds, and attach the protocol. Raises :class:`BackendError`. Cancelling it leaves no
socket behind."""


class ConnectionState(Enum):
    """State of a transport; ``Transport._become`` makes and logs every transition.

    ============== ================================================ ==============================================
    State          Event                                            Next state
    ============== ================================================ ==============================================
    ``CLOSED``     opened                                           ``CONNECTING``
    ``CONNECTING`` connected, and the greeting was answered         ``READY``
    ``CONNECTING`` not reached, or refused                          ``BROKEN``, and after a pause ``CONNECTING``
    ``CONNECTING`` the server denies what this connection is for    ``DENIED``, and after a pause ``CONNECTING``
    ``READY``      closed at its other end, or a PING not answered  ``BROKEN``, and after a pause ``CONNECTING``
    ``READY``      another server has taken over                    ``BROKEN``, and ``CONNECTING`` at once
    ``BROKEN``     the pause is over                                ``CONNECTING``
    ``DENIED``     the pause is over                                ``CONNECTING``
    any            closed by the client                             ``CLOSED``
    ============== ================================================ ==============================================
    """

    CLOSED = "closed"
    CONNECTING = "connecting"
    READY = "ready"
    BROKEN = "broken"
    DENIED = "denied"
    """The server answers, but refuses this use of it, or is the wrong one for it."""


class Options(TypedDict, total=False):
    """Options of every transport."""

    clock: Required[Clock]
    command_timeout: Required[float]
    """Seconds that :meth:`Transport.open` and each attempt to connect may take."""
    outages: Outages | None
    """Records when the connection is lost and when it is back."""
    random: Random | None


class Transport(asyncio.Protocol, OneProcess, ABC):
    """The protocol of one connection at a time, and the task that replaces it when it breaks; may be opened again.

    :param address: of the server, without a password; for messages.
    :param connect: makes each connection; see :data:`Connect`.
    :param on_up: called when the connection can be used, ``on_down`` when it breaks; neither when it is closed by
        :meth:`aclose`. Plain functions that must not raise; ``generation`` and ``failure`` have the details.
    """

    def __init__(
        self,
        address: str,
        connect: Connect,
        on_up: Hook | None = None,
        on_down: Hook | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.address = address
        self._connect = connect
        self._clock = options["clock"]
        self._timeout = options["command_timeout"]
        self._random = options.get("random") or Random()
        self._backoff = Backoff(self._random, FIRST_PAUSE, LONGEST_PAUSE)
        self._on_up = on_up
        self._on_down = on_down
        self._outages = options.get("outages")
        self.take_over()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._out: list[bytes] | None = None
        """The bytes to write in the next pass of the loop; ``None`` if there are none."""
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.Handle | None = None
        self._first: asyncio.Future[None] | None = None
        self.failure: BackendError | None = None
        """Why it is down."""
        self._pause = 0.0
        """Seconds before the next attempt to connect."""
        self._since = 0.0
        self._due = 0.0
        self._pinged: float | None = None
        self.state = ConnectionState.CLOSED
        self.generation = 0
        """Number of connections so far that became usable."""
        self.received = 0.0
        """Time of the latest bytes, by the injected clock."""
        self.full = False
        """True if the latest read brought as much as one read can: there may be more."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.address}, {self.state.value}>"

    # --- for subclasses

    @abstractmethod
    def _greet(self, transport: asyncio.WriteTransport) -> None:
        """Write what comes first on a new connection; call :meth:`_up` when it can be used."""

    @abstractmethod
    def _ping(self, transport: asyncio.WriteTransport) -> None:
        """Write a ping."""

    def _gone(self, error: BackendError) -> None:
        """Settle what was under way on a connection that is lost or closed."""

    def _expire(self, now: float) -> float:
        """Fail what is overdue; return when the next deadline is."""
        del now
        return math.inf

    # --- open and close

    async def open(self) -> None:
        """Connect; retry retryable failures until ``command_timeout`` has passed.

        Raises :class:`BackendRefused` at once for a permanent refusal, else :class:`BackendUnavailable`.
        Cancelling it leaves neither task nor socket behind.
        """
        first = self.begin()
        try:
            async with asyncio.timeout(self._timeout):
                await first
        except BaseException as error:
            failure = self.failure
            await self.aclose()
            if not isinstance(error, TimeoutError):
                raise
            if failure is None:
                raise BackendUnavailable(
                    f"{self.address} did not answer within {self._timeout:g} s"
                ) from error
            raise failure from failure.__cause__
        finally:
            self._first = None

    def begin(self) -> asyncio.Future[None]:
        """Connect in the background; the future is done with the first connection or the first refusal.

        After a refusal it goes on trying until it is closed, because the cause may be removed later.
        """
        if self.state is not ConnectionState.CLOSED:
            self.refuse_fork("connection")
            raise RuntimeError(f"{self!r} was opened already")
        self.take_over()
        self._loop = loop = asyncio.get_running_loop()
        self.failure, self._pause = None, 0.0
        self._become(ConnectionState.CONNECTING)
        first = self._first = loop.create_future()
        self._task = start(self._reconnect(), "aiolock-connect")
        self._set_timer(min(PING_EVERY, self._timeout))
        return first

    async def aclose(self) -> None:
        """Close the connection and fail what waits for it, within about a second. Idempotent; never raises.

        Cancelling it aborts the connection instead of waiting for the bytes that are left to be sent.
        In a forked child it does nothing: the connection is the parent's.
        """
        if self.forked or self.state is ConnectionState.CLOSED:
            return
        self._become(ConnectionState.CLOSED)
        if self._outages is not None:
            self._outages.forget(self, self.address)
        transport, self._transport = self._transport, None
        if transport is not None and self._out is not None:
            self._write_joined(transport, self._out)
        task, self._task = self._task, None
        if self._timer is not None:
            self._timer.cancel()
        closed = BackendUnavailable(f"the connection to {self.address} was closed")
        self._gone(closed)
        if self._first is not None:
            reject(self._first, closed)
        if task is not None:
            task.cancel()
        try:
            if transport is not None:
                closing = _ClosingProtocol()
                transport.set_protocol(closing)
                transport.close()
                await asyncio.wait((closing.closed,), timeout=CLOSE_WITHIN)
                if not closing.closed.done():
                    transport.abort()
                    await asyncio.wait((closing.closed,), timeout=CLOSE_WITHIN)
            if task is not None:
                await asyncio.wait((task,), timeout=CLOSE_WITHIN)
        finally:
            if transport is not None:
                transport.abort()

    def _closed(self) -> bool:
        return self.state is ConnectionState.CLOSED

    # --- up and down

    async def _reconnect(self) -> None:
        """Try until it is connected or closed."""
        while True:
            if self._pause:
                await asyncio.sleep(self._pause)
            self._pause = self._backoff.next()
            if self._closed():
                return
            self._become(ConnectionState.CONNECTING)
            try:
                transport = await self._connect(ATTEMPT * self._timeout, self)
            except BackendError as error:
                if self._closed():
                    return
                self._failed(error)
                continue
            if self._closed():
                transport.abort()
                return
            self._transport = transport
            read_little(transport)
            self._since = self.received = self._clock()
            self._pinged = None
            self._greet(transport)
            return

    def _failed(self, error: BackendError) -> None:
        self.failure = error
        self._become(ConnectionState.BROKEN)
        log.debug("%s", error)
        if not error.retryable:
            self._pause = REFUSED_PAUSE
            if self._first is not None:
                reject(self._first, error)

    def _up(self) -> None:
        self.generation += 1
        self.failure = None
        self._become(ConnectionState.READY)
        if self._outages is not None:
            self._outages.up(self, self.address)
        self._opened()
        if self._on_up is not None:
            self._on_up()

    def _opened(self) -> None:
        if self._first is not None:
            settle(self._first, None)

    def _lost(
        self, error: BackendError, state: ConnectionState = ConnectionState.BROKEN, pause: float = 0.0
    ) -> None:
        """Drop the connection and connect anew, not before about ``pause`` seconds; every loss ends up here."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        self._out = None
        transport.set_protocol(_ClosingProtocol())
        transport.abort()
        was = self.state
        self.failure = error
        self._become(state)
        if was is ConnectionState.READY and state is ConnectionState.BROKEN and self._outages is not None:
            # Before the waiters are failed, so that the outage counts them.
            self._outages.down(self, self.address, error.__cause__ or error)
        if self._clock() - self._since >= STABLE:
            self._backoff.reset()
            self._pause = self._backoff.next()
        self._pause = max(self._pause, pause)
        self._task = start(self._reconnect(), "aiolock-connect")
        self._gone(error)
        if was is ConnectionState.READY and self._on_down is not None:
            self._on_down()

    def leave(self) -> None:
        """Connect anew: another server has taken over."""
        self._lost(BackendUnavailable(f"{self.address}: another server has taken over"))

    def _become(self, state: ConnectionState) -> None:
        if state is not self.state:
            log.debug("%r becomes %s", self, state.value)
            self.state = state

    def connection_lost(self, exc: Exception | None) -> None:
        """Reconnect after the server or the network closed the connection."""
        what = (
            "the connection was closed at its other end"
            if exc is None
            else f"the connection to {self.address} broke"
        )
        error = BackendUnavailable(what)
        error.__cause__ = exc
        self._lost(error)

    def _write(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        if transport.is_closing():
            # Its loss is reported soon; asyncio would log a warning for each of many writes until then.
            return
        try:
            transport.write(data)
        except Exception as error:  # noqa: BLE001 - a transport that is being closed may raise what it likes
            self.connection_lost(error)

    def _write_together(self, transport: asyncio.WriteTransport, data: bytes, *, alone: bool) -> None:
        """Write at once if ``alone``, else in the next pass of the loop with what other tasks write meanwhile, by one system call.

        A request that finds nothing under way is alone: it shall not wait for others that may not come.
        """
        if self._out is not None:
            self._out.append(data)
        elif alone or self._loop is None:
            self._write(transport, data)
        else:
            self._out = [data]
            self._loop.call_soon(self._write_joined, transport, self._out)

    def _write_joined(self, transport: asyncio.WriteTransport, out: list[bytes]) -> None:
        if self._out is out:
            self._out = None
            self._write(transport, b"".join(out))

    # --- one timer for everything

    def _set_timer(self, delay: float) -> None:
        assert self._loop is not None  # noqa: S101 - it is open
        self._due = self._clock() + delay
        self._timer = self._loop.call_later(delay, self._on_timer)

    # What came due is judged only once the socket was found to be empty: the answer may have arrived long ago, behind thousands
    # of others, in a process that was stopped or busy. One pass of the loop makes one read of limited size. The server, or the network,
    # may have waited as well until there was room for the rest: as long as more comes, a process that was late waits for it.

    def _on_timer(self) -> None:
        now = self._clock()
        self._probe(now + self._timeout if now - self._due > LATE else now, -math.inf)

    def _probe(self, patience: float, latest: float) -> None:
        """Judge after a pass in which the loop asked for what has arrived, if that was all.

        The server may go on until ``patience`` if it has sent anything after ``latest``, which ``received`` was before a time of grace.
        """
        assert self._loop is not None  # noqa: S101 - it is open
        # In the next pass this comes before the reads, and in the one after it behind those of the pass between.
        self._timer = self._loop.call_soon(self._continue_probe, self.received, patience, latest)

    def _continue_probe(self, before: float, patience: float, latest: float) -> None:
        assert self._loop is not None  # noqa: S101 - it is open
        self._timer = self._loop.call_soon(self._end_probe, before, patience, latest)

    def _end_probe(self, before: float, patience: float, latest: float) -> None:
        assert self._loop is not None  # noqa: S101 - it is open
        now = self._clock()
        if self.received != before and self.full:
            self._probe(patience, latest)
        elif self.received != latest and now < patience:
            self._timer = self._loop.call_later(GRACE, self._probe, patience, self.received)
        else:
            self._judge(now)

    def _judge(self, now: float) -> None:
        then = min(self._expire(now), self._keep_alive(now), now + PING_EVERY, now + self._timeout)
        if self.state is not ConnectionState.CLOSED:
            self._set_timer(max(then - now, 0.001))

    def _keep_alive(self, now: float) -> float:
        """Ping a silent server, or drop the connection if it left a ping unanswered; return when to check again."""
        transport = self._transport
        if transport is None:
            return math.inf
        if self._pinged is not None and self.received > self._pinged:
            self._pinged = None
        if self._pinged is None:
            if now - self.received < PING_EVERY:
                return self.received + PING_EVERY
            self._pinged = now
            self._ping(transport)
        elif now - self._pinged >= PING_WITHIN:
            self._lost(BackendUnavailable(f"{self.address} did not answer a PING within {PING_WITHIN:g} s"))
            return math.inf
        return self._pinged + PING_WITHIN


R = TypeVar("R")
Slot = tuple[asyncio.Future[Any], R, float]
"""The future of the caller, its request, and when it was made, by the clock of the transport."""


class WaitingTransport(Transport, Generic[R]):
    """A transport whose requests may wait for a connection.

    They fail after the command timeout, and at once while the server refuses this client for good.
    """

    _request = "this"
    """A request, in messages."""

    def __init__(
        self,
        address: str,
        connect: Connect,
        on_up: Hook | None = None,
        on_down: Hook | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(address, connect, on_up, on_down, **options)
        self._pending: deque[Slot[R]] = deque()
        """Sent, in this order."""
        self._parked: deque[Slot[R]] = deque()
        """Waiting for a connection."""

    def _guard(self) -> asyncio.AbstractEventLoop:
        """Return the loop. Raises :class:`BackendUnavailable` if it is closed, :class:`RuntimeError` in a forked child."""
        self.refuse_fork("connection")
        if self._loop is None or self.state is ConnectionState.CLOSED:
            raise BackendUnavailable(f"{self.address}: the client is closed")
        return self._loop

    def _park(self, slot: Slot[R], *, write: bool = False) -> None:
        """Have a request wait for a connection; a ``write``, or one to a server that refuses this client, fails."""
        if write or (self.failure is not None and self._permanent(self.failure)):
            reject(slot[0], self._away())
        else:
            self._parked.append(slot)

    def _unpark(self) -> list[Slot[R]]:
        """Remove and return the requests that still wait."""
        parked, self._parked = self._parked, deque()
        return [slot for slot in parked if not slot[0].done()]

    def _permanent(self, error: BackendError) -> bool:
        """Return whether no later attempt to connect helps the requests that wait now."""
        return not error.retryable

    def _away(self) -> BackendError:
        """Return why a request was not sent."""
        return copy_of(self.failure or BackendUnavailable(f"{self.address} is not connected"))

    def _failed(self, error: BackendError) -> None:
        super()._failed(error)
        if self._permanent(error):
            self._refuse_parked()

    def _refuse_parked(self, issued_by: float = math.inf) -> None:
        while self._parked and self._parked[0][2] <= issued_by:
            reject(self._parked.popleft()[0], self._away())

    def _doubt(self, why: object) -> BackendUnavailable:
        return BackendUnavailable(f"{why}; whether it executed {self._request} is not known")

    def _gone(self, error: BackendError) -> None:
        pending, self._pending = self._pending, deque()
        for future, _, _ in pending:
            doubt = self._doubt(error)
            doubt.__cause__ = error.__cause__
            reject(future, doubt)
        if self._closed():
            self._refuse_parked()

    def _expire(self, now: float) -> float:
        limit = now - self._timeout
        self._refuse_parked(limit)
        next_one = self._parked[0][2] if self._parked else math.inf
        for future, _, issued in self._pending:
            # All of them: one that is sent anew is older than those before it.
            if issued <= limit:
                if not future.done():
                    reject(future, self._doubt(f"{self.address} did not answer within {self._timeout:g} s"))
            elif issued < next_one:
                next_one = issued
        return next_one + self._timeout


class _ClosingProtocol(asyncio.Protocol):
    """The protocol of a connection that is being closed."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that it is closed."""
        del exc
        settle(self.closed, None)
