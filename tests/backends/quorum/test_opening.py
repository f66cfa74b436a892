"""What can be wrong with a list of servers is found out when it is opened, or when the one in question is there."""

from __future__ import annotations

import asyncio
import logging

import pytest

from aiolock import Client, ConfigError
from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.backends.quorum import QuorumBackend
from tests.faults.staging import gets_the_lock, until


@pytest.mark.parametrize("number", range(3))
async def test_one_server_under_two_names_is_an_error(three, number):
    urls = three.urls()
    twin = urls[number - 1].replace("127.0.0.1", "localhost")
    urls[number] = twin
    client = three.of(*urls)
    with pytest.raises(ConfigError, match="are the same one") as caught:
        await client.open()
    port = three.servers[number - 1].port
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert f"localhost:{port}" in str(caught.value)
    await three.nothing_is_left()


async def test_one_server_under_two_names_is_an_error_in_memory():
    one, other = MemoryServer(), MemoryServer()
    client = Client(QuorumBackend([MemoryBackend(server=server) for server in (one, other, one)]))
    with pytest.raises(ConfigError, match="are the same one"):
        await client.open()
    assert not one._machine.locks
    assert not other._machine.locks


async def test_one_that_turns_out_to_be_another_when_it_is_there_never_takes_part(three, caplog):
    """It is found out later if it could not be reached: by then its port leads to the server of another name."""
    ways = await three.more_ways()
    ways[2].refuse = True
    async with three.client(ways, ttl=30) as client:
        ways[2].upstream = ways[0].upstream
        with caplog.at_level(logging.ERROR, logger="aiolock"):
            ways[2].refuse = False
            await until(lambda: any("are the same one" in line for line in caplog.messages))
        lease = await client.lock("x").acquire()
        assert (await three.votes("x"))[2] == "-"
        assert not client._backend.members.all[2].open
        await lease.release()
        await gets_the_lock(client, "x")
    await three.nothing_is_left()


async def test_cancelled_opening_leaves_nothing_open(three):
    """Neither a task, which every test looks for, nor a connection, at whatever step."""

    async def connections() -> int:
        lists = [await admin.client_list() for admin in three.admins]
        return sum(len(each) for each in lists)

    before = await connections()
    for step in range(0, 40, 3):
        client = three.of(*three.urls())
        opening = asyncio.create_task(client.open())
        for _ in range(step):
            await asyncio.sleep(0.0005)
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled():
            await client.aclose()
    await until(lambda: _same(connections, before))
    await three.nothing_is_left()


async def _same(connections, before: int) -> bool:
    return await connections() == before


async def test_what_is_asked_and_closed_at_once_leaves_nothing(three):
    for position in range(3):
        async with three.client(ttl=300) as holder:
            lease = await holder.lock(three.name(position)).acquire()
            async with three.client(ttl=300) as client:
                assert await client.lock(three.name(position)).try_acquire() is None
            await lease.release()
    await three.nothing_is_left()
