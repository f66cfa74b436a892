"""Exit statuses: one number for each way in which a command can end, as flock, shells and sysexits.h number them."""

from __future__ import annotations

import asyncio
import errno

from aiolock.errors import (
    AcquireTimeout,
    BackendError,
    ConfigError,
    InvalidName,
    LockError,
    LockLost,
    MissingDriver,
    UnsupportedKind,
)

__all__ = [
    "CANNOT_RUN",
    "CANNOT_WRITE",
    "EXHAUSTED",
    "EXHAUSTING",
    "INTERNAL",
    "LOST",
    "NOT_ACQUIRED",
    "NOT_FOUND",
    "TABLE",
    "UNAVAILABLE",
    "USAGE",
    "Ended",
    "ended_by",
    "of_child",
    "of_error",
    "of_exec",
    "of_signal",
]

NOT_ACQUIRED = 1
USAGE = 64
UNAVAILABLE = 69
INTERNAL = 70
EXHAUSTED = 71
CANNOT_WRITE = 74
LOST = 75
CANNOT_RUN = 126
NOT_FOUND = 127

TABLE = f"""\
exit status:
  of run: that of the command (128+n if signal n killed it), or
  {NOT_ACQUIRED:3}    the lock was not free in time (another number with -E)
  {LOST:3}    the lock was lost, and the command was stopped or had overlapped
  {CANNOT_RUN:3}    the command cannot be run
  {NOT_FOUND:3}    there is no such command
  128+n  signal n came before the command was started, or while the lock was given back
  of every command:
  {USAGE:3}    wrong usage
  {UNAVAILABLE:3}    the server cannot be reached, or refuses
  {INTERNAL:3}    a defect in aiolock itself
  {EXHAUSTED:3}    this machine gives no more processes, files or memory
  {CANNOT_WRITE:3}    stdout cannot be written"""

EXHAUSTING = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""The errors of a machine, or a limit, that gives no more of something."""


class Ended(Exception):
    """A command ends here, with this status; ``message`` has been said, or is the sentence to say.

    :param signal: the signal that came, or 0.
    :param job: it was meant for all of our process group, which has not got it.
    """

    def __init__(self, status: int, message: str = "", *, signal: int = 0, job: bool = False) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.signal = signal
        self.job = job


def of_signal(number: int) -> int:
    """The status of what signal ``number`` ended."""
    return 128 + number


def ended_by(number: int, *, job: bool = False) -> Ended:
    """The end that a signal brings."""
    return Ended(of_signal(number), signal=number, job=job)


def of_child(returncode: int) -> int:
    """The status of a command, from what Python says of its process: a negative number for a signal."""
    return of_signal(-returncode) if returncode < 0 else returncode


def of_exec(number: int) -> int:
    """The status for the error number with which a command could not be started."""
    return NOT_FOUND if number in (errno.ENOENT, errno.ENOTDIR) else CANNOT_RUN


def of_error(error: BaseException) -> int:
    """The status of a command that ended with ``error``."""
    match error:
        case Ended():
            return error.status
        case AcquireTimeout():
            return NOT_ACQUIRED
        case LockLost():
            return LOST
        case ConfigError() | InvalidName() | MissingDriver() | UnsupportedKind():
            return USAGE
        case BackendError() | LockError():
            return UNAVAILABLE
        case KeyboardInterrupt() | asyncio.CancelledError():
            return of_signal(2)
    return INTERNAL
