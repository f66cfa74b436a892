"""The same questions to every server: what to take is a matter of these figures, and of what each of them promises."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from random import Random
from typing import Any

from benchmarks.measure import Report, percentile
from benchmarks.scenarios.draining import baton, drained
from benchmarks.scenarios.fleet import Fleet
from benchmarks.workers import JobFailed, Workers

__all__ = ["SCENARIOS"]

TTL = 3.0
"""Seconds; of holders that are killed."""

HOLD = 0.005
"""Seconds of a turn with one of a hundred locks."""

COLUMNS = {
    "trip": "one bare round trip, µs",
    "free": "free lock, µs",
    "hot": "hot lock, turns/s",
    "fair": "hot lock, fair=True, turns/s",
    "spread": "100 locks, turns/s",
    "p50": "hand-over p50, ms",
    "p99": "hand-over p99, ms",
    "recovery": "holder killed, s",
}


def servers(fleet: Fleet) -> Report:
    """One table of all of them."""
    context = fleet.context
    report = Report("servers", "All servers, the same scenarios", COLUMNS)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in fleet.members}
    rounds = min(context.rounds, 3)
    single, few, turns = context.count(300, 60), context.count(6, 2), context.count(20, 4)
    remote = [name for name, it in fleet.members.items() if it.context is not None]

    def alone(name: str, who: str = "") -> float:
        it = fleet.members[name]
        rate: float = context.workers.one("single", who=who or it.who, url=it.url, turns=single)[0]
        return 1e6 / rate

    def shared(name: str, many: int, turns: int, who: str = "", **params: Any) -> float:
        it = fleet.members[name]
        processes = 1 if it.context is None else 2
        tasks = many // processes
        return drained(context, f"{it.who}{who}", processes, tasks, turns, url=it.url, **params)["rate"]

    played: dict[str, tuple[list[str], Callable[[str], float]]] = {
        "trip": (remote, lambda name: alone(name, "round trip")),
        "free": (list(found), alone),
        "hot": (list(found), lambda name: shared(name, 40, turns)),
        "fair": (list(found), lambda name: shared(name, 40, few, " fair")),
        "spread": (list(found), lambda name: shared(name, 200, few, locks=100, hold=HOLD)),
    }
    for column, (names, play) in played.items():

        def one(name: str, column: str = column, play: Callable[[str], float] = play) -> float:
            try:
                return play(name)
            except JobFailed as error:
                # The others are still worth their time.
                report.notes.append(_failed(name, column, error))
                return math.nan

        for name, values in context.alternate(rounds, names, one).items():
            if kept := [value for value in values if not math.isnan(value)]:
                found[name][column] = kept
    for name, latencies in context.alternate(
        rounds, remote, lambda name: _handovers(fleet, name, context.count(50, 10))
    ).items():
        found[name]["p50"] = [percentile(some, 50) for some in latencies]
        found[name]["p99"] = [percentile(some, 99) for some in latencies]
    for _ in range(context.count(4, 1)):
        try:
            for name, seconds in _recoveries(fleet, remote).items():
                found[name].setdefault("recovery", []).append(seconds)
        except JobFailed as error:
            report.notes.append(_failed("all", "recovery", error))
    for name, figures in found.items():
        report.add(name, **figures)
    report.notes.append(
        "One bare round trip: the simplest request of the server, by one client at a time; SQLite reads its file. "
        "Hot lock: a drain of 2 processes x 20 tasks (memory: one process with 40). 100 locks: each wanted by two tasks, of two "
        f"processes, for turns of {HOLD * 1000:g} ms. Holder killed: from kill -9 to the "
        f"next holder's entry, ttl {TTL:g} s, the moment in its renewals left to chance. All servers on this one machine: "
        "ZooKeeper with three members and MariaDB pay for processor time that they would have of their own elsewhere."
    )
    return report


def _failed(name: str, column: str, error: JobFailed) -> str:
    return f"{name}, {COLUMNS[column]}: a round failed: {str(error).strip().splitlines()[-1]}"


def _handovers(fleet: Fleet, name: str, count: int) -> list[float]:
    it = fleet.members[name]
    # The first ones open connections.
    found = baton(fleet.context, it.who, count + 3, 0.002, url=it.url, settle=0.012)
    return [took / 1000 for took in found[3:]]


def _recoveries(fleet: Fleet, names: list[str]) -> dict[str, float]:
    """Kill a holder on each server at the same moment: seconds until the next one is in."""
    lock = f"mourned:{time.monotonic_ns():x}"
    jobs = [{"url": fleet.members[name].url, "name": lock, "ttl": TTL} for name in names]
    killed = 0.0

    def kill(_: int) -> None:
        nonlocal killed
        # Everybody's place is known by then, and it is somewhere between two renewals.
        time.sleep(0.3 + Random().uniform(0, TTL / 3))
        killed = time.monotonic()
        victims.kill()

    with Workers() as victims:
        victims.ready([("victim", job) for job in jobs])
        entered: list[float] = fleet.context.workers.together([("heir", job) for job in jobs], between=kill)
    return {name: then - killed for name, then in zip(names, entered, strict=True)}


SCENARIOS = {"servers": servers}
