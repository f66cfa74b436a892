"""Random schedules: small worlds of clients, tasks and faults in virtual time, replayable by their seed.

Each seed makes a world: one memory server, three to five clients on hosts of their own, a network between them, tasks
that lock and work with all options, set lives of holds that are not renewed, and use the primitives for several tasks, and a fault injector. It stops hosts
(SIGSTOP), suspends them, cuts them off, cancels tasks, releases by force and closes clients. In the end it leaves, and
then there must be

* progress: each waiter without a timeout is served;
* hygiene: no hold, place, task, local queue or registration is left;

and all the time no cancellation is swallowed, no undocumented error is raised, and the `invariants` hold.

``python -m tests.simulation --seed 7`` prints the log of one world; ``--seeds 2000`` runs many and prints the sums.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from random import Random

from aiolock.backends.memory import MemoryBackend
from aiolock.client import Client
from aiolock.core.capabilities import Downgrade
from aiolock.core.hold import BLOCKS
from aiolock.errors import AcquireTimeout, BackendUnavailable, BarrierBroken, LockLost
from aiolock.kinds.reentrant import ReentrantLock
from aiolock.kinds.rwlock import ReadLock, WriteLock
from aiolock.lease import Lease
from aiolock.lock import Lock
from aiolock.types import MUTEX, READ, WRITE, Kind, Mode, permits
from tests.simulation import virtual
from tests.simulation.faults import FaultInjector
from tests.simulation.invariants import Invariants, Op, Outcome
from tests.simulation.lives import Lives
from tests.simulation.network import LATEST, Line, Network, Server
from tests.simulation.primitives import Primitives
from tests.simulation.virtual import Host, VirtualClock

__all__ = ["Outcome", "World", "explore", "play"]

KINDS: tuple[tuple[str, Kind], ...] = (
    ("a", MUTEX),
    ("b", MUTEX),
    ("rw", READ),
    ("rw", WRITE),
    ("sem", permits(1, 3)),
    ("sem", permits(2, 3)),
)


class BlockFailed(Exception):
    """The error of a block's own."""


class Peer:
    """One client of the world, on a host of its own."""

    def __init__(self, network: Network, server: Server, number: int) -> None:
        random = network.random
        self.host = Host(f"client-{number}")
        self.command_timeout = network.unit * random.choice([1 / 3, 1 / 3, 2.0])
        self.line = Line(network, self.host, self.command_timeout)
        self.backend = MemoryBackend(server=server, transport=self.line.carry)
        self.backends = [self.backend]
        self.client = Client(
            self.backend,
            ttl=network.unit,
            label=self.host.name,
            command_timeout=self.command_timeout,
            clock=VirtualClock(offset=random.uniform(0, 1e5)),
            random=Random(random.random()),
        )


class World:
    """Everything that a seed decides."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.unit = random.choice([0.3, 1.0, 1.0, 5.0, 30.0])
        """The usual ttl; every other time in this world is a multiple of it."""
        self.healthy = random.random() < 0.3
        """Nothing happens to the network: then the server knows nothing of anybody soon after he is gone."""
        trouble, slowness = random.choice([0.0, 0.02, 0.1]), random.choice([0.0, 0.02, 0.1])
        if self.healthy:
            trouble = slowness = 0.0
        self.network = Network(random, self.unit, trouble=trouble, slowness=slowness)
        self.loop = self.network.loop
        clock = VirtualClock(offset=5e6, rate=random.uniform(0.995, 1.005))
        self.server = Server(self.network, clock, self.look)
        self.outcome = Outcome(seed)
        self.servers = [self.server]
        self.invariants = Invariants(self.server, self.outcome)
        self.log, self.violated = self.invariants.log, self.invariants.violated
        self.names = random.sample(KINDS, random.choice([1, 2, 3]))
        self.peers = [Peer(self.network, self.server, number) for number in range(random.randint(3, 5))]
        self.ops: dict[Op, None] = {}
        """What is under way, in the order in which it began."""
        self.count = 0
        self.over = False
        """Nobody begins anything new."""
        self.injector = FaultInjector(self)
        self.primitives = Primitives(self)
        self.lives = Lives(self)

    # --- workers

    async def worker(self, peer: Peer) -> None:
        random = self.random
        for _ in range(random.randint(1, 6)):
            if self.over:
                return
            await asyncio.sleep(random.choice([0.0, 0.0, 0.1, 1.0]) * random.random() * self.unit)
            self.count += 1
            name, kind = random.choice(self.names)
            way = self.primitives.draw()
            op = Op(peer.host, way or name, self.count)
            op.task = asyncio.create_task(self.attempt(peer, op, way or kind), name=str(op))
            self.ops[op] = None
            await asyncio.wait([op.task])
            del self.ops[op]
            if op.cancelled and not op.task.cancelled():
                self.violated(op, "swallowed a cancellation")
            if not op.task.cancelled():
                op.task.result()

    async def attempt(self, peer: Peer, op: Op, what: str | Kind) -> None:
        """One operation with the errors that it may end with."""
        closed = self.invariants.closed
        try:
            if isinstance(what, str):
                await self.primitives.play(what, peer, op)
            else:
                await self.operation(peer, op, what)
        except asyncio.CancelledError:
            self.log(op, "was cancelled")
            if not op.cancelled:
                self.violated(op, "a cancellation came out that nobody asked for")
            raise
        except LockLost as error:
            self.log(op, f"lost: {error.reason}")
            self.outcome.losses += 1
            if error.reason == "closed" and op.host not in closed:
                self.violated(op, "lost a lock to a closing that never was")
        except (AcquireTimeout, BackendUnavailable, BarrierBroken, BlockFailed) as error:
            self.log(op, f"ended with {type(error).__name__}")
        except RuntimeError as error:
            self.log(op, f"ended with {error}")
            if op.host not in closed:
                self.violated(op, f"{error!r}")
        except Exception as error:
            self.violated(op, f"ended with {error!r}")

    async def operation(self, peer: Peer, op: Op, kind: Kind) -> None:
        """Ask for one lock in some way, work under it, and give it back in some way."""
        random, unit = self.random, self.unit
        reentrant = kind is MUTEX and random.random() < 0.2
        timeout = random.choice([None, None, 0.0, 0.05 * unit, 0.5 * unit, unit, 3 * unit])
        signal = random.random() < 0.3
        lock = peer.client._lock(
            ReentrantLock if reentrant else {READ: ReadLock, WRITE: WriteLock}.get(kind, Lock),
            kind,
            op.name,
            {
                "ttl": unit * random.choice([1, 1, 1, 2]),
                "timeout": timeout,
                "on_loss": "signal" if signal else "cancel",
                "fair": random.random() < 0.3,
                "max_hold": random.choice([None] * 6 + [0.3 * unit, unit]),
                **self.lives.options(),
            },
        )
        style = random.choice(["block", "block", "block", "acquire", "try", "lease", "drop"])
        self.log(op, f"wants {lock!r}, {style}, timeout={timeout}, fair={lock._request.fair}")
        limit = peer.command_timeout if timeout == 0.0 or style == "try" else timeout
        if style == "block":
            await self.in_block(peer, op, lock, limit, trusting=not signal)
            return
        with self.invariants.timed(op, "acquire", limit) as began:
            lease = await (lock.try_acquire() if style == "try" else lock.acquire())
        if lease is None:
            return
        self.invariants.granted(op, lease, began)
        try:
            if style == "lease":
                async with lease:
                    await self.work(peer, op, lease, trusting=not signal)
            else:
                await self.work(peer, op, lease, trusting=False)
            if style == "drop" and not reentrant:
                self.log(op, f"drops {lease!r}")
                self.invariants.drops += 1
                return
            self.log(op, f"leaves {lease!r}")
        finally:
            del self.invariants.open[lease]
            if style != "drop" or reentrant or sys.exc_info()[0] is not None:
                with self.invariants.timed(op, "release", peer.command_timeout):
                    await lease.release(keep=random.choice([0.0, 0.0, 0.0, 0.3]) * unit)
                self.injector.cancel_successor(op)

    async def in_block(self, peer: Peer, op: Op, lock: Lock, limit: float | None, *, trusting: bool) -> None:
        invariants = self.invariants
        began, left, lease = invariants.moment(op), None, None
        try:
            async with lock as lease:
                invariants.in_time(op, "async with", began, limit)
                invariants.granted(op, lease, began)
                try:
                    if isinstance(lock, ReentrantLock):
                        async with lock as inner:
                            if inner.token != lease.token:
                                self.violated(op, "levels of one hold have different tokens")
                            await self.work(peer, op, inner, trusting=trusting)
                    await self.work(peer, op, lease, trusting=trusting)
                finally:
                    left = invariants.moment(op)
                    self.log(op, f"leaves {lease!r}")
        finally:
            if lease is None or left is None:
                invariants.in_time(op, "async with", began, limit)
            else:
                del invariants.open[lease]
                invariants.in_time(op, "leaving", left, peer.command_timeout)
                self.injector.cancel_successor(op)

    async def work(self, peer: Peer, op: Op, lease: Lease, *, trusting: bool) -> None:
        random = self.random
        for _ in range(random.choice([0, 1, 2, 3])):
            pause = random.choice([0.0, 0.01, 0.2, 0.7, 3.0])
            await asyncio.sleep(pause * self.unit * random.random())
            self.invariants.act(op, lease, trusting=trusting)
            self.primitives.look_at(op, lease)
            await self.lives.change(peer, op, lease)
        if random.random() < 0.1:
            raise BlockFailed
        if random.random() < 0.1 and not self.lives.has(lease):
            with self.invariants.timed(op, "renew()", peer.command_timeout):
                await lease.renew()
        turns = lease.kind.mode is Mode.WRITE and lease.held and random.random() < 0.3
        if turns and isinstance(lease._hold.validity.claim, Downgrade):
            with self.invariants.timed(op, "downgrade()", peer.command_timeout):
                await lease.downgrade()
            self.log(op, f"has {lease!r} after a downgrade")
            await asyncio.sleep(0.5 * self.unit * random.random())
            self.invariants.act(op, lease, trusting=trusting)

    # --- from beginning to end

    async def live(self) -> Outcome:
        self.loop.set_exception_handler(self.invariants.on_error)
        random = self.random
        try:
            for peer in self.peers:
                await peer.host.run(peer.client.open())
            workers = [
                peer.host.run(self.worker(peer)) for peer in self.peers for _ in range(random.randint(1, 3))
            ]
            self.look_around()
            await self.injector.run(self.loop.now + random.choice([2, 5, 10]) * self.unit)
            finishing = asyncio.create_task(self.primitives.finish())
            _, late = await asyncio.wait(workers, timeout=200 * self.unit)
            self.over = self.primitives.over = True
            if late:
                self.violated("progress", f"never served: {', '.join(str(op) for op in self.ops)}")
                return self.outcome
            for worker in workers:
                worker.result()
            await finishing
            self.primitives.close()
            await self.tidy()
        except Exception as error:
            self.violated("world", repr(error))
        finally:
            self.outcome.seconds = self.loop.now - self.invariants.begin
        return self.outcome

    def look(self) -> None:
        """After each step of the server."""
        self.invariants.look()
        self.primitives.look()

    def look_around(self) -> None:
        """Beliefs are looked at by the clock as well, because a wrong one makes no step."""
        if not self.over:
            self.invariants.look()
            self.network.later(0.05 * self.unit, self.look_around)

    async def tidy(self) -> None:
        """Nothing is left: first in the clients, then on the server, then of the clients."""
        nothing = self.invariants.nothing
        if self.healthy:
            await asyncio.sleep(0.35 * self.unit)
            for server in self.servers:
                server.advance()
                nothing("server", "locks", server.machine.locks)
        await asyncio.sleep(3 * self.unit)
        for peer in self.peers:
            runtime = peer.client._runtime
            scheduler = runtime.scheduler
            nothing(peer.host.name, "queues", runtime.shared, runtime.contenders)
            nothing(peer.host.name, "clean-ups", runtime.cleanups)
            nothing(peer.host.name, "blocks", *BLOCKS.of(runtime).values())
            nothing(peer.host.name, "registers", runtime.registers)
            nothing(
                peer.host.name, "terms", len(scheduler), any(scheduler._calm.values()), scheduler._watched
            )
        # A place of which nobody could say that it was given up lapses when its turn has come, one after the other.
        for _ in range(4 + self.count):
            for server in self.servers:
                server.advance()
            await asyncio.sleep(2 * self.unit)
        for server in self.servers:
            nothing("server", "locks", server.machine.locks)
        await asyncio.sleep(LATEST)
        for peer in self.peers:
            for backend in peer.backends if self.healthy else ():
                if backend._claims:
                    # Errors and the frames that they went through hold each other.
                    gc.collect()
                    nothing(peer.host.name, "registrations", list(backend._claims))
        for peer in self.peers:
            if peer.host not in self.invariants.closed:
                await self.injector.close(peer)
            nothing(peer.host.name, "tasks", peer.client._runtime.tasks)
        for server in self.servers if self.healthy else ():
            nothing("server", "watches", server.machine.registers.watchers)
        nothing("loop", "tasks", asyncio.all_tasks() - {asyncio.current_task()})


def play(seed: int, world: type[World] = World) -> Outcome:
    """Live through the world of a seed."""

    async def main() -> Outcome:
        return await world(seed).live()

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        try:
            return virtual.run(main(), debug=False)
        except virtual.Deadlock as error:
            return Outcome(seed, violations=[f"deadlock: {error}"])


def explore(seeds: range, *, patience: int = 1, world: type[World] = World) -> Outcome:
    """Live through many worlds until ``patience`` of them were violated; the sums of what happened."""
    total = Outcome(seeds.start)
    for seed in seeds:
        outcome = play(seed, world)
        total.seconds += outcome.seconds
        total.grants += outcome.grants
        total.losses += outcome.losses
        total.faults += outcome.faults
        total.together += outcome.together
        total.lives += outcome.lives
        if outcome.violations:
            total.violations += [f"seed {seed}: {violation}" for violation in outcome.violations]
            patience -= 1
            if not patience:
                break
    return total
