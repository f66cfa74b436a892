"""The hold behind a lease: whether it is certain, which tasks work under it, and how it ends.

One file, because all of it reads and writes the same few fields: a block ends by what the loss has set, and the reverse.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections import defaultdict
from collections.abc import Coroutine, Iterable
from typing import Protocol

from aiolock.core.backend import Claim
from aiolock.core.cancellation import CancelScope, CancelScopes, Task
from aiolock.core.hooks import Observed
from aiolock.core.logs import Log, get_logger
from aiolock.core.renewal import Validity
from aiolock.core.runtime import OpeningState, Runtime
from aiolock.errors import LockLost, LossReason, UnsupportedKind, shorten
from aiolock.types import READ, Kind, LockEvent
from aiolock.validation import OnLoss

__all__ = ["BLOCKS", "READING", "Hold", "HoldParent", "LeaseOptions", "running_task"]

log: Log = get_logger("aiolock.lost")


class LeaseOptions:
    """The options of one caller for its own lease, whichever hold it gets."""

    __slots__ = ("label", "max_hold", "on_loss", "template")

    def __init__(self, max_hold: float | None, on_loss: OnLoss, template: str = "", label: str = "") -> None:
        self.max_hold: float | None = max_hold
        self.on_loss: OnLoss = on_loss
        self.template: str = template
        """The name before it was filled in, for callbacks; empty if the caller gave the name itself."""
        self.label: str = label
        """The label of the lock; empty if it is that of the client."""


class HoldParent(Protocol):
    """The owner of a hold, to which it is given back: a local queue, or the levels of a hold that was entered again."""

    runtime: Runtime

    @property
    def kind(self) -> Kind:
        """The kind of the hold at present."""
        ...

    def leave(self, hold: Hold, keep: float = 0) -> Claim | None:
        """End ``hold``: hand the claim over, or return it to be released."""

    def levels(self) -> int:
        """Return the number of levels of the hold that are open; 0 where levels are not counted."""
        ...

    def downgrade(self, hold: Hold) -> HoldParent:
        """Turn a write hold into a read hold; return its new parent."""
        ...


class _Rare:
    """State that few holds have."""

    __slots__ = (
        "block",
        "downgraded",
        "first",
        "followers",
        "guessed",
        "request_reason",
        "request_watchers",
        "watchers",
    )

    def __init__(self) -> None:
        self.block: CancelScope | None = None
        """The cancel scope of the hold's own block, once there are scopes."""
        self.downgraded: bool = False
        self.first: Hold | None = None
        """The first level of the claim, which a further level keeps alive."""
        self.followers: weakref.WeakSet[Hold] | None = None
        """Holds that are lost with this one: further levels, and that of several locks together."""
        self.guessed: bool = False
        """Its block may be another than the one that was left: a task left it that had entered none."""
        self.request_reason: str | None = None
        """The reason of the latest request to release."""
        self.request_watchers: set[asyncio.Future[None]] = set()
        """The watchers that a request to release wakes as well."""
        self.watchers: set[asyncio.Future[None]] = set()


class Hold:
    """One grant to one caller, from the grant to the release or the loss. Used on the loop of its client.

    Every question about it reads the clock, so the answer is right even after the event loop was stopped.
    """

    __slots__ = (
        "__weakref__",
        "_before",
        "_rare",
        "_scopes",
        "loss",
        "observed",
        "on_loss",
        "parent",
        "released",
        "task",
        "token",
        "validity",
    )

    def __init__(self, parent: HoldParent, validity: Validity, on_loss: OnLoss, token: int) -> None:
        self.parent: HoldParent = parent
        self.validity: Validity = validity
        self.on_loss: OnLoss = on_loss
        self.token: int = token
        self.loss: LossReason | None = None
        """The reason of the loss, once it is noticed."""
        self.released: bool = False
        self.task: Task | None = None
        """The task whose block this hold is under."""
        self._before = -1
        """The task's count of cancellations at the start of its block, while only that block is to be cancelled; else -1."""
        self._scopes: CancelScopes | None = None
        """Made when there is more than that one block: a loss, a guard, further levels."""
        self._rare: _Rare | None = None
        self.observed: Observed | None = None
        """Reports the end to callbacks, if the acquire was reported."""

    # --- state

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self.validity.claim.request.name

    def no_token(self) -> UnsupportedKind:
        """Return the error for a hold that has no fencing token."""
        backend = self.parent.runtime.backend.name
        return UnsupportedKind(
            "fencing tokens",
            backend,
            "other libraries take no numbers; fence by something in the data themselves",
        )

    @property
    def kind(self) -> Kind:
        """The kind of the hold at present."""
        return self.parent.kind

    @property
    def ttl(self) -> float:
        """Seconds for which the server keeps the hold if it is not renewed."""
        return self.validity.ttl

    @property
    def open(self) -> bool:
        """False once it was released or its loss was noticed."""
        return not self.released and self.loss is None

    def remaining(self) -> float:
        """Return the seconds for which the hold is still certain; 0 when it is not."""
        runtime = self.parent.runtime
        if self.loss is not None or self.released or runtime.forked:
            return 0.0
        left = self.validity.until - runtime.clock()
        return left if left > 0 else 0.0

    def lost(self) -> bool:
        """Return whether it ended before its release, as far as is known."""
        return self.loss is not None or (not self.released and not self.remaining() > 0)

    def waited_for(self) -> bool:
        """Return whether another request for the lock would have to wait for this hold or for a level of it."""
        return not self.lost() and (not self.released or self.parent.levels() > 0)

    def check(self) -> None:
        """Raise :class:`LockLost` if the hold is not certain, :class:`RuntimeError` if it was released."""
        if self.loss is None:
            if self.parent.runtime.forked:
                raise RuntimeError(
                    f"lease of {shorten(self.name)} was made before a fork: it is the parent's"
                )
            if self.released:
                raise RuntimeError(f"lease of {shorten(self.name)} was released: acquire the lock again")
            if self.remaining() > 0:
                return
        raise self.error()

    def certain(self) -> bool:
        """Return whether the claim is certain, whether or not this hold was released."""
        # After max_hold the loss was reported although the server keeps the claim for a while: no new level is opened.
        validity = self.validity
        return self.loss is None and not validity.over and validity.until > self.parent.runtime.clock()

    def error(self) -> LockLost:
        """Return the error that reports the loss."""
        return LockLost(self.name, self.loss or "expired")

    # --- blocks

    @property
    def _blocks(self) -> dict[str, Hold]:
        """The holds of all blocks of exclusive locks of this family."""
        return BLOCKS.of(self.parent.runtime)[self.kind.family.value]

    def enter(self, task: Task, *, cancel: bool) -> None:
        """Begin a block of ``task``; with ``cancel``, the loss of the hold cancels it."""
        self.task = task
        if cancel:
            self._before = task.cancelling()
            if self._scopes is not None or self.loss is not None:
                scope = self.block_scope()
                if self.loss is not None and scope is not None:
                    # Lost between the grant and this step.
                    asyncio.get_running_loop().call_soon(scope.cancel)

    def begin_block(self) -> None:
        """Record that the task is inside, so that a request that would wait for the end of this block is refused."""
        runtime, task = self.parent.runtime, self.task
        if self.kind.exclusive:
            outer = self._blocks.setdefault(self.name, self)
            if outer.task is not task or not outer.waited_for():
                self._blocks[self.name] = self
        elif self.kind == READ and task is not None:
            reading = READING.of(runtime)
            outer = reading.setdefault((task, self.name), self)
            if not outer.waited_for():
                reading[task, self.name] = self

    def end_block(self) -> None:
        """Record that the task is outside again, whatever kind the hold has by now."""
        runtime, task = self.parent.runtime, self.task
        if self._blocks.get(self.name) is self:
            del self._blocks[self.name]
        reading = READING.of(runtime)
        if task is not None and reading.get((task, self.name)) is self:
            del reading[task, self.name]

    def quiet(self, task: Task) -> bool:
        """Return whether the block of ``task`` can end as usual.

        False if another task has entered it, if there are cancel scopes, after a release, if the hold is not certain, and in a
        forked child.
        """
        runtime = self.parent.runtime
        return (
            self._scopes is None
            and self.task is task
            and not self.released
            and self.loss is None
            and self.validity.until > runtime.clock()
            and not runtime.forked
        )

    def leave(self, task: Task, error: BaseException | None) -> Coroutine[None, None, None] | None:
        """End a block: release, or raise what the loss means for it. The coroutine that is returned is to be awaited.

        Cancelling it has the client release in the background.
        """
        if not self.quiet(task):
            return self._leave(task, error)
        self._before = -1
        claim = self.give_back()
        return None if claim is None else self._release(claim, task, error)

    async def _release(self, claim: Claim, task: Task, error: BaseException | None) -> None:
        """Release at the end of a block. Cancelling it has the client release in the background."""
        if await self.parent.runtime.release(claim, self.disown):
            await self.raise_loss(task, error)

    async def _leave(self, task: Task, error: BaseException | None) -> None:
        """End a block that is not :meth:`quiet`. Cancelling it has the client release in the background."""
        runtime = self.parent.runtime
        if runtime.forked:
            if error is None:
                runtime.guard()
            return
        owner, lost, scope = self.task, self.lost(), self.block_scope()
        if scope is not None:
            self.scopes().exit(scope)
        if lost:
            loss = self.error()
            if self.loss is None:
                self.expire()
            self.abandon()
            own = scope if scope is not None and owner is task else CancelScope(task)
            await _raise(own.resolve(error, loss), error)
        elif (claim := self.give_back()) is not None:
            await self._release(claim, task, error)
        if owner is not task:
            self._left_by_another_task(error)

    def _left_by_another_task(self, error: BaseException | None) -> None:
        """Report the end of a block in another task than the one that entered it, after the release.

        A loss would have cancelled a task that has nothing to do with the block any more, so this is misuse unless the block
        was only to signal. An exception of the block goes on, and gets the report as a note: so does the cancellation of the
        task that leaves, and the end of a generator that was given up, whose error would be reported as never retrieved.
        """
        guessed = self._rare is not None and self._rare.guessed
        if self.on_loss == "signal" and not guessed:
            return
        text = f"the block of lock {shorten(self.name)} was left in another task than the one that entered it; the lock is released. "
        text += (
            "Several blocks of the same lock object were open, so it may have been the lease of another of them: make a lock "
            "object for each block"
            if guessed
            else "Where different tasks begin and end the work (fixtures, generators, notebook cells), use acquire() and "
            'release(); or on_loss="signal", with which a loss cancels no task'
        )
        if error is None:
            raise RuntimeError(text)
        error.add_note(text)

    async def raise_loss(self, task: Task, error: BaseException | None) -> None:
        """Raise :class:`LockLost` at the end of a block of ``task`` whose release reported it, unless ``error`` wins.

        A cancellation from outside wins as well.
        """
        await _raise(CancelScope(task).resolve(error, self.error()), error)

    # --- the release

    def give_back(self, keep: float = 0) -> Claim | None:
        """End the hold; return the claim to be released, if it is not handed over."""
        if self.released:
            return None
        try:
            return self.parent.leave(self, keep)
        finally:
            # Also if a callback ends the program, after which the claim is released in the background.
            self.released = True
            self._notify()

    async def release(self, keep: float = 0) -> None:
        """Give the hold back and wait for the server's answer until the first cancellation; idempotent."""
        claim = self.give_back(keep)
        if claim is not None:
            await self.parent.runtime.release(claim, self.disown, keep)

    async def close(self, error: BaseException | None, keep: float = 0) -> None:
        """Release at the end of work that ended with ``error``; raise :class:`LockLost` as the end of a block does.

        Cancelling it has the client release in the background.
        """
        before = self.loss
        await self.release(keep)
        if self.loss != before:
            await self.raise_loss(running_task(), error)

    def abandon(self) -> None:
        """Give the hold back without waiting."""
        if (claim := self.give_back()) is not None:
            self.parent.runtime.clean_up(claim, disown=self.disown)

    def drop(self) -> None:
        """Give the hold back because its lease was collected without a release. Called in any thread."""
        runtime = self.parent.runtime
        loop = runtime.loop
        if loop is not None and not loop.is_closed() and not runtime.forked:
            loop.call_soon_threadsafe(self._drop)

    def _drop(self) -> None:
        dropped = self.open
        self.abandon()
        if dropped:
            warnings.warn(
                f"a lease of {shorten(self.name)} was dropped without a release: keep it, or use `async with`",
                ResourceWarning,
                stacklevel=1,
            )

    def disown(self) -> bool:
        """Record that the server answered the release with "not held"; return whether the hold was lost by that.

        It was not if its validity has ended by now: the server may have ended it in good order. No task is cancelled.
        """
        if self.loss is not None or self.validity.until <= self.parent.runtime.clock():
            return False
        self.loss = "revoked"
        self._report("revoked")
        return True

    # --- the loss

    def expire(self) -> None:
        """End the validity, which is over although the renewal scheduler has not noticed it yet."""
        self.parent.runtime.scheduler.lose(self.validity, "expired")

    def lose(self, reason: LossReason) -> None:
        """Record that the hold is not certain any more: cancel the tasks that work under it, then count and log."""
        if self.loss is not None:
            # After max_hold the ttl has ended as well.
            return
        self.mark_lost(reason)
        self.cancel_tasks()
        self._report(reason)

    def mark_lost(self, reason: LossReason) -> None:
        """Set the reason and wake those that wait for its end, unless the hold ended before; then do so for its followers."""
        if self.open:
            self.loss = reason
            self._notify()
        for hold in self._followers():
            hold.mark_lost(reason)

    def cancel_tasks(self) -> None:
        """Cancel every task with a cancel scope."""
        self.block_scope()
        if self._scopes is not None:
            self._scopes.cancel()

    def end_without_loop(self) -> None:
        """Lose the hold without the event loop, which was closed: its tasks and futures are not touched."""
        if self.open:
            self.loss = "closed"
            if self._rare is not None:
                self._rare.watchers.clear()
        for hold in self._followers():
            hold.end_without_loop()

    def _report(self, reason: LossReason) -> None:
        stats = self.parent.runtime.stats
        stats.lost += 1
        stats.losses[reason] += 1
        log.warning(
            "lost %s (%s), token %s",
            shorten(self.name),
            reason,
            self.token or "-",
            extra={"lock": self.name, "kind": str(self.kind), "reason": reason, "token": self.token},
        )

        if self.observed is not None:
            self.observed.lost(reason, self.parent.runtime.clock())

    def observe(self, template: str, begun: float, granted: float) -> None:
        """Report the acquire, and the times of request and grant, to the callbacks of the client; its end is then reported as well."""
        runtime = self.parent.runtime
        event = LockEvent(self.name, self.kind, template, self.token, granted - begun)
        self.observed = Observed(runtime.hooks, event, granted)
        if self.loss is not None:
            # Lost between the grant and this step.
            self.observed.lost(self.loss, runtime.clock())

    def renewal_failed(self, error: str) -> None:
        """Report to the callbacks of the client that a renewal failed, while the hold is certain."""
        now = self.parent.runtime.clock()
        if self.observed is not None and self.open and self.validity.until > now:
            self.observed.renewal_failed(error, self.validity.until, now)

    # --- requests to release

    @property
    def request_reason(self) -> str | None:
        """The reason of the latest request to release, or ``None``."""
        return None if self._rare is None else self._rare.request_reason

    def request(self, reason: str) -> None:
        """Record a request to release."""
        rare = self.rare()
        rare.request_reason = reason
        _wake(rare.request_watchers)
        for hold in self._followers():
            hold.request(reason)

    def watch(self) -> asyncio.Future[None]:
        """Return a future that is done when the hold has ended."""
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watchers = self.rare().watchers
        watchers.add(watcher)
        watcher.add_done_callback(watchers.discard)
        return watcher

    def _notify(self) -> None:
        if self._rare is not None:
            _wake(self._rare.watchers)

    # --- levels, and several holds together

    def level(self, parent: HoldParent) -> Hold:
        """Return another hold of the same claim and task: it is lost with this one, and its task is cancelled once."""
        hold = Hold(parent, self.validity, self.on_loss, self.token)
        hold._scopes = self.scopes()
        hold.rare().first = self
        hold.follow(self)
        return hold

    def follow(self, hold: Hold) -> None:
        """Be lost with ``hold``, and be asked to release with it."""
        rare = hold.rare()
        if rare.followers is None:
            rare.followers = weakref.WeakSet()
        rare.followers.add(self)

    def downgrade(self) -> None:
        """Count as a read hold in this process, before the server is asked."""
        inside = self.task is not None and self._blocks.get(self.name) is self
        self.parent = self.parent.downgrade(self)
        self.rare().downgraded = True
        if inside:
            self.end_block()
            self.begin_block()

    def _followers(self) -> Iterable[Hold]:
        return tuple(self._rare.followers or ()) if self._rare is not None else ()

    def rare(self) -> _Rare:
        """Return the state that few holds have; made at its first use."""
        if self._rare is None:
            self._rare = _Rare()
        return self._rare

    def scopes(self) -> CancelScopes:
        """Return the cancel scopes; the first call turns that of the hold's own block into one of them."""
        scopes = self._scopes
        if scopes is None:
            scopes = self._scopes = CancelScopes()
        if self._before >= 0 and self.task is not None:
            self.rare().block = scopes.enter(self.task, self._before)
            self._before = -1
        return scopes

    def block_scope(self) -> CancelScope | None:
        """Return the cancel scope of the hold's own block, if its loss is to cancel that."""
        self.scopes()
        return None if self._rare is None else self._rare.block


BLOCKS = OpeningState[defaultdict[str, dict[str, Hold]]](lambda: defaultdict(dict))
"""The hold of the outermost block of an exclusive lock, by family and name."""
READING = OpeningState[dict[tuple[Task, str], Hold]](dict)
"""The hold of the outermost read block that a task is in, by task and name."""


def _wake(watchers: set[asyncio.Future[None]]) -> None:
    for watcher in tuple(watchers):
        if not watcher.done():
            watcher.set_result(None)


async def _raise(loss: LockLost | None, error: BaseException | None) -> None:
    if loss is not None:
        # A cancellation from outside that is still on its way wins.
        await asyncio.sleep(0)
        raise loss from error


def running_task() -> Task:
    """Return the running task; raise :class:`RuntimeError` outside of one."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("locks are entered by tasks, and this code runs outside of one")
    return task
