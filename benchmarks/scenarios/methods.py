"""Every method that articles name, on the server that they name it for: the same goods are sold by each."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.jobs.selling import WORK, Method
from benchmarks.measure import Report, percentile
from benchmarks.scenarios.context import Context
from benchmarks.workers import JobFailed, Workers
from examples.flash_sale.goods import STORES

__all__ = ["SCENARIOS", "Market", "offered"]

PATIENCE = 25.0
"""Seconds after a seller was killed in which the next piece has to be sold."""

COLUMNS = {
    "alone": "alone, ms a sale",
    "rate": "20 buyers, sales/s",
    "p50": "wait p50, ms",
    "p99": "wait p99, ms",
    "over": "oversold, of 100",
    "killed": "seller killed, s",
}


@dataclass(slots=True)
class Market:
    """What is compared, by its name in the table; and a context to play in."""

    methods: Mapping[str, Method]
    context: Context


NAMES = {
    "redis": "Redis",
    "mysql": "MariaDB",
    "postgresql": "PostgreSQL",
    "zookeeper": "ZooKeeper",
    "mongodb": "stand-in for MongoDB",
}
"""What the stores of the flash sale are called here, if it is something else."""
KNOWN_AS = {("zookeeper", "aiolock"): "sequential nodes (aiolock)"}


def offered(urls: Mapping[str, str], redlock: str) -> dict[str, Method]:
    """Return the methods of the stores at these URLs, by name; with Redlock on several servers of Redis."""
    found: dict[str, Method] = {}
    for store, url in urls.items():
        for way in (*(["no lock"] if store == "redis" else []), *STORES[store].WAYS, "aiolock"):
            name = f"{NAMES.get(store, store)}: {KNOWN_AS.get((store, way), way)}"
            found[name] = {"store": store, "url": url, "way": way, "locks": url}
        if store == "redis":
            found["Redis: Redlock of 3 (aiolock)"] = {**found[name], "locks": redlock}
    return found


def sale(market: Market) -> Report:
    """Sell goods by each method: alone, in a crowd, and after the death of a seller in the middle."""
    context, methods = market.context, market.methods
    report = Report("sale", "The same goods, sold by every method that articles name", COLUMNS)
    stores = sorted({(method["store"], method["url"]) for method in methods.values()})
    context.workers.one("prepared", stores=stores)
    numbers = itertools.count(100, 100)
    stock = context.count(100, 40)

    def sold(name: str, processes: int, tasks: int, pieces: int) -> dict[str, float]:
        method, number = methods[name], next(numbers)
        context.workers.one("stocked", methods=[method] * (1 + processes), number=number, stock=pieces)
        jobs = [
            ("buyers", {"method": method, "number": number, "warm": number + 1 + process, "tasks": tasks})
            for process in range(processes)
        ]
        bought = context.workers.together(jobs)
        pairs = [pair for some in bought for pair in some]
        took = max(then for _, then in pairs) - min(asked for asked, _ in pairs)
        waits = [1000 * (then - asked) for asked, then in pairs]
        oversold = max(0, context.workers.one("sold", method=method, number=number) - pieces)
        return {
            "alone": 1000 * took / len(pairs),
            "rate": len(pairs) / took,
            "p50": percentile(waits, 50),
            "p99": percentile(waits, 99),
            "over": 100 * oversold / pieces,
        }

    rounds = min(context.rounds, 3)
    alone = context.alternate(rounds, list(methods), lambda name: sold(name, 1, 1, context.count(50, 10)))
    crowd = context.alternate(rounds, list(methods), lambda name: sold(name, 2, 10, stock))
    for name in methods:
        figures = {
            column: [found[column] for found in crowd[name]] for column in ("rate", "p50", "p99", "over")
        }
        report.add(name, alone=[found["alone"] for found in alone[name]], **figures)
    locked = {name: method for name, method in methods.items() if method["way"] != "no lock"}
    try:
        for name, seconds in _killed(context, locked, next(numbers)).items():
            report.add(
                name, **{column: its.values for column, its in report.rows[name].items()}, killed=[seconds]
            )
    except JobFailed as error:
        report.notes.append(f"Seller killed: failed: {str(error).strip().splitlines()[-1]}")
    report.notes.append(
        f"A sale reads the stock, works for {WORK * 1000:g} ms, writes the stock and the buyer; a crowd are 2 processes x 10 tasks. "
        "Seller killed: from kill -9 of a seller that has read and not written to the next sale, where locks that expire do so "
        f"10 s after they were taken or renewed; 0: nothing was held; empty: not within {PATIENCE:g} s. “aiolock” are this library's locks on "
        "the same server."
    )
    return report


def _killed(context: Context, methods: Mapping[str, Method], number: int) -> dict[str, float]:
    """Kill a process that is in the middle of a sale by each method: seconds until the next piece is sold."""
    killed = 0.0
    chosen = list(methods.values())

    def kill(_: int) -> None:
        nonlocal killed
        killed = time.monotonic()
        sellers.kill()

    context.workers.one("stocked", methods=chosen, number=number, stock=10)
    with Workers() as sellers:
        sellers.ready([("doomed", {"methods": chosen, "number": number})])
        job = {"methods": chosen, "number": number, "limit": PATIENCE}
        [then] = context.workers.together([("followers", job)], between=kill)
    return {
        name: max(0.0, sold - killed) for name, sold in zip(methods, then, strict=True) if sold is not None
    }


SCENARIOS = {"sale": sale}
