"""The confirmation of a hold in the caller's transaction: its row is locked until the commit, and shows the hold.

A client that enters, or that ends the hold of another one, writes the row of the lock. None does before the end of a
transaction that has it locked. So what the transaction writes is committed before a later holder can do anything.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiolock.backends.callers import Callers
from aiolock.backends.postgresql.caller import NO_LIMIT, Interrupted, PostgreSQLConnection, check_connection
from aiolock.backends.postgresql.errors import READ_ONLY, sqlstate
from aiolock.backends.postgresql.schema import Statements
from aiolock.backends.postgresql.store import PostgreSQLStore
from aiolock.backends.rows.claim import RowClaim
from aiolock.clock import Deadline
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, LockError, shorten

__all__ = ["confirm"]

CHANGED = "40001"
"""The row was changed since the snapshot of the transaction, which has failed."""


class NotInSnapshotError(Exception):
    """The row is younger than the snapshot: what the server would have said of one that was changed."""

    sqlstate = CHANGED


async def confirm(
    store: PostgreSQLStore,
    statements: Statements,
    callers: Callers,
    claim: RowClaim,
    connection: object,
    address: str,
    timeout: float,
) -> bool:
    """Return whether the row shows the hold of ``claim``, and lock it in the transaction on ``connection`` if it does.

    Raises :class:`ConfigError` if ``connection`` is none to the database of the client, :class:`RuntimeError` if no transaction
    is open on it, :class:`DeadlockDetected`, :class:`BackendRefused` if the transaction is read-only, and
    :class:`BackendUnavailable` without an answer within ``timeout`` seconds, or if the row is locked by another transaction or
    is newer than the snapshot. Cancelling it ends the statement first; a connection on which that takes too long is closed,
    see :class:`CallerConnection`.
    """
    check_connection(connection)
    caller = PostgreSQLConnection(store, callers, connection, address)
    deadline = Deadline.after(timeout, asyncio.get_running_loop().time)
    try:
        async with asyncio.timeout(timeout):
            [there] = await store.ask("place")
        return await caller.within(deadline.left(), _confirm(caller, statements, claim, there, address))
    except TimeoutError as error:
        raise BackendUnavailable(f"{address}: no answer within {timeout:g} s") from error


async def _confirm(
    caller: PostgreSQLConnection, statements: Statements, claim: RowClaim, there: Any, address: str
) -> bool:
    """Check the connection, and lock the row; run by a task of the client."""
    try:
        driver = await caller.check(there)
        row = await driver.fetchrow(statements("share_free"), claim.key, timeout=NO_LIMIT)
        if row is None:
            if caller.leaving:
                # The row may be locked by another transaction, and was not asked for.
                raise TimeoutError
            caller.blocks = True
            row = await caller.wait(lambda: driver.fetchrow(statements("share"), claim.key, timeout=NO_LIMIT))
    except (LockError, RuntimeError, TimeoutError):
        raise
    except Interrupted as error:
        raise BackendUnavailable(f"{address}: another transaction has the row of the lock locked") from error
    except Exception as error:
        raise _translated(caller, error, claim.request.name, address) from error
    if row is None and caller.has_snapshot:
        raise _outdated(claim.request.name, address) from NotInSnapshotError()
    value = bytes.fromhex(row["value"]) if row is not None else b""
    if row is not None and caller.has_snapshot and claim.handed_over(value):
        # A hand-over inside the client writes nothing, so the server cannot tell whether the snapshot is older than it.
        raise BackendUnavailable(
            f"{address}: a task of this client has handed {shorten(claim.request.name)} over, and whether the {caller.isolation} "
            "transaction sees what it has committed cannot be found out: begin it as READ COMMITTED, or lock with fair=True"
        )
    return row is not None and claim.shown_in(value)


def _translated(caller: PostgreSQLConnection, error: Exception, name: str, address: str) -> Exception:
    code = sqlstate(error)
    if code == CHANGED:
        return _outdated(name, address)
    if code == READ_ONLY:
        return BackendRefused(
            f"{address}: the transaction is READ ONLY, and cannot lock the row of {shorten(name)}"
        )
    return caller.translated(error, name)


def _outdated(name: str, address: str) -> BackendError:
    return BackendUnavailable(
        f"{address}: the snapshot of the transaction is older than the row of {shorten(name)}: roll it back, and begin it "
        "again; one of READ COMMITTED has no such snapshot"
    )
