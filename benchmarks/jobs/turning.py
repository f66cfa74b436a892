"""Taking turns in one process: how many per second."""

from __future__ import annotations

import asyncio
import time

from benchmarks.contestants import contestant
from benchmarks.worker import Stage

__all__ = ["crowd", "many", "single"]

WARM = 20
"""Turns before the clock starts: connections, caches, scripts."""


async def single(stage: Stage, who: str, url: str, turns: int) -> float:
    """One task, one free lock, one turn after the other: turns per second."""
    del stage
    async with contestant(who, url) as it:
        await it.turns("single", WARM)
        start = time.perf_counter()
        await it.turns("single", turns)
        return turns / (time.perf_counter() - start)


async def many(stage: Stage, who: str, url: str, tasks: int, turns: int) -> float:
    """Many tasks, each with a lock of its own: turns per second of all together."""
    del stage
    async with contestant(who, url) as it:
        await asyncio.gather(*(it.turns(f"many:{number}", 2) for number in range(tasks)))
        start = time.perf_counter()
        await asyncio.gather(*(it.turns(f"many:{number}", turns) for number in range(tasks)))
        return tasks * turns / (time.perf_counter() - start)


async def crowd(stage: Stage, who: str, url: str, tasks: int, turns: int) -> float:
    """Many tasks of one process and one lock, with blocks that yield once: turns per second until all had theirs."""
    del stage
    async with contestant(who, url) as it:
        await it.turns("crowd", WARM)

        async def contender() -> None:
            lock = it.lock("crowd")
            for _ in range(turns):
                async with lock:
                    await asyncio.sleep(0)

        start = time.perf_counter()
        await asyncio.gather(*(contender() for _ in range(tasks)))
        return tasks * turns / (time.perf_counter() - start)
