"""One of three servers is away, in every way that a server can be: everything goes on with the other two."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.redis_quorum import AWAY, REFUSES, SERVERS, SILENT
from tests.faults.staging import PATIENCE, in_line, queued, until

TTL = 3.0
"""Seconds; what is held has to be renewed for longer than that."""

OTHERS = (1, 2)
NAMES = range(SERVERS)
"""The server that goes away is the first; it decides about one of the locks, and is second or third for the others."""


@pytest.mark.parametrize("how", [*SILENT, "without rights"])
async def test_what_is_held_stays_held_and_those_in_line_get_it(three, how):
    names = [three.name(position) for position in NAMES]
    async with three.several(3, ttl=TTL) as (holder, second, third):
        leases = [await holder.lock(name).acquire() for name in names]
        waiters = [asyncio.create_task(second.lock(name).acquire()) for name in names]
        for name in names:
            await queued(holder.lock(name), 1)
        await in_line(second, len(names))
        renewals = holder.stats()["renewals"]
        async with three.away(how, 0):
            # Who comes now is behind those who have a place at a server that is not there.
            later = [asyncio.create_task(third.lock(name).acquire()) for name in names]
            # A server that refuses does so at once; about one that is silent there is more to be found out.
            await asyncio.sleep(1.2 * TTL if how in REFUSES else 2 * TTL)
            assert holder.stats()["renewals"] >= renewals + 2 * len(names)
            assert not any(lease.lost for lease in leases)
            assert all(lease.held for lease in leases)
            assert not any(task.done() for task in waiters + later)
            await asyncio.gather(*(lease.release() for lease in leases))
            async with asyncio.timeout(PATIENCE):
                for one, other in zip(waiters, later, strict=True):
                    await asyncio.wait([one, other], return_when=asyncio.FIRST_COMPLETED)
                    first, last = (one, other) if one.done() else (other, one)
                    lease = await first
                    assert lease.held
                    assert not last.done() or not (await last).held
                    await lease.release()
                    await (await last).release()
            await three.nothing_is_left(*OTHERS)
        # Who may not even leave is forgotten when nothing was heard for some seconds.
        await three.nothing_is_left(*(OTHERS if how == "without rights" else NAMES))


@pytest.mark.parametrize("how", AWAY)
async def test_free_locks_are_had_and_given_back(three, how):
    async with three.several(2, command_timeout=1) as (client, rival):
        before = {position: three.name(position, "held") for position in NAMES}
        leases = [await client.lock(name).acquire() for name in before.values()]
        async with three.away(how, 0):
            # What was taken before is given back while one of those who gave it is away.
            await asyncio.gather(*(lease.release() for lease in leases))
            for position in NAMES:
                name = three.name(position)
                async with client.lock(name) as lease:
                    assert lease.held
                    assert await rival.lock(name).try_acquire() is None
                    assert await rival.lock(name).locked()
                taken = await rival.lock(before[position]).acquire(timeout=PATIENCE)
                await taken.release()
            await three.nothing_is_left(*OTHERS)
        await three.nothing_is_left()


@pytest.mark.parametrize("how", ["killed", "frozen", "read-only", "full"])
async def test_who_comes_later_does_not_miss_it(three, how):
    async with three.away(how, 0), three.several(2, command_timeout=1) as (client, rival):
        for position in NAMES:
            name = three.name(position)
            lease = await client.lock(name).acquire()
            waiter = asyncio.create_task(rival.lock(name).acquire())
            await queued(client.lock(name), 1)
            await lease.release()
            await (await waiter).release()
        await three.nothing_is_left(*OTHERS)
    await three.nothing_is_left()


@pytest.mark.parametrize("how", SILENT)
async def test_who_did_not_answer_once_is_not_waited_for_again(three, how):
    """A silent server that decides costs each client half a command timeout, and not each acquire."""
    many = 20
    async with three.client(ttl=300, command_timeout=20) as client:
        async with three.away(how, 0):
            name = three.name(0)
            quick = client._backend.members.all[0]
            quick.silent = True  # what any question to it that was not answered would have left
            async with asyncio.timeout(PATIENCE):
                for _ in range(many):
                    async with client.lock(name):
                        pass
                assert quick.silent
        await until(lambda: not client._backend.members.leaving)

        async def heard_again() -> bool:
            async with client.lock(name):
                pass
            return not quick.silent

        await until(heard_again)


async def test_a_dead_server_that_decides_costs_one_call_and_not_each(three):
    """What could not even be sent to it is given back without a question, which is no sign of life."""
    async with three.client(ttl=300) as holder, three.client(ttl=1.5, command_timeout=3) as client:
        dead = client._backend.members.all[0]
        async with three.away("killed", 0):
            names = [three.name(0), three.name(0, "y")]
            lease = await holder.lock(names[0]).acquire()
            for _ in range(3):
                assert await client.lock(names[0]).try_acquire() is None
                await until(lambda: not client._backend.members.leaving)
                assert dead.silent
            # Half of the command timeout is as long as the ttl: whoever waits for it each time never has a grant.
            async with asyncio.timeout(PATIENCE):
                for _ in range(3):
                    await (await client.lock(names[1]).acquire()).release()
            await lease.release()
        await three.nothing_is_left()


async def test_a_hundred_who_wait_do_not_ask_again_and_again(three):
    name, each, seconds = three.name(0), 25, 0.7
    async with three.several(4, ttl=30, command_timeout=2) as clients:
        lease = await clients[0].lock(name).acquire()
        tasks = [
            asyncio.create_task(client.lock(name, fair=True).acquire())
            for client in clients
            for _ in range(each)
        ]
        await queued(clients[0].lock(name), len(tasks))
        for how in (None, "black-holed"):
            if how is None:
                before = [await three.commands(number) for number in range(SERVERS)]
                await asyncio.sleep(seconds)
            else:
                async with three.away(how, 1):
                    before = [await three.commands(number) for number in range(SERVERS)]
                    await asyncio.sleep(seconds)
            after = [await three.commands(number) for number in range(SERVERS)]
            asked = [late - early for early, late in zip(before, after, strict=True)]
            print(how, asked)
            # A look of each every two seconds at the one that decides, heartbeats, and next to nothing elsewhere.
            assert asked[0] < 3 * len(tasks)
            assert max(asked[1:]) < len(tasks)
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            for task in asyncio.as_completed(tasks):
                await (await task).release()
    await three.nothing_is_left()
