"""Lock libraries of Java and Go: a small program of each language, built of java/ by Maven and of go/ by Go.

:mod:`benchmarks.contestants.peers` speaks with them. ``python -m benchmarks.peers`` builds them, as do the scenarios in which they
compete, if their sources have changed; where a tool is missing or nothing can be downloaded, a sentence says so.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.processes import ServerMissing, program

__all__ = ["LIBRARIES", "PROGRAMS", "Program", "absent", "built", "versions"]

SOURCES = Path(__file__).parent
BUILT = SOURCES.parents[1] / "build/peers"
PATIENCE = 600
"""Seconds that a build may take: it downloads libraries."""

LIBRARIES = {
    "curator": "java",
    "redisson": "java",
    "redislock": "go",
    "redsync": "go",
    "rueidislock": "go",
}
"""The language of each."""

_VERSIONS = {
    "java": r"<artifactId>(redisson|curator)[\w-]*</artifactId>\s*<version>(.+?)</version>",
    "go": r"/(redislock|redsync|rueidis)(?:/v\d+)? v(\S+)",
}


@dataclass(frozen=True, slots=True)
class Program:
    """The program of one language."""

    language: str
    build: tuple[str, ...]
    """The first word is the program that builds it, of the Debian package :attr:`package`."""
    package: str
    command: tuple[str, ...]

    @property
    def sources(self) -> Path:
        return SOURCES / self.language

    @property
    def _stamp(self) -> Path:
        return BUILT / self.language / "sources.sha256"

    def _digest(self) -> str:
        files = sorted(path for path in self.sources.iterdir() if path.is_file())
        return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()

    def is_built(self) -> bool:
        """Tell whether it is there, built of the sources as they are."""
        return self._stamp.is_file() and self._stamp.read_text() == self._digest()

    def make(self) -> None:
        """Build it unless it is there; raise :class:`RuntimeError` with a sentence if that is not possible."""
        if self.is_built():
            return
        try:
            tool = program(self.build[0], package=self.package, server="zookeeper")
        except ServerMissing:
            raise RuntimeError(f"{self.build[0]} is not installed (Debian: {self.package})") from None
        self._stamp.parent.mkdir(parents=True, exist_ok=True)
        try:
            done = subprocess.run(
                [tool, *self.build[1:]],
                cwd=self.sources,
                env={**os.environ, "GOTOOLCHAIN": "local"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self.build[0]} took longer than {PATIENCE} s") from None
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if line.strip()]
            raise RuntimeError(f"{self.build[0]} failed: {lines[0] if lines else done.returncode}")
        self._stamp.write_text(self._digest())


PROGRAMS = {
    "java": Program(
        "java",
        ("mvn", "--batch-mode", "--quiet", f"-Dpeers={BUILT}/java", "process-classes"),
        "maven",
        ("java", "-Xmx256m", "-cp", f"{BUILT}/java/classes:{BUILT}/java/lib/*", "Peers"),
    ),
    "go": Program(
        "go",
        ("go", "build", "-o", f"{BUILT}/go/peers", "."),
        "golang-go",
        (f"{BUILT}/go/peers",),
    ),
}


@functools.cache
def absent() -> dict[str, str]:
    """Build the programs; return the libraries that cannot compete, each with the reason."""
    reasons: dict[str, str] = {}
    for language, it in PROGRAMS.items():
        try:
            it.make()
        except RuntimeError as error:
            reasons |= {who: str(error) for who, its in LIBRARIES.items() if its == language}
    return reasons


def built(who: str) -> bool:
    """Tell whether a library is there without building it."""
    return PROGRAMS[LIBRARIES[who]].is_built()


def versions() -> dict[str, str]:
    """Return the version of each library, as the build files name it."""
    found: dict[str, str] = {}
    for language, pattern in _VERSIONS.items():
        for path in sorted(PROGRAMS[language].sources.iterdir()):
            if path.name in {"pom.xml", "go.mod"}:
                found |= dict(re.findall(pattern, path.read_text()))
    found["rueidislock"] = found.pop("rueidis")
    return {who: found[who] for who in LIBRARIES}
