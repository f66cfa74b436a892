"""Exit statuses, with the numbers of flock, timeout, shells and sysexits.h."""

from __future__ import annotations

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
    "OVERDUE",
    "TABLE",
    "UNAVAILABLE",
    "USAGE",
    "Ended",
    "ended_by",
    "of_child",
    "of_error",
    "of_exec",
]

NOT_ACQUIRED = 1
USAGE = 64
UNAVAILABLE = 69
INTERNAL = 70
EXHAUSTED = 71
CANNOT_WRITE = 74
LOST = 75
OVERDUE = 124
CANNOT_RUN = 126
NOT_FOUND = 127

TABLE = f"""\
exit status:
  of run: that of the command (128+n if signal n killed it), or
  {NOT_ACQUIRED:3}    the lock was not free in time (another number with -E)
  {LOST:3}    the lock was lost, and the command was stopped or had overlapped
  {OVERDUE:3}    the command was stopped because it ran for longer than --max-hold
  {CANNOT_RUN:3}    the command cannot be run
  {NOT_FOUND:3}    there is no such command
  128+n  signal n came before the command was started, or while the lock was released
  of verify:
  {NOT_ACQUIRED:3}    two holders were inside at once, or tokens were equal or fell
  of every command:
  {USAGE:3}    wrong usage
  {UNAVAILABLE:3}    the server cannot be reached, or refuses
  {INTERNAL:3}    a defect in aiolock itself
  {EXHAUSTED:3}    this machine gives no more processes, files or memory
  {CANNOT_WRITE:3}    stdout cannot be written"""

EXHAUSTING = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Error numbers of a machine, or a limit of the process, that gives no more resources."""


class Ended(Exception):
    """Ends a command with a status; ``message`` is a sentence for stderr, or empty.

    :param signal: the signal to die of, or 0.
    :param job: send it to the whole process group.
    """

    def __init__(self, status: int, message: str = "", *, signal: int = 0, job: bool = False) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.signal = signal
        self.job = job


def ended_by(number: int, *, job: bool = False) -> Ended:
    """End a command because of a signal."""
    return Ended(128 + number, signal=number, job=job)


def of_child(returncode: int) -> int:
    """Return the status for a return code of Python, which is negative for a signal."""
    return 128 - returncode if returncode < 0 else returncode


def of_exec(number: int) -> int:
    """Return the status for a command that failed to start with this error number."""
    return NOT_FOUND if number in (errno.ENOENT, errno.ENOTDIR) else CANNOT_RUN


def of_error(error: BaseException) -> int:
    """Return the status for an exception."""
    match error:
        case AcquireTimeout():
            return NOT_ACQUIRED
        case LockLost():
            return LOST
        case ConfigError() | InvalidName() | MissingDriver() | UnsupportedKind():
            return USAGE
        case BackendError() | LockError():
            return UNAVAILABLE
    return INTERNAL
