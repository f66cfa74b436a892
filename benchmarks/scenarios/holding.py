"""Scenarios of what is held and what waits: processor, memory, connections, commands, start-up."""

from __future__ import annotations

import os
import subprocess
import sys
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure import Report, percentile
from benchmarks.scenarios.context import RedisContext

__all__ = ["connections", "importing", "leases", "memory", "waiting"]

PERIOD = 2.0
"""Seconds between heartbeats of a process that waits for locks of the default ttl."""


def leases(context: RedisContext) -> Report:
    """Ten thousand leases, kept alive."""
    # Quick: as many renewals per second.
    count, ttl = context.count(10_000, 2000), context.count(30, 6)
    # Renewals come when two thirds of the ttl are left: a third of it is one round of them.
    seconds = context.count(3, 1) * ttl / 3
    columns = {
        "share": "% of one core",
        "p50": "lateness p50, ms",
        "p99": "lateness p99, ms",
        "renewals": "renewals",
        "alive": "held at the end",
    }
    report = Report(
        "leases", f"{count:,} leases held by one process, ttl {ttl:g} s, for {seconds:g} s", columns
    )
    report.notes.append(
        "Lateness: from the moment a renewal was due until its answer was used. All leases were taken within a few "
        "seconds, so their renewals come in bursts."
    )
    rounds = [
        context.calm.play(
            lambda: context.workers.fresh("leases", url=context.url, count=count, ttl=ttl, seconds=seconds)
        )
        for _ in range(1)
    ]
    report.add(
        "aiolock",
        share=[found["share"] * 100 for found in rounds],
        p50=[percentile(found["lateness"], 50) * 1000 for found in rounds],
        p99=[percentile(found["lateness"], 99) * 1000 for found in rounds],
        renewals=[found["renewals"] for found in rounds],
        alive=[found["alive"] for found in rounds],
    )
    report.limit("processor", "aiolock", "share", 2.0, "% of one core")
    report.limit("lateness p99 (ttl/30)", "aiolock", "p99", ttl / 30 * 1000, "ms")
    return report


def memory(context: RedisContext) -> Report:
    """Bytes per lease and per waiter."""
    count = context.count(1000, 300)
    report = Report("memory", "Memory by tracemalloc", {"bytes": "bytes each"})
    report.notes.append("Of a waiting task: beyond a task that waits for a plain future.")
    one: dict[str, Any] = {"locks": 1, "fair": False, "share": False}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "held lease": ("held", {}),
        "waiting task, one lock object": ("waiting", {**one, "share": True}),
        "waiting task, lock object of its own": ("waiting", one),
        "waiting task, fair=True": ("waiting", {**one, "fair": True, "share": True}),
        "waiting task, each for another lock": ("waiting", {**one, "locks": count}),
    }

    def play(kind: str) -> float:
        context.flush()
        job, params = kinds[kind]
        return float(context.workers.fresh(job, url=context.url, count=count, **params))

    for kind, rounds in context.alternate(min(context.rounds, 2), list(kinds), play).items():
        report.add(kind, bytes=rounds)
        report.limit(kind, kind, "bytes", 1536 if kind == "held lease" else 1024, "bytes")
    return report


def connections(context: RedisContext) -> Report:
    """How many connections a process needs for its waiters."""
    tasks = context.count(1000, 300)
    report = Report(
        "connections", f"Connections to Redis with {tasks:,} waiting tasks", {"open": "connections"}
    )

    def play(who: str) -> float:
        context.flush()
        seen: list[int] = []
        context.workers.fresh(
            "connections",
            who=who,
            url=context.url,
            tasks=tasks,
            between=lambda _: seen.append(int(context.info("clients")["connected_clients"])),
        )
        return seen[1] - seen[0]

    for who, rounds in context.alternate(1, ["aiolock", "aiolock fair", "redis-py"], play).items():
        report.add(who, open=rounds)
    report.limit("aiolock", "aiolock", "open", 2, "connections")
    report.limit("aiolock, fair=True", "aiolock fair", "open", 2, "connections")
    return report


def waiting(context: RedisContext) -> Report:
    """What waiting costs the server."""
    columns = {"scripts": "heartbeats", "pings": "pings", "all": "all commands"}
    report = Report(
        "waiting", f"Commands per heartbeat period of {PERIOD:g} s while a process waits", columns
    )
    report.notes.append(
        "Pings keep watch over connections that say nothing, here two of the holder and one of the waiter."
    )
    periods = context.count(3, 1)
    cases = {
        "100 locks, 1,000 tasks": (100, 10),
        "1,000 locks, 1,000 tasks": (1000, 1),
    }
    if context.quick:
        cases = {"100 locks, 1,000 tasks": (100, 10)}
    for case, (locks, tasks) in cases.items():
        context.flush()
        seen: list[dict[str, int]] = []
        seconds = periods * PERIOD
        context.workers.together(
            [
                ("holder", {"url": context.url, "locks": locks, "seconds": seconds}),
                ("waiter", {"url": context.url, "locks": locks, "tasks": tasks, "seconds": seconds}),
            ],
            between=lambda _, seen=seen: seen.append(context.commands()),  # type: ignore[misc]
        )
        before, after = seen[1], seen[2]
        done = {name: (count - before.get(name, 0)) / periods for name, count in after.items()}
        report.add(
            case, scripts=[done.get("evalsha", 0.0)], pings=[done.get("ping", 0.0)], all=[sum(done.values())]
        )
        report.limit(f"heartbeats, {case}", case, "scripts", 1, "per period and process")
    return report


def importing(context: RedisContext) -> Report:
    """What ``import aiolock`` takes in a fresh interpreter."""
    report = Report("import", "Import in fresh interpreters", {"ms": "ms"})
    programs = {
        "asyncio": "import asyncio",
        "aiolock": "import aiolock",
        "aiolock.backends.redis": "import aiolock.backends.redis",
        "redis.asyncio": "import redis.asyncio",
    }

    report.notes.append("Compiled before, as what is installed always is.")

    with TemporaryDirectory(prefix="aiolock-bench-") as folder:
        surroundings = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        surroundings.pop("PYTHONDONTWRITEBYTECODE", None)

        def play(what: str) -> float:
            program = (
                f"import time; t = time.perf_counter(); {programs[what]}; print(time.perf_counter() - t)"
            )
            said = subprocess.check_output([sys.executable, "-c", program], env=surroundings)
            return float(said) * 1000

        for what in programs:
            play(what)
        played = context.alternate(context.count(9, 3), list(programs), play)
    for what, rounds in played.items():
        report.add(what, ms=rounds)
    report.limit("import aiolock", "aiolock", "ms", 60, "ms")
    drivers = (
        "import aiolock, sys; print(*{'redis', 'hiredis', 'aiozk', 'aiomysql', 'anyio'} & set(sys.modules))"
    )
    found = subprocess.check_output([sys.executable, "-c", drivers], text=True).strip()
    report.notes.append(f"Drivers that it imports: {found or 'none'}.")
    return report
