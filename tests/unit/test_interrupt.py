"""Interruptions of a piece of work at each of its awaits, also of work that uses several locks and clients."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import aiolock
from aiolock.testing import World
from tests.faults.staging import until
from tests.interrupt import interrupt_everywhere


@pytest.fixture
def world() -> World:
    return World()


async def test_right_work_passes_and_says_how_often_it_was_interrupted(world):
    balance = [100]

    async with world.connect() as client, world.connect() as rival:

        async def work() -> None:
            async with client.lock("account", timeout=5) as lease:
                await asyncio.sleep(0)
                lease.check()
                balance[0] -= 1
                await asyncio.sleep(0)

        async def check() -> None:
            async with rival.lock("account", timeout=5):
                assert balance[0] in (99, 100)
            balance[0] = 100

        report = await interrupt_everywhere(
            work, clients=[client], check=check, ways=("cancel", "race", "twice", "timeout", "loss")
        )
    assert report.attempts == sum(report.points.values()) + 5
    assert set(report.points) == {"cancel", "race", "twice", "timeout", "loss"}
    assert min(report.points.values()) >= 2


async def test_waiting_is_interrupted_as_well(world):
    async with world.connect() as client, world.connect() as rival:

        async def work() -> None:
            lease = await rival.lock("x").acquire()
            waiting = asyncio.create_task(client.lock("x").acquire(timeout=20))
            try:
                await until(lambda: client.stats()["waiting"] == 1)
            finally:
                await lease.release()
                waiting.cancel()
                await asyncio.wait([waiting])
            if not waiting.cancelled():
                await waiting.result().release()

        await interrupt_everywhere(work, clients=[client, rival], ways=["cancel"])


@pytest.mark.parametrize("way", ["cancel", "race", "timeout"])
async def test_a_swallowed_cancellation_is_found_where_it_happens(way):
    async def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.001)

    with pytest.raises(AssertionError, match=r"swallowed") as caught:
        await interrupt_everywhere(work, ways=[way])
    assert f"{way} at await 1" in str(caught.value)
    # The place is the user's, not where asyncio sleeps.
    line = work.__code__.co_firstlineno + 2
    assert f"{work.__qualname__} ({__file__}:{line})" in str(caught.value)


async def test_a_lock_that_stays_is_found(world, monkeypatch):
    monkeypatch.setattr("tests.interrupt.GRACE", 0.05)
    async with world.connect() as client:
        kept = []

        async def work() -> None:
            lease = await client.lock(f"x{len(kept)}").acquire()
            kept.append(lease)
            await asyncio.sleep(0)
            await lease.release()

        with pytest.raises(AssertionError, match="still has 1 leases"):
            await interrupt_everywhere(work, clients=client, ways=["cancel"])
        for lease in kept:
            await lease.release()


async def test_a_lock_that_stays_is_not_waited_for_by_the_next_attempt(world, monkeypatch):
    monkeypatch.setattr("tests.interrupt.GRACE", 0.05)
    kept = []
    async with world.connect() as client:

        async def work() -> None:
            kept.append(await client.lock("x").acquire())
            await asyncio.sleep(0)
            await kept.pop().release()

        with pytest.raises(AssertionError, match="still has 1 leases") as caught:
            async with asyncio.timeout(30):
                await interrupt_everywhere(work, clients=client)
        assert "1 fault(s) in " in str(caught.value)
        await kept.pop().release()


async def test_a_task_that_stays_is_found(monkeypatch):
    monkeypatch.setattr("tests.interrupt.GRACE", 0.05)
    tasks = []

    async def work() -> None:
        tasks.append(asyncio.create_task(asyncio.sleep(60), name="forgotten"))
        await asyncio.sleep(0)
        tasks[-1].cancel()

    with pytest.raises(AssertionError, match="forgotten"):
        await interrupt_everywhere(work, ways=["cancel"])
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_failed_check_is_found():
    done = []

    async def work() -> None:
        done.append("first")
        await asyncio.sleep(0)
        done.append("second")

    def check() -> None:
        half = len(done) % 2
        done.clear()
        assert not half, "only half of it was done"

    with pytest.raises(AssertionError, match="only half"):
        await interrupt_everywhere(work, ways=["cancel"], check=check)


async def test_losses_in_a_task_group_are_no_fault_and_other_errors_beside_them_are(world):
    async with world.connect() as client:

        async def group(error: type[Exception] | None = None) -> None:
            async def block(number: int) -> None:
                try:
                    async with client.lock(f"x{number}"):
                        await asyncio.sleep(0)
                except aiolock.LockLost:
                    if error is not None and number:
                        raise error from None
                    raise

            async with asyncio.TaskGroup() as tasks:
                for number in range(2):
                    tasks.create_task(block(number))

        await interrupt_everywhere(group, clients=client, ways=["loss"])
        with pytest.raises(AssertionError, match="it lost its lease, and ended with ExceptionGroup"):
            await interrupt_everywhere(lambda: group(KeyError), clients=client, ways=["loss"])


async def test_ignoring_a_loss_is_found_and_catching_it_is_not(world):
    async with world.connect() as client:

        async def careless() -> None:
            lease = await client.lock("x").acquire()
            await asyncio.sleep(0)
            if lease.lost:
                raise KeyError("it fell over")
            await lease.release()

        async def careful() -> None:
            try:
                async with client.lock("x"):
                    await asyncio.sleep(0)
            except aiolock.LockLost:
                await asyncio.sleep(0)

        with pytest.raises(AssertionError, match="lost its lease, and ended with KeyError"):
            await interrupt_everywhere(careless, clients=client, ways=["loss"])
        assert (await interrupt_everywhere(careful, clients=client)).attempts > 4
        assert await interrupt_everywhere(careless, clients=client, ways=["loss"], raises=(KeyError,))


async def test_work_that_fails_by_itself_is_found():
    async def work() -> None:
        raise KeyError("x")

    with pytest.raises(AssertionError, match="without being interrupted"):
        await interrupt_everywhere(work, ways=["cancel"])


async def test_work_that_hangs_after_an_interruption_is_found(monkeypatch):
    monkeypatch.setattr("tests.interrupt.GRACE", 0.05)

    async def work() -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await asyncio.sleep(3600)

    with pytest.raises(AssertionError, match="went on for more than"):
        await interrupt_everywhere(work, ways=["cancel"])


async def test_what_cannot_be_interrupted_is_named():
    async def work() -> None: ...

    with pytest.raises(aiolock.ConfigError, match="ways"):
        await interrupt_everywhere(work, ways=["magic"])
    with pytest.raises(aiolock.ConfigError, match="clients="):
        await interrupt_everywhere(work, ways=["loss"])
    with pytest.raises(aiolock.ConfigError, match="clients"):
        await interrupt_everywhere(work, clients=[7])
