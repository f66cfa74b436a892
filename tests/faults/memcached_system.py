"""The memcached of a history run: how its frames look, what hurts it, and what must be left at the end: nothing.

A server that forgets is the exception of the page: exclusion and the order of tokens are not asked for while it does and until
every holder has looked. Everything else is asked for always, and outside of these windows all of it.

python -m tests.faults.memcached_system memcached --seconds 60 --processes 6 --names 12 --seed 1
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from functools import partial
from urllib.parse import unquote

from aiolock.backends.transport import LONGEST_PAUSE
from tests.faults import run
from tests.faults.injector import Fault, FaultInjector
from tests.faults.proxy import memcached_frames
from tests.faults.system import System
from tests.faults.verdict import DELETED, FLUSHED, STOPPED
from tests.servers import Memcached

QUEUE, HOLDS = b'"q":[', b'"h":['
"""How a queue and holds stand in the value of a lock row."""


class MemcachedInjector(FaultInjector):
    """Hurts processes, links, and the server, which forgets in all the ways in which it can."""

    system: MemcachedSystem  # type: ignore[assignment]  # alike, not related

    def _table(self) -> list[tuple[int, str, Fault]]:
        return [
            *self._general("freeze server, short", "freeze server, long"),
            (2, FLUSHED, self._flush),
            (3, DELETED, self._delete),
            # What it writes when it goes on may expire at once: an exception, however short it was stopped.
            (2, STOPPED, partial(self._stop_server, (0.2, 1.5))),
        ]

    async def _flush(self, _rng: random.Random, name: str) -> bool:
        async def flush() -> None:
            self.system.say(b"flush_all\r\n", b"OK\r\n")

        return await self._void(name, flush)

    async def _delete(self, rng: random.Random, name: str) -> bool:
        """Delete some items of locks, of sessions, or of both, as eviction does."""
        which, share = rng.choice(("/l/", "/s/", "/")), rng.choice((0.5, 1.0))

        async def delete() -> None:
            keys = [key for key in self.system.rows() if which in key and rng.random() < share]
            self.system.say("".join(f"md {key} q\r\n" for key in keys).encode() + b"mn\r\n", b"MN\r\n")

        return await self._void(name, delete)

    async def _stop_server(self, share: tuple[float, float], rng: random.Random, name: str) -> bool:
        async def stop() -> None:
            self.system.server.freeze()
            await asyncio.sleep(rng.uniform(*share) * self.ttl)
            self.system.server.thaw()

        return await self._void(name, stop)


class MemcachedSystem(System):
    """One private server."""

    framing = staticmethod(memcached_frames)
    injector = MemcachedInjector
    lateness = 2.0

    def __init__(self) -> None:
        super().__init__(Memcached())

    @staticmethod
    def verified_within(ttl: float) -> float:
        """Seconds after which every holder has looked whether its lock is still there; docs/backends/memcached.md."""
        return max(LONGEST_PAUSE, ttl / 3) + 0.25

    def url(self, host: str, port: int, number: int, seed: int) -> str:
        """Where a worker connects."""
        return f"memcached://{host}:{port}"

    def say(self, request: bytes, end: bytes) -> list[str]:
        """Send a request on a connection of its own, which no proxy hurts; the lines of the answer, up to ``end``."""
        answer = b""
        with socket.create_connection(("127.0.0.1", self.server.port), 5) as connection:
            connection.sendall(request)
            while not answer.endswith(end):
                if not (more := connection.recv(65_536)):
                    raise ConnectionResetError
                answer += more
        return answer.decode().splitlines()

    def rows(self) -> list[str]:
        """The keys of all items."""
        lines = self.say(b"lru_crawler metadump hash\r\n", b"END\r\n")
        return [unquote(line.split()[0][4:]) for line in lines[:-1]]

    # --- what a frame means; `down` comes from the server

    @staticmethod
    def placed(direction: str, frame: bytes) -> bool:
        """A client writes a row in which there is a queue."""
        return direction == "up" and frame[:3] == b"ms " and QUEUE in frame

    @staticmethod
    def granted(direction: str, frame: bytes) -> bool:
        """A client reads a row in which there are holds: most often one that waits, and has seen that the row changed."""
        return direction == "down" and frame[:3] == b"VA " and HOLDS in frame

    @staticmethod
    def reply(frame: bytes) -> bool:
        """A row, or that one was written: the answer to something that matters."""
        return frame[:3] in (b"VA ", b"HD ")


run.SYSTEMS.update({"memcached": MemcachedSystem})

if __name__ == "__main__":
    sys.exit(run.main())
