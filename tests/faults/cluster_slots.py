"""A slot of a cluster that moves from one primary to another, step by step, as `redis-cli --cluster reshard` does it."""

from __future__ import annotations

import secrets
from binascii import crc_hqx
from typing import Any, Self

import redis
import redis.asyncio

from tests.faults.redis_keys import Traces, traces
from tests.faults.staging import until
from tests.servers import RedisCluster

__all__ = ["Move", "named", "nothing_is_left", "owner", "slot_of_name"]


def slot_of_name(name: str) -> int:
    """Of a lock with that name; names here have nothing that is escaped."""
    return crc_hqx(name.encode(), 0) % 16384


def owner(cluster: RedisCluster, slot: int) -> int:
    """Which node has it, as the nodes that answer say themselves."""
    for index, child in enumerate(cluster.children):
        if not child.running or child.frozen:
            continue
        with redis.Redis(port=cluster.ports[index], decode_responses=True) as node:
            if node.execute_command("ROLE")[0] != "master":
                continue
            me = node.execute_command("CLUSTER MYID")
            for first, last, primary, *_ in _slots(node):
                if first <= slot <= last and primary[2] == me:
                    return index
    raise AssertionError(f"nobody serves slot {slot}")


def _slots(node: redis.Redis) -> list[Any]:
    node.response_callbacks.pop("CLUSTER SLOTS", None)
    return node.execute_command("CLUSTER SLOTS")


def named(cluster: RedisCluster, index: int) -> str:
    """A name of which node `index` has the slot, and which nobody has used."""
    while True:
        name = secrets.token_hex(4)
        if owner(cluster, slot_of_name(name)) == index:
            return name


class Move:
    """The slot of a lock's name goes to the next primary."""

    def __init__(self, cluster: RedisCluster, name: str, target: int | None = None) -> None:
        self.cluster = cluster
        self.slot = slot_of_name(name)
        self.source = owner(cluster, self.slot)
        self.target = (self.source + 1) % 3 if target is None else target

    def begin(self) -> Self:
        """From now on, who asks the source for a key that it has not got is sent to the target (ASK)."""
        ask, source, target = self.cluster.ask, self.cluster.id(self.source), self.cluster.id(self.target)
        ask(self.target, "CLUSTER", "SETSLOT", self.slot, "IMPORTING", source)
        ask(self.source, "CLUSTER", "SETSLOT", self.slot, "MIGRATING", target)
        return self

    def keys(self) -> Self:
        """All keys that are there now."""
        while found := self.cluster.ask(self.source, "CLUSTER", "GETKEYSINSLOT", self.slot, 100):
            where = "127.0.0.1", self.cluster.ports[self.target]
            self.cluster.ask(self.source, "MIGRATE", *where, "", 0, 5000, "KEYS", *found)
        return self

    def end(self) -> Self:
        """The target has the slot: from now on the source sends everybody there (MOVED)."""
        target = self.cluster.id(self.target)
        masters = [
            index
            for index in range(len(self.cluster.ports))
            if self.cluster.ask(index, "ROLE")[0] == "master"
        ]
        for index in (self.target, *(one for one in masters if one != self.target)):
            self.cluster.ask(index, "CLUSTER", "SETSLOT", self.slot, "NODE", target)
        # The next slot that moves does so with a higher number than this one, or nodes may contradict each other for good.
        self.cluster.until(lambda: len({self._epochs(index) for index in masters}) == 1)
        return self

    def _epochs(self, index: int) -> tuple[tuple[str, str], ...]:
        return tuple(sorted((words[0], words[6]) for words in self.cluster.known(index)))

    def all(self) -> Self:
        """From the beginning to the end."""
        return self.begin().keys().end()


async def nothing_is_left(cluster: RedisCluster, namespace: str) -> None:
    """Wait until no node knows a holder or a waiter."""

    async def clean() -> bool:
        found = Traces()
        for index, child in enumerate(cluster.children):
            if not child.running or child.frozen or cluster.ask(index, "ROLE")[0] != "master":
                continue
            async with redis.asyncio.Redis(port=cluster.ports[index]) as admin:
                found = found.plus(await traces(admin, namespace))
        return found.clean

    await until(clean, "an empty cluster")
