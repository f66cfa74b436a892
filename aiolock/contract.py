"""What a backend must offer: bids become claims, and claims become grants.

The servers differ in how they decide who may enter, how they tell those who wait, and how a hold dies. This
module is the line between those differences and everything else. Above it, nobody knows which server it is;
below it, nobody knows what a task, a timeout or a block is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Self

from aiolock.clock import Clock
from aiolock.delivery import Waking
from aiolock.document import Document
from aiolock.errors import LossReason, UnsupportedKind
from aiolock.info import Finding, Holder, LockInfo, Waiting
from aiolock.kinds import ELECTION, MUTEX, READ, WRITE, Family, Kind, Mode, permits
from aiolock.outages import Outages

__all__ = [
    "ELECTION",
    "MUTEX",
    "NEVER",
    "READ",
    "WRITE",
    "Backend",
    "Bid",
    "Claim",
    "Document",
    "Family",
    "Finding",
    "Grant",
    "Holder",
    "Kind",
    "Loan",
    "LockInfo",
    "Mode",
    "News",
    "Notice",
    "Release",
    "Renewal",
    "Settings",
    "Waiting",
    "certain_until",
    "claim_time",
    "margin",
    "permits",
]


@dataclass(frozen=True, slots=True)
class Bid:
    """What is asked for: a name, a kind, how long the server keeps it unrenewed (seconds), and who asks.

    ``fair`` asks for one token instead of a block: the hold is not passed on inside the process.
    """

    name: str
    kind: Kind
    ttl: float
    label: str
    fair: bool = False
    key: str = field(init=False, repr=False, compare=False)
    """What bids that may share one claim have in common; made once, because it is looked up for every acquire."""
    certain: float = field(init=False, repr=False, compare=False)
    """For how many seconds after its request a grant of the full ttl is certain: see :func:`certain_until`."""

    def __post_init__(self) -> None:
        kind = self.kind
        what = f"{kind.family.value} {kind.mode.value} {kind.permits}/{kind.limit} {self.ttl!r} {self.name}"
        object.__setattr__(self, "key", what)
        object.__setattr__(self, "certain", certain_until(0.0, self.ttl))


@dataclass(slots=True)
class Grant:
    """The server's yes."""

    token: int
    """The first of the fencing tokens that this grant carries."""
    count: int
    """How many tokens, counted up from ``token``, are ours to hand out."""
    until: float
    """The last instant, on the local clock, at which the hold is certain."""
    demand: bool
    """Whether others wait."""


def margin(ttl: float) -> float:
    """How many seconds before the end of a ttl of that many seconds a holder stops believing."""
    return max(0.02 * ttl, 0.01)


def certain_until(sent: float, ttl: float) -> float:
    """Until when a hold is certain whose request was sent at ``sent`` and asked for ``ttl`` seconds.

    The server started to count after ``sent``. One per cent allows for clocks that run at different speeds.
    """
    return sent + 0.99 * ttl - margin(ttl)


def claim_time(ttl: float) -> float:
    """How many seconds a pushed grant waits for its confirmation before the next in line gets it."""
    return min(ttl, max(1.0, ttl / 10))


NEVER = -math.inf
"""The ``until`` of a grant that proves a hold, and prolongs it by nothing."""

Renewal = Grant | LossReason | Exception
"""The answer to a renewal: still ours, gone and why, or not known."""


class Release(Enum):
    """The server's answer to a release."""

    RELEASED = "released"
    """There was something to give up, or nothing was ever asked for."""
    NOT_OURS = "not ours"
    """The server knew no hold of this claim, and no earlier copy of the release can have ended it."""
    UNKNOWN = "unknown"
    """The server knows of no hold any more; nothing follows from it, because an earlier copy may have ended it."""


class Claim(ABC):
    """One bid of one client at the server, from the first attempt to the release; not used again after it."""

    __slots__ = ("bid", "demanded_at", "fixed", "term")

    asks_again: bool = False
    """Whether a grant that came later than its own end stands for a full ttl again when the same claim asks once more."""

    def __init__(self, bid: Bid) -> None:
        self.bid: Bid = bid
        self.fixed: bool = False
        """Whether the hold is not to be prolonged: a renewal then only verifies that it is still there."""
        self.demanded_at: float | None = None
        """Since when, on the local clock, it is known that others wait; the backend writes it when it is told.

        One that is never told writes when it is to be taken for known, which may be a moment ahead.
        """
        self.term: object = None
        """Whoever watches over its hold finds it again by this; nothing for backends."""

    @abstractmethod
    async def attempt(self, wait: bool) -> Grant | None:
        """Ask once, in one atomic step; with ``wait``, a no also takes a place in the queue.

        Ends within the command timeout; with ``wait``, within two. May be called again in
        every state and finds its own earlier grant or place. A grant that was pushed in the meantime is answered
        without asking. After a cancellation or an error nobody knows whether the server heard it: only ``attempt`` and
        ``release`` are right then.

        Raises :class:`BackendUnavailable` or :class:`BackendRefused`, and :class:`ConfigError` if a semaphore is known
        with another limit: neither the one that its first user said nor the one that was set since.
        """

    @abstractmethod
    async def changed(self) -> None:
        """Wait until another attempt may succeed: may be early, is never infinitely late.

        Cancelling it changes nothing.
        """

    def listen(self, call: Callable[[], Waking | None]) -> bool:  # noqa: ARG002 - for those who can
        """Have ``call`` called once, outside of any task, when :meth:`changed` would end; whether this claim does that.

        If not, or if there is something to tell already, somebody has to wait for :meth:`changed`. It saves a task for
        each lock that is waited for. Whom the call lets go on is to be woken by the backend, when its own things are
        in order. Nothing is called after :meth:`release` has begun.
        """
        return False

    def take_pushed(self) -> Grant | None:
        """A grant that came while we listened, once: the one that :meth:`attempt` would answer without asking."""
        return None

    @abstractmethod
    async def release(self, keep: float = 0) -> Release:
        """Give up the hold, or the place in the queue, whichever there is or may be.

        Right when nobody knows whether the last attempt succeeded; idempotent. With ``keep``, the hold stays for
        that many more seconds but is nobody's. Ends within the command timeout; cancelling it leaves open whether
        the server heard it, and it may be called again.

        The answer is about a hold that was granted; of a place in the queue it says nothing. It is
        :attr:`Release.NOT_OURS` only if this is the first copy of the release that can have reached the server.
        """

    def begin_release(self, keep: float = 0) -> Release | None:  # noqa: ARG002 - for those who can
        """Send the request of :meth:`release` now, on the connection of the client's next request; a plain function.

        Where that request may go out on another connection, it waits for the answer to this one if it is about the same lock.

        The answer, or :attr:`Release.UNKNOWN` if it has yet to come: then :meth:`release` waits for it instead of asking
        again, and is to be called. ``None`` if it cannot be sent at this moment, and nothing was done. Right while an
        :meth:`attempt` is under way if that is cancelled in the same step.
        """
        return None

    def give_way(self) -> Claim | None:
        """Give up this hold, and have a new claim for the same bid wait behind everybody, in one step at the server: that claim.

        ``None`` if this claim cannot do that. If it can, it is over, the step has been sent, and nobody need wait for it: the
        new claim is like one that has asked and was given a place.
        """
        return None

    async def downgrade(self) -> Grant:
        """Turn this write hold into a read hold, without a moment in which it is neither; ``bid.kind`` is READ then.

        The grant has the token of the write hold. Readers who are next in line enter. After a cancellation or an error
        the claim is one of the two: its holder goes on believing the weaker, and ``release`` is right for both. Asking
        again is right as well. Raises :class:`LockLost` if the server says that the hold is gone.
        """
        raise UnsupportedKind("downgrade", type(self).__name__)


class Loan(ABC):
    """A lock inside a transaction on somebody else's connection, which ends it."""

    @abstractmethod
    async def take(self, timeout: float | None, mark: str = "") -> bool:
        """Wait for it for at most ``timeout`` seconds (``None``: for ever, 0: ask once); whether it was to be had.

        A ``mark`` is the name of what is left in the transaction, for :meth:`keeps`. Nothing else is sent on the connection
        afterwards. Cancelling it ends the wait at the server as well.
        """

    @abstractmethod
    async def keeps(self, mark: str) -> bool:
        """Return whether the transaction has had the lock since it was marked; remove the mark.

        Cancelling it leaves the connection in step.
        """


class News(Enum):
    """What a server may say unasked."""

    LOST = "lost"
    """The claim's hold is gone."""
    DOUBT = "doubt"
    """Holds may be gone (the connection broke): renew them now to know."""
    REQUESTED = "requested"
    """Somebody asks the holder to let go; ``text`` says why."""


class Notice(NamedTuple):
    """Something the server said unasked, about one claim, or about all of them if ``claim`` is ``None``."""

    news: News
    claim: Claim | None = None
    reason: LossReason = "revoked"
    text: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a client tells its backend before it opens it."""

    namespace: str
    label: str
    ttl: float
    command_timeout: float
    clock: Clock
    require: frozenset[str] = frozenset()
    outages: Outages | None = None
    """Where lost connections are reported."""


class Backend(ABC):
    """One server, or several that act as one.

    Everything that can be refused without asking the server is refused by ``__init__``, ``bind`` and ``claim``.
    Only errors of :mod:`aiolock.errors` leave a backend.
    """

    name: str
    """How messages call it."""

    address: str = ""
    """Where it is, as people may see it: without a password."""

    capabilities: frozenset[str] = frozenset()
    """What this deployment promises, in the words of ``require=``; complete after ``open``."""

    concurrency: int = 4096
    """How many claims of a client may make their first attempt at the same time; the others wait in the client."""

    settings: Settings

    _made: Callable[[], Self]
    """The constructor with its arguments. A function, because the repr of these would show passwords."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Remember the arguments, for :meth:`again`."""
        self = super().__new__(cls)
        self._made = lambda: cls(*args, **options)
        return self

    def again(self) -> Self:
        """Return a new backend with the same configuration, for the next opening of its client; no I/O.

        Whatever makes tokens grow across openings is passed on by those that keep it in the client.
        """
        return self._made()

    def abandon(self) -> None:  # noqa: B027 - most have nothing to do
        """Forget this opening, whose event loop was closed without ``aclose``: no I/O, and nothing of that loop.

        What the server keeps of it ends by its ttl; connections close when they are collected.
        """

    def bind(self, settings: Settings) -> None:
        """Take over what the client decides. Called once, before ``open``, without I/O."""
        if hasattr(self, "settings"):
            raise RuntimeError("this backend belongs to another client: make one for each")
        self.settings = settings

    @abstractmethod
    async def open(self) -> None:
        """Connect and find out what this deployment can do, within the command timeout.

        Cancelling it leaves nothing open.
        """

    async def settle(self, timeout: float) -> None:  # noqa: B027 - most have nothing to wait for
        """Wait for what is given back in the background, for at most ``timeout`` seconds; cancelling it stops the waiting."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close every connection and end every task. Never raises; safe in every state."""

    @abstractmethod
    def claim(self, bid: Bid) -> Claim:
        """A new claim for ``bid``; no I/O. Raises :class:`UnsupportedKind` where there is no mechanism."""

    @abstractmethod
    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Prolong many holds: per claim a grant, why the hold is gone, or an error if that is unknown.

        The ``token`` and ``count`` of these grants are not handed out. A claim that is ``fixed`` is not prolonged at the
        server: its grant says until when the hold is certain for another reason (a session), or :data:`NEVER` for no longer
        than it is anyway.
        """

    @abstractmethod
    async def notice(self) -> Notice:
        """Wait for the next thing that the server says unasked. Cancelling it loses nothing."""

    @abstractmethod
    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Who holds a lock and who waits for it."""

    @abstractmethod
    async def force_release(self, name: str, family: Family) -> bool:
        """Take a lock from whoever holds it; whether anybody did. The next in line gets it."""

    # --- what not every server has

    def borrow(self, bid: Bid, connection: object) -> Loan:
        """The lock of ``bid`` inside the transaction that is open on ``connection``; no I/O.

        Raises :class:`UnsupportedKind` where there is no mechanism, :class:`ConfigError` for what is no connection.
        """
        raise UnsupportedKind(
            "lock inside a transaction", self.name, "connection= is for MySQL and MariaDB with ?mode=row"
        )

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Ask whoever holds a lock to let go; whether anybody holds it.

        Each holder hears of it through ``notice`` (:attr:`News.REQUESTED`), with its next renewal at the latest.
        """
        raise UnsupportedKind("request_release", self.name)

    async def set_limit(self, name: str, limit: int) -> None:
        """Give a semaphore another number of permits, for 24 hours after its last use.

        Fewer than are out: nobody loses one, newcomers wait. More: whoever is next in line enters at once.
        """
        raise UnsupportedKind("semaphore", self.name)

    def document(self, name: str, family: Family) -> Document:
        """The document of that name, apart from the lock of the same name and family; no I/O.

        Raises :class:`UnsupportedKind` where there is no mechanism.
        """
        raise UnsupportedKind(family.value, self.name)

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Every lock of the namespace that is held or waited for and whose name matches a glob pattern, sorted."""
        raise UnsupportedKind("list of locks", self.name)

    async def diagnose(self) -> list[Finding]:
        """What this deployment is like, for ``aiolock doctor``: reads settings, changes nothing.

        What may not be read is a finding as well. Also right before ``open`` has succeeded if the server can be reached.
        """
        return []
