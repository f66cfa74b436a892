"""What the server answers to a release: "not held" says that the lease was lost before, unless a lost answer explains it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from aiolock import AcquireTimeout, Client, LockLost, lock_all
from aiolock.clock import system_clock
from tests.faults.staging import gets_the_lock, nothing_remains, outcome, until

LOCKS: dict[str, Callable[[Client], Any]] = {
    "mutex": lambda client: client.lock("x"),
    "fair": lambda client: client.lock("x", fair=True),
    "re-entrant": lambda client: client.reentrant_lock("x"),
    "signal": lambda client: client.lock("x", on_loss="signal"),
    "read": lambda client: client.rwlock("x").read(),
    "write": lambda client: client.rwlock("x").write(),
    "permits": lambda client: client.semaphore("x", limit=3),
    "election": lambda client: client.election("x").campaign(),
    "several": lambda client: lock_all(client.lock("x"), client.lock("y"), on_loss="signal"),
}

NEEDS = {
    "read": {"read-write"},
    "write": {"read-write"},
    "downgraded": {"downgrade"},
    "permits": {"semaphore"},
    "keep": {"keep"},
    "election": {"elections"},
}

acts = pytest.mark.parametrize("act", LOCKS)


def losses(client: Client) -> int:
    figures = client.stats()
    assert sum(figures["losses"].values()) == figures["lost"]
    return figures["lost"]


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "aiolock.lost"]


@acts
async def test_a_block_whose_hold_was_forgotten_raises_at_its_end(deployment, client, act, caplog):
    leases = []

    async def work() -> None:
        async with LOCKS[act](client) as lease:
            leases.append(lease)
            await deployment.forget(lease)

    with caplog.at_level(logging.WARNING, "aiolock.lost"):
        error, before, after = await outcome(work())
        [lease] = leases
        # Where the server tells of the first part, the others are given back in the background.
        await until(lambda: losses(client) == len(getattr(lease, "parts", [lease])))
    assert isinstance(error, LockLost), repr(error)
    assert error.reason in {"revoked", deployment.reason}
    assert (before, after) == (0, 0)
    assert lease.lost
    assert not lease.held
    assert len(warnings(caplog)) == losses(client)
    with pytest.raises(LockLost):
        lease.check()


@acts
async def test_a_release_by_hand_of_what_was_forgotten_tells_without_raising(deployment, client, act, caplog):
    lease = await LOCKS[act](client).acquire()
    await deployment.forget(lease)
    with caplog.at_level(logging.WARNING, "aiolock.lost"):
        await lease.release()
        await until(lambda: losses(client) == len(getattr(lease, "parts", [lease])))
    assert lease.lost
    assert len(warnings(caplog)) == losses(client)
    await lease.release()
    assert losses(client) == len(getattr(lease, "parts", [lease]))


@pytest.mark.parametrize("act", ["keep"])
async def test_a_release_that_keeps_what_was_forgotten_tells_it(deployment, client, act):
    lease = await client.lock("x").acquire()
    await deployment.forget(lease)
    await lease.release(keep=30)
    assert lease.lost
    assert losses(client) == 1
    await gets_the_lock(client, "x")


@pytest.mark.parametrize("act", ["keep"])
async def test_a_job_of_once_whose_hold_was_forgotten_raises(deployment, client, act):
    started = []

    @client.once("x", at_most=30, at_least=0.01)
    async def job() -> None:
        [hold] = list(client._runtime.scheduler._validities())
        started.append(hold)
        await deployment._forget(hold.claim)

    error, _, _ = await outcome(job())
    assert isinstance(error, LockLost)
    assert len(started) == losses(client) == 1


async def test_a_decorated_function_whose_hold_was_forgotten_raises(deployment, client):
    @client.locked("x")
    async def job() -> None:
        [hold] = list(client._runtime.scheduler._validities())
        await deployment._forget(hold.claim)

    error, before, after = await outcome(job())
    assert isinstance(error, LockLost)
    assert (before, after) == (0, 0)
    assert losses(client) == 1


@pytest.mark.parametrize("act", ["downgraded"])
async def test_a_downgraded_hold_that_was_forgotten_is_told(deployment, client, act):
    async def work() -> None:
        async with client.rwlock("x").write() as lease:
            await lease.downgrade()
            await deployment.forget(lease)

    error, _, _ = await outcome(work())
    assert isinstance(error, LockLost)
    assert losses(client) == 1


async def test_the_last_level_of_a_hold_that_was_forgotten_tells_it(deployment, client):
    told = []

    async def work() -> None:
        async with client.reentrant_lock("x") as outer:
            async with client.reentrant_lock("x") as inner:
                await deployment.forget(outer)
            told.append(inner.lost)

    error, before, after = await outcome(work())
    assert isinstance(error, LockLost)
    assert (before, after) == (0, 0)
    assert losses(client) == 1


async def test_an_exception_of_the_block_wins_with_the_loss_as_a_note(deployment, client):
    async def work() -> None:
        async with client.lock("x", on_loss="signal") as lease:
            await deployment.forget(lease)
            raise ValueError("of the block")

    error, _, _ = await outcome(work())
    assert type(error) is ValueError
    assert any("was lost" in note for note in error.__notes__)
    assert losses(client) == 1


async def test_a_cancelled_block_ends_cancelled_and_counts_the_loss(deployment, client):
    async def work() -> None:
        async with client.lock("x", on_loss="signal") as lease:
            await deployment.forget(lease)
            asyncio.current_task().cancel()
            await asyncio.sleep(60)

    error, before, after = await outcome(work())
    assert isinstance(error, asyncio.CancelledError)
    assert (before, after) == (0, 1)
    await until(lambda: losses(client) == 1)


async def test_a_hold_that_was_passed_on_here_is_told_to_the_task_that_releases_it(deployment, client):
    """Nothing is asked of the server when it goes from task to task, so the last one hears of it."""
    ended = []

    async def first() -> None:
        async with client.lock("x") as lease:
            await until(lambda: client.stats()["waiting"] == 1)
            await deployment.forget(lease)

    async def second() -> None:
        async with client.lock("x"):
            pass

    one = asyncio.create_task(outcome(first()))
    await until(lambda: client.stats()["acquired"] == 1)
    ended = await asyncio.gather(one, outcome(second()))
    assert any(isinstance(error, LockLost) for error, _, _ in ended)
    assert losses(client) == 1


@acts
async def test_a_release_whose_answer_was_lost_is_no_loss(deployment, act, caplog):
    async with deployment.over() as (client, way):
        async with LOCKS[act](client) as lease:
            way.lose_answer()
        await until(lambda: not client._runtime.cleanups)
        assert not lease.lost
        assert losses(client) == 0
        assert not warnings(caplog)
        await nothing_remains(client, "x")


async def test_an_answer_after_the_end_of_the_term_is_no_loss(deployment):
    async with deployment.over(ttl=1.0, command_timeout=20.0) as (client, way):
        lease = await client.lock("x").acquire()
        await deployment.forget(lease)
        if lease.lost:
            # Told by the server before anything was released.
            return
        way.hold()
        leaving = asyncio.create_task(lease.release())
        await until(lambda: system_clock() > lease._hold.validity.until)
        way.let_go()
        await leaving
        assert not lease.lost
        assert losses(client) == 0


# --- what a waiter leaves behind that gave up


EXCLUSIVE: dict[str, Callable[[Client, str], Any]] = {
    "mutex": lambda client, name: client.lock(name),
    "write": lambda client, name: client.rwlock(name).write(),
}
SHARED = EXCLUSIVE | {"read": lambda client, name: client.rwlock(name).read()}


def excluding(act: str, client: Client, name: str) -> Any:
    """A hold by which that of the act is not to be had."""
    return EXCLUSIVE["write" if act == "read" else act](client, name)


async def nothing_is_left(lock: Any) -> None:
    async def empty() -> bool:
        info = await lock.inspect()
        return not info.holders and not info.waiters

    await until(empty)


@pytest.mark.parametrize("act", SHARED)
async def test_who_gave_up_is_gone_for_its_own_next_request(deployment, client, rival, act):
    mine = SHARED[act](client, "x")
    lease = await excluding(act, rival, "x").acquire()
    with pytest.raises(AcquireTimeout):
        await mine.acquire(timeout=0.05 * deployment.slow)
    if deployment.prompt:
        assert not (await mine.inspect()).waiters
    await lease.release()
    await nothing_is_left(mine)


@pytest.mark.parametrize("act", SHARED)
async def test_what_several_had_is_gone_for_the_next_request(deployment, client, rival, act):
    first, second = SHARED[act](client, "a"), SHARED[act](client, "b")
    lease = await excluding(act, rival, "b").acquire()
    for _ in range(3):
        with pytest.raises(AcquireTimeout):
            await lock_all(first, second).acquire(timeout=0.1 * deployment.slow)
        if deployment.prompt:
            assert not await first.locked()
            assert not (await second.inspect()).waiters
    await lease.release()
    await nothing_is_left(first)
    await nothing_is_left(second)


@pytest.mark.parametrize("came", ["free", "waited for"])
@pytest.mark.parametrize("act", EXCLUSIVE)
async def test_what_several_had_can_be_had_by_the_next_request(deployment, client, rival, act, came):
    make = EXCLUSIVE[act]
    lease = await make(rival, "b").acquire()
    for _ in range(3):
        before = await make(rival, "a").acquire() if came == "waited for" else None
        asking = asyncio.create_task(
            lock_all(make(client, "a"), make(client, "b")).acquire(timeout=0.3 * deployment.slow)
        )
        if before is not None:
            await asyncio.sleep(0.05)
            await before.release()
        with pytest.raises(AcquireTimeout):
            await asking
        again = await make(client, "a").try_acquire()
        if deployment.prompt:
            assert again is not None
        if again is not None:
            await again.release()
    await lease.release()
    await nothing_is_left(make(client, "a"))
    await nothing_is_left(make(client, "b"))
