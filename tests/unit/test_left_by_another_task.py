"""A block that another task leaves than the one that entered it: fixtures, cells of a notebook, generators that are given up."""

from __future__ import annotations

import asyncio
import gc
from contextlib import AsyncExitStack

import pytest

import aiolock
from aiolock import LockLost, lock_all
from aiolock.testing import lose
from tests.faults.staging import gets_the_lock, until

REMEDY = r"acquire\(\) and release\(\)"

BLOCKS = {
    "lock": lambda client, **options: client.lock("x", **options),
    "acquire": lambda client, **options: client.lock("x", **options).acquire(),
    "fair": lambda client, **options: client.lock("x", fair=True, **options),
    "not renewed": lambda client, **options: client.lock("x", renew=False, **options),
    "re-entrant": lambda client, **options: client.reentrant_lock("x", **options),
    "read": lambda client, **options: client.rwlock("x").read(**options),
    "write": lambda client, **options: client.rwlock("x").write(**options),
    "semaphore": lambda client, **options: client.semaphore("x", 1, **options),
    "campaign": lambda client, **options: client.election("x", **options).campaign(),
    "several": lambda client, **options: lock_all(client.lock("x", **options), client.lock("y", **options)),
}


@pytest.fixture
async def client():
    async with aiolock.connect("memory://", ttl=5) as client:
        yield client


@pytest.fixture
async def reports():
    """What the loop was told of exceptions that no task waits for."""
    told: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    return told


async def begun(block):
    """Enter a block in a task that ends then, as the set-up of a fixture does."""
    return await asyncio.create_task(block.__aenter__())


async def left(block, error: BaseException | None = None) -> None:
    await asyncio.create_task(block.__aexit__(None if error is None else type(error), error, None))


@pytest.fixture
async def again(client):
    """Whether all locks of the test are free."""

    async def free() -> None:
        for kind, make in BLOCKS.items():
            async with make(client):
                assert kind

    return free


@pytest.mark.parametrize("kind", BLOCKS)
async def test_a_block_that_only_signals_is_left_quietly(client, kind, again):
    block = BLOCKS[kind](client, on_loss="signal")
    lease = await begun(block)
    assert lease.held
    await left(block)
    assert not lease.held
    assert not lease.lost
    await again()


@pytest.mark.parametrize("kind", BLOCKS)
async def test_a_block_that_would_be_cancelled_names_what_to_use_and_is_released(client, kind, again):
    block = BLOCKS[kind](client)
    await begun(block)
    with pytest.raises(RuntimeError, match=REMEDY):
        await left(block)
    await again()


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("error", [ValueError("the block's"), asyncio.CancelledError(), GeneratorExit()])
async def test_an_exception_of_the_block_goes_on_with_a_note(client, kind, error, again):
    block = BLOCKS[kind](client)
    await begun(block)
    await left(block, error)
    assert "acquire() and release()" in error.__notes__[-1]
    await again()


@pytest.mark.parametrize("on_loss", ["cancel", "signal"])
@pytest.mark.parametrize("kind", BLOCKS)
async def test_a_loss_is_told_to_the_task_that_leaves(client, kind, on_loss):
    block = BLOCKS[kind](client, on_loss=on_loss)
    lease = await begun(block)
    part = lease.parts[0] if kind == "several" else lease
    lose(part)
    await until(lambda: lease.lost)
    with pytest.raises(LockLost):
        await left(block)


@pytest.mark.parametrize("kind", BLOCKS)
async def test_a_generator_that_is_left_by_break_says_nothing(client, kind, reports, again):
    ended = []

    async def numbers():
        try:
            async with BLOCKS[kind](client):
                for number in range(3):
                    yield number
        finally:
            ended.append(True)

    async for _ in numbers():
        break
    gc.collect()
    await until(lambda: ended)
    await again()
    assert reports == []


async def test_a_decorated_generator_that_is_left_by_break_says_nothing(client, reports):
    async def numbers():
        for number in range(3):
            yield number

    async for _ in client.locked("x")(numbers)():
        break
    gc.collect()
    await asyncio.create_task(gets_the_lock(client, "x"))
    assert reports == []


async def test_a_decorated_generator_that_another_task_ends_names_what_to_use(client):
    @client.locked("x")
    async def fixture():
        yield 1

    running = fixture()
    assert await asyncio.create_task(anext(running)) == 1
    with pytest.raises(RuntimeError, match=REMEDY):
        await asyncio.create_task(anext(running))
    await gets_the_lock(client, "x")


async def test_a_block_on_an_exit_stack_is_left_quietly(client):
    stack = AsyncExitStack()
    await asyncio.create_task(stack.enter_async_context(client.lock("x", on_loss="signal")))
    await asyncio.create_task(stack.aclose())
    await gets_the_lock(client, "x")


@pytest.mark.parametrize(
    "make",
    [
        lambda client: client.semaphore("two", 2, on_loss="signal"),
        lambda client: lock_all(client.semaphore("two", 2, on_loss="signal")),
    ],
)
async def test_which_of_two_blocks_of_one_object_is_left_is_not_guessed_in_silence(client, make):
    block = make(client)
    await begun(block)
    await begun(block)
    with pytest.raises(RuntimeError, match="a lock object for each block"):
        await left(block)
    # The last one is known again.
    await left(block)
