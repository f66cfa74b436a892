"""The statements of the ``.sql`` files, by name."""

from __future__ import annotations

import re

from aiolock.backends.sql import read_schema, read_statements

__all__ = ["FORMAT", "QUERIES", "Statements"]


QUERIES = read_statements("postgresql", "queries.sql", "transaction.sql")
"""By name; the table is not filled in."""
SCHEMA = read_schema("postgresql")
FORMAT = int(re.findall(r"data format (\d+)", SCHEMA)[0])
"""The version of the data format, which the comment of the table says."""


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
