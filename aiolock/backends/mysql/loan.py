"""The row lock inside a transaction of the caller's own, on the caller's connection.

The row is made beforehand on a connection of ours. On the caller's, a look tells that it is to the same server and has a
transaction, and then the row is asked for without waiting. Only if somebody has it, it is waited for, and only if that
wait could be ended again: a caller who is cancelled, or whose time is over, gets the connection back in step.

A block puts a savepoint behind the lock. Whatever takes the lock from the transaction (its end, also an implicit one; going back to
an earlier savepoint) takes the savepoint as well, so the end of the block can tell.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from aiomysql.cursors import Cursor

from aiolock.backends.mysql.asking import UNDONE
from aiolock.backends.mysql.failures import (
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
from aiolock.backends.mysql.guest import Guest
from aiolock.backends.mysql.statements import quote
from aiolock.backends.mysql.turns import RETRY
from aiolock.contract import Bid, Loan
from aiolock.errors import (
    BackendRefused,
    BackendUnavailable,
    ConfigError,
    LockError,
    UnsafeBackend,
    shorten,
)

if TYPE_CHECKING:
    from aiolock.backends.mysql.row_claim import RowMode

__all__ = ["RowLoan"]

NEEDED = ("cursor", "close", "thread_id", "get_autocommit", "get_transaction_status")
SHORT = 0.1
"""Seconds; a wait that the server ends sooner is no wait."""
MISSES = 3
"""So many times in a row nobody deletes a row that was just made."""


class Answer(Enum):
    """What came of asking for the row."""

    TAKEN = "the transaction has it"
    BUSY = "somebody else has it, or the server ended the wait for it"
    MISSING = "there is no such row"


class Where(NamedTuple):
    """A server, as it calls itself."""

    identity: str
    name: str


class RowLoan(Loan):
    """One row, and somebody else's transaction that is to lock it."""

    def __init__(self, mode: RowMode, bid: Bid, connection: Any) -> None:
        if not all(callable(getattr(connection, name, None)) for name in NEEDED):
            raise ConfigError(
                "connection must be a connection of aiomysql's on which you began a transaction, "
                f"not {shorten(connection)}"
            )
        self._mode = mode
        self._backend = mode.backend
        self._bid = bid
        self._key = ""
        self._connection = connection
        self._there = ""
        self._number = 0
        """The server and the number of the session that has the lock."""

    async def take(self, timeout: float | None, mark: str = "") -> bool:
        """Lock the row in the transaction."""
        backend = self._backend
        self._key = backend.key(self._bid.name, self._bid.kind.family)
        if backend.rolls_back:
            raise UnsafeBackend(
                f"{backend.address}: innodb_rollback_on_timeout is on, so the server ends your whole transaction when a "
                "lock is not to be had: switch it off, or lock before you begin the transaction, without connection="
            )
        patience = backend.settings.command_timeout if timeout == 0 else timeout
        late = None if patience is None else asyncio.get_running_loop().time() + patience
        try:
            return await self._take(late, mark, wait=timeout != 0)
        except TimeoutError as error:
            if timeout == 0:
                raise BackendUnavailable(f"{backend.address}: no answer within {patience:g} s") from error
            return False

    async def keeps(self, mark: str) -> bool:
        """Release the savepoint, if it is there."""
        backend = self._backend
        if backend.guests.closed:
            # There is nobody to ask any more; the transaction is the caller's.
            return True
        guest = Guest(backend, self._connection)
        guest.there, guest.number = self._there, self._number
        patience = backend.settings.command_timeout
        try:
            return await guest.run(self._look_back(mark), asyncio.get_running_loop().time() + patience)
        except TimeoutError as error:
            raise BackendUnavailable(f"{backend.address}: no answer within {patience:g} s") from error

    async def _look_back(self, mark: str) -> bool:
        try:
            async with self._connection.cursor(Cursor) as cursor:
                await cursor.execute(self._backend.statements("loan_check", mark=mark))
        except RuntimeError:
            raise
        except Exception as error:
            number = code(error)
            if number in NO_SUCH_SAVEPOINT or deadly(error):
                return False
            if number in XA_ENDED:
                return True
            raise translate(error, self._backend.address) from error
        return True

    async def _take(self, late: float | None, mark: str, *, wait: bool) -> bool:
        """The same; raises :class:`TimeoutError` at ``late``, by the loop's clock."""
        backend = self._backend
        guest = Guest(backend, self._connection)
        async with asyncio.timeout_at(late):
            here = await backend.within(self._prepare())
        misses = 0
        while True:
            asked = backend.settings.clock()
            answer = await guest.run(self._lock(guest, here, mark), late)
            if answer is Answer.TAKEN:
                self._there, self._number = guest.there, guest.number
                return True
            if answer is Answer.MISSING:
                # Somebody deleted it just now.
                misses += 1
                if misses == MISSES:
                    raise BackendRefused(
                        f"{backend.address}: the row of lock {shorten(self._bid.name)} is there, but your connection does "
                        "not find it: look for a temporary table of that name, or for whoever deletes rows"
                    )
                self._mode.forget(self._key)
                async with asyncio.timeout_at(late):
                    await backend.pause(UNDONE)
                    await backend.within(self._mode.make_row(self._bid, self._key))
            elif not wait:
                return False
            elif not guest.blocks:
                await guest.ready(late)
                guest.blocks = True
            elif backend.settings.clock() - asked < SHORT:
                async with asyncio.timeout_at(late):
                    await backend.pause(RETRY)

    async def _prepare(self) -> Where:
        """See that there is a row; where that is."""
        backend = self._backend
        statements, guests = backend.statements, backend.guests
        if not guests.server:
            [own] = await backend.ask(statements("own_numbers"))
            guests.server = statements("server", numbers="".join(f", @@{name}" for name, _ in own.rows))
        # Asked each time: FOR UPDATE on a missing row may lock its place, and then nobody can make it.
        packet = statements("loan_row", id=quote(self._key), server=guests.server)
        try:
            [found], [where] = (answer.rows for answer in await backend.ask(packet))
        except BackendRefused as error:
            if code(error.__cause__) not in NO_SUCH_VARIABLE:
                raise
            guests.server = ""
            raise BackendUnavailable(
                f"{backend.address}: this is another server than before: try again"
            ) from error
        if not found[0]:
            self._mode.forget(self._key)
            await self._mode.make_row(self._bid, self._key)
        return Where(*map(str, where))

    async def _lock(self, guest: Guest, here: Where, mark: str) -> Answer:
        """Look, and lock; by a task of the client."""
        statements = self._backend.statements
        statement = (
            self._mode.line(self._key, self._bid.label.encode().hex())
            if guest.blocks
            else statements("row_free", id=quote(self._key))
        )
        try:
            # Of this kind, whichever is the connection's own: rows are read at once, and are tuples.
            async with self._connection.cursor(Cursor) as cursor:
                await cursor.execute(statements("loan_look", server=self._backend.guests.server))
                self._look(guest, here, *map(_said, await cursor.fetchone()))
                if guest.leaving:
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
                raise self._elsewhere(here, "one of another version") from error
            if number in OUTDATED:
                raise Outdated([self._bid.name]) from error
            raise translate(error, self._backend.address) from error

    def _look(self, guest: Guest, here: Where, number: int, identity: str, name: str, charset: str) -> None:
        """Raise unless a lock in this transaction excludes what it is to exclude."""
        connection = self._connection
        if identity != here.identity:
            raise self._elsewhere(here, name)
        if number != connection.thread_id():
            raise UnsafeBackend(
                f"{self._backend.address}: a proxy that has its own connection numbers stands between your connection "
                "and the server, and may swap the session that the transaction lives in: connect to the server itself"
            )
        if not self._backend.statements.ascii and not (
            charset.startswith("utf8") and _writes_utf8(connection)
        ):
            raise UnsafeBackend(
                f"{self._backend.address}: the name of the database has letters beyond ASCII, which your connection would "
                f"not send as they are (its character set is {charset}): use charset='utf8mb4' and SET NAMES utf8mb4"
            )
        if connection.get_autocommit() and not connection.get_transaction_status():
            raise RuntimeError(
                "no transaction is open on this connection, so it cannot hold a lock: "
                "begin one first (await connection.begin())"
            )
        guest.there, guest.number = here.identity, number

    def _elsewhere(self, here: Where, name: str) -> ConfigError:
        return ConfigError(
            f"connection must be to the server that the client is connected to: that is {here.name} "
            f"({self._backend.address}), and this one is to {name}, where a lock would exclude nobody"
        )


def _writes_utf8(connection: Any) -> bool:
    encoding = getattr(connection, "encoding", None)
    return isinstance(encoding, str) and encoding.lower().replace("-", "") == "utf8"


def _said(value: Any) -> Any:
    """A value of an answer; in the character set `binary` its texts are bytes."""
    return value.decode() if isinstance(value, bytes) else value
