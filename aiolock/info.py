"""What people are told about locks and servers: holders, waiters, findings."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from aiolock.kinds import Family

__all__ = ["Finding", "Holder", "Level", "LockInfo", "Waiting"]


@dataclass(frozen=True, slots=True)
class Holder:
    """Somebody inside, as an administrator sees it."""

    label: str
    token: int
    since: datetime
    remaining: float
    """Seconds until the server drops the hold if it is not renewed."""
    permits: int = 1
    mode: str = "mutex"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Somebody in the queue. Several tasks of one client may wait behind one place."""

    label: str
    mode: str = "mutex"
    permits: int = 1


@dataclass(frozen=True, slots=True)
class LockInfo:
    """What the server knows about one lock at one moment."""

    name: str
    holders: tuple[Holder, ...]
    waiters: tuple[Waiting, ...]
    """In the order in which they will be served."""
    family: Family = Family.LOCK
    limit: int | None = None
    """How many permits a semaphore has; ``None`` for what has none, or if nobody has said it yet."""

    @property
    def locked(self) -> bool:
        """Whether anybody is inside."""
        return bool(self.holders)


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found out about a deployment."""

    level: Level
    subject: str
    """What was looked at, such as ``maxmemory-policy``."""
    text: str
    """What it is and what follows from it, in a sentence."""
    advice: str = ""
    """What would be better, in a sentence; empty where all is well."""
