"""Renewals of the lease mode: many rows in one statement, which waits for no row; locked rows are asked for apart.

A row may be locked for a moment, by a rival's question, or for minutes, by an administrator's transaction. A statement that
waits for it must hold up neither the renewals of other holds nor other statements of the session. So it waits in
a session of its own, one row after the other; and until there is an answer it is unknown whether the hold goes on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiolock.backends.mysql.claim import LeaseClaim
from aiolock.backends.mysql.context import Context, hexed, quote
from aiolock.backends.mysql.errors import NOT_NOW, code
from aiolock.core.backend import NEVER, Claim, Event, EventKind, Grant, Renewal, certain_until
from aiolock.errors import BackendUnavailable, LockError

__all__ = [
    "BATCH",
    "FRESH",
    "LockedRenewals",
    "Renewals",
    "presents",
    "prolonged",
    "tell_requests",
    "verdict",
]

BATCH = 500
"""Number of rows that one statement renews."""
FRESH = 0.8
"""A row that is held for more than this share of its ttl need not be renewed, whatever has renewed it."""
PATIENCE = 0.05
"""Share of a ttl for which the answers about other holds wait for that about a hold with a locked row."""


def prolonged(microseconds: int, ttl: float, sent: float) -> Grant | None:
    """Return the grant of a row that was ours for so many µs more, asked at ``sent``; ``None`` if it was not renewed of late."""
    left = microseconds / 1_000_000
    # As if it had been prolonged by a request that was sent so much earlier.
    return Grant(0, 0, certain_until(sent - (ttl - left), ttl), demand=True) if left > FRESH * ttl else None


def verdict(owner: str, row: tuple[Any, ...] | None, ttl: float, sent: float) -> Renewal | None:
    """Return what a row means for a hold of ``owner``; ``None`` if it is ours and was not prolonged.

    It has its owner, the owner that was forced off, and for how many µs it is held, and was asked for at ``sent``.
    """
    if row is None:
        return "revoked"
    now, forced, microseconds = row
    if now == owner and int(microseconds) > 0:
        return prolonged(int(microseconds), ttl, sent)
    return "force-released" if forced == owner else "revoked"


def presents(claims: Iterable[Any], owner: str) -> str:
    """Return the expression for the column ``present`` of holds whose owner ids are in the column ``owner``."""
    told = [
        f"WHEN {quote(claim.owner)} THEN {hexed(claim.present.encode())}"
        for claim in claims
        if claim.present is not None
    ]
    if not told:
        return "NULL"
    now = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    return f"CONCAT({now}, ' ', CASE {owner} {' '.join(told)} END)"


def tell_requests(context: Context, claims: Iterable[Any], rows: Iterable[Sequence[Any]]) -> None:
    """Report the requests to let go, of which ``rows`` have owner and reason, to ``claims``; once for each reason."""
    reasons = {str(owner): str(reason) for owner, reason in rows}
    for claim in claims:
        reason = reasons.get(claim.owner)
        if reason is not None and reason != claim.requested:
            claim.requested = reason
            context.events.put(Event(EventKind.REQUESTED, claim, text=reason))


class Renewals:
    """The renewals of one client's mutexes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.locked_renewals = LockedRenewals(context)

    async def renew(self, claims: Sequence[LeaseClaim]) -> list[Renewal]:
        """Prolong the holds of one ttl, or verify those that are fixed."""
        found = await (self._verify(claims) if claims[0].fixed else self._together(claims))
        passed_over: dict[Claim, str] = {
            claim: self._alone(claim) for claim, answer in found.items() if answer is None
        }
        answers = await self.locked_renewals.ask(passed_over) if passed_over else {}
        return [answers[claim] if (answer := found[claim]) is None else answer for claim in claims]

    async def _verify(self, batch: Sequence[LeaseClaim]) -> dict[LeaseClaim, Renewal | None]:
        """Find out whether holds are there, without prolonging them."""
        packet = self._context.statements("verify", ids=", ".join(quote(claim.key) for claim in batch))
        rows, requests = await self._context.ask(packet, urgent=True)
        tell_requests(self._context, batch, requests.rows)
        found = {str(key): tuple(row) for key, *row in rows.rows}
        verified = Grant(0, 0, NEVER, demand=True)
        return {
            claim: verdict(claim.owner, found.get(claim.key), math.inf, 0.0) or verified for claim in batch
        }

    async def _together(self, batch: Sequence[LeaseClaim]) -> dict[LeaseClaim, Renewal | None]:
        """Renew in one statement; if it was not for all, a second one tells which. ``None`` for those that were passed over."""
        context, ttl = self._context, batch[0].request.ttl
        ids = ", ".join(quote(claim.key) for claim in batch)
        packet = context.statements(
            "renew",
            ttl=round(ttl * 1_000_000),
            ids=ids,
            count=len(batch),
            owners=", ".join(quote(claim.owner) for claim in batch),
            present=presents(batch, "t.owner"),
        )
        sent = context.clock()
        renewed, requests = await context.ask(packet, urgent=True)
        tell_requests(context, batch, requests.rows)
        if renewed.changed == len(batch):
            return dict.fromkeys(batch, Grant(0, 0, certain_until(sent, ttl), demand=True))
        sent = context.clock()
        [rows] = await context.ask(context.statements("owned", ids=ids), urgent=True)
        found = {str(key): tuple(row) for key, *row in rows.rows}
        return {claim: verdict(claim.owner, found.get(claim.key), ttl, sent) for claim in batch}

    def _alone(self, claim: LeaseClaim) -> str:
        ttl = round(claim.request.ttl * 1_000_000)
        words = {"id": quote(claim.key), "owner": quote(claim.owner), "present": presents([claim], "owner")}
        return self._context.statements("renew_one", ttl=ttl, **words)


class LockedRenewals:
    """The holds of one client whose rows were locked when they were to be renewed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: dict[Claim, tuple[str, asyncio.Future[Renewal]]] = {}
        """The statement of each, and the future of its answer."""
        self._asking = False

    def __contains__(self, claim: Claim) -> bool:
        return claim in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, packets: Mapping[Claim, str]) -> dict[Claim, Renewal]:
        """Send statements that wait for their rows; return the answers that come in the time that other holds can spare.

        Cancelling it stops the waiting.
        """
        loop = asyncio.get_running_loop()
        for claim, packet in packets.items():
            self._waiting.setdefault(claim, (packet, loop.create_future()))
        answers = {claim: self._waiting[claim][1] for claim in packets}
        if not self._asking:
            self._asking = True
            self._context.sessions.tasks.spawn(self._ask_for_each(), "aiolock-mysql-locked_renewals")
        await asyncio.wait(answers.values(), timeout=PATIENCE * min(claim.request.ttl for claim in packets))
        return {
            claim: answer.result() if answer.done() else self._unknown() for claim, answer in answers.items()
        }

    async def _ask_for_each(self) -> None:
        """Send one statement at a time, so that no row waits together with another that stays locked."""
        try:
            while self._waiting:
                claim, (packet, _) = next(iter(self._waiting.items()))
                answer = await self._ask(claim, packet)
                self._waiting.pop(claim)[1].set_result(answer)
        finally:
            self._asking = False
            self._waiting.clear()

    async def _ask(self, claim: Claim, packet: str) -> Renewal:
        context = self._context
        try:
            session = await context.sessions.take()
            if session is None:
                return self._unknown()
            sent = context.clock()
            try:
                [renewed] = await session.run(packet)
            finally:
                context.sessions.give(session)
        except LockError as error:
            return self._unknown() if code(error.__cause__) in NOT_NOW else error
        # What else has become of it, the next renewal tells.
        if not renewed.changed:
            return self._unknown()
        return Grant(0, 0, certain_until(sent, claim.request.ttl), demand=True)

    def _unknown(self) -> BackendUnavailable:
        return BackendUnavailable(f"{self._context.address}: another transaction has its row locked")
