"""Everybody who competes, by name: us and our peers behind one small interface (:mod:`benchmarks.contestants.base`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.contestants.base import Contestant
from benchmarks.contestants.etcd import Etcdctl, KeptAlive, LockService, PollingKey, PutDelete, PutGet
from benchmarks.contestants.files import BareSqlite, FileLock
from benchmarks.contestants.floors import RawFloor, ScriptFloor
from benchmarks.contestants.memcached import AddDelete, PollingAdd, Touching
from benchmarks.contestants.mysql import ForUpdate, GetLock, InsertDelete, SelectOne
from benchmarks.contestants.mysql import PollingRow as MySQLPollingRow
from benchmarks.contestants.ours import InMemory, Ours, OursAnew, OursPlain, OursWithoutPassing
from benchmarks.contestants.peers import Peer
from benchmarks.contestants.plain import Asyncio
from benchmarks.contestants.postgresql import (
    Advisory,
    Expiring,
    PollingRow,
    TryAdvisory,
    UpdateSelect,
    UpsertUpdate,
)
from benchmarks.contestants.redis import CoRedis, RedisPy, Watch
from benchmarks.contestants.trips import RoundTrip
from benchmarks.contestants.zookeeper import AioZK, Kazoo, PlainNode
from benchmarks.peers import LIBRARIES

__all__ = ["Contestant", "contestant"]

_KNOWN: dict[str, Callable[..., Any]] = {
    "a lease each": KeptAlive,
    "add + delete": AddDelete,
    "aiolock": Ours,
    "aiolock, lock made anew": OursAnew,
    "aiolock, mutexes only": OursPlain,
    "aiolock fair": partial(Ours, fair=True),
    "aiolock memory://": InMemory,
    "aiolock lease": partial(Ours, query="?mode=lease"),
    "aiolock lease, no passing": partial(OursWithoutPassing, query="?mode=lease"),
    "aiolock session": partial(Ours, query="?mode=session"),
    "aiolock row": partial(Ours, query="?mode=row"),
    "aiozk": AioZK,
    "asyncio": Asyncio,
    "asyncio.Lock": Asyncio,
    "bare sqlite": BareSqlite,
    "bare sqlite, lazy": partial(BareSqlite, lazy=True),
    "coredis": CoRedis,
    "etcdctl lock": Etcdctl,
    "expiring rows": Expiring,
    "flock": FileLock,
    "for update": ForUpdate,
    "get_lock": GetLock,
    "insert + delete, random wait": InsertDelete,
    "kazoo": Kazoo,
    "pg_advisory_lock": Advisory,
    "pg_try_advisory_lock": TryAdvisory,
    "plain node": PlainNode,
    "polling": MySQLPollingRow,
    "polling add": PollingAdd,
    "polling key": PollingKey,
    "polling row": PollingRow,
    "put + delete": PutDelete,
    "put + get": PutGet,
    "raw floor": RawFloor,
    "redis-py": RedisPy,
    "round trip": RoundTrip,
    "script floor": ScriptFloor,
    "select 1": SelectOne,
    "touch": Touching,
    "update + select": UpdateSelect,
    "upsert + update": UpsertUpdate,
    "upsert + lazy update": partial(UpsertUpdate, lazy=True),
    "v3lock": LockService,
    "WATCH/MULTI/EXEC": Watch,
    **{who: partial(Peer, who) for who in LIBRARIES},
}


def contestant(who: str, url: str) -> Any:
    """By name; one that polls may be given its interval, as in ``redis-py 0.01``."""
    name, _, interval = who.rpartition(" ")
    if name in _KNOWN and interval.replace(".", "").isdigit():
        return _KNOWN[name](url, float(interval))
    return _KNOWN[who](url)
