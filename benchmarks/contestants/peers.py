"""Peers in Java and Go: a program of the language beside each worker (:mod:`benchmarks.peers`), which stays warm between rounds."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from benchmarks.contestants.base import Contestant, Span
from benchmarks.peers import LIBRARIES, PROGRAMS

__all__ = ["Peer"]

WARM = 300
"""Turns before anything is measured: a virtual machine that has just started is slow; it learns once, and stays."""


class _Process:
    """The program of one language; it ends when we do, because its standard input ends."""

    running: ClassVar[dict[str, _Process]] = {}

    def __init__(self, language: str) -> None:
        self._language = language
        self._process = subprocess.Popen(
            PROGRAMS[language].command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    @classmethod
    def get(cls, language: str) -> _Process:
        if language not in cls.running:
            cls.running[language] = cls(language)
        return cls.running[language]

    def place(self) -> None:
        """Run where we run; each thread of a process has its own word on that."""
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), os.sched_getaffinity(os.getpid()))

    async def do(self, *words: object) -> list[str]:
        """Tell it something, and return what it says until it is done. Cancelling ends the program, which may hang."""
        try:
            return await asyncio.to_thread(self._do, words)
        except asyncio.CancelledError:
            self._process.kill()
            self.running.pop(self._language, None)
            raise

    def _do(self, words: Sequence[object]) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        said = []
        with suppress(BrokenPipeError):
            self._process.stdin.write(" ".join(map(str, words)) + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line == "ok\n":
                return said
            said.append(line.strip())
        raise RuntimeError(f"{words[0]}: the program ended with status {self._process.wait()}: {said}")


class Peer(Contestant):
    """One library; its threads contend as kazoo's do, and its clock is the one of Python's monotonic."""

    def __init__(self, who: str, url: str) -> None:
        super().__init__(url)
        self._who = who

    async def __aenter__(self) -> Self:
        self._program = _Process.get(LIBRARIES[self._who])
        self._program.place()
        await self._program.do("open", self._who, urlsplit(self.url).netloc)
        await self.turns("warm", WARM)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._program.do("close")

    def lock(self, name: str) -> _Taken:
        return _Taken(self._program, name)

    async def prepare(self, names: Sequence[str]) -> None:
        await self.each(names, 1)

    async def turns(self, name: str, count: int) -> None:
        await self._program.do("turns", name, count)

    async def each(self, names: Sequence[str], count: int) -> None:
        await self._program.do("drain", count, 0, *names)

    async def drain(self, names: Sequence[str], turns: int, hold: float, spans: list[Span]) -> None:
        for line in await self._program.do("drain", turns, round(hold * 1000), *names):
            asked, entered, left, number = line.split()
            spans.append((float(asked), float(entered), float(left), int(number)))

    async def line(self, name: str, count: int, ready: Callable[[], Awaitable[None]]) -> list[float]:
        await self._program.do("line", name, count)
        await ready()
        return [float(line) for line in await self._program.do("pass")]

    async def take(self, lock: Any) -> float:
        return await lock.take()  # type: ignore[no-any-return]

    async def leave(self, lock: Any) -> float:
        return await lock.leave()  # type: ignore[no-any-return]


class _Taken:
    """A lock that the program takes and leaves, and says when."""

    def __init__(self, program: _Process, name: str) -> None:
        self._program = program
        self._name = name

    async def take(self) -> float:
        [entered] = await self._program.do("take", self._name)
        return float(entered)

    async def leave(self) -> float:
        [left] = await self._program.do("leave", self._name)
        return float(left)
