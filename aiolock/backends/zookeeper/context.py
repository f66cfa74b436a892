"""The parts of one client that its claims, registers and administration share."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import NamedTuple

from aiozk import exc

from aiolock.backends.zookeeper import protocol
from aiolock.backends.zookeeper.errors import translate
from aiolock.backends.zookeeper.format import make
from aiolock.backends.zookeeper.protocol import Operation
from aiolock.backends.zookeeper.session import OnEvent, Session
from aiolock.backends.zookeeper.url import Address
from aiolock.clock import Clock
from aiolock.core.backend import EventQueue
from aiolock.core.logs import Log, get_logger
from aiolock.core.tasks import start
from aiolock.errors import BackendUnavailable, LockError, shorten

__all__ = ["BLOCK", "Cleanup", "Context", "Leftover", "Nodes", "SharedTimer", "Watches", "find", "remove"]

log: Log = get_logger("aiolock.zookeeper")

BLOCK = 1024
"""The number of tokens that the zxid of one node stands for: local hand-overs under it have their own."""

AN_HOUR = 3600.0
A_DAY = 24 * AN_HOUR

KEEPER = "kept"
"""A child that keeps the node of a semaphore whose limit was set: it lasts for a day after its last write."""


class Nodes:
    """Creates nodes other than contenders, and knows which operations this ensemble and its rights allow."""

    def __init__(self, session: Session, acl: bytes, clock: Clock) -> None:
        self._session = session
        self.acl = acl
        self._clock = clock
        self._kept: dict[str, float] = {}
        """By the path of a semaphore: the time of the last write to its keeper."""
        self.expire = True
        """True if the servers have nodes with a time to live; until one refuses."""
        self.may_write = True
        """True if the data of a lock's own node may be written; until a server refuses."""

    def temporary(self, path: str, data: bytes, seconds: float) -> Operation:
        """Create a node that the server removes ``seconds`` after its last write, where servers have such nodes."""
        if self.expire:
            return protocol.lasting(path, data, self.acl, seconds)
        return protocol.persistent(path, data, self.acl)

    async def make(self, path: str, data: bytes = b"") -> None:
        """Create the container ``path`` with this data and all containers above it, as far as they are missing.

        Cancelling it leaves open which were created; it may be called again.
        """
        await make(self._session.ask, path, self.acl, data)

    async def keep(self, path: str) -> bool:
        """Keep the node of a semaphore for a day; return False if it is not there.

        Cancelling it leaves open whether the server writes; it may be called again.
        """
        keeper = f"{path}/{KEEPER}"
        try:
            try:
                await self._session.ask(self.temporary(keeper, b"", A_DAY + AN_HOUR))
            except exc.Unimplemented:
                if not self.expire:
                    raise
                self.expire = False
                return await self.keep(path)
            except exc.NodeExists:
                await self._session.ask(protocol.put(keeper, b""))
        except exc.NoNode:
            return False
        self._kept[path] = self._clock()
        return True

    def keep_used(self, path: str) -> None:
        """Keep the node of a semaphore in use for another day; sends at most one request per hour, without waiting."""
        now = self._clock()
        if self._kept.get(path, -math.inf) < now - AN_HOUR:
            # Without a connection, the next use sends it.
            with contextlib.suppress(exc.ZKError):
                self._session.ask(protocol.put(f"{path}/{KEEPER}", b""))
                self._kept[path] = now


TICK = 0.001
"""Seconds before an uncontended holder checks for waiters, at least; twice as many at most."""


class SharedTimer:
    """Call functions after a moment, with one timer for all; one for each hold costs 7 % with 50 holds at once."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []
        self._next: list[Callable[[], None]] = []
        self._running = False

    def call(self, function: Callable[[], None]) -> None:
        """Call ``function`` in one to two ticks; it has to find out whether there is still a reason."""
        self._next.append(function)
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        due, self._due, self._next = self._due, self._next, []
        for function in due:
            function()
        self._running = bool(self._due)
        if self._running:
            asyncio.get_running_loop().call_later(TICK, self._tick)


class Watches:
    """The paths that one claim or register watches, with their callbacks.

    The server announces one event per request with ``watch``, and forgets with the connection. So a path in here means
    that events reach the callback, not that the server will send one.
    """

    __slots__ = ("_callbacks", "_session")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._callbacks: dict[str, OnEvent] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._callbacks

    def on(self, path: str, callback: OnEvent) -> str:
        """Call ``callback`` with the events at ``path``; return it for the request that sets the watch."""
        if path not in self._callbacks:
            self._callbacks[path] = callback
            self._session.watchers.setdefault(path, set()).add(callback)
        return path

    def off(self, *keep: str) -> None:
        """Forget every path but these."""
        if not self._callbacks:
            return
        for path in [path for path in self._callbacks if path not in keep]:
            self.forget(path)

    def forget(self, path: str) -> None:
        """Forget a path, for example because the server has announced its one event."""
        callback = self._callbacks.pop(path, None)
        if callback is None:
            return
        callbacks = self._session.watchers[path]
        callbacks.discard(callback)
        if not callbacks:
            del self._session.watchers[path]


# --- clean-up
# An ephemeral node lives as long as its session, which may be as long as the process. So the nodes that a failed or
# cancelled release may have left are searched for by the uuid of their attempt and deleted, until that succeeds or the
# session is gone.

PAUSE = 0.05
"""Seconds between a failure and the next try."""


class Leftover(NamedTuple):
    """The nodes that an attempt may have left: one if its name is known, else all that start with ``prefix``."""

    owner: int
    path: str
    prefix: str
    node: str | None


async def find(session: Session, leftover: Leftover) -> list[str]:
    """Return the nodes of an attempt in their order, as the leader knows them now. Cancelling it changes nothing."""
    [listed] = await session.read(protocol.listing(leftover.path, watch=False), owner=leftover.owner)
    children: list[str] = [] if listed is None else listed.children
    begin = len(leftover.prefix)
    return sorted(
        (name for name in children if name.startswith(leftover.prefix)), key=lambda name: name[begin:]
    )


async def remove(session: Session, leftover: Leftover) -> bool:
    """Delete what is there, and return whether anything was; unless it raises, nothing is there afterwards.

    Cancelling it leaves open which nodes were deleted; it may be called again.
    """
    found = False
    for name in [leftover.node] if leftover.node is not None else await find(session, leftover):
        with contextlib.suppress(exc.NoNode):
            await session.ask(protocol.delete(f"{leftover.path}/{name}"), leftover.owner)
            found = True
    return found


class Cleanup:
    """Delete nodes in the background, in one task that exists while there are any."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._leftovers: dict[Leftover, None] = {}
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._leftovers)

    def take(self, leftover: Leftover) -> None:
        """Delete these nodes from now on."""
        self._leftovers[leftover] = None
        if self._task is None or self._task.done():
            self._task = start(self._work(), "aiolock-zookeeper-cleanup")

    async def _work(self) -> None:
        session = self._session
        while self._leftovers:
            try:
                owner = await session.ready()
                for leftover in list(self._leftovers):
                    if leftover.owner == owner:
                        await remove(session, leftover)
                    # Nodes of another session are gone, or the ensemble is removing them.
                    self._leftovers.pop(leftover, None)
            except exc.NoAuth:
                leftover = next(iter(self._leftovers))
                del self._leftovers[leftover]
                log.warning("may not delete nodes in %s, they end with the session", shorten(leftover.path))
            except (exc.ZKError, LockError) as error:
                log.debug("deleting nodes will be tried again: %s", error)
                if session.closing or session.failure is not None:
                    return
                await asyncio.sleep(PAUSE)

    async def aclose(self) -> None:
        """Stop; what is left ends with the session. Cancelling it ends the waiting only."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


# --- context


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of a client that do not depend on a lock."""

    session: Session
    nodes: Nodes
    cleanup: Cleanup
    timer: SharedTimer
    events: EventQueue
    clock: Clock
    random: Random
    address: Address
    command_timeout: float

    def bounded(self) -> _Bounded:
        """Bound a statement by the command timeout, and translate errors of aiozk."""
        return _Bounded(self)

    def poll_delay(self) -> float:
        """Return the seconds until a waiter that was not notified reads again."""
        return self.session.timeout * self.random.uniform(1, 2)


class _Bounded:
    """The context manager of one statement; as a generator it would cost 3 % of the client's time for a free lock."""

    __slots__ = ("_context", "_timeout")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._timeout = asyncio.timeout(context.command_timeout)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            error = late
        if isinstance(error, TimeoutError):
            context = self._context
            message = f"{context.address} did not answer within {context.command_timeout:g} s"
            if not context.session.connected and context.session.error is not None:
                raise BackendUnavailable(f"{message}: {context.session.reason}") from context.session.error
            raise BackendUnavailable(message) from error
        if isinstance(error, exc.ZKError):
            raise translate(error) from error
