"""Read-write locks and semaphores of the lease mode: their claims, decisions, inspection and force release."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from aiolock.backends.mysql.context import BLOCK, Context, hexed, quote
from aiolock.backends.mysql.decisions import (
    Action,
    DecisionQueue,
    Outcome,
    PendingDecision,
    Transaction,
    execute,
)
from aiolock.backends.mysql.listener import Listener, ListeningClaim, presence
from aiolock.backends.mysql.protocol import Result
from aiolock.backends.mysql.renewal import Renewals
from aiolock.core.backend import (
    NEVER,
    Event,
    EventKind,
    Grant,
    Release,
    Request,
    confirmation_window,
    expires_at,
)
from aiolock.core.capabilities import Downgrade, Extension
from aiolock.core.present import decode_present, presented
from aiolock.errors import ConfigError, LockLost, shorten
from aiolock.types import READ, Family, Holder, LockInfo, Waiting

__all__ = ["ALL", "SharedClaim", "Sharing"]

DAY, MINUTE = timedelta(days=1), timedelta(minutes=1)
GRANTED, HELD, FORCED = 1, 2, 3
"""States of requests; `sharing.sql` has the list."""
NAMED = 64
"""Number of this client's first waiters that a decision lets in without a confirmation: they are likely to be next."""
NO_OWNER = "-"
"""An owner id that no claim has."""
ALL = 1 << 31
"""The capacity of a read-write lock, and the weight of a write: more readers than there can be."""

ABSENT = (None, 0)
"""The state and the token of a request that is not there."""


class Sharing:
    """Shared locks for all claims of one client: decisions, renewals, inspection, force release.

    The table of requests has the queue and the holds, the row of the lock gives the decisions their order. Each decision is one
    transaction in one packet, so a client that is stopped holds no other up; a claim that is let in by it is woken by ending
    the sleep of its client's listener.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.listener = Listener(context, self.advance, self.reclaim)
        self.renewals = Renewals(context, "renew_holds", "verify_holds")
        self.decisions: dict[str, DecisionQueue] = {}
        """The queues in which requests wait for a decision, by lock."""

    # --- deciding

    def begin(self, key: str, request: PendingDecision) -> asyncio.Future[Outcome]:
        """Add a request to the next decision about a lock, without waiting: the future of its outcome.

        Cancelling it withdraws the request if its decision was not sent yet; else it is carried out.
        """
        queue = self.decisions.get(key) or DecisionQueue(self.context, key, self.decisions, self.decide)
        return queue.begin(request)

    async def left(self, key: str) -> None:
        """Wait until requests of this client to leave the lock have been decided.

        A decision may go out on another connection than what is asked next about the lock. Cancelling it has no effect
        on them.
        """
        decisions = self.decisions.get(key)
        if decisions is not None and (leaving := decisions.leaving()):
            await asyncio.wait(leaving)

    async def decide(self, key: str, what: Transaction, *, repeat: bool = True) -> Outcome:
        """Carry out one transaction, and notify the clients that it let in.

        With ``repeat=False``, a transaction whose answer is lost is not tried again.

        The transaction also lets in the first waiters of this client, up to :data:`NAMED`, who learn it from the answer. Without
        an answer it raises :class:`BackendError`: as after a cancellation, the transaction may count. Then the listener finds out
        whether those waiters were let in, and this call notifies no other client.
        """
        waiting = self.listener.first(key, NAMED)
        local_owners = dict.fromkeys((*what.asking, *waiting))
        values = what.values | {
            "client": quote(self.context.client),
            "local_owners": _listed(local_owners),
            "asking": _listed(what.asking),
        }
        packet = "; ".join(
            self.context.statements(step, **values)
            for step in ("step", *what.before, "serve", *what.after, "outcome")
        )
        try:
            answers, sent, again = await self.context.within(
                execute(self.context, packet, key, repeat=repeat)
            )
        except BaseException:
            self.listener.doubt(waiting)
            raise
        rows = answers[-1].rows
        stand = {str(owner): (int(state), int(token)) for _, _, owner, _, state, token, _ in rows if owner}
        for _, _, owner, _, state, token, new in rows:
            if state == HELD and owner in waiting and owner not in what.asking:
                if new:
                    self.listener.hand(waiting[owner], waiting[owner].granted(int(token), sent))
                else:
                    # Since when is not known here.
                    self.listener.doubt([owner])
        await self.notify(
            {str(client) for *_, client, state, _, new in rows if state == GRANTED and (new or again)}
        )
        declared, capacity = rows[0][:2]
        return Outcome(
            stand,
            (int(declared), int(capacity or 0)),
            tuple(answer.changed for answer in answers),
            sent,
            None if again else _inside(what, answers),
        )

    async def advance(self, key: str, family: str, name: str) -> None:
        """Serve the next waiters: a hold or a position may be over. Cancelling it is cancelling :meth:`decide`."""
        await self.decide(key, Transaction([], [], self.values(key, family, name), []))

    async def reclaim(self, owner: str, key: str, family: str, name: str) -> None:
        """Give a grant without a claim to the next waiter; one that has been confirmed in the meantime stays.

        Cancelling it is cancelling :meth:`decide`.
        """
        values = self.values(key, family, name) | {"owner": quote(owner)}
        await self.decide(key, Transaction(["reclaim"], [], values, []))

    async def notify(self, granted: set[str]) -> None:
        """Wake the clients whose requests were granted while they waited. Cancelling it is cancelling :meth:`Listener.wake`."""
        if self.context.client in granted:
            self.listener.end_sleep()
        if others := granted - {self.context.client}:
            await self.listener.wake(others)

    # --- administration

    def values(self, key: str, family: str, name: str) -> dict[str, Any]:
        """Return the values of the statements about a lock; a ``limit`` of 0 is none."""
        return {"id": quote(key), "family": quote(family), "name": hexed(name), "limit": 0}

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Return the holders and waiters by the rows of its requests. Cancelling it changes nothing."""
        key = self.context.key(name, family)
        await self.left(key)
        packet = self.context.statements("inspect_shared", id=quote(key))
        requests, lock = await self.context.execute(packet)
        rows = [(int(state), *rest) for state, *rest in requests.rows]
        holders = sorted((_holder(*rest) for state, *rest in rows if state), key=lambda one: one.token)
        waiters = [_waiting(*rest) for state, *rest in rows if not state]
        limit = _limit(lock.rows, used=bool(rows)) if family is Family.SEMAPHORE else None
        return LockInfo.of_holds(name, holders, waiters, family, limit)

    async def force_release(self, name: str, family: Family, token: int | None) -> bool:
        """Take it from its holders, or from the one that has the token, and end a session of their clients, so that they learn it at once.

        Cancelling it leaves open how much of that the server does.
        """
        key = self.context.key(name, family)
        await self.left(key)
        values, statements = self.values(key, family.value, name), self.context.statements
        step, its_token = "force_out", "1"
        if token is not None:
            step = "force_out_token"
            its_token = statements("its_token", token=token, reported=statements("reported"))
        force = Transaction([step], [], values | {"its_token": its_token}, [])
        outcome = await self.decide(key, force, repeat=False)
        [clients] = await self.context.execute(statements("forced_out", id=values["id"], its_token=its_token))
        # START TRANSACTION, the row, the ended requests; then the holds that were kept after their release, and the others.
        # After a copy that was carried out in part, the rows that were forced out say it.
        if not any(outcome.changed[3 : 5 if token is None else 4]) and not (
            outcome.inside is None and clients.rows
        ):
            return False
        session = await self.context.sessions.main()
        for (client,) in clients.rows:
            if client == self.context.client:
                self.context.events.put(Event(EventKind.DOUBT))
            else:
                packet = self.context.statements("end_session", client=quote(presence(str(client))))
                session.send(packet)
        return True

    async def set_limit(self, name: str, limit: int) -> None:
        """Change the capacity, and let in whom it has room for. Cancelling it is cancelling :meth:`decide`."""
        key = self.context.key(name, Family.SEMAPHORE)
        values = self.values(key, Family.SEMAPHORE.value, name) | {"capacity": limit}
        await self.decide(key, Transaction(["resize"], [], values, []))


def _inside(what: Transaction, answers: Sequence[Result]) -> frozenset[str]:
    """Return the owners that left and had a hold until then."""
    if "depart" not in what.before:
        return frozenset()
    # After the three statements of `step`, and one for each statement before it.
    rows = answers[3 + list(what.before).index("depart")].rows
    return frozenset(str(owner) for (owner,) in rows)


def _listed(owners: Iterable[str]) -> str:
    return ", ".join(map(quote, owners)) or quote(NO_OWNER)


def _holder(
    label: str,
    token: int,
    since: datetime,
    remaining: int,
    weight: int,
    mode: str,
    tokens: int,
    present: str | None,
) -> Holder:
    permits = int(weight) if mode == "permits" else 1
    moment, left = since.replace(tzinfo=UTC), int(remaining) / 1_000_000
    holder = Holder(label, int(token), moment, left, permits, mode, int(tokens))
    return presented(holder, decode_present(present or ""))


def _waiting(label: str, *columns: Any) -> Waiting:
    *_, weight, mode, _, _ = columns
    return Waiting(label, mode, int(weight) if mode == "permits" else 1)


def _limit(rows: Sequence[Sequence[Any]], *, used: bool) -> int | None:
    for declared, capacity, idle in rows:
        memory = MINUTE if 0 != declared == capacity else DAY
        if capacity is not None and (used or int(idle) < memory.total_seconds() * 1_000_000):
            return int(capacity)
    return None


# --- claims


class SharedClaim(ListeningClaim, Downgrade, Extension):
    """A claim on a lock of readers and a writer, or of permits.

    Its row in the table of requests is its position in the queue, or its hold. Each request is one transaction, and asking
    again finds the row. While it waits, the client's listener wakes it with the grant.
    """

    __slots__ = ("_asked", "_begun", "_left", "_over", "_queued", "_sharing")

    def __init__(self, sharing: Sharing, request: Request) -> None:
        super().__init__(request)
        self._sharing = sharing
        self.context = sharing.context
        self.key = self.context.key(request.name, request.kind.family)
        self.owner = secrets.token_hex(16)
        self.block = 1 if request.fair or not request.kind.exclusive else BLOCK
        self.requested = None
        self._asked = False
        """The server may know of this owner."""
        self._queued = False
        """True if the claim has a position in the queue, as far as is known."""
        self._over = False
        self._left = False
        """A copy of the release may have been sent."""
        self._begun: asyncio.Future[Outcome] | None = None
        """The outcome of a request to leave that was added before :meth:`release` was called."""

    def _values(self) -> dict[str, Any]:
        """Return the values of the statements about its lock."""
        request = self.request
        _, limit = request.kind.weigh(ALL)
        return self._sharing.values(self.key, request.kind.family.value, request.name) | {"limit": limit}

    def _begin(self, action: Action) -> asyncio.Future[Outcome]:
        """Add a request to the next decision about the lock, without waiting: the future of its outcome."""
        request = self.request
        weight, limit = request.kind.weigh(ALL)
        row = {
            "owner": quote(self.owner),
            "mode": quote(request.kind.mode.value),
            "weight": weight,
            "block": self.block,
            "label": hexed(request.label),
            "ttl": round(request.ttl * 1_000_000),
            "confirmation_window": round(confirmation_window(request.ttl) * 1_000_000),
            "limit": limit,
        }
        return self._sharing.begin(self.key, PendingDecision(action, self.owner, weight, self._values(), row))

    # --- asking

    async def acquire(self, wait: bool) -> Grant | None:
        """Take the pushed grant; else request, or check that the position is there."""
        return await self.context.within(self._attempt(wait=wait))

    async def _attempt(self, *, wait: bool) -> Grant | None:
        if (grant := self.inbox.take()) is not None:
            return grant
        if self._queued:
            grant = await self._confirm()
            if grant is not None or self._queued:
                return grant
        self._asked = True
        if wait:
            self._sharing.listener.add(self)
        try:
            grant = await self._enter(wait=wait)
        except ConfigError:
            self._sharing.listener.discard(self)
            raise
        if grant is None and wait:
            self._queued = True
        else:
            self._sharing.listener.discard(self)
        return grant

    async def _enter(self, *, wait: bool) -> Grant | None:
        action = Action.WAIT if wait else Action.TRY
        outcome = await self._begin(action)
        state, token = outcome.stand.get(self.owner, ABSENT)
        if state == FORCED:
            self._begin_anew()
            if wait:
                self._sharing.listener.add(self)
            outcome = await self._begin(action)
            state, token = outcome.stand.get(self.owner, ABSENT)
        if state == HELD:
            return self.granted(token, outcome.sent)
        _, limit = self.request.kind.weigh(ALL)
        if state is None and limit not in outcome.limits:
            raise ConfigError(
                f"semaphore {shorten(self.request.name)} has {outcome.limits[1]} permits, not {limit}: "
                "every client has to name the same limit; set_limit() changes it"
            )
        return None

    async def _confirm(self) -> Grant | None:
        context, owner = self.context, quote(self.owner)
        await context.execute(context.statements("confirm_grants", owners=owner, count=1))
        asked = context.clock()
        [answer] = await context.execute(context.statements("requests", owners=owner))
        if not answer.rows:
            self._queued = False
            return None
        state, token, left = map(int, answer.rows[0][1:])
        if state == FORCED:
            self._begin_anew()
        if state != HELD:
            return None
        self._sharing.listener.discard(self)
        return self.granted(token, asked - (self.request.ttl - left / 1_000_000))

    def _begin_anew(self) -> None:
        """Take a new owner id: the hold was taken away before the claim knew of it, and its row keeps the owner id until it is over."""
        self._sharing.listener.discard(self)
        self._queued = False
        self.owner = secrets.token_hex(16)

    async def downgrade(self) -> Grant:
        """Become a reader; readers that are next in the queue enter."""
        return await self.context.within(self._downgrade())

    async def _downgrade(self) -> Grant:
        fixed = self.fixed
        values = self._values() | {"owner": quote(self.owner), "prolong": int(not fixed)}
        outcome = await self._sharing.decide(self.key, Transaction(["downgrade"], [], values, [self.owner]))
        state, token = outcome.stand.get(self.owner, ABSENT)
        if state != HELD:
            raise LockLost(self.request.name, "revoked")
        self.request = replace(self.request, kind=READ)
        self.block = 1
        grant = self.granted(token, outcome.sent)
        return replace(grant, until=NEVER) if fixed else grant

    async def extend(self, seconds: float, number: int) -> Grant:
        """Give the row another life."""
        context = self.context
        packet = context.statements(
            "extend_hold", owner=quote(self.owner), number=number, life=round(seconds * 1_000_000)
        )
        [*_, rows], sent = await context.within(context.change(packet, key=self.key))
        state = int(rows.rows[0][0]) if rows.rows else None
        if state != HELD:
            raise LockLost(self.request.name, "force-released" if state == FORCED else "revoked")
        return Grant(0, 0, expires_at(sent, seconds), demand=True)

    # --- leaving

    async def release(self, keep: float = 0) -> Release:
        """Give up the hold or the position, whichever there is or may be, and serve the next waiters."""
        if self._over:
            return Release.RELEASED
        first, self._left = not self._left, True
        held: bool | None = True
        self._sharing.listener.discard(self)
        self.inbox.close()
        if self._asked:
            held = await self.context.within(self._release(keep))
        self._over = True
        return Release.of(held, first=first)

    def begin_release(self, keep: float = 0) -> Release | None:
        """Add the request to leave to the next decision; later requests of this client about the lock wait for it."""
        if self._over or self._left or not self._asked or keep:
            return None
        if self._begun is None:
            self._sharing.listener.discard(self)
            self.inbox.close()
            self._begun = self._begin(Action.LEAVE)
            # The client may be closed before `release` tests it.
            self._begun.add_done_callback(lambda done: done.cancelled() or done.exception())
        return Release.UNKNOWN

    async def _release(self, keep: float) -> bool | None:
        begun, self._begun = self._begun, None
        if not keep:
            outcome = await self._outcome_of(begun)
            return None if outcome.inside is None else self.owner in outcome.inside
        values = self._values() | {"owner": quote(self.owner), "keep": round(keep * 1_000_000)}
        outcome = await self._sharing.decide(self.key, Transaction(["keep"], [], values, []))
        # After the three statements of `step`.
        return None if outcome.inside is None else outcome.changed[3] > 0

    async def _outcome_of(self, begun: asyncio.Future[Outcome] | None) -> Outcome:
        if begun is not None:
            # Not cancelled with its caller: the request stays in the decision.
            await asyncio.wait([begun])
            if not begun.cancelled() and begun.exception() is None:
                return begun.result()
        outcome = await self._begin(Action.LEAVE)
        # A copy that failed may have been carried out.
        return outcome if begun is None else outcome._replace(inside=None)
