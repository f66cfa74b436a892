"""``aiolock schema``: the tables that a server needs, for administrators who make them themselves."""

from __future__ import annotations

import argparse

from aiolock.cli.output import Output
from aiolock.mysql import ddl

__all__ = ["schema"]


async def schema(options: argparse.Namespace, output: Output) -> int:
    """Print them."""
    text = ddl(options.table).rstrip()
    if output.json:
        output.document({"server": options.server, "table": options.table, "statements": text})
    else:
        output.line(text)
    return 0
