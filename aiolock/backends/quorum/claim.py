"""Quorum claims: one request at several servers, held by a majority of them.

Clients that ask all servers at once can each get one server of three, and none a majority. So one server decides who is
next: the first that can be reached, in an order that is the same for every client and differs from lock to lock. Its queue
is the queue. The others are asked at the same time, because most locks are free; a vote that comes without the grant of the
first is given back at once. A claim that has this grant and lacks other votes queues for them, but not for long: two
claims that see different servers could wait for each other, so both retreat after a random time.

The majority is Redlock's (antirez, "Distributed locks with Redis"). The file is long because a vote and its claim are one
protocol: each calls the other."""

from __future__ import annotations

import asyncio
import logging
import math
from enum import Enum
from functools import partial

from aiolock.backends.quorum.members import Member, Members
from aiolock.backends.quorum.rules import majority_until
from aiolock.clock import Deadline
from aiolock.core.backend import (
    Certainty,
    Claim,
    Grant,
    Release,
    Renewal,
    Request,
    confirmation_window,
)
from aiolock.core.inbox import WakeReason
from aiolock.core.logs import Log, get_logger, log_change
from aiolock.core.tasks import Backoff, end
from aiolock.errors import BackendError, BackendUnavailable, LossReason

__all__ = ["QuorumClaim", "Vote", "VoteState"]

log: Log = get_logger("aiolock")
_votes: Log = get_logger("aiolock.claim")

POLL = 2.0
"""Seconds after which a queued vote is asked for again, even without a notification."""

SLACK = 0.01
"""Seconds that slow members get beyond the time that the majority took, at least."""

GATHER = (0.25, 0.5)
"""Share of the confirmation window of a pushed grant for which missing votes are waited for."""


# --- votes


class VoteState(Enum):
    """The state of a vote: the latest answer of its member."""

    NONE = "not asked, or no answer yet"
    GRANTED = "granted"
    REFUSED = "held by another owner"
    QUEUED = "held by another owner, and queued"
    FAILED = "not known"
    LOST = "granted, and taken back"


class Vote(Certainty):
    """The claim at one member."""

    __slots__ = (
        *("asked", "claim", "error", "grant", "member"),
        *("owner", "queued", "reason", "sent", "state", "task", "until"),
    )

    def __init__(self, member: Member, owner: QuorumClaim) -> None:
        self.member = member
        self.owner = owner
        self.claim: Claim = member.backend.claim(owner.request)
        # Events of the member's backend find the vote by this.
        self.claim.validity = self
        self.state = VoteState.NONE
        self.asked = False
        """True once a request was sent."""
        self.queued = False
        """True once a request was sent that may join the queue."""
        self.task: asyncio.Task[None] | None = None
        """The last request; a task of the client."""
        self.grant: Grant | None = None
        self.until = -math.inf
        """End of the certain validity, if granted."""
        self.sent = -math.inf
        """Time at which the latest confirmed request was sent."""
        self.error: Exception | None = None
        self.reason: LossReason = "revoked"

    @property
    def pending(self) -> asyncio.Task[None] | None:
        """The request whose answer may still come."""
        return self.task if self.task is not None and not self.task.done() else None

    @property
    def granted(self) -> bool:
        """Test whether the latest answer of the member is a grant."""
        return self.state is VoteState.GRANTED

    @property
    def known(self) -> bool:
        """Test whether the member may know the claim: it keeps nothing of a refused request that did not queue."""
        return self.asked and (self.queued or self.state is not VoteState.REFUSED or self.pending is not None)

    def _become(self, state: VoteState) -> None:
        """Change the state; all transitions pass through here."""
        if state is not self.state and _votes.logger.isEnabledFor(logging.DEBUG):
            member = repr(self.member)
            name = self.owner.request.name
            log_change(_votes, f"vote of {member} for a claim", name, self.state, state, member=member)
        self.state = state

    def ask(self, *, wait: bool, until_granted: bool = False) -> None:
        """Send a request in a task of the client, which with ``until_granted`` repeats it until it succeeds."""
        self.asked, self.queued = True, self.queued or wait
        self._become(VoteState.NONE)
        work = self._ask(wait=wait, until_granted=until_granted)
        self.task = self.owner.members.tasks.spawn(work, "aiolock-quorum-ask")

    async def _ask(self, *, wait: bool, until_granted: bool) -> None:
        clock = self.owner.members.settings.clock
        while True:
            sent = clock()
            try:
                grant = await self.member.ask(lambda: self.claim.acquire(wait))
            except Exception as error:  # noqa: BLE001 - one member's failure of any kind is outvoted by the others
                self.error = error
                self._become(VoteState.FAILED)
                return
            if grant is not None or not until_granted:
                break
            if self.state is VoteState.NONE:
                self._become(VoteState.QUEUED)
            await self.claim.inbox.wait(Deadline.after(POLL, clock))
        if grant is None:
            self._become(VoteState.QUEUED if wait else VoteState.REFUSED)
        elif self.state in (VoteState.NONE, VoteState.QUEUED):
            # Otherwise an event of the loss arrived before the grant.
            self.take(grant, sent)
        self.owner.answered(self)

    def take(self, grant: Grant, sent: float) -> None:
        """Record a grant, the answer to a request that was sent at ``sent``."""
        self.grant, self.error = grant, None
        self._become(VoteState.GRANTED)
        self.until, self.sent = max(self.until, grant.until), max(self.sent, sent)

    def lose(self, reason: LossReason) -> None:
        """Record that the member's hold is gone."""
        self.reason = reason
        self._become(VoteState.LOST)

    async def settled(self) -> VoteState:
        """Wait for the pending request and return the answer. Cancelling it leaves the request alone."""
        if (task := self.pending) is not None:
            await asyncio.wait([task])
        return self.state

    def give_back(self, keep: float = 0) -> asyncio.Task[Release]:
        """Release it in the background, for at most a ttl; the task returns the member's answer."""
        if self.member.open and not self.pending:
            self.claim.begin_release(keep)
        return self.owner.members.leave(self._give_back(keep))

    async def _give_back(self, keep: float) -> Release:
        if (task := self.pending) is not None:
            await end([task])
        if not self.member.open:
            return Release.UNKNOWN
        members = self.owner.members
        clock = members.settings.clock
        give_up, backoff = clock() + self.owner.request.stays, Backoff(members.random)
        while True:
            try:
                # No sign of life: what was never sent is given back without a question.
                return await self.member.ask(lambda: self.claim.release(keep), proves=False)
            except BackendError as error:
                if not error.retryable or clock() >= give_up:
                    extra = {"lock": self.owner.request.name, "member": repr(self.member)}
                    text = "could not give a vote back to %r, it ends by its ttl: %s"
                    log.info(text, self.member, error, extra=extra)
                    return Release.UNKNOWN
            await backoff.pause()


# --- claims


class QuorumClaim(Claim):
    """The votes of all members for one request."""

    __slots__ = (
        *("_deciding", "_demanded", "_give_up", "_leaving", "_pause", "_won"),
        *("members", "promised", "requested", "votes"),
    )

    def __init__(self, members: Members, request: Request) -> None:
        super().__init__(request)
        self.members = members
        self.votes: list[Vote] = [Vote(member, self) for member in members.order(request.name)]
        """One for each member, the deciding one first."""
        self._deciding: Vote | None = None
        """The vote of the member in whose queue the claim is."""
        self._give_up = math.inf
        """End of the wait for the votes of the other members; ``inf`` if there is no such wait."""
        self._pause = 0.0
        """Seconds without requests after a retreat."""
        self._won = False
        """True once a majority was granted."""
        self._leaving: dict[asyncio.Task[Release], Member] | None = None
        self.requested = ""
        """The reason of the last request to release."""
        self.promised = -math.inf
        """End of the validity that a grant promised the holder."""

    @property
    def contended_since(self) -> float | None:
        """The earliest time at which a member reported waiters."""
        times = (self._demanded, *(vote.claim.contended_since for vote in self.votes))
        return min((when for when in times if when is not None), default=None)

    @contended_since.setter
    def contended_since(self, when: float | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride] # each member reports its own
        self._demanded: float | None = when

    @property
    def _now(self) -> float:
        return self.members.settings.clock()

    @property
    def given_back(self) -> bool:
        """Test whether the release has begun."""
        return self._leaving is not None

    @property
    def until(self) -> float:
        """End of the validity of a majority of the votes."""
        return majority_until((vote.until for vote in self.votes if vote.granted), self.members.needed)

    def failure(self) -> BackendError:
        """Return the error for a majority that cannot be asked."""
        return self.members.failure([vote.error for vote in self.votes if vote.error is not None])

    def _replace(self, number: int) -> None:
        """Give back one vote in the background and start with a new one."""
        vote = self.votes[number]
        if vote.known:
            vote.give_back()
            self.votes[number] = Vote(vote.member, self)

    # --- acquire

    async def acquire(self, wait: bool) -> Grant | None:
        """Ask all members, or go on where the last attempt ended."""
        limit = self.members.command_timeout * (2 if wait else 1)
        self._pause = 0.0
        if self._inbox is not None:
            self._inbox.take()
        try:
            async with asyncio.timeout(limit):
                grant = await self._attempt(wait=wait)
        except TimeoutError as error:
            raise BackendUnavailable(f"{self.members!r} did not answer within {limit:g} s") from error
        if grant is None and wait:
            self._listen()
        return grant

    async def _attempt(self, *, wait: bool) -> Grant | None:
        if self._give_up < math.inf:
            return await self._gather()
        for number, vote in enumerate(self.votes):
            if vote.pending:
                # A request of an attempt that was cancelled.
                self._replace(number)
        if (first := self._deciding) is not None and first.state is VoteState.QUEUED and wait:
            first.ask(wait=True)
            if (answer := await first.settled()) is VoteState.QUEUED:
                return None
            if answer is VoteState.GRANTED:
                return await self._gather()
        return await self._ask_all(wait=wait)

    async def _ask_all(self, *, wait: bool) -> Grant | None:
        """Ask all members at once; only the first may queue the claim."""
        self._deciding = None
        for number, vote in enumerate(self.votes):
            if vote.state in (VoteState.FAILED, VoteState.LOST) or (
                vote.state is VoteState.QUEUED and (number or not wait)
            ):
                self._replace(number)
            self.votes[number].ask(wait=wait and number == 0)
        first = await self._first(wait=wait)
        if first is None:
            self._fail_or_retreat()
            return None
        if not first.granted:
            # Another claim is next: the votes that the others gave in the meantime would only block it.
            self._deciding = first if wait else None
            self._retreat(keep=self._deciding)
            return None
        if wait:
            return await self._gather()
        if await self._majority():
            return self._grant()
        self._fail_or_retreat()
        return None

    async def _first(self, *, wait: bool) -> Vote | None:
        """Return the vote of the deciding member: the first in order that answers.

        A member that was silent the last time is asked as well, and waited for if no other can be asked. Cancelling it leaves
        the requests alone.
        """
        for vote in sorted(self.votes, key=lambda vote: vote.member.silent):
            if await vote.settled() is VoteState.REFUSED and wait:
                vote.ask(wait=True)
                await vote.settled()
            if vote.state is not VoteState.FAILED:
                return vote
        return None

    async def _gather(self) -> Grant | None:
        """Queue for the missing votes, after the grant of the deciding member."""
        if self._give_up == math.inf:
            self._give_up = self._now + self._window(*GATHER)
        # Members that refused before the deciding one granted are asked once more.
        for missing in ({VoteState.NONE, VoteState.REFUSED, VoteState.QUEUED}, {VoteState.REFUSED}):
            for vote in self.votes:
                if not vote.pending and vote.state in missing:
                    vote.ask(wait=True)
            if await self._majority():
                return self._grant()
        if self._now >= self._give_up or not self._possible():
            self._fail_or_retreat()
            self._pause = self._window(0, GATHER[1])
        return None

    def _window(self, least: float, most: float) -> float:
        """Return a random share of the confirmation window; of a command timeout, if that is shorter."""
        whole = min(confirmation_window(self.request.ttl), self.members.command_timeout)
        return self.members.random.uniform(least, most) * whole

    async def _majority(self) -> bool:
        """Wait until a majority has granted, until it no longer can, or until a member has queued the claim.

        A queued vote may be granted before a silent member answers, so :meth:`_listen` waits for both together. Cancelling it
        leaves the requests alone.
        """
        while True:
            now = self._now
            granted = sum(vote.granted and vote.until > now for vote in self.votes)
            pending = [task for vote in self.votes if (task := vote.pending) is not None]
            if granted >= self.members.needed:
                return True
            if granted + len(pending) < self.members.needed:
                return False
            if any(vote.state is VoteState.QUEUED for vote in self.votes):
                return False
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)

    def _possible(self) -> bool:
        """Test whether enough members can be asked."""
        return sum(vote.state is not VoteState.FAILED for vote in self.votes) >= self.members.needed

    def _grant(self) -> Grant:
        """Return the grant of the majority, and go on asking the other members."""
        self._give_up, self._deciding, self._won = math.inf, None, True
        grants = [vote.grant for vote in self.votes if vote.granted and vote.grant is not None]
        for vote in self.votes:
            if vote.state in (VoteState.QUEUED, VoteState.REFUSED) and not vote.pending:
                vote.ask(wait=True, until_granted=True)
        # Tokens of the deciding member rise; those of the others follow their own clocks.
        first, self.promised = grants[0], self.until
        return Grant(first.token, first.count, self.promised, any(grant.demand for grant in grants))

    def _retreat(self, keep: Vote | None = None) -> None:
        """Give back all votes but one."""
        self._give_up = math.inf
        for number, vote in enumerate(self.votes):
            if vote is not keep:
                self._replace(number)

    def _fail_or_retreat(self) -> None:
        """Give back all votes; raise if too few members can be asked."""
        error = None if self._possible() else self.failure()
        self._retreat()
        if error is not None:
            raise error

    def answered(self, vote: Vote) -> None:
        """Use the answer to a request that no attempt waits for: a vote that is queued during the hold is worth having."""
        if vote.state is VoteState.QUEUED and self._won and not self.given_back and vote in self.votes:
            vote.ask(wait=True, until_granted=True)

    def _listen(self) -> None:
        """Have the next notification or answer of a member wake the waiter, or the time after which to ask anyway."""
        queued = [] if self._pause else [vote for vote in self.votes if vote.state is VoteState.QUEUED]
        pending = [] if self._pause else [vote for vote in self.votes if vote.pending is not None]
        limit = POLL if queued or pending else SLACK
        self.inbox.wake_after(self._pause or min(limit, max(0.0, self._give_up - self._now)), WakeReason.POLL)
        for vote in pending:
            assert vote.task is not None  # noqa: S101 - it is pending
            vote.task.add_done_callback(partial(self._take_answer, vote))
        for vote in queued:
            if not vote.claim.inbox.on_ready(self.inbox.wake):
                self.inbox.wake(vote.claim.inbox.reason)

    def _take_answer(self, vote: Vote, task: asyncio.Task[None]) -> None:
        if vote.state is VoteState.FAILED:
            self.inbox.wake(WakeReason.FAILED, vote.error)
        elif not task.cancelled():
            self.inbox.wake(WakeReason.ANSWERED)

    # --- hold

    def lost(self) -> LossReason | None:
        """Return the reason of the loss if fewer votes than a majority are left."""
        if sum(vote.granted for vote in self.votes) >= self.members.needed:
            return None
        reasons: list[LossReason] = [vote.reason for vote in self.votes if vote.state is VoteState.LOST]
        return "force-released" if "force-released" in reasons else reasons[-1] if reasons else "expired"

    def renewed(self, sent: float) -> Grant | None:
        """Return the grant of a majority of renewals that were sent at ``sent`` or later, if there is one."""
        fresh = [vote.until for vote in self.votes if vote.granted and vote.sent >= sent]
        if len(fresh) < self.members.needed:
            return None
        demand = any(vote.grant is not None and vote.grant.demand for vote in self.votes)
        until = majority_until(fresh, self.members.needed)
        self.promised = max(self.promised, until)
        return Grant(0, 0, until, demand)

    def renewal(self, sent: float) -> Renewal:
        """Return the result of a renewal that was sent at ``sent``, and ask for the missing votes if it succeeded."""
        if (grant := self.renewed(sent)) is not None:
            # A vote that is granted now would outlast a hold that is not prolonged.
            if not self.fixed:
                self._mend()
            return grant
        return self.lost() or self.failure()

    def _mend(self) -> None:
        """Ask the members whose vote is missing: after an outage or a loss of data they may be back.

        The claim queues there as well: the claims before it find out that they cannot have a majority, and retreat.
        """
        if self.given_back:
            return
        for number, vote in enumerate(self.votes):
            if not vote.granted and not vote.pending and vote.member.open:
                if vote.state is VoteState.LOST:
                    self._replace(number)
                self.votes[number].ask(wait=True, until_granted=True)

    # --- release

    def begin_release(self, keep: float = 0) -> Release | None:
        """Begin the release at every member; a pending request is cancelled first."""
        self._leave(keep)
        return Release.UNKNOWN

    def _leave(self, keep: float) -> dict[asyncio.Task[Release], Member]:
        self._give_up = math.inf
        if self._inbox is not None:
            self._inbox.close()
        if self._leaving is None:
            self._leaving = {vote.give_back(keep): vote.member for vote in self.votes if vote.known}
        return self._leaving

    async def release(self, keep: float = 0) -> Release:
        """Give back every vote: return when a majority has answered and the others had as much time again.

        The answer is "not held" if the members that knew a vote are no majority.
        """
        leaving, begun = self._leave(keep), self._now
        limit, needed = self.members.command_timeout, self.members.needed
        # The members that never knew the claim are free as well.
        without = len(self.votes) - len(leaving)

        def answers() -> list[Release]:
            return [task.result() for task in leaving if task.done() and not task.cancelled()]

        free = await self.members.until(
            lambda: without + len(answers()) >= needed, list(leaving), begun + limit
        )
        if not free:
            raise BackendUnavailable(f"{self.members!r}: too few servers have answered the release")
        slow = [task for task, member in leaving.items() if not (task.done() or member.silent)]
        took = self._now - begun
        if slow and took < limit:
            await asyncio.wait(slow, timeout=min(limit - took, took + SLACK))
        if without + answers().count(Release.NOT_HELD) > len(self.votes) - needed:
            return Release.NOT_HELD
        return Release.RELEASED if answers().count(Release.RELEASED) >= needed else Release.UNKNOWN
