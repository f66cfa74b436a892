"""Several locks as one: sorted, all or nothing, one timeout, and lost together."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import NoReturn

from aiolock.errors import AcquireTimeout, shorten
from aiolock.frames import in_async_generator
from aiolock.joint import JointLease
from aiolock.lease import Lease
from aiolock.lock import UNSET, Lock, Task, Unset
from aiolock.merging import Part, inside, merged
from aiolock.options import OnLoss, check_on_loss, check_timeout
from aiolock.queue import ask
from aiolock.tasks import start

__all__ = ["LockAll", "lock_all"]


def lock_all(
    *locks: Lock | LockAll, timeout: float | Unset | None = UNSET, on_loss: OnLoss | None = None
) -> LockAll:
    """Several locks of any kind as one: ``async with lock_all(a, b) as lease:`` has all of them or none.

    :param locks: from one client or from several; a lock may come up more than once.
    :param timeout: seconds that ``async with`` and ``acquire()`` wait for all of them together (``None``: for ever, 0: try
        once; default: the shortest of the locks' own).
    :param on_loss: ``"cancel"`` or ``"signal"`` (default: ``"cancel"`` if one of them says so).

    They are sorted by name and family, so that two programs that want the same locks never wait for each other. The
    same lock twice is one lock: write absorbs read, permits add up, the shortest ttl and ``max_hold`` count.

    Does no I/O. Raises :class:`ConfigError` if there is none, if equal names come from two clients, if permits add up to
    more than the limit, or if something else than a lock is among them.
    """
    flat = [each for lock in locks for each in (lock.locks if isinstance(lock, LockAll) else [lock])]
    parts = merged(flat)
    limits = [lock._timeout for lock in flat]  # noqa: SLF001 - this and the lock are of one library
    if isinstance(timeout, Unset):
        wait = min((limit for limit in limits if limit is not None), default=None)
    else:
        wait = check_timeout(timeout)
    if on_loss is None:
        say: OnLoss = "cancel" if any(terms.on_loss == "cancel" for _, _, terms in parts) else "signal"
    else:
        say = check_on_loss(on_loss)
    return LockAll(flat, parts, wait, say)


class LockAll:
    """Several locks as one. Made by :func:`lock_all`; does no I/O, and may be reused and shared between tasks.

    First all of them are asked for at once, without waiting: one round trip if they are free. Else they are taken one
    after the other in their order, so that whoever waits for one holds only such as come before it.
    """

    __slots__ = ("_entered", "_on_loss", "_parts", "_timeout", "locks")

    def __init__(
        self, locks: Sequence[Lock], parts: Sequence[Part], timeout: float | None, on_loss: OnLoss
    ) -> None:
        self.locks: tuple[Lock, ...] = tuple(locks)
        """What it was made of."""
        self._parts = parts
        self._timeout = timeout
        self._on_loss: OnLoss = on_loss
        self._entered: dict[Task, list[JointLease]] = {}
        """The leases of the blocks that are open through this object, per task, innermost last."""

    @property
    def name(self) -> str:
        """The names, in the order in which they are taken."""
        return ", ".join(dict.fromkeys(bid.name for _, bid, _ in self._parts))

    def __repr__(self) -> str:
        return f"<LockAll {shorten(self.name)}>"

    def __reduce__(self) -> str:
        raise TypeError(
            "a lock cannot be copied or pickled: pass the names, and ask the client there for the locks"
        )

    async def acquire(self, timeout: float | Unset | None = UNSET) -> JointLease:
        """Wait until all of them are ours, and return the hold.

        ``timeout`` is how many seconds to wait for all together (``None``: for ever, 0: try once; default: the option).

        Raises :class:`AcquireTimeout` with the name of the one that was missing when the time is over, and for the rest
        what :meth:`Lock.acquire` raises. If it raises, also by being cancelled, none is held.
        """
        wait = self._timeout if isinstance(timeout, Unset) else check_timeout(timeout)
        return await self._all(wait)

    async def try_acquire(self) -> JointLease | None:
        """Ask once, for all at the same time: the hold, or ``None`` if one of them is not free at this moment.

        Ends within the ``command_timeout``. Raises and cancels as :meth:`acquire` does, but returns ``None`` inside this
        task's own block of one of them.
        """
        try:
            got = self._levels()
        except _OwnBlock:
            return None
        if await self._at_once(got, None) is not None:
            release(got)
            return None
        return self._joint(got)

    async def __aenter__(self) -> JointLease:
        # Looked at before the first await, while the caller's frame is still the one above.
        cancel = self._on_loss == "cancel" and not in_async_generator(sys._getframe(1))  # noqa: SLF001
        lease = await self._all(self._timeout)
        task = _this_task()
        lease.enter(task, cancel=cancel)
        lease.begin_block()
        self._entered.setdefault(task, []).append(lease)
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release all, and wait for that until the first cancellation; raise :class:`LockLost` if one was lost."""
        task = _this_task()
        lease = self._leave(task)
        lease.end_block()
        rest = lease.leave(task, error)
        if rest is not None:
            await rest

    # --- asking

    async def _all(self, timeout: float | None) -> JointLease:
        runtime = inside(self._parts[0][0])[0]
        end = None if timeout is None else runtime.clock() + timeout
        while True:
            got: list[Lease | None] = self._levels()
            if got.count(None) <= 1:
                # Only one to ask for: it is asked for as by itself, with its place in line at once.
                lease = await self._in_order(got, end, timeout)
            else:
                # A single attempt is bounded by the command timeout, and that is what it may take with `timeout=0`.
                missing = await self._at_once(got, None if timeout == 0 else end)
                if missing is None:
                    lease = self._joint(got)
                elif timeout == 0 or (end is not None and runtime.clock() >= end):
                    release(got)
                    self._in_vain(missing, timeout)
                else:
                    lease = await self._in_order(got, end, timeout)
            if not lease.lost:
                return lease
            # One that we had was lost while we waited for the next.
            lease.abandon()
            if end is not None and runtime.clock() >= end:
                self._in_vain(self.name, timeout)

    def _levels(self) -> list[Lease | None]:
        """What this task has already and may enter again; raises if it has one that it may not."""
        got: list[Lease | None] = []
        try:
            for lock, bid, _ in self._parts:
                level = lock._level()  # noqa: SLF001 - this and the lock are of one library
                got.append(level)
                if level is None and lock._in_own_block():  # noqa: SLF001 - as above
                    raise _OwnBlock(
                        f"this task is inside its own block of {shorten(bid.name)} and would wait for itself for "
                        "ever: leave it first, or take all the locks at once"
                    )
        except BaseException:
            # A level that nobody knows of would keep its hold for as long as this task lives.
            release(got)
            raise
        return got

    async def _at_once(self, got: list[Lease | None], end: float | None) -> str | None:
        """Ask for all that is missing, without waiting; the first name that was not to be had.

        ``got`` is completed up to that one: of what was missing, the rest is given back. Levels stay: the task has those
        locks already, and would wait for itself if it asked for them without. If it raises, all of ``got`` is given back.
        """
        places = [place for place, lease in enumerate(got) if lease is None]
        asking: dict[int, asyncio.Task[Lease | None]] = {}
        try:
            runtime = inside(self._parts[0][0])[0]
            runtime.guard()
            for place in places:
                asking[place] = start(_once(self._parts[place]), "aiolock-lock-all")
            left = None if end is None else max(0.0, end - runtime.clock())
            if asking:
                await asyncio.wait(asking.values(), timeout=left)
            for task in asking.values():
                if task.done() and (failed := task.exception()) is not None:
                    raise failed
        except BaseException:
            _call_off(asking.values())
            release(got)
            raise
        for place, task in asking.items():
            if not task.done() or task.result() is None:
                late = [asking[later] for later in places if later >= place]
                unanswered = any(not other.done() for other in late)
                _call_off(late)
                if unanswered:
                    try:
                        # They take back what they asked for in the next pass, before this task asks for anything else.
                        await asyncio.sleep(0)
                    except BaseException:
                        release(got)
                        raise
                return self._parts[place][1].name
            got[place] = self._take(place, task.result())
        return None

    async def _in_order(
        self, got: list[Lease | None], end: float | None, timeout: float | None
    ) -> JointLease:
        """One after the other, as far as they are missing."""
        try:
            for place, (lock, bid, terms) in enumerate(self._parts):
                if got[place] is None:
                    runtime = inside(lock)[0]
                    runtime.guard()
                    # Only `timeout=0` may take a command timeout: a time that is over in between still is a time.
                    left = timeout if not timeout or end is None else max(1e-9, end - runtime.clock())
                    got[place] = self._take(place, await ask(runtime, bid, terms, left))
                    if got[place] is None:
                        self._in_vain(bid.name, timeout)
        except BaseException:
            release(got)
            raise
        return self._joint(got)

    def _take(self, place: int, lease: Lease | None) -> Lease | None:
        lock = self._parts[place][0]
        return None if lease is None else lock._won(lease)  # noqa: SLF001 - this and the lock are of one library

    def _joint(self, got: Iterable[Lease | None]) -> JointLease:
        return JointLease([lease for lease in got if lease is not None], self._on_loss)

    def _in_vain(self, name: str, timeout: float | None) -> NoReturn:
        inside(self._parts[0][0])[0].stats.timeouts += 1
        others = len(self._parts) - 1
        raise AcquireTimeout(name, timeout or 0.0, f"of {others + 1} locks" if others else "")

    def _leave(self, task: Task) -> JointLease:
        if task not in self._entered:
            if not self._entered:
                raise RuntimeError(f"no block of {shorten(self.name)} is open")
            ended = [other for other in self._entered if other.done()]
            task = ended[-1] if ended else next(reversed(self._entered))
        leases = self._entered[task]
        lease = leases.pop()
        if not leases:
            del self._entered[task]
        return lease


class _OwnBlock(RuntimeError):
    """The task would wait for itself."""


def release(leases: Iterable[Lease | None]) -> None:
    """Give back, in the background, what is no use without the rest."""
    for lease in leases:
        if lease is not None:
            lease.abandon()


async def _once(part: Part) -> Lease | None:
    lock, bid, terms = part
    runtime = inside(lock)[0]
    runtime.guard()
    return await ask(runtime, bid, terms, 0)


_called_off: set[asyncio.Task[Lease | None]] = set()
"""Attempts that nobody waits for any more, until they have ended."""


def _call_off(tasks: Iterable[asyncio.Task[Lease | None]]) -> None:
    """End attempts; what they got, or get in this very moment, is given back."""
    for task in tasks:
        if task.done():
            _give_back(task)
        else:
            _called_off.add(task)
            task.add_done_callback(_give_back)
            task.cancel()


def _give_back(task: asyncio.Task[Lease | None]) -> None:
    _called_off.discard(task)
    if not task.cancelled() and task.exception() is None:
        release([task.result()])


def _this_task() -> Task:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("locks are entered by tasks, and this code runs outside of one")
    return task
