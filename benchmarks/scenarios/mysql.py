"""Scenarios on MySQL or MariaDB, with what people write by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.measure import Report
from benchmarks.scenarios import common
from benchmarks.scenarios.context import MySQLContext
from benchmarks.scenarios.draining import drained

__all__ = ["SCENARIOS"]

BY_HAND = ["for update", "get_lock", "insert + delete, random wait", "polling 0.01", "polling 0.1"]
NOT_FLUSHED = "aiolock lease, not flushed"


@contextmanager
def flushed(context: MySQLContext, who: str) -> Iterator[str]:
    """Have the server flush every commit, as it does by default, or none if the name says so; the contestant's name."""
    if who != NOT_FLUSHED:
        yield who
        return
    context.run("SET GLOBAL innodb_flush_log_at_trx_commit = 0")
    try:
        yield "aiolock lease"
    finally:
        context.run("SET GLOBAL innodb_flush_log_at_trx_commit = 1")


def free(context: MySQLContext) -> Report:
    """A free lock, taken and left by one task, one turn after the other."""
    report = Report("free", "MySQL: free lock, one after the other", {"rate": "turns/s", "each": "µs each"})
    report.notes.append(
        "The server flushes every commit, as it does by default; for the row “not flushed” it does so once a second. "
        "“select 1” is no lock, only its two round trips."
    )
    turns = context.count(400, 100)

    def play(who: str) -> float:
        with flushed(context, who) as name:
            rate: float = context.workers.one("single", who=name, url=context.url, turns=turns)[0]
        return rate

    whos = ["select 1", "aiolock session", "aiolock lease", NOT_FLUSHED, "aiolock row", *BY_HAND[:4]]
    for who, rates in context.alternate(context.rounds, whos, play).items():
        report.add(who, rate=rates, each=[1e6 / rate for rate in rates])
    return report


DRAIN = {
    "rate": "turns/s",
    "p50": "wait p50, s",
    "p99": "wait p99, s",
    "worst": "longest wait, s",
    "statements": "statements per turn",
    "connections": "connections",
    "double": "two inside",
}


def hot(context: MySQLContext) -> Report:
    """One lock that a hundred tasks of four processes want, drained."""
    title = "MySQL: one hot lock, drain of 4 processes x 25 tasks"
    report = Report("hot", title, DRAIN)
    fast = {"aiolock session": context.count(100, 10), "aiolock lease": context.count(20, 4)}
    fast |= {
        NOT_FLUSHED: context.count(20, 4),
        "for update": context.count(15, 4),
        "get_lock": context.count(15, 4),
        "polling 0.01": context.count(6, 2),
    }
    whos = [
        "aiolock session",
        "aiolock lease",
        "aiolock lease, no passing",
        NOT_FLUSHED,
        "aiolock row",
        *BY_HAND,
    ]

    def play(who: str) -> dict[str, float]:
        with flushed(context, who) as name:
            turns = fast.get(who, context.count(3, 1))
            found = drained(context, name, 4, 25, turns)
        found["statements"] /= 100 * turns
        return found

    played = context.alternate(min(context.rounds, 2), whos, play)
    for who, rounds in played.items():
        report.add(who, **{column: [found[column] for found in rounds] for column in DRAIN})
    for mode, must in (("session", 10.0), ("lease", 0.4)):
        who = f"aiolock {mode}"
        report.compare(f"rate, {who} / for update", who, "for update", "rate", must)
        report.limit(f"connections, {who}", who, "connections", 12, "connections")
    report.notes.append(
        "Contenders have from 1 to 100 turns each, by how fast they are. “No passing” is the same mode with the passing of "
        "the lock among the tasks of a process turned off; there is no such setting. Connections: the most at one time."
    )
    return report


def spread(context: MySQLContext) -> Report:
    """A hundred locks, each wanted by one task of each of four processes, and held for 5 ms."""
    turns = context.count(3, 2)
    title = f"MySQL: 100 locks, drain of 4 processes x 100 tasks x {turns} turns of 5 ms"
    report = Report("spread", title, DRAIN)
    whos = ["aiolock session", "aiolock lease", NOT_FLUSHED, "for update", "polling 0.01", "polling 0.1"]

    def play(who: str) -> dict[str, float]:
        with flushed(context, who) as name:
            found = drained(context, name, 4, 100, turns, locks=100, hold=0.005)
        found["statements"] /= 400 * turns
        return found

    played = context.alternate(min(context.rounds, 2), whos, play)
    for who, rounds in played.items():
        report.add(who, **{column: [found[column] for found in rounds] for column in DRAIN})
    report.notes.append(
        "Each process of ours may have 16 connections that wait (the option “connections”); “for update” has one for each task."
    )
    return report


def handover(context: MySQLContext) -> Report:
    """From the release in one process to the entry in another."""
    pauses = dict.fromkeys(
        ("aiolock session", "aiolock lease", "aiolock row", "for update", "get_lock"), 0.002
    )
    pauses |= {"insert + delete, random wait": 0.02, "polling 0.01": 0.01, "polling 0.1": 0.1}
    return common.handover(context, "MySQL", pauses)


SCENARIOS = {"free": free, "hot": hot, "spread": spread, "handover": handover}
