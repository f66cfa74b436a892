"""What goes wrong when users of a lock are cancelled, and when a block takes longer than its ttl."""

from __future__ import annotations

import asyncio
from random import Random

from benchmarks.contestants import contestant
from benchmarks.worker import Stage

__all__ = ["cancelled", "overlong"]

LATEST = 40
"""Passes of the loop after which it is cancelled at the latest; some wait for an answer then, some have the lock, or have
left it. Not a time: the loop's timers are as coarse as a whole turn."""
CLEANED = 1.0
"""Seconds after which whatever cleans up has done so."""


async def cancelled(stage: Stage, who: str, url: str, count: int, seed: int) -> float:
    """Cancel users of free locks somewhere in the middle: per cent of those that left theirs held."""
    del stage
    random, stopped, left = Random(seed), [], 0
    async with contestant(who, url) as it, contestant(who, url) as witness:
        await it.prepare(["warm"])
        for number in range(count):
            name = f"cancelled:{seed}:{number}"
            # Some give up a connection when they are cancelled; the next one shall not spend its time on a new one.
            await it.turns("between", 1)
            task = asyncio.create_task(it.turns(name, 1))
            for _ in range(random.randrange(LATEST)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                stopped.append(name)
        await asyncio.sleep(CLEANED)
        for name in stopped:
            left += await witness.lock(name).locked()
    return 100 * left / len(stopped)


async def overlong(stage: Stage, who: str, url: str, count: int, ttl: float, seconds: float) -> float:
    """Blocks that last so long while somebody waits: per cent of those in which the other was inside as well."""
    del stage
    inside: set[int] = set()
    together: set[int] = set()
    it, other = contestant(who, url), contestant(who, url)
    it.ttl = other.ttl = ttl
    async with it, other:

        async def worker(me: object, number: int) -> None:
            try:
                async with me.lock(f"overlong:{number}"):  # type: ignore[attr-defined]
                    if number in inside:
                        together.add(number)
                    inside.add(number)
                    await asyncio.sleep(seconds)
                    inside.discard(number)
            except Exception:  # noqa: BLE001 - a release that finds the lock gone raises what its library likes
                inside.discard(number)

        first = [asyncio.create_task(worker(it, number)) for number in range(count)]
        await asyncio.sleep(seconds / 20)
        await asyncio.gather(*first, *(worker(other, number) for number in range(count)))
    return 100 * len(together) / count
