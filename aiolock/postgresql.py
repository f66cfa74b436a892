"""Helpers for PostgreSQL: writes that detect a concurrent change, the table of the library, and how to purge it.

The writes work on the application's own ``asyncpg`` connections and transactions, and need neither a client nor a table
of this library. :func:`compare_and_set` is optimistic locking: no writer waits, the second one is refused.
:func:`fenced_update` is the other half of a lease: the check of its token in the same statement as the write, so that
a holder that was stopped and woke up late changes nothing. Where the lock lives in the same database,
``lease.confirm(connection)`` needs no column for it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any, TypeVar

from aiolock._sql import Conflict, check_key, check_purge, check_values, parts_of, purge, retry
from aiolock.backends.sql import check_table, read_schema
from aiolock.errors import ConfigError, DeadlockDetected, shorten

__all__ = ["Conflict", "check_purge", "compare_and_set", "ddl", "fenced_update", "purge", "retry_on_conflict"]

T = TypeVar("T")

_RETRYABLE = {"40001", "40P01", "55P03"}
"""Another transaction was faster, as the server reports it: serialization failure, deadlock, lock not available."""
_REFUSED = "22012"
"""Division by zero, by which a statement refuses itself."""
_NO_ROOM = "22003"
_NARROWED = {"int84", "int82"}
"""The functions of the server by which a bigint that has no room becomes an integer or a smallint."""

_MOST = 2**63 - 1

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,62}")


def ddl(table: str = "aiolock") -> str:
    """Return the statements that create the table of this library, for an administrator and ``schema="check"``.

    :param table: the name of the table, or ``schema.table``, as in the option ``table=``.

    Running them where the table exists changes nothing. No I/O; raises :class:`ConfigError` for an invalid name.
    """
    check_table("postgresql", table)
    # As a file, because importing the backend would need its driver.
    text = read_schema("postgresql")
    schema, _, last = table.rpartition(".")
    return text.replace("{table}", f'"{schema or "public"}"."{last}"') + ";\n"


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

    :param connection: an ``asyncpg`` connection; nothing is committed here.
    :param table: the table, or ``schema.table``; names are as the server has them, capital letters included.
    :param key: the columns and values that identify the row, as ``{"id": 42}``.
    :param version: the value of ``column`` when the row was read.
    :param values: the columns to set and their values, of the types that asyncpg takes for these columns, or your codecs do.
    :param column: the integer column that counts changes; ``bigint`` never has an end.

    Returns whether the row was changed. Raises :class:`ConfigError` for invalid names, before anything is sent, and
    if the next version has no room in ``column``: then nothing is changed, and the transaction has failed, as after every
    error. In a transaction of REPEATABLE READ or SERIALIZABLE a row that another transaction has changed is the server's
    error 40001 instead of ``False``. :func:`retry_on_conflict` treats that as a conflict. After a cancellation it is unknown
    whether the row was changed.
    """
    if type(version) is not int:
        raise ConfigError(f"version must be the whole number that was read, not {shorten(version)}")
    check_values(values, column, "compare_and_set() counts it up by one")
    given: list[Any] = []
    sets = _equal(values, given)
    where = _equal(check_key(key), given)
    name = _quoted(column)
    if not -_MOST <= version < _MOST:
        raise _too_small(column, f"the version {version + 1}")
    before, after = _number(version, given), _number(version + 1, given)
    statement = _statement(
        table, [*sets, f"{name} = {after}"], [*where, f"{name}::numeric = {before}::numeric"], name, after
    )
    return await _changed(connection, statement, given, column, f"the version {version + 1}")


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
    :param column: a ``bigint NOT NULL DEFAULT 0`` column that remembers the highest token that wrote.

    The check and the write are one statement. Returns whether the write was accepted; ``False`` also if there is no such
    row. Raises :class:`ConfigError` as :func:`compare_and_set` does; also if ``column`` is too small for the token, or not
    exact, because it would then accept stale writes: nothing is changed. The other parameters, transactions of
    REPEATABLE READ and cancellation are as in :func:`compare_and_set`.
    """
    if type(token) is not int or not 0 <= token <= _MOST:
        raise ConfigError(f"token must be the token of a lease, not {shorten(token)}")
    check_values(values, column, "fenced_update() writes the token to it")
    given: list[Any] = []
    sets = _equal(values, given)
    where = _equal(check_key(key), given)
    name = _quoted(column)
    fence = _number(token, given)
    statement = _statement(
        table, [*sets, f"{name} = {fence}"], [*where, f"{name}::numeric <= {fence}::numeric"], name, fence
    )
    return await _changed(connection, statement, given, column, "tokens")


async def retry_on_conflict(
    work: Callable[[], Awaitable[T]],
    *,
    attempts: int = 5,
    pause: float = 0.01,
    longest: float = 1.0,
    random: Random | None = None,
) -> T:
    """Await ``work()`` until it ends without a conflict, at most ``attempts`` times; return its result.

    A conflict is :class:`Conflict`, or an error by which the server reports one: a serialization failure (40001), a deadlock
    (also as :class:`DeadlockDetected`), a lock that was not to be had in time; also if SQLAlchemy or this library raises it for
    the driver's. Between attempts it sleeps from half of ``pause`` to all of it (seconds), then twice that, up to
    ``longest``. The last conflict is raised. ``work`` should read and write in a transaction of its own, which it rolls
    back when it fails. Cancelling it cancels the work or the pause.
    """
    return await retry(work, _is_conflict, attempts, pause, longest, random)


def _is_conflict(error: Exception) -> bool:
    return isinstance(error, DeadlockDetected) or _sqlstate(error) in _RETRYABLE


def _sqlstate(error: Exception) -> str:
    """Return the code of a server's error; an empty string for any other error."""
    # By the attribute, so that no driver has to be imported; `orig` is SQLAlchemy's.
    for one in (error, getattr(error, "orig", None), error.__cause__):
        code = getattr(one, "sqlstate", None)
        if isinstance(code, str):
            return code
    return ""


def _statement(table: object, sets: list[str], where: list[str], name: str, stored: str) -> str:
    """Return an UPDATE that refuses itself if another number than ``stored`` is in the column afterwards."""
    exact = f"pg_catalog.int4out(1 / CASE WHEN {name}::numeric = {stored}::numeric THEN 1 ELSE 0 END)"
    return f"UPDATE {_table(table)} SET {', '.join(sets)} WHERE {' AND '.join(where)} RETURNING {exact}"  # noqa: S608 - names are checked


async def _changed(connection: Any, statement: str, given: list[Any], column: str, what: str) -> bool:
    """Execute a statement; return whether it changed a row."""
    if not callable(getattr(connection, "fetch", None)):
        raise ConfigError(f"connection must be a connection of asyncpg's, not {shorten(connection)}")
    try:
        return bool(await connection.fetch(statement, *given))
    except Exception as error:
        code = _sqlstate(error)
        narrowed = code == _NO_ROOM and getattr(error, "server_source_function", None) in _NARROWED
        if code == _REFUSED or narrowed:
            raise _too_small(column, what) from error
        raise


def _too_small(column: object, what: str) -> ConfigError:
    return ConfigError(
        f"column {shorten(column)} cannot hold {what}, and nothing was changed: make it bigint NOT NULL"
    )


def _number(value: int, given: list[Any]) -> str:
    """Return the expression for a whole number, and add it to ``given``, past the codecs of the program, as a ``cstring``."""
    given.append(str(value))
    return f"pg_catalog.int8in(${len(given)})"


def _equal(values: Mapping[Any, Any], given: list[Any]) -> list[str]:
    """Return ``column = $n`` for each, and add the values to ``given``."""
    parts: list[str] = []
    for name, value in values.items():
        given.append(value)
        parts.append(f"{_quoted(name)} = ${len(given)}")
    return parts


def _table(name: object) -> str:
    return ".".join(map(_quoted, parts_of(name, "schema.table")))


def _quoted(name: Any) -> str:
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
        raise ConfigError(
            f"a table or column is 1 to 63 characters of A-Z a-z 0-9 _ $ that do not begin with a digit, not {shorten(name)}"
        )
    return f'"{name}"'
