"""The tables: that they are there, and that they do not grow for ever.

Locking never deletes the row of a lock. Purging deletes the rows that nobody has needed for long, in statements that
look again before they delete, so it may run at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiolock.backends.mysql.failures import NO_SUCH_COLUMN, NO_SUCH_TABLE, code
from aiolock.backends.mysql.statements import quote
from aiolock.errors import BackendError, BackendRefused

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["LEAST_IDLE", "ensure", "purge", "purge_free"]

LEAST_IDLE = 3600
"""Seconds; far more than any clock is set back without anybody's knowing, and than any hold of a dead process lasts."""
BATCH = 50
"""How many rows are looked at in one packet."""


async def ensure(backend: MySQLBackend, *, create: bool) -> None:
    """See that the tables are there; create them if that is wanted."""
    statements = backend.statements
    try:
        await backend.ask(statements("schema_there"))
    except BackendRefused as error:
        number = code(error.__cause__)
        if number in NO_SUCH_COLUMN:
            raise BackendRefused(
                f"{backend.address}: the tables for locks are those of an earlier version; while nobody uses "
                f"them, have an administrator drop them and run:\n{statements.schema}"
            ) from error
        if number not in NO_SUCH_TABLE:
            raise
        missing: BackendError = error
    else:
        return
    if create:
        try:
            await backend.ask(statements.schema)
            return
        except BackendRefused as error:
            missing = error
    raise BackendRefused(
        f"{backend.address}: the tables for locks are missing; have an administrator run:\n{statements.schema}"
    ) from missing


async def purge(backend: MySQLBackend, idle: int) -> int:
    """Delete rows whose deadline was over ``idle`` µs ago; how many rows of locks there were."""
    packet = backend.statements("purge", namespace=quote(backend.settings.namespace), idle=idle)
    return (await backend.ask(packet))[-1].changed


async def purge_free(backend: MySQLBackend, idle: int) -> int:
    """Delete rows without a deadline that were made ``idle`` µs ago and that no transaction has locked; how many."""
    packet = backend.statements("aged_rows", namespace=quote(backend.settings.namespace), idle=idle)
    [rows] = await backend.ask(packet)
    ids = [str(row[0]) for row in rows.rows]
    gone = 0
    for start in range(0, len(ids), BATCH):
        gone += await _delete(backend, ids[start : start + BATCH])
    return gone


async def _delete(backend: MySQLBackend, ids: Sequence[str]) -> int:
    packet = "; ".join(backend.statements("purge_row", id=quote(one)) for one in ids)
    answers = await backend.ask(packet, atomic=True)
    # SET, START TRANSACTION, SELECT INTO, DELETE, COMMIT.
    return sum(answer.changed for answer in answers[3::5])
