"""Opening a client again: locks and decorated functions go on working, leases of earlier openings stay lost."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from aiolock import Client, LockLost, connect, lock_all
from tests.contract.deployments import Deployment
from tests.contract.test_guards import in_a_fork
from tests.faults.staging import gets_the_lock, nothing_remains, rising, token_of, until

Work = Callable[[], Coroutine[Any, Any, Any]]


def elsewhere(work: Work) -> Any:
    """Run `work` on a loop of its own, in a thread of its own; its failure is the test's."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(work()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


async def aside(work: Work) -> Any:
    """The same, while this loop goes on."""
    return await asyncio.to_thread(elsewhere, work)


def kinds(client: Client, deployment: Deployment) -> dict[str, Callable[[], Awaitable[Any]]]:
    """A use of everything that a client makes, through objects that are made once."""
    lock, fair, reentrant = client.lock("m"), client.lock("f", fair=True), client.reentrant_lock("r")

    async def block(*locks: Any) -> None:
        for one in locks:
            async with one:
                pass
            lease = await one.acquire()
            await lease.release()

    async def again() -> None:
        async with reentrant, reentrant:
            pass

    @client.locked("decorated:{n}")
    async def decorated(n: int) -> int:
        return n

    async def call() -> None:
        assert await decorated(3) == 3

    @client.once("job", at_most=5)
    async def job() -> str:
        return "done"

    async def run() -> None:
        assert await job() == "done"

    both = lock_all(lock, client.lock("other"))
    uses: dict[str, Callable[[], Awaitable[Any]]] = {
        "lock": lambda: block(lock, fair),
        "reentrant": again,
        "locked": call,
        "once": run,
        "lock_all": lambda: block(both),
    }
    if "read-write" in deployment.kinds:
        sides = client.rwlock("rw").read(), client.rwlock("rw").write()
        uses["rwlock"] = lambda: block(*sides)
    if "semaphore" in deployment.kinds:
        semaphore = client.semaphore("s", 3)

        async def permits() -> None:
            await block(semaphore)
            lease = await semaphore.acquire(permits=2)
            await lease.release()

        uses["semaphore"] = permits
    if "fencing" in deployment.promises and "elections" in deployment.kinds:
        election = client.election("e")

        async def lead() -> None:
            async with election.campaign() as term:
                leader = await election.leader()
                assert leader is not None
                assert leader.token == term.token or not deployment.shows

        uses["election"] = lead
    if "registers" in deployment.kinds:
        latch = client.latch("l", 9)
        uses["latch"] = latch.count_down
        barrier = client.barrier("b", 1)
        uses["barrier"] = lambda: barrier.wait(timeout=20)
    return uses


async def test_everything_that_a_client_made_works_after_it_was_opened_again(deployment):
    client = deployment.connect()
    uses = kinds(client, deployment)

    async def use() -> None:
        async with client:
            for work in uses.values():
                await work()

    await use()
    await use()
    # On the loop of another thread.
    await aside(use)
    await use()


async def test_tokens_go_on_rising(deployment):
    client = deployment.connect()
    lock = client.lock("x")
    tokens = []
    for _ in range(4):
        async with client, lock as lease:
            tokens.append(token_of(lease))
    assert rising(tokens)


async def test_a_lease_of_an_earlier_opening_is_lost_and_its_release_does_nothing(deployment, rival):
    client = deployment.connect()
    lock = client.lock("x")
    async with client:
        old = await lock.acquire()
    assert (old.held, old.lost, await old.wait_lost()) == (False, True, "closed")
    async with client, lock as lease:
        await old.release()
        await aside(old.release)
        with pytest.raises(LockLost):
            old.check()
        with pytest.raises(RuntimeError, match="closed"):
            await old.renew()
        lease.check()
        await lease.renew()
        assert await rival.lock("x").try_acquire() is None
    await gets_the_lock(rival, "x")


async def test_a_block_of_an_earlier_opening_ends_in_the_next(deployment, rival):
    client = await deployment.connect().open()
    lock = client.lock("x", on_loss="signal")
    entered, leave = asyncio.Event(), asyncio.Event()

    async def block() -> None:
        async with lock:
            entered.set()
            await leave.wait()

    old = asyncio.ensure_future(block())
    await entered.wait()
    await client.aclose()
    async with client, lock as lease:
        leave.set()
        with pytest.raises(LockLost):
            await old
        lease.check()
        assert await rival.lock("x").try_acquire() is None
    await nothing_remains(rival, "x")


async def test_a_client_is_open_once_at_a_time(deployment):
    client = deployment.connect()

    async def refused() -> None:
        with pytest.raises(RuntimeError, match="cannot be opened: it is open"):
            await client.open()

    async with client:
        await refused()
        await aside(refused)
        async with client.lock("x"):
            pass
    openings = [asyncio.ensure_future(client.open()) for _ in range(2)]
    done = await asyncio.gather(*openings, return_exceptions=True)
    assert sorted(type(one).__name__ for one in done) == ["Client", "RuntimeError"]
    await client.aclose()


async def test_counters_begin_anew_with_each_opening(deployment):
    client = deployment.connect()
    for _ in range(2):
        async with client, client.lock("x"):
            assert client.stats()["acquired"] == 1


def at_once(work: Work) -> Any:
    """Run `work` on a loop that is closed with everything that still runs there."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()


# What was left open in a closed loop is closed when it is collected, and Python says so.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("closed", [at_once, asyncio.run], ids=["at once", "asyncio.run"])
async def test_a_loop_that_was_closed_counts_as_the_end_of_its_client(
    deployment, closed, asyncio_has_no_complaint
):
    client = deployment.connect(ttl=deployment.ttl_of(2))
    lock = client.lock("x")
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def leave_open() -> Any:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await client.open()
        return await lock.acquire()

    async def leave_open_again() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await client.open()

    def collected() -> bool:
        # The thread that has run a loop may still hold it.
        gc.collect()
        return all(loop() is None for loop in loops)

    def end(work: Work) -> Any:
        return closed(work() if closed is asyncio.run else work)

    old = await asyncio.to_thread(end, leave_open)
    with pytest.raises(RuntimeError, match=r"event loop in which this client was opened is closed"):
        await lock.acquire()
    async with client:
        assert (old.held, old.lost) == (False, True)
        await old.release()
        # The server keeps the hold for a ttl at most; what waits has to see that by itself.
        lease = await lock.acquire(timeout=120)
        assert token_of(lease) > token_of(old) or not deployment.shows
        await old.release()
        lease.check()
        await lease.release()
    await asyncio.to_thread(end, leave_open_again)
    await client.aclose()
    assert "closed" in repr(client)
    client = lock = old = lease = None
    await until(collected)
    lines = asyncio_has_no_complaint.lines
    assert all(line.startswith("Task was destroyed but it is pending!") for line in lines)
    lines.clear()


async def test_a_hold_of_a_closed_loop_is_free_at_once_in_memory():
    """Nothing of that loop can run again, so nobody is inside."""
    client = connect(f"memory://{secrets.token_hex(4)}")
    lock = client.lock("x")

    async def leave_open() -> Any:
        await client.open()
        return await lock.acquire()

    old = await asyncio.to_thread(asyncio.run, leave_open())
    async with client:
        assert old.lost
        lease = await lock.try_acquire()
        assert lease is not None
        await lease.release()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_opens_what_its_parent_has_closed_or_never_opened(deployment, rival):
    never, closed = deployment.connect(), deployment.connect()
    locks = [each.lock("x") for each in (never, closed)]
    pool = closed.semaphore("s", 2) if "semaphore" in deployment.kinds else None
    async with closed:
        pass
    async with rival.lock("x") as before:
        token = token_of(before)
    # SQLite refuses a child whose parent has the file open.
    await rival.aclose()

    async def check() -> None:
        for client, lock in zip((never, closed), locks, strict=True):
            async with client, lock as lease:
                assert token_of(lease) > token
                if deployment.shows:
                    [holder] = (await lock.inspect()).holders
                    assert holder.pid == os.getpid()
        if pool is not None:
            async with closed, pool:
                info = await pool.inspect()
                assert {holder.pid for holder in info.holders} <= {os.getpid()}

    in_a_fork(check)
    for client, lock in zip((never, closed), locks, strict=True):
        async with client, lock as lease:
            assert token_of(lease) > token
