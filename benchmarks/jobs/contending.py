"""Several processes and one lock: a drain, a baton between two, and a queue on the server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from random import Random
from typing import Any, Self

from hiredis import pack_command

from benchmarks.contestants import contestant
from benchmarks.contestants.base import Span
from benchmarks.contestants.floors import Ear, Wire
from benchmarks.contestants.ours import Ours
from benchmarks.contestants.postgresql import Notify
from benchmarks.worker import Stage

__all__ = ["drain", "giver", "line", "places", "taker"]

CHANNEL = "bench:baton"


class Publish:
    """A bare PUBLISH and its arrival."""

    @classmethod
    async def open(cls, url: str, *, hears: bool) -> Self:
        it = cls()
        it._wire: Any = await (Ear.subscribed(url, CHANNEL) if hears else Wire.open(url))
        return it

    async def ring(self) -> None:
        # Not waited for: the subscriber's clock runs.
        self._wire.call(pack_command(("PUBLISH", CHANNEL, "g")))

    async def hear(self) -> None:
        await self._wire.hear()

    async def close(self) -> None:
        self._wire.close()


BARE = {"publish": Publish, "notify": Notify}
"""No locks, but a notification each."""


async def drain(
    stage: Stage,
    who: str,
    url: str,
    tasks: int,
    turns: int,
    locks: int = 1,
    hold: float = 0.0,
    limit: float | None = None,
    names: list[str] | None = None,
) -> list[Span]:
    """Every task wants so many turns, and asks again at once: when each was asked for, entered and left.

    ``locks`` is how many different ones they share, ``hold`` how many seconds a turn lasts (0 yields once), and after
    ``limit`` seconds those that are not through give up. ``names`` says for each task what it wants, if that is not one
    of so many locks.
    """
    spans: list[Span] = []
    async with contestant(who, url) as it:
        # Everybody's connections are there before the start.
        mine = f"warm:{id(it):x}:{time.monotonic_ns():x}"
        await it.prepare([f"{mine}:{number}" for number in range(tasks)])
        names = names or [f"hot:{number % locks}" for number in range(tasks)]
        await stage.pause()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await it.drain(names, turns, hold, spans)
        await stage.pause()
    return spans


async def giver(
    stage: Stage, who: str, url: str, socket: str, handovers: int, spread: float, settle: float = 0.003
) -> list[float]:
    """Have the taker ask for the lock, wait until it certainly waits, and let go: when that was, each time.

    A taker waits for certain after ``settle`` seconds; ``spread`` seconds of randomness keep one that polls from being
    in step with us.
    """
    met: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_unix_server(lambda *streams: met.set_result(streams), socket)
    await stage.pause()
    reader, writer = await met
    random, given = Random(), []
    bell: Any = await BARE[who].open(url, hears=False) if who in BARE else None
    async with contestant("aiolock" if bell else who, url) as it:
        lock = it.lock("baton")
        for _ in range(handovers):
            if bell is None:
                await it.take(lock)
            writer.write(b"?")
            await asyncio.sleep(settle + random.uniform(0, spread))
            if bell is None:
                given.append(await it.leave(lock))
            else:
                given.append(time.monotonic())
                await bell.ring()
            await reader.readexactly(1)
    if bell is not None:
        await bell.close()
    writer.close()
    server.close()
    return given


async def taker(stage: Stage, who: str, url: str, socket: str, handovers: int) -> list[float]:
    """Ask when told to: when we got it, each time."""
    await stage.pause()
    reader, writer = await asyncio.open_unix_connection(socket)
    taken = []
    if who in BARE:
        bell: Any = await BARE[who].open(url, hears=True)
        for _ in range(handovers):
            await reader.readexactly(1)
            await bell.hear()
            taken.append(time.monotonic())
            writer.write(b"!")
        await bell.close()
    else:
        async with contestant(who, url) as it:
            lock = it.lock("baton")
            for _ in range(handovers):
                await reader.readexactly(1)
                taken.append(await it.take(lock))
                await it.leave(lock)
                writer.write(b"!")
    writer.close()
    return taken


async def places(stage: Stage, url: str, count: int, handovers: int) -> float:
    """So many places stand in line all the time (``fair=True``): seconds per hand-over."""
    over = asyncio.get_running_loop().create_future()
    entered = 0
    async with Ours(url, fair=True) as it:
        lock = it.lock(f"places:{count}")

        async def contender() -> None:
            nonlocal entered
            while not over.done():
                async with lock:
                    entered += 1
                    if entered == handovers:
                        over.set_result(time.perf_counter())

        first = await lock.acquire()
        tasks = [asyncio.create_task(contender()) for _ in range(count)]
        await _in_line(url, f"bench:1:lock:{{places:{count}}}", count)
        await stage.pause()
        start = time.perf_counter()
        await first.release()
        end = await over
        await stage.pause()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return (end - start) / handovers


async def _in_line(url: str, key: str, count: int) -> None:
    """Wait until the server knows all of them."""
    wire = await Wire.open(url)
    while True:
        head, tail = await wire.call(pack_command(("HMGET", key, "head", "tail")))
        if tail is not None and int(tail) - int(head or 0) >= count:
            break
        await asyncio.sleep(0.02)
    wire.close()


async def line(stage: Stage, who: str, url: str, count: int, repeats: int) -> list[list[float]]:
    """So many wait in line, and then pass through one after the other: when they were let in, and each entry."""
    async with contestant(who, url) as it:
        return [await it.line(f"line:{count}:{number}", count, stage.pause) for number in range(repeats)]
