"""Metrics of a client for an exporter: counters, gauges, and distributions of waits, holds and renewals."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from aiolock.errors import LossReason

__all__ = ["SECONDS", "SHARES", "Distribution", "Figures", "Histogram", "no_losses"]

SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Bounds of the buckets for waits and holds, in seconds."""
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Bounds of the buckets for the rest of a ttl at its renewal."""
Number = Literal["held", "waiting", "passed", "renewals", "renewal_failures", "cleanups"]
"""The figures that exporters read: those with other labels than the template are recorded by callbacks."""
ByTemplate = Literal["timeouts_by_template", "skipped_by_template"]
"""Those of them that are counted by template."""
GAUGES: dict[Number, tuple[str, str]] = {
    "held": ("{lease}", "Leases held at this moment"),
    "waiting": ("{task}", "Tasks that wait for a lock at this moment"),
}
"""Unit and description of each."""
COUNTERS: dict[Number, tuple[str, str]] = {
    "passed": ("{lease}", "Leases handed over to another task of the same client without the server"),
    "renewals": ("{renewal}", "Renewals requested"),
    "renewal_failures": ("{renewal}", "Renewals that ended with an error"),
    "cleanups": ("{claim}", "Claims released in the background"),
}
COUNTERS_BY_TEMPLATE: dict[ByTemplate, tuple[str, str, str]] = {
    "timeouts_by_template": ("timeouts", "{wait}", "Waits and attempts that ended without the lock"),
    "skipped_by_template": ("skipped", "{call}", "Calls of a job that another worker had, or had done"),
}
"""Name, unit and description of each."""
TEMPLATES = 1000
"""The number of templates that are counted apart: a program may make a job for each name, of which there may be millions."""
BATCH = 64
"""Number of values that are counted at once."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The recorded values, counted in buckets; counts never fall while the client is open."""

    bounds: tuple[float, ...]
    """The upper ends of all buckets but the last, which has none; a value that equals one belongs to its bucket."""
    counts: tuple[int, ...]
    """The number of values in each bucket; there is one bucket more than bounds."""
    total: float
    """The sum of all values."""
    least: float | None
    """The smallest and the largest value; ``None`` before the first."""
    most: float | None

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    @property
    def cumulative(self) -> tuple[tuple[float, int], ...]:
        """The number of values up to each bound and infinity, in the form of Prometheus."""
        sums, seen = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            sums.append((bound, seen))
        return tuple(sums)

    def quantile(self, share: float) -> float | None:
        """Return the value below which ``share`` (0 to 1) of all lie, to the width of a bucket; ``None`` without values."""
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
    """A mutable distribution."""

    __slots__ = ("_bounds", "_counts", "_least", "_most", "_new", "_total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._least = float("inf")
        self._most = float("-inf")
        self._new: list[float] = []
        """Values that are not in the counts yet: counting many at once takes a third of the time."""

    def record(self, value: float) -> None:
        """Count ``value``; every wait and every hold is recorded."""
        new = self._new
        new.append(value)
        if len(new) >= BATCH:
            self._count()

    def _count(self) -> None:
        counts, bounds, new = self._counts, self._bounds, self._new
        for value in new:
            counts[bisect_left(bounds, value)] += 1
        self._total += sum(new)
        self._least = min(self._least, *new)
        self._most = max(self._most, *new)
        new.clear()

    def snapshot(self) -> Distribution:
        """Return what was recorded so far."""
        if self._new:
            self._count()
        some = self._most >= self._least
        return Distribution(
            self._bounds,
            tuple(self._counts),
            self._total,
            self._least if some else None,
            self._most if some else None,
        )


class TemplateCounter(dict[str, int]):
    """A counter for each template of names, and under the empty one for names without a template, and for templates beyond the first thousand."""

    __slots__ = ()

    def count(self, template: str, number: int = 1) -> None:
        """Count so many more; with 0, the template has a counter from now on."""
        key = template if template in self or len(self) < TEMPLATES else ""
        self[key] = self.get(key, 0) + number


def sum_by_template(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of the counters of several clients."""
    sums: dict[str, int] = {}
    for counter in counters:
        for template, count in counter.items():
            sums[template] = sums.get(template, 0) + count
    return sums


def no_losses() -> dict[LossReason, int]:
    """Return a counter for each reason of a loss: exporters need the zeros as well."""
    return dict.fromkeys(get_args(LossReason), 0)


class Figures(TypedDict):
    """The result of :meth:`aiolock.Client.stats`."""

    held: int
    """Gauge: leases held at this moment."""
    waiting: int
    """Gauge: tasks waiting for a lock at this moment."""
    acquired: int
    """Counter: leases granted."""
    released: int
    """Counter: leases released."""
    passed: int
    """Counter: of those, handed over to another task of this client without the server."""
    waited: int
    """Counter: tasks that had to wait, with or without success."""
    timeouts: int
    """Counter: waits, and single attempts by ``timeout=0``, that ended with :class:`AcquireTimeout`."""
    timeouts_by_template: dict[str, int]
    """Counters: those by the template of the name, which is empty for a name without one."""
    skipped: int
    """Counter: calls of jobs of :meth:`Client.once` that were skipped."""
    skipped_by_template: dict[str, int]
    """Counters: those by the template of the name."""
    lost: int
    """Counter: leases lost."""
    renewals: int
    """Counter: renewals requested, per lease."""
    renewal_failures: int
    """Counter: of those, ended with an error; the lease goes on, and is renewed again soon."""
    cleanups: int
    """Counter: claims released in the background, after a cancellation, a timeout or a loss."""
    losses: dict[LossReason, int]
    """Counters: leases lost, by reason."""
    waits: Distribution
    """Seconds that tasks waited for a lock that was not free, with or without success."""
    holds: Distribution
    """Seconds from a grant to its release."""
    slack: Distribution
    """The rest of the validity at its renewal, as a share of the ttl; 0 and less came too late."""
