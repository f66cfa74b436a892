"""One bid for a read-write lock or for permits: the life of every claim, and what only these have."""

from __future__ import annotations

from dataclasses import replace

from aiolock.backends.redis.claim import RedisClaim
from aiolock.backends.redis.many import Many, OtherLimit
from aiolock.backends.redis.pushes import GONE
from aiolock.contract import READ, Bid, Grant
from aiolock.errors import ConfigError, LockLost, shorten

__all__ = ["ManyClaim"]


class ManyClaim(RedisClaim):
    """A claim of a lock with many holders."""

    __slots__ = ("_many",)

    def __init__(self, many: Many, bid: Bid, number: int) -> None:
        super().__init__(many, bid, number)
        self._many = many

    async def attempt(self, wait: bool) -> Grant | None:
        """As every claim's; another limit than the semaphore's is :class:`ConfigError`."""
        try:
            return await super().attempt(wait)
        except OtherLimit as error:
            # Of the caller's making, not of the server's.
            raise ConfigError(f"semaphore {shorten(self.bid.name)} {error}") from None

    async def downgrade(self) -> Grant:
        """One script; it stands for a full ttl from then."""
        sent = self._many.clock()
        answer = await self._many.downgrade(self)
        self._many.learn(answer[-1] if len(answer) == 2 else answer[3], sent)
        if answer[0] != 1:
            raise LockLost(self.bid.name, GONE[answer[0]])
        _, token, _, _, waiting, claim = answer
        if self.bid.kind != READ:
            self.bid = replace(self.bid, kind=READ)
        self._many.served(self.key, claim)
        return self._granted(token, 1, sent + self.bid.certain, demand=waiting != 0)
