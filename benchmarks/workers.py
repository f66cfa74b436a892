"""The worker processes, as the parent sees them: one job in one of them, or one in each, in step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Self

__all__ = ["JobFailed", "Workers"]

Between = Callable[[int], None]
"""Called at each pause with its number, while every worker waits."""


class JobFailed(RuntimeError):
    """A job raised; the text is its traceback."""


class _Worker:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def pin(self, cores: set[int]) -> None:
        """Run on these cores only."""
        os.sched_setaffinity(self._process.pid, cores)

    def tell(self, message: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(message + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise JobFailed(f"a worker ended with status {self._process.wait()}")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise JobFailed(message["error"])
        return message

    def kill(self) -> None:
        """Give it no chance to say anything to anybody."""
        self._process.kill()

    def stop(self) -> None:
        """It ends with its input; one that is in the middle of something is ended."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Workers:
    """As many workers as are needed, started when they are needed first."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._cores = os.sched_getaffinity(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()

    def pin(self, cores: set[int]) -> None:
        """Have all workers, also those to come, run on these cores only."""
        self._cores = cores
        for worker in self._workers:
            worker.pin(cores)

    def one(self, job: str, *, loop: str = "asyncio", between: Between | None = None, **params: Any) -> Any:
        """One job in one worker."""
        return self.together([(job, params)], loop=loop, between=between)[0]

    def fresh(self, job: str, **params: Any) -> Any:
        """One job in a process that has done nothing before."""
        with Workers() as workers:
            return workers.one(job, **params)

    def ready(self, jobs: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Have each of several workers do a job until it pauses; whoever does that wants to :meth:`kill` them."""
        for worker in self._tell(jobs, "asyncio"):
            worker.hear()

    def kill(self) -> None:
        """End all workers in the middle of what they do."""
        for worker in self._workers:
            worker.kill()

    def together(
        self,
        jobs: Sequence[tuple[str, dict[str, Any]]],
        *,
        loop: str = "asyncio",
        between: Between | None = None,
    ) -> list[Any]:
        """One job in each of several workers; all of them pause equally often, and go on together."""
        busy = self._tell(jobs, loop)
        pauses = 0
        while True:
            try:
                messages = [worker.hear() for worker in busy]
            except JobFailed:
                # What the others still have to say would be taken for answers to the next job.
                for worker in busy:
                    worker.kill()
                    worker.stop()
                self._workers = self._workers[len(busy) :]
                raise
            if "result" in messages[0]:
                return [message["result"] for message in messages]
            if between is not None:
                between(pauses)
            pauses += 1
            for worker in busy:
                worker.tell("")

    def _tell(self, jobs: Sequence[tuple[str, dict[str, Any]]], loop: str) -> list[_Worker]:
        while len(self._workers) < len(jobs):
            self._workers.append(_Worker())
            self._workers[-1].pin(self._cores)
        busy = self._workers[: len(jobs)]
        for worker, (job, params) in zip(busy, jobs, strict=True):
            worker.tell(json.dumps({"job": job, "params": params, "loop": loop}))
        return busy
