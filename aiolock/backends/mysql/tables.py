"""The tables: that they are there and whole, and that they do not grow for ever.

Locking never deletes the row of a lock. Purging deletes the rows that nobody has needed for long, in statements that
look again before they delete and wait for nobody's row, so it may run at any time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.failures import NO_SUCH_TABLE, code
from aiolock.backends.mysql.formats import check_comments
from aiolock.backends.mysql.holding import BLOCK
from aiolock.backends.mysql.statements import Statements, quote
from aiolock.errors import BackendError, BackendRefused, ConfigError, UnsafeBackend, shorten

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend
    from aiolock.backends.mysql.connection import Session

__all__ = ["LEAST_IDLE", "Found", "check_idle", "check_tables", "ensure", "examine", "purge", "repairs"]

T = TypeVar("T")

LEAST_IDLE = 3600
"""Seconds; far more than any clock is set back without anybody's knowing, and than any hold of a dead process lasts."""
MOST_IDLE = 315_360_000
"""Seconds; ten years, which the server can subtract from its clock."""
PAGE = 500
"""How many rows one statement is about."""

TABLE = re.compile(r"CREATE TABLE IF NOT EXISTS (\S+) \((.*?)\n\)", re.DOTALL)
COLUMN = re.compile(r"^  (?!KEY )(\w+) (.*?)( PRIMARY KEY)?,?$", re.MULTILINE)
"""Of a table: name, definition, and whether it is the key."""
KEY = re.compile(r"^  KEY (\w+) \((\w+)\),?$", re.MULTILINE)
TYPE = re.compile(r"(\w+)(?:\((\d+)\))?( unsigned)?", re.IGNORECASE)
COLLATION = re.compile(r"COLLATE (\w+)")

WIDER = {
    kind: names[place:]
    for names in (("tinyint", "smallint", "mediumint", "int", "bigint"), ("mediumblob", "longblob"))
    for place, kind in enumerate(names)
}
"""The types that hold every value of a type."""


class Found(NamedTuple):
    """A table as the server describes it; all names in small letters."""

    columns: dict[str, tuple[str, str, bool]]
    """Type, collation, and whether NULL is allowed."""
    indexes: dict[str, list[str]]
    engine: str
    comment: str


async def ensure(backend: MySQLBackend, *, create: bool) -> None:
    """See that the tables are there and whole; create them first if they are missing and that is wanted."""
    statements = backend.statements
    try:
        await backend.ask(statements("schema_there"))
    except BackendRefused as error:
        if code(error.__cause__) not in NO_SUCH_TABLE:
            raise
        await _create(backend, create=create, missing=error)
    await examine(backend.ask, statements, backend.address)


async def _create(backend: MySQLBackend, *, create: bool, missing: BackendError) -> None:
    schema = backend.statements.schema
    if create:
        try:
            await backend.ask(schema)
            return
        except BackendRefused as error:
            missing = error
    raise BackendRefused(
        f"{backend.address}: the tables for locks are missing; have an administrator run:\n{schema}"
    ) from missing


async def check_tables(backend: MySQLBackend, session: Session) -> None:
    """Raise :class:`UnsafeBackend` if tables are there that have another data format, as ``session`` sees it."""
    packet = backend.statements("comments", named=_named(backend.statements))
    [found] = await backend.undisturbed(session, packet)
    comments = {str(table): str(comment) for table, comment in found.rows}
    check_comments(_ours(comments, backend.statements), backend.statements, backend.address)


async def examine(
    ask: Callable[[str], Awaitable[Sequence[Result]]], statements: Statements, address: str
) -> None:
    """Raise :class:`UnsafeBackend` if tables have another data format, or cannot keep what is written.

    An administrator may have made them, or the server with other defaults: without the primary key, for example, no lock
    would ever be free again, and without transactions two would have one row lock.
    """
    columns, indexes, tables = await ask(statements("schema_whole", named=_named(statements)))
    described = {
        str(table): Found({}, {}, str(engine).lower(), str(comment)) for table, engine, comment in tables.rows
    }
    for table, column, kind, collation, null in columns.rows:
        if (one := described.get(str(table))) is not None:
            one.columns[str(column).lower()] = (
                str(kind).lower(),
                str(collation or "").lower(),
                str(null) == "YES",
            )
    for table, index, column in indexes.rows:
        if (one := described.get(str(table))) is not None:
            one.indexes.setdefault(str(index).lower(), []).append(str(column).lower())
    found = _ours(described, statements)
    check_comments({table: one.comment for table, one in found.items()}, statements, address)
    if changes := repairs(statements.schema, found):
        raise UnsafeBackend(
            f"{address}: the tables for locks are not as they must be, and two could hold one lock, or nobody any; while "
            f"no program uses them, have an administrator run:\n{changes}"
        )


def _named(statements: Statements) -> str:
    return ", ".join(quote(name.strip("`")) for name, _ in TABLE.findall(statements.schema))


def _ours(found: Mapping[str, T], statements: Statements) -> dict[str, T]:
    """Of tables by the names that the server gives them, those that are ours, by our names.

    The server's lists are blind to the case of names, and there may be others that differ in that.
    """
    ours: dict[str, T] = {}
    for quoted, _ in TABLE.findall(statements.schema):
        table = quoted.strip("`")
        same = [name for name in found if name.lower() == table.lower()]
        if same:
            ours[table] = found[table if table in same else same[0]]
    return ours


def repairs(schema: str, found: Mapping[str, Found]) -> str:
    """The statements that make the tables that were found keep what those of ``schema`` keep; empty if they do."""
    statements: list[str] = []
    for quoted, body in TABLE.findall(schema):
        there = found.get(quoted.strip("`"))
        if there is None:
            # Made by nobody yet, or dropped at this moment: its first use says so.
            continue
        changes: list[str] = []
        keys: list[str] = []
        for column, definition, key in COLUMN.findall(body):
            if column not in there.columns:
                changes.append(f"ADD COLUMN {column} {definition}")
            elif not _fits(definition, *there.columns[column]):
                changes.append(f"MODIFY COLUMN {column} {definition}")
            if key:
                keys.append(column)
        primary = [*there.indexes.get("primary", ())]
        if primary != keys:
            changes += ["DROP PRIMARY KEY"] if primary else []
            changes.append(f"ADD PRIMARY KEY ({', '.join(keys)})")
        for index, column in KEY.findall(body):
            if (present := [*there.indexes.get(index, ())])[:1] != [column]:
                changes += [f"DROP KEY {index}"] if present else []
                changes.append(f"ADD KEY {index} ({column})")
        if there.engine != "innodb":
            changes.append("ENGINE=InnoDB")
        if changes:
            statements.append(f"ALTER TABLE {quoted} {', '.join(changes)};")
    return "\n".join(statements)


def _fits(definition: str, kind: str, collation: str, null: bool) -> bool:  # noqa: FBT001 - a column of the server's list
    """Whether a column keeps whatever one of that definition keeps, and compares it in the same way."""
    wanted, there = TYPE.match(definition), TYPE.match(kind)
    assert wanted is not None  # noqa: S101 - of the schema
    if there is None or (null < ("NOT NULL" not in definition)):
        return False
    name, other = wanted[1].lower(), there[1].lower()
    if name in WIDER:
        return other in WIDER[name] and bool(wanted[3]) == bool(there[3])
    if name == "datetime":
        return kind == definition.split(" ")[0].lower()
    [collate] = COLLATION.findall(definition)
    return (
        other in {"char", "varchar"}
        and int(there[2] or 0) >= int(wanted[2])
        and collation == collate
        and (name == other or name == "char")
    )


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
