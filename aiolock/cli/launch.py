"""Becomes the command: a program of its own, run by path, that prepares its process and then executes the command.

What has to happen between fork and exec is done here, in a fresh process with one thread, and not in a ``preexec_fn``, which
can deadlock. It imports nothing but the standard library, so that it starts in a few milliseconds.

Its arguments: a file descriptor to say an error number on (closed by a successful exec), one to tell the guard which
process group it has (or -1), the pid of who started it, whether to take the terminal, the signals that were blocked before
(separated by commas), and the command. With a guard it dies with who started it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys

__all__ = ["become", "main"]

PR_SET_PDEATHSIG = 1


def become(command: list[str]) -> int:
    """Execute ``command``; returns an error number if that cannot be done."""
    # Python ignores these two, and what is ignored stays so in the command.
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - running what the user says is what this is for
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            return error.errno or errno.EACCES
    except ValueError:
        return errno.EINVAL
    try:
        # A script without a first line that names its interpreter: shells, and execvp of C, do the same.
        os.execvp("/bin/sh", ["/bin/sh", *command])  # noqa: S606
    except OSError as error:
        return error.errno or errno.EACCES


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; survives exec, is not inherited by its children."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # noqa: PLC0415 - not needed elsewhere

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # It ended before the kernel was told.
        os.kill(os.getpid(), signal.SIGKILL)


def _tell_guard(guard: int) -> None:
    """Before the command can start anything: the guard has to know even if our parent is killed in this very moment."""
    # A guard that is gone makes no trouble, as SIGPIPE is ignored.
    with contextlib.suppress(OSError):
        os.write(guard, f"group {os.getpgrp()}\n".encode())
    os.close(guard)


def _take_terminal() -> None:
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
        # SIGTTOU is blocked: without that, a background group that asks for the terminal is stopped.
        os.tcsetpgrp(terminal, os.getpgrp())
    except OSError:
        return
    os.close(terminal)


def main(words: list[str]) -> int:
    """Prepare this process, and execute the command; ends only if that fails."""
    report, guard, parent, terminal, blocked, *command = words
    os.set_inheritable(int(report), False)  # noqa: FBT003 - the argument has no name
    os.setpgid(0, 0)
    if guard != "-1":
        _die_with(int(parent))
        _tell_guard(int(guard))
    if terminal == "1":
        _take_terminal()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Python's own answer to Ctrl-C would be a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [int(number) for number in blocked.split(",") if number])
    number = become(command)
    os.write(int(report), str(number).encode())
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
