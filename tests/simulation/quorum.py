"""Random schedules for a quorum: the worlds of `world` with three servers, of which one at a time may be away.

Each client has a line of its own to each server, and each server a network and a clock of its own. Any line may be cut at
any time, and so may one server: for some time, or until it comes back without its data, which it does when all that
it has granted is over. It may forget a single lock at any time. Beside what `world` looks for, all the time

* whoever believes in a lease has it at most servers, each of which would keep it for longer.

``python -m tests.simulation --quorum`` plays them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

from aiolock.backends.memory import MemoryBackend
from aiolock.backends.quorum import QuorumBackend
from aiolock.backends.quorum.rules import majority
from aiolock.client import Client
from aiolock.lease import Lease
from aiolock.types import MUTEX, READ, WRITE, Kind
from tests.simulation.faults import FaultInjector
from tests.simulation.invariants import Invariants, Op, Outcome, compatible
from tests.simulation.lives import Lives
from tests.simulation.network import Line, Network, Server
from tests.simulation.virtual import Host, VirtualClock
from tests.simulation.world import World

__all__ = ["QuorumWorld"]

SERVERS = 3
NEEDED = majority(SERVERS)
KINDS: tuple[tuple[str, Kind], ...] = (("a", MUTEX), ("b", MUTEX), ("rw", READ), ("rw", WRITE))
OVER = 2.05
"""Units after which whatever a server granted is over: the longest ttl, by the slowest of clocks."""


class QuorumPeer:
    """One client of the world, on a host of its own, with a line to each server."""

    def __init__(self, world: QuorumWorld, number: int) -> None:
        random, unit = world.random, world.unit
        self.host = Host(f"client-{number}")
        self.command_timeout = unit * random.choice([1 / 3, 1 / 3, 2.0])
        # As the quorum tells its servers.
        self.lines = [Line(server.network, self.host, self.command_timeout / 2) for server in world.servers]
        self.backends = [
            MemoryBackend(server=server, transport=line.carry)
            for server, line in zip(world.servers, self.lines, strict=True)
        ]
        backend = QuorumBackend(self.backends)
        backend.members.random = Random(random.random())
        self.client = Client(
            backend,
            ttl=unit,
            label=self.host.name,
            command_timeout=self.command_timeout,
            clock=VirtualClock(offset=random.uniform(0, 1e5)),
            random=Random(random.random()),
        )


class QuorumInvariants(Invariants):
    """The same, where a hold is what most servers have."""

    def __init__(self, servers: list[Server], outcome: Outcome) -> None:
        super().__init__(servers[0], outcome)
        self.servers = servers
        for server in servers[1:]:
            self.remember(server)

    def look(self) -> None:
        """Every belief ends before it is most servers' no more."""
        for lease, op in self.open.items():
            if lease.held and not self.forced(op.name):
                claim: Any = lease._hold.validity.claim
                left = [self._left_at(vote.claim) for vote in claim.votes]
                if sum(lease.remaining() < seconds for seconds in left) < NEEDED:
                    self.violated(op, f"believes in {lease!r}, which servers keep for {left}")
                    # Once is enough.
                    self.exempt(op.name, lease.ttl)
        for server in self.servers:
            self.look_at(server)

    def spares(self, name: str, server: Server) -> bool:
        """Whether somebody believes in a lock whom the others outlive, and no answer of this one is ahead of theirs."""
        for lease, op in self.open.items():
            if op.name == name and lease.held and lease.kind.exclusive:
                left = {
                    vote.claim.context.server: self._left_at(vote.claim)
                    for vote in lease._hold.validity.claim.votes
                }
                own = left.pop(server)
                return own > 0 and min(left.values()) > max(lease.remaining(), 0.99 * own)
        return False

    @staticmethod
    def _left_at(claim: Any) -> float:
        """For how many seconds its server keeps it."""
        server: Server = claim.context.server
        lock = server.machine.locks.get(claim.key)
        hold = lock.holds.get(claim.stored.id) if lock else None
        return server.clock.until(hold.deadline) if hold else 0.0

    def _check_token(self, op: Op, lease: Lease) -> None:
        """They may fall when another server decides."""

    def act(self, op: Op, lease: Lease, *, trusting: bool) -> None:
        """A step of work, in which nobody else may believe."""
        if (self.excused(op) if trusting else lease.lost) or self.forced(op.name):
            return
        for other, holder in self.open.items():
            rival = holder.name == op.name and other._hold.validity is not lease._hold.validity
            if rival and other.held and not compatible(lease, other):
                self.violated(op, f"acts with {lease!r} while {holder} believes in {other!r}")


class QuorumFaultInjector(FaultInjector):
    """The same for some of the lines, and for one server at a time."""

    def __init__(self, world: QuorumWorld) -> None:
        self.away_until = 0.0
        """Until when a server is away, if one is."""
        super().__init__(world)
        if self.random.random() < 0.5:
            self.faults.append(self.lose_one)

    def cut(self) -> None:
        """One client's lines to one server, or to several."""
        peer = self.random.choice(self.world.peers)
        lines = self.random.sample(peer.lines, self.random.choice([1, 1, 2, SERVERS]))
        refusing, until = self.random.random() < 0.5, self.loop.now + self.random.random() * 2 * self.unit
        for line in lines:
            line.refusing, line.cut_until = refusing, max(line.cut_until, until)
        self.log(f"cuts {peer.host.name} off {len(lines)} servers{', refusing' if refusing else ''}")

    def outage(self) -> Coroutine[Any, Any, None] | None:
        """A server is away for some time, or for so long that it may have lost its data."""
        if self.loop.now < self.away_until:
            return None
        number = self.random.randrange(SERVERS)
        server = self.world.servers[number]
        empty, refusing = self.random.random() < 0.4, self.random.random() < 0.5
        seconds = self.unit * (OVER if empty else 2 * self.random.random())
        self.away_until = self.loop.now + seconds
        for line in server.network.lines.values():
            line.refusing, line.cut_until = refusing, max(line.cut_until, self.away_until)
        self.log(f"takes server {number} away{', refusing' if refusing else ''}")
        return self._come_back(number, seconds) if empty else None

    async def _come_back(self, number: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.log(f"server {number} has lost its data")
        self.world.servers[number].machine.locks.clear()
        self.world.invariants.forget()

    def lose_one(self) -> None:
        """A server forgets a lock: whoever has it at all of them does not mind, and of others nothing is promised."""
        name, kind = self.random.choice(self.world.names)
        server = self.random.choice(self.world.servers)
        if not self.world.invariants.spares(name, server):
            self.world.invariants.exempt(name, 2 * self.unit)
        self.log(f"server {self.world.servers.index(server)} forgets {name}")
        server.machine.locks.pop(self.world.peers[0].backends[0].key(name, kind.family), None)
        self.world.invariants.forget()

    def force(self) -> None:
        name, kind = self.random.choice(self.world.names)
        key = self.world.peers[0].backends[0].key(name, kind.family)
        self.log(f"releases {name} by force")
        self.world.invariants.exempt(name, 2 * self.unit)
        for server in self.world.servers:
            server.ask(lambda machine, now: machine.force(key, now))


class NoPrimitives:
    """No primitives: what they need is no hold, and a quorum has only those."""

    over = False

    def draw(self) -> None:
        """Nothing else is done."""

    def look(self) -> None:
        """Nor looked at."""

    def look_at(self, op: Op, lease: Lease) -> None:
        """Nor asked for."""

    async def finish(self) -> None:
        """Nor finished."""

    def close(self) -> None:
        """Nor closed."""


class QuorumWorld(World):
    """Everything that a seed decides."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.unit = random.choice([0.3, 1.0, 1.0, 5.0, 30.0])
        self.healthy = random.random() < 0.3
        trouble, slowness = random.choice([0.0, 0.02, 0.1]), random.choice([0.0, 0.02, 0.1])
        if self.healthy:
            trouble = slowness = 0.0
        networks = [Network(random, self.unit, trouble=trouble, slowness=slowness) for _ in range(SERVERS)]
        self.network = Networks(networks)
        self.loop = networks[0].loop
        self.servers = [
            Server(
                network,
                VirtualClock(offset=random.uniform(0, 5e6), rate=random.uniform(0.995, 1.005)),
                self.look,
            )
            for network in networks
        ]
        self.outcome = Outcome(seed)
        self.invariants = QuorumInvariants(self.servers, self.outcome)
        self.log, self.violated = self.invariants.log, self.invariants.violated
        self.names = random.sample(KINDS, random.choice([1, 2, 3]))
        self.peers = [QuorumPeer(self, number) for number in range(random.randint(3, 5))]
        self.ops = {}
        self.count = 0
        self.over = False
        self.injector = QuorumFaultInjector(self)
        self.primitives = NoPrimitives()
        self.lives = Lives(self)


class Networks:
    """Those of all servers, as one."""

    def __init__(self, networks: list[Network]) -> None:
        self._networks = networks
        self.later = networks[0].later

    def heal(self) -> None:
        """From now on nothing is lost, slow or cut."""
        for network in self._networks:
            network.heal()
