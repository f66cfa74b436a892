"""The confirmation of a hold in the caller's transaction: its row is locked until the commit, and shows the hold.

A client that enters changes the row of the lock, in the first statement of its decision. None does before the end of a
transaction that has it locked, not even if the ttl of the hold ends in the meantime. So what the transaction writes is
committed before a later holder can do anything. Until then this hold is not renewed either.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiomysql.cursors import Cursor

from aiolock.backends.mysql.caller import MySQLCallers, MySQLConnection, Place, ask_place, check_connection
from aiolock.backends.mysql.context import Context, quote
from aiolock.backends.mysql.errors import INTERRUPTED, NOT_NOW, code
from aiolock.backends.mysql.listener import ListeningClaim
from aiolock.backends.mysql.renewal import RowClaim
from aiolock.clock import Deadline
from aiolock.errors import BackendUnavailable, LockError, UnsafeBackend

__all__ = ["confirm"]


async def confirm(context: Context, callers: MySQLCallers, claim: RowClaim, connection: Any) -> bool:
    """Return whether the row shows the hold of ``claim``, and lock it in the transaction on ``connection`` if it does.

    The wait for the row is ended at the server within the command timeout, and by cancelling it, see :class:`CallerConnection`.
    """
    check_connection(connection)
    if context.site.across:
        raise UnsafeBackend(
            f"{context.address}: a row that is locked here is not locked on the other nodes of this cluster, and a later holder "
            "there could commit first: write with a fencing token instead"
        )
    if context.site.rolls_back:
        raise UnsafeBackend(
            f"{context.address}: innodb_rollback_on_timeout is on, so the server ends your whole transaction when the row is "
            "not to be had in time: switch it off, or write with a fencing token instead"
        )
    deadline = Deadline.after(context.timeout, asyncio.get_running_loop().time)
    caller = MySQLConnection(context, callers, connection)
    [[where]] = await context.within(ask_place(context, callers, "server_address"))
    try:
        return await caller.within(deadline.left(), _confirm(context, caller, claim, Place(*map(str, where))))
    except TimeoutError as error:
        raise BackendUnavailable(f"{context.address}: no answer within {context.timeout:g} s") from error


async def _confirm(context: Context, caller: MySQLConnection, claim: RowClaim, there: Place) -> bool:
    """Check the connection, and lock the row; run by a task of the client."""
    name = "confirm_request" if isinstance(claim, ListeningClaim) else "confirm_hold"
    statement = context.statements(name, id=quote(claim.key), owner=quote(claim.owner))
    try:
        async with caller.connection.cursor(Cursor) as cursor:
            await caller.check(cursor, there)
            caller.blocks = True
            if caller.leaving:
                raise TimeoutError
            await cursor.execute(statement)
            row = await cursor.fetchone()
    except (LockError, RuntimeError, TimeoutError):
        raise
    except Exception as error:
        if code(error) in NOT_NOW | INTERRUPTED:
            raise BackendUnavailable(
                f"{context.address}: another transaction has the row of the lock locked"
            ) from error
        raise caller.translated(error, claim.request.name) from error
    owner = row[0] if row is not None else None
    return (owner.decode() if isinstance(owner, bytes) else owner) == claim.owner
