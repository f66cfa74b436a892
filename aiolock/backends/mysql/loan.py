"""The row lock inside a transaction of the caller's own, on the caller's connection.

The row is made beforehand on a connection of ours. On the caller's, one statement is sent, by a task of ours, so that a
caller who is cancelled, or whose time is over, leaves the connection in step and the transaction as it was: the
statement is ended by KILL QUERY, and its end awaited.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiolock.backends.mysql.failures import INTERRUPTED, NOT_NOW, code, translate
from aiolock.backends.mysql.place import GIVE_UP, KILL_AGAIN
from aiolock.backends.mysql.statements import quote
from aiolock.contract import Bid, Loan
from aiolock.errors import BackendUnavailable, ConfigError, LockError, UnsafeBackend, shorten

if TYPE_CHECKING:
    from aiolock.backends.mysql.row_claim import RowMode

__all__ = ["RowLoan"]


class RowLoan(Loan):
    """One row, and somebody else's transaction that is to lock it."""

    def __init__(self, mode: RowMode, bid: Bid, connection: Any) -> None:
        if not all(
            callable(getattr(connection, name, None))
            for name in ("cursor", "close", "thread_id", "get_transaction_status")
        ):
            raise ConfigError(
                "connection must be a connection of aiomysql's on which you began a transaction, "
                f"not {shorten(connection)}"
            )
        self._mode = mode
        self._bid = bid
        self._connection = connection
        self._key = mode.backend.key(bid.name, bid.kind.family)

    async def take(self, timeout: float | None) -> bool:
        """Lock the row in the transaction."""
        backend = self._mode.backend
        if backend.rolls_back:
            raise UnsafeBackend(
                f"{backend.address}: innodb_rollback_on_timeout is on, so the server ends your whole transaction when a "
                "lock is not to be had: switch it off, or lock before you begin the transaction, without connection="
            )
        start = backend.settings.clock()
        # Asked each time: FOR UPDATE on a missing row may lock its place, and then nobody can make it.
        await backend.within(self._mode.make_row(self._bid, self._key, sure=True))
        statement = (
            backend.statements("row_free", id=quote(self._key))
            if timeout == 0
            else self._mode.line(self._key, self._bid.label.encode().hex())
        )
        while True:
            left = None if timeout is None else timeout - (backend.settings.clock() - start)
            limit = backend.settings.command_timeout if timeout == 0 else left
            if limit is not None and limit <= 0:
                return False
            work = backend.sessions.spawn(self._execute(statement), "aiolock-mysql-loan")
            over = False
            try:
                await asyncio.wait([work], timeout=limit)
            finally:
                if over := not work.done():
                    # By a task of the client, because we may be on our way out.
                    await asyncio.shield(backend.sessions.spawn(self._end(work), "aiolock-mysql-loan-end"))
            try:
                if work.result():
                    break
                # Somebody deleted the row just now.
                self._mode.forget(self._key)
                await backend.within(self._mode.make_row(self._bid, self._key))
            except asyncio.CancelledError:
                if not work.cancelled():
                    raise
                raise BackendUnavailable(
                    f"{backend.address}: the wait could not be ended, so your connection was closed; let it have the "
                    "account that the client has"
                ) from None
            except LockError:
                raise
            except Exception as error:
                number = code(error)
                if number not in NOT_NOW | INTERRUPTED:
                    raise translate(error, backend.address) from error
                # Beyond the session's own limit for waits we wait on.
                if over or timeout == 0:
                    return False
        if not self._connection.get_transaction_status():
            raise RuntimeError(
                "no transaction is open on this connection, so the lock is not held: "
                "begin one first (await connection.begin())"
            )
        return True

    async def _execute(self, statement: str) -> bool:
        """Whether there was a row to lock."""
        async with self._connection.cursor() as cursor:
            await cursor.execute(statement)
            found = await cursor.fetchone() is not None
            # The answer to this one says whether there is a transaction. In a packet of its own: when KILL QUERY
            # comes between two statements of one packet, the server sends no answer for the second.
            await cursor.execute("DO 0")
        return found

    async def _end(self, work: asyncio.Task[bool]) -> None:
        backend = self._mode.backend
        loop = asyncio.get_running_loop()
        give_up = loop.time() + GIVE_UP
        while not work.done():
            try:
                control = await backend.sessions.control()
                await control.run(
                    f"KILL QUERY {self._connection.thread_id()}", backend.settings.command_timeout
                )
            except LockError:
                # Another account's, or nobody to ask: as the driver does when a statement is cancelled.
                give_up = 0.0
            if loop.time() > give_up:
                self._connection.close()
                work.cancel()
            await asyncio.wait([work], timeout=KILL_AGAIN)
