"""A server whose clock is set forward and back while locks are held: what it costs, as the page of the backend says it.

The server is a real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

import aiolock
from tests.backends.redis.conftest import SLOW
from tests.faults import clocks
from tests.faults.redis_keys import Stopwatch
from tests.faults.staging import until
from tests.servers import Redis

STEP = 3600
"""Seconds by which the clock is set: longer than any test takes, however slow the machine is."""


class SteppedRedis(NamedTuple):
    """One server whose clock can be set."""

    url: str
    step: Callable[[int], None]


@pytest.fixture
def stepped() -> Iterator[SteppedRedis]:
    """One for this test alone."""
    with clocks.stepped(Redis) as (server, step):
        yield SteppedRedis(server.url, step)


def some(client: aiolock.Client, kind: str) -> aiolock.Lock:
    """A lock of which only one hold can be had at a time."""
    return {
        "lock": lambda: client.lock("x"),
        "write": lambda: client.rwlock("x").write(),
        "permit": lambda: client.semaphore("x", 1),
    }[kind]()


KINDS = ["lock", "write", "permit"]


async def silent(server: SteppedRedis, namespace: str, kind: str, ttl: float) -> aiolock.Client:
    """A client that holds the lock and says nothing any more: to the server it is as good as dead."""
    client = await aiolock.connect(server.url, namespace=namespace, ttl=ttl, **SLOW).open()
    client.held = await some(client, kind).acquire()  # type: ignore[attr-defined] # else it would be given back
    client._runtime.scheduler.discard(client.held._hold.validity)  # type: ignore[attr-defined] # nobody renews it
    return client


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("waits", [True, False])
async def test_a_clock_that_is_set_back_costs_one_ttl_at_most(stepped, namespace, kind, waits):
    ttl = 2.0
    dead = await silent(stepped, namespace, kind, ttl)
    async with aiolock.connect(stepped.url, namespace=namespace, ttl=ttl, **SLOW) as client:
        lock = some(client, kind)
        stepped.step(-STEP)
        watch = Stopwatch()
        if waits:
            lease = await lock.acquire(timeout=STEP / 2)
        else:
            # Nobody is in line: each question is all that the server pushed.
            while (lease := await lock.try_acquire()) is None:
                assert watch.seconds < STEP / 2
                await asyncio.sleep(0.05)
        # How much less is the machine's business; without the bound it is an hour.
        assert watch.seconds < STEP / 10
        assert lease.held
        await lease.release()
    await dead.aclose()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_clock_that_is_set_back_takes_nothing_from_who_lives(stepped, namespace, kind):
    async with (
        aiolock.connect(stepped.url, namespace=namespace, ttl=2.0, **SLOW) as holder,
        aiolock.connect(stepped.url, namespace=namespace, ttl=2.0, **SLOW) as other,
    ):
        async with some(holder, kind) as lease:
            waiting = asyncio.create_task(some(other, kind).acquire())
            await until(lambda: other.stats()["waiting"] == 1)
            stepped.step(-STEP)
            # Several ttls and heartbeats.
            await asyncio.sleep(5)
            lease.check()
            assert not waiting.done()
        async with asyncio.timeout(60):
            after = await waiting
        assert after.token > lease.token
        await after.release()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_clock_that_is_set_forward_ends_holds_early_and_their_owners_are_told(
    stepped, namespace, kind
):
    """The exception that the page names: two may believe, until the first one's next renewal."""
    async with (
        aiolock.connect(stepped.url, namespace=namespace, ttl=30.0, **SLOW) as holder,
        aiolock.connect(stepped.url, namespace=namespace, ttl=30.0, **SLOW) as other,
    ):
        lease = await some(holder, kind).acquire()
        stepped.step(STEP)
        after = await some(other, kind).acquire(timeout=60)
        assert after.token > lease.token
        with pytest.raises(aiolock.LockLost):
            await lease.renew()
        assert lease.lost
        assert after.held
        await after.release()


async def test_tokens_rise_when_the_clock_is_set_back(stepped, namespace):
    async with aiolock.connect(stepped.url, namespace=namespace, **SLOW) as client:
        async with client.lock("x") as before:
            pass
        stepped.step(-STEP)
        async with client.lock("x") as after:
            assert after.token > before.token
        async with client.lock("y") as another:
            assert another.token > before.token
