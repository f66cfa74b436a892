"""Signals, job control of the terminal, and ending by a signal."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import termios
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from signal import Signals
from typing import Any, TextIO

__all__ = [
    "DEADLY",
    "ENDING",
    "FORWARDED",
    "JOB",
    "LEAVE",
    "SignalQueue",
    "Terminal",
    "blocked",
    "die",
    "size",
    "stop",
]

LEAVE = (Signals.SIGTERM, Signals.SIGINT, Signals.SIGHUP, Signals.SIGQUIT, Signals.SIGUSR1, Signals.SIGUSR2)
"""Signals that end a program by default; a run that waits for a lock leaves the queue."""

JOB = (Signals.SIGWINCH, Signals.SIGTSTP, Signals.SIGCONT, Signals.SIGCHLD)
"""Signals that matter only while a command runs."""

FORWARDED = (*LEAVE, Signals.SIGWINCH, Signals.SIGTSTP, Signals.SIGCONT)

ENDING = (Signals.SIGTERM, Signals.SIGINT, Signals.SIGHUP, Signals.SIGQUIT)
"""Signals that ask a command to end, and shorten the release after it; others have a meaning for the command alone."""

DEADLY = (Signals.SIGINT, Signals.SIGQUIT)
"""Signals that a terminal sends to the job in the foreground."""


class SignalQueue:
    """Received signals in order, and an event that wakes their reader."""

    def __init__(self) -> None:
        self.wake: asyncio.Event = asyncio.Event()
        """Set by a signal, the end of a watched task, or other code."""
        self._received: deque[Signals] = deque()

    def taken(self) -> Iterator[Signals]:
        """Remove and yield the signals, oldest first."""
        while self._received:
            yield self._received.popleft()

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Wake the reader when a task ends."""
        task.add_done_callback(lambda _: self.wake.set())

    async def wait(self, seconds: float) -> None:
        """Wait until :attr:`wake` is set, at most so many seconds, and clear it. Cancelling it does not clear it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wake.wait()
        self.wake.clear()

    @contextmanager
    def listen(self, *signals: Signals) -> Iterator[None]:
        """Receive these signals within the block, except those that this process was started to ignore."""
        loop = asyncio.get_running_loop()
        heeded = [number for number in signals if not _is_ignored(number)]
        for number in heeded:
            loop.add_signal_handler(number, self._receive, number)
        try:
            yield
        finally:
            for number in heeded:
                loop.remove_signal_handler(number)

    def _receive(self, number: Signals) -> None:
        self._received.append(number)
        self.wake.set()


def _is_ignored(number: Signals) -> bool:
    # nohup and shells without job control ignore signals for their children. SIGCHLD is no such case: a program that waits
    # for its own children must not inherit it.
    return number != Signals.SIGCHLD and signal.getsignal(number) is signal.SIG_IGN


class Terminal:
    """The controlling terminal; without one every method has no effect.

    Exactly one process group of a session has the terminal: it gets what is typed, and Ctrl-C. The command has a group of its
    own, to which the terminal is lent until the command stops or ends.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._modes: list[Any] | None = None
        with suppress(OSError):
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
        if self.foreground:
            with suppress(termios.error):
                self._modes = termios.tcgetattr(self._fd)
        self.lend_at_once = self.foreground and os.isatty(0) and os.isatty(1)
        """True if the command gets it from its start. If its output goes to a pager, that may need the terminal first."""

    @property
    def there(self) -> bool:
        """True if there is a terminal."""
        return self._fd >= 0

    @property
    def group(self) -> int:
        """The process group that has the terminal; -1 if that is not known."""
        try:
            return os.tcgetpgrp(self._fd)
        except OSError:
            return -1

    @property
    def foreground(self) -> bool:
        """True if the process group of aiolock has it."""
        return self.group == os.getpgrp()

    def restore(self) -> None:
        """Restore the modes from before the command, which a killed command cannot do."""
        if self._modes is not None and self.foreground:
            with suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._modes)

    def lend(self, group: int) -> None:
        """Give it to another process group."""
        # Unless SIGTTOU is blocked, a background group that changes the owner of the terminal is stopped.
        with blocked(signal.SIGTTOU), suppress(OSError):
            os.tcsetpgrp(self._fd, group)

    def take_back(self, group: int) -> bool:
        """Take it from the process group of the command; return whether that had it."""
        lent = self.group == group
        if lent:
            self.lend(os.getpgrp())
        return lent

    def close(self) -> None:
        """Close the terminal."""
        if self.there:
            os.close(self._fd)
            self._fd = -1


@contextmanager
def blocked(*signals: Signals) -> Iterator[set[int]]:
    """Block signals, which wait until the block ends; yields the mask from before."""
    before = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, signals)}
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop(*, job: bool) -> None:
    """Stop this process, or its whole process group, as Ctrl-Z does; return when it goes on."""
    before = signal.signal(Signals.SIGTSTP, signal.SIG_DFL)
    try:
        # The stop happens inside this call. An orphaned process group is not stopped: no shell could continue it.
        if job:
            os.killpg(os.getpgrp(), Signals.SIGTSTP)
        else:
            os.kill(os.getpid(), Signals.SIGTSTP)
    finally:
        signal.signal(Signals.SIGTSTP, before)


def die(number: Signals, *, job: bool) -> None:
    """End by a signal; return only if that is not possible.

    A shell continues its script after a program that ended with status 130, because the program may have used Ctrl-C for
    itself, as editors do. It ends the script if the program died of the signal and the shell got it too.

    :param job: send it to the whole process group, which did not get it because the command had the terminal.
    """
    if number is Signals.SIGQUIT:
        # A core dump is wanted of the command, not of aiolock.
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    if job:
        os.killpg(os.getpgrp(), number)
    os.kill(os.getpid(), number)


def size(stream: TextIO) -> os.terminal_size:
    """The size of the terminal behind a stream; the variable ``COLUMNS`` does not follow its changes."""
    with suppress(OSError, ValueError):
        found = os.get_terminal_size(stream.fileno())
        if found.columns > 0 and found.lines > 0:
            return found
    return shutil.get_terminal_size()
