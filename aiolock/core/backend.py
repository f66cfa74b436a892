"""The contract between aiolock and a server: requests become claims, and claims become grants.

Servers differ in how they decide who may enter, how they notify waiters, and how a hold ends. This module separates those
differences from everything else: the code above it knows no server, the code below it no task, timeout or block.

A backend opens and closes, names its capabilities, and has four verbs: ``acquire`` and ``release`` of a claim, ``renew`` of
many, and ``events``. The inbox of a claim wakes its waiter. :mod:`aiolock.core.capabilities` has what only some servers can do.
"""

from __future__ import annotations

import asyncio
import math
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple, Self, TypeVar

from aiolock.clock import Clock
from aiolock.core.inbox import Inbox
from aiolock.core.logs import Outages
from aiolock.core.present import PresentLease
from aiolock.errors import LossReason
from aiolock.types import Kind

__all__ = [
    "NEVER",
    "Backend",
    "Certainty",
    "Claim",
    "Event",
    "EventKind",
    "EventQueue",
    "Grant",
    "Release",
    "Renewal",
    "Request",
    "Settings",
    "confirmation_window",
    "expires_at",
    "margin",
]

T = TypeVar("T")

# --- requests, grants and claims


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a lock: name, kind, ttl (seconds that the server keeps it without renewal) and a text that says who asks.

    The text, ``label``, has host and process in front of the caller's label, and at most 360 bytes; a backend stores it as it is, and returns it as
    the label of holders and waiters.

    ``fair`` asks for one token instead of a block of tokens: the lock is not handed over inside the client.
    ``life`` is for how many seconds a hold stands that is not renewed; it is infinite if the client renews the hold. ``grace`` is
    how many seconds earlier than it has to the client counts the hold as lost.
    """

    name: str
    kind: Kind
    ttl: float
    label: str
    fair: bool = False
    life: float = math.inf
    grace: float = 0.0
    value: bytes = b""
    """The value of a campaign, which others read with the holder."""
    key: str = field(init=False, repr=False, compare=False)
    """Equal for requests that may share a claim; computed once, because every acquire uses it as a key."""
    valid_for: float = field(init=False, repr=False, compare=False)
    """Seconds from its sending for which a grant of the full ttl counts as held; see :func:`expires_at`."""

    @property
    def stays(self) -> float:
        """Seconds for which the server may keep a hold after its last renewal."""
        return self.ttl if self.life == math.inf else max(self.ttl, self.life)

    def __post_init__(self) -> None:
        kind = self.kind
        what = f"{kind.family.value} {kind.mode.value} {kind.permits}/{kind.limit} {self.ttl!r}/{self.grace!r} {self.name}"
        object.__setattr__(self, "key", what)
        object.__setattr__(self, "valid_for", _valid_for(self.ttl))


@dataclass(slots=True)
class Grant:
    """A grant of the server."""

    token: int
    """The first fencing token of this grant; 0 where the server gives none."""
    count: int
    """The number of tokens, counted up from ``token``, that the client may give out."""
    until: float
    """The time, on the local clock, until which the hold is certain."""
    demand: bool
    """True if other clients wait."""


def margin(ttl: float) -> float:
    """Return the seconds before the end of a ttl at which a holder stops relying on its hold."""
    return max(0.02 * ttl, 0.01)


def expires_at(sent: float, ttl: float) -> float:
    """Return the time at which the client counts a hold as expired whose request, for ``ttl`` seconds, was sent at ``sent``.

    The server started to count later, and so keeps the hold for longer. One per cent allows for clocks that run at different speeds.
    """
    return sent + 0.99 * ttl - margin(ttl)


def confirmation_window(ttl: float) -> float:
    """Return the confirmation window: seconds after which an unconfirmed pushed grant goes to the next in the queue."""
    return min(ttl, max(1.0, ttl / 10))


@lru_cache(maxsize=64)
def _valid_for(ttl: float) -> float:
    """Return :attr:`Request.valid_for`; requests of one ttl share it, which saves each hold 24 bytes."""
    return expires_at(0.0, ttl)


NEVER = -math.inf
"""The ``until`` of a grant that proves a hold without prolonging it."""

Renewal = Grant | LossReason | Exception
"""The answer to a renewal: granted, the reason why the hold is gone, or an error if that is unknown."""


class Release(Enum):
    """The server's answer to a release."""

    RELEASED = "released"
    """A hold or queue position was given up, or no request had been sent."""
    NOT_HELD = "not held"
    """The server knew no hold of this claim, and no earlier copy of the release can have ended it."""
    UNKNOWN = "unknown"
    """The server knows no hold any more, but an earlier copy of the release may have ended it."""

    @classmethod
    def of(cls, held: bool | None, *, first: bool) -> Release:
        """Return the answer, given whether there was a hold, if that is known; ``first``: no earlier copy may have arrived."""
        if held:
            return cls.RELEASED
        return cls.NOT_HELD if first and held is False else cls.UNKNOWN


class Certainty(ABC):
    """Until when the hold of a claim is certain, as the listener to the backend's events keeps it.

    The listener is the renewal scheduler or, for a claim at one server of several, the quorum. It finds its own object of
    this type by the claim that an event is about.
    """

    __slots__ = ()

    until: float
    """The time, on the local clock."""


class Claim(ABC):
    """One request at the server, from the first acquire to the release; not used again after it."""

    __slots__ = ("_inbox", "contended_since", "early", "fixed", "present", "request", "validity")

    asks_again: bool = False
    """True if a grant that arrived after its own end has a full ttl again when the same claim repeats its request."""

    def __init__(self, request: Request) -> None:
        self.request: Request = request
        self.fixed: bool = False
        """True if renewals only verify the hold instead of prolonging it; set by the renewal scheduler."""
        self.contended_since: float | None = None
        """Since when, on the local clock, other clients are known to wait; set by :meth:`note_waiters`."""
        self.present: PresentLease | None = None
        """For the next renewal to report; set by the renewal scheduler. ``None`` if no task waits, and none has handed it over."""
        self.validity: Certainty | None = None
        """Set by the listener to the backend's events."""
        self.early: Event | None = None
        """A request to release that was reported before the grant; the renewal scheduler reports it when the hold begins."""
        self._inbox: Inbox[Grant] | None = None

    @property
    def stays(self) -> float:
        """Seconds for which the server may keep what was sent of it, if it receives nothing more; for as long a release is tried."""
        return self.request.stays

    @property
    def inbox(self) -> Inbox[Grant]:
        """The inbox through which the backend wakes the waiter of this claim; made at its first use."""
        inbox = self._inbox
        if inbox is None:
            inbox = self._inbox = Inbox(self.request.name, self.request.kind)
        return inbox

    def note_waiters(self, since: float) -> None:
        """Record that other clients wait ``since`` a time on the local clock; the first report counts.

        Called when the server reports it. Without such reports it is the time from which on it is assumed, which may be ahead.
        """
        if self.contended_since is None:
            self.contended_since = since

    @abstractmethod
    async def acquire(self, wait: bool) -> Grant | None:
        """Send the request, one atomic step; with ``wait``, join the queue if the lock is taken.

        While the claim is in the queue, the backend wakes its :attr:`inbox` when another ``acquire`` may succeed or will be
        refused for good: maybe too early, never infinitely late.

        Ends within the command timeout; with ``wait``, within two. May be called again in every state and finds its own
        earlier grant or position. A grant that was pushed meanwhile is returned without a request. After a cancellation or
        an error the server may have received it: call only ``acquire`` or ``release`` then.

        Raises :class:`BackendUnavailable`, :class:`BackendRefused` or (data of another format) :class:`UnsafeBackend`, and
        :class:`ConfigError` if a semaphore has another limit: neither the one that its first user named nor the one that
        was set since.
        """

    @abstractmethod
    async def release(self, keep: float = 0) -> Release:
        """Give up the hold or the queue position, whichever there is or may be.

        Correct also if it is unknown whether the last ``acquire`` succeeded; idempotent. With ``keep``, the lock stays taken
        for that many more seconds, by no holder. Ends within the command timeout. After cancelling it the server may have
        received it, and it may be called again.

        The answer is about a hold that was granted; of a queue position it says nothing. It is
        :attr:`Release.NOT_HELD` only if this is the first copy of the release that can have reached the server.
        """

    def begin_release(self, keep: float = 0) -> Release | None:  # noqa: ARG002 - for backends that can
        """Send the request of :meth:`release` now, on the connection of the client's next request; a plain function.

        Where that request may go out on another connection, it waits for the answer to this one if it is about the same lock.

        Return the answer, or :attr:`Release.UNKNOWN` if it has yet to come: then :meth:`release` waits for it instead of
        sending another copy, and is to be called. Return ``None`` if it cannot be sent now, and nothing was done. Correct
        while an :meth:`acquire` is under way if that is cancelled in the same step.
        """
        return None


# --- events


class EventKind(Enum):
    """The kind of an event."""

    LOST = "lost"
    """The hold of the claim is gone."""
    DOUBT = "doubt"
    """Holds may be gone, because the connection broke: renew them now to find out."""
    REQUESTED = "requested"
    """The holder is asked to release; ``text`` is the reason."""
    FAILING = "failing"
    """A renewal has failed, and the hold is certain for a while; ``text`` is the error. From the renewal scheduler, not from backends."""


class Event(NamedTuple):
    """A report of the server about one claim, or about all of them if ``claim`` is ``None``."""

    kind: EventKind
    claim: Claim | None = None
    reason: LossReason = "revoked"
    text: str = ""


class EventQueue:
    """The events of one backend, in order, for one listener on one event loop."""

    def __init__(self) -> None:
        self._queue: deque[Event] = deque()
        self._listener: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """Add an event and wake the listener."""
        self._queue.append(event)
        if self._listener is not None and not self._listener.done():
            self._listener.set_result(None)

    async def get(self) -> Event:
        """Return the oldest event, or wait for the next; cancelling it loses none."""
        while not self._queue:
            self._listener = asyncio.get_running_loop().create_future()
            await self._listener
        return self._queue.popleft()


# --- the backend


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that a client gives its backend before it opens it."""

    namespace: str
    label: str
    ttl: float
    command_timeout: float
    clock: Clock
    require: frozenset[str] = frozenset()
    outages: Outages | None = None
    """Lost connections are reported to it."""
    random: Random = field(default_factory=Random, repr=False, compare=False)
    """The client's source of pauses and of order among equals; threads, and parts that get no settings, may have their own."""


class Backend(ABC):
    """One server, or several that act as one.

    Everything that can be refused without asking the server is refused by ``__init__``, ``bind`` and ``claim``.
    Only errors of :mod:`aiolock.errors` leave a backend.
    """

    name: str
    """The name in messages."""

    address: str = ""
    """The address as users may see it, without a password."""

    capabilities: frozenset[str] = frozenset()
    """The capabilities of this deployment, as in ``require=``; complete after ``open``."""

    dialect: str = ""
    """The format of other libraries in which locks are written, which then have no fencing tokens; empty for the library's own."""

    concurrency: int = 4096
    """Limit of first attempts of a client under way; others wait in the client."""

    settings: Settings

    events: EventQueue
    """Events that the server reports; the renewal scheduler listens."""

    _made: Callable[[], Self]
    """The constructor with its arguments. A function, because the repr of these would show passwords."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Remember the arguments, for :meth:`again`, and make the queue of events."""
        self = super().__new__(cls)
        self._made = lambda: cls(*args, **options)
        self.events = EventQueue()
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}>"

    def again(self) -> Self:
        """Return a new backend with the same configuration, for the next opening of its client; no I/O.

        Backends that make tokens grow across openings by state in the client pass that state on.
        """
        return self._made()

    def abandon(self) -> None:  # noqa: B027 - most have nothing to do
        """Forget this opening, whose event loop was closed without ``aclose``: no I/O, no use of that loop.

        Claims at the server end by their ttl; connections close when they are collected.
        """

    def bind(self, settings: Settings) -> None:
        """Take over the settings of the client. Called once, before ``open``, without I/O."""
        if hasattr(self, "settings"):
            raise RuntimeError("this backend belongs to another client: make one for each")
        self.settings = settings

    @abstractmethod
    async def open(self) -> None:
        """Connect and find out the capabilities of this deployment, within the command timeout.

        Cancelling it leaves nothing open.
        """

    async def settle(self, timeout: float) -> None:  # noqa: B027 - most have nothing to wait for
        """Wait for releases in the background, for at most ``timeout`` seconds; cancelling it stops the waiting."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close every connection and end every task. Never raises an error; safe in every state.

        Cancelling it may leave some open, for another call.
        """

    def obstacle(self, request: Request) -> str:  # noqa: ARG002 - for backends that know one
        """Return what else is to be said of a lock that was not free in time; nothing, if nothing is known."""
        return ""

    @abstractmethod
    def claim(self, request: Request) -> Claim:
        """Return a new claim for ``request``; no I/O. Raises :class:`UnsupportedKind` where there is no mechanism."""

    renewal_limit: int = sys.maxsize
    """Limit of claims in one call of :meth:`renew`."""
    renewal_lead: float = 0.02
    """The share of its ttl by which a claim is renewed early, to go out with one that is due."""

    def renewal_group(self, claim: Claim) -> Hashable:  # noqa: ARG002 - for backends with several groups
        """Return what the claims in one call of :meth:`renew` have in common: nothing, if all go together."""
        return None

    def batches(self, holds: Iterable[T], claim: Callable[[T], Claim]) -> list[list[T]]:
        """Split what is to be renewed into one list for each call of :meth:`renew`; ``claim`` returns the claim of a hold."""
        groups: dict[Hashable, list[T]] = {}
        for hold in holds:
            groups.setdefault(self.renewal_group(claim(hold)), []).append(hold)
        limit = self.renewal_limit
        return [
            group[start : start + limit] for group in groups.values() for start in range(0, len(group), limit)
        ]

    @abstractmethod
    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Prolong the holds of one batch; return for each claim a grant, the reason of the loss, or an error if that is unknown.

        The batches of one round are renewed at the same time. An error that is raised is the answer for each claim.

        The ``token`` and ``count`` of these grants are not given out. A claim that is ``fixed`` is not prolonged at the
        server: its grant says until when the hold is certain for another reason (a session), or :data:`NEVER` for no longer
        than it is anyway. Cancelling it changes nothing but that the server may have prolonged the holds.
        """
