"""The MariaDB of a history run: how its frames look, what hurts it, and what must be left at the end: nothing.

python -m tests.faults.mysql_system mariadb --seconds 60 --processes 6 --names 12 --seed 1
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pymysql

import aiolock
from aiolock.testing.locks import all_can_be_had
from tests.faults import run
from tests.faults.proxy import mysql_frames
from tests.faults.system import System
from tests.servers import MariaDB

TURN = b"\x02\x00\x00\x04\x011"
"""The row of a single 1, which is how the server says that GET_LOCK came to its end."""


CLOCK = b"\x11\x00\x00\x04\x10"
"""How a row of one number of 16 digits begins."""
ROW = b"\x29\x00\x00\x04\x28"
"""How a row of one text of 40 bytes begins."""


class MariaDBSystem(System):
    """One private server whose commits survive its death, and an administrator whom no proxy can hurt."""

    framing = staticmethod(mysql_frames)
    mode = "lease"
    place = 3.0
    """The page says so, of locks that several may be in."""
    waits = "INFO LIKE '%GET_LOCK(%, 31536000)%'"
    """How the statements look in which somebody waits."""

    def __init__(self) -> None:
        super().__init__(MariaDB(extra=["--innodb-flush-log-at-trx-commit=2", "--max-connections=500"]))

    def url(self, host: str, port: int, number: int, seed: int) -> str:
        """Where a worker connects; every eighth has one connection to wait on, and so tries again and again."""
        few = "&connections=1" if number % 8 == 7 else ""
        return f"mysql://root@{host}:{port}/test?mode={self.mode}{few}"

    async def prepare(self) -> None:
        """Have the tables made, because a machine may be too busy for any worker to open in time."""
        url = f"{self.server.url}?mode={self.mode}"
        async with aiolock.connect(url, namespace=self.namespace, command_timeout=60):
            pass

    @contextmanager
    def _administrator(self) -> Iterator[Any]:
        """A cursor on a connection over the socket."""
        with (
            pymysql.connect(
                unix_socket=self.server.socket, user="root", database="test", autocommit=True
            ) as admin,
            admin.cursor() as cursor,
        ):
            yield cursor

    def ask(self, statement: str) -> tuple[tuple[Any, ...], ...]:
        """Over the socket."""
        with self._administrator() as cursor:
            cursor.execute(statement)
            return tuple(cursor.fetchall())

    def _end(self, kill: str, where: str, ending: Callable[[int], object] = bool) -> None:
        """End sessions, or what they do, on one connection: it takes a busy machine long to make one, and no proxy goes on."""
        with self._administrator() as cursor:
            # Those over a socket have no port, and are no worker's.
            cursor.execute(
                f"SELECT ID, HOST FROM information_schema.processlist WHERE HOST LIKE '%:%' AND {where}"
            )
            for number, host in cursor.fetchall():
                # It may have its turn by now, although it waited when the list was made.
                ending(int(host.rpartition(":")[2]))
                # It may be gone by itself.
                with suppress(pymysql.err.OperationalError):
                    cursor.execute(f"{kill} {number}")

    @staticmethod
    def placed(direction: str, frame: bytes) -> bool:
        """Somebody lines up."""
        return direction == "up" and b", 31536000)" in frame

    @staticmethod
    def granted(direction: str, frame: bytes) -> bool:
        """Somebody who waits is told that it is its turn."""
        return direction == "down" and frame == TURN

    @staticmethod
    def reply(frame: bytes) -> bool:
        """A row: the answer to something that matters."""
        return len(frame) > 5 and frame[3] >= 4

    def kill_clients(self, kind: str, ending: Callable[[int], object]) -> None:
        """End all sessions, or those that wait; `ending` is called with the port of the client of each before."""
        self._end("KILL", self.waits if kind == "pubsub" else "USER = 'root'", ending)

    def forget_scripts(self) -> None:
        """End what sessions are doing, and let them live."""
        self._end("KILL QUERY", "COMMAND = 'Query'")

    def replay(self, *, older: float, most: int) -> int:
        """See `overhear`."""
        return 0

    async def hygiene(self, names: Sequence[str], ttl: float) -> list[str]:
        """After all workers have left: nobody holds or waits, and every lock can be had."""
        found = []
        if self.mode == "lease":
            found += [
                f"hygiene: {name} is held by {label}"
                for name, label in self.ask(
                    "SELECT name, label FROM aiolock WHERE expires_at > UTC_TIMESTAMP(6) AND owner IS NOT NULL"
                )
            ]
            found += [
                f"hygiene: {mode} of {label}, in state {state}, is left"
                for mode, label, state in self.ask(
                    "SELECT mode, label, state FROM aiolock_requests WHERE expires_at > UTC_TIMESTAMP(6)"
                )
            ]
        for _ in range(100):
            others = self.ask(
                "SELECT ID, INFO FROM information_schema.processlist "
                "WHERE ID <> CONNECTION_ID() AND COMMAND <> 'Daemon'"
            )
            if not others:
                break
            await asyncio.sleep(0.02)
        found += [f"hygiene: session {number} is left, doing {info}" for number, info in others]
        async with aiolock.connect(
            f"{self.server.url}?mode={self.mode}", namespace=self.namespace, ttl=5
        ) as client:
            found += await all_can_be_had(client, names, 3 * ttl)
        return found


class SessionSystem(MariaDBSystem):
    """The same with user locks; the end of the holder's connection and a restart are its page's exceptions."""

    mode = "session"
    place = 0.0
    breaking = 0.1
    """The next one may be in before the holder has read that its connection has ended; in how many seconds it has, if it runs."""
    spares = frozenset({"half-open"})
    """The server sees the end of a connection, and its client does not: an exception of the page, like a killed session."""

    @staticmethod
    def granted(direction: str, frame: bytes) -> bool:
        """What the clock says in µs, which is how the server says that it is somebody's turn."""
        return direction == "down" and frame[:5] == CLOCK


class RowSystem(SessionSystem):
    """The same with row locks in open transactions; every hold and every wait has a connection."""

    mode = "row"
    waits = "INFO LIKE '%FOR UPDATE%'"

    def url(self, host: str, port: int, number: int, seed: int) -> str:
        """Every eighth worker has two connections for all that it wants."""
        few = 2 if number % 8 == 7 else 24
        return f"mysql://root@{host}:{port}/test?mode=row&connections={few}"

    @staticmethod
    def placed(direction: str, frame: bytes) -> bool:
        """Somebody lines up."""
        return direction == "up" and b"FOR UPDATE /*" in frame

    @staticmethod
    def granted(direction: str, frame: bytes) -> bool:
        """The id of a row, which is a digest of 40 letters: it is locked."""
        return direction == "down" and frame[:5] == ROW


run.SYSTEMS.update({"mariadb": MariaDBSystem, "mariadb-session": SessionSystem, "mariadb-row": RowSystem})

if __name__ == "__main__":
    sys.exit(run.main())
