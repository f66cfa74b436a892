"""Lease mode: a mutex is a row, and a turnstile on which waiters block; its claims, inspection and force release.

The row says who holds, until when, and under which token. It is the truth, and one atomic statement decides about it. The
turnstile is a user lock that the holder has and the waiters block on, so that the server keeps them in order and wakes the
next one when the holder leaves or dies; that one asks the row again. Losing a turnstile costs time, never exclusion: a
check at the row's deadline is always scheduled, and a session that keeps the turnstile of a free row is ended.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Hashable, Sequence
from datetime import UTC
from fnmatch import fnmatchcase
from typing import Any

from aiolock.backends.mysql.connection import MySQLSession
from aiolock.backends.mysql.context import BLOCK, Context, hexed, quote
from aiolock.backends.mysql.queue import (
    GRACE,
    LONGEST_POLL,
    Blocking,
    PollAction,
    Position,
    PositionState,
    QueuedClaim,
    in_queue,
    judge,
    left,
)
from aiolock.backends.mysql.renewal import Renewals, RowClaim
from aiolock.backends.mysql.shared import SharedClaim, Sharing
from aiolock.core.backend import Claim, Event, EventKind, Grant, Renewal, Request, expires_at
from aiolock.core.capabilities import Extension
from aiolock.core.logs import Log, get_logger
from aiolock.core.present import decode_present, presented
from aiolock.core.tasks import Backoff
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, LockLost
from aiolock.types import Family, Holder, LockInfo, Mode

__all__ = ["LeaseClaim", "LeaseMode"]

log: Log = get_logger("aiolock")

POLLS = 0.005, 0.25
"""Most seconds, at first and after many, between polls of the first in the queue at a row whose holder cannot wake it."""


def lock_names(context: Context, name: str, family: Family) -> tuple[str, str]:
    """Return the key of a lock's row and the name of its turnstile."""
    key = context.key(name, family)
    return key, f"aiolock:t:{key}"


async def kill_holder(context: Context, turnstile: str, number: int) -> None:
    """End the session that has the turnstile, if it is still that one; a session of this client gives it back instead.

    Cancelling it ends the waiting; the statement is carried out if it was sent.
    """
    session = context.sessions.find(number)
    if session is not None and isinstance(other := session.locks.get(turnstile), LeaseClaim):
        other.lose_turnstile()
        context.events.put(Event(EventKind.DOUBT, other))
        return
    packet = context.statements("kill_holder", turnstile=quote(turnstile), number=number)
    try:
        await (await context.sessions.control()).run(packet)
    except BackendError as error:
        # Another account's, or it has gone by itself.
        log.info("session %d, which keeps a turnstile, could not be ended: %s", number, error)


class LeaseMode:
    """A row for each mutex; shared locks are those of :class:`Sharing`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.sharing = Sharing(context)
        self.renewals = Renewals(context, "renew", "verify")

    def claim(self, request: Request) -> Claim:
        """Return a new claim of any kind."""
        if request.kind.mode is Mode.MUTEX:
            return LeaseClaim(self._context, request)
        return SharedClaim(self.sharing, request)

    def ended(self, session: MySQLSession) -> None:
        """Verify holds and positions at the end of a session: rows live on. All sessions of a demoted server end together."""
        if session.demoted:
            self._context.sessions.abort_all()
        if session.locks or not session.contended:
            self._context.events.put(Event(EventKind.DOUBT))
            self.sharing.listener.doubt_all()

    def renewal_group(self, claim: Claim) -> Hashable:
        """Return whether it is a mutex, whether it is only verified, and the ttl of a mutex that is not."""
        mutex = isinstance(claim, LeaseClaim)
        return mutex, claim.fixed, claim.request.ttl if mutex and not claim.fixed else None

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Prolong the holds of one group in a few statements. Cancelling it leaves open whether the server has prolonged them."""
        renewals = self.renewals if isinstance(claims[0], LeaseClaim) else self.sharing.renewals
        return await renewals.renew([claim for claim in claims if isinstance(claim, RowClaim)])

    # --- administration

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Return the holder of the row, and the statements that wait. Cancelling it changes nothing."""
        if family.shareable:
            return await self.sharing.inspect(name, family)
        context = self._context
        key, turnstile = lock_names(context, name, family)
        await left(context, turnstile)
        row = context.statements("inspect", id=quote(key))
        prefix = context.statements("wait_for_turnstile", turnstile=quote(turnstile), who="%")
        listing = context.statements("waiters", processlist=context.facts.processlist, pattern=hexed(prefix))
        holders, others = await context.execute(f"{row}; {listing}")
        waiting = await in_queue(context, others.rows)
        return LockInfo.of_holds(name, map(_holder, holders.rows), waiting, family)

    async def force_release(self, name: str, family: Family, token: int | None) -> bool:
        """Free the row; then end the session of the holder, so that it learns of it at once and the next waiter wakes.

        Cancelling it leaves open how much of that the server does.
        """
        if family.shareable:
            return await self.sharing.force_release(name, family, token)
        key, turnstile = lock_names(self._context, name, family)
        packet = self._context.statements(
            "force" if token is None else "force_token",
            id=quote(key),
            turnstile=quote(turnstile),
            token=token,
            block=BLOCK,
            reported=self._context.statements("reported"),
        )
        # Not twice if the answer is lost: the second would take it from the next holder.
        freed, used = await self._context.execute(packet, repeat=False)
        if not freed.changed:
            return False
        if user := int(used.rows[0][0]):
            await kill_holder(self._context, turnstile, user)
        return True

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Write the reason to the row, which the renewals of its holder read.

        Cancelling it leaves open whether the server writes it.
        """
        statement = "request_release_shared" if family.shareable else "request_release"
        key = quote(self._context.key(name, family))
        packet = self._context.statements(statement, id=key, reason=hexed(reason))
        answers = await self._context.execute(packet)
        return bool(int(answers[-1].rows[0][0]))

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Return every lock of the namespace that is held or waited for, if its name matches. Cancelling it changes nothing."""
        [found] = await self._context.execute(self._context.statements("names"))
        return sorted(
            (str(name), Family(family)) for name, family in found.rows if fnmatchcase(str(name), pattern)
        )


def _holder(row: tuple[Any, ...]) -> Holder:
    label, token, since, remaining, owned, value, present = row
    holder = Holder(
        label=label,
        token=int(token),
        since=since.replace(tzinfo=UTC),
        remaining=int(remaining) / 1_000_000,
        tokens=BLOCK if int(owned) else 0,
        value=bytes(value),
    )
    return presented(holder, decode_present(present or ""))


# --- claims


class LeaseClaim(QueuedClaim, RowClaim, Extension):
    """An owner of a row, or a request to become it."""

    __slots__ = (
        *("_asked", "_granted", "_polls", "_remaining", "_turn", "_user"),
        *("key", "owner", "requested", "turnstile"),
    )

    def __init__(self, context: Context, request: Request) -> None:
        super().__init__(context, request)
        self.key, self.turnstile = lock_names(context, request.name, request.kind.family)
        self.owner = secrets.token_hex(16)
        self.requested = None
        self._asked = False
        """The server may know of this owner."""
        self._granted = False
        """The last answer was that this claim has the row."""
        self._turn: MySQLSession | None = None
        """The session that has the turnstile for this claim, or may have it."""
        self._remaining = 0.0
        """Seconds for which the row was held when it was last seen; below zero: free since."""
        self._polls: Backoff
        """Set in `_blocking`."""
        self._user = -1
        """The session that had the turnstile at the last poll; 0: none."""

    @property
    def row(self) -> str:
        """The key of the row: that of the lock."""
        return self.key

    # --- asking

    async def _try_on(self, session: MySQLSession) -> Grant | None:
        await left(self._context, self.turnstile)
        # A user lock that a session has can be had by it again: another claim of this client must not count as this one.
        mine = session.locks.setdefault(self.turnstile, self) is self
        if mine:
            self._turn = session
        turn = self._context.statements("turn", turnstile=quote(self.turnstile)) if mine else "0"
        grant, passed = await self._enter(session, turn, put_back=True)
        if mine and not (grant is not None and passed):
            session.locks.pop(self.turnstile, None)
            self._turn = None
            if grant is not None:
                self._context.sessions.tasks.spawn(self._free_turnstile(), "aiolock-mysql-turnstile")
        return grant

    async def _in_turn(self, position: Position, session: MySQLSession) -> Grant | None:
        grant, _ = await self._enter(session, "1", put_back=False)
        if grant is not None and self._position is position:
            self._position = None
            self._turn = position.hand_over()
            self._turn.locks[self.turnstile] = self
        return grant

    async def _enter(self, session: MySQLSession, turn: str, *, put_back: bool) -> tuple[Grant | None, bool]:
        context, request = self._context, self.request
        self._asked = True
        packet = context.statements(
            "enter",
            turn=turn,
            id=quote(self.key),
            family=quote(request.kind.family.value),
            name=hexed(request.name),
            owner=quote(self.owner),
            label=hexed(request.label),
            value=f"_binary X'{request.value.hex()}'",
            block=BLOCK,
            ttl=round(request.ttl * 1_000_000),
            grace=round(GRACE * 1_000_000),
            turnstile=quote(self.turnstile),
            put_back=int(put_back),
        )
        answers, sent = await context.change(packet, session, key=self.key)
        token, remaining, passed, _ = answers[-1].rows[0]
        self._remaining = remaining / 1_000_000
        self._granted = bool(token)
        if not token:
            return None, bool(passed)
        return context.granted(self, int(token), 1 if request.fair else BLOCK, sent), bool(passed)

    async def extend(self, seconds: float, number: int) -> Grant:
        """Give the row another life."""
        context = self._context
        values = {"id": quote(self.key), "owner": quote(self.owner), "number": number}
        packet = context.statements("extend", life=round(seconds * 1_000_000), **values)
        [*_, rows], sent = await context.within(context.change(packet, key=self.key))
        owner, forced, left = rows.rows[0] if rows.rows else (None, None, 0)
        if owner != self.owner or int(left) <= 0:
            raise LockLost(self.request.name, "force-released" if forced == self.owner else "revoked")
        return Grant(0, 0, expires_at(sent, seconds), demand=True)

    # --- waiting

    def _blocking(self) -> Blocking:
        self._user, self._polls = -1, Backoff(self._context.random, *POLLS)
        statements, turnstile = self._context.statements, quote(self.turnstile)
        return Blocking(
            self.turnstile,
            statements("wait_for_turnstile", turnstile=turnstile, who=self.request.label.encode().hex()),
            statements("put_back", turnstile=turnstile),
        )

    def _pause(self) -> float:
        position = self._position
        if position is None:
            return super()._pause()
        if position.state is PositionState.TURN:
            # First in the queue already, and refused by the row: its holder has no turnstile to leave.
            return min(self._polls.next(), max(self._remaining, 0.001))
        # The row should have become free by then.
        return min(max(self._remaining, 0.0), LONGEST_POLL) + GRACE

    async def _poll(self, position: Position) -> float:
        """Read the row and the turnstile; return the seconds until the next poll."""
        session = position.session
        try:
            remaining, user = await self._read_state()
        except BackendRefused:
            # The table was dropped, for example, so no row will ever be free.
            raise
        except BackendError:
            # The server cannot be asked; if the position is gone as well, its task wakes the claim.
            return GRACE
        action, pause = judge(
            remaining, user, session.id if session is not None else -1, again=user == self._user
        )
        self._user = user
        if action is PollAction.KILL:
            await kill_holder(self._context, self.turnstile, user)
        elif action is PollAction.REQUEUE and session is not None:
            session.abort()
        return pause

    async def _read_state(self) -> tuple[float, int]:
        """Return for how many seconds the row is held (below zero: free since), and which session has the turnstile."""
        context = self._context
        packet = context.statements("poll", id=quote(self.key), turnstile=quote(self.turnstile))
        remaining, user = (await context.ask(packet))[0].rows[0]
        return int(remaining) / 1_000_000, int(user)

    async def _free_turnstile(self) -> None:
        """End the session that has the turnstile while this claim has the row: else its release would wake no waiter."""
        try:
            _, user = await self._read_state()
        except BackendError:
            return
        if user:
            await kill_holder(self._context, self.turnstile, user)

    # --- leaving

    async def _release(self, keep: float) -> bool | None:
        held: bool | None = None
        position, session, begun = self._position, self._turn, self._begun
        if session is None and position is not None and position.state is PositionState.TURN:
            # Behind an attempt that may be on its way there.
            session = position.session
        if begun is not None:
            await asyncio.wait([begun])
            self._begun = None
        if session is not None and not session.alive:
            session = None
        if begun is not None and not begun.cancelled() and begun.exception() is None:
            held = begun.result()[0].changed > 0
        elif self._asked:
            packet, change = self._leaving_packet(session, keep), self._context.change
            try:
                answers, _ = await change(packet, session, key=self.key, repeat=begun is not None)
                if begun is None:
                    held = answers[-1 if session is None or session is not self._turn else -2].changed > 0
            except BackendUnavailable:
                # It may have been carried out, so nothing follows from the answer to another copy.
                if session is not None and not session.alive:
                    session = None
                await change(packet, session, key=self.key)
        if self._turn is not None and session is self._turn:
            self._forget(self._turn)
        self._turn = None
        await self._leave_queue()
        return held

    def _begin_release(self, keep: float) -> bool:
        context = self._context
        session = self._turn or context.sessions.main_now
        if not self._granted or session is None or context.crowded(self.key):
            return False
        try:
            self._begun = session.begin(self._leaving_packet(session, keep))
        except BackendUnavailable:
            return False
        return True

    def _leaving_packet(self, session: MySQLSession | None, keep: float) -> str:
        """Return the packet that gives back the row; and behind it the turnstile, if ``session`` has it."""
        statements = self._context.statements
        packet = statements(
            "leave", id=quote(self.key), owner=quote(self.owner), keep=round(keep * 1_000_000)
        )
        if session is not None and session is self._turn:
            packet += "; " + statements("put_back", turnstile=quote(self.turnstile))
        return packet

    def _forget(self, session: MySQLSession) -> None:
        session.locks.pop(self.turnstile, None)
        if session.contended:
            self._context.sessions.give(session)

    def lose_turnstile(self) -> None:
        """Give back the turnstile alone; the row has another owner already."""
        session, self._turn = self._turn, None
        if session is not None and session.alive:
            session.send(self._context.statements("put_back", turnstile=quote(self.turnstile)))
            self._forget(session)
