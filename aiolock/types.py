"""Kinds of locks, the events of leases, and the results of inspection and diagnosis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Self

from aiolock.errors import LossReason

__all__ = [
    "BARRIER",
    "ELECTION",
    "LATCH",
    "LOCK_FAMILIES",
    "MUTEX",
    "PERMIT",
    "READ",
    "WRITE",
    "Family",
    "Finding",
    "Holder",
    "Kind",
    "Leader",
    "Level",
    "LockEvent",
    "LockInfo",
    "Mode",
    "SkipEvent",
    "Waiting",
    "permits",
]

# --- kinds of locks


class Family(StrEnum):
    """The locks that one name can have: families never exclude each other."""

    LOCK = "lock"
    RW = "rw"
    SEMAPHORE = "sem"
    ELECTION = "election"
    LATCH = "latch"
    BARRIER = "barrier"

    @property
    def shareable(self) -> bool:
        """Test whether several holds of one name can exist at the same time."""
        return self in (Family.RW, Family.SEMAPHORE)

    @property
    def counted(self) -> bool:
        """Test whether holds are permits, of which a name has a limited number."""
        return self is Family.SEMAPHORE


class Mode(StrEnum):
    """The way in which a hold excludes others of its name."""

    MUTEX = "mutex"
    READ = "read"
    WRITE = "write"
    PERMITS = "permits"


# Looking members up in their class would cost 3 to 4 % of a free acquire and release on memory:// (Python 3.11).
_ALONE = (Mode.MUTEX, Mode.WRITE)


@dataclass(frozen=True, slots=True)
class Kind:
    """A family, a mode, and for permits how many of how many.

    Backends ask for these properties and not for the mode, so that one rule admits every kind: see :meth:`weigh`.
    """

    family: Family
    mode: Mode
    permits: int = 1
    limit: int = 1

    @property
    def exclusive(self) -> bool:
        """Test whether such a hold is alone, so that tasks of one process may hand it over among themselves."""
        return self.mode in _ALONE

    @property
    def shareable(self) -> bool:
        """Test whether the name can have several holds at once, though perhaps not of this kind."""
        return self.family.shareable

    @property
    def counted(self) -> bool:
        """Test whether such a hold is permits out of a limit."""
        return self.family.counted

    def weigh(self, whole: int) -> tuple[int, int]:
        """Return the weight of such a hold, and what all holds of its name together may weigh.

        A request is admitted if it does not exceed the second number. ``whole`` stands for more readers than there can be.
        """
        if self.family.counted:
            return self.permits, self.limit
        return (whole if self.exclusive else 1), whole

    def __str__(self) -> str:
        if self.counted:
            return f"{self.permits} of {self.limit} permits"
        return self.mode.value if self.family in (Family.LOCK, Family.RW) else self.family.value


MUTEX = Kind(Family.LOCK, Mode.MUTEX)
READ = Kind(Family.RW, Mode.READ)
WRITE = Kind(Family.RW, Mode.WRITE)
PERMIT = Kind(Family.SEMAPHORE, Mode.PERMITS)
ELECTION = Kind(Family.ELECTION, Mode.MUTEX)
LATCH = Kind(Family.LATCH, Mode.MUTEX)
BARRIER = Kind(Family.BARRIER, Mode.MUTEX)


def permits(count: int, limit: int) -> Kind:
    """Return the kind that takes ``count`` of ``limit`` permits."""
    return replace(PERMIT, permits=count, limit=limit)


LOCK_FAMILIES = (Family.LOCK, Family.RW, Family.SEMAPHORE, Family.ELECTION)
"""The families whose locks have holders; the other families are registers."""


# --- events of leases


@dataclass(frozen=True, slots=True)
class LockEvent:
    """An event of one lease, as the callbacks of :meth:`Client.on_acquired` and its siblings get it."""

    name: str
    """The name of the lock. Not for the labels of metrics: there may be millions of names."""
    kind: Kind
    """The kind of lock that was acquired."""
    template: str
    """The name before it was filled in, such as ``order:{order_id}``: of locks that a decorator or a route made. Else empty."""
    token: int
    """The fencing token of the lease; 0 if it has none, as where locks are in the format of another library."""
    waited: float
    """Seconds from the request to the grant."""
    held: float = 0.0
    """Seconds from the grant to the release or the loss, whichever was first, or until now; 0 in ``on_acquired``."""
    released: bool = False
    """True once the holder gave it back. In ``on_lost``: only the answer to the release reported the loss."""
    reason: LossReason | None = None
    """The reason of the loss; ``None`` unless it was lost."""
    remaining: float = 0.0
    """In ``on_renewal_failing``: seconds for which the lease still holds if no renewal succeeds."""
    error: str = ""
    """In ``on_renewal_failing``: why the renewal failed."""


# --- results of inspection and diagnosis


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder, as an administrator sees it."""

    label: str
    """The ``label=`` of the lock, else of the client; empty if neither has one."""
    token: int
    """The first fencing token of the hold; 0 if it has none, as where locks are in the format of another library."""
    since: datetime
    """The time of the grant; that of the inspection where it is not known."""
    remaining: float
    """Seconds until the server drops the hold if it is not renewed; infinite for a client of another library that set no end."""
    permits: int = 1
    mode: str = "mutex"
    tokens: int = 1
    """The number of tokens, from ``token`` on, that may belong to this hold: its client hands it over between its tasks without
    asking the server."""
    value: bytes = b""
    """The value of the campaign of a leader."""
    local_waiters: int | None = None
    """The tasks that wait inside the holder's client, as of its last renewal (0 before the first); ``None`` where renewals do
    not send it to the server."""
    host: str = ""
    """The machine of the holder's process, at most 64 bytes of its name; empty where the server does not know it."""
    pid: int | None = None
    """The id of the process on that machine, or in its container; ``None`` where the server does not know it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A hold without a holder: it was released with ``keep=``, as by ``at_least=`` of ``once``, and excludes others until its time is over."""

    until: datetime
    """Its end, by the clock of this machine."""
    permits: int
    last_holder: str
    """The label of the holder that released it."""
    host: str = ""
    """The machine of that holder, as :attr:`Holder.host`."""
    pid: int | None = None
    """The process of that holder, as :attr:`Holder.pid`."""


@dataclass(frozen=True, slots=True)
class SkipEvent:
    """A job that was skipped, as the callbacks of :meth:`Client.on_skipped` get it."""

    name: str
    """The name of the lock. Not for the labels of metrics: there may be millions of names."""
    template: str
    """The name before it was filled in, such as ``report:{tenant}``."""
    holder: Holder | None = None
    """The worker that does the job at this moment; ``None`` if no worker does, or if that is not known."""
    kept: Kept | None = None
    """The run that counts within ``at_least``, if it is over; ``None`` if there is none, or if it is not known."""
    until: datetime | None = None
    """The time until which others skip the job, by the clock of this machine: later if the holder renews its lock, earlier if
    its run ends. ``None`` if that is not known."""

    @classmethod
    def of(cls, name: str, template: str, info: LockInfo | None) -> Self:
        """Return the event of a lock whose state after the skip was ``info``; ``None`` if it could not be read."""
        if info is not None and info.holders:
            holder = info.holders[0]
            return cls(name, template, holder, until=datetime.now(UTC) + timedelta(seconds=holder.remaining))
        if info is not None and info.kept:
            return cls(name, template, kept=info.kept[0], until=info.kept[0].until)
        return cls(name, template)


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader of an election, as the server sees it."""

    holder: Holder
    """The holder of the term: its ``label``, ``since`` and ``remaining``."""

    @property
    def token(self) -> int:
        """The number of the term, greater than that of every earlier one."""
        return self.holder.token

    @property
    def value(self) -> bytes:
        """The value that the leader campaigned with, such as its address; empty if it gave none."""
        return self.holder.value


@dataclass(frozen=True, slots=True)
class Waiting:
    """An entry of the queue; several tasks of one client may wait behind it."""

    label: str
    mode: str = "mutex"
    permits: int = 1
    host: str = ""
    """The machine of the process that waits, as :attr:`Holder.host`."""
    pid: int | None = None
    """The process that waits, as :attr:`Holder.pid`."""


@dataclass(frozen=True, slots=True)
class LockInfo:
    """The state of one lock at the server at one moment."""

    name: str
    holders: tuple[Holder, ...]
    """Those that hold it at this moment; what is kept after a release has no holder."""
    waiters: tuple[Waiting, ...]
    """In the order of service."""
    family: Family = Family.LOCK
    limit: int | None = None
    """The permits of a semaphore, 0 while it is paused; ``None`` for other locks, and before a client has named the number."""
    kept: tuple[Kept, ...] = ()
    """Holds without a holder, kept after their release."""
    unreadable: str = ""
    """In a list of locks: why holders and waiters are not known, if what is at the server cannot be read."""

    @property
    def locked(self) -> bool:
        """True if the lock has a holder or is kept after a release, or may have a holder that is not known."""
        return bool(self.holders or self.kept or self.unreadable)

    @property
    def permits(self) -> int:
        """The permits that are taken, with and without a holder."""
        return sum(holder.permits for holder in self.holders) + sum(kept.permits for kept in self.kept)

    @classmethod
    def of_holds(
        cls,
        name: str,
        holds: Iterable[Holder],
        waiters: Iterable[Waiting],
        family: Family,
        limit: int | None = None,
    ) -> Self:
        """Return the state of a lock from its holds, of which those without a token are kept after their release."""
        now = datetime.now(UTC)
        holders: list[Holder] = []
        kept: list[Kept] = []
        for hold in holds:
            if hold.tokens:
                holders.append(hold)
            else:
                kept.append(Kept(now + timedelta(seconds=hold.remaining), hold.permits, hold.label))
        return cls(name, tuple(holders), tuple(waiters), family, limit, tuple(kept))

    @property
    def local_waiters(self) -> int | None:
        """The tasks that wait inside the clients of the holders, which :attr:`waiters` does not contain; ``None`` if not known."""
        known = [holder.local_waiters for holder in self.holders if holder.local_waiters is not None]
        return sum(known) if known else None


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a diagnosis."""

    level: Level
    subject: str
    """The setting or property, such as ``maxmemory-policy``."""
    text: str
    """The value of the subject and the consequence, in a sentence."""
    advice: str = ""
    """The remedy, in a sentence; empty if there is nothing to improve."""
