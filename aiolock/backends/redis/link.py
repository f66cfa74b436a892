"""A connection that comes back: its states, its back-off, and how it finds out that nobody is at the other end."""

from __future__ import annotations

import asyncio
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from random import Random

from aiolock.backends.redis.endpoint import Endpoint
from aiolock.backends.redis.format import Verify
from aiolock.clock import Clock
from aiolock.delivery import read_little
from aiolock.errors import BackendError, BackendUnavailable
from aiolock.logs import Log, get_logger
from aiolock.outages import Outages
from aiolock.tasks import start

__all__ = ["Forks", "Hook", "Link", "State", "settle"]

log: Log = get_logger("aiolock")

PING_EVERY = 2.0
"""Seconds without a byte from the server after which it is asked for one."""
PING_WITHIN = 2.0
"""Seconds it has to answer that."""
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.4
"""Seconds between attempts to connect; doubled from the first to the longest, and jittered. A server that is back
should be in use within half a second, and an attempt that is refused costs next to nothing."""
REFUSED_PAUSE = 2.0
"""The same after a refusal that somebody has to do something about, who may not tell us when it is done."""
STABLE = 2.0
"""A connection that lasted for so many seconds starts from the first pause when it breaks."""
LATE = 0.05
"""A timer that is later than so many seconds was held up by us, not by the server."""
GRACE = 0.01
ATTEMPT = 0.95
"""The share of the time to open that one attempt may take, so that open can say why it failed."""
CLOSE_WITHIN = 0.5

Hook = Callable[[], object]


class State(Enum):
    """What a link is; every change goes through ``Link._become``."""

    CLOSED = "closed"
    CONNECTING = "connecting"
    READY = "ready"
    BROKEN = "broken"
    DENIED = "denied"
    """The server talks to us, but not about this."""


class Forks:
    """How often this process was made by a fork: what was made before one is dead in the child."""

    generation = 0

    @classmethod
    def child(cls) -> None:
        cls.generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Forks.child)


class Link(asyncio.Protocol, ABC):
    """The protocol of one connection at a time, and the task that makes the next one when it breaks.

    ``on_up()`` is called when it can be used, ``on_down()`` when it no longer can, neither when it is closed by us.
    They are plain functions and must not raise; ``generation`` and ``failure`` tell them more. ``command_timeout`` (seconds) also bounds :meth:`open`
    and each attempt to connect.
    """

    __slots__ = (
        "__weakref__",
        "_clock",
        "_due",
        "_endpoint",
        "_first",
        "_fork",
        "_held_up",
        "_loop",
        "_on_down",
        "_on_up",
        "_pause",
        "_pinged",
        "_random",
        "_since",
        "_task",
        "_timeout",
        "_timer",
        "_transport",
        "failure",
        "generation",
        "outages",
        "received",
        "state",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        clock: Clock,
        command_timeout: float,
        random: Random | None = None,
        on_up: Hook | None = None,
        on_down: Hook | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._timeout = command_timeout
        self._random = random or Random()
        self._on_up = on_up
        self._on_down = on_down
        self._fork = Forks.generation
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._first: asyncio.Future[None] | None = None
        self.failure: BackendError | None = None
        """Why it is down."""
        self._pause = 0.0
        self._since = 0.0
        self._due = 0.0
        self._held_up = False
        self._pinged: float | None = None
        self.state = State.CLOSED
        self.generation = 0
        """How often it came up."""
        self.outages: Outages | None = None
        """Where it is told that the connection was lost and that it is back."""
        self.received = 0.0
        """When the latest bytes arrived, by the injected clock."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self._endpoint}, {self.state.value}>"

    # --- what a subclass says

    @abstractmethod
    def _greet(self, transport: asyncio.WriteTransport) -> None:
        """A new connection: write what comes first, and call :meth:`_up` when it can be used."""

    @abstractmethod
    def _ping(self, transport: asyncio.WriteTransport) -> None:
        """Write a PING."""

    verify: Verify | None = None
    """Looks at the server before the connection is used."""

    def _gone(self, error: BackendError) -> None:
        """The connection is no more: settle what was under way on it."""

    def _expire(self, now: float) -> float:
        """Fail what is overdue, and return when the next thing will be."""
        del now
        return math.inf

    # --- open and close

    async def open(self) -> None:
        """Connect; what may help in a moment is tried again until ``command_timeout`` is over.

        Raises :class:`BackendRefused` at once for what will not change by itself, else :class:`BackendUnavailable`.
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
                    f"{self._endpoint} did not answer within {self._timeout:g} s"
                ) from error
            raise failure from failure.__cause__
        finally:
            self._first = None

    def begin(self) -> asyncio.Future[None]:
        """Connect without anybody waiting for it; the future says that it is connected, or why that will not be.

        What has to be done about a refusal may be done later, so it is tried again until it is closed.
        """
        self._guard()
        if self.state is not State.CLOSED:
            raise RuntimeError(f"{self!r} was opened already")
        self._loop = loop = asyncio.get_running_loop()
        self.failure, self._pause = None, 0.0
        self._become(State.CONNECTING)
        first = self._first = loop.create_future()
        self._task = start(self._connect(), "aiolock-redis-connect")
        self._arm(min(PING_EVERY, self._timeout))
        return first

    async def aclose(self) -> None:
        """Give up the connection and what waits for it, within about a second. Idempotent; never raises.

        In a forked child it does nothing, because the connection is its parent's.
        """
        if self._fork != Forks.generation or self.state is State.CLOSED:
            return
        self._become(State.CLOSED)
        if self.outages is not None:
            self.outages.forget(self, str(self._endpoint))
        transport, self._transport = self._transport, None
        task, self._task = self._task, None
        if self._timer is not None:
            self._timer.cancel()
        closed = BackendUnavailable(f"the connection to {self._endpoint} was closed")
        self._gone(closed)
        if self._first is not None:
            settle(self._first, closed)
        if task is not None:
            task.cancel()
        farewell = _Farewell()
        try:
            if transport is not None:
                transport.set_protocol(farewell)
                transport.close()
                await asyncio.wait((farewell.over,), timeout=CLOSE_WITHIN)
                if not farewell.over.done():
                    transport.abort()
                    await asyncio.wait((farewell.over,), timeout=CLOSE_WITHIN)
            if task is not None:
                await asyncio.wait((task,), timeout=CLOSE_WITHIN)
        finally:
            if transport is not None:
                transport.abort()

    def _closed(self) -> bool:
        return self.state is State.CLOSED

    def _guard(self) -> None:
        if self._fork != Forks.generation:
            raise RuntimeError(
                "this connection was made before a fork, and a forked child must not use it: connect anew in the child"
            )

    # --- up and down

    async def _connect(self) -> None:
        """Try until it is connected; ends when it is closed."""
        while True:
            if self._pause:
                await asyncio.sleep(self._pause * self._random.uniform(0.5, 1.0))
            self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
            if self._closed():
                return
            self._become(State.CONNECTING)
            try:
                transport = await self._endpoint.connect(ATTEMPT * self._timeout, self, self.verify)
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
        self._become(State.BROKEN)
        log.debug("%s", error)
        if not error.retryable:
            self._pause = REFUSED_PAUSE
            if self._first is not None:
                settle(self._first, error)

    def _up(self) -> None:
        self.generation += 1
        self.failure = None
        self._become(State.READY)
        if self.outages is not None:
            self.outages.up(self, str(self._endpoint))
        if self._first is not None:
            settle(self._first)
        if self._on_up is not None:
            self._on_up()

    def _lost(self, error: BackendError, state: State = State.BROKEN, pause: float = 0.0) -> None:
        """The one way down, however it was found; the next attempt comes not before ``pause`` seconds or so."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        transport.set_protocol(_Farewell())
        transport.abort()
        was = self.state
        self.failure = error
        self._become(state)
        if was is State.READY and state is State.BROKEN and self.outages is not None:
            # Before those who wait are told, so that they count.
            self.outages.down(self, str(self._endpoint), error.__cause__ or error)
        if self._clock() - self._since >= STABLE:
            self._pause = FIRST_PAUSE
        self._pause = max(self._pause, pause)
        self._task = start(self._connect(), "aiolock-redis-connect")
        self._gone(error)
        if was is State.READY and self._on_down is not None:
            self._on_down()

    def leave(self) -> None:
        """Connect anew: another server has taken over."""
        self._lost(BackendUnavailable(f"{self._endpoint}: another server has taken over"))

    def _become(self, state: State) -> None:
        if state is not self.state:
            log.debug("%r becomes %s", self, state.value)
            self.state = state

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end has closed, or the network has."""
        error = BackendUnavailable(f"the connection to {self._endpoint} broke")
        error.__cause__ = exc
        self._lost(error)

    def _write(self, transport: asyncio.WriteTransport, data: bytes) -> None:
        try:
            transport.write(data)
        except Exception as error:  # noqa: BLE001 - a transport that is being closed may raise what it likes
            self.connection_lost(error)

    # --- one timer for everything

    def _arm(self, delay: float) -> None:
        assert self._loop is not None  # noqa: S101 - it is open
        self._due = self._clock() + delay
        self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        now = self._clock()
        if now - self._due > LATE and not self._held_up:
            # We were stopped or busy. What arrived meanwhile is read before anybody is found to be silent.
            self._held_up = True
            assert self._loop is not None  # noqa: S101 - it is open
            self._timer = self._loop.call_later(GRACE, self._tick)
            return
        self._held_up = False
        then = min(self._expire(now), self._look(now), now + PING_EVERY, now + self._timeout)
        if self.state is not State.CLOSED:
            self._arm(max(then - now, 0.001))

    def _look(self, now: float) -> float:
        """Ask for a sign of life where there was none, and return when to look again."""
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
            self._lost(BackendUnavailable(f"{self._endpoint} did not answer a PING within {PING_WITHIN:g} s"))
            return math.inf
        return self._pinged + PING_WITHIN


class _Farewell(asyncio.Protocol):
    """Listens to a connection that is none any more, until it is closed."""

    __slots__ = ("over",)

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed, in whatever way."""
        del exc
        settle(self.over)


def settle(future: asyncio.Future[None], error: BackendError | None = None) -> None:
    """Give whoever waits the answer."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # looked at: nobody may be waiting any more
