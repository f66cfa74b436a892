"""A backend made of backends: the claims of several independent servers, counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self, TypeVar

from aiolock.backends.quorum.claim import QuorumClaim
from aiolock.backends.quorum.holding import Holding
from aiolock.backends.quorum.looking import all_of, findings, seen
from aiolock.backends.quorum.member import Member
from aiolock.backends.quorum.members import Members
from aiolock.backends.quorum.vote import Say, Vote
from aiolock.contract import (
    Backend,
    Bid,
    Claim,
    Family,
    Finding,
    Grant,
    LockInfo,
    News,
    Notice,
    Release,
    Renewal,
    Settings,
)
from aiolock.errors import (
    BackendError,
    UnsupportedKind,
)
from aiolock.logs import Log, get_logger
from aiolock.notices import Notices

__all__ = ["QuorumBackend"]

log: Log = get_logger("aiolock")

T = TypeVar("T")


class QuorumBackend(Backend):
    """Several independent servers: who has a lock on more than half of them has it (Redlock).

    :param members: a backend for each server, three or more; every client has to name the same ones, in the same order.
    """

    name = "quorum"

    def __init__(self, members: Sequence[Backend]) -> None:
        self.members = Members(members)
        self.needed = self.members.needed
        """How many votes are more than half."""
        self.random = self.members.random
        self.spawn = self.members.spawn
        self.failure = self.members.failure
        self.notices = Notices()

    def __repr__(self) -> str:
        return f"<QuorumBackend {self.members!r}>"

    # --- opening and closing

    def again(self) -> Self:
        """The same, of new backends for the same servers."""
        return type(self)([member.backend.again() for member in self.members.all])

    def abandon(self) -> None:
        """Every member for itself."""
        for member in self.members.all:
            member.backend.abandon()

    def bind(self, settings: Settings) -> None:
        """The same for all of them."""
        super().bind(settings)
        self.members.bind(settings)

    async def open(self) -> None:
        """Open most of them."""
        self.capabilities = await self.members.open(self._opened)

    def _opened(self, member: Member) -> None:
        self.spawn(self._listen(member), "aiolock-quorum-notices")
        # Votes that were missing are asked for with the next renewals.
        self.notices.put(Notice(News.DOUBT))

    async def settle(self, timeout: float) -> None:
        """Wait for votes that are given back, unless they have had their time."""
        await self.members.settle(timeout)

    async def aclose(self) -> None:
        """Close every server."""
        await self.members.aclose()

    # --- claims

    def claim(self, bid: Bid) -> QuorumClaim:
        """A new claim, for kinds of which one server's no is enough."""
        if bid.kind.family is Family.SEMAPHORE:
            raise UnsupportedKind(
                "semaphore",
                self.name,
                "three servers with two permits each can seat three holders, each of whom has a majority: use one server",
            )
        return QuorumClaim(self, bid)

    def order(self, bid: Bid) -> list[Member]:
        """The servers, the one that decides about this lock first."""
        return self.members.order(bid.name)

    def free(self, vote: Vote, keep: float = 0) -> asyncio.Task[Release]:
        """Give back a vote, in the background, for as long as its server could keep it; what it said of the vote."""
        if vote.member.open and not vote.open:
            vote.claim.begin_release(keep)
        return self.members.leave(self._free(vote, keep))

    async def _free(self, vote: Vote, keep: float) -> Release:
        if vote.task is not None and vote.open:
            vote.task.cancel()
            await asyncio.wait([vote.task])
        if not vote.member.open:
            return Release.UNKNOWN
        clock = self.settings.clock
        give_up, pause = clock() + vote.claim.bid.ttl, 0.02
        while True:
            try:
                return await vote.member.hear(vote.claim.release(keep))
            except BackendError as error:
                if not error.retryable or clock() >= give_up:
                    log.info(
                        "%r was not told that a vote is given back, it ends by its ttl: %s",
                        vote.member,
                        error,
                    )
                    return Release.UNKNOWN
            await asyncio.sleep(pause * self.random.uniform(0.5, 1.0))
            pause = min(2 * pause, 1.0)

    # --- renewing

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """All servers at once; answered when most have said what it takes for each claim."""
        mine = [claim for claim in claims if isinstance(claim, QuorumClaim)]
        sent = self.settings.clock()
        rounds = []
        for member in self.members.all:
            votes = [
                vote
                for claim in mine
                for vote in claim.votes
                if vote.member is member and vote.say is Say.YES
            ]
            for vote in votes:
                vote.claim.fixed = vote.owner.fixed
            if votes:
                rounds.append(self.spawn(self._renew(member, votes, sent), "aiolock-quorum-renewal"))
        while (open_rounds := [one for one in rounds if not one.done()]) and not all(
            claim.renewed(sent) or claim.lost() for claim in mine
        ):
            await asyncio.wait(open_rounds, return_when=asyncio.FIRST_COMPLETED)
        return [self._renewal(claim, sent) for claim in mine]

    def _renewal(self, claim: QuorumClaim, sent: float) -> Renewal:
        if (grant := claim.renewed(sent)) is not None:
            if not claim.fixed:
                # What is asked for now would be ours for longer than the hold is to last.
                claim.mend()
            return grant
        if (reason := claim.lost()) is not None:
            return reason
        return self.failure([vote.error for vote in claim.votes if vote.error is not None])

    async def _renew(self, member: Member, votes: Sequence[Vote], sent: float) -> None:
        try:
            answers: Sequence[Renewal] = await member.hear(
                member.backend.renew([vote.claim for vote in votes])
            )
        except Exception as error:  # noqa: BLE001 - whatever a server does to us, it is only one of several
            answers = [error] * len(votes)
        for vote, answer in zip(votes, answers, strict=True):
            if isinstance(answer, Exception):
                vote.error = answer
            elif vote.say is not Say.YES:
                # It was lost, or given back, while the question was under way.
                pass
            elif isinstance(answer, Grant):
                vote.take(answer, sent)
            else:
                vote.lose(answer)
                self._weakened(vote.owner)

    def _weakened(self, claim: Holding) -> None:
        """A vote was lost, and the others may be certain for less time than its holder believes."""
        if not claim.given_back and claim.lost() is None and claim.until < claim.promised:
            now = self.settings.clock()
            if claim.until <= now:
                self.notices.put(Notice(News.LOST, claim, "expired"))
            else:
                asyncio.get_running_loop().call_later(claim.until - now, self._weakened, claim)

    # --- what servers say unasked

    async def notice(self) -> Notice:
        """The next thing that the votes of a claim mean, together."""
        return await self.notices.get()

    async def _listen(self, member: Member) -> None:
        while True:
            self._hear(await member.backend.notice())

    def _hear(self, notice: Notice) -> None:
        if notice.claim is None:
            self.notices.put(notice)
            return
        vote = getattr(notice.claim, "term", None)
        if not isinstance(vote, Vote):
            return
        owner = vote.owner
        if notice.news is News.LOST:
            vote.lose(notice.reason)
            if (reason := owner.lost()) is not None:
                self.notices.put(Notice(News.LOST, owner, reason))
            else:
                self.notices.put(Notice(News.DOUBT, owner))
                self._weakened(owner)
        elif notice.news is News.REQUESTED:
            if owner.asked != notice.text:
                owner.asked = notice.text
                self.notices.put(Notice(News.REQUESTED, owner, text=notice.text))
        else:
            self.notices.put(Notice(notice.news, owner))

    # --- what people ask

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Who is inside as most servers see it."""
        return await seen(self.members, name, family)

    async def force_release(self, name: str, family: Family) -> bool:
        """At every server."""
        return any(await all_of(self.members, lambda backend: backend.force_release(name, family)))

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """At every server."""
        return any(await all_of(self.members, lambda backend: backend.request_release(name, family, reason)))

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Whatever any server knows."""
        found = await all_of(self.members, lambda backend: backend.names(pattern))
        return sorted({name for names in found for name in names})

    async def diagnose(self) -> list[Finding]:
        """What each of them says of itself, and which are away."""
        return await findings(self.members)
