"""Peers on etcd: the lock service of the server, etcdctl, a lock by a key that people write by hand, and the requests that a lock costs.

They share one connection for each process. Their leases last so long that nothing has to be renewed while they are measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self

from aiolock.backends.etcd import messages
from aiolock.backends.etcd.connection import new_connection
from aiolock.backends.etcd.url import parameters
from benchmarks.contestants.base import BATCH, RENEWALS, InBlocks, Polling, again_and_again
from tests.processes import program

__all__ = ["Etcdctl", "KeptAlive", "LockService", "PollingKey", "PutDelete", "PutGet"]

LOCK, UNLOCK = "/v3lockpb.Lock/Lock", "/v3lockpb.Lock/Unlock"
KEEP_ALIVE = "/etcdserverpb.Lease/LeaseKeepAlive"
LASTS = 600
"""Seconds of a lease."""
TOGETHER = 100
"""Keys of one read."""


class OnEtcd(InBlocks):
    """One connection to the first member."""

    async def __aenter__(self) -> Self:
        address = parameters(self.url, {})
        self.wire = await new_connection(address.hosts[0], address, self.ttl)
        self._lease = await self.lease(LASTS)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.wire.transport is not None
        self.wire.transport.abort()

    async def lease(self, seconds: float) -> int:
        """Get a new lease."""
        return messages.granted(await self.wire.ask(messages.GRANT, messages.grant(int(seconds))))[0]

    async def change(self, conditions: list[bytes], *operations: bytes) -> bool:
        """Make a transaction; return whether its conditions held."""
        answer = await self.wire.ask(messages.TXN, messages.txn(conditions, operations))
        return messages.written(answer).made


class PutDelete(OnEtcd):
    """No lock: one bare put and one bare delete of a key, the least that a lock costs."""

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        await self.change([], messages.put(f"bare/{name}", b"1", self._lease))
        yield
        await self.change([], messages.delete(f"bare/{name}"))


class PollingKey(Polling, OnEtcd):
    """A key with a lease, which is put unless it is there, every ``interval`` seconds until it is not; then deleted."""

    async def enter(self, name: str) -> bool:
        key = f"polled/{name}"
        return await self.change([messages.unchanged(key, 0)], messages.put(key, b"1", self._lease))

    async def exit(self, name: str) -> None:
        await self.change([], messages.delete(f"polled/{name}"))


class LockService(OnEtcd):
    """``v3lockpb.Lock`` of the server, which waits in the place of its client: one call to enter and one to leave.

    Locks of one lease are one lock, so whoever holds or waits has a lease of its own; those that are free are used again.
    """

    async def __aenter__(self) -> Self:
        self._leases: list[int] = []
        return await super().__aenter__()

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        lease = self._leases.pop() if self._leases else await self.lease(LASTS)
        request = messages._message((1, f"service/{name}".encode()), (2, lease))
        key = messages.Fields(await self.wire.ask(LOCK, request)).data(2)
        yield
        await self.wire.ask(UNLOCK, messages._message((1, key)))
        self._leases.append(lease)


class Etcdctl(InBlocks):
    """``etcdctl lock``: a process for whoever holds or waits, which frees the lock when it is told to end."""

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        argv = [program("etcdctl", package="etcd-client", server="etcd")]
        argv += [f"--endpoints={parameters(self.url, {}).hosts[0]}", "lock", f"ctl/{name}", "--ttl", "30"]
        process = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, env={"ETCDCTL_API": "3"}
        )
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise RuntimeError(f"etcdctl ended with status {await process.wait()}")
        try:
            yield
        finally:
            process.terminate()
            await process.wait()


class KeptAlive(OnEtcd):
    """Keys with a lease each, as sessions of the lock service have, of which each is prolonged by itself."""

    @asynccontextmanager
    async def keep(self, names: Sequence[str]) -> AsyncIterator[None]:
        leases: list[int] = []
        for start in range(0, len(names), BATCH):
            leases += await asyncio.gather(*(self._put(name) for name in names[start : start + BATCH]))

        async def renew() -> None:
            calls = (self.wire.ask(KEEP_ALIVE, messages._message((1, lease))) for lease in leases)
            await asyncio.gather(*calls)

        async with again_and_again(renew, self.ttl / RENEWALS):
            yield

    async def _put(self, name: str) -> int:
        lease = await self.lease(self.ttl)
        await self.change([], messages.put(f"kept/{name}", b"1", lease))
        return lease


class PutGet(OnEtcd):
    """No lock: one bare keep-alive and put, and one bare read of all keys, again and again."""

    @asynccontextmanager
    async def keep(self, names: Sequence[str]) -> AsyncIterator[None]:
        keys = [f"kept/{name}" for name in names]
        for key in keys:
            await self.change([], messages.put(key, b"1", self._lease))

        async def renew() -> None:
            reads = [
                self.wire.ask(messages.TXN, messages.get(keys[first : first + TOGETHER], values=False))
                for first in range(0, len(keys), TOGETHER)
            ]
            await asyncio.gather(
                self.wire.ask(KEEP_ALIVE, messages._message((1, self._lease))),
                self.change([], messages.put(keys[0], b"2", self._lease)),
                *reads,
            )

        async with again_and_again(renew, self.ttl / RENEWALS):
            yield
