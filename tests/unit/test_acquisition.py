"""What `acquire()` returns is a coroutine to all that runs, watches or imitates coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import unittest.mock

import anyio
import pytest

import aiolock
from tests.faults.staging import PATIENCE, until

LOCKS = {
    "lock": lambda client: client.lock("x"),
    "semaphore": lambda client: client.semaphore("x", 1),
    "lock_all": lambda client: aiolock.lock_all(client.lock("x"), client.lock("y")),
}


@pytest.fixture
async def client():
    async with aiolock.connect("memory://acquisition") as client:
        yield client


@pytest.fixture(params=LOCKS)
def lock(request, client):
    return LOCKS[request.param](client)


async def in_a_task(acquire):
    return await asyncio.create_task(acquire())


async def in_a_task_group(acquire):
    async with asyncio.TaskGroup() as group:
        task = group.create_task(acquire())
    return task.result()


async def gathered(acquire):
    [lease] = await asyncio.gather(acquire())
    return lease


async def waited_for(acquire):
    done, _ = await asyncio.wait([asyncio.ensure_future(acquire())])
    return done.pop().result()


async def shielded(acquire):
    return await asyncio.shield(acquire())


async def as_completed(acquire):
    [first] = asyncio.as_completed([acquire()])
    return await first


async def from_another_thread(acquire):
    loop = asyncio.get_running_loop()

    def ask():
        return asyncio.run_coroutine_threadsafe(acquire(), loop).result(PATIENCE)

    return await asyncio.to_thread(ask)


async def from_a_thread_of_anyio(acquire):
    return await anyio.to_thread.run_sync(lambda: anyio.from_thread.run(acquire))


async def on_an_exit_stack(acquire):
    return await contextlib.AsyncExitStack().enter_async_context(acquire())


WAYS = [
    in_a_task,
    in_a_task_group,
    gathered,
    waited_for,
    shielded,
    as_completed,
    from_another_thread,
    from_a_thread_of_anyio,
    on_an_exit_stack,
]


@pytest.mark.parametrize("way", WAYS)
async def test_it_may_be_run_in_every_way(way, lock):
    async with asyncio.timeout(PATIENCE):
        lease = await way(functools.partial(lock.acquire, timeout=PATIENCE))
    assert lease.held
    await lease.release()


async def waits(client):
    async def one() -> bool:
        return client.stats()["waiting"] == 1

    await until(one)


async def test_a_scope_of_anyio_cancels_it(client):
    async with client.lock("x") as lease:
        async with anyio.create_task_group() as group:
            group.start_soon(client.lock("x").acquire)
            await waits(client)
            group.cancel_scope.cancel()
        assert lease.held
    assert not await client.lock("x").locked()


async def test_a_task_of_it_has_its_name_and_its_stack(client):
    async with client.lock("x"):
        task = asyncio.create_task(client.lock("x").acquire())
        assert "Lock._acquire()" in repr(task)
        await waits(client)
        assert [frame.f_code.co_name for frame in task.get_stack()] == ["_acquire"]
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


def test_one_that_was_never_awaited_is_told(client):
    with pytest.warns(RuntimeWarning, match=r"'Lock\._acquire' was never awaited"):
        client.lock("x").acquire()


@pytest.mark.parametrize("cls", [aiolock.Lock, aiolock.Semaphore, aiolock.LockAll])
async def test_a_mock_of_it_can_be_awaited(cls):
    for mock in (unittest.mock.create_autospec(cls, instance=True), unittest.mock.Mock(spec=cls)):
        mock.acquire.return_value = "lease"
        assert await mock.acquire() == "lease"
        mock.acquire.assert_awaited_once_with()
