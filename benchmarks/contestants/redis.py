"""Peers on Redis: the locks of redis-py and of coredis, which poll."""

from __future__ import annotations

from typing import Any, Self

from benchmarks.contestants.base import Contestant, OneByOne, parts

__all__ = ["CoRedis", "RedisPy"]


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
