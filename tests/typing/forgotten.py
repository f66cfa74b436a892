"""Calls whose ``await`` was forgotten: mypy has to report each, or the comment behind it is an unused one."""

# mypy: enable-error-code="unused-awaitable"

from __future__ import annotations

from aiolock import Client, lock_all


def main(client: Client) -> None:
    """Forget to wait."""
    lock, other, rwlock = client.lock("x"), client.lock("y"), client.rwlock("x")
    # What can be entered as well is no coroutine to mypy, which reports it by an option.
    lock.acquire()  # type: ignore[unused-awaitable]
    client.semaphore("x", 2).acquire()  # type: ignore[unused-awaitable]
    client.reentrant_lock("x").acquire()  # type: ignore[unused-awaitable]
    rwlock.write().acquire()  # type: ignore[unused-awaitable]
    lock_all(lock, other).acquire()  # type: ignore[unused-awaitable]
    lock.try_acquire()  # type: ignore[unused-coroutine]
    client.latch("x", 1).wait()  # type: ignore[unused-coroutine]
    client.aclose()  # type: ignore[unused-coroutine]
