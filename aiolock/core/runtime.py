"""Runtime: the state that the parts of one open client share.

Work that outlives its caller (clean-ups, renewals, requests for waiters) runs in tasks of the client. They are kept here, end
with the client, and log an error that ends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from enum import Enum
from random import Random
from threading import get_ident
from typing import Any, Generic, Protocol, TypeVar

from aiolock.clock import Clock
from aiolock.core.backend import Backend, Claim, Release
from aiolock.core.capabilities import RegisterStore
from aiolock.core.forks import OneProcess
from aiolock.core.hooks import Hooks
from aiolock.core.limiter import Limiter
from aiolock.core.logs import Log, Outages, get_logger
from aiolock.core.present import labelled_by
from aiolock.core.register import SharedRegister
from aiolock.core.renewal import RenewalScheduler
from aiolock.core.tasks import Backoff, TaskSet
from aiolock.core.wakeup import current_task
from aiolock.errors import BackendError, BackendUnavailable, LossReason, closed_error, copy_of, shorten
from aiolock.metrics import Figures, Histogram, TemplateCounter, no_losses
from aiolock.types import Family

__all__ = ["Contender", "Generations", "OpeningState", "Runtime", "State", "Stats", "current_task"]

T = TypeVar("T")

ASKING = 100
"""Limit of repeated requests under way: few enough to be answered within a short ttl, and enough for a slow connection."""

REPORT_EVERY = 1.0
"""Seconds between the reports of figures."""

log: Log = get_logger("aiolock")


class State(Enum):
    """The state of one opening of a client; it only goes forward."""

    NEW = "not open"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class Contender(Protocol):
    """A local queue or shared register: it may have a claim, and gives it up when the client is closed."""

    @property
    def waiting(self) -> int:
        """The number of tasks that wait for it."""
        ...

    @property
    def ended(self) -> bool:
        """True if it has no claim and no task waits for it any more."""
        ...

    def close(self) -> Claim | None:
        """Fail the waiters, lose the hold, and return the claim to release, if there is one."""
        ...

    def end_without_loop(self) -> None:
        """Lose the hold without the event loop, which was closed."""
        ...


Disown = Callable[[], bool]
"""Records that the server answered a release with "not held"; returns whether the lease was lost by that."""


class Stats:
    """Counters since the client was opened, for a metrics exporter."""

    __slots__ = (
        *("acquired", "cleanups", "holds", "losses", "lost", "passed", "released"),
        *("skipped_by_template", "timeouts_by_template", "waited", "waits"),
    )

    def __init__(self) -> None:
        self.acquired: int = 0
        self.released: int = 0
        self.passed: int = 0
        self.timeouts_by_template: TemplateCounter = TemplateCounter()
        self.skipped_by_template: TemplateCounter = TemplateCounter()
        self.lost: int = 0
        self.losses: dict[LossReason, int] = no_losses()
        self.cleanups: int = 0
        self.waited: int = 0
        self.waits: Histogram = Histogram()
        self.holds: Histogram = Histogram()


class Generations:
    """The latest opening of one client, and what outlives each opening: its callbacks, and who is given its figures."""

    __slots__ = ("hooks", "latest", "reporters")

    def __init__(self) -> None:
        self.latest: Runtime
        self.hooks: Hooks = Hooks()
        self.reporters: list[Callable[[Runtime], None]] = []

    def report_to(self, reporter: Callable[[Runtime], None]) -> None:
        """Have ``reporter`` called on the loop of each opening once a second, and when it is closed. In any thread; no I/O."""
        self.reporters.append(reporter)
        self.latest.begin_reports()


class OpeningState(Generic[T]):
    """State that each opening of a client has of its own; :class:`Runtime` keeps it, and the module that uses it knows its type."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def of(self, runtime: Runtime) -> T:
        """Return the state of one opening, made when it is first asked for."""
        kept = runtime.kept
        if self not in kept:
            kept[self] = self._make()
        state: T = kept[self]
        return state


class Runtime(OneProcess):
    """One opening of a client, shared by its locks, leases and queues."""

    def __init__(
        self,
        backend: Backend,
        *,
        clock: Clock,
        random: Random,
        command_timeout: float,
        label: str,
        caller: str,
        generations: Generations | None = None,
        outages: Outages | None = None,
    ) -> None:
        super().__init__()
        self.generations: Generations = Generations() if generations is None else generations
        self.generations.latest = self
        self.hooks: Hooks = self.generations.hooks
        self.backend = backend
        self.clock = clock
        self.random = random
        self.command_timeout = command_timeout
        self.label = label
        """The label of the client; may be empty."""
        self.caller = caller
        self.shown: str = labelled_by(caller, label)
        """The text by which servers show a request of this client that has no label of its own."""
        """Host and process, as servers keep them."""
        self.state: State = State.NEW
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = 0
        """The thread of the loop."""
        self.tasks: TaskSet = TaskSet()
        self.cleanups: set[asyncio.Task[None]] = set()
        """The tasks that release a claim."""
        self.shared: dict[str, Contender] = {}
        """Local queues that other tasks join, by the key of their request."""
        self.contenders: dict[Contender, None] = {}
        """Local queues of single tasks, and shared registers; in order, so that closing is the same in every run."""
        self.registers: dict[tuple[str, str], SharedRegister] = {}
        """The registers in use, by family and name."""
        self.writing: set[asyncio.Task[None]] = set()
        """The tasks that work on a register."""
        self.kept: dict[OpeningState[Any], Any] = {}
        """State that belongs to other modules; see :class:`OpeningState`."""
        self.connect: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Connects a lazy client before its first request; ``None`` once the server was reached."""
        self._connecting: asyncio.Task[Exception | None] | None = None
        """The latest attempt; its result is why it failed."""
        self.on_first_use: Callable[[], None] | None = None
        """Opens the client when it is used before; for tests with a server in memory."""
        self.outages: Outages = Outages(clock) if outages is None else outages
        self.outages.in_use = self.in_use
        self.stats: Stats = Stats()
        self.limiter: Limiter = Limiter(backend.concurrency, clock, command_timeout)
        """Admits the first requests of claims."""
        self.asking: asyncio.Semaphore = asyncio.Semaphore(ASKING)
        """Admits repeated requests of claims."""
        self.scheduler: RenewalScheduler = RenewalScheduler(
            backend,
            clock=clock,
            random=random,
            spawn=self.spawn,
            alive=lambda: not self.forked and self.state is not State.CLOSED,
        )
        self._reporting: asyncio.Task[None] | None = None

    def identity(self, label: str) -> str:
        """Return the text by which servers show a request of this client; an empty label is that of the client."""
        return labelled_by(self.caller, label) if label else self.shown

    @property
    def contending(self) -> list[Contender]:
        """All local queues and shared registers."""
        return [*self.shared.values(), *self.contenders]

    def end(self) -> Iterator[None]:
        """Close all contenders, then release their claims; yield in between, so that other tasks of the program can go on.

        To end ten thousand holds takes a quarter of a second.
        """
        claims = []
        for number, contender in enumerate(self.contending, 1):
            if not contender.ended and (claim := contender.close()) is not None:
                claims.append(claim)
            if number % 200 == 0:
                yield
        for number, claim in enumerate(claims, 1):
            self.clean_up(claim)
            if number % 200 == 0:
                yield

    def in_use(self) -> bool:
        """Test whether something holds or waits for a lock."""
        return bool(self.shared or self.contenders)

    def guard(self) -> asyncio.Task[Any] | None:
        """Return the running task if the client may be used here, else raise :class:`RuntimeError`."""
        # Asking for the running loop is a system call on Python 3.11; a task of the client's loop that runs in its
        # thread is proof enough.
        if self.state is State.OPEN and not self.forked and get_ident() == self.thread:
            task = current_task(self.loop)
            if task is not None:
                return task
        return self._guard()

    def _guard(self) -> asyncio.Task[Any] | None:
        opened = self.state in (State.OPEN, State.CLOSING)
        self.refuse_fork(
            "client", "connect anew in the child" if opened else "open it in the child, with `async with`"
        )
        if self.state is State.NEW and self.on_first_use is not None:
            self.on_first_use()
        if self.state is not State.OPEN:
            hint = "enter it with `async with` first" if self.state is State.NEW else "open it again first"
            raise RuntimeError(f"this client is {self.state.value}: {hint}")
        loop = self.loop
        if loop is not None and get_ident() == self.thread and (task := current_task(loop)) is not None:
            return task
        if asyncio.get_running_loop() is not loop:
            if loop is not None and loop.is_closed():
                raise RuntimeError(
                    "the event loop in which this client was opened is closed: open it again first"
                )
            raise RuntimeError(
                "this client belongs to another event loop or thread; each loop needs a client of its own "
                "(from synchronous code, use aiolock.portal)"
            )
        return None

    async def reach(self, timeout: float | None = None) -> float | None:
        """Connect a lazy client before its first request; return what is left of ``timeout`` seconds.

        Tasks that come meanwhile wait for the same attempt. Cancelling it ends the waiting; the attempt ends by itself, within
        the command timeout. Raises :class:`BackendUnavailable` at the end of a timeout other than 0, and what
        :meth:`Client.open` raises.
        """
        if self.connect is None:
            return timeout
        begun = self.clock()
        attempt = self._connecting
        if attempt is None or attempt.done():
            attempt = self._connecting = self.tasks.spawn(self._attempt(self.connect), "aiolock-open")
        await asyncio.wait([attempt], timeout=timeout or None)
        if not attempt.done():
            raise BackendUnavailable(f"{self.backend.name} was not reached within {timeout:g} s")
        if attempt.cancelled() or self.state is not State.OPEN:
            raise closed_error()
        if (error := attempt.result()) is not None:
            raise copy_of(error) if isinstance(error, BackendError) else error
        return timeout and max(0.001, timeout - (self.clock() - begun))

    def unanswered(self, name: str, timeout: float, *, whole: bool) -> BackendUnavailable | None:
        """Return the error of a task whose request for a lock was not answered within its timeout, if the server is away.

        ``None`` if that is not known: then the lock may be taken. If the request was under way for the ``whole`` timeout, a
        command timeout without an answer says it as well as a connection that was lost.
        """
        why = self.outages.describe()
        if not why and not (whole and timeout >= self.command_timeout):
            return None
        within = f" within {timeout:g} s" if timeout else ""
        text = f"the server has not answered about lock {shorten(name)}{within}"
        return BackendUnavailable(f"{text}: {why}" if why else text)

    async def _attempt(self, connect: Callable[[], Coroutine[Any, Any, None]]) -> Exception | None:
        try:
            await connect()
        except Exception as error:  # noqa: BLE001 - raised in the tasks that wait, whatever a backend raises
            return error
        self.connect = None
        return None

    def become(self, state: State) -> None:
        """Change the state; all transitions pass through here."""
        log.debug("the client of %s is %s", self.backend.name, state.value)
        self.state = state

    @property
    def over(self) -> bool:
        """True if another opening may follow, because this one was closed, or its event loop was."""
        if self.state is State.CLOSED:
            return True
        return self.loop is not None and self.loop.is_closed()

    def end_without_loop(self) -> None:
        """End an opening whose event loop was closed without ``aclose``: every lease is lost, and nothing is sent."""
        if self.state is State.CLOSED:
            return
        self.become(State.CLOSED)
        for contender in self.contending:
            contender.end_without_loop()
        self.report()
        self.tasks.clear()
        self.cleanups.clear()
        self.scheduler.close()
        self.backend.abandon()

    # --- figures

    def figures(self) -> Figures:
        """Return counters since this opening began, and gauges of this moment."""
        stats = self.stats
        return {
            "held": len(self.scheduler),
            "waiting": sum(contender.waiting for contender in self.contending),
            "acquired": stats.acquired,
            "released": stats.released,
            "passed": stats.passed,
            "waited": stats.waited,
            "timeouts": sum(stats.timeouts_by_template.values()),
            "timeouts_by_template": dict(stats.timeouts_by_template),
            "skipped": sum(stats.skipped_by_template.values()),
            "skipped_by_template": dict(stats.skipped_by_template),
            "lost": stats.lost,
            "renewals": self.scheduler.renewals,
            "renewal_failures": self.scheduler.failures,
            "cleanups": stats.cleanups,
            "losses": dict(stats.losses),
            "waits": stats.waits.snapshot(),
            "holds": stats.holds.snapshot(),
            "slack": self.scheduler.slack.snapshot(),
        }

    def begin_reports(self) -> None:
        """Report the figures from now on if there are reporters and the client is open. In any thread."""
        loop = self.loop
        if self.generations.reporters and self.state is State.OPEN and not self.forked:
            assert loop is not None  # noqa: S101 - it is open
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._begin_reports)

    def _begin_reports(self) -> None:
        if self._reporting is None and self.state is State.OPEN:
            self._reporting = self.spawn(self._report_periodically(), "aiolock-report")

    async def _report_periodically(self) -> None:
        """Report the figures until cancelled."""
        while True:
            self.report()
            await asyncio.sleep(REPORT_EVERY)

    def report(self) -> None:
        """Call the reporters; an error of one is logged and harms no lock."""
        for reporter in () if self.forked else self.generations.reporters:
            try:
                reporter(self)
            except Exception as error:  # noqa: BLE001 - code and files of others
                log.error("the figures of a client could not be reported: %r", error)

    def register(self, name: str, family: Family, keep: float) -> SharedRegister:
        """Return a register as this client shares it, which the server keeps for ``keep`` seconds after its last write."""
        key = family.value, name
        found = self.registers.get(key)
        if found is None or found.ended:
            store = RegisterStore.of(self.backend, family.value)
            found = self.registers[key] = SharedRegister(
                store.register(name, family), name, family, keep, self
            )
            self.contenders[found] = None
            task = self.spawn(self._work(key, found), f"aiolock-{family.value}")
            self.writing.add(task)
            task.add_done_callback(self.writing.discard)
        return found

    async def _work(self, key: tuple[str, str], register: SharedRegister) -> None:
        try:
            await register.run()
        finally:
            self.contenders.pop(register, None)
            if self.registers.get(key) is register:
                del self.registers[key]

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` as a task of the client."""
        return self.tasks.spawn(work, name)

    def clean_up(self, claim: Claim, keep: float = 0, disown: Disown | None = None) -> None:
        """Release ``claim`` in the background, for as long as it could otherwise stay: see :attr:`Claim.stays`.

        What can be sent without waiting is sent before this returns. ``disown`` is called if the hold was lost.
        """
        if self.state is State.CLOSED or self.forked:
            # The server cannot be reached any more: the claim ends by its ttl.
            return
        self.stats.cleanups += 1
        answer = claim.begin_release(keep)
        if answer is None or answer is Release.UNKNOWN:
            task = self.spawn(self._clean_up(claim, keep, disown), "aiolock-clean-up")
            self.cleanups.add(task)
            task.add_done_callback(self.cleanups.discard)
        elif answer is Release.NOT_HELD and disown is not None:
            disown()

    async def _clean_up(self, claim: Claim, keep: float, disown: Disown | None) -> None:
        give_up = self.clock() + claim.stays
        backoff = Backoff(self.random)
        while not self.forked:
            try:
                answer = await claim.release(keep)
            except BackendError as error:
                if not error.retryable or self.clock() >= give_up:
                    name = claim.request.name
                    log.warning(
                        "gave up releasing %s, or its request: what is left of it ends by its ttl at the latest: %s",
                        shorten(name),
                        error,
                        extra={"lock": name},
                    )
                    return
            else:
                if answer is Release.NOT_HELD and disown is not None:
                    disown()
                return
            await backoff.pause()

    async def release(self, claim: Claim, disown: Disown, keep: float = 0) -> bool:
        """Release a claim and wait for the answer; return whether it says that the lease was lost.

        After an error of the backend or a cancellation the client releases it in the background; such an error is not raised.
        """
        try:
            answer = await claim.release(keep)
        except BaseException as error:
            if not self.unreleased(claim, error, disown, keep):
                raise
            return False
        return answer is Release.NOT_HELD and disown()

    def unreleased(self, claim: Claim, error: BaseException, disown: Disown, keep: float = 0) -> bool:
        """Release in the background after a release that ended with ``error``; return whether the caller can ignore that."""
        trouble = isinstance(error, BackendError)
        if trouble:
            name = claim.request.name
            log.info("release of %s will be tried again: %s", shorten(name), error, extra={"lock": name})
        self.clean_up(claim, keep, disown)
        return trouble
