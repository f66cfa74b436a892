"""A lock while it is held: its token, how long it is certain, and what its loss does to the work under it."""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from aiolock.arms import Arm, Arms
from aiolock.contract import Claim, Kind, Mode
from aiolock.errors import LockLost, LossReason, UnsupportedKind, shorten
from aiolock.frames import in_async_generator
from aiolock.logs import Log, get_logger
from aiolock.options import OnLoss, check_seconds
from aiolock.requests import ReleaseRequest
from aiolock.runtime import Runtime, State
from aiolock.watchdog import Term

__all__ = ["Home", "Lease", "ReleaseRequest", "Terms"]

log: Log = get_logger("aiolock.lost")

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

    @property
    def kind(self) -> Kind:
        """What kind of hold it is now."""
        ...

    def leave(self, lease: Lease, keep: float = 0) -> Claim | None:
        """End the turn of ``lease``: pass the hold on, or return the claim that is to be released."""

    def shared(self) -> bool:
        """Test whether other levels of the hold are open, once one was released."""
        ...

    def weaken(self, lease: Lease) -> Home:
        """The write hold of ``lease`` becomes a read hold, in a home of its own."""
        ...


H = TypeVar("H", bound=Home)


class _More:
    """What few leases have."""

    __slots__ = ("arm", "downgraded", "followers", "request", "watchers")

    def __init__(self) -> None:
        self.arm: Arm | None = None
        """What cancels the task of the block, once it is not the only thing that a loss has to do."""
        self.downgraded = False
        self.followers: weakref.WeakSet[Lease] | None = None
        """What is lost with this one: further levels of its hold, the lease of several locks that it is part of."""
        self.request: ReleaseRequest | None = None
        self.watchers: set[asyncio.Future[None]] = set()


class Lease:
    """A hold, from the grant to the release or the loss.

    Comes from ``async with lock as lease`` or ``await lock.acquire()``; not made by hand. Every look at it reads the
    clock, so it is right even if the event loop was stopped. Usable on the loop of its client.
    """

    __slots__ = (
        "__weakref__",
        "_arms",
        "_before",
        "_home",
        "_lost",
        "_more",
        "_on_loss",
        "_released",
        "_term",
        "below",
        "entered_by",
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
        self.entered_by: Task | None = None
        """The task whose block this lease is under."""
        self._before = -1
        """How often the task that entered had been cancelled before, if the loss is to cancel it; else -1."""
        self._arms: Arms | None = None
        """What cancels tasks; made only when there is more than that one block: a loss, a guard, further levels."""
        self._more: _More | None = None
        self.below: Lease | None = None
        """The lease of the block around this one, of the same lock object and task."""

    # --- what it is

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._term.claim.bid.name

    @property
    def kind(self) -> Kind:
        """What kind of hold this is."""
        return self._home.kind

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
        """Whether the lease ended before it was released, as far as is known: the server's answer to the release may say so."""
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

        It ends when the release begins, and does not wait for the server's answer. Cancelling it changes nothing.
        """
        if self.open:
            self._home.runtime.guard()
            watcher = self.watch()
            try:
                await watcher
            finally:
                watcher.cancel()
        return self._lost

    @property
    def release_requested(self) -> ReleaseRequest:
        """Whether somebody asked to let go: false until then, with the ``reason``, and can be awaited.

        See :meth:`Lock.request_release`. It is a request: the hold goes on until it is released.
        """
        more = self._rest()
        if more.request is None:
            more.request = ReleaseRequest(self)
        return more.request

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

        With ``keep``, the lock stays taken for that many more seconds, by nobody. Raises nothing if the lease was lost, also
        if the server says so only in answer to this: then ``lost`` is true afterwards, and it is logged and counted. Raises
        nothing if the server cannot be reached: the client goes on trying in the background. Cancelling it stops the
        waiting, not the release.

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
        claim = self.give_back(keep)
        if claim is not None:
            await runtime.release(claim, self, keep)

    async def downgrade(self) -> None:
        """Turn this write lease into a read lease, without a moment in which somebody else can write.

        From the call on it counts as a read lease here. Readers who are next in line enter, and so may this task
        (``rwlock.read()`` inside the block is another level of it); tasks of this client that wait to write go on
        waiting. The token stays. Cancelling it stops the waiting, not the downgrade; it can be called again, and returns
        as soon as the server has done it.

        Raises :class:`RuntimeError` if this was never a write lease, :class:`LockLost` if the hold is gone, and
        :class:`BackendError` if it is not known whether the server heard it: then readers may have to wait on, and
        it can be called again.
        """
        runtime = self._home.runtime
        runtime.guard()
        self.check()
        term = self._term
        if term.claim.bid.kind.mode is not Mode.WRITE:
            if self._more is not None and self._more.downgraded:
                return
            raise RuntimeError(
                f"lease of {shorten(self.name)} is no write lease: only those of rwlock(…).write() can be downgraded"
            )
        if self.kind.mode is Mode.WRITE:
            inside = self.entered_by is not None and self._blocks.get(self.name) is self
            self._home = self._home.weaken(self)
            self._rest().downgraded = True
            if inside:
                # The block that it is under is one for reading now.
                self.end_block()
                self.begin_block()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        runtime.spawn(self._downgrade(term, done), "aiolock-downgrade")
        await done
        self.check()

    async def _downgrade(self, term: Term, done: asyncio.Future[None]) -> None:
        watchdog = self._home.runtime.watchdog
        try:
            watchdog.learn(term, await term.claim.downgrade())
        except LockLost as error:
            watchdog.lose(term, error.reason)
            if not done.done():
                done.set_exception(self._loss())
        except Exception as error:  # noqa: BLE001 - whatever a backend raises, who waits for it hears of it
            if not done.done():
                done.set_exception(error)
            else:
                log.info("downgrade of %s was not confirmed: %s", shorten(self.name), error)
        finally:
            if not done.done():
                done.set_result(None)

    @contextmanager
    def guard(self) -> Iterator[Lease]:
        """Protect another task that works under this lease: ``with lease.guard():`` cancels it on loss.

        The block then raises :class:`LockLost`, by the same rules as ``async with lock``. Does not release.

        Raises :class:`LockLost` at once if the lease is already lost.
        """
        task = _this_task()
        self.check()
        self._home.runtime.guard()
        # The frames above are this function's and the context manager's.
        arm = Arm(task) if in_async_generator(sys._getframe(2), sync=True) else self._all_arms().take(task)  # noqa: SLF001
        error: BaseException | None = None
        try:
            yield self
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._all_arms().put_back(arm)
            if self.lost and (loss := arm.settle(error, self._loss())) is not None:
                raise loss from error

    async def __aenter__(self) -> Self:
        self._home.runtime.guard()
        if self.entered_by is not None:
            raise RuntimeError(
                f"lease of {shorten(self.name)} was entered already: acquire one for each block"
            )
        self.check()
        cancel = self._on_loss == "cancel" and not in_async_generator(sys._getframe(1))  # noqa: SLF001
        self.enter(_this_task(), cancel=cancel)
        self.begin_block()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_block()
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
    def open(self) -> bool:
        """Whether it was neither released nor lost, as far as anybody noticed."""
        return not self._released and self._lost is None

    @property
    def waited_for(self) -> bool:
        """Test whether another request for the lock would have to wait for this lease or for a level of its hold."""
        return not self.lost and (not self._released or self._home.shared())

    @property
    def home(self) -> Home:
        """Where it goes back to."""
        return self._home

    @property
    def _blocks(self) -> dict[str, Lease]:
        """The leases of all blocks that are alone in their locks, of this family."""
        return self._home.runtime.inside[self.kind.family.value]

    def enter(self, task: Task, *, cancel: bool) -> None:
        """Begin a block of ``task``; with ``cancel``, the loss of the lease cancels it."""
        self.entered_by = task
        if cancel:
            self._before = task.cancelling()
            if self._arms is not None or self._lost is not None:
                self._all_arms()
                arm = self._rest().arm
                if self._lost is not None and arm is not None:
                    # Lost on the way here, between the grant and this step.
                    asyncio.get_running_loop().call_soon(arm.fire)

    def begin_block(self) -> None:
        """What would wait for the end of this block for ever is refused in there."""
        runtime, task = self._home.runtime, self.entered_by
        if self.kind.exclusive:
            outer = self._blocks.setdefault(self.name, self)
            if outer.entered_by is not task or not outer.waited_for:
                self._blocks[self.name] = self
        elif self.kind.mode is Mode.READ and task is not None:
            outer = runtime.reading.setdefault((task, self.name), self)
            if not outer.waited_for:
                runtime.reading[task, self.name] = self

    def end_block(self) -> None:
        """The block has ended, whatever kind the lease has by now."""
        runtime, task = self._home.runtime, self.entered_by
        if self._blocks.get(self.name) is self:
            del self._blocks[self.name]
        if task is not None and runtime.reading.get((task, self.name)) is self:
            del runtime.reading[task, self.name]

    def leave(self, task: Task, error: BaseException | None) -> Coroutine[Any, Any, None] | None:
        """End a block: release, or say what the loss means for it. What is returned is to be awaited."""
        if not self.quiet(task):
            return self._leave(task, error)
        claim = self.end()
        return None if claim is None else self.give_up(claim, task, error)

    async def close(self, error: BaseException | None, keep: float = 0) -> None:
        """Release at the end of work that was no block and ended with ``error``; raise :class:`LockLost` as a block does."""
        before = self._lost
        await self.release(keep)
        if self._lost != before:
            await self.tell_loss(_this_task(), error)

    async def give_up(self, claim: Claim, task: Task, error: BaseException | None) -> None:
        """Release ``claim`` at the end of the block of ``task``; raise :class:`LockLost` if it turns out to be lost."""
        if await self._home.runtime.release(claim, self):
            await self.tell_loss(task, error)

    async def tell_loss(self, task: Task, error: BaseException | None) -> None:
        """Raise :class:`LockLost` at the end of a block of ``task`` whose release said so, unless the block's ``error`` wins."""
        verdict = Arm(task).settle(error, self._loss())
        if verdict is not None:
            # A cancellation from outside that is still on its way wins.
            await asyncio.sleep(0)
            raise verdict from error

    def quiet(self, task: Task) -> bool:
        """Whether the block of ``task`` ends as usual: nothing happened, and nobody else is concerned."""
        runtime = self._home.runtime
        return (
            self._arms is None
            and self.entered_by is task
            and not self._released
            and self._lost is None
            and self._term.until > runtime.clock()
            and not runtime.forked
        )

    def end(self) -> Claim | None:
        """End a block that is :meth:`quiet`: the claim that is to be released, if the hold is not passed on."""
        self._before = -1
        claim = self._home.leave(self)
        self._released = True
        if self._more is not None:
            self._wake()
        return claim

    async def _leave(self, task: Task, error: BaseException | None) -> None:
        runtime = self._home.runtime
        if runtime.forked:
            if error is None:
                runtime.guard()
            return
        arms = self._all_arms()
        owner = self.entered_by
        lost = self.lost
        arm = self._rest().arm
        if arm is not None:
            arms.put_back(arm)
        if lost:
            loss = self._loss()
            if self._lost is None:
                self.expire()
            self.abandon()
            if owner is task:
                verdict = (arm or Arm(task)).settle(error, loss)
                if verdict is not None:
                    # A cancellation from outside that is still on its way wins.
                    await asyncio.sleep(0)
                    raise verdict from error
        elif (claim := self.give_back()) is not None and await runtime.release(claim, self) and owner is task:
            await self.tell_loss(task, error)
        if owner is not task:
            raise RuntimeError(
                f"the block of lock {shorten(self.name)} was left in another task than the one that entered it; "
                "the lock is released"
            ) from error

    def check_hold(self) -> None:
        """Raise :class:`LockLost` if the hold behind this lease is not certain, whether or not the lease was released."""
        # Who overstayed was told of the loss although the server keeps the hold for a while: nobody comes in any more.
        if self._lost is not None or self._term.over or self._term.until <= self._home.runtime.clock():
            raise self._loss()

    def level(self) -> Lease:
        """Another lease of the same hold and task: it is lost with this one, and cancels its task only once."""
        lease = Lease(self._home, self._term, self._on_loss, self.token)
        lease._arms = self._all_arms()
        lease.follow(self)
        return lease

    def expire(self) -> None:
        """The term is over, and the watchdog has not come to say so."""
        self._home.runtime.watchdog.lose(self._term, "expired")

    def stop_renewing(self, seconds: float) -> None:
        """Let the hold end in ``seconds``, although a task may still work under it; until then it is only verified."""
        self._home.runtime.watchdog.stop_renewing(self._term, seconds)

    def request(self, reason: str) -> None:
        """Somebody asks the holder to let go."""
        self.release_requested.ask(reason)
        for lease in self._followers():
            lease.request(reason)

    def watch(self) -> asyncio.Future[None]:
        """A future that is done when the lease has ended."""
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watchers = self._rest().watchers
        watchers.add(watcher)
        watcher.add_done_callback(watchers.discard)
        return watcher

    def move(self, build: Callable[[Home], H]) -> H:
        """Put another home between this lease and its own."""
        home = build(self._home)
        self._home = home
        return home

    def abandon(self) -> None:
        """Give the hold back without waiting: nobody will work under it."""
        if (claim := self.give_back()) is not None:
            self._home.runtime.clean_up(claim, lease=self)

    def disown(self) -> bool:
        """Learn that the server has answered the release with "not yours"; whether the lease was lost by that.

        It was not if its term is over by now: the server may have ended it in good order. Nobody works under it any more,
        so nobody is cancelled.
        """
        if self._lost is not None or self._term.until <= self._home.runtime.clock():
            return False
        self._lost = "revoked"
        self._report("revoked")
        return True

    def lose(self, reason: LossReason) -> None:
        """The hold is not certain any more: tell whoever works under it."""
        if self._lost is not None:
            # Overstayed, and told so; now its ttl has ended as well.
            return
        self.mark_lost(reason)
        self.fire()
        self._report(reason)

    def _report(self, reason: LossReason) -> None:
        """Count and log a loss."""
        stats = self._home.runtime.stats
        stats.lost += 1
        stats.losses[reason] += 1
        log.warning(
            "lost %s (%s), token %d",
            shorten(self.name),
            reason,
            self.token,
            extra={"lock": self.name, "kind": str(self.kind), "reason": reason, "token": self.token},
        )

    def fire(self) -> None:
        """Cancel every task that is armed."""
        self._all_arms().fire()

    def mark_lost(self, reason: LossReason) -> None:
        """Remember why, unless the lease ended before, and wake those who wait for its end."""
        if not self._released and self._lost is None:
            self._lost = reason
            self._wake()
        for lease in self._followers():
            lease.mark_lost(reason)

    def bury(self) -> None:
        """Be lost with the client's event loop, which was closed: neither its tasks nor its futures are touched."""
        if self.open:
            self._lost = "closed"
            if self._more is not None:
                self._more.watchers.clear()
        for lease in self._followers():
            lease.bury()

    def follow(self, lease: Lease) -> None:
        """Be lost with ``lease``, and be asked to let go with it."""
        more = lease._rest()
        if more.followers is None:
            more.followers = weakref.WeakSet()
        more.followers.add(self)

    def _loss(self) -> LockLost:
        return LockLost(self.name, self._lost or "expired")

    def give_back(self, keep: float = 0) -> Claim | None:
        """End the turn: the claim that is to be released, if the hold is not passed on."""
        if self._released:
            return None
        claim = self._home.leave(self, keep)
        self._released = True
        self._wake()
        return claim

    def _wake(self) -> None:
        for watcher in self._more.watchers if self._more is not None else ():
            if not watcher.done():
                watcher.set_result(None)

    def _rest(self) -> _More:
        if self._more is None:
            self._more = _More()
        return self._more

    def _followers(self) -> Iterable[Lease]:
        return self._more.followers or () if self._more is not None else ()

    def _all_arms(self) -> Arms:
        arms = self._arms
        if arms is None:
            arms = self._arms = Arms()
        if self._before >= 0 and self.entered_by is not None:
            self._rest().arm = arms.take(self.entered_by, self._before)
            self._before = -1
        return arms


def _this_task() -> Task:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("locks are entered by tasks, and this code runs outside of one")
    return task
