"""The session mode: the lock is a user lock, GET_LOCK; fast, and gone with the session that has it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.holding import HoldingClaim, HoldingMode
from aiolock.backends.mysql.lease_claim import GRACE, Look, judge
from aiolock.backends.mysql.place import Place, Stand
from aiolock.backends.mysql.statements import quote
from aiolock.backends.mysql.turns import left
from aiolock.contract import Bid, Family, Grant, LockInfo, News, Notice
from aiolock.errors import BackendError, BackendUnavailable, LockError

__all__ = ["SessionClaim", "SessionMode"]

LOOK = 5.0
"""At most so many seconds between looks whether a turn came whose message was lost."""


class SessionMode(HoldingMode):
    """A user lock for each lock."""

    name = "session"

    def claim(self, bid: Bid) -> SessionClaim:
        """A new claim."""
        return SessionClaim(self, bid)

    def lock(self, name: str, family: Family) -> str:
        """The user lock of a lock."""
        return f"aiolock:s:{self.backend.key(name, family)}"

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
        waiting = self.backend.statements("line_up", turnstile=quote(lock), who="%")
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

    __slots__ = ("_mode", "_user")

    def __init__(self, mode: SessionMode, bid: Bid) -> None:
        super().__init__(mode, bid, mode.lock(bid.name, bid.kind.family))
        self._mode = mode
        self._user = -1

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

    async def _try_on(self, session: Session) -> Grant | None:
        await left(self._backend.sessions.holder(self.lock))
        # A session that has a user lock gets it again: another claim of ours must not count as us.
        mine = session.locks.setdefault(self.lock, self) is self
        if not mine:
            return None
        self._asked = session
        backend = self._backend
        packet = backend.statements("take", lock=quote(self.lock))
        sent = backend.settings.clock()
        answers = await session.run(packet, backend.settings.command_timeout)
        if not int(answers[-2].rows[0][0] or 0):
            session.locks.pop(self.lock, None)
            self._asked = None
            return None
        return self._held(session, answers, sent)

    # --- waiting

    def _line_up(self) -> Place:
        backend = self._backend
        self._user = -1
        return Place(
            backend.sessions,
            self.lock,
            backend.statements("line_up", turnstile=quote(self.lock), who=self.bid.label.encode().hex()),
            came=lambda answers: answers[0].rows[0][0] == 1,
            put_back=backend.statements("put_back", turnstile=quote(self.lock)),
            timeout=backend.settings.command_timeout,
            silence=self._mode.silence(self.bid.ttl),
        )

    async def _wait(self, place: Place) -> None:
        usual = pause = min(LOOK, max(GRACE, self.bid.ttl / 3))
        while place.stand is Stand.WAITING:
            try:
                async with asyncio.timeout(pause):
                    await place.event.wait()
            except TimeoutError:
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
        return self._backend.statements("put_back", turnstile=quote(self.lock))
