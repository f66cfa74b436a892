"""Workers, in a task group on each of several machines, that share jobs: one worker does each job.

    AIOLOCK_URL=redis://127.0.0.1:6379/0 python examples/workers.py     (start it several times)

The jobs of one account take turns, those of different accounts run side by side. If a worker loses its lock, its job is
cancelled and tried again; the other workers are not disturbed.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

import aiolock


@dataclass
class Job:
    account: str
    amount: int


@dataclass
class Ledger:
    """A stand-in for a database that checks fencing tokens: it refuses writes of earlier holders than the last writer."""

    balances: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    async def add(self, account: str, amount: int, token: int) -> None:
        if token < self.tokens.get(account, 0):
            raise RuntimeError(f"a later holder has written to {account}: {token} is too old")
        self.tokens[account] = token
        balance = self.balances.get(account, 0)
        await asyncio.sleep(0.001)  # the gap in which another worker would read the same balance
        self.balances[account] = balance + amount


async def worker(client: aiolock.Client, jobs: asyncio.Queue[Job], ledger: Ledger) -> None:
    while True:
        job = await jobs.get()
        try:
            async with client.lock(f"account:{job.account}", timeout=30) as lease:
                await ledger.add(job.account, job.amount, lease.token)
        except (aiolock.LockLost, aiolock.AcquireTimeout) as trouble:
            print(f"again: {trouble}")
            jobs.put_nowait(job)
        finally:
            jobs.task_done()


async def main(workers: int = 4) -> Ledger:
    ledger, jobs = Ledger(), asyncio.Queue[Job]()
    for number in range(40):
        jobs.put_nowait(Job(f"{number % 3}", 10))
    url = os.environ.get("AIOLOCK_URL", "memory://")
    async with aiolock.connect(url) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(worker(client, jobs, ledger)) for _ in range(workers)]
        await jobs.join()
        for task in tasks:
            task.cancel()
    return ledger


if __name__ == "__main__":
    print(asyncio.run(aiolock.run_until_signal(main())).balances)
