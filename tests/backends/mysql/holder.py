"""A process that takes a lock, says so, and keeps it: python -m tests.backends.mysql.holder URL MODE NAMESPACE NAME TTL [LOCK-TTL]."""

from __future__ import annotations

import asyncio
import sys

import aiolock


async def main(url: str, mode: str, namespace: str, name: str, ttl: str, own: str = "") -> None:
    async with aiolock.connect(url, mode=mode, namespace=namespace, ttl=float(ttl)) as client:
        lease = await client.lock(name, ttl=float(own or ttl)).acquire()
        print("held", flush=True)
        reason = await lease.wait_lost()
        print("lost", reason, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
