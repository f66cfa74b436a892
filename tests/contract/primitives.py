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

from aiolock import BarrierBroken, Client, Lease, lock_all
from tests.contract.deployments import Deployment
from tests.faults.staging import PATIENCE, queued, until, waiting

__all__ = ["BRIEF", "NEEDS", "PRIMITIVES", "Primitive", "Stage"]

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
NEEDS: dict[str, set[str]] = {}
"""What a deployment must have for some of them, in the words of `deployments.KINDS` and `WORDS`."""


BRIEF: set[str] = set()
"""Those that have much in common with the mutex, which is swept at all its steps."""


def primitive(name: str, *needs: str) -> Callable[[Callable[[Stage], AsyncIterator[Operation]]], Primitive]:
    def register(prepare: Callable[[Stage], AsyncIterator[Operation]]) -> Primitive:
        PRIMITIVES[name] = asynccontextmanager(prepare)
        NEEDS[name] = set(needs) - {"brief"}
        BRIEF.update({name} if "brief" in needs else ())
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


@asynccontextmanager
async def kept(stage: Stage, client: Client | None = None, **options: Any):
    """A lease, the rival's unless said otherwise, which the interruption must not touch."""
    lease = await (client or stage.rival).lock(stage.name, **options).acquire()
    stage.kept.append(lease)
    yield lease
    stage.kept.clear()
    await lease.release()


# --- getting it


@primitive("acquire, free")
async def _(stage):
    yield stage.client.lock(stage.name).acquire


@primitive("acquire, free, with a timeout")
async def _(stage):
    yield lambda: stage.client.lock(stage.name).acquire(timeout=PATIENCE)


@primitive("acquire, by a lazy client", "brief")
async def _(stage):
    async with stage.deployment.connect(lazy=True, ttl=100) as lazy:
        yield lazy.lock(stage.name).acquire


@primitive("inspect, by a lazy client", "brief")
async def _(stage):
    async with stage.deployment.connect(lazy=True, ttl=100) as lazy:
        yield lazy.lock(stage.name).inspect


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
    async with kept(stage):
        yield stage.client.lock(stage.name).try_acquire


@primitive("try_acquire, held elsewhere, with a timeout")
async def _(stage):
    holder = await stage.rival.lock(stage.name).acquire()
    lock = stage.client.lock(stage.name)
    async with released_on_demand(holder, lambda: queued(stage.rival.lock(stage.name), 1)):
        yield lambda: lock.try_acquire(timeout=PATIENCE)


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


@primitive("async with acquire(timeout), held elsewhere", "brief")
async def _(stage):
    holder = await stage.rival.lock(stage.name).acquire()

    async def block() -> None:
        async with stage.client.lock(stage.name).acquire(timeout=PATIENCE) as lease:
            await asyncio.sleep(0)
            lease.check()

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
    async with kept(stage, stage.client) as lease:

        async def guarded() -> None:
            with lease.guard():
                await asyncio.sleep(0)
                lease.check()

        yield guarded


@primitive("lease.renew")
async def _(stage):
    async with kept(stage, stage.client) as lease:
        yield lease.renew


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
    async with kept(stage):
        yield stage.client.lock(stage.name).locked


@primitive("inspect")
async def _(stage):
    async with kept(stage):
        yield stage.client.lock(stage.name).inspect


@primitive("force_release")
async def _(stage):
    lease = await stage.rival.lock(stage.name).acquire()
    yield stage.client.lock(stage.name).force_release
    await lease.release()


# --- other kinds: what is left of them is looked at here, for the sweep looks at the mutex of that name


async def gone(stage: Stage, lock: Any) -> None:
    """Neither a hold nor a place is left of a lock."""

    async def empty() -> bool:
        info = await lock.inspect()
        return not info.holders and not info.waiters

    async with asyncio.timeout(PATIENCE / 4):
        await until(empty, f"{lock!r} is free")


@primitive("read, behind a writer", "read-write", "brief")
async def _(stage):
    holder = await stage.rival.rwlock(stage.name).write().acquire()
    lock = stage.client.rwlock(stage.name).read()

    async def block() -> None:
        async with lock as lease, lock:
            await asyncio.sleep(0)
            lease.check()

    async with released_on_demand(holder, lambda: queued(stage.rival.rwlock(stage.name).read(), 1)):
        yield block
    await gone(stage, lock)


@primitive("write, behind a reader", "read-write", "brief")
async def _(stage):
    holder = await stage.rival.rwlock(stage.name).read().acquire()
    lock = stage.client.rwlock(stage.name).write()

    async def block() -> None:
        async with lock as lease:
            await asyncio.sleep(0)
            lease.check()

    async with released_on_demand(holder, lambda: queued(lock, 1)):
        yield block
    await gone(stage, lock)


@primitive("downgrade, with a reader and a writer behind", "downgrade", "brief")
async def _(stage):
    pair, theirs = stage.client.rwlock(stage.name), stage.rival.rwlock(stage.name)
    inside: list[str] = []

    async def turn(lock: Any, who: str) -> None:
        async with lock:
            assert who == "reader" or not inside
            inside.append(who)
            await asyncio.sleep(0)
            inside.remove(who)

    lease = await pair.write().acquire()
    others = [asyncio.create_task(turn(theirs.read(), "reader"))]
    await queued(theirs.read(), 1)
    others.append(asyncio.create_task(turn(theirs.write(), "writer")))
    await queued(theirs.read(), 2)
    yield lease.downgrade
    assert lease.held
    await lease.release()
    await asyncio.gather(*others)
    await gone(stage, pair.read())


@primitive("extend", "extension")
async def _(stage):
    lock = stage.client.lock(stage.name, ttl=100, renew=False)
    lease = await lock.acquire()
    yield lambda: lease.extend(200)
    assert lease.held
    await lease.extend(50)
    assert lease.remaining() < 50
    await lease.release()
    await gone(stage, lock)


@primitive("extend, by less, permits", "extension", "semaphore", "brief")
async def _(stage):
    semaphore = stage.client.semaphore(stage.name, 3, permits=2, ttl=100, renew=False)
    lease = await semaphore.acquire()
    yield lambda: lease.extend(50)
    assert lease.held
    await lease.extend(150)
    assert lease.remaining() > 100
    await lease.release()
    await gone(stage, semaphore)


@primitive("acquire, not renewed, held elsewhere", "brief")
async def _(stage):
    holder = await stage.rival.lock(stage.name).acquire()
    lock = stage.client.lock(stage.name, renew=False)
    async with released_on_demand(holder, lambda: queued(stage.rival.lock(stage.name), 1)):
        yield lock.acquire


@primitive("permits, behind others", "semaphore", "brief")
async def _(stage):
    holder = await stage.rival.semaphore(stage.name, 3).acquire(permits=2)
    semaphore = stage.client.semaphore(stage.name, 3)

    async def block() -> None:
        async with await semaphore.acquire(permits=3) as lease:
            await asyncio.sleep(0)
            lease.check()

    async with released_on_demand(holder, lambda: queued(semaphore, 1)):
        yield block
    await gone(stage, semaphore)


@primitive("async with acquire(permits), held elsewhere", "semaphore", "brief")
async def _(stage):
    holder = await stage.rival.semaphore(stage.name, 2).acquire()
    semaphore = stage.client.semaphore(stage.name, 2)

    async def block() -> None:
        async with semaphore.acquire(permits=2):
            await asyncio.sleep(0)

    async with released_on_demand(holder, lambda: queued(semaphore, 1)):
        yield block
    await gone(stage, semaphore)


@primitive("try_acquire of permits, with a timeout", "semaphore", "brief")
async def _(stage):
    holder = await stage.rival.semaphore(stage.name, 1).acquire()
    semaphore = stage.client.semaphore(stage.name, 1)

    async def attempt() -> None:
        lease = await semaphore.try_acquire(timeout=PATIENCE)
        assert lease is not None
        await lease.release()

    async with released_on_demand(holder, lambda: queued(semaphore, 1)):
        yield attempt
    await gone(stage, semaphore)


@primitive("current_limit", "semaphore", "brief")
async def _(stage):
    yield stage.client.semaphore(stage.name, 1).current_limit


@primitive("set_limit", "semaphore", "brief")
async def _(stage):
    holder = await stage.rival.semaphore(stage.name, 1).acquire()
    yield lambda: stage.client.semaphore(stage.name, 1).set_limit(2)
    await holder.release()
    await gone(stage, stage.rival.semaphore(stage.name, 1))


@primitive("is_current", "tokens", "brief")
async def _(stage):
    async with kept(stage) as lease:
        yield lambda: stage.client.is_current(stage.name, lease.token)


@primitive("set_limit, to pause", "semaphore", "brief")
async def _(stage):
    holder = await stage.rival.semaphore(stage.name, 1).acquire()
    yield lambda: stage.client.semaphore(stage.name, 1).set_limit(0)
    await stage.rival.semaphore(stage.name, 1).set_limit(1)
    await holder.release()
    await gone(stage, stage.rival.semaphore(stage.name, 1))


@primitive("acquire, of a semaphore that is paused", "semaphore", "brief")
async def _(stage):
    semaphore = stage.client.semaphore(stage.name, 1)
    await semaphore.set_limit(0)

    async def resume() -> None:
        await queued(stage.rival.semaphore(stage.name, 1), 1)
        await stage.rival.semaphore(stage.name, 1).set_limit(1)

    async def block() -> None:
        async with semaphore:
            await asyncio.sleep(0)

    resuming = asyncio.create_task(resume())
    yield block
    resuming.cancel()
    await asyncio.wait([resuming])
    await stage.rival.semaphore(stage.name, 1).set_limit(1)
    await gone(stage, semaphore)


@primitive("request_release", "requests", "brief")
async def _(stage):
    async with kept(stage):
        yield lambda: stage.client.lock(stage.name).request_release("please")


@primitive("waiting for a request to release", "requests", "brief")
async def _(stage):
    # Short, because on some servers the request comes with a renewal.
    async with kept(stage, stage.client, ttl=3.0) as lease:

        async def told() -> None:
            await lease.release_requested

        asking = asyncio.create_task(stage.rival.lock(stage.name).request_release("please"))
        yield told
        await asking


@primitive("lock_all, free", "brief")
async def _(stage):
    names = [f"{stage.name} 1", stage.name]
    yield lock_all(*(stage.client.lock(name) for name in names)).acquire
    await gone(stage, stage.client.lock(names[0]))


@primitive("lock_all, the first is taken", "brief")
async def _(stage):
    names = [stage.name, f"{stage.name} 1", f"{stage.name} 2"]
    holder = await stage.rival.lock(stage.name).acquire()
    several = lock_all(*(stage.client.lock(name) for name in names))

    async def block() -> None:
        async with several as lease:
            await asyncio.sleep(0)
            lease.check()

    async with released_on_demand(holder, lambda: queued(stage.rival.lock(stage.name), 1)):
        yield block
    for name in names:
        await gone(stage, stage.client.lock(name))


@primitive("lock_all, the last is taken", "brief")
async def _(stage):
    names = [stage.name, f"{stage.name} 1", f"{stage.name} 2"]
    holder = await stage.rival.lock(names[-1]).acquire()
    several = lock_all(*(stage.client.lock(name) for name in names))
    async with released_on_demand(holder, lambda: queued(stage.rival.lock(names[-1]), 1)):
        yield several.acquire
    for name in names[1:]:
        await gone(stage, stage.client.lock(name))


@primitive("try_acquire of lock_all, with a timeout", "brief")
async def _(stage):
    names = [stage.name, f"{stage.name} 1"]
    holder = await stage.rival.lock(names[1]).acquire()
    several = lock_all(*(stage.client.lock(name) for name in names))

    async def attempt() -> None:
        lease = await several.try_acquire(timeout=PATIENCE)
        assert lease is not None
        await lease.release()

    async with released_on_demand(holder, lambda: queued(stage.rival.lock(names[1]), 1)):
        yield attempt
    await gone(stage, stage.client.lock(names[1]))


@primitive("campaign, behind a leader", "elections", "brief")
async def _(stage):
    term = await stage.rival.election(stage.name).campaign().acquire()
    election = stage.client.election(stage.name)

    async def lead() -> None:
        async with election.campaign() as won:
            await asyncio.sleep(0)
            won.check()

    async with released_on_demand(term, lambda: queued(election.campaign(), 1)):
        yield lead
    await gone(stage, election.campaign())


@primitive("campaign with a value, behind a leader", "elections", "tokens", "values", "brief")
async def _(stage):
    term = await stage.rival.election(stage.name).campaign(value=b"first").acquire()
    election = stage.client.election(stage.name)

    async def lead() -> None:
        async with election.campaign(value=b"second"):
            leader = await election.leader()
            assert leader is not None
            assert leader.value == b"second"

    async with released_on_demand(term, lambda: queued(election.campaign(), 1)):
        yield lead
    await gone(stage, election.campaign())


@primitive("observe, one change", "elections", "brief")
async def _(stage):
    election = stage.client.election(stage.name, ttl=0.3)

    async def observe() -> None:
        seen = 0
        async for _ in election.observe():
            seen += 1
            if seen == 2:
                return
            leading.set()

    async def lead() -> None:
        await leading.wait()
        async with stage.rival.election(stage.name).campaign():
            await done.wait()

    leading, done = asyncio.Event(), asyncio.Event()
    leader = asyncio.create_task(lead())
    yield observe
    leading.set()
    done.set()
    await leader
    await gone(stage, election.campaign())


async def nobody_writes(stage: Stage) -> None:
    """The work on registers has come to rest."""
    for client in (stage.client, stage.rival):
        await until(lambda client=client: not client._runtime.registers)


@primitive("latch.count_down", "registers", "brief")
async def _(stage):
    yield stage.client.latch(stage.name, 2).count_down
    await nobody_writes(stage)
    # Counted once or, if it was interrupted, once or not at all.
    assert await stage.rival.latch(stage.name, 2).count() in (1, 2)


@primitive("latch.count_down, with a name", "registers", "brief")
async def _(stage):
    yield lambda: stage.client.latch(stage.name, 3).count_down(request_id="job")
    await nobody_writes(stage)
    # Whether or not it was interrupted: whoever makes sure has counted it once.
    assert await stage.rival.latch(stage.name, 3).count_down(request_id="job") == 2
    await nobody_writes(stage)


@primitive("latch.wait", "registers", "brief")
async def _(stage):
    async def opened() -> None:
        opening = asyncio.create_task(stage.rival.latch(stage.name, 1).count_down())
        try:
            await stage.client.latch(stage.name, 1).wait()
        finally:
            opening.cancel()

    yield opened
    await nobody_writes(stage)


@primitive("barrier.wait, the last of two", "registers", "brief")
async def _(stage):
    other = asyncio.create_task(stage.rival.barrier(stage.name, 2).wait())

    async def arrived() -> bool:
        return await stage.rival.barrier(stage.name, 2).waiting() == 1

    await until(arrived)
    yield stage.client.barrier(stage.name, 2).wait
    # It passed, or the round was broken, or the one that was interrupted never came.
    async with asyncio.timeout(PATIENCE / 4):
        while not other.done() and await stage.rival.barrier(stage.name, 2).waiting():
            await asyncio.sleep(0.001)
            if await stage.rival.barrier(stage.name, 2).waiting() == 1:
                other.cancel()
    await asyncio.wait([other])
    assert other.cancelled() or other.exception() is None or isinstance(other.exception(), BarrierBroken)
    await nobody_writes(stage)
    assert await stage.rival.barrier(stage.name, 2).waiting() == 0
    await nobody_writes(stage)


# --- the client


@primitive("open")
async def _(stage):
    client = stage.deployment.connect(ttl=100)
    yield client.open
    await client.aclose()


@primitive("open, with wait_for_server", "brief")
async def _(stage):
    client = stage.deployment.connect(wait_for_server=60, ttl=100)
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
