"""The cluster of a history run: slots move, replicas take over in order, and primaries stand still for a moment.

    python -m tests.faults.cluster_system cluster --seconds 60 --processes 6 --names 12 --seed 1 [--kinds all]

Each worker reaches each node through a proxy of its own. Nothing of what is done to the nodes may show: a slot that moves
loses nothing, nor does a failover in which the primary waits for its replica, nor one that stands still for less time than
after which it counts as dead. So there is no exception here.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import redis

import aiolock
from aiolock.testing.locks import all_can_be_had
from tests.faults import run
from tests.faults.cluster_slots import Move
from tests.faults.injector import Fault, FaultInjector
from tests.faults.redis_system import USERS, RedisSystem
from tests.servers import RedisCluster

TTLS = [0.8, 1.2, 1.6]
"""Longer than with one server: a failover that is ordered takes a tenth of a second and more."""
NODE_TIMEOUT = 5000
"""Milliseconds: none of the nodes stands still for so long."""


class Part(RedisSystem):
    """One node."""

    def __init__(self, cluster: RedisCluster, index: int) -> None:
        super().__init__(server=cluster.nodes[index])
        self.cluster, self.index = cluster, index

    @property
    def leads(self) -> bool:
        """Whether it is a primary."""
        return bool(self.cluster.ask(self.index, "ROLE")[0] == "master")

    def url(self, host: str, port: int, number: int, seed: int) -> str:
        url = super().url(host, port, number, seed).removesuffix("/0")
        return f"{url}?real={self.server.port}"

    def others(self, admin: redis.Redis) -> list[dict[str, Any]]:
        """Without its replica, or its primary."""
        return [one for one in super().others(admin) if not {"S", "M"} & set(one["flags"])]


class ClusterFaultInjector(FaultInjector):
    """The same, with slots and nodes instead of the only server."""

    system: ClusterSystem  # type: ignore[assignment]  # alike, not related

    def _table(self) -> list[tuple[int, str, Fault]]:
        others = [fault for fault in super()._table() if "server" not in fault[1] and fault[1] != "replay"]
        return [
            *others,
            (12, "move a slot", self._move),
            (3, "order a failover", self._fail_over),
            (3, "freeze a node", self._freeze_node),
        ]

    async def _move(self, rng: random.Random, _name: str) -> bool:
        """Of a lock that somebody may have, step by step."""
        name = rng.choice(self.names)
        async with self.system.busy:
            move = await asyncio.to_thread(self._begin, name, rng)
            await asyncio.sleep(rng.choice((0, rng.uniform(0, 0.3))))
            await asyncio.to_thread(move.keys)
            await asyncio.sleep(rng.choice((0, rng.uniform(0, 0.3))))
            # What was made in the meantime is at the target; what was left behind goes along now.
            await asyncio.to_thread(move.keys)
            await asyncio.to_thread(move.end)
        return True

    def _begin(self, name: str, rng: random.Random) -> Move:
        leading = [part.index for part in self.system.parts if part.leads]
        move = Move(self.system.server, name, leading[0])
        move.target = rng.choice([index for index in leading if index != move.source])
        return move.begin()

    async def _fail_over(self, rng: random.Random, _name: str) -> bool:
        """A replica takes over when it has all that its primary has."""
        async with self.system.busy:
            await asyncio.to_thread(self._take_over, rng)
            await asyncio.sleep(rng.choice((0, self.ttl)))
        return True

    def _take_over(self, rng: random.Random) -> None:
        cluster = self.system.server
        part = rng.choice([part for part in self.system.parts if not part.leads])
        cluster.until(lambda: cluster.ask(part.index, "ROLE")[3] == "connected")
        cluster.ask(part.index, "CLUSTER", "FAILOVER")
        cluster.until(lambda: part.leads)
        # The next slot may move when all have heard of it.
        everybody = range(len(cluster.ports))
        cluster.until(
            lambda: len({tuple(sorted(map(_who, cluster.known(index)))) for index in everybody}) == 1
        )

    async def _freeze_node(self, rng: random.Random, _name: str) -> bool:
        part = rng.choice(self.system.parts)
        async with self.system.busy:
            self.system.server.freeze(part.index)
            await asyncio.sleep(rng.uniform(0.1, 0.9) * self.shortest)
            self.system.server.thaw(part.index)
        return True


def _who(words: list[str]) -> tuple[str, str, str]:
    """A node, what it is, and by which election."""
    return words[0], words[2].replace("myself,", ""), words[6]


class ClusterSystem:
    """Three primaries, and a replica of each."""

    framing = staticmethod(Part.framing)
    namespace = Part.namespace
    injector = ClusterFaultInjector
    worker = "tests.faults.cluster_worker"
    placed = staticmethod(Part.placed)
    granted = staticmethod(Part.granted)
    reply = staticmethod(Part.reply)
    verified_within = staticmethod(Part.verified_within)
    replayed = 0

    def __init__(self) -> None:
        self.server = RedisCluster(3, 1, node_timeout=NODE_TIMEOUT, users=USERS)
        self.parts = [Part(self.server, index) for index in range(len(self.server.ports))]
        self.busy = asyncio.Lock()
        """Held by whoever hurts a node, or moves a slot."""
        self.foreign: list[str] = []

    def kill_clients(self, kind: str, ending: Callable[[int], object]) -> None:
        """Close all connections of a kind at one of them; replicas are of another one."""
        random.choice(self.parts).kill_clients(kind, ending)

    def forget_scripts(self) -> None:
        """SCRIPT FLUSH at all of them."""
        for part in self.parts:
            part.forget_scripts()

    async def hygiene(self, names: Sequence[str], ttl: float) -> list[str]:
        """After all workers have left, no primary knows anybody who holds or waits, and every lock can be had."""
        found = [each for part in self.parts if part.leads for each in part.alive()]
        async with aiolock.connect(self.server.url, namespace=self.namespace, ttl=5) as client:
            found += await all_can_be_had(client, names, 3 * ttl)
        return found + [each for part in self.parts if part.leads for each in await part.left()]


def prepare() -> None:
    """Make it known, with times in which its nodes and their proxies can answer."""
    run.SYSTEMS["cluster"] = ClusterSystem
    run.TTLS[:] = TTLS


def main() -> int:
    """As the history run's."""
    prepare()
    return run.main()


if __name__ == "__main__":
    sys.exit(main())
