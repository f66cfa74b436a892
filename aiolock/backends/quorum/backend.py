"""A backend made of backends: the claims of several independent servers, counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from aiolock.backends.quorum.claim import QuorumClaim
from aiolock.backends.quorum.holding import Holding
from aiolock.backends.quorum.member import Member
from aiolock.backends.quorum.rules import combined, majority, promised, rotation
from aiolock.backends.quorum.twins import check_twins
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
    Renewal,
    Settings,
)
from aiolock.errors import (
    BackendError,
    BackendRefused,
    BackendUnavailable,
    ConfigError,
    UnsupportedKind,
    shorten,
)
from aiolock.info import Level
from aiolock.notices import Notices

__all__ = ["QuorumBackend"]

log: logging.Logger = logging.getLogger("aiolock")

T = TypeVar("T")

FEWEST = 3
"""With two servers, each of them would be able to stop everything."""


class QuorumBackend(Backend):
    """Several independent servers: who has a lock on more than half of them has it (Redlock).

    :param members: a backend for each server, three or more; every client has to name the same ones, in the same order.
    """

    name = "quorum"

    def __init__(self, members: Sequence[Backend]) -> None:
        if not isinstance(members, list | tuple) or not all(isinstance(one, Backend) for one in members):
            raise ConfigError(f"members must be a list of backends, not {shorten(members)}")
        if len(members) < FEWEST:
            raise ConfigError(
                f"a quorum needs at least {FEWEST} servers, so that it works without one of them, not {len(members)}"
            )
        if len({id(one) for one in members}) < len(members):
            raise ConfigError("a quorum needs a backend of its own for each server: one is named twice")
        self._members = [Member(one) for one in members]
        self.needed = majority(len(members))
        """How many votes are more than half."""
        self.notices = Notices()
        self.random = Random()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leaving: dict[asyncio.Task[None], float] = {}
        """What gives something back, and since when."""

    def __repr__(self) -> str:
        return f"<QuorumBackend {', '.join(map(repr, self._members))}>"

    # --- opening and closing

    def bind(self, settings: Settings) -> None:
        """Each server gets half of the time, so that there is some left for what its silence means."""
        super().bind(settings)
        theirs = replace(settings, command_timeout=settings.command_timeout / 2, require=frozenset())
        for member in self._members:
            member.backend.bind(theirs)

    async def open(self) -> None:
        """Open those that can be reached, which must be most; the others are tried again until they are there."""
        tries = [self.spawn(member.try_to_open(), "aiolock-quorum-open") for member in self._members]
        try:
            await asyncio.wait(tries)
        finally:
            for one in tries:
                one.cancel()
            await asyncio.wait(tries)
        for one in tries:
            # What nobody can retry is an error in the address of that server, or in its rights.
            one.result()
        there = [member for member in self._members if member.open]
        if len(there) < self.needed:
            raise self.failure([member.failure for member in self._members if member.failure is not None])
        await self._check_twins(there)
        self.capabilities = promised([member.backend.capabilities for member in there])
        for member in self._members:
            if member.open:
                self._opened(member)
            else:
                log.warning("%r cannot be reached, going on without it: %s", member, member.failure)
                self.spawn(self._open_later(member), "aiolock-quorum-open")

    async def _open_later(self, member: Member) -> None:
        def suits() -> Coroutine[Any, Any, None]:
            return self._check_twins([*(other for other in self._members if other.open), member])

        await member.open_later(self.random, suits)
        if member.open:
            self._opened(member)

    async def _check_twins(self, members: Sequence[Member]) -> None:
        settings = self.settings
        backends = [member.backend for member in members]
        await check_twins(backends, ttl=settings.ttl, limit=settings.command_timeout / 2, later=self._leave)

    def _opened(self, member: Member) -> None:
        self.spawn(self._listen(member), "aiolock-quorum-notices")
        # Votes that were missing are asked for with the next renewals.
        self.notices.put(Notice(News.DOUBT))

    async def aclose(self) -> None:
        """Finish what is being given back, unless that has had its time, and close every server."""
        if self._leaving:
            now = self.settings.clock()
            limits = {
                task: since + self.settings.command_timeout / 2 - now for task, since in self._leaving.items()
            }
            if late := [task for task, limit in limits.items() if limit > 0]:
                await asyncio.wait(late, timeout=max(limits.values()))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        closing = [asyncio.ensure_future(member.backend.aclose()) for member in self._members if member.open]
        for member in self._members:
            member.open = False
        if closing:
            await asyncio.wait(closing)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run ``work`` until it ends or everything is closed."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def failure(self, errors: Sequence[Exception]) -> BackendError:
        """What to say when too few servers can be asked, and why they cannot."""
        kind = (
            BackendRefused
            if errors and all(isinstance(one, BackendRefused) for one in errors)
            else BackendUnavailable
        )
        retryable = not errors or any(getattr(one, "retryable", True) for one in errors)
        why = f": {'; '.join(dict.fromkeys(map(str, errors)))}" if errors else ""
        failure = kind(
            f"{len(errors)} of {len(self._members)} servers cannot be asked, and {self.needed} are needed{why}",
            retryable=retryable,
        )
        failure.__cause__ = errors[0] if errors else None
        return failure

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
        start = rotation(bid.name, len(self._members))
        return self._members[start:] + self._members[:start]

    def free(self, vote: Vote, keep: float = 0) -> asyncio.Task[None]:
        """Give back a vote, in the background, for as long as its server could keep it."""
        return self._leave(self._free(vote, keep))

    def _leave(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.spawn(work, "aiolock-quorum-clean-up")
        self._leaving[task] = self.settings.clock()
        task.add_done_callback(self._left)
        return task

    def _left(self, task: asyncio.Task[None]) -> None:
        self._leaving.pop(task, None)

    async def _free(self, vote: Vote, keep: float) -> None:
        if vote.task is not None and vote.open:
            vote.task.cancel()
            await asyncio.wait([vote.task])
        if not vote.member.open:
            return
        clock = self.settings.clock
        give_up, pause = clock() + vote.claim.bid.ttl, 0.02
        while True:
            try:
                await vote.member.hear(vote.claim.release(keep))
            except BackendError as error:
                if not error.retryable or clock() >= give_up:
                    log.info(
                        "%r was not told that a vote is given back, it ends by its ttl: %s",
                        vote.member,
                        error,
                    )
                    return
            else:
                return
            await asyncio.sleep(pause * self.random.uniform(0.5, 1.0))
            pause = min(2 * pause, 1.0)

    # --- renewing

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """All servers at once; answered when most have said what it takes for each claim."""
        mine = [claim for claim in claims if isinstance(claim, QuorumClaim)]
        sent = self.settings.clock()
        rounds = []
        for member in self._members:
            votes = [
                vote
                for claim in mine
                for vote in claim.votes
                if vote.member is member and vote.say is Say.YES
            ]
            if votes:
                rounds.append(self.spawn(self._renew(member, votes, sent), "aiolock-quorum-renewal"))
        while (open_rounds := [one for one in rounds if not one.done()]) and not all(
            claim.renewed(sent) or claim.lost() for claim in mine
        ):
            await asyncio.wait(open_rounds, return_when=asyncio.FIRST_COMPLETED)
        return [self._renewal(claim, sent) for claim in mine]

    def _renewal(self, claim: QuorumClaim, sent: float) -> Renewal:
        if (grant := claim.renewed(sent)) is not None:
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

    async def _all(self, ask: Callable[[Backend], Awaitable[T]]) -> list[T]:
        """The answers of all servers that gave one, which must be most, in their order."""

        async def one(member: Member) -> T:
            member.check()
            return await member.hear(ask(member.backend))

        asked = [self.spawn(one(member), "aiolock-quorum-look") for member in self._members]
        # Who did not answer the last time is not waited for if the others are enough.
        vital = [
            task
            for task, member in zip(asked, self._members, strict=True)
            if member.open and not member.silent
        ]
        try:
            if len(vital) >= self.needed:
                await asyncio.wait(vital)
            if len([task for task in asked if task.done() and task.exception() is None]) < self.needed:
                await asyncio.wait(asked)
        finally:
            for task in asked:
                task.cancel()
        heard = [task for task in asked if task.done() and not task.cancelled()]
        errors = [error for task in heard if (error := task.exception()) is not None]
        for error in errors:
            if not isinstance(error, BackendError):
                raise error
        answers = [task.result() for task in heard if task.exception() is None]
        if len(answers) < self.needed:
            raise self.failure([error for error in errors if isinstance(error, BackendError)])
        return answers

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Who is inside as most servers see it; who waits as the first one does, or others."""
        start = rotation(name, len(self._members))
        infos = await self._all(lambda backend: backend.inspect(name, family))
        # With some missing, nobody knows which is the first: the longest line is likely to be that of most.
        if len(infos) == len(self._members):
            infos = infos[start:] + infos[:start]
        else:
            infos.sort(key=lambda info: -len(info.waiters))
        return combined(infos, self.needed)

    async def force_release(self, name: str, family: Family) -> bool:
        """At every server."""
        return any(await self._all(lambda backend: backend.force_release(name, family)))

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """At every server."""
        return any(await self._all(lambda backend: backend.request_release(name, family, reason)))

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Whatever any server knows."""
        return sorted(
            {name for names in await self._all(lambda backend: backend.names(pattern)) for name in names}
        )

    async def diagnose(self) -> list[Finding]:
        """What each of them says of itself, and which are away."""
        asked = [self.spawn(_findings(member), "aiolock-quorum-look") for member in self._members]
        try:
            await asyncio.wait(asked)
        finally:
            for one in asked:
                one.cancel()
        return [finding for one in asked for finding in one.result()]


async def _findings(member: Member) -> list[Finding]:
    try:
        found = await member.backend.diagnose()
    except BackendError as error:
        found = [
            Finding(
                Level.ERROR, "connection", f"{error}", "bring it back: the others can lose fewer until then"
            )
        ]
    return [replace(finding, subject=f"{member!r} {finding.subject}") for finding in found]
