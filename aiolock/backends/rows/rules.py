"""The rules of a lock server as a pure state machine: requests and a time go in, answers and messages come out.

It knows no tasks, sockets or clocks. ``memory://`` runs on it; property tests use it as the model of every backend.

* A request is admitted if it is compatible with every hold and the queue is empty. Otherwise it may join the queue.
* When a hold ends, the compatible requests at the head of the queue are granted at once. Such a grant is pushed with a
  short confirmation window and confirmed by the first renewal; if it is not, it lapses and the next request is granted.
* Every request has an id and is idempotent: a repeated request finds its grant or its position in the queue.
* A request that was given up before it arrived leaves a tombstone, so that it changes nothing when it arrives.
* Tokens only grow, over all names, and none is handed out twice.
* A semaphore has the limit of its first user until another is set; a request with any other limit is refused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple

from aiolock.core.backend import confirmation_window
from aiolock.core.present import PresentLease, decode_value
from aiolock.types import Holder

__all__ = ["Answer", "Granted", "Hold", "Machine", "Message", "Registers", "StoredRequest", "admits"]

BLOCK = 1024
"""Tokens in a grant whose holder may hand the lock over within its process."""
TOMBSTONE = 60.0
"""Seconds for which a request is refused after it was given up unseen."""
UNSET_LIMIT = 60.0
"""Seconds after its last use for which a semaphore keeps the limit of its first user."""
SET_LIMIT = 86_400.0
"""Seconds after its last use for which a semaphore keeps a limit that was set."""

Key = tuple[str, str]


# --- locks


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request as the server keeps it; ``mode`` is mutex, read, write or permits."""

    id: str
    mode: str
    ttl: float
    label: str = ""
    permits: int = 1
    limit: int = 1
    block: int = 1
    value: str = ""
    """The value of a campaign, in base64."""


@dataclass(slots=True)
class Granted:
    """A request that was granted, with its first token."""

    request: StoredRequest
    token: int
    since: float
    asked: str | None = None
    """Reason of the last request to release it, if there was one."""
    kept: bool = False
    """Released with ``keep``: it excludes others, and has no owner."""

    def shown(self, since: datetime, remaining: float) -> Holder:
        """Return the holder that ``inspect()`` shows, with the first lease under its hold."""
        request = self.request
        return Holder(
            request.label,
            self.token,
            since,
            remaining,
            request.permits,
            request.mode,
            tokens=0 if self.kept else request.block,
            value=decode_value(request.value),
        )


@dataclass(slots=True)
class Hold(Granted):
    """A request that was granted, until ``deadline`` unless it is renewed."""

    deadline: float = 0.0
    present: tuple[PresentLease, float] | None = None
    """The lease that the last renewal has reported, and when."""
    extension: int = 0
    """The number of the request that gave it another life; from then on only later ones change its end."""

    def has_token(self, token: int) -> bool:
        """Test whether the hold has a token, as :func:`~aiolock.core.present.has_token` does."""
        last, reported = self.token + self.request.block - 1, self.present and self.present[0].token
        first = reported if reported and self.token <= reported <= last else self.token
        return not self.kept and first <= token <= last

    def prolong(self, now: float) -> None:
        """Let it stand for a full ttl, unless it was given another life."""
        if not self.extension:
            self.deadline = now + self.request.ttl


@dataclass(frozen=True, slots=True)
class Answer:
    """A grant with its tokens and validity in seconds; or a refusal: ``token`` is 0, and a hold may end in ``seconds``."""

    token: int
    count: int
    seconds: float
    demand: bool
    limit: int | None = None
    """The limit of the semaphore, if the request was refused because it names another one."""
    asked: str | None = None
    """Reason of the last request to release the hold, if there was one."""


class Message(NamedTuple):
    """A notification: ``grant``, ``lost``, ``demand`` or ``requested`` to the owner of a request, ``sooner`` to one that waits for a
    hold which ends earlier than it knows, ``changed`` to a watcher."""

    to: str
    what: str
    sent: float
    answer: Answer | None = None
    text: str = ""


@dataclass(slots=True)
class Limit:
    """The limit of a semaphore: that of its first user, and the one in force."""

    declared: int
    current: int
    until: float
    """Time at which an unused limit is forgotten."""


@dataclass(slots=True)
class Lock:
    """One lock: its holds and its queue, both by the id of the request, in the order in which they came."""

    holds: dict[str, Hold] = field(default_factory=dict)
    queue: dict[str, StoredRequest] = field(default_factory=dict)


def admits(holds: Mapping[str, Granted], request: StoredRequest, limit: int | None = None) -> bool:
    """Test whether ``request`` is compatible with ``holds``; ``limit`` is in force for permits instead of the request's."""
    if request.mode == "permits":
        room = request.limit if limit is None else limit
        return sum(hold.request.permits for hold in holds.values()) + request.permits <= room
    if request.mode == "read":
        return all(hold.request.mode == "read" for hold in holds.values())
    return not holds


class Machine:
    """All locks and registers of one server."""

    def __init__(self) -> None:
        self.locks: dict[Key, Lock] = {}
        """The locks that are held or waited for."""
        self.tombstones: dict[str, float] = {}
        self.limits: dict[Key, Limit] = {}
        """Limits of semaphores, in the order of their last use."""
        self.registers: Registers = Registers()
        self.outbox: list[Message] = []
        """Messages that are not delivered yet; the caller takes them."""
        self._token = 0

    # --- requests of clients

    def enter(self, key: Key, request: StoredRequest, now: float, *, wait: bool) -> Answer:
        """Acquire the lock, or with ``wait`` join the queue; a repeated request finds its hold or position."""
        lock = self._at(key, now)
        if (hold := lock.holds.get(request.id)) is not None:
            hold.prolong(now)
            return Answer(hold.token, request.block, request.ttl, bool(lock.queue))
        if request.id in self.tombstones:
            return Answer(0, 0, request.ttl, demand=False)
        limit = None
        if request.mode == "permits" and request.id not in lock.queue:
            known = self._limit(key, request.limit, now)
            if request.limit not in (known.declared, known.current):
                return Answer(0, 0, 0.0, demand=False, limit=known.current)
            limit = known.current
        if not lock.queue and admits(lock.holds, request, limit):
            answer = self._grant(lock, request, now, request.ttl)
        else:
            if wait and request.id not in lock.queue:
                if not lock.queue:
                    self.outbox += [Message(other, "demand", now) for other in lock.holds]
                lock.queue[request.id] = request
            answer = Answer(0, 0, self._next_change(lock, now), demand=True)
        self._store(key, lock)
        return answer

    def renew(
        self,
        key: Key,
        request: StoredRequest,
        now: float,
        *,
        prolong: bool = True,
        present: PresentLease | None = None,
    ) -> Answer | None:
        """Prolong a hold to its full ttl from now, or only verify it; ``None`` if there is none."""
        lock = self._at(key, now)
        if (hold := lock.holds.get(request.id)) is None:
            return None
        if prolong:
            hold.prolong(now)
            hold.present = None if present is None else (present, now)
        return Answer(hold.token, 0, request.ttl, bool(lock.queue), asked=hold.asked)

    def downgrade(
        self, key: Key, request: StoredRequest, now: float, *, prolong: bool = True
    ) -> Answer | None:
        """Make a write hold a read hold, and prolong it to its full ttl from now or not; ``None`` if there is none."""
        lock = self._at(key, now)
        if (hold := lock.holds.get(request.id)) is None:
            return None
        hold.request = replace(request, mode="read", block=1)
        if prolong:
            hold.prolong(now)
        self._serve(key, lock, now)
        return Answer(hold.token, 1, request.ttl, bool(lock.queue))

    def extend(
        self, key: Key, request: StoredRequest, seconds: float, number: int, now: float
    ) -> Answer | None:
        """Give a hold a life of ``seconds`` from now, unless a request with that number or a higher one did; ``None`` if there is none."""
        lock = self._at(key, now)
        if (hold := lock.holds.get(request.id)) is None:
            return None
        if number > hold.extension:
            hold.extension = number
            self._end_at(lock, hold, now + seconds, now)
        return Answer(hold.token, 0, seconds, bool(lock.queue), asked=hold.asked)

    def leave(
        self, key: Key, request: StoredRequest, now: float, keep: float = 0, *, tombstone: bool = False
    ) -> bool:
        """Release the hold of a request or give up its position; return whether it had a hold.

        With ``tombstone``, refuse the request if it arrives again: its client sent it, received no answer, and a copy may be late.
        """
        lock = self._at(key, now)
        hold = lock.holds.pop(request.id, None)
        if hold is None:
            lock.queue.pop(request.id, None)
        elif keep:
            hold.kept = True
            self._end_at(lock, hold, now + keep, now)
            lock.holds[f"{request.id} kept"] = hold
        if tombstone:
            self._add_tombstone(request.id, now)
        if key in self.limits:
            self._use(self.limits[key], now)
        self._serve(key, lock, now)
        return hold is not None

    def abandon(self, prefix: str, now: float) -> None:
        """Give up all holds and positions of requests whose id begins with ``prefix``, but not what is kept."""
        for key in list(self.locks):
            lock = self._at(key, now)
            for owner in [each for each in lock.holds if each.startswith(prefix)]:
                if not lock.holds[owner].kept:
                    del lock.holds[owner]
            for waiter in [each for each in lock.queue if each.startswith(prefix)]:
                del lock.queue[waiter]
            self._serve(key, lock, now)

    # --- administration

    def force(self, key: Key, now: float, token: int | None = None) -> bool:
        """End all holds, or that of a token, notify their owners, and serve the queue; return whether there were any."""
        lock = self._at(key, now)
        taken = [owner for owner, hold in lock.holds.items() if token is None or hold.has_token(token)]
        for owner in taken:
            del lock.holds[owner]
            self.outbox.append(Message(owner, "lost", now))
        self._serve(key, lock, now)
        return bool(taken)

    def request(self, key: Key, reason: str, now: float) -> bool:
        """Notify all holders that a release is requested; return whether there are any."""
        asked = {owner: hold for owner, hold in self._at(key, now).holds.items() if not hold.kept}
        for owner, hold in asked.items():
            hold.asked = reason
            self.outbox.append(Message(owner, "requested", now, text=reason))
        return bool(asked)

    def set_limit(self, key: Key, limit: int, now: float) -> None:
        """Set the limit of a semaphore, and serve the requests that it admits."""
        known = self._limit(key, 0, now)
        known.current = limit
        known.until = now + SET_LIMIT
        self._serve(key, self._at(key, now), now)

    def limit(self, key: Key, now: float) -> int | None:
        """Return the limit of a semaphore, if it is known."""
        known = self.limits.get(key)
        return None if known is None or self._forgotten(key, known, now) else known.current

    def busy(self, now: float) -> list[Key]:
        """Return all locks that are held or waited for."""
        for key in list(self.locks):
            self._at(key, now)
        return list(self.locks)

    def inspect(self, key: Key, now: float) -> tuple[list[Hold], list[StoredRequest]]:
        """Return the holds, and the queue in order."""
        lock = self._at(key, now)
        return list(lock.holds.values()), list(lock.queue.values())

    def advance(self, key: Key, now: float) -> float:
        """End the holds whose time is over and serve the queue; return the seconds until the next hold ends."""
        return self._next_change(self._at(key, now), now)

    # --- rules

    def _at(self, key: Key, now: float) -> Lock:
        """Return the lock as it is now: a lock that is neither held nor waited for is a new one, and not stored."""
        lock = self.locks.get(key)
        if lock is None:
            return Lock()
        over = [owner for owner, hold in lock.holds.items() if hold.deadline <= now]
        for owner in over:
            del lock.holds[owner]
        if over:
            self._serve(key, lock, now)
        return lock

    def _end_at(self, lock: Lock, hold: Hold, deadline: float, now: float) -> None:
        """Have a hold end at another time; if that is sooner, notify the waiters in the queue, which have a timer for the later one."""
        if deadline < hold.deadline:
            self.outbox += [Message(waiter, "sooner", now) for waiter in lock.queue]
        hold.deadline = deadline

    def _store(self, key: Key, lock: Lock) -> None:
        if lock.holds or lock.queue:
            self.locks[key] = lock
        else:
            self.locks.pop(key, None)

    def _serve(self, key: Key, lock: Lock, now: float) -> None:
        """Grant the requests at the head of the queue as far as they are compatible, and store the lock."""
        known = self.limits.get(key)
        limit = None if known is None else known.current
        while lock.queue and admits(lock.holds, request := next(iter(lock.queue.values())), limit):
            del lock.queue[request.id]
            answer = self._grant(lock, request, now, confirmation_window(request.ttl))
            self.outbox.append(Message(request.id, "grant", now, answer))
        self._store(key, lock)

    def _grant(self, lock: Lock, request: StoredRequest, now: float, seconds: float) -> Answer:
        token = self._token + 1
        self._token += request.block
        lock.holds[request.id] = Hold(request, token, now, deadline=now + seconds)
        return Answer(token, request.block, seconds, bool(lock.queue))

    @staticmethod
    def _next_change(lock: Lock, now: float) -> float:
        return max(0.0, min((hold.deadline - now for hold in lock.holds.values()), default=0.0))

    def _add_tombstone(self, request: str, now: float) -> None:
        while self.tombstones and next(iter(self.tombstones.values())) <= now:
            del self.tombstones[next(iter(self.tombstones))]
        self.tombstones[request] = now + TOMBSTONE

    def _limit(self, key: Key, declared: int, now: float) -> Limit:
        """Return the limit of a semaphore that is being used; if it is not known, that of this user."""
        known = self.limits.pop(key, None)
        if known is None or self._forgotten(key, known, now):
            known = Limit(declared, declared, now)
        elif not known.declared:
            known.declared = declared
        for other in list(itertools.islice(self.limits, 2)):
            # Two for each that may be added, so that unused limits do not pile up.
            if self._forgotten(other, self.limits[other], now):
                del self.limits[other]
        self._use(known, now)
        self.limits[key] = known
        return known

    @staticmethod
    def _use(known: Limit, now: float) -> None:
        known.until = max(known.until, now + (UNSET_LIMIT if known.current == known.declared else SET_LIMIT))

    def _forgotten(self, key: Key, limit: Limit, now: float) -> bool:
        return limit.until <= now and key not in self.locks


# --- registers


class Stored(NamedTuple):
    """The value of a register, its version, and the time at which it may be forgotten."""

    value: bytes
    stamp: str
    until: float


class Registers:
    """All registers of one server: compare-and-set of small values, and the watchers of each."""

    def __init__(self) -> None:
        self.stored: dict[Key, Stored] = {}
        self.watchers: dict[Key, dict[str, None]] = {}
        """The ids that are notified of the next change, once."""
        self._writes = 0

    def read(self, key: Key, now: float) -> tuple[bytes, str]:
        """Return a value and its stamp; both are empty if there is none."""
        found = self.stored.get(key)
        if found is None or found.until <= now:
            self.stored.pop(key, None)
            return b"", ""
        return found.value, found.stamp

    def write(
        self, key: Key, value: bytes, stamp: str, keep: float, now: float
    ) -> tuple[str | None, list[str]]:
        """Replace the version ``stamp``: return the new stamp, or ``None`` if it was another one; and the watchers to notify."""
        if self.read(key, now)[1] != stamp:
            return None, []
        # Counted over all registers: no register has the same stamp twice, not even after it was forgotten.
        self._writes += 1
        self.stored.pop(key, None)
        for other in list(itertools.islice(self.stored, 2)):
            self.read(other, now)
        self.stored[key] = Stored(value, str(self._writes), now + keep)
        return str(self._writes), list(self.watchers.pop(key, ()))

    def watch(self, key: Key, watcher: str, stamp: str, now: float) -> bool:
        """Notify ``watcher`` of the next change; return False if the stamp has changed already."""
        if self.read(key, now)[1] != stamp:
            return False
        self.watchers.setdefault(key, {})[watcher] = None
        return True

    def forget(self, key: Key, watcher: str) -> None:
        """Remove one watcher."""
        watchers = self.watchers.get(key, {})
        watchers.pop(watcher, None)
        if not watchers:
            self.watchers.pop(key, None)

    def forget_client(self, prefix: str) -> None:
        """Remove all watchers whose id begins with ``prefix``."""
        for key, watchers in list(self.watchers.items()):
            for watcher in [each for each in watchers if each.startswith(prefix)]:
                self.forget(key, watcher)
