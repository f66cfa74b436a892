"""Read-write locks and semaphores of one client: decisions, renewals, inspection and force release."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from aiolock.backends.mysql.context import Context, hexed, quote
from aiolock.backends.mysql.decisions import DecisionQueue, Outcome, PendingDecision, Transaction, execute
from aiolock.backends.mysql.listener import Listener, presence
from aiolock.backends.mysql.protocol import Result
from aiolock.backends.mysql.renewal import Renewals
from aiolock.core.backend import Event, EventKind
from aiolock.core.present import decode_present, presented
from aiolock.types import Family, Holder, LockInfo, Waiting

__all__ = ["FORCED", "HELD", "Sharing"]

DAY, MINUTE = timedelta(days=1), timedelta(minutes=1)
GRANTED, HELD, FORCED = 1, 2, 3
"""States of requests; `sharing.sql` has the list."""
NAMED = 64
"""Number of this client's first waiters that a decision lets in without a confirmation: they are likely to be next."""
NO_OWNER = "-"
"""An owner id that no claim has."""


class Sharing:
    """Shared locks for all claims of one client: decisions, renewals, inspection, force release.

    The table of requests has the queue and the holds, the row of the lock gives the decisions their order. Each decision is one
    transaction in one packet, so a client that is stopped holds no other up; a claim that is let in by it is woken by ending
    the sleep of its client's listener.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.listener = Listener(context, self.advance, self.bury)
        self.renewals = Renewals(context, "renew_holds", "renew_hold", "verify_holds")
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

        With ``repeat=False``, one whose answer is lost is not tried again.

        The first waiters of this client are let in by it like the claims that ask, and learn it from its answer. If it has none,
        or the caller was cancelled, the listener finds out.
        """
        waiting = self.listener.first(key, NAMED)
        ours = dict.fromkeys((*what.asking, *waiting))
        words = what.words | {
            "client": quote(self.context.client),
            "ours": _listed(ours),
            "asking": _listed(what.asking),
        }
        packet = "; ".join(
            self.context.statements(step, **words)
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
        await self.tell(
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
        """Serve the next waiters: a hold or a position may be over."""
        await self.decide(key, Transaction([], [], self.words(key, family, name), []))

    async def bury(self, owner: str, key: str, family: str, name: str) -> None:
        """Pass a grant without a claim on to the next waiter; one that has been confirmed in the meantime stays."""
        words = self.words(key, family, name) | {"owner": quote(owner)}
        await self.decide(key, Transaction(["bury"], [], words, []))

    async def tell(self, granted: set[str]) -> None:
        """Wake the clients whose requests were granted while they waited."""
        if self.context.client in granted:
            self.listener.look()
        if others := granted - {self.context.client}:
            await self.listener.wake(others)

    # --- administration

    def words(self, key: str, family: str, name: str) -> dict[str, Any]:
        """Return the words of the statements about a lock; a ``limit`` of 0 is none."""
        return {"id": quote(key), "family": quote(family), "name": hexed(name), "limit": 0}

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Return the holders and waiters by the rows of its requests."""
        key = self.context.key(name, family)
        await self.left(key)
        packet = self.context.statements("inspect_shared", id=quote(key))
        requests, lock = await self.context.execute(packet)
        rows = [(int(state), *rest) for state, *rest in requests.rows]
        holders = sorted((_holder(*rest) for state, *rest in rows if state), key=lambda one: one.token)
        waiters = [_waiting(*rest) for state, *rest in rows if not state]
        limit = _limit(lock.rows, used=bool(rows)) if family is Family.SEMAPHORE else None
        return LockInfo(name, tuple(holders), tuple(waiters), family, limit)

    async def force_release(self, name: str, family: Family) -> bool:
        """Take it from its holders, and end a session of their clients, so that they learn it at once."""
        key = self.context.key(name, family)
        await self.left(key)
        words = self.words(key, family.value, name)
        outcome = await self.decide(key, Transaction(["force_out"], [], words, []), repeat=False)
        [clients] = await self.context.execute(self.context.statements("forced_out", id=words["id"]))
        # START TRANSACTION, the row, the ended requests; then the holds that were kept after their release, and the others.
        # After a copy that was carried out in part, the rows that were forced out say it.
        if not any(outcome.changed[3:5]) and not (outcome.inside is None and clients.rows):
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
        """Change the capacity, and let in whom it has room for."""
        key = self.context.key(name, Family.SEMAPHORE)
        words = self.words(key, Family.SEMAPHORE.value, name) | {"capacity": limit}
        await self.decide(key, Transaction(["resize"], [], words, []))


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
