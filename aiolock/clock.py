"""The clock that runs during suspend; the only module that reads time.

``loop.time()`` and ``time.monotonic()`` stand still while a machine with Linux or macOS is suspended, and a server elsewhere
does not. Terms are therefore judged by ``CLOCK_BOOTTIME`` (Linux), or by ``CLOCK_MONOTONIC``, which on macOS is not
the clock of ``time.monotonic()`` and goes on. Nothing here is the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

__all__ = ["Clock", "system_clock"]

Clock = Callable[[], float]
"""A function without arguments that returns seconds since an arbitrary, fixed moment, and never goes back."""


def _choose() -> Clock:
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        if hasattr(time, name):
            return partial(time.clock_gettime, getattr(time, name))
    return time.monotonic


system_clock: Clock = _choose()
