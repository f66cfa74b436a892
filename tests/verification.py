"""`aiolock verify` under way, as an operator starts it: tests break a server meanwhile, and read the report."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.processes import STRICT_PYTHON

__all__ = ["Verification", "verifying"]

PATIENCE = 120.0
"""Seconds after which something is broken."""


class Verification:
    """The command."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.messages: list[dict[str, Any]] = []

    async def contending(self) -> str:
        """Wait until all processes contend; return the namespace."""
        async with asyncio.timeout(PATIENCE):
            while line := await self.process.stderr.readline():
                self.messages.append(json.loads(line))
                if self.messages[-1]["event"] == "contending":
                    return self.messages[-1]["namespace"]
        raise AssertionError(self.messages)

    async def report(self) -> tuple[int, dict[str, Any]]:
        """Wait for the end; return the status and the document."""
        async with asyncio.timeout(PATIENCE):
            out, err = await self.process.communicate()
        self.messages += map(json.loads, err.splitlines())
        assert out, self.messages
        document = json.loads(out)
        if document["histories"]:
            shutil.rmtree(document["histories"])
        return self.process.returncode, document


@asynccontextmanager
async def verifying(
    url: str, seconds: float, *words: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Verification]:
    """Run it with four processes, and kill it if the test ends before it does."""
    process = await asyncio.create_subprocess_exec(
        *(
            *STRICT_PYTHON,
            "-m",
            "aiolock",
            "verify",
            "--json",
            "--for",
            f"{seconds}",
            "--processes",
            "4",
            *words,
        ),
        # The processes of the command would be slowed down by it.
        env={**os.environ, "AIOLOCK_URL": url, "PYTHONASYNCIODEBUG": "", **(environment or {})},
        cwd=Path(__file__).parents[1],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Verification(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
