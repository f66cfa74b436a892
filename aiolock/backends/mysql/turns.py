"""What claims have in common that try first, then stand in line, and hold what they get in a session."""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from typing import TYPE_CHECKING

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.place import Place, Stand
from aiolock.contract import Bid, Claim, Grant, Release
from aiolock.errors import BackendUnavailable

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["ALONE", "RETRY", "TurnClaim", "left"]

ALONE = 0.005
"""For how many seconds after a grant it is taken that nobody else waits."""
RETRY = (0.05, 0.15)
"""Seconds between tries where there is no session to wait on."""


class TurnClaim(Claim):
    """A claim with at most one place in line."""

    __slots__ = ("_backend", "_begun", "_left", "_over", "_place", "leaving")

    def __init__(self, backend: MySQLBackend, bid: Bid) -> None:
        super().__init__(bid)
        self._backend = backend
        self._place: Place | None = None
        self._over = False
        self._left = False
        """Whether a copy of the release may have been sent."""
        self.leaving: asyncio.Future[None] | None = None
        """Done when a release under way has ended."""
        self._begun: asyncio.Future[list[Result]] | None = None
        """The answers to a release that was sent before :meth:`release` was called."""

    async def attempt(self, wait: bool) -> Grant | None:
        """Try without waiting; or if it is our turn, take it."""
        return await self._backend.within(self._attempt(wait=wait))

    async def _attempt(self, *, wait: bool) -> Grant | None:
        place = self._place
        if place is not None:
            if place.stand is Stand.WAITING:
                return None
            if place.stand is Stand.TURN:
                if place.session is not None and place.session.alive:
                    return await self._in_turn(place, place.session)
                await self._leave_place()
                return None
            await self._leave_place()
        grant = await self._directly(wait=wait)
        if grant is None and wait and self._backend.sessions.room:
            self._place = self._line_up()
        return grant

    async def _directly(self, *, wait: bool) -> Grant | None:  # noqa: ARG002 - who needs a session of its own does
        session = await self._home(wait=wait)
        if session is None:
            return None
        try:
            return await self._try_on(session)
        except BackendUnavailable:
            if session.alive:
                raise
        # It broke in the meantime, with what it had; asking again finds what is ours all the same.
        session = await self._home(wait=wait)
        return None if session is None else await self._try_on(session)

    async def _home(self, *, wait: bool) -> Session | None:  # noqa: ARG002 - others may have to wait for one
        """The session to try on; ``None`` if we have to wait on one of our own."""
        return await self._backend.sessions.main()

    @abstractmethod
    async def _try_on(self, session: Session) -> Grant | None:
        """Ask on the main session."""

    @abstractmethod
    async def _in_turn(self, place: Place, session: Session) -> Grant | None:
        """Ask on the session that has the turn."""

    @abstractmethod
    def _line_up(self) -> Place:
        """A new place."""

    async def _leave_place(self) -> None:
        place = self._place
        if place is not None:
            await place.leave()
            if self._place is place:
                self._place = None

    # --- waiting

    async def changed(self) -> None:
        """Wait for our turn; without a session to wait on, a moment."""
        place = self._place
        if place is None or place.stand in (Stand.NO_ROOM, Stand.GONE):
            await self._backend.pause(RETRY)
        else:
            await self._wait(place)

    async def _wait(self, place: Place) -> None:
        await place.moved(math.inf)

    # --- leaving

    async def release(self, keep: float = 0) -> Release:
        """Give up the hold, or the place in line, whichever there is or may be."""
        if self._over:
            return Release.RELEASED
        first, self._left = not self._left, True
        leaving = self.leaving
        if leaving is None or leaving.done():
            self.leaving = leaving = asyncio.get_running_loop().create_future()
        try:
            held = await self._backend.within(self._release(keep))
        finally:
            if not leaving.done():
                leaving.set_result(None)
        self._over = True
        if held:
            return Release.RELEASED
        return Release.NOT_OURS if first and held is False else Release.UNKNOWN

    def begin_release(self, keep: float = 0) -> Release | None:
        """Send the release of a hold, or begin to leave the line; the next request of this client for the lock waits for that."""
        leaving = self.leaving
        if self._over or self._left:
            return None
        if leaving is None:
            place = self._place
            if place is not None:
                if place.stand is not Stand.WAITING:
                    return None
                place.begin_leave()
            elif not self._begin_release(keep):
                return None
            self.leaving = asyncio.get_running_loop().create_future()
        return Release.UNKNOWN

    @abstractmethod
    def _begin_release(self, keep: float) -> bool:
        """Send the release of a hold that was granted, if that can be done now; whether it was."""

    async def _answers(self) -> list[Result] | None:
        """The answers to the release that was sent in advance; ``None`` if there is none, or it has failed."""
        begun = self._begun
        if begun is None:
            return None
        await asyncio.wait([begun])
        self._begun = None
        if begun.cancelled() or begun.exception() is not None:
            return None
        return begun.result()

    @abstractmethod
    async def _release(self, keep: float) -> bool | None:
        """The same, in no particular time; whether there was a hold, if that is known."""


async def left(*holders: object) -> None:
    """Wait until those of ``holders``, who have a user lock that is wanted, have given it back that are about to.

    What is sent on a session after a release comes after it; but whether it was sent is known only when it has ended.
    """
    for holder in holders:
        if isinstance(holder, TurnClaim | Place) and holder.leaving is not None and not holder.leaving.done():
            await asyncio.wait([holder.leaving])
