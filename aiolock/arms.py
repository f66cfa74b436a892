"""How the loss of a lease cancels the work under it: an arm for each task, and what a block that it ended raises."""

from __future__ import annotations

import asyncio
from typing import Any

from aiolock.errors import LockLost
from aiolock.logs import Log, get_logger

__all__ = ["Arm", "Arms"]

log: Log = get_logger("aiolock.lost")

Task = asyncio.Task[Any]


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
            try:
                self.task.cancel("the lock was lost")
            except Exception:  # noqa: BLE001 - a task class of the application; the others are cancelled all the same
                log.exception("cancelling %r failed", self.task)

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


class Arms:
    """Those of one hold, one for each task; all leases of that hold share them."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[Task, Arm] = {}

    def take(self, task: Task, before: int | None = None) -> Arm:
        """The arm of a task that begins to work under the hold, once more if it does already.

        ``before`` is how often it had been cancelled then, if that was earlier than now.
        """
        arm = self._of.setdefault(task, Arm(task, before))
        arm.depth += 1
        return arm

    def put_back(self, arm: Arm) -> None:
        """Its task does not work under the hold any more, or once less."""
        arm.depth = max(0, arm.depth - 1)
        if not arm.depth and self._of.get(arm.task) is arm:
            del self._of[arm.task]

    def fire(self) -> None:
        """Cancel every task that has one."""
        current = asyncio.current_task()
        for arm in list(self._of.values()):
            if arm.task is current:
                # The running task is not cancelled under its own feet: if it leaves the block before its next
                # await, there is nothing left to cancel.
                asyncio.get_running_loop().call_soon(arm.fire)
            else:
                arm.fire()
