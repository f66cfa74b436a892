"""What it costs that a replica confirms each grant: the same client with and without `replicas=1`."""

from __future__ import annotations

from benchmarks.measure import Report, percentile
from benchmarks.scenarios.draining import baton, drained
from benchmarks.scenarios.fleet import Fleet

__all__ = ["SCENARIOS", "WITH", "WITHOUT"]

WITHOUT, WITH = "aiolock", "aiolock, replicas=1"
COLUMNS = {
    "free": "free lock, µs",
    "many": "100 free locks, turns/s",
    "hot": "hot lock, turns/s",
    "fair": "hot lock, fair=True, turns/s",
    "p50": "hand-over p50, µs",
}


def cost(fleet: Fleet) -> Report:
    """A free lock, many of them, a hot one, and a hand-over."""
    context = fleet.context
    report = Report("cost", "A primary and its replica on one machine", COLUMNS)
    names, rounds = list(fleet.members), context.rounds
    turns, few, handovers = context.count(1_000, 100), context.count(20, 4), context.count(100, 10)

    def alone(name: str) -> float:
        rate: float = context.workers.one("single", who="aiolock", url=fleet.members[name].url, turns=turns)[
            0
        ]
        return 1e6 / rate

    def together(name: str) -> float:
        rate: float = context.workers.one(
            "many", who="aiolock", url=fleet.members[name].url, tasks=100, turns=few
        )[0]
        return rate

    def wanted(name: str, who: str) -> float:
        return drained(context, who, 2, 20, few, url=fleet.members[name].url)["rate"]

    def handed(name: str) -> float:
        # The first ones open connections.
        found = baton(context, "aiolock", handovers + 3, 0.002, url=fleet.members[name].url)
        return percentile(found[3:], 50)

    played = {
        "free": context.alternate(rounds, names, alone),
        "many": context.alternate(rounds, names, together),
        "hot": context.alternate(rounds, names, lambda name: wanted(name, "aiolock")),
        "fair": context.alternate(rounds, names, lambda name: wanted(name, "aiolock fair")),
        "p50": context.alternate(rounds, names, handed),
    }
    for name in names:
        report.add(name, **{column: found[name] for column, found in played.items()})
    for column in COLUMNS:
        report.mention(WITH, WITHOUT, column)
    report.notes.append(
        "A free lock: one task, one turn after the other. Hot lock: a drain of 2 processes x 20 tasks, which hand it over inside "
        "as well. Hand-over: from the release in one process to the entry in another. Elsewhere a replica is a round trip away from its "
        "primary, which a turn waits for in addition."
    )
    return report


SCENARIOS = {"cost": cost}
