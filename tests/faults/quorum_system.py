"""The quorum of a history run: three Redis servers that are one, of which one at a time is hurt.

    python -m tests.faults.quorum_system quorum --seconds 60 --processes 6 --names 12 --seed 1 [--kinds all]

Each worker reaches each server through a proxy of its own; a fault of the network hurts one of a worker's links, or
several. A server that is hurt keeps its data, or comes back without it after a ttl: then every hold that it has
forgotten is over. Neither may show, and neither is an outage: all goes on with the other two.

The one exception is "restart server": one that comes back without its data at once. Whoever had two votes of which this
was one has one, and does not know it before it has asked again, which it does when it is connected again.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager
from functools import partial
from typing import Self

import aiolock
from aiolock.testing.locks import KINDS, all_can_be_had
from tests.faults import run
from tests.faults.injector import Fault, FaultInjector
from tests.faults.proxy import Proxy
from tests.faults.redis_system import RedisSystem
from tests.faults.verdict import RESTART

SERVERS = 3
TTLS = [0.8, 1.2, 1.6]
"""Longer than with one server: each of them is given half of a command's time."""
PROBES = "aiolock-quorum-"
"""What a client that opens takes and gives back, to find out that these are several servers. Of one that is killed just
then it stays, as nobody will ever ask for it again; its hold ends like any other."""
DURABLE = ("--appendfsync", "always")
"""An answer is given when what it says is on the disk."""


class Part(RedisSystem):
    """One of them: it keeps its data, unless that is taken from it."""

    def __init__(self) -> None:
        super().__init__(appendonly=True, extra=DURABLE)

    def empty(self) -> None:
        """Take its data away, while it is down."""
        for path in self.server.folder.glob("appendonly*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def without(self, words: str) -> None:
        """Take away the keys that have these words in their name."""
        with self.admin() as admin:
            for key in admin.scan_iter(f"*{words}*"):
                admin.delete(key)

    async def back(self) -> None:
        """Start it, and wait until it serves, while everything else goes on."""
        child = self.server.children[0]
        child.start()
        while child.running:
            try:
                if self.server._answers(0):
                    return
            except OSError:
                pass
            await asyncio.sleep(0.01)
        raise AssertionError(f"the server did not come back:\n{child.log_tail(20)}")


class Servers:
    """All of them, as one that can be started and stopped."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._running = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as started:
            for part in self._parts:
                started.enter_context(part.server)
            self._running = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()


class QuorumFaultInjector(FaultInjector):
    """The same, for one server at a time instead of the only one; only a bare restart is an outage."""

    system: QuorumSystem  # type: ignore[assignment]  # alike, not related

    def _table(self) -> list[tuple[int, str, Fault]]:
        others = [fault for fault in super()._table() if "server" not in fault[1]]
        return [
            *others,
            (3, "kill a server", self._kill_server),
            (2, "empty a server", self._empty_server),
            (2, "freeze a server, short", partial(self._hurt, self._frozen, (0.1, 0.9))),
            (3, "freeze a server, long", partial(self._hurt, self._frozen, (1.1, 2.0))),
            (2, "black-hole a server", partial(self._hurt, self._unreachable, (0.3, 2.0))),
            (2, "reset a server", partial(self._hurt, self._refusing, (0.05, 1.0))),
            (2, "delay a server", partial(self._hurt, self._late, (0.3, 2.0))),
            (2, RESTART, self._restart),
        ]

    async def _pause(self, rng: random.Random) -> None:
        """Before the next one is hurt: often long enough for all votes to be there again."""
        await asyncio.sleep(rng.choice((0, self.ttl)))

    async def _kill_server(self, rng: random.Random, _name: str) -> bool:
        """It comes back with its data, whether it was killed or stopped in order."""
        part = self.system.choose(rng)
        async with self.system.busy:
            end = rng.choice((part.server.kill, part.server.stop))
            await asyncio.to_thread(end)
            await asyncio.sleep(rng.choice((0, rng.uniform(0, 0.5), rng.uniform(0.5, 2) * self.ttl)))
            await part.back()
            await self._pause(rng)
        return True

    async def _empty_server(self, rng: random.Random, _name: str) -> bool:
        """It comes back without its data, when all that it has granted is over."""
        part = self.system.choose(rng)
        async with self.system.busy:
            await asyncio.to_thread(part.server.kill)
            part.empty()
            await asyncio.sleep(rng.uniform(1.05, 1.5) * self.ttl)
            await part.back()
            await self._pause(rng)
        return True

    async def _hurt(
        self,
        how: Callable[[Part, random.Random], AbstractContextManager[None]],
        share: tuple[float, float],
        rng: random.Random,
        _name: str,
    ) -> bool:
        """One server, or everybody's way to it, for a share of the ttl."""
        part = self.system.choose(rng)
        async with self.system.busy:
            with how(part, rng):
                await asyncio.sleep(rng.uniform(*share) * self.ttl)
            await self._pause(rng)
        return True

    @contextmanager
    def _frozen(self, part: Part, _rng: random.Random) -> Iterator[None]:
        part.server.freeze()
        try:
            yield
        finally:
            part.server.thaw()

    @contextmanager
    def _unreachable(self, part: Part, rng: random.Random) -> Iterator[None]:
        links = self._ways(part)
        for proxy in links:
            proxy.blackhole()
        try:
            yield
        finally:
            late = rng.random() < 0.6
            for proxy in links:
                proxy.heal(release=late)
                if not late:
                    proxy.reset_all()

    @contextmanager
    def _refusing(self, part: Part, _rng: random.Random) -> Iterator[None]:
        links = self._ways(part)
        for proxy in links:
            proxy.reset_all()
            proxy.refuse = True
        try:
            yield
        finally:
            for proxy in links:
                proxy.refuse = False

    @contextmanager
    def _late(self, part: Part, rng: random.Random) -> Iterator[None]:
        lanes = [lane for proxy in self._ways(part) for lane in (proxy.up, proxy.down)]
        latency = rng.choice((rng.uniform(0.01, 0.3), rng.uniform(0.3, 1.5) * self.shortest))
        for lane in lanes:
            lane.delay, lane.jitter = latency, 0.02
        try:
            yield
        finally:
            for lane in lanes:
                lane.delay = lane.jitter = 0.0

    def _ways(self, part: Part) -> list[Proxy]:
        return [victim.proxies[self.system.parts.index(part)] for victim in self.workers]

    async def _restart(self, rng: random.Random, name: str) -> bool:
        """Without its data and at once: alone, so that everybody can find out at once."""
        part = self.system.choose(rng)
        async with AsyncExitStack() as alone:
            await alone.enter_async_context(self.system.busy)
            for victim in self.workers:
                await alone.enter_async_context(victim.busy)
            self.recorder.down(name)
            await asyncio.to_thread(part.server.kill)
            part.empty()
            await asyncio.sleep(rng.choice((0, rng.uniform(0, 0.5))))
            await part.back()
            self.recorder.up(name)
            await asyncio.sleep(self.system.verified_within(self.ttl))
        return True


class QuorumSystem:
    """Three private servers that keep their data."""

    framing = staticmethod(Part.framing)
    namespace = Part.namespace
    injector = QuorumFaultInjector
    fenced = False
    """A server that decides for the first time knows no token that another one gave."""
    placed = staticmethod(Part.placed)
    granted = staticmethod(Part.granted)
    reply = staticmethod(Part.reply)

    def __init__(self) -> None:
        self.parts = [Part() for _ in range(SERVERS)]
        self.server = Servers(self.parts)
        self.busy = asyncio.Lock()
        """Held by whoever hurts a server."""

    def choose(self, rng: random.Random) -> Part:
        """One of them."""
        return rng.choice(self.parts)

    @staticmethod
    def verified_within(ttl: float) -> float:
        """Seconds after which everybody has asked a server that came back without its data; docs/backends/redis.md."""
        return Part.verified_within(ttl)

    def kill_clients(self, kind: str, ending: Callable[[int], object]) -> None:
        """Close all connections of a kind at one of them."""
        random.choice(self.parts).kill_clients(kind, ending)

    def forget_scripts(self) -> None:
        """SCRIPT FLUSH at all of them."""
        for part in self.parts:
            part.forget_scripts()

    def replay(self, *, older: float, most: int) -> int:
        """Late packets, to the servers that they were for."""
        return sum(part.replay(older=older, most=most) for part in self.parts)

    @property
    def replayed(self) -> int:
        """How many there were."""
        return sum(part.replayed for part in self.parts)

    @property
    def foreign(self) -> list[str]:
        """Those that changed somebody's hold."""
        return [each for part in self.parts for each in part.foreign]

    async def hygiene(self, names: Sequence[str], ttl: float) -> list[str]:
        """After all workers have left, no server knows anybody who holds or waits, and every lock can be had."""
        found = [each for part in self.parts for each in part.alive()]
        for part in self.parts:
            part.without(PROBES)
        urls = [part.server.url for part in self.parts]
        async with aiolock.connect(urls, namespace=self.namespace, ttl=5) as client:
            found += await all_can_be_had(client, names, 3 * ttl)
        return found + [each for part in self.parts for each in await part.left()]


def prepare() -> None:
    """Make it known, with the kinds that it has, and with times in which three servers and their proxies can answer."""
    run.SYSTEMS["quorum"] = QuorumSystem
    run.KINDS = tuple(kind for kind in KINDS if kind != "permits")
    run.TTLS[:] = TTLS


def main() -> int:
    """As the history run's."""
    prepare()
    return run.main()


if __name__ == "__main__":
    sys.exit(main())
