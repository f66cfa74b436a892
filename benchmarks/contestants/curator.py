"""Curator's InterProcessMutex, the peer in Java: a small program beside each worker, which stays warm between rounds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from benchmarks.contestants.base import Contestant, Span
from benchmarks.contestants.zookeeper import hosts
from tests.processes import missing, program

__all__ = ["Curator", "compiled"]

CLASSES = "AIOLOCK_BENCHMARKS_CLASSES"
"""Where the compiled program is; the parent says so to its workers."""
JARS = (
    "curator-recipes curator-framework curator-client zookeeper zookeeper-jute guava slf4j-api slf4j-simple"
)
CLASS_PATH = [f"/usr/share/java/{jar}.jar" for jar in JARS.split()]
SOURCE = Path(__file__).parent / "Peer.java"


@contextmanager
def compiled() -> Iterator[None]:
    """Compile the program for the workers that are started inside."""
    if absent := [jar for jar in CLASS_PATH if not Path(jar).exists()]:
        raise missing(absent[0], "libcurator-recipes-java", "zookeeper")
    java = program("java", package="default-jre-headless", server="zookeeper")
    with tempfile.TemporaryDirectory(prefix="aiolock-bench-") as folder:
        # The compiler is a module of the runtime; its own program is in another package.
        command = [
            java,
            "-m",
            "jdk.compiler/com.sun.tools.javac.Main",
            "-nowarn",
            "-cp",
            ":".join(CLASS_PATH),
            "-d",
            folder,
            str(SOURCE),
        ]
        subprocess.run(command, check=True, capture_output=True)
        os.environ[CLASSES] = folder
        try:
            yield
        finally:
            del os.environ[CLASSES]


class _Machine:
    """One Java process; it ends when we do, because its standard input ends."""

    one: _Machine | None = None

    def __init__(self) -> None:
        java = program("java", package="default-jre-headless", server="zookeeper")
        quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=off"
        path = ":".join((os.environ[CLASSES], *CLASS_PATH))
        self._process = subprocess.Popen(
            [java, "-Xmx256m", quiet, "-cp", path, "Peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    @classmethod
    def get(cls) -> _Machine:
        if cls.one is None:
            cls.one = cls()
        return cls.one

    def place(self) -> None:
        """Run where we run; each thread of a process has its own word on that."""
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), os.sched_getaffinity(os.getpid()))

    async def do(self, *words: object) -> list[str]:
        """Tell it something, and return what it says until it is done."""
        return await asyncio.to_thread(self._do, words)

    def _do(self, words: Sequence[object]) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        said = []
        for line in self._process.stdout:
            if line == "ok\n":
                return said
            said.append(line.strip())
        raise RuntimeError(f"Curator's process ended with status {self._process.wait()}: {said}")


class Curator(Contestant):
    """Its threads contend as kazoo's do; its clock is the one of Python's monotonic."""

    async def __aenter__(self) -> Self:
        self._machine = _Machine.get()
        self._machine.place()
        await self._machine.do("open", hosts(self.url))
        # A virtual machine that has just started is slow; it learns once, and stays.
        await self._machine.do("turns", "/curator/warm", 300)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._machine.do("close")

    def lock(self, name: str) -> Any:
        raise NotImplementedError("Curator's lock is used inside its own process")

    async def prepare(self, names: Sequence[str]) -> None:
        await self._machine.do("drain", 1, 0, *(f"/curator/{name}" for name in names))

    async def turns(self, name: str, count: int) -> None:
        await self._machine.do("turns", f"/curator/{name}", count)

    async def drain(self, names: Sequence[str], turns: int, hold: float, spans: list[Span]) -> None:
        paths = [f"/curator/{name}" for name in names]
        for line in await self._machine.do("drain", turns, round(hold * 1000), *paths):
            asked, entered, left, number = line.split()
            spans.append((float(asked), float(entered), float(left), int(number)))

    async def line(self, name: str, count: int, ready: Callable[[], Awaitable[None]]) -> list[float]:
        await self._machine.do("line", f"/curator/{name}", count)
        await ready()
        return [float(line) for line in await self._machine.do("pass")]
