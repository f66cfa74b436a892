"""The sessions of one client, by role."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from aiolock.backends.mysql.connection import LockUser, MySQLSession
from aiolock.backends.mysql.errors import hit
from aiolock.backends.mysql.protocol import Result
from aiolock.clock import Clock, Deadline
from aiolock.core.tasks import TaskSet, interrupt_until_done
from aiolock.errors import BackendUnavailable, LockError

__all__ = ["ServerFacts", "Sessions"]

T = TypeVar("T")

KEPT = "kept "
"""Prefix of the roles of sessions whose holds have another ttl than the client."""


class ServerFacts(NamedTuple):
    """The facts about a server and its database that statements depend on."""

    across: bool
    """True if the server is one of several nodes that take locks; each node has user locks of its own."""
    galera: bool
    """A read must be made to wait for the commits of other nodes."""
    clock_stands: bool
    """SYSDATE is NOW here: when a statement began, and not the time."""
    scope: tuple[str, str]
    """The database and the table by their names at the server, which all clients see alike."""
    rolls_back: bool
    """A lock wait that took too long ends the whole transaction."""
    processlist: str
    """The table of the server's sessions and their statements."""
    server: str
    """The expression by which the server identifies itself."""
    fine_times: bool
    """True if the times in that table have fractions of a second."""


class Sessions:
    """Open sessions, share them by role, and close them.

    *main* carries whatever does not block, and the locks that were free when they were asked for; a *kept* one the same
    for holds of another ttl, because the server has one time-out for a whole session; *control* ends statements of others
    by KILL; the *listener* sleeps for all waiters of shared locks. A *contended* session blocks for one claim, and
    keeps the lock that it waited for, because a user lock cannot move between sessions; only their number grows with
    contention, up to ``most``.

    Cancelling a call that waits for a new session lets the opening go on: the next caller gets that session.
    """

    def __init__(
        self,
        make: Callable[[Callable[[MySQLSession], None], int], MySQLSession],
        check: Callable[[list[Result]], ServerFacts],
        enter: Callable[[MySQLSession, bool], Awaitable[None]],
        ended: Callable[[MySQLSession], None],
        *,
        most: int,
        timeout: float,
        clock: Clock,
    ) -> None:
        """Take the steps of opening a session: make it, check the answers to its set-up, and enter.

        ``enter`` refuses clients of another data format, before the session can have locks; its flag says that this is the
        main session. ``ended`` is called at the end of each.
        """
        self._make, self._check, self._enter, self._ended = make, check, enter, ended
        self._most, self._timeout, self._clock = most, timeout, clock
        self.facts: ServerFacts | None = None
        """Known once a session was opened."""
        self._all: set[MySQLSession] = set()
        self._shared: dict[str, MySQLSession] = {}
        self._opening: dict[str, asyncio.Task[MySQLSession]] = {}
        self._idle: list[MySQLSession] = []
        self._contended = 0
        """Number of contended sessions, and of those that are being opened."""
        self.tasks: TaskSet = TaskSet(awaited=True)
        """The tasks of the pool; closing it ends them."""
        self.closed = False

    # --- shared sessions

    async def main(self) -> MySQLSession:
        """Return the session for everything that does not block."""
        return self.main_now or await self._open_shared("main")

    @property
    def main_now(self) -> MySQLSession | None:
        """The main session, if it is open."""
        return self._now("main")

    async def control(self) -> MySQLSession:
        """Return the session that ends statements of other sessions."""
        return await self._open_shared("control")

    async def listener(self) -> MySQLSession:
        """Return the session that sleeps until KILL QUERY wakes it."""
        return await self._open_shared("listener")

    async def kept(self, silence: int) -> MySQLSession | None:
        """Return the session for holds that may be silent for ``silence`` seconds; ``None`` if there are too many others.

        One without holds is not pinged, so the server ends it.
        """
        role = f"{KEPT}{silence}"
        if self._now(role) is None and role not in self._opening:
            others = [one for name, one in self._shared.items() if name.startswith(KEPT) and one.alive]
            opening = sum(name.startswith(KEPT) for name in self._opening)
            if len(others) + opening >= self._most:
                unused = next((one for one in others if one.idle and not one.locks), None)
                if unused is None:
                    return None
                unused.quit()
        return await self._open_shared(role, silence)

    def _now(self, role: str) -> MySQLSession | None:
        session = self._shared.get(role)
        return session if session is not None and session.alive else None

    async def _open_shared(self, role: str, silence: int = 0) -> MySQLSession:
        if (session := self._now(role)) is not None:
            return session
        task = self._opening.get(role)
        if task is None:
            task = self._opening[role] = self.tasks.spawn(self._open(silence, role), "aiolock-mysql-connect")
            task.add_done_callback(lambda done: self._opened(role, done))
        return await _outcome(task)

    def _opened(self, role: str, task: asyncio.Task[MySQLSession]) -> None:
        self._opening.pop(role, None)
        if not task.cancelled() and task.exception() is None:
            self._shared[role] = task.result()

    async def _open(self, silence: int = 0, role: str = "") -> MySQLSession:
        if self.closed:
            raise BackendUnavailable("the client is closed")
        deadline = Deadline.after(self._timeout, self._clock)
        while True:
            session = self._make(self._end, silence)
            try:
                answers = await session.open(deadline)
                break
            except BackendUnavailable as error:
                # KILL QUERY may have hit the statement that sets it up.
                if not hit(error) or deadline.passed():
                    raise
        self._all.add(session)
        try:
            self.facts = self._check(answers)
            if role not in ("control", "listener"):
                await self._enter(session, role == "main")
        except BaseException:
            # It never had a hold: its end is no reason to verify the holds, for which the next one would be opened at once.
            self._all.discard(session)
            session.quit()
            raise
        if role != "control":
            session.interrupt = self._interrupt
        return session

    def _interrupt(self, session: MySQLSession, answered: asyncio.Future[None]) -> None:
        self.tasks.spawn(self._end_late_statement(session, answered), "aiolock-mysql-late")

    async def _end_late_statement(self, session: MySQLSession, answered: asyncio.Future[None]) -> None:
        # It may wait for a row for as long as its holder likes, and the session has other locks.
        await self.end_statement(session, answered, self._timeout)
        session.go_on()

    async def end_statement(self, session: MySQLSession, done: asyncio.Future[Any], limit: float) -> None:
        """Have the server end the statement under way on ``session`` by KILL QUERY; ``done`` is done when it has ended.

        If it does not end within ``limit`` seconds, or no session is to be had that can end it, its own is closed: the server
        notices within a second. Until this returns, nothing else may be sent on it, which would be hit. Cancelling it leaves
        the session as it is.
        """

        async def kill(left: float) -> None:
            try:
                async with asyncio.timeout(left):
                    control = await self.control()
                    if not done.done():
                        await control.run(f"KILL QUERY {session.id}")
            except (LockError, TimeoutError):
                session.abort()

        if not await interrupt_until_done(done, kill, Deadline.after(limit, self._clock)):
            session.abort()

    # --- contended sessions

    async def take(self) -> MySQLSession | None:
        """Return a session that may block; ``None`` if there are as many as there may be."""
        while self._idle:
            session = self._idle.pop()
            if session.alive:
                return session
        if self._contended >= self._most:
            return None
        self._contended += 1
        opening = self.tasks.spawn(self._open_contended(), "aiolock-mysql-connect")
        try:
            return await _outcome(opening)
        except BaseException:
            # The caller is gone; the next one may have it.
            opening.add_done_callback(self._unwanted)
            raise

    async def _open_contended(self) -> MySQLSession:
        try:
            session = await self._open()
        except BaseException:
            self._contended -= 1
            raise
        session.contended = True
        return session

    def _unwanted(self, opening: asyncio.Task[MySQLSession]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self.give(opening.result())

    def give(self, session: MySQLSession) -> None:
        """Take back a contended session that has no lock and no command. It is not pinged: unused, the server ends it."""
        if session.alive:
            self._idle.append(session)

    @property
    def room(self) -> bool:
        """True if another contended session may be had."""
        return bool(self._idle) or self._contended < self._most

    @property
    def contended(self) -> int:
        """Number of contended sessions, and of those that are being opened."""
        return self._contended

    @property
    def idle(self) -> int:
        """Number of contended sessions that wait to be used; the server may have ended some of them unnoticed."""
        return len(self._idle)

    # --- reading

    @property
    def used(self) -> list[MySQLSession]:
        """The sessions that must be kept alive."""
        spare = {one for name, one in self._shared.items() if name.startswith(KEPT) and not one.locks}
        return [session for session in self._all if session not in spare and session not in self._idle]

    def holders(self, lock: str) -> list[LockUser]:
        """Return the claims and positions of this client that have a user lock, or may have it, or wait for it."""
        return [session.locks[lock] for session in self._all if lock in session.locks]

    def find(self, number: int) -> MySQLSession | None:
        """Return the session of this client with that id at the server."""
        return next((session for session in self._all if session.id == number), None)

    # --- ends

    def _end(self, session: MySQLSession) -> None:
        admitted = session in self._all
        self._all.discard(session)
        for role in [role for role, one in self._shared.items() if one is session]:
            del self._shared[role]
        if session.contended:
            self._contended -= 1
        if session in self._idle:
            self._idle.remove(session)
        if admitted:
            self._ended(session)

    def abort_all(self) -> None:
        """Close all sessions at once, because the address has come to mean another server."""
        for session in list(self._all):
            session.abort()

    async def aclose(self) -> None:
        """Close all sessions and end every task."""
        sessions = list(self._all)
        if sessions:
            await asyncio.wait([self.tasks.spawn(one.drain(), "aiolock-mysql-drain") for one in sessions])
        self.closed = True
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        for session in sessions:
            session.quit()
        if tasks:
            await asyncio.wait(tasks)
        for session in [*sessions, *self._all]:
            session.quit()


async def _outcome(opening: asyncio.Task[T]) -> T:
    """Return the result of ``opening``. Cancelling this leaves it alone; if it is cancelled, the client is closed."""
    await asyncio.wait([opening])
    if opening.cancelled():
        raise BackendUnavailable("the client is closed")
    return opening.result()
