"""Closing a client: what is under a block is lost, everything is released, nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import LockLost
from tests.faults.staging import (
    PATIENCE,
    gets_the_lock,
    nothing_remains,
    outcome,
    passes,
    queued,
    until,
    waiting,
)


async def test_nothing_happens_before_a_client_is_opened(deployment):
    client = deployment.connect()
    lock = client.lock("x")
    for call in (lock.acquire, lock.try_acquire, lock.locked, lock.inspect, lock.force_release):
        with pytest.raises(RuntimeError, match="not open"):
            await call()
    await client.aclose()
    async with client, lock:
        pass


async def test_a_closed_client_refuses_everything(deployment):
    async with deployment.connect() as client:
        lock = client.lock("x")
        reentrant = client.reentrant_lock("x")
    calls = (lock.acquire, lock.try_acquire, lock.locked, lock.inspect, lock.force_release, reentrant.acquire)
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            await call()


async def test_closing_twice_or_in_two_tasks_is_closing_once(deployment):
    client = await deployment.connect().open()
    await asyncio.gather(client.aclose(), client.aclose())
    await client.aclose()
    assert "closed" in repr(client)


async def test_closing_loses_what_is_under_a_block(deployment, rival):
    client = await deployment.connect().open()
    entered = asyncio.Event()

    async def work() -> None:
        async with client.lock("x"):
            entered.set()
            await asyncio.get_running_loop().create_future()

    working = asyncio.create_task(outcome(work()))
    await entered.wait()
    await client.aclose()
    error, before, after = await working
    assert isinstance(error, LockLost)
    assert error.reason == "closed"
    assert before == after == 0
    await gets_the_lock(rival, "x")


async def test_closing_in_ones_own_block_loses_it(deployment, rival):
    client = await deployment.connect().open()

    async def work() -> None:
        async with client.lock("x"):
            await client.aclose()

    error, before, after = await outcome(work())
    assert isinstance(error, LockLost)
    assert error.reason == "closed"
    assert before == after == 0
    await client.aclose()
    await gets_the_lock(rival, "x")


async def test_closing_releases_every_lease(deployment, rival):
    async with deployment.connect() as client:
        leases = [await client.lock(f"x{number}").acquire() for number in range(20)]
        levels = [await client.reentrant_lock("y").acquire() for _ in range(2)]
    for number in range(20):
        assert (await rival.lock(f"x{number}").inspect()).holders == ()
    assert (await rival.lock("y").inspect()).holders == ()
    for lease in (*leases, *levels):
        assert lease.lost
        assert not lease.held
        assert await lease.wait_lost() == "closed"
        # Says nothing: it is over already.
        await lease.release()
        with pytest.raises(LockLost, match="closed"):
            lease.check()
        with pytest.raises(RuntimeError, match="closed"):
            await lease.renew()


async def test_closing_ends_waiting_with_a_runtime_error(deployment, rival):
    client = await deployment.connect().open()
    holder = await rival.lock("x").acquire()
    waiters = [asyncio.create_task(client.lock("x").acquire()) for _ in range(3)]
    waiters += [asyncio.create_task(client.lock("x", fair=True).acquire()) for _ in range(2)]
    await waiting(client, 5)
    await queued(rival.lock("x"), 3)
    await client.aclose()
    for error in await asyncio.gather(*waiters, return_exceptions=True):
        assert isinstance(error, RuntimeError)
        assert "closed" in str(error)
    assert (await rival.lock("x").inspect()).waiters == ()
    holder.check()
    await holder.release()
    await nothing_remains(rival, "x")


@pytest.mark.parametrize("steps", range(8))
async def test_closing_in_the_middle_of_an_attempt_leaves_nothing_behind(deployment, rival, steps):
    client = await deployment.connect(ttl=100).open()
    attempts = [
        asyncio.create_task(client.lock("x").acquire()),
        asyncio.create_task(client.lock("y").try_acquire()),
        asyncio.create_task(client.lock("z", fair=True).acquire()),
    ]
    await passes(steps)
    await client.aclose()
    for result in await asyncio.gather(*attempts, return_exceptions=True):
        if isinstance(result, BaseException):
            assert isinstance(result, RuntimeError)
            assert "clos" in str(result)
        else:
            assert result.lost
    for name in "xyz":
        await nothing_remains(rival, name)


@pytest.mark.parametrize("steps", range(4))
async def test_closing_in_the_middle_of_a_release_leaves_nothing_behind(deployment, rival, steps):
    client = await deployment.connect(ttl=100).open()
    leases = [await client.lock(name).acquire() for name in "xyz"]
    releases = [asyncio.create_task(lease.release()) for lease in leases]
    await passes(steps)
    await client.aclose()
    await asyncio.gather(*releases)
    for name in "xyz":
        await nothing_remains(rival, name)


async def test_closing_waits_for_cleanups(deployment, rival):
    client = await deployment.connect(ttl=100).open()
    holder = await rival.lock("x").acquire()
    waiters = [asyncio.create_task(client.lock("x", fair=True).acquire()) for _ in range(5)]
    await queued(rival.lock("x"), 5)
    for waiter in waiters:
        waiter.cancel()
    await asyncio.wait(waiters)
    await client.aclose()
    assert (await rival.lock("x").inspect()).waiters == ()
    await holder.release()


async def test_a_closing_whose_caller_is_cancelled_goes_on(deployment, rival):
    client = await deployment.connect(ttl=100).open()
    lease = await client.lock("x").acquire()
    closing = asyncio.create_task(client.aclose())
    await passes(1)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await until(lambda: "closed" in repr(client))
    assert lease.lost
    await nothing_remains(rival, "x")


async def test_no_task_of_a_closed_client_is_left(deployment):
    before = asyncio.all_tasks()
    client = await deployment.connect().open()
    leases = [await client.lock(f"x{number}").acquire() for number in range(3)]
    waiter = asyncio.create_task(client.lock("x0").acquire())
    await waiting(client, 1)
    await client.aclose()
    await asyncio.wait([waiter])
    assert isinstance(waiter.exception(), RuntimeError)
    await until(lambda: asyncio.all_tasks() == before)
    assert all(lease.lost for lease in leases)


async def test_a_block_that_ends_while_its_client_closes_is_told(deployment, rival):
    client = await deployment.connect(ttl=100).open()

    async def work() -> None:
        async with client.lock("x"):
            closing.append(asyncio.create_task(client.aclose()))
            await passes(1)

    closing: list[asyncio.Task] = []
    error, before, after = await outcome(work())
    assert error is None or (isinstance(error, LockLost) and error.reason == "closed")
    assert before == after == 0
    await closing[0]
    await nothing_remains(rival, "x")


async def test_an_exception_in_the_block_of_the_client_passes_through(deployment):
    with pytest.raises(ValueError, match="of the block"):
        async with deployment.connect() as client:
            lease = await client.lock("x").acquire()
            raise ValueError("of the block")
    assert "closed" in repr(client)
    assert lease.lost


async def test_a_client_that_was_refused_at_open_leaves_nothing_open(deployment):
    before = asyncio.all_tasks()
    client = deployment.connect(require={"miracles"})
    for _ in range(2):
        with pytest.raises(Exception, match="miracles"):
            await client.open()
    assert asyncio.all_tasks() == before
    with pytest.raises(RuntimeError, match="not open"):
        await client.lock("x").acquire()


async def test_closing_has_a_time_limit(deployment):
    client = await deployment.connect().open()
    lease = await client.lock("x").acquire()
    async with asyncio.timeout(PATIENCE):
        await client.aclose(timeout=0)
    assert "closed" in repr(client)
    assert lease.lost
