"""A place in line: one blocked statement on a session of its own, and how it is given up from every state.

A task of the client runs the statement; whoever waits is told by an event. Giving up ends the statement by KILL QUERY
and awaits both its answer and the statement's, so the session stays in step and can be used again; a turn that came
in the same moment is put back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.failures import INTERRUPTED, NOT_NOW, code
from aiolock.backends.mysql.sessions import Sessions
from aiolock.errors import BackendError, LockError

__all__ = ["Place", "Stand"]

KILL_AGAIN = 0.2
"""Seconds after which a statement that did not end is killed once more."""
GIVE_UP = 2.0
"""Seconds after which its session is closed instead."""


class Stand(Enum):
    """How a place in line stands."""

    WAITING = "blocked at the server, or on the way there"
    TURN = "first in line"
    NO_ROOM = "no session was to be had"
    GONE = "the session was lost"


class Place:
    """A statement that blocks until it is our turn."""

    def __init__(
        self,
        sessions: Sessions,
        key: str,
        statement: str,
        *,
        came: Callable[[list[Result]], bool],
        put_back: str,
        timeout: float,
        limit: float | None = None,
        prelude: str = "",
        silence: int = 0,
    ) -> None:
        self._sessions = sessions
        self._key = key
        self._statement = statement
        self._came = came
        self._put_back = put_back
        self._timeout = timeout
        self._prelude = prelude
        """What is sent before the statement, each time; in a packet of its own, because when KILL QUERY comes between two
        statements of one packet, the server sends no answer for the second."""
        self._silence = silence
        """After how many seconds the server is to end a session that has its turn and says nothing; 0: as it is."""
        self._limit = limit
        """After how many seconds the statement must have ended by itself, if it does."""
        self.leaving: asyncio.Task[None] | None = None
        self.session: Session | None = None
        self.stand = Stand.WAITING
        self.event = asyncio.Event()
        """Set as soon as it does not wait any more."""
        self._driver = sessions.spawn(self._drive(), "aiolock-mysql-wait")

    async def _drive(self) -> None:
        try:
            session = await self._sessions.take()
            if session is None:
                self._become(Stand.NO_ROOM)
                return
            self.session = session
            # From the moment that it may have the turn.
            session.locks[self._key] = self
            while self.leaving is None:
                if await self._turn(session):
                    self._become(Stand.TURN)
                    return
            self._become(Stand.GONE)
        except LockError:
            # Whoever waits asks again, and hears it then if it is still so.
            self._become(Stand.NO_ROOM if self.session is None else Stand.GONE)

    async def _turn(self, session: Session) -> bool:
        try:
            if self._prelude or self._silence not in (0, session.silence):
                await session.run(self._prelude or "DO 0", self._timeout, silence=self._silence)
            return self._came(await session.run(self._statement, self._limit, blocks=True))
        except BackendError as error:
            if session.alive and code(error.__cause__) in INTERRUPTED | NOT_NOW:
                return False
            raise

    def _become(self, stand: Stand) -> None:
        self.stand = stand
        self.event.set()

    def hand_over(self) -> Session:
        """The session with the turn, to whoever keeps it; this place is over."""
        session = self.session
        assert session is not None  # noqa: S101 - there is a turn only on a session
        self.session = None
        return session

    async def leave(self) -> None:
        """Give it up; ends in bounded time. Cancelling it stops the waiting, not the leaving."""
        if self.leaving is None:
            self.leaving = self._sessions.spawn(self._leave(), "aiolock-mysql-leave")
        await asyncio.shield(self.leaving)

    async def _leave(self) -> None:
        if self.session is None:
            self._driver.cancel()
        elif not self._driver.done():
            await self._end_statement(self.session)
        await asyncio.wait([self._driver])
        session = self.session
        if session is None:
            return
        self.session = None
        if session.alive:
            # In every case: a statement that was killed may have got its lock in the same moment.
            try:
                await session.run(self._put_back, self._timeout)
            except BackendError:
                session.abort()
        session.locks.pop(self._key, None)
        self._sessions.give(session)

    async def _end_statement(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + GIVE_UP
        while not self._driver.done():
            if loop.time() > give_up:
                session.abort()
                return
            try:
                control = await self._sessions.control()
                await control.run(f"KILL QUERY {session.id}", self._timeout)
            except LockError:
                # Nobody to ask; the server ends a wait whose client is gone within a second.
                session.abort()
                return
            await asyncio.wait([self._driver], timeout=KILL_AGAIN)
