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
    "INTERNAL",
    "LOST",
    "NOT_ACQUIRED",
    "NOT_FOUND",
    "TABLE",
    "UNAVAILABLE",
    "USAGE",
    "Ended",
    "of_child",
    "of_error",
    "of_exec",
    "of_signal",
]

NOT_ACQUIRED = 1
USAGE = 64
UNAVAILABLE = 69
INTERNAL = 70
LOST = 75
CANNOT_RUN = 126
NOT_FOUND = 127

TABLE = f"""\
exit status:
  of run: that of the command (128+n if signal n killed it), or
  {NOT_ACQUIRED:3}    the lock was not free in time (another number with -E)
  {LOST:3}    the lock was lost, and the command was stopped
  {CANNOT_RUN:3}    the command cannot be run
  {NOT_FOUND:3}    there is no such command
  128+n  signal n came before the command was started
  of every command:
  {USAGE:3}    wrong usage
  {UNAVAILABLE:3}    the server cannot be reached, or refuses
  {INTERNAL:3}    a defect in aiolock itself"""


class Ended(Exception):
    """A command ends here, with this status; ``message`` has been said, or is the sentence to say."""

    def __init__(self, status: int, message: str = "") -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message


def of_signal(number: int) -> int:
    """The status of what signal ``number`` ended."""
    return 128 + number


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
