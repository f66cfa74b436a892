"""What the tasks of a schedule do together: several locks at once, a latch, a barrier, and asking holders to let go.

Each world takes up some of it beside its locks, and then there must be

* several locks: each part keeps what ``invariants`` says of a lock, and the whole is held as long as all of its parts are;
* a latch: what is left lies between what has certainly counted and what may have counted, each request once; it never
  rises, and whoever waits goes on when it is zero, and not before;
* a barrier: no more have passed than rounds were full, each from a place of its own; nobody who was told that the round was
  not complete has passed it; and none is passed that fewer are at than it needs;
* a request to let go: a holder sees none that nobody made, and in healthy worlds it sees each in time.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiolock.errors import BackendUnavailable, BarrierBroken, WaitTimeout
from aiolock.kinds.multi import JointLease, lock_all
from aiolock.kinds.rwlock import WriteLock
from aiolock.lease import Lease
from aiolock.lock import Lock
from aiolock.types import MUTEX, WRITE, Family, Kind, permits
from tests.simulation.invariants import Moment, Op

if TYPE_CHECKING:
    from tests.simulation.world import Peer, World

__all__ = ["Primitives"]

PARTS: tuple[tuple[str, Kind], ...] = (("a", MUTEX), ("b", MUTEX), ("rw", WRITE), ("sem", permits(1, 3)))
RECENT = 3.0
"""Units after which whoever left a barrier has been heard of in a healthy world, also if its host was stopped."""
GRACE = 0.05
"""Seconds for which a party finds out at the end of its time what came of its round."""


class Primitives:
    """What one world has of it."""

    def __init__(self, world: World) -> None:
        random = world.random
        self.world = world
        ways = {"all": self.several, "latch": self.at_latch, "barrier": self.at_barrier, "ask": self.ask}
        self.ways: dict[str, Callable[[Peer, Op], Awaitable[None]]] = {
            name: ways[name] for name in random.sample(list(ways), random.choice([0, 0, 1, 2, 4]))
        }
        self.share = random.choice([0.2, 0.5, 0.8])
        """How much of what is done is of this kind."""
        self.pool = random.choice([PARTS, PARTS[:2]])
        self.latch = Tally(random.choice([2, 4, 7]), random.choice([0, 3, 6]))
        self.parties = random.choice([1, 2, 2, 3])
        self.rounds = Rounds()
        self.asked: dict[str, set[str]] = {}
        """What was said to the holders of each lock."""
        self.over = False
        """Nobody is under way any more, and nobody will be."""

    def draw(self) -> str | None:
        """Which of these is done next, or none of them."""
        random = self.world.random
        return random.choice(list(self.ways)) if self.ways and random.random() < self.share else None

    async def play(self, way: str, peer: Peer, op: Op) -> None:
        """Do it, with whatever it ends with."""
        await self.ways[way](peer, op)

    # --- several locks

    async def several(self, peer: Peer, op: Op) -> None:
        """Some locks in any order, under one timeout, in a block or without."""
        world, random, unit = self.world, self.world.random, self.world.unit
        wishes = random.sample(self.pool, min(len(self.pool), random.choice([1, 2, 2, 3])))
        timeout = random.choice([None, None, None, 0.0, 0.5 * unit, 3 * unit])
        locks = [
            peer.client._lock(
                WriteLock if kind is WRITE else Lock,
                kind,
                name,
                {
                    "ttl": unit * random.choice([1, 1, 2]),
                    "on_loss": "cancel",
                    "fair": random.random() < 0.3,
                },
            )
            for name, kind in wishes
        ]
        whole = lock_all(*locks, timeout=timeout)
        style = random.choice(["block", "block", "acquire", "try"])
        world.log(op, f"wants {whole!r}, {style}, timeout={timeout}")
        invariants = world.invariants
        limit = peer.command_timeout if timeout == 0.0 or style == "try" else timeout
        lease, began = None, invariants.moment(op)
        try:
            if style == "block":
                async with whole as lease:
                    invariants.in_time(op, "async with", began, limit)
                    await self._have(peer, op, lease, began, trusting=True)
                    left = invariants.moment(op)
                invariants.in_time(op, "leaving", left, peer.command_timeout)
                return
            lease = await (whole.try_acquire() if style == "try" else whole.acquire())
            invariants.in_time(op, "acquire", began, limit)
            if lease is None:
                return
            try:
                await self._have(peer, op, lease, began, trusting=False)
            finally:
                with invariants.timed(op, "release", peer.command_timeout):
                    await lease.release()
        finally:
            if lease is None:
                invariants.in_time(op, "acquire", began, limit)
            world.injector.cancel_successor(op)

    async def _have(self, peer: Peer, op: Op, lease: JointLease, began: Moment, *, trusting: bool) -> None:
        world, random = self.world, self.world.random
        world.outcome.together["several locks"] += len(lease.parts) > 1
        parts = {part: Op(peer.host, part.name, op.number) for part in lease.parts}
        for part, of in parts.items():
            world.invariants.granted(of, part, began)
        try:
            for _ in range(random.choice([0, 1, 2])):
                await asyncio.sleep(random.choice([0.0, 0.2, 0.7, 3.0]) * random.random() * world.unit)
                for part, of in parts.items():
                    world.invariants.act(of, part, trusting=trusting)
                if lease.held != all(part.held for part in lease.parts):
                    world.violated(op, f"{lease!r} is held, and its parts are not, or the other way round")
        finally:
            for part in parts:
                del world.invariants.open[part]

    # --- the latch

    async def at_latch(self, peer: Peer, op: Op) -> None:
        """Count down, with a name or without, look, or wait."""
        world, random, unit = self.world, self.world.random, self.world.unit
        tally, latch = self.latch, peer.client.latch("latch", self.latch.count)
        what = random.choice(["count down", "count down", "wait", "wait", "look"])
        if what == "count down":
            request = random.choice([None, f"r{random.randrange(tally.names)}"]) if tally.names else None
            await self._count_down(peer, op, request)
            return
        with tally.looking() as upper:
            if what == "look":
                with world.invariants.timed(op, "count()", peer.command_timeout):
                    rest = await latch.count()
            else:
                timeout = random.choice([None, 0.0, 0.1 * unit, unit])
                limit = peer.command_timeout if timeout == 0.0 else timeout
                world.log(op, f"waits for the latch, {timeout}")
                with world.invariants.timed(op, "wait()", limit):
                    await latch.wait(timeout)
                rest = 0
            world.outcome.together["open latches"] += rest == 0
            self._compare(op, what, rest, upper())

    async def _count_down(self, peer: Peer, op: Op, request: str | None) -> None:
        world, tally = self.world, self.latch
        name = request or f"{op} by itself"
        n = tally.attempt(name)
        world.log(op, f"counts down by {n} as {request}")
        with tally.looking() as upper, world.invariants.timed(op, "count_down()", peer.command_timeout):
            rest = await peer.client.latch("latch", tally.count).count_down(n, request_id=request)
            tally.certain.add(name)
            self._compare(op, "count_down", rest, upper())

    def _compare(self, op: Op, what: str, rest: int, upper: int) -> None:
        lower = self.latch.left(self.latch.attempted)
        self.world.log(op, f"{what}: {rest} are left")
        if not lower <= rest <= upper:
            self.world.violated(op, f"{what}: {rest} are left, and it should be from {lower} to {upper}")
        self.latch.least = min(self.latch.least, rest)

    # --- the barrier

    async def at_barrier(self, peer: Peer, op: Op) -> None:
        """Arrive, and pass with the others or not."""
        unit = self.world.unit
        await self._arrive(peer, op, self.world.random.choice([None, 0.0, 0.1 * unit, unit, 3 * unit]))

    async def _arrive(self, peer: Peer, op: Op, timeout: float | None) -> None:
        world, rounds = self.world, self.rounds
        barrier = peer.client.barrier("barrier", self.parties, ttl=2 * world.unit)
        limit = peer.command_timeout if timeout == 0.0 else timeout
        world.log(op, f"arrives, {timeout}")
        rounds.there.add(op)
        unknown = False
        try:
            with world.invariants.timed(op, "barrier", None if limit is None else limit + GRACE):
                place = await barrier.wait(timeout)
        except BarrierBroken:
            raise
        except WaitTimeout as error:
            unknown = "not known" in str(error) or "did not answer" in str(error)
            raise
        except BaseException:
            # It was cancelled, or its client closed or cut off: the others may have passed.
            unknown = True
            raise
        else:
            world.log(op, f"passes from place {place}")
            rounds.places[place] += 1
            world.outcome.together["passed barriers"] += self.parties > 1
            if rounds.places[place] > rounds.passed:
                world.violated(op, f"passed from place {place}, as {rounds.passed} rounds did before")
        finally:
            rounds.there.discard(op)
            rounds.left.append(world.loop.now)
            rounds.unknown += unknown

    # --- asking holders

    async def ask(self, peer: Peer, op: Op) -> None:
        """Ask whoever holds one of the locks to let go."""
        world = self.world
        name, kind = world.random.choice(world.names)
        lock = peer.client._lock(Lock, kind, name, {})
        reason = f"says {op}"
        self.asked.setdefault(name, set()).add(reason)
        # An error that comes out keeps what is here, and must not keep a lease that somebody drops.
        before = [
            weakref.ref(lease)
            for lease, holder in world.invariants.open.items()
            if holder.name == name and lease.held
        ]
        with world.invariants.timed(op, "request_release()", peer.command_timeout):
            told = await lock.request_release(reason)
        world.log(op, f"asks the holders of {name}: {told}")
        world.outcome.together["requests"] += told
        if told and world.healthy:
            for known in before:
                world.network.later(0.5 * world.unit, self._must_know, known, world.loop.now)

    def _must_know(self, known: weakref.ref[Lease], asked: float) -> None:
        """Half a ttl later: who still holds it has heard of it, unless something kept it from that."""
        lease, invariants = known(), self.world.invariants
        holder = None if lease is None else invariants.open.get(lease)
        if lease is None or holder is None or holder.host.stopped or holder.host.woke >= asked:
            return
        if lease.held and not invariants.forced(holder.name) and not lease.release_requested:
            self.world.violated(holder, f"was asked for {lease!r} long ago and has not heard of it")

    def look_at(self, op: Op, lease: Lease) -> None:
        """A holder looks whether it was asked, and by whom."""
        reason = lease.release_requested.reason
        if reason is not None and reason not in self.asked.get(op.name, ()):
            self.world.violated(op, f"was asked {reason!r}, which nobody did")

    # --- time goes on

    def look(self) -> None:
        """After each step of the server: was a round passed, and were its parties there?"""
        world, rounds = self.world, self.rounds
        key = world.peers[0].backend.key("barrier", Family.BARRIER) if world.peers else None
        paper = world.server.machine.registers.stored.get(key)
        if paper is None or paper.stamp == rounds.stamp:
            return
        rounds.stamp = paper.stamp
        passed = rounds.read(json.loads(paper.value)["body"])
        if not passed:
            return
        recently = [left for left in rounds.left if left > world.loop.now - RECENT * world.unit]
        there = len(rounds.there) + len(recently)
        if world.healthy and there < self.parties:
            world.violated("barrier", f"{there} of {self.parties} were there when it was passed")

    async def finish(self) -> None:
        """Have whoever waits at the latch and the barrier go on, until it is over; if somebody has an open client."""
        world, number = self.world, 0
        while not self.over:
            open_peers = [peer for peer in world.peers if peer.host not in world.invariants.closed]
            if not open_peers:
                return
            number -= 1
            peer = open_peers[number % len(open_peers)]
            op = Op(peer.host, "end", number)
            for work in (self._count_down(peer, op, None), self._arrive(peer, op, world.unit)):
                task = peer.host.run(work)
                await asyncio.wait([task])
                if (error := task.exception()) is not None and not isinstance(
                    error, BarrierBroken | WaitTimeout | BackendUnavailable
                ):
                    world.violated(op, f"{error!r}")
            await asyncio.sleep(world.unit)

    def close(self) -> None:
        """Nobody is under way: do the accounts agree?"""
        rounds = self.rounds
        passed = rounds.passed * self.parties
        if passed > sum(rounds.places.values()) + rounds.unknown:
            self.world.violated(
                "barrier",
                f"{rounds.passed} rounds of {self.parties} were passed: {dict(rounds.places)} say so, {rounds.unknown} do not "
                "know, and the others were told that it was not complete",
            )


class Tally:
    """What is known of a latch: which counts were tried, and which have certainly counted."""

    def __init__(self, count: int, names: int) -> None:
        self.count = count
        self.names = names
        """How many names there are for counts."""
        self.attempted: set[str] = set()
        self.certain: set[str] = set()
        self.least = count
        """The lowest number that somebody was told."""
        self._weights: dict[str, int] = {}

    def attempt(self, name: str) -> int:
        """Somebody counts down under that name: by how many."""
        self.attempted.add(name)
        return self._weights.setdefault(name, 1 + len(self._weights) % 2)

    def left(self, names: set[str]) -> int:
        """What is left after these counts."""
        return max(0, self.count - sum(self._weights[name] for name in names))

    def looking(self) -> _Looking:
        """A look begins now."""
        return _Looking(self)


class _Looking:
    """What was known when a look began, for what it may tell at most."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._before = min(tally.least, tally.left(tally.certain))

    def __enter__(self) -> Callable[[], int]:
        return lambda: self._before

    def __exit__(self, *_: object) -> None:
        """Nothing to do."""


class Rounds:
    """What is known of a barrier: the rounds that the server says were passed, and the places of those who passed."""

    def __init__(self) -> None:
        self.stamp = ""
        self.passed = 0
        self.places: Counter[int] = Counter()
        self.unknown = 0
        """How many ended without knowing whether they had passed."""
        self.there: set[Op] = set()
        self.left: list[float] = []
        self._next = 1

    def read(self, body: dict[str, Any]) -> int:
        """How many rounds more were passed than when it was read last."""
        if not body:
            # Somebody wrote it before anybody arrived, so that nobody does who has given up.
            return 0
        broken = {number for number, _ in body["broken"]}
        new = sum(number not in broken for number in range(self._next, body["round"]))
        self._next = body["round"]
        self.passed += new
        return new
