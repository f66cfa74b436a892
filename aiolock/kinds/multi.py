"""Multi-lock: acquire several locks together, all or none, with one timeout; they are lost together.

One file, because what is acquired, what is given back and what is lost is decided part by part in one order.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn

from aiolock.core.backend import Claim, Grant, Release, Request
from aiolock.core.cancellation import Task, in_async_generator
from aiolock.core.hold import Hold, HoldParent, LeaseOptions, running_task
from aiolock.core.local_queue import ask
from aiolock.core.runtime import Runtime
from aiolock.core.tasks import TaskSet
from aiolock.errors import AcquireTimeout, ConfigError, LockLost, LossReason, shorten
from aiolock.kinds.reentrant import ReentrantLock
from aiolock.lease import Acquisition, Lease, acquires, hold_of
from aiolock.lock import UNSET, Handle, Lock, Unset, of_another_task
from aiolock.types import Kind, permits
from aiolock.validation import OnLoss, check_grace, check_on_loss, check_timeout

__all__ = ["JointHold", "JointLease", "LockAll", "Part", "lock_all", "merged"]

# --- parts


class Part(NamedTuple):
    """One lock of several: the handle, the request for it, and the options of its lease."""

    lock: Lock
    request: Request
    options: LeaseOptions

    @property
    def runtime(self) -> Runtime:
        """The latest opening of the lock's client."""
        return self.lock._follow()  # noqa: SLF001 - a lock and several locks are of one library

    async def ask(self, timeout: float | None) -> Hold | None:
        """Acquire the lock without regard to the calling task's own blocks. Cancelling it leaves nothing held."""
        runtime = self.runtime
        runtime.guard()
        return await ask(runtime, self.request, self.options, timeout)


def merged(locks: Sequence[Lock]) -> list[Part]:
    """Return the locks in the order in which they are taken, each once."""
    if not locks:
        raise ConfigError("lock_all must be given at least one lock, not none")
    by_key: dict[tuple[str, str], Part] = {}
    for lock in locks:
        if not isinstance(lock, Lock):
            raise ConfigError(f"lock_all must be given locks, such as client.lock(…), not {shorten(lock)}")
        if lock._follow() is not locks[0]._runtime:  # noqa: SLF001 - as above
            raise ConfigError(
                f"lock_all must be given locks of one client: {shorten(locks[0].name)} and {shorten(lock.name)} come from two"
            )
        part = Part(lock, lock._request, lock._options)  # noqa: SLF001 - as above
        key = (part.request.name, part.request.kind.family.value)
        by_key[key] = part if key not in by_key else _both(by_key[key], part)
    return [by_key[key] for key in sorted(by_key)]


def _both(one: Part, other: Part) -> Part:
    """Combine two requests for one lock."""
    (lock, request, options), (second, another, more) = one, other
    name, kind = shorten(request.name), request.kind
    if kind.counted:
        count = kind.permits + another.kind.permits
        if kind.limit != another.kind.limit:
            raise ConfigError(
                f"semaphore {name} must have one limit, not {kind.limit} and {another.kind.limit}"
            )
        if count > kind.limit:
            raise ConfigError(
                f"permits must be at most the limit of semaphore {name}, which is {kind.limit}, not {count}"
            )
        kind = permits(count, kind.limit)
    elif (another.kind.exclusive and not kind.exclusive) or isinstance(second, ReentrantLock):
        # A re-entrant lock serves for both: another one would refuse a task that is inside already.
        lock, kind = second, another.kind
    holds = [each.max_hold for each in (options, more) if each.max_hold is not None]
    ttl, grace = min(request.ttl, another.ttl), max(request.grace, another.grace)
    life = math.inf if math.inf == request.life == another.life else ttl
    on_loss: OnLoss = "cancel" if "cancel" in (options.on_loss, more.on_loss) else "signal"
    return Part(
        lock,
        replace(
            request,
            kind=kind,
            ttl=ttl,
            fair=request.fair or another.fair,
            life=life,
            grace=check_grace(grace, ttl),
        ),
        LeaseOptions(min(holds, default=None), on_loss, options.template or more.template),
    )


# --- joint leases


class JointHold(Hold):
    """Several holds as one: certain while all of them are, lost with the first of them, given back together."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Hold], on_loss: OnLoss) -> None:
        # The validity and the token are never used: the parts have their own.
        super().__init__(_Parts(parts), parts[0].validity, on_loss, 0)
        self.parts: tuple[Hold, ...] = tuple(parts)
        for part in parts:
            self.follow(part)
            if part.lost():
                self.mark_lost("expired")

    @property
    def name(self) -> str:
        """The names of the locks, in the order in which they were taken."""
        return ", ".join(dict.fromkeys(part.name for part in self.parts))

    @property
    def ttl(self) -> float:
        """The shortest ttl of the parts, in seconds."""
        return min(part.ttl for part in self.parts)

    def remaining(self) -> float:
        """Return the seconds for which all parts are certain; parts that were released by themselves do not count."""
        if not self.open:
            return 0.0
        return min((part.remaining() for part in self.parts if part.open or part.lost()), default=0.0)

    def lost(self) -> bool:
        """Return whether a part ended before it was released."""
        return self.loss is not None or (not self.released and any(part.lost() for part in self.parts))

    def check(self) -> None:
        """Raise :class:`LockLost` if a part is not certain, :class:`RuntimeError` if all of them were released."""
        if self.open and not any(part.open or part.lost() for part in self.parts):
            raise RuntimeError(
                f"every part of the lease of {shorten(self.name)} was released: acquire the locks again"
            )
        super().check()

    def error(self) -> LockLost:
        """Return the error of the first part that is lost."""
        return next((part.error() for part in self.parts if part.lost()), super().error())

    def enter(self, task: Task, *, cancel: bool) -> None:
        """Begin a block of ``task``, which is one of every part."""
        super().enter(task, cancel=cancel)
        for part in self.parts:
            part.enter(task, cancel=False)

    def begin_block(self) -> None:
        """Record that the task is inside a block of every part."""
        for part in self.parts:
            part.begin_block()

    def end_block(self) -> None:
        """Record that the task is outside again."""
        for part in self.parts:
            part.end_block()

    def quiet(self, task: Task) -> bool:  # noqa: ARG002 - the end is never that of a single hold
        """Return False."""
        return False

    def abandon(self) -> None:
        """Give the parts back without waiting."""
        for part in self.parts:
            part.abandon()
        super().abandon()

    def disown(self) -> bool:
        """Record that the server answered the release of a part with "not held", which that part has reported."""
        if self.loss is None and any(part.lost() for part in self.parts):
            self.loss: LossReason | None = "revoked"
            return True
        return False

    def expire(self) -> None:
        """End the parts whose validity is over although the renewal scheduler has not noticed it yet."""
        for part in self.parts:
            if part.open and part.lost():
                part.expire()

    def mark_lost(self, reason: LossReason) -> None:
        """Be lost because a part is, and cancel the tasks in blocks of the joint lease; do nothing after its end."""
        if self.open:
            super().mark_lost(reason)
            self.cancel_tasks()


class JointLease(Lease):
    """The lease of several locks, from :func:`lock_all`: a :class:`Lease` with ``parts``, and without a ``token``.

    It is certain for as long as all of its parts are, and lost with the first that is lost: then its block is cancelled,
    and at the end of the block, or with ``release()``, the others are given back. A part that was released by itself
    counts no more.
    """

    __slots__ = ("parts",)

    def __init__(self, hold: JointHold) -> None:
        super().__init__(hold)
        self.parts: tuple[Lease, ...] = tuple(map(Lease, hold.parts))
        """The leases, in the order in which they were taken; each with the token of its lock."""

    def __del__(self) -> None:
        # Each part is released when its own lease is collected.
        pass

    @property
    def token(self) -> NoReturn:
        """Each part has a token of its own."""
        raise AttributeError("a lease of several locks has no token of its own: each of its parts has one")

    async def renew(self) -> None:
        """Ask for a full ttl of each part now. Raises and cancels as :meth:`Lease.renew` does."""
        hold = self._hold
        hold.parent.runtime.guard()
        for part in self.parts:
            part._refuse_life()  # noqa: SLF001 - a lease as well
        if not hold.open:
            hold.check()
        for part in self.parts:
            if hold_of(part).open:
                await part.renew()
        hold.check()

    async def extend(self, seconds: float) -> None:
        """Set the life of each part, one after the other. Raises and cancels as :meth:`Lease.extend` does."""
        hold = self._hold
        for part in self.parts:
            part._extensible(seconds)  # noqa: SLF001 - as above
        hold.check()
        for part in self.parts:
            if hold_of(part).open:
                await part.extend(seconds)
        hold.check()

    async def confirm(self, connection: object) -> None:
        """Check each part inside your own transaction. Raises and cancels as :meth:`Lease.confirm` does."""
        hold = self._hold
        hold.parent.runtime.guard()
        hold.check()
        for part in self.parts:
            if hold_of(part).open:
                await part.confirm(connection)
        hold.check()

    async def downgrade(self) -> None:
        """Raise :class:`RuntimeError`: each part that is a write lease can be downgraded."""
        raise RuntimeError("a lease of several locks cannot be downgraded: downgrade the part that is to be")

    def __repr__(self) -> str:
        return f"<JointLease of {', '.join(map(repr, self.parts))}>"


class _Parts:
    """The parent of a joint hold: the parents of its parts."""

    def __init__(self, parts: Sequence[Hold]) -> None:
        self.runtime: Runtime = parts[0].parent.runtime
        self._parts = parts

    @property
    def kind(self) -> Kind:
        """The kind of the first part."""
        return self._parts[0].kind

    def leave(self, hold: Hold, keep: float = 0) -> Claim | None:  # noqa: ARG002 - the parts have one joint hold
        """End all parts; return what is left to release as one claim."""
        claims: list[tuple[Hold, Claim]] = []
        ending: BaseException | None = None
        for part in self._parts:
            try:
                if (claim := part.give_back(keep)) is not None:
                    claims.append((part, claim))
            except BaseException as error:  # noqa: BLE001 - raised below, when every part has ended
                # A callback ends the program.
                ending = ending or error
        if ending is not None:
            for part, claim in claims:
                self.runtime.clean_up(claim, keep, part.disown)
            raise ending
        return _Several(claims) if claims else None

    def levels(self) -> int:
        """Return 0: every part stands for itself."""
        return 0

    def downgrade(self, hold: Hold) -> HoldParent:
        """Refuse, as a joint lease does."""
        raise RuntimeError(f"{shorten(hold.name)} cannot be downgraded as one")


class _Several(Claim):
    """The claims of all parts, released together."""

    __slots__ = ("_claims",)

    def __init__(self, claims: Sequence[tuple[Hold, Claim]]) -> None:
        super().__init__(max((claim.request for _, claim in claims), key=lambda request: request.ttl))
        self._claims = dict.fromkeys(claims)
        """The claims whose release has not begun."""

    async def acquire(self, wait: bool) -> Grant | None:  # noqa: ARG002 - they were asked for one by one
        """Return no grant; never called."""
        return None

    async def release(self, keep: float = 0) -> Release:
        """Release all claims at the same time; the client goes on trying in the background."""
        try:
            results = await asyncio.gather(
                *(self._one(part, claim, keep) for part, claim in self._claims), return_exceptions=True
            )
        except BaseException:
            # The releases that had not begun: a task that is cancelled before its first step never runs.
            for part, claim in self._claims:
                part.parent.runtime.clean_up(claim, keep, part.disown)
            self._claims.clear()
            raise
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return Release.NOT_HELD if any(results) else Release.RELEASED

    async def _one(self, part: Hold, claim: Claim, keep: float) -> bool:
        del self._claims[part, claim]
        return await part.parent.runtime.release(claim, part.disown, keep)


# --- the handle


def lock_all(
    *locks: Lock | LockAll, timeout: float | Unset | None = UNSET, on_loss: OnLoss | None = None
) -> LockAll:
    """Combine several locks of any kind: ``async with lock_all(a, b) as lease:`` has all of them or none.

    :param locks: locks of one client; a lock may come up more than once.
    :param timeout: seconds that ``async with`` and ``acquire()`` wait for all of them together (``None``: no limit, 0: try
        once; default: the shortest of the locks' own).
    :param on_loss: ``"cancel"`` or ``"signal"`` (default: ``"cancel"`` if that is the option of any of them).

    They are sorted by name and family, so that two programs that request the same locks never wait for each other. The
    same lock twice is one lock: write absorbs read, permits add up, the shortest ttl and ``max_hold`` count, the longest
    ``grace``, and ``renew=False``. Different locks keep their own: the lease is lost with the first of them that ends.

    Does no I/O. Raises :class:`ConfigError` for no locks, locks of several clients, permits that add up to more than the
    limit, and anything but a lock.
    """
    flat = [each for lock in locks for each in (lock.locks if isinstance(lock, LockAll) else [lock])]
    parts = merged(flat)
    limits = [lock._timeout for lock in flat if lock._timeout is not None]  # noqa: SLF001 - as above
    wait = min(limits, default=None) if isinstance(timeout, Unset) else check_timeout(timeout)
    any_cancels = any(part.options.on_loss == "cancel" for part in parts)
    default: OnLoss = "cancel" if any_cancels else "signal"
    return LockAll(flat, parts, wait, default if on_loss is None else check_on_loss(on_loss))


class LockAll(Handle):
    """Several locks as one. Made by :func:`lock_all`; does no I/O, and may be reused and shared between tasks.

    First all of them are requested at once, without waiting: one round trip if they are free. Otherwise they are taken one
    after the other in their order, so that a task that waits for one holds only locks that come before it.
    """

    __slots__ = ("_entered", "_on_loss", "_parts", "_timeout", "locks")

    def __init__(
        self, locks: Sequence[Lock], parts: Sequence[Part], timeout: float | None, on_loss: OnLoss
    ) -> None:
        self.locks: tuple[Lock, ...] = tuple(locks)
        """The locks as they were given."""
        self._parts = parts
        self._timeout = timeout
        self._on_loss: OnLoss = on_loss
        self._entered: dict[Task, list[JointLease]] = {}
        """The leases of the blocks that are open through this object, per task, innermost last."""

    @property
    def name(self) -> str:
        """The names, in the order in which they are taken."""
        return ", ".join(dict.fromkeys(part.request.name for part in self._parts))

    @acquires
    def acquire(self, timeout: float | Unset | None = UNSET) -> Acquisition[JointLease]:
        """Wait for all of them: ``await`` it for their lease, or enter it with ``async with`` as the locks themselves.

        ``timeout`` is in seconds, for all together (``None``: no limit, 0: try once; default: the option).

        Raises :class:`AcquireTimeout` with the name of a lock that was not free when the time is over, and otherwise
        what :meth:`Lock.acquire` raises. If it raises, also by being cancelled, none is held.
        """
        return Acquisition(self._acquire(timeout))

    async def _acquire(self, timeout: float | Unset | None) -> JointLease:
        wait = self._timeout if isinstance(timeout, Unset) else check_timeout(timeout)
        try:
            return JointLease(await self._ask(wait))
        except AcquireTimeout:
            self._parts[0].runtime.stats.timeouts_by_template.count("")
            raise

    async def try_acquire(self, timeout: float | None = 0) -> JointLease | None:
        """Wait for at most ``timeout`` seconds for all of them: the lease, or ``None`` if one was not free by then.

        With 0, the default, it tries once, for all at the same time, and ends within the ``command_timeout``; ``None`` waits
        for ever. Raises and cancels as :meth:`acquire` does, but returns ``None`` when the time is over, and at once inside
        this task's own block of one of them.
        """
        try:
            return JointLease(await self._ask(check_timeout(timeout)))
        except (_OwnBlock, AcquireTimeout):
            return None

    async def __aenter__(self) -> JointLease:
        # Determined before the first await, while the caller's frame is still the one above.
        cancel = self._on_loss == "cancel" and not in_async_generator(sys._getframe(1))  # noqa: SLF001
        lease = await self._acquire(UNSET)
        hold, task = hold_of(lease), running_task()
        hold.enter(task, cancel=cancel)
        hold.begin_block()
        self._entered.setdefault(task, []).append(lease)
        return lease

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release all, and wait for that until the first cancellation; raise :class:`LockLost` if one was lost."""
        task = running_task()
        # Kept until its hold has ended, as in `Lock.__aexit__`.
        lease = self._leave(task)
        hold = hold_of(lease)
        hold.end_block()
        rest = hold.leave(task, error)
        if rest is not None:
            await rest

    async def _ask(self, timeout: float | None) -> JointHold:
        runtime = self._parts[0].runtime
        clock = runtime.clock
        end = None if timeout is None else clock() + timeout
        if runtime.connect is not None:
            runtime.guard()
            await runtime.reach(timeout)
        while True:
            hold = await self._ask_once(timeout, end)
            if not hold.lost():
                return hold
            # One of them was lost while this task waited for the next.
            hold.abandon()
            if end is not None and clock() >= end:
                self._in_vain(self.name, timeout)

    async def _ask_once(self, timeout: float | None, end: float | None) -> JointHold:
        clock = self._parts[0].runtime.clock
        got = self._levels()
        try:
            # A single one is requested as by itself, with its position in the queue at once.
            if got.count(None) > 1:
                # A single attempt is bounded by the command timeout, and that is what it may take with `timeout=0`.
                missing = await self._at_once(got, timeout, end)
                if missing is not None and (timeout == 0 or (end is not None and clock() >= end)):
                    self._in_vain(missing, timeout)
            for index, part in enumerate(self._parts):
                if got[index] is None:
                    # Only `timeout=0` may take a command timeout: a timeout that passed in between stays a timeout.
                    left = timeout if not timeout or end is None else max(1e-9, end - clock())
                    got[index] = self._won(index, await part.ask(left))
                    if got[index] is None:
                        self._in_vain(part.request.name, timeout)
        except BaseException:
            release(got)
            raise
        return self._joint(got)

    def _levels(self) -> list[Hold | None]:
        """Return for each part a further level of this task's hold, or ``None``; raise if the task would wait for its own block."""
        got: list[Hold | None] = []
        try:
            for lock, request, _ in self._parts:
                level = lock._level()  # noqa: SLF001 - as above
                got.append(level)
                if level is None and lock._in_own_block():  # noqa: SLF001 - as above
                    raise _OwnBlock(
                        f"this task is inside its own block of {shorten(request.name)} and would wait for itself for "
                        "ever: leave it first, or take all the locks at once"
                    )
        except BaseException:
            # A level without a lease would keep its hold for as long as this task lives.
            release(got)
            raise
        return got

    async def _at_once(self, got: list[Hold | None], timeout: float | None, end: float | None) -> str | None:
        """Request all that is missing at the same time, without waiting; return the first name that is not free.

        ``got`` is completed up to that one, and what was granted beyond it is given back. Levels stay: the task has those
        locks already, and would wait for itself if it requested them without. If it raises, also by being cancelled, the
        requests under way are withdrawn, and ``got`` is the caller's to give back.
        """
        runtime = self._parts[0].runtime
        runtime.guard()
        asking = {
            index: _attempts.spawn(self._parts[index].ask(0), "aiolock-lock-all")
            for index, hold in enumerate(got)
            if hold is None
        }
        try:
            if asking:
                left = max(0.0, end - runtime.clock()) if timeout and end is not None else None
                await asyncio.wait(asking.values(), timeout=left)
            for task in asking.values():
                if task.done() and (failed := task.exception()) is not None:
                    raise failed
        except BaseException:
            _call_off(asking.values())
            raise
        for index, task in asking.items():
            if not task.done() or task.result() is None:
                name = self._parts[index].request.name
                away = None if task.done() else runtime.unanswered(name, timeout or 0.0, whole=True)
                late = [asking[later] for later in asking if later >= index]
                unanswered = any(not other.done() for other in late)
                _call_off(late)
                if unanswered:
                    # They withdraw their requests in the next pass, before this task sends another one.
                    await asyncio.sleep(0)
                if away is not None:
                    raise away
                return name
            got[index] = self._won(index, task.result())
        return None

    def _won(self, index: int, hold: Hold | None) -> Hold | None:
        return None if hold is None else self._parts[index].lock._won(hold)  # noqa: SLF001 - as above

    def _joint(self, got: Iterable[Hold | None]) -> JointHold:
        return JointHold([hold for hold in got if hold is not None], self._on_loss)

    def _in_vain(self, name: str, timeout: float | None) -> NoReturn:
        count = len(self._parts)
        raise AcquireTimeout(name, timeout or 0.0, f"of {count} locks" if count > 1 else "")

    def _leave(self, task: Task) -> JointLease:
        if task not in self._entered:
            if not self._entered:
                raise RuntimeError(f"no block of {shorten(self.name)} is open")
            task, guessed = of_another_task(self._entered)
            hold_of(self._entered[task][-1]).rare().guessed = guessed
        leases = self._entered[task]
        lease = leases.pop()
        if not leases:
            del self._entered[task]
        return lease


class _OwnBlock(RuntimeError):
    """The task would wait for itself."""


def release(holds: Iterable[Hold | None]) -> None:
    """Give back in the background what is of no use without the rest."""
    for hold in holds:
        if hold is not None:
            hold.abandon()


_attempts = TaskSet(awaited=True)
"""Kept until they end: no task waits for the result of one that was called off."""


def _call_off(tasks: Iterable[asyncio.Task[Hold | None]]) -> None:
    """Cancel attempts; what was granted, or is granted in this very moment, is given back."""
    for task in tasks:
        if task.done():
            _give_back(task)
        else:
            task.add_done_callback(_give_back)
            task.cancel()


def _give_back(task: asyncio.Task[Hold | None]) -> None:
    if not task.cancelled() and task.exception() is None:
        release([task.result()])
