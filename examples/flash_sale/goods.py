"""The goods of the shop, in Redis and in MySQL: the stock and the buyers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import unquote, urlsplit

import aiomysql
import redis.asyncio

from aiolock.mysql import fenced_update

FENCED_SET = (Path(__file__).parent / "fenced_set.lua").read_text()


class Goods(ABC):
    """One kind of store; reading and writing are two steps, as in a program with more to decide than a number."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...

    @abstractmethod
    async def put(self, number: int, stock: int) -> None:
        """Set the stock, with nothing sold."""

    @abstractmethod
    async def stock(self, number: int) -> int:
        """Return the stock."""

    @abstractmethod
    async def write(self, number: int, stock: int) -> None:
        """Write the stock."""

    @abstractmethod
    async def fenced_write(self, number: int, stock: int, token: int) -> bool:
        """Write the stock unless a later holder of the lock has written; return True if it was written."""

    @abstractmethod
    async def sell(self, number: int, buyer: str) -> None:
        """Record a buyer."""

    @abstractmethod
    async def sold(self, number: int) -> int:
        """Return the number of recorded buyers."""


class RedisGoods(Goods):
    """A hash for the goods, a list for the buyers."""

    def __init__(self, url: str) -> None:
        self._redis = redis.asyncio.Redis.from_url(url, decode_responses=True)
        self._fenced_set = self._redis.register_script(FENCED_SET)

    async def __aenter__(self) -> Self:
        await self._redis.ping()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._redis.aclose()

    async def put(self, number: int, stock: int) -> None:
        await self._redis.delete(f"flash:buyers:{number}", f"flash:goods:{number}")
        await self._redis.hset(f"flash:goods:{number}", "stock", stock)

    async def stock(self, number: int) -> int:
        return int(await self._redis.hget(f"flash:goods:{number}", "stock") or 0)

    async def write(self, number: int, stock: int) -> None:
        await self._redis.hset(f"flash:goods:{number}", "stock", stock)

    async def fenced_write(self, number: int, stock: int, token: int) -> bool:
        return bool(await self._fenced_set([f"flash:goods:{number}"], [stock, token]))

    async def sell(self, number: int, buyer: str) -> None:
        await self._redis.rpush(f"flash:buyers:{number}", buyer)

    async def sold(self, number: int) -> int:
        return int(await self._redis.llen(f"flash:buyers:{number}"))


class MySQLGoods(Goods):
    """A table for the goods, one for the buyers."""

    TABLES: ClassVar = {
        "flash_goods": """
            CREATE TABLE flash_goods
                (id INT PRIMARY KEY, stock INT NOT NULL, fence_token BIGINT UNSIGNED NOT NULL DEFAULT 0)
        """,
        "flash_buyers": """
            CREATE TABLE flash_buyers
                (number INT AUTO_INCREMENT PRIMARY KEY, goods INT NOT NULL, buyer VARCHAR(64) NOT NULL, KEY (goods))
        """,
    }

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._where = {
            "host": parts.hostname,
            "port": parts.port or 3306,
            "user": unquote(parts.username or "root"),
            "password": unquote(parts.password or ""),
            "db": parts.path.strip("/") or "test",
        }
        self._pool: Any = None

    async def __aenter__(self) -> Self:
        self._pool = await aiomysql.create_pool(**self._where, minsize=1, maxsize=8, autocommit=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pool.close()
        await self._pool.wait_closed()

    async def _run(self, statement: str, *values: object) -> tuple[Any, ...] | None:
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.execute(statement, values)
            row: tuple[Any, ...] | None = await cursor.fetchone()
            return row

    async def make_tables(self) -> None:
        """Create the tables, once, before the workers start."""
        for name, statement in self.TABLES.items():
            if await self._run("SHOW TABLES LIKE %s", name) is None:
                await self._run(statement)

    async def put(self, number: int, stock: int) -> None:
        await self._run("DELETE FROM flash_buyers WHERE goods = %s", number)
        await self._run("REPLACE INTO flash_goods (id, stock) VALUES (%s, %s)", number, stock)

    async def stock(self, number: int) -> int:
        row = await self._run("SELECT stock FROM flash_goods WHERE id = %s", number)
        return 0 if row is None else int(row[0])

    async def write(self, number: int, stock: int) -> None:
        await self._run("UPDATE flash_goods SET stock = %s WHERE id = %s", stock, number)

    async def fenced_write(self, number: int, stock: int, token: int) -> bool:
        async with self._pool.acquire() as connection:
            return await fenced_update(
                connection, "flash_goods", {"id": number}, {"stock": stock}, token=token
            )

    async def sell(self, number: int, buyer: str) -> None:
        await self._run("INSERT INTO flash_buyers (goods, buyer) VALUES (%s, %s)", number, buyer)

    async def sold(self, number: int) -> int:
        row = await self._run("SELECT COUNT(*) FROM flash_buyers WHERE goods = %s", number)
        return 0 if row is None else int(row[0])
