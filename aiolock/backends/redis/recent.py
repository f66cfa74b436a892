"""What was given back a moment ago. A primary that takes over may not have heard of it, and would keep it for its ttl."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from aiolock.clock import Clock

if TYPE_CHECKING:
    from aiolock.backends.redis.claim import RedisClaim

__all__ = ["Recent"]

MOST = 4096
"""So many are remembered, the latest: those before them have most likely been heard of."""


class Recent:
    """Claims that were released within their ttl."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._released: OrderedDict[RedisClaim, float] = OrderedDict()

    def add(self, claim: RedisClaim) -> None:
        """It is being given back."""
        self._released[claim] = self._clock() + claim.ttl
        if len(self._released) > MOST:
            self._released.popitem(last=False)

    def take(self) -> list[RedisClaim]:
        """Those that may still be held somewhere, once."""
        now = self._clock()
        found = [claim for claim, end in self._released.items() if end > now]
        self._released.clear()
        return found
