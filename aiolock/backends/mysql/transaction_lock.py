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

from aiolock.backends.callers import SHORT, Callers, ConnectionLock
from aiolock.backends.mysql.caller import MySQLConnection, ServerIdentity, ask_identity, check_connection
from aiolock.backends.mysql.context import RETRY, UNDONE, Context, quote
from aiolock.backends.mysql.errors import (
    INTERRUPTED,
    NO_SUCH_SAVEPOINT,
    NOT_NOW,
    XA_ENDED,
    code,
    deadly,
    translate,
)
from aiolock.backends.mysql.row_mode import RowMode, make_row
from aiolock.clock import Deadline
from aiolock.core.backend import Request
from aiolock.errors import BackendRefused, LockError, UnsafeBackend, shorten
from aiolock.types import LockInfo

__all__ = ["CallerRowLock"]

MISSES = 3
"""Number of times in a row that a row which was just made may be missing."""


class RowAnswer(Enum):
    """The result of asking for the row."""

    TAKEN = "the transaction has it"
    BUSY = "another transaction has it, or the server ended the wait for it"
    MISSING = "there is no such row"


class CallerRowLock(ConnectionLock):
    """One row, and a transaction of the caller that is to lock it."""

    def __init__(
        self, context: Context, mode: RowMode, callers: Callers, request: Request, connection: Any
    ) -> None:
        check_connection(connection)
        super().__init__(callers, context.address, context.settings)
        self._context, self._mode, self._request, self._connection = context, mode, request, connection
        self._key = ""
        self._there = ServerIdentity()
        self._kill = ""
        """Ends a statement in the session that has the lock, by KILL QUERY."""

    async def inspect(self) -> LockInfo:
        """Return the state of the row: it is that of the row mode's other locks."""
        request = self._request
        return await self._context.within(self._mode.inspect(request.name, request.kind.family))

    async def _keeps(self, mark: str, deadline: Deadline) -> bool:
        """Release the savepoint, if it is there."""
        caller = MySQLConnection(self._context, self._callers, self._connection, self._kill)
        return await caller.run(self._find_mark(mark), deadline)

    async def _find_mark(self, mark: str) -> bool:
        try:
            async with self._connection.cursor(Cursor) as cursor:
                await cursor.execute(self._context.statements("caller_check", mark=mark))
        except RuntimeError:
            raise
        except Exception as error:
            number = code(error)
            if number in NO_SUCH_SAVEPOINT | XA_ENDED or deadly(error):
                return number in XA_ENDED
            raise translate(error, self._context.address) from error
        return True

    async def _take(self, deadline: Deadline, mark: str, *, wait: bool) -> bool:
        """Lock the row."""
        context = self._context
        self._key = context.key(self._request.name, self._request.kind.family)
        if context.facts.rolls_back:
            raise UnsafeBackend(
                f"{context.address}: innodb_rollback_on_timeout is on, so the server ends your whole transaction when a "
                "lock is not to be had: switch it off, or lock before you begin the transaction, without connection="
            )
        caller = MySQLConnection(context, self._callers, self._connection)
        async with asyncio.timeout(deadline.left()):
            await context.within(self._prepare())
        misses, refused = 0, None
        while True:
            asked = context.clock()
            answer = await caller.run(self._lock(caller, mark), deadline)
            if answer is RowAnswer.TAKEN:
                self._kill = caller.kill
                return True
            if answer is RowAnswer.MISSING:
                # It was deleted just now.
                misses += 1
                if misses == MISSES:
                    raise refused or BackendRefused(
                        f"{context.address}: the row of lock {shorten(self._request.name)} is there, but your connection does "
                        "not find it: look for a temporary table of that name, or for a program that deletes rows"
                    )
                async with asyncio.timeout(deadline.left()):
                    await context.pause(UNDONE)
                    refused = await context.within(make_row(context, self._request, self._key))
            elif not wait:
                return False
            elif not caller.blocks:
                await caller.ready(deadline)
                caller.blocks = True
            elif context.clock() - asked < SHORT:
                async with asyncio.timeout(deadline.left()):
                    await context.pause(RETRY)

    async def _prepare(self) -> None:
        """Make the row if it is missing, and find out which server has it."""
        # Asked each time: FOR UPDATE on a missing row may lock its place, and then it cannot be made.
        there, [[found]] = await ask_identity(self._context, "caller_row", id=quote(self._key))
        if not found[0]:
            await make_row(self._context, self._request, self._key)
        self._there = there

    async def _lock(self, caller: MySQLConnection, mark: str) -> RowAnswer:
        """Check the connection, and lock; run by a task of the client."""
        statements = self._context.statements
        statement = (
            statements("lock_row", id=quote(self._key), who=self._request.label.encode().hex())
            if caller.blocks
            else statements("row_free", id=quote(self._key))
        )
        try:
            # Of this kind, whichever is the connection's own: rows are read at once, and are tuples.
            async with self._connection.cursor(Cursor) as cursor:
                await caller.check(cursor, self._there)
                if caller.leaving:
                    return RowAnswer.BUSY
                await cursor.execute(statement)
                if await cursor.fetchone() is None:
                    return RowAnswer.MISSING
                if mark:
                    await cursor.execute(statements("caller_mark", mark=mark))
                return RowAnswer.TAKEN
        except (LockError, RuntimeError):
            raise
        except Exception as error:
            if code(error) in NOT_NOW | INTERRUPTED:
                return RowAnswer.BUSY
            raise caller.translated(error, self._request.name) from error
