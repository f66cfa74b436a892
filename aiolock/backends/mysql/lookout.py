"""Looks after places whose owners are called instead of waiting: has a turn come whose message was lost?

One timer for all places of a client. A lock that goes from hand to hand stands in line thousands of times a second, and none
of those places is there long enough to be looked at.
"""

from __future__ import annotations

import asyncio
import math

from aiolock.backends.mysql.place import Place
from aiolock.backends.mysql.sessions import Sessions

__all__ = ["Lookout"]


class Lookout:
    """Asks each place that is due to look for itself."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._next = math.inf
        """When it looks next, by the local clock."""
        self._timer: asyncio.TimerHandle | None = None
        self._round: asyncio.Task[None] | None = None

    def watch(self, when: float) -> None:
        """See that somebody looks then, or before."""
        if when >= self._next:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._next = when
        pause = max(0.0, when - self._sessions.clock())
        self._timer = asyncio.get_running_loop().call_later(pause, self._begin)

    def stop(self) -> None:
        """Nobody is in line any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        self._timer = None
        self._next = math.inf
        if not self._sessions.closed and (self._round is None or self._round.done()):
            self._round = self._sessions.spawn(self._look(), "aiolock-mysql-lookout")

    async def _look(self) -> None:
        clock = self._sessions.clock
        for place in self._places():
            if place.due <= clock() and place.look is not None:
                place.due = clock() + await place.look(place)
        due = min((place.due for place in self._places()), default=math.inf)
        if due < math.inf:
            self.watch(due)

    def _places(self) -> list[Place]:
        return [
            one for one in self._sessions.possessions() if isinstance(one, Place) and one.look is not None
        ]
