"""An event loop in virtual time: when nothing is ready, time jumps to the next timer, and nobody waits."""

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
"""Seconds that a pass of the loop takes: whoever looks at the clock in a loop gets on."""


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: nothing would ever happen again. The message says who waits where."""


class _Jump(selectors.DefaultSelector):
    """Never waits: the time that it was to wait is added to the loop's time."""

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
        """What timers are measured by."""
        return self.now

    def stuck(self) -> str:
        """Who waits where."""
        lines = ["nothing is ready and no timer is set, and there wait"]
        for task in sorted(asyncio.all_tasks(self), key=lambda task: task.get_name()):
            places = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in task.get_stack(limit=1)]
            lines.append(f"  {task.get_name()} at {places[-1] if places else '?'}")
        return "\n".join(lines)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` as ``asyncio.run`` does, in virtual time, and return its result: an hour takes milliseconds.

    For code that waits for timers, tasks and a :class:`World`, and for nothing outside: there is no time in which a
    socket could answer. Every run with the same random numbers is the same run. Where a real loop would hang,
    :class:`Deadlock` is raised.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
