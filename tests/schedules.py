"""Random schedules: small worlds of clients, tasks and accidents in virtual time, replayable by their seed.

Each seed makes a world: one memory server, three to five clients on hosts of their own, a network between them, tasks
that lock and work with all options, and a nemesis. The network delays (also for longer than a ttl), loses requests
and replies, and delivers copies of lost ones late. The nemesis stops hosts (SIGSTOP) and suspends them, cuts them off,
cancels tasks, releases by force and closes clients. In the end it leaves, and everybody has to get what they wait for.

What must hold, checked at every step of the server, at every acquire and at every act of a worker:

* belief: a lease that says ``held`` has its hold on the server, and no incompatible lease says so as well;
* told in time: a holder whose host runs knows of its loss before the next one is granted, and a block that is to be
  cancelled does not act any more;
* tokens are unique, and grow in the order in which holders believe;
* no call outlives its timeout, no cancellation is swallowed, no error comes out that is not documented;
* progress: whoever waits without a timeout is served in the end;
* hygiene: then no hold, place, task, cohort or registration is left.

A release by force may make beliefs overlap for one ttl: for so long the name is exempt. A stopped host cannot be told
anything; it has one pass of its loop after waking, and after suspend the watchdog's next look at the clock.

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
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from random import Random
from typing import Any

from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.backends.memory.machine import Message, Request
from aiolock.client import Client
from aiolock.contract import MUTEX, READ, WRITE, Kind, permits
from aiolock.errors import AcquireTimeout, BackendUnavailable, LockLost
from aiolock.lease import Lease
from aiolock.lock import Lock
from aiolock.reentrant import ReentrantLock
from aiolock.watchdog import LOOK
from tests import virtual
from tests.virtual import Host, VirtualClock

__all__ = ["Outcome", "Violation", "explore", "play"]

EPSILON = 1e-3
"""Seconds that no promise is about: passes of the loop take time."""
LATEST = 50.0
"""Seconds after which no copy of a packet arrives any more; the server's tombstones last longer."""


class Violation(Exception):
    """A promise that was not kept."""


class Nuisance(Exception):
    """The error of a block's own."""


@dataclass
class Outcome:
    """What happened in one world."""

    seed: int
    seconds: float = 0.0
    grants: int = 0
    losses: int = 0
    accidents: int = 0
    violations: list[str] = field(default_factory=list)
    log: list[tuple[float, str, str]] = field(default_factory=list)


class Server(MemoryServer):
    """The memory server, watched at every step, with its messages on the world's network."""

    def __init__(self, world: World, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.world = world
        self.machine = self._machine
        self.left: set[str] = set()
        """Requests that were given up."""
        leave = self.machine.leave

        def remember(key: tuple[str, str], request: Request, *rest: Any, **options: Any) -> None:
            self.left.add(request.id)
            leave(key, request, *rest, **options)

        self.machine.leave = remember

    def attach(self, client: str, deliver: Callable[[Message], None]) -> None:
        post = self.world.post_office(deliver)
        super().attach(client, post)

    def ask(self, question: Callable[[Any, float], Any]) -> Any:
        answer = super().ask(question)
        self.world.compare_beliefs()
        for lock in self.machine.locks.values():
            if not self.left.isdisjoint((*lock.holds, *lock.queue)):
                self.world.violated("server", f"took up a request that was given up: {lock}")
                self.left.clear()
        return answer


class Peer:
    """One client of the world, on a host of its own."""

    def __init__(self, world: World, number: int) -> None:
        random = world.random
        self.world = world
        self.name = f"client-{number}"
        self.host = Host(self.name)
        self.command_timeout = world.unit * random.choice([1 / 3, 1 / 3, 2.0])
        self.cut_until = 0.0
        self.refusing = False
        self.closed = False
        self.last_delivery = 0.0
        self.backend = MemoryBackend(server=world.server, transport=self.carry)
        self.client = Client(
            self.backend,
            ttl=world.unit,
            label=self.name,
            command_timeout=self.command_timeout,
            clock=VirtualClock(offset=random.uniform(0, 1e5)),
            random=Random(random.random()),
        )

    @property
    def cut(self) -> bool:
        return self.world.loop.now < self.cut_until

    async def carry(self, step: Callable[[], Any]) -> Any:
        """The client's end of the network: an answer, or an error after the command timeout."""
        if self.cut and self.refusing:
            raise BackendUnavailable("connection refused")
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[tuple[Any] | None] = loop.create_future()
        timer = loop.call_later(self.command_timeout, self.world.reach, reply, None)
        self.world.send(self, step, reply)
        try:
            answer = await reply
        finally:
            timer.cancel()
        if answer is None:
            raise BackendUnavailable("no answer in time")
        return answer[0]


class Op:
    """One lock that one task takes, and what it knows of it."""

    def __init__(self, peer: Peer, name: str, number: int) -> None:
        self.peer = peer
        self.name = name
        self.number = number
        self.task: asyncio.Task[None] | None = None
        self.cancelled = False
        self.woken_at = 0.0

    def __str__(self) -> str:
        return f"{self.peer.name}/{self.number} {self.name}"


class World:
    """Everything that a seed decides."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.loop = virtual._virtual()
        self.outcome = Outcome(seed)
        self.begin = self.loop.now
        self.unit = random.choice([0.3, 1.0, 1.0, 5.0, 30.0])
        """The usual ttl; every other time in this world is a multiple of it."""
        self.network = Context()
        self.trouble = random.choice([0.0, 0.02, 0.1])
        """How often the network loses something."""
        self.slowness = random.choice([0.0, 0.02, 0.1])
        """How often it takes very long."""
        self.healthy = random.random() < 0.3
        """Nothing happens to the network: then the server knows nothing of anybody soon after he is gone."""
        if self.healthy:
            self.trouble = self.slowness = 0.0
        self.over = False
        self.tidying = False
        self.server = Server(self, VirtualClock(offset=5e6, rate=random.uniform(0.995, 1.005)))
        names: list[tuple[str, Kind]] = [("a", MUTEX), ("b", MUTEX), ("rw", READ), ("rw", WRITE)]
        names += [("sem", permits(count, 3)) for count in (1, 2)]
        self.names = random.sample(names, random.choice([1, 2, 3])) or names
        self.open: dict[Lease, Op] = {}
        self.ops: set[Op] = set()
        self.tokens: dict[str, dict[int, str]] = {}
        self.exclusive_token: dict[str, int] = {}
        self.acted_token: dict[str, int] = {}
        self.forced_until: dict[str, float] = {}
        self.dropped = 0
        self.peers = [Peer(self, number) for number in range(random.randint(3, 5))]
        self.count = 0

    # --- telling

    def log(self, who: object, what: str) -> None:
        self.outcome.log.append((self.loop.now - self.begin, str(who), what))

    def violated(self, who: object, what: str) -> None:
        self.log(who, f"VIOLATION: {what}")
        self.outcome.violations.append(f"{who}: {what}")

    def on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, ResourceWarning) and self.dropped:
            self.dropped -= 1
            return
        self.violated("loop", f"{context.get('message')}: {error!r}")

    # --- the network

    def later(self, delay: float, callback: Callable[..., None], *args: Any) -> None:
        self.loop.call_later(delay, callback, *args, context=self.network)

    def delay(self) -> float:
        if self.random.random() < self.slowness:
            return self.random.uniform(0.1, 1.5) * self.unit
        return self.random.uniform(0.0005, 0.02) * self.unit

    def send(self, peer: Peer, step: Callable[[], Any], reply: asyncio.Future[Any]) -> None:
        there, back, fate = self.delay(), self.delay(), self.random.random()
        if peer.cut or fate < self.trouble / 2:
            if self.random.random() < 0.1:
                self.later(min(LATEST, there + self.random.uniform(0, 3) * self.unit), self.arrive, step)
            return
        lost = fate < self.trouble
        self.later(there, self.arrive, step, None if lost else (peer, back, reply))
        if lost and self.random.random() < 0.3:
            self.later(min(LATEST, there + self.random.uniform(0, 3) * self.unit), self.arrive, step)

    def arrive(
        self, step: Callable[[], Any], answer: tuple[Peer, float, asyncio.Future[Any]] | None = None
    ) -> None:
        result = step()
        if answer is not None and not answer[0].cut:
            self.later(answer[1], self.reach, answer[2], (result,))

    def reach(self, reply: asyncio.Future[tuple[Any] | None], answer: tuple[Any] | None) -> None:
        if not reply.done():
            reply.set_result(answer)

    def post_office(self, deliver: Callable[[Message], None]) -> Callable[[Message], None]:
        """What the server says unasked arrives in its order, late, and sometimes never."""
        host = virtual._host.get()
        assert host is not None
        peer = next(peer for peer in self.peers if peer.host is host)
        context = host.context.copy()

        def post(message: Message) -> None:
            if peer.cut or self.random.random() < self.trouble / 2:
                return
            peer.last_delivery = max(peer.last_delivery, self.loop.now + self.delay())
            self.loop.call_at(peer.last_delivery, deliver, message, context=context)

        return post

    # --- what must hold

    def excused(self, op: Op, name: str) -> bool:
        """Whether nobody could have told this holder, or told it only a moment ago."""
        host = op.peer.host
        return host.stopped or self.loop.now <= host.woke + LOOK + EPSILON or self.forced(name)

    def forced(self, name: str) -> bool:
        return self.loop.now <= self.forced_until.get(name, 0.0)

    def compare_beliefs(self) -> None:
        """Every lease that says ``held`` has its hold on the server."""
        for lease, op in self.open.items():
            if lease.held and not self.forced(op.name):
                claim: Any = lease._term.claim
                lock = self.server.machine.locks.get(claim.key)
                hold = lock.holds.get(claim.request.id) if lock else None
                if hold is None or hold.deadline <= self.server.clock():
                    self.violated(op, f"believes in {lease!r}, and the server does not")
                    self.forced_until[op.name] = self.loop.now + self.unit

    def look_around(self) -> None:
        if not self.tidying:
            self.compare_beliefs()
            self.later(0.05 * self.unit, self.look_around)

    def granted(self, op: Op, lease: Lease, waited_from: tuple[float, float]) -> None:
        """Somebody has got a lease: look at everybody else's."""
        self.outcome.grants += 1
        self.log(op, f"has got {lease!r}")
        host = op.peer.host
        if not lease.held and not lease.lost:
            self.violated(op, f"got {lease!r} that is neither held nor lost")
        if not lease.held and host.away == waited_from[1] and not op.peer.closed and not self.forced(op.name):
            self.violated(op, f"got {lease!r} that is not held")
        for other, holder in self.open.items():
            if holder.name != op.name or other._term is lease._term or compatible(lease, other):
                continue
            if self.forced(op.name):
                continue
            if other.held and lease.held:
                self.violated(op, f"got {lease!r} while {holder} believes in {other!r}")
            if not other._released and other._lost is None and not self.excused(holder, op.name):
                self.violated(op, f"got {lease!r} before {holder} was told of its loss")
        self.check_token(op, lease)
        self.open[lease] = op

    def check_token(self, op: Op, lease: Lease) -> None:
        seen = self.tokens.setdefault(op.name, {})
        if lease.token in seen:
            self.violated(op, f"got token {lease.token}, as {seen[lease.token]} did")
        floor = self.exclusive_token.get(op.name, 0)
        if lease.kind.exclusive:
            floor = max(seen, default=0)
            self.exclusive_token[op.name] = max(floor, lease.token)
        if lease.token <= floor and lease.held and not self.forced(op.name):
            self.violated(op, f"got token {lease.token} after token {floor}")
        seen[lease.token] = str(op)

    def act(self, op: Op, lease: Lease, *, trusting: bool) -> None:
        """A step of work: guarded by ``check()``, or ``trusting`` that a lost block is cancelled."""
        if not trusting and lease.lost:
            return
        if trusting and self.excused(op, op.name):
            return
        if lease.kind.exclusive and not self.forced(op.name):
            highest = self.acted_token.get(op.name, 0)
            if lease.token < highest:
                self.violated(op, f"acts with token {lease.token} after {highest}")
            self.acted_token[op.name] = max(highest, lease.token)

    @contextmanager
    def timed(self, op: Op, what: str, limit: float | None) -> Iterator[tuple[float, float]]:
        """No call outlives its limit; the time in which its host could not run does not count."""
        host = op.peer.host
        start = self.loop.now, host.away
        try:
            yield start
        finally:
            took = self.loop.now - start[0] - (host.away - start[1])
            if limit is not None and took > limit + EPSILON:
                self.violated(op, f"{what} took {took:.3f} s, and had {limit:.3f} s")

    # --- workers

    async def work(self, op: Op, lease: Lease, *, trusting: bool) -> None:
        for _ in range(self.random.choice([0, 1, 2, 3])):
            pause = self.random.choice([0.0, 0.01, 0.2, 0.7, 3.0])
            await asyncio.sleep(pause * self.unit * self.random.random())
            self.act(op, lease, trusting=trusting)
        if self.random.random() < 0.1:
            raise Nuisance
        if self.random.random() < 0.1:
            with self.timed(op, "renew()", op.peer.command_timeout):
                await lease.renew()

    async def one(self, op: Op, kind: Kind) -> None:
        """Ask for one lock in some way, work under it, and give it back in some way."""
        random, client = self.random, op.peer.client
        reentrant = kind is MUTEX and random.random() < 0.2
        timeout = random.choice([None, None, 0.0, 0.05, 0.5, 1.0, 3.0])
        timeout = None if timeout is None else timeout * self.unit
        signal = random.random() < 0.3
        lock = client._lock(
            ReentrantLock if reentrant else Lock,
            kind,
            op.name,
            ttl=self.unit * random.choice([1, 1, 1, 2]),
            timeout=timeout,
            on_loss="signal" if signal else "cancel",
            fair=random.random() < 0.3,
            max_hold=random.choice([None] * 6 + [0.3, 1.0]),
            label=None,
        )
        if lock._terms.max_hold is not None:
            lock._terms.max_hold *= self.unit
        limit = op.peer.command_timeout if timeout == 0.0 else timeout
        style = random.choice(["block", "block", "block", "acquire", "try", "lease", "drop"])
        self.log(op, f"wants {lock!r}, {style}, timeout={timeout}, fair={lock._bid.fair}")
        if style == "block":
            await self.in_block(op, lock, limit, trusting=not signal)
            return
        if style == "try":
            with self.timed(op, "try_acquire", op.peer.command_timeout) as start:
                lease = await lock.try_acquire()
            if lease is None:
                return
        else:
            with self.timed(op, "acquire", limit) as start:
                lease = await lock.acquire()
        self.granted(op, lease, start)
        try:
            if style == "lease":
                async with lease:
                    await self.work(op, lease, trusting=not signal)
            else:
                await self.work(op, lease, trusting=False)
            if style == "drop" and not reentrant:
                self.log(op, f"drops {lease!r}")
                self.dropped += 1
                return
            self.log(op, f"leaves {lease!r}")
        finally:
            self.open.pop(lease)
            if style != "drop" or reentrant or sys.exc_info()[0] is not None:
                with self.timed(op, "release", op.peer.command_timeout):
                    await lease.release(keep=random.choice([0.0, 0.0, 0.0, 0.3]) * self.unit)
                self.spite(op)

    async def in_block(self, op: Op, lock: Lock, limit: float | None, *, trusting: bool) -> None:
        left = None
        lease = None
        try:
            with self.timed(op, "async with", None) as start:
                async with lock as lease:
                    self.check_wait(op, start, limit)
                    self.granted(op, lease, start)
                    try:
                        if isinstance(lock, ReentrantLock):
                            async with lock as inner:
                                if inner.token != lease.token:
                                    self.violated(op, "levels of one hold have different tokens")
                                await self.work(op, inner, trusting=trusting)
                        await self.work(op, lease, trusting=trusting)
                    finally:
                        left = self.loop.now, op.peer.host.away
                        self.log(op, f"leaves {lease!r}")
        except AcquireTimeout:
            self.check_wait(op, start, limit)
            raise
        finally:
            if lease is not None:
                self.open.pop(lease, None)
            if left is not None:
                self.check_wait(op, left, op.peer.command_timeout)
                self.spite(op)

    def spite(self, op: Op) -> None:
        """Sometimes, whoever may just have been given the lock is cancelled in this very step."""
        if self.random.random() < 0.2:
            others = [other for other in self.ops if other.peer is op.peer and other.name == op.name]
            others = sorted((other for other in others if other is not op), key=lambda other: other.number)
            if others:
                self.cancel_one(self.random.choice(others))

    def check_wait(self, op: Op, start: tuple[float, float], limit: float | None) -> None:
        took = self.loop.now - start[0] - (op.peer.host.away - start[1])
        if limit is not None and took > limit + EPSILON:
            self.violated(op, f"a call took {took:.3f} s, and had {limit:.3f} s")

    async def attempt(self, op: Op, kind: Kind) -> None:
        """One operation with the errors that it may end with."""
        try:
            await self.one(op, kind)
        except asyncio.CancelledError:
            self.log(op, "was cancelled")
            if not op.cancelled and not op.peer.closed:
                self.violated(op, "a cancellation came out that nobody asked for")
            raise
        except LockLost as error:
            self.log(op, f"lost: {error.reason}")
            self.outcome.losses += 1
            if error.reason == "closed" and not op.peer.closed:
                self.violated(op, "lost a lock to a closing that never was")
        except (AcquireTimeout, BackendUnavailable, Nuisance) as error:
            self.log(op, f"ended with {type(error).__name__}")
        except RuntimeError as error:
            self.log(op, f"ended with {error}")
            if not op.peer.closed:
                self.violated(op, f"{error!r}")
        except Exception as error:
            self.violated(op, f"ended with {error!r}")

    async def worker(self, peer: Peer) -> None:
        random = self.random
        for _ in range(random.randint(1, 6)):
            if self.over:
                return
            await asyncio.sleep(random.choice([0.0, 0.0, 0.1, 1.0]) * random.random() * self.unit)
            self.count += 1
            name, kind = random.choice(self.names)
            op = Op(peer, name, self.count)
            op.task = asyncio.create_task(self.attempt(op, kind), name=str(op))
            self.ops.add(op)
            await asyncio.wait([op.task])
            self.ops.discard(op)
            if op.cancelled and not op.task.cancelled():
                self.violated(op, "swallowed a cancellation")
            if not op.task.cancelled():
                op.task.result()

    # --- the nemesis

    async def nemesis(self, until: float) -> None:
        random = self.random
        acts: list[Callable[[], Coroutine[Any, Any, None] | None]]
        acts = [self.stop, self.suspend, self.cancel, self.cancel, self.force, self.close]
        if not self.healthy:
            acts += [self.cut, self.outage]
        acts = random.sample(acts, random.randint(1, 4))
        pause = random.choice([0.2, 1.0, 4.0]) * self.unit
        running = set()
        while self.loop.now < until:
            await asyncio.sleep(pause * random.random())
            self.outcome.accidents += 1
            accident = random.choice(acts)()
            if accident is not None:
                running.add(asyncio.create_task(accident))
        for accident in running:
            await accident
        for peer in self.peers:
            peer.cut_until = 0.0
        self.trouble = self.slowness = 0.0
        if self.healthy:
            self.over = True
            for op in sorted(self.ops, key=lambda op: op.number):
                self.cancel_one(op)
        self.log("nemesis", "leaves")

    def stop(self, *, suspended: bool = False) -> Coroutine[Any, Any, None] | None:
        host = self.random.choice(self.peers).host
        return None if host.stopped else self.hold_back(host, suspended=suspended)

    def suspend(self) -> Coroutine[Any, Any, None] | None:
        return self.stop(suspended=True)

    async def hold_back(self, host: Host, *, suspended: bool) -> None:
        self.log("nemesis", f"stops {host.name}")
        host.stop()
        await asyncio.sleep(self.random.choice([0.1, 1.0, 2.0]) * self.random.random() * self.unit)
        self.log("nemesis", f"resumes {host.name}{' after suspend' if suspended else ''}")
        host.resume(suspended=suspended)

    def cut(self) -> None:
        peer = self.random.choice(self.peers)
        peer.refusing = self.random.random() < 0.5
        peer.cut_until = self.loop.now + self.random.random() * 2 * self.unit
        self.log("nemesis", f"cuts {peer.name} off{', refusing' if peer.refusing else ''}")

    def outage(self) -> None:
        self.log("nemesis", "takes the server away")
        until = self.loop.now + self.random.random() * 2 * self.unit
        refusing = self.random.random() < 0.5
        for peer in self.peers:
            peer.refusing, peer.cut_until = refusing, until

    def cancel(self) -> None:
        ops = [op for op in self.ops if not op.peer.host.stopped]
        if not ops:
            return
        self.cancel_one(self.random.choice(sorted(ops, key=lambda op: op.number)))

    def cancel_one(self, op: Op) -> None:
        assert op.task is not None
        if op.task.cancel():
            op.cancelled = True
            self.log("nemesis", f"cancels {op}")

    def force(self) -> Coroutine[Any, Any, None] | None:
        name, kind = self.random.choice(self.names)
        lock = self.peers[0].client._lock(Lock, kind, name, *[None] * 3, False, None, None)
        claim: Any = self.peers[0].backend.claim(lock._bid)
        self.log("nemesis", f"releases {name} by force")
        self.forced_until[name] = self.loop.now + 2 * self.unit
        self.server.ask(lambda machine, now: machine.force(claim.key, now))
        return None

    def close(self) -> Coroutine[Any, Any, None] | None:
        peer = self.random.choice(self.peers)
        return None if peer.closed or self.random.random() < 0.7 else self.close_now(peer)

    async def close_now(self, peer: Peer) -> None:
        self.log("nemesis", f"closes {peer.name}")
        peer.closed = True
        op = Op(peer, "aclose", 0)
        with self.timed(op, "aclose", peer.command_timeout):
            await peer.host.run(peer.client.aclose())

    # --- from beginning to end

    async def live(self) -> Outcome:
        self.loop.set_exception_handler(self.on_error)
        random = self.random
        self.look_around()
        try:
            for peer in self.peers:
                await peer.host.run(peer.client.open())
            workers = [
                peer.host.run(self.worker(peer)) for peer in self.peers for _ in range(random.randint(1, 3))
            ]
            nemesis = asyncio.create_task(
                self.nemesis(self.loop.now + random.choice([2, 5, 10]) * self.unit), name="nemesis"
            )
            await asyncio.wait([nemesis])
            nemesis.result()
            _, late = await asyncio.wait(workers, timeout=200 * self.unit)
            if late:
                waiting = ", ".join(str(op) for op in sorted(self.ops, key=lambda op: op.number))
                self.violated("progress", f"never served: {waiting}")
                return self.outcome
            for worker in workers:
                worker.result()
            await self.tidy()
        except Exception as error:
            self.violated("world", repr(error))
        finally:
            self.outcome.seconds = self.loop.now - self.begin
        return self.outcome

    async def tidy(self) -> None:
        """Nothing is left: first in the clients, then on the server, then of the clients."""
        self.tidying = True
        if self.healthy:
            await asyncio.sleep(0.35 * self.unit)
            self.empty_server()
        await asyncio.sleep(3 * self.unit)
        for peer in self.peers:
            runtime = peer.client._runtime
            self.nothing(peer.name, "cohorts", runtime.shared, runtime.contenders)
            self.nothing(peer.name, "clean-ups", runtime.cleanups)
            self.nothing(peer.name, "blocks", runtime.inside)
            if len(runtime.watchdog) or runtime.watchdog._calm or runtime.watchdog._watched:
                self.violated(peer.name, "watches terms of nobody")
        # A place of which nobody could say that it was given up lapses when its turn has come, one after the other.
        for _ in range(4 + self.count):
            self.advance()
            await asyncio.sleep(2 * self.unit)
        self.empty_server()
        await asyncio.sleep(LATEST)
        for peer in self.peers:
            if peer.backend._claims and self.healthy:
                # Errors and the frames that they went through hold each other.
                gc.collect()
                self.nothing(peer.name, "registrations", list(peer.backend._claims))
        for peer in self.peers:
            if not peer.closed:
                await self.close_now(peer)
            self.nothing(peer.name, "tasks", peer.client._runtime.tasks)
        self.nothing("loop", "tasks", asyncio.all_tasks() - {asyncio.current_task()})

    def advance(self) -> None:
        for key in list(self.server.machine.locks):
            self.server.ask(lambda machine, now, key=key: machine.advance(key, now))

    def empty_server(self) -> None:
        self.advance()
        self.nothing("server", "locks", self.server.machine.locks)

    def nothing(self, who: str, what: str, *things: Any) -> None:
        for thing in things:
            if thing:
                self.violated(who, f"{what} left: {thing!r}")


def compatible(one: Lease, other: Lease) -> bool:
    """Whether both may be held at once: readers; permits are counted by the server, which beliefs are compared with."""
    return not (one.kind.exclusive or other.kind.exclusive)


def play(seed: int) -> Outcome:
    """Live through the world of a seed."""

    async def main() -> Outcome:
        return await World(seed).live()

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        try:
            return virtual.run(main(), debug=False)
        except virtual.Deadlock as error:
            return Outcome(seed, violations=[f"deadlock: {error}"])


def explore(seeds: range, *, patience: int = 1) -> Outcome:
    """Live through many worlds until ``patience`` of them were violated; the sums of what happened."""
    total = Outcome(seeds.start)
    for seed in seeds:
        outcome = play(seed)
        total.seconds += outcome.seconds
        total.grants += outcome.grants
        total.losses += outcome.losses
        total.accidents += outcome.accidents
        if outcome.violations:
            total.violations += [f"seed {seed}: {violation}" for violation in outcome.violations]
            patience -= 1
            if not patience:
                break
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.schedules", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="print the log of this world")
    parser.add_argument("--seeds", type=int, default=2000, help="how many worlds")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--patience", type=int, default=10, help="how many violated worlds are enough")
    options = parser.parse_args()
    logging.getLogger("aiolock").addHandler(logging.NullHandler())
    if options.seed is not None:
        outcome = play(options.seed)
        for moment, who, what in outcome.log:
            print(f"{moment:12.6f}  {who:20}  {what}")
        for violation in outcome.violations:
            print(f"violated: {violation}")
        return bool(outcome.violations)
    start = time.monotonic()
    total = explore(range(options.start, options.start + options.seeds), patience=options.patience)
    for violation in total.violations:
        print(violation)
    took = time.monotonic() - start
    print(
        f"{options.seeds} seeds in {took:.1f} s: {total.seconds / 3600:.1f} virtual hours, {total.grants} grants, "
        f"{total.losses} losses, {total.accidents} accidents, {len(total.violations)} violations"
    )
    return bool(total.violations)


if __name__ == "__main__":
    sys.exit(main())
