"""The writer of one lock row: it collects the steps of all tasks of a client, writes once, and repeats after a lost race.

One file, because reading, writing and answering change the same few fields: what is pending, and what is known of the row.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum

from aiolock.backends.rows.context import (
    Context,
    Flight,
    ReadAnswer,
    new_future,
    new_version,
    unreadable,
)
from aiolock.backends.rows.liveness import relied_until
from aiolock.backends.rows.lockrow import (
    Batch,
    Enter,
    Entered,
    Force,
    Leave,
    LockRow,
    Result,
    RowRequest,
    Serve,
    Step,
    UnknownFormat,
    apply,
    decode,
    encode,
    keep_row,
    template,
)
from aiolock.backends.rows.rules import UNSET_LIMIT
from aiolock.backends.rows.session import RowSession
from aiolock.backends.rows.store import MOST_VALUE, Edit, Entry, Row
from aiolock.clock import Deadline
from aiolock.core.backend import Claim, Event, EventKind, Grant
from aiolock.core.inbox import WakeReason
from aiolock.core.logs import Log, get_logger, log_change
from aiolock.core.tasks import Backoff, reject, settle
from aiolock.errors import BackendError, BackendUnavailable, LossReason, shorten

__all__ = ["Member", "MemberState", "Pending", "RowWriter"]

log: Log = get_logger("aiolock.claim")
_logger: logging.Logger = log.logger

SHORTEST_PAUSE = 0.002
"""Seconds; after a lost race a client waits for as long as the round took that lost it, which grows with the number of clients."""
MOST_ROUNDS = 8
"""After further ones it waits for twice as many of these, up to this number: of hundreds of clients few meet then."""
CLOSED = "the client was closed"
ALONE = 4
"""Statements in a row that find the row as this client has left it, after which it writes against the version that it knows.
Such a write costs the server less than a statement, and one that is refused costs about as much as four of them save."""


class MemberState(Enum):
    """The state of a claim in its row, as far as the client knows.

    ============ ================================================== =========================================
    State        Event                                              Next state
    ============ ================================================== =========================================
    ``ENTERING`` its request to enter is granted                    ``HELD``
    ``ENTERING`` its request has joined the queue                   ``WAITING``
    ``ENTERING`` the queue has no room for it                       ``OUTSIDE``
    ``OUTSIDE``  the row shows it in the queue                      ``WAITING``
    ``OUTSIDE``  the row shows its hold                             ``HELD``
    ``WAITING``  the row shows its hold                             ``HELD``
    ``WAITING``  the row shows it nowhere                           ``ENTERING``: the claim asks again
    ``HELD``     its hold is gone, and the claim had taken it       ``GONE``, and the loss is reported
    ``HELD``     its hold is gone, and the grant was not taken      ``ENTERING``: the claim asks again
    any          its release was answered                           forgotten
    ============ ================================================== =========================================
    """

    ENTERING = "entering"
    OUTSIDE = "outside"
    """The row has no room for it: it waits in this client, and enters in its turn when there is room."""
    WAITING = "waiting"
    HELD = "held"
    GONE = "gone"
    """The hold of the claim was found missing."""


_WAITS = (MemberState.OUTSIDE, MemberState.WAITING)


class Member:
    """One claim and what is known of it: its id is new for each attempt to enter under another session."""

    __slots__ = (
        *("asked", "claim", "doubted", "read", "reason"),
        *("refused", "request", "session", "shown", "state"),
    )

    def __init__(self, claim: Claim, request: RowRequest, session: RowSession) -> None:
        self.claim = claim
        self.request = request
        self.session = session
        self.state: MemberState = MemberState.ENTERING
        self.shown: float = 0.0
        """The time at which the newest request was sent whose answer showed the hold."""
        self.read: ReadAnswer | None = None
        """The first answer that has shown the hold, until the hold is believed, if what it shows may be undone."""
        self.asked: str | None = None
        """The reason of the last request to release it."""
        self.reason: LossReason = "revoked"
        """The reason of the loss."""
        self.refused: BackendError | None = None
        """The error for which it can wait no longer."""
        self.doubted = ""
        """The version of the session that a statement has named which was given up without an answer, if a copy may be late."""

    @property
    def id(self) -> str:
        """The id of the claim."""
        return self.request.id

    @property
    def doubtful(self) -> bool:
        """True if a copy of a statement that was to enter may be late."""
        return bool(self.doubted) and not self.session.dead

    @property
    def unproven(self) -> bool:
        """True if the hold may be undone at the server, or count for no other client: a heartbeat proves it."""
        session, read = self.session, self.read
        if read is None or self.state is not MemberState.HELD or session.dead:
            return session.unproven
        return session.unproven or not session.context.proves(read)

    def show(self, sent: float, read: ReadAnswer | None) -> None:
        """Note that the answer to a request that was sent at ``sent`` has shown the hold, and whether that alone proves it."""
        self.shown = max(self.shown, sent)
        held, known = self.state is MemberState.HELD, self.read
        if read is None or not held or (known is not None and known.connection != read.connection):
            self.read = read

    @property
    def until(self) -> float:
        """The time until which the hold is certain."""
        return relied_until(self.session.heartbeat_sent, self.shown, self.session.ttl)

    def become(self, state: MemberState) -> None:
        """Change the state, if it is another one; all transitions pass through here."""
        if state is not self.state and _logger.isEnabledFor(logging.DEBUG):
            log_change(log, f"claim {self.id}", self.claim.request.name, self.state, state, claim=self.id)
        self.state = state


class Pending:
    """A step that is not answered yet."""

    __slots__ = (
        "future",
        "in_doubt",
        "observed",
        "order",
        "raced",
        "sending",
        "session",
        "step",
        "withdrawn",
    )

    def __init__(self, step: Step, order: int, session: RowSession | None) -> None:
        self.step = step
        self.order = order
        self.session = session
        self.future: asyncio.Future[Result] = new_future()
        self.sending = False
        """True while a write that contains it is under way."""
        self.in_doubt = False
        """True if such a write was not answered."""
        self.raced = False
        """True once another client has written the row first: the server answers, and the step is tried again."""
        self.withdrawn = False
        """True once the request was given up."""
        self.observed = False
        """True once the sessions of those ahead were read for it."""

    @property
    def lost_races(self) -> bool:
        """True if it is not answered because of lost races: the server answers."""
        return self.raced and not self.future.done()


class RowWriter:
    """The writer; it works in a task while there are steps, and remembers the row in between.

    :param observe: reads the sessions of requests ahead; returns whether one of them turned out not to count.
    :param renew: sends a heartbeat of a session, and records what it shows.
    :param waits: called with the writer when a claim begins to wait.
    :param waiters_changed: called when a claim may have ceased to wait.
    """

    def __init__(
        self,
        context: Context,
        key: str,
        name: str,
        observe: Callable[[Iterable[RowRequest]], asyncio.Future[bool]],
        renew: Callable[[RowSession], asyncio.Future[None]],
        waits: Callable[[RowWriter], None],
        waiters_changed: Callable[[], None],
    ) -> None:
        self.context = context
        self.key = key
        self.name = name
        self.members: dict[str, Member] = {}
        """The claims of this client that enter, wait, hold or leave."""
        self.row: LockRow = LockRow(name)
        self.version: str | None = None
        """The version of ``row``; ``None`` if it is not known."""
        self.doubt = False
        """True while a copy of an unanswered write may be late: until a flushed write was answered."""
        self._observe = observe
        self._renew = renew
        self._waits = waits
        self._waiters_changed = waiters_changed
        self._tick = 0
        self._newest_answer = 0
        """The order number of the newest answer about the row."""
        self._read_order = 0
        """The order number at which the request was sent that showed ``version``; 0 if its own write did."""
        self._read_sent = 0.0
        self._shown_by: ReadAnswer | None = None
        """The answer that has shown ``row``, if it may be undone."""
        self._alone = 0
        """The number of statements in a row that found the row as this client had left it."""
        self._overtaken = False
        """True if other clients had written the row before this one released its last hold: it reads first then."""
        self._unreadable = False
        """True if the row has an unknown format and is to be replaced."""
        self._pending: dict[Pending, None] = {}
        """In the order in which they came."""
        self._outside: dict[str, Enter] = {}
        """By claim, the requests for which the row has no room, in their order: they are a part of every round."""
        self._due = False
        """True if the row was read since the last round in which they were, and may have room."""
        self._attempt: tuple[str, dict[Pending, Result | None]] | None = None
        """The version of the last unanswered write, and its results."""
        self._task: asyncio.Task[None] | None = None
        self._end_pause: asyncio.Future[None] | None = None
        """Ends the pause after a lost race."""

    @property
    def idle(self) -> bool:
        """True if nothing would be lost with the writer but a read."""
        return not (self.members or self._pending or self.doubt or (self._task and not self._task.done()))

    @property
    def leaving(self) -> list[asyncio.Future[Result]]:
        """The releases that are not answered."""
        return [pending.future for pending in self._pending if isinstance(pending.step, Leave)]

    def leaves(self, claim: str) -> bool:
        """Test whether the release of a claim is not answered."""
        return any(isinstance(pending.step, Leave) and pending.step.id == claim for pending in self._pending)

    def tries(self, pending: Pending) -> bool:
        """Test whether a step is still to be answered: another one about the same claim does not answer it."""
        return pending in self._pending

    def close(self) -> None:
        """Answer all steps with an error, because the client is closed."""
        for pending in self._pending:
            reject(pending.future, BackendUnavailable(CLOSED))
        self._pending.clear()
        self._outside.clear()

    @property
    def waiting(self) -> bool:
        """True if a claim of this client waits."""
        return bool(self._waiting())

    def _waiting(self) -> set[str]:
        return {claim for claim, member in self.members.items() if member.state in _WAITS}

    def refuse(self, error: BackendError) -> None:
        """Have the claims that wait raise an error, if no other try mends it."""
        for member in self.members.values():
            if member.state in _WAITS and not error.retryable:
                member.refused = error
                member.claim.inbox.wake(WakeReason.FAILED, error)

    def ahead(self) -> list[RowRequest]:
        """Return the foreign requests ahead of the last waiting claim of this client: their sessions are observed."""
        own = self.context.liveness.own
        return [request for request in self.row.ahead(self._waiting()) if request.session not in own]

    # --- steps

    def submit(self, step: Step, session: RowSession | None = None) -> Pending:
        """Submit a step. Its future gets an error when the store fails; a :class:`Leave` is tried again nevertheless."""
        pending = Pending(step, self.context.order(), session)
        if self.context.closed:
            # An acquire goes on for a moment when its client is closed: its session may just have been opened.
            reject(pending.future, BackendUnavailable(CLOSED))
            return pending
        self._pending[pending] = None
        if self._end_pause is not None and not isinstance(step, Enter):
            # Only those that are to enter can wait: a release would hold up all others.
            settle(self._end_pause, None)
        self._run()
        return pending

    async def answered(self, pending: Pending, deadline: Deadline) -> Result:
        """Return the result of a step by the deadline; raise and cancel as :meth:`Context.answered` does."""
        try:
            return await self.context.answered(pending.future, deadline)
        except BackendUnavailable:
            if not pending.lost_races:
                raise
            raise BackendUnavailable(
                f"other clients changed the row of {shorten(self.name)} first, whenever this one tried within the command "
                f"timeout of {self.context.timeout:g} s"
            ) from None

    def withdraw(self, claim: str) -> None:
        """Drop the requests to enter of a claim that is about to leave; those under way are followed by the leave."""
        self._outside.pop(claim, None)
        for pending in [
            each for each in self._pending if isinstance(each.step, Enter) and each.step.id == claim
        ]:
            reject(pending.future, BackendUnavailable("the request was given up"))
            pending.withdrawn = True
            if not pending.sending:
                self._pending.pop(pending, None)

    def serve(self) -> None:
        """Read the row, and write it if an entry does not count any more."""
        self.version = None
        if not any(isinstance(pending.step, Serve) and not pending.sending for pending in self._pending):
            self.submit(Serve())

    def forget(self) -> None:
        """Forget the row after a reconnect."""
        self.version = None

    def _run(self) -> None:
        if self._task is None or self._task.done():
            self._task = self.context.tasks.spawn(self._work(), f"aiolock-row-{shorten(self.name)}")

    async def _work(self) -> None:
        """Work until no step is left. Ends with the client."""
        clock, random = self.context.clock, self.context.random
        failing, losing = Backoff(random), Backoff(random, 1.0, MOST_ROUNDS)
        while self._pending or self._due:
            begun = clock()
            try:
                lost_race = await self._round()
            except BackendError as error:
                self.version, self._due = None, False
                self._fail(error)
                self.refuse(error)
                await failing.pause()
            except Exception as error:  # noqa: BLE001 - a defect of a store must not leave callers waiting
                self._fail(error)
                self._pending.clear()
                raise
            else:
                failing.reset()
                if not lost_race or await self._leave_to_others(clock() - begun, losing):
                    losing.reset()

    async def _leave_to_others(self, took: float, losing: Backoff) -> bool:
        """Leave the row to other clients for a while after a lost race; return whether a step that cannot wait has ended it.

        :param took: the seconds that the round took.
        :param losing: the back-off of the races that were lost in a row, in units of such rounds.
        """
        for pending in self._pending:
            pending.raced = True
        pause = losing.next(most=self.context.timeout / 2, unit=max(took, SHORTEST_PAUSE))
        self._end_pause = end_pause = new_future()
        await asyncio.wait({end_pause}, timeout=pause)
        self._end_pause = None
        return end_pause.done()

    def _fail(self, error: Exception) -> None:
        """Answer the steps with an error; releases are tried again while their session lives."""
        for pending in list(self._pending):
            reject(pending.future, error)
            if not isinstance(pending.step, (Leave, Serve)) or not getattr(error, "retryable", False):
                self._pending.pop(pending, None)

    # --- reading

    async def read(self) -> None:
        """Read the row. Cancelling it ends the wait, and nothing is recorded."""
        [row], flight = await self.context.get([self.key])
        self.learn(row, flight)

    def learn(self, row: Row, flight: Flight, *, written: bool = False) -> bool:
        """Process an answer about the row, if its request was sent after the newest answer; return whether it was.

        ``written``: it is that to a flushed write of this client. Versions have no order: an answer that was overtaken by another one proves nothing.
        """
        if flight.order <= self._newest_answer or flight.connection != self.context.connection:
            return False
        self._newest_answer = self.context.order()
        self._unreadable = False
        granting = self._granting()
        try:
            self.row = decode(row.value)
        except UnknownFormat as error:
            self.version = None
            if not any(isinstance(pending.step, Force) for pending in self._pending):
                self._settle(self._unsent(), flushed=True, sent=flight.sent)
                raise unreadable(self.name, error) from None
            self.row, self._unreadable = LockRow(self.name), True
        self.version, self._tick = row.version, row.tick or self._tick
        self._read_order, self._read_sent = flight.order, flight.sent
        self._shown_by = None if written else self.context.read(doubt=self.doubt)
        self._update_claims(flight.sent, granting)
        if self._outside:
            self._due = True
            self._run()
        return True

    def _unsent(self) -> dict[Pending, Result]:
        """Return the releases of claims that no write or statement can have entered in the row."""
        if self.doubt or self._attempt is not None or any(pending.sending for pending in self._pending):
            return {}
        return {
            pending: True
            for pending in self._pending
            if isinstance(pending.step, Leave)
            and (member := self.members.get(pending.step.id)) is not None
            and member.state is MemberState.ENTERING
            and not member.doubtful
        }

    def confirm(self, version: str, flight: Flight) -> bool:
        """Record that the row had ``version`` after ``flight`` was sent; return whether that is the version known."""
        if not version or version != self.version:
            return False
        for member in self.members.values():
            if member.state is MemberState.HELD:
                member.shown = max(member.shown, flight.sent)
        return True

    def shown_since(self, begun: float) -> bool:
        """Test whether every hold of this client was shown by an answer to a request that was sent since then."""
        return all(
            member.shown >= begun
            for member in self.members.values()
            if member.state is MemberState.HELD and not member.session.dead
        )

    def _granting(self) -> WakeReason:
        """Return why a claim that waits goes on, should the next row show its hold: a client ahead may have been declared dead."""
        dead = self.context.liveness.dead
        expired = bool(dead) and any(request.session in dead for request in self.ahead())
        return WakeReason.EXPIRED if expired else WakeReason.GRANTED

    def _update_claims(self, sent: float, granting: WakeReason) -> None:
        """Update the claims with what the row shows of them."""
        row, now = self.row, self.context.clock()
        self.context.floor = max(self.context.floor, row.token)
        demand = bool(row.queue)
        for member in list(self.members.values()):
            hold = row.holds.get(member.id)
            # Under a dead session nothing counts, not even a hold that the row shows.
            if member.state in (MemberState.ENTERING, MemberState.GONE) or member.session.dead:
                continue
            if hold is None:
                self._missing(member)
                continue
            member.show(sent, self._shown_by)
            if member.state in _WAITS:
                self._outside.pop(member.id, None)
                member.become(MemberState.HELD)
                self._waiters_changed()
                if member.unproven:
                    # The claim asks again, which sends a heartbeat.
                    member.claim.inbox.wake(WakeReason.NOTIFIED)
                else:
                    self.context.expect_others(member.claim)
                    grant = Grant(hold.token, hold.request.block, member.until, demand)
                    member.claim.inbox.put(grant, granting)
            if demand:
                member.claim.note_waiters(now)
            if hold.asked is not None and hold.asked != member.asked:
                member.asked = hold.asked
                self.context.events.put(Event(EventKind.REQUESTED, member.claim, text=hold.asked))

    def _missing(self, member: Member) -> None:
        if member.state is MemberState.HELD:
            self.lost(member, "force-released" if member.id in self.row.forced else "revoked")
        elif member.id in self.row.queue:
            self._outside.pop(member.id, None)
            self._wait(member, MemberState.WAITING)
        elif member.state is MemberState.WAITING:
            member.become(MemberState.ENTERING)
            member.claim.inbox.wake(WakeReason.LAPSED)

    def _wait(self, member: Member, state: MemberState) -> None:
        member.become(state)
        self._waits(self)

    def lapse(self, member: Member) -> None:
        """Have a claim that waits enter anew, because its session is dead."""
        self._outside.pop(member.id, None)
        if member.state in _WAITS:
            member.claim.inbox.wake(WakeReason.LAPSED)

    def lost(self, member: Member, reason: LossReason) -> None:
        """Record that a hold is gone: report it, or have the claim ask again if it has not taken the grant yet."""
        if member.claim.inbox.take() is None:
            member.reason = reason
            member.become(MemberState.GONE)
            self.context.events.put(Event(EventKind.LOST, member.claim, reason))
        else:
            member.become(MemberState.ENTERING)
            member.claim.inbox.wake(WakeReason.LAPSED)

    # --- writing

    async def _round(self) -> bool:
        """Read if necessary, apply the steps and write once; return whether another client was faster."""
        self._drop_withdrawn()
        if (entering := self._to_enter()) is not None:
            await self._enter(*entering)
            self._drop_withdrawn()
        known, overtaken = self.version, self._overtaken and self._attempt is None and self._releases()
        if known is None or overtaken:
            await self.read()
            if self.version is None:
                return True
        if overtaken and self.version == known:
            # It is written without a read again until it is found to be late.
            self._overtaken = False
        if self._attempt is not None:
            version, results = self._attempt
            self._attempt = None
            if version == self.version and self.context.store.reads_prove:
                # The unanswered write counted. Where it may be undone, its releases are written again.
                self._settle(results, flushed=False, sent=self._read_sent)
        pending = list(self._pending)
        leaving = (self.members.get(each.step.id) for each in pending if isinstance(each.step, Leave))
        if doubtful := [member for member in leaving if member is not None and member.doubtful]:
            await self._rule_out_copies(doubtful)
            return False
        # Those that are outside came before all others that are to enter.
        outside, self._due = list(self._outside.values()), False
        batch = apply(
            self.row,
            [*outside, *(each.step for each in pending)],
            self.context.liveness,
            self.context.source(self._tick),
            doubt=self.doubt,
        )
        batch = batch._replace(results=batch.results[len(outside) :])
        if self._unreadable:
            # What it held is not known.
            forced = [
                isinstance(each.step, Force) or result
                for each, result in zip(pending, batch.results, strict=True)
            ]
            batch = batch._replace(changed=True, flush=True, results=forced)
        if not batch.changed:
            return await self._answer_from_read(pending, batch)
        if not self.version:
            return await self._insert()
        return await self._write(pending, batch)

    def _releases(self) -> bool:
        """Test whether a hold is to be released that no answer has shown since its holder decided that."""
        return any(
            isinstance(each.step, Leave) and each.order > self._newest_answer for each in self._pending
        )

    async def _answer_from_read(self, pending: list[Pending], batch: Batch) -> bool:
        """Answer steps that change nothing, if the row was read after they were submitted."""
        answers: dict[Pending, Result | None] = {}
        refused: list[Pending] = []
        for each, result in zip(pending, batch.results, strict=True):
            if each.order > self._read_order:
                self.version = None
                continue
            answers[each] = result
            if isinstance(each.step, Enter) and not each.observed and (result is None or result == Entered()):
                refused.append(each)
        if refused:
            for each in refused:
                each.observed = True
            # One of those ahead may be dead, or have ended: a request that does not wait learns it here.
            await self.context.answered(self._observe(self.row.ahead([each.step.id for each in refused])))
            return False
        self._settle(answers, flushed=False, sent=self._read_sent)
        return False

    def _drop_withdrawn(self) -> None:
        """Drop the requests that were given up while they were under way and did not count: none may follow its own leave."""
        self._pending = {each: None for each in self._pending if not each.withdrawn}

    def _to_enter(self) -> tuple[Pending, Member, str] | None:
        """Return the request to send as a statement, and the version of its session, if the lock may be free.

        A client that is alone with the lock writes against the version that it knows, and several steps go out together.
        """
        known = self.version is not None
        if (
            not self.context.store.enters
            or self._outside
            or (known and (self._alone >= ALONE or not self.row.free))
        ):
            return None
        for pending in self._pending:
            member = self.members.get(pending.step.id) if isinstance(pending.step, Enter) else None
            if member is None or (heartbeat := member.session.version) is None:
                continue
            if known and (len(self._pending) > 1 or pending.order <= self._read_order):
                return None
            # The limit of a semaphore stands in its row.
            return None if member.request.mode == "permits" else (pending, member, heartbeat)
        return None

    async def _enter(self, pending: Pending, member: Member, heartbeat: str) -> None:
        """Read the row, and enter if it is free, by a statement that the server evaluates."""
        context, known, request = self.context, self.version, member.request
        head, hold = template(self.name, request, context.source(0).wall)
        session = member.session.key
        entry = Entry(self.key, new_version(), head, hold, request.block, context.floor, session, heartbeat)
        answered, pending.sending = False, True
        try:
            row, before, flight = await context.enter(entry)
            answered = True
        finally:
            pending.sending = False
            if not answered:
                pending.in_doubt, self.version, member.doubted = True, None, heartbeat
        if row.version == entry.version:
            self.doubt, self._alone = False, self._alone + 1 if before == known else 0
            context.flushed(flight)
        self.learn(row, flight, written=row.version == entry.version)

    async def _rule_out_copies(self, leaving: list[Member]) -> None:
        """Send a heartbeat before claims leave for which a statement was not answered, and forget the row.

        The heartbeat changes the version of the session row that the statement names: afterwards no copy of it counts any
        more, and one that has counted is in the row that is read next.
        """
        for member in leaving:
            session = member.session
            if session.version in (None, member.doubted):
                await self.context.answered(self._renew(session))
            if session.version in (None, member.doubted) and not session.dead:
                raise BackendUnavailable("the session was not renewed since a statement was given up")
        for member in leaving:
            member.doubted = ""
        self.version = None

    async def _insert(self) -> bool:
        """Insert the empty row; holds and queue entries are only written against a version that was answered."""
        edit = Edit(self.key, "", new_version(), encode(LockRow(self.name)), UNSET_LIMIT, flush=self.doubt)
        row, flight = await self.context.write(edit)
        self.version = None
        if row is None:
            return True
        if flight.connection == self.context.connection and flight.order > self._newest_answer:
            self._newest_answer = self.context.order()
            self.row, self.version = LockRow(self.name), row.version
            self._tick, self._read_order = row.tick or self._tick, 0
            if not row.tick:
                # Tokens are counted from a time at or after the insertion.
                self.version = None
        return False

    async def _write(self, pending: list[Pending], batch: Batch) -> bool:
        value = encode(batch.row if batch.row.name else replace(batch.row, name=self.name))
        if len(value) > MOST_VALUE:
            raise BackendUnavailable(f"the row of {shorten(self.name)} is full")
        assert self.version is not None  # noqa: S101 - the caller has read it
        edit = Edit(
            self.key,
            self.version,
            new_version(),
            value,
            keep_row(batch.row),
            flush=batch.flush,
            notify=batch.notify - {self.context.address},
        )
        results = dict(zip(pending, batch.results, strict=True))
        for each in results:
            each.sending = True
        answered = False
        try:
            row, flight = await self.context.write(edit)
            answered = True
        finally:
            for each in results:
                each.sending = False
            if not answered:
                self.doubt, self._attempt, self.version = True, (edit.version, results), None
                for each in results:
                    each.in_doubt = True
        if row is None:
            # A lost race, or the answer to a copy that the network repeated: then the next read finds this version. No race
            # is lost if the version was not read for this step: another client has used the lock since.
            self._attempt, self.version, self._alone = (edit.version, results), None, 0
            self._overtaken = any(isinstance(each.step, Leave) for each in results)
            return self._read_order > 0
        if not batch.flush and flight.connection != self.context.connection:
            # Answered before a reconnect that came first: a crash may have undone the write, so it is checked again.
            self._attempt, self.version = (edit.version, results), None
            for each in results:
                each.in_doubt = True
            return True
        if batch.flush:
            self.doubt = False
            self.context.flushed(flight)
        known = flight.order > self._newest_answer and flight.connection == self.context.connection
        self._newest_answer, granting = self.context.order(), self._granting()
        if known:
            self.row, self.version, self._unreadable = batch.row, row.version, False
            self._shown_by = None if batch.flush else self._shown_by
            self._tick, self._read_order = row.tick or self._tick, 0
        else:
            # A read was answered meanwhile: it is not known which of the two is newer.
            self.version = None
        self._settle(results, flushed=batch.flush, sent=flight.sent)
        if known:
            self._update_claims(flight.sent, granting)
        return False

    # --- answers

    def _refuse(self, pending: Pending) -> None:
        """Answer a step for which the row has no room: a request that waits does so outside."""
        step, member = pending.step, self.members.get(pending.step.id)
        if not isinstance(step, Enter):
            error = BackendUnavailable(f"too many clients wait for {shorten(self.name)}: its row is full")
            reject(pending.future, error)
        elif step.wait and member is not None and not member.session.dead:
            self._outside[step.id] = step
            self._wait(member, MemberState.OUTSIDE)
        settle(pending.future, Entered())

    def _settle(self, results: Mapping[Pending, Result | None], *, flushed: bool, sent: float) -> None:
        """Answer steps whose effect is known by the answer to a request that was sent at ``sent``."""
        for pending, result in results.items():
            if pending not in self._pending:
                continue
            del self._pending[pending]
            if result is None:
                self._refuse(pending)
                continue
            step, member = pending.step, self.members.get(pending.step.id)
            if isinstance(step, Leave):
                self._left(pending, flushed=flushed)
            elif isinstance(step, Enter) and isinstance(result, Entered) and member is not None:
                if result.token:
                    member.show(sent, None if flushed else self._shown_by)
                    member.become(MemberState.HELD)
                elif step.wait and result.limit is None:
                    self._wait(member, MemberState.WAITING)
            settle(pending.future, result)

    def _left(self, pending: Pending, *, flushed: bool) -> None:
        self._outside.pop(pending.step.id, None)
        member = self.members.pop(pending.step.id, None)
        self._waiters_changed()
        session = pending.session
        if session is None:
            return
        pending.in_doubt = pending.in_doubt or session.ended.announced(pending.step.id)
        session.ended.removed(
            pending.step.id, flushed=flushed, connection=self.context.connection, order=self.context.order()
        )
        if not flushed:
            self.context.undurable.add(session.ended)
        if member is not None:
            session.remove(member.id)
