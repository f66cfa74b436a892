"""Giving everything back at the end: within one bound for all of it, and sooner when a signal comes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from signal import Signals
from typing import Any

from aiolock.cli.inbox import Inbox
from aiolock.cli.statuses import ended_by
from aiolock.client import Client
from aiolock.clock import system_clock
from aiolock.lease import Lease

__all__ = ["HURRY", "close"]

ENDING = (Signals.SIGTERM, Signals.SIGINT, Signals.SIGHUP, Signals.SIGQUIT)
"""What says that somebody wants us to end; others may have been meant for the command, which is over."""

LAST = 0.25
"""Seconds that connections have to close, with nobody to listen at the other end."""

HURRY = 0.5
"""Seconds after a signal in which a server that answers has heard everything; what it did not hear dies by its ttl."""


async def close(client: Client, lease: Lease | None, inbox: Inbox, limit: float) -> None:
    """Release ``lease`` and close ``client``, in at most ``limit`` seconds together, and a moment.

    Raises :class:`Ended` if a signal comes meanwhile. Cancelling it stops the waiting; the client goes on for as long as
    the event loop runs.
    """
    bound = _Bound(inbox, limit)
    if lease is not None:
        await bound.wait(lease.release())
    # What was not released until now is so here, or by its ttl.
    await bound.wait(client.aclose(timeout=bound.left), LAST)
    if bound.came is not None:
        raise ended_by(bound.came)


class _Bound:
    """Seconds for several things together, of which a signal leaves only few."""

    def __init__(self, inbox: Inbox, limit: float) -> None:
        self._inbox = inbox
        self._end = system_clock() + limit
        self.came: Signals | None = None

    @property
    def left(self) -> float:
        return max(0.0, self._end - system_clock())

    async def wait(self, what: Coroutine[Any, Any, None], more: float = 0.0) -> None:
        """Wait for it, as long as there is time, and for so many seconds more."""
        self._end = system_clock() + self.left + more
        task = asyncio.create_task(what)
        task.add_done_callback(lambda _: self._inbox.wake.set())
        # With no time left it still needs its first step.
        await asyncio.sleep(0)
        try:
            while not task.done() and self.left > 0:
                self._look()
                await self._inbox.wait(self.left)
        finally:
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    def _look(self) -> None:
        while (number := self._inbox.take()) is not None:
            if number in ENDING and self.came is None:
                self.came = number
                self._end = min(self._end, system_clock() + HURRY)
