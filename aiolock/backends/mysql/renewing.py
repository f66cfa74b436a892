"""Renewals of the lease mode's mutexes: all rows of one ttl in one statement, which waits for nobody.

A row that somebody else has locked is passed over, and asked for apart from the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiolock.backends.mysql.lease_claim import LeaseClaim
from aiolock.backends.mysql.sharing import BATCH, Sharing
from aiolock.backends.mysql.statements import quote
from aiolock.backends.mysql.stragglers import Stragglers, prolonged
from aiolock.contract import NEVER, Claim, Grant, Renewal, certain_until
from aiolock.errors import LockError

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["Renewing", "verdict"]


class Renewing:
    """The renewals of one client."""

    def __init__(self, backend: MySQLBackend, sharing: Sharing) -> None:
        self._backend = backend
        self._sharing = sharing
        self.stragglers = Stragglers(backend)

    async def renew(self, claims: Sequence[LeaseClaim]) -> dict[Claim, Renewal]:
        """Prolong holds of any ttl; per claim a grant, why the hold is gone, or an error if that is unknown."""
        by_ttl: dict[float, list[LeaseClaim]] = {}
        fixed: list[LeaseClaim] = []
        for claim in claims:
            if claim.fixed:
                fixed.append(claim)
            else:
                by_ttl.setdefault(claim.bid.ttl, []).append(claim)
        answers: dict[Claim, Renewal] = await self._verify(fixed)
        passed_over: dict[Claim, str] = {}
        for ttl, mine in by_ttl.items():
            for start in range(0, len(mine), BATCH):
                batch = mine[start : start + BATCH]
                found: dict[LeaseClaim, Renewal | None]
                try:
                    found = await self._together(batch, ttl)
                except LockError as error:
                    found = dict.fromkeys(batch, error)
                for claim, answer in found.items():
                    if answer is None:
                        passed_over[claim] = self._alone(claim)
                    else:
                        answers[claim] = answer
        if passed_over:
            answers.update(await self.stragglers.ask(passed_over))
        return answers

    async def _verify(self, claims: Sequence[LeaseClaim]) -> dict[Claim, Renewal]:
        answers: dict[Claim, Renewal] = {}
        for start in range(0, len(claims), BATCH):
            batch = claims[start : start + BATCH]
            packet = self._backend.statements("verify", ids=", ".join(quote(claim.key) for claim in batch))
            try:
                rows, requests = await self._backend.ask(packet, urgent=True)
            except LockError as error:
                answers.update(dict.fromkeys(batch, error))
                continue
            found = {str(key): tuple(row) for key, *row in rows.rows}
            wanted = {str(owner): str(reason) for owner, reason in requests.rows}
            for claim in batch:
                self._sharing.request(claim, wanted.get(claim.owner))
                gone = verdict(claim.owner, found.get(claim.key), math.inf, 0.0)
                answers[claim] = Grant(0, 0, NEVER, demand=True) if gone is None else gone
        return answers

    def _alone(self, claim: LeaseClaim) -> str:
        ttl = round(claim.bid.ttl * 1_000_000)
        return self._backend.statements("renew_one", ttl=ttl, id=quote(claim.key), owner=quote(claim.owner))

    async def _together(self, batch: list[LeaseClaim], ttl: float) -> dict[LeaseClaim, Renewal | None]:
        """One statement for all; if it was not for all, a second one tells which. ``None`` for those that were passed over."""
        backend = self._backend
        clock, statements = backend.settings.clock, backend.statements
        ids = ", ".join(quote(claim.key) for claim in batch)
        packet = statements(
            "renew",
            ttl=round(ttl * 1_000_000),
            ids=ids,
            count=len(batch),
            owners=", ".join(quote(claim.owner) for claim in batch),
        )
        sent = clock()
        renewed, requests = await backend.ask(packet, urgent=True)
        wanted = {str(owner): str(reason) for owner, reason in requests.rows}
        for claim in batch:
            self._sharing.request(claim, wanted.get(claim.owner))
        if renewed.changed == len(batch):
            return dict.fromkeys(batch, Grant(0, 0, certain_until(sent, ttl), demand=True))
        sent = clock()
        [rows] = await backend.ask(statements("owned", ids=ids), urgent=True)
        found = {str(key): tuple(row) for key, *row in rows.rows}
        return {claim: verdict(claim.owner, found.get(claim.key), ttl, sent) for claim in batch}


def verdict(owner: str, row: tuple[Any, ...] | None, ttl: float, sent: float) -> Renewal | None:
    """What a row means for a hold of ``owner``; ``None`` if it is ours and was not prolonged.

    It says its owner, who was forced off it, and for how many µs it is held, and was asked for at ``sent``.
    """
    if row is None:
        return "revoked"
    now, forced, microseconds = row
    if now == owner and int(microseconds) > 0:
        return prolonged(int(microseconds), ttl, sent)
    return "force-released" if forced == owner else "revoked"
