"""Two measurements that every kind of server is asked for: a drain of several processes, and a baton between two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.contestants.base import Span
from benchmarks.measure import percentile
from benchmarks.scenarios.context import Context

__all__ = ["baton", "drained"]


def drained(
    context: Context,
    who: str,
    processes: int,
    tasks: int,
    turns: int,
    *,
    url: str | None = None,
    between: Callable[[int], None] | None = None,
    **params: Any,
) -> dict[str, float]:
    """One drain: everybody gets all of their turns, unless there is a ``limit`` of seconds."""
    context.flush()
    cost: dict[str, float] = {}

    def look(pause: int) -> None:
        if pause:
            cost.update(context.after())
        else:
            context.before()

    jobs = [("drain", {"who": who, "url": url or context.url, "tasks": tasks, "turns": turns, **params})]
    results: list[list[Span]] = context.workers.together(jobs * processes, between=between or look)
    spans = [span for result in results for span in result]
    wanted = processes * tasks * turns
    if not params.get("limit") and len(spans) != wanted:
        raise RuntimeError(f"{who} took {len(spans)} of {wanted} turns")
    return {**figures(spans, turns, params.get("locks", 1)), **cost, "through": len(spans) / wanted * 100}


def figures(spans: list[Span], turns: int, locks: int) -> dict[str, float]:
    """What the turns of a drain say: their rate, the waits, and whether two were ever inside together."""
    if not spans:
        return {}
    start = min(asked for asked, _, _, _ in spans)
    took = max(left for _, _, left, _ in spans) - start
    waits = [entered - asked for asked, entered, _, _ in spans]
    inside: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for _, entered, left, number in spans:
        inside[number % locks].append((entered, left))
    return {
        "rate": len(spans) / took,
        "p50": percentile(waits, 50),
        "p99": percentile(waits, 99),
        "worst": max(waits),
        "share": percentile(waits, 99) / (took / turns),
        "double": sum(
            then < before for held in inside.values() for (_, before), (then, _) in pairwise(sorted(held))
        ),
    }


def baton(
    context: Context,
    who: str,
    handovers: int,
    spread: float,
    *,
    url: str | None = None,
    settle: float = 0.003,
) -> list[float]:
    """Microseconds from the release in one process to the entry in another, each time."""
    context.flush()
    with TemporaryDirectory(prefix="aiolock-bench-") as folder:
        common: dict[str, Any] = {"who": who, "url": url or context.url, "handovers": handovers}
        common["socket"] = str(Path(folder) / "baton")
        jobs = [("giver", {**common, "spread": spread, "settle": settle}), ("taker", common)]
        given, taken = context.workers.together(jobs)
    return [(took - gave) * 1e6 for gave, took in zip(given, taken, strict=True)]
