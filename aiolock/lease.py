"""A lock while it is held: its token, how long it is certain, and what its loss does to the work under it."""

from __future__ import annotations

import asyncio
import logging
import sys
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from aiolock.contract import Claim, Kind
from aiolock.errors import LockLost, LossReason, UnsupportedKind, shorten
from aiolock.options import OnLoss, check_seconds
from aiolock.runtime import Runtime, State, in_async_generator
from aiolock.watchdog import Term

__all__ = ["Arm", "Home", "Lease", "Terms"]

log: logging.Logger = logging.getLogger("aiolock.lost")

Task = asyncio.Task[Any]


class Terms:
    """What one caller asks of its own lease, whoever shares the hold with it."""

    __slots__ = ("max_hold", "on_loss")

    def __init__(self, max_hold: float | None, on_loss: OnLoss) -> None:
        self.max_hold: float | None = max_hold
        self.on_loss: OnLoss = on_loss


class Home(Protocol):
    """Where a lease came from, and where it goes back to."""

    runtime: Runtime

    def leave(self, lease: Lease, keep: float = 0) -> Claim | None:
        """End the turn of ``lease``: pass the hold on, or return the claim that is to be released."""


H = TypeVar("H", bound=Home)


class Arm:
    """One task that is cancelled if the lease is lost; the arithmetic is that of ``asyncio.timeout``."""

    __slots__ = ("absorbed", "before", "depth", "fired", "task")

    def __init__(self, task: Task, before: int | None = None) -> None:
        self.task: Task = task
        self.before: int = task.cancelling() if before is None else before
        self.depth: int = 0
        self.fired: bool = False
        self.absorbed: bool = False

    def fire(self) -> None:
        """Cancel the task, once, unless it has left in the meantime."""
        if self.depth and not self.fired:
            self.fired = True
            self.task.cancel("the lock was lost")

    def settle(self, error: BaseException | None, lost: LockLost) -> LockLost | None:
        """What a block that ends with ``error`` has to raise instead, now that its lease is lost.

        Our own cancellation is absorbed; an outer one wins; else an exception of the block wins, with the loss as
        a note; else the loss is raised.
        """
        foreign = True
        if self.fired and not self.absorbed:
            self.absorbed = True
            foreign = self.task.uncancel() > self.before
        if error is None or (isinstance(error, asyncio.CancelledError) and not foreign):
            return lost
        if not isinstance(error, LockLost):
            error.add_note(str(lost))
        return None


class Lease:
    """A hold, from the grant to the release or the loss.

    Comes from ``async with lock as lease`` or ``await lock.acquire()``; not made by hand. Every look at it reads the
    clock, so it is right even if the event loop was stopped. Usable on the loop of its client.
    """

    __slots__ = (
        "__weakref__",
        "_arm_of_block",
        "_arms",
        "_before",
        "_entered",
        "_followers",
        "_home",
        "_lost",
        "_on_loss",
        "_released",
        "_term",
        "_watchers",
        "token",
    )

    def __init__(self, home: Home, term: Term, on_loss: OnLoss, token: int) -> None:
        self.token: int = token
        """The fencing token: greater than that of every earlier grant of this name."""
        self._home = home
        self._term = term
        self._on_loss: OnLoss = on_loss
        self._lost: LossReason | None = None
        self._released = False
        self._entered: Task | None = None
        self._before = -1
        """How often the task that entered had been cancelled before, if the loss is to cancel it; else -1."""
        self._arm_of_block: Arm | None = None
        """What cancels it; made only when there is more than that one block: a loss, a guard, further levels."""
        self._arms: dict[Task, Arm] | None = None
        self._watchers: set[asyncio.Future[None]] | None = None
        self._followers: weakref.WeakSet[Lease] | None = None
        """Further levels of the same hold."""

    # --- what it is

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._term.claim.bid.name

    @property
    def kind(self) -> Kind:
        """What kind of hold this is."""
        return self._term.claim.bid.kind

    @property
    def ttl(self) -> float:
        """Seconds for which the server keeps the hold if it is not renewed."""
        return self._term.ttl

    def remaining(self) -> float:
        """Seconds for which the hold is still certain, by the local clock; 0 when it is not.

        Counted from the moment before the last successful request was sent, less a margin.
        """
        runtime = self._home.runtime
        if self._lost is not None or self._released or runtime.forked:
            return 0.0
        left = self._term.until - runtime.clock()
        return left if left > 0 else 0.0

    @property
    def held(self) -> bool:
        """Whether it is certain at this moment that the lock is ours."""
        return self.remaining() > 0

    @property
    def lost(self) -> bool:
        """Whether the lease ended before it was released."""
        return self._lost is not None or (not self._released and not self.held)

    def check(self) -> None:
        """Raise :class:`LockLost` if it is not certain that we hold the lock, :class:`RuntimeError` if it was released.

        Call it before every step that must not be taken without the lock.
        """
        if self._lost is None:
            if self._home.runtime.forked:
                raise RuntimeError(
                    f"lease of {shorten(self.name)} was made before a fork: it is the parent's"
                )
            if self._released:
                raise RuntimeError(f"lease of {shorten(self.name)} was released: acquire the lock again")
            if self.held:
                return
        raise self._loss()

    async def wait_lost(self) -> LossReason | None:
        """Wait until the lease ends: why it was lost, or ``None`` if it was released in good order.

        Cancelling it changes nothing.
        """
        if self._open:
            self._home.runtime.guard()
            watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if self._watchers is None:
                self._watchers = set()
            self._watchers.add(watcher)
            try:
                await watcher
            finally:
                self._watchers.discard(watcher)
        return self._lost

    # --- what it does

    async def renew(self) -> None:
        """Ask the server for a full ttl now, instead of when the client would do it by itself.

        Raises :class:`LockLost` if the hold is gone, :class:`BackendError` if that could not be found out; the lease
        then goes on until its term ends. Cancelling it changes nothing but that the server may have done it.
        """
        self._home.runtime.guard()
        if self._released or self._lost is not None:
            self.check()
        await self._home.runtime.watchdog.renew(self._term)
        self.check()

    async def release(self, keep: float = 0) -> None:
        """Give the lock back, to the next local task or to the server; idempotent.

        With ``keep``, the lock stays taken for that many more seconds, by nobody. Says nothing if the lease was
        already lost, and raises nothing if the server cannot be reached: the client goes on trying in the background.
        Cancelling it stops the waiting, not the release.

        Raises :class:`UnsupportedKind` if ``keep`` is asked of a server that cannot.
        """
        runtime = self._home.runtime
        if keep != 0:
            keep = check_seconds("keep", keep, 0)
            if "keep" not in runtime.backend.capabilities:
                raise UnsupportedKind("release(keep=…)", runtime.backend.name, "release without keep")
        if self._released:
            return
        if runtime.state is State.OPEN or runtime.forked:
            runtime.guard()
        claim = self._give_back(keep)
        if claim is not None:
            await runtime.release(claim, keep)

    @contextmanager
    def guard(self) -> Iterator[Lease]:
        """Protect another task that works under this lease: ``with lease.guard():`` cancels it on loss.

        The block then raises :class:`LockLost`, by the same rules as ``async with lock``. Does not release.

        Raises :class:`LockLost` at once if the lease is already lost.
        """
        task = _this_task()
        self.check()
        self._home.runtime.guard()
        # The frames above are this function's, the context manager's, and its user's.
        arm = Arm(task) if in_async_generator(sys._getframe(2)) else self._arm(task)  # noqa: SLF001
        error: BaseException | None = None
        try:
            yield self
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._disarm(arm)
            if self.lost and (loss := arm.settle(error, self._loss())) is not None:
                raise loss from error

    async def __aenter__(self) -> Self:
        self._home.runtime.guard()
        if self._entered is not None:
            raise RuntimeError(
                f"lease of {shorten(self.name)} was entered already: acquire one for each block"
            )
        self.check()
        cancel = self._on_loss == "cancel" and not in_async_generator(sys._getframe(1))  # noqa: SLF001
        self.enter(_this_task(), cancel=cancel)
        if self.kind.exclusive:
            # So that acquiring it again in here is refused instead of waiting for ever.
            self._home.runtime.inside.setdefault((self.name, self.kind.family.value), self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        inside, key = self._home.runtime.inside, (self.name, self.kind.family.value)
        if inside.get(key) is self:
            del inside[key]
        rest = self.leave(_this_task(), error)
        if rest is not None:
            await rest

    def __repr__(self) -> str:
        if self._lost is not None:
            state = f"lost ({self._lost})"
        elif self._released:
            state = "released"
        else:
            state = f"{self.remaining():.3f} s"
        return f"<Lease {shorten(self.name)} {self.kind} token={self.token} {state}>"

    def __reduce__(self) -> str:
        raise TypeError("a lease cannot be copied or pickled: it is one hold of one process")

    # --- for locks and queues

    @property
    def _open(self) -> bool:
        return not self._released and self._lost is None

    @property
    def entered_by(self) -> Task | None:
        """The task whose block this lease is under."""
        return self._entered

    def enter(self, task: Task, *, cancel: bool) -> None:
        """Begin a block of ``task``; with ``cancel``, the loss of the lease cancels it."""
        self._entered = task
        if cancel:
            self._before = task.cancelling()
            if self._arms is not None or self._lost is not None:
                self._all_arms()
            if self._lost is not None and self._arm_of_block is not None:
                # Lost on the way here, between the grant and this step.
                asyncio.get_running_loop().call_soon(self._arm_of_block.fire)

    def leave(self, task: Task, error: BaseException | None) -> Coroutine[Any, Any, None] | None:
        """End a block: release, or say what the loss means for it. What is returned is to be awaited."""
        home = self._home
        runtime = home.runtime
        if (
            self._arms is not None
            or self._entered is not task
            or self._released
            or self._lost is not None
            or self._term.until <= runtime.clock()
            or runtime.forked
        ):
            return self._leave(task, error)
        # The usual end: nothing happened, and nobody else is concerned.
        self._before = -1
        claim = home.leave(self)
        self._released = True
        if self._watchers:
            self._wake()
        return None if claim is None else runtime.release(claim)

    async def _leave(self, task: Task, error: BaseException | None) -> None:
        runtime = self._home.runtime
        if runtime.forked:
            if error is None:
                runtime.guard()
            return
        self._all_arms()
        owner = self._entered
        lost = self.lost
        arm = self._arm_of_block
        if arm is not None:
            self._disarm(arm)
        if lost:
            loss = self._loss()
            if self._lost is None:
                runtime.watchdog.lose(self._term, "expired")
            self.abandon()
            if owner is task:
                verdict = (arm or Arm(task)).settle(error, loss)
                if verdict is not None:
                    # A cancellation from outside that is still on its way wins.
                    await asyncio.sleep(0)
                    raise verdict from error
        elif (claim := self._give_back()) is not None:
            await runtime.release(claim)
        if owner is not task:
            raise RuntimeError(
                f"the block of lock {shorten(self.name)} was left in another task than the one that entered it; "
                "the lock is released"
            ) from error

    def check_hold(self) -> None:
        """Raise :class:`LockLost` if the hold behind this lease is not certain, whether or not the lease was released."""
        if self._term.over or self._term.until <= self._home.runtime.clock():
            raise self._loss()

    def level(self) -> Lease:
        """Another lease of the same hold and task: it is lost with this one, and cancels its task only once."""
        if self._followers is None:
            self._followers = weakref.WeakSet()
        lease = Lease(self._home, self._term, self._on_loss, self.token)
        lease._arms = self._all_arms()
        self._followers.add(lease)
        return lease

    def move(self, build: Callable[[Home], H]) -> H:
        """Put another home between this lease and its own."""
        home = build(self._home)
        self._home = home
        return home

    def abandon(self) -> None:
        """Give the hold back without waiting: nobody will work under it."""
        if (claim := self._give_back()) is not None:
            self._home.runtime.clean_up(claim)

    def lose(self, reason: LossReason) -> None:
        """The hold is not certain any more: tell whoever works under it."""
        if self._lost is not None:
            # Overstayed, and told so; now its ttl has ended as well.
            return
        runtime = self._home.runtime
        runtime.stats.lost += 1
        log.warning("lost %s (%s), token %d", shorten(self.name), reason, self.token)
        for lease in (self, *(self._followers or ())):
            lease.mark_lost(reason)
        current = asyncio.current_task()
        for arm in list(self._all_arms().values()):
            if arm.task is current:
                # The running task is not cancelled under its own feet: if it leaves the block before its next
                # await, there is nothing left to cancel.
                asyncio.get_running_loop().call_soon(arm.fire)
            else:
                arm.fire()

    def mark_lost(self, reason: LossReason) -> None:
        """Remember why, unless the lease ended before, and wake those who wait for its end."""
        if not self._released and self._lost is None:
            self._lost = reason
            self._wake()

    def _loss(self) -> LockLost:
        return LockLost(self.name, self._lost or "expired")

    def _give_back(self, keep: float = 0) -> Claim | None:
        if self._released:
            return None
        claim = self._home.leave(self, keep)
        self._released = True
        self._wake()
        return claim

    def _wake(self) -> None:
        for watcher in self._watchers or ():
            if not watcher.done():
                watcher.set_result(None)

    def _all_arms(self) -> dict[Task, Arm]:
        if self._arms is None:
            self._arms = {}
        if self._before >= 0 and self._entered is not None:
            arm = self._arms.setdefault(self._entered, Arm(self._entered, self._before))
            arm.depth += 1
            self._arm_of_block = arm
            self._before = -1
        return self._arms

    def _arm(self, task: Task) -> Arm:
        arm = self._all_arms().setdefault(task, Arm(task))
        arm.depth += 1
        return arm

    def _disarm(self, arm: Arm) -> None:
        arm.depth = max(0, arm.depth - 1)
        if not arm.depth and self._arms is not None and self._arms.get(arm.task) is arm:
            del self._arms[arm.task]


def _this_task() -> Task:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("locks are entered by tasks, and this code runs outside of one")
    return task
