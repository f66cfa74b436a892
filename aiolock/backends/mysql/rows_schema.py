"""The tables of rows and notes: the statements about them by name; create them, and check that they keep what is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from aiolock.backends.mysql.driver import MySQLDriver, StatementAnswer
from aiolock.backends.mysql.errors import NO_SUCH_TABLE, code, translate
from aiolock.backends.mysql.schema import examine
from aiolock.backends.sql import read_part, read_statements
from aiolock.errors import BackendRefused

__all__ = ["RowStatements", "ensure_tables", "examine_tables", "literal"]

QUERIES = read_statements("mysql", "rows.sql")
SCHEMA = read_part("mysql", "rows_schema.sql")
FORMAT = int(re.findall(r"data format (\d+)", SCHEMA)[0])
"""The version of the data format, which the comments of the tables say."""


def literal(value: str | bytes) -> str:
    """Return a literal that every character set and every sql_mode reads in the same way."""
    return f"X'{(value.encode() if isinstance(value, str) else value).hex()}'"


class RowStatements:
    """The statements of ``rows.sql``, by name, for the tables that are named after ``table``."""

    def __init__(self, table: str, database: str) -> None:
        named = database.replace("`", "``").replace("{", "{{").replace("}", "}}")
        self.format = FORMAT
        self.table, notes = f"{table}_rows", f"{table}_notes"
        self.ascii = named.isascii()
        """True if statements are the same bytes in every character set."""
        words = {
            "{database}": f"`{named}`",
            "{whole}": f"`{named}`.`{self.table}`",
            "{table}": f"`{self.table}`",
            "{notes}": f"`{notes}`",
        }
        self._queries = {name: _filled(text, words) for name, text in QUERIES.items()}
        tick = {"{tick}": self._queries["tick"]}
        self._queries = {name: _filled(text, tick) for name, text in self._queries.items()}
        self.schema = SCHEMA.replace("{table}", self.table).replace("{notes}", notes)
        """The statements that create the tables, for people and for the server."""

    def __call__(self, name: str, /, **values: Any) -> str:
        """Return the packet, or the part of one, of that name, with its values filled in."""
        return self._queries[name].format_map(values)


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text


async def ensure_tables(
    driver: MySQLDriver, statements: RowStatements, address: str, *, create: bool
) -> None:
    """Check that the tables are there and whole; create them first if they are missing and ``create`` is true.

    Raises :class:`BackendRefused`, or :class:`UnsafeBackend` for tables that are there, with the statements that an
    administrator has to run, and errors of the driver. Cancelling it leaves open whether the server makes the tables.
    """
    try:
        await driver.run(statements("schema_there"))
    except Exception as error:
        if code(error) not in NO_SUCH_TABLE:
            raise
        missing = (
            f"{address}: the tables for locks are missing; have an administrator run:\n{statements.schema};"
        )
        if not create:
            raise BackendRefused(missing) from error
        try:
            await driver.run(statements.schema)
        except Exception as refused:
            raise BackendRefused(f"{translate(refused, address)}\n{missing}") from refused
    await examine_tables(driver, statements, address)


async def examine_tables(driver: MySQLDriver, statements: RowStatements, address: str) -> None:
    """Raise :class:`UnsafeBackend` if tables have another data format, or cannot keep all values; it changes nothing.

    Cancelling it is cancelling :meth:`MySQLDriver.run`.
    """

    async def ask(packet: str) -> Sequence[StatementAnswer]:
        return await driver.run(packet)

    await examine(ask, statements, address)
