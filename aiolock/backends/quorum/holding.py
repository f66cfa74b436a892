"""The votes for one bid, as long as they count: until when they hold, what mends them, and how they are given back."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from aiolock.backends.quorum.rules import certain
from aiolock.backends.quorum.vote import Say, Vote
from aiolock.contract import READ, Bid, Claim, Grant, Release
from aiolock.errors import BackendError, BackendUnavailable, LockLost, LossReason

if TYPE_CHECKING:
    from aiolock.backends.quorum.backend import QuorumBackend
    from aiolock.backends.quorum.member import Member

__all__ = ["Holding"]

SLACK = 0.01
"""Seconds that those who are slower than most may take longer than most, at least."""


class Holding(Claim):
    """A claim that is made of the votes of several servers."""

    __slots__ = ("_demanded", "_leaving", "_token", "_votes", "_won_it", "asked", "backend", "promised")

    def __init__(self, backend: QuorumBackend, bid: Bid) -> None:
        self.backend = backend
        self._demanded: float | None = None
        self._votes: list[Vote] = []
        super().__init__(bid)
        self._votes = [Vote(member, self, bid) for member in backend.order(bid)]
        self._won_it = False
        """Whether most votes were ours once."""
        self._token = 0
        """Of the grant that they made."""
        self._leaving: dict[asyncio.Task[Release], Member] | None = None
        self.asked = ""
        """Why it was asked to let go."""
        self.promised = -math.inf
        """Until when its holder believes that it has it."""

    @property
    def demanded_at(self) -> float | None:
        """Since when any server says that others wait."""
        told = [vote.claim.demanded_at for vote in self._votes]
        return min((when for when in (*told, self._demanded) if when is not None), default=None)

    @demanded_at.setter
    def demanded_at(self, when: float | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride] # each server tells it
        self._demanded = when

    @property
    def votes(self) -> list[Vote]:
        """One for each server, the one that decides first."""
        return self._votes

    @property
    def _now(self) -> float:
        return self.backend.settings.clock()

    def voted(self, vote: Vote) -> None:
        """An answer came that nobody may be waiting for any more: no place in line is left behind for nothing."""
        if vote.say is Say.IN_LINE and self._won_it and not self.given_back and vote in self._votes:
            vote.ask(wait=True, stay=True)

    def _without_majority(self) -> BackendError:
        """Why too few servers can be asked."""
        return self.backend.failure([vote.error for vote in self._votes if vote.error is not None])

    def _replace(self, number: int) -> None:
        """Give back whatever there is at one server, in the background, and start anew there."""
        vote = self._votes[number]
        if vote.known:
            self.backend.free(vote)
        if vote.known or vote.claim.bid is not self.bid:
            self._votes[number] = Vote(vote.member, self, self.bid)

    # --- holding

    @property
    def given_back(self) -> bool:
        """Whether it was."""
        return self._leaving is not None

    @property
    def until(self) -> float:
        """Until when most of the votes are certain."""
        return certain((vote.until for vote in self._votes if vote.say is Say.YES), self.backend.needed)

    def lost(self) -> LossReason | None:
        """Why too few votes are left, if so."""
        if sum(vote.say is Say.YES for vote in self._votes) >= self.backend.needed:
            return None
        reasons: list[LossReason] = [vote.reason for vote in self._votes if vote.say is Say.LOST]
        return "force-released" if "force-released" in reasons else reasons[-1] if reasons else "expired"

    def renewed(self, sent: float) -> Grant | None:
        """The grant that renewals make which were sent then or later, if they are enough."""
        fresh = [vote.until for vote in self._votes if vote.say is Say.YES and vote.heard >= sent]
        if len(fresh) < self.backend.needed:
            return None
        demand = any(vote.grant is not None and vote.grant.demand for vote in self._votes)
        until = certain(fresh, self.backend.needed)
        self.promised = max(self.promised, until)
        return Grant(0, 0, until, demand)

    def mend(self) -> None:
        """Ask again those whose vote we lack: who was down, or has lost its data, may be back.

        Others may be in line there, who find that they cannot have the other votes, and let go: so we stand in line as well.
        """
        if self.given_back:
            return
        for number, vote in enumerate(self._votes):
            if vote.say is not Say.YES and not vote.open and vote.member.open:
                if vote.say is Say.LOST:
                    self._replace(number)
                self._votes[number].ask(wait=True, stay=True)

    async def downgrade(self) -> Grant:
        """At every server whose vote we have. Done when most servers know, and the others had as much time again."""
        sent = self._now
        asked = [
            vote for vote in self._votes if vote.say is Say.YES or (vote.say is Say.NOTHING and vote.open)
        ]
        steps = [self.backend.spawn(_downgrade(vote, sent), "aiolock-quorum-downgrade") for vote in asked]
        try:
            while (slow := [step for step in steps if not step.done()]) and self.renewed(sent) is None:
                await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
            if slow:
                await asyncio.wait(slow, timeout=SLACK + self._now - sent)
        finally:
            for step in steps:
                step.cancel()
        if (reason := self.lost()) is not None:
            raise LockLost(self.bid.name, reason)
        if (grant := self.renewed(sent)) is None:
            raise self._without_majority()
        if self.bid.kind != READ:
            self.bid = replace(self.bid, kind=READ)
        # Whoever did not hear it goes on refusing readers: its vote is given back.
        for number, vote in enumerate(self._votes):
            if vote.heard < sent:
                self._replace(number)
        return Grant(self._token, 1, grant.until, grant.demand)

    # --- leaving

    def begin_release(self, keep: float = 0) -> Release | None:
        """Begin at every server; where a question is under way, that is ended first."""
        self._leave(keep)
        return Release.UNKNOWN

    def _leave(self, keep: float) -> dict[asyncio.Task[Release], Member]:
        backend = self.backend
        if self._leaving is None:
            self._leaving = {backend.free(vote, keep): vote.member for vote in self._votes if vote.known}
        return self._leaving

    async def release(self, keep: float = 0) -> Release:
        """Give back every vote. Done when most servers know, and the others had as much time again.

        It was not ours if so many servers knew no vote for us that the others are no majority.
        """
        backend, leaving = self.backend, self._leave(keep)
        begun = self._now
        left = backend.settings.command_timeout
        if not await self._left(left):
            raise BackendUnavailable(f"{backend!r}: too few servers know that it was given back")
        slow = [task for task, member in leaving.items() if not (task.done() or member.silent)]
        took = self._now - begun
        if slow and took < left:
            await asyncio.wait(slow, timeout=min(left - took, took + SLACK))
        answers = [task.result() for task in leaving if task.done() and not task.cancelled()]
        without = len(self._votes) - len(leaving) + answers.count(Release.NOT_OURS)
        if without > len(self._votes) - backend.needed:
            return Release.NOT_OURS
        return Release.RELEASED if answers.count(Release.RELEASED) >= backend.needed else Release.UNKNOWN

    async def _left(self, limit: float) -> bool:
        """Whether within so many seconds so many servers are free of us that others can have a majority."""
        needed = self.backend.needed - (len(self._votes) - len(self._leaving or ()))
        end = self._now + limit
        while True:
            leaving = list(self._leaving or ())
            if sum(task.done() and not task.cancelled() for task in leaving) >= needed:
                return True
            slow = [task for task in leaving if not task.done()]
            seconds = end - self._now
            if not slow or seconds <= 0:
                return False
            await asyncio.wait(slow, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


async def _downgrade(vote: Vote, sent: float) -> None:
    if await vote.answered() is not Say.YES:
        return
    try:
        vote.take(await vote.member.hear(vote.claim.downgrade()), sent)
    except LockLost as error:
        vote.lose(error.reason)
    except BackendError as error:
        vote.error = error
