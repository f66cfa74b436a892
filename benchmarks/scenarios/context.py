"""What every scenario needs: a server, workers, and how long it may take; and what the server counted."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.calm import Calm
from benchmarks.crew import Crew
from benchmarks.measure import Report, alternate
from tests.processes import ask
from tests.servers import Redis

__all__ = ["Context", "Scenario"]

T = TypeVar("T")

INSIDE = {"hmget", "hset", "hget", "hdel", "hexists", "time", "pexpire", "pttl", "publish", "get", "del"}
"""What scripts call inside the server; clients of ours do not."""
OWN = {"info", "quit"}
"""What looking costs."""


@dataclass(slots=True)
class Context:
    """One run."""

    server: Redis
    crew: Crew
    quick: bool
    rounds: int
    calm: Calm

    @property
    def url(self) -> str:
        return self.server.url

    def alternate(
        self, rounds: int, contestants: Sequence[str], play: Callable[[str], T]
    ) -> dict[str, list[T]]:
        """Rounds that alternate between the contestants; those in which others used the machine are run again."""
        return alternate(rounds, contestants, lambda who: self.calm.play(lambda: play(who)))

    def count(self, full: int, quick: int) -> int:
        """How many of something."""
        return quick if self.quick else full

    def info(self, section: str) -> dict[str, str]:
        """A section of INFO."""
        answer = ask(self.server.socket, f"INFO {section}\r\nQUIT\r\n".encode()).decode()
        return dict(line.split(":", 1) for line in answer.splitlines() if ":" in line)

    def commands(self, *, inside: bool = False) -> dict[str, int]:
        """How often clients have called which command; with ``inside``, what scripts called instead."""
        calls = {
            name.removeprefix("cmdstat_"): int(re.match(r"calls=(\d+)", value)[1])  # type: ignore[index]
            for name, value in self.info("commandstats").items()
        }
        return {name: n for name, n in calls.items() if (name in INSIDE) == inside and name not in OWN}

    def processor_seconds(self) -> float:
        """What the server has used."""
        cpu = self.info("cpu")
        return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])

    @contextmanager
    def pinned(self, *, apart: bool) -> Iterator[None]:
        """The server and the workers each on their own side of the machine, or all on one core.

        Left to the scheduler, two processes that take turns land on one core or on two by chance, and waking
        somebody up on another core of a virtual machine costs several times what the work does.
        """
        every = os.sched_getaffinity(0)
        first = {min(every)}
        self._pin(first, (every - first or every) if apart else first)
        try:
            yield
        finally:
            self._pin(every, every)

    def _pin(self, server: set[int], workers: set[int]) -> None:
        for thread in Path(f"/proc/{self.server.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), server)
        self.crew.pin(workers)

    def flush(self) -> None:
        """Begin with an empty server."""
        ask(self.server.socket, b"FLUSHALL\r\nQUIT\r\n")


Scenario = Callable[[Context], Report]
