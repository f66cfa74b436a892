"""A lock in the caller's transaction: a row lock that is taken on the caller's connection and ends with the transaction.

The row is made beforehand on a connection of the client. On the caller's, a first statement checks that it is to the same
server and has a transaction, and then the row is locked without waiting. Only if it is locked, it is waited for, and only
if that wait could be ended again: a caller who is cancelled, or whose time is over, gets the connection back in step.

A block puts a savepoint behind the lock. Whatever takes the lock from the transaction (its end, also an implicit one; going
back to an earlier savepoint) takes the savepoint as well, so the end of the block finds out.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any

from aiomysql.cursors import Cursor

from aiolock.backends.callers import CLOSED, SHORT, CallerConnection, CallerLoan, Callers, patiently
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
from aiolock.backends.mysql.row_mode import RowMode
from aiolock.core.backend import Request
from aiolock.errors import BackendRefused, BackendUnavailable, ConfigError, LockError, UnsafeBackend, shorten
from aiolock.types import LockInfo

__all__ = ["MySQLCallers", "MySQLConnection", "RowLoan"]

NEEDED = ("cursor", "close", "thread_id", "get_autocommit", "get_transaction_status")
MISSES = 3
"""Number of times in a row that a row which was just made may be missing."""

# --- the caller's connection


class MySQLCallers(Callers):
    """The connections of callers, and the expression by which a server identifies itself."""

    def __init__(self) -> None:
        super().__init__()
        self.server = ""
        """Empty until it is known."""


class MySQLConnection(CallerConnection):
    """A connection of a caller, whose statement is ended by KILL QUERY on a connection of the client."""

    def __init__(self, context: Context, callers: Callers, connection: Any, kill: str = "") -> None:
        super().__init__(callers, connection, context.address)
        self.kill = kill
        """Ends the statement under way by KILL QUERY; empty until the server and the number of the session are known."""
        self._context = context

    async def interrupt(self, left: float) -> None:
        """Send KILL QUERY on the control session."""
        async with asyncio.timeout(left):
            if self.kill:
                await self._end_statement(await self._context.sessions.control())

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

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
        if (interruption := await patiently(trial)) is not None:
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


# --- the lock


class Answer(Enum):
    """The result of asking for the row."""

    TAKEN = "the transaction has it"
    BUSY = "another transaction has it, or the server ended the wait for it"
    MISSING = "there is no such row"


class RowLoan(CallerLoan):
    """One row, and a transaction of the caller that is to lock it."""

    def __init__(
        self, context: Context, mode: RowMode, callers: MySQLCallers, request: Request, connection: Any
    ) -> None:
        if not all(callable(getattr(connection, name, None)) for name in NEEDED):
            raise ConfigError(
                "connection must be a connection of aiomysql's on which you began a transaction, "
                f"not {shorten(connection)}"
            )
        super().__init__(callers, context.address, context.timeout)
        self._context, self._mode, self._rows, self._known = context, mode, mode.rows, callers
        self._request, self._connection = request, connection
        self._key = ""
        self._server = self._identity = ""
        """The name and the identity of the client's server."""
        self._kill = ""
        """Ends a statement in the session that has the lock, by KILL QUERY."""

    async def inspect(self) -> LockInfo:
        """Return the state of the row: it is that of the row mode's other locks."""
        request = self._request
        return await self._context.within(self._mode.inspect(request.name, request.kind.family))

    async def _keeps(self, mark: str, late: float | None) -> bool:
        """Release the savepoint, if it is there."""
        caller = MySQLConnection(self._context, self._callers, self._connection, self._kill)
        return await caller.run(self._look_back(mark), late)

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
        """Lock the row."""
        context = self._context
        self._key = context.key(self._request.name, self._request.kind.family)
        if context.site.rolls_back:
            raise UnsafeBackend(
                f"{context.address}: innodb_rollback_on_timeout is on, so the server ends your whole transaction when a "
                "lock is not to be had: switch it off, or lock before you begin the transaction, without connection="
            )
        caller = MySQLConnection(context, self._callers, self._connection)
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
        context, callers = self._context, self._known
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

    async def _lock(self, caller: MySQLConnection, mark: str) -> Answer:
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
                await cursor.execute(statements("loan_look", server=self._known.server))
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

    def _check(self, caller: MySQLConnection, number: int, identity: str, name: str, charset: str) -> None:
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
        words = {"server": self._known.server, "there": identity, "number": number}
        caller.kill = context.statements("loan_end", **words)

    def _elsewhere(self, name: str) -> ConfigError:
        return ConfigError(
            f"connection must be to the server that the client is connected to: that is {self._server} "
            f"({self._context.address}), and this one is to {name}, where a lock would exclude no other client"
        )


def _decoded(value: Any) -> Any:
    """Return a value of an answer; in the character set `binary` its texts are bytes."""
    return value.decode() if isinstance(value, bytes) else value
