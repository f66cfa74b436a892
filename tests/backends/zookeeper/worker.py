"""One of many processes that want the same locks, and write down what they did: `worker.py URL NAMESPACE FILE NAME SEED`."""

from __future__ import annotations

import asyncio
import random
import sys

import aiolock
from tests.faults.history import Recorder

NAMES = ("x", "y", "z")
TASKS = 3
PERMITS = 3


def choose(client: aiolock.Client) -> tuple[aiolock.Lock, int]:
    """A lock of some kind, and how many permits it asks for."""
    draw = random.random()
    if draw < 0.5:
        return client.lock(random.choice(NAMES), fair=random.random() < 0.3), 1
    if draw < 0.75:
        both = client.rwlock("shared")
        return (both.write() if random.random() < 0.3 else both.read()), 1
    permits = random.choice((1, 1, 2))
    return client.semaphore("some", PERMITS), permits


async def work(client: aiolock.Client, recorder: Recorder, task: str) -> None:
    while True:
        lock, permits = choose(client)
        mode = lock.kind.mode.value
        hold = recorder.acquiring(lock.name, task, mode=mode, permits=permits)
        options = {"permits": permits} if mode == "permits" else {}
        try:
            lease = await lock.acquire(timeout=random.uniform(0.05, 5), **options)
        except aiolock.LockError:
            recorder.unknown(hold)
            await asyncio.sleep(0.01)
            continue
        recorder.acquired(hold, lease.token)
        watching = asyncio.create_task(watch(lease, recorder, hold))
        await asyncio.sleep(random.uniform(0, 0.03))
        if mode == "write" and random.random() < 0.5:
            await weaken(lease, recorder, hold)
        if not lease.lost:
            recorder.releasing(hold)
            await lease.release()
            recorder.released(hold, "ok" if not lease.lost else "fail")
        await watching


async def weaken(lease: aiolock.Lease, recorder: Recorder, hold: str) -> None:
    """Go on as a reader."""
    recorder.downgrading(hold)
    try:
        await lease.downgrade()
    except aiolock.LockError:
        return
    recorder.downgraded(hold)
    await asyncio.sleep(random.uniform(0, 0.03))


async def watch(lease: aiolock.Lease, recorder: Recorder, hold: str) -> None:
    if await lease.wait_lost() is not None:
        recorder.lost(hold)


async def main(url: str, namespace: str, file: str, name: str, seed: str) -> None:
    random.seed(seed)
    recorder = Recorder(file, name)
    async with aiolock.connect(url, namespace=namespace, ttl=30) as client:
        await asyncio.gather(*(work(client, recorder, f"t{number}") for number in range(TASKS)))


asyncio.run(main(*sys.argv[1:]))
