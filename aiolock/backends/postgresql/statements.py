"""The statements of the ``.sql`` files, by name."""

from __future__ import annotations

import re
from importlib.resources import files

__all__ = ["FORMAT", "QUERIES", "Statements"]


def _read(file: str) -> str:
    return files("aiolock.backends.postgresql").joinpath("sql", file).read_text("utf-8")


def _split(text: str) -> dict[str, str]:
    statements: dict[str, str] = {}
    for part in text.split("-- name: ")[1:]:
        name, _, body = part.partition("\n")
        lines = [line.strip() for line in body.splitlines() if not line.startswith("--")]
        statements[name.strip()] = " ".join(line for line in lines if line)
    return statements


QUERIES = _split(_read("queries.sql") + _read("transaction.sql"))
"""By name; the table is not filled in."""
SCHEMA = _read("schema.sql").strip()
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
