"""One of many processes that want the same locks, and write down what they did: `worker.py URL NAMESPACE FILE NAME SEED`."""

from __future__ import annotations

import asyncio
import random
import sys

import aiolock
from tests.faults.history import Recorder

NAMES = ("x", "y", "z")
TASKS = 3


async def work(client: aiolock.Client, recorder: Recorder, task: str) -> None:
    while True:
        name = random.choice(NAMES)
        hold = recorder.acquiring(name, task)
        try:
            lease = await client.lock(name, fair=random.random() < 0.3).acquire(
                timeout=random.uniform(0.05, 5)
            )
        except aiolock.LockError:
            recorder.unknown(hold)
            await asyncio.sleep(0.01)
            continue
        recorder.acquired(hold, lease.token)
        watching = asyncio.create_task(watch(lease, recorder, hold))
        await asyncio.sleep(random.uniform(0, 0.03))
        if not lease.lost:
            recorder.releasing(hold)
            await lease.release()
            recorder.released(hold, "ok" if not lease.lost else "fail")
        await watching


async def watch(lease: aiolock.Lease, recorder: Recorder, hold: str) -> None:
    if await lease.wait_lost() is not None:
        recorder.lost(hold)


async def main(url: str, namespace: str, file: str, name: str, seed: str) -> None:
    random.seed(seed)
    recorder = Recorder(file, name)
    async with aiolock.connect(url, namespace=namespace, ttl=30) as client:
        await asyncio.gather(*(work(client, recorder, f"t{number}") for number in range(TASKS)))


asyncio.run(main(*sys.argv[1:]))
