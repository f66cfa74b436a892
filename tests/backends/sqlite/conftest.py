"""Stores on real files, what they report, and processes that do something to a file."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiolock.backends.rows.store import Edit, Listener
from aiolock.backends.sqlite.store import SqliteStore
from aiolock.clock import system_clock
from aiolock.core.backend import Settings

PATIENCE = 30.0
"""Seconds after which something that has to happen counts as never."""


class Opened(SqliteStore):
    """A store that keeps what it reports."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.heard: list[str | None] = []
        self.interruptions = self.replacements = 0

    def _interrupted(self) -> None:
        self.interruptions += 1

    def _replaced(self) -> None:
        assert self.replacements == self.interruptions
        self.replacements += 1

    async def begin(self, timeout: float = 15.0) -> Opened:
        settings = Settings("test", "label", 10.0, timeout, system_clock)
        await self.open(settings, Listener("me", self.heard.append, self._interrupted, self._replaced))
        return self

    async def insert(self, key: str, value: bytes = b"", version: str = "v1", **more: Any) -> bool:
        return (await self.compare_and_set([Edit(key, "", version, value, **more)])) != [None]

    async def update(self, key: str, expected: str, version: str, value: bytes = b"", **more: Any) -> bool:
        return (await self.compare_and_set([Edit(key, expected, version, value, **more)])) != [None]

    async def read(self, key: str) -> tuple[bytes, str]:
        [row] = await self.get([key])
        return row.value, row.version


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks.db"


@pytest.fixture
async def make(path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Open a store on the file of the test; closed at its end."""
    opened: list[Opened] = []

    async def open_one(at: Path = path, **options: Any) -> Opened:
        store = Opened(at)
        opened.append(store)
        return await store.begin(**options)

    yield open_one
    for store in opened:
        await store.aclose()


class Child:
    """A Python process with a program that says a line when it is ready; gone when the test is."""

    def __init__(self, program: str, *arguments: object, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[3],
            # Slow steps are about the machine, and would be said between the lines.
            env={**os.environ, "PYTHONASYNCIODEBUG": ""},
            **options,
        )
        self.pid = self.process.pid

    async def line(self) -> str:
        """The next line that it says."""
        async with asyncio.timeout(PATIENCE):
            return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    async def end(self) -> str:
        """What it says until it ends by itself."""
        async with asyncio.timeout(PATIENCE):
            return (await asyncio.to_thread(self.process.communicate))[0]

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            stream.close()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(*words: Any, **options: Any) -> Child:
        children.append(Child(*words, **options))
        return children[-1]

    yield start
    for each in children:
        each.kill()


async def until(condition: Callable[[], Any]) -> None:
    """Wait for something that has to happen."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - conditions of threads and files
            await asyncio.sleep(0.005)
