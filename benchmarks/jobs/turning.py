"""Taking turns in one process: how many per second, and how much of our processor each takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

from benchmarks.contestants import contestant
from benchmarks.worker import Stage

__all__ = ["crowd", "many", "single"]

WARM = 20
"""Turns before the clock starts: connections, caches, scripts."""


async def _timed(turns: int, work: Awaitable[Any]) -> tuple[float, float]:
    """Turns per second, and processor seconds of this process per turn."""
    start, cpu = time.perf_counter(), time.process_time()
    await work
    return turns / (time.perf_counter() - start), (time.process_time() - cpu) / turns


async def single(stage: Stage, who: str, url: str, turns: int, name: str = "single") -> tuple[float, float]:
    """One task, one free lock, one turn after the other."""
    del stage
    async with contestant(who, url) as it:
        await it.prepare([name])
        await it.turns(name, WARM)
        return await _timed(turns, it.turns(name, turns))


async def many(stage: Stage, who: str, url: str, tasks: int, turns: int) -> tuple[float, float]:
    """Many tasks, each with a lock of its own."""
    del stage
    async with contestant(who, url) as it:
        names = [f"many:{number}" for number in range(tasks)]
        await it.prepare(names)
        await it.each(names, 1)
        return await _timed(tasks * turns, it.each(names, turns))


async def crowd(stage: Stage, who: str, url: str, tasks: int, turns: int) -> tuple[float, float]:
    """Many tasks of one process and one lock, with blocks that yield once, until all had their turns."""
    del stage
    async with contestant(who, url) as it:
        await it.turns("crowd", WARM)

        async def contender() -> None:
            lock = it.lock("crowd")
            for _ in range(turns):
                async with lock:
                    await asyncio.sleep(0)

        return await _timed(tasks * turns, asyncio.gather(*(contender() for _ in range(tasks))))
