"""What goes wrong in a history run: several arms, each hurting one worker, its link or the server at a time.

Every choice comes from a seed; when it takes effect depends on the machine, so a replay is alike but not the same.
A fault is noted in the history before it is done, with the windows that the checker needs: `stop` and `cont` of a
process, `cut` and `mended` of its link, `broken` of one of its connections, `down` and `up` of the server.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Protocol

from aiolock.testing.history import Recorder
from tests.faults.proxy import Lane, Proxy
from tests.faults.redis_system import RedisSystem

TRAP_FOR = 2.0
"""Seconds to wait for the moment that a fault is meant for."""

REPLAYED = 1_500
"""Late requests that are sent again at a time, at most."""


class Victim(Protocol):
    """A worker: the process of the moment, its place in the workers, its links, and what can be done to it."""

    name: str
    proxies: list[Proxy]
    busy: asyncio.Lock
    """Held by the arm that hurts it."""
    trap: Trap | None

    def signal(self, number: int) -> None: ...

    def links(self, rng: random.Random) -> list[Proxy]:
        """Those of its proxies that a fault is for."""

    async def replace(self) -> None:
        """Wait for the death of the process, and start another in its place."""


Moment = Callable[[str, bytes], bool]
"""Whether this is it, given a frame and its direction; "store" is a reading there, and the frame the lock's name."""


class Trap:
    """Does something at the moment in which a frame passes by, or a holder asks the store."""

    def __init__(self, match: Moment, act: Callable[[], object]) -> None:
        self._match, self._act = match, act
        self.sprung = asyncio.Event()

    def frame(self, direction: str, frame: bytes) -> None:
        if not self.sprung.is_set() and self._match(direction, frame):
            self._act()
            self.sprung.set()


Fault = Callable[[random.Random, str], Awaitable[bool]]
"""Done with these choices, under this name; whether it could be done."""


OF_REDIS = ("CLIENT KILL normal", "CLIENT KILL pubsub", "SCRIPT FLUSH", "replay")
"""Faults that only Redis has, and MySQL in ways of its own."""


class FaultInjector:
    """`ttls` are those that workers use, `names` what they lock; the last quarter of these is held for long."""

    def __init__(
        self,
        system: RedisSystem,
        workers: list[Victim],
        recorder: Recorder,
        *,
        seed: int,
        ttls: Sequence[float],
        names: Sequence[str],
        only: Iterable[str] = (),
    ) -> None:
        self.system, self.workers, self.recorder, self.seed = system, workers, recorder, seed
        self.ttl, self.shortest = max(ttls), min(ttls)
        self.names = names
        self.slow = {name.encode() for name in names[len(names) * 3 // 4 :]}
        only = set(only)
        spared = getattr(system, "spares", ())
        self.faults = [
            fault for fault in self._table() if fault[1] not in spared and (not only or fault[1] in only)
        ]
        self._deck: list[tuple[str, Fault]] = []
        self._dealer = random.Random(f"{seed}/injector")

    def _general(self, *without: str) -> list[tuple[int, str, Fault]]:
        """The faults of any server, without some of them."""
        return [fault for fault in FaultInjector._table(self) if fault[1] not in {*OF_REDIS, *without}]

    def _table(self) -> list[tuple[int, str, Fault]]:
        system, long, short = self.system, (1.2, 2.0), (0.2, 0.45)

        def held(direction: str, frame: bytes) -> bool:
            """A holder reads at the store what it is about to write, after a while."""
            return direction == "store" and frame in self.slow

        return [
            (2, "kill anybody", partial(self._kill, None)),
            (2, "kill holder", partial(self._kill, held)),
            (2, "kill waiter", partial(self._kill, system.placed)),
            (3, "kill grantee", partial(self._kill, system.granted)),
            (1, "vanish", self._vanish),
            (3, "stop anybody, short", partial(self._stop, None, short)),
            (2, "stop anybody, long", partial(self._stop, None, long)),
            (3, "stop holder, long", partial(self._stop, held, long)),
            (2, "stop waiter, long", partial(self._stop, system.placed, long)),
            (2, "stop grantee, short", partial(self._stop, system.granted, short)),
            (3, "stop grantee, long", partial(self._stop, system.granted, long)),
            (5, "block loop", self._block),
            (3, "delay", self._delay),
            (3, "reset", self._reset),
            (1, "half-open", self._half_open),
            (3, "black-hole", partial(self._blackhole, None, "both")),
            (5, "black-hole holder", partial(self._blackhole, held, "both")),
            (3, "black-hole up", partial(self._blackhole, None, "up")),
            (3, "black-hole down", partial(self._blackhole, None, "down")),
            (3, "drop reply", partial(self._lose_reply, cut=False)),
            (2, "cut reply", partial(self._lose_reply, cut=True)),
            (2, "slices", self._slices),
            (2, "CLIENT KILL normal", partial(self._kill_clients, "normal")),
            (4, "CLIENT KILL pubsub", partial(self._kill_clients, "pubsub")),
            (3, "SCRIPT FLUSH", self._forget_scripts),
            (3, "replay", self._replay),
            (2, "freeze server, short", partial(self._freeze, short)),
            (1, "freeze server, long", partial(self._freeze, (1.1, 1.5))),
            (2, "restart server", self._restart),
        ]

    async def run(self, until: float, arms: int) -> None:
        """Hurt until then, by `time.monotonic()`, with several arms at once; everything is whole again afterwards."""
        await asyncio.gather(*(self._arm(number, until) for number in range(arms)))

    async def _arm(self, number: int, until: float) -> None:
        rng = random.Random(f"{self.seed}/injector {number}")
        while time.monotonic() < until:
            await asyncio.sleep(rng.expovariate(8))
            name, fault = self._deal()
            if await fault(rng, name):
                self.recorder.note("fault", name=name)

    def _deal(self) -> tuple[str, Fault]:
        """From a shuffled deck: every fault comes as often as its weight says, and none is left out for long."""
        if not self._deck:
            self._deck = [(name, fault) for weight, name, fault in self.faults for _ in range(weight)]
            self._dealer.shuffle(self._deck)
        return self._deck.pop()

    @asynccontextmanager
    async def _somebody(self, rng: random.Random):
        victim = rng.choice([each for each in self.workers if not each.busy.locked()] or self.workers)
        async with victim.busy:
            yield victim

    async def _do(self, victim: Victim, moment: Moment | None, act: Callable[[], object]) -> bool:
        """Act now, or when the moment comes; False if it did not."""
        if moment is None:
            act()
            return True
        victim.trap = trap = Trap(moment, act)
        try:
            async with asyncio.timeout(TRAP_FOR):
                await trap.sprung.wait()
        except TimeoutError:
            pass
        victim.trap = None
        return trap.sprung.is_set()

    # --- processes

    async def _kill(self, moment: Moment | None, rng: random.Random, _name: str) -> bool:
        async with self._somebody(rng) as victim:
            if not await self._do(victim, moment, lambda: self._kill_now(victim)):
                return False
            await victim.replace()
            return True

    def _kill_now(self, victim: Victim) -> None:
        self.recorder.kill(victim.name)
        victim.signal(signal.SIGKILL)

    async def _vanish(self, rng: random.Random, _name: str) -> bool:
        """The machine is gone: the server sees no closing."""
        async with self._somebody(rng) as victim:
            for proxy in victim.proxies:
                proxy.blackhole()
            self._kill_now(victim)
            await asyncio.sleep(rng.uniform(1, 2) * self.ttl)
            for proxy in victim.proxies:
                proxy.heal()
            await victim.replace()
            return True

    async def _stop(
        self, moment: Moment | None, share: tuple[float, float], rng: random.Random, _name: str
    ) -> bool:
        """Short is shorter than half of the shortest ttl, long is longer than the longest."""
        async with self._somebody(rng) as victim:
            if not await self._do(victim, moment, lambda: self._stop_now(victim)):
                return False
            await asyncio.sleep(rng.uniform(*share) * (self.ttl if share[0] > 1 else self.shortest))
            victim.signal(signal.SIGCONT)
            self.recorder.cont(victim.name)
            return True

    def _stop_now(self, victim: Victim) -> None:
        self.recorder.stop(victim.name)
        victim.signal(signal.SIGSTOP)

    async def _block(self, rng: random.Random, _name: str) -> bool:
        async with self._somebody(rng) as victim:
            victim.signal(signal.SIGUSR1)
            await asyncio.sleep(1.5 * self.ttl)
            return True

    # --- links

    @contextmanager
    def _cut(self, victim: Victim):
        name = victim.name
        self.recorder.note("cut", target=name)
        try:
            yield
        finally:
            self.recorder.note("mended", target=name)

    async def _delay(self, rng: random.Random, _name: str) -> bool:
        async with self._somebody(rng) as victim:
            ways = rng.choice((("up",), ("down",), ("up", "down")))
            lanes = _lanes(victim.links(rng), *ways)
            with self._cut(victim):
                latency = rng.choice((rng.uniform(0.01, 0.3), rng.uniform(0.3, 1.5) * self.shortest))
                for lane in lanes:
                    lane.delay, lane.jitter = latency, 0.02
                await asyncio.sleep(rng.uniform(0.3, 1.5))
                for lane in lanes:
                    lane.delay = lane.jitter = 0.0
            return True

    async def _slices(self, rng: random.Random, _name: str) -> bool:
        async with self._somebody(rng) as victim:
            lanes = _lanes(victim.links(rng), "up", "down")
            for lane in lanes:
                lane.slices = rng.choice((1, 3, 7))
            await asyncio.sleep(rng.uniform(0.2, 0.5))
            for lane in lanes:
                lane.slices = 0
            return True

    async def _reset(self, rng: random.Random, _name: str) -> bool:
        async with self._somebody(rng) as victim:
            links = victim.links(rng)
            with self._cut(victim):
                refuse = rng.random() < 0.5
                for proxy in links:
                    proxy.reset_all()
                    proxy.refuse = refuse
                await asyncio.sleep(rng.uniform(0.05, 0.5))
                for proxy in links:
                    proxy.refuse = False
            return True

    async def _half_open(self, rng: random.Random, _name: str) -> bool:
        """The server's side closes and the client does not hear of it, until it asks."""
        async with self._somebody(rng) as victim:
            links = victim.links(rng)
            with self._cut(victim):
                expected = [proxy.connections + proxy.reset_all(proxy.down) for proxy in links]
                for _ in range(60):
                    if all(proxy.connections >= count for proxy, count in zip(links, expected, strict=True)):
                        break
                    await asyncio.sleep(0.1)
            return True

    async def _blackhole(self, moment: Moment | None, way: str, rng: random.Random, _name: str) -> bool:
        """What was held arrives late, or never, and then the connection breaks, as no stream goes on with a hole."""
        async with self._somebody(rng) as victim:
            links = victim.links(rng)
            lanes = _lanes(links, *(("up", "down") if way == "both" else (way,)))
            with self._cut(victim):
                if not await self._do(victim, moment, lambda: [lane.blackhole() for lane in lanes]):
                    return False
                await asyncio.sleep(rng.uniform(0.3, 2) * self.ttl)
                late = rng.random() < 0.6
                for lane in lanes:
                    lane.heal(release=late)
                if not late:
                    for proxy in links:
                        proxy.reset_all()
            return True

    async def _lose_reply(self, rng: random.Random, _name: str, *, cut: bool) -> bool:
        """An answer about a lock is lost, or arrives in part, and its connection breaks."""
        async with self._somebody(rng) as victim:
            lane = rng.choice(victim.proxies).down
            with self._cut(victim):
                if cut:
                    lost = lane.cut_after(rng.randrange(1, 12), self.system.reply)
                else:
                    lost = lane.drop_next(1, self.system.reply, reset=True)
                try:
                    async with asyncio.timeout(TRAP_FOR):
                        await lost.wait()
                except TimeoutError:
                    lane.accidents.clear()
            return lost.is_set()

    # --- the server

    async def _kill_clients(self, kind: str, _rng: random.Random, _name: str) -> bool:
        breaking = getattr(self.system, "breaking", 0.0)
        async with self._alone() if breaking else self.system.busy:
            self.system.kill_clients(kind, self._ending)
            # No link is slow, so every holder can read at once that its connection has ended.
            await asyncio.sleep(breaking)
            return True

    def _ending(self, port: int) -> None:
        """Note whose connection is about to be ended: the others go on, and no overlap of their holds is forgiven."""
        for victim in self.workers:
            if any(port in proxy.ports for proxy in victim.proxies):
                self.recorder.broken(victim.name)

    async def _forget_scripts(self, _rng: random.Random, _name: str) -> bool:
        async with self.system.busy:
            self.system.forget_scripts()
            return True

    async def _replay(self, _rng: random.Random, _name: str) -> bool:
        async with self.system.busy:
            done = 0
            while done < REPLAYED and (some := self.system.replay(older=3 * self.ttl, most=20)):
                done += some
                await asyncio.sleep(0)  # the proxies forward meanwhile
            return done > 0

    async def _freeze(self, share: tuple[float, float], rng: random.Random, name: str) -> bool:
        async with self.system.busy:
            self.recorder.down(name)
            self.system.server.freeze()
            await asyncio.sleep(rng.uniform(*share) * (self.ttl if share[0] > 1 else self.shortest))
            self.system.server.thaw()
            self.recorder.up(name)
            return True

    async def _restart(self, rng: random.Random, name: str) -> bool:
        """Without persistence: all is forgotten."""

        async def restart() -> None:
            self.system.server.kill()
            await asyncio.sleep(rng.choice((0, rng.uniform(0, 0.5))))
            self.system.server.start()

        return await self._void(name, restart)

    @asynccontextmanager
    async def _alone(self):
        """While nothing else is hurt."""
        async with AsyncExitStack() as alone:
            await alone.enter_async_context(self.system.busy)
            for victim in self.workers:
                await alone.enter_async_context(victim.busy)
            yield

    async def _void(self, name: str, lose: Callable[[], Awaitable[None]]) -> bool:
        """Have holds lost, which is an exception; alone, so that everybody can find out at once."""
        async with self._alone():
            self.recorder.down(name)
            await lose()
            self.recorder.up(name)
            await asyncio.sleep(self.system.verified_within(self.ttl))
        # Clients that lose a young connection wait for longer and longer: the next one is to find them calm.
        await asyncio.sleep(2)
        return True


def _lanes(links: Iterable[Proxy], *ways: str) -> list[Lane]:
    return [proxy.up if way == "up" else proxy.down for proxy in links for way in ways]


def send(pid: int, number: int) -> None:
    """A signal to a process that may have ended by itself; whoever waits for it says so."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
