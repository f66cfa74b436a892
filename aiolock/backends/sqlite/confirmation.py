"""The confirmation of a hold in the caller's transaction: the file is locked for writing until the commit, and shows the hold.

A client that enters, or that ends the hold of another one, writes to the file. None does before the end of a transaction
that has it locked. So what the transaction writes is committed before a later holder can do anything.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiolock.backends.rows.claim import RowClaim
from aiolock.backends.sqlite.errors import LOCKED, code, translate
from aiolock.errors import BackendUnavailable, ConfigError, shorten

__all__ = ["confirm"]

FILE = "SELECT CAST(file AS BLOB) FROM pragma_database_list WHERE name = 'main'"
LOCK = "UPDATE main.aiolock SET version = version WHERE 0"
"""Changes nothing, and makes the transaction one that writes."""
ROW = "SELECT CAST(value AS BLOB) FROM main.aiolock WHERE key = ?"


async def confirm(
    path: Path,
    claim: RowClaim,
    connection: Any,
    timeout: float,
    verify_file: Callable[[RowClaim], Awaitable[bool]],
) -> bool:
    """Return whether the row shows the hold of ``claim``, in the transaction on ``connection``, which then writes.

    A path does not tell which file the connection has open: the one that it leads to may have taken its place. ``verify_file`` reads
    the file of the client, and returns False if that was replaced; no other one shows the hold.
    Ends within ``timeout`` seconds. Cancelling it ends the wait for a thread only, of an aiosqlite connection or of the client.
    """
    module: Any = sys.modules.get("aiosqlite")
    if not isinstance(connection, sqlite3.Connection) and not (
        module is not None and isinstance(connection, module.Connection)
    ):
        raise ConfigError(
            "connection must be one of sqlite3 or aiosqlite, on which you began a transaction that writes, "
            f"not {shorten(connection)}"
        )
    try:
        async with asyncio.timeout(timeout):
            return await _confirm(path, claim, connection) and await verify_file(claim)
    except TimeoutError as error:
        raise BackendUnavailable(f"{path}: no answer of the disk within {timeout:g} s") from error
    except (sqlite3.ProgrammingError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        # It is closed, or another thread's.
        advice = "; open it with check_same_thread=False" if "same thread" in str(error) else ""
        raise RuntimeError(f"this connection cannot be used now: {error}{advice}") from error
    except sqlite3.Error as error:
        if code(error) in LOCKED:
            raise BackendUnavailable(
                f"{path}: another connection writes, or has written since the transaction began to read: roll it back, and "
                "begin it again, by BEGIN IMMEDIATE"
            ) from error
        raise translate(error, path) from error


async def _confirm(path: Path, claim: RowClaim, connection: Any) -> bool:
    if not connection.in_transaction:
        raise RuntimeError("no transaction is open on this connection: begin one first, by BEGIN IMMEDIATE")
    [[name]] = await _fetch(connection, FILE)
    if not _same(path, name):
        raise ConfigError(
            f"connection must be to the file of the locks, {path}, and this one is to {shorten(os.fsdecode(name))}: what is "
            "written to another file is not committed together with the check"
        )
    if isinstance(connection, sqlite3.Connection):
        # Here the event loop would wait for other processes.
        [[busy_timeout]] = await _fetch(connection, "PRAGMA busy_timeout")
        await _fetch(connection, "PRAGMA busy_timeout = 0")
        try:
            await _fetch(connection, LOCK)
        finally:
            await _fetch(connection, f"PRAGMA busy_timeout = {int(busy_timeout)}")
    else:
        await _fetch(connection, LOCK)
    rows = await _fetch(connection, ROW, (claim.key,))
    return bool(rows) and claim.shown_in(rows[0][0])


def _same(path: Path, name: bytes) -> bool:
    try:
        return bool(name) and path.samefile(os.fsdecode(name))
    except OSError:
        return False


async def _fetch(connection: Any, statement: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Execute a statement; its rows are tuples, whatever the connection makes of its own."""
    if isinstance(connection, sqlite3.Connection):
        cursor = connection.cursor()
        cursor.row_factory = None
        try:
            return cursor.execute(statement, values).fetchall()
        finally:
            cursor.close()
    async with connection.cursor() as other:
        other.row_factory = None
        await other.execute(statement, values)
        return list(await other.fetchall())
