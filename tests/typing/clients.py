# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What a type checker says of the ways to make a client. Read, and never run.

``verify.py`` gives it to mypy and to pyright. A line with ``type: ignore`` is a mistake that both of them must find: an
ignore that is not needed is an error as well.
"""

from __future__ import annotations

import asyncio
from typing import assert_type

import redis.asyncio

from aiolock import (
    Client,
    Holder,
    Leader,
    Lease,
    Lock,
    LockEvent,
    LockInfo,
    Semaphore,
    connect,
    portal,
    run_until_signal,
)
from aiolock.decorators import Locked
from aiolock.types import Kind


def addresses() -> None:
    """A URL, several, or a client of redis-py."""
    assert_type(connect("memory://", wait_for_server=30, require={"fencing"}), Client)
    assert_type(connect(["redis://a", "redis://b", "redis://c"], lazy=True), Client)
    assert_type(connect(redis.asyncio.Redis(host="h"), label="web-1"), Client)
    assert_type(portal.connect("memory://", wait_for_server=1.5), portal.SyncClient)
    assert_type(portal.connect(redis.asyncio.Redis(host="h")), portal.SyncClient)
    connect(7)  # type: ignore[arg-type]
    connect("memory://", lazy="yes")  # type: ignore[arg-type]
    connect("memory://", wait_for_server=None)  # type: ignore[arg-type]


def lifetimes(client: Client, sync: portal.SyncClient, lease: Lease, held: portal.SyncLease) -> None:
    """Options about the life of a hold, of every kind of lock, and another life."""
    assert_type(client.lock("a", renew=False, grace=1.5), Lock)
    assert_type(client.semaphore("a", 3, renew=True, grace=1), Semaphore)
    assert_type(client.locked("a", renew=False), Locked)
    assert_type(sync.lock("a", renew=False, grace=None), portal.SyncLock)
    client.rwlock("a").read(renew=False)
    client.election("a", renew=False, grace=2)
    sync.election("a", renew=False, grace=2)
    lease.extend(3.5).close()
    assert_type(held.extend(3), None)
    lease.extend("3").close()  # type: ignore[arg-type]
    lease.extend().close()  # type: ignore[call-arg]
    client.lock("a", renew=None)  # type: ignore[call-overload]
    client.lock("a", grace="2")  # type: ignore[call-overload]


async def additions(client: Client) -> None:
    """Calls beside the locks."""
    assert_type(await client.is_current("a", 7), bool)
    await client.is_current("a", "7")  # type: ignore[arg-type]
    assert_type(await client.semaphore("a", 3).set_limit(0), None)
    election = client.election("a")
    async with election.campaign(value=b"host:1") as term:
        assert_type(term, Lease)
    if (leader := await election.leader()) is not None:
        assert_type(leader, Leader)
        assert_type((leader.holder, leader.token, leader.value), tuple[Holder, int, bytes])
    async for other in election.observe():
        assert_type(other, Leader | None)
    election.campaign(value="host:1")  # type: ignore[arg-type]


async def acquiring(client: Client) -> None:
    """Timed tries, blocks with a timeout of their own, permits, and what a task knows of its lease."""
    lock = client.lock("a")
    assert_type(await lock.try_acquire(), Lease | None)
    assert_type(await lock.try_acquire(timeout=None), Lease | None)
    assert_type(await lock.acquire(timeout=2), Lease)
    async with lock.acquire(timeout=2) as lease:
        assert_type(lease, Lease)
        assert_type(lease.depth, int)
    assert_type(lock.owned(), bool)
    semaphore = client.semaphore("b", 3, permits=2)
    assert_type(semaphore, Semaphore)
    assert_type(await semaphore.try_acquire(timeout=1, permits=2), Lease | None)
    assert_type(await semaphore.current_limit(), int)
    assert_type(semaphore.limit, int)
    info = await lock.inspect()
    assert_type(info, LockInfo)
    assert_type(info.local_waiters, int | None)
    assert_type(info.holders[0].local_waiters, int | None)
    await lock.try_acquire("soon")  # type: ignore[arg-type]
    lock.acquire(timeout="soon")  # type: ignore[arg-type]
    client.semaphore("b", 3, permits="2")  # type: ignore[arg-type]
    await semaphore.set_limit("0")  # type: ignore[arg-type]


def watching(client: Client, lock_kind: Kind) -> None:
    """Callbacks keep their type; a program ends in good order by a signal."""

    @client.on_acquired
    def count(event: LockEvent) -> None:
        assert_type(event.token, int)

    count(LockEvent("a", lock_kind, "", 7, 0.5))
    client.on_lost(count)

    async def main() -> int:
        return 7

    assert_type(asyncio.run(run_until_signal(main())), int)
    client.on_released(None)  # type: ignore[type-var]
