"""The clock that runs during suspend; the only module that reads time.

``loop.time()`` and ``time.monotonic()`` stand still while a Linux machine is suspended, and a server elsewhere
does not. Terms are therefore judged by ``CLOCK_BOOTTIME`` where there is one. Nothing here is the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

__all__ = ["Clock", "system_clock"]

Clock = Callable[[], float]
"""A function without arguments that returns seconds since an arbitrary, fixed moment, and never goes back."""

system_clock: Clock = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
