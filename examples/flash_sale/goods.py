"""The goods of the shop on every server: the stock, the buyers, and the ways to sell that need no lock library."""

from __future__ import annotations

import asyncio
import base64
import random
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import unquote, urlsplit

import aiohttp
import aiomysql
import aiosqlite
import aiozk
import asyncpg
import pymysql
import redis.asyncio
from pymongo import AsyncMongoClient

import aiolock
import aiolock.etcd
import aiolock.mysql
import aiolock.postgresql
import aiolock.zookeeper

PATIENCE = 120.0
"""Seconds that a buyer waits."""
TTL = 10
"""Seconds after which a lock ends that a worker neither frees nor renews."""
CONNECTIONS = 8
"""Of a worker to a server, at most."""
FENCED_SET = (Path(__file__).parent / "fenced_set.lua").read_text()

Run = Callable[..., Awaitable[list[Any]]]
"""Run one SQL statement with its values; return its rows."""


class Goods(ABC):
    """One kind of store; reading and writing are two steps, as in a program with more to decide than a number.

    An attempt of an optimistic way fails only because another one has sold a piece, so the stock bounds its attempts.
    """

    work = 0.002
    """Seconds that a shop has to think about a buyer."""

    WAYS: ClassVar[Mapping[str, Callable[[Any, int, str], Awaitable[bool]]]] = {}
    """Methods that sell one piece to a buyer and return True, or False if there is none, by their names in articles."""

    @abstractmethod
    def __init__(self, url: str) -> None: ...

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *_: object) -> None: ...

    @abstractmethod
    async def prepare(self) -> None:
        """Make what the store needs, once, before the workers start."""

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
    async def fenced_write(self, number: int, stock: int, lease: aiolock.Lease) -> bool:
        """Write the stock unless a later holder of the lock has written; return True if it was written."""

    @abstractmethod
    async def sell(self, number: int, buyer: str) -> None:
        """Record a buyer."""

    @abstractmethod
    async def sold(self, number: int) -> int:
        """Return the number of recorded buyers."""

    async def take(self, number: int, buyer: str) -> bool:
        """Sell one piece in separate steps: right only while no other task is between the first and the last."""
        stock = await self.stock(number)
        if stock <= 0:
            return False
        await asyncio.sleep(self.work)
        await self.write(number, stock - 1)
        await self.sell(number, buyer)
        return True


class RedisGoods(Goods):
    """A hash for the goods, a set for the buyers."""

    def __init__(self, url: str) -> None:
        self._redis = redis.asyncio.Redis.from_url(url, decode_responses=True)
        self._fenced_set = self._redis.register_script(FENCED_SET)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._redis.aclose()

    async def prepare(self) -> None: ...

    async def put(self, number: int, stock: int) -> None:
        await self._redis.delete(f"flash:buyers:{number}", f"flash:goods:{number}")
        await self.write(number, stock)

    async def stock(self, number: int) -> int:
        return int(await self._redis.hget(f"flash:goods:{number}", "stock") or 0)

    async def write(self, number: int, stock: int) -> None:
        await self._redis.hset(f"flash:goods:{number}", "stock", stock)

    async def fenced_write(self, number: int, stock: int, lease: aiolock.Lease) -> bool:
        return bool(await self._fenced_set([f"flash:goods:{number}"], [stock, lease.token]))

    async def sell(self, number: int, buyer: str) -> None:
        await self._redis.sadd(f"flash:buyers:{number}", buyer)

    async def sold(self, number: int) -> int:
        return int(await self._redis.scard(f"flash:buyers:{number}"))

    async def set_nx_px(self, number: int, buyer: str) -> bool:
        """Lock by redis-py's Lock: SET NX PX, and a script that deletes the key if it still has our value."""
        async with self._redis.lock(
            f"flash:lock:{number}", timeout=TTL, sleep=0.01, blocking_timeout=PATIENCE
        ):
            return await self.take(number, buyer)

    async def watch(self, number: int, buyer: str) -> bool:
        """Write only if nothing has changed since the stock was read; docs/how-to/redis-transactions.md explains it."""
        goods, buyers = f"flash:goods:{number}", f"flash:buyers:{number}"
        async with self._redis.pipeline() as pipe:
            while True:
                try:
                    await pipe.watch(goods, buyers)
                    if await pipe.sismember(buyers, buyer):
                        return True  # the answer to an earlier EXEC was lost
                    stock = int(await pipe.hget(goods, "stock") or 0)
                    if stock <= 0:
                        return False
                    await asyncio.sleep(self.work)
                    pipe.multi()
                    pipe.hset(goods, "stock", stock - 1)
                    pipe.sadd(buyers, buyer)
                    await pipe.execute()
                    return True
                except redis.WatchError:
                    await asyncio.sleep(random.uniform(0, 0.01))

    WAYS: ClassVar = {"SET NX PX": set_nx_px, "WATCH/MULTI/EXEC": watch}


class ZooKeeperGoods(Goods):
    """A node for the goods with the stock as its data, and a child for each buyer."""

    def __init__(self, url: str) -> None:
        hosts, _, chroot = url.removeprefix("zookeeper://").partition("?")[0].partition("/")
        self._zk: Any = aiozk.ZKClient(hosts, chroot=chroot or None, session_timeout=TTL)

    async def __aenter__(self) -> Self:
        await self._zk.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._zk.close()

    async def prepare(self) -> None:
        await self._zk.ensure_path("/flash-goods")

    async def put(self, number: int, stock: int) -> None:
        if await self._zk.exists(f"/flash-goods/{number}"):
            await self._zk.deleteall(f"/flash-goods/{number}")
        await self._zk.create(f"/flash-goods/{number}", data=str(stock))

    async def stock(self, number: int) -> int:
        return int(await self._zk.get_data(f"/flash-goods/{number}"))

    async def write(self, number: int, stock: int) -> None:
        await self._zk.set(f"/flash-goods/{number}", str(stock), -1)

    async def fenced_write(self, number: int, stock: int, lease: aiolock.Lease) -> bool:
        try:
            await aiolock.zookeeper.fenced_set(lease, f"/flash-goods/{number}", str(stock).encode())
        except aiolock.LockLost:
            return False
        return True

    async def sell(self, number: int, buyer: str) -> None:
        await self._zk.create(f"/flash-goods/{number}/{buyer}")

    async def sold(self, number: int) -> int:
        return len(await self._zk.get_children(f"/flash-goods/{number}"))

    async def plain_node(self, number: int, buyer: str) -> bool:
        """Lock by one ephemeral node, which all others watch: each of them tries again when it is deleted."""
        node = f"/flash-goods/lock-{number}"
        while True:
            try:
                await self._zk.create(node, ephemeral=True)
                break
            except aiozk.exc.NodeExists:
                deleted = self._zk.wait_for_events([aiozk.WatchEvent.DELETED], node)
                if await self._zk.exists(node, watch=True):
                    await deleted
        try:
            return await self.take(number, buyer)
        finally:
            await self._zk.delete(node)

    async def node_version(self, number: int, buyer: str) -> bool:
        """Write only if the node still has the version that was read."""
        while True:
            stock, stat = await self._zk.get(f"/flash-goods/{number}")
            if int(stock) <= 0:
                return False
            await asyncio.sleep(self.work)
            try:
                await self._zk.set(f"/flash-goods/{number}", str(int(stock) - 1), stat.version)
            except aiozk.exc.BadVersion:
                continue
            await self.sell(number, buyer)
            return True

    WAYS: ClassVar = {"plain node": plain_node, "node version": node_version}


class MemcachedGoods(Goods):
    """An item for the goods, whose value is the stock and the token of the last holder that wrote it; one for the buyers."""

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self._free = asyncio.Semaphore(CONNECTIONS)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for _reader, writer in self._idle:
            writer.close()
            await writer.wait_closed()

    async def _ask(self, command: str, value: str | None = None) -> list[str]:
        """Send a command of memcached's text protocol; return the lines of its answer."""
        data = "" if value is None else f" {len(value)}\r\n{value}"
        async with self._free:
            reader, writer = self._idle.pop() if self._idle else await self._connect()
            try:
                writer.write(f"{command}{data}\r\n".encode())
                lines = [(await reader.readline()).decode().strip()]
                while lines[-1].startswith("VALUE "):
                    lines += [(await reader.readline()).decode().strip() for _ in range(2)]
            except BaseException:
                # The next command would get the rest of this answer.
                writer.close()
                raise
            self._idle.append((reader, writer))
        return lines

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._server.hostname, self._server.port or 11211)

    async def _read(self, number: int) -> tuple[int, int, str]:
        """Return the stock, the token of the last holder that wrote it, and the CAS id of both."""
        head, value, _ = await self._ask(f"gets flash:goods:{number}")
        stock, token = value.split()
        return int(stock), int(token), head.split()[-1]

    async def prepare(self) -> None: ...

    async def put(self, number: int, stock: int) -> None:
        await self._ask(f"set flash:buyers:{number} 0 0", "")
        await self.write(number, stock)

    async def stock(self, number: int) -> int:
        return (await self._read(number))[0]

    async def write(self, number: int, stock: int) -> None:
        await self._ask(f"set flash:goods:{number} 0 0", f"{stock} 0")

    async def fenced_write(self, number: int, stock: int, lease: aiolock.Lease) -> bool:
        while True:
            _, token, cas = await self._read(number)
            if token > lease.token:
                return False
            if await self._swap(number, f"{stock} {lease.token}", cas):
                return True

    async def _swap(self, number: int, value: str, cas: str) -> bool:
        """Write if the item has not been written since it was read."""
        # The CAS id is the last word of the line, behind the length of the value.
        command = f"cas flash:goods:{number} 0 0 {len(value)} {cas}\r\n{value}"
        return await self._ask(command) == ["STORED"]

    async def sell(self, number: int, buyer: str) -> None:
        await self._ask(f"append flash:buyers:{number} 0 0", f"{buyer} ")

    async def sold(self, number: int) -> int:
        _, buyers, _ = await self._ask(f"get flash:buyers:{number}")
        return len(buyers.split())

    async def add(self, number: int, buyer: str) -> bool:
        """Lock by an item that expires: `add` takes the lock, `delete` frees it, also if it is another worker's by then."""
        while await self._ask(f"add flash:lock:{number} 0 {TTL}", "1") != ["STORED"]:  # noqa: ASYNC110 - memcached tells nobody
            await asyncio.sleep(random.uniform(0, 0.02))
        try:
            return await self.take(number, buyer)
        finally:
            await self._ask(f"delete flash:lock:{number}")

    async def compare_and_swap(self, number: int, buyer: str) -> bool:
        """Write only if the item has not been written since it was read."""
        while True:
            stock, token, cas = await self._read(number)
            if stock <= 0:
                return False
            await asyncio.sleep(self.work)
            if await self._swap(number, f"{stock - 1} {token}", cas):
                await self.sell(number, buyer)
                return True

    WAYS: ClassVar = {"add": add, "cas": compare_and_swap}


class EtcdGoods(Goods):
    """A key for the goods, whose value is the stock, and a key for each buyer; by the gateway that etcd has for JSON."""

    def __init__(self, url: str) -> None:
        self._server = url.removeprefix("etcd://").partition(",")[0].partition("?")[0]

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)  # a buyer who waits in the lock service needs a connection
        self._http = aiohttp.ClientSession(f"http://{self._server}", connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def _ask(self, call: str, **request: object) -> dict[str, Any]:
        """Make a call of etcd's API, version 3."""
        async with self._http.post(f"/v3/{call}", json=request, raise_for_status=True) as answer:
            return dict(await answer.json())

    @staticmethod
    def _bytes(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    def _buyers(self, number: int) -> dict[str, str]:
        """Return the range of the keys of all buyers: a zero follows the slash."""
        return {
            "key": self._bytes(f"flash-buyers/{number}/"),
            "range_end": self._bytes(f"flash-buyers/{number}0"),
        }

    async def _read(self, number: int) -> tuple[int, str]:
        """Return the stock and the revision of its last change."""
        [found] = (await self._ask("kv/range", key=self._bytes(f"flash-goods/{number}")))["kvs"]
        return int(base64.b64decode(found["value"])), found["mod_revision"]

    async def prepare(self) -> None: ...

    async def put(self, number: int, stock: int) -> None:
        await self._ask("kv/deleterange", **self._buyers(number))
        await self.write(number, stock)

    async def stock(self, number: int) -> int:
        return (await self._read(number))[0]

    async def write(self, number: int, stock: int) -> None:
        await self._ask("kv/put", key=self._bytes(f"flash-goods/{number}"), value=self._bytes(str(stock)))

    async def fenced_write(self, number: int, stock: int, lease: aiolock.Lease) -> bool:
        try:
            await aiolock.etcd.fenced_put(lease, f"flash-goods/{number}", str(stock).encode())
        except aiolock.LockLost:
            return False
        return True

    async def sell(self, number: int, buyer: str) -> None:
        await self._ask("kv/put", key=self._bytes(f"flash-buyers/{number}/{buyer}"))

    async def sold(self, number: int) -> int:
        return int((await self._ask("kv/range", **self._buyers(number), count_only=True)).get("count", 0))

    @asynccontextmanager
    async def _lease(self) -> AsyncIterator[str]:
        """A lease that is kept alive, also in the queue, where etcd lets it end, and answers later all the same."""
        lease = (await self._ask("lease/grant", TTL=TTL))["ID"]
        try:
            async with asyncio.TaskGroup() as group:
                kept = group.create_task(self._keep_alive(lease))
                yield lease
                kept.cancel()
        finally:
            try:
                await self._ask("lease/revoke", ID=lease)  # deletes the key of the lock
            except aiohttp.ClientResponseError as error:
                if error.status != HTTPStatus.NOT_FOUND:  # it has ended by itself
                    raise

    async def _keep_alive(self, lease: str) -> None:
        while True:
            await asyncio.sleep(TTL / 3)
            if "TTL" not in (await self._ask("lease/keepalive", ID=lease))["result"]:
                raise RuntimeError("the lease has ended, and with it the lock")

    async def lock_service(self, number: int, buyer: str) -> bool:
        """Lock by the service of etcd, as etcdctl and clients in Go do: a key with a lease, in the order of revisions."""
        async with self._lease() as lease:
            await self._ask("lock/lock", name=self._bytes(f"flash-lock/{number}"), lease=lease)
            return await self.take(number, buyer)

    async def key_revision(self, number: int, buyer: str) -> bool:
        """Write only if the key still has the revision that was read, and the buyer in the same transaction."""
        goods = self._bytes(f"flash-goods/{number}")
        while True:
            stock, revision = await self._read(number)
            if stock <= 0:
                return False
            await asyncio.sleep(self.work)
            unchanged = {"key": goods, "target": "MOD", "result": "EQUAL", "mod_revision": revision}
            put = {"key": goods, "value": self._bytes(str(stock - 1))}
            buy = {"key": self._bytes(f"flash-buyers/{number}/{buyer}")}
            writes = [{"request_put": put}, {"request_put": buy}]
            if (await self._ask("kv/txn", compare=[unchanged], success=writes)).get("succeeded"):
                return True

    WAYS: ClassVar = {"lock service": lock_service, "key revision": key_revision}


class MongoDBGoods(Goods):
    """A document for the goods, with the token of the last holder that wrote it, and a document for each buyer."""

    def __init__(self, url: str) -> None:
        # Otherwise the driver connects once more for itself, and leaves that socket open if it is closed meanwhile.
        self._driver: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(url, serverMonitoringMode="poll")
        database = self._driver.get_default_database()
        self._goods, self._buyers = database.flash_goods, database.flash_buyers

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._driver.close()

    async def prepare(self) -> None: ...

    async def put(self, number: int, stock: int) -> None:
        await self._buyers.delete_many({"goods": number})
        await self._goods.replace_one({"_id": number}, {"stock": stock, "token": 0}, upsert=True)

    async def stock(self, number: int) -> int:
        found = await self._goods.find_one({"_id": number})
        return int(found["stock"]) if found else 0

    async def write(self, number: int, stock: int) -> None:
        await self._goods.update_one({"_id": number}, {"$set": {"stock": stock}})

    async def fenced_write(self, number: int, stock: int, lease: aiolock.Lease) -> bool:
        done = await self._goods.update_one(
            {"_id": number, "token": {"$lte": lease.token}}, {"$set": {"stock": stock, "token": lease.token}}
        )
        return bool(done.matched_count)

    async def sell(self, number: int, buyer: str) -> None:
        await self._buyers.insert_one({"goods": number, "buyer": buyer})

    async def sold(self, number: int) -> int:
        return await self._buyers.count_documents({"goods": number})

    async def find_and_modify(self, number: int, buyer: str) -> bool:
        """Take a piece if there is one, in one step at the server."""
        taken = await self._goods.find_one_and_update(
            {"_id": number, "stock": {"$gt": 0}}, {"$inc": {"stock": -1}}
        )
        if taken is None:
            return False
        await self.sell(number, buyer)
        return True

    WAYS: ClassVar = {"findAndModify": find_and_modify}


class SQLGoods(Goods):
    """A table for the goods, one for the buyers, and one for locks by unique rows."""

    TABLES: ClassVar = {
        "flash_goods": "id INT PRIMARY KEY, stock INT NOT NULL, version INT NOT NULL DEFAULT 0, "
        "fence_token BIGINT NOT NULL DEFAULT 0",
        "flash_buyers": "goods INT NOT NULL, buyer VARCHAR(64) NOT NULL",
        "flash_locks": "goods INT PRIMARY KEY",
    }
    LOCKED: ClassVar = " FOR UPDATE"
    helpers: ClassVar[Any]
    """`aiolock.mysql` or `aiolock.postgresql`."""
    _pool: Any

    @abstractmethod
    async def run(self, statement: str, *values: object) -> list[Any]:
        """Run one statement as a transaction of its own; return its rows."""

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[Run]:
        """Run statements in one transaction."""

    @abstractmethod
    def refused(self, error: Exception) -> bool:
        """Tell whether an INSERT failed because the row is there, or another one was faster."""

    async def prepare(self) -> None:
        for name, columns in self.TABLES.items():
            await self.run(f"DROP TABLE IF EXISTS {name}")
            await self.run(f"CREATE TABLE {name} ({columns})")

    async def put(self, number: int, stock: int) -> None:
        await self.run("DELETE FROM flash_buyers WHERE goods = $1", number)
        await self.run("DELETE FROM flash_goods WHERE id = $1", number)
        await self.run("INSERT INTO flash_goods (id, stock) VALUES ($1, $2)", number, stock)

    async def stock(self, number: int) -> int:
        [[stock]] = await self.run("SELECT stock FROM flash_goods WHERE id = $1", number)
        return int(stock)

    async def write(self, number: int, stock: int) -> None:
        await self.run("UPDATE flash_goods SET stock = $1 WHERE id = $2", stock, number)

    async def fenced_write(self, number: int, stock: int, lease: aiolock.Lease) -> bool:
        key, values = {"id": number}, {"stock": stock}
        async with self._pool.acquire() as connection:
            return bool(
                await self.helpers.fenced_update(connection, "flash_goods", key, values, token=lease.token)
            )

    async def write_version(self, number: int, stock: int, version: int) -> bool:
        """Write the stock if the row still has this version; return True if it was written."""
        key, values = {"id": number}, {"stock": stock}
        async with self._pool.acquire() as connection:
            return bool(await self.helpers.compare_and_set(connection, "flash_goods", key, version, values))

    async def sell(self, number: int, buyer: str) -> None:
        await self.run("INSERT INTO flash_buyers (goods, buyer) VALUES ($1, $2)", number, buyer)

    async def sold(self, number: int) -> int:
        [[count]] = await self.run("SELECT COUNT(*) FROM flash_buyers WHERE goods = $1", number)
        return int(count)

    async def locked_row(self, number: int, buyer: str) -> bool:
        """Keep the row locked from the first statement to the commit."""
        async with self.transaction() as run:
            [[stock]] = await run(f"SELECT stock FROM flash_goods WHERE id = $1{self.LOCKED}", number)
            if stock <= 0:
                return False
            await asyncio.sleep(self.work)
            await run("UPDATE flash_goods SET stock = $1 WHERE id = $2", stock - 1, number)
            await run("INSERT INTO flash_buyers (goods, buyer) VALUES ($1, $2)", number, buyer)
            return True

    async def unique_row(self, number: int, buyer: str) -> bool:
        """Lock by a row: its INSERT takes the lock, its DELETE frees it, and a worker that dies leaves it taken."""
        while True:
            try:
                await self.run("INSERT INTO flash_locks (goods) VALUES ($1)", number)
                break
            except Exception as error:
                if not self.refused(error):
                    raise
                await asyncio.sleep(random.uniform(0, 0.02))
        try:
            return await self.take(number, buyer)
        finally:
            await self.run("DELETE FROM flash_locks WHERE goods = $1", number)

    async def version_column(self, number: int, buyer: str) -> bool:
        """Write only if the row still has the version that was read."""
        while True:
            [[stock, version]] = await self.run(
                "SELECT stock, version FROM flash_goods WHERE id = $1", number
            )
            if stock <= 0:
                return False
            await asyncio.sleep(self.work)
            if await self.write_version(number, stock - 1, version):
                await self.sell(number, buyer)
                return True

    WAYS: ClassVar = {
        "FOR UPDATE": locked_row,
        "unique row": unique_row,
        "version column": version_column,
    }


class MySQLGoods(SQLGoods):
    """MySQL or MariaDB, by aiomysql."""

    helpers = aiolock.mysql

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._where = {
            "host": parts.hostname,
            "port": parts.port or 3306,
            "user": unquote(parts.username or "root"),
            "password": unquote(parts.password or ""),
            "db": parts.path.strip("/") or "test",
        }

    async def __aenter__(self) -> Self:
        # Without notes, dropping a table that is not there is no warning.
        words = {"autocommit": True, "init_command": "SET sql_notes = 0"}
        self._pool = await aiomysql.create_pool(**self._where, **words, minsize=1, maxsize=CONNECTIONS)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pool.close()
        await self._pool.wait_closed()

    async def run(self, statement: str, *values: object) -> list[Any]:
        async with self._pool.acquire() as connection:
            return await self._run(connection, statement, *values)

    @staticmethod
    async def _run(connection: Any, statement: str, *values: object) -> list[Any]:
        async with connection.cursor() as cursor:
            await cursor.execute(re.sub(r"\$\d", "%s", statement), values)
            return list(await cursor.fetchall())

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Run]:
        async with self._pool.acquire() as connection:
            await connection.begin()
            try:
                yield lambda statement, *values: self._run(connection, statement, *values)
            except BaseException:
                await connection.rollback()
                raise
            await connection.commit()

    def refused(self, error: Exception) -> bool:
        # 1213 is a deadlock: the gap that a deleted row leaves is locked as well.
        return isinstance(error, pymysql.MySQLError) and error.args[0] in {1062, 1213}


class PostgreSQLGoods(SQLGoods):
    """PostgreSQL, by asyncpg."""

    helpers = aiolock.postgresql

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> Self:
        self._pool = await asyncpg.create_pool(self._url, min_size=1, max_size=CONNECTIONS)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    async def run(self, statement: str, *values: object) -> list[Any]:
        return list(await self._pool.fetch(statement, *values))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Run]:
        async with self._pool.acquire() as connection, connection.transaction():
            yield connection.fetch

    def refused(self, error: Exception) -> bool:
        return isinstance(error, asyncpg.UniqueViolationError)


class SQLiteGoods(SQLGoods):
    """The file of the locks, which a client has made, by aiosqlite: a connection, which is a thread, for each transaction."""

    LOCKED = ""  # the whole file is locked from BEGIN IMMEDIATE on

    def __init__(self, url: str) -> None:
        self._file = unquote(urlsplit(url).path)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def run(self, statement: str, *values: object) -> list[Any]:
        async with self._connection() as run:
            return await run(statement, *values)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Run]:
        async with aiosqlite.connect(self._file, isolation_level=None, timeout=PATIENCE) as connection:

            async def run(statement: str, *values: Any) -> list[Any]:
                return list(await connection.execute_fetchall(statement.replace("$", "?"), values))

            yield run

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Run]:
        async with self._connection() as run:
            await run("BEGIN IMMEDIATE")
            yield run
            await run("COMMIT")

    def refused(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.IntegrityError)

    async def fenced_write(self, number: int, stock: int, lease: aiolock.Lease) -> bool:
        statement = "UPDATE flash_goods SET stock = $1, fence_token = $2 WHERE id = $3 AND fence_token <= $2"
        return bool(await self.run(f"{statement} RETURNING 1", stock, lease.token, number))

    async def write_version(self, number: int, stock: int, version: int) -> bool:
        statement = "UPDATE flash_goods SET stock = $1, version = $2 + 1 WHERE id = $3 AND version = $2"
        return bool(await self.run(f"{statement} RETURNING 1", stock, version, number))

    WAYS: ClassVar = {
        "BEGIN IMMEDIATE": SQLGoods.locked_row,
        "unique row": SQLGoods.unique_row,
        "version column": SQLGoods.version_column,
    }


STORES: dict[str, type[Goods]] = {
    "redis": RedisGoods,
    "zookeeper": ZooKeeperGoods,
    "mysql": MySQLGoods,
    "postgresql": PostgreSQLGoods,
    "memcached": MemcachedGoods,
    "etcd": EtcdGoods,
    "mongodb": MongoDBGoods,
    "sqlite": SQLiteGoods,
}
