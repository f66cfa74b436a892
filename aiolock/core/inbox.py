"""Inbox: the only way to wake a waiter, which logs why it woke."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar

from aiolock.clock import Deadline
from aiolock.core.logs import Log, get_logger
from aiolock.errors import shorten
from aiolock.types import Kind

__all__ = ["Inbox", "WakeReason", "log_wake"]

T = TypeVar("T")

wait_log: Log = get_logger("aiolock.wait")
_wait_logger: logging.Logger = wait_log.logger
"""Asked for its level without the adapter in between, because it is asked at every wake-up."""


class WakeReason(Enum):
    """The reason why a waiter goes on; the values are the texts of the log."""

    GRANTED = "the server granted the lock"
    NOTIFIED = "the server announced a change"
    ANSWERED = "its own request was answered late"
    RECONNECTED = "the connection was lost or restored"
    EXPIRED = "a hold or position ahead of it at the server may have expired"
    POLL = "fallback poll"
    LAPSED = "it is not in the queue at the server any more: a grant was not announced, or the claim is gone"
    HANDED_OVER = "another task of this client handed the lock over"
    TIMEOUT = "the timeout passed"
    CANCELLED = "the waiter was cancelled"
    CLOSED = "the client was closed"
    FAILED = "the request failed"


def log_wake(
    name: str, kind: Kind | None, reason: WakeReason, error: BaseException | None = None, *, own: bool = False
) -> None:
    """Log at DEBUG that a waiter for ``name`` goes on, with the ``error`` that it raises, if it does or if its request failed.

    With ``own``, that is the running task, which is named; else the client's claim, which asks for the lock again for all
    its tasks. ``kind`` is ``None`` for a client that watches a register.
    """
    if _wait_logger.isEnabledFor(logging.DEBUG):
        task = asyncio.current_task() if own else None
        waiter = "waiter" if task is None else f"task {task.get_name()}"
        extra = {"lock": name, "kind": "register" if kind is None else str(kind), "reason": reason.name}
        why = reason.value
        if error is not None:
            extra["error"] = type(error).__name__
            why = f"{why}: {type(error).__name__}: {error}"
        wait_log.debug("%s for %s (%s) wakes: %s", waiter, shorten(name), extra["kind"], why, extra=extra)


class Inbox(Generic[T]):
    """Wake the one waiter of a claim or register, and keep what the server pushed (a grant, for a claim).

    The waiter is a task in :meth:`wait` or a callback of :meth:`on_ready`. A wake-up without a waiter is kept for the next
    one. All methods run on the client's event loop.
    """

    __slots__ = ("_error", "_kind", "_name", "_reason", "_timer", "_waiter", "pushed")

    def __init__(self, name: str, kind: Kind | None = None) -> None:
        self.pushed: T | None = None
        """Pushed by the server, until :meth:`take` returns it."""
        self._kind = kind
        self._name = name
        self._reason: WakeReason | None = None
        """The first wake-up that no waiter has seen yet."""
        self._error: BaseException | None = None
        """The error that the waiter raises, for the log."""
        self._waiter: asyncio.Future[None] | Callable[[WakeReason], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, pushed: T, reason: WakeReason = WakeReason.GRANTED) -> None:
        """Store what the server pushed and wake the waiter."""
        self.pushed = pushed
        self.wake(reason)

    def wake(self, reason: WakeReason, error: BaseException | None = None) -> None:
        """Wake the waiter, or the next one if there is none now; ``error`` is what the waiter raises, for the log."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiter = self._waiter
        if isinstance(waiter, asyncio.Future):
            self._keep(reason, error)
            if not waiter.done():
                waiter.set_result(None)
        elif waiter is not None:
            self._waiter = None
            log_wake(self._name, self._kind, reason, error)
            waiter(reason)
        else:
            self._keep(reason, error)

    def _keep(self, reason: WakeReason, error: BaseException | None) -> None:
        if self._reason is None:
            self._reason, self._error = reason, error

    def wake_after(self, seconds: float, reason: WakeReason, error: BaseException | None = None) -> None:
        """Wake the waiter in ``seconds`` unless something else wakes it before; replaces an earlier timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.wake, reason, error)

    @property
    def woken(self) -> bool:
        """True if there is something that no waiter has seen."""
        return self._reason is not None or self.pushed is not None

    @property
    def reason(self) -> WakeReason:
        """The reason of the first wake-up that no waiter has seen; to be read if :attr:`woken`."""
        return self._reason or WakeReason.GRANTED

    async def wait(self, deadline: Deadline | None = None) -> WakeReason:
        """Wait for a wake-up, or until the deadline passes (:attr:`WakeReason.POLL`), and return the reason.

        Cancelling it changes nothing: a wake-up that came meanwhile is kept.
        """
        timer = None
        if deadline is not None and not self.woken:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(deadline.left(), self.wake, WakeReason.POLL)
        try:
            while not self.woken:
                self._waiter = waiter = asyncio.get_running_loop().create_future()
                await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
        reason, error = self.reason, self._error
        self._reason = self._error = None
        log_wake(self._name, self._kind, reason, error)
        return reason

    def on_ready(self, call: Callable[[WakeReason], None]) -> bool:
        """Have ``call`` called once, with the reason, at the next wake-up, without a task; return False if there is one already."""
        if self.woken:
            log_wake(self._name, self._kind, self.reason, self._error)
            return False
        self._waiter = call
        return True

    def take(self) -> T | None:
        """Return what was pushed, once, and forget earlier wake-ups and the callback.

        To be called before a request is sent: its answer covers whatever the wake-ups were about, and those that come while
        it is under way are kept for the next waiter.
        """
        pushed, self.pushed = self.pushed, None
        self._reason = self._error = None
        if not isinstance(self._waiter, asyncio.Future):
            self._waiter = None
        return pushed

    def close(self) -> None:
        """Forget the callback and the timer: the claim is given up. What was pushed stays."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not isinstance(self._waiter, asyncio.Future):
            self._waiter = None
