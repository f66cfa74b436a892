"""Leases, with which the cluster deletes the keys of clients that have ended.

No lease is ever renewed; a key that is to stay is written again with a later lease. The reason is etcd-io/etcd#15247: a leader
whose disk hangs goes on counting leases down, and does not learn that they are renewed by way of another member. When its disk
goes on, it has those leases revoked, although they are alive. A lease that is never renewed has ended whenever any member says
so, and therefore the absence of a session's key proves that the session was not renewed for its ttl.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from aiolock.backends.etcd.messages import GRANT, grant, granted
from aiolock.clock import Clock

__all__ = ["SHORTEST", "SPARE", "Leases", "for_rows", "for_session"]

DRIFT = 0.01
"""By how much the clocks of two machines may differ in speed."""
SPARE = 3
"""Seconds by which a lease is longer than the ttl of its sessions: the heartbeats of so long may be written with it."""
SHORTEST = 600
"""Seconds of the shortest ttl for which rows have a lease."""
LONGEST = 4_000_000_000
"""Seconds, of which etcd accepts twice as much."""
KNOWN = 1_000
"""Leases that are remembered before those are forgotten that have ended."""


def for_session(ttl: float) -> int:
    """Return the seconds of the lease of a session: little more than its ttl, after which others follow."""
    return min(math.ceil(ttl * (1 + DRIFT)) + SPARE, LONGEST)


def for_rows(ttl: float) -> int:
    """Return the seconds of the lease of other rows, which is used for half of them: doubled from the shortest one on."""
    return 2 * min(SHORTEST << max(0, math.ceil(math.log2(max(ttl, 1) / SHORTEST))), LONGEST)


class _Lease:
    """The newest lease of its length, and until when it certainly lasts."""

    __slots__ = ("id", "turn", "until")

    def __init__(self) -> None:
        self.id = 0
        self.until = -math.inf
        self.turn = asyncio.Lock()


class Leases:
    """The leases of one client, by their length.

    :param call: sends a request to a path; raises :class:`BackendError`.
    """

    def __init__(self, call: Callable[[str, bytes], Awaitable[bytes]], clock: Clock) -> None:
        self._call = call
        self._clock = clock
        self._leases: dict[int, _Lease] = {}

    def ready(self, seconds: int, ttl: float) -> int:
        """Return a lease of this length that certainly lasts for ``ttl`` seconds from now; 0 if there is none."""
        lease = self._leases.get(seconds)
        return lease.id if lease is not None and self._lasts(lease, ttl) else 0

    async def get(self, seconds: int, ttl: float) -> int:
        """Return a lease of this length that certainly lasts for ``ttl`` seconds from now.

        Cancelling it may leave a lease at the cluster, which ends by itself.
        """
        if len(self._leases) >= KNOWN:
            now = self._clock()
            self._leases = {each: lease for each, lease in self._leases.items() if lease.until > now}
        lease = self._leases.setdefault(seconds, _Lease())
        async with lease.turn:
            if not self._lasts(lease, ttl):
                sent = self._clock()
                lease.id, lasts = granted(await self._call(GRANT, grant(seconds)))
                # From the sending: the server counts from later, if by a clock that may be faster.
                lease.until = sent + lasts * (1 - DRIFT)
        return lease.id

    def clear(self) -> None:
        """Forget all leases: one of them is not there any more."""
        self._leases.clear()

    def _lasts(self, lease: _Lease, ttl: float) -> bool:
        return lease.until >= self._clock() + min(ttl, LONGEST)
