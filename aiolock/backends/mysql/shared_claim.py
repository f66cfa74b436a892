"""A claim on a lock that several may be in: readers and a writer, or permits.

Its row in the table of bids is its place in line, or its hold. Each question is one transaction, and asking again
finds the row. Whoever has a place sleeps; the client's listener wakes it with the grant.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiolock.backends.mysql.decision import Transaction
from aiolock.backends.mysql.desk import Wish
from aiolock.backends.mysql.statements import hexed, quote
from aiolock.contract import READ, Bid, Claim, Grant, Mode, Release, claim_time
from aiolock.errors import ConfigError, LockLost, shorten

if TYPE_CHECKING:
    from aiolock.backends.mysql.sharing import Sharing

__all__ = ["ALL", "BLOCK", "SharedClaim", "weight"]

BLOCK = 64
"""How many tokens the grant of a write carries that may be passed on inside this process."""
ALL = 1 << 31
"""The capacity of a read-write lock, and the weight of a write: more readers than there can be."""

HELD, FORCED_OUT = 2, 3
"""The states of a confirmed hold, and of one that was taken away; `sharing.sql` has the list."""
ABSENT = (None, 0)
"""The state and the token of a bid that is not there."""


def weight(bid: Bid) -> tuple[int, int]:
    """What a bid weighs, and what the capacity of its lock is if nobody has set another."""
    kind = bid.kind
    if kind.mode is Mode.PERMITS:
        return kind.permits, kind.limit
    return (ALL if kind.mode is Mode.WRITE else 1), ALL


class SharedClaim(Claim):
    """One row in the table of bids, or the wish for one."""

    __slots__ = (
        "_asked",
        "_left",
        "_over",
        "_placed",
        "_sharing",
        "block",
        "event",
        "key",
        "owner",
        "pushed",
        "requested",
    )

    def __init__(self, sharing: Sharing, bid: Bid) -> None:
        super().__init__(bid)
        self._sharing = sharing
        self.key = sharing.backend.key(bid.name, bid.kind.family)
        self.owner = secrets.token_hex(16)
        self.block = 1 if bid.fair or not bid.kind.exclusive else BLOCK
        self.event = asyncio.Event()
        """Set when asking again may have another answer."""
        self.pushed: Grant | None = None
        """A grant that the listener confirmed for us."""
        self.requested: str | None = None
        """Why the holder was asked to let go, if it was."""
        self._asked = False
        """Whether the server may know of this owner."""
        self._placed = False
        """Whether it has a place in line, as far as we know."""
        self._over = False
        self._left = False
        """Whether a copy of the release may have been sent."""

    @property
    def weight(self) -> int:
        """What it weighs."""
        return weight(self.bid)[0]

    def words(self) -> dict[str, Any]:
        """What the statements about its lock are filled in with."""
        _, limit = weight(self.bid)
        settings = self._sharing.backend.settings
        return {
            "id": quote(self.key),
            "namespace": quote(settings.namespace),
            "family": quote(self.bid.kind.family.value),
            "name": hexed(self.bid.name),
            "limit": limit,
        }

    # --- asking

    async def attempt(self, wait: bool) -> Grant | None:
        """Take the grant that came; else bid, or look whether the place is there."""
        return await self._sharing.backend.within(self._attempt(wait=wait))

    async def _attempt(self, *, wait: bool) -> Grant | None:
        grant, self.pushed = self.pushed, None
        if grant is not None:
            return grant
        # Before asking: what comes meanwhile must not be forgotten.
        self.event.clear()
        if self._placed:
            grant = await self._confirm()
            if grant is not None or self._placed:
                return grant
        self._asked = True
        if wait:
            self._sharing.listener.add(self)
        try:
            grant = await self._bid(wait=wait)
        except ConfigError:
            self._sharing.listener.discard(self)
            raise
        if grant is None and wait:
            self._placed = True
        else:
            self._sharing.listener.discard(self)
        return grant

    def wanted(self, place: int) -> str:
        """What it bids for; ``place`` orders those that arrive together."""
        own, limit = weight(self.bid)
        return self._sharing.backend.statements(
            "wanted",
            place=place,
            owner=quote(self.owner),
            mode=quote(self.bid.kind.mode.value),
            weight=own,
            block=self.block,
            label=hexed(self.bid.label),
            ttl=round(self.bid.ttl * 1_000_000),
            claim=round(claim_time(self.bid.ttl) * 1_000_000),
            limit=limit,
        )

    async def _bid(self, *, wait: bool) -> Grant | None:
        wish = Wish.WAIT if wait else Wish.TRY
        outcome = await self._sharing.ask(self, wish)
        state, token = outcome.stand.get(self.owner, ABSENT)
        if state == FORCED_OUT:
            self._begin_anew()
            if wait:
                self._sharing.listener.add(self)
            outcome = await self._sharing.ask(self, wish)
            state, token = outcome.stand.get(self.owner, ABSENT)
        if state == HELD:
            return self.granted(token, outcome.sent)
        _, limit = weight(self.bid)
        if state is None and limit not in outcome.limits:
            raise ConfigError(
                f"semaphore {shorten(self.bid.name)} has {outcome.limits[1]} permits, not {limit}: "
                "everybody has to name the same limit; set_limit() changes it"
            )
        return None

    async def _confirm(self) -> Grant | None:
        backend = self._sharing.backend
        statements, owner = backend.statements, quote(self.owner)
        await backend.ask(statements("confirm_bids", owners=owner, count=1))
        asked = backend.settings.clock()
        [bids] = await backend.ask(statements("bids", owners=owner))
        if not bids.rows:
            self._placed = False
            return None
        state, token, left = map(int, bids.rows[0][1:])
        if state == FORCED_OUT:
            self._begin_anew()
        if state != HELD:
            return None
        self._sharing.listener.discard(self)
        return self.granted(token, asked - (self.bid.ttl - left / 1_000_000))

    def _begin_anew(self) -> None:
        """The hold was taken away before we knew of it. Its row says so until it is over; we are somebody else from now on."""
        self._sharing.listener.discard(self)
        self._placed = False
        self.owner = secrets.token_hex(16)

    def granted(self, token: int, sent: float) -> Grant:
        """The grant of a hold that the server has had for a full ttl since ``sent`` or later."""
        return self._sharing.backend.granted(self, token, self.block, sent)

    async def changed(self) -> None:
        """Wait for the listener."""
        await self.event.wait()

    async def downgrade(self) -> Grant:
        """Become a reader; readers who are next in line come in."""
        return await self._sharing.backend.within(self._downgrade())

    async def _downgrade(self) -> Grant:
        words = self.words() | {"owner": quote(self.owner)}
        outcome = await self._sharing.decide(self.key, Transaction(["weaken"], [], words, [self.owner]))
        state, token = outcome.stand.get(self.owner, ABSENT)
        if state != HELD:
            raise LockLost(self.bid.name, "revoked")
        self.bid = replace(self.bid, kind=READ)
        self.block = 1
        return self.granted(token, outcome.sent)

    # --- leaving

    async def release(self, keep: float = 0) -> Release:
        """Give up the hold or the place, whichever there is or may be, and serve who is next."""
        if self._over:
            return Release.RELEASED
        first, self._left = not self._left, True
        held: bool | None = True
        self._sharing.listener.discard(self)
        if self._asked:
            held = await self._sharing.backend.within(self._release(keep))
        self._over = True
        if held:
            return Release.RELEASED
        return Release.NOT_OURS if first and held is False else Release.UNKNOWN

    async def _release(self, keep: float) -> bool | None:
        if not keep:
            outcome = await self._sharing.ask(self, Wish.LEAVE)
            return None if outcome.inside is None else self.owner in outcome.inside
        words = self.words() | {"owner": quote(self.owner), "keep": round(keep * 1_000_000)}
        outcome = await self._sharing.decide(self.key, Transaction(["keep"], [], words, []))
        # After the three statements of `step`.
        return None if outcome.inside is None else outcome.changed[3] > 0
