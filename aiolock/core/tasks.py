"""Tasks of the library: start and track them, pause between tries, and settle futures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from random import Random
from typing import Any, TypeVar

from aiolock.clock import Deadline
from aiolock.core.logs import Log, get_logger
from aiolock.errors import LockError

__all__ = ["Backoff", "TaskSet", "end", "interrupt_until_done", "reject", "settle", "start"]

log: Log = get_logger("aiolock")

T = TypeVar("T")

SOON = 0.01
"""Seconds after which a statement that was interrupted, and goes on, is interrupted once more; the pauses double."""
AGAIN = 0.2
"""The longest of these pauses, in seconds."""


def start(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Create a task of the running loop, whose first step comes after the present one of the caller.

    The application's task factory takes no part: ``asyncio.eager_task_factory`` would run ``work`` before the caller has
    stored the task, or what the task waits for.
    """
    return asyncio.Task(work, loop=asyncio.get_running_loop(), name=name)


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all of them have ended, whatever they raise."""
    some = list(tasks)
    for task in some:
        task.cancel()
    if some:
        await asyncio.wait(some)


class TaskSet(set[asyncio.Task[Any]]):
    """The tasks of one owner, kept until they end.

    :param awaited: callers wait for these tasks and get the error that ends one, if they are still there; else it is logged.
    """

    def __init__(self, *, awaited: bool = False) -> None:
        super().__init__()
        self._awaited = awaited

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task and keep it."""
        task = start(work, name)
        self.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._awaited:
            extra = {"task": task.get_name()}
            log.error("%s ended with %r", task.get_name(), error, exc_info=error, extra=extra)


class Backoff:
    """Pauses between tries that double up to a limit, each shortened by chance to between half of it and all."""

    __slots__ = ("_first", "_limit", "_next", "_random")

    def __init__(self, random: Random, first: float = 0.02, limit: float = 1.0) -> None:
        self._random = random
        self._first = self._next = first
        self._limit = limit

    def next(self, least: float = 0.0, most: float = math.inf, *, unit: float = 1.0) -> float:
        """Return the seconds of the next pause, counted in units of ``unit`` seconds; ``least`` and ``most`` bound it before it is shortened."""
        pause, self._next = self._next, min(2 * self._next, self._limit)
        return min(max(pause * unit, least), most) * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with the first pause again, after a success."""
        self._next = self._first

    async def pause(self) -> None:
        """Sleep for the next pause; cancelling it ends the sleep."""
        await asyncio.sleep(self.next())


async def interrupt_until_done(
    statement: asyncio.Future[Any], interrupt: Callable[[float], Awaitable[None]], deadline: Deadline
) -> bool:
    """Have the server end a statement under way; return whether it was ``done`` by the deadline.

    ``interrupt`` gets the seconds that are left, and is called again while the statement goes on: it may have come before
    the statement did. Its errors of this library, and :class:`TimeoutError`, are ignored. Cancelling it ends the interrupting.
    """
    backoff = Backoff(Random(), SOON, AGAIN)  # noqa: S311 - for pauses
    while not statement.done() and (left := deadline.left()):
        with suppress(LockError, TimeoutError):
            await interrupt(left)
        await asyncio.wait([statement], timeout=min(backoff.next(), left))
    return statement.done()


def settle(future: asyncio.Future[T], result: T) -> None:
    """Set a result, unless the future is done."""
    if not future.done():
        future.set_result(result)


def reject(future: asyncio.Future[T], error: BaseException) -> None:
    """Set an exception, unless the future is done; asyncio does not warn if no task reads it."""
    if not future.done():
        future.set_exception(error)
        future.exception()
