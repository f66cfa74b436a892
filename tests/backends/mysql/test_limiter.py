"""Crowds of tasks that ask at the same moment: the limiter keeps them off the one session on which requests leave."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

import aiolock
from aiolock.backends.mysql.queue import QueuedClaim
from tests.faults.proxy import Proxy
from tests.faults.staging import PATIENCE
from tests.pace import pace


async def test_a_crowd_is_not_kept_longer_than_it_wants_to_wait(deployment, monkeypatch):
    """Their timeout is longer than that of a command, and shorter than their line."""
    real = QueuedClaim._attempt

    async def slow(claim, *, wait: bool):
        await asyncio.sleep(0.05)
        return await real(claim, wait=wait)

    monkeypatch.setattr(QueuedClaim, "_attempt", slow)
    async with deployment.connect(ttl=10, command_timeout=0.5) as client:
        client._runtime.limiter.room = 1

        async def ask(number: int) -> float:
            begun = time.monotonic()
            with contextlib.suppress(aiolock.LockError):
                await (await client.lock(f"x{number}").acquire(timeout=0.6)).release()
            return time.monotonic() - begun

        async with asyncio.timeout(PATIENCE):
            times = await asyncio.gather(*(ask(number) for number in range(200)))
        # One after the other it would be ten seconds and more.
        assert max(times) < 8


@pytest.mark.parametrize("mode", ["lease", "session"])
async def test_a_crowd_gets_its_locks_and_the_others_of_its_client_are_kept(deployment, mode):
    """More than the server does within a command timeout, however busy the machine is."""
    async with deployment.connect(mode, ttl=60, command_timeout=20) as client:
        begun = time.monotonic()
        few = await asyncio.gather(*(client.lock(f"few {number}").acquire() for number in range(64)))
        timeout = max(pace() ** 2, 8 * (time.monotonic() - begun))
        await asyncio.gather(*(lease.release() for lease in few))
    async with deployment.connect(mode, ttl=max(10.0, 3 * timeout), command_timeout=timeout) as client:
        kept = [await client.lock(f"kept {number}").acquire() for number in range(3)]
        leases = await asyncio.gather(*(client.lock(f"x{number}").acquire() for number in range(2000)))
        assert all(lease.held for lease in kept)
        assert client.stats()["lost"] == 0
        await asyncio.gather(*(lease.release() for lease in [*leases, *kept]))


async def test_a_server_that_is_gone_refuses_a_crowd_at_once(deployment):
    async with (
        Proxy(deployment.server.host, deployment.server.port) as proxy,
        deployment.connect(port=proxy.port, command_timeout=0.5) as client,
    ):
        lock = client.lock("first")
        await (await lock.acquire()).release()
        proxy.blackhole()
        tasks = [asyncio.create_task(client.lock(f"x{number}").acquire()) for number in range(300)]
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait(tasks)
        assert all(isinstance(task.exception(), aiolock.BackendUnavailable) for task in tasks)
        proxy.reset_all()
