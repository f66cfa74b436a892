"""A backend made of backends: a lock is held by a majority of several independent servers (Redlock)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Self, TypeVar

from aiolock.backends.diagnosis import failure
from aiolock.backends.quorum.claim import QuorumClaim, Vote
from aiolock.backends.quorum.members import Member, Members
from aiolock.backends.quorum.rules import combined, rotation
from aiolock.core.backend import Backend, Claim, Event, EventKind, Grant, Renewal, Request, Settings
from aiolock.core.capabilities import Administration, Diagnosis, diagnose
from aiolock.errors import BackendError, UnsupportedKind
from aiolock.types import Family, Finding, LockInfo

__all__ = ["QuorumBackend"]

T = TypeVar("T")


class QuorumBackend(Administration, Diagnosis):
    """Several independent servers: a claim that more than half of them granted is held (Redlock).

    :param members: a backend for each server, three or more; every client has to name the same ones, in the same order.
    """

    name = "quorum"
    shows_tokens = False
    renewal_limit = 100
    """After each answer of a member, the claims of one call are examined."""

    def __init__(self, members: Sequence[Backend]) -> None:
        self.members = Members(members)
        self.keeps_values = all(
            isinstance(member, Administration) and member.keeps_values for member in members
        )

    def __repr__(self) -> str:
        return repr(getattr(self, "members", "<quorum>"))

    # --- opening and closing

    def again(self) -> Self:
        """Return a new quorum of new backends for the same servers; no I/O."""
        return type(self)([member.backend.again() for member in self.members.all])

    def abandon(self) -> None:
        """Forget this opening at every member."""
        for member in self.members.all:
            member.backend.abandon()

    def bind(self, settings: Settings) -> None:
        """Bind every member."""
        super().bind(settings)
        self.members.bind(settings)

    async def open(self) -> None:
        """Open a majority of the members."""
        self.capabilities = await self.members.open(self._opened)

    def _opened(self, member: Member) -> None:
        self.members.tasks.spawn(self._listen(member), "aiolock-quorum-events")
        # The next renewals ask this member for the votes that are missing.
        self.events.put(Event(EventKind.DOUBT))

    async def settle(self, timeout: float) -> None:
        """Wait for votes that are given back, at most a command timeout for each."""
        await self.members.settle(timeout)

    async def aclose(self) -> None:
        """Close every member."""
        await self.members.aclose()

    # --- claims

    def claim(self, request: Request) -> QuorumClaim:
        """Return a new claim, of a kind of which a majority admits the right number of holders."""
        if request.kind.counted:
            raise self._no_semaphore()
        return QuorumClaim(self.members, request)

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Renew at all members at once, in their batches; return when for each claim a majority has answered, or none is possible."""
        mine = [claim for claim in claims if isinstance(claim, QuorumClaim)]
        sent = self.settings.clock()
        rounds = []
        for member in self.members.all:
            votes = [vote for claim in mine for vote in claim.votes if vote.member is member and vote.granted]
            for vote in votes:
                vote.claim.fixed = vote.owner.fixed
            rounds += [
                self.members.tasks.spawn(self._renew(member, batch, sent), "aiolock-quorum-renewal")
                for batch in member.backend.batches(votes, lambda vote: vote.claim)
            ]
        await self.members.until(lambda: all(claim.renewed(sent) or claim.lost() for claim in mine), rounds)
        return [claim.renewal(sent) for claim in mine]

    async def _renew(self, member: Member, votes: Sequence[Vote], sent: float) -> None:
        try:
            answers: Sequence[Renewal] = await member.ask(
                lambda: member.backend.renew([vote.claim for vote in votes])
            )
        except Exception as error:  # noqa: BLE001 - one member's failure of any kind is outvoted by the others
            answers = [error] * len(votes)
        for vote, answer in zip(votes, answers, strict=True):
            if isinstance(answer, Exception):
                vote.error = answer
            elif not vote.granted:
                # It was lost, or given back, while the request was under way.
                pass
            elif isinstance(answer, Grant):
                vote.take(answer, sent)
            else:
                vote.lose(answer)
                self._weakened(vote.owner)

    def _weakened(self, claim: QuorumClaim) -> None:
        """Report the loss in time if the remaining votes are certain for less time than the grant promised the holder."""
        if not claim.given_back and claim.lost() is None and claim.until < claim.promised:
            left = claim.until - claim.request.grace - self.settings.clock()
            if left <= 0:
                self.events.put(Event(EventKind.LOST, claim, "expired"))
            else:
                asyncio.get_running_loop().call_later(left, self._weakened, claim)

    # --- events

    async def _listen(self, member: Member) -> None:
        while True:
            self._receive(await member.backend.events.get())

    def _receive(self, event: Event) -> None:
        if event.claim is None:
            self.events.put(event)
            return
        vote = event.claim.validity
        if not isinstance(vote, Vote):
            return
        owner = vote.owner
        if event.kind is EventKind.LOST:
            vote.lose(event.reason)
            if (reason := owner.lost()) is not None:
                self.events.put(Event(EventKind.LOST, owner, reason))
            else:
                self.events.put(Event(EventKind.DOUBT, owner))
                self._weakened(owner)
        elif event.kind is EventKind.REQUESTED:
            if owner.requested != event.text:
                owner.requested = event.text
                self.events.put(Event(EventKind.REQUESTED, owner, text=event.text))
        else:
            self.events.put(Event(event.kind, owner))

    # --- administration

    def _ask_all(self, ask: Callable[[Administration], Awaitable[T]], what: str) -> Awaitable[list[T]]:
        """Return the answers of the members that gave one.

        Raises :class:`UnsupportedKind` if a member cannot be asked for ``what``, and :class:`BackendError` if no majority
        answers. Cancelling it cancels the requests.
        """
        return self.members.ask_all(lambda backend: ask(Administration.of(backend, what)))

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Return the holders that a majority reports, and the queue of the deciding member."""
        infos = await self._ask_all(lambda member: member.inspect(name, family), "inspection")
        if len(infos) == len(self.members.all):
            first = rotation(name, len(infos))
            infos = infos[first:] + infos[:first]
        else:
            # The deciding member may be among the silent ones: the longest queue is likely to be the one in use.
            infos.sort(key=lambda info: -len(info.waiters))
        return combined(infos, self.members.needed)

    async def force_release(self, name: str, family: Family, token: int | None = None) -> bool:  # noqa: ARG002 - it has none
        """Release by force at every member; each gives tokens of its own, so none is asked for."""
        return any(await self._ask_all(lambda member: member.force_release(name, family), "force_release"))

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Request a release at every member."""
        return any(
            await self._ask_all(
                lambda member: member.request_release(name, family, reason), "request_release"
            )
        )

    async def set_limit(self, name: str, limit: int) -> None:  # noqa: ARG002 - refused whatever it is
        """Raise :class:`UnsupportedKind`."""
        raise self._no_semaphore()

    def _no_semaphore(self) -> UnsupportedKind:
        advice = "three servers with two permits each can seat three holders, each of whom has a majority: use one server"
        return UnsupportedKind("semaphore", self.name, advice)

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Return the locks that any member knows."""
        found = await self._ask_all(lambda member: member.names(pattern), "list of locks")
        return sorted({name for names in found for name in names})

    async def empty(self) -> None:
        """Empty each member that can be reached."""
        await self._ask_all(lambda member: member.empty(), "deletion of a namespace")

    async def diagnose(self) -> list[Finding]:
        """Return the findings of each member, and the members that cannot be reached."""
        found = await asyncio.gather(*map(_diagnose, self.members.all))
        return [finding for findings in found for finding in findings]


async def _diagnose(member: Member) -> list[Finding]:
    try:
        found = await diagnose(member.backend)
    except BackendError as error:
        advice = "bring it back: the others can lose fewer until then"
        found = [failure("connection", str(error), advice)]
    return [replace(finding, subject=f"{member!r} {finding.subject}") for finding in found]
