"""The PostgreSQL of a history run: how its frames look, what hurts it, and what must be left at the end: nothing.

python -m tests.faults.postgresql_system postgresql --seconds 60 --processes 6 --names 12 --seed 1
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
from base64 import b64decode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import asyncpg

import aiolock
from tests.faults import run
from tests.faults.injector import Fault, FaultInjector
from tests.faults.proxy import postgresql_frames
from tests.faults.system import System
from tests.faults.verdict import DELETED, RESTART
from tests.servers import PostgreSQL

OWN_PREFIX = "application_name = 'aiolock'"
"""The sessions of the workers."""
END = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE " + OWN_PREFIX
END_READERS = END + " AND query LIKE '%k.wanted%'"
"""Of the two connections of a client, the one that reads is also the one that listens."""
CANCEL = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE state = 'active' AND " + OWN_PREFIX

QUEUE = b'"q":['
"""How a queue stands in the value of a lock row."""
VALUE = re.compile(rb"MXsi[A-Za-z0-9+/]*=*")
"""A value in base64: each begins with 1, {, and a double quote."""


class PostgreSQLInjector(FaultInjector):
    """Hurts processes, links, sessions, and the server in all the ways in which it can end."""

    system: PostgreSQLSystem  # type: ignore[assignment]  # alike, not related

    def _table(self) -> list[tuple[int, str, Fault]]:
        return [
            *self._general(RESTART),
            (2, "terminate sessions", partial(self._execute, END)),
            (4, "terminate listeners", partial(self._execute, END_READERS)),
            (3, "cancel statements", partial(self._execute, CANCEL)),
            (3, "kill server", partial(self._end, signal.SIGKILL)),
            (2, "immediate shutdown", partial(self._end, signal.SIGQUIT)),
            (2, "fast shutdown", partial(self._end, signal.SIGINT)),
            (2, DELETED, self._delete),
            *([(3, "full disk", self._fill)] if self.system.small else []),
        ]

    async def _execute(self, statement: str, _rng: random.Random, _name: str) -> bool:
        async with self.system.busy, self.system.admin() as admin:
            return bool(await admin.fetch(statement))

    async def _end(self, how: int, rng: random.Random, name: str) -> bool:
        """End the server and start it again; with the first two ways, commits that were not flushed are lost."""
        async with self.system.busy:
            self.recorder.down(name)
            await asyncio.to_thread(self.system.end, how)
            await asyncio.sleep(rng.choice((0, rng.uniform(0, 0.5))))
            await asyncio.to_thread(self.system.server.start)
            self.recorder.up(name)
            return True

    async def _delete(self, rng: random.Random, name: str) -> bool:
        """Delete the rows of locks, those of sessions, or both: an exception of the page."""
        which = rng.choice(("%/l/%", "%/s/%", "%"))

        async def delete() -> None:
            async with self.system.admin() as admin:
                await admin.execute("DELETE FROM aiolock WHERE key LIKE $1", which)

        return await self._void(name, delete)

    async def _fill(self, rng: random.Random, name: str) -> bool:
        """Leave no space for the table, while a transaction keeps the space of changed rows from being used again."""
        async with self.system.busy, self.system.admin() as admin:
            self.recorder.down(name)
            async with admin.transaction(isolation="repeatable_read"):
                await admin.fetch("SELECT count(*) FROM aiolock")
                self.system.server.fill()
                await asyncio.sleep(rng.uniform(0.3, 1.5) * self.ttl)
                self.system.server.empty()
            self.recorder.up(name)
            return True


class PostgreSQLSystem(System):
    """One private server, whose table is in a small file system of its own if this user may mount one."""

    framing = staticmethod(postgresql_frames)
    injector = PostgreSQLInjector

    def __init__(self) -> None:
        # What is not flushed stays so until somebody's commit is.
        super().__init__(PostgreSQL(settings=["wal_writer_delay = 10s", "autovacuum_naptime = 1s"]))
        self.small = False

    def url(self, host: str, port: int, number: int, seed: int) -> str:
        """Where a worker connects."""
        return f"postgresql://postgres@{host}:{port}/test"

    async def prepare(self) -> None:
        """Make the table, in a small file system."""
        self.small = self.server.confine()
        async with aiolock.connect(self.server.url, namespace=self.namespace, command_timeout=60):
            pass

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[Any]:
        """A connection over the socket, which no proxy hurts."""
        connection = await asyncpg.connect(
            host=str(self.server.folder), port=self.server.port, user="postgres", database="test", timeout=60
        )
        try:
            yield connection
        finally:
            await connection.close()

    # --- what a frame means; `down` comes from the server

    @staticmethod
    def placed(direction: str, frame: bytes) -> bool:
        """A client writes a row in which there is a queue."""
        if direction != "up" or frame[:1] != b"B":
            return False
        return QUEUE in frame or any(QUEUE in b64decode(value) for value in VALUE.findall(frame))

    @staticmethod
    def granted(direction: str, frame: bytes) -> bool:
        """A client is notified: most often of its turn."""
        return direction == "down" and frame[:1] == b"A"

    @staticmethod
    def reply(frame: bytes) -> bool:
        """A row: the answer to something that matters."""
        return frame[:1] == b"D"

    # --- what hurts

    def end(self, how: int) -> None:
        """End every process of the server: as the end of a machine would, at once, or in order."""
        if how == signal.SIGKILL:
            self.server.kill()
        else:
            os.kill(self.server.pid, how)
            self.server.children[0].wait(60)

    # --- what must be left: nothing

    async def hygiene(self, names: Sequence[str], ttl: float) -> list[str]:
        """After all workers have left: no session is theirs, every lock can be had, and nobody holds or waits."""
        async with self.admin() as admin:
            for _ in range(100):
                left = await admin.fetch(f"SELECT pid, state, query FROM pg_stat_activity WHERE {OWN_PREFIX}")
                if not left:
                    break
                await asyncio.sleep(0.05)
        found = [f"hygiene: session {pid} is left, {state}: {query}" for pid, state, query in left]
        return found + await super().hygiene(names, ttl)


run.SYSTEMS.update({"postgresql": PostgreSQLSystem})

if __name__ == "__main__":
    sys.exit(run.main())
