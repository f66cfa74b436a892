"""aiolock, in the ways in which it is measured."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import aiolock
from aiolock.core import local_queue
from benchmarks.contestants.base import BATCH, RENEWALS, SEATS, Contestant, OneByOne, parts

__all__ = ["InMemory", "Ours", "OursAnew", "OursPlain", "OursWithoutPassing", "connect"]


def connect(url: str, **options: Any) -> aiolock.Client:
    """A client of a server, or of several that are one, with spaces between their addresses."""
    first, *others = url.split()
    return aiolock.connect([first, *others] if others else first, namespace="bench", **options)


class Ours(Contestant):
    """aiolock; ``fair`` waits in strict order, ``query`` is added to the address."""

    def __init__(self, url: str, *, fair: bool = False, query: str = "") -> None:
        super().__init__(url + query)
        self._fair = fair

    async def __aenter__(self) -> Self:
        self.client = await connect(self.url, ttl=self.ttl).open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    def lock(self, name: str) -> aiolock.Lock:
        return self.client.lock(name, fair=self._fair)

    def read(self, name: str) -> Any:
        return self.client.rwlock(name).read(fair=self._fair)

    def write(self, name: str) -> Any:
        return self.client.rwlock(name).write(fair=self._fair)

    def seat(self, name: str) -> Any:
        return self.client.semaphore(name, SEATS, fair=self._fair)

    def every(self, name: str) -> Any:
        return aiolock.lock_all(*(self.client.lock(part) for part in parts(name)))

    @asynccontextmanager
    async def keep(self, names: Sequence[str]) -> AsyncIterator[None]:
        kept: list[aiolock.Lease] = []
        for start in range(0, len(names), BATCH):
            some = names[start : start + BATCH]
            kept += await asyncio.gather(*(self.lock(name).acquire() for name in some))
            # Not all at once: as a program gets them that works, over the time between two renewals.
            await asyncio.sleep(self.ttl / RENEWALS * len(some) / len(names))
        yield
        if lost := sum(lease.lost for lease in kept):
            raise RuntimeError(f"{lost} of {len(kept)} leases were lost")
        await asyncio.gather(*(lease.release() for lease in kept))

    async def all_wait(self, count: int) -> None:
        while self.client.stats()["waiting"] < count:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.02)


class OursPlain(Ours):
    """With nothing but mutexes, where another kind would do: what that kind is worth."""

    def read(self, name: str) -> Any:
        return self.lock(name)

    def write(self, name: str) -> Any:
        return self.lock(name)

    def every(self, name: str) -> Any:
        return OneByOne([self.lock(part) for part in parts(name)])


class OursAnew(Ours):
    """A lock object made for every block."""

    async def turns(self, name: str, count: int) -> None:
        for _ in range(count):
            async with self.client.lock(name):
                pass


class OursWithoutPassing(Ours):
    """Every turn goes to the server, while the tasks of a process still wait behind one place there.

    There is no such setting, because nobody needs it: ``fair=True`` gives every task a place of its own instead.
    """

    async def __aenter__(self) -> Self:
        self._may_hand_over, local_queue.may_hand_over = local_queue.may_hand_over, lambda *_: False
        return await super().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        local_queue.may_hand_over = self._may_hand_over


class InMemory(Ours):
    """Over the server inside the process."""

    def __init__(self, url: str) -> None:
        del url
        super().__init__("memory://")
