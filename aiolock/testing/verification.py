"""The report of ``aiolock verify``: pure functions from a history to figures and sentences."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from aiolock.testing import checker
from aiolock.testing.history import NEVER, Event, History, Hold
from aiolock.testing.views import unique_and_rising, views

__all__ = ["SURVIVAL", "ConnectionReport", "HandOver", "Overlap", "Report", "assess"]

SURVIVAL = ("survives-restart", "survives-failover")
"""The capabilities without which a server may forget holds while it is away."""


@dataclass(frozen=True)
class Overlap:
    """Two holders inside at once; times in seconds, ``at`` since the beginning."""

    name: str
    at: float
    seconds: float
    holders: tuple[str, str]
    tokens: tuple[int, int]

    def __str__(self) -> str:
        (first, second), (one, other) = self.holders, self.tokens
        return (
            f"{self.name!r} was held by {first} (token {one}) and {second} (token {other}) at once, "
            f"for {1000 * self.seconds:.1f} ms from {self.at:.3f} s"
        )


@dataclass(frozen=True)
class HandOver:
    """The time from a release to the grant of the next in the queue, in milliseconds."""

    count: int
    median: float
    p99: float
    longest: float


@dataclass
class ConnectionReport:
    """One process: the outages of its connection, the errors of its requests, and the seconds for which it was stopped."""

    process: str
    grants: int = 0
    outages: int = 0
    away: float = 0.0
    longest: float = 0.0
    stopped: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The figures of one run; times in seconds where nothing else is said."""

    seconds: float
    grants: int
    overlaps: list[Overlap]
    tokens: list[str] | None
    """Tokens that are equal or have fallen; ``None`` where the server does not promise that they rise."""
    told_late: list[str]
    losses: dict[str, int]
    forgotten: int
    """Holds that the server did not know any more although their leases ran."""
    rate: float
    hand_over: HandOver | None
    stretch: float
    """The longest time without a grant."""
    stretch_at: float
    connections: list[ConnectionReport]
    contradicted: list[str]
    """The capabilities that this history contradicts."""
    unlisted: int
    """Overlaps that are far from every outage, or all of them where the server promises to keep holds over an outage."""
    defects: list[str]
    """Complaints of the library or of asyncio."""

    @property
    def kept(self) -> bool:
        """Return whether exclusion and tokens held."""
        return not self.overlaps and not self.tokens

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the report as JSON has them."""
        report = {"kept": self.kept, **asdict(self)}
        report["losses"] = [{"reason": reason, "count": count} for reason, count in self.losses.items()]
        for one in report["connections"]:
            one["errors"] = [{"error": text, "count": count} for text, count in one["errors"].items()]
        return report


def assess(history: History, capabilities: Collection[str], ttl: float) -> Report:
    """Judge a history of mutexes, given what the server promised when it began and the ttl of the holds.

    A hold ends when its lease ended by the holder's clock; where a process did not get to run, it is excused only from having been told.
    """
    told, clock = views(history, 0.0)
    pairs = checker.overlaps(clock, grace=0)
    overlaps = [_overlap(history, *pair) for pair in pairs]
    away = list(_away(history))
    tokens = unique_and_rising(clock) if "fencing" in capabilities else None
    forgotten = [event for event in history.events if event["kind"] == "lost" and _forgotten(event)]
    excused = not {*SURVIVAL} <= {*capabilities}
    explained = [excused and _near(later.start, away, ttl) for _, later in pairs]
    over = next((event["t"] for event in history.events if event["kind"] == "over"), history.end)
    seconds = (over - history.start) / 1e9
    stretch_at, stretch = _stretch(history, over)
    return Report(
        seconds=seconds,
        grants=len(history.holds),
        overlaps=overlaps,
        tokens=tokens,
        told_late=checker.told(told),
        losses=dict(Counter(event["reason"] for event in history.events if event["kind"] == "lost")),
        forgotten=len(forgotten),
        rate=len(history.holds) / seconds if seconds else 0.0,
        hand_over=_hand_over(history),
        stretch=stretch,
        stretch_at=stretch_at,
        connections=_connections(history),
        contradicted=_contradicted(
            capabilities,
            overlaps=bool(overlaps),
            tokens=bool(tokens),
            after_outage=any(_near(event["t"], away, ttl) for event in forgotten),
            without_outage=any(not _near(event["t"], away, ttl) for event in forgotten),
        ),
        unlisted=explained.count(False),
        defects=[event["what"] for event in history.events if event["kind"] == "error"],
    )


def _overlap(history: History, earlier: checker.Belief, later: checker.Belief) -> Overlap:
    return Overlap(
        name=later.hold.name,
        at=(later.start - history.start) / 1e9,
        seconds=(min(earlier.end, later.end, history.end) - later.start) / 1e9,
        holders=(earlier.hold.process, later.hold.process),
        tokens=(earlier.hold.token or 0, later.hold.token or 0),
    )


def _contradicted(
    capabilities: Collection[str], *, overlaps: bool, tokens: bool, after_outage: bool, without_outage: bool
) -> list[str]:
    """Return the promised words that do not hold. Whether a server restarted or another took over, clients do not see."""
    broken = {
        "exclusion": overlaps,
        "fencing": tokens,
        "no-eviction": without_outage,
        **dict.fromkeys(SURVIVAL, after_outage),
    }
    return [word for word, contradicted in broken.items() if contradicted and word in capabilities]


def _forgotten(event: Event) -> bool:
    """Return whether a loss is one that the server told before the lease had ended by its own clock."""
    return bool(event["reason"] == "revoked" and event["until"] == event["t"])


def _away(history: History) -> Iterator[tuple[float, float]]:
    """Yield the windows, in ns, in which a process had lost its connection."""
    since: dict[tuple[str, str], float] = {}
    for event in history.events:
        if event["kind"] == "connection":
            key = event["process"], event["address"]
            if event["what"] == "lost":
                since.setdefault(key, event["t"])
            else:
                yield since.pop(key, event["t"]), event["t"]
    for start in since.values():
        yield start, history.end


def _near(time: float, windows: list[tuple[float, float]], ttl: float) -> bool:
    """Return whether a time is at most one ttl away from a window."""
    return any(start - ttl * 1e9 <= time <= end + ttl * 1e9 for start, end in windows)


def _hand_over(history: History) -> HandOver | None:
    """Measure releases while a process waited for the lock, up to the next grant."""
    took = []
    by_name: dict[str, list[Hold]] = defaultdict(list)
    for hold in sorted(history.holds, key=lambda hold: hold.ret):
        by_name[hold.name].append(hold)
    for holds in by_name.values():
        took += [
            (later.ret - earlier.release_call) / 1e6
            for earlier, later in pairwise(holds)
            if later.call < earlier.release_call < min(later.ret, earlier.lost)
        ]
    if not took:
        return None
    took.sort()
    return HandOver(len(took), median(took), took[min(len(took) - 1, len(took) * 99 // 100)], took[-1])


def _stretch(history: History, over: float) -> tuple[float, float]:
    """Return the longest time without a grant before the end as its beginning and its length, in seconds."""
    times = [history.start, *sorted(hold.ret for hold in history.holds if hold.ret <= over), over]
    longest, start = max((later - earlier, earlier) for earlier, later in pairwise(times))
    return (start - history.start) / 1e9, longest / 1e9


def _connections(history: History) -> list[ConnectionReport]:
    """Return the report of each process, in their order."""
    found = {event["process"]: ConnectionReport(event["process"]) for event in history.events}
    errors: dict[str, Counter[str]] = defaultdict(Counter)
    for event in history.events:
        one, kind = found[event["process"]], event["kind"]
        if kind == "connection" and event["what"] == "lost":
            one.outages += 1
        elif kind == "connection" and event["seconds"] is not None:
            one.away += event["seconds"]
            one.longest = max(one.longest, event["seconds"])
        elif kind == "trouble":
            errors[event["process"]][f"{event['error']}: {event['what']}"] += 1
    for hold in history.holds:
        found[hold.process].grants += 1
    for name, one in found.items():
        one.errors = dict(errors[name].most_common())
        one.stopped = sum(
            (min(cont, history.end) - stop) / 1e9 for stop, cont in history.stops[name] if stop < NEVER
        )
    return [found[name] for name in sorted({attempt.process for attempt in history.attempts})]
