"""Who may be inside together: the words that every lock, every backend and every page uses for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ELECTION", "MUTEX", "READ", "WRITE", "Family", "Kind", "Mode", "permits"]


class Family(StrEnum):
    """Which locks share a name: families never exclude each other."""

    LOCK = "lock"
    RW = "rw"
    SEMAPHORE = "sem"
    ELECTION = "election"
    LATCH = "latch"
    BARRIER = "barrier"


class Mode(StrEnum):
    """Who may be inside together."""

    MUTEX = "mutex"
    READ = "read"
    WRITE = "write"
    PERMITS = "permits"


# Looking a member up in its class is slow on Python 3.11, and this is asked for every acquire.
_ALONE = (Mode.MUTEX, Mode.WRITE)


@dataclass(frozen=True, slots=True)
class Kind:
    """A family, a mode, and for permits how many of how many."""

    family: Family
    mode: Mode
    permits: int = 1
    limit: int = 1

    @property
    def exclusive(self) -> bool:
        """Whether such a hold is alone, so that tasks of one process may pass it on among themselves."""
        return self.mode in _ALONE

    def __str__(self) -> str:
        return f"{self.permits} of {self.limit} permits" if self.mode is Mode.PERMITS else self.mode.value


MUTEX = Kind(Family.LOCK, Mode.MUTEX)
READ = Kind(Family.RW, Mode.READ)
WRITE = Kind(Family.RW, Mode.WRITE)
ELECTION = Kind(Family.ELECTION, Mode.MUTEX)


def permits(count: int, limit: int) -> Kind:
    """The kind that takes ``count`` of ``limit`` permits."""
    return Kind(Family.SEMAPHORE, Mode.PERMITS, count, limit)
