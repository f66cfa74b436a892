"""The statements of the ``.sql`` files, by name."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

__all__ = ["FORMAT", "Statements", "hexed", "quote"]


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
FORMAT = int(re.findall(r"data format (\d+)", SCHEMA)[0])
"""The version of the data format: what is stored, and the names of user locks. The comments of the tables say it."""

_WORD = re.compile(r"[A-Za-z0-9_.:-]*")


def quote(word: str) -> str:
    """A literal of a word that this library made: an id, an owner, a family, a namespace, the name of a user lock.

    Such a word has the same bytes in every character set, and nothing in it needs an escape in any `sql_mode`. Raises
    :class:`ValueError` for any other text.
    """
    if not _WORD.fullmatch(word):
        raise ValueError(f"{word!r} must be sent as hexadecimal digits")
    return f"'{word}'"


def hexed(text: str) -> str:
    """A literal of any text: a name, a label, a reason, a pattern. No character set can read it in another way."""
    return f"_utf8mb4 X'{text.encode().hex()}'"


class Statements:
    """What is sent, for one set of tables: ``table`` of a database, and those that are named after it."""

    def __init__(self, table: str, database: str) -> None:
        named = database.replace("`", "``").replace("{", "{{").replace("}", "}}")
        self.format = FORMAT
        self.table = table
        self.ascii = named.isascii()
        """Whether statements are the same bytes in every character set."""
        self._tables = {
            "{database}": f"`{named}`",
            "{whole}": f"`{named}`.`{table}`",
            "{table}": f"`{table}`",
            "{bids}": f"`{table}_bids`",
            "{documents}": f"`{table}_documents`",
        }
        # The tables are filled in once, not at every call.
        self._queries = {name: self._named(text) for name, text in QUERIES.items()}
        self.schema = self._named(SCHEMA)
        """The statements that create the tables, for people and for the server."""

    def _named(self, text: str) -> str:
        for word, table in self._tables.items():
            text = text.replace(word, table)
        return text

    def __call__(self, name: str, /, **words: Any) -> str:
        """The packet of that name with its words filled in."""
        return self._queries[name].format_map(words)
