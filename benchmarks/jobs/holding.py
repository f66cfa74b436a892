"""What it costs to hold and to wait: processor time, memory, connections, commands."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import time
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiolock
from benchmarks.contestants import contestant
from benchmarks.worker import Stage

__all__ = ["connections", "held", "holder", "kept", "leases", "waiter", "waiting"]

ALL_AT_ONCE = 200


async def _acquire_all(locks: Sequence[aiolock.Lock]) -> list[aiolock.Lease]:
    got: list[aiolock.Lease] = []
    for start in range(0, len(locks), ALL_AT_ONCE):
        got += await asyncio.gather(*(lock.acquire() for lock in locks[start : start + ALL_AT_ONCE]))
    return got


async def _all_wait(client: aiolock.Client, count: int) -> None:
    while client.stats()["waiting"] < count:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.02)
    # Attempts under way and their answers pass.
    await asyncio.sleep(0.5)


async def leases(stage: Stage, url: str, count: int, ttl: float, seconds: float) -> dict[str, Any]:
    """Hold many leases for a while: share of one core, and how late renewals were answered."""
    del stage
    async with aiolock.connect(url, namespace="bench", ttl=ttl) as client:
        kept = await _acquire_all([client.lock(f"lease:{number}") for number in range(count)])
        lateness = _listen_to_renewals(client)
        renewed, cpu, start = client.stats()["renewals"], time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        share = (time.process_time() - cpu) / (time.perf_counter() - start)
        renewed = client.stats()["renewals"] - renewed
        alive = sum(lease.held for lease in kept)
        await asyncio.gather(*(lease.release() for lease in kept))
    return {"share": share, "renewals": renewed, "alive": alive, "lateness": lateness}


def _listen_to_renewals(client: aiolock.Client) -> list[float]:
    """Seconds from when a renewal was due until its answer was used; grows while the client runs."""
    scheduler = client._runtime.scheduler
    due: dict[Any, float] = {}
    lateness: list[float] = []
    ask, learn = scheduler._ask, scheduler._learn

    def asking(terms: list[Any], now: float) -> None:
        due.update((term, term.due) for term in terms)
        ask(terms, now)

    def learning(term: Any, grant: Any, now: float) -> None:
        lateness.append(max(0.0, now - due.pop(term, now)))
        learn(term, grant, now)

    scheduler._ask, scheduler._learn = asking, learning  # type: ignore[method-assign]
    return lateness


async def kept(stage: Stage, who: str, url: str, count: int, ttl: float, seconds: float) -> dict[str, Any]:
    """Hold many locks for a while: processor seconds of this process, and the statements of its connections to SQLite."""
    statements: Counter[str] = Counter()
    connect = sqlite3.connect

    def counted(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.set_trace_callback(lambda statement: statements.update([statement.split()[0]]))
        return connection

    sqlite3.connect = counted  # type: ignore[assignment]
    try:
        it = contestant(who, url)
        it.ttl = ttl
        async with it, it.keep([f"kept:{number}" for number in range(count)]):
            # What came of the acquisitions is over.
            await asyncio.sleep(ttl / 2)
            await stage.pause()
            before, cpu = Counter(statements), time.process_time()
            await asyncio.sleep(seconds)
            used, sent = time.process_time() - cpu, statements - before
            await stage.pause()
    finally:
        sqlite3.connect = connect
    return {"processor": used, "statements": sent}


async def held(stage: Stage, url: str, count: int) -> float:
    """Bytes per lease that is held."""
    del stage
    async with aiolock.connect(url, namespace="bench") as client:
        names = [f"held:{number}" for number in range(count)]
        await client.lock("first").acquire()
        tracemalloc.start()
        before = _traced()
        kept = []
        for start in range(0, count, ALL_AT_ONCE):
            some = names[start : start + ALL_AT_ONCE]
            kept += await asyncio.gather(*(client.lock(name).acquire() for name in some))
        used = _traced() - before
        tracemalloc.stop()
        await asyncio.gather(*(lease.release() for lease in kept))
    return used / count


async def waiting(stage: Stage, url: str, count: int, locks: int, fair: bool, share: bool) -> float:
    """Bytes per task that waits, beyond those of a task that waits for a plain future.

    With ``share`` all tasks use one lock object, else everybody makes one.
    """
    del stage
    loop = asyncio.get_running_loop()
    async with (
        aiolock.connect(url, namespace="bench") as other,
        aiolock.connect(url, namespace="bench") as client,
    ):
        names = [f"wanted:{number}" for number in range(locks)]
        kept = await _acquire_all([other.lock(name) for name in names])
        shared = client.lock(names[0], fair=fair) if share else None

        async def idle(number: int) -> None:
            del number
            await loop.create_future()

        async def contender(number: int) -> None:
            async with shared or client.lock(names[number % locks], fair=fair):
                pass

        tracemalloc.start()
        plain = await _per_task(idle, count, lambda: asyncio.sleep(0.1))
        ours = await _per_task(contender, count, lambda: _all_wait(client, count))
        tracemalloc.stop()
        await asyncio.gather(*(lease.release() for lease in kept))
    return ours - plain


async def _per_task(work: Callable[[int], Any], count: int, ready: Callable[[], Awaitable[Any]]) -> float:
    before = _traced()
    tasks: list[asyncio.Task[None]] = [asyncio.create_task(work(number)) for number in range(count)]
    await ready()
    used = _traced() - before
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return used / count


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def connections(stage: Stage, who: str, url: str, tasks: int) -> None:
    """Hold a lock that many tasks of this process wait for, and pause while they do."""
    await stage.pause()
    async with contestant(who, url) as it:

        async def contender() -> None:
            async with it.lock("crowded"):
                pass

        async with it.lock("crowded"):
            waiters = [asyncio.create_task(contender()) for _ in range(tasks)]
            await asyncio.sleep(1)
            await stage.pause()
        for task in waiters:
            task.cancel()
        await asyncio.wait(waiters)


async def holder(stage: Stage, url: str, locks: int, seconds: float) -> None:
    """Hold locks that others want, for so long that nothing is renewed meanwhile."""
    async with aiolock.connect(url, namespace="bench", ttl=3600) as client:
        kept = await _acquire_all([client.lock(f"wanted:{number}") for number in range(locks)])
        await stage.pause()
        await stage.pause()
        await asyncio.sleep(seconds)
        await stage.pause()
        await asyncio.gather(*(lease.release() for lease in kept))


async def waiter(stage: Stage, url: str, locks: int, tasks: int, seconds: float) -> None:
    """Wait for locks with several tasks each, while somebody counts commands."""
    async with aiolock.connect(url, namespace="bench") as client:
        await stage.pause()

        async def contender(number: int) -> None:
            async with client.lock(f"wanted:{number % locks}"):
                pass

        waiters = [asyncio.create_task(contender(number)) for number in range(locks * tasks)]
        await _all_wait(client, locks * tasks)
        await stage.pause()
        await asyncio.sleep(seconds)
        await stage.pause()
        for task in waiters:
            task.cancel()
        await asyncio.wait(waiters)
