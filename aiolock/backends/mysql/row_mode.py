"""Row mode: a lock is a row lock, SELECT … FOR UPDATE in an open transaction; one connection for each hold.

The row is made beforehand, in a transaction of its own, and is never deleted: on a missing row FOR UPDATE excludes
nothing, and making it inside causes deadlocks. If an administrator deleted it, that is seen by what FOR UPDATE found.
Releasing is ROLLBACK; nothing was written."""

from __future__ import annotations

from aiolock.backends.mysql.connection import MySQLSession
from aiolock.backends.mysql.context import Context, hexed, quote
from aiolock.backends.mysql.errors import ACCOUNT_LIMIT, NO_CONNECTION, NOT_NOW, code, takes_no_writes
from aiolock.backends.mysql.protocol import Result
from aiolock.backends.mysql.queue import Blocking, Position, in_queue, left
from aiolock.backends.mysql.session_mode import HoldingClaim, HoldingMode, demoted
from aiolock.core.backend import Claim, Grant, Request
from aiolock.errors import BackendUnavailable, UnsupportedKind
from aiolock.types import Family, LockInfo

__all__ = ["RowMode", "RowModeClaim", "make_row"]

WAIT = 10
"""Seconds at most, and no more than its ttl, after which the server ends a wait, and the claim queues up again: the server
does not notice when a waiter's client is gone."""


async def make_row(context: Context, request: Request, key: str) -> BackendUnavailable | None:
    """Make the row of a lock, which is missing; return why that is not possible now, if it is not there already.

    If another client has made it in the meantime, it may have it locked, which is the same answer of the server. Cancelling
    it leaves open whether the server makes the row.
    """
    family, name = quote(request.kind.family.value), hexed(request.name)
    try:
        await context.execute(context.statements("make_row", id=quote(key), family=family, name=name))
    except BackendUnavailable as error:
        if code(error.__cause__) not in NOT_NOW:
            raise
        return error
    return None


class RowMode(HoldingMode):
    """A row for each lock, locked by an open transaction."""

    def claim(self, request: Request) -> Claim:
        """Return a new claim of a mutex."""
        return RowModeClaim(self._context, request, self._lock(request.name, request.kind.family))

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Return the holder, as far as it can be known, and the statements that wait. Cancelling it changes nothing."""
        context, key = self._context, self._context.key(name, family)
        await left(context, key)
        pattern = hexed(context.statements("lock_row", id=quote(key), who="%"))
        packet = context.statements("waiters", processlist=context.facts.processlist, pattern=pattern)
        [others] = await context.execute(packet)
        waiting = await in_queue(context, others.rows)
        claim = self._own(key)
        held = claim is not None or not await self._free(key)
        return LockInfo(name, (self._shown(claim, "a transaction"),) if held else (), waiting, family)

    async def _free(self, key: str) -> bool:
        """Return whether no transaction has the row."""
        try:
            await self._context.execute(self._context.statements("row_free", id=quote(key)))
        except BackendUnavailable as error:
            if code(error.__cause__) not in NOT_NOW:
                raise
            return False
        return True

    async def _force(self, lock: str) -> bool:
        """Refuse: which other transaction has a row, only administrators may see."""
        if await self._free(lock):
            return False
        advice = "end its connection by KILL"
        raise UnsupportedKind("force_release() of another client's row lock", "MySQL", advice)


class RowModeClaim(HoldingClaim):
    """A transaction with one row locked, or a request for it."""

    __slots__ = ()

    async def _attempt(self, *, wait: bool) -> Grant | None:
        try:
            return await super()._attempt(wait=wait)
        except BackendUnavailable as error:
            if not takes_no_writes(error.__cause__):
                raise
            raise demoted(self._context) from error

    async def _home(self, *, wait: bool) -> MySQLSession | None:
        """Return a session for the hold alone; ``None`` if every one is in use and the claim may ``wait``."""
        context, sessions, session = self._context, self._context.sessions, self._asked
        await left(context, self.lock)
        if self._begun is None and session is not None and session.alive:
            return session
        try:
            if (session := await sessions.take()) is not None:
                return session
        except BackendUnavailable as error:
            if (number := code(error.__cause__)) not in NO_CONNECTION:
                raise
            if number in ACCOUNT_LIMIT and not sessions.contended:
                # Without a connection for the hold it is not to be had, free or not.
                raise BackendUnavailable(
                    f"{error}: in this mode each hold and each waiter needs a connection beside the client's own, and the "
                    "server refuses it: raise MAX_USER_CONNECTIONS of the account, or use ?mode=lease"
                ) from error
        if wait:
            return None
        raise BackendUnavailable(
            f"{context.address}: every one of its connections is in use, and in this mode each hold needs one: "
            "raise connections="
        )

    async def _try_on(self, session: MySQLSession) -> Grant | None:
        context = self._context
        self._use(session)
        await session.set_silence(self._silence)
        packet = context.statements("try_row", id=quote(self.lock))
        refused: BackendUnavailable | None = None
        try:
            for _ in range(2):
                sent = context.clock()
                answers = await context.execute(packet, session)
                if self._confirmed(answers):
                    return self._held(session, answers, sent)
                if refused is not None:
                    break
                refused = await make_row(context, self.request, self.lock)
        except BackendUnavailable as error:
            if not session.alive or code(error.__cause__) not in NOT_NOW:
                raise
            # It is there, and locked.
            refused = None
        await self._give_back()
        if refused is not None:
            raise refused
        return None

    async def _in_turn(self, position: Position, session: MySQLSession) -> Grant | None:
        try:
            return await super()._in_turn(position, session)
        except BackendUnavailable as error:
            if not session.alive or code(error.__cause__) not in NOT_NOW:
                raise
        # There was no row to wait for, and now another transaction has it.
        await self._leave_queue()
        return None

    def _confirm(self) -> str:
        # Again, because the wait finds nothing if the row was deleted in the meantime.
        return self._context.statements("confirm_row", id=quote(self.lock))

    def _confirmed(self, answers: list[Result]) -> bool:
        if int(answers[-1].rows[0][0]) < 0:
            # The caller gives the row back.
            raise demoted(self._context)
        return bool(answers[-2].rows)

    def _blocking(self) -> Blocking:
        context, wait = self._context, min(WAIT, self._silence)
        who = self.request.label.encode().hex()
        return Blocking(
            self.lock,
            context.statements("lock_row", id=quote(self.lock), who=who),
            self._put_back(),
            answers_turn=False,
            prelude=context.statements("wait_row", wait=wait),
            limit=wait + context.timeout,
            silence=self._silence,
        )

    def _put_back(self) -> str:
        return "ROLLBACK"
