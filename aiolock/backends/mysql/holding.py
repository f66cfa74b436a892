"""What the two modes have in common in which a hold is a session's: evidence, loss, tokens, looking.

A session that says nothing for its ``wait_timeout`` is ended by the server, with all that it has. So every answer of
the session is evidence that the hold goes on, counted from when the question was sent; and the end of the session is
pushed, because the connection ends.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.looking import waiters
from aiolock.backends.mysql.statements import quote
from aiolock.contract import (
    Bid,
    Claim,
    Family,
    Grant,
    Holder,
    LockInfo,
    News,
    Notice,
    Renewal,
    certain_until,
)
from aiolock.errors import LockError

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["BLOCK", "HoldingClaim", "HoldingMode", "first_token"]

BLOCK = 64
"""How many tokens there are for each microsecond of the server's clock; a grant that may be passed on has them all."""


def first_token(microseconds: int) -> int:
    """The first token of a grant that the server made at that time of its clock, in µs since 1970."""
    return microseconds * BLOCK


class HoldingClaim(Claim):
    """A claim whose hold is a session's."""

    __slots__ = ("session",)

    def __init__(self, bid: Bid) -> None:
        super().__init__(bid)
        self.session: Session | None = None
        """The session that has the lock for us."""


class HoldingMode(ABC):
    """Holds end with their sessions."""

    name: str

    def __init__(self, backend: MySQLBackend) -> None:
        self.backend = backend

    @abstractmethod
    def claim(self, bid: Bid) -> Claim:
        """A new claim."""

    def ended(self, session: Session) -> None:
        """All that the session had is gone."""
        for claim in session.locks.values():
            if isinstance(claim, HoldingClaim) and claim.session is session:
                self.backend.notices.put(Notice(News.LOST, claim, "session"))

    def silence(self, session: Session, ttl: float) -> str:
        """What makes the server wait for a session at least as long as a hold on it may be silent."""
        longest = max(math.ceil(ttl), self.backend.silence)
        if session.silence >= longest:
            return ""
        session.silence = longest
        return f"SET SESSION wait_timeout={longest}; "

    def grant(self, claim: Claim, microseconds: int, sent: float) -> Grant:
        """The grant that a session's answer to a question sent at ``sent`` proves."""
        count = 1 if claim.bid.fair else BLOCK
        until = certain_until(sent, claim.bid.ttl)
        # Nobody tells a holder that others wait, so it is always assumed: local passing stays bounded.
        return Grant(first_token(microseconds), count, until, demand=True)

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """One ping for each session, for all that it has."""
        sessions = {claim.session for claim in claims if isinstance(claim, HoldingClaim) and claim.session}
        sent = self.backend.settings.clock()
        pings: dict[Session, asyncio.Future[LockError | None]] = {
            session: asyncio.ensure_future(self._ping(session)) for session in sessions
        }
        if pings:
            await asyncio.wait(pings.values())
        return [self._renewal(claim, pings, sent) for claim in claims]

    async def _ping(self, session: Session) -> LockError | None:
        try:
            await session.run(self.backend.statements("ping"), self.backend.settings.command_timeout)
        except LockError as error:
            return error
        return None

    def _renewal(
        self, claim: Claim, pings: dict[Session, asyncio.Future[LockError | None]], sent: float
    ) -> Renewal:
        session = claim.session if isinstance(claim, HoldingClaim) else None
        if session is None or not session.alive:
            return "session"
        error = pings[session].result()
        return error if error is not None else Grant(0, 0, certain_until(sent, claim.bid.ttl), demand=True)

    # --- looking

    async def look(self, name: str, lock: str, waiting: str) -> LockInfo:
        """The session that has a user lock, and the statements that wait; labels and tokens are not at the server."""
        packet = self.backend.statements("user", lock=quote(lock), pattern=quote(waiting))
        holder, others = await self.backend.ask(packet)
        return LockInfo(name, tuple(self._holder(lock, *row) for row in holder.rows), waiters(others.rows))

    def _holder(self, lock: str, number: int, user: str, host: str) -> Holder:
        session = self.backend.sessions.find(number)
        claim = session.locks.get(lock) if session is not None else None
        if isinstance(claim, HoldingClaim):
            return self.shown(claim.bid.label, claim.bid.ttl)
        return self.shown(f"connection {number} of {user}@{host}", float(self.backend.silence))

    @staticmethod
    def shown(label: str, ttl: float) -> Holder:
        """A holder of whom the server knows no more."""
        return Holder(label, 0, datetime.now(UTC), ttl)

    @abstractmethod
    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Who holds and who waits, as far as the server knows."""

    @abstractmethod
    async def force_release(self, name: str, family: Family) -> bool:
        """End the session of the holder."""
