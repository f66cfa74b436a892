"""Peers on a file of one machine: a lock of the file, taken without waiting again and again, as filelock does."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

from benchmarks.contestants.base import Contestant

__all__ = ["FileLock"]


class FileLock(Contestant):
    """``flock`` on a file for each lock, every ``interval`` seconds; the files are beside that of the URL."""

    def __init__(self, url: str, interval: float = 0.05) -> None:
        super().__init__(url)
        self._interval = interval

    def lock(self, name: str) -> Any:
        return _Again(self, name)

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        path = f"{self.url.removeprefix('sqlite://')}.{sha256(name.encode()).hexdigest()[:16]}"
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(self._interval)
            yield
        finally:
            os.close(file)


class _Again:
    def __init__(self, owner: FileLock, name: str) -> None:
        self._owner = owner
        self._name = name

    async def __aenter__(self) -> None:
        self._open = self._owner.block(self._name)
        await self._open.__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await self._open.__aexit__(None, None, None)
