"""The clock that runs during suspend, deadlines by it, and the wall clock.

``loop.time()`` and ``time.monotonic()`` stand still while a machine with Linux or macOS is suspended, and a server elsewhere
does not. The ends of holds are therefore judged by ``CLOCK_BOOTTIME`` (Linux), or by ``CLOCK_MONOTONIC``, which on macOS is not
the clock of ``time.monotonic()`` and goes on. The limits of single calls, and pauses, may count by ``loop.time()``, as those of
asyncio do. The wall clock is shown to people, ages unused rows, and is where the tokens of a file begin; it decides about no hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Self

__all__ = ["Clock", "Deadline", "system_clock", "wall_clock"]

Clock = Callable[[], float]
"""A function without arguments that returns seconds since an arbitrary, fixed moment, and never goes back."""


def _choose() -> Clock:
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        if hasattr(time, name):
            return partial(time.clock_gettime, getattr(time, name))
    return time.monotonic


system_clock: Clock = _choose()

wall_clock: Callable[[], float] = time.time
"""Seconds since the epoch, as far as the machine knows them; may go back."""


class Deadline:
    """The time at which a call gives up; passed down to everything that the call waits for."""

    __slots__ = ("_clock", "when")

    def __init__(self, when: float, clock: Clock) -> None:
        self.when: float = when
        """On ``clock``; ``inf`` for a call without a limit."""
        self._clock = clock

    @classmethod
    def after(cls, seconds: float | None, clock: Clock) -> Self:
        """Return the deadline ``seconds`` from now; ``None`` for never."""
        return cls(math.inf if seconds is None else clock() + seconds, clock)

    def left(self) -> float:
        """Return the seconds that are left, at least 0."""
        return max(0.0, self.when - self._clock())

    def passed(self) -> bool:
        """Return whether the time is over."""
        return self._clock() >= self.when
