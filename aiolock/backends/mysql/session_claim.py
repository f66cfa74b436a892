"""The session mode: the lock is a user lock, GET_LOCK; fast, and gone with the session that has it."""

from __future__ import annotations

import asyncio
import math

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.holding import HoldingClaim, HoldingMode
from aiolock.backends.mysql.lease_claim import GRACE, RETRY, Look, judge
from aiolock.backends.mysql.place import Place, Stand
from aiolock.backends.mysql.statements import quote
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

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """The session that has it, and those that wait."""
        lock = self.lock(name, family)
        return await self.look(name, lock, self.backend.statements("line_up", turnstile=quote(lock), who="%"))

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

    __slots__ = ("_asked", "_mode", "_over", "_place", "_user", "lock")

    def __init__(self, mode: SessionMode, bid: Bid) -> None:
        super().__init__(bid)
        self._mode = mode
        self.lock = mode.lock(bid.name, bid.kind.family)
        self._asked: Session | None = None
        """The session that has the lock for us, or may have it."""
        self._place: Place | None = None
        self._user = -1
        self._over = False

    async def attempt(self, wait: bool) -> Grant | None:
        """Ask on the main session; or take the turn that came."""
        return await self._mode.backend.within(self._attempt(wait=wait))

    async def _attempt(self, *, wait: bool) -> Grant | None:
        place = self._place
        if place is not None:
            if place.stand is Stand.WAITING:
                return None
            if place.stand is Stand.TURN:
                return await self._in_turn(place)
            await place.leave()
            self._place = None
        grant = await self._directly()
        if grant is None and wait and (place is None or self._mode.backend.sessions.room):
            self._line_up()
        return grant

    async def _directly(self) -> Grant | None:
        sessions = self._mode.backend.sessions
        session = await sessions.main()
        try:
            return await self._try_on(session)
        except BackendUnavailable:
            if session.alive:
                raise
        return await self._try_on(await sessions.main())

    async def _try_on(self, session: Session) -> Grant | None:
        # A session that has a user lock gets it again: another claim of ours must not count as us.
        mine = session.locks.setdefault(self.lock, self) is self
        if not mine:
            return None
        self._asked = session
        backend = self._mode.backend
        packet = self._mode.silence(session, self.bid.ttl) + backend.statements("take", lock=quote(self.lock))
        sent = backend.settings.clock()
        answers = await session.run(packet, backend.settings.command_timeout)
        granted, microseconds = int(answers[-2].rows[0][0] or 0), int(answers[-1].rows[0][0])
        if not granted:
            session.locks.pop(self.lock, None)
            self._asked = None
            return None
        return self._held(session, microseconds, sent)

    async def _in_turn(self, place: Place) -> Grant | None:
        session = place.session
        if session is None or not session.alive:
            await place.leave()
            self._place = None
            return None
        backend = self._mode.backend
        # How old the grant is nobody knows; an answer of the session that has it is evidence.
        packet = self._mode.silence(session, self.bid.ttl) + backend.statements("confirm")
        sent = backend.settings.clock()
        answers = await session.run(packet, backend.settings.command_timeout)
        if self._place is not place:
            return None
        self._place = None
        self._asked = place.hand_over()
        session.locks[self.lock] = self
        return self._held(session, int(answers[-1].rows[0][0]), sent)

    def _held(self, session: Session, microseconds: int, sent: float) -> Grant | None:
        if not session.alive:
            return None
        self.session = session
        return self._mode.grant(self, microseconds, sent)

    # --- waiting

    def _line_up(self) -> None:
        backend = self._mode.backend
        self._user = -1
        self._place = Place(
            backend.sessions,
            self.lock,
            backend.statements("line_up", turnstile=quote(self.lock), who=self.bid.label.encode().hex()),
            came=lambda answers: answers[0].rows[0][0] == 1,
            put_back=backend.statements("put_back", turnstile=quote(self.lock)),
            timeout=backend.settings.command_timeout,
        )

    async def changed(self) -> None:
        """Wait for our turn."""
        place = self._place
        if place is None or place.stand in (Stand.NO_ROOM, Stand.GONE):
            await asyncio.sleep(self._mode.backend.random.uniform(*RETRY))
            return
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

    # --- leaving

    async def release(self, keep: float = 0) -> None:  # noqa: ARG002 - refused above: no such capability
        """Give up the user lock, or the place in line."""
        if self._over:
            return
        await self._mode.backend.within(self._release())
        self._over = True

    async def _release(self) -> None:
        session, backend = self._asked, self._mode.backend
        if session is not None and session.alive:
            packet = backend.statements("put_back", turnstile=quote(self.lock))
            try:
                await session.run(packet, backend.settings.command_timeout)
            except BackendUnavailable:
                # What ends the session ends the hold.
                if session.alive:
                    raise
            if session.locks.pop(self.lock, None) is not None and session.contended and session.alive:
                backend.sessions.give(session)
        self._asked = self.session = None
        if self._place is not None:
            await self._place.leave()
            self._place = None
