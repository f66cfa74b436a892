"""What one server says about one claim."""

from __future__ import annotations

import asyncio
import contextlib
import math
from enum import Enum
from typing import TYPE_CHECKING

from aiolock.backends.quorum.member import Member
from aiolock.contract import Bid, Claim, Grant
from aiolock.errors import LossReason

if TYPE_CHECKING:
    from aiolock.backends.quorum.holding import Holding

__all__ = ["LOOK", "Say", "Vote"]

LOOK = 2.0
"""Seconds after which a place in line is looked at, whatever its server has told."""


class Say(Enum):
    """What a server said last."""

    NOTHING = "not asked, or it has not answered yet"
    YES = "it is ours"
    NO = "somebody else has it"
    IN_LINE = "somebody else has it, and we have a place in line"
    ERROR = "nobody knows"
    LOST = "it was ours"


class Vote:
    """A claim on one of the servers."""

    __slots__ = (
        "asked",
        "claim",
        "error",
        "grant",
        "heard",
        "member",
        "owner",
        "reason",
        "say",
        "task",
        "until",
        "waited",
    )

    def __init__(self, member: Member, owner: Holding, bid: Bid) -> None:
        self.member = member
        self.owner = owner
        self.claim: Claim = member.backend.claim(bid)
        # What its backend says unasked is found by this.
        self.claim.term = self
        self.say = Say.NOTHING
        self.asked = False
        """Whether the server was."""
        self.waited = False
        """Whether it was asked for a place in line."""
        self.task: asyncio.Task[None] | None = None
        """The question that is under way."""
        self.grant: Grant | None = None
        self.until = -math.inf
        """Until when it is certain, if it is ours."""
        self.heard = -math.inf
        """When the question was sent whose answer says so."""
        self.error: Exception | None = None
        self.reason: LossReason = "revoked"

    @property
    def open(self) -> bool:
        """Whether an answer may still come."""
        return self.task is not None and not self.task.done()

    @property
    def known(self) -> bool:
        """Whether the server may know of it; one that said no to a question without waiting keeps nothing."""
        return self.asked and (self.open or self.waited or self.say is not Say.NO)

    def ours(self, now: float) -> bool:
        """Whether it is certainly ours."""
        return self.say is Say.YES and self.until > now

    def ask(self, *, wait: bool, stay: bool = False) -> None:
        """Ask the server, in a task of the client, which with ``stay`` goes on until the vote is ours."""
        self.asked, self.waited = True, self.waited or wait
        self.say = Say.NOTHING
        self.task = self.owner.backend.spawn(self._ask(wait=wait, stay=stay), "aiolock-quorum-ask")

    async def _ask(self, *, wait: bool, stay: bool) -> None:
        clock = self.owner.backend.settings.clock
        while True:
            sent = clock()
            try:
                grant = await self.member.attempt(self.claim, wait=wait)
            except Exception as error:  # noqa: BLE001 - whatever a server does to us, it is only one of several
                self.say, self.error = Say.ERROR, error
                return
            if grant is not None or not stay:
                break
            self.say = Say.IN_LINE if self.say is Say.NOTHING else self.say
            await self.changed()
        if grant is None:
            self.say = Say.IN_LINE if wait else Say.NO
        elif self.say in (Say.NOTHING, Say.IN_LINE):
            # Else the loss was told before the grant was.
            self.take(grant, sent)
        self.owner.voted(self)

    async def changed(self) -> None:
        """Wait in line until it may be ours; not for ever, because the server may be silent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK):
                await self.claim.changed()

    def take(self, grant: Grant, sent: float) -> None:
        """It is ours, by the answer to a question that was sent then."""
        self.say, self.grant, self.error = Say.YES, grant, None
        self.until, self.heard = max(self.until, grant.until), max(self.heard, sent)

    async def answered(self) -> Say:
        """Wait for the question under way, and return what the server says. Cancelling it leaves the question alone."""
        if self.open and self.task is not None:
            await asyncio.wait([self.task])
        return self.say

    def lose(self, reason: LossReason) -> None:
        """It is not ours any more."""
        self.say, self.reason = Say.LOST, reason
