"""Locks in memory for tests: a loop in virtual time, a client, lost leases and other holders on demand."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Self, TypeVar, get_args
from weakref import WeakSet

from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.backends.rows.rules import Machine, Message
from aiolock.client import Client
from aiolock.core.backend import Event, EventKind
from aiolock.core.inbox import WakeReason
from aiolock.core.runtime import State
from aiolock.errors import BackendUnavailable, ConfigError, LossReason, shorten
from aiolock.kinds.multi import JointLease
from aiolock.lease import Lease, hold_of
from aiolock.validation import check_seconds

__all__ = ["Deadlock", "OpenedClient", "VirtualLoop", "World", "lose", "run"]

T = TypeVar("T")

# --- virtual time

START = 1000.0
"""The time at which every loop begins."""
PASS = 1e-6
"""Seconds that a pass of the loop takes: a task that polls the clock comes to its end."""


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: the loop would hang. The message lists the tasks and where they wait."""


class _Jump(selectors.DefaultSelector):
    """A selector that never waits, and adds the timeout to the loop's time instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            self.loop.now += PASS
            return []
        # The only file is the pipe through which other threads wake the loop.
        events = super().select(0)
        if not events:
            if timeout is None:
                raise Deadlock(self.loop.stuck())
            self.loop.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; ``now`` is its time, in seconds."""

    def __init__(self) -> None:
        self.now: float = START
        selector = _Jump()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Return the time that timers are measured by."""
        return self.now

    def stuck(self) -> str:
        """Return the list of tasks and where they wait."""
        lines = ["nothing is ready and no timer is set, and there wait"]
        for task in sorted(asyncio.all_tasks(self), key=lambda task: task.get_name()):
            frames = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in task.get_stack(limit=1)]
            lines.append(f"  {task.get_name()} at {frames[-1] if frames else '?'}")
        return "\n".join(lines)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` as ``asyncio.run`` does, in virtual time, and return its result: an hour takes milliseconds.

    For code that waits for timers, tasks and a :class:`World` only: no socket could answer in time. Every run with the same
    random numbers is the same run. Raises :class:`Deadlock` where a real loop would hang.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


# --- a client that opens by itself


class OpenedClient(Client):
    """A client of a server in memory that opens on the event loop that uses it first: a pytest fixture knows no loop."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._runtime.on_first_use = self._open_at_once

    def _open_at_once(self) -> None:
        asyncio.get_running_loop()
        # A server in memory answers at once.
        opening = super().open()
        try:
            opening.send(None)
        except StopIteration:
            return
        opening.close()
        raise AssertionError("a server in memory was waited for")

    async def open(self) -> Self:
        """Open the client, unless it has opened by itself on this loop."""
        runtime = self._runtime
        if runtime.state is State.OPEN and runtime.loop is asyncio.get_running_loop():
            return self
        return await super().open()

    def end(self) -> None:
        """Close the client on its loop, if that can still run."""
        runtime = self._runtime
        loop = runtime.loop
        if (
            runtime.state is State.OPEN
            and loop is not None
            and not loop.is_closed()
            and not loop.is_running()
        ):
            loop.run_until_complete(self.aclose())


# --- world

C = TypeVar("C", bound=Client)

LANDING = 25
"""Passes of the loop after which everything under way has arrived."""


def lose(lease: Lease, reason: LossReason = "expired") -> None:
    """Lose a lease at this moment, as by any other loss: the tasks under it are cancelled or notified.

    Works with leases of every server, whose client releases the lock in the background. Call it on the loop of the lease. A lease
    that has ended already stays as it is.
    """
    if reason not in get_args(LossReason):
        raise ConfigError(f"reason must be one of {', '.join(get_args(LossReason))}, not {shorten(reason)}")
    if not isinstance(lease, Lease):
        raise ConfigError(f"lose() ends leases, and this is none: {shorten(lease)}")
    if isinstance(lease, JointLease):
        # It is lost with the first of its parts.
        lease = lease.parts[0]
    hold = hold_of(lease)
    runtime = hold.parent.runtime
    runtime.guard()
    if hold.open:
        # One that has ended may share its validity with the hold of the next task.
        runtime.scheduler.lose(hold.validity, reason)


class _Server(MemoryServer):
    """A server that can act at once when its clock was moved."""

    def serve(self) -> None:
        """End the holds whose time is over, and grant the lock to the next waiters."""
        self.ask(lambda machine, now: [machine.advance(key, now) for key in list(machine.locks)])

    def next_end(self) -> float:
        """Return the time at which the next hold ends without a renewal."""

        def inspect(machine: Machine, _: float) -> float:
            holds = (hold for lock in machine.locks.values() for hold in lock.holds.values())
            return min((hold.deadline for hold in holds), default=float("inf"))

        return self.ask(inspect)


class _Backend(MemoryBackend):
    """A connection to the server that can be cut."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server=server, transport=self._travel)
        self._cut = False

    async def _travel(self, step: Callable[[], Any]) -> Any:
        if self._cut:
            raise BackendUnavailable("this client was cut off by World.cut()")
        return step()

    def receive(self, message: Message) -> None:
        """Drop messages while the connection is cut."""
        if not self._cut:
            super().receive(message)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Cut the connection until the end of the block."""
        self._cut = True
        try:
            yield
        finally:
            self._cut = False
            # As after every broken connection: notifications may have been lost.
            self.events.put(Event(EventKind.DOUBT))
            for register in list(self._registers.values()):
                register.inbox.wake(WakeReason.RECONNECTED)


class World:
    """A lock server in memory, with clients that stand for as many processes.

    Its time stands still, for server and leases alike, until :meth:`advance` or :meth:`pause` moves it: no lease ends
    while a debugger is open. Sleeps of tasks and ``timeout=`` follow the event loop: in real time usually; under
    :func:`aiolock.testing.run` all of it is one virtual time.
    """

    def __init__(self) -> None:
        self._moved = 0.0
        self._server = _Server(self.now)
        self._clients: WeakSet[Client] = WeakSet()

    def __repr__(self) -> str:
        return f"<World with {len(self._clients)} clients at {self.now():.3f} s>"

    def now(self) -> float:
        """Return the time, in seconds since an arbitrary moment."""
        loop = _virtual()
        return self._moved + (START if loop is None else loop.time())

    def connect(self, **options: Any) -> Client:
        """Return a client of this server, to be entered with ``async with``; takes the options of :class:`aiolock.Client`."""
        return self.connect_as(Client, **options)

    def connect_as(self, cls: type[C], **options: Any) -> C:
        """Return a client of a subclass of :class:`aiolock.Client`."""
        client = cls(_Backend(self._server), clock=self.now, random=Random(0), **options)
        self._clients.add(client)
        return client

    # --- time

    async def advance(self, seconds: float) -> None:
        """Let time pass, with all that happens in it: renewals, holds that end, grants to waiters.

        Other tasks run meanwhile. Cancelling it leaves the time where it is.
        """
        end = self.now() + check_seconds("seconds", seconds, 0)
        if _virtual() is not None:
            await asyncio.sleep(end - self.now())
            return
        while (now := self.now()) < end:
            schedulers = [client._runtime.scheduler for client in self._clients]  # noqa: SLF001 - see lose()
            events = [scheduler._next_event() for scheduler in schedulers]  # noqa: SLF001 - see lose()
            # A renewal is due at its moment and not before: each step moves the time.
            step = min((event for event in (*events, self._server.next_end()) if event > now), default=end)
            self._moved += max(min(step, end) - now, 1e-6)
            self._notice()
            await self.settle()

    def pause(self, seconds: float) -> None:
        """Stop this process for a time, as if it were stopped, swapped out or busy; the server goes on.

        No renewal is sent meanwhile. Timers of the loop are not delayed, except under :func:`aiolock.testing.run`. Returns
        before other tasks run: ``lease.held`` is right at once, and tasks under lost leases are cancelled at the next
        ``await``.
        """
        passed = check_seconds("seconds", seconds, 0)
        loop = _virtual()
        if loop is None:
            self._moved += passed
        else:
            loop.now += passed
        self._notice()

    async def settle(self) -> None:
        """Let all other tasks run until everything under way has arrived; cancelling it ends the wait."""
        for _ in range(LANDING):
            await asyncio.sleep(0)

    def _notice(self) -> None:
        self._server.serve()
        for client in list(self._clients):
            client._runtime.scheduler._check_clock()  # noqa: SLF001 - see lose()

    # --- accidents

    @contextmanager
    def cut(self, client: Client) -> Iterator[None]:
        """Cut the connection between a client and the server during the block: calls fail, no notification arrives.

        Leases of the client are lost when their validity ends.
        """
        backend = getattr(client, "_backend", None)
        if client not in list(self._clients) or not isinstance(backend, _Backend):
            raise ConfigError(f"cut() is for clients of this world, not for {shorten(client)}")
        with backend.cut():
            yield

    def lose(self, lease: Lease, reason: LossReason = "expired") -> None:
        """Lose a lease, as :func:`aiolock.testing.lose`."""
        lose(lease, reason)


def _virtual() -> VirtualLoop | None:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return loop if isinstance(loop, VirtualLoop) else None
