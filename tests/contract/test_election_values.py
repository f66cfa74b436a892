"""A leader may say something about itself, such as where its service is, and every client can read it while it leads."""

from __future__ import annotations

import asyncio
import random

import pytest

from aiolock import UnsupportedKind
from tests.faults.staging import PATIENCE, queued, until

VALUES = [
    b"10.0.0.7:8080",
    b"",
    b"\x00\n\r\\'\"%{}; DROP TABLE aiolock; --\xff\xfe/../",
    bytes(range(256)),
    random.Random(7).randbytes(256),
]

NEEDS = "elections"


async def test_every_client_reads_the_value_of_the_leader(deployment, client, rival):
    election = client.election("x")
    if not deployment.shows:
        with pytest.raises(UnsupportedKind, match="value of a campaign"):
            election.campaign(value=b"host:1")
        assert election.campaign(value=b"") is election.campaign()
        return
    for value in VALUES:
        async with election.campaign(value=value) as term:
            for other in (client, rival):
                leader = await other.election("x").leader()
                assert leader is not None
                assert (leader.value, leader.holder.label) == (value, "client")
                assert leader.token == leader.holder.token
                if "tokens" in deployment.kinds:
                    assert leader.token == term.token
                [holder] = (await other.election("x").campaign().inspect()).holders
                assert holder == leader.holder or abs(holder.remaining - leader.holder.remaining) < PATIENCE
        assert await rival.election("x").leader() is None


async def test_a_value_is_that_of_the_present_leader(deployment, client, rival):
    """Also of one that waited, as its request does; and renewals and requests to let go do not change it."""
    if not deployment.shows:
        return
    mine, theirs = client.election("x", ttl=deployment.lasting(0.5)), rival.election("x")
    first = await mine.campaign(value=b"first").acquire()
    waiter = asyncio.create_task(theirs.campaign(value=b"second").acquire())
    await queued(mine.campaign(), 1)
    info = await theirs.campaign().inspect()
    assert [waiting.label for waiting in info.waiters] == ["rival"]
    if "requests" in deployment.kinds:
        await mine.campaign().request_release("please")
    await asyncio.sleep(1.2 * first.ttl)
    leader = await theirs.leader()
    assert leader is not None
    assert leader.value == b"first"
    await first.release()
    async with asyncio.timeout(PATIENCE):
        second = await waiter
    leader = await mine.leader()
    assert leader is not None
    assert (leader.value, leader.holder.label) == (b"second", "rival")
    await second.release()
    async with mine.campaign():
        leader = await theirs.leader()
        assert leader is not None
        assert leader.value == b""


async def test_a_value_comes_with_what_is_observed(deployment, client, rival):
    if not deployment.shows:
        return
    seen: list[bytes | None] = []

    async def observe() -> None:
        async for leader in rival.election("x", ttl=3).observe():
            value = None if leader is None else leader.value
            seen.append(value)

    observer = asyncio.create_task(observe())
    await until(lambda: seen == [None])
    async with client.election("x").campaign(value=b"one:1"):
        await until(lambda: seen[-1] == b"one:1")
    await until(lambda: seen[-1] is None)
    async with client.election("x").campaign(value=b"two:2"):
        await until(lambda: seen[-1] == b"two:2")
        observer.cancel()
        await asyncio.wait([observer])
    assert seen == [None, b"one:1", None, b"two:2"]


async def test_terms_with_a_value_are_resigned_like_others(deployment, client):
    if not deployment.shows:
        return
    election = client.election("x")
    term = await election.campaign(value=b"host:1").acquire()
    assert await election.campaign(value=b"host:1").try_acquire() is None
    assert await election.resign()
    assert not term.held
    assert not await election.resign()
    assert await election.leader() is None
