"""Peers on a file of one machine: a lock of the file, tried again and again as filelock does, and the statements of SQLite."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Self

from benchmarks.contestants.base import RENEWALS, InBlocks, Polling, again_and_again

__all__ = ["BareSqlite", "FileLock", "make_table"]

UPSERT = "INSERT INTO by_hand VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET owner = excluded.owner"


class FileLock(Polling):
    """``flock`` on a file for each lock, every ``interval`` seconds; the files are beside that of the URL."""

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
                    await asyncio.sleep(self.pause())
            yield
        finally:
            os.close(file)


def _connect(url: str) -> sqlite3.Connection:
    path = f"{url.removeprefix('sqlite://')}.bare"
    # It flushes each commit by default.
    return sqlite3.connect(path, isolation_level=None, timeout=30)


def make_table(url: str) -> None:
    """Make the file of :class:`BareSqlite`."""
    db = _connect(url)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE by_hand (name TEXT PRIMARY KEY, owner INT) WITHOUT ROWID")
    db.close()


class BareSqlite(InBlocks):
    """No lock: bare statements on a file of their own, in the thread of the loop.

    Each commit is flushed, with ``lazy`` only the first one of a turn.
    """

    def __init__(self, url: str, *, lazy: bool = False) -> None:
        super().__init__(url)
        self._lazy = lazy

    async def __aenter__(self) -> Self:
        self._db = _connect(self.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._db.close()

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        """One upsert and one update, of another value each: SQLite writes nothing if nothing changes."""
        self._db.execute(UPSERT, [name, time.monotonic_ns()])
        yield
        if self._lazy:
            self._db.executescript("PRAGMA synchronous = NORMAL")
        self._db.execute("UPDATE by_hand SET owner = ? WHERE name = ?", [time.monotonic_ns(), name])
        if self._lazy:
            self._db.executescript("PRAGMA synchronous = FULL")

    @asynccontextmanager
    async def keep(self, names: Sequence[str]) -> AsyncIterator[None]:
        """One update of one row and one select of all, again and again."""
        rows = ", ".join("(?, 1)" for _ in names)
        self._db.execute(f"INSERT INTO by_hand VALUES {rows}", names)
        every = ", ".join("?" for _ in names)

        async def renew() -> None:
            self._db.execute("UPDATE by_hand SET owner = owner + 1 WHERE name = ?", [names[0]])
            self._db.execute(f"SELECT name, owner FROM by_hand WHERE name IN ({every})", names).fetchall()

        async with again_and_again(renew, self.ttl / RENEWALS):
            yield
        self._db.execute("DELETE FROM by_hand")
