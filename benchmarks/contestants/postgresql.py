"""Peers on PostgreSQL: locks that people write by hand, and the statements that a lock costs at least.

They are done well where that does not change what they are: statements are prepared, no pool loses waiters, and a waiter that
sleeps between tries shares its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from benchmarks.contestants.base import RENEWALS, SHARED, Polling, Pooled, again_and_again

__all__ = [
    "TABLE",
    "Advisory",
    "Expiring",
    "Notify",
    "PollingRow",
    "TryAdvisory",
    "UpdateSelect",
    "UpsertUpdate",
]

CHANNEL = "bench_baton"

TABLE = "CREATE TABLE by_hand (name text PRIMARY KEY, owner int, expires timestamptz) WITH (fillfactor = 50)"
"""To be there before; the rows come by themselves."""
UPSERT = "INSERT INTO by_hand AS r VALUES ($1, 1) ON CONFLICT (name) DO UPDATE SET owner = 1"
PROLONG = "UPDATE by_hand SET expires = now() + make_interval(secs => $2) WHERE name"
KEY = "hashtextextended($1, 0)"


class _ByHand(Pooled):
    async def _connect(self) -> Any:
        import asyncpg

        return await asyncpg.connect(self.url)


class UpsertUpdate(_ByHand):
    """No lock: one bare upsert and one bare update of a row, the least that a lock in a table costs.

    ``lazy`` does not wait for the flush of the update.
    """

    def __init__(self, url: str, *, lazy: bool = False) -> None:
        super().__init__(url)
        self._update = "UPDATE by_hand SET owner = NULL WHERE name = $1"
        if lazy:
            self._update += " RETURNING set_config('synchronous_commit', 'off', true)"

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        async with self._connection() as connection:
            await connection.execute(UPSERT, name)
            yield
            await connection.execute(self._update, name)


class Advisory(_ByHand):
    """``pg_advisory_lock``: a connection for each task that holds or waits."""

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        async with self._connection() as connection:
            await connection.execute(f"SELECT pg_advisory_lock({KEY})", name)
            yield
            await connection.execute(f"SELECT pg_advisory_unlock({KEY})", name)


class TryAdvisory(Polling, _ByHand):
    """``pg_try_advisory_lock`` every ``interval`` seconds; the holder keeps the connection."""

    most = SHARED

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        while True:
            async with self._connection() as connection:
                if await connection.fetchval(f"SELECT pg_try_advisory_lock({KEY})", name):
                    yield
                    await connection.execute(f"SELECT pg_advisory_unlock({KEY})", name)
                    return
            await asyncio.sleep(self.pause())


class PollingRow(Polling, _ByHand):
    """A row with an owner, set and cleared by one statement each; a task that is refused asks again after a while."""

    most = SHARED

    async def enter(self, name: str) -> bool:
        return await self._changed(f"{UPSERT} WHERE r.owner IS NULL", name)

    async def exit(self, name: str) -> None:
        await self._changed("UPDATE by_hand SET owner = NULL WHERE name = $1", name)

    async def _changed(self, statement: str, name: str) -> bool:
        async with self._connection() as connection:
            return not str(await connection.execute(statement, name)).endswith(" 0")


class Expiring(_ByHand):
    """Rows that expire, all of which one statement prolongs."""

    @asynccontextmanager
    async def keep(self, names: Sequence[str]) -> AsyncIterator[None]:
        async with self._connection() as connection:
            await connection.execute("INSERT INTO by_hand SELECT unnest($1::text[]), 1", names)
            async with again_and_again(lambda: self.renew(connection, names), self.ttl / RENEWALS):
                yield
            await connection.execute("DELETE FROM by_hand WHERE name = ANY($1)", names)

    async def renew(self, connection: Any, names: Sequence[str]) -> None:
        await connection.execute(f"{PROLONG} = ANY($1)", names, self.ttl)


class UpdateSelect(Expiring):
    """No lock: one bare update of one row and one bare select of all of them."""

    async def renew(self, connection: Any, names: Sequence[str]) -> None:
        await connection.execute(f"{PROLONG} = $1", names[0], self.ttl)
        await connection.fetch("SELECT name, owner FROM by_hand WHERE name = ANY($1)", names)


class Notify:
    """A bare NOTIFY and its arrival: no lock, the least that a hand-over costs."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._heard: asyncio.Queue[None] = asyncio.Queue()

    @classmethod
    async def open(cls, url: str, *, hears: bool) -> Self:
        import asyncpg

        it = cls(await asyncpg.connect(url))
        if hears:
            await it._driver.add_listener(CHANNEL, lambda *_: it._heard.put_nowait(None))
        return it

    async def ring(self) -> None:
        await self._driver.execute(f"NOTIFY {CHANNEL}")

    async def hear(self) -> None:
        await self._heard.get()

    async def close(self) -> None:
        await self._driver.close()
