"""What `doctor` says of each server is true there: no advice about the settings of another one."""

from __future__ import annotations

import pytest

from aiolock.backends.etcd.backend import EtcdBackend
from aiolock.backends.etcd.store import capabilities as of_etcd
from aiolock.backends.memcached.backend import MemcachedBackend
from aiolock.backends.memcached.store import MemcachedStore
from aiolock.backends.memory import MemoryBackend
from aiolock.backends.mongodb.backend import MongoDBBackend
from aiolock.backends.mongodb.store import MongoDBStore
from aiolock.backends.mysql.backend import MySQLBackend
from aiolock.backends.mysql.diagnosis import capabilities as of_mysql
from aiolock.backends.postgresql.backend import PostgreSQLBackend
from aiolock.backends.postgresql.connection import Facts
from aiolock.backends.postgresql.replication import Replication
from aiolock.backends.postgresql.store import capabilities as of_postgresql
from aiolock.backends.quorum import QuorumBackend
from aiolock.backends.quorum.rules import promised
from aiolock.backends.redis.backend import RedisBackend
from aiolock.backends.redis.diagnosis import assess
from aiolock.backends.sqlite.backend import SqliteBackend
from aiolock.backends.sqlite.store import SqliteStore
from aiolock.backends.zookeeper.backend import ZooKeeperBackend
from aiolock.backends.zookeeper.diagnosis import capabilities as of_zookeeper
from aiolock.cli.doctor import BY_SERVER, CAPABILITIES, in_words

DEPLOYMENTS = [
    (MemoryBackend.name, MemoryBackend.capabilities),
    (SqliteBackend.name, SqliteStore.capabilities),
    (MemcachedBackend.name, MemcachedStore.capabilities),
    (MongoDBBackend.name, MongoDBStore.capabilities),
    *((EtcdBackend.name, of_etcd(members)) for members in (1, 3)),
    *((PostgreSQLBackend.name, of_postgresql(Facts("18", recovering=False, pid=1, fsync=fsync, full_page_writes="on", replication=Replication(other), run="run 1")))
      for fsync in ("on", "off") for other in ("", "other")),
    *((RedisBackend.name, assess(info, pushed=pushed).capabilities) for pushed in (True, False)
      for info in ({}, {"maxmemory_policy": "allkeys-lru"}, {"maxmemory_policy": "noeviction", "aof_enabled": "1"})),
    *((QuorumBackend.name, promised([assess({"maxmemory_policy": policy, "aof_enabled": aof}, pushed=True).capabilities] * 3))
      for policy in ("allkeys-lru", "noeviction") for aof in ("0", "1")),
    *((ZooKeeperBackend.name, of_zookeeper(None, named)) for named in (1, 3)),
    *((MySQLBackend.name, of_mysql({"version": version, "innodb_flush_log_at_trx_commit": flush}, mode))
      for version in ("8.4.0", "10.11.19-MariaDB") for flush in ("1", "2") for mode in ("lease", "session", "row")),
]  # fmt: skip

SETTINGS = {
    "redis": ("maxmemory", "append", "INFO", "publish"),
    "zookeeper": ("recipe=", "/zookeeper/config"),
    "mysql": ("innodb", "use mode="),
}
"""What only one server has."""

MADE_OF = {"quorum": "redis"}
"""What has no settings of its own."""


@pytest.mark.parametrize(("server", "capabilities"), DEPLOYMENTS)
def test_advice_is_about_the_server_that_it_is_given_for(server, capabilities):
    told = [sentence for sentence in in_words(capabilities, server) if not sentence.promised]
    assert {sentence.capability for sentence in told} == set(CAPABILITIES) - capabilities
    for sentence in told:
        assert sentence.advice
        for other, settings in SETTINGS.items():
            if other != MADE_OF.get(server, server.lower()):
                assert not any(setting in sentence.advice for setting in settings), sentence


def test_only_redis_and_memcached_can_evict():
    for server, capabilities in DEPLOYMENTS:
        assert server in {"Redis", "quorum", "memcached"} or "no-eviction" in capabilities


def test_what_is_said_about_one_server_is_about_one_that_there_is():
    assert {server for server, _ in BY_SERVER} <= {server.lower() for server, _ in DEPLOYMENTS}
    assert {word for _, word in BY_SERVER} <= set(CAPABILITIES)
