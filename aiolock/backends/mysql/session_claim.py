"""The session mode: the lock is a user lock, GET_LOCK; fast, and gone with the session that has it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.holding import HoldingClaim, HoldingMode
from aiolock.backends.mysql.lease_claim import GRACE, Look, judge
from aiolock.backends.mysql.place import Place, Stand
from aiolock.backends.mysql.statements import quote
from aiolock.backends.mysql.turns import left
from aiolock.contract import Bid, Family, Grant, LockInfo, News, Notice, certain_until
from aiolock.errors import BackendError, BackendUnavailable, LockError

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["SessionClaim", "SessionMode"]

LOOK = 5.0
"""At most so many seconds between looks whether a turn came whose message was lost."""


KNOWN = 1024
"""Of how many locks the statements are remembered."""


class Words(NamedTuple):
    """The statements of somebody who waits."""

    queue_up: str
    pass_on: str
    put_back: str


class SessionMode(HoldingMode):
    """A user lock for each lock."""

    name = "session"

    def claim(self, bid: Bid) -> SessionClaim:
        """A new claim."""
        return SessionClaim(self, bid)

    def __init__(self, backend: MySQLBackend) -> None:
        super().__init__(backend)
        # A lock that goes from hand to hand is asked for thousands of times a second.
        self.lock = lru_cache(KNOWN)(self._lock)
        self.words = lru_cache(KNOWN)(self._words)

    def _lock(self, name: str, family: Family) -> str:
        """The user lock of a lock."""
        return f"aiolock:s:{self.backend.key(name, family)}"

    def _words(self, lock: str, label: str) -> Words:
        """The statements of somebody who waits for a user lock."""
        statements, quoted, who = self.backend.statements, quote(lock), label.encode().hex()
        return Words(
            statements("queue_up", lock=quoted, who=who),
            statements("pass_on", lock=quoted, who=who),
            statements("put_back", turnstile=quoted),
        )

    def proof(self, claims: Sequence[HoldingClaim]) -> str:
        """Ask for each by name: somebody may have made the session let go of them all."""
        names = (claim.lock for claim in claims if isinstance(claim, SessionClaim))
        held = ", ".join(f"IS_USED_LOCK({quote(name)}) <=> CONNECTION_ID()" for name in names)
        return f"SELECT CONCAT_WS(',', {held})"  # noqa: S608 - names are digests

    def proven(self, answers: list[Result], count: int) -> Sequence[bool]:  # noqa: ARG002 - one answer for each
        """One digit for each."""
        return [word == "1" for word in str(answers[-1].rows[0][0]).split(",")]

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """The session that has it, and those that wait."""
        lock = self.lock(name, family)
        waiting = f"SELECT IF(%GET_LOCK({quote(lock)}, 31536000)%"
        return await self.look(name, family, lock, waiting)

    async def user(self, lock: str) -> int:
        """The session that has a user lock; 0 if nobody has."""
        answers = await self.backend.ask(f"SELECT IFNULL(IS_USED_LOCK({quote(lock)}), 0)")
        return int(answers[0].rows[0][0])

    async def force_release(self, name: str, family: Family) -> bool:
        """End the session that has it; if that is one of ours, release it there instead."""
        lock = self.lock(name, family)
        user = await self.user(lock)
        if not user:
            return False
        ours = self.backend.sessions.find(user)
        claim = ours.locks.get(lock) if ours is not None else None
        if isinstance(claim, SessionClaim):
            self.backend.notices.put(Notice(News.LOST, claim, "force-released"))
            await claim.release()
            return True
        try:
            control = await self.backend.sessions.control()
            await control.run(
                self.backend.statements("kill_holder", turnstile=quote(lock), number=user),
                self.backend.settings.command_timeout,
            )
        except BackendUnavailable:
            raise
        except LockError:
            if await self.user(lock) == user:
                raise
        return True


class SessionClaim(HoldingClaim):
    """A user lock of one of our sessions, or the wish for it."""

    __slots__ = ("_mode", "_user", "releasing")
    lingers = True

    def __init__(self, mode: SessionMode, bid: Bid) -> None:
        super().__init__(mode, bid, mode.lock(bid.name, bid.kind.family))
        self._mode = mode
        self._user = -1
        self.releasing: Session | None = None
        """The session that waited for the lock and is giving it back."""

    async def _home(self, *, wait: bool) -> Session | None:
        backend, silence = self._backend, self._mode.silence(self.bid.ttl)
        if silence == backend.silence:
            return await backend.sessions.main()
        session = await backend.sessions.kept(silence)
        if session is None and not wait:
            raise BackendUnavailable(
                f"{backend!r}: holds of so many different ttls need more connections than it may have: "
                "raise connections="
            )
        return session

    async def attempt(self, wait: bool) -> Grant | None:
        """As said; the usual ways of a lock that goes from hand to hand are the short ones."""
        place = self._place
        if place is not None:
            if place.stand is Stand.TURN and (grant := self._turn_that_came(place)) is not None:
                return grant
        elif wait and (session := self._inherited()) is not None:
            self._place = self._line_up(session)
            return None
        return await super().attempt(wait)

    def _turn_that_came(self, place: Place) -> Grant | None:
        """The grant of a turn that came so soon that the time of the request is evidence enough."""
        session, now = place.session, self._backend.settings.clock()
        if (
            session is None
            or not session.alive
            or self._backend.clock_stands
            or certain_until(place.sent, self.bid.ttl) - now < self.bid.ttl / 2
        ):
            return None
        self._place = None
        self._asked = place.hand_over()
        session.locks[self.lock] = self
        return self._held(session, place.answers, place.sent)

    def _inherited(self) -> Session | None:
        """The session in which a claim of ours is about to give the lock back, if it was won by waiting: others wait.

        Our place in line is asked for by the statement that releases.
        """
        holder = self._backend.sessions.holder(self.lock)
        if not isinstance(holder, SessionClaim) or holder.leaving is None or holder.leaving.done():
            return None
        session = holder.releasing
        silence = self._mode.silence(self.bid.ttl)
        usual = session is not None and session.alive and session.lingering and session.silence == silence
        return session if usual else None

    async def release(self, keep: float = 0) -> None:
        """Give up the hold, or the place in line, whichever there is or may be."""
        session = self._asked
        usual = self._place is None and self._giving is None
        if self._over or not usual or session is None or not session.alive:
            await super().release(keep)
            return
        # One command of a session that is there: its own time-out is enough.
        self.leaving = leaving = asyncio.get_running_loop().create_future()
        if session.contended:
            self.releasing = session
        try:
            await self._release(keep)
        finally:
            self.releasing = None
            leaving.set_result(None)
        self._over = True

    async def _try_on(self, session: Session) -> Grant | None:
        await left(self._backend.sessions.holder(self.lock))
        # A session that has a user lock gets it again: another claim of ours must not count as us.
        mine = session.locks.setdefault(self.lock, self) is self
        if not mine:
            return None
        self._asked = session
        backend = self._backend
        packet = backend.statements("take", lock=quote(self.lock))
        if backend.clock_stands:
            packet = f"{packet}; {backend.statements('confirm')}"
        sent = backend.settings.clock()
        answers = await session.run(packet, backend.settings.command_timeout)
        if not int(answers[0].rows[0][0] or 0):
            session.locks.pop(self.lock, None)
            self._asked = None
            return None
        return self._held(session, answers, sent)

    # --- waiting

    def _line_up(self, session: Session | None = None) -> Place:
        backend = self._backend
        self._user = -1
        words = self._mode.words(self.lock, self.bid.label)
        return Place(
            backend.sessions,
            self.lock,
            words.queue_up,
            came=_came,
            put_back=words.put_back,
            timeout=backend.settings.command_timeout,
            silence=self._mode.silence(self.bid.ttl),
            session=session,
            instead="" if session is None else words.pass_on,
        )

    async def _wait(self, place: Place) -> None:
        usual = pause = min(LOOK, max(GRACE, self.bid.ttl / 3))
        while not await place.moved(pause):
            pause = min(usual, await self._check(place))

    async def _check(self, place: Place) -> float:
        """Give up a session that is not where it should be; in how many seconds to look again."""
        session = place.session
        if session is None:
            return GRACE
        try:
            user = await self._mode.user(self.lock)
        except BackendError:
            return GRACE
        look, pause = judge(math.inf, user, session.id, again=user == self._user)
        self._user = user
        if look is Look.ANEW:
            session.abort()
        return pause

    def _put_back(self) -> str:
        return self._mode.words(self.lock, self.bid.label).put_back


def _came(answers: list[Result]) -> bool:
    return bool(answers[0].rows[0][0])
