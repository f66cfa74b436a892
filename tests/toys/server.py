"""The server of the toys in docs/how-to/write-a-backend.md: rows, and a lock service, over TCP; the page lists its requests.

    with ToyServer() as server:
        print(server.url("toyrows"))         # toyrows://127.0.0.1:PORT

It keeps everything in memory. The rules of its lock service are those of ``memory://``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from aiolock.backends.rows.rules import Machine, StoredRequest
from aiolock.backends.rows.store import Edit
from aiolock.clock import system_clock
from tests.processes import Child, Server, ask
from tests.simulation.rowstore import RowServer

ROOT = Path(__file__).parents[2]

LONGEST = 2**26
"""Bytes of a request."""
PAGE = 500
"""Rows in one answer to ``scan``."""


class Service:
    """What a server knows. Each public method is a request, and returns its answer."""

    def __init__(self) -> None:
        self._rows = RowServer(time.time, push=False, shared_clock=False)
        self._locks = Machine()
        # Tokens go on rising after a restart, as long as the clock does not go back.
        self._locks._token = time.time_ns() // 1000

    def version(self) -> int:
        return 1

    # --- rows

    def get(self, keys: list[str]) -> list[Any]:
        rows = self._rows.read(keys, value=True)
        return [(row.value.decode("latin-1"), row.version, row.tick) for row in rows]

    def versions(self, keys: list[str]) -> list[Any]:
        return [(row.version, row.tick) for row in self._rows.read(keys, value=False)]

    def write(self, edits: list[Any]) -> list[int | None]:
        made = []
        for key, expected, version, text, ttl in edits:
            value = None if text is None else text.encode("latin-1")
            row = self._rows.edit(Edit(key, expected, version, value, ttl))
            made.append(None if row is None else row.tick)
        return made

    def scan(self, prefix: str, after: str) -> list[Any]:
        keys = sorted(key for key in self._rows.rows if key.startswith(prefix) and key > after)[:PAGE]
        return [(key, *row) for key, row in zip(keys, self.get(keys), strict=True)]

    def purge(self, prefix: str, idle: float, spared: list[str]) -> int:
        return self._rows.purge(prefix, idle, spared)

    # --- locks

    def enter(
        self, space: str, family: str, name: str, owner: str, ttl: float, tokens: int, label: str, wait: bool
    ) -> Any:
        request = StoredRequest(owner, "mutex", ttl, label, block=tokens)
        answer = self._locks.enter(_key(space, family, name), request, system_clock(), wait=wait)
        return answer.token, answer.demand

    def leave(self, space: str, family: str, name: str, owner: str, keep: float) -> bool:
        request = StoredRequest(owner, "mutex", 0.0)
        return self._locks.leave(_key(space, family, name), request, system_clock(), keep, tombstone=True)

    def renew(self, holds: list[Any]) -> list[Any]:
        answers = []
        for *lock, owner, ttl in holds:
            request = StoredRequest(owner, "mutex", ttl or 0.0)
            found = self._locks.renew(_key(*lock), request, system_clock(), prolong=ttl is not None)
            answers.append(None if found is None else (found.demand, found.asked))
        return answers

    def look(self, space: str, family: str, name: str) -> Any:
        now = system_clock()
        holds, queue = self._locks.inspect(_key(space, family, name), now)
        holders = [
            (
                one.request.label,
                one.token,
                0 if one.kept else one.request.block,
                now - one.since,
                one.deadline - now,
            )
            for one in holds
        ]
        return holders, [request.label for request in queue]

    def force(self, space: str, family: str, name: str, token: int | None = None) -> bool:
        return self._locks.force(_key(space, family, name), system_clock(), token)

    def ask(self, space: str, family: str, name: str, reason: str) -> bool:
        return self._locks.request(_key(space, family, name), reason, system_clock())

    def names(self, space: str) -> list[tuple[str, str]]:
        found = [(*first.split("/", 1), name) for first, name in self._locks.busy(system_clock())]
        return [(family, name) for family, other, name in found if other == space]

    # --- requests

    def answer(self, line: bytes) -> bytes:
        verb, *words = json.loads(line)
        known = not verb.startswith("_") and verb != "answer" and hasattr(self, verb)
        answer = (getattr(self, verb)(*words), None) if known else (None, f"there is no request {verb!r}")
        # No client is told of anything unasked.
        self._locks.outbox.clear()
        return json.dumps(answer).encode() + b"\n"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(self.answer(line))
        except OSError:
            pass
        finally:
            writer.close()


def _key(space: str, family: str, name: str) -> tuple[str, str]:
    return f"{family}/{space}", name


async def main(port: int) -> None:
    server = await asyncio.start_server(Service().serve, "127.0.0.1", port, limit=LONGEST)
    await server.serve_forever()


class ToyServer(Server):
    """One of them, in a process of its own."""

    def __init__(self) -> None:
        super().__init__("toy")
        self.ports = [self._reserve()]
        argv = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.toys.server", str(self.port)]
        self.children = [Child(argv, self.folder / "toy.log")]

    def url(self, scheme: str) -> str:
        return f"{scheme}://127.0.0.1:{self.port}"

    def _answers(self, index: int) -> bool:
        return ask(("127.0.0.1", self.port), b'["version"]\n', enough=4).startswith(b"[1")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
