"""``aiolock schema``: the tables that a server needs, for administrators who make them themselves."""

from __future__ import annotations

import argparse
import re
from importlib.resources import files

from aiolock.cli.output import Output
from aiolock.errors import ConfigError, shorten

__all__ = ["schema", "statements"]

TABLE = re.compile(r"[A-Za-z0-9_$]{1,48}")
"""The names of the other tables are longer, and must fit as well."""


def statements(table: str) -> str:
    """The statements that create ``table`` and those that are named after it."""
    if not TABLE.fullmatch(table):
        raise ConfigError(f"a table is 1 to 48 characters of A-Z a-z 0-9 _ $, not {shorten(table)}")
    # As a file, because importing the backend would need its driver.
    text = files("aiolock.backends").joinpath("mysql", "schema.sql").read_text("utf-8").strip()

    def named(match: re.Match[str]) -> str:
        return f"`{table}`" if match[1] == "table" else f"`{table}_{match[1]}`"

    return re.sub(r"\{(\w+)\}", named, text) + ";"


async def schema(options: argparse.Namespace, output: Output) -> int:
    """Print them."""
    text = statements(options.table)
    if output.json:
        output.document({"server": options.server, "table": options.table, "statements": text})
    else:
        output.line(text)
    return 0
