"""Statements that are asked, and asked again: which may be repeated, how often, and within what time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any, TypeVar

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.crowded import Crowded
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.failures import hit
from aiolock.backends.mysql.sessions import Sessions
from aiolock.contract import Backend
from aiolock.errors import BackendUnavailable, DeadlockDetected

__all__ = ["Asking"]

T = TypeVar("T")

UNDONE = (0.001, 0.01)
"""Seconds before a statement is sent again that the server undid in favour of another."""


class Asking(Backend):
    """A backend that has sessions and asks on them."""

    address: str
    """The server as messages call it, without the password."""
    random: Random
    sessions: Sessions
    concurrency = 32
    """Enough that the server is never idle, and so few that other requests do not wait for long behind them."""
    crowded: Crowded

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns, if it ends within the command timeout: opening a connection and asking again included.

        Commands under way are not interrupted; only the waiting for them is.
        """
        limit = self.settings.command_timeout
        try:
            async with asyncio.timeout(limit):
                return await work
        except DeadlockDetected as error:
            # Of statements of ours that the server undid; no holder waits for another in these.
            raise self._contended() from error
        except TimeoutError as error:
            raise BackendUnavailable(f"{self.address}: no answer within {limit:g} s") from error

    async def ask(
        self,
        packet: str,
        session: Session | None = None,
        *,
        atomic: bool = False,
        repeat: bool = True,
        urgent: bool = False,
    ) -> list[Result]:
        """Have a packet carried out, on ``session`` or on the main one; what can be repeated is repeated once.

        Packets that come here find what they did before, except with ``repeat=False``: such a one is not repeated
        when its answer was lost. An ``atomic`` packet is a transaction, an ``urgent`` one stands behind no others.
        """
        timeout = self.settings.command_timeout
        if session is not None:
            return await self.undisturbed(session, packet, repeat=repeat)
        session = await self.sessions.main()
        sent = self.settings.clock()
        try:
            return await self.undisturbed(session, packet, atomic=atomic, urgent=urgent, repeat=repeat)
        except BackendUnavailable:
            left = timeout - (self.settings.clock() - sent)
            if not repeat or session.alive or left <= 0:
                raise
        session = await self.sessions.main()
        return await self.undisturbed(session, packet, left, atomic=atomic, urgent=urgent)

    async def undisturbed(
        self,
        session: Session,
        packet: str,
        timeout: float | None = None,
        *,
        atomic: bool = False,
        urgent: bool = False,
        silence: int = 0,
        repeat: bool = True,
    ) -> list[Result]:
        """Have a packet carried out, again and again within the (command) timeout if the server undoes it, or somebody ends it.

        The former is how two statements about one row end on two nodes of a cluster, and sometimes on one server: one of them
        has done nothing. Whatever stands before it in the packet must bear to be repeated. The latter is KILL QUERY; only
        what may be done twice is sent again after that, and nothing with ``repeat=False``.
        """
        timeout = self.settings.command_timeout if timeout is None else timeout
        give_up = self.settings.clock() + timeout
        while True:
            try:
                return await session.run(packet, timeout, atomic=atomic, urgent=urgent, silence=silence)
            except DeadlockDetected as error:
                if self.settings.clock() >= give_up:
                    raise self._contended() from error
            except BackendUnavailable as error:
                if not repeat or not session.alive or not hit(error) or self.settings.clock() >= give_up:
                    raise
            await self.pause(UNDONE)

    def _contended(self) -> BackendUnavailable:
        return BackendUnavailable(f"{self.address}: too many statements about the same rows at once")

    async def pause(self, seconds: tuple[float, float]) -> None:
        """Sleep for so long, at random, that those who met do not meet again."""
        await asyncio.sleep(self.random.uniform(*seconds))
