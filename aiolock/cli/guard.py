"""The dead man's switch: a program of its own that kills the command if aiolock cannot.

Aiolock tells it on its standard input which process group it guards, and again and again until when the lock is certain.
If that moment passes, or the input ends because aiolock was killed, the whole group is killed: also what the
command has started, which the kernel's parent-death signal does not reach, and also if aiolock was stopped.
It imports nothing but the standard library.

Its input: lines ``group PGID``, ``until SECONDS`` (on the clock that runs during suspend, or ``inf``) and ``unguarded``.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import time

__all__ = ["main"]

LOOK = 0.25
"""Seconds between looks at the clock: timers stand still while the machine is suspended."""


def _now() -> float:
    # The same clock as aiolock.clock, which cannot be imported without the whole package.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _kill(group: int) -> None:
    if group > 1:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def main() -> int:
    """Guard until the input ends."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    group, until, heard = 0, math.inf, b""
    while True:
        left = until - _now()
        if left <= 0:
            _kill(group)
            until = math.inf
        ready, _, _ = select.select([0], [], [], None if until == math.inf else max(0.0, min(left, LOOK)))
        if not ready:
            continue
        chunk = os.read(0, 65_536)
        if not chunk:
            _kill(group)
            return 0
        *lines, heard = (heard + chunk).split(b"\n")
        for line in lines:
            what, _, value = line.partition(b" ")
            if what == b"group":
                group = int(value)
            elif what == b"until":
                until = float(value)
            elif what == b"unguarded":
                group = 0


if __name__ == "__main__":
    sys.exit(main())
