"""Random schedules for the engine over rows: the worlds of `world` with a row store instead of the memory server.

Beside what `world` does to hosts, lines, tasks and clients, the server crashes and loses what is not durable, single lock
and session rows are deleted, unused rows are purged, and its clock is stepped back. In some worlds the server waits for a
standby, administrators end that wait while the standby is away, and the standby takes over. All the time

* whoever believes in a lease has it in the row, under a session that no other client may declare dead before the belief ends.

``python -m tests.simulation --rows`` plays them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

from aiolock.backends.rows.context import row_key
from aiolock.backends.rows.liveness import decode_session
from aiolock.backends.rows.lockrow import LockRow, decode
from aiolock.backends.rows.session import REMEMBERED, session_key
from aiolock.client import Client
from aiolock.core.hold import BLOCKS
from tests.simulation.faults import FaultInjector
from tests.simulation.invariants import Invariants, Op, Outcome
from tests.simulation.lives import Lives
from tests.simulation.network import Line, Network
from tests.simulation.quorum import NoPrimitives
from tests.simulation.rowstore import MemoryRowStore, RowServer, RowTestBackend
from tests.simulation.virtual import Host, VirtualClock, current_host
from tests.simulation.world import KINDS, World

__all__ = ["RowWorld"]

NAMESPACE = "aiolock"
STANDBYS = 0.3
"""The share of the worlds whose server has a synchronous standby."""


class SimulatedRows(RowServer):
    """The server at the other end of the lines."""

    def __init__(self, world: RowWorld, **options: Any) -> None:
        self.world = world
        self.network = world.network
        super().__init__(VirtualClock(offset=5e6, rate=world.random.uniform(0.995, 1.005)), **options)
        self.after = world.look

    def advance(self) -> None:
        """Nothing ends by itself here."""

    def lock(self, name: str, kind: Any) -> LockRow:
        found = self.rows.get(row_key(NAMESPACE, "l", kind.family, name))
        return decode(found.value) if found else LockRow()


class SimulatedStore(MemoryRowStore):
    """Reports of the server come over the line, on the client's host."""

    server: SimulatedRows

    def attach(self) -> None:
        self.line = self.server.network.lines[current_host()]

    async def open(self, settings: Any, listener: Any) -> None:
        self.attach()
        await super().open(settings, listener)

    def notify(self, key: str) -> None:
        if self._listener is not None:
            self.line.post(self._listener.changed, key)

    def break_off(self) -> None:
        """The connection is lost at the server's end: the host learns it however stopped or cut off it is."""
        if self._listener is not None:
            loop = self.server.network.loop
            loop.call_soon(self._listener.interrupted, context=self.line.host.context.copy())


class SimulatedBackend(RowTestBackend):
    """The engine on a host."""

    def make_store(self) -> SimulatedStore:
        return SimulatedStore(self.server, self._transport, poll=self._poll)

    def key(self, name: str, family: Any) -> str:
        return row_key(NAMESPACE, "l", family, name)


class RowPeer:
    """One client of the world, on a host of its own."""

    def __init__(self, world: RowWorld, number: int) -> None:
        network, random = world.network, world.random
        self.host = Host(f"client-{number}")
        self.command_timeout = network.unit * random.choice([1 / 3, 1 / 3, 2.0])
        self.line = Line(network, self.host, self.command_timeout)
        self.backend = SimulatedBackend(world.server, self.line.carry, poll=0.3 * network.unit)
        self.backends = [self.backend]
        self.client = Client(
            self.backend,
            namespace=NAMESPACE,
            ttl=network.unit,
            label=self.host.name,
            command_timeout=self.command_timeout,
            clock=VirtualClock(offset=random.uniform(0, 1e5), rate=random.uniform(1.0, 1.004)),
            random=Random(random.random()),
        )
        self.backend.context.random = Random(random.random())


class RowInvariants(Invariants):
    """The same, where a hold is in a row and its end in another one."""

    def __init__(self, server: SimulatedRows, outcome: Outcome) -> None:
        super().__init__(server, outcome)
        self.pardoned: dict[str, float] = {}
        """Sessions whose row was deleted, and until when that may be noticed."""

    def remember(self, server: Any) -> None:
        """What is given up is found by other means."""

    def look(self) -> None:
        """Every belief has its hold in the row, under a session that lives."""
        for lease, op in self.open.items():
            if not lease.held or self.forced(op.name):
                continue
            claim: Any = lease._hold.validity.claim
            hold = self.server.lock(op.name, lease.kind).holds.get(claim.member.id)
            session = claim.member.session.id
            if hold is None:
                self.violated(op, f"believes in {lease!r}, which is not in the row")
                self.exempt(op.name, lease.ttl)
            elif self.loop.now > self.pardoned.get(session, 0.0) and lease.remaining() >= self.left(session):
                self.violated(op, f"believes in {lease!r}, whose session ends in {self.left(session):.3f} s")
                self.exempt(op.name, lease.ttl)

    def left(self, session: str) -> float:
        """For how many seconds at least no other client declares it dead; negative if one has, or if its row is gone."""
        found = self.server.rows.get(session_key(NAMESPACE, session))
        if found is None or found.until is None or decode_session(found.value).dead:
            return -1.0
        return self.server.clock.until(found.until - REMEMBERED)


class RowFaultInjector(FaultInjector):
    """The same, and accidents of a row store."""

    def __init__(self, world: RowWorld) -> None:
        super().__init__(world)
        more = [self.crash, self.delete_lock, self.delete_session, self.purge, self.step_clock]
        self.faults += self.random.sample(more, self.random.randint(0, 3))
        if world.server.standby:
            self.faults += [self.lose_standby, self.crash]

    def lose_standby(self) -> Coroutine[Any, Any, None] | None:
        """The standby is away, and an administrator ends every wait for it; should the server die then, the standby takes over."""
        server = self.world.server
        if server.away:
            return None

        async def hold_back() -> None:
            self.log("takes the standby away")
            server.away = True
            await asyncio.sleep(self.random.random() * 2 * self.unit)
            self.log("brings the standby back")
            server.away = False

        return hold_back()

    def force(self) -> None:
        name, kind = self.random.choice(self.world.names)
        self.log(f"releases {name} by force")
        self.delete(name, kind)

    def delete(self, name: str, kind: Any) -> None:
        key = row_key(NAMESPACE, "l", kind.family, name)
        if self.world.server.lock(name, kind).holds:
            self.world.invariants.exempt(name, 2.1 * self.unit)
        self.world.server.rows.pop(key, None)

    def delete_lock(self) -> None:
        name, kind = self.random.choice(self.world.names)
        self.log(f"deletes the row of {name}")
        self.delete(name, kind)

    def delete_session(self) -> None:
        rows = self.world.server.rows
        sessions = sorted(key for key in rows if f"{NAMESPACE}/s/" in key)
        if sessions:
            # Sorted by when they were made: their ids are random.
            key = self.random.choice(sorted(sessions, key=list(rows).index))
            self.log("deletes a session row")
            self.world.invariants.pardoned[key.rpartition("/")[2]] = self.loop.now + 2.1 * self.unit
            del rows[key]

    def crash(self) -> None:
        self.log("crashes the server")
        server = self.world.server
        for key, before in reversed(server._undo):
            if before is None:
                server.rows.pop(key, None)
            else:
                server.rows[key] = before
        server._undo.clear()
        for store in list(server.stores.values()):
            store.break_off()

    def purge(self) -> None:
        self.log(f"purges {self.world.server.purge('', 0.0)} rows")

    def step_clock(self) -> None:
        """Back only: a forward step is an exception of the page."""
        self.log("steps the server's clock back")
        self.world.server.stepped -= self.random.random() * self.unit


class RowWorld(World):
    """Everything that a seed decides."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.unit = random.choice([0.3, 1.0, 1.0, 5.0, 30.0])
        self.healthy = random.random() < 0.3
        trouble, slowness = random.choice([0.0, 0.02, 0.1]), random.choice([0.0, 0.02, 0.1])
        if self.healthy:
            trouble = slowness = 0.0
        self.network = Network(random, self.unit, trouble=trouble, slowness=slowness)
        self.loop = self.network.loop
        self.outcome = Outcome(seed)
        self.server = SimulatedRows(
            self,
            push=random.random() < 0.7,
            shared_clock=random.random() < 0.5,
            enters=random.random() < 0.5,
            standby=Random(f"standby {seed}").random() < STANDBYS,
        )
        self.servers = [self.server]
        self.invariants = RowInvariants(self.server, self.outcome)
        self.log, self.violated = self.invariants.log, self.invariants.violated
        self.names = random.sample(KINDS, random.choice([1, 2, 3]))
        self.peers = [RowPeer(self, number) for number in range(random.randint(3, 5))]
        self.ops: dict[Op, None] = {}
        self.count = 0
        self.over = False
        self.injector = RowFaultInjector(self)
        self.primitives = NoPrimitives()
        self.lives = Lives(self)

    def look(self) -> None:
        if hasattr(self, "invariants"):
            self.invariants.look()

    async def tidy(self) -> None:
        """Nothing is left in the clients, and no row has a claim of theirs; then nothing is left of the clients."""
        nothing, unit = self.invariants.nothing, self.unit
        await asyncio.sleep((1 if self.healthy else 20) * unit)
        for peer in self.peers:
            runtime = peer.client._runtime
            nothing(peer.host.name, "queues", runtime.shared, runtime.contenders)
            nothing(peer.host.name, "blocks", *BLOCKS.of(runtime).values())
            nothing(peer.host.name, "terms", len(runtime.scheduler))
        await asyncio.sleep(3 * unit)
        for peer in self.peers:
            if peer.host not in self.invariants.closed:
                nothing(peer.host.name, "clean-ups", peer.client._runtime.cleanups)
                for session in peer.backend._engine.sessions.open.values():
                    nothing(peer.host.name, "claims", session.claims, len(session.ended))
        for name, kind in KINDS:
            row = self.server.lock(name, kind)
            nothing(
                "server",
                "queue",
                {waiter: each for waiter, each in row.queue.items() if self.has_client(each.session)},
            )
            nothing(
                "server",
                "holds",
                {owner: hold for owner, hold in row.holds.items() if self.has_client(hold.request.session)},
            )
        for peer in self.peers:
            if peer.host not in self.invariants.closed:
                await self.injector.close(peer)
            nothing(peer.host.name, "tasks", peer.client._runtime.tasks)
        nothing("loop", "tasks", asyncio.all_tasks() - {asyncio.current_task()})

    def has_client(self, session: str) -> bool:
        """Whether it is the session of a client that was not closed: neither kept, nor of a hold that ends by its ttl."""
        return any(
            session in peer.backend._engine.sessions.open
            for peer in self.peers
            if peer.host not in self.invariants.closed
        )
