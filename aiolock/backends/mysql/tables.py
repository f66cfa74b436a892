"""The tables: that they are there and whole, and that they do not grow for ever.

Locking never deletes the row of a lock. Purging deletes the rows that nobody has needed for long, in statements that
look again before they delete and wait for nobody's row, so it may run at any time.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from aiolock.backends.mysql.failures import NO_SUCH_COLUMN, NO_SUCH_TABLE, code
from aiolock.backends.mysql.holding import BLOCK
from aiolock.backends.mysql.statements import quote
from aiolock.errors import BackendError, BackendRefused, ConfigError, shorten

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["LEAST_IDLE", "check_idle", "ensure", "lacking", "purge"]

LEAST_IDLE = 3600
"""Seconds; far more than any clock is set back without anybody's knowing, and than any hold of a dead process lasts."""
MOST_IDLE = 315_360_000
"""Seconds; ten years, which the server can subtract from its clock."""
PAGE = 500
"""How many rows one statement is about."""

TABLE = re.compile(r"CREATE TABLE IF NOT EXISTS (\S+) \((.*?)\n\)", re.DOTALL)
COLUMN = re.compile(r"^  (?!KEY )(\w+) (\w+)(?:\((\d+)\))?.*?(PRIMARY KEY)?,?$", re.MULTILINE)
"""Of a table: name, kind, length or precision, and whether it is the key."""


async def ensure(backend: MySQLBackend, *, create: bool) -> None:
    """See that the tables are there; create them if that is wanted, else see that they are whole."""
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
        if not create:
            await _examine(backend)
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


async def _examine(backend: MySQLBackend) -> None:
    """Somebody else has made the tables: without its primary key, for example, no lock would ever be free again."""
    schema = backend.statements.schema
    named = ", ".join(quote(name.strip("`")) for name, _ in TABLE.findall(schema))
    answers = await backend.ask(backend.statements("schema_whole", named=named))
    columns: dict[str, dict[str, str]] = {}
    keys: dict[str, list[str]] = {}
    for table, column, kind in answers[0].rows:
        columns.setdefault(str(table).lower(), {})[str(column).lower()] = str(kind).lower()
    for table, column in answers[1].rows:
        keys.setdefault(str(table).lower(), []).append(str(column).lower())
    engines = {str(table).lower(): str(engine) for table, engine in answers[2].rows}
    if what := lacking(schema, columns, keys, engines):
        raise BackendRefused(
            f"{backend.address}: the tables for locks lack {', '.join(what)}; while nobody uses them, have an "
            f"administrator make them as these are:\n{schema}"
        )


def lacking(
    schema: str,
    columns: Mapping[str, Mapping[str, str]],
    keys: Mapping[str, Collection[str]],
    engines: Mapping[str, str],
) -> list[str]:
    """What the tables of ``schema`` have and those that are there have not.

    By table: what kind each column is of, which columns are the primary key, and what keeps it; all in small letters.
    """
    missing: list[str] = []
    for quoted, body in TABLE.findall(schema):
        table = quoted.strip("`").lower()
        there = columns.get(table, {})
        for column, kind, precision, key in COLUMN.findall(body):
            if column not in there:
                missing.append(f"{table}.{column}")
            elif kind == "DATETIME" and there[column] != f"datetime({precision})":
                missing.append(f"the microseconds of {table}.{column}")
            if key and [*keys.get(table, ())] != [column]:
                missing.append(f"the primary key of {table}, which is {column}")
        if engines.get(table, "").lower() != "innodb":
            missing.append(f"InnoDB for {table}")
    return missing


def check_idle(idle: object) -> int:
    """The µs of a number of seconds that is long enough for purging; raises :class:`ConfigError` for anything else."""
    number = isinstance(idle, int | float) and not isinstance(idle, bool)
    if not number or not math.isfinite(idle) or not LEAST_IDLE <= idle <= MOST_IDLE:  # type: ignore[arg-type,operator]  # it is a number
        raise ConfigError(
            f"idle must be a number of seconds from {LEAST_IDLE} to {MOST_IDLE}, not {shorten(idle)}"
        )
    return round(idle * 1_000_000)  # type: ignore[operator]  # as above


async def purge(backend: MySQLBackend, idle: int) -> int:
    """Delete what nobody has needed for ``idle`` µs, whichever mode made it; how many rows of locks there were."""
    statements = backend.statements
    long_ago = statements("long_ago", idle=idle, block=BLOCK)
    words = {
        "namespace": quote(backend.settings.namespace),
        "idle": idle,
        "long_ago": long_ago,
        "count": PAGE,
    }
    gone = 0
    for look, delete in (("aged", "purge"), ("aged_documents", "purge_documents")):
        after = ""
        while True:
            [rows] = await backend.ask(statements(look, after=quote(after), **words))
            ids = [str(row[0]) for row in rows.rows]
            if not ids:
                break
            answers = await backend.ask(statements(delete, ids=", ".join(map(quote, ids)), **words))
            gone += answers[-1].changed if delete == "purge" else 0
            after = ids[-1]
    return gone
