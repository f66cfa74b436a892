"""Peers on MySQL: what people write by hand, each on a table of rows that are there before anybody asks.

They are done well where that does not change what they are: no statement more than needed, no pool that loses waiters.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Self
from urllib.parse import urlsplit

from benchmarks.contestants.base import SHARED, Polling, Pooled

__all__ = [
    "ForUpdate",
    "GetLock",
    "InsertDelete",
    "PollingRow",
    "SelectOne",
]

LONGEST_PAUSE = 0.02
"""A waiter that spins pauses for 0 to so many seconds."""


class _ByHand(Pooled):
    autocommit = True

    async def prepare(self, names: Sequence[str]) -> None:
        async with self._connection() as connection:
            for name in set(names):
                statement = "INSERT INTO rows_by_hand (name) VALUES (%s) ON DUPLICATE KEY UPDATE owner = NULL"
                await _run(connection, statement, name)
            await connection.commit()
        await super().prepare(names)

    async def _connect(self) -> Any:
        import aiomysql

        parts = urlsplit(self.url)
        return await aiomysql.connect(
            host=parts.hostname,
            port=parts.port,
            user=parts.username,
            db=parts.path.strip("/"),
            autocommit=self.autocommit,
        )


async def _run(connection: Any, statement: str, *values: object) -> int:
    async with connection.cursor() as cursor:
        changed: int = await cursor.execute(statement, values)
        return changed


class SelectOne(_ByHand):
    """No lock: two round trips that do nothing, the least that a lock here can cost."""

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        del name
        async with self._connection() as connection:
            await _run(connection, "SELECT 1")
            yield
            await _run(connection, "SELECT 1")


class ForUpdate(_ByHand):
    """``SELECT … FOR UPDATE`` in an open transaction: a connection for whoever holds or waits.

    Nothing that is not needed: no pool, and a transaction that begins by itself.
    """

    autocommit = False

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        async with self._connection() as connection:
            await _run(connection, "SELECT name FROM rows_by_hand WHERE name = %s FOR UPDATE", name)
            yield
            await connection.commit()


class GetLock(_ByHand):
    """``GET_LOCK``: a connection for whoever holds or waits."""

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        async with self._connection() as connection:
            await _run(connection, "SELECT GET_LOCK(%s, 300)", name)
            yield
            await _run(connection, "DO RELEASE_LOCK(%s)", name)


class InsertDelete(Polling, _ByHand):
    """A unique row that is there while the lock is held; who meets it waits for a random while and tries again."""

    most = SHARED

    async def __aenter__(self) -> Self:
        self._random = Random()
        return await super().__aenter__()

    def pause(self) -> float:
        return self._random.uniform(0, LONGEST_PAUSE)

    async def enter(self, name: str) -> bool:
        from pymysql import IntegrityError, OperationalError

        async with self._connection() as connection:
            try:
                await _run(connection, "INSERT INTO held_by_hand (name) VALUES (%s)", name)
            except IntegrityError:
                return False
            except OperationalError as error:
                if error.args[0] != 1213:  # a deadlock: the gap that a deleted row leaves is locked as well
                    raise
                return False
        return True

    async def exit(self, name: str) -> None:
        async with self._connection() as connection:
            await _run(connection, "DELETE FROM held_by_hand WHERE name = %s", name)


class PollingRow(Polling, _ByHand):
    """A row with an owner, set and cleared by one conditional update each; who is refused asks again after a while."""

    most = SHARED

    async def enter(self, name: str) -> bool:
        return await self._changed(
            "UPDATE rows_by_hand SET owner = 1 WHERE name = %s AND owner IS NULL", name
        )

    async def exit(self, name: str) -> None:
        await self._changed("UPDATE rows_by_hand SET owner = NULL WHERE name = %s", name)

    async def _changed(self, statement: str, name: str) -> bool:
        async with self._connection() as connection:
            return await _run(connection, statement, name) > 0
