"""Leases, with which the cluster deletes the keys of clients that have ended.

A session has a lease of its own, so that the absence of its key proves that it was not renewed for its ttl. Other rows that
may be deleted some time after their last use share leases, each of which is used for half of its ttl and never renewed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from aiolock.backends.etcd.messages import GRANT, KEEP_ALIVE, grant, granted, keep_alive
from aiolock.clock import Clock

__all__ = ["SPARE", "Leases", "seconds_of"]

DRIFT = 0.01
"""By how much the clocks of two machines may differ in speed."""
SPARE = 3
"""Seconds by which a lease is longer than the ttl of its session, so that a heartbeat finds time for both of its calls."""
STALE = 1.0
"""Seconds for which a leader that was replaced may go on renewing leases: those of the next one began that much earlier."""
SHORTEST = 600
"""Seconds of the shortest ttl of rows that share a lease."""
LONGEST = 4_000_000_000
"""Seconds, of which etcd accepts twice as much."""
KNOWN = 1_000
"""Leases of sessions that are remembered before those are forgotten that have ended."""


def seconds_of(ttl: float) -> int:
    """Return the ttl of the lease of a session."""
    return min(math.ceil(ttl * (1 + DRIFT)) + SPARE, LONGEST)


def _shared_for(ttl: float) -> int:
    """Return the ttl for which rows share a lease: doubled from the shortest one on."""
    return min(SHORTEST << max(0, math.ceil(math.log2(max(ttl, 1) / SHORTEST))), LONGEST)


class _Lease:
    """A lease, and until when it certainly lasts."""

    __slots__ = ("id", "turn", "until")

    def __init__(self) -> None:
        self.id = 0
        self.until = -math.inf
        self.turn = asyncio.Lock()


class Leases:
    """The leases of one client.

    :param call: sends a request to a path; raises :class:`BackendError`.
    """

    def __init__(self, call: Callable[[str, bytes], Awaitable[bytes]], clock: Clock) -> None:
        self._call = call
        self._clock = clock
        self._own: dict[str, _Lease] = {}
        self._shared: dict[int, _Lease] = {}

    def ready(self, ttl: float) -> int:
        """Return a shared lease that certainly lasts for ``ttl`` seconds from now; 0 if there is none."""
        lease = self._shared.get(_shared_for(ttl))
        return lease.id if lease is not None and self._lasts(lease, ttl) else 0

    async def shared(self, ttl: float) -> int:
        """Return a shared lease that certainly lasts for ``ttl`` seconds from now."""
        common = _shared_for(ttl)
        lease = self._shared.setdefault(common, _Lease())
        async with lease.turn:
            if not self._lasts(lease, ttl):
                await self._begin(lease, GRANT, grant(2 * common))
        return lease.id

    async def own(self, key: str, ttl: float) -> int:
        """Return the lease of a session, which certainly lasts for ``ttl`` seconds from now."""
        if len(self._own) >= KNOWN:
            now = self._clock()
            self._own = {each: lease for each, lease in self._own.items() if lease.until > now}
        lease = self._own.setdefault(key, _Lease())
        async with lease.turn:
            if lease.id and not self._lasts(lease, ttl):
                await self._begin(lease, KEEP_ALIVE, keep_alive(lease.id))
            if not self._lasts(lease, ttl):
                # There was none yet, or it has ended.
                await self._begin(lease, GRANT, grant(seconds_of(ttl)))
        return lease.id

    def forget(self, key: str) -> None:
        """Forget the lease of a session that has ended: it ends by itself."""
        self._own.pop(key, None)

    def clear(self) -> None:
        """Forget all leases: one of them is not there any more."""
        self._own.clear()
        self._shared.clear()

    def _lasts(self, lease: _Lease, ttl: float) -> bool:
        return lease.until >= self._clock() + min(ttl, LONGEST) * (1 + DRIFT)

    async def _begin(self, lease: _Lease, path: str, request: bytes) -> None:
        sent = self._clock()
        lease.id, seconds = granted(await self._call(path, request))
        # From the sending: the server counts from later.
        lease.until = sent + seconds - STALE if seconds else -math.inf
