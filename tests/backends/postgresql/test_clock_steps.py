"""A server whose clock is set forward and back while locks are held: what it costs, as the page says it."""

from __future__ import annotations

import asyncio
import secrets

import pytest

import aiolock
from aiolock import LockLost
from tests.faults.clocks import keeps_its_lock, stepped
from tests.faults.staging import PATIENCE
from tests.servers import PostgreSQL

STEP = 3600
"""Seconds by which the clock is set: longer than any test takes."""
TTL = 2.0


@pytest.fixture(scope="module")
def server():
    """Its URL, and the function that sets its clock."""
    with stepped(PostgreSQL) as (running, step):
        yield running.url, step


@pytest.fixture
def connect(server):
    """Makes clients of one namespace."""
    namespace = secrets.token_hex(6)
    return lambda **options: aiolock.connect(server[0], **{"namespace": namespace, "ttl": TTL, **options})


async def die(client) -> None:
    """Have a client send no heartbeat any more: to others it is as good as dead."""
    engine = client._runtime.backend._engine
    for timer in engine._timers.values():
        timer.cancel()
    client._runtime.scheduler.close()


@pytest.mark.parametrize("waits", [True, False])
async def test_a_clock_that_is_set_back_costs_a_client_that_stays_a_ttl_and_no_more(server, connect, waits):
    async with connect() as dead, connect() as client:
        held = await dead.lock("x").acquire()
        await die(dead)
        server[1](-STEP)
        async with asyncio.timeout(PATIENCE):
            if waits:
                lease = await client.lock("x").acquire()
            else:
                while (lease := await client.lock("x").try_acquire()) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        assert lease.token > held.token
        await lease.release()


async def test_clients_that_try_once_and_leave_do_not_take_over_before_the_clock_has_caught_up(
    server, connect
):
    async def tried() -> aiolock.Lease | None:
        async with connect() as client:
            lease = await client.lock("x").try_acquire()
            if lease is not None:
                await lease.release()
            return lease

    async with connect() as dead:
        held = await dead.lock("x").acquire()
        await die(dead)
        server[1](-STEP)
        loop = asyncio.get_running_loop()
        end = loop.time() + 4 * TTL
        while loop.time() < end:
            assert await tried() is None
        server[1](STEP)
        lease = await tried()
        assert lease is not None
        assert lease.token > held.token


async def test_a_clock_that_is_set_back_takes_nothing_from_a_holder_that_lives(server, connect):
    await keeps_its_lock(connect, lambda: server[1](-STEP))


async def test_a_clock_that_is_set_forward_ends_holds_early_for_clients_that_come_then(server, connect):
    """The exception that the page names: two may believe, until the first one's next renewal."""
    async with connect(ttl=30.0) as holder:
        lease = await holder.lock("x").acquire()
        server[1](STEP)
        async with connect(ttl=30.0) as client:
            following = await client.lock("x").acquire(timeout=PATIENCE / 4)
            assert following.token > lease.token
            with pytest.raises(LockLost):
                await lease.renew()
            assert lease.lost
            assert following.held
            await following.release()
