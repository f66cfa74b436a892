"""A worker process: runs one job after the other, as told by lines of JSON on its standard input.

A job may pause, to start together with those of other workers, or to let somebody look at the server in between.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import traceback
from typing import Any

__all__ = ["Stage", "main"]

LIMIT = 180.0
"""Seconds after which a job is given up: something hangs."""


class Stage:
    """How a job speaks with whoever started it."""

    async def pause(self, value: Any = None) -> None:
        """Say that we are here, and wait until everybody is."""
        say({"paused": value})
        # In a thread, because a client has heartbeats and renewals to send meanwhile.
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


def say(message: dict[str, Any]) -> None:
    """One line to the parent."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def perform(job: str, params: dict[str, Any]) -> Any:
    """Run a job by its name."""
    from benchmarks import jobs

    async with asyncio.timeout(LIMIT):
        return await getattr(jobs, job)(Stage(), **params)


def main() -> None:
    """Work until standard input ends."""
    while line := sys.stdin.readline():
        order = json.loads(line)
        factory = None
        if order["loop"] == "uvloop":
            import uvloop

            factory = uvloop.new_event_loop
        gc.collect()
        try:
            with asyncio.Runner(loop_factory=factory) as runner:
                result = runner.run(perform(order["job"], order["params"]))
        except Exception:  # noqa: BLE001 - whatever it is, the parent reports it
            say({"error": traceback.format_exc()})
        else:
            say({"result": result})


if __name__ == "__main__":
    main()
