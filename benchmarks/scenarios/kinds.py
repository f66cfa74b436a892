"""The other kinds of lock, on every server that has them, with peers where they have them."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.contestants.base import PARTS, SEATS
from benchmarks.measure import Report
from benchmarks.scenarios.draining import drained
from benchmarks.scenarios.fleet import Fleet
from benchmarks.workers import JobFailed

__all__ = ["SCENARIOS"]

HOLD = 0.001
"""Seconds of a turn."""
LIMIT = 15.0
"""Seconds of a drain, after which those that are not through give up."""
PLAIN = "mutexes only"
COLUMNS = {
    "rate": "turns/s",
    "p50": "wait p50, s",
    "p99": "wait p99, s",
    "worst": "longest wait, s",
    "through": "% of turns taken",
}


def _drains(
    fleet: Fleet, report: Report, members: list[str], wanted: Callable[[int], list[str]], tasks: int
) -> None:
    """Two processes with half of the tasks each; without a server one process with all of them."""
    context = fleet.context
    turns = context.count(10, 4)
    absent: set[str] = set()

    def play(member: str) -> dict[str, float] | None:
        it = fleet.members[member]
        processes = 1 if it.context is None else 2
        mine = tasks // processes
        if member in absent:
            return None
        try:
            # Threads cannot be told to give up.
            limit = None if it.who == "kazoo" else LIMIT
            return drained(
                context,
                it.who,
                processes,
                mine,
                turns,
                url=it.url,
                hold=HOLD,
                names=wanted(mine),
                limit=limit,
            )
        except JobFailed as failure:
            # That a server has no such lock is known by what is raised; anything else is a defect.
            if not any(word in str(failure) for word in ("UnsupportedKind", "NotImplementedError")):
                raise
            absent.add(member)
            return None

    for member, rounds in context.alternate(min(context.rounds, 3), members, play).items():
        if figures := [found for found in rounds if found is not None]:
            report.add(member, **{column: [found[column] for found in figures] for column in COLUMNS})
    if absent:
        report.notes.append(f"Has no such lock: {', '.join(sorted(absent))}.")


def reading(fleet: Fleet) -> Report:
    """Many who read, few who write."""
    title = "Read-write lock: 40 tasks, 2 of them write, turns of 1 ms"
    report = Report("reading", title, COLUMNS)
    report.notes.append(
        "“Mutexes only” has a plain lock where the others have two sides: so much are readers worth."
    )
    names = list(fleet.members)
    _drains(fleet, report, names, lambda tasks: ["write page"] + ["read page"] * (tasks - 1), 40)
    return report


def seats(fleet: Fleet) -> Report:
    """More who want a permit than there are."""
    report = Report("seats", f"Semaphore of {SEATS}: 100 tasks, turns of 1 ms", COLUMNS)
    names = [name for name in fleet.members if not name.endswith(PLAIN)]
    _drains(fleet, report, names, lambda tasks: ["seat bus"] * tasks, 100)
    return report


def together(fleet: Fleet) -> Report:
    """Several locks as one."""
    context = fleet.context
    columns = {"rate": "turns/s", "each": "µs each"}
    report = Report("together", f"{PARTS} free locks together, one task, one turn after the other", columns)
    report.notes.append("aiolock by `lock_all`; the others, and “mutexes only”, one after the other.")
    absent: set[str] = set()

    def play(member: str) -> float | None:
        it = fleet.members[member]
        if member in absent:
            return None
        try:
            rate: float = context.workers.one(
                "single", who=it.who, url=it.url, turns=context.count(100, 30), name="every thing"
            )[0]
        except JobFailed as failure:
            if "UnsupportedKind" not in str(failure):
                raise
            absent.add(member)
            return None
        return rate

    for member, rounds in context.alternate(min(context.rounds, 3), list(fleet.members), play).items():
        if rates := [rate for rate in rounds if rate is not None]:
            report.add(member, rate=rates, each=[1e6 / rate for rate in rates])
    return report


SCENARIOS = {"reading": reading, "seats": seats, "together": together}
