"""More requests at once than are admitted wait in the client: in order, for their own timeout, and without a trace."""

from __future__ import annotations

import asyncio
import time

import pytest

from aiolock import AcquireTimeout, BackendUnavailable
from tests.contract.deployments import (
    MariaDB,
    Memory,
    RedisQuorum,
    RedisWithoutPubSub,
    ZooKeeper,
    registry,
)
from tests.faults.staging import PATIENCE, nothing_remains, passes, until, waiting

NEEDS: dict[str, str | None] = {"fair": None, "permits": "semaphore", "read": "read-write"}

NAMES = [f"lock {number}" for number in range(12)]


async def test_a_burst_is_served_in_order(client):
    limiter = client._runtime.limiter
    limiter.room = 1
    order = []

    async def work(name: str) -> None:
        async with client.lock(name):
            order.append(name)

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        for name in NAMES:
            group.create_task(work(name))
    assert order == NAMES
    assert limiter.room == 1


async def test_what_ends_before_its_admission_leaves_nothing(deployment, rival):
    limit = deployment.seconds(0.1)
    async with deployment.connect(label="client") as client:
        limiter = client._runtime.limiter
        limiter.room = 0
        cancelled = asyncio.create_task(client.lock("cancelled").acquire())
        patient = asyncio.create_task(client.lock("patient").acquire(timeout=PATIENCE))
        first = asyncio.create_task(client.lock("shared").acquire(timeout=limit))
        await passes(3)
        # Behind the other task of the same client, and not concerned by what becomes of that.
        second = asyncio.create_task(client.lock("shared").acquire(timeout=PATIENCE))
        await passes(3)
        cancelled.cancel()
        with pytest.raises(AcquireTimeout):
            await first
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert not await rival.lock("cancelled").locked()
        assert not patient.done()
        assert not second.done()
        assert not await rival.lock("patient").locked()
        limiter.answered()
        async with asyncio.timeout(PATIENCE):
            leases = [await patient, await second]
        assert limiter.room == 1
        for lease in leases:
            await lease.release()
        assert not client._runtime.in_use()
        for name in ("patient", "shared"):
            await nothing_remains(rival, name)


async def test_a_single_try_waits_for_its_admission_no_longer_than_a_command_timeout(deployment, rival):
    async with deployment.connect(command_timeout=deployment.seconds(0.3)) as client:
        limiter = client._runtime.limiter
        limiter.room = 0
        with pytest.raises(BackendUnavailable, match="too many requests of this client came first"):
            await client.lock("x").try_acquire()
        with pytest.raises(BackendUnavailable, match="too many requests of this client came first"):
            await client.lock("x").acquire(timeout=0)
        assert not client._runtime.in_use()
        limiter.room = 1
        assert not await rival.lock("x").locked()


async def test_what_waits_for_its_admission_hears_that_the_client_was_closed(deployment, rival):
    client = await deployment.connect().open()
    limiter = client._runtime.limiter
    limiter.room = 0
    tasks = [asyncio.create_task(client.lock(name).acquire()) for name in NAMES]
    await passes(3)
    await client.aclose()
    limiter.answered()
    async with asyncio.timeout(PATIENCE):
        await asyncio.wait(tasks)
    for task in tasks:
        with pytest.raises(RuntimeError, match="was closed while this task waited"):
            task.result()
    for name in NAMES:
        assert not await rival.lock(name).locked()


async def test_a_burst_for_a_thousand_free_locks_fails_in_no_task(deployment):
    limit = max(3.0, deployment.seconds(0.6))
    async with deployment.connect(command_timeout=limit) as client:
        limiter, loop = client._runtime.limiter, asyncio.get_running_loop()
        # As many are admitted at once as the deployment says, and the last of all waits for longer than one may take.
        room, limiter.room = limiter.room, 0

        async def work(name: str) -> None:
            await (await client.lock(name).acquire()).release()

        async with asyncio.TaskGroup() as group:
            for number in range(1_000):
                group.create_task(work(f"{number}"))
            begun = loop.time()
            await until(lambda: loop.time() > begun + 1.2 * limit)
            for _ in range(room):
                limiter.answered()
        assert limiter.room == room


@pytest.mark.parametrize("act", NEEDS)
@pytest.mark.parametrize(
    "server",
    # Elsewhere a hand-over takes a poll, or so many round trips that hundreds are too many for a test.
    [each for each in registry() if not issubclass(each, RedisWithoutPubSub | ZooKeeper | MariaDB)],
    ids=lambda each: each.name,
    indirect=True,
    scope="session",
)
async def test_hundreds_of_tasks_wait_for_one_lock_in_order_and_at_the_cost_of_no_other_lease(
    deployment, rival, act
):
    # More than many a server has room for in one place.
    count, ttl, served = 600, deployment.seconds(3), []
    taken = {"read": rival.rwlock("x").write(), "permits": rival.semaphore("x", 5)}.get(act, rival.lock("x"))
    permits = {"permits": 5} if act == "permits" else {}
    async with deployment.connect(label="client") as client:
        lock = {"read": client.rwlock("x").read(), "permits": client.semaphore("x", 5)}.get(
            act, client.lock("x", fair=True)
        )
        other = await client.lock("other", ttl=ttl).acquire()
        holder = await taken.acquire(**permits)
        held_up = 0.0

        async def watch() -> None:
            # The time of the processor that passes between two steps of this task, however busy the machine is.
            nonlocal held_up
            while True:
                begun = time.thread_time()
                await asyncio.sleep(0.001)
                held_up = max(held_up, time.thread_time() - begun)

        async def work(number: int) -> None:
            lease = await lock.acquire(timeout=PATIENCE)
            served.append(number)
            await lease.release()

        watcher = asyncio.create_task(watch())
        tasks = [asyncio.create_task(work(number)) for number in range(count)]
        await waiting(client, count)
        await holder.release()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*tasks)
        watcher.cancel()
        assert not other.lost
        assert held_up < 0.25
        await other.release()
    if act == "fair" and deployment.queues:
        assert served == list(range(count))
    info = await taken.inspect()
    assert not info.holders
    assert not info.waiters


@pytest.mark.parametrize(
    "server",
    # A function call is always answered, and one server of three does not silence a quorum.
    [each for each in registry() if not issubclass(each, Memory | RedisQuorum)],
    ids=lambda each: each.name,
    indirect=True,
    scope="session",
)
async def test_a_silent_server_refuses_a_burst_within_a_few_command_timeouts(deployment):
    limit = deployment.seconds(0.5)
    async with deployment.over(command_timeout=limit) as (client, way):
        await (await client.lock("x").acquire(timeout=PATIENCE)).release()
        limiter = client._runtime.limiter
        limiter.room = 1
        way.cut(refused=False)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        tasks = [asyncio.create_task(client.lock(f"{number}").acquire()) for number in range(40)]
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait(tasks)
        # One after the other each would take a command timeout.
        assert loop.time() - begun < 20 * limit
        assert all(isinstance(task.exception(), BackendUnavailable) for task in tasks)
        await until(lambda: limiter.room == 1)
