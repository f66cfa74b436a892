"""Everybody who competes, behind one small interface: by name, opened with a URL, handing out locks.

A lock is an object for ``async with``, made once and used for several blocks, as the documentation of each of them
allows. Floors have no lock objects, only :meth:`turns`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

import aiolock
from benchmarks.floors import RawFloor, ScriptFloor

__all__ = ["Contestant", "contestant"]

TTL = 30.0


class Contestant:
    """What all of them can do."""

    def __init__(self, url: str) -> None:
        self.url = url

    def lock(self, name: str) -> Any:
        raise NotImplementedError

    async def turns(self, name: str, count: int) -> None:
        """Take and leave one lock so many times."""
        lock = self.lock(name)
        for _ in range(count):
            async with lock:
                pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


class Ours(Contestant):
    """aiolock; ``fair`` waits in strict order."""

    def __init__(self, url: str, *, fair: bool = False) -> None:
        super().__init__(url)
        self._fair = fair

    async def __aenter__(self) -> Self:
        self.client = await aiolock.connect(self.url, namespace="bench", ttl=TTL).open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    def lock(self, name: str) -> aiolock.Lock:
        return self.client.lock(name, fair=self._fair)


class OursAnew(Ours):
    """aiolock with a lock object made for every block."""

    async def turns(self, name: str, count: int) -> None:
        for _ in range(count):
            async with self.client.lock(name):
                pass


class InMemory(Ours):
    """aiolock over the server inside the process."""

    def __init__(self, url: str) -> None:
        del url
        super().__init__("memory://")


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
        return self._client.lock(f"redis-py:{name}", timeout=TTL, sleep=self._sleep, thread_local=False)


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

        return Lock(self._client, f"coredis:{name}", timeout=TTL, sleep=self._sleep)


class Asyncio(Contestant):
    """``asyncio.Lock``: one process, no server, no loss."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._locks: dict[str, asyncio.Lock] = {}

    def lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())


_KNOWN: dict[str, Callable[..., Any]] = {
    "aiolock": Ours,
    "aiolock, lock made anew": OursAnew,
    "aiolock fair": lambda url: Ours(url, fair=True),
    "aiolock memory://": InMemory,
    "asyncio.Lock": Asyncio,
    "coredis": CoRedis,
    "raw floor": RawFloor,
    "redis-py": RedisPy,
    "script floor": ScriptFloor,
}


def contestant(who: str, url: str) -> Any:
    """By name; one that polls may be given its interval, as in ``redis-py 0.01``."""
    name, _, interval = who.rpartition(" ")
    if name in _KNOWN and interval.replace(".", "").isdigit():
        return _KNOWN[name](url, float(interval))
    return _KNOWN[who](url)
