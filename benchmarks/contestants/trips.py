"""One bare round trip to each kind of server: its simplest request, without a lock, by a driver or a bare protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

from hiredis import pack_command

from aiolock.backends.etcd.messages import TXN, get
from benchmarks.contestants.base import InBlocks
from benchmarks.contestants.etcd import PutDelete
from benchmarks.contestants.files import BareSqlite
from benchmarks.contestants.floors import RawFloor
from benchmarks.contestants.memcached import AddDelete
from benchmarks.contestants.mysql import SelectOne
from benchmarks.contestants.postgresql import UpsertUpdate
from benchmarks.contestants.zookeeper import AioZK

__all__ = ["RoundTrip"]

Trip = Callable[[], Awaitable[object]]


@asynccontextmanager
async def _redis(url: str) -> AsyncIterator[Trip]:
    async with RawFloor(url) as it:
        yield lambda: it._wire.call(pack_command(("PING",)))


@asynccontextmanager
async def _zookeeper(url: str) -> AsyncIterator[Trip]:
    async with AioZK(url) as it:
        yield lambda: it._client.exists("/")


@asynccontextmanager
async def _mysql(url: str) -> AsyncIterator[Trip]:
    async with SelectOne(url) as it, it._connection() as connection, connection.cursor() as cursor:
        yield lambda: cursor.execute("SELECT 1")


@asynccontextmanager
async def _postgresql(url: str) -> AsyncIterator[Trip]:
    async with UpsertUpdate(url) as it, it._connection() as connection:
        yield lambda: connection.fetchval("SELECT 1")


@asynccontextmanager
async def _sqlite(url: str) -> AsyncIterator[Trip]:
    async with BareSqlite(url) as it:

        async def select() -> None:
            it._db.execute("SELECT * FROM by_hand").fetchall()

        yield select


@asynccontextmanager
async def _memcached(url: str) -> AsyncIterator[Trip]:
    async with AddDelete(url) as it:
        yield lambda: it.wire.call("mn")


@asynccontextmanager
async def _etcd(url: str) -> AsyncIterator[Trip]:
    async with PutDelete(url) as it:
        yield lambda: it.wire.ask(TXN, get(["nothing"]))


_TRIPS: dict[str, Any] = {
    "redis": _redis,
    "zookeeper": _zookeeper,
    "mysql": _mysql,
    "postgresql": _postgresql,
    "sqlite": _sqlite,
    "memcached": _memcached,
    "etcd": _etcd,
}
"""By scheme; of several servers that are one, the first is asked."""


class RoundTrip(InBlocks):
    """No lock: one round trip for each block."""

    async def __aenter__(self) -> Self:
        url = self.url.split()[0]
        self._stack = AsyncExitStack()
        self._trip: Trip = await self._stack.enter_async_context(_TRIPS[url.partition(":")[0]](url))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        del name
        await self._trip()
        yield
