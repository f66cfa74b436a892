"""A holder that is killed, and whoever waits for what it held."""

from __future__ import annotations

import asyncio
import time

import aiolock
from benchmarks.contestants.ours import connect
from benchmarks.worker import Stage

__all__ = ["heir", "victim"]


async def victim(stage: Stage, url: str, name: str, ttl: float) -> None:
    """Take the lock, say so, and keep it until we are killed."""
    async with connect(url, ttl=ttl) as client, client.lock(name):
        await stage.pause()
        await asyncio.Event().wait()


async def heir(stage: Stage, url: str, name: str, ttl: float) -> float:
    """Wait for a lock that somebody holds: when we got it."""
    async with connect(url, ttl=ttl) as client:

        async def wait() -> tuple[aiolock.Lease, float]:
            return await client.lock(name).acquire(), time.monotonic()

        waiting = asyncio.create_task(wait())
        while not client.stats()["waiting"]:
            if waiting.done():
                raise RuntimeError("the holder lost the lock before it was killed: the machine is too busy")
            await asyncio.sleep(0.02)
        await stage.pause()
        lease, entered = await waiting
        await lease.release()
    return entered
