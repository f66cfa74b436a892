"""Compare a short run with the committed results, and fail where a ratio became clearly worse: `--gate`.

A row is one goal of a scenario. Its bound is the goal's must, or what the committed run found if that missed the must,
weakened by `TOLERANCE`. Scenarios with a row beyond its bound are played again, because a busy machine is no defect; a
row fails if it is beyond its bound in every one of `ATTEMPTS` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.measure import Goal, Report

__all__ = ["ATTEMPTS", "ROUNDS", "ROWS", "TOLERANCE", "bound", "check", "scenarios", "within"]

ROWS = {
    "redis/free": "cost, aiolock / script floor",
    "redis/shared": "cost, aiolock / script floor",
    "redis/many": "rate, aiolock / script floor",
    "redis/local": "rate, aiolock on Redis / asyncio.Lock",
    "redis/places": "cost, 5,000 / 2 places",
    "redis/handover": "p50, aiolock / publish → receive",
    "redis/commands": "per remote turn (fair=True: every turn is one)",
    "redis/memory": "held lease",
}
"""The goals that are compared, by scenario: ratios to a floor on the same machine, or figures that depend on none."""

TOLERANCE = 0.15
ROUNDS = 3
"""Rounds of each run, whose median counts."""
ATTEMPTS = 3


def scenarios() -> dict[str, list[str]]:
    """Return the names of the scenarios by suite."""
    found: dict[str, list[str]] = {}
    for name in ROWS:
        suite, _, scenario = name.partition("/")
        found.setdefault(suite, []).append(scenario)
    return found


def bound(goal: Goal, committed: Goal) -> float:
    """Return the figure beyond which a goal counts as worse than before."""
    before = committed.value.median
    if goal.at_most:
        return max(goal.must, before) * (1 + TOLERANCE)
    return min(goal.must, before) * (1 - TOLERANCE)


def within(goal: Goal, limit: float) -> bool:
    """Tell whether the median of a goal's rounds is on the good side of a bound."""
    return goal.value.median <= limit if goal.at_most else goal.value.median >= limit


def _goal(report: Report) -> Goal:
    return next(goal for goal in report.goals if goal.what == ROWS[report.name])


def check(
    play: Callable[[Mapping[str, Sequence[str]]], Iterable[Report]],
    committed: Mapping[str, Report],
    say: Callable[[str], object] = print,
) -> list[str]:
    """Play the scenarios, those with a row beyond its bound again; return the names of the rows that failed.

    `play` gets names of scenarios by suite and returns their reports. One that raised an error has failed at once.
    """
    wanted = scenarios()
    broken: list[str] = []
    for attempt in range(1, ATTEMPTS + 1):
        worse: list[str] = []
        for report in play(wanted):
            if report.failed:
                say(f"gate: {report.name} ended with an error")
                broken.append(report.name)
                continue
            goal = _goal(report)
            limit = bound(goal, _goal(committed[report.name]))
            good = within(goal, limit)
            side = "at most" if goal.at_most else "at least"
            say(
                f"gate, run {attempt}: {'ok  ' if good else 'MISS'} {report.name}, {goal.what}: "
                f"{goal.value.median:.2f} {goal.unit}, {side} {limit:.2f}"
            )
            if not good:
                worse.append(report.name)
        wanted = {
            suite: chosen
            for suite, names in wanted.items()
            if (chosen := [name for name in names if f"{suite}/{name}" in worse])
        }
        if not wanted:
            break
    return broken + [f"{suite}/{name}" for suite, names in wanted.items() for name in names]
