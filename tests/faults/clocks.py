"""Servers whose wall clock can be set while they run: that of `clock.c`, which is compiled here."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest.mock import patch

from tests.faults.staging import PATIENCE, queued
from tests.processes import program
from tests.servers import Server

__all__ = ["Clock", "keeps_its_lock", "stepped"]

S = TypeVar("S", bound=Server)


class Clock:
    """A wall clock for programs that are started with its variables in their environment."""

    def __init__(self, folder: Path) -> None:
        library = folder / "clock.so"
        source = Path(__file__).with_name("clock.c")
        compiler = program("gcc", "clang", "cc", package="gcc", server="redis")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
        self._offset = folder / "offset"
        self._offset.write_bytes(bytes(8))
        # Some servers run as another user.
        for path in (folder, library, self._offset):
            path.chmod(0o755)
        self.variables = {"LD_PRELOAD": str(library), "CLOCK_FILE": str(self._offset)}

    def step(self, seconds: int) -> None:
        """Set the clock by so many seconds; negative ones set it back."""
        [before] = struct.unpack("q", self._offset.read_bytes())
        with self._offset.open("r+b") as file:
            file.write(struct.pack("q", before + seconds))


@contextmanager
def stepped(make: Callable[[], S]) -> Iterator[tuple[S, Callable[[int], None]]]:
    """Run a server; yield it, and the function that sets its clock by so many seconds (negative ones: back)."""
    with TemporaryDirectory(prefix="aiolock-") as folder:
        clock = Clock(Path(folder))
        server = make()
        with patch.dict(os.environ, clock.variables):
            server.__enter__()
        try:
            yield server, clock.step
        finally:
            server.__exit__(None, None, None)


async def keeps_its_lock(
    connect: Callable[..., Any],
    step: Callable[[], None],
    kind: Callable[[Any], Any] = lambda client: client.lock("x"),
) -> None:
    """Check that a holder that lives keeps its lock for longer than its ttl after a step of the server's clock."""
    async with connect(ttl=6.0) as holder, connect(ttl=6.0) as client:
        async with kind(holder) as lease:
            waiter = asyncio.create_task(kind(client).acquire(timeout=2 * PATIENCE))
            await queued(kind(client), 1)
            step()
            await asyncio.sleep(9)
            lease.check()
            assert not waiter.done()
        # It has renewed since: its release is all that the next one waits for.
        async with asyncio.timeout(PATIENCE):
            following = await waiter
        assert following.token > lease.token
        await following.release()
