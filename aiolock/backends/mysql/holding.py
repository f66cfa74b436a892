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
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.looking import in_line
from aiolock.backends.mysql.place import Place
from aiolock.backends.mysql.statements import hexed, quote
from aiolock.backends.mysql.turns import TurnClaim
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
from aiolock.errors import BackendRefused, BackendUnavailable, LockError

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["BLOCK", "HoldingClaim", "HoldingMode", "first_token"]

BATCH = 500
"""How many locks one question is about."""
AGAIN = 0.05
"""Seconds between looks whether a session is there that is giving something back."""
BLOCK = 64
"""How many tokens there are for each microsecond of the server's clock; a grant that may be passed on has them all."""


def first_token(microseconds: int) -> int:
    """The first token of a grant that the server made at that time of its clock, in µs since 1970."""
    return microseconds * BLOCK


class HoldingClaim(TurnClaim):
    """A claim whose hold is a session's."""

    __slots__ = ("_asked", "_giving", "_holding", "lock", "session")

    def __init__(self, mode: HoldingMode, bid: Bid, lock: str) -> None:
        super().__init__(mode.backend, bid)
        self._holding = mode
        self.lock = lock
        """What the session has, as the server calls it."""
        self.session: Session | None = None
        """The session that has the lock for us."""
        self._asked: Session | None = None
        """The session that has it, or may have it."""
        self._giving: tuple[Session, asyncio.Future[None]] | None = None
        """The session that was asked to give it back, and what is done when it has."""

    async def _in_turn(self, place: Place, session: Session) -> Grant | None:
        backend = self._backend
        # How old the grant is nobody knows; an answer of the session that has it is evidence.
        sent = backend.settings.clock()
        answers = await backend.undisturbed(session, self._confirm())
        if self._place is not place:
            return None
        if not self._confirmed(answers):
            await self._leave_place()
            return None
        self._place = None
        self._asked = place.hand_over()
        session.locks[self.lock] = self
        return self._held(session, answers, sent)

    def _confirm(self) -> str:
        """What to ask the session that has the turn; the last answer is the time."""
        return self._backend.statements("confirm")

    def _confirmed(self, answers: list[Result]) -> bool:  # noqa: ARG002 - the turn was the lock
        """Whether its answers say that there is a lock."""
        return True

    def _held(self, session: Session, answers: list[Result], sent: float) -> Grant | None:
        """The grant whose time is the last of the answers."""
        if not session.alive:
            return None
        self.session = session
        return self._holding.grant(self, int(answers[-1].rows[0][0]), sent)

    async def _release(self, keep: float) -> bool | None:  # noqa: ARG002 - refused above: no such capability
        held: bool | None = None
        answers = await self._answers()
        session = self._asked
        if answers is not None:
            held = self._had(answers)
        elif session is not None and session.alive:
            try:
                held = await self._give_back(session)
            except BackendUnavailable:
                # What ends the session ends the hold.
                if session.alive:
                    raise
        elif session is not None:
            held = False
        self._asked = self.session = None
        await self._leave_place()
        return held

    def _begin_release(self, keep: float) -> bool:  # noqa: ARG002 - as above
        session = self.session
        if session is None or session is not self._asked or not session.alive or self._giving is not None:
            return False
        self._giving = (session, asyncio.get_running_loop().create_future())
        timeout = self._backend.settings.command_timeout
        self._begun = session.begin(self._put_back(), timeout, lambda: self._given_back(session))
        return True

    async def _give_back(self, session: Session) -> bool | None:
        """Have the session let go of the lock; it may be used for others then. Whether it had it, if that is known.

        Once asked for, it is done for as long as the session lives, whatever becomes of the caller. Not twice: behind it
        somebody else of ours may have lined up in the same session, and would lose what it got.
        """
        if self._giving is None or self._giving[0] is not session:
            self._giving = (session, asyncio.get_running_loop().create_future())
            answers = await session.run(
                self._put_back(),
                self._backend.settings.command_timeout,
                then=lambda: self._given_back(session),
            )
            return self._had(answers)
        giving = self._giving[1]
        while session.alive and not giving.done():
            await asyncio.wait([giving], timeout=AGAIN)
        return None

    def _had(self, answers: list[Result]) -> bool:  # noqa: ARG002 - a session that is there has what it took
        """Whether the session had the lock, by its answers to the giving back."""
        return True

    @abstractmethod
    def _put_back(self) -> str:
        """The packet for that."""

    def _given_back(self, session: Session) -> None:
        if self._giving is not None and self._giving[0] is session:
            self._giving[1].set_result(None)
            self._giving = None
        if self._asked is session:
            self._asked = self.session = None
        if session.locks.get(self.lock) is self:
            del session.locks[self.lock]
            if session.contended:
                self._backend.sessions.give(session)


class HoldingMode(ABC):
    """Holds end with their sessions."""

    name: str

    def __init__(self, backend: MySQLBackend) -> None:
        self.backend = backend

    @abstractmethod
    def claim(self, bid: Bid) -> Claim:
        """A new claim."""

    @abstractmethod
    async def enter(self, session: Session, *, main: bool) -> None:
        """Raise :class:`UnsafeBackend` if clients of another data format are there; the first on a session that can have locks."""

    def ended(self, session: Session) -> None:
        """All that the session had is gone."""
        for claim in session.locks.values():
            if isinstance(claim, HoldingClaim) and claim.session is session:
                self.backend.notices.put(Notice(News.LOST, claim, "session"))

    @staticmethod
    def silence(ttl: float) -> int:
        """After how many seconds without a word the server is to end a session with a hold of that ttl; it counts whole
        seconds.

        Not earlier, because the hold is believed in for so long; not later, because a stopped holder is succeeded then.
        So all holds of a session have the same.
        """
        return max(1, math.ceil(ttl))

    def grant(self, claim: Claim, microseconds: int, sent: float) -> Grant:
        """The grant that a session's answer to a question sent at ``sent`` proves."""
        count = 1 if claim.bid.fair else BLOCK
        return self.backend.granted(claim, first_token(microseconds), count, sent)

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """One question for each session, about all that it has."""
        by_session: dict[Session, list[HoldingClaim]] = {}
        for claim in claims:
            if isinstance(claim, HoldingClaim) and claim.session is not None:
                by_session.setdefault(claim.session, []).append(claim)
        asked = {
            session: asyncio.ensure_future(self._renew(session, held)) for session, held in by_session.items()
        }
        if asked:
            await asyncio.wait(asked.values())
        answers: dict[Claim, Renewal] = {}
        for one in asked.values():
            answers.update(one.result())
        return [answers.get(claim, "session") for claim in claims]

    async def _renew(self, session: Session, claims: list[HoldingClaim]) -> dict[Claim, Renewal]:
        sent = self.backend.settings.clock()
        answers: dict[Claim, Renewal] = {}
        for start in range(0, len(claims), BATCH):
            batch = claims[start : start + BATCH]
            try:
                proof = await session.run(
                    self.proof(batch), self.backend.settings.command_timeout, urgent=True
                )
                if not int(proof[-1].rows[0][-1]):
                    raise self.demoted()
            except LockError as error:
                answers.update(dict.fromkeys(batch, error if session.alive else "session"))
                continue
            for claim, there in zip(batch, self.proven(proof, len(batch)), strict=True):
                grant = Grant(0, 0, certain_until(sent, claim.bid.ttl), demand=True)
                answers[claim] = grant if there else "revoked"
        return answers

    def proof(self, claims: Sequence[HoldingClaim]) -> str:  # noqa: ARG002 - a transaction that goes on is proof enough
        """What to ask a session so that its answer proves that it has the locks of ``claims``; at last, whether the server
        may write."""
        return self.backend.statements("writable")

    def demoted(self) -> BackendRefused:
        """The server may not write any more: another one is likely to give out locks by now."""
        return BackendRefused(
            f"{self.backend!r}: the server has become read_only: locks of this mode are taken at the one that is written to"
        )

    def proven(self, answers: list[Result], count: int) -> Sequence[bool]:  # noqa: ARG002 - see above
        """Which of ``count`` locks an answer to that proves."""
        return [True] * count

    # --- looking

    async def look(self, name: str, family: Family, lock: str, waiting: str) -> LockInfo:
        """The session that has a user lock, and the statements that wait; labels and tokens are not at the server."""
        words = {"processlist": self.backend.processlist, "lock": quote(lock), "pattern": hexed(waiting)}
        holder, others = await self.backend.ask(self.backend.statements("user", **words))
        holders = tuple(self._holder(lock, *row) for row in holder.rows)
        return LockInfo(name, holders, await in_line(self.backend, others.rows), family)

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
