"""Twenty processes, locks of every kind, an ensemble that loses servers, workers that are killed and stopped; and the whole history."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.checker import check
from tests.faults.history import Recorder, load
from tests.faults.program import history
from tests.faults.zookeeper_system import SESSION
from tests.servers import ZooKeeper

WORKER = Path(__file__).with_name("worker.py")
ROOT = Path(__file__).parents[3]
SECONDS = float(os.environ.get("AIOLOCK_HISTORY_SECONDS", "10"))
WORKERS = 20
PATIENCE = 60.0
"""More seconds than that, at most."""
MODES = {"mutex", "read", "write", "permits"}


class Workers:
    """The processes, and the one who hurts them."""

    def __init__(self, url: str, namespace: str, folder: Path) -> None:
        self._url, self._namespace, self._folder = url, namespace, folder
        self.injector = Recorder(folder / "injector", "injector")
        self.lives = [0] * WORKERS
        self.running: dict[int, subprocess.Popen] = {}
        self.faults = {"killed": 0, "stopped": 0, "servers": 0}

    def name(self, number: int) -> str:
        return f"worker{number}.{self.lives[number]}"

    def start(self, number: int) -> None:
        self.lives[number] += 1
        name = self.name(number)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONASYNCIODEBUG": ""}
        with (self._folder / f"{name}.log").open("wb") as log:
            self.running[number] = subprocess.Popen(
                [
                    sys.executable,
                    str(WORKER),
                    self._url,
                    self._namespace,
                    str(self._folder / name),
                    name,
                    name,
                ],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def kill(self, number: int) -> None:
        self.injector.kill(self.name(number))
        self.running[number].kill()
        self.running[number].wait()
        self.faults["killed"] += 1

    async def stop(self, number: int, seconds: float) -> None:
        self.injector.stop(self.name(number))
        self.running[number].send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.running[number].send_signal(signal.SIGCONT)
        self.injector.cont(self.name(number))
        self.faults["stopped"] += 1

    def end(self) -> None:
        for number, process in self.running.items():
            if process.poll() is None:
                self.injector.kill(self.name(number))
                process.kill()
                process.wait()
        self.injector.close()


def grants(folder: Path) -> list[Any]:
    """The holds of the history so far."""
    history = load(path for path in folder.iterdir() if path.suffix != ".log")
    return [hold for hold in history.holds if hold.token is not None]


def enough(granted: list[Any]) -> bool:
    """Whether there were several of each kind, in several processes."""
    modes = {hold.mode for hold in granted}
    return len(granted) > 20 and len({hold.process for hold in granted}) > 3 and modes == MODES


@pytest.mark.slow
async def test_no_history_of_twenty_processes_under_faults_shows_two_holders(tools, tmp_path):
    generator = random.Random(5)
    with ZooKeeper(3) as ensemble:
        url = f"{ensemble.url}?session_timeout=3&tick_time=0.5"
        workers = Workers(url, tools.namespace, tmp_path)
        try:
            for number in range(WORKERS):
                workers.start(number)
            await asyncio.sleep(3)
            end = time.monotonic() + SECONDS
            hurt = time.monotonic() + 4
            # A machine that has much else to do gets more time, until there is something to be checked.
            while (now := time.monotonic()) < end or (now < end + PATIENCE and not enough(grants(tmp_path))):
                number = generator.randrange(WORKERS)
                if generator.random() < 0.4:
                    workers.kill(number)
                    workers.start(number)
                else:
                    await workers.stop(number, generator.choice([0.2, 1.0, 4.0]))
                if time.monotonic() > hurt:
                    victim = generator.randrange(3)
                    workers.injector.down(f"server{victim}")
                    await asyncio.to_thread(ensemble.kill, victim)
                    await asyncio.to_thread(ensemble.start, victim)
                    workers.injector.up(f"server{victim}")
                    workers.faults["servers"] += 1
                    hurt = time.monotonic() + generator.uniform(6, 10)
                await asyncio.sleep(generator.uniform(0.05, 0.3))
            assert [process.poll() for process in workers.running.values()] == [None] * WORKERS
        finally:
            workers.end()
    history = load(path for path in tmp_path.iterdir() if path.suffix != ".log")
    granted = grants(tmp_path)
    print(f"{len(granted)} grants, {workers.faults}")
    assert check(history, capacity={"some": 3}) == []
    # How much gets done in this time is the machine's affair; without contention it would show nothing.
    assert enough(granted)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nobody_is_wrong_while_links_processes_and_servers_fail(tmp_path):
    """The history run that all servers have, with locks of every kind. In a process of its own: asyncio's debug mode would slow the proxies down."""
    shown = run(20, tmp_path / "histories")
    if sum(shown["faults"].values()) < 5 or shown["grants"] < 30:
        # This machine has much else to do: too little has happened to say anything.
        shown = run(60, tmp_path / "longer")
    assert sum(shown["faults"].values()) >= 5
    assert shown["grants"] >= 30
    assert set(shown["grants_by_mode"]) == {"mutex", "reentrant", "read", "write", "permits"}


def run(seconds: int, keep: Path) -> dict[str, Any]:
    """One run, and that nobody was wrong in it."""
    words = ("--seconds", f"{seconds}", "--processes", "6", "--names", "12", "--kinds", "all")
    shown = history("tests.faults.zookeeper_system", "zookeeper", *words, ttls=[SESSION], keep=keep)
    assert shown["outside"] == {name: [] for name in shown["outside"]}
    assert shown["inside"] == dict.fromkeys(shown["inside"], 0), "there are no exceptions here"
    assert shown["fenced"]["stale"] == 0
    return shown
