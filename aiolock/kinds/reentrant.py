"""Re-entrant lock: its own task may enter it again; levels are counted here, over one hold at the server."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any
from weakref import WeakValueDictionary, ref

from aiolock.core.backend import Claim
from aiolock.core.cancellation import Task
from aiolock.core.hold import Hold, HoldParent
from aiolock.core.runtime import OpeningState, Runtime
from aiolock.lock import Lock
from aiolock.types import Kind

__all__ = ["Levels", "ReentrantLock", "at_once"]


class Levels:
    """The parent of all levels of one claim that its task has open; the last one to leave gives the claim back.

    Further levels keep the first one alive, and this object does not: a lease that is dropped is collected at once.
    """

    def __init__(self, first: Hold, parent: HoldParent, key: tuple[Task, str] | None) -> None:
        self.runtime: Runtime = parent.runtime
        self._first = ref(first)
        self._parent = parent
        self._key = key
        self._open = 1

    @property
    def kind(self) -> Kind:
        """The kind of the hold."""
        return self._parent.kind

    def downgrade(self, hold: Hold) -> HoldParent:  # noqa: ARG002 - no kind of lock that has levels can be downgraded
        """Refuse: a write hold has no levels."""
        raise RuntimeError("a hold that was entered again cannot be downgraded")

    def again(self) -> Hold:
        """Open one more level; raises :class:`LockLost` if the claim is not certain any more."""
        first = self._first()
        assert first is not None  # noqa: S101 - kept by its local queue, its lease or another level
        if not first.certain():
            raise first.error()
        level = first.level(self)
        self._open += 1
        return level

    def certain(self) -> bool:
        """Return whether the claim is certain."""
        first = self._first()
        return first is not None and first.certain()

    def leave(self, hold: Hold, keep: float = 0) -> Claim | None:  # noqa: ARG002 - every level counts alike
        """Leave one level, and with the last one give the claim back."""
        self._open -= 1
        if self._open:
            return None
        levels = LEVELS.of(self.runtime)
        if self._key is not None and levels.get(self._key) is self:
            del levels[self._key]
        first = self._first()
        assert first is not None  # noqa: S101 - the hold that leaves is the first, or keeps it
        return self._parent.leave(first, keep)

    def levels(self) -> int:
        """Return the number of levels that are open."""
        return self._open


LEVELS = OpeningState[WeakValueDictionary[tuple[Task, str], Levels]](WeakValueDictionary)
"""The levels of the hold that a task may enter again, by task and name."""


class ReentrantLock(Lock):
    """A lock that excludes other tasks, but not the one that holds it.

    The owner is the task: tasks that it starts do not inherit the hold, and two lock objects of one name in one task
    share it. Inside its own hold a task acquires at once, without I/O, and gets :class:`LockLost` if that hold is not
    certain any more. Every acquire needs its release; the last one gives the lock back. All levels have one token, and
    if the hold is lost, every level raises :class:`LockLost`. ``ttl``, ``renew``, ``grace``, ``max_hold`` and ``label`` are
    those of the first level, and ``release(keep=…)`` counts at the last. A further level prolongs nothing.
    """

    __slots__ = ()

    async def _try(self, timeout: float | None) -> Hold | None:
        self._guard()
        if (level := self._level()) is not None:
            return level
        hold = await super()._try(timeout)
        return None if hold is None else self._won(hold)

    def _ask(self, timeout: float | None) -> Coroutine[Any, Any, Hold | None]:
        self._guard()
        level = self._level()
        return self._ask_first(super()._ask(timeout)) if level is None else at_once(level)

    async def _ask_first(self, asking: Coroutine[Any, Any, Hold | None]) -> Hold | None:
        hold = await asking
        return None if hold is None else self._won(hold)

    def _owned(self, task: Task) -> bool:
        """Also by a hold of ``acquire()``, which is not a block: a further acquire of this task is another level of it."""
        levels = LEVELS.of(self._runtime).get((task, self.name))
        return super()._owned(task) if levels is None else levels.certain()

    def _level(self) -> Hold | None:
        levels = self._levels()
        return None if levels is None else levels.again()

    def _levels(self) -> Levels | None:
        return LEVELS.of(self._runtime).get((self._task(), self.name))

    def _won(self, hold: Hold) -> Hold:
        key = (self._task(), self.name)
        # The holds keep their levels alive; this table only finds them.
        hold.parent = LEVELS.of(self._runtime)[key] = Levels(hold, hold.parent, key)
        return hold


async def at_once(hold: Hold) -> Hold:
    """Return a hold that is there already, as a coroutine."""
    return hold
