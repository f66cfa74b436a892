"""The dead man's switch: a program of its own that kills the command if aiolock cannot.

It is told on its standard input which process group it guards, and again and again until when the lock is certain.
If that moment passes, or the input ends because aiolock was killed, the whole group is killed: also what the
command has started, which the kernel's parent-death signal does not reach, and also if aiolock was stopped.
It imports nothing but the standard library.

Its input: lines ``group PGID``, ``until SECONDS`` (on the clock that runs during suspend, or ``inf``), ``unguarded``,
``json`` (how to speak) and ``told`` (aiolock has said that the group cannot be killed).
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import time
from enum import Enum

__all__ = ["BEYOND_US", "DYING", "Group", "Left", "main"]

BEYOND_US = (
    "the command CANNOT BE KILLED, because it or a part of it runs as another user: it goes on WITHOUT THE LOCK, and may "
    "be at work together with the next holder"
)

DYING = 0.5
"""Seconds that killed processes have to be gone."""

LOOK = 0.25
"""Seconds between looks at the clock: timers stand still while the machine is suspended."""


def _now() -> float:
    # The same clock as aiolock.clock, which cannot be imported without the whole package.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Left(Enum):
    """Who is in a process group."""

    NOBODY = "nobody"
    OURS = "some that we can kill, or that are dead already"
    BEYOND_US = "only processes of other users"


class Group:
    """A process group, as far as we may send it signals."""

    def __init__(self, number: int) -> None:
        self._number = number

    def send(self, number: int) -> bool:
        """Send it a signal; ``False`` if nobody in it is ours. Who is beyond us is passed over."""
        try:
            os.killpg(self._number, number)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return True

    @property
    def left(self) -> Left:
        """Who is in it."""
        try:
            os.killpg(self._number, 0)
        except ProcessLookupError:
            return Left.NOBODY
        except PermissionError:
            return Left.BEYOND_US
        return Left.OURS


def _kill(group: int) -> bool:
    """Kill it; whether all of it could be killed."""
    if group <= 1:
        return True
    target = Group(group)
    target.send(signal.SIGKILL)
    give_up = _now() + DYING
    while target.left is Left.OURS and _now() < give_up:
        time.sleep(0.01)
    return target.left is not Left.BEYOND_US


def _complain(as_json: bool) -> None:  # noqa: FBT001 - it is called here only
    import json  # noqa: PLC0415 - rarely needed, and this should start quickly

    said = {"event": "lost", "unstoppable": True, "message": BEYOND_US}
    text = json.dumps(said) if as_json else f"aiolock: {BEYOND_US}"
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def main() -> int:
    """Guard until the input ends."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    group, until, heard, as_json, told = 0, math.inf, b"", False, False
    while True:
        left = until - _now()
        if group and left <= 0:
            until = math.inf
            if not _kill(group) and not told:
                told = True
                _complain(as_json)
        waits = None if until == math.inf or not group else max(0.0, min(left, LOOK))
        ready, _, _ = select.select([0], [], [], waits)
        if not ready:
            continue
        chunk = os.read(0, 65_536)
        if not chunk:
            if not _kill(group) and not told:
                _complain(as_json)
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
            elif what == b"json":
                as_json = True
            elif what == b"told":
                told = True


if __name__ == "__main__":
    sys.exit(main())
