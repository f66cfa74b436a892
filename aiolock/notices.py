"""What a server said unasked, until somebody listens: the queue behind a backend's ``notice``."""

from __future__ import annotations

import asyncio
from collections import deque

from aiolock.contract import Notice

__all__ = ["Notices"]


class Notices:
    """A queue with one listener; to be used on one event loop."""

    def __init__(self) -> None:
        self._queue: deque[Notice] = deque()
        self._listener: asyncio.Future[None] | None = None

    def put(self, notice: Notice) -> None:
        """Add one and wake the listener."""
        self._queue.append(notice)
        if self._listener is not None and not self._listener.done():
            self._listener.set_result(None)

    async def get(self) -> Notice:
        """The oldest one, or the next; cancelling it loses none."""
        while not self._queue:
            self._listener = asyncio.get_running_loop().create_future()
            await self._listener
        return self._queue.popleft()
