"""Scenarios of one process that takes and leaves locks."""

from __future__ import annotations

from benchmarks.measure import Report
from benchmarks.peers import LIBRARIES
from benchmarks.scenarios.context import Context

__all__ = ["PEERS", "free", "inprocess", "local", "loops", "many", "shared"]

RATE = {"rate": "turns/s", "each": "µs each", "cpu": "µs of the client's processor"}

SLICES = 3
"""Each round is so many short ones: what else runs on the machine then hits one of them, not one contestant."""


def _play(context: Context, report: Report, job: str, whos: list[str], **params: int) -> None:
    rounds = context.rounds * context.count(SLICES, 2)
    played = context.alternate(
        rounds, whos, lambda who: context.workers.one(job, who=who, url=context.url, **params)
    )
    for who, figures in played.items():
        # What a program of another language uses is not in there.
        cpu = {} if who in LIBRARIES else {"cpu": [cpu * 1e6 for _, cpu in figures]}
        report.add(who, rate=[rate for rate, _ in figures], each=[1e6 / rate for rate, _ in figures], **cpu)


EVERYBODY = ["raw floor", "script floor", "aiolock", "aiolock, lock made anew", "redis-py", "coredis"]
PEERS = ["redisson", "rueidislock", "redsync", "redislock"]


def free(context: Context) -> Report:
    """A free lock, taken and left by one task, one turn after the other; the server on a core of its own."""
    report = Report("free", "Free lock, one after the other, the server on another core", RATE)
    with context.pinned(apart=True):
        whos = context.competing(report, [*EVERYBODY, *PEERS])
        _play(context, report, "single", whos, turns=context.count(400, 150))
    return _free_goals(report)


def shared(context: Context) -> Report:
    """The same with everything on one core: nobody has to be woken up elsewhere, what is left is processor time."""
    report = Report("shared", "Free lock, one after the other, the server on the same core", RATE)
    with context.pinned(apart=False):
        _play(context, report, "single", EVERYBODY, turns=context.count(600, 150))
    return _free_goals(report)


def _free_goals(report: Report) -> Report:
    report.compare("cost, aiolock / script floor", "aiolock", "script floor", "each", 1.15, at_most=True)
    report.compare("rate, aiolock / redis-py", "aiolock", "redis-py", "rate", 1.3)
    return report


def many(context: Context) -> Report:
    """A hundred tasks of one process, each with its own lock."""
    report = Report("many", "100 tasks, 100 locks, one process, the server on another core", RATE)
    with context.pinned(apart=True):
        whos = context.competing(report, [*EVERYBODY, *PEERS])
        _play(context, report, "many", whos, tasks=100, turns=context.count(20, 8))
    report.compare("rate, aiolock / script floor", "aiolock", "script floor", "rate", 0.65)
    report.compare("rate, aiolock / redis-py", "aiolock", "redis-py", "rate", 4.5)
    return report


def local(context: Context) -> Report:
    """A thousand tasks of one process and one lock on the server: mostly local passing."""
    report = Report("local", "One hot lock, 1,000 tasks of one process, blocks that yield once", RATE)
    whos = ["asyncio.Lock", "aiolock", "aiolock memory://"]
    _play(context, report, "crowd", whos, tasks=1000, turns=context.count(10, 3))
    report.compare("rate, aiolock on Redis / asyncio.Lock", "aiolock", "asyncio.Lock", "rate", 0.6)
    return report


def inprocess(context: Context) -> Report:
    """The free lock without a server: what leases, tokens and terms cost where a plain lock would do."""
    report = Report("inprocess", "Free lock of one process, no server: where we lose", RATE)
    whos = ["asyncio.Lock", "aiolock memory://"]
    _play(context, report, "single", whos, turns=context.count(10_000, 3000))
    return report


def loops(context: Context) -> Report:
    """The main scenarios on uvloop and on asyncio's own loop."""
    columns = {"asyncio": "asyncio, turns/s", "uvloop": "uvloop, turns/s", "gain": "uvloop / asyncio"}
    report = Report("loops", "With uvloop and without", columns)
    jobs = {
        "free lock": ("single", {"turns": context.count(600, 200)}),
        "100 tasks, 100 locks": ("many", {"tasks": 100, "turns": context.count(30, 8)}),
        "1,000 tasks, one lock": ("crowd", {"tasks": 1000, "turns": context.count(10, 3)}),
    }
    with context.pinned(apart=True):
        _on_both(context, report, jobs)
    return report


def _on_both(context: Context, report: Report, jobs: dict[str, tuple[str, dict[str, int]]]) -> None:
    for what, (job, params) in jobs.items():
        for who in ("script floor", "aiolock"):
            if job == "crowd" and who != "aiolock":
                continue
            rates = context.alternate(
                context.rounds,
                ["asyncio", "uvloop"],
                lambda loop, job=job, who=who, params=params: context.workers.one(  # type: ignore[misc]
                    job, loop=loop, who=who, url=context.url, **params
                )[0],
            )
            gain = [fast / slow for fast, slow in zip(rates["uvloop"], rates["asyncio"], strict=True)]
            report.add(f"{what}, {who}", asyncio=rates["asyncio"], uvloop=rates["uvloop"], gain=gain)
