"""The lock that its own task may enter again: counted here, one hold on the server."""

from __future__ import annotations

import asyncio
from typing import Any

from aiolock.contract import Claim
from aiolock.lease import Home, Lease
from aiolock.lock import UNSET, Lock, Unset
from aiolock.options import check_timeout

__all__ = ["ReentrantLock"]


class _Levels:
    """One hold and how many leases of its task share it; the last one to leave gives it back."""

    def __init__(self, first: Lease, home: Home, key: tuple[asyncio.Task[Any], str]) -> None:
        self.runtime = home.runtime
        self._first = first
        self._home = home
        self._key = key
        self._open = 1

    def again(self) -> Lease:
        """One more level; raises :class:`LockLost` if the hold is not certain any more."""
        self._first.check_hold()
        self._open += 1
        return self._first.level()

    def leave(self, lease: Lease, keep: float = 0) -> Claim | None:  # noqa: ARG002 - every level counts alike
        """Leave one level, and with the last one the hold."""
        self._open -= 1
        if self._open:
            return None
        if self.runtime.levels.get(self._key) is self:
            del self.runtime.levels[self._key]
        return self._home.leave(self._first, keep)


class ReentrantLock(Lock):
    """A lock that excludes other tasks, but not the one that holds it.

    The owner is the task: tasks that it starts do not inherit the hold, and two lock objects of one name in one task
    share it. Every acquire needs its release; the last one gives the lock back. All levels have one token, and if the
    hold is lost, every level raises :class:`LockLost`.
    """

    __slots__ = ()

    async def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """As :meth:`Lock.acquire`; inside this task's own hold it returns at once, without I/O.

        Raises :class:`LockLost` there if that hold is not certain any more.
        """
        if not isinstance(timeout, Unset):
            check_timeout(timeout)
        lease = self._again()
        return self._first(await super().acquire(timeout)) if lease is None else lease

    async def try_acquire(self) -> Lease | None:
        """As :meth:`Lock.try_acquire`; inside this task's own hold it returns another level of it."""
        lease = self._again()
        if lease is None and (lease := await super().try_acquire()) is not None:
            self._first(lease)
        return lease

    def _key(self) -> tuple[asyncio.Task[Any], str]:
        return self._task(), self.name

    def _again(self) -> Lease | None:
        self._runtime.guard()
        levels = self._runtime.levels.get(self._key())
        return None if levels is None else levels.again()

    def _first(self, lease: Lease) -> Lease:
        key = self._key()
        # The leases hold their levels, and this table only finds them: a hold that was dropped is not kept alive.
        self._runtime.levels[key] = lease.move(lambda home: _Levels(lease, home, key))
        return lease
