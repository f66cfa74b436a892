"""The claim of a read-write lock or semaphore: a row in the table of requests, its position in the queue or its hold."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from typing import Any

from aiolock.backends.mysql.context import BLOCK, hexed, quote
from aiolock.backends.mysql.decisions import Action, Outcome, PendingDecision, Transaction
from aiolock.backends.mysql.listener import ListeningClaim
from aiolock.backends.mysql.shared import FORCED, HELD, Sharing
from aiolock.core.backend import NEVER, Grant, Release, Request, certain_until, claim_time
from aiolock.core.capabilities import Downgrade, Extension
from aiolock.errors import ConfigError, LockLost, shorten
from aiolock.types import READ

__all__ = ["ALL", "SharedClaim"]

ALL = 1 << 31
"""The capacity of a read-write lock, and the weight of a write: more readers than there can be."""

ABSENT = (None, 0)
"""The state and the token of a request that is not there."""


class SharedClaim(ListeningClaim, Downgrade, Extension):
    """A claim on a lock of readers and a writer, or of permits.

    Its row in the table of requests is its position in the queue, or its hold. Each request is one transaction, and asking
    again finds the row. While it waits, the client's listener wakes it with the grant.
    """

    __slots__ = ("_asked", "_begun", "_left", "_over", "_queued", "_sharing")

    def __init__(self, sharing: Sharing, request: Request) -> None:
        super().__init__(request)
        self._sharing = sharing
        self.context = sharing.context
        self.key = self.context.key(request.name, request.kind.family)
        self.owner = secrets.token_hex(16)
        self.block = 1 if request.fair or not request.kind.exclusive else BLOCK
        self.requested = None
        self._asked = False
        """The server may know of this owner."""
        self._queued = False
        """It has a position in the queue, as far as is known."""
        self._over = False
        self._left = False
        """A copy of the release may have been sent."""
        self._begun: asyncio.Future[Outcome] | None = None
        """The outcome of a request to leave that was added before :meth:`release` was called."""

    def _words(self) -> dict[str, Any]:
        """Return the words of the statements about its lock."""
        request = self.request
        _, limit = request.kind.weigh(ALL)
        return self._sharing.words(self.key, request.kind.family.value, request.name) | {"limit": limit}

    def _begin(self, action: Action) -> asyncio.Future[Outcome]:
        """Add a request to the next decision about the lock, without waiting: the future of its outcome."""
        request = self.request
        weight, limit = request.kind.weigh(ALL)
        row = {
            "owner": quote(self.owner),
            "mode": quote(request.kind.mode.value),
            "weight": weight,
            "block": self.block,
            "label": hexed(request.label),
            "ttl": round(request.ttl * 1_000_000),
            "confirmation_window": round(claim_time(request.ttl) * 1_000_000),
            "limit": limit,
        }
        return self._sharing.begin(self.key, PendingDecision(action, self.owner, weight, self._words(), row))

    # --- asking

    async def acquire(self, wait: bool) -> Grant | None:
        """Take the pushed grant; else request, or check that the position is there."""
        return await self.context.within(self._attempt(wait=wait))

    async def _attempt(self, *, wait: bool) -> Grant | None:
        if (grant := self.inbox.take()) is not None:
            return grant
        if self._queued:
            grant = await self._confirm()
            if grant is not None or self._queued:
                return grant
        self._asked = True
        if wait:
            self._sharing.listener.add(self)
        try:
            grant = await self._enter(wait=wait)
        except ConfigError:
            self._sharing.listener.discard(self)
            raise
        if grant is None and wait:
            self._queued = True
        else:
            self._sharing.listener.discard(self)
        return grant

    async def _enter(self, *, wait: bool) -> Grant | None:
        action = Action.WAIT if wait else Action.TRY
        outcome = await self._begin(action)
        state, token = outcome.stand.get(self.owner, ABSENT)
        if state == FORCED:
            self._begin_anew()
            if wait:
                self._sharing.listener.add(self)
            outcome = await self._begin(action)
            state, token = outcome.stand.get(self.owner, ABSENT)
        if state == HELD:
            return self.granted(token, outcome.sent)
        _, limit = self.request.kind.weigh(ALL)
        if state is None and limit not in outcome.limits:
            raise ConfigError(
                f"semaphore {shorten(self.request.name)} has {outcome.limits[1]} permits, not {limit}: "
                "all clients have to name the same limit; set_limit() changes it"
            )
        return None

    async def _confirm(self) -> Grant | None:
        context, owner = self.context, quote(self.owner)
        await context.execute(context.statements("confirm_grants", owners=owner, count=1))
        asked = context.clock()
        [answer] = await context.execute(context.statements("requests", owners=owner))
        if not answer.rows:
            self._queued = False
            return None
        state, token, left = map(int, answer.rows[0][1:])
        if state == FORCED:
            self._begin_anew()
        if state != HELD:
            return None
        self._sharing.listener.discard(self)
        return self.granted(token, asked - (self.request.ttl - left / 1_000_000))

    def _begin_anew(self) -> None:
        """Take a new owner id: the hold was taken away before the claim knew of it, and its row keeps the owner id until it is over."""
        self._sharing.listener.discard(self)
        self._queued = False
        self.owner = secrets.token_hex(16)

    async def downgrade(self) -> Grant:
        """Become a reader; readers that are next in the queue enter."""
        return await self.context.within(self._downgrade())

    async def _downgrade(self) -> Grant:
        fixed = self.fixed
        words = self._words() | {"owner": quote(self.owner), "prolong": int(not fixed)}
        outcome = await self._sharing.decide(self.key, Transaction(["downgrade"], [], words, [self.owner]))
        state, token = outcome.stand.get(self.owner, ABSENT)
        if state != HELD:
            raise LockLost(self.request.name, "revoked")
        self.request = replace(self.request, kind=READ)
        self.block = 1
        grant = self.granted(token, outcome.sent)
        return replace(grant, until=NEVER) if fixed else grant

    async def extend(self, seconds: float, number: int) -> Grant:
        """Give the row another life."""
        context = self.context
        packet = context.statements(
            "extend_hold", owner=quote(self.owner), number=number, life=round(seconds * 1_000_000)
        )
        [*_, rows], sent = await context.within(context.change(packet, key=self.key))
        state = int(rows.rows[0][0]) if rows.rows else None
        if state != HELD:
            raise LockLost(self.request.name, "force-released" if state == FORCED else "revoked")
        return Grant(0, 0, certain_until(sent, seconds), demand=True)

    # --- leaving

    async def release(self, keep: float = 0) -> Release:
        """Give up the hold or the position, whichever there is or may be, and serve the next waiters."""
        if self._over:
            return Release.RELEASED
        first, self._left = not self._left, True
        held: bool | None = True
        self._sharing.listener.discard(self)
        self.inbox.close()
        if self._asked:
            held = await self.context.within(self._release(keep))
        self._over = True
        if held:
            return Release.RELEASED
        return Release.NOT_OURS if first and held is False else Release.UNKNOWN

    def begin_release(self, keep: float = 0) -> Release | None:
        """Add the request to leave to the next decision; later requests of this client about the lock wait for it."""
        if self._over or self._left or not self._asked or keep:
            return None
        if self._begun is None:
            self._sharing.listener.discard(self)
            self.inbox.close()
            self._begun = self._begin(Action.LEAVE)
            # The client may be closed before `release` looks at it.
            self._begun.add_done_callback(lambda done: done.cancelled() or done.exception())
        return Release.UNKNOWN

    async def _release(self, keep: float) -> bool | None:
        begun, self._begun = self._begun, None
        if not keep:
            outcome = await self._outcome_of(begun)
            return None if outcome.inside is None else self.owner in outcome.inside
        words = self._words() | {"owner": quote(self.owner), "keep": round(keep * 1_000_000)}
        outcome = await self._sharing.decide(self.key, Transaction(["keep"], [], words, []))
        # After the three statements of `step`.
        return None if outcome.inside is None else outcome.changed[3] > 0

    async def _outcome_of(self, begun: asyncio.Future[Outcome] | None) -> Outcome:
        if begun is not None:
            # Not cancelled with its caller: the request stays in the decision.
            await asyncio.wait([begun])
            if not begun.cancelled() and begun.exception() is None:
                return begun.result()
        outcome = await self._begin(Action.LEAVE)
        # A copy that failed may have been carried out.
        return outcome if begun is None else outcome._replace(inside=None)
