"""The statements of the ``.sql`` files, by name."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from pymysql.converters import escape_string

__all__ = ["Statements", "quote"]


def _read(file: str) -> str:
    return files("aiolock.backends.mysql").joinpath(file).read_text("utf-8")


def _split(text: str) -> dict[str, str]:
    statements: dict[str, str] = {}
    for part in text.split("-- name: ")[1:]:
        name, _, body = part.partition("\n")
        lines = [line.strip() for line in body.splitlines() if not line.startswith("--")]
        statements[name.strip()] = " ".join(line for line in lines if line)
    return statements


QUERIES = _split(_read("queries.sql")) | _split(_read("sharing.sql")) | _split(_read("documents.sql"))
SCHEMA = _read("schema.sql").strip()


def quote(text: str) -> str:
    """A text as a literal; our sessions have a `sql_mode` in which backslashes escape."""
    return f"'{escape_string(text)}'"


class Statements:
    """What is sent, for one set of tables: ``table`` of a database, and those that are named after it."""

    def __init__(self, table: str, database: str) -> None:
        named = database.replace("`", "``").replace("{", "{{").replace("}", "}}")
        self._tables = {
            "{whole}": f"`{named}`.`{table}`",
            "{table}": f"`{table}`",
            "{bids}": f"`{table}_bids`",
            "{documents}": f"`{table}_documents`",
        }
        # The tables are filled in once, not at every call.
        self._queries = {name: self._named(text) for name, text in QUERIES.items()}

    def _named(self, text: str) -> str:
        for word, table in self._tables.items():
            text = text.replace(word, table)
        return text

    def __call__(self, name: str, /, **words: Any) -> str:
        """The packet of that name with its words filled in."""
        return self._queries[name].format_map(words)

    @property
    def schema(self) -> str:
        """What creates the tables, for people and for the server."""
        return self._named(SCHEMA)
