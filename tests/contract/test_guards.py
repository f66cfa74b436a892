"""Using what is somebody else's (another loop's, another thread's, a parent process's) is refused at once."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import traceback

import pytest

from tests.faults.staging import gets_the_lock, passes


def on_another_loop(work) -> list[BaseException | object]:
    """Run each coroutine function of `work` on a loop in another thread; what came of them."""
    results: list[BaseException | object] = []

    async def run() -> None:
        for call in work:
            try:
                results.append(await call())
            except RuntimeError as error:
                results.append(error)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    thread.join()
    return results


async def guarded(lease) -> None:
    with lease.guard():
        pass


async def test_another_event_loop_is_refused(client):
    lease = await client.lock("x").acquire()
    lock = client.lock("y")
    calls = [
        lock.acquire,
        lock.try_acquire,
        lock.locked,
        lock.inspect,
        lock.force_release,
        lock.__aenter__,
        client.reentrant_lock("y").acquire,
        lease.release,
        lease.renew,
        lease.wait_lost,
        lease.__aenter__,
        lambda: guarded(lease),
        client.aclose,
    ]
    results = on_another_loop(calls)
    assert len(results) == len(calls)
    for result in results:
        assert isinstance(result, RuntimeError), result
        assert "another event loop" in str(result)
    assert lease.held
    lease.check()
    await lease.release()
    await gets_the_lock(client, "y")


async def test_a_client_belongs_to_the_loop_that_opened_it(deployment):
    client = deployment.connect()

    async def use() -> str:
        async with client:
            await gets_the_lock(client, "x")
        return "used"

    assert on_another_loop([use]) == ["used"]
    with pytest.raises(RuntimeError):
        await client.lock("x").acquire()


# --- fork


def in_a_fork(check) -> None:
    """Run `check` on a loop of a forked child; its failure is the test's."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        # The child must never return into the test runner.
        try:
            asyncio.run(check())
            os.write(write, b"fine")
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        report = pipe.read().decode()
    os.waitpid(child, 0)
    assert report == "fine", report


async def refused(call, *args) -> None:
    """The call raises RuntimeError for being made in a child."""
    with pytest.raises(RuntimeError, match="fork"):
        await call(*args)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_holds_nothing_and_can_do_nothing(client, rival):
    lease = await client.lock("x").acquire()
    entered = client.lock("y")
    block = await entered.__aenter__()

    async def check() -> None:
        for one in (lease, block):
            assert not one.held
            assert one.remaining() == 0
            with pytest.raises(RuntimeError, match="fork"):
                one.check()
            for call in (one.release, one.renew, one.wait_lost, one.__aenter__):
                await refused(call)
        await refused(entered.__aexit__, None, None, None)
        for call in (
            client.lock("z").acquire,
            client.lock("z").try_acquire,
            client.reentrant_lock("z").acquire,
            client.lock("z").locked,
            client.lock("z").force_release,
            client.open,
        ):
            await refused(call)
        # Closing has nothing to do, and says nothing.
        await client.aclose()

    in_a_fork(check)
    # The parent goes on as if nothing had happened.
    for one in (lease, block):
        one.check()
        await one.renew()
    assert await rival.lock("x").try_acquire() is None
    await entered.__aexit__(None, None, None)
    await lease.release()
    await gets_the_lock(rival, "x")
    await gets_the_lock(rival, "y")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_that_drops_a_lease_does_not_release_it(client, rival):
    leases = [await client.lock("x").acquire()]

    async def check() -> None:
        leases.clear()
        gc.collect()
        await passes(5)

    in_a_fork(check)
    await passes(5)
    leases[0].check()
    assert await rival.lock("x").try_acquire() is None
    await leases[0].release()


async def test_a_block_of_a_lease_is_an_own_block_too(client):
    lock = client.lock("x")
    async with await lock.acquire():
        assert await lock.try_acquire() is None
        with pytest.raises(RuntimeError, match="own block"):
            await lock.acquire()
    async with lock:
        pass
