"""Helpers for MySQL and MariaDB: writes that detect a concurrent change, the tables of the library, and how to purge them.

The writes work on the application's own ``aiomysql`` connections and transactions, and need neither a client nor a table
of this library. :func:`compare_and_set` is optimistic locking: no writer waits, the second one is refused.
:func:`fenced_update` is the other half of a lease: the check of its token in the same statement as the write, so that
a holder that was stopped and woke up late changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from random import Random
from typing import Any, TypeVar

from aiolock._sql import Conflict, check_key, check_purge, check_values, parts_of, purge, retry
from aiolock.backends.sql import check_table, read_schema
from aiolock.errors import ConfigError, DeadlockDetected, shorten

__all__ = ["Conflict", "check_purge", "compare_and_set", "ddl", "fenced_update", "purge", "retry_on_conflict"]

T = TypeVar("T")

_RETRYABLE = {1020, 1205, 1213, 3058, 3572}
"""Another transaction was faster, as the server reports it: changed row, lock wait timeout, deadlock, lock not available."""

_NO_ROOM = {1264, 1406}
"""A value is too large for its column, in strict mode."""
_REFUSED = "(SELECT 1 UNION ALL SELECT 2)"
"""An expression that is no single value on any server, in any mode: a statement that evaluates it changes nothing."""
_TWO_VALUES = 1242
_SIMULTANEOUS = 4140

_DIGITS = (int, float, Decimal, date, time, timedelta)
"""Types that a driver writes with characters that are the same in every character set."""

_IDENTIFIER = re.compile(r"[A-Za-z0-9_$]{1,64}")


def ddl(table: str = "aiolock") -> str:
    """Return the statements that create the tables of this library, for an administrator and ``schema="manual"``.

    :param table: the name of the first table, as in the option ``table=``; the others are named after it.

    Running them where the tables exist changes nothing. No I/O; raises :class:`ConfigError` for an invalid name.
    """
    check_table("mysql", table)
    # As a file, because importing the backend would need its driver.
    text = read_schema("mysql")
    return (
        re.sub(
            r"\{(\w+)\}", lambda word: f"`{table}`" if word[1] == "table" else f"`{table}_{word[1]}`", text
        )
        + ";\n"
    )


async def compare_and_set(
    connection: Any,
    table: str,
    key: Mapping[str, Any],
    version: int,
    values: Mapping[str, Any],
    *,
    column: str = "version",
) -> bool:
    """Change one row if its version is still the one that was read; the version then is one higher.

    :param connection: an ``aiomysql`` connection; nothing is committed here.
    :param table: the table, or ``database.table``.
    :param key: the columns and values that identify the row, as ``{"id": 42}``.
    :param version: the value of ``column`` when the row was read.
    :param values: the columns to set and their values: text, bytes, numbers, dates, times or ``None``. Text travels as
        hexadecimal digits of UTF-8, so the character set of the connection does not matter.
    :param column: the integer column that counts changes; ``BIGINT`` never has an end.

    Returns whether the row was changed. Raises :class:`ConfigError` for invalid names and values, before
    anything is sent, and if the next version has no room in ``column``: then nothing is changed. In a transaction of
    REPEATABLE READ a row that another transaction has changed must be read again in a new transaction; MariaDB with
    ``innodb_snapshot_isolation`` (on from 11.6.2) raises error 1020 instead, and rolls the transaction
    back. :func:`retry_on_conflict` treats that as a conflict. After a cancellation it is unknown whether the row was changed.
    """
    if type(version) is not int:
        raise ConfigError(f"version must be the whole number that was read, not {shorten(version)}")
    check_values(values, column, "compare_and_set() counts it up by one")
    sets, given = _equal(values)
    where, named = _where(key)
    where += [f"{_exact(column)} = %s"]
    sets += [f"{_quoted(column)} = {_quoted(column)} + 1", _whole(column)]
    statement = f"UPDATE {_table(table)} SET {', '.join(sets)} WHERE {' AND '.join(where)}"  # noqa: S608 - names are checked
    arguments = (*given, version + 1, *named, version)
    async with connection.cursor() as cursor:
        changed = await _changed(cursor, statement, arguments, column, f"the version {version + 1}")
    return bool(changed)


async def fenced_update(
    connection: Any,
    table: str,
    key: Mapping[str, Any],
    values: Mapping[str, Any],
    *,
    token: int,
    column: str = "fence_token",
) -> bool:
    """Change one row unless a later holder of the lock has written to it before.

    :param token: the lease's token.
    :param column: a ``BIGINT UNSIGNED NOT NULL DEFAULT 0`` column that remembers the highest token that wrote.

    The check and the write are one statement. Returns whether the write was accepted; ``False`` also if there is no such
    row. Raises :class:`ConfigError` as :func:`compare_and_set` does; also if ``column`` is too small for the token, or not
    exact, because it would then accept stale writes: nothing is changed. Raises :class:`Conflict` in a transaction of REPEATABLE
    READ that began to read before another token was written, because its values may rest on what was there before; MariaDB's
    error 1020 is as in :func:`compare_and_set`, and so are the other parameters and cancellation.
    """
    if type(token) is not int:
        raise ConfigError(f"token must be the token of a lease, not {shorten(token)}")
    fence = _exact(column)
    check_values(values, column, "fenced_update() writes the token to it")
    sets, given = _equal(values)
    sets += [f"{_quoted(column)} = %s", _whole(column)]
    conditions, named = _where(key)
    where = " AND ".join(conditions)
    statement = f"UPDATE {_table(table)} SET {', '.join(sets)} WHERE {where} AND {fence} <= %s"  # noqa: S608 - names are checked
    async with connection.cursor() as cursor:
        if not connection.get_autocommit() or connection.get_transaction_status():
            # Locked, it is as it was committed last; a plain SELECT answers from the snapshot of the transaction.
            found = f"SELECT {_quoted(column)} FROM {_table(table)} WHERE {where}"  # noqa: S608 - names are checked
            await _changed(cursor, f"{found} AND {fence} <= %s FOR UPDATE", (*named, token), column, "tokens")
            last = await cursor.fetchone()
            await cursor.execute(found, tuple(named))
            if last not in (None, await cursor.fetchone()):
                raise Conflict(
                    f"a row of {shorten(table)} was written since the transaction began to read, so what it writes may rest on "
                    "old values: roll it back, and read the row again in a new one; one of READ COMMITTED has no such snapshot"
                )
        arguments = (*given, token, token, *named, token)
        if await _changed(cursor, statement, arguments, column, "tokens"):
            return True
        # The server counts rows that it changed: a write that says again what is there was accepted as well. A plain
        # SELECT would answer from the snapshot of the transaction, in which this token may still be the highest.
        await cursor.execute(
            f"SELECT 1 FROM {_table(table)} WHERE {where} AND {fence} = %s FOR UPDATE",  # noqa: S608 - names are checked
            (*named, token),
        )
        return await cursor.fetchone() is not None


async def retry_on_conflict(
    work: Callable[[], Awaitable[T]],
    *,
    attempts: int = 5,
    pause: float = 0.01,
    longest: float = 1.0,
    random: Random | None = None,
) -> T:
    """Await ``work()`` until it ends without a conflict, at most ``attempts`` times; return its result.

    A conflict is :class:`Conflict`, or an error by which the server reports one: a deadlock (also as :class:`DeadlockDetected`), a
    lock wait that took too long, as an error of a driver with the class names of the DB-API (aiomysql, PyMySQL, asyncmy,
    mysqlclient). Between attempts it sleeps from half of ``pause`` to all of it (seconds), then twice that, up to ``longest``. The
    last conflict is raised. ``work`` should read and write in a transaction of its own, which it rolls back when it fails. Cancelling it
    cancels the work or the pause.
    """
    return await retry(work, _is_conflict, attempts, pause, longest, random)


def _is_conflict(error: Exception) -> bool:
    return isinstance(error, DeadlockDetected) or _number(error) in _RETRYABLE


def _number(error: Exception) -> int:
    """Return the server's number of an error; 0 for any other error."""
    # By the class's name, which the DB-API gives, so that no driver has to be imported.
    number = error.args[0] if error.args else None
    named = {cls.__name__ for cls in type(error).__mro__}
    return number if type(number) is int and "DatabaseError" in named else 0


def _exact(column: str) -> str:
    """Return the value of a column for comparisons: a server compares numbers with text, and with other inexact types, as doubles."""
    return f"CAST({_quoted(column)} AS DECIMAL(30))"


def _whole(column: str) -> str:
    """Return an assignment behind that of ``column``, which refuses the statement if another number was stored.

    Outside of strict mode a server clips a number that is too large, without an error. Assignments are made from left to right,
    so this one sees the stored number.
    """
    name = _quoted(column)
    return f"{name} = IF({_exact(column)} = %s, {name}, {_REFUSED})"


async def _changed(cursor: Any, statement: str, arguments: tuple[Any, ...], column: str, what: str) -> int:
    """Execute a statement and return the number of rows that it changed."""
    try:
        changed: int = await cursor.execute(statement, arguments)
    except Exception as error:
        number = _number(error)
        if number == _TWO_VALUES or (number in _NO_ROOM and f"'{column}'".lower() in str(error).lower()):
            raise ConfigError(
                f"column {shorten(column)} cannot hold {what}, and nothing was changed: make it BIGINT UNSIGNED NOT NULL"
            ) from error
        if number == _SIMULTANEOUS:
            raise ConfigError(
                "sql_mode must be without SIMULTANEOUS_ASSIGNMENT on this connection: else it cannot be seen what was stored"
            ) from error
        raise
    return changed


def _where(key: object) -> tuple[list[str], list[Any]]:
    return _equal(check_key(key))


def _equal(values: Mapping[Any, Any]) -> tuple[list[str], list[Any]]:
    """Return ``column = value`` for each, and the values that the driver writes for the ``%s`` of these.

    Texts are hexadecimal digits in the statement. The driver would write them for the character set that it takes the
    session to have, and in another one a text may end where it should not: ``SET NAMES gbk`` is enough for that.
    """
    parts: list[str] = []
    given: list[Any] = []
    for name, value in values.items():
        if isinstance(value, str):
            try:
                literal = f"_utf8mb4 X'{str.encode(value).hex()}'"
            except UnicodeEncodeError:
                raise ConfigError(f"{shorten(name)} is no valid Unicode: {shorten(value)}") from None
        elif isinstance(value, bytes | bytearray | memoryview):
            literal = f"_binary X'{bytes(value).hex()}'"
        elif value is None or isinstance(value, _DIGITS):
            literal = "%s"
            given.append(int(value) if isinstance(value, int) else value)
        else:
            raise ConfigError(
                f"{shorten(name)} must be text, bytes, a number, a date, a time or None, not {shorten(value)}"
            )
        parts.append(f"{_quoted(name)} = {literal}")
    return parts, given


def _table(name: object) -> str:
    return ".".join(map(_quoted, parts_of(name, "database.table")))


def _quoted(name: Any) -> str:
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
        raise ConfigError(f"a table or column is 1 to 64 characters of A-Z a-z 0-9 _ $, not {shorten(name)}")
    return f"`{name}`"
