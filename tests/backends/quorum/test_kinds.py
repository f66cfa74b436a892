"""Readers and writers, requests and force, order and limits: with all three servers, and without one."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from aiolock.core.backend import EventKind
from tests.faults.staging import PATIENCE, gets_the_lock, queued, until


async def test_readers_are_inside_together_and_a_writer_in_line_stops_new_ones(three):
    for position in range(3):
        name = three.name(position)
        async with three.several(4, ttl=30) as (one, two, writer, late):
            readers = [await client.rwlock(name).read().acquire() for client in (one, two)]
            writing = asyncio.create_task(writer.rwlock(name).write().acquire())
            await queued(one.rwlock(name).read(), 1)
            reading = asyncio.create_task(late.rwlock(name).read().acquire())
            assert await late.rwlock(name).read().try_acquire() is None
            await queued(one.rwlock(name).read(), 2)
            assert all(lease.held for lease in readers)
            assert not writing.done()
            assert not reading.done()
            await asyncio.gather(*(lease.release() for lease in readers))
            async with asyncio.timeout(PATIENCE):
                lease = await writing
            assert not reading.done()
            await lease.release()
            await (await reading).release()
    await three.nothing_is_left()


async def test_a_writer_is_served_although_readers_never_stop_coming(three):
    name, over = three.name(0), asyncio.Event()
    async with three.several(3, ttl=30) as (*readers, writer):

        async def read(client) -> None:
            while not over.is_set():
                async with client.rwlock(name).read():
                    await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(read(client)) for client in readers for _ in range(3)]
        async with asyncio.timeout(PATIENCE):
            for _ in range(3):
                async with writer.rwlock(name).write():
                    pass
        over.set()
        await asyncio.gather(*tasks)
    await three.nothing_is_left()


@asynccontextmanager
async def without(three, number: int | None):
    """All of them, or all but one."""
    if number is None:
        yield
    else:
        async with three.away("black-holed", number):
            yield


@pytest.mark.parametrize("away", [None, 0, 1])
async def test_who_is_asked_to_let_go_is_told_once(three, away, monkeypatch):
    """Although every server says it, and says it again with each renewal."""
    name, told = three.name(0), []
    async with three.several(2, ttl=5, command_timeout=3) as (holder, asker):
        events = holder._backend.events
        put = events.put
        monkeypatch.setattr(events, "put", lambda event: (told.append(event), put(event)))
        async with holder.lock(name) as lease:
            async with without(three, away):
                assert await asker.lock(name).request_release("maintenance")
                async with asyncio.timeout(PATIENCE):
                    assert await lease.release_requested == "maintenance"
                for _ in range(3):
                    await lease.renew()
            await lease.renew()
            assert [event.text for event in told if event.kind is EventKind.REQUESTED] == ["maintenance"]
            assert lease.held
    await three.nothing_is_left()


async def test_who_is_asked_to_let_go_before_enough_have_granted_is_told(three):
    name = three.name(0)
    async with three.several(2, ttl=300, command_timeout=10) as (holder, asker):
        first, *others = (vote.backend for vote in holder._backend.members.all)
        connections = [backend._server.connection._transport for backend in others]
        for connection in connections:
            connection.pause_reading()
        entering = asyncio.create_task(holder.lock(name).acquire())
        await until(lambda: any(claim.taken for claim in first.claims.values()), "the first grant")

        async def asked() -> bool:
            return await asker.lock(name).request_release("maintenance")

        await until(asked)
        [vote] = [claim.validity for claim in first.claims.values()]
        await until(lambda: vote.owner.requested, "the request")
        for connection in connections:
            connection.resume_reading()
        async with asyncio.timeout(PATIENCE):
            lease = await entering
            assert await lease.release_requested == "maintenance"
        await lease.release()
    await three.nothing_is_left()


@pytest.mark.parametrize("away", [None, 0, 1])
async def test_force_takes_it_away_and_the_holder_is_told(three, away):
    name = three.name(0)
    async with three.several(2, ttl=300, command_timeout=3) as (holder, administrator):
        lease = await holder.lock(name).acquire()
        async with without(three, away):
            assert await administrator.lock(name).force_release()
            async with asyncio.timeout(PATIENCE):
                assert await lease.wait_lost() == "force-released"
                await gets_the_lock(administrator, name)
        await three.nothing_is_left()


async def test_a_lock_that_is_held_for_too_long_is_lost_and_had_by_the_next(three):
    name = three.name(1)
    async with three.several(2, ttl=3) as (client, rival):
        lease = await client.lock(name, max_hold=0.5).acquire()
        waiter = asyncio.create_task(rival.lock(name).acquire())
        async with asyncio.timeout(PATIENCE):
            assert await lease.wait_lost() == "max_hold"
            other = await waiter
        await lease.release()
        await other.renew()
        assert other.held
        await other.release()
    await three.nothing_is_left()


async def test_fair_tasks_of_several_clients_are_served_in_their_order(three):
    """As long as the same server decides; it is no promise, but what its line makes of it."""
    name, order = three.name(2), []
    async with three.several(3, ttl=30) as clients:
        held = await clients[0].lock(name).acquire()
        tasks = []

        async def turn(number: int) -> None:
            async with clients[number % 3].lock(name, fair=True):
                order.append(number)

        for number in range(9):
            tasks.append(asyncio.create_task(turn(number)))
            await queued(clients[0].lock(name), number + 1)
        await held.release()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*tasks)
    assert sorted(order) == list(range(9))
    assert order[0] == 0
    await three.nothing_is_left()


@pytest.mark.parametrize("fair", [False, True])
async def test_a_thousand_tasks_of_four_clients_take_turns(three, fair):
    name, count = three.name(0), 40 if fair else 250
    inside = total = 0

    async def turn(client) -> None:
        nonlocal inside, total
        async with client.lock(name, fair=fair):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1
            total += 1

    async with three.several(4, ttl=30) as clients, asyncio.timeout(2 * PATIENCE):
        await asyncio.gather(*(turn(client) for client in clients for _ in range(count)))
    assert total == 4 * count
    await three.nothing_is_left()
