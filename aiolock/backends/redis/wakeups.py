"""Who of this process waits, and what tells them to look: pushes, heartbeats and deadlines.

A push is a hint that usually arrives; the state is on the server. So every place is also looked after by a heartbeat
per process, which says that it still waits and lets time pass for its locks, and by a timer at the moment when the
hold before it may end. All of it is timers and reply slots of the connection: there is no task per lock or waiter.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

from aiolock.clock import Clock
from aiolock.errors import BackendError, BackendRefused, UnsafeBackend
from aiolock.logs import Log, get_logger

__all__ = ["Place", "Wakeups"]

log: Log = get_logger("aiolock")

PERIOD = 2.0
"""Most seconds between heartbeats."""
ASKING = 0.1
"""Seconds between heartbeats while grants cannot be pushed to us."""
LIFE = 3.0
"""Least seconds that a place stands without a heartbeat."""
BATCH = 1000
"""How many locks one call looks after on one server: a lock takes the server about 10 µs, so that others wait for 10 ms, or for 17 on a busy
machine."""
CALLS = 5000
"""Most calls in a second for heartbeats, as long as no place ends for that: more would leave no time for anything else."""
HANDED = 3 * PERIOD
"""Longest provisional grant, in seconds, whose end is looked at by the process that handed the lock on. Waiters learn of a longer one with
their heartbeats, well before it ends."""
FEW = 32
"""So many waiters of one lock ask again at once when one of their places may be gone; of more, the server says which."""
SLACK = 100
"""How many outdated entries the agenda may have beside as many as valid ones."""


class Place(Protocol):
    """A claim that waits."""

    @property
    def key(self) -> str:
        """The lock."""
        ...

    @property
    def request(self) -> str:
        """The request id."""
        ...

    @property
    def ttl(self) -> float:
        """Of a hold, in seconds."""
        ...

    @property
    def placed(self) -> bool:
        """The server has told us of our place."""
        ...

    def wake(self) -> None:
        """Have it ask again."""


Beat = Callable[[Sequence[str], Sequence[int], int], "asyncio.Future[Any]"]
"""Send a heartbeat for these locks, with the number of places that we certainly have in each, and the ms that a place
lives."""


Tickets = Callable[[str, Sequence[str]], "asyncio.Future[Any]"]
"""Read which ticket each of these requests has in the queue of a lock; ``None`` for one that has none."""


class Wakeups:
    """The waiting of one process on one server."""

    def __init__(self, beat: Beat, tickets: Tickets, *, clock: Clock, random: Random) -> None:
        self._beat = beat
        self._tickets = tickets
        self._clock = clock
        self._random = random
        self._waiting: dict[str, set[Place]] = {}
        self._ttls: Counter[float] = Counter()
        """How many of them have which ttl."""
        self._shortest = math.inf
        """The shortest of these."""
        self._ends: dict[str, float] = {}
        """When a lock should be looked at before the next heartbeat."""
        self._agenda: list[tuple[float, str]] = []
        self._urgent: OrderedDict[str, None] = OrderedDict()
        """The locks that are to be looked at now, the earliest first. On one server there is one call at a time: what others issue
        meanwhile waits for one call only, and a server that is slower than the heartbeats is not buried under them. So all that
        becomes due during a call is in the next one."""
        self._round: OrderedDict[str, None] = OrderedDict()
        """The locks that the round of heartbeats under way has still to look after; they go behind the urgent ones."""
        self._calls = 0
        """How many calls are under way."""
        self._in_round = False
        """Whether the call under way on one server is part of the round."""
        self._began = 0.0
        """When the latest round of heartbeats began."""
        self._overdue = False
        """The next one is due before that one has ended."""
        self._next_beat = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._pushed = True
        self.batch = BATCH
        """How many locks one call looks after."""
        self.period = PERIOD
        """Seconds between heartbeats."""
        self.life_ms = round(3 * PERIOD * 1000)
        """For how many ms a place stands without one."""
        self.terms = f"{self.life_ms} s"
        """What is said of every new place: that, and whether we hear of a grant by push (s) or by asking (n)."""

    # --- who waits

    def add(self, place: Place) -> None:
        """Look after a place from now on."""
        places = self._waiting.setdefault(place.key, set())
        if place not in places:
            places.add(place)
            self._ttls[place.ttl] += 1
            if place.ttl < self._shortest:
                self._shortest = place.ttl
                self._pace()
        self._next_beat = min(self._next_beat, self._clock() + self.period)
        self._arm()

    def remove(self, place: Place) -> None:
        """It waits no longer."""
        places = self._waiting.get(place.key)
        if places is None or place not in places:
            return
        places.remove(place)
        if not places:
            del self._waiting[place.key]
            self._forget(place.key)
        self._ttls[place.ttl] -= 1
        if not self._ttls[place.ttl]:
            del self._ttls[place.ttl]
            if place.ttl == self._shortest:
                self._shortest = min(self._ttls, default=math.inf)
                self._pace()

    @property
    def pushed(self) -> bool:
        """Whether grants are pushed to us."""
        return self._pushed

    @pushed.setter
    def pushed(self, pushed: bool) -> None:
        self._pushed = pushed
        self._pace()

    def _pace(self) -> None:
        self.period = max(ASKING, min(self._shortest / 3, PERIOD)) if self._pushed else ASKING
        life = round(max(3 * self.period, LIFE) * 1000)
        terms = f"{life} {'s' if self._pushed else 'n'}"
        if terms != self.terms:
            self.life_ms, self.terms = life, terms

    # --- when to look

    def ends(self, key: str, left: float, *, first: bool) -> None:
        """The hold of a lock ends in ``left`` seconds; look then, first in line first."""
        self._look_at(
            key, self._clock() + left + (0.002 if first else self._random.uniform(0.02, 0.08)), move=True
        )

    def claimed(self, key: str, claim: float) -> None:
        """The lock was handed on: look whether the grant was confirmed when its ``claim`` seconds are over."""
        if claim <= HANDED:
            self._look_at(key, self._clock() + max(0.0, claim) + 0.002, move=False)

    def now(self) -> None:
        """Look at everything at once: something may have been missed."""
        self._next_beat = self._clock()
        self._arm()

    def soon(self, concerned: Callable[[str], bool]) -> None:
        """Look at once at the locks of which something may have been missed."""
        now = self._clock()
        for key in self._waiting:
            if concerned(key):
                self._look_at(key, now, move=False)

    def close(self) -> None:
        """End all timers, for good: answers that are under way may still come."""
        self._waiting.clear()
        self._ttls.clear()
        self._shortest = math.inf
        self._ends.clear()
        self._agenda.clear()
        self._urgent.clear()
        self._round.clear()
        self._next_beat = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # No later time is before this one.
        self._timer_at = -math.inf

    def _look_at(self, key: str, when: float, *, move: bool) -> None:
        known = self._ends.get(key)
        if known is None or move or when < known:
            self._ends[key] = when
            heapq.heappush(self._agenda, (when, key))
            self._tidy()
            self._arm()

    def _forget(self, key: str) -> None:
        """Drop the look at a lock that is waited for no more, unless it is due soon: it may be for a lock that was handed on."""
        if self._ends.get(key, 0.0) > self._clock() + HANDED + 0.1:
            del self._ends[key]
            self._tidy()

    def _tidy(self) -> None:
        """Rebuild the agenda when most of it is outdated: every move leaves an entry behind until its time comes."""
        if len(self._agenda) > 2 * len(self._ends) + SLACK:
            self._agenda = [(then, name) for name, then in self._ends.items()]
            heapq.heapify(self._agenda)

    def _arm(self) -> None:
        if not self._waiting:
            self._next_beat = math.inf
        agenda = self._agenda
        while agenda and self._ends.get(agenda[0][1]) != agenda[0][0]:
            heapq.heappop(agenda)
        when = min(self._next_beat, agenda[0][0] if agenda else math.inf)
        if when >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = asyncio.get_running_loop().call_later(max(0.0, when - self._clock()), self._look)

    def _look(self) -> None:
        self._timer, self._timer_at = None, math.inf
        now = self._clock()
        if now < self._next_beat:
            pass
        elif self._busy:
            self._overdue = True
            self._next_beat = now + self.period
        else:
            self._began = now
            self._round.update(dict.fromkeys(self._waiting))
            crowd = len(self._round) / self.batch / CALLS
            self._next_beat = now + max(self.period, min(crowd, self.life_ms / 3000))
        agenda = self._agenda
        while agenda and agenda[0][0] <= now:
            when, key = heapq.heappop(agenda)
            if self._ends.get(key) == when:
                del self._ends[key]
                self._urgent[key] = None
                self._round.pop(key, None)
        self._send()
        self._arm()

    @property
    def _busy(self) -> bool:
        """Whether a round of heartbeats on one server has not ended yet."""
        return self._in_round or bool(self._round)

    def _send(self) -> None:
        """Make the next calls: one on one server, all in a cluster, where one node must not hold up the others."""
        while (self._urgent or self._round) and (self.batch == 1 or not self._calls):
            keys: list[str] = []
            for due in (self._urgent, self._round):
                while due and len(keys) < self.batch:
                    keys.append(due.popitem(last=False)[0])
                    self._in_round = due is self._round and self.batch > 1
            self._ask(keys)

    def _answered(self) -> None:
        """A call has ended, in whatever way."""
        self._calls -= 1
        self._in_round = False
        self._send()
        if self._overdue and not self._busy:
            # Others get as much of the server's time as the round took.
            now = self._clock()
            self._overdue = False
            self._next_beat = min(self._next_beat, now + min(now - self._began, self.life_ms / 3000))
            self._arm()

    def _ask(self, keys: list[str]) -> None:
        # A place whose attempt is under way is not counted on: nobody knows whether it stands.
        counts = [sum(place.placed for place in self._waiting.get(key, ())) for key in keys]
        reply = self._beat(keys, counts, self.life_ms)
        self._calls += 1
        reply.add_done_callback(lambda future: self._heard(keys, future))

    def _heard(self, keys: list[str], reply: asyncio.Future[Any]) -> None:
        self._answered()
        if reply.cancelled():
            return
        error = reply.exception()
        if error is not None:
            # The connection tells us when it is back, and then we look at everything.
            if isinstance(error, UnsafeBackend):
                # It will not be: those who wait ask, and are refused.
                for place in [place for key in keys for place in self._waiting.get(key, ())]:
                    place.wake()
            elif not isinstance(error, BackendError):
                log.error("heartbeat failed: %r", error)
            return
        for key, answer in zip(keys, reply.result()[1:], strict=True):
            left, claim, state = answer
            places = self._waiting.get(key)
            if claim:
                self.claimed(key, claim / 1000)
            if not places:
                continue
            if state == 2:
                self._missed(key, places)
            elif left:
                self.ends(key, left / 1_000_000, first=state == 1)

    def _missed(self, key: str, places: set[Place]) -> None:
        """Wake the places of a lock of which something was missed: a grant, or a place that is gone."""
        if len(places) <= FEW:
            for place in list(places):
                place.wake()
            return
        # Most likely one of them was handed the lock, and the message has not arrived yet: the others have nothing to ask.
        listed = [place for place in places if place.placed]
        for start in range(0, len(listed), BATCH):
            some = listed[start : start + BATCH]
            reply = self._tickets(key, [place.request for place in some])
            reply.add_done_callback(functools.partial(self._looked_up, key, some))

    def _looked_up(self, key: str, places: Sequence[Place], reply: asyncio.Future[Any]) -> None:
        if reply.cancelled():
            return
        error = reply.exception()
        if error is not None and not isinstance(error, BackendRefused):
            # The connection tells us when it is back, and then we look at everything.
            return
        tickets = [None] * len(places) if error is not None else reply.result()
        waiting = self._waiting.get(key, set())
        for place, ticket in zip(places, tickets, strict=True):
            if ticket is None and place.placed and place in waiting:
                place.wake()
