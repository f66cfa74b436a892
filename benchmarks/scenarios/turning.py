"""Scenarios of one process that takes and leaves locks."""

from __future__ import annotations

from benchmarks.measure import Report, alternate
from benchmarks.scenarios.context import Context

__all__ = ["free", "inprocess", "local", "loops", "many"]

RATE = {"rate": "turns/s", "each": "µs each"}


def _play(context: Context, report: Report, job: str, whos: list[str], **params: int) -> None:
    played = alternate(
        context.rounds, whos, lambda who: context.crew.one(job, who=who, url=context.url, **params)
    )
    for who, rates in played.items():
        report.add(who, rate=rates, each=[1e6 / rate for rate in rates])


def free(context: Context) -> Report:
    """A free lock, taken and left by one task, one turn after the other."""
    report = Report("free", "Free lock, one after the other", RATE)
    whos = ["raw floor", "script floor", "aiolock", "aiolock, lock made anew", "redis-py", "coredis"]
    _play(context, report, "single", whos, turns=context.count(3000, 500))
    report.compare("cost, aiolock / script floor", "aiolock", "script floor", "each", 1.15, at_most=True)
    report.compare("rate, aiolock / redis-py", "aiolock", "redis-py", "rate", 1.3)
    return report


def many(context: Context) -> Report:
    """A hundred tasks of one process, each with its own lock."""
    report = Report("many", "100 tasks, 100 locks, one process", RATE)
    whos = ["raw floor", "script floor", "aiolock", "aiolock, lock made anew", "redis-py", "coredis"]
    _play(context, report, "many", whos, tasks=100, turns=context.count(100, 20))
    report.compare("rate, aiolock / script floor", "aiolock", "script floor", "rate", 0.65)
    report.compare("rate, aiolock / redis-py", "aiolock", "redis-py", "rate", 4.5)
    return report


def local(context: Context) -> Report:
    """A thousand tasks of one process and one lock on the server: mostly local passing."""
    report = Report("local", "One hot lock, 1,000 tasks of one process, blocks that yield once", RATE)
    whos = ["asyncio.Lock", "aiolock", "aiolock memory://"]
    _play(context, report, "crowd", whos, tasks=1000, turns=context.count(20, 5))
    report.compare("rate, aiolock on Redis / asyncio.Lock", "aiolock", "asyncio.Lock", "rate", 0.6)
    return report


def inprocess(context: Context) -> Report:
    """The free lock without a server: what leases, tokens and terms cost where a plain lock would do."""
    report = Report("inprocess", "Free lock of one process, no server: where we lose", RATE)
    whos = ["asyncio.Lock", "aiolock memory://"]
    _play(context, report, "single", whos, turns=context.count(50_000, 5000))
    return report


def loops(context: Context) -> Report:
    """The main scenarios on uvloop and on asyncio's own loop."""
    columns = {"asyncio": "asyncio, turns/s", "uvloop": "uvloop, turns/s", "gain": "uvloop / asyncio"}
    report = Report("loops", "With uvloop and without", columns)
    jobs = {
        "free lock": ("single", {"turns": context.count(3000, 300)}),
        "100 tasks, 100 locks": ("many", {"tasks": 100, "turns": context.count(100, 10)}),
        "1,000 tasks, one lock": ("crowd", {"tasks": 1000, "turns": context.count(20, 3)}),
    }
    for what, (job, params) in jobs.items():
        for who in ("script floor", "aiolock"):
            if job == "crowd" and who != "aiolock":
                continue
            rates = alternate(
                context.rounds,
                ["asyncio", "uvloop"],
                lambda loop, job=job, who=who, params=params: context.crew.one(  # type: ignore[misc]
                    job, loop=loop, who=who, url=context.url, **params
                ),
            )
            gain = [fast / slow for fast, slow in zip(rates["uvloop"], rates["asyncio"], strict=True)]
            report.add(f"{what}, {who}", asyncio=rates["asyncio"], uvloop=rates["uvloop"], gain=gain)
    return report
