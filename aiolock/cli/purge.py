"""``aiolock purge``: delete what is left of locks that nobody has needed for long, on servers that keep it."""

from __future__ import annotations

import argparse

from aiolock.cli import settings
from aiolock.cli.output import Output
from aiolock.mysql import check_purge
from aiolock.mysql import purge as purge_rows

__all__ = ["purge"]


async def purge(options: argparse.Namespace, output: Output) -> int:
    """Delete it, and say how much it was."""
    address = settings.place(options)
    client = settings.connect(options)
    check_purge(client, idle=options.idle)
    async with client:
        gone = await purge_rows(client, idle=options.idle)
    if output.json:
        output.document({"namespace": settings.namespace(options), "idle": options.idle, "purged": gone})
    else:
        locks = "1 lock" if gone == 1 else f"{gone} locks"
        output.line(f"purged from {address}: {locks} that nobody had needed for {options.idle:.15g} s")
    return 0
