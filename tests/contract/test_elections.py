"""One leader at a time, with a term that has a number; and everybody may watch."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import LockLost
from aiolock.clock import system_clock
from tests.faults.staging import PATIENCE, queued, until

NEEDS = {"fencing", "elections"}
"""A term has a number, which the server knows."""


async def test_who_campaigns_first_leads_first(client, rival):
    mine, theirs = client.election("x"), rival.election("x")
    assert await mine.leader() is None
    async with mine.campaign() as term:
        leader = await theirs.leader()
        assert leader is not None
        assert (leader.holder.label, leader.token) == ("client", term.token)
        next_term = asyncio.create_task(theirs.campaign().acquire())
        await queued(mine.campaign(), 1)
        assert await theirs.campaign().try_acquire() is None
    async with asyncio.timeout(PATIENCE):
        second = await next_term
    assert second.token > term.token
    leader = await mine.leader()
    assert leader is not None
    assert (leader.holder.label, leader.token) == ("rival", second.token)
    await second.release()
    assert await mine.leader() is None


async def test_the_number_of_a_term_is_what_others_are_told(client):
    election = client.election("x")
    for _ in range(3):
        async with election.campaign() as term:
            leader = await election.leader()
            assert leader is not None
            assert leader.token == term.token


async def test_tasks_of_one_client_lead_one_after_the_other(client):
    election, inside, terms = client.election("x"), 0, []

    async def lead() -> None:
        nonlocal inside
        async with election.campaign() as term:
            inside += 1
            assert inside == 1
            terms.append(term.token)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(lead() for _ in range(5)))
    assert terms == sorted(set(terms))


async def test_who_resigns_makes_place(client, rival):
    election = client.election("x")
    assert not await election.resign()
    term = await election.campaign().acquire()
    successor = asyncio.create_task(rival.election("x").campaign().acquire())
    await queued(election.campaign(), 1)
    assert await election.resign()
    assert not term.held
    assert not term.lost
    async with asyncio.timeout(PATIENCE):
        second = await successor
    assert not await election.resign()
    assert second.held
    await second.release()


async def test_a_block_may_resign_in_the_middle(client):
    election = client.election("x")
    async with election.campaign() as term:
        assert await election.resign()
        assert not term.held
        assert await election.leader() is None


async def test_a_leader_that_loses_its_term_is_told(deployment, client, rival):
    with pytest.raises(LockLost):
        async with client.election("x").campaign() as term:
            await deployment.lose(term)
            await asyncio.sleep(PATIENCE)
            raise AssertionError("the block was not cancelled")
    async with rival.election("x").campaign() as second:
        assert second.token > term.token


@pytest.mark.parametrize("refused", [False, True], ids=["silence", "refusal"])
async def test_a_leader_that_is_cut_off_knows_it_before_another_leads(deployment, refused):
    """Both moments are read from the clock that both of them go by."""
    async with (
        deployment.over(label="cut off", ttl=2.0) as (client, way),
        deployment.connect(label="rival", ttl=2.0) as rival,
    ):
        ended: list[float] = []
        leading = asyncio.Event()

        async def lead() -> None:
            async with client.election("x").campaign() as term:
                leading.set()
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    assert term.lost
                    # Until then it was certain; the block was told at its next step.
                    ended.append(term._hold.validity.until)

        leader = asyncio.create_task(lead())
        await leading.wait()
        first = await rival.election("x").leader()
        successor = asyncio.create_task(rival.election("x").campaign().acquire())
        await queued(rival.election("x").campaign(), 1)
        way.cut(refused=refused)
        async with asyncio.timeout(PATIENCE):
            second = await successor
            led = system_clock()
            with pytest.raises(LockLost):
                await leader
        assert ended[0] < led
        assert first is not None
        assert second.token > first.token
        seen = await rival.election("x").leader()
        assert seen is not None
        assert (seen.holder.label, seen.token) == ("rival", second.token)
        await second.release()


async def test_observers_see_every_change(client, rival):
    seen: list[str | None] = []

    async def observe() -> None:
        async for leader in rival.election("x", ttl=3).observe():
            label = None if leader is None else leader.holder.label
            seen.append(label)

    observer = asyncio.create_task(observe())
    await until(lambda: seen == [None])
    async with client.election("x").campaign():
        await until(lambda: seen[-1] == "client")
    await until(lambda: seen[-1] is None)
    async with rival.election("x").campaign():
        await until(lambda: seen[-1] == "rival")
        observer.cancel()
        await asyncio.wait([observer])
    assert seen == [None, "client", None, "rival"]


async def test_an_observer_begins_with_what_is(client, rival):
    async with client.election("x").campaign() as term:
        async for leader in rival.election("x").observe():
            assert leader is not None
            assert leader.token == term.token
            break


async def test_closing_ends_observers(deployment):
    client = await deployment.connect().open()
    seen = asyncio.Event()

    async def observe() -> None:
        async for _ in client.election("x", ttl=0.3).observe():
            seen.set()

    observer = asyncio.create_task(observe())
    async with asyncio.timeout(PATIENCE):
        await seen.wait()
        await client.aclose()
        with pytest.raises(RuntimeError, match=r"closed|closing"):
            await observer


async def test_an_election_is_no_lock(client):
    async with client.election("x").campaign(), client.lock("x") as lease:
        assert lease.held
        with pytest.raises(RuntimeError, match="own block"):
            await client.election("x").campaign().acquire()
