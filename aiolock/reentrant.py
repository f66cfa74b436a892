"""The lock that its own task may enter again: counted here, one hold on the server."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from typing import Any

from aiolock.contract import Claim, Kind
from aiolock.lease import Home, Lease
from aiolock.lock import Lock
from aiolock.runtime import Runtime

__all__ = ["Level", "Levels", "ReentrantLock", "at_once"]


class Levels:
    """One hold and how many leases of its task share it; the last one to leave gives it back.

    It is the home of the first lease, which the hold hangs on. The others keep that one alive, and it is freed at once
    when all of them have been dropped: nobody points in a circle.
    """

    def __init__(self, first: Lease, home: Home, key: tuple[asyncio.Task[Any], str] | None) -> None:
        self.runtime: Runtime = home.runtime
        self._first = weakref.ref(first)
        self._home = home
        self._key = key
        self._open = 1

    @property
    def kind(self) -> Kind:
        """What kind of hold it is."""
        return self._home.kind

    def weaken(self, lease: Lease) -> Home:  # noqa: ARG002 - no kind of lock that has levels can be downgraded
        """Levels of a write hold do not exist."""
        raise RuntimeError("a hold that was entered again cannot be downgraded")

    def again(self) -> Lease:
        """One more level; raises :class:`LockLost` if the hold is not certain any more."""
        first = self._first()
        assert first is not None  # noqa: S101 - whoever has these levels has a lease of them, and that keeps the first
        first.check_hold()
        level = first.level()
        level.move(lambda _: Level(self, first))
        self._open += 1
        return level

    def leave(self, lease: Lease, keep: float = 0) -> Claim | None:  # noqa: ARG002 - every level counts alike
        """Leave one level, and with the last one the hold."""
        self._open -= 1
        if self._open:
            return None
        if self._key is not None and self.runtime.levels.get(self._key) is self:
            del self.runtime.levels[self._key]
        first = self._first()
        assert first is not None  # noqa: S101 - the lease that leaves is the first, or keeps it
        return self._home.leave(first, keep)

    def shared(self) -> bool:
        """Test whether levels are open."""
        return self._open > 0


class Level:
    """The home of a further lease of a hold: the levels, and the first lease, which it keeps alive."""

    def __init__(self, levels: Levels, first: Lease) -> None:
        self.runtime: Runtime = levels.runtime
        self.levels: Levels = levels
        self._first = first

    @property
    def kind(self) -> Kind:
        """What kind of hold it is."""
        return self.levels.kind

    def weaken(self, lease: Lease) -> Home:
        """Levels of a write hold do not exist."""
        return self.levels.weaken(lease)

    def again(self) -> Lease:
        """One more level; raises :class:`LockLost` if the hold is not certain any more."""
        return self.levels.again()

    def leave(self, lease: Lease, keep: float = 0) -> Claim | None:
        """Leave this level, and with the last one the hold."""
        return self.levels.leave(lease, keep)

    def shared(self) -> bool:
        """Test whether levels are open."""
        return self.levels.shared()


class ReentrantLock(Lock):
    """A lock that excludes other tasks, but not the one that holds it.

    The owner is the task: tasks that it starts do not inherit the hold, and two lock objects of one name in one task
    share it. Inside its own hold a task acquires at once, without I/O, and gets :class:`LockLost` if that hold is not
    certain any more. Every acquire needs its release; the last one gives the lock back. All levels have one token, and
    if the hold is lost, every level raises :class:`LockLost`. ``ttl``, ``max_hold`` and ``label`` are those of the first
    level, and ``release(keep=…)`` counts at the last.
    """

    __slots__ = ()

    async def try_acquire(self) -> Lease | None:
        """As :meth:`Lock.try_acquire`; inside this task's own hold it returns another level of it."""
        self._guard()
        levels = self._levels()
        if levels is not None:
            return levels.again()
        lease = await super().try_acquire()
        return None if lease is None else self._won(lease)

    def _ask(self, timeout: float | None) -> Coroutine[Any, Any, Lease | None]:
        self._guard()
        levels = self._levels()
        return self._ask_first(super()._ask(timeout)) if levels is None else at_once(levels.again())

    async def _ask_first(self, asking: Coroutine[Any, Any, Lease | None]) -> Lease | None:
        lease = await asking
        return None if lease is None else self._won(lease)

    def _level(self) -> Lease | None:
        levels = self._levels()
        return None if levels is None else levels.again()

    def _levels(self) -> Levels | None:
        return self._runtime.levels.get((self._task(), self.name))

    def _won(self, lease: Lease) -> Lease:
        key = (self._task(), self.name)
        # The leases hold their levels, and this table only finds them: a hold that was dropped is not kept alive.
        self._runtime.levels[key] = lease.move(lambda home: Levels(lease, home, key))
        return lease


async def at_once(lease: Lease) -> Lease:
    """What is there already, for who awaits it."""
    return lease
