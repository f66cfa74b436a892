"""What the tests of the contract stage: waiting for a state, ending a hold in a chosen tick, looking at what remains."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import pytest

from aiolock import AcquireTimeout, BackendUnavailable, Client, Lease, Lock, UnsupportedKind
from aiolock.core.local_queue import QueueState
from aiolock.errors import LossReason
from tests.contract.deployments import Deployment

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which something that has to happen counts as never."""


async def until(condition: Callable[[], Any | Awaitable[Any]], what: str = "the condition") -> None:
    """Wait until `condition` is true; the state is what counts, not how long it takes."""
    async with asyncio.timeout(PATIENCE):
        while True:
            answer = condition()
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer:
                return
            await asyncio.sleep(0.001)


async def queued(lock: Lock, count: int) -> None:
    """Wait until the server knows `count` waiters."""

    async def enough() -> bool:
        return len((await lock.inspect()).waiters) >= count

    await until(enough)


async def waiting(client: Client, count: int) -> None:
    """Wait until `count` tasks of `client` wait."""
    await until(lambda: client.stats()["waiting"] >= count)


async def in_line(client: Client, count: int = 1) -> None:
    """Wait until `client` knows of so many places in line: before the answer, an attempt that is cut off ends in an error."""
    await until(
        lambda: (
            sum(getattr(one, "_state", None) is QueueState.WAITING for one in client._runtime.contending)
            >= count
        )
    )


async def passes(count: int) -> None:
    """Let everything else run for `count` passes of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def verdict(lease: Lease, reason: LossReason = "expired") -> None:
    """End the hold in this very tick, by the way that every loss takes; the server is told by a clean-up."""
    lease._hold.parent.runtime.scheduler.lose(lease._hold.validity, reason)


class NoToken:
    """In the place of a token where the format of locks has none: it is neither too old nor known from before."""

    def __gt__(self, _: object) -> bool:
        return True

    def __lt__(self, _: object) -> bool:
        return True

    def __eq__(self, _: object) -> bool:
        return True

    __hash__ = None


def token_of(lease: Lease) -> Any:
    """The token of a lease, which says so itself if there is none."""
    if lease._hold.parent.runtime.backend.dialect:
        with pytest.raises(UnsupportedKind):
            _ = lease.token
        return NoToken()
    return lease.token


def rising(tokens: Sequence[Any]) -> bool:
    """Whether each of these tokens is greater than the one before."""
    return all(one < other for one, other in pairwise(tokens))


def shown_token(lease: Lease) -> int:
    """The token of a lease as others see it, which is 0 if there is none."""
    token = token_of(lease)
    return 0 if isinstance(token, NoToken) else token


async def gets_the_lock(client: Client, name: str) -> Any:
    """Another client gets the lock, and gives it back; its token."""
    lease = await client.lock(name).acquire(timeout=PATIENCE)
    await lease.release()
    return token_of(lease)


async def in_time(work: Callable[[], Awaitable[T]]) -> T:
    """Do it as soon as the server can be reached; what the attempt returns."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await work()
            except BackendUnavailable:
                await asyncio.sleep(0.01)


async def nothing_remains(client: Client, name: str) -> None:
    """The server knows neither a holder nor a waiter."""

    async def empty() -> bool:
        info = await client.lock(name).inspect()
        return not info.holders and not info.waiters

    await until(empty)


async def outcome(work: Awaitable[Any]) -> tuple[BaseException | None, int, int]:
    """Run `work` as a task of its own: what it raised, and the task's `cancelling()` before and at the end."""
    counts: list[int] = []

    async def run() -> None:
        task = asyncio.current_task()
        counts.append(task.cancelling())
        try:
            await work
        finally:
            counts.append(task.cancelling())

    task = asyncio.ensure_future(run())
    done, _ = await asyncio.wait([task], timeout=PATIENCE)
    if not done:
        task.cancel()
        raise AssertionError("the work did not end")
    error: BaseException | None
    try:
        error = task.exception()
    except asyncio.CancelledError as cancelled:
        error = cancelled
    return error, counts[0], counts[1]


__all__ = [
    "PATIENCE",
    "Deployment",
    "gets_the_lock",
    "in_line",
    "nothing_remains",
    "outcome",
    "passes",
    "queued",
    "until",
    "verdict",
    "waiting",
]


async def left_at_the_server(rival: Client, name: str) -> list[tuple[str, str]]:
    """What a sweep has to complain of when everybody but ``rival`` should have nothing to do with a lock any more."""
    lock = rival.lock(name)
    try:
        lease = await lock.acquire(timeout=PATIENCE / 4)
        await lease.release()
        async with asyncio.timeout(PATIENCE / 4):
            await nothing_remains(rival, name)
    except AcquireTimeout:
        return [("left", f"the lock: {await lock.inspect()}")]
    except TimeoutError:
        return [("left", f"at the server: {await lock.inspect()}")]
    return []


async def left_in_the_loop(before: set[asyncio.Task[Any]]) -> list[tuple[str, str]]:
    """The same of tasks that were not there before, and should have ended soon after."""
    for _ in range(2000):
        if not (tasks := asyncio.all_tasks() - before):
            return []
        await asyncio.sleep(0.001)
    return [("left", f"tasks {tasks}")]
