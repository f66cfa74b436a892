"""What must hold in every schedule, checked at every step of the server, every acquire and every act of a worker.

* Belief: a lease that says ``held`` has its hold on the server, which would outlive the belief if nothing more came
  through; and no incompatible lease says so as well.
* Told in time: a holder whose host runs knows of its loss before the next one is granted, and a block that is to be
  cancelled does not act any more.
* Tokens are unique, and grow in the order in which holders believe.
* A request that was given up is never taken up again.
* No call outlives its timeout.

A release by force may make beliefs overlap for one ttl: for so long the name is exempt. A stopped host cannot be told
anything; it has one pass of its loop after waking, and after suspend the renewal scheduler's next look at the clock.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiolock.backends.rows.rules import StoredRequest
from aiolock.core.renewal import CHECK_EVERY
from aiolock.lease import Lease
from tests.simulation.network import Server
from tests.simulation.virtual import Host

__all__ = ["Invariants", "Op", "Outcome"]

EPSILON = 1e-3
"""Seconds that no promise is about: passes of the loop take time."""


@dataclass
class Outcome:
    """What happened in one world."""

    seed: int
    seconds: float = 0.0
    grants: int = 0
    lives: int = 0
    """Answered requests to extend a hold."""
    losses: int = 0
    faults: int = 0
    together: Counter[str] = field(default_factory=Counter)
    """What came about that took several: locks at once, a latch that opened, a barrier that was passed, requests."""
    violations: list[str] = field(default_factory=list)
    log: list[tuple[float, str, str]] = field(default_factory=list)


class Op:
    """One lock that one task takes on one host."""

    def __init__(self, host: Host, name: str, number: int) -> None:
        self.host = host
        self.name = name
        self.number = number
        self.task: asyncio.Task[None] | None = None
        self.cancelled = False

    def __str__(self) -> str:
        return f"{self.host.name}/{self.number} {self.name}"


@dataclass(frozen=True)
class Moment:
    """When a call began, and for how long its host had been away until then."""

    now: float
    away: float


class Invariants:
    """Keeps the books of one world, and compares."""

    def __init__(self, server: Server, outcome: Outcome) -> None:
        self.server = server
        self.outcome = outcome
        self.loop = server.network.loop
        self.begin = self.loop.now
        self.open: dict[Lease, Op] = {}
        """Who believes, or should have stopped to."""
        self.closed: set[Host] = set()
        """Whose clients were closed."""
        self.drops = 0
        """How many leases were dropped on purpose and not complained of yet."""
        self._tokens: dict[str, dict[int, str]] = {}
        self._exclusive: dict[str, int] = {}
        self._acted: dict[str, int] = {}
        self._forced_until: dict[str, float] = {}
        self._left: set[str] = set()
        self.remember(server)

    def remember(self, server: Server) -> None:
        """Notice whatever is given up at this server."""
        leave = server.machine.leave

        def remember(key: tuple[str, str], request: StoredRequest, *rest: Any, **options: Any) -> None:
            self._left.add(request.id)
            leave(key, request, *rest, **options)

        server.machine.leave = remember

    # --- telling

    def log(self, who: object, what: str) -> None:
        self.outcome.log.append((self.loop.now - self.begin, str(who), what))

    def violated(self, who: object, what: str) -> None:
        self.log(who, f"VIOLATION: {what}")
        self.outcome.violations.append(f"{who}: {what}")

    def nothing(self, who: object, what: str, *things: Any) -> None:
        for thing in things:
            if thing:
                self.violated(who, f"{what} left: {thing!r}")

    def on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's exception handler."""
        error = context.get("exception")
        if isinstance(error, ResourceWarning) and self.drops:
            self.drops -= 1
        else:
            self.violated("loop", f"{context.get('message')}: {error!r}")

    def forget(self) -> None:
        """Of what was given up until now, a server that has lost its data knows nothing."""
        self._left.clear()

    # --- exemptions

    def exempt(self, name: str, seconds: float) -> None:
        """Beliefs about a name may overlap for so long."""
        self._forced_until[name] = self.loop.now + seconds

    def forced(self, name: str) -> bool:
        return self.loop.now <= self._forced_until.get(name, 0.0)

    def excused(self, op: Op) -> bool:
        """Whether nobody could have told this holder, or told it only a moment ago."""
        return (
            op.host.stopped or self.loop.now <= op.host.woke + CHECK_EVERY + EPSILON or self.forced(op.name)
        )

    # --- belief, tokens, acts

    def look(self) -> None:
        """Every belief ends before its hold on the server does."""
        for lease, op in self.open.items():
            if lease.held and not self.forced(op.name):
                claim: Any = lease._hold.validity.claim
                lock = self.server.machine.locks.get(claim.key)
                hold = lock.holds.get(claim.stored.id) if lock else None
                if hold is None or lease.remaining() >= self.server.clock.until(hold.deadline):
                    self.violated(op, f"believes in {lease!r}, and the server has {hold}")
                    # Once is enough.
                    self.exempt(op.name, lease.ttl)
        self.look_at(self.server)

    def look_at(self, server: Server) -> None:
        """Who left is not there."""
        for lock in server.machine.locks.values():
            if not self._left.isdisjoint((*lock.holds, *lock.queue)):
                self.violated("server", f"took up a request that was given up: {lock}")
                self._left.clear()

    def granted(self, op: Op, lease: Lease, began: Moment) -> None:
        """Somebody has got a lease: look at everybody else's."""
        self.outcome.grants += 1
        self.log(op, f"has got {lease!r}")
        if not self.forced(op.name):
            if not lease.held and op.host.away == began.away and op.host not in self.closed:
                self.violated(op, f"got {lease!r} that is not held")
            for other, holder in self.open.items():
                if (
                    holder.name == op.name
                    and other._hold.validity is not lease._hold.validity
                    and not compatible(lease, other)
                ):
                    self._compare(op, lease, holder, other)
        self._check_token(op, lease)
        self.open[lease] = op

    def _compare(self, op: Op, lease: Lease, holder: Op, other: Lease) -> None:
        if other.held and lease.held:
            self.violated(op, f"got {lease!r} while {holder} believes in {other!r}")
        if other._hold.open and not self.excused(holder):
            self.violated(op, f"got {lease!r} before {holder} was told of its loss")

    def _check_token(self, op: Op, lease: Lease) -> None:
        seen = self._tokens.setdefault(op.name, {})
        if lease.token in seen:
            self.violated(op, f"got token {lease.token}, as {seen[lease.token]} did")
        floor = self._exclusive.get(op.name, 0)
        if lease.kind.exclusive:
            floor = max(seen, default=0)
            self._exclusive[op.name] = max(floor, lease.token)
        if lease.token <= floor and lease.held and not self.forced(op.name):
            self.violated(op, f"got token {lease.token} after token {floor}")
        seen[lease.token] = str(op)

    def act(self, op: Op, lease: Lease, *, trusting: bool) -> None:
        """A step of work: after a look at ``lost``, or ``trusting`` that a lost block is cancelled."""
        if self.excused(op) if trusting else lease.lost:
            return
        if lease.kind.exclusive and not self.forced(op.name):
            highest = self._acted.get(op.name, 0)
            if lease.token < highest:
                self.violated(op, f"acts with token {lease.token} after {highest}")
            self._acted[op.name] = max(highest, lease.token)

    # --- time

    def moment(self, op: Op) -> Moment:
        return Moment(self.loop.now, op.host.away)

    def in_time(self, op: Op, what: str, began: Moment, limit: float | None) -> None:
        """No call outlives its limit; the time in which its host could not run does not count."""
        took = self.loop.now - began.now - (op.host.away - began.away)
        if limit is not None and took > limit + EPSILON:
            self.violated(op, f"{what} took {took:.3f} s, and had {limit:.3f} s")

    @contextmanager
    def timed(self, op: Op, what: str, limit: float | None) -> Iterator[Moment]:
        began = self.moment(op)
        try:
            yield began
        finally:
            self.in_time(op, what, began, limit)


def compatible(one: Lease, other: Lease) -> bool:
    """Whether both may be held at once; how many permits are out is the server's to count, and looked up there."""
    return not (one.kind.exclusive or other.kind.exclusive)
