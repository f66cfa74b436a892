"""A server that was away comes back, with what it knew or without: its vote is mended, and another one may go."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.staging import PATIENCE, in_line, queued, until

TTL = 3.0
OTHERS = (1, 2)


async def mended(three, name: str, label: str, *numbers: int) -> None:
    """Wait until these servers have that holder."""

    async def all_of_them() -> bool:
        return set(await three.votes(name, *numbers)) == {label}

    await until(all_of_them, f"votes for {label}")


async def test_who_was_away_at_open_takes_part_when_it_is_there(three):
    names = [three.name(position) for position in range(3)]
    async with three.away("killed", 0):
        client = await three.client(label="me", ttl=TTL).open()
        leases = [await client.lock(name).acquire() for name in names]
    for name in names:
        await mended(three, name, "me")
    async with three.away("killed", 1):
        await asyncio.sleep(1.3 * TTL)
        assert all(lease.held for lease in leases)
        await asyncio.gather(*(lease.release() for lease in leases))
    await client.aclose()
    await three.nothing_is_left()


async def test_who_was_away_for_a_while_has_its_votes_again(three):
    names = [three.name(position) for position in range(3)]
    async with three.client(label="me", ttl=TTL) as client:
        async with three.away("black-holed", 0):
            leases = [await client.lock(name).acquire() for name in names]
        for name in names:
            await mended(three, name, "me")
        async with three.away("black-holed", 1):
            await asyncio.sleep(1.3 * TTL)
            assert all(lease.held for lease in leases)
            await asyncio.gather(*(lease.release() for lease in leases))
    await three.nothing_is_left()


@pytest.mark.parametrize("waiters", [0, 3])
async def test_a_restart_without_data_gives_the_lock_to_nobody_and_the_vote_is_mended(three, waiters):
    """Also if others wait there, each of whom is next at the server that has forgotten the holder."""
    names = [three.name(position) for position in range(3)]
    async with three.client(label="me", ttl=TTL) as client, three.several(3, ttl=TTL) as rivals:
        leases = [await client.lock(name).acquire() for name in names]
        tasks = [
            asyncio.create_task(rival.lock(name).acquire()) for rival in rivals[:waiters] for name in names
        ]
        for name in names:
            await queued(client.lock(name), waiters)
            await mended(three, name, "me")
        for rival in rivals[:waiters]:
            await in_line(rival, len(names))
        for number in range(3):
            async with three.away("killed", number):
                pass
            for name in names:
                assert await rivals[-1].lock(name).try_acquire() is None
            for name in names:
                await mended(three, name, "me")
            assert not any(task.done() for task in tasks)
        assert all(lease.held for lease in leases)
        await asyncio.gather(*(lease.release() for lease in leases))
        async with asyncio.timeout(PATIENCE):
            for task in asyncio.as_completed(tasks):
                lease = await task
                assert lease.held
                await lease.release()
    await three.nothing_is_left()


async def test_two_servers_that_forget_are_a_loss_that_is_told_at_once(three):
    """That is the exception: most votes are gone. With a ttl that nobody could wait for here."""
    async with three.client(ttl=300) as client:
        lease = await client.lock("x").acquire()
        for number in OTHERS:
            await three.admins[number].flushall()
            three.ways[number].reset_all()
        async with asyncio.timeout(PATIENCE):
            assert await lease.wait_lost() == "revoked"
    await three.nothing_is_left()
