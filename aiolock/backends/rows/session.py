"""Sessions: one row for each client and ttl, whose heartbeat renews every hold and queue position that names it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from functools import partial

from aiolock.backends.rows.context import Context, Flight, new_version
from aiolock.backends.rows.liveness import (
    DEAD,
    MOST_ENDED,
    EndedClaims,
    SessionRow,
    decode_session,
    encode_session,
    expiry,
    needs_heartbeat,
)
from aiolock.backends.rows.lockrow import UnknownFormat
from aiolock.backends.rows.store import Edit, Row
from aiolock.clock import Deadline, wall_clock
from aiolock.core.backend import Claim
from aiolock.errors import BackendError, BackendUnavailable, UnsafeBackend

__all__ = ["REMEMBERED", "RowSession", "RowSessions", "session_key"]

REMEMBERED = 86_400.0
"""Seconds for which the row of a dead session stays: longer than any client is stopped that learns of it."""
MOST_LEASES = 16_384
"""Bytes in a session row for present leases; nothing depends on them."""
MOST_UNUSED = 16
"""Sessions that a client has for ttls of which it has no claim: with another one, the one that was not used for longest ends."""
NUMBERS = 32
"""Heartbeats whose sending a client remembers."""


def session_key(namespace: str, session: str) -> str:
    """Return the key of a session row."""
    return f"{namespace}/s/{session}"


class RowSession:
    """One session of this client: :meth:`open`, then :meth:`heartbeat` until :meth:`close`; dead for ever once it is dead."""

    def __init__(
        self,
        context: Context,
        ttl: float,
        unused: Callable[[RowSession], None] = lambda _: None,
        *,
        alone: bool = False,
        kept: bool = False,
    ) -> None:
        self.context = context
        self.ttl = ttl
        """The ttl in the newest heartbeat that was answered."""
        self._next_ttl = ttl
        self._kept = kept
        """True for a lock that is kept after its release."""
        self._unused = unused
        """Called when the last claim has left it."""
        self.alone = alone
        """True for a session of one claim, with a life of its own."""
        # Each attempt to open one has an id of its own, so that a late copy of another attempt opens nothing that is used.
        self.id: str = f"{context.address}-{context.order()}"
        self.key = session_key(context.settings.namespace, self.id)
        self.dead = False
        self.claims: dict[str, Claim] = {}
        """The claims that name it, until their removal was answered."""
        self.keys: dict[str, str] = {}
        """By claim, the key of the row that it is in."""
        self.ended = EndedClaims()
        self.heartbeat_sent: float = -math.inf
        """The time at which the newest heartbeat that was answered was sent."""
        self.answered = 0
        """The order number of its sending."""
        self.last_sent: float = -math.inf
        """The time at which the last heartbeat was sent."""
        self._version: str | None = None
        self._number = 0
        self._sent: dict[int, tuple[Flight, float]] = {}
        """The sending of each heartbeat, and its ttl."""
        self._turn = asyncio.Lock()

    @property
    def version(self) -> str | None:
        """The version of its row as the last answer has shown it; ``None`` if it is not known."""
        return self._version

    @property
    def busy(self) -> bool:
        """True while heartbeats are needed: for claims that are prolonged, or for ended claims that others may still see."""
        return any(not claim.fixed for claim in self.claims.values()) or len(self.ended) > 0

    @property
    def rests(self) -> bool:
        """True if no more heartbeats are to be sent, because its one claim has a life of its own."""
        return self.alone and not self.busy

    def add(self, name: str, claim: Claim, key: str) -> None:
        """Record that a claim names it, in the row with this key."""
        self.claims[name], self.keys[name] = claim, key

    def remove(self, name: str) -> None:
        """Record that a claim names it no more."""
        self.claims.pop(name, None)
        self.keys.pop(name, None)
        if not self.claims:
            self._unused(self)

    @property
    def full(self) -> bool:
        """True if new claims need another session."""
        return len(self.ended) >= MOST_ENDED

    @property
    def late(self) -> bool:
        """True if an acquire needs a heartbeat in the same flight."""
        return needs_heartbeat(self.context.clock(), self.heartbeat_sent, self.ttl)

    @property
    def unproven(self) -> bool:
        """True if its row was not seen since a reconnect, in a store where a session without a row is dead at once: what it holds may
        count for no other client."""
        return self.context.store.expires and self._version is None and not self.dead

    async def open(self) -> None:
        """Insert the row, flushed, before any other row names it. Cancelling it may leave the row, which ends by its ttl."""
        if self.context.reading is None or self._old_clock:
            # The row carries its expiry by the shared clock, if the store has one.
            await self.context.get([self.key])
        edit = self._edit("")
        flight = self.context.flight()
        [row] = await self.context.store.compare_and_set([edit])
        if row is None:
            raise BackendUnavailable("the row of a new session is there already")
        self._answered(flight, self.ttl, row)

    @property
    def _old_clock(self) -> bool:
        """True if the shared clock was read longer than a ttl ago: one per cent of that time is added to the expiry, which keeps a
        dead client's locks after hours without a request from others for minutes."""
        reading = self.context.reading
        return reading is not None and self.context.clock() - reading[1] > self._next_ttl

    def _edit(self, expected: str) -> Edit:
        context, now = self.context, self.context.clock()
        self._number += 1
        expires = None
        if context.reading is not None:
            clock, read = context.reading
            expires = expiry(clock, read, now, self._next_ttl)
        leases, more = self._leases()
        row = SessionRow(
            self._next_ttl,
            self._number,
            self.ended.announce(),
            expires=expires,
            kept=wall_clock() + self._next_ttl if self._kept else None,
            leases=leases,
            more=more,
        )
        self.last_sent = now
        return Edit(self.key, expected, new_version(), encode_session(row), self._row_ttl)

    def _leases(self) -> tuple[dict[str, tuple[int, float, str, int]], bool]:
        """Return the present leases that others cannot know from the rows of the locks, and whether some are left out."""
        leases: dict[str, tuple[int, float, str, int]] = {}
        room, now = MOST_LEASES, wall_clock()
        for claim in self.claims:
            if (present := self.claims[claim].present) is not None:
                room -= len(claim) + len(json.dumps(present.label)) + 50
                if room < 0:
                    return leases, True
                leases[claim] = present.token, round(now - present.age, 3), present.label, present.waiting
        return leases, False

    @property
    def _row_ttl(self) -> float:
        return self._next_ttl if self.context.store.expires else self._next_ttl + REMEMBERED

    async def heartbeat(self) -> None:
        """Send a heartbeat, or join one that is under way; raise :class:`BackendError` if it is not known to count.

        To be called in tasks of the client only: cancelling it leaves its answer unknown.
        """
        before = self.answered
        async with self._turn:
            if not self.dead and self.answered == before:
                await self._heartbeat()

    async def extend(self, ttl: float) -> None:
        """Send a heartbeat with another ttl, after those that were begun before. Raises and is to be called as :meth:`heartbeat`.

        Cancelling it leaves the answer unknown; later heartbeats may have that ttl.
        """
        async with self._turn:
            self._next_ttl = ttl
            if not self.dead:
                await self._heartbeat()

    async def check(self) -> None:
        """Find out whether it is alive, and its version. To be called as :meth:`heartbeat`. Cancelling it changes nothing."""
        async with self._turn:
            if not self.dead:
                await self._read()

    async def _heartbeat(self) -> None:
        read_clock = self._old_clock
        trouble: BackendError | None = None
        for _ in range(2):
            while (version := self._version) is None or read_clock:
                # A reconnect meanwhile leaves the version unknown.
                read_clock = False
                await self._read()
                if self.dead:
                    return
            edit = self._edit(version)
            flight = self.context.flight()
            self._sent[number := self._number] = flight, self._next_ttl
            self._sent.pop(number - NUMBERS, None)
            row: Row | None = None
            try:
                [row] = await self.context.store.compare_and_set([edit])
            except BackendError as error:
                trouble = error
            if row is not None:
                self._answered(flight, self._next_ttl, row)
                return
            # Unanswered, or another version: a copy of an earlier heartbeat, or the session was declared dead.
            self._version = None
            found = await self._read()
            if self.dead or (found == number and self.context.store.reads_prove):
                return
            if found != number:
                break
            # It is there, and may be undone: the next one proves that it will not.
        raise trouble or BackendUnavailable("another heartbeat of this session came first")

    async def _read(self) -> int:
        """Find out which heartbeat counted last; return its number. A session that is dead or absent has ended."""
        [row], flight = await self.context.get([self.key])
        if not row.version:
            self.dead = True
            return 0
        try:
            content = decode_session(row.value)
        except UnknownFormat as error:
            raise UnsafeBackend(
                f"the session row of this client was not written by this version of the library: {error}"
            ) from None
        if content.dead:
            self.dead = True
            return 0
        if self.context.store.reads_prove and (sent := self._sent.get(content.heartbeat)) is not None:
            self._answered(*sent, row)
        if flight.connection == self.context.connection:
            self._version = row.version
        return content.heartbeat

    def _answered(self, flight: Flight, ttl: float, row: Row) -> None:
        """Record that a heartbeat counts."""
        if flight.order >= self.answered:
            self.heartbeat_sent, self.answered, self.ttl = flight.sent, flight.order, ttl
        if flight.connection == self.context.connection:
            self._version = row.version
            self.context.flushed(flight)

    def interrupted(self) -> list[tuple[str, str, str]]:
        """Forget the version after a reconnect; return the ended claims to check again, with their rows and locks."""
        self._version = None
        return self.ended.interrupted()

    async def close(self) -> None:
        """Delete the row; with claims left, declare the session dead instead, so that they count no more. Never raises.

        After cancelling it the session ends by its ttl at the latest.
        """
        if not self.dead:
            self.dead = True
            await self.delete()

    async def delete(self) -> None:
        """Delete the row of a session that was ended, after a heartbeat that is under way. Never raises.

        Cancelling it may leave the row, which ends by its ttl; :meth:`close` calls it.
        """
        async with self._turn:
            if self._version is not None:
                await self._delete(self._version)

    async def _delete(self, version: str) -> None:
        # The write is flushed, and so makes the removals durable that were answered before it.
        left = bool(self.claims) or self.ended.unanswered(self.context.connection)
        value = encode_session(DEAD) if left else None
        edit = Edit(self.key, version, new_version() if left else "", value, REMEMBERED if left else None)
        try:
            await self.context.store.compare_and_set([edit])
        except BackendError:
            # It ends by its ttl.
            return


class RowSessions:
    """The sessions of one client: one for each ttl, and others for claims that have one alone, until no claim names them.

    :param ended: called with a session that has ended.
    """

    def __init__(self, context: Context, ended: Callable[[RowSession], None]) -> None:
        self.context = context
        self.open: dict[str, RowSession] = {}
        """All that are not dead, by id."""
        self.ending: set[asyncio.Future[None]] = set()
        """The deletions of rows that are under way."""
        self._ended = ended
        self._current: dict[float, RowSession] = {}
        """By ttl, the session for new claims."""
        self._opening: dict[float, asyncio.Future[RowSession]] = {}
        self._unused: dict[str, RowSession] = {}
        """Of the current ones, those that no claim named when the last one left, the longest unused one first."""

    async def get(self, ttl: float, deadline: Deadline) -> RowSession:
        """Return the session for new claims of this ttl; open one if there is none.

        Raises :class:`BackendError`. Cancelling it lets the opening go on.
        """
        session = self._current.get(ttl)
        if session is not None and not session.dead and not session.full:
            return session
        opening = self._opening.get(ttl)
        if opening is None or opening.done():
            opening = self._opening[ttl] = self.context.begin(self._open(ttl), "aiolock-session")
            opening.add_done_callback(partial(self._opened, ttl))
        return await self.context.answered(opening, deadline)

    def _opened(self, ttl: float, opening: asyncio.Future[RowSession]) -> None:
        if self._opening.get(ttl) is opening:
            del self._opening[ttl]

    async def _open(self, ttl: float) -> RowSession:
        session = await self._add(RowSession(self.context, ttl, self._not_used))
        before, self._current[ttl] = self._current.get(ttl), session
        for each in (before, session):
            if each is not None and not each.claims:
                self._not_used(each)
        return session

    async def alone(self, ttl: float) -> RowSession:
        """Open a session for one claim, with whose removal it ends: a claim with a life of its own.

        Cancelling it is cancelling :meth:`RowSession.open`.
        """
        return await self._add(RowSession(self.context, ttl, self._not_used, alone=True))

    async def _add(self, session: RowSession) -> RowSession:
        await session.open()
        self.open[session.id] = session
        self.context.liveness.own[session.id] = session.claims
        return session

    def _not_used(self, session: RowSession) -> None:
        """End a session that no claim names, unless it is one of the last :data:`MOST_UNUSED` for new claims."""
        if self._current.get(session.ttl) is not session:
            self._end(session)
            return
        self._unused.pop(session.id, None)
        self._unused[session.id] = session
        while len(self._unused) > MOST_UNUSED:
            first = self._unused.pop(next(iter(self._unused)))
            if not first.claims:
                self._end(first)

    def _end(self, session: RowSession) -> None:
        """Delete the row of a session that no row names any more."""
        if self._forget(session):
            # At once: a claim that was about to name it enters under another one.
            session.dead = True
            deleting = self.context.begin(session.delete(), "aiolock-session")
            self.ending.add(deleting)
            deleting.add_done_callback(self.ending.discard)

    def _forget(self, session: RowSession) -> bool:
        """Forget a session; return whether it was one of this client."""
        if self.open.pop(session.id, None) is None:
            return False
        self.context.liveness.own.pop(session.id, None)
        self._unused.pop(session.id, None)
        if self._current.get(session.ttl) is session:
            del self._current[session.ttl]
        self._ended(session)
        return True

    async def keep(self, seconds: float, deadline: Deadline) -> str:
        """Open a session without heartbeats, for a lock that stays taken without a holder; return its id.

        Raises :class:`BackendError`. Cancelling it lets the opening go on.
        """
        session = RowSession(self.context, seconds, kept=True)
        await self.context.answered(self.context.begin(session.open(), "aiolock-session"), deadline)
        return session.id

    def mark_dead(self, session: RowSession) -> None:
        """Note that a session is dead: it is no longer one of this client."""
        if self._forget(session):
            self.context.liveness.dead.add(session.id)
