"""Statements of ours on a connection of the caller's, which gets it back in step.

A statement is sent by a task of the client's, because cancelling one inside the driver closes the connection. Whoever waits
for it and is cancelled has it ended by KILL QUERY and stays until both have been answered, however often he is
cancelled: what comes next on that connection is the caller's, and nothing of ours may be on its way to it. That takes
milliseconds; if the server does not end the statement within two seconds, the connection is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from aiolock.backends.mysql.failures import DENIED, code
from aiolock.backends.mysql.place import GIVE_UP, KILL_AGAIN, SOON
from aiolock.errors import BackendRefused, BackendUnavailable, LockError

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["Guest", "Guests"]

T = TypeVar("T")

QUICK = 0.1
"""Seconds in which a statement ends by itself if it waits for nobody."""
CLOSED = "this client was closed while it waited for a lock: connect anew"


class Guests:
    """All on whose connections something of one client's is under way."""

    def __init__(self) -> None:
        self.present: set[Guest] = set()
        self.closed = False
        self.server = ""
        """What a server is asked to say which one it is, once that is known."""

    async def aclose(self, timeout: float) -> None:
        """End what is under way, so that the callers have their connections back; takes at most ``timeout`` seconds."""
        self.closed = True
        if self.present:
            await asyncio.wait([guest.leave() for guest in self.present], timeout=timeout)


class Guest:
    """Somebody else's connection, and the statement of ours that is under way on it."""

    def __init__(self, backend: MySQLBackend, connection: Any) -> None:
        self.connection = connection
        self.there = ""
        """The server on which it was found, once it has been."""
        self.number = 0
        """What that server calls it."""
        self.blocks = False
        """Whether the statement under way waits for others."""
        self.leaving = False
        """Whether the caller goes: nothing more is to be sent."""
        self.closed = False
        """Whether we had to close it."""
        self._backend = backend
        self._task: asyncio.Task[Any] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def run(self, work: Coroutine[Any, Any, T], late: float | None) -> T:
        """What ``work`` returns, which sends statements; at ``late``, by the loop's clock, the one under way is ended.

        Cancelling it ends the statement as well, and takes that long. Raises :class:`TimeoutError` if nothing was sent
        any more.
        """
        guests, loop = self._backend.guests, asyncio.get_running_loop()
        left = None if late is None else late - loop.time()
        if guests.closed or (left is not None and left <= 0):
            work.close()
            raise RuntimeError(CLOSED) if guests.closed else TimeoutError
        self.leaving, self._ending = False, None
        self._task = task = self._backend.sessions.spawn(work, "aiolock-mysql-loan")
        guests.present.add(self)
        interruption: BaseException | None = None
        try:
            await asyncio.wait([task], timeout=left)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is raised when the connection is in step
            interruption = error
        if not task.done() or self._ending is not None:
            # Of several the first is raised; none is lost, because the task counts its cancellations.
            interruption = await _patiently(self.leave(), interruption)
        guests.present.discard(self)
        if interruption is not None:
            raise interruption
        if self.closed:
            raise BackendUnavailable(
                f"{self._backend.address}: the wait for the lock could not be ended within {GIVE_UP:g} s, so your "
                "connection was closed, and the server rolls its transaction back"
            )
        if task.cancelled():
            raise RuntimeError(CLOSED)
        result: T = task.result()
        return result

    def leave(self) -> asyncio.Task[None]:
        """End what is under way; the task that does it ends in bounded time."""
        assert self._task is not None  # noqa: S101 - who is present has one
        self.leaving = True
        if self._ending is None:
            ending = self._end(self._task)
            self._ending = self._backend.sessions.spawn(ending, "aiolock-mysql-loan-end")
        return self._ending

    async def _end(self, task: asyncio.Task[Any]) -> None:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + GIVE_UP
        try:
            if not self.blocks:
                await asyncio.wait([task], timeout=QUICK)
            pause = SOON
            while not task.done() and (left := give_up - loop.time()) > 0:
                await self._kill(left)
                await asyncio.wait([task], timeout=min(pause, left))
                pause = min(2 * pause, KILL_AGAIN)
        finally:
            # Also if the client's tasks are ended in the meantime.
            if not task.done():
                self.closed = True
                self.connection.close()
                task.cancel()
        await asyncio.wait([task])

    async def _kill(self, left: float) -> None:
        """Send KILL QUERY and await its answer, if there is anybody to ask; the next try comes soon."""
        if not self.number:
            # Before it has told its number, it waits for nobody.
            return
        try:
            async with asyncio.timeout(left):
                control = await self._backend.sessions.control()
                await control.run(self._packet(), left)
        except (LockError, TimeoutError):
            return

    def _packet(self) -> str:
        statements = self._backend.statements
        server = self._backend.guests.server
        return statements("loan_end", server=server, there=self.there, number=self.number)

    async def ready(self, late: float | None) -> None:
        """See that a wait on it could be ended, while none is under way; raise if not.

        By ending nothing, which does no harm: rights and numbers are checked all the same. Cancelling it takes until that
        is answered. Raises :class:`TimeoutError` at ``late``.
        """
        backend = self._backend
        try:
            async with asyncio.timeout_at(late):
                control = await backend.within(backend.sessions.control())
        except LockError as error:
            raise BackendUnavailable(
                self._unable(f"the client has no connection for that: {error}")
            ) from error
        trial = backend.sessions.spawn(control.run(self._packet(), GIVE_UP), "aiolock-mysql-loan-trial")
        if (interruption := await _patiently(trial)) is not None:
            raise interruption
        if trial.cancelled():
            raise RuntimeError(CLOSED)
        try:
            trial.result()
        except LockError as error:
            if code(error.__cause__) in DENIED:
                raise BackendRefused(
                    self._unable(
                        "your connection has another account than the client: let both have the same one, "
                        "or only try, with try_acquire()"
                    )
                ) from error
            raise BackendUnavailable(self._unable(str(error))) from error

    def _unable(self, why: str) -> str:
        return f"{self._backend.address}: the lock is not free, and the wait for it could not be ended, because {why}"


async def _patiently(task: asyncio.Task[Any], first: BaseException | None = None) -> BaseException | None:
    """Wait until ``task`` has ended, whatever comes in between: the first of it, or ``first``."""
    while not task.done():
        try:
            await asyncio.wait([task])
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whoever waits raises it
            first = first or error
    return first
