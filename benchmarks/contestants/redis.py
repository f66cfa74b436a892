"""Peers on Redis: the locks of redis-py and of coredis, and one by WATCH, MULTI and EXEC; they poll."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Self

from benchmarks.contestants.base import Contestant, OneByOne, parts

__all__ = ["CoRedis", "RedisPy", "Watch"]


class RedisPy(Contestant):
    """``redis.asyncio`` and its Lock, which polls every ``sleep`` seconds."""

    def __init__(self, url: str, sleep: float = 0.1) -> None:
        super().__init__(url)
        self._sleep = sleep

    async def __aenter__(self) -> Self:
        from redis.asyncio import Redis

        # Every task that waits has a command under way, and for that a connection.
        self._client = Redis.from_url(self.url, max_connections=10_000)
        await self._client.ping()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    def lock(self, name: str) -> Any:
        # Several tasks of one thread share what is thread-local.
        return self._client.lock(f"redis-py:{name}", timeout=self.ttl, sleep=self._sleep, thread_local=False)

    def every(self, name: str) -> OneByOne:
        return OneByOne([self.lock(part) for part in parts(name)])


class Watch(RedisPy):
    """A key that is set, and deleted by its owner, in transactions: docs/how-to/redis-transactions.md."""

    def lock(self, name: str) -> Any:
        return _Watched(self._client, f"watch:{name}", int(self.ttl * 1000), self._sleep)


class _Watched:
    """For ``async with``, again and again."""

    def __init__(self, client: Any, key: str, ttl_ms: int, sleep: float) -> None:
        self._client, self._key, self._ttl_ms, self._sleep = client, key, ttl_ms, sleep
        self._owner = secrets.token_hex(16).encode()

    async def __aenter__(self) -> None:
        while not await self._swap(None, lambda pipe: pipe.set(self._key, self._owner, px=self._ttl_ms)):  # noqa: ASYNC110 - it polls
            await asyncio.sleep(self._sleep)

    async def __aexit__(self, *_: object) -> None:
        await self._swap(self._owner, lambda pipe: pipe.delete(self._key))

    async def _swap(self, holder: bytes | None, write: Callable[[Any], object]) -> bool:
        """Write if the key has this holder, and it has not been changed since it was read."""
        from redis.asyncio import WatchError

        async with self._client.pipeline() as pipe:
            try:
                await pipe.watch(self._key)
                if await pipe.get(self._key) != holder:
                    return False
                pipe.multi()
                write(pipe)
                await pipe.execute()
            except WatchError:
                return False
            return True


class CoRedis(Contestant):
    """coredis and its Lock, which polls as well."""

    def __init__(self, url: str, sleep: float = 0.1) -> None:
        super().__init__(url)
        self._sleep = sleep

    async def __aenter__(self) -> Self:
        import coredis

        self._client = coredis.Redis.from_url(self.url)
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)

    def lock(self, name: str) -> Any:
        from coredis.patterns.lock import Lock

        return Lock(self._client, f"coredis:{name}", timeout=self.ttl, sleep=self._sleep)
