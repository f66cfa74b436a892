"""Waiting at a quorum: woken by the servers and not by the clock, at the cost of a future."""

from __future__ import annotations

import asyncio
import logging

import pytest

import aiolock
from aiolock.backends.quorum import claim as quorum_claim
from aiolock.core.backend import Request
from aiolock.core.inbox import WakeReason
from aiolock.types import MUTEX
from tests.faults.staging import PATIENCE, passes, queued, until

WAITERS = 20


@pytest.mark.parametrize("position", range(3))
async def test_a_waiter_is_woken_by_the_release_and_not_by_a_poll(three, monkeypatch, position):
    monkeypatch.setattr(quorum_claim, "POLL", 3600.0)
    name = three.name(position)
    async with three.several(2, ttl=300) as (one, two):
        for _ in range(20):
            async with one.lock(name):
                waiting = asyncio.create_task(two.lock(name).acquire())
                await queued(one.lock(name), 1)
            async with asyncio.timeout(PATIENCE):
                await (await waiting).release()
    await three.nothing_is_left()


async def test_waiters_have_no_task_of_the_client(three):
    name = three.name(0)
    async with three.several(2, ttl=300) as (one, two):
        lease = await one.lock(name).acquire()
        await until(lambda: not two._backend.members.leaving)
        before = asyncio.all_tasks()
        waiting = {asyncio.create_task(two.lock(name, fair=True).acquire()) for _ in range(WAITERS)}
        await queued(one.lock(name), WAITERS)
        # The votes that the other servers gave meanwhile have been given back by then.
        await until(lambda: asyncio.all_tasks() - before == waiting, "no other task")
        await passes(5)
        assert asyncio.all_tasks() - before == waiting
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            for waiter in asyncio.as_completed(waiting):
                await (await waiter).release()
    await three.nothing_is_left()


async def test_why_a_waiter_woke_is_logged(three, monkeypatch, caplog):
    monkeypatch.setattr(quorum_claim, "POLL", 3600.0)
    name = three.name(0)

    async def woken(claim) -> WakeReason:
        async with asyncio.timeout(PATIENCE):
            reason = await claim.inbox.wait()
        records = [each for each in caplog.records if each.name == "aiolock.wait"]
        assert records[-1].aiolock_reason == reason.name
        return reason

    async with (
        three.client(ttl=300, command_timeout=20) as client,
        aiolock.connect(three.urls()[1], namespace=three.namespace, ttl=300) as of_one_server,
    ):
        caplog.set_level(logging.DEBUG, "aiolock.wait")
        lease = await client.lock(name).acquire()
        claim = client._backend.claim(Request(name, MUTEX, ttl=300, label="", fair=True))
        assert await claim.acquire(wait=True) is None
        await lease.release()
        assert await woken(claim) is WakeReason.GRANTED
        while await claim.acquire(wait=True) is None:
            await woken(claim)
        await claim.release()

        # The second server refuses, then the first grants, and the third is slow.
        lease = await of_one_server.lock(name).acquire()
        claim = client._backend.claim(Request(name, MUTEX, ttl=300, label="", fair=True))
        three.ways[0].up.delay, three.ways[2].up.delay = 0.2, 1.5
        assert await claim.acquire(wait=True) is None
        assert await woken(claim) is WakeReason.ANSWERED
        assert await claim.acquire(wait=True) is not None
        three.ways[0].up.delay = three.ways[2].up.delay = 0.0
        await claim.release()
        await lease.release()
    await three.nothing_is_left()
