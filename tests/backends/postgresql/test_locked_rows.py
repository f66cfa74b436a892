"""Rows of locks that a stranger's transaction keeps locked: they cost these locks, and none of the others."""

from __future__ import annotations

import asyncio
import secrets

import asyncpg
import pytest

import aiolock
from tests.faults.proxy import Proxy
from tests.faults.staging import PATIENCE

LOCKS = 8


@pytest.fixture
async def stranger(server):
    """A connection of another program."""
    connection = await asyncpg.connect(server.url)
    yield connection
    await connection.close()


async def test_heartbeats_that_succeed_renew_leases_also_while_writes_wait_for_rows(server, stranger):
    """One that waits for the statement before it takes half of the command timeout here, and two are too many."""
    namespace = secrets.token_hex(6)
    async with Proxy("127.0.0.1", server.port) as proxy:
        url = server.url.replace(str(server.port), str(proxy.port))
        options = {"namespace": namespace, "ttl": 16, "command_timeout": 2.0, "on_loss": "signal"}
        async with aiolock.connect(url, **options) as client:
            leases = [await client.lock(f"x{number}").acquire() for number in range(LOCKS)]
            other = await client.lock("other").acquire()
            async with stranger.transaction():
                found = await stranger.fetch(
                    "SELECT FROM aiolock WHERE key LIKE $1 FOR UPDATE", f"{namespace}/l/lock/x%"
                )
                assert len(found) == LOCKS
                proxy.up.delay = proxy.down.delay = 0.07
                releases = [asyncio.create_task(lease.release()) for lease in leases]
                for _ in range(10):
                    first = asyncio.create_task(other.renew())
                    await asyncio.sleep(0.1)
                    await other.renew()
                    await first
            proxy.up.delay = proxy.down.delay = 0
            assert client._runtime.scheduler.losses == 0
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*releases)
                await other.release()
            # What could not be left while the rows were locked is left now.
            async with asyncio.timeout(PATIENCE), aiolock.connect(server.url, namespace=namespace) as rival:
                for number in range(LOCKS):
                    await (await rival.lock(f"x{number}").acquire()).release()
