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
    """Claims that were released within their ttl, and for how long their locks stay taken by nobody."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._released: OrderedDict[RedisClaim, tuple[float, float]] = OrderedDict()

    def add(self, claim: RedisClaim, keep: float = 0) -> None:
        """It is being given back, and its lock stays taken for ``keep`` seconds."""
        released, now = self._released, self._clock()
        known = released.get(claim)
        # Said again it is no older: nobody renews it since the first time.
        released[claim] = known[0] if known else now + claim.ttl, now + keep
        # In the order in which they came, which is near to that in which they end.
        while released and (len(released) > MOST or next(iter(released.values()))[0] <= now):
            released.popitem(last=False)

    def again(self) -> list[tuple[RedisClaim, float]]:
        """Those that may still be held somewhere, and for how many seconds more each lock stays taken."""
        now = self._clock()
        return [(claim, max(0.0, kept - now)) for claim, (end, kept) in self._released.items() if end > now]
