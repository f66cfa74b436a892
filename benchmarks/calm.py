"""Whether anybody else used the machine: rounds that were disturbed are run again.

The processor time of the whole machine less that of our own processes is that of others. It is counted in ticks of
10 ms, so short rounds are judged roughly.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["Calm"]

T = TypeVar("T")

SHARE = 0.1
"""The share of the machine that others may use."""
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Calm:
    """Runs things again that others have disturbed, for as long as there is patience."""

    def __init__(self, patience: float) -> None:
        self.left = patience
        """Seconds that may be spent on waiting and on doing things again."""
        self.rounds = 0
        self.repeated = 0
        self.disturbed = 0
        """Rounds that count although they were disturbed."""

    def play(self, work: Callable[[], T]) -> T:
        """Do it, and again if somebody else was busy meanwhile."""
        self.rounds += 1
        while True:
            start, before = time.monotonic(), _others()
            result = work()
            took = time.monotonic() - start
            if _others() - before <= SHARE * took * (os.cpu_count() or 1) + 2 * TICK:
                return result
            if self.left <= 0:
                self.disturbed += 1
                return result
            self.repeated += 1
            self._wait()
            self.left -= time.monotonic() - start

    def _wait(self) -> None:
        """Until nobody was busy for a while."""
        give_up = time.monotonic() + self.left
        while time.monotonic() < give_up:
            start, before = time.monotonic(), _others()
            time.sleep(0.5)
            if _others() - before <= SHARE * (time.monotonic() - start) * (os.cpu_count() or 1):
                return


def _others() -> float:
    """Processor seconds that were used by anybody but us since the machine was started."""
    busy = Path("/proc/stat").read_text().partition("\n")[0].split()
    user, nice, system, _, _, irq, soft, steal = (int(ticks) for ticks in busy[1:9])
    return (user + nice + system + irq + soft + steal - _ours()) * TICK


def _ours() -> int:
    """Ticks of this process and everything that comes from it."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name of a program, in parentheses, may contain anything.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        # With those of children that have ended.
        ticks[pid] = sum(int(field) for field in fields[11:15])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours and pid not in ours}:
        ours |= more
    return sum(ticks.get(pid, 0) for pid in ours)
