"""Stand-alone programs around a command: one becomes it, the other kills it when aiolock cannot.

Both run by path in an isolated interpreter and import only the standard library, so that they start in a few milliseconds.

``guard.py`` is the dead man's switch. If the deadline on its standard input passes, because aiolock is stopped, or the input
ends, because aiolock was killed, it kills the process group of the command. That reaches the children of the command, which
the parent-death signal of the kernel does not. Its input: lines ``group PGID``, ``until SECONDS`` (on the clock that runs
during suspend) and ``complaint TEXT``, which it writes to stderr if the group cannot be killed.

``guard.py REPORT GUARD PARENT TERMINAL BLOCKED COMMAND ...`` prepares its process and executes the command: what a
``preexec_fn`` would do after a fork, where it can deadlock. REPORT is a descriptor for the error number of a failed exec; GUARD
is the input of the guard, or -1; PARENT is the process to die with, if there is a guard; TERMINAL is 1 for a command in the
foreground; BLOCKED is the signal mask to restore, separated by commas."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import signal
import sys
import time
from enum import Enum

__all__ = ["DYING", "Reach", "become", "guard", "kill", "main", "send"]

DYING = 0.5
"""Seconds that killed processes have to be gone."""

POLL = 0.25
"""Seconds between checks of the clock: timers stand still while the machine is suspended."""

PR_SET_PDEATHSIG = 1


class Reach(Enum):
    """The answer of the kernel to a signal for a process group."""

    SENT = "at least one process got it, or is dead and not reaped yet"
    GONE = "the group is empty"
    FOREIGN = "all its processes belong to other users"


def send(group: int, number: int) -> Reach:
    """Send a signal to a process group; number 0 sends nothing."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return Reach.GONE
    except PermissionError:
        return Reach.FOREIGN
    return Reach.SENT


def _now() -> float:
    # The clock of aiolock.clock, which cannot be imported without the whole package.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def kill(group: int) -> Reach:
    """Kill a process group and wait until it is gone, for :data:`DYING` seconds at most; return what is left of it."""
    if group <= 1:
        # Not a group yet; 0 would be the own one.
        return Reach.GONE
    reach, give_up = send(group, signal.SIGKILL), _now() + DYING
    while reach is Reach.SENT and _now() < give_up:
        # No event reports the end of a group: a pidfd is about one process, and nothing lists the others.
        time.sleep(0.01)
        reach = send(group, 0)
    return reach


def _end(group: int, complaint: bytes) -> bytes:
    """Kill a group; return the complaint for the next time, which is empty after it was written."""
    if kill(group) is not Reach.FOREIGN:
        return complaint
    with contextlib.suppress(OSError):
        os.write(2, complaint)
    return b""


def guard() -> int:
    """Guard a process group until the input ends."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    group, until, complaint, received = 0, math.inf, b"", b""
    while True:
        left = until - _now()
        if group and left <= 0:
            until, complaint = math.inf, _end(group, complaint)
        waits = None if until == math.inf or not group else max(0.0, min(left, POLL))
        if not select.select([0], [], [], waits)[0]:
            continue
        chunk = os.read(0, 65_536)
        if not chunk:
            _end(group, complaint)
            return 0
        *lines, received = (received + chunk).split(b"\n")
        for line in lines:
            what, _, value = line.partition(b" ")
            if what == b"group":
                group = int(value)
            elif what == b"until":
                until = float(value)
            elif what == b"complaint":
                complaint = value and value + b"\n"


def become(report: str, guard: str, parent: str, terminal: str, blocked: str, *command: str) -> int:
    """Prepare this process and execute the command; return only if that fails, after the error number was reported."""
    os.set_inheritable(int(report), False)  # noqa: FBT003 - the argument has no name
    os.setpgid(0, 0)
    if guard != "-1":
        _die_with(int(parent))
        # Before the command can start anything: the guard must know the group even if aiolock is killed in this moment.
        # The write to a guard that is gone fails with EPIPE, because Python ignores SIGPIPE.
        with contextlib.suppress(OSError):
            os.write(int(guard), f"group {os.getpgrp()}\n".encode())
        os.close(int(guard))
    if terminal == "1":
        # aiolock has blocked SIGTTOU, which would stop a background group that takes the terminal.
        with contextlib.suppress(OSError):
            os.tcsetpgrp(os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC), os.getpgrp())
    # Python ignores SIGPIPE and SIGXFSZ, and an ignored signal stays ignored in the command; its own handler of Ctrl-C would
    # print a traceback.
    defaults = [signal.SIGPIPE, signal.SIGXFSZ]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        defaults.append(signal.SIGINT)
    for number in defaults:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [int(number) for number in blocked.split(",") if number])
    os.write(int(report), str(_execute(list(command))).encode())
    return 127


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; survives exec, is not inherited by children. Linux only."""
    if sys.platform.startswith("linux"):
        import ctypes  # noqa: PLC0415 - the guard does without

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            # The parent ended before the call.
            os.kill(os.getpid(), signal.SIGKILL)


def _execute(command: list[str]) -> int:
    """Execute a command; return the error number if that fails."""
    # A script without a first line that names its interpreter goes to the shell, as in shells and in execvp of C.
    for words in (command, ["/bin/sh", *command]):
        try:
            os.execvp(words[0], words)  # noqa: S606 - the command of the user
        except OSError as error:
            if error.errno != errno.ENOEXEC or words is not command:
                return error.errno or errno.EACCES
        except ValueError:
            return errno.EINVAL
    return errno.ENOEXEC


def main(words: list[str]) -> int:
    """Guard a command, or become the one in ``words``."""
    return become(*words) if words else guard()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
