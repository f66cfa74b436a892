"""The file of a history run: what hurts it, and what must be left at the end: nothing.

python -m tests.faults.sqlite_system sqlite --seconds 60 --processes 6 --names 12 --seed 1
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

from tests.faults import run
from tests.faults.injector import Fault, FaultInjector
from tests.faults.proxy import raw
from tests.faults.system import System

WRITER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
db.execute("BEGIN IMMEDIATE")
print("writing", flush=True)
sys.stdin.readline()
"""


class LockFile:
    """A file in a small file system of its own, where this user may mount one, else in a directory."""

    port = 1
    """No proxy is used."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="aiolock-history-file-"))
        self.path = self.directory / "locks.db"
        self.url = f"sqlite://{self.path}"
        self.small = False
        self._writer: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        mount = ("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(self.directory))
        self.small = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()
        if self.small:
            subprocess.run(["umount", "-l", str(self.directory)], check=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def freeze(self) -> None:
        """Have a process stand still in the middle of a write."""
        self._writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def thaw(self) -> None:
        """Kill that process."""
        if self._writer is not None:
            self._writer.kill()
            self._writer.communicate()
            self._writer = None

    def kill(self) -> None:
        """Delete the file, and what lies beside it."""
        for each in self.directory.glob("locks.db*"):
            each.unlink(missing_ok=True)

    def start(self) -> None:
        """The next client makes another one."""

    def fill(self) -> None:
        """Leave no space."""
        with contextlib.suppress(OSError), (self.directory / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4_096))

    def empty(self) -> None:
        """Make space again."""
        (self.directory / "ballast").unlink(missing_ok=True)


class FileInjector(FaultInjector):
    """Hurts processes and the file; there are no links."""

    def _table(self) -> list[tuple[int, str, Fault]]:
        long, short = (1.2, 2.0), (0.2, 0.45)

        def held(direction: str, frame: bytes) -> bool:
            """A holder reads at the store what it is about to write, after a while."""
            return direction == "store" and frame in self.slow

        full: list[tuple[int, str, Fault]] = (
            [(3, "full disk", self._fill)] if self.system.server.small else []
        )
        return [
            *full,
            (4, "kill anybody", partial(self._kill, None)),
            (3, "kill holder", partial(self._kill, held)),
            (4, "stop anybody, short", partial(self._stop, None, short)),
            (4, "stop anybody, long", partial(self._stop, None, long)),
            (4, "stop holder, long", partial(self._stop, held, long)),
            (5, "block loop", self._block),
            (4, "freeze server, short", partial(self._freeze, short)),
            (2, "freeze server, long", partial(self._freeze, (1.1, 1.5))),
            # The file is deleted: the exception of the page, which the verdict knows by this name.
            (2, "restart server", self._restart),
        ]

    async def _fill(self, rng: random.Random, name: str) -> bool:
        async with self.system.busy:
            self.recorder.down(name)
            self.system.server.fill()
            await asyncio.sleep(rng.uniform(0.3, 1.5) * self.ttl)
            self.system.server.empty()
            self.recorder.up(name)
            return True


class SqliteSystem(System):
    """One file, of which each worker makes its own connection."""

    framing = staticmethod(raw)
    injector = FileInjector

    def __init__(self) -> None:
        super().__init__(LockFile())

    def url(self, host: str, port: int, number: int, seed: int) -> str:
        """Where a worker connects."""
        return self.server.url

    async def hygiene(self, names: Sequence[str], ttl: float) -> list[str]:
        """After all workers have left: the file is sound, and every lock can be had."""
        with contextlib.closing(sqlite3.connect(self.server.path)) as db:
            sound = [text for [text] in db.execute("PRAGMA integrity_check")]
        found = [f"hygiene: {text}" for text in sound if text != "ok"]
        return found + await super().hygiene(names, ttl)


run.SYSTEMS.update({"sqlite": SqliteSystem})

if __name__ == "__main__":
    sys.exit(run.main())
