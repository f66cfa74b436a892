"""Renewals of the lease mode: many rows in one statement, which waits for no row; locked rows are asked for again.

A row may be locked for a moment, by a rival's request or a decision, or for minutes, by an administrator's transaction. A
statement that waits for it would hold up the renewals of other holds and other statements of the session. So locked rows are
passed over; and until there is an answer it is unknown whether the hold goes on.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiolock.backends.mysql.context import Context, hexed, quote
from aiolock.clock import Deadline
from aiolock.core.backend import NEVER, Claim, Event, EventKind, Grant, Renewal, expires_at
from aiolock.core.tasks import Backoff
from aiolock.errors import BackendUnavailable, LockError

__all__ = ["BATCH", "FRESH", "Renewals", "RowClaim", "verdict"]

BATCH = 500
"""Number of rows that one statement renews."""
FRESH = 0.8
"""A row that is held for more than this share of its ttl need not be renewed, whatever has renewed it."""
SOON, LATER = 0.01, 0.1
"""Seconds before rows are asked for again that were passed over, from the first pause, because most are locked for a few
milliseconds, to the longest."""
ANSWER_SHARE = 0.05
"""Share of a ttl for which the answers about other holds wait for that about a hold with a locked row."""


class RowClaim(Claim):
    """A claim whose hold is a row with its owner id."""

    __slots__ = ()

    key: str
    """The key of the lock."""
    owner: str
    requested: str | None
    """The reason of the last request to let go."""

    @property
    @abstractmethod
    def row(self) -> str:
        """The key of the row that is the hold."""


def verdict(owner: str, row: Sequence[Any] | None, ttl: float, sent: float) -> Renewal | None:
    """Return what a row means for a hold of ``owner``; ``None`` if it is this client's and was not prolonged lately.

    It has its owner, the owner that was forced off, and for how many µs it is held, and was asked for at ``sent``.
    """
    if row is None:
        return "revoked"
    now, forced, microseconds = row
    left = int(microseconds) / 1_000_000
    if now != owner or left <= 0:
        return "force-released" if forced == owner else "revoked"
    # As if it had been prolonged by a request that was sent so much earlier.
    return Grant(0, 0, expires_at(sent - (ttl - left), ttl), demand=True) if left > FRESH * ttl else None


def _presents(claims: Iterable[Claim], owners: Iterable[str]) -> str:
    """Return the expression for the column ``present`` of these holds."""
    reports = [
        f"WHEN {owner} THEN {hexed(claim.present.encode())}"
        for claim, owner in zip(claims, owners, strict=True)
        if claim.present is not None
    ]
    if not reports:
        return "NULL"
    now = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    return f"CONCAT({now}, ' ', CASE t.owner {' '.join(reports)} END)"


def _values(batch: Sequence[RowClaim]) -> dict[str, Any]:
    """Return the values for the statements about these holds; a ``ttl`` among them is that of each."""
    owners = [quote(claim.owner) for claim in batch]
    return {
        # In the order of the rows, so that two of these statements do not wait for each other.
        "ids": ", ".join(sorted(quote(claim.row) for claim in batch)),
        "owners": ", ".join(owners),
        "count": len(batch),
        "ttl": round(batch[0].request.ttl * 1_000_000),
        "present": _presents(batch, owners),
    }


class Renewals:
    """The renewals of one client's mutexes, or of its shared locks."""

    def __init__(self, context: Context, many: str, verify: str) -> None:
        """Take the names of the statements that renew holds, and that verify them."""
        self._context, self._many, self._single = context, many, verify

    async def renew(self, claims: Sequence[RowClaim]) -> list[Renewal]:
        """Prolong holds in one statement, or verify those that are fixed; if some are gone, a second finds which.

        Rows that are locked are passed over, and asked for again for as long as the other holds can wait for the answer.
        Cancelling it leaves open which of them the server has prolonged.
        """
        if claims[0].fixed:
            found = await self._verify(claims, prolonged=False)
            return [found[claim] or Grant(0, 0, NEVER, demand=True) for claim in claims]
        context, left = self._context, list(claims)
        answers: dict[RowClaim, Renewal] = {}
        backoff = Backoff(context.random, SOON, LATER)
        deadline = Deadline.after(ANSWER_SHARE * min(claim.request.ttl for claim in claims), context.clock)
        while True:
            try:
                found = await self._together(left)
            except LockError as error:
                # What was answered before it counts.
                found = dict.fromkeys(left, error)
            answers |= {claim: answer for claim, answer in found.items() if answer is not None}
            left = [claim for claim in left if claim not in answers]
            if not left or deadline.passed():
                break
            await backoff.pause()
        locked = BackendUnavailable(f"{context.address}: another transaction has its row locked")
        return [answers.get(claim, locked) for claim in claims]

    async def _together(self, batch: Sequence[RowClaim]) -> Mapping[RowClaim, Renewal | None]:
        """Renew in one statement; if it was not for all, a second one finds which. ``None`` for those that were passed over."""
        context = self._context
        sent = context.clock()
        packet = context.statements(self._many, **_values(batch))
        renewed, requests = await context.ask(packet, urgent=True)
        self._report_requests(batch, requests.rows)
        if renewed.changed < len(batch):
            return await self._verify(batch, prolonged=True)
        return {claim: Grant(0, 0, expires_at(sent, claim.request.ttl), demand=True) for claim in batch}

    async def _verify(
        self, batch: Sequence[RowClaim], *, prolonged: bool
    ) -> Mapping[RowClaim, Renewal | None]:
        """Read the rows; return ``None`` for a hold that is there, but, where ``prolonged`` is asked for, was not prolonged lately."""
        context = self._context
        sent = context.clock()
        rows, requests = await context.ask(context.statements(self._single, **_values(batch)), urgent=True)
        self._report_requests(batch, requests.rows)
        found = {str(key): row for key, *row in rows.rows}
        return {
            claim: verdict(
                claim.owner, found.get(claim.row), claim.request.ttl if prolonged else math.inf, sent
            )
            for claim in batch
        }

    def _report_requests(self, claims: Iterable[RowClaim], rows: Iterable[Sequence[Any]]) -> None:
        """Report the requests to let go, of which ``rows`` have owner and reason; once for each reason."""
        reasons = {str(owner): str(reason) for owner, reason in rows}
        for claim in claims:
            reason = reasons.get(claim.owner)
            if reason is not None and reason != claim.requested:
                claim.requested = reason  # type: ignore[misc]  # subclasses have the slot
                self._context.events.put(Event(EventKind.REQUESTED, claim, text=reason))
