"""The confirmation of a hold over rows in the caller's transaction: its row is locked until the commit, and shows the hold.

A client that enters, or that ends the hold of another one, writes the row of the lock. None does before the end of a
transaction that has it locked. So what the transaction writes is committed before a later holder can do anything. Heartbeats write
another row, so the hold is renewed meanwhile.

Plain reads of a transaction of REPEATABLE READ answer from the snapshot of its first one. A plain read of the row tells whether
that is as young as the hold, and so shows what the holders before have committed. A hand-over between tasks of the client
writes nothing; so a heartbeat before reports the present lease, and the snapshot has to show that report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from aiomysql.cursors import Cursor

from aiolock.backends.callers import CallerConnection, Callers
from aiolock.backends.mysql.caller import check_connection
from aiolock.backends.mysql.errors import (
    DEADLOCK,
    INTERRUPTED,
    NO_SUCH_VARIABLE,
    NOT_NOW,
    OUTDATED,
    Outdated,
    code,
    translate,
)
from aiolock.backends.mysql.rows_schema import literal
from aiolock.backends.mysql.store import MySQLStore
from aiolock.backends.rows.claim import RowClaim
from aiolock.backends.rows.liveness import decode_session
from aiolock.clock import Deadline
from aiolock.core.backend import Claim, Renewal
from aiolock.errors import (
    BackendUnavailable,
    ConfigError,
    DeadlockDetected,
    LockError,
    UnsafeBackend,
    copy_of,
    shorten,
)

__all__ = ["confirm"]

Renew = Callable[[Sequence[Claim]], Coroutine[Any, Any, Sequence[Renewal]]]


class ConfirmingConnection(CallerConnection):
    """A connection of a caller, whose statement is ended by KILL QUERY on a connection of the client."""

    def __init__(self, store: MySQLStore, callers: Callers, connection: Any, address: str) -> None:
        super().__init__(callers, connection, address)
        self._store = store
        self._kill = ""
        """Ends the statement under way; empty until the server and the number of the session are known."""

    async def check(self, cursor: Any) -> None:
        """Check that a transaction is open on the server of the client.

        Raises :class:`RuntimeError` if none is open, :class:`ConfigError` for another server, :class:`UnsafeBackend` if a proxy
        stands in between or the character set would change the name of the database, and errors of the driver. To be called by a
        task of the client only: cancelling it may close the connection.
        """
        store, connection = self._store, self.connection
        there, where = store.server
        try:
            await cursor.execute(store.statements("caller_server", server=store.identity))
        except Exception as error:
            if code(error) in NO_SUCH_VARIABLE:
                raise self._elsewhere(where, "one of another version") from error
            raise
        number, identity, name, charset = map(_text, await cursor.fetchone())
        if identity != there:
            raise self._elsewhere(where, name)
        if number != connection.thread_id():
            raise UnsafeBackend(
                f"{self._address}: a proxy that has its own connection numbers stands between your connection "
                "and the server, and may swap the session that the transaction lives in: connect to the server itself"
            )
        encoding = str(getattr(connection, "encoding", "")).lower().replace("-", "")
        if not store.statements.ascii and not (charset.startswith("utf8") and encoding == "utf8"):
            raise UnsafeBackend(
                f"{self._address}: the name of the database has letters beyond ASCII, which your connection would "
                f"not send as they are (its character set is {charset}): use charset='utf8mb4' and SET NAMES utf8mb4"
            )
        if connection.get_autocommit() and not connection.get_transaction_status():
            raise RuntimeError(
                "no transaction is open on this connection: begin one first (await connection.begin())"
            )
        self._kill = store.statements(
            "caller_end", server=store.identity, there=literal(there), number=number
        )

    def _elsewhere(self, where: str, name: str) -> ConfigError:
        return ConfigError(
            f"connection must be to the server that the client is connected to: that is {where} ({self._address}), and this one "
            f"is to {name}, where the hold is not known"
        )

    async def interrupt(self, left: float) -> None:
        """Send KILL QUERY on the connection for reads."""
        async with asyncio.timeout(left):
            if self._kill:
                await self._store.ask(self._kill)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def translated(self, error: Exception, name: str) -> LockError:
        """Return the error of this library for one of the driver's, about the lock ``name``."""
        number = code(error)
        if number in DEADLOCK:
            return DeadlockDetected([name])
        if number in OUTDATED:
            return Outdated([name])
        if number in NOT_NOW | INTERRUPTED:
            return BackendUnavailable(f"{self._address}: another transaction has the row of the lock locked")
        return translate(error, self._address)


def _text(value: Any) -> Any:
    """Return a value of an answer; in the character set `binary` its texts are bytes."""
    return value.decode() if isinstance(value, bytes) else value


async def confirm(
    store: MySQLStore,
    callers: Callers,
    claim: RowClaim,
    connection: Any,
    address: str,
    timeout: float,
    renew: Renew,
) -> bool:
    """Return whether the row shows the hold of ``claim``, and lock it in the transaction on ``connection`` if it does.

    Raises as :meth:`Confirmation.confirm` does, and :class:`UnsafeBackend` on a cluster, and with
    ``innodb_rollback_on_timeout``. The wait for the row is ended at the server within ``timeout`` seconds, and by cancelling it,
    see :class:`CallerConnection`.
    """
    check_connection(connection)
    if store.galera:
        raise UnsafeBackend(
            f"{address}: a row that is locked here is not locked on the other nodes of this cluster, and a later holder "
            "there could commit first: write with a fencing token instead"
        )
    if store.rolls_back:
        raise UnsafeBackend(
            f"{address}: innodb_rollback_on_timeout is on, so the server ends your whole transaction when the row is "
            "not to be had in time: switch it off, or write with a fencing token instead"
        )
    deadline = Deadline.after(timeout, asyncio.get_running_loop().time)
    caller = ConfirmingConnection(store, callers, connection, address)
    try:
        async with asyncio.timeout(timeout):
            await store.check_writable()
            [row] = await store.get([claim.key])
            handed_over = claim.handed_over(row.value)
            if handed_over:
                [renewal] = await renew([claim])
                if isinstance(renewal, Exception):
                    raise copy_of(renewal)
        return await caller.within(
            deadline.left(), _confirm(caller, store, claim, address, handed_over=handed_over)
        )
    except TimeoutError as error:
        raise BackendUnavailable(f"{address}: no answer within {timeout:g} s") from error


async def _confirm(
    caller: ConfirmingConnection, store: MySQLStore, claim: RowClaim, address: str, *, handed_over: bool
) -> bool:
    """Check the connection, lock the row and look at the snapshot; run by a task of the client."""
    member = claim.member
    if member is None:
        return False
    key, session = literal(claim.key), literal(member.session.key)
    try:
        async with caller.connection.cursor(Cursor) as cursor:
            await caller.check(cursor)
            caller.blocks = True
            if caller.leaving:
                raise TimeoutError
            await cursor.execute(store.statements("confirm", key=key))
            row = await cursor.fetchone()
            if row is None or not claim.shown_in(row[0]):
                return False
            await cursor.execute(store.statements("snapshot", keys=f"{key}, {session}"))
            rows = {_text(one): value for one, value in await cursor.fetchall()}
    except (LockError, RuntimeError, TimeoutError):
        raise
    except Exception as error:
        raise caller.translated(error, claim.request.name) from error
    name = shorten(claim.request.name)
    if not claim.shown_in(rows.get(claim.key, b"")):
        raise BackendUnavailable(
            f"{address}: the transaction read before {name} was acquired, so it sees what was there before: roll it back, "
            "and begin it again; one of READ COMMITTED has no such snapshot"
        )
    if handed_over and not _reported(rows.get(member.session.key), claim, member.id):
        raise BackendUnavailable(
            f"{address}: a task of this client has handed {name} over, and whether the transaction, which read before "
            "this, sees what that task has committed cannot be found out: roll it back and begin it again, begin it as READ "
            "COMMITTED, or lock with fair=True"
        )
    return True


def _reported(session: bytes | None, claim: RowClaim, member: str) -> bool:
    """Return whether a heartbeat has reported the present lease of a claim, by the session row."""
    if session is None or claim.present is None:
        return False
    lease = decode_session(session).leases.get(member)
    return lease is not None and lease[0] == claim.present.token
