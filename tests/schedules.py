"""Random schedules: small worlds of clients, tasks and accidents in virtual time, replayable by their seed.

Each seed makes a world: one memory server, three to five clients on hosts of their own, a network between them, tasks
that lock and work with all options, and do what ``gatherings`` has for several, and a nemesis. The nemesis stops hosts (SIGSTOP) and suspends them, cuts them off,
cancels tasks, releases by force and closes clients. In the end it leaves, and then there must be

* progress: whoever waits without a timeout is served;
* hygiene: no hold, place, task, cohort or registration is left;

and all the time no cancellation is swallowed, no error comes out that is not documented, and what `promises` says.

``python -m tests.schedules --seed 7`` prints the log of one world; ``--seeds 2000`` runs many and prints the sums.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
import time
import warnings
from random import Random

from aiolock.backends.memory import MemoryBackend
from aiolock.client import Client
from aiolock.contract import MUTEX, READ, WRITE, Kind, Mode, permits
from aiolock.errors import AcquireTimeout, BackendUnavailable, BarrierBroken, LockLost
from aiolock.lease import Lease
from aiolock.lock import Lock
from aiolock.reentrant import ReentrantLock
from aiolock.rwlock import ReadLock, WriteLock
from tests import virtual
from tests.accidents import Nemesis
from tests.gatherings import Gatherings
from tests.network import LATEST, Line, Network, Server
from tests.promises import Op, Outcome, Promises
from tests.virtual import Host, VirtualClock

__all__ = ["Outcome", "World", "explore", "play"]

KINDS: tuple[tuple[str, Kind], ...] = (
    ("a", MUTEX),
    ("b", MUTEX),
    ("rw", READ),
    ("rw", WRITE),
    ("sem", permits(1, 3)),
    ("sem", permits(2, 3)),
)


class Nuisance(Exception):
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
        self.promises = Promises(self.server, self.outcome)
        self.log, self.violated = self.promises.log, self.promises.violated
        self.names = random.sample(KINDS, random.choice([1, 2, 3]))
        self.peers = [Peer(self.network, self.server, number) for number in range(random.randint(3, 5))]
        self.ops: dict[Op, None] = {}
        """What is under way, in the order in which it began."""
        self.count = 0
        self.over = False
        """Nobody begins anything new."""
        self.nemesis = Nemesis(self)
        self.gatherings = Gatherings(self)

    # --- workers

    async def worker(self, peer: Peer) -> None:
        random = self.random
        for _ in range(random.randint(1, 6)):
            if self.over:
                return
            await asyncio.sleep(random.choice([0.0, 0.0, 0.1, 1.0]) * random.random() * self.unit)
            self.count += 1
            name, kind = random.choice(self.names)
            way = self.gatherings.draw()
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
        closed = self.promises.closed
        try:
            if isinstance(what, str):
                await self.gatherings.play(what, peer, op)
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
        except (AcquireTimeout, BackendUnavailable, BarrierBroken, Nuisance) as error:
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
            ttl=unit * random.choice([1, 1, 1, 2]),
            timeout=timeout,
            on_loss="signal" if signal else "cancel",
            fair=random.random() < 0.3,
            max_hold=random.choice([None] * 6 + [0.3 * unit, unit]),
            label=None,
        )
        style = random.choice(["block", "block", "block", "acquire", "try", "lease", "drop"])
        self.log(op, f"wants {lock!r}, {style}, timeout={timeout}, fair={lock._bid.fair}")
        limit = peer.command_timeout if timeout == 0.0 or style == "try" else timeout
        if style == "block":
            await self.in_block(peer, op, lock, limit, trusting=not signal)
            return
        with self.promises.timed(op, "acquire", limit) as began:
            lease = await (lock.try_acquire() if style == "try" else lock.acquire())
        if lease is None:
            return
        self.promises.granted(op, lease, began)
        try:
            if style == "lease":
                async with lease:
                    await self.work(peer, op, lease, trusting=not signal)
            else:
                await self.work(peer, op, lease, trusting=False)
            if style == "drop" and not reentrant:
                self.log(op, f"drops {lease!r}")
                self.promises.drops += 1
                return
            self.log(op, f"leaves {lease!r}")
        finally:
            del self.promises.open[lease]
            if style != "drop" or reentrant or sys.exc_info()[0] is not None:
                with self.promises.timed(op, "release", peer.command_timeout):
                    await lease.release(keep=random.choice([0.0, 0.0, 0.0, 0.3]) * unit)
                self.nemesis.spite(op)

    async def in_block(self, peer: Peer, op: Op, lock: Lock, limit: float | None, *, trusting: bool) -> None:
        promises = self.promises
        began, left, lease = promises.moment(op), None, None
        try:
            async with lock as lease:
                promises.in_time(op, "async with", began, limit)
                promises.granted(op, lease, began)
                try:
                    if isinstance(lock, ReentrantLock):
                        async with lock as inner:
                            if inner.token != lease.token:
                                self.violated(op, "levels of one hold have different tokens")
                            await self.work(peer, op, inner, trusting=trusting)
                    await self.work(peer, op, lease, trusting=trusting)
                finally:
                    left = promises.moment(op)
                    self.log(op, f"leaves {lease!r}")
        finally:
            if lease is None or left is None:
                promises.in_time(op, "async with", began, limit)
            else:
                del promises.open[lease]
                promises.in_time(op, "leaving", left, peer.command_timeout)
                self.nemesis.spite(op)

    async def work(self, peer: Peer, op: Op, lease: Lease, *, trusting: bool) -> None:
        random = self.random
        for _ in range(random.choice([0, 1, 2, 3])):
            pause = random.choice([0.0, 0.01, 0.2, 0.7, 3.0])
            await asyncio.sleep(pause * self.unit * random.random())
            self.promises.act(op, lease, trusting=trusting)
            self.gatherings.look_at(op, lease)
        if random.random() < 0.1:
            raise Nuisance
        if random.random() < 0.1:
            with self.promises.timed(op, "renew()", peer.command_timeout):
                await lease.renew()
        if lease.kind.mode is Mode.WRITE and lease.held and random.random() < 0.3:
            with self.promises.timed(op, "downgrade()", peer.command_timeout):
                await lease.downgrade()
            self.log(op, f"has {lease!r} after a downgrade")
            await asyncio.sleep(0.5 * self.unit * random.random())
            self.promises.act(op, lease, trusting=trusting)

    # --- from beginning to end

    async def live(self) -> Outcome:
        self.loop.set_exception_handler(self.promises.on_error)
        random = self.random
        try:
            for peer in self.peers:
                await peer.host.run(peer.client.open())
            workers = [
                peer.host.run(self.worker(peer)) for peer in self.peers for _ in range(random.randint(1, 3))
            ]
            self.look_around()
            await self.nemesis.visit(self.loop.now + random.choice([2, 5, 10]) * self.unit)
            finishing = asyncio.create_task(self.gatherings.finish())
            _, late = await asyncio.wait(workers, timeout=200 * self.unit)
            self.over = self.gatherings.over = True
            if late:
                self.violated("progress", f"never served: {', '.join(str(op) for op in self.ops)}")
                return self.outcome
            for worker in workers:
                worker.result()
            await finishing
            self.gatherings.close()
            await self.tidy()
        except Exception as error:
            self.violated("world", repr(error))
        finally:
            self.outcome.seconds = self.loop.now - self.promises.begin
        return self.outcome

    def look(self) -> None:
        """After each step of the server."""
        self.promises.look()
        self.gatherings.look()

    def look_around(self) -> None:
        """Beliefs are looked at by the clock as well, because a wrong one makes no step."""
        if not self.over:
            self.promises.look()
            self.network.later(0.05 * self.unit, self.look_around)

    async def tidy(self) -> None:
        """Nothing is left: first in the clients, then on the server, then of the clients."""
        nothing = self.promises.nothing
        if self.healthy:
            await asyncio.sleep(0.35 * self.unit)
            for server in self.servers:
                server.advance()
                nothing("server", "locks", server.machine.locks)
        await asyncio.sleep(3 * self.unit)
        for peer in self.peers:
            runtime = peer.client._runtime
            watchdog = runtime.watchdog
            nothing(peer.host.name, "cohorts", runtime.shared, runtime.contenders)
            nothing(peer.host.name, "clean-ups", runtime.cleanups)
            nothing(peer.host.name, "blocks", *runtime.inside.values())
            nothing(peer.host.name, "boards", runtime.boards)
            nothing(peer.host.name, "terms", len(watchdog), any(watchdog._calm.values()), watchdog._watched)
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
            if peer.host not in self.promises.closed:
                await self.nemesis.close(peer)
            nothing(peer.host.name, "tasks", peer.client._runtime.tasks)
        for server in self.servers if self.healthy else ():
            nothing("server", "watches", server.machine.papers.watchers)
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
        total.accidents += outcome.accidents
        total.together += outcome.together
        if outcome.violations:
            total.violations += [f"seed {seed}: {violation}" for violation in outcome.violations]
            patience -= 1
            if not patience:
                break
    return total


def main(world: type[World] = World) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.schedules", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="print the log of this world")
    parser.add_argument("--seeds", type=int, default=2000, help="how many worlds")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--patience", type=int, default=10, help="how many violated worlds are enough")
    options = parser.parse_args()
    logging.getLogger("aiolock").addHandler(logging.NullHandler())
    if options.seed is not None:
        outcome = play(options.seed, world)
        for moment, who, what in outcome.log:
            print(f"{moment:12.6f}  {who:20}  {what}")
        for violation in outcome.violations:
            print(f"violated: {violation}")
        return bool(outcome.violations)
    start = time.monotonic()
    seeds = range(options.start, options.start + options.seeds)
    total = explore(seeds, patience=options.patience, world=world)
    for violation in total.violations:
        print(violation)
    took = time.monotonic() - start
    print(
        f"{options.seeds} seeds in {took:.1f} s: {total.seconds / 3600:.1f} virtual hours, {total.grants} grants, "
        f"{total.losses} losses, {total.accidents} accidents, "
        + "".join(f"{count} {what}, " for what, count in sorted(total.together.items()))
        + f"{len(total.violations)} violations"
    )
    return bool(total.violations)


if __name__ == "__main__":
    sys.exit(main())
