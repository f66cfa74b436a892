# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What a type checker says of locks, leases, callbacks and exporters. Read, and never run.

``verify.py`` gives it to mypy and to pyright. A line with ``type: ignore`` is a mistake that both of them must find: an
ignore that is not needed is an error as well.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import assert_type

import prometheus_client
from opentelemetry.trace import get_tracer_provider

from aiolock import (
    Client,
    Holder,
    JointLease,
    Kept,
    Lease,
    LockEvent,
    SkipEvent,
    etcd,
    lock_all,
    opentelemetry,
    prometheus,
    run_until_signal,
)


async def acquiring(client: Client) -> None:
    """A lease, awaited or as a block; or none, after a try."""
    lock = client.lock("a", ttl=5, timeout=2, max_hold=60, fair=True, label="web-1")
    assert_type(await lock.acquire(), Lease)
    assert_type(await lock.acquire(timeout=None), Lease)
    assert_type(await lock.try_acquire(), Lease | None)
    assert_type(await lock.try_acquire(timeout=1.5), Lease | None)
    async with lock as lease, lock.acquire(timeout=2) as other:
        assert_type((lease, other), tuple[Lease, Lease])
    assert_type(lock.owned(), bool)
    assert_type(await asyncio.create_task(lock.acquire()), Lease)
    async with asyncio.TaskGroup() as group:
        assert_type(group.create_task(lock.acquire()), asyncio.Task[Lease])
    print(lock.acquire().token)  # type: ignore[attr-defined]
    with lock.acquire():  # type: ignore[attr-defined]
        pass
    await lock.acquire("soon")  # type: ignore[arg-type]


async def leases(client: Client, lease: Lease) -> None:
    """What a lease tells, and what can be done with it."""
    assert_type((lease.token, lease.depth, lease.held, lease.lost), tuple[int, int, bool, bool])
    assert_type(lease.remaining(), float)
    assert_type(await lease.confirm(object()), None)
    assert_type(await lease.release(keep=60), None)
    assert_type(await lease.release_requested, str | None)
    assert_type(await etcd.fenced_put(lease, "key", b"value"), int)
    async with client.reentrant_lock("a") as level:
        assert_type(level.depth, int)
    await lease.release(keep="long")  # type: ignore[arg-type]
    await etcd.fenced_put(lease, "key", "value")  # type: ignore[arg-type]


async def semaphores(client: Client) -> None:
    """Permits of the semaphore, or of one request."""
    semaphore = client.semaphore("c", 3, permits=2)
    async with semaphore.acquire(permits=3, timeout=1) as lease:
        assert_type(lease, Lease)
    assert_type(await semaphore.try_acquire(1, permits=2), Lease | None)
    assert_type((semaphore.limit, await semaphore.current_limit()), tuple[int, int])
    await semaphore.acquire(2, 3)  # type: ignore[call-arg]


async def several(client: Client) -> None:
    """Locks of one client as one."""
    async with lock_all(client.lock("a"), client.semaphore("b", 2)).acquire(timeout=1) as both:
        assert_type(both, JointLease)
        assert_type(both.parts, tuple[Lease, ...])


def callbacks(client: Client, event: LockEvent) -> None:
    """Callbacks stay what they are; exporters take clients of both kinds."""

    @client.on_acquired
    @client.on_released
    @client.on_lost
    def count(event: LockEvent) -> int:
        return len(event.name)

    assert_type(count(event), int)
    assert_type((event.name, event.waited, event.held), tuple[str, float, float])
    prometheus.export(client, prometheus_client.CollectorRegistry())
    opentelemetry.instrument(client, tracer_provider=get_tracer_provider())
    client.on_lost(lambda: None)  # type: ignore[type-var]

    @client.on_skipped
    def skipped(event: SkipEvent) -> None:
        assert_type(
            (event.holder, event.kept, event.until), tuple[Holder | None, Kept | None, datetime | None]
        )

    skipped(SkipEvent("report:a", "report:{tenant}"))
    assert_type(client.on_renewal_failing(count)(event), int)
    assert_type((event.remaining, event.error), tuple[float, str])
    client.on_skipped(count)  # type: ignore[type-var]
    client.on_renewal_failing(skipped)  # type: ignore[type-var]


async def main() -> int:
    """Return the status of a script."""
    return 0


async def scripts() -> None:
    """The result is that of the program."""
    assert_type(await run_until_signal(main()), int)
    await run_until_signal(main)  # type: ignore[arg-type]
