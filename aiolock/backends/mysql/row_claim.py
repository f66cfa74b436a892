"""The row mode: the lock is a row lock, SELECT … FOR UPDATE in an open transaction; one connection for each hold.

The row is made beforehand, in a transaction of its own, and is never deleted: on a missing row FOR UPDATE excludes
nobody, and making it inside is a machine for deadlocks. Releasing is ROLLBACK; nothing was written.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.failures import NOT_NOW, code
from aiolock.backends.mysql.holding import HoldingClaim, HoldingMode
from aiolock.backends.mysql.lease_claim import RETRY
from aiolock.backends.mysql.looking import waiters
from aiolock.backends.mysql.place import Place, Stand
from aiolock.backends.mysql.statements import quote
from aiolock.contract import Bid, Family, Grant, Holder, LockInfo, News, Notice
from aiolock.errors import BackendUnavailable, UnsupportedKind

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["RowClaim", "RowMode"]


WAIT = 10
"""Seconds after which the server ends a wait, and we line up again: it does not notice when a waiter's client is gone."""


class RowMode(HoldingMode):
    """A row for each lock, locked by an open transaction."""

    name = "row"

    def __init__(self, backend: MySQLBackend) -> None:
        super().__init__(backend)
        self._known: set[str] = set()

    def claim(self, bid: Bid) -> RowClaim:
        """A new claim."""
        return RowClaim(self, bid)

    async def make_row(self, bid: Bid, key: str) -> None:
        """See that the row is there; asked once for each name."""
        if key in self._known:
            return
        ask, statements = self.backend.ask, self.backend.statements
        if not (await ask(statements("row_exists", id=quote(key))))[0].rows[0][0]:
            namespace = quote(self.backend.settings.namespace)
            try:
                await ask(statements("make_row", id=quote(key), namespace=namespace, name=quote(bid.name)))
            except BackendUnavailable as error:
                # Somebody else made it in the meantime, and has it locked.
                if code(error.__cause__) not in NOT_NOW:
                    raise
        self._known.add(key)

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Whether somebody holds it, and the statements that wait."""
        key = self.backend.key(name, family)
        packet = self.backend.statements("waiters", pattern=quote(RowClaim.line(self, key, "%")))
        others = await self.backend.ask(packet)
        return LockInfo(name, await self._holders(key), waiters(others[0].rows))

    async def _holders(self, key: str) -> tuple[Holder, ...]:
        claim = self._own(key)
        if claim is not None:
            return (self.shown(claim.bid.label, claim.bid.ttl),)
        try:
            await self.backend.ask(self.backend.statements("row_free", id=quote(key)))
        except BackendUnavailable as error:
            if code(error.__cause__) not in NOT_NOW:
                raise
            return (self.shown("a transaction", float(self.backend.silence)),)
        return ()

    def _own(self, key: str) -> RowClaim | None:
        for session in self.backend.sessions.used:
            claim = session.locks.get(key)
            if isinstance(claim, RowClaim) and claim.session is session:
                return claim
        return None

    async def force_release(self, name: str, family: Family) -> bool:
        """Only a hold of this client: which transaction has a row, only administrators may see."""
        key = self.backend.key(name, family)
        claim = self._own(key)
        if claim is None:
            if not await self._holders(key):
                return False
            raise UnsupportedKind(
                "force_release() of another client's row lock",
                self.backend.name,
                "end its connection by KILL",
            )
        self.backend.notices.put(Notice(News.LOST, claim, "force-released"))
        await claim.release()
        return True


class RowClaim(HoldingClaim):
    """A transaction with one row locked, or the wish for it."""

    __slots__ = ("_asked", "_mode", "_over", "_place", "key")

    def __init__(self, mode: RowMode, bid: Bid) -> None:
        super().__init__(bid)
        self._mode = mode
        self.key = mode.backend.key(bid.name, bid.kind.family)
        self._asked: Session | None = None
        self._place: Place | None = None
        self._over = False

    @staticmethod
    def line(mode: RowMode, key: str, who: str) -> str:
        """The statement that blocks, as the server lists it."""
        return mode.backend.statements("lock_row", id=quote(key), who=who)

    async def attempt(self, wait: bool) -> Grant | None:
        """Try to lock the row without waiting; or take the turn that came."""
        return await self._mode.backend.within(self._attempt(wait=wait))

    async def _attempt(self, *, wait: bool) -> Grant | None:
        place = self._place
        if place is not None:
            if place.stand is Stand.WAITING:
                return None
            if place.stand is Stand.TURN:
                return await self._in_turn(place)
            await place.leave()
            self._place = None
        await self._mode.make_row(self.bid, self.key)
        grant = await self._directly(wait=wait)
        if grant is None and wait and self._mode.backend.sessions.room:
            self._line_up()
        return grant

    async def _directly(self, *, wait: bool) -> Grant | None:
        backend = self._mode.backend
        session = self._asked
        if session is None or not session.alive:
            session = await backend.sessions.take()
        if session is None:
            if wait:
                return None
            raise BackendUnavailable(
                f"{backend!r}: every one of its connections is in use, and in this mode each hold needs one: "
                "raise connections="
            )
        self._asked = session
        session.locks[self.key] = self
        packet = self._mode.silence(session, self.bid.ttl) + backend.statements("try_row", id=quote(self.key))
        sent = backend.settings.clock()
        try:
            answers = await session.run(packet, backend.settings.command_timeout)
        except BackendUnavailable as error:
            if not session.alive or code(error.__cause__) not in NOT_NOW:
                raise
            await self._give_back(session)
            return None
        return self._held(session, int(answers[-1].rows[0][0]), sent)

    async def _in_turn(self, place: Place) -> Grant | None:
        session = place.session
        if session is None or not session.alive:
            await place.leave()
            self._place = None
            return None
        backend = self._mode.backend
        packet = self._mode.silence(session, self.bid.ttl) + backend.statements("confirm")
        sent = backend.settings.clock()
        answers = await session.run(packet, backend.settings.command_timeout)
        if self._place is not place:
            return None
        self._place = None
        self._asked = place.hand_over()
        session.locks[self.key] = self
        return self._held(session, int(answers[-1].rows[0][0]), sent)

    def _held(self, session: Session, microseconds: int, sent: float) -> Grant | None:
        if not session.alive:
            return None
        self.session = session
        return self._mode.grant(self, microseconds, sent)

    def _line_up(self) -> None:
        backend = self._mode.backend
        self._place = Place(
            backend.sessions,
            self.key,
            f"{backend.statements('wait_row', wait=WAIT)}; "
            + self.line(self._mode, self.key, self.bid.label.encode().hex()),
            came=lambda _: True,
            put_back="ROLLBACK",
            timeout=backend.settings.command_timeout,
            limit=WAIT + backend.settings.command_timeout,
        )

    async def changed(self) -> None:
        """Wait for our turn."""
        place = self._place
        if place is None or place.stand in (Stand.NO_ROOM, Stand.GONE):
            await asyncio.sleep(self._mode.backend.random.uniform(*RETRY))
        else:
            await place.event.wait()

    async def release(self, keep: float = 0) -> None:  # noqa: ARG002 - refused above: no such capability
        """End the transaction, or give up the place in line."""
        if self._over:
            return
        await self._mode.backend.within(self._release())
        self._over = True

    async def _release(self) -> None:
        session = self._asked
        if session is not None and session.alive:
            try:
                await self._give_back(session)
            except BackendUnavailable:
                # What ends the session ends the hold.
                if session.alive:
                    raise
        self._asked = self.session = None
        if self._place is not None:
            await self._place.leave()
            self._place = None

    async def _give_back(self, session: Session) -> None:
        await session.run("ROLLBACK", self._mode.backend.settings.command_timeout)
        if session.locks.pop(self.key, None) is not None:
            self._mode.backend.sessions.give(session)
        if self._asked is session:
            self._asked = None
