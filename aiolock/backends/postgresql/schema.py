"""The table: the statements about it, by name; create it, and check that it keeps what is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import asyncpg

from aiolock.backends.postgresql.errors import CREATED_MEANWHILE, sqlstate, translate
from aiolock.backends.sql import read_schema, read_statements
from aiolock.errors import BackendRefused, UnsafeBackend, shorten

__all__ = ["FORMAT", "QUERIES", "Statements", "ensure", "examine"]

QUERIES = read_statements("postgresql", "queries.sql", "transaction.sql")
"""By name; the table is not filled in."""
SCHEMA = read_schema("postgresql")
FORMAT = int(re.findall(r"data format (\d+)", SCHEMA)[0])
"""The version of the data format, which the comment of the table says."""
COLUMNS = {
    "key": {"text not null C"},
    "value": {"bytea not null"},
    "version": {"text not null C"},
    "expires": {"timestamp with time zone"},
}
"""The definitions that keep what is written, by column."""


class Statements:
    """The statements for one table, ``schema.name``."""

    def __init__(self, table: str) -> None:
        self.schema_name, self.table_name = table.split(".")
        self.table = f'"{self.schema_name}"."{self.table_name}"'
        self._queries = {name: self._named(text) for name, text in QUERIES.items()}
        self.schema = self._named(SCHEMA)
        """The statements that create the table, for people and for the server."""

    def _named(self, text: str) -> str:
        return text.replace("{table}", self.table)

    def __call__(self, name: str) -> str:
        """Return the statement of that name."""
        return self._queries[name]


async def ensure(driver: asyncpg.Connection, statements: Statements, address: str, *, create: bool) -> None:
    """Check the table; create it first if it is missing and ``create`` is true.

    Raises :class:`BackendRefused` if it is missing or privileges are, :class:`UnsafeBackend` if it is another one.
    Cancelling it leaves open whether the table was created.
    """
    if await examine(driver, statements, address):
        return
    missing = f"{address}: the table for locks, {statements.table}, is missing; have an administrator run:\n{statements.schema};"
    if not create:
        raise BackendRefused(missing)
    try:
        await driver.execute(statements.schema)
    except Exception as error:
        if sqlstate(error) not in CREATED_MEANWHILE:
            raise BackendRefused(f"{translate(error, address)}\n{missing}") from error
    if not await examine(driver, statements, address):
        raise BackendRefused(missing)


async def examine(driver: asyncpg.Connection, statements: Statements, address: str) -> bool:
    """Return whether the table is there; raises if it is not as it must be, or this role may not use it.

    Cancelling it changes nothing in the database.
    """
    found: Mapping[str, Any] | None = await driver.fetchrow(
        statements("described"), statements.schema_name, statements.table_name
    )
    if found is None:
        return False
    there = re.fullmatch(r"aiolock data format (\d+)", found["comment"] or "")
    if there is None or int(there[1]) != FORMAT:
        name = f"data format {there[1]}" if there else f"the comment {shorten(found['comment'])}"
        raise UnsafeBackend(
            f"{address}: the table {statements.table} has {name}, and this client has data format {FORMAT}: locks of the two would "
            "not exclude each other. Give this client a table of its own, by table=; or, when no program uses this one any "
            f"more, have an administrator drop it and make it anew:\nDROP TABLE {statements.table};\n{statements.schema};"
        )
    parts = (column.partition(" ") for column in str(found["columns"] or "").split(", "))
    columns = {name: definition for name, _, definition in parts}
    whole = all(columns.get(name) in definitions for name, definitions in COLUMNS.items())
    if found["kind"] != "r" or found["persistence"] != "p" or found["key"] != "key" or not whole:
        raise UnsafeBackend(
            f"{address}: the table {statements.table} is not as it must be (an ordinary logged table with the columns and the key "
            "below), and two clients could hold one lock; while no program uses it, have an administrator drop it and make "
            f"it anew:\nDROP TABLE {statements.table};\n{statements.schema};"
        )
    if found["missing"]:
        raise BackendRefused(
            f"{address}: this role lacks privileges on the table for locks; have an administrator run:\n"
            f"GRANT {found['missing']} ON {statements.table} TO this_role;"
        )
    return True
