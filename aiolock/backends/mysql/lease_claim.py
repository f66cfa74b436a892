"""The lease mode: a row says who holds, until when, and under which token; waiters block on a turnstile.

The row is the truth, and one atomic statement decides about it. The turnstile is a user lock that the holder has and
the waiters block on, so that the server itself keeps them in order and wakes the next one when the holder leaves or
dies. Whoever comes through it asks the row again. Losing a turnstile costs time, never exclusion: a look at the row's deadline
is always armed, and a turnstile whose row has been free for a while is taken from whoever sits on it.
"""

from __future__ import annotations

import asyncio
import secrets
from enum import Enum
from typing import TYPE_CHECKING

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.failures import NOT_NOW, code, locked
from aiolock.backends.mysql.holding import BLOCK
from aiolock.backends.mysql.place import Place, Queue, Stand
from aiolock.backends.mysql.statements import hexed, quote
from aiolock.backends.mysql.turns import RETRY, TurnClaim, left
from aiolock.contract import Bid, Grant
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable

if TYPE_CHECKING:
    from aiolock.backends.mysql.lease import LeaseMode

__all__ = ["GRACE", "MOMENT", "LeaseClaim", "Look", "judge"]

GRACE = 0.5
"""For how many seconds a row is free before somebody without the turnstile may take it."""
MOMENT = 0.2
"""For how many seconds somebody has the turnstile of such a row before its session is ended."""
FIRST_LOOK, LAST_LOOK = 0.005, 0.25
"""Seconds between looks of the first in line at a row whose holder cannot wake it."""


class Look(Enum):
    """What to do after a look at a lock for which we are in line."""

    WAIT = "somebody holds it"
    KILL = "the turnstile is with somebody who does not use it"
    ANEW = "our place is not what it seems"


def judge(remaining: float, user: int, mine: int, *, again: bool) -> tuple[Look, float]:
    """What to do about a row that is held for ``remaining`` seconds and whose turnstile session ``user`` has, and when
    to look next.

    ``again``: the last look saw the same user. A holder that is well has the row; a grantee on its way to it needs a
    moment only, as does the answer to a turn that we have.
    """
    if user in (0, mine):
        return (Look.ANEW if again else Look.WAIT), GRACE
    if remaining > 0:
        return Look.WAIT, remaining + GRACE
    if remaining > -GRACE:
        return Look.WAIT, GRACE
    # There may be several in line who are dead, and get the turn one after the other.
    return (Look.KILL if again else Look.WAIT), MOMENT


class LeaseClaim(TurnClaim):
    """One owner of a row, or somebody who wants to be."""

    __slots__ = (
        "_asked",
        "_granted",
        "_look",
        "_mode",
        "_pause",
        "_session",
        "_turn",
        "_user",
        "key",
        "owner",
        "requested",
        "turnstile",
    )

    def __init__(self, mode: LeaseMode, bid: Bid) -> None:
        super().__init__(mode.backend, bid)
        self._mode = mode
        self.key = mode.backend.key(bid.name, bid.kind.family)
        self.turnstile = f"aiolock:t:{self.key}"
        self.owner = secrets.token_hex(16)
        self.requested: str | None = None
        """Why the holder was asked to let go, if it was."""
        self._asked = False
        """Whether the server may know of this owner."""
        self._granted = False
        """Whether the last answer was that the row is ours."""
        self._turn: Session | None = None
        """The session that has the turnstile for us, or may have it."""
        self._look = 0.0
        self._pause = FIRST_LOOK
        self._user = -1

    # --- asking

    async def _try_on(self, session: Session) -> Grant | None:
        await left(self._backend.sessions.holder(self.turnstile))
        mine = session.locks.setdefault(self.turnstile, self) is self
        if mine:
            self._turn = session
        # A user lock that a session has can be had by it again: another claim of ours must not count as us.
        grant, passed = await self._enter(
            session,
            self._backend.statements("turn", turnstile=quote(self.turnstile)) if mine else "0",
            put_back=True,
        )
        if mine and not (grant is not None and passed):
            session.locks.pop(self.turnstile, None)
            self._turn = None
            if grant is not None:
                self._mode.free_turnstile(self)
        return grant

    async def _in_turn(self, place: Place, session: Session) -> Grant | None:
        grant, _ = await self._enter(session, "1", put_back=False)
        if grant is None:
            return None
        if self._place is place:
            self._place = None
            self._turn = place.hand_over()
            self._turn.locks[self.turnstile] = self
        return grant

    async def _enter(self, session: Session, turn: str, *, put_back: bool) -> tuple[Grant | None, bool]:
        backend, bid = self._mode.backend, self.bid
        count = 1 if bid.fair else BLOCK
        self._asked = True
        packet = backend.statements(
            "enter",
            turn=turn,
            id=quote(self.key),
            namespace=quote(backend.settings.namespace),
            family=quote(bid.kind.family.value),
            name=hexed(bid.name),
            owner=quote(self.owner),
            label=hexed(bid.label),
            block=BLOCK,
            ttl=round(bid.ttl * 1_000_000),
            grace=round(GRACE * 1_000_000),
            turnstile=quote(self.turnstile),
            put_back=int(put_back),
        )
        answers, sent = await self._carefully(packet, session)
        token, remaining, passed, _ = answers[-1].rows[0]
        self._look = remaining / 1_000_000
        self._granted = bool(token)
        if not token:
            return None, bool(passed)
        return backend.granted(self, int(token), count, sent), bool(passed)

    async def _carefully(
        self, packet: str, session: Session | None, *, repeat: bool = True
    ) -> tuple[list[Result], float]:
        """Have a packet carried out that changes the row; its answers, and when it was sent.

        Once somebody has had the row locked for long, others of ours are not to wait behind this for it. With
        ``repeat=False``, it is not sent again if it may have been carried out.
        """
        backend, key = self._backend, self.key
        clock, timeout = backend.settings.clock, backend.settings.command_timeout
        give_up = clock() + timeout
        while True:
            careful = backend.crowded.has(key, clock())
            probe = f"{backend.statements('unlocked', id=quote(key))}; " if careful else ""
            sent = clock()
            try:
                return await backend.ask(probe + packet, session, repeat=repeat), sent
            except BackendUnavailable as error:
                if locked(error):
                    backend.crowded.add(key, clock())
                if code(error.__cause__) not in NOT_NOW or clock() >= give_up:
                    raise
            except asyncio.CancelledError:
                # Whoever asks may have less time than the statement.
                if not careful and clock() - sent >= timeout / 2:
                    backend.crowded.add(key, clock())
                raise
            await backend.pause(RETRY)

    # --- waiting

    def _line_up(self) -> Place:
        self._user = -1
        self._pause = FIRST_LOOK
        backend = self._backend
        queue = Queue(
            self.turnstile,
            backend.statements("line_up", turnstile=quote(self.turnstile), who=self.bid.label.encode().hex()),
            backend.statements("put_back", turnstile=quote(self.turnstile)),
            backend.settings.command_timeout,
        )
        return Place(backend.sessions, queue)

    async def _wait(self, place: Place) -> None:
        if place.stand is Stand.TURN and self._user == 0:
            # First in line already, and refused by the row: its holder has no turnstile to leave.
            await asyncio.sleep(min(self._pause, max(self._look, 0.001)))
            self._pause = min(2 * self._pause, LAST_LOOK)
            return
        await self._watch(place)
        if place.stand is Stand.TURN:
            self._user = 0

    async def _watch(self, place: Place) -> None:
        """Wait for our turn; look at the row whenever it should have become free without that."""
        pause = max(self._look, 0.0) + GRACE
        while place.stand is Stand.WAITING:
            if await place.moved(pause):
                return
            try:
                remaining, user = await self._mode.look(self)
            except BackendRefused:
                # Whoever waits is told: the table was dropped, for example, so no row will ever be free.
                raise
            except BackendError:
                # The server cannot be asked. Whoever asks again will say so.
                if place.session is not None and not place.session.alive:
                    return
                pause = GRACE
                continue
            mine = place.session.id if place.session is not None else -1
            look, pause = judge(remaining, user, mine, again=user == self._user)
            self._user = user
            if look is Look.KILL:
                await self._mode.kill(self.turnstile, user)
            elif look is Look.ANEW and place.session is not None:
                place.session.abort()

    # --- leaving

    async def _release(self, keep: float) -> bool | None:
        held: bool | None = None
        place, session = self._place, self._turn
        if session is None and place is not None and place.stand is Stand.TURN:
            # Behind an attempt that may be on its way there.
            session = place.session
        begun = self._begun is not None
        answers = await self._answers()
        if session is not None and not session.alive:
            session = None
        if answers is not None:
            held = answers[0].changed > 0
        elif self._asked:
            packet = self._leaving_packet(session, keep)
            try:
                answers, _ = await self._carefully(packet, session, repeat=begun)
                if not begun:
                    held = answers[-1 if session is None or session is not self._turn else -2].changed > 0
            except BackendUnavailable:
                # It may have been carried out, so nothing follows from the answer to another copy.
                if session is not None and not session.alive:
                    session = None
                await self._carefully(packet, session)
        if self._turn is not None and session is self._turn:
            self._forget(self._turn)
        self._turn = None
        await self._leave_place()
        return held

    def _begin_release(self, keep: float) -> bool:
        backend, session = self._backend, self._turn or self._backend.sessions.main_now
        if not self._granted or session is None or backend.crowded.has(self.key, backend.settings.clock()):
            return False
        try:
            packet = self._leaving_packet(session, keep)
            self._begun = session.begin(packet, backend.settings.command_timeout)
        except BackendUnavailable:
            return False
        return True

    def _leaving_packet(self, session: Session | None, keep: float) -> str:
        """What gives back the row; and behind it the turnstile, if ``session`` has it."""
        statements = self._backend.statements
        packet = statements(
            "leave", id=quote(self.key), owner=quote(self.owner), keep=round(keep * 1_000_000)
        )
        if session is not None and session is self._turn:
            packet += "; " + statements("put_back", turnstile=quote(self.turnstile))
        return packet

    def _forget(self, session: Session) -> None:
        session.locks.pop(self.turnstile, None)
        if session.contended:
            self._mode.backend.sessions.give(session)

    def lose_turnstile(self) -> None:
        """Give up the turnstile alone; the row is somebody else's already."""
        session, self._turn = self._turn, None
        if session is not None and session.alive:
            packet = self._mode.backend.statements("put_back", turnstile=quote(self.turnstile))
            session.send(packet, self._mode.backend.settings.command_timeout)
            self._forget(session)
