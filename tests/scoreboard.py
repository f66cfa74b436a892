"""The table of what is promised, with what this machine measures: `make scoreboard`.

Most figures come from history runs on Redis, each with the faults that its figure asks for; others from programs and
tests that stand on their own. What nothing measures yet is named.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

from aiolock.backends.redis.waiting import LIFE
from aiolock.testing.history import NEVER, History, Hold, load
from tests.faults.run import Plan, run
from tests.faults.verdict import RESTART, Verdict
from tests.mutants import MUTANTS

ROOT = Path(__file__).parent.parent
NOT_YET = "not measured"

MANY = Plan(processes=12, arms=12, names=64, ttls=(0.25, 0.4, 0.5))
"""A fault for each process at any time, and holds that end soon after it."""

RUNS = {
    "everything": Plan(seconds=95, processes=12, names=96, tasks=20),
    "stale": replace(MANY, seconds=65, only=("block loop", "stop holder, long")),
    "black holes": replace(MANY, seconds=75, only=("black-hole holder",)),
    "kills": Plan(seconds=30, arms=3, only=("kill holder",)),
    "restarts": Plan(seconds=50, processes=3, arms=1, only=(RESTART,)),
    "quiet faults": Plan(seconds=60, only=("stop anybody, short", "SCRIPT FLUSH", "CLIENT KILL pubsub")),
}
"""The history runs; all of them count for the figures that must be 0 anywhere."""

SERVERS = (
    ("ZooKeeper", "zookeeper", "zookeeper"),
    ("MariaDB", "mysql", "mariadb"),
    ("PostgreSQL", "postgresql", "postgresql"),
    ("SQLite", "sqlite", "sqlite"),
    ("memcached", "memcached", "memcached"),
    ("quorum of three Redis", "quorum", "quorum"),
)
"""By title, the module and name of their history runs."""

COPIES = {"restarts": 4}
"""Servers that a run has side by side, with clients of their own: these faults are mostly waiting."""


@dataclass(frozen=True)
class Shown:
    """A run, and its history for what the verdict does not say."""

    verdict: Verdict
    history: History


def show(plan: Plan) -> Shown:
    """Run a plan and read its history."""
    with tempfile.TemporaryDirectory(prefix="aiolock-scoreboard-") as folder:
        verdict = run(replace(plan, keep=Path(folder)))
        return Shown(verdict, load(Path(folder).glob("*.jsonl")))


class Board:
    """Runs each thing once, when a figure first asks for it; `scale` shortens the runs, for a look at the table."""

    def __init__(self, scale: float, seed: int) -> None:
        self._scale, self._seed = scale, seed

    @cache  # noqa: B019 - one board per program
    def shown(self, name: str) -> list[Shown]:
        plan = RUNS[name]
        seconds, copies = max(8, plan.seconds * self._scale), COPIES.get(name, 1)
        plans = [replace(plan, seconds=seconds, seed=self._seed + copy) for copy in range(copies)]
        with ProcessPoolExecutor(copies, mp_context=get_context("spawn")) as processes:
            return list(processes.map(show, plans))

    def every(self) -> list[Shown]:
        return [shown for name in RUNS for shown in self.shown(name)]

    def rows(self) -> Iterator[tuple[str, str, Callable[[], str]]]:
        """Figure, target and how it is measured, in the order of the promise."""
        yield (
            "exclusion, token, ownership violations: Redis",
            "0 outside; >= 200 faults, >= 100,000 grants",
            self._exclusion,
        )
        for title, module, system in SERVERS:
            yield (
                f"exclusion, ownership violations: {title}",
                "0 outside; >= 40 faults, >= 2,000 grants",
                partial(server, module, system, max(15, 60 * self._scale), self._seed),
            )
        yield "stale writes accepted by the store, forced", "0 of >= 500; unfenced > 0", self._stale
        yield "told in time (loss without a stop)", "100 % of >= 300; margin >= 2 % of ttl", self._told
        yield "told after a stop or a blocked loop", "200; p99 <= 20 ms", self._after_stops
        yield (
            "steps of a guarded block after a stop of 0.2-3 ttl, each of 200",
            "0; busy loop: <= 1, with sleep(0) <= 2",
            lambda: _last(
                sys.executable, "-m", "tests.stops", "--stops", str(max(8, int(200 * self._scale)))
            ),
        )
        yield (
            "await points cancelled, every primitive and mode",
            "0 leaks, 0 swallowed",
            lambda: tests("tests/contract/test_sweep.py", "-k", "redis"),
        )
        yield "kill -9 of a holder: next within (8 processes)", "ttl + 100 ms = 1.1 s", self._after_kills
        yield "server restarted: first grant after its port answers", "<= 500 ms", self._after_restarts
        yield (
            "hand-overs lost, subscription killed each time",
            "0 of 1,000",
            unsubscribed,
        )
        yield "calls that outlive their timeout by > 100 ms", "0", lambda: self._sum("calls in time")
        yield "left behind after all runs", "0", lambda: self._sum("hygiene")
        yield "tokens duplicated or decreased, bare restarts", "0 of 50", self._tokens
        yield "the same, failovers with lost writes", "0 of 50", lambda: NOT_YET
        yield "false losses: short stops, SCRIPT FLUSH, killed subscriptions", "0", self._false_losses
        yield "fair=True: overtakes, waiters being killed", "0 of 2,000", lambda: NOT_YET
        yield (
            "hostile names (>= 60)",
            "injective or InvalidName",
            lambda: tests("tests/contract/test_names.py", "-k", "redis or corpus or no_name"),
        )
        yield "planted bugs caught", f"{len(MUTANTS)} of {len(MUTANTS)}", mutants
        yield (
            "simulated schedules",
            ">= 5,000 seeds, 0 violations",
            lambda: schedules(int(5_000 * self._scale)),
        )
        yield (
            "the same for a quorum",
            ">= 2,000 seeds, 0 violations",
            lambda: schedules(int(2_000 * self._scale), "--quorum"),
        )
        yield (
            "the same for a row store",
            ">= 2,000 seeds, 0 violations",
            lambda: schedules(int(2_000 * self._scale), "--rows"),
        )
        yield "passwords shown; bad TLS; least-privileged account", "0; refused; green", lambda: NOT_YET
        yield "foreign or late renewals and releases that succeed", "0 of 10,000", self._foreign

    # --- figures of history runs

    def _exclusion(self) -> str:
        verdicts = [shown.verdict for shown in self.every()]
        wrong = sum(
            len(verdict.outside[name])
            for verdict in verdicts
            for name in ("exclusion (by own clock)", "tokens", "ownership")
        )
        inside = sum(sum(verdict.inside.values()) for verdict in verdicts)
        faults = sum(sum(verdict.faults.values()) for verdict in verdicts)
        return (
            f"{wrong} outside, {inside} inside; {faults} faults, {sum(v.grants for v in verdicts):,} grants"
        )

    def _stale(self) -> str:
        [shown] = self.shown("stale")
        verdict = shown.verdict
        forced = sum(verdict.faults.values())
        return f"{verdict.fenced['stale']} of {forced} forced; unfenced {verdict.unfenced['stale']}"

    def _told(self) -> str:
        verdicts = [shown.verdict for shown in self.every()]
        late = sum(len(verdict.outside["told in time"]) for verdict in verdicts)
        margins = [verdict.worst_margin for verdict in verdicts if verdict.worst_margin is not None]
        if not margins:
            return "no loss was followed by a grant"
        return (
            f"{late} late of {sum(v.told for v in verdicts)}; worst margin {min(margins) * 1000:.1f} ms of "
            f"a ttl of {min(RUNS['black holes'].ttls or ()):g} to 1 s"
        )

    def _after_stops(self) -> str:
        [shown] = self.shown("stale")
        delays = sorted(after_stops(shown.history, max(MANY.ttls or ())))
        return f"{len(delays)}; p99 {_ms(_p99(delays))}, worst {_ms(max(delays, default=NEVER))}"

    def _after_kills(self) -> str:
        [shown] = self.shown("kills")
        waits, others = after_kills(shown.history), after_kills(shown.history, alone=False)
        return (
            f"{_ms(max(waits, default=NEVER))}, worst of {len(waits)} with a waiter in the queue; "
            f"{len(others)} where a waiter died as well: worst {_ms(max(others, default=0.0))}"
        )

    def _after_restarts(self) -> str:
        waits = [wait for shown in self.shown("restarts") for wait in after_restarts(shown.history)]
        return f"{_ms(max(waits, default=NEVER))}, worst of {len(waits)}"

    def _tokens(self) -> str:
        verdicts = [shown.verdict for shown in self.shown("restarts")]
        wrong = sum(verdict.tokens_duplicated + verdict.tokens_decreased for verdict in verdicts)
        return f"{wrong} in {sum(sum(verdict.faults.values()) for verdict in verdicts)} restarts"

    def _false_losses(self) -> str:
        [shown] = self.shown("quiet faults")
        losses = [event for event in shown.history.events if event["kind"] == "lost"]
        return f"{sum(event['reason'] != 'max_hold' for event in losses)} in {shown.verdict.seconds:.0f} s"

    def _sum(self, name: str) -> str:
        return (
            f"{sum(len(shown.verdict.outside[name]) for shown in self.every())} in {len(self.every())} runs"
        )

    def _foreign(self) -> str:
        verdicts = [shown.verdict for shown in self.every()]
        done = sum(verdict.replayed for verdict in verdicts)
        return f"{sum(len(verdict.outside['ownership']) for verdict in verdicts)} of {done}"


def after_stops(history: History, ttl: float) -> list[float]:
    """Seconds that a process ran until it was told of a loss that happened while it was stopped for more than a ttl.

    It may be stopped again before it has run for long: that is no time in which it could have told.
    """
    delays = []
    for event in history.events:
        if event["kind"] == "lost":
            until, told = event["until"], event["t"]
            stops = history.stops[event["process"]]
            if any(cont - stop > ttl * 1e9 and stop < until < cont for stop, cont in stops):
                ran, awake = 0.0, until
                for stop, cont in sorted(stops):  # they may overlap
                    if cont > awake and stop < told:
                        ran, awake = ran + max(0, stop - awake), cont
                delays.append((ran + max(0, told - awake)) / 1e9)
    return delays


def after_kills(history: History, *, alone: bool = True) -> list[float]:
    """Seconds from the death of a holder to the grant of a waiter that was in line then.

    A waiter that dies in the same line may be granted the lock, and costs the provisional grant if the server cannot know of
    its death: kills with such a death are those that are not `alone`.
    """
    waits = []
    for process, kill in history.kills.items():
        for dead in history.holds:
            if dead.process == process and dead.ret < kill < min(dead.release_call, dead.lost):
                served = [
                    hold.ret
                    for hold in history.holds
                    if hold.name == dead.name and hold.process != process and hold.call < kill < hold.ret
                ]
                if served and alone is not _died_in_line(history, dead, kill, min(served)):
                    waits.append((min(served) - kill) / 1e9)
    return waits


def _died_in_line(history: History, dead: Hold, kill: float, served: float) -> bool:
    """Whether a waiter died that could be before the one that was served: its place stands for a while."""
    return any(
        each.name == dead.name
        and each is not dead
        and each.call < (death := history.killed(each.process)) < served
        and death > kill - LIFE * 1e9
        and min(each.release_call, each.ret if each.result != "ok" else NEVER) > death
        for each in history.attempts
    )


def after_restarts(history: History) -> list[float]:
    """Seconds from the moment in which the server serves again to the first grant."""
    ups = [event["t"] for event in history.events if event["kind"] == "up" and event.get("target") == RESTART]
    firsts = [min((hold.ret for hold in history.holds if hold.ret > up), default=NEVER) for up in ups]
    return [(first - up) / 1e9 for up, first in zip(ups, firsts, strict=True)]


# Figures of others


def tests(*words: str) -> str:
    """What pytest sums up."""
    return _last(sys.executable, "-m", "pytest", "-q", "--no-header", *words)


def unsubscribed() -> str:
    """What is lost of 1,000 hand-overs if each finds the subscription killed."""
    rows = _output(sys.executable, "-m", "tests.faults.redis_figures", "unsubscribed").splitlines()
    return next((" ".join(row.split()) for row in rows if ": lost" in row), "no row")


def server(module: str, system: str, seconds: float, seed: int) -> str:
    """A history run on another server than one Redis, of every kind that it has."""
    words = ("--seconds", f"{seconds:g}", "--seed", f"{seed}", "--processes", "6", "--kinds", "all", "--json")
    shown = json.loads(_output(sys.executable, "-m", f"tests.faults.{module}_system", system, *words))
    inside = sum(count for name, count in shown["inside"].items() if name != "tokens")
    faults = sum(shown["faults"].values())
    return f"{shown['violations']} outside, {inside} inside; {faults} faults, {shown['grants']:,} grants"


def schedules(seeds: int, *words: str) -> str:
    return _last(sys.executable, "-m", "tests.simulation", *words, "--seeds", str(max(10, seeds)))


def mutants() -> str:
    lines = _output(sys.executable, "-m", "tests.mutants").splitlines()
    caught = sum(line.startswith("caught") for line in lines)
    return f"{caught} of {caught + sum(line.startswith('MISSED') for line in lines)}"


def _output(*argv: str) -> str:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(f"{' '.join(argv)} said nothing (status {done.returncode}): {done.stderr[-2000:]}")
    return done.stdout


def _last(*argv: str) -> str:
    return re.sub(r"^=+ | =+$", "", _output(*argv).strip().splitlines()[-1])


def _p99(values: list[float]) -> float:
    return values[int(0.99 * (len(values) - 1))] if values else NEVER


def _ms(seconds: float) -> str:
    return "none" if seconds == NEVER else f"{seconds * 1000:.1f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scoreboard", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="shorten all runs by this factor")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    board = Board(options.scale, options.seed)
    print(f"{'figure':<62} {'target':<44} measured")
    for figure, target, measure in board.rows():
        print(f"{figure:<62} {target:<44} {measure()}", flush=True)
    return int(any(shown.verdict.violations for shown in board.every()))


if __name__ == "__main__":
    sys.exit(main())
