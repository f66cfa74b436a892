"""A client that opens on the event loop that uses it first: a pytest fixture has no loop that it could know."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from aiolock.client import Client
from aiolock.runtime import State

__all__ = ["OpenedClient"]


class OpenedClient(Client):
    """A client of a server in memory, open for the event loop that uses it first."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._runtime.on_first_use = self._open_at_once

    def _open_at_once(self) -> None:
        asyncio.get_running_loop()
        # What is opened is in memory, so nothing is waited for.
        opening = super().open()
        try:
            opening.send(None)
        except StopIteration:
            return
        opening.close()
        raise AssertionError("a server in memory was waited for")

    async def open(self) -> Self:
        """Open it, unless it has opened by itself on this loop."""
        runtime = self._runtime
        if runtime.state is State.OPEN and runtime.loop is asyncio.get_running_loop():
            return self
        return await super().open()

    def end(self) -> None:
        """Close it on its loop, if that can still run."""
        runtime = self._runtime
        loop = runtime.loop
        if (
            runtime.state is State.OPEN
            and loop is not None
            and not loop.is_closed()
            and not loop.is_running()
        ):
            loop.run_until_complete(self.aclose())
