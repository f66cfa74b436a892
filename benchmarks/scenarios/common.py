"""Measurements that every server of the rows engine is asked for, with what people write by hand there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.measure import Report, percentile, ratio
from benchmarks.scenarios.context import Context
from benchmarks.scenarios.draining import baton, drained

__all__ = [
    "DRAIN",
    "INTERVALS",
    "Found",
    "beats",
    "free",
    "handover",
    "hot",
    "kept",
    "one_read",
    "quickest",
    "renewal",
    "spread",
]

INTERVALS = (0.001, 0.005, 0.02, 0.1)
"""Seconds between two tries of a peer that polls; the goals count against its best one."""

Found = tuple[Counter[str], float]
"""Statements by their first word, and processor seconds."""

DRAIN = {
    "rate": "turns/s",
    "p50": "wait p50, s",
    "p99": "wait p99, s",
    "worst": "longest wait, s",
    "double": "two inside",
}

HOLDS = 1_000
"""Of the client whose renewals are counted."""
WRITES = {"INSERT", "UPDATE", "DELETE", "WITH"}
"""First words of statements that write; a compare-and-set of several rows begins with the rows that it is given."""


def free(context: Context, server: str, whos: list[str]) -> Report:
    title = f"{server}: free lock, one after the other"
    report = Report("free", title, {"rate": "turns/s", "each": "µs each"})
    turns = context.count(400, 50)

    def play(who: str) -> float:
        rate: float = context.workers.one("single", who=who, url=context.url, turns=turns)[0]
        return rate

    for who, rates in context.alternate(context.rounds, whos, play).items():
        report.add(who, rate=rates, each=[1e6 / rate for rate in rates])
    return report


def hot(context: Context, server: str, floor: str, peers: list[str], columns: dict[str, str]) -> Report:
    """Drain one lock; everybody has as many turns as they are fast."""
    title = f"{server}: one hot lock, drain of 4 processes x 25 tasks"
    report = Report("hot", title, columns)
    whos = ["aiolock", "aiolock fair", *peers, floor]

    def play(who: str) -> dict[str, float]:
        turns = {"aiolock": context.count(40, 4), "aiolock fair": context.count(5, 1)}.get(
            who, context.count(5, 1)
        )
        return drained(context, who, 4, 25, turns)

    for who, rounds in context.alternate(min(context.rounds, 2), whos, play).items():
        report.add(who, **{column: [found[column] for found in rounds] for column in columns})
    report.notes.append(
        f"Contenders have different numbers of turns, by how fast they are. “{floor}” is no lock, only the statements."
    )
    report.mention("aiolock", floor, "rate")
    return report


def spread(
    context: Context,
    server: str,
    floor: str,
    peers: list[str],
    polling: Sequence[str],
    columns: dict[str, str],
) -> Report:
    """A hundred locks, each wanted by one task of each of four processes, and held for 5 ms."""
    turns = context.count(5, 2)
    title = f"{server}: 100 locks, drain of 4 processes x 100 tasks x {turns} turns of 5 ms"
    report = Report("spread", title, columns)
    intervals = [f"{peer} {interval}" for peer in polling for interval in INTERVALS]
    played = context.alternate(
        min(context.rounds, 2),
        ["aiolock", "aiolock fair", *peers, *intervals, floor],
        lambda who: drained(context, who, 4, 100, turns, locks=100, hold=0.005),
    )
    for who, rounds in played.items():
        report.add(who, **{column: [found[column] for found in rounds] for column in columns})
    for peer in (*peers, *polling):
        beats(report, peer, 1)
    report.mention("aiolock", floor, "rate")
    return report


def _best(report: Report, peer: str) -> str:
    """The row of a peer that polls, at the interval at which it is fastest."""
    rates = {f"{peer} {interval}": 0.0 for interval in INTERVALS}
    for who, found in report.rows.items():
        if who in rates:
            rates[who] = found["rate"].median
    return max(rates, key=lambda who: rates[who])


def quickest(report: Report, peer: str) -> str:
    """The same by the hand-over of half of them."""
    return min(
        (who for who in report.rows if who.startswith(peer)), key=lambda who: report.rows[who]["p50"].median
    )


def beats(report: Report, peer: str, must: float) -> None:
    """The goals against a peer: so many times its rate, at no worse p99."""
    name = f"{peer} at its best interval" if f"{peer} {INTERVALS[0]}" in report.rows else peer
    best = peer if peer in report.rows else _best(report, peer)
    report.compare(f"rate, aiolock / {name}", "aiolock", best, "rate", must)
    report.compare(f"wait p99, aiolock / {name}", "aiolock", best, "p99", 1, at_most=True)


def handover(
    context: Context,
    server: str,
    pauses: dict[str, float],
    *,
    settle: float = 0.012,
    count: tuple[int, int] = (40, 6),
) -> Report:
    """Hand over when the next one has waited for ``settle`` seconds and up to a pause of its own longer."""
    report = Report(
        "handover",
        f"{server}: hand-over latency between two processes",
        {"p50": "p50, ms", "p90": "p90, ms", "p99": "p99, ms"},
    )

    def play(who: str) -> list[float]:
        # The first ones open connections.
        found = baton(context, who, context.count(*count) + 3, pauses[who], settle=settle)
        return [took / 1000 for took in found[3:]]

    for who, rounds in context.alternate(min(context.rounds, 3), list(pauses), play).items():
        report.add(who, **{f"p{p}": [percentile(found, p) for found in rounds] for p in (50, 90, 99)})
    return report


def one_read(report: Report) -> None:
    """The goal that all locks of a client are verified by one statement."""
    ours = report.rows["aiolock"]
    report.limit_of("reads for each write", ratio(ours["reads"], ours["writes"]), 1.2, "reads")


def kept(
    context: Any, look: Callable[[], Counter[str]], who: str, count: int, ttl: float, seconds: float
) -> Found:
    """Keep so many locks for a while; what the server was asked for meanwhile, and the processor time that it took."""
    seen: list[Found] = []
    context.workers.one(
        "kept",
        who=who,
        url=context.url,
        count=count,
        ttl=ttl,
        seconds=seconds,
        between=lambda _: seen.append((look(), context.processor_seconds())),
    )
    (before, start), (after, end) = seen
    return after - before, end - start


def renewal(
    context: Context,
    server: str,
    peers: list[str],
    floor: str,
    play: Callable[[str, int, float, float], Found],
) -> Report:
    """What it costs to keep a thousand locks."""
    ttl = context.count(10, 6)
    seconds = float(context.count(3, 1) * ttl)
    columns = {"writes": "writes per ttl", "reads": "reads per ttl", "processor": f"ms of {server} per ttl"}
    report = Report("renewal", f"{server}: {HOLDS:,} locks held by one client, ttl {ttl} s", columns)
    whos = ["aiolock", "aiolock, one hold", *peers, floor]

    def one(who: str) -> Found:
        return play(who.partition(",")[0], 1 if who.endswith("one hold") else HOLDS, ttl, seconds)

    for who, found in context.alternate(1, whos, one).items():
        report.add(
            who,
            writes=[sum(statements[word] for word in WRITES) * ttl / seconds for statements, _ in found],
            reads=[statements["SELECT"] * ttl / seconds for statements, _ in found],
            processor=[processor * 1000 * ttl / seconds for _, processor in found],
        )
    # Not exactly the same: a renewal may fall out of the time in which they are counted.
    report.compare(
        f"writes per ttl, {HOLDS:,} holds / one hold",
        "aiolock",
        "aiolock, one hold",
        "writes",
        1.2,
        at_most=True,
    )
    report.notes.append(
        f"“{floor}” is no lock, only the statements, three times in a ttl. The locks are acquired fifty at a time, "
        "over a third of a ttl."
    )
    for other in (floor, *peers):
        report.mention("aiolock", other, "processor")
    return report
