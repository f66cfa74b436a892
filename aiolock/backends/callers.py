"""Statements on connections of callers: a client's task sends them, and ends the one under way when its caller goes.

A caller that is cancelled, or whose time is over, gets the connection back in step: the next statement on it is the
caller's own, and must not receive the answer to one of the client.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiolock.clock import Deadline
from aiolock.core.backend import Settings
from aiolock.core.capabilities import CallerLock
from aiolock.core.tasks import TaskSet, end, interrupt_until_done
from aiolock.errors import BackendUnavailable

__all__ = ["CLOSED", "SHORT", "CallerConnection", "Callers", "ConnectionLock", "until_done"]

T = TypeVar("T")

QUICK = 0.1
"""Seconds in which a statement that does not wait for others ends by itself."""
GIVE_UP = 2.0
"""Seconds after which the connection of such a statement is closed."""
SHARE = 4
"""A call that has to end in time keeps one of so many parts of it, at most :data:`GIVE_UP`, to end the statement under way."""
SHORT = 0.1
"""Seconds; a wait that the server ends sooner is no wait."""
CLOSED = "this client was closed while it waited for a lock: connect anew"


class Callers:
    """The connections of callers on which a statement of one client is under way."""

    def __init__(self) -> None:
        self.present: set[CallerConnection] = set()
        self.closed = False
        self.tasks: TaskSet = TaskSet(awaited=True)
        """Tasks that run statements; they go on when their callers are cancelled."""

    async def aclose(self, timeout: float) -> None:
        """End the statements under way, so that the callers have their connections back.

        Connections that are not back within ``timeout`` seconds are closed. Cancelling it ends the wait only.
        """
        self.closed = True
        if self.present:
            await asyncio.wait([caller.leave() for caller in self.present], timeout=timeout)
        await end(self.tasks)


class CallerConnection(ABC):
    """A connection of a caller, and the statement of this client that is under way on it.

    The statement is sent by a task of the client, because cancelling one inside a driver may close the connection, or
    leave its transaction failed. A caller that is cancelled has it ended and stays until the server has answered, however
    often it is cancelled. That takes milliseconds; if the server does not end the statement within :data:`GIVE_UP`
    seconds, or those of :meth:`within`, the connection is closed.
    """

    def __init__(
        self,
        callers: Callers,
        connection: Any,
        address: str,
    ) -> None:
        self.connection = connection
        self.blocks = False
        """The statement under way waits for others."""
        self.leaving = False
        """The caller goes: no more is to be sent."""
        self._timeout = GIVE_UP
        """Seconds within which the statement under way has to end then."""
        self._callers = callers
        self._address = address
        self._closed = False
        """True if the connection had to be closed."""
        self._task: asyncio.Task[Any] | None = None
        self._ending: asyncio.Task[None] | None = None

    @abstractmethod
    async def interrupt(self, left: float) -> None:
        """Have the server end the statement under way, within ``left`` seconds; called again while it goes on.

        Errors of this library, and :class:`TimeoutError`, are ignored. After cancelling it the server may have received it.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection at once."""

    async def within(self, timeout: float, work: Coroutine[Any, Any, T]) -> T:
        """Do the same as :meth:`run`, and end within ``timeout`` seconds also where the server does not end the statement."""
        self._timeout = min(GIVE_UP, timeout / SHARE)
        clock = asyncio.get_running_loop().time
        return await self.run(work, Deadline.after(timeout - self._timeout, clock))

    async def run(self, work: Coroutine[Any, Any, T], deadline: Deadline) -> T:
        """Return the result of ``work``, which sends statements; at the deadline end the one under way.

        Cancelling it ends the statement as well, and takes that long. Raises :class:`TimeoutError` if it was too late to
        send any.
        """
        callers = self._callers
        if callers.closed or deadline.passed():
            work.close()
            raise RuntimeError(CLOSED) if callers.closed else TimeoutError
        self.leaving, self._ending = False, None
        self._task = task = callers.tasks.spawn(work, "aiolock-caller-lock")
        callers.present.add(self)
        interruption: BaseException | None = None
        try:
            await asyncio.wait([task], timeout=deadline.left())
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is raised when the connection is in step
            interruption = error
        if not task.done() or self._ending is not None:
            # Of several the first is raised; none is lost, because the task counts its cancellations.
            interruption = await until_done(self.leave(), interruption)
        callers.present.discard(self)
        if interruption is not None:
            raise interruption
        if self._closed:
            raise BackendUnavailable(
                f"{self._address}: the statement under way could not be ended, so your connection was closed, and the server "
                "rolls its transaction back"
            )
        if task.cancelled():
            raise RuntimeError(CLOSED)
        return task.result()

    def leave(self) -> asyncio.Task[None]:
        """End the statement under way; the task that does it ends in bounded time."""
        assert self._task is not None  # noqa: S101 - it is there while the caller is present
        self.leaving = True
        if self._ending is None:
            self._ending = self._callers.tasks.spawn(self._end(self._task), "aiolock-caller-lock-end")
        return self._ending

    async def _end(self, task: asyncio.Task[Any]) -> None:
        deadline = Deadline.after(self._timeout, asyncio.get_running_loop().time)
        try:
            if not self.blocks:
                await asyncio.wait([task], timeout=QUICK)
            # Before the session is known, it does not wait for others. The next try comes soon.
            await interrupt_until_done(task, self.interrupt, deadline)
        finally:
            # Also if the client's tasks are ended in the meantime.
            if not task.done():
                self._closed = True
                self.close()
                # It ends with the error of the connection, which a driver keeps in a future.
                await asyncio.wait([task], timeout=QUICK)
                task.cancel()
        await asyncio.wait([task])


async def until_done(task: asyncio.Task[Any], first: BaseException | None = None) -> BaseException | None:
    """Wait until ``task`` has ended, also after being cancelled; return ``first``, else the first exception in between."""
    while not task.done():
        try:
            await asyncio.wait([task])
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the caller raises it
            first = first or error
    return first


class ConnectionLock(CallerLock):
    """A lock that is taken, and verified, by statements on the caller's connection."""

    def __init__(self, callers: Callers, address: str, settings: Settings) -> None:
        self._callers = callers
        self._address = address
        self._settings = settings

    async def take(self, timeout: float | None, mark: str = "") -> bool:
        """Take the lock in the transaction."""
        limit = self._settings.command_timeout if timeout == 0 else timeout
        try:
            return await self._take(Deadline.after(limit, self._settings.clock), mark, wait=timeout != 0)
        except TimeoutError as error:
            if timeout == 0:
                raise self._no_answer() from error
            return False

    @abstractmethod
    async def _take(self, deadline: Deadline, mark: str, *, wait: bool) -> bool:
        """Take the lock; raises :class:`TimeoutError` at the deadline."""

    async def keeps(self, mark: str) -> bool:
        """Test whether the mark is there, and remove it."""
        if self._callers.closed:
            # Nothing can be asked any more; the transaction is the caller's.
            return True
        deadline = Deadline.after(self._settings.command_timeout, self._settings.clock)
        try:
            return await self._keeps(mark, deadline)
        except TimeoutError as error:
            raise self._no_answer() from error

    @abstractmethod
    async def _keeps(self, mark: str, deadline: Deadline) -> bool:
        """Test whether the mark is there; raises :class:`TimeoutError` at the deadline."""

    def _no_answer(self) -> BackendUnavailable:
        return BackendUnavailable(f"{self._address}: no answer within {self._settings.command_timeout:g} s")
