"""Call back at a time of ``CLOCK_BOOTTIME``: a timer of the loop stands still while the machine is suspended.

A Linux ``timerfd`` that the loop reads is due at once after a suspend, where a timer of the loop would come late."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
import weakref
from collections.abc import Callable

from aiolock.clock import Clock, system_clock
from aiolock.core.forks import OneProcess

__all__ = ["Timer", "open_timer"]


class Timer(OneProcess):
    """One time at which the loop is to call back; setting another replaces it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        import ctypes  # noqa: PLC0415 - only Linux needs it, and os.timerfd_create is new in Python 3.13

        super().__init__()
        self._loop, self._call = loop, call
        libc = ctypes.CDLL(None)
        self._settime = libc.timerfd_settime
        self._fd: int = libc.timerfd_create(time.CLOCK_BOOTTIME, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError("no timerfd")
        self._free = weakref.finalize(self, os.close, self._fd)
        loop.add_reader(self._fd, self._due)

    def set(self, when: float) -> None:
        """Call back at ``when``, in seconds of CLOCK_BOOTTIME."""
        # struct itimerspec: no interval, then the time; all zero would disarm it. 1 is TFD_TIMER_ABSTIME.
        spec = struct.pack("@4l", 0, 0, int(when), max(1, int(when % 1 * 1e9)))
        self._settime(self._fd, 1, spec, None)

    def close(self) -> None:
        """Call back no more; in a forked child, whose loop shares the registration with the parent's, do nothing."""
        if not self.forked:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
            self._free()

    def _due(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        self._call()


def open_timer(loop: asyncio.AbstractEventLoop, clock: Clock, call: Callable[[], object]) -> Timer | None:
    """Return a timer for ``clock``, or ``None`` if there is none for that clock, loop or system."""
    if clock is system_clock and hasattr(time, "CLOCK_BOOTTIME"):
        with contextlib.suppress(OSError, AttributeError, ImportError, NotImplementedError):
            return Timer(loop, call)
    return None
