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
from typing import TYPE_CHECKING

from aiolock.backends.quorum.holding import SLACK, Holding
from aiolock.backends.quorum.vote import LOOK, Say, Vote
from aiolock.contract import Bid, Grant, Release, claim_time
from aiolock.errors import BackendUnavailable

if TYPE_CHECKING:
    from aiolock.backends.quorum.backend import QuorumBackend
    from aiolock.backends.quorum.member import Member

__all__ = ["QuorumClaim"]

GATHER = (0.25, 0.5)
"""For which share of the time that a pushed grant waits for its confirmation the other votes are waited for."""


class QuorumClaim(Holding):
    """The votes of all servers for one bid, while they are asked for."""

    __slots__ = ("_give_up", "_line", "_pause")

    def __init__(self, backend: QuorumBackend, bid: Bid) -> None:
        super().__init__(backend, bid)
        self._line: Vote | None = None
        """The server whose line we stand in."""
        self._give_up = math.inf
        """Until when we may wait for the votes of others; ``inf``: we do not."""
        self._pause = 0.0
        """Seconds to keep quiet after everything was given back."""

    # --- asking

    async def attempt(self, wait: bool) -> Grant | None:
        """Ask everybody; or go on where the last attempt ended."""
        limit = self.backend.settings.command_timeout * (2 if wait else 1)
        self._pause = 0.0
        try:
            async with asyncio.timeout(limit):
                if self._give_up < math.inf:
                    return await self._gather()
                self._quiet()
                if self._line is not None and (vote := self._line).say is Say.IN_LINE and wait:
                    return await self._in_line(vote)
                return await self._round(wait=wait)
        except TimeoutError as error:
            raise BackendUnavailable(f"{self.backend!r} did not answer within {limit:g} s") from error

    def _quiet(self) -> None:
        """What an attempt that was cancelled has asked for is given back."""
        for number, vote in enumerate(self._votes):
            if vote.open:
                self._replace(number)

    async def _round(self, *, wait: bool) -> Grant | None:
        """All at once; only the first may put us in line."""
        votes = self._votes
        self._line = None
        for number, vote in enumerate(votes):
            if vote.say in (Say.ERROR, Say.LOST) or (vote.say is Say.IN_LINE and (number or not wait)):
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
        if wait:
            return await self._gather()
        if await self._enough():
            return self._won()
        error = None if self._possible() else self._without_majority()
        self._retreat()
        if error is not None:
            raise error
        return None

    async def _first(self, *, wait: bool) -> Vote | None:
        """The vote of the first server that can be asked, which decides.

        One that did not answer the last time is asked as well, and is waited for if nobody else can be asked.
        """
        for vote in sorted(self._votes, key=lambda vote: vote.member.silent):
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
            self._give_up = self._now + self._patience(*GATHER)
        # Once more for those that said no before we were next.
        for missing in ({Say.NOTHING, Say.NO, Say.IN_LINE}, {Say.NO}):
            for vote in self._votes:
                if not vote.open and vote.say in missing:
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
        self._pause = self._patience(0, GATHER[1])
        return None

    def _patience(self, least: float, most: float) -> float:
        """A random share of the time that others may take as well: for a long ttl, that of a command."""
        whole = min(claim_time(self.bid.ttl), self.backend.settings.command_timeout)
        return self.backend.random.uniform(least, most) * whole

    async def _enough(self) -> bool:
        """Wait until most have said yes, or cannot any more, or one of them says that we are in its line."""
        while True:
            ours = sum(vote.ours(self._now) for vote in self._votes)
            waiting = [vote.task for vote in self._votes if vote.task is not None and vote.open]
            if ours >= self.backend.needed:
                return True
            if ours + len(waiting) < self.backend.needed:
                return False
            if any(vote.say is Say.IN_LINE for vote in self._votes):
                # It may tell us sooner than a silent one answers: both are waited for together.
                return False
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    def _possible(self) -> bool:
        """Whether so many servers can be asked that they could give us the lock."""
        return sum(vote.say is not Say.ERROR for vote in self._votes) >= self.backend.needed

    def _won(self) -> Grant | None:
        """The grant that the votes make together."""
        self._give_up, self._line, self._won_it = math.inf, None, True
        grants = [vote.grant for vote in self._votes if vote.say is Say.YES and vote.grant is not None]
        for vote in self._votes:
            if vote.say in (Say.IN_LINE, Say.NO) and not vote.open:
                vote.ask(wait=True, stay=True)
        # Those of the server that decides rise; what another one's clock makes of it is beside the point.
        first, self.promised = grants[0], self.until
        self._token = first.token
        return Grant(first.token, first.count, self.promised, any(grant.demand for grant in grants))

    def _retreat(self, keep: Vote | None = None) -> None:
        """Give back everything, except for one place."""
        self._give_up = math.inf
        for number, vote in enumerate(self._votes):
            if vote is not keep:
                self._replace(number)

    # --- waiting

    async def changed(self) -> None:
        """Wait for whatever may come from a server whose line we stand in, or that has not answered yet."""
        if self._pause:
            await asyncio.sleep(self._pause)
            return
        limit = min(LOOK, max(0.0, self._give_up - self._now))
        spawn = self.backend.spawn
        lines = [
            spawn(vote.claim.changed(), "aiolock-quorum-wait")
            for vote in self._votes
            if vote.say is Say.IN_LINE
        ]
        waits = [*lines, *(vote.task for vote in self._votes if vote.task is not None and vote.open)]
        try:
            if waits:
                await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(min(limit, SLACK))
        finally:
            for line in lines:
                line.cancel()

    def _leave(self, keep: float) -> dict[asyncio.Task[Release], Member]:
        self._give_up = math.inf
        return super()._leave(keep)
