"""A lock server in memory, its clients, and the clock of all of them, which goes when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar, get_args
from weakref import WeakSet

from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.backends.memory.machine import Machine, Message
from aiolock.client import Client
from aiolock.contract import News, Notice
from aiolock.errors import BackendUnavailable, ConfigError, LossReason, shorten
from aiolock.joint import JointLease
from aiolock.lease import Lease
from aiolock.options import check_seconds
from aiolock.testing.virtual import START, VirtualLoop

__all__ = ["World", "lose"]

T = TypeVar("T")
C = TypeVar("C", bound=Client)

LANDING = 25
"""After so many passes of the loop, everything that was on its way has arrived."""


def lose(lease: Lease, reason: LossReason = "expired") -> None:
    """End a lease at this moment, by the way that every loss takes: what works under it is cancelled or told.

    Works with leases of every server; the server hears of it in the background, so that others can have the lock soon.
    To be called on the loop of the lease. A lease that has ended already stays as it is.
    """
    if reason not in get_args(LossReason):
        raise ConfigError(f"reason must be one of {', '.join(get_args(LossReason))}, not {shorten(reason)}")
    if not isinstance(lease, Lease):
        raise ConfigError(f"lose() ends leases, and this is none: {shorten(lease)}")
    if isinstance(lease, JointLease):
        # It is lost with the first of its parts.
        lease = lease.parts[0]
    home, term = lease._home, lease._term  # noqa: SLF001 - what this module is for: to do what only servers can
    home.runtime.guard()
    home.runtime.watchdog.lose(term, reason)


class _Server(MemoryServer):
    """A server that notices at once that its clock was moved."""

    def serve(self) -> None:
        """End what is over, and let in who is next."""
        self.ask(lambda machine, now: [machine.advance(key, now) for key in list(machine.locks)])

    def next_end(self) -> float:
        """When a hold ends if nobody renews it."""

        def look(machine: Machine, _: float) -> float:
            holds = (hold for lock in machine.locks.values() for hold in lock.holds.values())
            return min((hold.deadline for hold in holds), default=float("inf"))

        return self.ask(look)


class _Backend(MemoryBackend):
    """A way to the server that can be cut."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server=server, transport=self._travel)
        self._cut = False

    async def _travel(self, step: Callable[[], Any]) -> Any:
        if self._cut:
            raise BackendUnavailable("this client was cut off by World.cut()")
        return step()

    def receive(self, message: Message) -> None:
        """Messages do not arrive either."""
        if not self._cut:
            super().receive(message)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing gets through until the end of the block."""
        self._cut = True
        try:
            yield
        finally:
            self._cut = False
            # As after every connection that broke: what was said in the meantime was not heard.
            self._notices.put(Notice(News.DOUBT))
            for document in list(self._documents.values()):
                document.wake()


class World:
    """A lock server in memory, with clients that stand for as many processes.

    Its time stands still, for server and leases alike, until :meth:`advance` or :meth:`pause` moves it: no lease ends
    while a debugger is open, and none is waited for. How long tasks sleep, and ``timeout=``, are the event loop's: in
    real time usually; under :func:`aiolock.testing.run` all of it is one virtual time.
    """

    def __init__(self) -> None:
        self._moved = 0.0
        self._server = _Server(self.now)
        self._clients: WeakSet[Client] = WeakSet()

    def __repr__(self) -> str:
        return f"<World with {len(self._clients)} clients at {self.now():.3f} s>"

    def now(self) -> float:
        """The time, in seconds since an arbitrary moment."""
        loop = _virtual()
        return self._moved + (START if loop is None else loop.time())

    def connect(self, **options: Any) -> Client:
        """A client of this server, to be entered with ``async with``; takes the options of :class:`aiolock.Client`."""
        return self.connect_as(Client, **options)

    def connect_as(self, cls: type[C], **options: Any) -> C:
        """The same, of a subclass of :class:`aiolock.Client`."""
        client = cls(_Backend(self._server), clock=self.now, random=Random(0), **options)
        self._clients.add(client)
        return client

    # --- time

    async def advance(self, seconds: float) -> None:
        """Let so much time pass, with everything that happens in it: renewals in time, holds that end, turns in queues.

        Other tasks run meanwhile. Cancelling it leaves the time where it is.
        """
        end = self.now() + check_seconds("seconds", seconds, 0)
        if _virtual() is not None:
            await asyncio.sleep(end - self.now())
            return
        while (now := self.now()) < end:
            dogs = [client._runtime.watchdog for client in self._clients]  # noqa: SLF001 - see lose()
            events = [dog._next_event() for dog in dogs]  # noqa: SLF001 - see lose()
            # A renewal falls due when its moment has come, not just before it: a step never is nothing.
            step = min((event for event in (*events, self._server.next_end()) if event > now), default=end)
            self._moved += max(min(step, end) - now, 1e-6)
            self._notice()
            await self.settle()

    def pause(self, seconds: float) -> None:
        """This process stands still for so long, as one that is stopped, swapped out or busy; the server does not.

        No renewal goes out meanwhile. What waits on timers of the loop is not concerned, except under
        :func:`aiolock.testing.run`, where they are late by so much. Returns before anybody has run: ``lease.held`` is
        right at once, and who has to be cancelled is cancelled at the next ``await``.
        """
        passed = check_seconds("seconds", seconds, 0)
        loop = _virtual()
        if loop is None:
            self._moved += passed
        else:
            loop.now += passed
        self._notice()

    async def settle(self) -> None:
        """Let every other task run until what is on its way has arrived."""
        for _ in range(LANDING):
            await asyncio.sleep(0)

    def _notice(self) -> None:
        self._server.serve()
        for client in list(self._clients):
            client._runtime.watchdog._look()  # noqa: SLF001 - timers do not know that the clock was moved

    # --- accidents

    @contextmanager
    def cut(self, client: Client) -> Iterator[None]:
        """The way between a client and the server is cut for the length of the block: calls fail, nothing arrives.

        A lease of the client lives on until its term ends, and is lost then.
        """
        backend = getattr(client, "_backend", None)
        if client not in list(self._clients) or not isinstance(backend, _Backend):
            raise ConfigError(f"cut() is for clients of this world, not for {shorten(client)}")
        with backend.cut():
            yield

    def lose(self, lease: Lease, reason: LossReason = "expired") -> None:
        """The same as :func:`aiolock.testing.lose`."""
        lose(lease, reason)


def _virtual() -> VirtualLoop | None:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return loop if isinstance(loop, VirtualLoop) else None
