"""Session mode: a lock is a user lock (GET_LOCK) of a session; and the base of the row mode.

In both, a hold is a session's. A session that says nothing for its ``wait_timeout`` is ended by the server, with all that it
has. So every answer of the session is evidence that the hold goes on, counted from when the request was sent; and the
end of the session is pushed, because the connection ends.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from datetime import UTC, datetime

from aiolock.backends.mysql.connection import Answers, MySQLSession
from aiolock.backends.mysql.context import BLOCK, Context, hexed, quote
from aiolock.backends.mysql.protocol import Result
from aiolock.backends.mysql.queue import (
    GRACE,
    Blocking,
    PollAction,
    Position,
    QueuedClaim,
    in_queue,
    judge,
    left,
)
from aiolock.core.backend import Claim, Event, EventKind, Grant, Renewal, Request, expires_at
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, LockError
from aiolock.types import Family, Holder, LockInfo

__all__ = ["HoldingClaim", "HoldingMode", "SessionClaim", "SessionMode", "demoted", "silence_of", "user_lock"]

AGAIN = 0.05
"""Seconds between checks whether a session is there that is giving something back."""
POLL = 5.0
"""Seconds at most between polls for a turn whose message was lost."""


def silence_of(ttl: float) -> int:
    """Return the ``wait_timeout`` of a session with a hold of that ttl; the server counts whole seconds.

    Not shorter, because the hold is believed in for so long; not longer, because a stopped holder is succeeded then. So all
    holds of a session have the same.
    """
    return max(1, math.ceil(ttl))


def demoted(context: Context) -> BackendRefused:
    """Return the error of a server that may not write any more: another one is likely to give out locks by now."""
    return BackendRefused(
        f"{context.address}: the server has become read_only: locks of this mode are taken at the one that is written to"
    )


class HoldingClaim(QueuedClaim):
    """A claim whose hold is a session's."""

    __slots__ = ("_asked", "evidence", "lock", "session")

    def __init__(self, context: Context, request: Request, lock: str) -> None:
        super().__init__(context, request)
        self.lock = lock
        """The server's name of the lock."""
        self.evidence = "1"
        """The expression that is 1 while the session has it; being there is enough for a transaction."""
        self.session: MySQLSession | None = None
        """The session that has the lock for this claim."""
        self._asked: MySQLSession | None = None
        """The session that has it, or may have it."""

    @property
    def _silence(self) -> int:
        return silence_of(self.request.ttl)

    def _use(self, session: MySQLSession) -> None:
        """Record that the session may have the lock for this claim from now on."""
        self._asked, self._begun = session, None
        session.locks[self.lock] = self

    async def _in_turn(self, position: Position, session: MySQLSession) -> Grant | None:
        # The age of the grant is unknown; an answer of the session that has it is evidence.
        sent = self._context.clock()
        answers = await self._context.execute(self._confirm(), session)
        if self._position is not position:
            return None
        if not self._confirmed(answers):
            await self._leave_queue()
            return None
        return self._take_over(position, answers, sent)

    def _take_over(self, position: Position, answers: list[Result], sent: float) -> Grant | None:
        self._position = None
        session = position.hand_over()
        self._use(session)
        return self._held(session, answers, sent)

    @abstractmethod
    def _confirm(self) -> str:
        """Return the question for the session that has the turn; the last answer is the server's time in µs."""

    @abstractmethod
    def _confirmed(self, answers: list[Result]) -> bool:
        """Return whether the answers contain a lock."""

    def _held(self, session: MySQLSession, answers: list[Result], sent: float) -> Grant | None:
        """Return the grant whose time is the last of the answers."""
        if not session.alive:
            return None
        self.session = session
        token = int(answers[-1].rows[0][0]) * BLOCK
        return self._context.granted(self, token, 1 if self.request.fair else BLOCK, sent)

    # --- leaving

    async def _release(self, keep: float) -> bool | None:  # noqa: ARG002 - refused above: no such capability
        held = None if self._asked is None and self._begun is None else await self._give_back()
        self._asked = self.session = None
        await self._leave_queue()
        return held

    def _begin_release(self, keep: float) -> bool:  # noqa: ARG002 - as above
        session = self.session
        if session is None or session is not self._asked or not session.alive or self._begun is not None:
            return False
        self._begin(session)
        return True

    def _begin(self, session: MySQLSession) -> Answers:
        self._begun = session.begin(self._put_back(), lambda: self._given_back(session))
        return self._begun

    async def _give_back(self) -> bool | None:
        """Have the session let go of the lock; return whether it had it, if that is known.

        Once asked for, it is done for as long as the session lives, whatever becomes of the caller. Not twice: behind it
        another claim of this client may have queued up in the same session, and would lose the lock.
        """
        session, begun = self._asked, self._begun
        first = begun is None
        if begun is None:
            if session is None or not session.alive:
                return False
            begun = self._begin(session)
        if not begun.cancelled():
            try:
                return self._had(await begun)
            except BackendUnavailable:
                # What ends the session ends the hold.
                if first and session is not None and session.alive:
                    raise
        while session is not None and session.alive and self._asked is session:  # noqa: ASYNC110 - rare
            await asyncio.sleep(AGAIN)
        return None

    def _had(self, answers: list[Result]) -> bool:  # noqa: ARG002 - a transaction that is there has its row
        """Return whether the session had the lock, by its answers to the giving back."""
        return True

    @abstractmethod
    def _put_back(self) -> str:
        """Return the packet that gives the lock back."""

    def _given_back(self, session: MySQLSession) -> None:
        if self._asked is session:
            self._asked = self.session = None
        if session.locks.get(self.lock) is self:
            del session.locks[self.lock]
            if session.contended:
                self._context.sessions.give(session)


class HoldingMode(ABC):
    """Holds that end with their sessions."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def ended(self, session: MySQLSession) -> None:
        """Report the loss of all that the session had."""
        for claim in session.locks.values():
            if isinstance(claim, HoldingClaim) and claim.session is session:
                self._context.events.put(Event(EventKind.LOST, claim, "session"))

    def renewal_group(self, claim: Claim) -> Hashable:
        """Return the session that has the lock."""
        return claim.session if isinstance(claim, HoldingClaim) else None

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Ask a session in one statement which of its user locks it still has.

        Cancelling it ends the waiting; the session is kept alive by the statement all the same if it was sent.
        """
        held = [claim for claim in claims if isinstance(claim, HoldingClaim)]
        session = next((claim.session for claim in held if claim.session is not None), None)
        if session is None:
            return ["session"] * len(held)
        sent = self._context.clock()
        evidence = ", ".join(claim.evidence for claim in held)
        try:
            [found] = await session.run(self._context.statements("have", held=evidence), urgent=True)
        except LockError as error:
            return [error if session.alive else "session"] * len(held)
        flags, writable = found.rows[0]
        if not int(writable):
            raise demoted(self._context)
        return [
            Grant(0, 0, expires_at(sent, claim.request.ttl), demand=True) if flag == "1" else "revoked"
            for claim, flag in zip(held, str(flags).split(","), strict=True)
        ]

    # --- administration

    def _lock(self, name: str, family: Family) -> str:
        """Return the server's name of a lock."""
        return self._context.key(name, family)

    def _own(self, lock: str) -> HoldingClaim | None:
        """Return the claim of this client that has a lock."""
        holders = self._context.sessions.holders(lock)
        return next(
            (one for one in holders if isinstance(one, HoldingClaim) and one.session is not None), None
        )

    def _shown(self, claim: HoldingClaim | None, other: str) -> Holder:
        """Return a holder of which the server knows no more than that it is there."""
        request, ttl = claim and claim.request, self._context.settings.ttl
        label, left = (request.label, request.ttl) if request else (other, float(silence_of(ttl)))
        return Holder(label, 0, datetime.now(UTC), left)

    async def force_release(self, name: str, family: Family, token: int | None) -> bool:  # noqa: ARG002 - none is known
        """Release a hold of this client; of another client, end it if that can be done.

        Cancelling it ends the waiting: a hold of this client is released all the same, and the statement that ends
        that of another client is carried out if it was sent.
        """
        lock = self._lock(name, family)
        if (claim := self._own(lock)) is None:
            return await self._force(lock)
        self._context.events.put(Event(EventKind.LOST, claim, "force-released"))
        await claim.release()
        return True

    @abstractmethod
    async def _force(self, lock: str) -> bool:
        """End the hold of another client; return whether there was one."""


# --- the session mode


class SessionMode(HoldingMode):
    """A user lock for each lock."""

    def claim(self, request: Request) -> Claim:
        """Return a new claim of a mutex."""
        return SessionClaim(self._context, request, self._lock(request.name, request.kind.family))

    def _lock(self, name: str, family: Family) -> str:
        return user_lock(self._context, name, family)

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Return the session that has it, and those that wait; labels and tokens are not at the server.

        Cancelling it changes nothing.
        """
        context, lock = self._context, self._lock(name, family)
        await left(context, lock)
        packet = context.statements(
            "user",
            processlist=context.facts.processlist,
            lock=quote(lock),
            pattern=hexed(f"SELECT IF(%GET_LOCK({quote(lock)}, 31536000)%"),
        )
        holder, others = await context.execute(packet)
        holders = tuple(
            self._shown(
                self._own(lock) if context.sessions.find(number) else None,
                f"connection {number} of {user}@{host}",
            )
            for number, user, host in holder.rows
        )
        return LockInfo(name, holders, await in_queue(context, others.rows), family)

    async def _force(self, lock: str) -> bool:
        """End the session that has it."""
        context = self._context
        user = await _user(context, lock)
        if not user:
            return False
        try:
            control = await context.sessions.control()
            await control.run(context.statements("kill_holder", turnstile=quote(lock), number=user))
        except BackendUnavailable:
            raise
        except LockError:
            if await _user(context, lock) == user:
                raise
        return True


def user_lock(context: Context, name: str, family: Family) -> str:
    """Return the user lock of a lock."""
    return f"aiolock:s:{context.key(name, family)}"


async def _user(context: Context, lock: str) -> int:
    """Return the session that has a user lock; 0 if none has."""
    answers = await context.execute(f"SELECT IFNULL(IS_USED_LOCK({quote(lock)}), 0)")
    return int(answers[0].rows[0][0])


class SessionClaim(HoldingClaim):
    """A user lock of a session of this client, or a request for it."""

    __slots__ = ("_user",)

    def __init__(self, context: Context, request: Request, lock: str) -> None:
        super().__init__(context, request, lock)
        # By name: the session may have been made to let go of all its locks.
        self.evidence = f"IS_USED_LOCK({quote(lock)}) <=> CONNECTION_ID()"
        self._user = -1
        """The session that had the lock at the last poll; 0: none."""

    async def _home(self, *, wait: bool) -> MySQLSession | None:
        context = self._context
        if self._silence == silence_of(context.settings.ttl):
            return await context.sessions.main()
        session = await context.sessions.kept(self._silence)
        if session is None and not wait:
            raise BackendUnavailable(
                f"{context.address}: holds of so many different ttls need more connections than it may have: "
                "raise connections="
            )
        return session

    async def _try_on(self, session: MySQLSession) -> Grant | None:
        context = self._context
        await left(context, self.lock)
        # A session that has a user lock gets it again: another claim of this client must not count as this one.
        mine = session.locks.setdefault(self.lock, self) is self
        if not mine:
            return None
        self._use(session)
        packet = context.statements("take", lock=quote(self.lock))
        if context.facts.clock_stands:
            packet = f"{packet}; {context.statements('confirm')}"
        sent = context.clock()
        answers = await context.execute(packet, session)
        if (given := int(answers[0].rows[0][0] or 0)) <= 0:
            session.locks.pop(self.lock, None)
            self._asked = None
            if given:
                raise demoted(context)
            return None
        return self._held(session, answers, sent)

    async def _in_turn(self, position: Position, session: MySQLSession) -> Grant | None:
        """Take the turn; one that came soon after its request needs no confirmation by the server."""
        given, now, ttl = int(position.answers[0].rows[0][0]), self._context.clock(), self.request.ttl
        fresh = position.sent + self.request.valid_for - now >= ttl / 2
        if given > 0 and fresh and not self._context.facts.clock_stands:
            return self._take_over(position, position.answers, position.sent)
        return await super()._in_turn(position, session)

    def _confirm(self) -> str:
        return self._context.statements("confirm")

    def _confirmed(self, answers: list[Result]) -> bool:
        return int(answers[-1].rows[0][0]) > 0

    def _blocking(self) -> Blocking:
        self._user = -1
        statements, lock = self._context.statements, quote(self.lock)
        return Blocking(
            self.lock,
            statements("queue_up", lock=lock, who=self.request.label.encode().hex()),
            statements("put_back", turnstile=lock),
            silence=self._silence,
        )

    def _pause(self) -> float:
        return min(super()._pause(), POLL, max(GRACE, self.request.ttl / 3))

    async def _poll(self, position: Position) -> float:
        """Close a session that is not in the queue as it should be; return the seconds until the next poll."""
        session = position.session
        if session is None:
            return GRACE
        try:
            user = await self._context.within(_user(self._context, self.lock))
        except BackendError:
            return GRACE
        action, pause = judge(math.inf, user, session.id, again=user == self._user)
        self._user = user
        if action is PollAction.REQUEUE:
            session.abort()
        return min(pause, self._pause())

    def _put_back(self) -> str:
        return self._context.statements("release", lock=quote(self.lock))

    def _had(self, answers: list[Result]) -> bool:
        # A proxy, or an administrator's procedure, may have made the session let go of it.
        return int(answers[-1].rows[0][0] or 0) == 1
