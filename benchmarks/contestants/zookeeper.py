"""Peers on ZooKeeper that are written in Python: kazoo's lock, in threads, aiozk's recipe, and the plain node of articles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Self

from benchmarks.contestants.base import SEATS, TTL, Contestant, InBlocks, Span, parts

__all__ = ["AioZK", "Kazoo", "PlainNode"]


def hosts(url: str) -> str:
    """What other clients call the address."""
    return url.removeprefix("zookeeper://")


class Kazoo(Contestant):
    """kazoo knows no coroutines: each contender is a thread that stays in kazoo for all of its turns."""

    async def __aenter__(self) -> Self:
        from kazoo.client import KazooClient

        self._threads = ThreadPoolExecutor(max_workers=2000)
        self._client = KazooClient(hosts(self.url), timeout=TTL)
        await self._run(self._client.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._run(self._client.stop)
        await self._run(self._client.close)
        self._threads.shutdown()

    def _run(self, what: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._threads, what, *args)

    def lock(self, name: str) -> Any:
        return self._client.Lock(f"/kazoo/{name}")

    def read(self, name: str) -> Any:
        return self._client.ReadLock(f"/kazoo/rw/{name}")

    def write(self, name: str) -> Any:
        return self._client.WriteLock(f"/kazoo/rw/{name}")

    def seat(self, name: str) -> Any:
        return self._client.Semaphore(f"/kazoo/seats/{name}", max_leases=SEATS)

    def every(self, name: str) -> Any:
        return _OneByOne([self.lock(part) for part in parts(name)])

    async def turns(self, name: str, count: int) -> None:
        await self._run(self._turns, name, count)

    def _turns(self, name: str, count: int) -> None:
        lock = self.asked(name)
        for _ in range(count):
            with lock:
                pass

    async def drain(self, names: Sequence[str], turns: int, hold: float, spans: list[Span]) -> None:
        await asyncio.gather(
            *(
                self._run(self._contend_, name, turns, hold, spans, number)
                for number, name in enumerate(names)
            )
        )

    def _contend_(self, name: str, turns: int, hold: float, spans: list[Span], number: int) -> None:
        clock, lock = time.monotonic, self.asked(name)
        for _ in range(turns):
            asked = clock()
            with lock:
                entered = clock()
                time.sleep(hold)
                left = clock()
            spans.append((asked, entered, left, number))

    async def line(self, name: str, count: int, ready: Callable[[], Awaitable[None]]) -> list[float]:
        entered: list[float] = []

        def waiter() -> None:
            with self.lock(name):
                entered.append(time.monotonic())

        first = self.lock(name)
        await self._run(first.acquire)
        waiters = [self._run(waiter) for _ in range(count)]
        await ready()
        entered.append(time.monotonic())
        await self._run(first.release)
        await asyncio.gather(*waiters)
        return entered


class _OneByOne:
    """Several context managers, entered one after the other."""

    def __init__(self, locks: Sequence[Any]) -> None:
        self._locks = locks

    def __enter__(self) -> None:
        self._stack = ExitStack()
        for lock in self._locks:
            self._stack.enter_context(lock)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class AioZK(Contestant):
    """aiozk's own recipe, one object for each contender, as it wants it."""

    async def __aenter__(self) -> Self:
        from aiozk import ZKClient

        self._client = ZKClient(hosts(self.url), session_timeout=TTL)
        await self._client.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    def lock(self, name: str) -> Any:
        return self._client.recipes.Lock(f"/aiozk/{name}")


class PlainNode(InBlocks):
    """One ephemeral node by aiozk, which all others watch: there is no order, and each release wakes all of them."""

    async def __aenter__(self) -> Self:
        from aiozk import ZKClient

        self._client = ZKClient(hosts(self.url), session_timeout=TTL)
        await self._client.start()
        await self._client.ensure_path("/plain")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        from aiozk import WatchEvent, exc

        node = f"/plain/{name}"
        while True:
            try:
                await self._client.create(node, ephemeral=True)
                break
            except exc.NodeExists:
                deleted = self._client.wait_for_events([WatchEvent.DELETED], node)
                if await self._client.exists(node, watch=True):
                    await deleted
        yield
        await self._client.delete(node)
