"""The tables: create, check and purge them; and the version of the data format, by which clients refuse each other.

Locking never deletes the row of a lock. Purging deletes the rows that were not needed for long, in statements that
check again before they delete and wait for no row, so it may run at any time.

Locks of two versions of the format would not exclude each other. In modes with tables, the comments of the tables contain the
version. The session mode has none: there each connection that can have a lock takes one of the *slots* of its namespace, a
user lock that is the same in all versions, and with it the slot's *mark*, whose name has the version. A slot that is used by
a session without the mark of this version belongs to a client of another one. Marks are taken before slots, and slots before
checking, so of two clients that open at the same moment one refuses, or both. A connection that finds no free slot is not
used: there is none that others cannot see.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from aiolock.backends.mysql.connection import MySQLSession
from aiolock.backends.mysql.context import BLOCK, UNDONE, Context, quote
from aiolock.backends.mysql.errors import NO_SUCH_TABLE, code
from aiolock.clock import Deadline
from aiolock.errors import BackendRefused, BackendUnavailable, UnsafeBackend
from aiolock.validation import digest

__all__ = ["announce", "check_tables", "ensure", "examine", "purge"]

T = TypeVar("T")

PAGE = 500
"""Number of rows of one statement."""

TABLE = re.compile(r"CREATE TABLE IF NOT EXISTS `(\S+)` \((.*?)\n\)", re.DOTALL)
COLUMN = re.compile(r"^  (?!KEY |PRIMARY )(\w+) (.*?)( PRIMARY KEY)?,?$", re.MULTILINE)
"""A column of a table: name, definition, and whether it is the primary key."""
PRIMARY = re.compile(r"^  PRIMARY KEY \(([\w, ]+)\),?$", re.MULTILINE)
"""A primary key of several columns."""
KEY = re.compile(r"^  KEY (\w+) \((\w+)\),?$", re.MULTILINE)
TYPE = re.compile(r"(\w+)(?:\((\d+)\))?( unsigned)?", re.IGNORECASE)
COLLATION = re.compile(r"COLLATE (\w+)")
COMMENT = re.compile(r"aiolock data format (\d+)")

WIDER = {
    kind: names[index:]
    for names in (("tinyint", "smallint", "mediumint", "int", "bigint"), ("mediumblob", "longblob"))
    for index, kind in enumerate(names)
}
"""The types that hold every value of a type."""

SLOTS = 4096
"""Limit of the connections of one namespace that can have locks; `slots_in_use` counts as far. The same in all versions."""
TRIES = 16
"""Number of slots that one statement tries."""
CHECKS = 3
"""Number of checks after which a slot without its mark is not that of a client that is just leaving."""
NEWEST = 99
"""The highest version that is searched for, to name it."""


class Described(Protocol):
    """The answer to a statement that describes tables."""

    @property
    def rows(self) -> tuple[tuple[Any, ...], ...]:
        """Return the rows."""
        ...


class TableStatements(Protocol):
    """The statements of a set of tables."""

    format: int
    schema: str

    def __call__(self, name: str, /, **values: Any) -> str:
        """Return the packet of that name with its values filled in."""
        ...


class Found(NamedTuple):
    """A table as the server describes it; all names in small letters."""

    columns: dict[str, tuple[str, str, bool]]
    """Type, collation, and whether NULL is allowed."""
    indexes: dict[str, list[str]]
    engine: str
    comment: str


async def ensure(context: Context, *, create: bool) -> None:
    """Check that the tables are there and whole; create them first if they are missing and ``create`` is true.

    Raises :class:`BackendRefused`, or :class:`UnsafeBackend` for tables that are there, with the statement that an
    administrator has to run. Cancelling it leaves it open whether the server makes the tables; it may be called again.
    """
    statements = context.statements
    try:
        await context.ask(statements("schema_there"))
    except BackendRefused as error:
        if code(error.__cause__) not in NO_SUCH_TABLE:
            raise
        try:
            if not create:
                raise
            await context.ask(statements.schema)
        except BackendRefused as missing:
            raise BackendRefused(
                f"{context.address}: the tables for locks are missing; have an administrator run:\n{statements.schema}"
            ) from missing
    await examine(context.ask, statements, context.address)


async def check_tables(context: Context, session: MySQLSession) -> None:
    """Raise :class:`UnsafeBackend` if tables are there that have another data format, as ``session`` sees it.

    Cancelling it changes nothing.
    """
    packet = context.statements("comments", named=_named(context.statements))
    [found] = await context.execute(packet, session)
    comments = {str(table): str(comment) for table, comment in found.rows}
    _check_comments(comments, context.statements, context.address)


async def examine(
    ask: Callable[[str], Awaitable[Sequence[Described]]], statements: TableStatements, address: str
) -> None:
    """Raise :class:`UnsafeBackend` if tables have another data format, or cannot keep all values.

    An administrator may have made them, or the server with other defaults: without the primary key, for example, no lock
    would ever be free again, and without transactions two would have one row lock. Cancelling it is cancelling ``ask``.
    """
    columns, indexes, tables = await ask(statements("schema_whole", named=_named(statements)))
    described = {
        str(table): Found({}, {}, str(engine).lower(), str(comment)) for table, engine, comment in tables.rows
    }
    for table, *words in columns.rows:
        if (one := described.get(str(table))) is not None:
            name, kind, collation, null = (str(word or "").lower() for word in words)
            one.columns[name] = kind, collation, null == "yes"
    for table, index, column in indexes.rows:
        if (one := described.get(str(table))) is not None:
            one.indexes.setdefault(str(index).lower(), []).append(str(column).lower())
    _check_comments({table: one.comment for table, one in described.items()}, statements, address)
    if changes := _repairs(statements.schema, _chosen(described, _tables(statements))):
        raise UnsafeBackend(
            f"{address}: the tables for locks are not as they must be, and two clients could hold one lock, or none could get it; while "
            f"no program uses them, have an administrator run:\n{changes}"
        )


def _tables(statements: TableStatements) -> list[str]:
    """Return the names of the tables of this format."""
    return [name for name, _ in TABLE.findall(statements.schema)]


def _named(statements: TableStatements) -> str:
    return ", ".join(map(quote, _tables(statements)))


def _chosen(found: Mapping[str, T], tables: Sequence[str]) -> dict[str, T]:
    """Return those of ``tables`` that were found, by these names, given tables by the names that the server gives them.

    The server's lists are blind to the case of names, and there may be others that differ in that.
    """
    chosen: dict[str, T] = {}
    for table in tables:
        same = [name for name in found if name.lower() == table.lower()]
        if same:
            chosen[table] = found[table if table in same else same[0]]
    return chosen


def _repairs(schema: str, found: Mapping[str, Found]) -> str:
    """Return the statements that repair the found tables so that they keep all values of ``schema``; empty if they do.

    A table that is missing was not made yet, or dropped at this moment: its first use raises that.
    """
    statements: list[str] = []
    for table, body in TABLE.findall(schema):
        if (there := found.get(table)) is None:
            continue
        changes: list[str] = []
        columns = COLUMN.findall(body)
        for column, definition, _ in columns:
            if column not in there.columns:
                changes.append(f"ADD COLUMN {column} {definition}")
            elif not _fits(definition, *there.columns[column]):
                changes.append(f"MODIFY COLUMN {column} {definition}")
        keys = [column for column, _, key in columns if key]
        for several in PRIMARY.findall(body):
            keys = several.split(", ")
        if (primary := there.indexes.get("primary", [])) != keys:
            changes += ["DROP PRIMARY KEY"] if primary else []
            changes.append(f"ADD PRIMARY KEY ({', '.join(keys)})")
        for index, column in KEY.findall(body):
            if (present := there.indexes.get(index, []))[:1] != [column]:
                changes += [f"DROP KEY {index}"] if present else []
                changes.append(f"ADD KEY {index} ({column})")
        if there.engine != "innodb":
            changes.append("ENGINE=InnoDB")
        if changes:
            statements.append(f"ALTER TABLE `{table}` {', '.join(changes)};")
    return "\n".join(statements)


def _fits(definition: str, kind: str, collation: str, null: bool) -> bool:
    """Return whether a column keeps every value of one with that definition, and compares them in the same way."""
    wanted, there = TYPE.match(definition), TYPE.match(kind)
    assert wanted is not None  # noqa: S101 - of the schema
    if there is None or (null < ("NOT NULL" not in definition)):
        return False
    name, other = wanted[1].lower(), there[1].lower()
    if name in WIDER:
        return other in WIDER[name] and bool(wanted[3]) == bool(there[3])
    if name == "datetime":
        return kind == definition.split(" ")[0].lower()
    enough = other in {name, "varchar"} and int(there[2] or 0) >= int(wanted[2])
    # Bytes have no collation.
    return enough and collation == "".join(COLLATION.findall(definition))


async def purge(context: Context, idle: int) -> int:
    """Delete rows that were not needed for ``idle`` µs, whichever mode made them; return the number of rows of locks.

    Cancelling it ends it; the statement under way is carried out if it was sent.
    """
    statements = context.statements
    values = {"idle": idle, "long_ago": statements("long_ago", idle=idle, block=BLOCK), "count": PAGE}
    gone = 0
    for select, delete in (("aged", "purge"), ("aged_registers", "purge_registers")):
        after = ""
        while True:
            [rows] = await context.ask(statements(select, after=quote(after), **values))
            ids = [str(row[0]) for row in rows.rows]
            if not ids:
                break
            answers = await context.ask(statements(delete, ids=", ".join(map(quote, ids)), **values))
            gone += answers[-1].changed if delete == "purge" else 0
            after = ids[-1]
    return gone


# --- the version of the data format


def _check_comments(comments: Mapping[str, str], statements: TableStatements, address: str) -> None:
    """Raise :class:`UnsafeBackend` if tables are those of another version, given their comments; no comment is version 1."""
    chosen = _chosen(comments, _tables(statements))
    for table, comment in chosen.items():
        version = COMMENT.search(comment)
        found = int(version[1]) if version else 1
        if found != statements.format:
            dropped = ", ".join(f"`{one}`" for one in chosen)
            raise UnsafeBackend(
                f"{address}: the table {table} has data format {found}, and this client has format {statements.format}: locks "
                "of the two would not exclude each other. Give this client tables of its own, by table=; or, when no "
                "program uses these any more, have an administrator drop them and make them anew:\n"
                f"DROP TABLE {dropped};\n{statements.schema}"
            )


async def announce(context: Context, session: MySQLSession) -> None:
    """Announce the version on ``session``, before it has any lock.

    Raises :class:`UnsafeBackend` if another version is there, :class:`BackendUnavailable` if there is no free slot. Cancelling
    it leaves the slot with the session.
    """
    statements, version, namespace = context.statements, context.statements.format, context.settings.namespace
    deadline = Deadline.after(context.timeout, context.clock)
    prefix = f"aiolock:f:{digest(chr(0).join((*context.facts.scope, namespace)))}"
    query = statements("slots_in_use", prefix=prefix, version=version)

    def take(free: Sequence[int]) -> str:
        takes = (
            statements("take_slot", slot=quote(f"{prefix}:{slot}"), mark=quote(f"{prefix}:{slot}:{version}"))
            for slot in context.random.sample(free, min(TRIES, len(free)))
        )
        return f"SELECT COALESCE({', '.join(takes)}, 0); {query}"

    packet, checks = take(range(SLOTS)), 0
    strangers: set[tuple[int, int]] = set()
    while checks < CHECKS:
        answers = await context.execute(packet, session)
        used = {
            int(slot): (user, user == marked) for slot, user, marked in answers[-1].rows if user is not None
        }
        if any(int(user) == session.id for user, _ in used.values()):
            # Once is enough: a session can take several.
            packet, checks = query, checks + 1
            found = {(slot, int(user)) for slot, (user, marked) in used.items() if not marked}
            strangers = strangers & found if checks > 1 else found
            if not strangers:
                return
        else:
            free = [slot for slot in range(SLOTS) if slot not in used]
            if not free or deadline.passed():
                raise BackendUnavailable(
                    f"{context.address}: {len(used)} connections use the namespace {namespace} in the session "
                    f"mode, and there may be {SLOTS}: give some of the programs another namespace="
                )
            packet = take(free)
        await context.pause(UNDONE)
    slot, user = strangers.pop()
    others = [other for other in range(1, NEWEST + 1) if other != version]
    marks = ", ".join(f"IS_USED_LOCK({quote(f'{prefix}:{slot}:{other}')})" for other in others)
    [answer] = await context.execute(f"SELECT {marks}", session)
    known = [
        other for other, marked in zip(others, answer.rows[0], strict=True) if marked and int(marked) == user
    ]
    raise UnsafeBackend(
        f"{context.address}: a client of data format {known[0] if known else 'unknown'} uses the namespace {namespace}, and this "
        f"client has format {version}: locks of the two would not exclude each other. Stop the programs of one of the two "
        "versions first, or give this client another namespace="
    )
