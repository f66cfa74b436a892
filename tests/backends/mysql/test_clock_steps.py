"""A server whose clock is set forward and back while locks are held: what it costs, as the page says it."""

from __future__ import annotations

import asyncio
import secrets

import pytest

import aiolock
from aiolock import LockLost
from tests.faults.clocks import keeps_its_lock, stepped
from tests.faults.staging import PATIENCE, queued
from tests.servers import MariaDB, is_mysql

pytestmark = pytest.mark.skipif(is_mysql(), reason="staged with MariaDB; the statements are the same")

STEP = 3600
"""Seconds by which the clock is set: longer than any test takes."""
TTL = 2.0


@pytest.fixture(scope="module")
def server():
    """Its URL, and the function that sets its clock."""
    with stepped(MariaDB) as (running, step):
        yield running.url, step


@pytest.fixture
def connect(server):
    """Makes clients of one namespace."""
    namespace = secrets.token_hex(6)
    return lambda **options: aiolock.connect(server[0], **{"namespace": namespace, "ttl": TTL, **options})


KINDS = {
    "lock": lambda client: client.lock("x"),
    "write": lambda client: client.rwlock("x").write(),
    "permit": lambda client: client.semaphore("x", 1),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_a_dead_holder_s_lock_stays_taken_for_as_much_longer_as_the_clock_is_set_back(
    server, connect, kind
):
    async with connect() as dead, connect() as client:
        held = await kind(dead).acquire()
        # To the server it is as good as dead.
        dead._runtime.scheduler.discard(held._hold.validity)
        server[1](-STEP)
        loop = asyncio.get_running_loop()
        end = loop.time() + 4 * TTL
        while loop.time() < end:
            assert await kind(client).try_acquire() is None
            await asyncio.sleep(0.1)
        waiter = asyncio.create_task(kind(client).acquire(timeout=2 * PATIENCE))
        await queued(kind(client), 1)
        server[1](STEP)
        # It does not sleep until the hour is over that it was told.
        lease = await waiter
        assert lease.token > held.token
        await lease.release()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_a_clock_that_is_set_back_takes_nothing_from_a_holder_that_lives(server, connect, kind):
    await keeps_its_lock(connect, lambda: server[1](-STEP), kind)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_a_clock_that_is_set_forward_ends_holds_early_and_their_owners_are_told(server, connect, kind):
    """The exception that the page names: two may believe, until the first one's next renewal."""
    async with connect(ttl=30.0) as holder, connect(ttl=30.0) as client:
        lease = await kind(holder).acquire()
        server[1](STEP)
        following = await kind(client).acquire(timeout=PATIENCE)
        assert following.token > lease.token
        with pytest.raises(LockLost):
            await lease.renew()
        assert lease.lost
        assert following.held
        await following.release()
