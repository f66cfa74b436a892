"""What can be run by name: for each suite the servers that it starts, and its scenarios."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, Self

from benchmarks.calm import Calm
from benchmarks.contestants.files import make_table
from benchmarks.contestants.postgresql import TABLE
from benchmarks.scenarios import compare, kinds, methods, mysql, redis, replicas, rows, zookeeper
from benchmarks.scenarios.context import (
    Context,
    EtcdContext,
    MemcachedContext,
    MySQLContext,
    PostgreSQLContext,
    RedisContext,
    Scenario,
    ZooKeeperContext,
)
from benchmarks.scenarios.fleet import Fleet, Member
from benchmarks.scenarios.methods import Market
from benchmarks.workers import Workers
from tests.servers import Etcd, MariaDB, Memcached, MongoStandIn, PostgreSQL, Redis, Server, ZooKeeper

__all__ = ["COMPARED", "SHOPS", "SUITES", "LockFile", "Options", "Suite"]


@dataclass(slots=True)
class Options:
    """How much of everything."""

    quick: bool
    rounds: int
    calm: Calm
    peers: bool = True
    """Whether libraries of other languages compete."""

    def context(self, kind: type[Any], server: Server, workers: Workers) -> Any:
        return kind(server, workers, self.quick, self.rounds, self.calm, self.peers)


@dataclass(slots=True)
class Suite:
    """Some scenarios, and what they are given."""

    scenarios: Mapping[str, Scenario]
    opened: Callable[[Options], AbstractContextManager[Any]]


def durable_mariadb() -> MariaDB:
    """One that flushes every commit, as servers do unless they are told otherwise, and has room for many."""
    return MariaDB(extra=["--innodb-flush-log-at-trx-commit=1", "--max-connections=1000"])


def durable_postgresql() -> PostgreSQL:
    """One that flushes every commit, and has room for many."""
    return PostgreSQL(settings=["max_connections = 1000"], init=[TABLE])


class LockFile(TemporaryDirectory[str]):
    """A file in the place of a server."""

    def __init__(self) -> None:
        super().__init__(prefix="aiolock-bench-")
        self.url = f"sqlite://{self.name}/locks.db"
        self.pid = os.getpid()
        make_table(self.url)

    def __enter__(self) -> Self:  # type: ignore[override]  # as servers do
        return self


def _one(
    make: Callable[[], Any], kind: type[Context]
) -> Callable[[Options], AbstractContextManager[Context]]:
    """Scenarios on one server."""

    @contextmanager
    def opened(options: Options) -> Iterator[Context]:
        with make() as server, Workers() as workers:
            context = options.context(kind, server, workers)
            context.prepare()
            yield context

    return opened


class _Several(ExitStack):
    """Independent servers that are one for clients."""

    def __init__(self, *servers: Any) -> None:
        super().__init__()
        self.url = " ".join(self.enter_context(server).url for server in servers)
        self.pid = servers[0].pid


COMPARED: Sequence[tuple[Callable[[], Any], Mapping[str, str]]] = (
    (Redis, {"Redis": ""}),
    (lambda: _Several(Redis(), Redis(), Redis()), {"Redis, 3 servers as one": ""}),
    (ZooKeeper, {"ZooKeeper, 1 server": ""}),
    (lambda: ZooKeeper(3), {"ZooKeeper, 3 servers": ""}),
    (
        durable_mariadb,
        {
            "MariaDB, lease": "?mode=lease",
            "MariaDB, session": "?mode=session",
            "MariaDB, row": "?mode=row",
        },
    ),
    (durable_postgresql, {"PostgreSQL": ""}),
    (LockFile, {"SQLite": ""}),
    (Memcached, {"memcached": ""}),
    (Etcd, {"etcd, 1 member": ""}),
    (lambda: Etcd(3), {"etcd, 3 members": ""}),
)
"""The servers that are compared, and by title what is added to the URL. Each scheme has a round trip in
:mod:`benchmarks.contestants.trips`."""


@contextmanager
def _compare(options: Options) -> Iterator[Fleet]:
    members = {"memory://": Member("aiolock", None)}
    with ExitStack() as stack:
        workers = stack.enter_context(Workers())
        for make, titles in COMPARED:
            context = options.context(Context, stack.enter_context(make()), workers)
            members |= {title: Member("aiolock", context, query) for title, query in titles.items()}
        first = next(it.context for it in members.values() if it.context is not None)
        yield Fleet(members, first)


@contextmanager
def _kinds(options: Options) -> Iterator[Fleet]:
    with ExitStack() as stack:
        workers = stack.enter_context(Workers())
        redis, zookeeper_, mariadb = (
            options.context(Context, stack.enter_context(server), workers)
            for server in (Redis(), ZooKeeper(), durable_mariadb())
        )
        members = {
            "asyncio, one process": Member("asyncio", None),
            "memory://, aiolock, one process": Member("aiolock", None),
            "Redis, aiolock": Member("aiolock", redis),
            "Redis, aiolock, mutexes only": Member("aiolock, mutexes only", redis),
            "Redis, redis-py": Member("redis-py", redis),
            "ZooKeeper, aiolock": Member("aiolock", zookeeper_),
            "ZooKeeper, kazoo": Member("kazoo", zookeeper_),
            "MariaDB, aiolock": Member("aiolock", mariadb, "?mode=lease"),
        }
        yield Fleet(members, redis)


@contextmanager
def _replicas(options: Options) -> Iterator[Fleet]:
    at_once = "--repl-diskless-sync-delay", "0"
    with Redis(extra=at_once) as primary, Redis(extra=at_once) as replica, Workers() as workers:
        replica.follow(primary)
        context = options.context(RedisContext, primary, workers)
        context.prepare()
        yield Fleet(
            {
                replicas.WITHOUT: Member("aiolock", context),
                replicas.WITH: Member("aiolock", context, "?replicas=1"),
            },
            context,
        )


SHOPS: Mapping[str, Callable[[], Any]] = {
    "redis": Redis,
    "mysql": durable_mariadb,
    "postgresql": durable_postgresql,
    "memcached": Memcached,
    "zookeeper": ZooKeeper,
    "etcd": Etcd,
    "mongodb": MongoStandIn,
}
"""The servers of the flash sale whose methods are compared, by the names of its stores."""


@contextmanager
def _methods(options: Options) -> Iterator[Market]:
    with ExitStack() as stack:
        workers = stack.enter_context(Workers())
        servers = {store: stack.enter_context(make()) for store, make in SHOPS.items()}
        redlock = " ".join([servers["redis"].url, *(stack.enter_context(Redis()).url for _ in range(2))])
        yield Market(
            methods.offered({store: server.url for store, server in servers.items()}, redlock),
            options.context(Context, servers["redis"], workers),
        )


SUITES = {
    "redis": Suite(redis.SCENARIOS, _one(Redis, RedisContext)),
    "zookeeper": Suite(zookeeper.SCENARIOS, _one(ZooKeeper, ZooKeeperContext)),
    "mysql": Suite(mysql.SCENARIOS, _one(durable_mariadb, MySQLContext)),
    "compare": Suite(compare.SCENARIOS, _compare),
    "kinds": Suite(kinds.SCENARIOS, _kinds),
    "postgresql": Suite(rows.POSTGRESQL, _one(durable_postgresql, PostgreSQLContext)),
    "sqlite": Suite(rows.SQLITE, _one(LockFile, Context)),
    "memcached": Suite(rows.MEMCACHED, _one(Memcached, MemcachedContext)),
    "etcd": Suite(rows.ETCD, _one(Etcd, EtcdContext)),
    "methods": Suite(methods.SCENARIOS, _methods),
    "replicas": Suite(replicas.SCENARIOS, _replicas),
}
