# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What a type checker says of synchronous code: every kind, method and decorator of the portal. Read, and never run.

``verify.py`` gives it to mypy and to pyright. A line with ``type: ignore`` is a mistake that both of them must find: an
ignore that is not needed is an error as well.
"""

from __future__ import annotations

import sqlite3
from typing import assert_type

from aiolock import Leader, LockInfo, portal


def kinds(client: portal.SyncClient) -> None:
    """Every kind of lock, and what its lease is."""
    with client.lock("a", ttl=5, timeout=2) as lease:
        assert_type(lease, portal.SyncLease)
        assert_type(lease.token, int)
        assert_type(lease.release_requested.wait(1), str | None)
        assert_type(lease.confirm(sqlite3.connect("locks.db")), None)
        with lease.guard() as same:
            assert_type(same, portal.SyncLease)
    with client.reentrant_lock("a") as level, client.rwlock("b").read(fair=True) as reader:
        assert_type((level, reader), tuple[portal.SyncLease, portal.SyncLease])
    with client.rwlock("b").write() as writer:
        assert_type(writer.downgrade(), None)
    semaphore = client.semaphore("c", 3)
    assert_type(semaphore.acquire(1, permits=2), portal.SyncLease)
    assert_type(semaphore.try_acquire(permits=2), portal.SyncLease | None)
    assert_type(client.latch("d", 2).count_down(request_id="7"), int)
    assert_type(client.barrier("e", 2, ttl=3).wait(timeout=1), int)
    election = client.election("f", ttl=3)
    with election.campaign(value=b"host:1") as term:
        assert_type(term, portal.SyncLease)
    for leader in election.observe():
        assert_type(leader, Leader | None)
    with portal.lock_all(client.lock("a"), semaphore, timeout=1) as both:
        assert_type(both, portal.SyncJointLease)
        assert_type(both.parts, tuple[portal.SyncLease, ...])
    assert_type(client.locks(), list[LockInfo])
    assert_type(client.is_current("a", 7), bool)


def decorators(client: portal.SyncClient) -> None:
    """Arguments and results are as before; a job may have been skipped."""

    @client.locked("order:{order_id}", timeout=2)
    def pay(order_id: int, amount: float = 1.5, *, note: str = "") -> str:
        return f"{order_id} {amount} {note}"

    @client.once("nightly", at_most=60)
    def report(day: str, *, full: bool = False) -> int:
        return len(day) + full

    assert_type(pay(7, note="x"), str)
    assert_type(report("today", full=True), int | None)
    pay("7")  # type: ignore[arg-type]
    report("today", whole=True)  # type: ignore[call-arg]


def mistakes(client: portal.SyncClient) -> None:
    """Options that there are not."""
    client.lock("a", on_loss="cancel")  # type: ignore[call-arg]
    client.lock("a", tll=3)  # type: ignore[call-arg]
    client.lock("a", connection=sqlite3.connect("locks.db"))  # type: ignore[call-arg]
    client.election("a", fair=True)  # type: ignore[call-arg]
    client.lock("a").acquire("soon")  # type: ignore[arg-type]
