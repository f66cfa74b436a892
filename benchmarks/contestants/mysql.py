"""Peers on MySQL: what people write by hand, each on a table of rows that are there before anybody asks.

They are done well where that does not change what they are: no statement more than needed, no pool that loses waiters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Self
from urllib.parse import urlsplit

from benchmarks.contestants.base import Block, Contestant

__all__ = [
    "ForUpdate",
    "GetLock",
    "InsertDelete",
    "Polling",
    "SelectOne",
]

SHARED = 10
"""Connections of a process whose waiters sleep between tries, and so can share them."""
LONGEST_PAUSE = 0.02
"""A waiter that spins pauses for 0 to so many seconds."""


class _ByHand(Contestant):
    """Connections on demand, as many as are in use at once but no more than ``most``."""

    most = 100_000
    autocommit = True

    async def __aenter__(self) -> Self:
        self._idle: list[Any] = []
        self._all: list[Any] = []
        self._gate = asyncio.Semaphore(self.most)
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._all:
            connection.close()

    async def prepare(self, names: Sequence[str]) -> None:
        async with self._connection() as connection:
            for name in set(names):
                statement = "INSERT INTO rows_by_hand (name) VALUES (%s) ON DUPLICATE KEY UPDATE owner = NULL"
                await _run(connection, statement, name)
            await connection.commit()
        await super().prepare(names)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        async with self._gate:
            connection = self._idle.pop() if self._idle else await self._connect()
            yield connection
            self._idle.append(connection)

    async def _connect(self) -> Any:
        import aiomysql

        parts = urlsplit(self.url)
        connection = await aiomysql.connect(
            host=parts.hostname,
            port=parts.port,
            user=parts.username,
            db=parts.path.strip("/"),
            autocommit=self.autocommit,
        )
        self._all.append(connection)
        return connection

    def lock(self, name: str) -> Any:
        return Block(self, name)

    def block(self, name: str) -> Any:
        """An asynchronous context manager that is the lock."""
        raise NotImplementedError


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


class InsertDelete(_ByHand):
    """A unique row that is there while the lock is held; who meets it waits for a random while and tries again."""

    most = SHARED

    async def __aenter__(self) -> Self:
        self._random = Random()
        return await super().__aenter__()

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        while not await self._insert(name):  # noqa: ASYNC110 - the database tells nobody
            await asyncio.sleep(self._random.uniform(0, LONGEST_PAUSE))
        yield
        async with self._connection() as connection:
            await _run(connection, "DELETE FROM held_by_hand WHERE name = %s", name)

    async def _insert(self, name: str) -> bool:
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


class Polling(_ByHand):
    """A row with an owner, set and cleared by one conditional update each; who is refused asks again after a while."""

    most = SHARED

    def __init__(self, url: str, interval: float = 0.1) -> None:
        super().__init__(url)
        self._interval = interval

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        statement = "UPDATE rows_by_hand SET owner = 1 WHERE name = %s AND owner IS NULL"
        while not await self._changed(statement, name):  # noqa: ASYNC110 - as above
            await asyncio.sleep(self._interval)
        yield
        await self._changed("UPDATE rows_by_hand SET owner = NULL WHERE name = %s", name)

    async def _changed(self, statement: str, name: str) -> int:
        async with self._connection() as connection:
            return await _run(connection, statement, name)
