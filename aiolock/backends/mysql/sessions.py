"""The few sessions of one client: who gets which, and how many there are at most.

*main* carries whatever is not contended and the locks that were free when they were asked for; a *kept* one the same for
holds of another ttl, because the server has one time-out for a whole session; *control* ends statements of others by KILL; the *listener* sleeps for all who wait for a lock that several may be in; a session *in
line* blocks on behalf of one claim, and keeps the lock that it waited for, because a user lock cannot move between
sessions. Only the last kind grows with contention, up to a cap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.failures import ACCOUNT_LIMIT, code, hit
from aiolock.backends.mysql.late import end_late_statement
from aiolock.clock import Clock
from aiolock.errors import BackendError, BackendUnavailable
from aiolock.tasks import start

__all__ = ["Sessions"]

T = TypeVar("T")

KEPT = "kept "
"""With what the names of those begin whose holds have another ttl than the client."""


class Enter(Protocol):
    """Look whether clients of another data format are there."""

    async def __call__(self, session: Session, *, main: bool) -> None:
        """Raise if so; ``main`` says that it is the main session."""


class Sessions:
    """Opens sessions, shares them, and closes them."""

    def __init__(
        self,
        make: Callable[[Callable[[Session], None], int], Session],
        check: Callable[[list[Result]], None],
        *,
        most: int,
        timeout: float,
        ended: Callable[[Session], None],
        clock: Clock,
        enter: Enter,
    ) -> None:
        self.clock = clock
        self._enter = enter
        """The first on a session that can have locks."""
        self._make = make
        self._check = check
        self._most = most
        self._timeout = timeout
        self._told = ended
        self._all: set[Session] = set()
        self._shared: dict[str, Session] = {}
        self._opening: dict[str, asyncio.Task[Session]] = {}
        self._idle: list[Session] = []
        self._in_line = 0
        self.refusal: BackendError | None = None
        """Why the last session for the line could not be opened; ``None`` once one could."""
        self._closing: set[asyncio.Task[Any]] = set()
        self.closed = False

    # --- shared ones

    async def main(self) -> Session:
        """The session for everything that does not block."""
        session = self._shared.get("main")
        return session if session is not None and session.alive else await self._open_shared("main")

    async def control(self) -> Session:
        """The session that ends other statements."""
        session = self._shared.get("control")
        return session if session is not None and session.alive else await self._open_shared("control")

    async def listener(self) -> Session:
        """The session that sleeps until somebody wakes it by ending what it does."""
        session = self._shared.get("listener")
        return session if session is not None and session.alive else await self._open_shared("listener")

    async def kept(self, silence: int) -> Session | None:
        """The session for holds that may be silent for ``silence`` seconds; ``None`` if there are too many other ones.

        Nobody pings one without holds, so the server ends it when it is not used.
        """
        role = f"{KEPT}{silence}"
        session = self._shared.get(role)
        if session is not None and session.alive:
            return session
        if role not in self._opening:
            others = [one for name, one in self._shared.items() if name.startswith(KEPT) and one.alive]
            opening = sum(name.startswith(KEPT) for name in self._opening)
            if len(others) + opening >= self._most:
                unused = next((one for one in others if one.idle and not one.locks), None)
                if unused is None:
                    return None
                unused.quit()
        return await self._open_shared(role, silence)

    async def _open_shared(self, role: str, silence: int = 0) -> Session:
        task = self._opening.get(role)
        if task is None:
            task = self._opening[role] = self.spawn(self._open(silence, role), "aiolock-mysql-connect")
            task.add_done_callback(lambda done: self._opened(role, done))
        return await _outcome(task)

    def _opened(self, role: str, task: asyncio.Task[Session]) -> None:
        self._opening.pop(role, None)
        if not task.cancelled() and task.exception() is None:
            self._shared[role] = task.result()

    async def _open(self, silence: int = 0, role: str = "") -> Session:
        """A new one. Nobody ends a late statement of the one for control, by which those of all others are ended."""
        if self.closed:
            raise BackendUnavailable("the client is closed")
        give_up = self.clock() + self._timeout
        while True:
            session = self._make(self._end, silence)
            try:
                answers = await session.open(self._timeout)
                break
            except BackendUnavailable as error:
                # Somebody ended the statement that sets it up.
                if not hit(error) or self.clock() >= give_up:
                    raise
        self._all.add(session)
        try:
            self._check(answers)
            if role not in ("control", "listener"):
                await self._enter(session, main=role == "main")
        except BaseException:
            session.quit()
            raise
        if role != "control":
            session.interrupt = self._interrupt
        return session

    def _interrupt(self, session: Session) -> None:
        self.spawn(end_late_statement(session, self.control, self._timeout), "aiolock-mysql-late")

    # --- those in line

    async def take(self) -> Session | None:
        """A session that may block; ``None`` if there are as many as there may be, or no more are to be had."""
        while self._idle:
            session = self._idle.pop()
            if session.alive:
                return session
        if self._in_line >= self._most:
            return None
        self._in_line += 1
        opening = self.spawn(self._open_in_line(), "aiolock-mysql-connect")
        try:
            opened: Session | None = await _outcome(opening)
        except BaseException:
            # Whoever wanted it is gone; the next one may have it.
            opening.add_done_callback(self._unwanted)
            raise
        return opened

    async def _open_in_line(self) -> Session | None:
        session = None
        try:
            session = await self._open()
            session.contended = True
            self.refusal = None
        except BackendError as error:
            self.refusal = error
            return None
        finally:
            if session is None:
                self._in_line -= 1
        return session

    def _unwanted(self, opening: asyncio.Task[Session | None]) -> None:
        if not opening.cancelled() and opening.exception() is None and (session := opening.result()):
            self.give(session)

    @property
    def room(self) -> bool:
        """Whether another one may be had."""
        return bool(self._idle) or self._in_line < self._most

    @property
    def shut_out(self) -> BackendError | None:
        """The error with which the server refused a session for the line, because of a limit of the account, if there is
        no other one."""
        refusal = self.refusal
        if self._in_line or refusal is None or code(refusal.__cause__) not in ACCOUNT_LIMIT:
            return None
        return refusal

    def give(self, session: Session) -> None:
        """Take back one that has no lock and no command; nobody pings it, so the server ends it when it is not used."""
        if session.alive:
            self._idle.append(session)

    # --- ends

    def _end(self, session: Session) -> None:
        self._all.discard(session)
        for role in [role for role, one in self._shared.items() if one is session]:
            del self._shared[role]
        if session.contended:
            self._in_line -= 1
        if session in self._idle:
            self._idle.remove(session)
        self._told(session)

    @property
    def used(self) -> list[Session]:
        """Those that somebody needs."""
        spare = {one for name, one in self._shared.items() if name.startswith(KEPT) and not one.locks}
        return [session for session in self._all if session not in spare and session not in self._idle]

    @property
    def idle(self) -> int:
        """How many wait to be used again; the server may have ended them without our knowing it yet."""
        return len(self._idle)

    def holder(self, lock: str) -> Any:
        """Who has a user lock, or may have it, on whichever of our sessions; ``None`` if it is nobody of ours."""
        return next((session.locks[lock] for session in self._all if lock in session.locks), None)

    def holders(self, lock: str) -> list[Any]:
        """All who have a user lock, or may have it, or wait for it."""
        return [session.locks[lock] for session in self._all if lock in session.locks]

    @property
    def main_now(self) -> Session | None:
        """The main session, if it is open."""
        session = self._shared.get("main")
        return session if session is not None and session.alive else None

    def possessions(self) -> list[Any]:
        """Whoever has a user lock, or may have it, on any of our sessions."""
        return [one for session in self._all for one in session.locks.values()]

    def find(self, number: int) -> Session | None:
        """The session with that id at the server, if it is one of ours."""
        return next((session for session in self._all if session.id == number), None)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run ``work`` until it ends or everything is closed."""
        task = start(work, name)
        self._closing.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._closing.discard(task)
        if not task.cancelled():
            task.exception()

    async def aclose(self) -> None:
        """Close all of them and end every task."""
        sessions = list(self._all)
        if sessions:
            await asyncio.wait(
                [self.spawn(one.drain(self._timeout), "aiolock-mysql-drain") for one in sessions]
            )
        self.closed = True
        tasks = list(self._closing)
        for task in tasks:
            task.cancel()
        for session in sessions:
            session.quit()
        if tasks:
            await asyncio.wait(tasks)
        for session in [*sessions, *self._all]:
            session.quit()


async def _outcome(opening: asyncio.Task[T]) -> T:
    """What it opened. Cancelling this leaves it alone; if it is cancelled because of the closing, nobody else is."""
    await asyncio.wait([opening])
    if opening.cancelled():
        raise BackendUnavailable("the client is closed")
    return opening.result()
