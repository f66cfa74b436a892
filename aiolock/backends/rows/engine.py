"""The engine of one opening: writers of lock rows, sessions with their heartbeats, and verification of what is held."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

from aiolock.backends.rows.context import Context, row_key
from aiolock.backends.rows.lockrow import Leave
from aiolock.backends.rows.observer import Observer
from aiolock.backends.rows.session import RowSession, RowSessions
from aiolock.backends.rows.writer import Member, MemberState, RowWriter
from aiolock.core.backend import Event, EventKind
from aiolock.core.inbox import Inbox, WakeReason
from aiolock.errors import BackendError
from aiolock.types import Family

__all__ = ["Engine"]

REMEMBERED_ROWS = 1_000
"""Rows that a client remembers without a claim in them, so that a lock that it used last costs one write."""
TOGETHER = 1_000
"""Rows that are verified by one request."""


class Engine:
    """The context of claims and registers: what they and the backend of one opening share. It does not know the backend.

    What in other backends is fixed changes here with each answer (sessions, rows that were read, heartbeats that are due),
    because the client decides what there the server does. The calls of the store, and the times by which their answers are
    judged, are in its :class:`Context`.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.sessions = RowSessions(context, self._stop_heartbeats)
        self.observer = Observer(context, self._waiting_rows)
        self.watchers: dict[str, set[Inbox[None]]] = {}
        """The inboxes of registers that are watched, by key."""
        self._writers: OrderedDict[str, RowWriter] = OrderedDict()
        self._waiting: dict[str, RowWriter] = {}
        """Those in which a claim waits, and some in which one did."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """The timers of heartbeats, by session."""
        self._settle_until = 0.0
        """Until when a closing client waits, on its clock."""
        self._busy: dict[str, float] = {}
        """The time at which a session was last seen in use."""
        self._watch_due = False

    def writer(self, name: str, family: Family) -> RowWriter:
        """Return the writer of a lock's row."""
        return self._writer(row_key(self.context.settings.namespace, "l", family, name), name)

    def _writer(self, key: str, name: str) -> RowWriter:
        writer = self._writers.get(key)
        if writer is None:
            writer = self._writers[key] = RowWriter(
                self.context,
                key,
                name,
                self.observer.observe_once,
                self.begin_renewal,
                self._waits,
                self.observer.waiters_changed,
            )
            self._forget_idle()
        else:
            self._writers.move_to_end(key)
        return writer

    def _waits(self, writer: RowWriter) -> None:
        self._waiting[writer.key] = writer

    def _waiting_rows(self) -> list[RowWriter]:
        """Return the writers in which a claim waits, without going through all: thousands of others may have holds."""
        self._waiting = {key: writer for key, writer in self._waiting.items() if writer.waiting}
        return list(self._waiting.values())

    def _forget_idle(self) -> None:
        if len(self._writers) > REMEMBERED_ROWS:
            # Two for each that is added, so that they come to be fewer.
            for key in list(itertools.islice(self._writers, 2)):
                if self._writers[key].idle:
                    del self._writers[key]
                else:
                    self._writers.move_to_end(key)

    # --- reports of the store

    def changed(self, key: str | None) -> None:
        """Read a row that may have changed, if a claim is in it or it is watched."""
        for watched in [key] if key is not None else list(self.watchers):
            for inbox in self.watchers.get(watched, ()):
                inbox.wake(WakeReason.NOTIFIED)
        if key is None:
            self.observer.wake(poll=True)
        elif (writer := self._writers.get(key)) is not None:
            writer.version = None
            if writer.members:
                writer.serve()

    def interrupted(self) -> None:
        """Forget what is known after a reconnect, and check again what was not durable."""
        context = self.context
        context.connection += 1
        known, context.answered_since = context.answered_since, False
        if context.closed or not known:
            # Nothing was learnt on this connection, and the loss of the one before is known.
            return
        self.observer.interrupted()
        for writer in list(self._writers.values()):
            writer.forget()
            if writer.waiting:
                writer.serve()
        for session in self.sessions.open.values():
            for claim, key, name in session.interrupted():
                if not (checking := self._writer(key, name)).leaves(claim):
                    checking.submit(Leave(claim), session)
        for inboxes in self.watchers.values():
            for inbox in inboxes:
                inbox.wake(WakeReason.RECONNECTED)
        context.events.put(Event(EventKind.DOUBT))

    def replaced(self) -> None:
        """End all sessions, because other rows have taken the place of theirs; :meth:`interrupted` follows."""
        for session in list(self.sessions.open.values()):
            session.dead = True
            self._mark_dead(session)

    def watch(self) -> None:
        """Report to the store soon which rows are waited for."""
        if not self._watch_due:
            self._watch_due = True
            asyncio.get_running_loop().call_soon(self._watch)

    def _watch(self) -> None:
        self._watch_due = False
        rows = [writer.key for writer in self._waiting_rows()]
        self.context.store.watch(frozenset([*rows, *self.watchers]))

    # --- renewals

    def begin_renewal(self, session: RowSession) -> asyncio.Future[None]:
        """Start a renewal of everything that names a session, as a task of the client."""
        return self.context.begin(self.renew(session), "aiolock-heartbeat")

    async def renew(self, session: RowSession, ttl: float | None = None) -> None:
        """Send a heartbeat and, in the same flight, verify the rows in which this client holds or waits.

        With ``ttl``, the session has that ttl from this heartbeat on. Raises :class:`BackendError` if the heartbeat or a read was
        not answered; answers that came count nevertheless. Cancelling it does not end the heartbeat, but waits for its answer.
        """
        work = session.heartbeat() if ttl is None else session.extend(ttl)
        heartbeat = self.context.begin(work, "aiolock-heartbeat")
        try:
            await self._verify([session])
        finally:
            await asyncio.wait({heartbeat})
            if session.dead:
                self._mark_dead(session)
        try:
            heartbeat.result()
        except BackendError as error:
            for writer in self._writers.values():
                writer.refuse(error)
            raise

    async def verify(self, sessions: Collection[RowSession]) -> None:
        """Verify the holds of sessions whose claims are ``fixed``, which no heartbeat prolongs.

        One flight reads the versions of the lock rows and of the session rows; the rows that have changed are read afterwards.
        The holds of a session that is dead are lost. Raises :class:`BackendError` if a read was not answered. Cancelling it
        changes nothing at the server.
        """
        await self._verify(sessions, sessions)

    async def _verify(self, sessions: Collection[RowSession], rows_of: Collection[RowSession] = ()) -> None:
        """Read the versions of all rows in which the sessions have claims, and the rows that have changed.

        Cancelling it changes nothing at the server.

        :param rows_of: the sessions whose own rows are read as well.
        """
        writers = dict.fromkeys(
            writer
            for session in sessions
            for writer, member in self._members(session)
            if member.state is not MemberState.ENTERING
        )
        rows: list[RowWriter | RowSession] = [*writers, *rows_of]
        if len(rows) <= TOGETHER:
            await self._verify_rows(rows)
            return
        # All in one flight, and each in a task: what is done with the answers holds up the event loop for a moment each time.
        parts = [
            self.context.begin(self._verify_rows(rows[first : first + TOGETHER]), "aiolock-verify")
            for first in range(0, len(rows), TOGETHER)
        ]
        await asyncio.wait(parts)
        for part in parts:
            part.result()

    async def _verify_rows(self, rows: Sequence[RowWriter | RowSession]) -> None:
        """Read the versions of rows of locks and sessions, and those that have changed. Cancelling it is as for :meth:`_verify`."""
        if not rows:
            return
        answers, flight = await self.context.versions([row.key for row in rows])
        begun = flight.sent
        changed: list[RowWriter] = []
        doubtful: list[RowSession] = []
        for row, answer in zip(rows, answers, strict=True):
            if isinstance(row, RowSession):
                if answer.version != row.version:
                    doubtful.append(row)
            elif not row.confirm(answer.version, flight):
                changed.append(row)
        await asyncio.gather(*(session.check() for session in doubtful))
        for session in doubtful:
            if session.dead:
                self._mark_dead(session)
        while changed:
            found, flight = await self.context.get([writer.key for writer in changed])
            # A row that was written while the read was under way is not judged by it, but by an answer that came first.
            changed = [
                writer
                for writer, row in zip(changed, found, strict=True)
                if not writer.learn(row, flight) and not writer.shown_since(begun)
            ]

    def _members(self, session: RowSession) -> Iterator[tuple[RowWriter, Member]]:
        """Yield the claims that name a session, with the writers of their rows."""
        for claim, key in list(session.keys.items()):
            writer = self._writers.get(key)
            if writer is not None and (member := writer.members.get(claim)) is not None:
                yield writer, member

    def _mark_dead(self, session: RowSession) -> None:
        """Record that a session is dead: its holds are lost, and its waiting claims enter anew."""
        if session.id not in self.sessions.open:
            return
        self.sessions.mark_dead(session)
        for writer, member in self._members(session):
            if member.state is MemberState.HELD:
                writer.lost(member, "revoked")
            else:
                writer.lapse(member)

    def keep_alive(self, session: RowSession) -> None:
        """Have heartbeats sent while a claim needs them, and for a ttl longer."""
        if session.id not in self._timers:
            self._busy[session.id] = self.context.clock()
            self._set_timer(session, session.ttl / 4)

    def _set_timer(self, session: RowSession, seconds: float) -> None:
        # Between heartbeats there is no task: an idle client leaves nothing running.
        loop = asyncio.get_running_loop()
        self._timers[session.id] = loop.call_later(seconds, self._send_heartbeat_if_due, session)

    def _send_heartbeat_if_due(self, session: RowSession) -> None:
        """Send a heartbeat if one is due; end the heartbeats of a session that has been idle for its ttl."""
        context, now = self.context, self.context.clock()
        if session.busy:
            self._busy[session.id] = now
        if session.dead or session.rests or context.closed or now - self._busy[session.id] >= session.ttl:
            self._stop_heartbeats(session)
            return
        due = session.last_sent + session.ttl / 2.5
        if due > now:
            self._set_timer(session, min(due - now, session.ttl / 4))
        else:
            context.tasks.spawn(self._send_heartbeat(session), "aiolock-heartbeat")

    async def _send_heartbeat(self, session: RowSession) -> None:
        """Renew, and set the timer again: sooner after an error, of whatever kind. Ends with the client."""
        seconds = session.ttl / 10 * self.context.random.uniform(0.5, 1.0)
        try:
            await self.renew(session)
            seconds = session.ttl / 4
        except BackendError:
            pass
        finally:
            if not self.context.closed and session.id in self._timers:
                self._set_timer(session, seconds)

    def _stop_heartbeats(self, session: RowSession) -> None:
        """Set no more timers of a session."""
        self._busy.pop(session.id, None)
        if (timer := self._timers.pop(session.id, None)) is not None:
            timer.cancel()

    # --- the end

    async def settle(self, timeout: float, key: str | None = None) -> None:
        """Wait until all releases were answered, or those of one row, for at most ``timeout`` seconds.

        What is left of the time is for :meth:`close`, which follows when the client is closed. Cancelling it ends the wait only.
        """
        self._settle_until = self.context.clock() + timeout
        writers = [writer for each, writer in self._writers.items() if key in (None, each)]
        if leaves := [future for writer in writers for future in writer.leaving]:
            await asyncio.wait(leaves, timeout=timeout)

    async def close(self) -> None:
        """End all sessions and tasks. Never raises. Cancelling it may leave some of them, for another call."""
        context = self.context
        closing = [context.begin(session.close(), "aiolock-close") for session in self.sessions.open.values()]
        context.closed = True
        closing += self.sessions.ending
        for timer in self._timers.values():
            timer.cancel()
        if closing:
            # With no time left they are sent, and the sessions end by their ttl.
            left = self._settle_until - context.clock()
            await asyncio.wait(closing, timeout=max(0.0, min(left, context.timeout / 4)))
        for task in list(context.tasks):
            task.cancel()
        for writer in self._writers.values():
            writer.close()
        if context.tasks:
            await asyncio.wait(set(context.tasks), timeout=context.timeout)
