"""Heartbeats and deadlines of the positions that this client has in queues at the server.

A push is a hint that usually arrives; the state is on the server. So a heartbeat per client also extends every position
and lets time pass for its lock, and a timer asks the server when the hold ahead may end. All of it is timers and reply slots of the
connection: there is no task per lock or waiter.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from random import Random

from aiolock.backends.redis.commands import Reply
from aiolock.clock import Clock
from aiolock.core.backend import Grant
from aiolock.core.inbox import Inbox, WakeReason
from aiolock.core.logs import Log, get_logger
from aiolock.errors import BackendError, BackendRefused

__all__ = ["Waiter", "Wakeups"]

log: Log = get_logger("aiolock")

PERIOD = 2.0
"""Most seconds between heartbeats."""
PERIOD_WITHOUT_PUSH = 0.1
"""Seconds between heartbeats while grants cannot be pushed to this client."""
ASKED_FOR = 30.0
"""Seconds in which a client asks after it has found that another one, which may send no messages, uses a lock that it waits for."""
LIFE = 3.0
"""Least seconds that a position lives without a heartbeat."""
BATCH = 1000
"""Most locks per heartbeat call on one server: each takes the server about 10 µs, so other commands wait 10 ms, or 17 on
a busy machine."""
CALLS = 5000
"""Most heartbeat calls per second, as long as no position expires for that: more would leave no time for anything else."""
LONGEST_WINDOW = 3 * PERIOD
"""Longest provisional grant, in seconds, whose end is checked by the client that handed the lock over. Waiters learn of
a longer one with their heartbeats, well before it ends."""
FEW = 32
"""Most waiters of one lock that all ask again when one of their positions may be gone; of more, the server is asked which."""
SLACK = 100
"""Outdated entries that the agenda may have, in addition to one for each valid entry."""


class Waiter:
    """A claim's position in the queue of a lock."""

    __slots__ = ("inbox", "key", "number", "queued", "ttl")

    def __init__(self, key: str, number: int, ttl: float, inbox: Inbox[Grant]) -> None:
        self.key: str = key
        self.number: int = number
        """Number of the claim within this client."""
        self.ttl: float = ttl
        """The ttl of the hold that is waited for, in seconds."""
        self.inbox: Inbox[Grant] = inbox
        self.queued = False
        """The server has confirmed the position, and no further request is under way."""


SendHeartbeat = Callable[[Sequence[str], Sequence[int], int, str], Reply]
"""Send a heartbeat for these locks, with the number of confirmed positions in each, the life of a position in ms, and
how this client learns of a grant."""

Tickets = Callable[[str, Sequence[int]], Reply]
"""Read the ticket of each of these claims, by number, in the queue of a lock; ``None`` for one that has none."""


class Wakeups:
    """The waiters of one client for one family of locks."""

    def __init__(
        self, heartbeat: SendHeartbeat, tickets: Tickets, *, clock: Clock, random: Random, batch: int = BATCH
    ) -> None:
        self._heartbeat = heartbeat
        self._tickets = tickets
        self._clock = clock
        self._random = random
        self._waiting: dict[str, set[Waiter]] = {}
        self._ttls: Counter[float] = Counter()
        """Number of waiters by ttl."""
        self._shortest = math.inf
        """The shortest of these."""
        self._ends: dict[str, float] = {}
        """When a lock should be checked before the next heartbeat."""
        self._agenda: list[tuple[float, str]] = []
        self._urgent: OrderedDict[str, WakeReason] = OrderedDict()
        """Locks that are due, the earliest first. On one server there is one call at a time: other commands wait for one
        call only, and a server slower than the heartbeats is not overloaded by them."""
        self._round: OrderedDict[str, WakeReason] = OrderedDict()
        """Locks that the current round of heartbeats has still to cover; they come after the urgent ones."""
        self._calls = 0
        """Calls under way."""
        self._in_round = False
        """The call under way on one server is part of the round."""
        self._began = 0.0
        """When the latest round began."""
        self._overdue = False
        """The next round was due before this one had ended."""
        self._next_heartbeat = math.inf
        self._reason: WakeReason | None = None
        """Why the next round comes early."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self.pushed = True
        """Grants are pushed to this client."""
        self._subscription = ""
        """The end of the name of the present subscription's own channel."""
        self._asks_until = 0.0
        """The time until which this client asks, although grants are pushed to it."""
        self._notified = "s"
        """The way in which this client learns of a grant: by push (s, with the end of its subscription's own channel) or by asking (n)."""
        self.batch = batch
        """Most locks per call; 1 in a cluster, where a call is about one slot."""
        self.period = PERIOD
        """Seconds between heartbeats."""
        self.life_ms = round(3 * PERIOD * 1000)
        """Milliseconds that a position lives without one."""
        self.terms = f"{self.life_ms} s"
        """Terms of a new position: that, and how this client learns of a grant."""

    # --- waiters

    def add(self, waiter: Waiter) -> None:
        """Keep the position of a waiter alive from now on."""
        waiters = self._waiting.setdefault(waiter.key, set())
        if waiter not in waiters:
            if waiters:
                # One text for all that wait for a lock.
                waiter.key = next(iter(waiters)).key
            waiters.add(waiter)
            self._ttls[waiter.ttl] += 1
            if waiter.ttl < self._shortest:
                self._shortest = waiter.ttl
                self._pace()
        self._next_heartbeat = min(self._next_heartbeat, self._clock() + self.period)
        self._set_timer()

    def remove(self, waiter: Waiter) -> None:
        """Forget a waiter."""
        waiters = self._waiting.get(waiter.key)
        if waiters is None or waiter not in waiters:
            return
        waiters.remove(waiter)
        if not waiters:
            del self._waiting[waiter.key]
            # A check that is due soon stays: it may be for a lock that was handed over.
            if self._ends.get(waiter.key, 0.0) > self._clock() + LONGEST_WINDOW + 0.1:
                del self._ends[waiter.key]
                self._compact()
        self._ttls[waiter.ttl] -= 1
        if not self._ttls[waiter.ttl]:
            del self._ttls[waiter.ttl]
            if waiter.ttl == self._shortest:
                self._shortest = min(self._ttls, default=math.inf)
                self._pace()

    def set_pushed(self, subscription: str | None) -> None:
        """Note what the channel of the present subscription has in addition; ``None`` if grants are not pushed to this client."""
        self.pushed, self._subscription = subscription is not None, subscription or ""
        self._pace()

    def _pace(self) -> None:
        if self.pushed and not self._asks_until:
            self._notified = f"s{self._subscription}"
            self.period = max(PERIOD_WITHOUT_PUSH, min(self._shortest / 3, PERIOD))
        else:
            self._notified, self.period = "n", PERIOD_WITHOUT_PUSH
        life = round(max(3 * self.period, LIFE) * 1000)
        terms = f"{life} {self._notified}"
        if terms != self.terms:
            self.life_ms, self.terms = life, terms

    # --- deadlines

    def ends(self, key: str, left: float, *, first: bool) -> None:
        """Check a lock when its hold may end, in ``left`` seconds; the first in its queue does so first."""
        delay = 0.002 if first else self._random.uniform(0.02, 0.08)
        self._schedule(key, self._clock() + left + delay, move=True)

    def handed_over(self, key: str, window: int) -> None:
        """Read a script's report: a lock was handed over, with a confirmation window of so many ms, at whose end it is checked.

        -1: there are more positions to examine, at once; other numbers say that it was not.
        """
        if window == -1 or 0 < window <= LONGEST_WINDOW * 1000:
            self._schedule(key, self._clock() + max(0, window) / 1000 + 0.002, move=False)

    def now(self) -> None:
        """Check every lock at once: messages may have been missed."""
        if not self._waiting:
            return
        self._next_heartbeat = self._clock()
        self._reason = WakeReason.RECONNECTED
        self._set_timer()

    def soon(self, concerned: Callable[[str], bool]) -> None:
        """Check at once the locks for which ``concerned`` returns true: messages may have been missed."""
        for key in filter(concerned, self._waiting):
            self._add_urgent(key, WakeReason.RECONNECTED)
        self._send()

    def open(self) -> None:
        """Accept waiters again after :meth:`close`."""
        self._timer_at = math.inf

    def close(self) -> None:
        """End all timers; answers and waiters that come later have no effect."""
        for each in (self._waiting, self._ttls, self._ends, self._agenda, self._urgent, self._round):
            each.clear()
        self._shortest = self._next_heartbeat = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # No later time is before this one.
        self._timer_at = -math.inf

    def _schedule(self, key: str, when: float, *, move: bool) -> None:
        known = self._ends.get(key)
        if known is None or move or when < known:
            self._ends[key] = when
            heapq.heappush(self._agenda, (when, key))
            self._compact()
            self._set_timer()

    def _compact(self) -> None:
        """Rebuild the agenda when most of it is outdated: every move leaves an entry behind until its time comes."""
        if len(self._agenda) > 2 * len(self._ends) + SLACK:
            self._agenda = [(then, name) for name, then in self._ends.items()]
            heapq.heapify(self._agenda)

    def _set_timer(self) -> None:
        if not self._waiting:
            self._next_heartbeat = math.inf
        agenda = self._agenda
        while agenda and self._ends.get(agenda[0][1]) != agenda[0][0]:
            heapq.heappop(agenda)
        when = min(self._next_heartbeat, agenda[0][0] if agenda else math.inf)
        if when >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = asyncio.get_running_loop().call_later(max(0.0, when - self._clock()), self._on_timer)

    # --- heartbeats

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        now = self._clock()
        if now >= self._next_heartbeat:
            self._begin_round(now)
        agenda = self._agenda
        while agenda and agenda[0][0] <= now:
            when, key = heapq.heappop(agenda)
            if self._ends.get(key) == when:
                del self._ends[key]
                self._add_urgent(key, WakeReason.EXPIRED)
        self._send()
        self._set_timer()

    def _add_urgent(self, key: str, reason: WakeReason) -> None:
        self._urgent[key] = reason
        self._round.pop(key, None)

    def _begin_round(self, now: float) -> None:
        if self._busy:
            self._overdue = True
            self._next_heartbeat = now + self.period
            return
        self._began = now
        if self._asks_until and now >= self._asks_until:
            self._asks_until = 0.0
            self._pace()
        reason = self._reason or (WakeReason.LAPSED if self.pushed else WakeReason.POLL)
        self._reason = None
        self._round.update(dict.fromkeys(self._waiting, reason))
        crowd = len(self._round) / self.batch / CALLS
        self._next_heartbeat = now + max(self.period, min(crowd, self.life_ms / 3000))

    @property
    def _busy(self) -> bool:
        """True while a round on one server has not ended."""
        return self._in_round or bool(self._round)

    def _send(self) -> None:
        """Make the next calls: one on one server, all in a cluster, where one node must not delay the others."""
        while (self._urgent or self._round) and (self.batch == 1 or not self._calls):
            asked: dict[str, WakeReason] = {}
            for due in (self._urgent, self._round):
                while due and len(asked) < self.batch:
                    key, reason = due.popitem(last=False)
                    asked[key] = reason
                    self._in_round = due is self._round and self.batch > 1
            # Only confirmed positions are counted: one whose request is under way may not exist yet.
            counts = [sum(waiter.queued for waiter in self._waiting.get(key, ())) for key in asked]
            reply = self._heartbeat(list(asked), counts, self.life_ms, self._notified)
            self._calls += 1
            reply.add_done_callback(functools.partial(self._answered, asked))

    def _answered(self, asked: dict[str, WakeReason], reply: Reply) -> None:
        self._calls -= 1
        self._in_round = False
        self._send()
        if self._overdue and not self._busy:
            # Other commands get as much of the server's time as the round took.
            now = self._clock()
            self._overdue = False
            self._next_heartbeat = min(
                self._next_heartbeat, now + min(now - self._began, self.life_ms / 3000)
            )
            self._set_timer()
        if reply.cancelled():
            return
        error = reply.exception()
        if error is None:
            self._read(asked, reply.result()[1:])
        elif isinstance(error, BackendError) and not error.retryable:
            # Waiters ask, and are refused.
            for waiter in [waiter for key in asked for waiter in self._waiting.get(key, ())]:
                waiter.inbox.wake(WakeReason.FAILED, error)
        elif not isinstance(error, BackendError):
            # After an error of the backend, everything is checked when the connection is back.
            log.error("heartbeat failed: %r", error)

    def _read(self, asked: dict[str, WakeReason], answers: Sequence[tuple[int, int, int]]) -> None:
        for (key, reason), (left, window, state) in zip(asked.items(), answers, strict=True):
            waiters = self._waiting.get(key)
            self.handed_over(key, window)
            if not waiters:
                continue
            if state >= 2:
                if state == 3:
                    self._ask()
                self._missed(key, waiters, reason)
            elif left:
                self.ends(key, left / 1_000_000, first=state == 1)

    def _ask(self) -> None:
        """Ask from now on: the client that passed this one over may send no messages."""
        now = self._clock()
        self._asks_until = now + ASKED_FOR
        self._pace()
        self._next_heartbeat = min(self._next_heartbeat, now + self.period)
        self._set_timer()

    def _missed(self, key: str, waiters: set[Waiter], reason: WakeReason) -> None:
        """Wake the waiters of a lock of which a grant, or the end of a position, was missed."""
        if len(waiters) <= FEW:
            for waiter in list(waiters):
                waiter.inbox.wake(reason)
            return
        # Most likely one of them was granted the lock and the push is still under way: the others have nothing to ask.
        queued = [waiter for waiter in waiters if waiter.queued]
        for start in range(0, len(queued), BATCH):
            some = queued[start : start + BATCH]
            reply = self._tickets(key, [waiter.number for waiter in some])
            reply.add_done_callback(functools.partial(self._on_tickets, key, some))

    def _on_tickets(self, key: str, waiters: Sequence[Waiter], reply: Reply) -> None:
        if reply.cancelled():
            return
        error = reply.exception()
        if error is not None and not isinstance(error, BackendRefused):
            # Everything is checked when the connection is back.
            return
        tickets = [None] * len(waiters) if error is not None else reply.result()
        waiting = self._waiting.get(key, set())
        for waiter, ticket in zip(waiters, tickets, strict=True):
            if ticket is None and waiter.queued and waiter in waiting:
                waiter.inbox.wake(WakeReason.LAPSED)
