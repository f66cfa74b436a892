"""What a metrics exporter reads of a client: counters, gauges, and how waits, holds and renewals are distributed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, get_args

from aiolock.errors import LossReason

__all__ = ["FIRST", "SECONDS", "SHARES", "THIN", "Distribution", "Figures", "Histogram", "no_losses"]

SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Bounds of the buckets for waits and holds."""
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Bounds of the buckets for what was left of a ttl."""

FIRST = 1024
"""So many waits and holds are all measured; of those that come later, a part."""
THIN = 64
"""Of how many later ones each one is measured; it counts for all of them."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """How often which value was seen, in buckets; the counts only grow from one look to the next."""

    bounds: tuple[float, ...]
    """The upper ends of the buckets but the last, which has none; a value that equals one is in its bucket."""
    counts: tuple[int, ...]
    """How many values fell into each bucket: one more than there are bounds."""
    total: float
    """The sum of all values."""
    least: float | None
    """The smallest and the largest value; ``None`` before the first one."""
    most: float | None

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    @property
    def cumulative(self) -> tuple[tuple[float, int], ...]:
        """How many values were at most so great, for each bound and for infinity: what Prometheus wants."""
        sums, seen = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            sums.append((bound, seen))
        return tuple(sums)

    def quantile(self, share: float) -> float | None:
        """The value below which ``share`` (0 to 1) of them lie, as exactly as the buckets say; ``None`` without any."""
        if self.least is None or self.most is None:
            return None
        rank, low, seen = share * self.count, self.least, 0
        for bound, count in zip((*self.bounds, self.most), self.counts, strict=True):
            high = max(low, min(bound, self.most))
            if count and seen + count >= rank:
                return low + (high - low) * max(0.0, rank - seen) / count
            low, seen = max(low, high), seen + count
        return self.most


class Histogram:
    """Where values are counted; cheap enough for hot paths that call it now and then."""

    __slots__ = ("_bounds", "_counts", "_least", "_most", "_total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._least = float("inf")
        self._most = float("-inf")

    def record(self, value: float, weight: int = 1) -> None:
        """Count ``value``, which stands for ``weight`` values like it."""
        self._counts[bisect_left(self._bounds, value)] += weight
        self._total += value * weight
        if value < self._least:
            self._least = value
        if value > self._most:
            self._most = value

    def look(self) -> Distribution:
        """What was counted so far."""
        some = self._most >= self._least
        return Distribution(
            self._bounds,
            tuple(self._counts),
            self._total,
            self._least if some else None,
            self._most if some else None,
        )


def no_losses() -> dict[LossReason, int]:
    """A counter for each reason for which a lease can be lost: exporters want the zeros as well."""
    return dict.fromkeys(get_args(LossReason), 0)


class Figures(TypedDict):
    """What :meth:`aiolock.Client.stats` returns."""

    held: int
    """Gauge: leases that this client holds at this moment."""
    waiting: int
    """Gauge: tasks that wait for a lock at this moment."""
    acquired: int
    """Counter: leases that were handed out."""
    released: int
    """Counter: leases that were given back."""
    passed: int
    """Counter: of those, how many went to another task of this client without the server."""
    waited: int
    """Counter: tasks that had to wait, with or without success."""
    timeouts: int
    """Counter: waits, and single attempts by ``timeout=0``, that ended with :class:`AcquireTimeout`."""
    lost: int
    """Counter: leases that were lost."""
    renewals: int
    """Counter: renewals that were asked for, per lease."""
    renewal_failures: int
    """Counter: of those, how many ended with an error; the lease goes on, and is renewed again soon."""
    cleanups: int
    """Counter: claims that were released in the background, after a cancellation, a timeout or a loss."""
    losses: dict[LossReason, int]
    """Counters: leases that were lost, by reason."""
    waits: Distribution
    """Seconds that tasks waited for a lock that was not free, with or without success."""
    holds: Distribution
    """Seconds from a grant to its release."""
    slack: Distribution
    """What was left of the term when it was renewed, as a share of the ttl; 0 and less came too late."""
