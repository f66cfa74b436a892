"""Cancel the tasks that work under a lost lease, and detect blocks inside async generators."""

from __future__ import annotations

import asyncio
import dis
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

from aiolock.core.logs import Log, get_logger
from aiolock.errors import LockLost

__all__ = ["CancelScope", "CancelScopes", "Task", "in_async_generator", "owns_block"]

log: Log = get_logger("aiolock.lost")

Task = asyncio.Task[Any]

# --- blocks inside async generators


Enter = TypeVar("Enter", bound=Callable[..., Coroutine[Any, Any, Any]])

_ASYNC_GENERATOR = 0x200  # inspect.CO_ASYNC_GENERATOR
_COROUTINE = 0x80  # inspect.CO_COROUTINE
_GET_AWAITABLE = dis.opmap["GET_AWAITABLE"]
_BEFORE_WITH = dis.opmap.get("BEFORE_WITH")
_ENTER_STACK = ("enter_async_context", "enter_context")

_OWNERS: set[int] = set()
"""The identities of the code that :func:`owns_block` marked."""


def owns_block(enter: Enter) -> Enter:
    """Mark an ``__aenter__`` whose block a loss cancels, also where an async generator executes the ``async with``.

    For generators that a framework makes to hold a lock around a function of the application: while such a generator is
    suspended at its ``yield``, the task runs that function and nothing else.
    """
    function: Any = enter
    _OWNERS.add(id(function.__code__))
    return enter


def in_async_generator(frame: FrameType | None, *, sync: bool = False) -> bool:
    """Test whether the block that begins in ``frame``, or in a caller of it, is or may be one of an async generator.

    While such a generator is suspended at a ``yield``, its task runs the code of the consumer, which a cancellation must
    not hit. The block belongs to the first frame upwards that

    * is an async generator: functions between it and the lock (an ``__aenter__``, a helper) return before the block ends;
    * is a coroutine that executes ``async with``, or with ``sync`` a ``with``, at this moment: it ends the block before it
      returns. This does not hold for a lock that is entered on an exit stack: the stack may have come from a caller, and
      may be returned, stored or moved with ``pop_all()`` later. Then any async generator upwards may own the block;
    * is marked by :func:`owns_block`.
    """
    on_stack = False
    while frame is not None:
        code = frame.f_code
        if code.co_flags & _COROUTINE:
            if not on_stack and (_enters(frame) or (sync and _enters_sync(frame))):
                return False
            if id(code) in _OWNERS:
                return False
        elif code.co_flags & _ASYNC_GENERATOR:
            return True
        elif str(frame.f_globals.get("__name__")).startswith("asyncio."):
            # The loop that runs the task, or what starts a task eagerly in the middle of another.
            return False
        on_stack = on_stack or code.co_name in _ENTER_STACK
        frame = frame.f_back
    return False


def _enters(frame: FrameType) -> bool:
    """Test whether a coroutine executes ``async with`` and awaits the ``__aenter__``.

    The compiler marks the await of an ``__aenter__`` by the argument 1 (CPython 3.11 and newer). Between that mark and the
    instruction that waits is the constant that is sent; CPython 3.12 may stand one cache entry behind that instruction.
    """
    code, at = frame.f_code.co_code, frame.f_lasti - 4
    if code[at] != _GET_AWAITABLE:
        at -= 2
    return code[at] == _GET_AWAITABLE and code[at + 1] == 1


def _enters_sync(frame: FrameType) -> bool:
    """Test whether a coroutine executes ``with``: certain up to CPython 3.13, and assumed where it is not known."""
    return _BEFORE_WITH is None or frame.f_code.co_code[frame.f_lasti] == _BEFORE_WITH


# --- cancel scopes


class CancelScope:
    """One task that the loss of a hold cancels; it counts cancellations as ``asyncio.timeout`` does."""

    __slots__ = ("before", "cancelled", "depth", "task", "uncancelled")

    def __init__(self, task: Task, before: int | None = None) -> None:
        self.task: Task = task
        self.before: int = task.cancelling() if before is None else before
        """The task's count of cancellations when it began to work under the hold."""
        self.depth: int = 0
        """Number of blocks that the task has open under the hold."""
        self.cancelled: bool = False
        self.uncancelled: bool = False

    def cancel(self) -> None:
        """Cancel the task, once, unless it has left its blocks."""
        if self.depth and not self.cancelled:
            self.cancelled = True
            try:
                self.task.cancel("the lock was lost")
            except Exception:  # noqa: BLE001 - a task class of the application; the others are cancelled all the same
                log.exception("cancelling %r failed", self.task)

    def resolve(self, error: BaseException | None, lost: LockLost) -> LockLost | None:
        """Return what a block that ends with ``error`` raises instead because the lease is lost, or ``None`` for ``error``.

        The cancellation of this scope is taken back. An outer cancellation wins, then an exception of the block, which gets
        the loss as a note; else the loss is raised.
        """
        outer = True
        if self.cancelled and not self.uncancelled:
            self.uncancelled = True
            outer = self.task.uncancel() > self.before
        if error is None or (isinstance(error, asyncio.CancelledError) and not outer):
            return lost
        if not isinstance(error, LockLost):
            error.add_note(str(lost))
        return None


class CancelScopes:
    """The cancel scopes of one hold, one for each task; all its leases share them."""

    __slots__ = ("_scopes",)

    def __init__(self) -> None:
        self._scopes: dict[Task, CancelScope] = {}

    def enter(self, task: Task, before: int | None = None) -> CancelScope:
        """Return the scope of a task that opens a block under the hold, one level deeper.

        ``before`` is its count of cancellations then, if the block began earlier than now.
        """
        scope = self._scopes.setdefault(task, CancelScope(task, before))
        scope.depth += 1
        return scope

    def exit(self, scope: CancelScope) -> None:
        """Close one block of a scope."""
        scope.depth = max(0, scope.depth - 1)
        if not scope.depth and self._scopes.get(scope.task) is scope:
            del self._scopes[scope.task]

    def cancel(self) -> None:
        """Cancel the task of every scope."""
        current = asyncio.current_task()
        for scope in list(self._scopes.values()):
            if scope.task is current:
                # Not in the middle of its step: if it leaves the block before its next await, nothing is to be cancelled.
                asyncio.get_running_loop().call_soon(scope.cancel)
            else:
                scope.cancel()
