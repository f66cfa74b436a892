"""Scenarios on PostgreSQL and SQLite, which share an engine, with what people write by hand."""

from __future__ import annotations

from benchmarks.measure import Report, percentile
from benchmarks.scenarios.context import Context
from benchmarks.scenarios.draining import baton, drained

__all__ = ["POSTGRESQL", "SQLITE"]

INTERVALS = (0.001, 0.005, 0.02, 0.1)
"""Seconds between two tries of a peer that polls; the goals count against its best one."""

DRAIN = {
    "rate": "turns/s",
    "p50": "wait p50, s",
    "p99": "wait p99, s",
    "worst": "longest wait, s",
    "double": "two inside",
}


def _free(context: Context, server: str, whos: list[str]) -> Report:
    title = f"{server}: free lock, one after the other"
    report = Report("free", title, {"rate": "turns/s", "each": "µs each"})
    turns = context.count(400, 50)

    def play(who: str) -> float:
        rate: float = context.workers.one("single", who=who, url=context.url, turns=turns)[0]
        return rate

    for who, rates in context.alternate(context.rounds, whos, play).items():
        report.add(who, rate=rates, each=[1e6 / rate for rate in rates])
    return report


def _hot(context: Context, server: str, peers: list[str], columns: dict[str, str]) -> Report:
    """Drain one lock; everybody has as many turns as they are fast."""
    title = f"{server}: one hot lock, drain of 4 processes x 25 tasks"
    report = Report("hot", title, columns)
    whos = ["aiolock", "aiolock fair", *peers]

    def play(who: str) -> dict[str, float]:
        turns = {"aiolock": context.count(40, 4), "aiolock fair": context.count(5, 1)}.get(
            who, context.count(5, 1)
        )
        return drained(context, who, 4, 25, turns)

    for who, rounds in context.alternate(min(context.rounds, 2), whos, play).items():
        report.add(who, **{column: [found[column] for found in rounds] for column in columns})
    report.notes.append("Contenders have different numbers of turns, by how fast they are.")
    return report


def _best(report: Report, peer: str) -> str:
    """The row of a peer that polls, at the interval at which it is fastest."""
    rates = {f"{peer} {interval}": 0.0 for interval in INTERVALS}
    for who, found in report.rows.items():
        if who in rates:
            rates[who] = found["rate"].median
    return max(rates, key=lambda who: rates[who])


def _handover(context: Context, server: str, pauses: dict[str, float]) -> Report:
    report = Report(
        "handover",
        f"{server}: hand-over latency between two processes",
        {"p50": "p50, ms", "p90": "p90, ms", "p99": "p99, ms"},
    )

    def play(who: str) -> list[float]:
        # The first ones open connections.
        count = context.count(40, 6) + 3
        return [took / 1000 for took in baton(context, who, count, pauses[who], settle=0.012)[3:]]

    for who, rounds in context.alternate(min(context.rounds, 3), list(pauses), play).items():
        report.add(who, **{f"p{p}": [percentile(found, p) for found in rounds] for p in (50, 90, 99)})
    return report


# --- PostgreSQL


def _postgresql_free(context: Context) -> Report:
    """A free lock, taken and left by one task, one turn after the other."""
    peers = ["upsert + update", "pg_advisory_lock", "polling row 0.1"]
    report = _free(context, "PostgreSQL", ["aiolock", *peers])
    report.notes.append(
        "The server flushes every commit. “upsert + update” is no lock, only the two statements."
    )
    report.compare("rate, aiolock / one bare upsert and one bare update", "aiolock", peers[0], "rate", 0.9)
    return report


def _postgresql_hot(context: Context) -> Report:
    """One lock that a hundred tasks of four processes want, drained."""
    polling = [
        f"{peer} {interval}" for peer in ("pg_try_advisory_lock", "polling row") for interval in INTERVALS
    ]
    columns = {**DRAIN, "connections": "connections"}
    report = _hot(context, "PostgreSQL", ["pg_advisory_lock", *polling], columns)
    report.compare("rate, aiolock / pg_advisory_lock", "aiolock", "pg_advisory_lock", "rate", 3)
    for peer in ("pg_try_advisory_lock", "polling row"):
        report.compare(
            f"rate, aiolock / {peer} at its best interval", "aiolock", _best(report, peer), "rate", 1
        )
    report.limit("connections, aiolock", "aiolock", "connections", 12, "connections")
    return report


def _postgresql_handover(context: Context) -> Report:
    """From the release in one process to the entry in another."""
    pauses = {"notify": 0.002, "aiolock": 0.002, "pg_advisory_lock": 0.002}
    report = _handover(
        context, "PostgreSQL", pauses | {f"polling row {interval}": interval for interval in INTERVALS}
    )
    report.notes.append("notify: a bare NOTIFY and its arrival at a bare listener, driven in the same way.")
    report.compare("p50, aiolock / a bare NOTIFY", "aiolock", "notify", "p50", 2, at_most=True)
    return report


POSTGRESQL = {"free": _postgresql_free, "hot": _postgresql_hot, "handover": _postgresql_handover}


# --- SQLite


def _sqlite_free(context: Context) -> Report:
    """A free lock, taken and left by one task, one turn after the other."""
    return _free(context, "SQLite", ["aiolock", "flock 0.05"])


def _sqlite_hot(context: Context) -> Report:
    """One lock that a hundred tasks of four processes want, drained."""
    report = _hot(context, "SQLite", [f"flock {interval}" for interval in INTERVALS], DRAIN)
    best = _best(report, "flock")
    report.compare("rate, aiolock / flock at its best interval", "aiolock", best, "rate", 2)
    report.notes.append("flock: a lock of a file, tried again and again, as filelock does.")
    return report


def _sqlite_handover(context: Context) -> Report:
    """From the release in one process to the entry in another."""
    return _handover(context, "SQLite", {"aiolock": 0.01} | {f"flock {each}": each for each in INTERVALS})


SQLITE = {"free": _sqlite_free, "hot": _sqlite_hot, "handover": _sqlite_handover}
