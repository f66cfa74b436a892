"""The injector of a world: it stops hosts, cuts lines, cancels tasks, releases by force, closes clients, and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tests.simulation.invariants import Op

if TYPE_CHECKING:
    from tests.simulation.world import Peer, World

__all__ = ["FaultInjector"]

Fault = Callable[[], Coroutine[Any, Any, None] | None]


class FaultInjector:
    """Has a few of the faults happen at random times, as the seed says."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.random
        self.loop = world.loop
        self.unit = world.unit
        faults = [self.stop, self.suspend, self.cancel, self.cancel, self.force, self.close_one]
        if not world.healthy:
            faults += [self.cut, self.outage]
        self.faults: list[Fault] = self.random.sample(faults, self.random.randint(1, 4))
        self.pause = self.random.choice([0.2, 1.0, 4.0]) * self.unit

    def log(self, what: str) -> None:
        self.world.log("injector", what)

    async def run(self, until: float) -> None:
        """Do harm until then, and leave everything in working order."""
        lasting = set()
        while self.loop.now < until:
            await asyncio.sleep(self.pause * self.random.random())
            self.world.outcome.faults += 1
            fault = self.random.choice(self.faults)()
            if fault is not None:
                lasting.add(asyncio.create_task(fault))
        for fault in lasting:
            await fault
        self.world.network.heal()
        if self.world.healthy:
            # Whoever is cancelled now has nothing left on the server soon: that is looked at.
            self.world.over = True
            for op in self.world.ops:
                self.cancel_op(op)
        self.log("leaves")

    # --- hosts

    def stop(self, *, suspended: bool = False) -> Coroutine[Any, Any, None] | None:
        host = self.random.choice(self.world.peers).host
        if host.stopped:
            return None

        async def hold_back() -> None:
            self.log(f"stops {host.name}")
            host.stop()
            await asyncio.sleep(self.random.choice([0.1, 1.0, 2.0]) * self.random.random() * self.unit)
            self.log(f"resumes {host.name}{' after suspend' if suspended else ''}")
            host.resume(suspended=suspended)

        return hold_back()

    def suspend(self) -> Coroutine[Any, Any, None] | None:
        return self.stop(suspended=True)

    # --- lines

    def cut(self) -> None:
        line = self.random.choice(self.world.peers).line
        line.refusing = self.random.random() < 0.5
        line.cut_until = self.loop.now + self.random.random() * 2 * self.unit
        self.log(f"cuts {line.host.name} off{', refusing' if line.refusing else ''}")

    def outage(self) -> None:
        until = self.loop.now + self.random.random() * 2 * self.unit
        refusing = self.random.random() < 0.5
        for peer in self.world.peers:
            peer.line.refusing, peer.line.cut_until = refusing, until
        self.log("takes the server away")

    # --- tasks

    def cancel(self) -> None:
        ops = [op for op in self.world.ops if not op.host.stopped]
        if ops:
            self.cancel_op(self.random.choice(ops))

    def cancel_successor(self, leaving: Op) -> None:
        """Sometimes, whoever may just have been given the lock is cancelled in this very step."""
        if self.random.random() < 0.2:
            others = [op for op in self.world.ops if op.host is leaving.host and op.name == leaving.name]
            others.remove(leaving)
            if others:
                self.cancel_op(self.random.choice(others))

    def cancel_op(self, op: Op) -> None:
        assert op.task is not None
        if op.task.cancel():
            op.cancelled = True
            self.log(f"cancels {op}")

    # --- locks and clients

    def force(self) -> None:
        name, kind = self.random.choice(self.world.names)
        peer = self.world.peers[0]
        key = peer.backend.key(name, kind.family)
        self.log(f"releases {name} by force")
        self.world.invariants.exempt(name, 2 * self.unit)
        self.world.server.ask(lambda machine, now: machine.force(key, now))

    def close_one(self) -> Coroutine[Any, Any, None] | None:
        peer = self.random.choice(self.world.peers)
        if peer.host in self.world.invariants.closed or self.random.random() < 0.7:
            return None
        return self.close(peer)

    async def close(self, peer: Peer) -> None:
        self.log(f"closes {peer.host.name}")
        self.world.invariants.closed.add(peer.host)
        op = Op(peer.host, "itself", 0)
        with self.world.invariants.timed(op, "aclose", peer.command_timeout):
            await peer.host.run(peer.client.aclose())
