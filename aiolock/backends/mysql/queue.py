"""Wait in the server's queue for a lock: a blocking statement on a session of its own, and the claims that use one."""

from __future__ import annotations

import asyncio
import logging
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from aiolock.backends.mysql.connection import Answers, MySQLSession
from aiolock.backends.mysql.context import RETRY, Context
from aiolock.backends.mysql.errors import DENIED, INTERRUPTED, NOT_NOW, code
from aiolock.backends.mysql.protocol import Result
from aiolock.core.backend import Claim, Grant, Release, Request
from aiolock.core.inbox import Inbox, WakeReason
from aiolock.core.logs import Log, get_logger, log_change
from aiolock.core.tasks import settle
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, LockError
from aiolock.types import Waiting

__all__ = [
    "GRACE",
    "MOMENT",
    "Blocking",
    "PollAction",
    "Position",
    "PositionState",
    "QueuedClaim",
    "in_queue",
    "judge",
    "left",
]

log: Log = get_logger("aiolock.claim")

SOON = 0.01
"""Seconds in which the server answers the commands before the statement."""
GIVE_UP = 2.0
"""Seconds after which the session of such a statement is closed."""

# --- waiters in the server's list of sessions


async def in_queue(context: Context, rows: Sequence[Sequence[Any]]) -> tuple[Waiting, ...]:
    """Return the statements in a list of processes as waiters, in the order of their arrival.

    A row begins with ID, USER, HOST, DB, COMMAND, TIME, STATE, INFO; on MariaDB TIME_MS follows. The list of a MySQL counts
    whole seconds; the times of arrival are asked for, which an account may see that may SELECT from `performance_schema`.
    Else those with the same time are in the order of their connections. Cancelling it changes nothing.
    """
    began: Mapping[int, int] = {}
    if len(rows) > 1 and not context.facts.fine_times:
        sessions = ", ".join(str(int(row[0])) for row in rows)
        try:
            [found] = await context.execute(context.statements("arrivals", sessions=sessions))
            began = {int(number): int(time) for number, time in found.rows if time is not None}
        except BackendRefused as error:
            if code(error.__cause__) not in DENIED:
                raise
    if all(int(row[0]) in began for row in rows):
        rows = sorted(rows, key=lambda row: began[int(row[0])])
    else:
        rows = sorted(rows, key=_arrival)
    return tuple(Waiting(_label(row[7])) for row in rows)


def _arrival(row: Sequence[Any]) -> tuple[float, int]:
    # MySQL has the name of an engine there.
    fine = row[8] if len(row) > 8 and not isinstance(row[8], str) else None
    return -float(row[5] * 1000 if fine is None else fine), int(row[0])


def _label(statement: str) -> str:
    label = statement.rpartition("/*")[2].removesuffix("*/")
    try:
        return bytes.fromhex(label).decode()
    except ValueError:
        return "?"


# --- polls of a position

GRACE = 0.5
"""Seconds for which a row is free before a claim without the turnstile may take it."""
MOMENT = 0.2
"""Seconds for which a session has the turnstile of such a row before it is ended."""
LONGEST_POLL = 10.0
"""Most seconds between polls of a row: its deadline is nearer than it seemed once the server's clock is put right."""


class PollAction(Enum):
    """The action after a poll of a lock for which a claim is in the queue."""

    WAIT = "the lock is held"
    KILL = "a session has the turnstile and does not use it"
    REQUEUE = "the position is lost, and the session does not report it"


def judge(remaining: float, user: int, mine: int, *, again: bool) -> tuple[PollAction, float]:
    """Decide about a row that is held for ``remaining`` seconds and whose turnstile session ``user`` has; and when to poll
    next, in seconds.

    ``again``: the last poll saw the same user. A holder that is well has the row; a grantee on its way to it needs a
    moment only, as does the answer to a turn of this session.
    """
    if user in (0, mine):
        return (PollAction.REQUEUE if again else PollAction.WAIT), GRACE
    if remaining > 0:
        return PollAction.WAIT, min(remaining, LONGEST_POLL) + GRACE
    if remaining > -GRACE:
        return PollAction.WAIT, GRACE
    # Several in the queue may be dead, and get the turn one after the other.
    return (PollAction.KILL if again else PollAction.WAIT), MOMENT


# --- positions


class PositionState(Enum):
    """The state of a position in the queue."""

    WAITING = "blocked at the server, or on the way there"
    TURN = "first in the queue"
    NO_ROOM = "no session was to be had"
    GONE = "the session was lost"


class Blocking(NamedTuple):
    """The statements by which a session queues up for one lock, and leaves the queue."""

    key: str
    """The server's name of the lock that the session has when it is its turn."""
    statement: str
    """Blocks until then."""
    put_back: str
    """Gives the lock back, whether the session had it or not."""
    answers_turn: bool = True
    """The first value of the answer is true if it is its turn; else it is when the statement was answered."""
    prelude: str = ""
    """Sent before the statement, each time; in a packet of its own, because when KILL QUERY comes between two
    statements of one packet, the server sends no answer for the second."""
    silence: int = 0
    """The ``wait_timeout`` of the session, in seconds; 0: as it is."""
    limit: float | None = None
    """Seconds after which the statement must have ended by itself, if it does."""


class Position:
    """A position in the queue: a statement that blocks on a session of its own until it is its turn.

    Giving it up ends the statement by KILL QUERY and awaits both its answer and the statement's, so that the session stays
    in step and can be used again; a turn that came in the same moment is put back.
    """

    __slots__ = (
        *("_blocking", "_context", "_inbox", "_name", "_task"),
        *("answers", "leaving", "sent", "session", "state"),
    )

    def __init__(self, context: Context, blocking: Blocking, inbox: Inbox[Grant], name: str) -> None:
        """Queue up for the lock ``name``; the inbox is woken when the state changes."""
        self._context = context
        self._name = name
        self._blocking = blocking
        self._inbox = inbox
        self.leaving: asyncio.Task[None] | None = None
        self.session: MySQLSession | None = None
        self.state = PositionState.WAITING
        self.sent = 0.0
        """The time, by the local clock, at which the statement was sent."""
        self.answers: list[Result] = []
        """The answers to the statement."""
        self._task = context.sessions.tasks.spawn(self._wait(), "aiolock-mysql-wait")

    async def _wait(self) -> None:
        blocking, again = self._blocking, True
        while again:
            try:
                session = self.session or await self._context.sessions.take()
                if session is None:
                    self._become(PositionState.NO_ROOM)
                    return
                self.session = session
                # From the moment that it may have the turn.
                session.locks[blocking.key] = self
                if blocking.silence:
                    await session.set_silence(blocking.silence)
                if blocking.prelude:
                    await session.run(blocking.prelude)
                if self.leaving is None:
                    self.sent = self._context.clock()
                    answers = await session.run(blocking.statement, blocks=True, limit=blocking.limit)
                    if not blocking.answers_turn or answers[0].rows[0][0]:
                        self.answers = answers
                        self._become(PositionState.TURN)
                        return
            except LockError as error:
                if self.session is None:
                    # The next attempt meets the same error, if it still holds.
                    self._become(PositionState.NO_ROOM, error)
                    return
                again = self.session.alive and code(error.__cause__) in INTERRUPTED | NOT_NOW
            again = again and self.leaving is None
        self._become(PositionState.GONE)

    def _become(self, state: PositionState, error: LockError | None = None) -> None:
        """Change the state; all transitions pass through here."""
        if log.isEnabledFor(logging.DEBUG):
            log_change(log, "position in the queue", self._name, self.state, state)
        self.state = state
        if state is PositionState.NO_ROOM:
            self._inbox.wake_after(self._context.random.uniform(*RETRY), WakeReason.FAILED, error)
        else:
            self._inbox.wake(WakeReason.NOTIFIED if state is PositionState.TURN else WakeReason.RECONNECTED)

    def hand_over(self) -> MySQLSession:
        """Return the session with the turn to its next owner; the position is over."""
        session = self.session
        assert session is not None  # noqa: S101 - there is a turn only on a session
        self.session = None
        return session

    async def leave(self) -> None:
        """Give the position up; ends in bounded time. Cancelling it stops the waiting, not the leaving."""
        await asyncio.shield(self.begin_leave())

    def begin_leave(self) -> asyncio.Task[None]:
        """Begin to give the position up; the task that does it."""
        if self.leaving is None:
            self.leaving = self._context.sessions.tasks.spawn(self._leave(), "aiolock-mysql-leave")
        return self.leaving

    async def _leave(self) -> None:
        await self._end_statement()
        session, self.session = self.session, None
        if session is None:
            return
        if session.alive:
            # In every case: a statement that was killed may have got its lock in the same moment.
            try:
                await session.run(self._blocking.put_back)
            except BackendError:
                session.abort()
        session.locks.pop(self._blocking.key, None)
        self._context.sessions.give(session)

    async def _end_statement(self) -> None:
        task = self._task
        if self.session is None:
            task.cancel()
        while not task.done():
            if self.session is not None and self.session.blocked:
                await self._context.sessions.end_statement(self.session, task, GIVE_UP)
            # Commands before the statement are not to be hit.
            await asyncio.wait([task], timeout=SOON)


# --- claims


class QueuedClaim(Claim):
    """A claim that tries first, then takes a position in the server's queue, and holds the lock in a session."""

    __slots__ = ("_begun", "_context", "_left", "_over", "_position", "leaving")

    def __init__(self, context: Context, request: Request) -> None:
        super().__init__(request)
        self._context = context
        self._position: Position | None = None
        self._over = False
        self._left = False
        """A copy of the release may have been sent."""
        self.leaving: asyncio.Future[None] | None = None
        """Done when a release under way has ended."""
        self._begun: Answers | None = None
        """The answers to the release that was sent last, until it has succeeded."""

    async def acquire(self, wait: bool) -> Grant | None:
        """Try without waiting; if it is its turn, take it; before its turn, poll."""
        if self._inbox is not None:
            self._inbox.take()
        position = self._position
        if position is not None and position.state is PositionState.WAITING:
            pause = await self._poll(position)
        elif (grant := await self._context.within(self._attempt(wait=wait))) is not None:
            return grant
        else:
            pause = self._pause()
        if wait and pause < math.inf:
            self.inbox.wake_after(pause, WakeReason.POLL)
        return None

    async def _attempt(self, *, wait: bool) -> Grant | None:
        position = self._position
        if position is not None:
            if position.state is PositionState.TURN:
                if position.session is not None and position.session.alive:
                    return await self._in_turn(position, position.session)
                await self._leave_queue()
                return None
            await self._leave_queue()
        grant = await self._directly(wait=wait)
        if grant is None and wait and self._context.sessions.room:
            self._position = Position(self._context, self._blocking(), self.inbox, self.request.name)
        return grant

    async def _directly(self, *, wait: bool) -> Grant | None:
        chances: int | None = None
        while (session := await self._home(wait=wait)) is not None:
            try:
                return await self._try_on(session)
            except BackendUnavailable:
                if chances is None:
                    # The sessions that are idle may have been ended by the server in the meantime as well.
                    chances = self._context.sessions.idle + 1
                if session.alive or not chances:
                    raise
            # It was lost with its locks; a repeated request finds the grant of this claim all the same.
            chances -= 1
        return None

    async def _home(self, *, wait: bool) -> MySQLSession | None:  # noqa: ARG002 - others may have to wait for one
        """Return the session to try on; ``None`` if the claim has to wait on one of its own."""
        return await self._context.sessions.main()

    @abstractmethod
    async def _try_on(self, session: MySQLSession) -> Grant | None:
        """Request the lock without waiting."""

    @abstractmethod
    async def _in_turn(self, position: Position, session: MySQLSession) -> Grant | None:
        """Request the lock on the session that has the turn."""

    @abstractmethod
    def _blocking(self) -> Blocking:
        """Return the statements of a new position."""

    async def _leave_queue(self) -> None:
        position = self._position
        if position is not None:
            await position.leave()
            if self._position is position:
                self._position = None

    def _pause(self) -> float:
        """Return the seconds until the next poll: without a session to wait on, until the next try."""
        return self._context.random.uniform(*RETRY) if self._position is None else math.inf

    async def _poll(self, position: Position) -> float:  # noqa: ARG002 - in the row mode the server ends the wait
        """Check a position whose turn may have come unseen; return the seconds until the next poll."""
        return math.inf

    # --- leaving

    async def release(self, keep: float = 0) -> Release:
        """Give up the hold, or the position, whichever there is or may be."""
        if self._over:
            return Release.RELEASED
        self._stop_waiting()
        first, self._left = not self._left, True
        leaving = self.leaving
        if leaving is None or leaving.done():
            self.leaving = leaving = asyncio.get_running_loop().create_future()
        try:
            held = await self._context.within(self._release(keep))
        finally:
            settle(leaving, None)
        self._over = True
        return Release.of(held, first=first)

    def begin_release(self, keep: float = 0) -> Release | None:
        """Send the release of a hold, or begin to leave the queue; this client's next request for the lock waits for it."""
        if self._over or self._left:
            return None
        if self.leaving is None:
            self._stop_waiting()
            position = self._position
            if position is not None:
                if position.state is not PositionState.WAITING:
                    return None
                position.begin_leave()
            elif not self._begin_release(keep):
                return None
            self.leaving = asyncio.get_running_loop().create_future()
        return Release.UNKNOWN

    def _stop_waiting(self) -> None:
        if self._inbox is not None:
            self._inbox.close()

    @abstractmethod
    def _begin_release(self, keep: float) -> bool:
        """Send the release of a hold that was granted, if that can be done now; return whether it was."""

    @abstractmethod
    async def _release(self, keep: float) -> bool | None:
        """Release in no particular time; return whether there was a hold, if that is known."""


async def left(context: Context, lock: str) -> None:
    """Wait until the claims and positions of this client that are about to give back a user lock have done so.

    A statement on another session may arrive before the release that was sent earlier. Cancelling it ends the wait only.
    """
    for holder in context.sessions.holders(lock):
        if (leaving := holder.leaving) is not None:
            await asyncio.wait([leaving])
