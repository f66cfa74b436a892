"""What goes wrong, and how often: tasks that are cancelled, blocks that take longer than their ttl."""

from __future__ import annotations

from benchmarks.measure import Report
from benchmarks.scenarios.context import RedisContext

__all__ = ["safety"]

TTL = 1.0
"""Seconds; of blocks that take longer."""


def safety(context: RedisContext) -> Report:
    """Locks that nobody knows that they hold, and two who are inside together."""
    columns = {
        "orphans": "cancelled tasks that left the lock held, %",
        "double": "blocks of 3 ttl with two inside, %",
    }
    report = Report("safety", "When a task is cancelled, and when a block takes longer than the ttl", columns)
    count = context.count(300, 60)

    def play(who: str) -> tuple[float, float]:
        context.flush()
        seed = len(seeds)
        seeds.append(seed)
        orphans: float = context.workers.one("cancelled", who=who, url=context.url, count=count, seed=seed)
        double: float = context.workers.one(
            "overlong", who=who, url=context.url, count=20, ttl=TTL, seconds=3 * TTL
        )
        return orphans, double

    seeds: list[int] = []
    for who, rounds in context.alternate(min(context.rounds, 2), ["aiolock", "redis-py"], play).items():
        report.add(who, orphans=[found for found, _ in rounds], double=[found for _, found in rounds])
    report.limit("aiolock leaves nothing behind", "aiolock", "orphans", 0, "%")
    report.limit("aiolock renews", "aiolock", "double", 0, "%")
    report.notes.append(
        "Each task enters and leaves a free lock, and is cancelled within 40 passes of its loop; one second later a "
        "witness asks whether the lock is held. redis-py as its documentation shows it: it renews only if it is told to."
    )
    return report
