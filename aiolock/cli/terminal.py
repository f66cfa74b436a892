"""The terminal that a command shares with us: which process group has it, and what it looked like before.

Exactly one group of a session has the terminal: what is typed goes there, and so does Ctrl-C. The command has a group
of its own, so the terminal is lent to it, and taken back when it stops or ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from typing import Any, TextIO

__all__ = ["Terminal", "blocked", "size"]


class Terminal:
    """Our controlling terminal, or none: then every verb does nothing."""

    def __init__(self) -> None:
        self._fd = -1
        self._modes: list[Any] | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        self.lend_at_once = self.ours and _is_terminal(0) and _is_terminal(1)
        """Whether the command gets it from its start. If its output goes to a pager, that may need the terminal first."""

    @property
    def there(self) -> bool:
        """Whether there is one."""
        return self._fd >= 0

    @property
    def ours(self) -> bool:
        """Whether our own group has it."""
        try:
            return self.there and os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False

    def remember(self) -> None:
        """Keep its modes, for :meth:`restore`."""
        if self.ours:
            import termios  # noqa: PLC0415 - only where there is a terminal

            with contextlib.suppress(termios.error):
                self._modes = termios.tcgetattr(self._fd)

    def restore(self) -> None:
        """Give it the modes that were kept: a command that was killed cannot tidy up."""
        if self._modes is not None and self.ours:
            import termios  # noqa: PLC0415

            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._modes)

    def lend(self, group: int) -> None:
        """Give it to another group."""
        if self.there:
            # We may be in the background already, where asking for it means SIGTTOU, unless that is blocked.
            with blocked(signal.SIGTTOU), contextlib.suppress(OSError):
                os.tcsetpgrp(self._fd, group)

    def take_back(self, group: int) -> bool:
        """Take it from ``group``, a command of ours, if that still has it; whether it did."""
        try:
            lent = self.there and os.tcgetpgrp(self._fd) == group
        except OSError:
            return False
        if lent:
            self.lend(os.getpgrp())
        return lent

    def close(self) -> None:
        """We need it no more."""
        if self.there:
            os.close(self._fd)
            self._fd = -1


class blocked:  # noqa: N801 - reads as the verb that it is
    """``with blocked(*signals) as before``: they wait until the block ends; ``before`` is what was blocked already."""

    def __init__(self, *signals: signal.Signals) -> None:
        self._signals = signals
        self._before: set[int] = set()

    def __enter__(self) -> set[int]:
        self._before = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)}
        return self._before

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


def size(stream: TextIO) -> os.terminal_size:
    """How large the terminal is that a stream goes to: of itself, because ``COLUMNS`` does not follow its changes."""
    with contextlib.suppress(OSError, ValueError):
        found = os.get_terminal_size(stream.fileno())
        if found.columns > 0 and found.lines > 0:
            return found
    return shutil.get_terminal_size()


def _is_terminal(fd: int) -> bool:
    return os.isatty(fd) and sys.platform != "win32"
