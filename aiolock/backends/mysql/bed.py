"""How a listener sleeps at the server: so that others can wake it at any moment, and nobody has to wait for that.

It waits for a user lock, the bed, that the client's main session has and does not give back; whoever wakes it ends that
statement by KILL QUERY, and finds its session by another user lock, the bell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.failures import INTERRUPTED, code
from aiolock.backends.mysql.statements import quote
from aiolock.errors import BackendError

if TYPE_CHECKING:
    from aiolock.backends.mysql.sharing import Sharing

__all__ = ["Bed", "insist", "interrupted"]


class Bed:
    """Where the listener of one client sleeps."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self.asleep = False
        """Whether there is a sleep that can be ended."""
        self._belled: Session | None = None
        self._bedded: Session | None = None
        """Who has the bell, and who has the bed."""

    @property
    def _bed(self) -> str:
        return quote(self._sharing.bed(self._sharing.client))

    async def settle(self, session: Session) -> None:
        """See that others can wake us, and that there is something to wait for."""
        backend, sharing = self._sharing.backend, self._sharing
        timeout = backend.settings.command_timeout
        if self._belled is not session:
            packet = backend.statements("answer_the_bell", bell=quote(sharing.bell(sharing.client)))
            [answer] = await insist(session, packet, timeout)
            # One that we had before may not have noticed yet that it has ended.
            self._belled = session if answer.rows[0][0] else None
        main = await backend.sessions.main()
        if self._bedded is not main:
            await backend.ask(backend.statements("lie_down", bed=self._bed), main)
            self._bedded = main

    async def sleep(self, session: Session, look: float, changed: str) -> bool:
        """Sleep until there is something to hear, for ``look`` seconds at most; whether nobody ended it.

        ``changed`` is the condition that a document has changed that somebody looks at.
        """
        backend = self._sharing.backend
        timeout = backend.settings.command_timeout
        packet = backend.statements(
            "listen",
            client=quote(self._sharing.client),
            look=round(look, 6),
            changed=changed,
            bed=self._bed,
        )
        self.asleep = True
        try:
            [answer] = await session.run(packet, look + timeout, blocks=True)
        except BackendError as error:
            if not interrupted(session, error):
                raise
            return False
        finally:
            self.asleep = False
        [[came]] = answer.rows
        if came:
            # Whoever had it is gone; it is for the main session, whose next one takes it.
            self._bedded = None
            await insist(session, backend.statements("get_up", bed=self._bed), timeout)
            await self.settle(session)
        # MariaDB has no error for GET_LOCK when it is ended, but no answer either.
        return came is not None


async def insist(session: Session, statement: str, timeout: float) -> list[Result]:
    """Have one carried out that may be repeated, also if somebody ends it who meant our sleep."""
    while True:
        try:
            return await session.run(statement, timeout)
        except BackendError as error:
            if not interrupted(session, error):
                raise


def interrupted(session: Session, error: BackendError) -> bool:
    """Whether somebody ended the statement, and nothing else is wrong."""
    return session.alive and code(error.__cause__) in INTERRUPTED
