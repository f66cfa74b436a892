"""The row mode: the lock is a row lock, SELECT … FOR UPDATE in an open transaction; one connection for each hold.

The row is made beforehand, in a transaction of its own, and is never deleted: on a missing row FOR UPDATE excludes
nobody, and making it inside is a machine for deadlocks. If somebody deleted it all the same, that is seen by what FOR
UPDATE found. Releasing is ROLLBACK; nothing was written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.failures import NOT_NOW, code
from aiolock.backends.mysql.holding import HoldingClaim, HoldingMode
from aiolock.backends.mysql.looking import in_line
from aiolock.backends.mysql.place import Place, Queue
from aiolock.backends.mysql.statements import hexed, quote
from aiolock.backends.mysql.tables import check_tables
from aiolock.backends.mysql.turns import left
from aiolock.contract import Bid, Family, Grant, Holder, LockInfo, News, Notice
from aiolock.errors import BackendUnavailable, UnsupportedKind

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["RowClaim", "RowMode"]


WAIT = 10
"""At most so many seconds, and no more than its ttl, after which the server ends a wait, and we line up again: it does not
notice when a waiter's client is gone."""


class RowMode(HoldingMode):
    """A row for each lock, locked by an open transaction."""

    name = "row"

    def __init__(self, backend: MySQLBackend) -> None:
        super().__init__(backend)
        self._known: set[str] = set()

    def claim(self, bid: Bid) -> RowClaim:
        """A new claim."""
        return RowClaim(self, bid)

    async def enter(self, session: Session, *, main: bool) -> None:
        """See that the tables, if they are there, have our data format."""
        if main:
            await check_tables(self.backend, session)

    async def make_row(self, bid: Bid, key: str, *, sure: bool = False) -> None:
        """See that the row is there; asked once for each name, or if it is to be ``sure``."""
        if key in self._known and not sure:
            return
        ask, statements = self.backend.ask, self.backend.statements
        if not await self._exists(key):
            words = {
                "namespace": quote(self.backend.settings.namespace),
                "family": quote(bid.kind.family.value),
                "name": hexed(bid.name),
            }
            try:
                await ask(statements("make_row", id=quote(key), **words))
            except BackendUnavailable as error:
                # Somebody else made it in the meantime, and has it locked.
                if code(error.__cause__) not in NOT_NOW or not await self._exists(key):
                    raise
        self._known.add(key)

    async def _exists(self, key: str) -> bool:
        answers = await self.backend.ask(self.backend.statements("row_exists", id=quote(key)))
        return bool(answers[0].rows[0][0])

    def forget(self, key: str) -> None:
        """The row has gone."""
        self._known.discard(key)

    def line(self, key: str, who: str) -> str:
        """The statement that blocks, as the server lists it."""
        return self.backend.statements("lock_row", id=quote(key), who=who)

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Whether somebody holds it, and the statements that wait."""
        key = self.backend.key(name, family)
        backend = self.backend
        await left(*backend.sessions.holders(key))
        words = {"processlist": backend.processlist, "pattern": hexed(self.line(key, "%"))}
        [others] = await backend.ask(backend.statements("waiters", **words))
        waiting = await in_line(backend, others.rows)
        return LockInfo(name, await self._holders(key), waiting, family)

    async def _holders(self, key: str) -> tuple[Holder, ...]:
        claim = self.own(key)
        if claim is not None:
            return (self.shown(claim.bid.label, claim.bid.ttl),)
        try:
            await self.backend.ask(self.backend.statements("row_free", id=quote(key)))
        except BackendUnavailable as error:
            if code(error.__cause__) not in NOT_NOW:
                raise
            return (self.shown("a transaction", float(self.backend.silence)),)
        return ()

    def own(self, key: str) -> RowClaim | None:
        """The claim of this client that holds it."""
        for session in self.backend.sessions.used:
            claim = session.locks.get(key)
            if isinstance(claim, RowClaim) and claim.session is session:
                return claim
        return None

    async def force_release(self, name: str, family: Family) -> bool:
        """Only a hold of this client: which transaction has a row, only administrators may see."""
        key = self.backend.key(name, family)
        claim = self.own(key)
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

    __slots__ = ("_mode",)

    def __init__(self, mode: RowMode, bid: Bid) -> None:
        super().__init__(mode, bid, mode.backend.key(bid.name, bid.kind.family))
        self._mode = mode

    async def _directly(self, *, wait: bool) -> Grant | None:
        """On a session that is nobody else's: each hold needs one."""
        sessions = self._backend.sessions
        await left(sessions.holder(self.lock))
        session: Session | None = None
        # Those that were idle may have been ended by the server in the meantime.
        for last in (*(False for _ in range(sessions.idle + 1)), True):
            await self._mode.make_row(self.bid, self.lock)
            session = self._asked
            if session is None or not session.alive:
                session = await sessions.take()
            if session is None:
                break
            try:
                return await self._try_on(session)
            except BackendUnavailable:
                if session.alive or last:
                    raise
        if (refusal := sessions.shut_out) is not None:
            # Without a connection for the hold it is not to be had, free or not.
            raise BackendUnavailable(
                f"{refusal}: in this mode each hold and each waiter needs a connection beside the client's own, and the "
                "server refuses it: raise MAX_USER_CONNECTIONS of the account, or use ?mode=lease"
            ) from refusal
        if wait:
            return None
        raise BackendUnavailable(
            f"{self._backend!r}: every one of its connections is in use, and in this mode each hold needs one: "
            "raise connections="
        )

    async def _try_on(self, session: Session) -> Grant | None:
        backend = self._backend
        self._asked = session
        session.locks[self.lock] = self
        packet = backend.statements("try_row", id=quote(self.lock))
        silence = self._mode.silence(self.bid.ttl)
        try:
            for _ in range(2):
                sent = backend.settings.clock()
                answers = await backend.undisturbed(session, packet, silence=silence)
                if self._confirmed(answers):
                    return self._held(session, answers, sent)
                await self._mode.make_row(self.bid, self.lock)
        except BackendUnavailable as error:
            if not session.alive or code(error.__cause__) not in NOT_NOW:
                raise
        await self._give_back(session)
        return None

    async def _in_turn(self, place: Place, session: Session) -> Grant | None:
        try:
            return await super()._in_turn(place, session)
        except BackendUnavailable as error:
            if not session.alive or code(error.__cause__) not in NOT_NOW:
                raise
        # There was no row to wait for, and now somebody else has it.
        self._mode.forget(self.lock)
        await self._leave_place()
        return None

    def _confirm(self) -> str:
        # Again, because the one that waited finds nothing if the row was deleted in the meantime.
        return self._backend.statements("confirm_row", id=quote(self.lock))

    def _confirmed(self, answers: list[Result]) -> bool:
        if int(answers[-1].rows[0][0]) < 0:
            # Whoever asks gives back what it has.
            raise self._mode.demoted()
        if answers[-2].rows:
            return True
        self._mode.forget(self.lock)
        return False

    def _line_up(self) -> Place:
        backend, silence = self._backend, self._mode.silence(self.bid.ttl)
        wait = min(WAIT, silence)
        queue = Queue(
            self.lock,
            self._mode.line(self.lock, self.bid.label.encode().hex()),
            "ROLLBACK",
            backend.settings.command_timeout,
            tells=False,
            prelude=backend.statements("wait_row", wait=wait),
            limit=wait + backend.settings.command_timeout,
            silence=silence,
        )
        return Place(backend.sessions, queue)

    def _put_back(self) -> str:
        return "ROLLBACK"
