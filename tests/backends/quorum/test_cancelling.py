"""Cancelled at any moment: nothing is left at any server or in the client, and the next one gets the lock."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random

import pytest

from aiolock import Client
from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.backends.quorum import QuorumBackend
from tests.faults.links import Link
from tests.faults.staging import PATIENCE, passes, until


async def storm(clients, names: list[str], count: int, random: Random, pause) -> int:
    """Acquire and release, cancelled after some time, by several tasks; how many were cancelled."""
    cancelled = 0

    async def turn(client, name: str) -> None:
        async with client.lock(name):
            await pause(random)

    async def worker() -> None:
        nonlocal cancelled, count
        while count > 0:
            count -= 1
            task = asyncio.create_task(turn(random.choice(clients), random.choice(names)))
            await pause(random)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            cancelled += task.cancelled()

    async with asyncio.timeout(2 * PATIENCE):
        await asyncio.gather(*(worker() for _ in range(6)))
    return cancelled


async def settled(clients) -> None:
    """Wait until the clients have nothing to do any more."""
    for client in clients:
        await until(lambda client=client: not client._backend.members.leaving)
        await until(lambda client=client: not client._runtime.cleanups)
        assert not client._runtime.shared
        assert not client._runtime.contenders
        # What listens at each server, the tasks of the client itself, and what a silent server is still asked.
        assert client.stats()["held"] == client.stats()["waiting"] == 0


async def test_a_thousand_cancellations_leave_nothing():
    """Of free and contended locks, at any step, on links that take their time."""
    random, servers = Random(7), [MemoryServer() for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                Client(
                    QuorumBackend([MemoryBackend(server=one, transport=Link()) for one in servers]), ttl=300
                )
            )
            for _ in range(3)
        ]
        await passes(20)
        before = asyncio.all_tasks()
        names = ["a", "b", *(f"free {number}" for number in range(20))]
        cancelled = await storm(clients, names, 1000, random, lambda random: passes(random.randrange(40)))
        assert cancelled > 300
        await settled(clients)
        await until(lambda: not asyncio.all_tasks() - before, "the end of all tasks")
        for server in servers:
            assert not server._machine.locks
        for client in clients:
            for name in names:
                lease = await client.lock(name).try_acquire()
                assert lease is not None
                await lease.release()


@pytest.mark.parametrize("away", [None, "black-holed", "killed"])
async def test_cancellations_leave_nothing_at_servers_of_which_one_may_be_away(three, away):
    random = Random(11)
    names = [three.name(position) for position in range(3)]
    numbers = range(3) if away is None else (1, 2)
    async with three.several(3, ttl=3, command_timeout=2) as clients, contextlib.AsyncExitStack() as stack:
        if away is not None:
            await stack.enter_async_context(three.away(away, 0))
        cancelled = await storm(
            clients, names, 120, random, lambda random: asyncio.sleep(random.random() * 0.03)
        )
        assert cancelled > 30
        await three.nothing_is_left(*numbers)
        for client in clients:
            for name in names:
                lease = await client.lock(name).acquire(timeout=PATIENCE)
                await lease.release()
        await stack.aclose()
        await settled(clients)
        await three.nothing_is_left()
