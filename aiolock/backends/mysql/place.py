"""A place in line: one blocked statement on a session of its own, and how it is given up from every state.

Getting a session takes a task of the client; the statement itself has none: its end is told by the session, and whoever
waits is woken at once. Giving up ends the statement by KILL QUERY
and awaits both its answer and the statement's, so the session stays in step and can be used again; a turn that came
in the same moment is put back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import NamedTuple

from aiolock.backends.mysql.command import Command
from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.failures import INTERRUPTED, NOT_NOW, code
from aiolock.backends.mysql.sessions import Sessions
from aiolock.delivery import Waking, wake_now
from aiolock.errors import BackendError, LockError

__all__ = ["Place", "Queue", "Stand"]

KILL_AGAIN = 0.2
"""Seconds after which a statement that did not end is killed once more."""
SOON = 0.01
"""Seconds in which the server answers what was sent before it."""
GIVE_UP = 2.0
"""Seconds after which its session is closed instead."""


class Stand(Enum):
    """How a place in line stands."""

    WAITING = "blocked at the server, or on the way there"
    TURN = "first in line"
    NO_ROOM = "no session was to be had"
    GONE = "the session was lost"


_WAITING, _TURN = Stand.WAITING, Stand.TURN
"""Looking a member up in its class costs 0.2 µs on Python 3.11."""


class Queue(NamedTuple):
    """What is sent to stand in line for one lock, and to leave it."""

    key: str
    """What the session has when it is its turn, as the server calls it."""
    statement: str
    """What blocks until then."""
    put_back: str
    """What gives it back, whether we had it or not."""
    timeout: float
    """How many seconds everything may take that does not block."""
    tells: bool = True
    """Whether the first value of its answer says if it is our turn; else it is when it was answered."""
    prelude: str = ""
    """What is sent before the statement, each time; in a packet of its own, because when KILL QUERY comes between two
    statements of one packet, the server sends no answer for the second."""
    silence: int = 0
    """After how many seconds the server is to end a session that has its turn and says nothing; 0: as it is."""
    limit: float | None = None
    """After how many seconds the statement must have ended by itself, if it does."""
    pass_on: str = ""
    """What gives it back and blocks until it is our turn again, where there is such a statement."""


class Place:
    """A statement that blocks until it is our turn."""

    __slots__ = (
        *("_asked", "_behind", "_call", "_passing", "_queue", "_sessions", "_starter", "_waiting"),
        *("answers", "due", "leaving", "look", "sent", "session", "stand"),
    )

    def __init__(self, sessions: Sessions, queue: Queue, *, line_up: bool = True) -> None:
        """In line on a session that is to be found, or nowhere yet."""
        self._sessions = sessions
        self._queue = queue
        self._behind = False
        """Whether we came by passing it on: nobody knows whether that was done if the statement is ended."""
        self._call: Callable[[], Waking | None] | None = None
        self.look: Callable[[Place], Awaitable[float]] | None = None
        """What finds out whether our turn has come without a word, and in how many seconds to look again."""
        self.due = 0.0
        """When that is to be called next, by the local clock."""
        self.leaving: asyncio.Task[None] | None = None
        self.session: Session | None = None
        self.stand = Stand.WAITING
        self.sent = 0.0
        """When, by the local clock, the statement was sent that came to its end."""
        self.answers: list[Result] = []
        """What it said."""
        self._waiting: list[asyncio.Future[bool]] = []
        """Who waits for a change of the stand, or for the end of the statement."""
        self._asked = False
        self._passing: Command | None = None
        """What is sent to pass it on, again and again."""
        self._starter: asyncio.Task[None] | None = None
        if line_up:
            self._starter = sessions.spawn(self._start(), "aiolock-mysql-wait")

    def pass_on(self, session: Session) -> bool:
        """Give it back, and stand in line anew, on the session that has it, if that can be sent at once; whether it can.

        Others wait for this: what we note of it comes behind the sending.
        """
        queue, command = self._queue, self._passing
        if command is None:
            command = self._passing = Command(queue.pass_on, math.inf)
            command.blocks = True
        command.heard = self._heard
        sent = self._sessions.clock()
        if not session.at_once(command):
            return False
        self.sent = sent
        self.stand = _WAITING
        self.session = session
        self._asked = self._behind = True
        session.locks[queue.key] = self
        return True

    async def _start(self) -> None:
        queue = self._queue
        try:
            session = self.session or await self._sessions.take()
            if session is None:
                self._become(Stand.NO_ROOM)
                return
            self.session = session
            # From the moment that it may have the turn.
            session.locks[queue.key] = self
            if self._behind:
                # It was ended somewhere: the lock of before may still be there.
                self._behind = False
                await session.run(queue.put_back, queue.timeout)
            if queue.prelude or queue.silence not in (0, session.silence):
                await session.run(queue.prelude or "DO 0", queue.timeout, silence=queue.silence)
        except LockError as error:
            if self.session is not None and self.session.alive and _interrupted(error):
                self._again()
            else:
                # Whoever waits asks again, and hears it then if it is still so.
                self._become(Stand.NO_ROOM if self.session is None else Stand.GONE)
        else:
            if self.leaving is None:
                limit = queue.limit
                self._send(session, Command(queue.statement, math.inf if limit is None else limit))
            else:
                self._become(Stand.GONE)

    def _send(self, session: Session, command: Command) -> None:
        command.heard, command.blocks = self._heard, True
        self._asked = True
        self.sent = self._sessions.clock()
        session.line_up(command)

    def _heard(self, outcome: list[Result] | LockError) -> None:
        """The statement has ended. Called by the session, so that nobody has to wake up in between."""
        self._asked = False
        if not isinstance(outcome, LockError):
            if not self._queue.tells or outcome[0].rows[0][0]:
                self.answers = outcome
                self._become(_TURN)
            else:
                self._again()
            return
        session = self.session
        if session is not None and session.alive and _interrupted(outcome):
            self._again()
        else:
            self._become(Stand.GONE)

    def _again(self) -> None:
        if self.leaving is None:
            self._starter = self._sessions.spawn(self._start(), "aiolock-mysql-wait")
        else:
            self._become(Stand.GONE)

    def _become(self, stand: Stand) -> None:
        self.stand = stand
        if self._waiting:
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(True)
        call = self._call
        if call is not None:
            self._call = self.look = None
            if (waking := call()) is not None:
                wake_now(waking)

    def listen(
        self, call: Callable[[], Waking | None], look: Callable[[Place], Awaitable[float]], due: float
    ) -> bool:
        """Have ``call`` called when it does not wait any more; not if that is so already, nor when it is left before.

        From ``due`` on, by the local clock, somebody may call ``look``.
        """
        if self.stand is not _WAITING:
            return False
        self._call, self.look, self.due = call, look, due
        return True

    async def moved(self, timeout: float) -> bool:
        """Wait until it does not wait any more, at most ``timeout`` seconds; whether that is so."""
        if self.stand is not Stand.WAITING:
            return True
        return await self._move(timeout)

    async def _move(self, timeout: float) -> bool:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(waiter)
        timer = None if timeout == math.inf else loop.call_later(timeout, _expire, waiter)
        try:
            return await waiter
        finally:
            self._waiting.remove(waiter)
            if timer is not None:
                timer.cancel()

    @property
    def unanswered(self) -> bool:
        """Whether the statement is on its way, or blocked."""
        return self._asked

    def hand_over(self) -> Session:
        """The session with the turn, to whoever keeps it; this place is over."""
        session = self.session
        assert session is not None  # noqa: S101 - there is a turn only on a session
        self.session = None
        return session

    async def leave(self) -> None:
        """Give it up; ends in bounded time. Cancelling it stops the waiting, not the leaving."""
        await asyncio.shield(self.begin_leave())

    def begin_leave(self) -> asyncio.Task[None]:
        """Begin to give it up; the task that does it."""
        self._call = self.look = None
        if self.leaving is None:
            self.leaving = self._sessions.spawn(self._leave(), "aiolock-mysql-leave")
        return self.leaving

    async def _leave(self) -> None:
        if self._starter is not None and not self._starter.done():
            if self.session is None:
                self._starter.cancel()
            await asyncio.wait([self._starter])
        session = self.session
        if session is None:
            return
        if self.unanswered:
            await self._end_statement(session)
        self.session = None
        if session.alive:
            # In every case: a statement that was killed may have got its lock in the same moment.
            try:
                await session.run(self._queue.put_back, self._queue.timeout)
            except BackendError:
                session.abort()
        session.locks.pop(self._queue.key, None)
        self._sessions.give(session)

    async def _end_statement(self, session: Session) -> None:
        give_up = self._sessions.clock() + GIVE_UP
        while self.unanswered:
            if self._sessions.clock() > give_up:
                session.abort()
                return
            # What is sent before it is not to be hit.
            if session.blocked and not await self._killed(session):
                # Nobody to ask; the server ends a wait whose client is gone within a second.
                session.abort()
                return
            if self.unanswered:
                await self._move(KILL_AGAIN if session.blocked else SOON)

    async def _killed(self, session: Session) -> bool:
        """Whether KILL QUERY was sent, if it is still needed when the control session is there."""
        try:
            control = await self._sessions.control()
            if session.blocked:
                await control.run(f"KILL QUERY {session.id}", self._queue.timeout)
        except LockError:
            return False
        return True


def _interrupted(error: LockError) -> bool:
    return code(error.__cause__) in INTERRUPTED | NOT_NOW


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
