"""A count that reaches zero once: for everybody, however often it is asked, whoever goes away meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import AcquireTimeout, BackendError, ConfigError, WaitTimeout
from tests.contract.staging import PATIENCE, until, waiting

NEEDS = "documents"


async def test_it_opens_at_zero_for_everybody(client, rival):
    mine, theirs = client.latch("x", 3), rival.latch("x", 3)
    waiters = [asyncio.create_task(latch.wait()) for latch in (mine, theirs, mine, theirs)]
    await waiting(client, 2)
    await waiting(rival, 2)
    assert await mine.count_down() == 2
    assert await theirs.count_down() == 1
    assert await mine.count() == await theirs.count() == 1
    assert not any(waiter.done() for waiter in waiters)
    assert await mine.count_down() == 0
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*waiters)
    assert await theirs.count() == 0
    await theirs.wait()
    await theirs.wait(timeout=0)


async def test_it_stays_open_and_never_goes_below_zero(client, rival):
    latch = client.latch("x", 2)
    assert await latch.count_down(5) == 0
    assert await rival.latch("x", 2).count_down() == 0
    await rival.latch("x", 2).wait(timeout=PATIENCE)


async def test_many_count_down_at_once_and_each_counts_once(client, rival):
    latches = [client.latch("x", 60), rival.latch("x", 60)]
    left = await asyncio.gather(*(latches[number % 2].count_down() for number in range(59)))
    # However they were put together, no two of one client saw the same.
    assert min(left) == 1
    assert await latches[0].count() == 1
    assert await latches[1].count_down() == 0


async def test_a_wait_ends_in_time_and_says_what_is_missing(deployment, client):
    latch = client.latch("x", 3)
    await latch.count_down()
    # Time enough for an answer.
    for timeout in (0, deployment.seconds(0.1)):
        with pytest.raises(WaitTimeout, match=r"latch 'x' did not open .*2 of 3 are left") as caught:
            await latch.wait(timeout=timeout)
        assert isinstance(caught.value, AcquireTimeout)
        assert (caught.value.name, caught.value.timeout) == ("x", timeout)
    assert client.stats()["waiting"] == 0


async def test_everybody_names_the_same_count(client, rival):
    latch = client.latch("x", 3)
    await latch.count_down()
    other = rival.latch("x", 4)
    for ask in (other.count_down, other.count, other.wait):
        with pytest.raises(ConfigError, match="latch 'x' counts from 3, not 4"):
            await ask()
    # Who waited before anybody counted hears of it as well.
    early = asyncio.create_task(rival.latch("y", 5).wait())
    await waiting(rival, 1)
    await client.latch("y", 2).count_down()
    with pytest.raises(ConfigError, match="counts from 2, not 5"):
        async with asyncio.timeout(PATIENCE):
            await early
    assert await latch.count() == 2


async def test_a_wait_that_is_cancelled_concerns_nobody_else(client):
    latch = client.latch("x", 1)
    waiters = [asyncio.create_task(latch.wait()) for _ in range(3)]
    await waiting(client, 3)
    waiters[1].cancel()
    await latch.count_down()
    async with asyncio.timeout(PATIENCE):
        results = await asyncio.gather(*waiters, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), asyncio.CancelledError, type(None)]
    await until(lambda: client.stats()["waiting"] == 0)


async def test_a_count_that_is_cancelled_is_counted_once(client):
    latch = client.latch("x", 3)
    for steps in range(6):
        counting = asyncio.create_task(latch.count_down())
        for _ in range(steps):
            await asyncio.sleep(0)
        counting.cancel()
        await asyncio.wait([counting])
        if steps:
            # It had begun, so it happens: once.
            break
    await until(lambda: not client._runtime.boards)
    assert await latch.count() == 2


async def test_closing_ends_waits_and_finishes_counts(deployment, rival):
    client = await deployment.connect().open()
    waiter = asyncio.create_task(client.latch("x", 2).wait())
    await waiting(client, 1)
    counting = asyncio.create_task(client.latch("y", 2).count_down())
    await asyncio.sleep(0)
    counting.cancel()
    await client.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await waiter
    assert await rival.latch("x", 2).count() == 2
    assert await rival.latch("y", 2).count() in (1, 2)


async def test_latches_are_apart(client):
    await client.latch("x", 1).count_down()
    assert await client.latch("x ", 1).count() == 1
    async with client.lock("x", timeout=0), client.lock("y", timeout=0):
        assert await client.latch("y", 2).count() == 2


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None, 1_000_001])
async def test_wrong_numbers_are_refused(client, value):
    with pytest.raises(ConfigError, match=r"^count must be a whole number from 1 to 1000000, not "):
        client.latch("x", value)
    with pytest.raises(ConfigError, match=r"^n must be "):
        await client.latch("x", 2).count_down(value)


async def test_a_document_of_somebody_else_is_no_latch(client):
    document = client._runtime.backend.document("x", client.latch("x", 1)._board().family)
    assert await document.write(b"not ours", "", 60.0) is not None
    await document.aclose()
    with pytest.raises(BackendError, match="was not written by this version"):
        await client.latch("x", 1).count_down()
