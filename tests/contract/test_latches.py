"""A count that reaches zero once: for everybody, however often it is asked, whoever goes away meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import AcquireTimeout, BackendError, ConfigError, WaitTimeout
from aiolock.types import Family
from tests.faults.staging import PATIENCE, until, waiting

NEEDS = "registers"


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


async def test_a_count_with_a_name_counts_once_whoever_asks_for_it_and_however_often(client, rival):
    mine, theirs = client.latch("x", 5), rival.latch("x", 5)
    assert await mine.count_down(request_id="job 1") == 4
    # A worker that was started again, on another machine, after others have counted.
    assert await theirs.count_down(request_id="job 2") == 3
    assert await theirs.count_down() == 2
    assert await theirs.count_down(request_id="job 1") == 2
    assert await mine.count_down(2, request_id="job 2") == 2
    together = [each.count_down(request_id="job 3") for each in (mine, theirs, mine, theirs)]
    assert await asyncio.gather(*together) == [1, 1, 1, 1]
    waiter = asyncio.create_task(theirs.wait())
    await waiting(rival, 1)
    assert await mine.count_down(request_id="job 3") == 1
    assert await mine.count_down(request_id="Job 3") == 0
    async with asyncio.timeout(PATIENCE):
        await waiter
    # Open, it has nothing left to count, and stays so.
    assert await mine.count_down(request_id="job 1") == await theirs.count_down(request_id="job 9") == 0


async def test_names_of_counts_belong_to_one_latch(client):
    assert await client.latch("x", 2).count_down(request_id="job") == 1
    assert await client.latch("y", 2).count_down(request_id="job") == 1


async def test_a_count_that_was_cancelled_is_asked_for_again_under_its_name(client, rival):
    """Whether the first try counted is not known to who cancelled it; the second makes sure."""
    latch = client.latch("x", 50)
    for number in range(12):
        counting = asyncio.create_task(latch.count_down(request_id=str(number)))
        for _ in range(number):
            await asyncio.sleep(0)
        counting.cancel()
        await asyncio.wait([counting])
        assert await rival.latch("x", 50).count_down(request_id=str(number)) == 49 - number
    await until(lambda: not client._runtime.registers)
    assert await latch.count() == 38


@pytest.mark.parametrize("steps", [1, 6, 12])
async def test_a_count_of_a_client_that_was_cut_off_is_made_again_by_another_one(deployment, rival, steps):
    async with deployment.over(label="cut off", command_timeout=deployment.seconds(0.5)) as (client, way):
        counting = asyncio.create_task(client.latch("x", 3).count_down(request_id="job"))
        for _ in range(steps):
            await asyncio.sleep(0)
        way.cut(refused=False)
        try:
            async with asyncio.timeout(PATIENCE):
                assert await counting == 2
        except BackendError:
            pass
        assert await rival.latch("x", 3).count_down(request_id="job") == 2
    # What was still on its way has arrived by now, or never will.
    assert await rival.latch("x", 3).count_down(request_id="job") == 2


@pytest.mark.parametrize("value", ["", 7, b"job", True, "x" * 1025, "\ud800", ["job"]])
async def test_names_of_counts_that_are_none_are_refused(client, value):
    with pytest.raises(ConfigError, match=r"^request_id must be 1 to 1024 UTF-8 bytes of text"):
        await client.latch("x", 2).count_down(request_id=value)
    assert await client.latch("x", 2).count() == 2


async def test_names_of_counts_are_kept_by_latches_that_can_remember_all_of_them(client):
    assert await client.latch("x", 1000).count_down(request_id="job") == 999
    with pytest.raises(
        ConfigError, match="latch 'y' must count from at most 1000, not 1001, to remember every request_id"
    ):
        await client.latch("y", 1001).count_down(request_id="job")
    assert await client.latch("y", 1001).count_down() == 1000


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
        begun = bool(client._runtime.registers)
        counting.cancel()
        await asyncio.wait([counting])
        if begun:
            # It had begun, so it happens: once.
            break
    await until(lambda: not client._runtime.registers)
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


async def test_a_register_of_somebody_else_is_no_latch(client):
    register = client._runtime.backend.register("x", Family.LATCH)
    assert await register.write(b"not ours", "", 60.0) is not None
    await register.aclose()
    with pytest.raises(BackendError, match="was not written by this version"):
        await client.latch("x", 1).count_down()
