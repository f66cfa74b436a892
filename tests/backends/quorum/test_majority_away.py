"""Two of three servers are away: nobody gets a lock, whoever holds one learns in time, and whoever waits is served later."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from functools import partial

import pytest

from aiolock import BackendRefused, BackendUnavailable
from tests.faults.redis_keys import Stopwatch
from tests.faults.staging import gets_the_lock, in_line, passes, queued, until

SOON = 8.0
"""Seconds that a loaded machine may add to what happens at once."""


async def test_holders_are_told_before_the_next_grant(three):
    mine = await three.more_ways()
    async with three.client(mine) as client, three.client(ttl=300) as rival:

        async def told_before(name: str) -> bool:
            """The holder is told, and only then there is another one."""
            lease = await client.lock(name).acquire()
            waiter = asyncio.create_task(rival.lock(name).acquire())
            await queued(rival.lock(name), 1)
            told = asyncio.create_task(lease.wait_lost())
            ready.release()
            other = await waiter
            # By its own clock; a busy machine may run what is due at the same time a step later.
            before = not lease.held
            await passes(10)
            before = before and told.done()
            assert await told == "expired"
            await other.release()
            return before

        ready = asyncio.Semaphore(0)
        watching = [asyncio.create_task(told_before(three.name(position))) for position in range(3)]
        for _ in watching:
            await ready.acquire()
        for way in mine[1:]:
            way.blackhole()
        assert await asyncio.gather(*watching) == [True, True, True]
        for way in mine[1:]:
            way.heal(release=False)
            way.reset_all()
    await three.nothing_is_left()


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_who_asks_is_told_within_the_command_timeout(three, how):
    limit = 2.0
    async with three.client(ttl=300, command_timeout=limit) as client:
        async with three.away(how, 0), three.away(how, 1):
            for position in range(3):
                lock = client.lock(three.name(position))
                for call in (lock.try_acquire(), lock.acquire()):
                    since = Stopwatch()
                    with pytest.raises(BackendUnavailable, match="2 of 3 servers cannot be asked"):
                        await call
                    assert since.seconds < 2 * limit + SOON

        async def works(name: str) -> bool:
            # A connection that breaks just now is as good as none.
            with contextlib.suppress(BackendUnavailable):
                return await gets_the_lock(client, name) > 0
            return False

        for position in range(3):
            await until(partial(works, three.name(position)))
        await three.nothing_is_left()


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_who_waits_survives_it_and_is_served_when_they_are_back(three, how):
    names = [three.name(position) for position in range(3)]
    async with three.several(2, ttl=20, command_timeout=2) as (holder, client):
        leases = [await holder.lock(name).acquire() for name in names]
        waiters = [asyncio.create_task(client.lock(name).acquire()) for name in names]
        for name in names:
            await queued(holder.lock(name), 1)
        await in_line(client, len(names))
        async with three.away(how, 0), three.away(how, 1):
            # Long enough to be given up by everybody who asks.
            await asyncio.sleep(2.5)
            assert not any(task.done() for task in waiters)
        # Who was killed has forgotten the locks, and the others have not.
        if how != "killed":
            await until(lambda: all(lease.remaining() > 15 for lease in leases))
            assert not any(task.done() for task in waiters)
        await asyncio.gather(*(lease.release() for lease in leases))
        async with asyncio.timeout(20):
            for waiter in waiters:
                lease = await waiter
                assert lease.held
                await lease.release()
        await three.nothing_is_left()


async def test_a_quorum_that_is_not_there_cannot_be_opened_and_says_why(three):
    urls = [f"redis://careful:geheim@127.0.0.1:{way.port}" for way in three.ways]
    client = three.of(*urls, command_timeout=2)
    async with three.away("killed", 0), three.away("killed", 2):
        with pytest.raises(BackendUnavailable) as caught:
            await client.open()
    shown = "".join(traceback.format_exception(caught.value)) + repr(client)
    assert "2 of 3 servers cannot be asked, and 2 are needed" in shown
    assert f"127.0.0.1:{three.ways[0].port}" in shown
    assert "geheim" not in shown
    # It may be tried again.
    async with client:
        await gets_the_lock(client, "x")


async def test_opening_again_without_them_fails_again(three):
    """What was open the last time is not taken for open."""
    client = three.client(command_timeout=2)
    async with three.away("killed", 0), three.away("killed", 1):
        with pytest.raises(BackendUnavailable):
            await client.open()
    async with three.away("killed", 1), three.away("killed", 2):
        with pytest.raises(BackendUnavailable, match="2 of 3"):
            await client.open()


@pytest.mark.parametrize("number", range(3))
async def test_a_wrong_password_at_one_of_them_is_an_error_at_open(three, number):
    urls = [
        f"redis://careful:{'falsch' if number == index else 'geheim'}@127.0.0.1:{one.port}"
        for index, one in enumerate(three.servers)
    ]
    client = three.of(*urls)
    with pytest.raises(BackendRefused) as caught:
        await client.open()
    shown = "".join(traceback.format_exception(caught.value)) + repr(client)
    assert "WRONGPASS" in shown
    assert "falsch" not in shown
    assert "geheim" not in shown

    async def closed() -> bool:
        lists = [await admin.client_list() for admin in three.admins]
        return not any(one["user"] == "careful" for each in lists for one in each)

    await until(closed)


async def test_closing_takes_no_longer_than_it_may_when_no_server_answers(three):
    """However long a command may take: what a frozen server does not hear ends by its ttl."""
    async with contextlib.AsyncExitStack() as stack:
        client = await three.client(ttl=300, command_timeout=200.0).open()
        lease = await client.lock("x").acquire()
        for number in range(3):
            await stack.enter_async_context(three.away("frozen", number))
        watch = Stopwatch()
        await client.aclose(0.2)
        assert lease.lost
        assert 0.2 <= watch.seconds < 0.2 + SOON
