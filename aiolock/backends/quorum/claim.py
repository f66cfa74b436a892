"""One bid at several servers: asked of all, held by most, given back to each.

Whoever asks everybody at once may find that each of three got one server of three, and nobody a majority. So one server
decides who is next: the first that can be reached, in an order that is the same for every client and another for each
lock. Its line is the line. The others are asked at the same time, because most locks are free; a vote that came without
the word of the first is given back at once. Whoever has that word and lacks other votes stands in line for them, but
not for long: two who see different servers could wait for each other, so both let go after a random time.

The majority is Redlock's (antirez, "Distributed locks with Redis").
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from aiolock.backends.quorum.rules import certain
from aiolock.backends.quorum.vote import Say, Vote
from aiolock.contract import READ, Bid, Claim, Grant, claim_time
from aiolock.errors import BackendError, BackendUnavailable, LockLost, LossReason

if TYPE_CHECKING:
    from aiolock.backends.quorum.backend import QuorumBackend

__all__ = ["QuorumClaim"]

LOOK = 2.0
"""Seconds after which a place in line is looked at, whatever its server has told."""
GATHER = (0.25, 0.5)
"""For which share of the time that a pushed grant waits for its confirmation the other votes are waited for."""
SLACK = 0.01
"""Seconds that those who are slower than most may take longer than most, at least."""


class QuorumClaim(Claim):
    """The votes of all servers for one bid."""

    __slots__ = (
        "_demanded",
        "_give_up",
        "_leaving",
        "_line",
        "_pause",
        "_votes",
        "_won_it",
        "asked",
        "backend",
        "promised",
    )

    def __init__(self, backend: QuorumBackend, bid: Bid) -> None:
        self.backend = backend
        self._demanded: float | None = None
        self._votes: list[Vote] = []
        super().__init__(bid)
        self._votes = [Vote(member, self, bid) for member in backend.order(bid)]
        self._line: Vote | None = None
        """The server whose line we stand in."""
        self._give_up = math.inf
        """Until when we may wait for the votes of others; ``inf``: we do not."""
        self._pause = 0.0
        """Seconds to keep quiet after everything was given back."""
        self._won_it = False
        """Whether most votes were ours once."""
        self._leaving: list[asyncio.Task[None]] | None = None
        self.asked = ""
        """Why it was asked to let go."""
        self.promised = -math.inf
        """Until when its holder believes that it has it."""

    @property
    def demanded_at(self) -> float | None:  # pyright: ignore[reportIncompatibleVariableOverride] # each server tells it
        """Since when any server says that others wait."""
        told = [vote.claim.demanded_at for vote in self._votes]
        return min((when for when in (*told, self._demanded) if when is not None), default=None)

    @demanded_at.setter
    def demanded_at(self, when: float | None) -> None:
        self._demanded = when

    @property
    def votes(self) -> list[Vote]:
        """One for each server, the one that decides first."""
        return self._votes

    @property
    def _now(self) -> float:
        return self.backend.settings.clock()

    # --- asking

    async def attempt(self, wait: bool) -> Grant | None:
        """Ask everybody; or go on where the last attempt ended."""
        limit = self.backend.settings.command_timeout * (2 if wait else 1)
        try:
            async with asyncio.timeout(limit):
                await self._quiet()
                self._pause = 0.0
                if self._give_up < math.inf:
                    return await self._gather()
                if self._line is not None and (vote := self._line).say is Say.IN_LINE and wait:
                    return await self._in_line(vote)
                return await self._round(wait=wait)
        except TimeoutError as error:
            raise BackendUnavailable(f"{self.backend!r} did not answer within {limit:g} s") from error

    async def _quiet(self) -> None:
        """What an attempt that was cancelled has asked for is answered first, or given back."""
        for number, vote in enumerate(self._votes):
            if vote.open:
                self._replace(number)

    async def _round(self, *, wait: bool) -> Grant | None:
        """All at once; only the first may put us in line."""
        votes = self._votes
        self._line = None
        for number, vote in enumerate(votes):
            if vote.say in (Say.ERROR, Say.LOST) or (number and vote.say is Say.IN_LINE):
                self._replace(number)
            votes[number].ask(wait=wait and number == 0)
        first = await self._first(wait=wait)
        if first is None:
            failure = self._without_majority()
            self._retreat()
            raise failure
        if first.say is not Say.YES:
            # Whoever is next is not us: what others have given us in the meantime would only be in the way.
            self._retreat(keep=first if wait else None)
            self._line = first if wait else None
            return None
        if await self._enough():
            return self._won()
        if wait:
            return await self._gather()
        error = None if self._possible() else self._without_majority()
        self._retreat()
        if error is not None:
            raise error
        return None

    async def _first(self, *, wait: bool) -> Vote | None:
        """The vote of the first server that can be asked, which decides."""
        for vote in self._votes:
            if await vote.answered() is Say.NO and wait:
                vote.ask(wait=True)
                await vote.answered()
            if vote.say is not Say.ERROR:
                return vote
        return None

    async def _in_line(self, vote: Vote) -> Grant | None:
        vote.ask(wait=True)
        said = await vote.answered()
        if said is Say.IN_LINE:
            return None
        if said is not Say.YES:
            return await self._round(wait=True)
        return await self._gather()

    async def _gather(self) -> Grant | None:
        """We are next: stand in line for the votes that are missing."""
        if self._give_up == math.inf:
            self._give_up = self._now + self.backend.random.uniform(*GATHER) * claim_time(self.bid.ttl)
        for vote in self._votes:
            if not vote.open and vote.say in (Say.NOTHING, Say.NO, Say.IN_LINE):
                vote.ask(wait=True)
        if await self._enough():
            return self._won()
        if not self._possible():
            error = self._without_majority()
            self._retreat()
            raise error
        if self._now < self._give_up:
            return None
        self._retreat()
        self._pause = self.backend.random.uniform(0, GATHER[1]) * claim_time(self.bid.ttl)
        return None

    async def _enough(self) -> bool:
        """Wait until most have said yes, or cannot any more."""
        while True:
            ours = sum(vote.ours(self._now) for vote in self._votes)
            waiting = [vote.task for vote in self._votes if vote.task is not None and vote.open]
            if ours >= self.backend.needed:
                return True
            if ours + len(waiting) < self.backend.needed:
                return False
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    def _possible(self) -> bool:
        """Whether so many servers can be asked that they could give us the lock."""
        return sum(vote.say is not Say.ERROR for vote in self._votes) >= self.backend.needed

    def _won(self) -> Grant | None:
        """The grant that the votes make together."""
        self._give_up, self._line, self._won_it = math.inf, None, True
        grants = [vote.grant for vote in self._votes if vote.say is Say.YES and vote.grant is not None]
        for number, vote in enumerate(self._votes):
            if vote.say is Say.IN_LINE:
                self._replace(number)
        # Those of the server that decides rise; what another one's clock makes of it is beside the point.
        first, self.promised = grants[0], self.until
        return Grant(first.token, first.count, self.promised, any(grant.demand for grant in grants))

    def voted(self, vote: Vote) -> None:
        """An answer came that nobody may be waiting for any more: no place in line is left behind for nothing."""
        if vote.say is Say.IN_LINE and self._won_it and vote in self._votes:
            self._replace(self._votes.index(vote))

    def _without_majority(self) -> BackendError:
        """Why too few servers can be asked."""
        return self.backend.failure([vote.error for vote in self._votes if vote.error is not None])

    # --- waiting

    async def changed(self) -> None:
        """Wait for whatever may come from a server whose line we stand in."""
        if self._pause:
            await asyncio.sleep(self._pause)
            return
        lines = [vote for vote in self._votes if vote.say is Say.IN_LINE]
        limit = min(LOOK, max(0.0, self._give_up - self._now))
        spawn = self.backend.spawn
        waits = [spawn(vote.claim.changed(), "aiolock-quorum-wait") for vote in lines]
        try:
            if waits:
                await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(min(limit, SLACK))
        finally:
            for wait in waits:
                wait.cancel()

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
        """Ask again those whose vote we lack: who was down, or has lost its data, may be back."""
        if self.given_back:
            return
        for number, vote in enumerate(self._votes):
            if vote.say is not Say.YES and not vote.open and vote.member.open:
                if vote.say is Say.LOST:
                    self._replace(number)
                self._votes[number].ask(wait=False)

    async def downgrade(self) -> Grant:
        """At every server whose vote we have."""
        sent = self._now
        asked = [vote for vote in self._votes if vote.say is Say.YES]
        steps = [self.backend.spawn(_downgrade(vote, sent), "aiolock-quorum-downgrade") for vote in asked]
        try:
            await asyncio.wait(steps)
        except BaseException:
            for step in steps:
                step.cancel()
            raise
        if self.lost() is not None:
            raise LockLost(self.bid.name, self.lost() or "revoked")
        if (grant := self.renewed(sent)) is None:
            raise self._without_majority()
        if self.bid.kind != READ:
            self.bid = replace(self.bid, kind=READ)
        # Whoever did not hear it goes on refusing readers: its vote is given back.
        for number, vote in enumerate(self._votes):
            if vote.heard < sent:
                self._replace(number)
        tokens = [vote.grant.token for vote in asked if vote.grant is not None]
        return Grant(tokens[0], 1, grant.until, grant.demand)

    # --- leaving

    def _replace(self, number: int) -> None:
        """Give back whatever there is at one server, in the background, and start anew there."""
        vote = self._votes[number]
        if vote.known:
            self._votes[number] = Vote(vote.member, self, self.bid)
            self.backend.free(vote)

    def _retreat(self, keep: Vote | None = None) -> None:
        """Give back everything, except for one place."""
        self._give_up = math.inf
        for number, vote in enumerate(self._votes):
            if vote is not keep:
                self._replace(number)

    async def release(self, keep: float = 0) -> None:
        """Give back every vote. Done when most servers know, and the others had as much time again."""
        backend = self.backend
        if self._leaving is None:
            known = [vote for vote in self._votes if vote.known]
            self._leaving = [backend.free(vote, keep) for vote in known]
            self._give_up = math.inf
        begun = self._now
        left = backend.settings.command_timeout
        if not await self._left(left):
            raise BackendUnavailable(f"{backend!r}: too few servers know that it was given back")
        slow = [task for task in self._leaving if not task.done()]
        if slow:
            await asyncio.wait(slow, timeout=min(left, SLACK + self._now - begun))

    async def _left(self, limit: float) -> bool:
        """Whether within so many seconds so many servers are free of us that others can have a majority."""
        needed = self.backend.needed - (len(self._votes) - len(self._leaving or ()))
        end = self._now + limit
        while True:
            leaving = self._leaving or []
            if sum(task.done() and not task.cancelled() for task in leaving) >= needed:
                return True
            slow = [task for task in leaving if not task.done()]
            seconds = end - self._now
            if not slow or seconds <= 0:
                return False
            await asyncio.wait(slow, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


async def _downgrade(vote: Vote, sent: float) -> None:
    try:
        vote.take(await vote.claim.downgrade(), sent)
    except LockLost as error:
        vote.lose(error.reason)
    except BackendError as error:
        vote.error = error
