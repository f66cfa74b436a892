"""Locks that many may be inside: read-write locks and semaphores, by scripts of their own and the same protocol.

A hold weighs its permits, a reader 1 and a writer everything, so one rule, *used + weight <= limit*, is right for all of
them (``scripts/many_hold.lua``). To a claim this is the backend: what differs is which scripts are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING, Any

from aiolock.backends.redis.claim import RedisClaim
from aiolock.backends.redis.commands import Arg, Script
from aiolock.backends.redis.scripts import source
from aiolock.backends.redis.wakeups import Wakeups
from aiolock.contract import Family, Holder, Kind, LockInfo, Mode, Waiting
from aiolock.errors import BackendError, BackendRefused

if TYPE_CHECKING:
    from aiolock.backends.redis.backend import RedisBackend

__all__ = ["FAMILIES", "MANY_SCRIPTS", "WHOLE", "Many", "OtherLimit", "weigh"]

FAMILIES = frozenset({Family.RW, Family.SEMAPHORE})
"""Whose locks are of this kind."""

WHOLE = 2**30
"""What a write hold weighs, and the limit of a read-write lock; the scripts know it as well."""

ENTER, RELEASE, LEAVE, RENEW, BEAT, FORCE, LOOK, DOWNGRADE, LIMIT, ASK = MANY_SCRIPTS = tuple(
    Script(source(f"many_{name}"))
    for name in (
        "enter",
        "release",
        "leave",
        "renew",
        "beat",
        "force",
        "look",
        "downgrade",
        "limit",
        "ask",
    )
)

MOST_TOKENS = "1024"
"""Most tokens of a write hold that may be passed on inside this process."""


class OtherLimit(BackendRefused):
    """The semaphore is known with another number of permits."""


def weigh(kind: Kind) -> tuple[int, int]:
    """What a hold of that kind weighs, and the limit for all holds together."""
    if kind.mode is Mode.PERMITS:
        return kind.permits, kind.limit
    return (WHOLE if kind.mode is Mode.WRITE else 1), WHOLE


class Many:
    """What :class:`RedisBackend` is for claims of the mutex, for claims of locks with many holders."""

    def __init__(self, backend: RedisBackend) -> None:
        self._backend = backend
        self.settings = backend.settings
        self.clock = backend.settings.clock
        self.claims = backend.claims
        self.wakeups = Wakeups(self._beat, backend.tickets, clock=self.clock, random=Random())
        """Heartbeats of their own: their script is another one."""

    # --- what a claim sends

    async def enter(self, claim: RedisClaim, wait: bool, ticket: int) -> Any:
        """Ask for the lock; raises :class:`OtherLimit`."""
        bid = claim.bid
        weight, limit = weigh(bid.kind)
        most = "1" if bid.fair or not bid.kind.exclusive else MOST_TOKENS
        place = f"{self.wakeups.terms} {ticket}" if wait else ""
        words = claim.request, claim.ttl_ms, most, self._backend.floor, bid.label, place, weight, limit
        answer = await self._backend.send(ENTER, (claim.key,), words)
        if answer[0] == 2:
            raise OtherLimit(
                f"has {answer[1]} permits, not {limit}: everybody has to name the same limit; "
                "set_limit() changes it"
            )
        return answer

    def release(self, claim: RedisClaim) -> asyncio.Future[Any]:
        """Give up a hold that is certainly ours, or certainly gone."""
        if self._backend.recent is not None:
            self._backend.recent.add(claim)
        return self._backend.send(RELEASE, (claim.key,), (claim.request, self._backend.floor))

    def leave(self, claim: RedisClaim, *, bury: bool, keep: float) -> asyncio.Future[Any]:
        """Give up whatever there is."""
        if self._backend.recent is not None:
            self._backend.recent.add(claim, keep)
        words = claim.request, self._backend.floor, int(bury), round(keep * 1000)
        return self._backend.send(LEAVE, (claim.key,), words)

    def downgrade(self, claim: RedisClaim) -> asyncio.Future[Any]:
        """Make a write hold a read hold."""
        words = claim.request, claim.ttl_ms, self._backend.floor
        return self._backend.send(DOWNGRADE, (claim.key,), words)

    def key(self, claim: RedisClaim) -> str:
        """Where the lock is on the server."""
        return self._backend.key(claim)

    def request(self, claim: RedisClaim) -> str:
        """How the server calls a claim."""
        return self._backend.request(claim)

    def served(self, key: str, claim: int) -> None:
        """Somebody was let in, with a claim of so many ms; or (-1) there is more to look through."""
        if claim > 0 or claim == -1:
            self.wakeups.claimed(key, claim / 1000)

    def _beat(self, keys: Sequence[str], counts: Sequence[int], life: int) -> asyncio.Future[Any]:
        backend = self._backend
        words: list[Arg] = [backend.process, life, self._hears, backend.floor, *counts]
        return backend.send(BEAT, keys, words)

    @property
    def _hears(self) -> str:
        return "s" if self.wakeups.pushed else "n"

    # --- what a claim needs to know

    def saw(self, token: int) -> None:
        """Remember the highest token."""
        self._backend.saw(token)

    def learn(self, server: int, sent: float) -> None:
        """Pair the server's time in µs with ours."""
        self._backend.learn(server, sent)

    def never_sent(self, error: BackendError) -> bool:
        """Whether a request certainly did not reach the server."""
        return self._backend.never_sent(error)

    # --- what people ask

    async def inspect(self, key: str, name: str, family: Family) -> LockInfo:
        """One script, which writes nothing."""
        now, limit, holds, places = await self._backend.send(LOOK, (key,), ())
        return LockInfo(
            name,
            tuple(_holder(hold.decode("utf-8", "replace"), now, family) for hold in holds),
            tuple(_waiting(place.decode("utf-8", "replace"), family) for place in places),
            family,
            limit if limit and family is Family.SEMAPHORE else None,
        )

    async def force_release(self, key: str) -> bool:
        """One script, which tells all holders."""
        taken, claim = await self._backend.send(FORCE, (key,), (self._backend.floor,))
        self.served(key, claim)
        return bool(taken)

    async def set_limit(self, key: str, limit: int) -> None:
        """One script, which lets in whoever fits then."""
        self.served(key, await self._backend.send(LIMIT, (key,), (limit, self._backend.floor)))


def _mode(weight: int, family: Family) -> tuple[str, int]:
    """The mode and the permits of a hold of that weight."""
    if family is Family.SEMAPHORE:
        return Mode.PERMITS.value, weight
    return (Mode.WRITE if weight == WHOLE else Mode.READ).value, 1


def _holder(text: str, now: int, family: Family) -> Holder:
    until, weight, token, since, label = text.split(" ", 4)
    mode, permits = _mode(int(weight), family)
    return Holder(
        label=label,
        token=int(token),
        since=datetime.fromtimestamp(int(since) / 1_000_000, UTC),
        remaining=(int(until) - now) / 1_000_000,
        permits=permits,
        mode=mode,
    )


def _waiting(text: str, family: Family) -> Waiting:
    weight, _, label = text.partition(" ")
    mode, permits = _mode(int(weight), family)
    return Waiting(label, mode, permits)
