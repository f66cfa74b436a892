"""A hold that ends before its block does: whoever works under it is told, wherever it happens, and nobody else."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from importlib.metadata import version

import anyio
import pytest

from aiolock import LockLost, lock_all
from aiolock.core import local_queue
from aiolock.lease import Lease
from tests.faults.staging import gets_the_lock, outcome, passes, queued, token_of, until, verdict, waiting


def for_ever() -> asyncio.Future:
    return asyncio.get_running_loop().create_future()


def soon(action, *args) -> None:
    """In the next pass of the loop, when the task that asks for it waits for something."""
    asyncio.get_running_loop().call_soon(action, *args)


def this_task() -> asyncio.Task:
    task = asyncio.current_task()
    assert task is not None
    return task


def in_one_step(*actions) -> None:
    """All of them in one callback, so that the task sees them at once."""
    soon(lambda: [action() for action in actions])


async def assert_lost(work, client, reason: str | None = None) -> LockLost:
    """`work` ends with LockLost, its task's count of cancellations is what it was, and the next one gets the lock."""
    error, before, after = await outcome(work)
    assert isinstance(error, LockLost), repr(error)
    assert error.name == "x"
    assert reason in (None, error.reason)
    assert before == after == 0
    await gets_the_lock(client, "x")
    return error


async def assert_cancelled(work, client, count: int = 1) -> None:
    """`work` ends cancelled from outside, and counts that cancellation alone; the next one gets the lock."""
    error, before, after = await outcome(work)
    assert isinstance(error, asyncio.CancelledError), repr(error)
    assert (before, after) == (0, count)
    await gets_the_lock(client, "x")


# --- the plain cases


async def test_losing_it_while_the_block_awaits_cancels_the_block(deployment, client):
    felt: list[BaseException] = []

    async def work() -> None:
        async with client.lock("x") as lease:
            losing = asyncio.create_task(deployment.lose(lease))
            try:
                await for_ever()
            except asyncio.CancelledError as error:
                assert lease.lost
                felt.append(error)
                raise
            finally:
                await losing

    error = await assert_lost(work(), client, deployment.reason)
    assert felt == [error.__cause__]


async def test_the_next_holder_has_a_greater_token(deployment, client, rival):
    lease = await client.lock("x").acquire()
    following = asyncio.create_task(gets_the_lock(rival, "x"))
    await queued(client.lock("x"), 1)
    await deployment.lose(lease)
    assert await following > token_of(lease)
    await until(lambda: lease.lost)


async def test_local_waiters_go_on_after_a_loss(deployment, client):
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.raises(LockLost))
        lease = await stack.enter_async_context(client.lock("x"))
        turns = [asyncio.create_task(gets_the_lock(client, "x")) for _ in range(3)]
        await waiting(client, 3)
        losing = asyncio.create_task(deployment.lose(lease))
        try:
            await for_ever()
        finally:
            await losing
    tokens = await asyncio.gather(*turns)
    assert sorted(tokens) == tokens
    assert tokens[0] > token_of(lease)


async def test_losing_it_in_the_last_step_of_the_block_is_told_at_its_end(client):
    async def work() -> None:
        async with client.lock("x") as lease:
            await passes(2)
            verdict(lease)

    await assert_lost(work(), client, "expired")


async def test_the_running_task_is_not_cancelled_under_its_own_feet(client):
    """It leaves the block before its next await, and what it awaits after that is not interrupted."""

    async def work() -> None:
        with pytest.raises(LockLost):
            async with client.lock("x") as lease:
                verdict(lease)
        await passes(5)

    error, before, after = await outcome(work())
    assert error is None
    assert before == after == 0


async def test_a_block_that_goes_on_after_the_verdict_is_cancelled_at_its_next_await(client):
    async def work() -> None:
        async with client.lock("x") as lease:
            verdict(lease)
            await for_ever()

    await assert_lost(work(), client)


async def test_with_signal_the_block_goes_on_and_learns_it_at_its_end(deployment, client):
    went_on = []

    async def work() -> None:
        async with client.lock("x", on_loss="signal") as lease:
            await deployment.lose(lease)
            assert await lease.wait_lost() == deployment.reason
            await passes(5)
            went_on.append(True)

    await assert_lost(work(), client, deployment.reason)
    assert went_on


async def test_the_default_of_the_client_counts(deployment):
    async with deployment.connect(on_loss="signal") as client:

        async def work() -> None:
            async with client.lock("x") as lease:
                verdict(lease)
                await passes(5)

        await assert_lost(work(), client)


async def test_a_loss_between_the_grant_and_the_block_cancels_the_block(client, monkeypatch):
    # Without pushes others are taken to wait, and then the hold is passed on for a few ms only, which a busy machine takes.
    monkeypatch.setattr(local_queue, "LONGEST_HANDING_OVER", math.inf)
    # The first grant of a name may carry a single token, and cannot be passed on.
    await gets_the_lock(client, "x")
    holder = await client.lock("x").acquire()
    assert holder._hold.validity.left

    async def work() -> None:
        async with client.lock("x"):
            await for_ever()

    def hand_over_and_lose() -> None:
        holder._hold.give_back()
        (queue,) = client._runtime.contending
        verdict(Lease(queue._hold))

    task = asyncio.create_task(assert_lost(work(), client))
    await waiting(client, 1)
    hand_over_and_lose()
    await task


# --- a loop that stood still


async def test_after_a_blocked_loop_every_look_is_right_at_once(deployment, client, rival):
    ttl = deployment.seconds(0.3)
    seen: list[object] = []

    async def work() -> None:
        async with client.lock("x", ttl=ttl) as lease:
            time.sleep(1.1 * ttl)  # noqa: ASYNC251 - the loop is to stand still
            seen.extend([lease.held, lease.lost, lease.remaining()])
            with pytest.raises(LockLost):
                lease.check()
            await for_ever()

    await assert_lost(work(), rival, "expired")
    assert seen == [False, True, 0.0]


async def test_a_loop_blocked_in_the_last_step_is_told_at_the_end_of_the_block(deployment, client, rival):
    ttl = deployment.seconds(0.3)

    async def work() -> None:
        async with client.lock("x", ttl=ttl):
            time.sleep(1.1 * ttl)  # noqa: ASYNC251 - the loop is to stand still

    await assert_lost(work(), rival, "expired")


async def test_a_loop_blocked_by_somebody_else_cancels_the_block(deployment, client, rival):
    ttl = deployment.seconds(0.3)

    async def work() -> None:
        async with client.lock("x", ttl=ttl) as lease:
            soon(time.sleep, 1.1 * ttl)
            try:
                await for_ever()
            finally:
                assert not lease.held

    await assert_lost(work(), rival)


# --- holds that are not renewed


async def test_a_job_that_is_not_renewed_is_told_that_the_server_forgot_its_hold(deployment, client, rival):
    """It is verified three times in its ttl; "expired" would be the end of that."""
    begun = asyncio.Event()

    @client.once("x", at_most=deployment.seconds(5))
    async def job() -> None:
        begun.set()
        await for_ever()

    working = asyncio.create_task(job())
    await begun.wait()
    [term] = client._runtime.scheduler._validities()
    await deployment._forget(term.claim)
    with pytest.raises(LockLost) as caught:
        await working
    assert caught.value.reason in ("revoked", "force-released", "session")
    await gets_the_lock(rival, "x")


async def test_verifying_prolongs_nothing(deployment, client, rival):
    lock = client.lock("x", ttl=deployment.ttl_of(deployment.seconds(2)), renew=False)
    lease = await lock.acquire()
    try:
        term, scheduler = lease._hold.validity, client._runtime.scheduler
        await until(lambda: term.claim.fixed)
        assert lease.remaining() > 0
        [holder] = (await rival.lock("x").inspect()).holders
        for _ in range(3):
            end, before = term.until, asyncio.get_running_loop().time()
            # More than the smallest step of any server's clock: less is left by then.
            await until(lambda: asyncio.get_running_loop().time() > before + 0.05)  # noqa: B023
            await scheduler.renew(term)
            assert lease.held
            assert term.until <= term.end
            if "keep" in client.capabilities:
                # The hold has a ttl of its own, and not that of a session; of a quorum, a late vote may count as well.
                assert term.until == end or "fencing" not in client.capabilities
                [again] = (await rival.lock("x").inspect()).holders
                assert again.remaining < holder.remaining or not deployment.tells
                holder = again
    finally:
        await lease.release()


async def test_a_job_that_takes_too_long_is_lost_at_its_time(deployment, client, rival):
    verified = []

    @client.once("x", at_most=deployment.seconds(1.5))
    async def job() -> None:
        [term] = client._runtime.scheduler._validities()
        verified.append(term)
        await for_ever()

    with pytest.raises(LockLost, match="expired"):
        await job()
    assert verified[0].over
    # One confirms a grant that came late.
    assert client.stats()["renewals"] <= 1
    await gets_the_lock(rival, "x")


# --- code of the application that raises


@pytest.fixture
def logging_that_raises(monkeypatch):
    """Every record of this package makes the application's LogRecord factory raise."""
    plain = logging.getLogRecordFactory()
    monkeypatch.setattr(logging, "raiseExceptions", False)

    def factory(name, *rest, **options):
        if name.partition(".")[0] == "aiolock":
            raise KeyError("no request id in this context")
        return plain(name, *rest, **options)

    logging.setLogRecordFactory(factory)
    yield
    logging.setLogRecordFactory(plain)


async def test_a_loss_is_told_and_others_are_renewed_although_logging_raises(
    deployment, client, rival, logging_that_raises
):
    kept = await client.lock("kept", ttl=deployment.ttl_of(deployment.seconds(0.8))).acquire()
    felt = asyncio.Event()

    async def work() -> None:
        async with client.lock("x") as lease:
            losing = asyncio.create_task(deployment.lose(lease))
            try:
                await for_ever()
            except asyncio.CancelledError:
                assert lease.lost
                assert not lease.held
                felt.set()
                raise
            finally:
                await losing

    await assert_lost(work(), rival, deployment.reason)
    assert felt.is_set()
    renewals = client.stats()["renewals"]
    await until(lambda: client.stats()["renewals"] >= renewals + 2)
    if deployment.reason != "session":
        assert kept.held
    await client.aclose()
    assert kept.lost
    await gets_the_lock(rival, "kept")


# --- an outer cancellation


@pytest.mark.parametrize("order", ["lost first", "cancelled first"])
async def test_an_outer_cancellation_in_the_same_step_wins(client, order):
    notes: list[str] = []

    async def work() -> None:
        task = this_task()
        try:
            async with client.lock("x") as lease:
                actions = [lambda: verdict(lease), task.cancel]
                in_one_step(*(actions if order == "lost first" else reversed(actions)))
                await for_ever()
        except asyncio.CancelledError as error:
            notes.extend(getattr(error, "__notes__", []))
            raise

    await assert_cancelled(work(), client)
    assert any("lost" in note for note in notes)


async def test_an_outer_cancellation_that_comes_while_the_block_ends_wins(client):
    async def work() -> None:
        async with client.lock("x") as lease:
            verdict(lease)
            this_task().cancel()

    await assert_cancelled(work(), client)


@pytest.mark.parametrize("order", ["lost first", "cancelled first"])
async def test_an_outer_cancellation_a_step_apart_wins(client, order):
    async def work() -> None:
        task = this_task()
        async with client.lock("x") as lease:
            actions = [lambda: verdict(lease), task.cancel]
            first, second = actions if order == "lost first" else reversed(actions)
            soon(first)
            try:
                await for_ever()
            finally:
                soon(second)
                await for_ever()

    await assert_cancelled(work(), client)


async def test_a_cancellation_swallowed_before_is_not_taken_for_ours(client):
    async def work() -> None:
        task = this_task()
        soon(task.cancel)
        with suppress(asyncio.CancelledError):
            await for_ever()
        async with client.lock("x") as lease:
            soon(verdict, lease)
            await for_ever()

    error, _, after = await outcome(work())
    assert isinstance(error, LockLost)
    assert after == 1
    await gets_the_lock(client, "x")


# --- exceptions of the block


async def test_an_exception_of_the_block_wins_and_carries_the_loss_as_a_note(client):
    async def work() -> None:
        async with client.lock("x") as lease:
            verdict(lease)
            raise ValueError("of the block")

    error, _, after = await outcome(work())
    assert isinstance(error, ValueError)
    assert any("'x' was lost (expired)" in note for note in error.__notes__)
    assert after == 0
    await gets_the_lock(client, "x")


async def test_an_exception_that_the_cancellation_leads_to_wins(client):
    async def work() -> None:
        async with client.lock("x") as lease:
            soon(verdict, lease)
            try:
                await for_ever()
            except asyncio.CancelledError:
                raise ValueError("of the block") from None

    error, _, after = await outcome(work())
    assert isinstance(error, ValueError)
    assert len(error.__notes__) == 1
    assert after == 0
    await gets_the_lock(client, "x")


async def test_an_exception_that_is_under_way_when_the_loss_comes_is_in_the_chain(client):
    async def work() -> None:
        async with client.lock("x") as lease:
            try:
                raise ValueError("of the block")
            finally:
                soon(verdict, lease)
                await for_ever()

    error = await assert_lost(work(), client)
    assert isinstance(error.__cause__, asyncio.CancelledError)
    assert isinstance(error.__cause__.__context__, ValueError)


async def test_a_block_that_swallows_the_cancellation_is_told_at_its_end(client):
    async def work() -> None:
        async with client.lock("x") as lease:
            soon(verdict, lease)
            with suppress(asyncio.CancelledError):
                await for_ever()
            await passes(5)

    await assert_lost(work(), client)


# --- re-entrant levels and guards


async def test_a_loss_between_levels_is_told_by_every_level(client):
    told: list[str] = []

    async def work() -> None:
        outer, inner = client.reentrant_lock("x"), client.reentrant_lock("x")
        try:
            async with outer as lease:
                try:
                    async with inner:
                        pass
                    verdict(lease)
                    async with inner:
                        raise AssertionError("entered a lost hold again")
                except LockLost:
                    told.append("inner")
                    raise
        except LockLost:
            told.append("outer")
            raise

    await assert_lost(work(), client)
    assert told == ["inner", "outer"]


async def test_a_loss_in_the_innermost_level_is_told_by_every_level(client):
    told: list[str] = []

    async def work() -> None:
        lock = client.reentrant_lock("x")
        async with lock:
            with pytest.raises(LockLost):
                async with lock:
                    with pytest.raises(LockLost):
                        async with lock as lease:
                            soon(verdict, lease)
                            await for_ever()
                    # Cancelled once and told; the level goes on as it likes, until its own end.
                    await passes(3)
                    told.append("third")
            await passes(3)
            told.append("second")

    await assert_lost(work(), client)
    assert told == ["third", "second"]


async def test_an_inner_level_that_only_signals_does_not_disarm_the_outer_one(client):
    async def work() -> None:
        async with client.reentrant_lock("x") as lease:
            async with client.reentrant_lock("x", on_loss="signal"):
                pass
            soon(verdict, lease)
            await for_ever()

    await assert_lost(work(), client)


async def test_an_inner_level_cancels_although_the_outer_one_only_signals(client):
    async def work() -> None:
        async with client.reentrant_lock("x", on_loss="signal") as lease:
            with pytest.raises(LockLost):
                async with client.reentrant_lock("x"):
                    soon(verdict, lease)
                    await for_ever()
            await passes(3)

    await assert_lost(work(), client)


async def test_a_task_that_works_under_a_lease_protects_itself_with_guard(client):
    async def helper(lease) -> None:
        with lease.guard():
            await for_ever()

    async def work() -> None:
        async with client.lock("x") as lease:
            helping = asyncio.create_task(outcome(helper(lease)))
            await passes(3)
            soon(verdict, lease)
            try:
                await for_ever()
            finally:
                error, before, after = await helping
                assert isinstance(error, LockLost)
                assert before == after == 0

    await assert_lost(work(), client)


async def test_a_task_that_left_its_guard_is_not_cancelled(client):
    lease = await client.lock("x").acquire()

    async def helper() -> None:
        with lease.guard():
            await passes(1)
        verdict(lease)
        await passes(5)

    error, _, after = await outcome(helper())
    assert error is None
    assert after == 0
    await gets_the_lock(client, "x")


async def test_a_lease_that_was_handed_over_cancels_whoever_guards_it_and_not_the_giver(client):
    handed: asyncio.Queue = asyncio.Queue()

    async def giver() -> None:
        handed.put_nowait(await client.lock("x").acquire())
        await passes(20)

    async def taker() -> None:
        lease = await handed.get()
        with lease.guard():
            soon(verdict, lease)
            await for_ever()

    giving = asyncio.create_task(outcome(giver()))
    await assert_lost(taker(), client)
    assert await giving == (None, 0, 0)


async def test_guard_inside_the_own_block_tells_both(client):
    told = []

    async def work() -> None:
        async with client.lock("x") as lease:
            with pytest.raises(LockLost), lease.guard():
                soon(verdict, lease)
                await for_ever()
            told.append("guard")
            await passes(3)

    await assert_lost(work(), client)
    assert told == ["guard"]


# --- task groups


async def test_a_task_group_inside_the_block_is_ended(client):
    ended = []

    async def child() -> None:
        try:
            await for_ever()
        finally:
            ended.append(True)

    async def work() -> None:
        async with client.lock("x") as lease, asyncio.TaskGroup() as group:
            group.create_task(child())
            group.create_task(child())
            soon(soon, verdict, lease)

    await assert_lost(work(), client)
    assert ended == [True, True]


async def test_a_task_group_that_fails_in_the_same_step_wins_with_a_note(client):
    async def child(lease) -> None:
        await passes(2)
        verdict(lease)
        raise ValueError("of the child")

    async def work() -> None:
        async with client.lock("x") as lease, asyncio.TaskGroup() as group:
            group.create_task(child(lease))

    error, before, after = await outcome(work())
    assert isinstance(error, ExceptionGroup)
    assert error.subgroup(ValueError) is not None
    assert before == after == 0
    await gets_the_lock(client, "x")


async def test_a_loss_in_a_child_ends_its_task_group(client):
    ended = []
    counts = []

    async def child() -> None:
        try:
            async with client.lock("x") as lease:
                soon(verdict, lease)
                await for_ever()
        finally:
            counts.append(this_task().cancelling())

    async def sibling() -> None:
        try:
            await for_ever()
        finally:
            ended.append(True)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(sibling())
            group.create_task(child())

    # The count of the parent is the task group's affair (before Python 3.13 it may be left at 1).
    error, _, _ = await outcome(work())
    assert isinstance(error, ExceptionGroup)
    assert [type(one) for one in error.exceptions] == [LockLost]
    assert counts == [0]
    assert ended
    await gets_the_lock(client, "x")


# --- timeouts


@pytest.mark.parametrize("order", ["lost first", "timeout first", "timeout far away"])
async def test_a_timeout_inside_the_block_does_not_take_the_loss_for_its_own(client, order):
    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with client.lock("x") as lease:
            async with asyncio.timeout(3600) as deadline:
                actions = [lambda: verdict(lease), deadline._on_timeout]
                if order == "timeout far away":
                    actions.pop()
                elif order == "timeout first":
                    actions.reverse()
                in_one_step(*actions)
                await for_ever()
            assert loop.time() < 0, "the block went on"

    await assert_lost(work(), client)


@pytest.mark.parametrize("order", ["lost first", "timeout first"])
async def test_a_timeout_around_the_block_wins_in_the_same_step(client, order):
    async def work() -> None:
        async with asyncio.timeout(3600) as deadline:
            async with client.lock("x") as lease:
                actions = [lambda: verdict(lease), deadline._on_timeout]
                in_one_step(*(actions if order == "lost first" else reversed(actions)))
                await for_ever()

    error, before, after = await outcome(work())
    assert type(error) is TimeoutError
    assert before == after == 0
    await gets_the_lock(client, "x")


async def test_a_timeout_around_the_block_lets_the_loss_through(client):
    async def work() -> None:
        async with asyncio.timeout(3600), client.lock("x") as lease:
            soon(verdict, lease)
            await for_ever()

    await assert_lost(work(), client)


# --- anyio


TAKES_BOTH = tuple(map(int, version("anyio").split(".")[:2])) < (4, 16)
"""A scope of this anyio that was cancelled first takes the cancellation for its own, so what follows it runs up to its next
`await`, or to the end of the block."""


@pytest.mark.parametrize("order", ["lost first", "scope first", "scope alone", "loss alone"])
async def test_an_anyio_scope_inside_the_block_does_not_hide_the_loss(client, order):
    reached = []

    async def work() -> None:
        async with client.lock("x") as lease:
            with anyio.CancelScope() as scope:
                in_one_step(
                    *{
                        "lost first": [lambda: verdict(lease), scope.cancel],
                        "scope first": [scope.cancel, lambda: verdict(lease)],
                        "scope alone": [scope.cancel],
                        "loss alone": [lambda: verdict(lease)],
                    }[order]
                )
                await for_ever()
            reached.append(True)

    if order == "scope alone":
        assert await outcome(work()) == (None, 0, 0)
        assert reached
    else:
        await assert_lost(work(), client)
        assert not reached or (order == "scope first" and TAKES_BOTH)


@pytest.mark.parametrize("order", ["lost first", "scope first", "scope alone", "loss alone"])
async def test_an_anyio_scope_around_the_block_wins_in_the_same_step(client, order):
    async def work() -> None:
        with anyio.CancelScope() as scope:
            async with client.lock("x") as lease:
                in_one_step(
                    *{
                        "lost first": [lambda: verdict(lease), scope.cancel],
                        "scope first": [scope.cancel, lambda: verdict(lease)],
                        "scope alone": [scope.cancel],
                        "loss alone": [lambda: verdict(lease)],
                    }[order]
                )
                await for_ever()
        assert scope.cancelled_caught
        await passes(3)

    if order == "loss alone":
        await assert_lost(work(), client)
    else:
        assert await outcome(work()) == (None, 0, 0)
        await gets_the_lock(client, "x")


@pytest.mark.parametrize("order", ["lost first", "scope first"])
async def test_an_anyio_scope_around_a_guard_wins_if_it_is_first(client, order):
    lease = await client.lock("x").acquire()

    async def work() -> None:
        with anyio.CancelScope() as scope:
            with lease.guard():
                actions = [lambda: verdict(lease), scope.cancel]
                in_one_step(*(actions if order == "lost first" else reversed(actions)))
                await for_ever()
        assert scope.cancelled_caught

    if order == "scope first":
        assert await outcome(work()) == (None, 0, 0)
        await gets_the_lock(client, "x")
    else:
        await assert_lost(work(), client)


async def test_an_anyio_task_group_inside_the_block_is_ended(client):
    async def work() -> None:
        async with client.lock("x") as lease, anyio.create_task_group() as group:
            group.start_soon(anyio.sleep_forever)
            group.start_soon(anyio.sleep_forever)
            soon(soon, verdict, lease)

    await assert_lost(work(), client)


async def test_a_loss_in_a_child_ends_its_anyio_task_group(client):
    async def child() -> None:
        async with client.lock("x") as lease:
            soon(verdict, lease)
            await for_ever()

    async def work() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep_forever)
            group.start_soon(child)

    error, before, after = await outcome(work())
    assert isinstance(error, ExceptionGroup)
    assert [type(one) for one in error.exceptions] == [LockLost]
    assert before == after == 0
    await gets_the_lock(client, "x")


# --- async generators


async def test_an_async_generator_is_not_cancelled_from_outside(deployment, client):
    """Its consumer's task runs the consumer's code while the generator rests at a yield."""

    async def numbers() -> AsyncIterator[object]:
        async with client.lock("x") as lease:
            yield lease
            with pytest.raises(LockLost):
                lease.check()
            yield 2

    async def work() -> None:
        async with aclosing(numbers()) as source:
            lease = await anext(source)
            await deployment.lose(lease)
            await until(lambda: lease.lost)
            await passes(5)
            assert await anext(source) == 2
            await passes(5)
            with pytest.raises(LockLost):
                await anext(source)

    assert await outcome(work()) == (None, 0, 0)
    await gets_the_lock(client, "x")


@pytest.mark.parametrize("how", ["lock", "lease", "guard"])
async def test_the_user_of_a_context_manager_made_of_a_generator_is_told_at_its_end(client, how):
    @asynccontextmanager
    async def locked() -> AsyncIterator[object]:
        if how == "lock":
            async with client.lock("x") as lease:
                yield lease
        elif how == "lease":
            async with await client.lock("x").acquire() as lease:
                yield lease
        else:
            lease = await client.lock("x").acquire()
            with lease.guard():
                yield lease

    went_on = []

    async def work() -> None:
        async with locked() as lease:
            soon(verdict, lease)
            await passes(10)
            assert lease.lost
            went_on.append(True)

    await assert_lost(work(), client)
    assert went_on


class Wrapper:
    """What applications write: enters a lock in its own ``__aenter__``, here after an await."""

    def __init__(self, lock) -> None:
        self._lock = lock

    async def __aenter__(self):
        await asyncio.sleep(0)
        return await self._lock.__aenter__()

    async def __aexit__(self, *error) -> None:
        await self._lock.__aexit__(*error)


class OnStack:
    """Enters a lock on an exit stack, which ends with the block of this object."""

    def __init__(self, lock) -> None:
        self._lock = lock
        self._stack = AsyncExitStack()

    async def __aenter__(self):
        return await self._stack.enter_async_context(self._lock)

    async def __aexit__(self, *error) -> None:
        await self._stack.__aexit__(*error)


class OnMovedStack(OnStack):
    async def __aenter__(self):
        async with AsyncExitStack() as stack:
            lease = await stack.enter_async_context(self._lock)
            self._stack = stack.pop_all()
        return lease


class OnLocalStack(OnStack):
    async def __aenter__(self):
        stack = AsyncExitStack()
        lease = await stack.enter_async_context(self._lock)
        self._stack = stack
        return lease


class OnReturnedStack(OnStack):
    async def _make(self):
        stack = AsyncExitStack()
        return stack, await stack.enter_async_context(self._lock)

    async def __aenter__(self):
        self._stack, lease = await self._make()
        return lease


class Guarded:
    def __init__(self, lease) -> None:
        self._guard = lease.guard()

    def __enter__(self):
        return self._guard.__enter__()

    def __exit__(self, *error) -> None:
        self._guard.__exit__(*error)


class Shape:
    """One way in which a coroutine or generator enters a lock, or several."""

    def __init__(self, helper, *, several: bool = False) -> None:
        self.helper = helper
        self._several = several

    def __str__(self) -> str:
        return f"{self.helper.__name__}{' of several' * self._several}"

    def enter(self, client):
        """The context manager, and a function from what it returns to one lease."""
        if self._several:
            return self.helper(lock_all(client.lock("x"), client.lock("y"))), lambda joint: joint.parts[0]
        return self.helper(client.lock("x")), lambda lease: lease


ON_STACKS = [
    Shape(helper, several=several)
    for helper in (OnStack, OnMovedStack, OnLocalStack, OnReturnedStack)
    for several in (False, True)
]
WITHOUT_STACKS = [Shape(Wrapper), Shape(Wrapper, several=True)]


async def with_class(client, shape) -> AsyncIterator[object]:
    manager, one = shape.enter(client)
    async with manager as entered:
        yield one(entered)


async def with_function(client, _) -> AsyncIterator[object]:
    async def enter_on(stack: AsyncExitStack):
        return await stack.enter_async_context(client.lock("x"))

    async with AsyncExitStack() as stack:
        yield await enter_on(stack)


async def with_guard_class(client, _) -> AsyncIterator[object]:
    lease = await client.lock("x").acquire()
    with Guarded(lease):
        yield lease


@pytest.mark.parametrize(
    ("how", "shape"),
    [
        (with_function, None),
        (with_guard_class, None),
        *((with_class, shape) for shape in WITHOUT_STACKS + ON_STACKS),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
async def test_a_generator_whose_helper_enters_spares_its_consumer(client, how, shape):
    """The block is the generator's, whatever enters it: the consumer is told when the generator goes on."""
    went_on = []

    async def work() -> None:
        async with aclosing(how(client, shape)) as source:
            async for lease in source:
                soon(verdict, lease)
                await passes(10)
                went_on.append(lease.lost)

    await assert_lost(work(), client)
    assert went_on == [True]


CERTAIN = [
    *itertools.product([*WITHOUT_STACKS, None], ["alone", "around", "inside"]),
    *itertools.product(ON_STACKS, ["alone", "around"]),
]


@pytest.mark.parametrize(("shape", "where"), CERTAIN, ids=str)
async def test_a_coroutine_is_cancelled_where_the_block_is_certainly_its_own(client, shape, where):
    """The block ends before it returns, so no code of a consumer runs in there; a generator that it consumes is no matter."""
    felt = []

    async def block(lease) -> None:
        soon(verdict, lease)
        try:
            await for_ever()
        except asyncio.CancelledError:
            felt.append(True)
            raise

    async def coroutine() -> None:
        if shape is None:
            lease = await client.lock("x").acquire()
            with Guarded(lease):
                await block(lease)
        else:
            manager, one = shape.enter(client)
            async with manager as entered:
                await block(one(entered))

    async def generator() -> AsyncIterator[int]:
        if where == "inside":
            await coroutine()
        yield 1

    async def work() -> None:
        if where == "alone":
            await coroutine()
        async for _ in generator():
            await coroutine()

    await assert_lost(work(), client)
    assert felt == [True]


@pytest.mark.parametrize("shape", ON_STACKS, ids=str)
async def test_a_coroutine_that_a_generator_awaits_is_told_at_the_end_of_a_block_on_a_stack(client, shape):
    """At entry, a stack that the coroutine will end is like one that the generator will get."""
    went_on = []

    async def coroutine() -> None:
        manager, one = shape.enter(client)
        async with manager as entered:
            soon(verdict, one(entered))
            await passes(10)
            went_on.append(one(entered).lost)

    async def generator() -> AsyncIterator[int]:
        await coroutine()
        yield 1

    async def work() -> None:
        async for _ in generator():
            pass

    await assert_lost(work(), client)
    assert went_on == [True]


async def test_an_async_generator_that_is_closed_early_releases(client):
    async def numbers() -> AsyncIterator[int]:
        async with client.lock("x"):
            yield 1

    async with aclosing(numbers()) as source:
        async for _ in source:
            break
    await gets_the_lock(client, "x")


async def test_a_generator_that_enters_through_an_exit_stack_spares_its_consumer(deployment, client):
    seen = []

    async def generator():
        async with AsyncExitStack() as stack:
            lease = await stack.enter_async_context(client.lock("x"))
            seen.append(lease)
            yield 1

    with pytest.raises(LockLost):
        async for _ in generator():
            await deployment.lose(seen[0])
            await until(lambda: seen[0].lost)
            await asyncio.sleep(0)
    assert asyncio.current_task().cancelling() == 0
