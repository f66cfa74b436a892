"""Scenarios of several processes that want one lock."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measure import Report, percentile
from benchmarks.scenarios.context import RedisContext
from benchmarks.scenarios.draining import baton, drained
from benchmarks.scenarios.turning import PEERS

__all__ = ["commands", "handover", "hot", "pair", "places", "waiters"]

INTERVALS = (0.001, 0.003, 0.01, 0.03)
"""Seconds of which the best polling interval is found by trying."""


def _best_interval(context: RedisContext, who: str, processes: int, tasks: int) -> str:
    rates = {
        f"{who} {interval}": drained(context, f"{who} {interval}", processes, tasks, 1)["rate"]
        for interval in (INTERVALS[:1] if context.quick else INTERVALS)
    }
    return max(rates, key=rates.__getitem__)


DRAIN = {
    "rate": "turns/s",
    "p50": "wait p50, s",
    "p99": "wait p99, s",
    "worst": "longest wait, s",
    "share": "p99 / fair share",
    "double": "two inside",
}


def _drains(
    context: RedisContext, report: Report, processes: int, tasks: int, turns: int, peers: Sequence[str] = ()
) -> str:
    best = _best_interval(context, "redis-py", processes, tasks)
    report.notes.append(
        f"The best of the polling intervals {INTERVALS} for redis-py was {best.split()[1]} s; WATCH/MULTI/EXEC polls at it too."
    )
    report.notes.append("The fair share is the length of the drain over the turns of each contender.")
    whos = ["aiolock", "aiolock fair", best, "redis-py", f"WATCH/MULTI/EXEC {best.split()[1]}"]
    whos += context.competing(report, peers)
    played = context.alternate(
        min(context.rounds, 2), whos, lambda who: drained(context, who, processes, tasks, turns)
    )
    for who, rounds in played.items():
        report.add(who, **{column: [figures[column] for figures in rounds] for column in DRAIN})
    return best


def hot(context: RedisContext) -> Report:
    """One hot lock of eight processes, drained."""
    tasks, turns = context.count(100, 5), context.count(5, 2)
    title = f"One hot lock, drain of 8 processes x {tasks} tasks x {turns} turns"
    report = Report("hot", title, DRAIN)
    best = _drains(context, report, 8, tasks, turns)
    report.compare("rate, aiolock / redis-py", "aiolock", "redis-py", "rate", 100)
    report.compare("rate, aiolock / redis-py at its best interval", "aiolock", best, "rate", 15)
    report.limit("wait p99 / fair share, fair=True", "aiolock fair", "share", 1.2, "x")
    return report


def pair(context: RedisContext) -> Report:
    """One hot lock of two processes, drained."""
    turns = context.count(5, 2)
    report = Report("pair", f"One hot lock, drain of 2 processes x 10 tasks x {turns} turns", DRAIN)
    _drains(context, report, 2, 10, turns, PEERS)
    return report


def waiters(context: RedisContext) -> Report:
    """Throughput against the number of those who wait."""
    crowds = [(2, 1), (2, 5), (2, 25), (4, 50), (8, 100)]
    if context.quick:
        crowds = [(2, 1), (2, 10)]
    columns = {f"{processes * tasks}": f"{processes} x {tasks}" for processes, tasks in crowds}
    report = Report("waiters", "Turns/s of a drain, by processes x tasks", columns)
    whos = ["aiolock", "aiolock fair", "redis-py 0.01", "redis-py"]
    found: dict[str, dict[str, list[float]]] = {who: {} for who in whos}
    for processes, tasks in crowds:
        polled = max(1, context.count(60, 20) // (processes * tasks))
        pushed = max(2, context.count(3000, 300) // (processes * tasks))
        rates = context.alternate(
            min(context.rounds, 2),
            whos,
            lambda who, processes=processes, tasks=tasks, polled=polled, pushed=pushed: drained(  # type: ignore[misc]
                context, who, processes, tasks, pushed if who.startswith("aiolock") else polled
            )["rate"],
        )
        for who in whos:
            found[who][f"{processes * tasks}"] = rates[who]
    for who in whos:
        report.add(who, **found[who])
    return report


def places(context: RedisContext) -> Report:
    """What a hand-over costs, by the number of places in the queue on the server."""
    counts = [2, 100, 5000] if context.quick else [2, 10, 100, 1000, 5000]
    columns = {"each": "µs per hand-over", "server": "µs of the server's processor"}
    report = Report("places", "Cost per hand-over, by places on the server (fair=True)", columns)
    handovers = context.count(2000, 500)

    def play(count: str) -> tuple[float, float]:
        context.flush()
        used: list[float] = []
        each = context.workers.one(
            "places",
            url=context.url,
            count=int(count),
            handovers=handovers,
            between=lambda _: used.append(context.processor_seconds()),
        )
        return each * 1e6, (used[1] - used[0]) / handovers * 1e6

    for count, rounds in context.alternate(context.rounds, [str(count) for count in counts], play).items():
        report.add(count, each=[each for each, _ in rounds], server=[server for _, server in rounds])
    report.compare("cost, 5,000 / 2 places", "5000", "2", "each", 1.3, at_most=True)
    return report


def handover(context: RedisContext) -> Report:
    """From the release in one process to the entry in another."""
    columns = {"p50": "p50, µs", "p90": "p90, µs", "p99": "p99, µs", "worst": "longest, µs"}
    report = Report("handover", "Hand-over latency between two processes", columns)
    report.notes.append(
        "publish: a bare PUBLISH and its arrival at a bare subscriber, driven in the same way. The script floor is "
        "aiolock's release script and its push on the same bare protocol."
    )
    intervals = {
        "publish": 0.0,
        "script floor": 0.0,
        "aiolock": 0.0,
        "redis-py 0.001": 0.001,
        "redis-py": 0.1,
    }
    pauses = {"redisson": 0.0, "rueidislock": 0.0, "redsync": 0.2, "redislock": 0.1}
    intervals |= {who: pauses[who] for who in context.competing(report, PEERS)}
    latencies: dict[str, list[float]] = {who: [] for who in intervals}

    def play(who: str) -> list[float]:
        slow = intervals[who] >= 0.1
        handovers = context.count(30, 8) if slow else context.count(300, 80)
        found = baton(context, who, handovers, intervals[who] or 0.001)
        latencies[who] += found
        return found

    for who, rounds in context.alternate(context.rounds, list(intervals), play).items():
        report.add(
            who,
            p50=[percentile(found, 50) for found in rounds],
            p90=[percentile(found, 90) for found in rounds],
            p99=[percentile(found, 99) for found in rounds],
            worst=[max(found) for found in rounds],
        )
    report.compare("p50, aiolock / publish → receive", "aiolock", "publish", "p50", 1.5, at_most=True)
    report.compare("p99, aiolock / publish → receive", "aiolock", "publish", "p99", 5, at_most=True)
    report.plot["latencies"] = {
        who: [round(percentile(found, step / 4), 1) for step in range(401)]
        for who, found in latencies.items()
    }
    return report


def commands(context: RedisContext) -> Report:
    """How many commands a turn costs the server."""
    columns = {"commands": "commands per turn", "inside": "calls inside scripts per turn"}
    report = Report("commands", "Server commands per turn, drain of 2 processes x 10 tasks", columns)
    report.notes.append(
        "From INFO commandstats: what clients sent while the drain ran; what scripts call inside the server is counted apart."
    )

    def play(who: str) -> tuple[float, float]:
        turns = {"redis-py": 2, "redis-py 0.01": 10}.get(who, context.count(40, 10))
        seen: list[tuple[int, int]] = []

        def look(_: int) -> None:
            seen.append((sum(context.commands().values()), sum(context.commands(inside=True).values())))

        drained(context, who, 2, 10, turns, between=look)
        (sent, inner), (sent_then, inner_then) = seen[0], seen[1]
        return (sent_then - sent) / (20 * turns), (inner_then - inner) / (20 * turns)

    whos = ["aiolock fair", "aiolock", "redis-py 0.001", "redis-py 0.01"]
    if not context.quick:
        whos.append("redis-py")
    for who, rounds in context.alternate(context.rounds, whos, play).items():
        report.add(who, commands=[sent for sent, _ in rounds], inside=[inner for _, inner in rounds])
    report.limit("per remote turn (fair=True: every turn is one)", "aiolock fair", "commands", 3, "commands")
    report.limit("per turn with local passing", "aiolock", "commands", 0.3, "commands")
    return report
