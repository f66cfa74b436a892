"""Scenarios on ZooKeeper, with kazoo, aiozk's own recipe, and Curator."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from statistics import median

from benchmarks.measure import Report, Series, ratio
from benchmarks.scenarios.context import ZooKeeperContext
from benchmarks.scenarios.draining import drained
from benchmarks.workers import JobFailed

__all__ = ["SCENARIOS"]

SLICES = 3
"""Each round is so many short ones: what else runs on the machine then hits one of them, not one contestant."""
LIMIT = 3.0
"""Seconds that aiozk's recipe gets for a drain: it can hang for ever."""
PEERS = {"kazoo": 1.4, "curator": 1.0}
"""How many times as fast as these we must be."""


def free(context: ZooKeeperContext) -> Report:
    """A free lock, taken and left by one task, one turn after the other; the server on a core of its own."""
    columns = {"rate": "turns/s", "each": "µs each", "requests": "requests per turn"}
    report = Report("free", "ZooKeeper: free lock, one after the other, the server on another core", columns)
    turns = context.count(150, 100)
    rounds = context.rounds * context.count(SLICES, 1)

    def play(who: str) -> tuple[float, float]:
        asked = context.packets()
        rate, _ = context.workers.one("single", who=who, url=context.url, turns=turns)
        return rate, (context.packets() - asked) / turns

    whos = context.competing(report, ["aiolock", "plain node", "kazoo", "aiozk", "curator"])
    with context.pinned(apart=True):
        played = context.alternate(rounds, whos, play)
    for who, figures in played.items():
        requests = [] if who == "curator" else [asked for _, asked in figures]
        rates = [rate for rate, _ in figures]
        report.add(who, rate=rates, each=[1e6 / rate for rate in rates])
        if requests:
            report.add(who, rate=rates, each=[1e6 / rate for rate in rates], requests=requests)
    _compare(report, "aiolock")
    report.notes.append(
        "Requests are those of the whole visit over its turns, with connecting and one turn before the clock starts; "
        "Curator's also warms up its virtual machine, so they are left out."
    )
    return report


def _compare(report: Report, *ours: str) -> None:
    """Set the goals beside the peers that competed."""
    for peer, must in PEERS.items():
        for who in ours if peer in report.rows else ():
            title = who.replace(" fair", " with fair=True")
            report.compare(f"rate, {title} / {peer}", who, peer, "rate", must)


def hot(context: ZooKeeperContext) -> Report:
    """One lock that two processes want, drained."""
    turns = context.count(15, 4)
    columns = {
        "rate": "turns/s",
        "p99": "wait p99, s",
        "share": "p99 / fair share",
        "requests": "requests per turn",
        "through": "% of turns taken",
        "double": "two inside",
    }
    title = f"ZooKeeper: one hot lock, drain of 2 processes x 10 tasks x {turns} turns"
    report = Report("hot", title, columns)
    every = ["aiolock", "aiolock fair", "plain node", "kazoo", "curator", "aiozk"]
    whos = context.competing(report, every)

    def play(who: str) -> dict[str, float]:
        limit = {"limit": LIMIT} if who == "aiozk" else {}
        found = drained(context, who, 2, 10, turns, **limit)
        found["requests"] /= max(1.0, found["through"] * 20 * turns / 100)
        return found

    for who, rounds in context.alternate(min(context.rounds, 3), whos, play).items():
        names = [name for name in columns if all(name in found for found in rounds)]
        if any(found["through"] < 100 for found in rounds):
            # A rate until it hung says nothing.
            names = [name for name in names if name in {"through", "double"}]
        report.add(who, **{name: [found[name] for found in rounds] for name in names})
    _compare(report, "aiolock", "aiolock fair")
    report.notes.append(
        f"aiozk's recipe gets {LIMIT:g} s: a waiter of it can miss that its turn has come, and then it and all behind it wait "
        "for ever; it has a rate only if all get through each time. kazoo's and Curator's contenders are threads. The plain "
        "node is the lock of the textbooks: it knows no order, and each release wakes all who wait."
    )
    return report


def many(context: ZooKeeperContext) -> Report:
    """A hundred tasks of one process, each with its own lock: creates that travel together."""
    turns = context.count(6, 2)
    report = Report("many", "ZooKeeper: 100 tasks, 100 locks, one process", {"rate": "turns/s"})
    whos = context.competing(report, ["aiolock", "plain node", "kazoo", "aiozk", "curator"])

    def play(who: str) -> float:
        return drained(context, who, 1, 100, turns, locks=100)["rate"]

    for who, rates in context.alternate(context.rounds, whos, play).items():
        report.add(who, rate=rates)
    _compare(report, "aiolock")
    return report


LINES = {
    "aiolock fair": (2, 20, 200, 2000),
    "plain node": (2, 20),
    "kazoo": (2, 20, 200),
    "curator": (2, 20, 200, 2000),
}
"""How many wait, where it is bearable."""


def line(context: ZooKeeperContext) -> Report:
    """What a hand-over costs by the number of those who wait."""
    counts = [2, 20, 200, 2000]
    columns = {str(count): f"{count:,} waiting" for count in counts}
    report = Report("line", "ZooKeeper: µs per hand-over, by the number of those who wait", columns)
    report.notes.append(
        "All of them stand in line before the first is let in; each leaves at once, and nobody comes back. The median of "
        "the first half of the line, where it is still long. aiolock's with fair=True, so that each has a node of its own."
    )
    skipped = {2000} if context.quick else set()
    competing = context.competing(report, list(LINES))
    found: dict[str, dict[str, list[float]]] = {who: {} for who in competing}
    for count in counts:
        if count in skipped:
            continue
        whos = [who for who in competing if count in LINES[who]]
        rounds = min(context.rounds, context.count(3, 1)) if count < 2000 else 1
        played = context.alternate(rounds, whos, lambda who, count=count: _tried(context, report, who, count))  # type: ignore[misc]
        for who, tries in played.items():
            if figures := [figure for figure in tries if figure is not None]:
                found[who][str(count)] = figures
    for who, figures in found.items():
        report.add(who, **figures)
    row = report.rows["aiolock fair"]
    most = "200" if context.quick else "2000"
    value = Series((math.inf,))
    if most in row:
        shortest = min(len(row[most].values), len(row["2"].values))
        value = ratio(*(Series(row[key].values[:shortest]) for key in (most, "2")))
    report.limit_of(f"cost of a hand-over, {most} waiting / 2 waiting", value, 1.3, "x")
    return report


def _tried(context: ZooKeeperContext, report: Report, who: str, count: int) -> float | None:
    try:
        return _line(context, who, count)
    except (JobFailed, RuntimeError) as failure:
        said = str(failure).strip().splitlines()[-1]
        report.notes.append(f"{who} did not get through with {count:,} waiting: {said}")
        return None


def _line(context: ZooKeeperContext, who: str, count: int) -> float:
    repeats = max(1, 16 // count)
    nodes = 1 if who == "plain node" else count + 1
    times: list[list[float]] = context.workers.one(
        "line",
        who=who,
        url=context.url,
        count=count,
        repeats=repeats,
        between=lambda _: context.until_quiet(nodes),
    )
    if any(len(entered) != count + 1 for entered in times):
        raise RuntimeError(f"{who} did not let everybody pass")
    gaps = [then - before for entered in times for before, then in pairwise(entered[: 2 + count // 2])]
    time.sleep(0.1)
    return median(gaps) * 1e6


SCENARIOS = {"free": free, "hot": hot, "many": many, "line": line}
