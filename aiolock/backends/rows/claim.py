"""Claims and registers over a row store."""

from __future__ import annotations

import asyncio
import math
import secrets
from dataclasses import replace

from aiolock.backends.rows.context import new_future, new_version, row_key, unreadable
from aiolock.backends.rows.engine import Engine
from aiolock.backends.rows.lockrow import (
    Downgrade,
    Enter,
    Entered,
    Leave,
    RowHold,
    RowRequest,
    UnknownFormat,
    decode,
)
from aiolock.backends.rows.rules import BLOCK
from aiolock.backends.rows.session import RowSession
from aiolock.backends.rows.store import ALL, Edit
from aiolock.backends.rows.writer import Member, MemberState, Pending
from aiolock.clock import Deadline
from aiolock.core.backend import Grant, Release, Request
from aiolock.core.capabilities import Downgrade as CanDowngrade
from aiolock.core.capabilities import Entry, Extension, Register
from aiolock.core.inbox import Inbox, WakeReason
from aiolock.core.present import encode_value
from aiolock.core.tasks import Backoff
from aiolock.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    LockLost,
    copy_of,
    shorten,
)
from aiolock.types import READ, Family

__all__ = ["POLL", "RowClaim", "RowRegister"]

POLL = 2.0
"""Most seconds between two reads of a register that is watched."""
TRIES = 3
"""Sessions under which one call tries to enter, if they turn out to be dead."""


class RowClaim(CanDowngrade, Extension):
    """One request; it enters under another id if its session is dead."""

    __slots__ = (
        *("__weakref__", "_alone", "_answer", "_keeping", "_leave", "_member", "_writer"),
        "engine",
    )

    asks_again = True

    def __init__(self, engine: Engine, request: Request) -> None:
        super().__init__(request)
        self.engine = engine
        """The context of the claim."""
        self._writer = engine.writer(request.name, request.kind.family)
        self._member: Member | None = None
        self._leave: Pending | None = None
        self._keeping: asyncio.Future[None] | None = None
        """Opens the session of a lock that stays taken, and begins the release."""
        self._answer: Release | None = None
        self._alone: asyncio.Future[RowSession] | None = None
        """Opens the session of a claim with a life of its own."""

    @property
    def member(self) -> Member | None:
        """The state of the claim in the row, once a request was sent."""
        return self._member

    @property
    def key(self) -> str:
        """The key of the row."""
        return self._writer.key

    def shown_in(self, value: bytes) -> bool:
        """Return whether a value of the row contains the hold."""
        return self._hold_in(value) is not None

    def handed_over(self, value: bytes) -> bool:
        """Return whether its client has handed the hold over between its tasks since the grant that a value of the row contains."""
        hold = self._hold_in(value)
        return hold is not None and self.present is not None and self.present.token > hold.token

    def _hold_in(self, value: bytes) -> RowHold | None:
        try:
            row = decode(value)
        except UnknownFormat as error:
            raise unreadable(self.request.name, error) from None
        return None if self._member is None else row.holds.get(self._member.id)

    @property
    def stays(self) -> float:
        """Without end: the heartbeats of its client keep it, however long its release is not answered.

        A hold that is not renewed ends by itself.
        """
        return math.inf if self.request.life == math.inf else self.request.stays

    # --- acquire

    async def acquire(self, wait: bool) -> Grant | None:
        """Acquire the lock or join the queue, or take a grant that was pushed."""
        context = self.engine.context
        deadline = context.deadline()
        for _ in range(TRIES):
            if (
                self._inbox is not None
                and (grant := self._inbox.take()) is not None
                and grant.until - self.request.grace > context.clock()
            ):
                return grant
            if (waiting := self._member) is not None and (error := waiting.refused) is not None:
                waiting.refused = None
                raise copy_of(error)
            member = self._enter(await self._session(deadline))
            session = member.session
            self.engine.keep_alive(session)
            # Less than half a ttl is left, or a read alone has shown the hold: the heartbeat goes in the same flight, and nothing
            # is believed before its answer.
            heartbeat = self.engine.begin_renewal(session) if session.late or member.unproven else None
            entering = self._writer.submit(Enter(member.id, member.request, wait), session)
            try:
                entered = await self._answered(entering, deadline)
            except BackendUnavailable:
                if not wait or not entering.lost_races:
                    raise
                # The writer goes on, for as long as the caller waits. The claim asks again when that is answered.
                entering.future.add_done_callback(lambda _: self.inbox.wake(WakeReason.ANSWERED))
                return None
            if heartbeat is not None:
                await context.answered(heartbeat, deadline)
            while member.unproven:
                # The server may have let it in after it had forgotten the session, or may undo that it has.
                await context.answered(self.engine.begin_renewal(session), deadline)
            if session.dead or member.state is MemberState.GONE:
                continue
            if entered.limit is not None:
                self._forget(member)
                raise ConfigError(
                    f"semaphore {shorten(self.request.name)} has {entered.limit} permits, not {self.request.kind.limit}: "
                    "every client has to name the same limit; set_limit() changes it"
                )
            if entered.token:
                member.read = None
                context.expect_others(self)
                return Grant(entered.token, entered.tokens, member.until, bool(self._writer.row.queue))
            if wait:
                self.engine.observer.wake()
                self.engine.watch()
            else:
                self._forget(member)
            return None
        raise BackendUnavailable(
            "the sessions of this client are declared dead by others as soon as they are opened"
        )

    async def _session(self, deadline: Deadline) -> RowSession:
        """Return the session to enter with: that of all claims with this ttl, or one for a claim with a life of its own."""
        sessions, ttl, alone = self.engine.sessions, self.request.ttl, self._alone
        if self.request.life == math.inf:
            return await sessions.get(ttl, deadline)
        if alone is None or (alone.done() and not _usable(alone)):
            # Where a second attempt finds it: the caller may be cancelled meanwhile.
            alone = self._alone = self.engine.context.begin(sessions.alone(ttl), "aiolock-session")
        return await self.engine.context.answered(alone, deadline)

    def _enter(self, session: RowSession) -> Member:
        """Return the member to enter with: a claim does not move to another session, but enters anew."""
        member = self._member
        if member is not None and not member.session.dead:
            return member
        if member is not None:
            self._writer.submit(Leave(member.id), member.session)
        kind = self.request.kind
        request = RowRequest(
            id=secrets.token_hex(8),
            mode=kind.mode.value,
            ttl=session.ttl,
            label=self.request.label,
            permits=kind.permits,
            limit=kind.limit,
            block=1 if self.request.fair or not kind.exclusive else BLOCK,
            session=session.id,
            value=encode_value(self.request.value),
        )
        member = self._member = Member(self, request, session)
        # The engine may have forgotten an idle writer while the session was opened.
        self._writer = self.engine.writer(self.request.name, kind.family)
        session.add(member.id, self, self._writer.key)
        self._writer.members[member.id] = member
        return member

    async def _answered(self, pending: Pending, deadline: Deadline) -> Entered:
        entered = await self._writer.answered(pending, deadline)
        assert isinstance(entered, Entered)  # noqa: S101 - the result of these steps
        return entered

    def _forget(self, member: Member) -> None:
        """Forget a member that the answer says is not in the row, unless a copy of its request may be late."""
        self._member = None
        if member.doubtful:
            member.session.ended.begin(member.id, self._writer.key, self.request.name)
            self._writer.submit(Leave(member.id), member.session)
            return
        self._writer.members.pop(member.id, None)
        member.session.remove(member.id)

    async def downgrade(self) -> Grant:
        """Turn the write hold into a read hold."""
        member = self._member
        if member is None:
            raise LockLost(self.request.name, "revoked")
        step = self._writer.submit(Downgrade(member.id), member.session)
        entered = await self._answered(step, self.engine.context.deadline())
        if not entered.token:
            raise LockLost(self.request.name, "revoked")
        self.request = replace(self.request, kind=READ)
        member.request = replace(member.request, mode=READ.mode.value, block=1)
        return Grant(entered.token, 1, member.until, bool(self._writer.row.queue))

    async def extend(self, seconds: float, number: int) -> Grant:  # noqa: ARG002 - each is written against the one before
        """Send a heartbeat of the claim's own session, with another ttl, and verify the row in the same flight; see :meth:`Extension.extend`."""
        member, engine = self._member, self.engine
        if member is None:
            raise LockLost(self.request.name, "revoked")
        extending = engine.context.begin(engine.renew(member.session, seconds), "aiolock-extend")
        await engine.context.answered(extending)
        if member.state is MemberState.GONE or member.session.dead:
            raise LockLost(self.request.name, member.reason)
        return Grant(0, 0, member.until, self.contended_since is not None)

    # --- release

    async def release(self, keep: float = 0) -> Release:
        """Release the hold or give up the position."""
        member = self._member
        if member is None or self._answer is not None:
            self._end_session()
            return self._answer or Release.RELEASED
        context = self.engine.context
        deadline = context.deadline()
        if self._leave is None and keep and member.state is not MemberState.GONE:
            if self._keeping is None:
                self._keeping = context.begin(self._leave_kept(member, keep), "aiolock-keep")
            await context.answered(self._keeping, deadline)
        elif self._leave is None:
            self._begin(member, None)
        return await self._left(deadline)

    async def _leave_kept(self, member: Member, seconds: float) -> None:
        """Begin the release once a session for the kept lock is open, however long that takes; never gives up."""
        context = self.engine.context
        end, backoff, kept = context.clock() + seconds, Backoff(context.random), None
        while kept is None and not member.session.dead and (left := end - context.clock()) > 0:
            try:
                # The row of the session exists, flushed, before any row names it.
                session = await self.engine.sessions.keep(left, context.deadline())
            except BackendError:
                await backoff.pause()
            else:
                kept = replace(member.request, id=f"{member.id} kept", session=session, ttl=left, block=1)
        if self._leave is None:
            self._begin(member, kept)

    def begin_release(self, keep: float = 0) -> Release | None:
        """Submit the release before any later request of this client for the same lock."""
        member = self._member
        if member is None or self._answer is not None:
            self._end_session()
            return self._answer or Release.RELEASED
        if keep and self._leave is None:
            return None
        if self._leave is None:
            self._begin(member, None)
        return Release.UNKNOWN

    def _end_session(self) -> None:
        """End a session that was opened for this claim, and in which it never was."""
        if self._alone is not None and self._member is None:
            self._alone.add_done_callback(_end_unused)

    def _begin(self, member: Member, kept: RowRequest | None) -> None:
        if self._inbox is not None:
            self._inbox.close()
        self._writer.withdraw(member.id)
        if kept is None:
            # From the next heartbeat on it counts for no client, whatever becomes of the release.
            member.session.ended.begin(member.id, self._writer.key, self.request.name)
        self._leave = self._writer.submit(Leave(member.id, kept), member.session)

    async def _left(self, deadline: Deadline) -> Release:
        leave = self._leave
        assert leave is not None  # noqa: S101 - the caller has begun it
        if leave.future.done() and leave.future.exception() is not None:
            # Tried again by the writer; this is another wait for it, unless it was answered while none waited.
            leave.future = new_future()
            if not self._writer.tries(leave):
                self._leave = leave = self._writer.submit(leave.step, leave.session)
                leave.in_doubt = True
        first = await self._writer.answered(leave, deadline)
        self._answer = Release.UNKNOWN
        if first:
            return Release.RELEASED
        return Release.UNKNOWN if leave.in_doubt else Release.NOT_HELD


def _usable(opening: asyncio.Future[RowSession]) -> bool:
    return not opening.cancelled() and opening.exception() is None and not opening.result().dead


def _end_unused(opening: asyncio.Future[RowSession]) -> None:
    if _usable(opening):
        opening.result().remove("")


# --- registers


class RowRegister(Register):
    """One client's view of a register, which is a row of its own."""

    def __init__(self, engine: Engine, name: str, family: Family) -> None:
        self.inbox: Inbox[None] = Inbox(name)
        self._engine = engine
        self._key = row_key(engine.context.settings.namespace, "r", family, name)
        self._doubt: float | None = None
        """The ``keep`` of a write that was not answered, until a later one was."""

    async def read(self) -> Entry:
        """Return the value and its version."""
        context = self._engine.context
        while True:
            future = context.begin(context.get([self._key]), "aiolock-register")
            [row], _ = await context.answered(future)
            if self._doubt is None or context.store.reads_prove or not row.version:
                return Entry(row.value, row.version)
            # A write of this client that the read finds may be undone, unless a later one is answered.
            if (version := await self._write(row.value, row.version, self._doubt, frozenset())) is not None:
                return Entry(row.value, version)

    async def write(self, value: bytes, stamp: str, keep: float) -> str | None:
        """Replace the version ``stamp``, and notify the clients that watch."""
        return await self._write(value, stamp, keep, frozenset({ALL}))

    async def _write(self, value: bytes, stamp: str, keep: float, notify: frozenset[str]) -> str | None:
        context = self._engine.context
        edit = Edit(self._key, stamp, new_version(), value, keep, notify=notify)
        doubt, self._doubt = self._doubt, keep
        row, _ = await context.answered(context.begin(context.write(edit), "aiolock-register"))
        # The answer to a write that was made proves those before it.
        self._doubt = doubt if row is None else None
        return None if row is None else row.version

    async def changed(self, stamp: str) -> None:
        """Wait for a notification, at most until the next poll."""
        engine, context = self._engine, self._engine.context
        self.inbox.take()
        engine.watchers.setdefault(self._key, set()).add(self.inbox)
        engine.watch()
        pause = context.store.poll
        while not self.inbox.woken:
            [row], _ = await context.answered(
                context.begin(context.versions([self._key]), "aiolock-register")
            )
            if row.version != stamp:
                return
            await self.inbox.wait(Deadline.after(pause, context.clock))
            if context.store.poll >= POLL:
                return
            pause = min(pause * 1.5, POLL)

    async def aclose(self) -> None:
        """End the watch."""
        inboxes = self._engine.watchers.get(self._key)
        if inboxes is not None:
            inboxes.discard(self.inbox)
            if not inboxes:
                del self._engine.watchers[self._key]
