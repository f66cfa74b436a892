"""What the parts of one client share: its loop, clock, backend, watchdog, its tasks, and who may use them.

Everything that outlives a caller runs in a task of the client: clean-ups, renewals, waiting. They are held strongly
here, end with the client, and an error in one of them is logged instead of lost.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Coroutine
from enum import Enum
from random import Random
from threading import get_ident
from typing import Any, ClassVar, Protocol

from aiolock.clock import Clock
from aiolock.contract import Backend, Claim, Release
from aiolock.delivery import current_task
from aiolock.errors import BackendError, LossReason, shorten
from aiolock.figures import FIRST, THIN, Histogram, no_losses
from aiolock.gate import Gate
from aiolock.logs import Log, get_logger
from aiolock.tasks import start
from aiolock.watchdog import Watchdog

__all__ = ["Contender", "Generations", "Runtime", "State", "Stats", "current_task"]

ASKING = 100
"""How many claims of one client ask again at the same time: few enough to be answered within a short ttl, and enough for a slow link."""

log: Log = get_logger("aiolock")


class State(Enum):
    """The life of one opening of a client; it only goes forward."""

    NEW = "not open"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


_OPEN = State.OPEN
"""Looking a member up in its class costs 0.2 µs on Python 3.11, and this is asked for every acquire."""
_NOT_OURS, _UNKNOWN = Release.NOT_OURS, Release.UNKNOWN


class Contender(Protocol):
    """Whatever asks for or has a claim, and lets go of it when the client is closed."""

    @property
    def waiting(self) -> int:
        """How many tasks wait behind it."""
        ...

    def close(self) -> Claim:
        """Tell waiters and holder that it is over, and return the claim to release."""
        ...

    def bury(self) -> None:
        """Mark the hold as lost without the event loop, which was closed."""
        ...


class Owner(Protocol):
    """The lease of a hold that is being released."""

    def disown(self) -> bool:
        """The server has answered that the hold was not ours: whether the lease was lost by that."""
        ...


class Stats:
    """Counters since the client was opened, for a metrics exporter."""

    __slots__ = (
        *("acquired", "cleanups", "holds", "losses", "lost", "mask"),
        *("passed", "released", "timeouts", "waited", "waits"),
    )

    def __init__(self) -> None:
        self.acquired: int = 0
        self.released: int = 0
        self.passed: int = 0
        self.timeouts: int = 0
        self.lost: int = 0
        self.losses: dict[LossReason, int] = no_losses()
        self.cleanups: int = 0
        self.waited: int = 0
        self.waits: Histogram = Histogram()
        self.holds: Histogram = Histogram()
        self.mask: int = 0
        """Which of them are measured: those whose number has no bit in common with it."""

    def wait(self) -> int:
        """Somebody waits: for how many they stand if that is measured, else 0."""
        self.waited += 1
        return 0 if self.waited & self.mask else self.weigh()

    def weigh(self) -> int:
        """For how many the one that is measured now stands."""
        weight = self.mask + 1
        if self.acquired >= FIRST:
            self.mask = THIN - 1
        return weight


class _Forks:
    """What was made before a fork is dead in the child."""

    runtimes: ClassVar[weakref.WeakSet[Runtime]] = weakref.WeakSet()

    @classmethod
    def child(cls) -> None:
        for runtime in list(cls.runtimes):
            runtime.forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Forks.child)


class Generations:
    """The openings of one client, of which the latest is used: its lock objects outlive each of them."""

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.latest: Runtime


class Runtime:
    """One opening of a client, shared by its locks, leases and queues."""

    def __init__(
        self,
        backend: Backend,
        *,
        clock: Clock,
        random: Random,
        command_timeout: float,
        label: str,
        generations: Generations | None = None,
    ) -> None:
        self.generations: Generations = Generations() if generations is None else generations
        self.generations.latest = self
        self.backend = backend
        self.clock = clock
        self.random = random
        self.command_timeout = command_timeout
        self.label = label
        self.state: State = State.NEW
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = 0
        """The thread that the loop runs in."""
        self.tasks: set[asyncio.Task[Any]] = set()
        self.cleanups: set[asyncio.Task[Any]] = set()
        self.shared: dict[str, Any] = {}
        """The cohort that tasks of this client join when they want the same lock."""
        self.contenders: dict[Contender, None] = {}
        """All others, in the order in which they came: closing is the same in every run."""
        self.inside: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        """The lease of the outermost block of a lock that only one may be in, by family and name."""
        self.reading: dict[tuple[asyncio.Task[Any], str], Any] = {}
        """The lease of the outermost read block that a task is in, by task and name."""
        self.boards: dict[tuple[str, str], Any] = {}
        """What this client does with one document, by family and name."""
        self.levels: weakref.WeakValueDictionary[tuple[asyncio.Task[Any], str], Any] = (
            weakref.WeakValueDictionary()
        )
        """The hold that a task may enter again."""
        self.on_first_use: Callable[[], None] | None = None
        """What opens the client when it is used before; for tests with a server in memory."""
        self.stats: Stats = Stats()
        self.gate: Gate = Gate(backend.concurrency, clock, command_timeout)
        """Admits the first requests of claims."""
        self.asking: asyncio.Semaphore = asyncio.Semaphore(ASKING)
        """Turns of the claims that ask again."""
        self.forked: bool = False
        """Whether this process is a child that was forked after the client was made."""
        _Forks.runtimes.add(self)
        self.watchdog: Watchdog = Watchdog(
            backend.renew,
            backend.notice,
            clock=clock,
            random=random,
            spawn=self.spawn,
            alive=lambda: not self.forked and self.state is not State.CLOSED,
        )

    @property
    def everybody(self) -> list[Contender]:
        """All that ask for or have a claim."""
        return [*self.shared.values(), *self.contenders]

    def in_use(self) -> bool:
        """Test whether something holds or waits for a lock."""
        return bool(self.shared or self.contenders)

    def guard(self) -> asyncio.Task[Any] | None:
        """Return the running task if the client may be used here, else raise :class:`RuntimeError`."""
        if self.forked:
            hint = (
                "connect anew in the child"
                if self.state in (_OPEN, State.CLOSING)
                else "open it in the child, with `async with`"
            )
            raise RuntimeError(
                f"this client was made before a fork, and a forked child must not use it: {hint}"
            )
        if self.state is State.NEW and self.on_first_use is not None:
            self.on_first_use()
        if self.state is not _OPEN:
            hint = "enter it with `async with` first" if self.state is State.NEW else "open it again first"
            raise RuntimeError(f"this client is {self.state.value}: {hint}")
        # Asking for the running loop is a system call on Python 3.11; a task of our loop that runs in its thread is
        # proof enough.
        loop = self.loop
        task = current_task(loop) if loop is not None and get_ident() == self.thread else None
        if task is None and asyncio.get_running_loop() is not loop:
            if loop is not None and loop.is_closed():
                raise RuntimeError(
                    "the event loop in which this client was opened is closed: open it again first"
                )
            raise RuntimeError(
                "this client belongs to another event loop or thread; each loop needs a client of its own "
                "(from synchronous code, use aiolock.portal)"
            )
        return task

    @property
    def over(self) -> bool:
        """Whether another opening may follow: this one was closed, or its event loop was."""
        if self.state is State.CLOSED:
            return True
        return self.loop is not None and self.loop.is_closed()

    def bury(self) -> None:
        """End an opening whose event loop was closed without ``aclose``: every lease is lost, and nothing is sent."""
        if self.state is State.CLOSED:
            return
        self.state = State.CLOSED
        for contender in self.everybody:
            contender.bury()
        self.tasks.clear()
        self.cleanups.clear()
        self.watchdog.close()
        self.backend.abandon()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` as a task of the client."""
        task = start(work, name)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        self.cleanups.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(
                "%s ended with %r",
                task.get_name(),
                error,
                exc_info=error,
                extra={"task": task.get_name()},
            )

    def clean_up(self, claim: Claim, keep: float = 0, lease: Owner | None = None) -> None:
        """Release ``claim`` in the background, for as long as it could otherwise stay: one ttl.

        What can be sent without waiting is sent before this returns. ``lease`` learns whether the hold was lost.
        """
        if self.state is State.CLOSED or self.forked:
            # There is no way to the server any more: it ends by its ttl.
            return
        self.stats.cleanups += 1
        answer = claim.begin_release(keep)
        if answer is None or answer is _UNKNOWN:
            self.cleanups.add(self.spawn(self._clean_up(claim, keep, lease), "aiolock-clean-up"))
        elif answer is _NOT_OURS and lease is not None:
            lease.disown()

    async def _clean_up(self, claim: Claim, keep: float, lease: Owner | None) -> None:
        give_up = self.clock() + claim.bid.ttl
        pause = 0.02
        while not self.forked:
            try:
                answer = await claim.release(keep)
            except BackendError as error:
                if not error.retryable or self.clock() >= give_up:
                    name = claim.bid.name
                    log.warning(
                        "could not clean up %s, it ends by its ttl: %s",
                        shorten(name),
                        error,
                        extra={"lock": name},
                    )
                    return
            else:
                if answer is _NOT_OURS and lease is not None:
                    lease.disown()
                return
            await asyncio.sleep(pause * self.random.uniform(0.5, 1.0))
            pause = min(2 * pause, 1.0)

    async def release(self, claim: Claim, lease: Owner, keep: float = 0) -> bool:
        """Release the hold of ``lease`` and wait for it until the first cancellation; what is left to do is then the client's.

        Whether the server's answer says that the lease was lost. Trouble with the connection is no news to a caller who is
        leaving: it is cleaned up in the background.
        """
        try:
            answer = await claim.release(keep)
        except BaseException as error:
            if not self.unreleased(claim, error, lease, keep):
                raise
            return False
        return answer is _NOT_OURS and lease.disown()

    def unreleased(self, claim: Claim, error: BaseException, lease: Owner, keep: float = 0) -> bool:
        """A release ended with ``error``: it is the client's now; whether its caller need not know."""
        trouble = isinstance(error, BackendError)
        if trouble:
            name = claim.bid.name
            log.info("release of %s will be tried again: %s", shorten(name), error, extra={"lock": name})
        self.clean_up(claim, keep, lease)
        return trouble
