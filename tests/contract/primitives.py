"""Everything that a user can await, each with the situation in which it is interrupted.

A primitive is an async context manager: it prepares the situation, yields a function that makes the operation anew,
and afterwards clears away what it prepared itself. What the operation leaves behind is looked at by the sweep.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiolock import Client, Lease
from tests.contract.deployments import Deployment
from tests.contract.staging import PATIENCE, queued, until, waiting

__all__ = ["PRIMITIVES", "Primitive", "Stage"]

Operation = Callable[[], Coroutine[Any, Any, Any]]


@dataclass
class Stage:
    """Who takes part in one attempt: the client that is interrupted, and another one."""

    deployment: Deployment
    client: Client
    rival: Client
    name: str
    kept: list[Lease]
    """Leases that the interruption of the operation must not touch."""


Primitive = Callable[[Stage], AbstractAsyncContextManager[Operation]]
PRIMITIVES: dict[str, Primitive] = {}


def primitive(name: str) -> Callable[[Callable[[Stage], AsyncIterator[Operation]]], Primitive]:
    def register(prepare: Callable[[Stage], AsyncIterator[Operation]]) -> Primitive:
        PRIMITIVES[name] = asynccontextmanager(prepare)
        return PRIMITIVES[name]

    return register


@asynccontextmanager
async def released_on_demand(holder: Lease, condition: Callable[[], Coroutine[Any, Any, None]]):
    """Let go of `holder` once `condition` is there; at the latest at the end."""

    async def let_go() -> None:
        await condition()
        await holder.release()

    task = asyncio.create_task(let_go())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        await holder.release()


# --- getting it


@primitive("acquire, free")
async def _(stage):
    yield stage.client.lock(stage.name).acquire


@primitive("acquire, free, with a timeout")
async def _(stage):
    yield lambda: stage.client.lock(stage.name).acquire(timeout=PATIENCE)


@primitive("acquire, held elsewhere")
async def _(stage):
    holder = await stage.rival.lock(stage.name).acquire()
    lock = stage.client.lock(stage.name)
    async with released_on_demand(holder, lambda: queued(stage.rival.lock(stage.name), 1)):
        yield lock.acquire


@primitive("acquire, held elsewhere, with a timeout")
async def _(stage):
    holder = await stage.rival.lock(stage.name).acquire()
    lock = stage.client.lock(stage.name)
    async with released_on_demand(holder, lambda: queued(stage.rival.lock(stage.name), 1)):
        yield lambda: lock.acquire(timeout=PATIENCE)


@primitive("acquire, behind local waiters")
async def _(stage):
    lock = stage.client.lock(stage.name)
    holder = await lock.acquire()

    async def turn() -> None:
        async with lock:
            await asyncio.sleep(0)

    first = asyncio.create_task(turn())
    await waiting(stage.client, 1)
    async with released_on_demand(holder, lambda: waiting(stage.client, 2)):
        yield lock.acquire
    await first


@primitive("acquire, fair, behind others")
async def _(stage):
    holder = await stage.rival.lock(stage.name, fair=True).acquire()
    lock = stage.client.lock(stage.name, fair=True)

    async def turn() -> None:
        async with lock:
            await asyncio.sleep(0)

    first = asyncio.create_task(turn())
    await queued(stage.rival.lock(stage.name), 1)
    async with released_on_demand(holder, lambda: queued(stage.rival.lock(stage.name), 2)):
        yield lock.acquire
    await first


@primitive("acquire, re-entrant, first level")
async def _(stage):
    yield stage.client.reentrant_lock(stage.name).acquire


@primitive("try_acquire, free")
async def _(stage):
    yield stage.client.lock(stage.name).try_acquire


@primitive("try_acquire, taken")
async def _(stage):
    holder = await stage.rival.lock(stage.name).acquire()
    stage.kept.append(holder)
    yield stage.client.lock(stage.name).try_acquire
    stage.kept.clear()
    await holder.release()


# --- holding it


@primitive("async with")
async def _(stage):
    lock = stage.client.lock(stage.name)

    async def block() -> None:
        async with lock as lease:
            await asyncio.sleep(0)
            lease.check()

    yield block


@primitive("async with, contended on both sides")
async def _(stage):
    holder = await stage.rival.lock(stage.name).acquire()
    lock = stage.client.lock(stage.name)

    async def block() -> None:
        async with lock as lease:
            successor = asyncio.create_task(turn())
            await asyncio.sleep(0)
            lease.check()
        await successor

    async def turn() -> None:
        async with lock:
            await asyncio.sleep(0)

    async with released_on_demand(holder, lambda: queued(stage.rival.lock(stage.name), 1)):
        yield block


@primitive("async with, two re-entrant levels")
async def _(stage):
    async def blocks() -> None:
        async with stage.client.reentrant_lock(stage.name):
            await asyncio.sleep(0)
            async with stage.client.reentrant_lock(stage.name) as lease:
                await asyncio.sleep(0)
                lease.check()
            await asyncio.sleep(0)

    yield blocks


@primitive("async with lease")
async def _(stage):
    async def block() -> None:
        async with await stage.client.lock(stage.name).acquire() as lease:
            await asyncio.sleep(0)
            lease.check()

    yield block


@primitive("lease.guard")
async def _(stage):
    lease = await stage.client.lock(stage.name).acquire()
    stage.kept.append(lease)

    async def guarded() -> None:
        with lease.guard():
            await asyncio.sleep(0)
            lease.check()

    yield guarded
    stage.kept.clear()
    await lease.release()


@primitive("lease.renew")
async def _(stage):
    lease = await stage.client.lock(stage.name).acquire()
    stage.kept.append(lease)
    yield lease.renew
    stage.kept.clear()
    await lease.release()


@primitive("lease.wait_lost")
async def _(stage):
    lease = await stage.client.lock(stage.name).acquire()

    async def watched() -> None:
        ending = asyncio.create_task(lease.release())
        await lease.wait_lost()
        await ending

    yield watched
    await lease.release()


# --- giving it back


@primitive("release")
async def _(stage):
    lease = await stage.client.lock(stage.name).acquire()
    yield lease.release


@primitive("release, with a local waiter")
async def _(stage):
    lock = stage.client.lock(stage.name)
    lease = await lock.acquire()

    async def turn() -> None:
        async with lock:
            await asyncio.sleep(0)

    waiter = asyncio.create_task(turn())
    await waiting(stage.client, 1)
    yield lease.release
    await lease.release()
    await waiter


@primitive("release, with a waiter elsewhere")
async def _(stage):
    lease = await stage.client.lock(stage.name).acquire()

    async def turn() -> None:
        async with stage.rival.lock(stage.name):
            await asyncio.sleep(0)

    waiter = asyncio.create_task(turn())
    await queued(stage.rival.lock(stage.name), 1)
    yield lease.release
    await lease.release()
    await waiter


@primitive("release of the last re-entrant level")
async def _(stage):
    async def last() -> None:
        first = await stage.client.reentrant_lock(stage.name).acquire()
        second = await stage.client.reentrant_lock(stage.name).acquire()
        try:
            await asyncio.sleep(0)
        finally:
            await first.release()
            await second.release()

    yield last


# --- looking at it


@primitive("locked")
async def _(stage):
    lease = await stage.rival.lock(stage.name).acquire()
    stage.kept.append(lease)
    yield stage.client.lock(stage.name).locked
    stage.kept.clear()
    await lease.release()


@primitive("inspect")
async def _(stage):
    lease = await stage.rival.lock(stage.name).acquire()
    stage.kept.append(lease)
    yield stage.client.lock(stage.name).inspect
    stage.kept.clear()
    await lease.release()


@primitive("force_release")
async def _(stage):
    lease = await stage.rival.lock(stage.name).acquire()
    yield stage.client.lock(stage.name).force_release
    await lease.release()


# --- the client


@primitive("open")
async def _(stage):
    client = stage.deployment.connect(ttl=100)
    yield client.open
    await client.aclose()


@primitive("aclose, holding and waiting")
async def _(stage):
    client = await stage.deployment.connect(ttl=100).open()
    lease = await client.lock(stage.name).acquire()

    async def wait() -> None:
        try:
            async with client.lock(stage.name):
                raise AssertionError("a closed client got the lock")
        except RuntimeError:
            pass

    waiter = asyncio.create_task(wait())
    await waiting(client, 1)
    yield client.aclose
    await client.aclose()
    await waiter
    await until(lambda: lease.lost or lease.remaining() == 0)
