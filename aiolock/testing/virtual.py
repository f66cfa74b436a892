"""Event loop in virtual time: when nothing is ready, time jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Deadlock", "VirtualLoop", "run"]

T = TypeVar("T")

START = 1000.0
"""The time at which every loop begins."""
PASS = 1e-6
"""Seconds that a pass of the loop takes: a task that polls the clock comes to its end."""


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: the loop would hang. The message lists the tasks and where they wait."""


class _Jump(selectors.DefaultSelector):
    """A selector that never waits, and adds the timeout to the loop's time instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            self.loop.now += PASS
            return []
        # The only file is the pipe through which other threads wake the loop.
        events = super().select(0)
        if not events:
            if timeout is None:
                raise Deadlock(self.loop.stuck())
            self.loop.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; ``now`` is its time, in seconds."""

    def __init__(self) -> None:
        self.now: float = START
        selector = _Jump()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Return the time that timers are measured by."""
        return self.now

    def stuck(self) -> str:
        """Return the list of tasks and where they wait."""
        lines = ["nothing is ready and no timer is set, and there wait"]
        for task in sorted(asyncio.all_tasks(self), key=lambda task: task.get_name()):
            places = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in task.get_stack(limit=1)]
            lines.append(f"  {task.get_name()} at {places[-1] if places else '?'}")
        return "\n".join(lines)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` as ``asyncio.run`` does, in virtual time, and return its result: an hour takes milliseconds.

    For code that waits for timers, tasks and a :class:`World` only: no socket could answer in time. Every run with the same
    random numbers is the same run. Raises :class:`Deadlock` where a real loop would hang.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
