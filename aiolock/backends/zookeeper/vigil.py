"""A look at each new hold a moment after it began: whether others have come since. Most holds are over by then.

A holder has to learn who waits for it, so that it passes the lock on and says when it leaves that it has gone. Being told by
the server of every change of the queue from the first moment costs it a message for each turn, and us another.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiolock.backends.zookeeper.hold import Hold

__all__ = ["MOMENT", "Vigil"]

MOMENT = 0.001
"""Seconds that a hold is left alone at least; twice as many at most."""


class Vigil:
    """The holds of one client that nobody has looked at yet."""

    def __init__(self) -> None:
        self._new: list[Hold] = []
        self._old: list[Hold] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, hold: Hold) -> None:
        """Look at this one in a moment, if it still is one."""
        self._new.append(hold)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MOMENT, self._look)

    def _look(self) -> None:
        old, self._old, self._new = self._old, self._new, []
        for hold in old:
            hold.look()
        self._timer = asyncio.get_running_loop().call_later(MOMENT, self._look) if self._old else None

    def close(self) -> None:
        """Look no more."""
        self._new, self._old = [], []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
