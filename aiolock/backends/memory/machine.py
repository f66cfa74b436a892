"""The state of a lock server as a pure machine: requests and a time go in, answers and messages come out.

It knows nothing of tasks, sockets or clocks. ``memory://`` runs it for real; property tests use it as the model of
what every backend should do. The rules:

* A request enters if it is compatible with every hold and nobody is in line before it. Else it takes a place.
* When a hold ends, the head run of compatible requests is granted at once: a grant is pushed with a short claim,
  and is confirmed by the first renewal. A claim that nobody confirms lapses, and the next in line is served.
* Every request has an id of its own and is idempotent: asking again finds the grant or the place.
* A request that was given up before it arrived leaves a tombstone, so that it changes nothing when it arrives.
* Tokens only grow, over all names, and are never handed out twice.
* A semaphore has the limit of its first user until somebody sets another; who names neither is refused.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from aiolock.backends.memory.papers import Papers

__all__ = ["Answer", "Hold", "Machine", "Message", "Place", "Request"]

BLOCK = 1024
"""How many tokens a grant carries for holders who pass the lock on among themselves."""
TOMBSTONE = 60.0
"""For how many seconds a request that was given up unseen is refused."""
UNSET_LIMIT = 60.0
"""For how many seconds after its last use a semaphore keeps the limit that its first user said."""
SET_LIMIT = 86_400.0
"""For how many seconds after its last use it keeps a limit that was set."""

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Request:
    """Somebody who asks: ``mode`` is mutex, read, write or permits."""

    id: str
    mode: str
    ttl: float
    label: str = ""
    permits: int = 1
    limit: int = 1
    block: int = 1


@dataclass(slots=True)
class Hold:
    """Somebody inside, until ``deadline`` if nothing is heard."""

    request: Request
    token: int
    since: float
    deadline: float
    confirmed: bool = True
    asked: str | None = None
    """Why it was asked to let go, if it was."""
    kept: bool = False
    """Released, and taken for a while all the same, by nobody."""


@dataclass(slots=True)
class Place:
    """Somebody in line."""

    request: Request


@dataclass(frozen=True, slots=True)
class Answer:
    """Yes: tokens and how long. No: ``token`` is 0, and ``seconds`` is when another look may be worth it."""

    token: int
    count: int
    seconds: float
    demand: bool
    limit: int = 0
    """Not at all: this semaphore is known with so many permits, and another number was named."""
    asked: str | None = None
    """Why the holder was asked to let go, if it was."""


class Message(NamedTuple):
    """What the server says unasked: ``grant``, ``lost``, ``demand`` or ``requested`` to whoever made a request,
    ``changed`` to who looks at a document."""

    to: str
    what: str
    sent: float
    answer: Answer | None = None
    text: str = ""


@dataclass(slots=True)
class Limit:
    """How many permits a semaphore has: what its first user said, and what counts now."""

    declared: int
    current: int
    until: float
    """When it is forgotten if nobody uses it."""


@dataclass(slots=True)
class _Lock:
    holds: dict[str, Hold] = field(default_factory=dict)
    queue: dict[str, Place] = field(default_factory=dict)


def claim_time(ttl: float) -> float:
    """For how many seconds a pushed grant waits for its confirmation."""
    return min(ttl, max(1.0, ttl / 10))


def admits(holds: dict[str, Hold], request: Request, limit: int | None = None) -> bool:
    """Whether ``request`` may be inside together with ``holds``; ``limit`` is that of the semaphore, if it differs."""
    if request.mode == "permits":
        room = request.limit if limit is None else limit
        return sum(hold.request.permits for hold in holds.values()) + request.permits <= room
    if request.mode == "read":
        return all(hold.request.mode == "read" for hold in holds.values())
    return not holds


class Machine:
    """All locks of one server."""

    def __init__(self) -> None:
        self.locks: dict[Key, _Lock] = {}
        self.tombstones: dict[str, float] = {}
        self.limits: dict[Key, Limit] = {}
        """Of semaphores, in the order of their last use."""
        self.papers: Papers = Papers()
        """The documents, which are apart from the locks."""
        self.outbox: list[Message] = []
        """Messages since the last look; whoever runs the machine takes and delivers them."""
        self._token = 0

    # --- what clients ask

    def enter(self, key: Key, request: Request, now: float, *, wait: bool) -> Answer:
        """Get in, or with ``wait`` in line; asking again finds what is there."""
        lock = self._at(key, now)
        hold = lock.holds.get(request.id)
        if hold is not None:
            hold.deadline = now + request.ttl
            hold.confirmed = True
            return Answer(hold.token, request.block, request.ttl, bool(lock.queue))
        if request.id in self.tombstones:
            self._prune(key)
            return Answer(0, 0, request.ttl, demand=False)
        limit = None
        if request.mode == "permits" and request.id not in lock.queue:
            known = self._limit(key, request.limit, now)
            if request.limit not in (known.declared, known.current):
                self._prune(key)
                return Answer(0, 0, 0.0, demand=False, limit=known.current)
            limit = known.current
        if not lock.queue and admits(lock.holds, request, limit):
            return self._grant(lock, request, now, request.ttl)
        if wait and request.id not in lock.queue:
            if not lock.queue:
                self.outbox += [Message(other, "demand", now) for other in lock.holds]
            lock.queue[request.id] = Place(request)
        self._prune(key)
        return Answer(0, 0, self._next_change(lock, now), demand=True)

    def renew(self, key: Key, request: Request, now: float, *, prolong: bool = True) -> Answer | None:
        """Prolong a hold to its full ttl from now, or only look; ``None`` if there is none."""
        lock = self._at(key, now)
        hold = lock.holds.get(request.id)
        if hold is None:
            self._prune(key)
            return None
        if prolong:
            hold.deadline = now + request.ttl
            hold.confirmed = True
        return Answer(hold.token, 0, request.ttl, bool(lock.queue), asked=hold.asked)

    def downgrade(self, key: Key, request: Request, now: float) -> Answer | None:
        """Make a write hold a read hold, with a full ttl from now; ``None`` if there is none."""
        lock = self._at(key, now)
        hold = lock.holds.get(request.id)
        if hold is None:
            self._prune(key)
            return None
        hold.request = replace(request, mode="read", block=1)
        hold.deadline = now + request.ttl
        hold.confirmed = True
        self._serve(key, lock, now)
        return Answer(hold.token, 1, request.ttl, bool(lock.queue))

    def leave(self, key: Key, request: Request, now: float, keep: float = 0, *, bury: bool = False) -> bool:
        """Give up the hold or the place of a request; whether it had a hold. With ``bury``, refuse it if it arrives once more.

        A client buries when it asked without hearing the answer: what it sent may still be on its way.
        """
        lock = self._at(key, now)
        hold = lock.holds.get(request.id)
        if hold is not None:
            if keep:
                hold.deadline, hold.kept = now + keep, True
                lock.holds[f"{request.id} kept"] = lock.holds.pop(request.id)
            else:
                del lock.holds[request.id]
        else:
            lock.queue.pop(request.id, None)
        if bury:
            self._bury(request.id, now)
        if key in self.limits:
            self._use(self.limits[key], now)
        self._serve(key, lock, now)
        self._prune(key)
        return hold is not None

    def abandon(self, prefix: str, now: float) -> None:
        """Give up every hold and queue position of requests whose id begins with ``prefix``; not what is kept."""
        for key in list(self.locks):
            lock = self._at(key, now)
            for owner in [each for each, hold in lock.holds.items() if each.startswith(prefix)]:
                if not lock.holds[owner].kept:
                    del lock.holds[owner]
            for waiter in [each for each in lock.queue if each.startswith(prefix)]:
                del lock.queue[waiter]
            self._serve(key, lock, now)
            self._prune(key)

    # --- what administrators ask

    def force(self, key: Key, now: float) -> bool:
        """Take the lock from whoever has it, tell them, and serve the next."""
        lock = self._at(key, now)
        taken = bool(lock.holds)
        self.outbox += [Message(owner, "lost", now) for owner in lock.holds]
        lock.holds.clear()
        self._serve(key, lock, now)
        self._prune(key)
        return taken

    def request(self, key: Key, reason: str, now: float) -> bool:
        """Ask whoever is inside to let go; whether anybody is. What is kept for nobody has nobody to ask."""
        lock = self._at(key, now)
        asked = {owner: hold for owner, hold in lock.holds.items() if not hold.kept}
        for owner, hold in asked.items():
            hold.asked = reason
            self.outbox.append(Message(owner, "requested", now, text=reason))
        self._prune(key)
        return bool(asked)

    def set_limit(self, key: Key, limit: int, now: float) -> None:
        """Give a semaphore another number of permits, and serve whoever they let in."""
        known = self._limit(key, 0, now)
        known.current = limit
        known.until = now + SET_LIMIT
        lock = self._at(key, now)
        self._serve(key, lock, now)
        self._prune(key)

    def limit(self, key: Key, now: float) -> int | None:
        """How many permits a semaphore has, if anybody has said it."""
        known = self.limits.get(key)
        return None if known is None or self._forgotten(key, known, now) else known.current

    def busy(self, now: float) -> list[Key]:
        """Every lock that is held or waited for."""
        found = []
        for key in list(self.locks):
            self._at(key, now)
            self._prune(key)
            if key in self.locks:
                found.append(key)
        return found

    def look(self, key: Key, now: float) -> tuple[list[Hold], list[Place]]:
        """Holders, and waiters in order."""
        lock = self._at(key, now)
        self._prune(key)
        return list(lock.holds.values()), list(lock.queue.values())

    def advance(self, key: Key, now: float) -> float:
        """Let time pass: end what is over, serve who is next; seconds until that is worth doing again."""
        lock = self._at(key, now)
        seconds = self._next_change(lock, now)
        self._prune(key)
        return seconds

    # --- the rules

    def _bury(self, request: str, now: float) -> None:
        while self.tombstones and next(iter(self.tombstones.values())) <= now:
            del self.tombstones[next(iter(self.tombstones))]
        self.tombstones[request] = now + TOMBSTONE

    def _limit(self, key: Key, said: int, now: float) -> Limit:
        """The limit of a semaphore that is being used, with what its user says if nobody said it before."""
        known = self.limits.pop(key, None)
        if known is None or self._forgotten(key, known, now):
            known = Limit(said, said, now)
        elif not known.declared:
            known.declared = said
        for other in list(itertools.islice(self.limits, 2)):
            # Two for each that may be added, so that they do not pile up.
            if self._forgotten(other, self.limits[other], now):
                del self.limits[other]
        self._use(known, now)
        self.limits[key] = known
        return known

    def _use(self, known: Limit, now: float) -> None:
        known.until = max(known.until, now + (UNSET_LIMIT if known.current == known.declared else SET_LIMIT))

    def _forgotten(self, key: Key, limit: Limit, now: float) -> bool:
        lock = self.locks.get(key)
        return limit.until <= now and (lock is None or not (lock.holds or lock.queue))

    def _at(self, key: Key, now: float) -> _Lock:
        lock = self.locks.get(key)
        if lock is None:
            lock = self.locks[key] = _Lock()
        elif lock.holds:
            over = [owner for owner, hold in lock.holds.items() if hold.deadline <= now]
            for owner in over:
                del lock.holds[owner]
            if over:
                self._serve(key, lock, now)
        return lock

    def _serve(self, key: Key, lock: _Lock, now: float) -> None:
        known = self.limits.get(key)
        limit = None if known is None else known.current
        while lock.queue:
            request = next(iter(lock.queue.values())).request
            if not admits(lock.holds, request, limit):
                return
            del lock.queue[request.id]
            answer = self._grant(lock, request, now, claim_time(request.ttl))
            self.outbox.append(Message(request.id, "grant", now, answer))

    def _grant(self, lock: _Lock, request: Request, now: float, seconds: float) -> Answer:
        token = self._token + 1
        self._token += request.block
        lock.holds[request.id] = Hold(request, token, now, now + seconds, confirmed=seconds == request.ttl)
        return Answer(token, request.block, seconds, bool(lock.queue))

    def _next_change(self, lock: _Lock, now: float) -> float:
        return max(0.0, min((hold.deadline - now for hold in lock.holds.values()), default=0.0))

    def _prune(self, key: Key) -> None:
        lock = self.locks[key]
        if not lock.holds and not lock.queue:
            del self.locks[key]
