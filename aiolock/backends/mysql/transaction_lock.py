"""A lock in the caller's transaction: a row lock that is taken on the caller's connection and ends with the transaction.

The row is made beforehand on a connection of the client. On the caller's, a first statement checks that it is to the same
server and has a transaction, and then the row is locked without waiting. Only if it is locked, it is waited for, and only
if that wait could be ended again: a caller who is cancelled, or whose time is over, gets the connection back in step.

A block puts a savepoint behind the lock. Whatever takes the lock from the transaction (its end, also an implicit one; going
back to an earlier savepoint) takes the savepoint as well, so the end of the block finds out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from enum import Enum
from typing import Any, TypeVar

from aiomysql.cursors import Cursor

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.context import RETRY, UNDONE, Context, quote
from aiolock.backends.mysql.errors import (
    DENIED,
    INTERRUPTED,
    NO_SUCH_SAVEPOINT,
    NO_SUCH_VARIABLE,
    NOT_NOW,
    OUTDATED,
    XA_ENDED,
    Outdated,
    code,
    deadly,
    translate,
)
from aiolock.backends.mysql.queue import GIVE_UP, KILL_AGAIN, SOON
from aiolock.backends.mysql.row_mode import Rows
from aiolock.clock import Deadline
from aiolock.core.backend import Request
from aiolock.core.capabilities import Loan
from aiolock.errors import BackendRefused, BackendUnavailable, ConfigError, LockError, UnsafeBackend, shorten

__all__ = ["CallerConnection", "CallerConnections", "RowLoan"]

T = TypeVar("T")

QUICK = 0.1
"""Seconds in which a statement that does not wait ends by itself."""
CLOSED = "this client was closed while it waited for a lock: connect anew"
NEEDED = ("cursor", "close", "thread_id", "get_autocommit", "get_transaction_status")
SHORT = 0.1
"""Seconds; a wait that the server ends sooner is no wait."""
MISSES = 3
"""Number of times in a row that a row which was just made may be missing."""

# --- the caller's connection


class CallerConnections:
    """The connections of callers on which a statement of one client is under way."""

    def __init__(self) -> None:
        self.present: set[CallerConnection] = set()
        self.closed = False
        self.server = ""
        """The expression by which a server identifies itself, once it is known."""

    async def aclose(self, timeout: float) -> None:
        """End the statements under way, so that the callers have their connections back; takes at most ``timeout`` seconds."""
        self.closed = True
        if self.present:
            await asyncio.wait([caller.leave() for caller in self.present], timeout=timeout)


class CallerConnection:
    """A connection of a caller, and the statement of this client that is under way on it.

    The statement is sent by a task of the client, because cancelling one inside the driver closes the connection. A caller
    that is cancelled has it ended by KILL QUERY and stays until both have been answered, however often it is cancelled:
    the next statement on that connection is the caller's. That takes milliseconds; if the server does not end the
    statement within :data:`GIVE_UP` seconds, the connection is closed.
    """

    def __init__(self, context: Context, callers: CallerConnections, connection: Any, kill: str = "") -> None:
        self.connection = connection
        self.kill = kill
        """Ends the statement under way by KILL QUERY; empty until the server and the number of the session are known."""
        self.blocks = False
        """The statement under way waits for others."""
        self.leaving = False
        """The caller goes: no more is to be sent."""
        self._closed = False
        """It had to be closed."""
        self._context = context
        self._callers = callers
        self._task: asyncio.Task[Any] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def run(self, work: Coroutine[Any, Any, T], late: float | None) -> T:
        """Return the result of ``work``, which sends statements; at ``late``, by the loop's clock, end the one under way.

        Cancelling it ends the statement as well, and takes that long. Raises :class:`TimeoutError` if it was too late to
        send any.
        """
        callers = self._callers
        left = None if late is None else late - asyncio.get_running_loop().time()
        if callers.closed or (left is not None and left <= 0):
            work.close()
            raise RuntimeError(CLOSED) if callers.closed else TimeoutError
        self.leaving, self._ending = False, None
        self._task = task = self._context.sessions.spawn(work, "aiolock-mysql-loan")
        callers.present.add(self)
        interruption: BaseException | None = None
        try:
            await asyncio.wait([task], timeout=left)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is raised when the connection is in step
            interruption = error
        if not task.done() or self._ending is not None:
            # Of several the first is raised; none is lost, because the task counts its cancellations.
            interruption = await _patiently(self.leave(), interruption)
        callers.present.discard(self)
        if interruption is not None:
            raise interruption
        if self._closed:
            raise BackendUnavailable(
                f"{self._context.address}: the wait for the lock could not be ended within {GIVE_UP:g} s, so your "
                "connection was closed, and the server rolls its transaction back"
            )
        if task.cancelled():
            raise RuntimeError(CLOSED)
        return task.result()

    def leave(self) -> asyncio.Task[None]:
        """End the statement under way; the task that does it ends in bounded time."""
        assert self._task is not None  # noqa: S101 - it is there while the caller is present
        self.leaving = True
        if self._ending is None:
            ending = self._end(self._task)
            self._ending = self._context.sessions.spawn(ending, "aiolock-mysql-loan-end")
        return self._ending

    async def _end(self, task: asyncio.Task[Any]) -> None:
        sessions, deadline, pause = self._context.sessions, Deadline.after(GIVE_UP, self._context.clock), SOON
        try:
            if not self.blocks:
                await asyncio.wait([task], timeout=QUICK)
            while not task.done() and (left := deadline.left()):
                # Before its number is known, it does not wait for others. The next try comes soon.
                with suppress(LockError, TimeoutError):
                    async with asyncio.timeout(left):
                        if self.kill:
                            await self._end_statement(await sessions.control())
                await asyncio.wait([task], timeout=min(pause, left))
                pause = min(2 * pause, KILL_AGAIN)
        finally:
            # Also if the client's tasks are ended in the meantime.
            if not task.done():
                self._closed = True
                self.connection.close()
                task.cancel()
        await asyncio.wait([task])

    async def _end_statement(self, control: Session) -> None:
        await control.run(self.kill)

    async def ready(self, late: float | None) -> None:
        """Raise if a wait on it could not be ended; to be called while none is under way.

        The trial ends nothing, which does no harm: rights and numbers are checked all the same. Cancelling it takes until the
        trial is answered. Raises :class:`TimeoutError` at ``late``.
        """
        context = self._context
        unable = f"{context.address}: the lock is not free, and the wait for it could not be ended, because "
        try:
            async with asyncio.timeout_at(late):
                control = await context.within(context.sessions.control())
        except LockError as error:
            raise BackendUnavailable(f"{unable}the client has no connection for that: {error}") from error
        trial = context.sessions.spawn(
            context.within(self._end_statement(control)), "aiolock-mysql-loan-trial"
        )
        if (interruption := await _patiently(trial)) is not None:
            raise interruption
        if trial.cancelled():
            raise RuntimeError(CLOSED)
        try:
            trial.result()
        except LockError as error:
            if code(error.__cause__) in DENIED:
                raise BackendRefused(
                    f"{unable}your connection has another account than the client: let both have the same one, or only try, "
                    "with try_acquire()"
                ) from error
            raise BackendUnavailable(f"{unable}{error}") from error


async def _patiently(task: asyncio.Task[Any], first: BaseException | None = None) -> BaseException | None:
    """Wait until ``task`` has ended, whatever comes in between; return the first of it, or ``first``."""
    while not task.done():
        try:
            await asyncio.wait([task])
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the caller raises it
            first = first or error
    return first


# --- the lock


class Answer(Enum):
    """The result of asking for the row."""

    TAKEN = "the transaction has it"
    BUSY = "another transaction has it, or the server ended the wait for it"
    MISSING = "there is no such row"


class RowLoan(Loan):
    """One row, and a transaction of the caller that is to lock it."""

    def __init__(
        self, context: Context, rows: Rows, callers: CallerConnections, request: Request, connection: Any
    ) -> None:
        if not all(callable(getattr(connection, name, None)) for name in NEEDED):
            raise ConfigError(
                "connection must be a connection of aiomysql's on which you began a transaction, "
                f"not {shorten(connection)}"
            )
        self._context, self._rows, self._callers = context, rows, callers
        self._request, self._connection = request, connection
        self._key = ""
        self._server = self._identity = ""
        """The name and the identity of the client's server."""
        self._kill = ""
        """Ends a statement in the session that has the lock, by KILL QUERY."""

    async def take(self, timeout: float | None, mark: str = "") -> bool:
        """Lock the row in the transaction."""
        context = self._context
        self._key = context.key(self._request.name, self._request.kind.family)
        if context.site.rolls_back:
            raise UnsafeBackend(
                f"{context.address}: innodb_rollback_on_timeout is on, so the server ends your whole transaction when a "
                "lock is not to be had: switch it off, or lock before you begin the transaction, without connection="
            )
        patience = context.timeout if timeout == 0 else timeout
        late = None if patience is None else asyncio.get_running_loop().time() + patience
        try:
            return await self._take(late, mark, wait=timeout != 0)
        except TimeoutError as error:
            if timeout == 0:
                raise self._no_answer(context.timeout) from error
            return False

    async def keeps(self, mark: str) -> bool:
        """Release the savepoint, if it is there."""
        context = self._context
        if self._callers.closed:
            # Nothing can be asked any more; the transaction is the caller's.
            return True
        caller = CallerConnection(context, self._callers, self._connection, self._kill)
        late = asyncio.get_running_loop().time() + context.timeout
        try:
            return await caller.run(self._look_back(mark), late)
        except TimeoutError as error:
            raise self._no_answer(context.timeout) from error

    def _no_answer(self, seconds: float) -> BackendUnavailable:
        return BackendUnavailable(f"{self._context.address}: no answer within {seconds:g} s")

    async def _look_back(self, mark: str) -> bool:
        try:
            async with self._connection.cursor(Cursor) as cursor:
                await cursor.execute(self._context.statements("loan_check", mark=mark))
        except RuntimeError:
            raise
        except Exception as error:
            number = code(error)
            if number in NO_SUCH_SAVEPOINT | XA_ENDED or deadly(error):
                return number in XA_ENDED
            raise translate(error, self._context.address) from error
        return True

    async def _take(self, late: float | None, mark: str, *, wait: bool) -> bool:
        """Lock the row; raises :class:`TimeoutError` at ``late``, by the loop's clock."""
        context = self._context
        caller = CallerConnection(context, self._callers, self._connection)
        async with asyncio.timeout_at(late):
            await context.within(self._prepare())
        misses = 0
        while True:
            asked = context.clock()
            answer = await caller.run(self._lock(caller, mark), late)
            if answer is Answer.TAKEN:
                self._kill = caller.kill
                return True
            if answer is Answer.MISSING:
                # It was deleted just now.
                misses += 1
                if misses == MISSES:
                    raise BackendRefused(
                        f"{context.address}: the row of lock {shorten(self._request.name)} is there, but your connection does "
                        "not find it: look for a temporary table of that name, or for a program that deletes rows"
                    )
                self._rows.forget(self._key)
                async with asyncio.timeout_at(late):
                    await context.pause(UNDONE)
                    await context.within(self._rows.make(self._request, self._key))
            elif not wait:
                return False
            elif not caller.blocks:
                await caller.ready(late)
                caller.blocks = True
            elif context.clock() - asked < SHORT:
                async with asyncio.timeout_at(late):
                    await context.pause(RETRY)

    async def _prepare(self) -> None:
        """Make the row if it is missing, and find out which server has it."""
        context, callers = self._context, self._callers
        statements = context.statements
        if not callers.server:
            [own] = await context.execute(statements("own_numbers"))
            callers.server = statements("server", numbers="".join(f", @@{name}" for name, _ in own.rows))
        # Asked each time: FOR UPDATE on a missing row may lock its place, and then it cannot be made.
        packet = statements("loan_row", id=quote(self._key), server=callers.server)
        try:
            [found], [where] = (answer.rows for answer in await context.execute(packet))
        except BackendRefused as error:
            if code(error.__cause__) not in NO_SUCH_VARIABLE:
                raise
            callers.server = ""
            again = f"{context.address}: this is another server than before: try again"
            raise BackendUnavailable(again) from error
        if not found[0]:
            self._rows.forget(self._key)
            await self._rows.make(self._request, self._key)
        self._identity, self._server = map(str, where)

    async def _lock(self, caller: CallerConnection, mark: str) -> Answer:
        """Check the connection, and lock; run by a task of the client."""
        statements = self._context.statements
        statement = (
            self._rows.blocking(self._key, self._request.label.encode().hex())
            if caller.blocks
            else statements("row_free", id=quote(self._key))
        )
        try:
            # Of this kind, whichever is the connection's own: rows are read at once, and are tuples.
            async with self._connection.cursor(Cursor) as cursor:
                await cursor.execute(statements("loan_look", server=self._callers.server))
                self._check(caller, *map(_decoded, await cursor.fetchone()))
                if caller.leaving:
                    return Answer.BUSY
                await cursor.execute(statement)
                if await cursor.fetchone() is None:
                    return Answer.MISSING
                if mark:
                    await cursor.execute(statements("loan_mark", mark=mark))
                return Answer.TAKEN
        except (LockError, RuntimeError):
            raise
        except Exception as error:
            number = code(error)
            if number in NOT_NOW | INTERRUPTED:
                return Answer.BUSY
            if number in NO_SUCH_VARIABLE:
                raise self._elsewhere("one of another version") from error
            if number in OUTDATED:
                raise Outdated([self._request.name]) from error
            raise translate(error, self._context.address) from error

    def _check(self, caller: CallerConnection, number: int, identity: str, name: str, charset: str) -> None:
        """Raise unless a lock in this transaction excludes the other clients."""
        context, connection = self._context, self._connection
        if identity != self._identity:
            raise self._elsewhere(name)
        if number != connection.thread_id():
            raise UnsafeBackend(
                f"{context.address}: a proxy that has its own connection numbers stands between your connection "
                "and the server, and may swap the session that the transaction lives in: connect to the server itself"
            )
        encoding = str(getattr(connection, "encoding", "")).lower().replace("-", "")
        if not context.statements.ascii and not (charset.startswith("utf8") and encoding == "utf8"):
            raise UnsafeBackend(
                f"{context.address}: the name of the database has letters beyond ASCII, which your connection would "
                f"not send as they are (its character set is {charset}): use charset='utf8mb4' and SET NAMES utf8mb4"
            )
        if connection.get_autocommit() and not connection.get_transaction_status():
            raise RuntimeError(
                "no transaction is open on this connection, so it cannot hold a lock: "
                "begin one first (await connection.begin())"
            )
        words = {"server": self._callers.server, "there": identity, "number": number}
        caller.kill = context.statements("loan_end", **words)

    def _elsewhere(self, name: str) -> ConfigError:
        return ConfigError(
            f"connection must be to the server that the client is connected to: that is {self._server} "
            f"({self._context.address}), and this one is to {name}, where a lock would exclude no other client"
        )


def _decoded(value: Any) -> Any:
    """Return a value of an answer; in the character set `binary` its texts are bytes."""
    return value.decode() if isinstance(value, bytes) else value
