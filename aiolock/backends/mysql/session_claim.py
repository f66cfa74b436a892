"""The session mode: the lock is a user lock, GET_LOCK; fast, and gone with the session that has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.formats import announce
from aiolock.backends.mysql.holding import BLOCK, HoldingClaim, HoldingMode
from aiolock.backends.mysql.lease_claim import GRACE, Look, judge
from aiolock.backends.mysql.lookout import Lookout
from aiolock.backends.mysql.place import Place, Queue, Stand
from aiolock.backends.mysql.statements import quote
from aiolock.backends.mysql.turns import ALONE, left
from aiolock.contract import Bid, Claim, Family, Grant, LockInfo, News, Notice
from aiolock.delivery import Waking
from aiolock.errors import BackendError, BackendUnavailable, LockError

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["SessionClaim", "SessionMode"]

LOOK = 5.0
"""At most so many seconds between looks whether a turn came whose message was lost."""


KNOWN = 1024
"""Of how many locks the statements are remembered."""


_TURN = Stand.TURN
"""Looking a member up in its class costs 0.2 µs on Python 3.11."""


class SessionMode(HoldingMode):
    """A user lock for each lock."""

    name = "session"

    def claim(self, bid: Bid) -> SessionClaim:
        """A new claim."""
        return SessionClaim(self, bid)

    async def enter(self, session: Session, *, main: bool) -> None:  # noqa: ARG002 - each can have locks
        """Say our data format, and refuse if another client has another one."""
        await announce(self.backend, session)

    def __init__(self, backend: MySQLBackend) -> None:
        super().__init__(backend)
        # A lock that goes from hand to hand is asked for thousands of times a second.
        self.lock = lru_cache(KNOWN)(self._lock)
        self.queue = lru_cache(KNOWN)(self._queue)

    @cached_property
    def lookout(self) -> Lookout:
        """Who looks after those that are called when it is their turn."""
        return Lookout(self.backend.sessions)

    def _lock(self, name: str, family: Family) -> str:
        """The user lock of a lock."""
        return f"aiolock:s:{self.backend.key(name, family)}"

    def _queue(self, lock: str, label: str, ttl: float) -> Queue:
        """How to stand in line for a user lock, and how to give it back and stand in line again."""
        statements, quoted, who = self.backend.statements, quote(lock), label.encode().hex()
        return Queue(
            lock,
            statements("queue_up", lock=quoted, who=who),
            statements("put_back", turnstile=quoted),
            self.backend.settings.command_timeout,
            silence=self.silence(ttl),
            pass_on=statements("pass_on", lock=quoted, who=who),
        )

    def proof(self, claims: Sequence[HoldingClaim]) -> str:
        """Ask for each by name: somebody may have made the session let go of them all."""
        names = (claim.lock for claim in claims if isinstance(claim, SessionClaim))
        held = ", ".join(f"IS_USED_LOCK({quote(name)}) <=> CONNECTION_ID()" for name in names)
        return self.backend.statements("have", held=held)

    def proven(self, answers: list[Result], count: int) -> Sequence[bool]:  # noqa: ARG002 - one answer for each
        """One digit for each."""
        return [word == "1" for word in str(answers[-1].rows[0][0]).split(",")]

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """The session that has it, and those that wait."""
        lock = self.lock(name, family)
        await left(*self.backend.sessions.holders(lock))
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

    __slots__ = ("_mode", "_stood", "_user")

    def __init__(self, mode: SessionMode, bid: Bid) -> None:
        super().__init__(mode, bid, mode.lock(bid.name, bid.kind.family))
        self._mode = mode
        self._user = -1
        self._stood: Place | None = None
        """The place that our hold came from."""

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
        """As said."""
        place = self._place
        if place is not None and place.session is not None and place.session.alive:
            grant = self.take_pushed()
            if grant is not None:
                return grant
        return await super().attempt(wait)

    def listen(self, call: Callable[[], Waking | None]) -> bool:
        """Instead of a task that waits for :meth:`changed`."""
        place = self._place
        if place is None:
            return False
        due = place.sent + self._pause if place.sent else self._backend.settings.clock() + self._pause
        if not place.listen(call, self._check, due):
            return False
        self._mode.lookout.watch(due)
        return True

    def take_pushed(self) -> Grant | None:
        """The grant of a turn that came so soon that the time of the request is evidence enough.

        As :meth:`_held`, on the shortest way: a lock that goes from hand to hand waits for nothing else.
        """
        place = self._place
        if place is None or place.stand is not _TURN:
            return None
        session, bid, backend = place.session, self.bid, self._backend
        now, until, given = backend.settings.clock(), place.sent + bid.certain, place.answers[0].rows[0][0]
        if session is None or given < 0 or until - now < bid.ttl / 2 or backend.clock_stands:
            return None
        self._place = place.session = None
        self._stood = place
        self._asked = self.session = session
        session.locks[self.lock] = self
        count = 1
        if not bid.fair:
            count, self.demanded_at = BLOCK, now + ALONE
        return Grant(given * BLOCK, count, until, False)  # noqa: FBT003 - as above, on the shortest way

    def give_way(self) -> Claim | None:
        """In the session that waited for the lock: one that has others besides must not block."""
        session, lock = self._asked, self.lock
        if session is None or not session.contended or session.locks.get(lock) is not self:
            return None
        if self._giving is not None:
            return None
        place = self._stood
        if place is None:
            place = Place(self._backend.sessions, self._line, line_up=False)
        if not place.pass_on(session):
            return None
        self._over = True
        self._asked = self.session = None
        heir = SessionClaim(self._mode, self.bid)
        heir._place = place  # noqa: SLF001 - one of us
        return heir

    def _confirmed(self, answers: list[Result]) -> bool:
        return int(answers[-1].rows[0][0]) > 0

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
        answers = await backend.undisturbed(session, packet)
        if (given := int(answers[0].rows[0][0] or 0)) <= 0:
            session.locks.pop(self.lock, None)
            self._asked = None
            if given:
                raise self._mode.demoted()
            return None
        return self._held(session, answers, sent)

    # --- waiting

    def _line_up(self) -> Place:
        self._user = -1
        return Place(self._backend.sessions, self._line)

    @property
    def _line(self) -> Queue:
        return self._mode.queue(self.lock, self.bid.label, self.bid.ttl)

    @property
    def _pause(self) -> float:
        return min(LOOK, max(GRACE, self.bid.ttl / 3))

    async def _wait(self, place: Place) -> None:
        usual = pause = self._pause
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
        return self._backend.statements("release", lock=quote(self.lock))

    def _had(self, answers: list[Result]) -> bool:
        # Something between us and the server, or an administrator's procedure, may have made the session let go of it.
        return int(answers[-1].rows[0][0] or 0) == 1
