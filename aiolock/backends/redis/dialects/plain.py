"""The plain format: ``SET key owner NX PX ttl``, and a release that compares the owner.

Spoken by redis-py's ``Lock``, redsync, node-redlock, RedLock.net (each on one server), bsm/redislock, Laravel, Spring Integration.
Foreign releases say nothing, so waiters poll; who polls cannot be seen, so this library's clients share turns, after each of
which they leave a free lock alone for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiolock.backends.redis.commands import Arg, Reply
from aiolock.backends.redis.dialects.backend import SHOWN, DialectBackend, DialectClaim, EnterAnswer, scripts
from aiolock.backends.redis.server import RedisServer
from aiolock.core.backend import Request
from aiolock.types import Holder

__all__ = ["PlainBackend"]

OWN_PREFIX = "aiolock:"
"""Begin of the values of this library."""
KEPT = f"{OWN_PREFIX}kept"
POLL = 0.1
"""Most seconds between two requests of a waiter: redis-py and Spring ask as often."""
YIELD = 0.1
"""Seconds for which all clients of this library leave a free lock alone after their turn, by default."""
TURN = 1.0
"""Seconds that clients of this library may have a lock in a row, while no foreign holder was seen lately."""
SHORT_TURN = 0.005
"""The same if one was."""
SEEN = 10.0
"""Seconds for which a foreign holder counts as seen lately."""


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


class PlainBackend(DialectBackend):
    """A server of any sort with locks in the plain format."""

    name = "Redis with dialect=plain"
    dialect = "plain"
    removed = frozenset({"fencing", "fifo", "push"})
    shares = "redis-py's Lock, redsync, node-redlock and RedLock.net on one server, bsm/redislock, Laravel and Spring Integration"
    type = "string"
    scripts = scripts("plain", "enter", "renew", "leave", "inspect", "force", "probe")

    def __init__(self, make: Callable[[], RedisServer]) -> None:
        super().__init__(make)
        pause: float = self._server.endpoint.spoken.get("yield_to_foreign", YIELD)
        self._terms = _ms(TURN), _ms(SHORT_TURN), _ms(pause), _ms(SEEN)

    def _owner(self, request: Request, number: int) -> str:
        return f"{OWN_PREFIX}{self.process}:{number:x} {request.label}"

    async def enter(self, claim: DialectClaim, *, wait: bool) -> EnterAnswer:
        """Send one script; a lock that is taken is asked for again within 100 ms."""
        answer = await self.call(
            "enter", claim.key, claim.owner, _ms(claim.request.ttl), int(wait), self.process, *self._terms
        )
        if answer[0] == 1:
            self.note_foreign(claim.key, "", expires=True)
            return EnterAnswer(granted=True, demand=bool(answer[1]), quiet=answer[2] / 1000)
        _, left, value = answer
        text = value.decode("utf-8", "replace")
        self.note_foreign(claim.key, "" if text.startswith(OWN_PREFIX) else text, expires=left >= 0)
        poll = self.settings.random.uniform(0.5, 1) * POLL
        return EnterAnswer(granted=False, again=min(left / 1000 + 0.002, poll) if left >= 0 else poll)

    def leave(self, claim: DialectClaim, *, tombstone: bool, keep: float) -> Reply:
        """Send one script."""
        kept = f"{KEPT} {claim.request.label}"
        return self.call(
            "leave", claim.key, claim.owner, int(tombstone), _ms(keep), self.channel, self.process, kept
        )

    def shown(self, value: str) -> str:
        """Return the label in a value of this library, or the begin of a foreign value."""
        if value.startswith(OWN_PREFIX):
            return value.partition(" ")[2]
        return f"foreign: {value[:SHOWN]}{'…' if len(value) > SHOWN else ''}"

    def _read(self, answer: Sequence[Any]) -> tuple[list[Holder], list[str]]:
        value, left, age, *waiting = answer
        text = value.decode("utf-8", "replace")
        waiters = [self.shown(owner.decode("utf-8", "replace")) for owner in waiting]
        # A foreign value may be empty.
        if left == -2:
            return [], waiters
        kept = text.startswith(KEPT)
        known = age if text.startswith(OWN_PREFIX) else -1
        return [self._holder(self.shown(text), left, known, kept=kept)], waiters

    def _force_arguments(self, key: str) -> tuple[Arg, ...]:
        del key
        return (self.channel,)
