"""The ensemble of a history run: how its frames look, what hurts it, and what must be left at the end: nothing.

python -m tests.faults.zookeeper_system zookeeper --seconds 60 --processes 8 --names 16 --seed 1

Three servers that keep their data, of which one at a time is killed or stopped. Half of the workers know one of them,
through their proxy; the others know all.
"""

from __future__ import annotations

import asyncio
import random
import struct
import sys
from collections.abc import Sequence
from typing import Self

import aiolock
from aiolock.testing.locks import all_can_be_had
from tests.faults import run
from tests.faults.proxy import length_frames
from tests.faults.system import System
from tests.servers import ZooKeeper, ask

SESSION = 3.0
"""Seconds; what all holds live in, whatever ttl is asked for."""

GET = struct.pack("!i", 4)
EVENT, DELETED = struct.pack("!i", -1), struct.pack("!i", 2)

FAULTS = (
    "kill anybody",
    "kill holder",
    "kill waiter",
    "kill grantee",
    "vanish",
    "stop anybody, short",
    "stop anybody, long",
    "stop holder, long",
    "stop waiter, long",
    "stop grantee, short",
    "stop grantee, long",
    "block loop",
    "delay",
    "reset",
    "half-open",
    "black-hole",
    "black-hole holder",
    "black-hole up",
    "black-hole down",
    "drop reply",
    "cut reply",
    "slices",
    "freeze server, short",
    "freeze server, long",
    "restart server",
)
"""Those of the table that there are here."""


class OneByChance:
    """Three servers, of which every verb without a number means one by chance; goes before their class."""

    def __init__(self) -> None:
        super().__init__(3)
        self._victim = 0
        self._turn = 0

    @property
    def port(self) -> int:
        """Another one each time, so that proxies lead to all of them."""
        self._turn += 1
        return self.ports[self._turn % 3]

    def start(self, index: int | None = None) -> Self:
        if index is None and any(child.running for child in self.children):
            # Not waited for: a server that returns to an ensemble in need takes its time.
            self.children[self._victim].start()
            return self
        return super().start(index)

    def kill(self, index: int | None = None) -> None:
        super().kill(self._choose(index))

    def freeze(self, index: int | None = None) -> None:
        super().freeze(self._choose(index))

    def thaw(self, index: int | None = None) -> None:
        super().thaw(self._victim if index is None else index)

    def _choose(self, index: int | None) -> int:
        self._victim = random.randrange(3) if index is None else index
        return self._victim


class Ensemble(OneByChance, ZooKeeper):
    """An ensemble of three."""


class SystemOfThree(System):
    """Three private servers, of which half of the workers know one."""

    @staticmethod
    def verified_within(ttl: float) -> float:  # noqa: ARG004 - it is asked of every system
        """A restart is no exception here: nothing is lost with a server."""
        return 0.0

    def url(self, host: str, port: int, number: int, seed: int) -> str:  # noqa: ARG002 - as above
        """Where a worker connects."""
        others = "".join(f",127.0.0.1:{each}" for each in self.server.ports) if number % 2 else ""
        scheme = self.server.url.partition(":")[0]
        return f"{scheme}://{host}:{port}{others}"

    def start_all(self) -> None:
        """Start the servers that a fault has ended."""
        for child in self.server.children:
            if not child.running:
                child.start()


class ZooKeeperSystem(SystemOfThree):
    """One private ensemble."""

    framing = staticmethod(length_frames)

    def __init__(self) -> None:
        super().__init__(Ensemble())

    def url(self, host: str, port: int, number: int, seed: int) -> str:
        """Where a worker connects."""
        return f"{super().url(host, port, number, seed)}?session_timeout={SESSION}&tick_time=0.5"

    @staticmethod
    def placed(direction: str, frame: bytes) -> bool:
        """Somebody looks at whoever is before."""
        return direction == "up" and frame[8:12] == GET

    @staticmethod
    def granted(direction: str, frame: bytes) -> bool:
        """Somebody who waits is told that the one before has gone."""
        return direction == "down" and frame[4:8] == EVENT and frame[20:24] == DELETED

    @staticmethod
    def reply(frame: bytes) -> bool:
        """An answer with a Stat or a list, which is one that matters."""
        return len(frame) > 80 and frame[4:8] != EVENT

    async def hygiene(self, names: Sequence[str], ttl: float) -> list[str]:
        """After all workers have left: no node and no watch is left, and every lock can be had."""
        self.start_all()
        found: list[str] = []
        async with aiolock.connect(self.server.url, namespace=self.namespace, command_timeout=20) as client:
            for _ in range(100):
                left = await client.locks()
                if not left:
                    break
                await asyncio.sleep(0.1)
            found += [f"hygiene: left in {info.name!r}: {info}" for info in left]
            found += await all_can_be_had(client, names, 3 * ttl)
        for port in self.server.ports:
            for _ in range(50):
                watches = ask(("127.0.0.1", port), b"wchs").decode(errors="replace")
                if "Total watches:0" in watches:
                    break
                await asyncio.sleep(0.1)
            else:
                found.append(f"hygiene: the server at port {port} still has watches: {watches}")
        return found


def prepare() -> None:
    """Sessions are longer than the holds that other servers are tested with."""
    run.SYSTEMS["zookeeper"] = ZooKeeperSystem
    run.TTLS[:] = [SESSION]


def main() -> int:
    prepare()
    if "--only" not in sys.argv:
        sys.argv += [word for fault in FAULTS for word in ("--only", fault)]
    return run.main()


if __name__ == "__main__":
    sys.exit(main())
