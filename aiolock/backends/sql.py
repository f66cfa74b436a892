"""Read the ``.sql`` files of the SQL servers, and check the names of their tables. No driver is imported."""

from __future__ import annotations

import re
from importlib.resources import files

from aiolock.errors import ConfigError, shorten

__all__ = ["check_table", "read_part", "read_schema", "read_statements"]

_PART = "[A-Za-z_][A-Za-z0-9_]{0,47}"
_TABLES = {
    "mysql": (re.compile("[A-Za-z0-9_]{1,48}"), "1 to 48 characters of A-Z a-z 0-9 _"),
    "postgresql": (
        re.compile(rf"(?:{_PART}\.)?{_PART}"),
        "a table or schema.table, each 1 to 48 characters of A-Z a-z 0-9 _ that do not begin with a digit",
    ),
}


def check_table(server: str, name: object) -> str:
    """Return the value of the option ``table``, if it may name the table of a server, else raise :class:`ConfigError`."""
    pattern, form = _TABLES[server]
    if not isinstance(name, str) or not pattern.fullmatch(name):
        raise ConfigError(f"table must be {form}, not {shorten(name)}")
    return name


def read_part(server: str, file: str) -> str:
    """Return the text of one file of a server, with placeholders in ``{}``."""
    return files("aiolock.backends").joinpath(server, "sql", file).read_text("utf-8").strip()


def read_schema(server: str) -> str:
    """Return the statements that create the tables of a server, with placeholders in ``{}``."""
    return read_part(server, "schema.sql")


def read_statements(server: str, *names: str) -> dict[str, str]:
    """Return the statements of some files by name, each on one line. A name is in the comment above its statement."""
    statements: dict[str, str] = {}
    for part in "\n".join(read_part(server, name) for name in names).split("-- name: ")[1:]:
        name, _, body = part.partition("\n")
        lines = [line.strip() for line in body.splitlines() if not line.startswith("--")]
        statements[name.strip()] = " ".join(line for line in lines if line)
    return statements
