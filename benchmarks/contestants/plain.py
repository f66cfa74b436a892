"""What asyncio itself has: one process, no server, no loss."""

from __future__ import annotations

import asyncio

from benchmarks.contestants.base import SEATS, Contestant, OneByOne, parts

__all__ = ["Asyncio"]


class Asyncio(Contestant):
    """``asyncio.Lock`` and ``asyncio.Semaphore``; there is no read-write lock."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._locks: dict[str, asyncio.Lock] = {}
        self._seats: dict[str, asyncio.Semaphore] = {}

    def lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def read(self, name: str) -> asyncio.Lock:
        return self.lock(name)

    def write(self, name: str) -> asyncio.Lock:
        return self.lock(name)

    def seat(self, name: str) -> asyncio.Semaphore:
        return self._seats.setdefault(name, asyncio.Semaphore(SEATS))

    def every(self, name: str) -> OneByOne:
        return OneByOne([self.lock(part) for part in parts(name)])
