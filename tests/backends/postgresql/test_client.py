"""Locks on a PostgreSQL server that something happens to: holders keep what they hold, and waiters get it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import pytest

import aiolock
from tests.backends.postgresql.test_faults import ask
from tests.faults.staging import PATIENCE, until


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+asyncpg"])
async def test_every_scheme_is_a_way_to_the_same_locks(url, scheme):
    namespace = secrets.token_hex(6)
    async with (
        aiolock.connect(url, namespace=namespace) as client,
        aiolock.connect(f"{scheme}{url[url.index('://') :]}", namespace=namespace) as other,
    ):
        async with client.lock("x") as lease:
            assert await other.lock("x").try_acquire() is None
        async with other.lock("x") as next_lease:
            assert next_lease.token > lease.token


async def test_findings_are_had_through_the_client(url):
    async with aiolock.connect(url, namespace=secrets.token_hex(6)) as client:
        assert {"version", "recovery", "durability", "table"} <= {
            one.subject for one in await client.diagnose()
        }


@pytest.mark.parametrize("accident", ["terminate", "restart", "kill"])
async def test_a_holder_keeps_its_lock_and_a_waiter_gets_it_afterwards(own, accident):
    loop = asyncio.get_running_loop()
    namespace = secrets.token_hex(6)
    options = {"namespace": namespace, "ttl": 30.0}
    async with aiolock.connect(own.url, **options) as client, aiolock.connect(own.url, **options) as other:
        lease = await client.lock("x").acquire()
        waiter = asyncio.create_task(other.lock("x").acquire(timeout=90))

        async def queued():
            return bool((await client.lock("x").inspect()).waiters)

        await until(queued)
        if accident == "terminate":
            every = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'aiolock'"
            )
            await ask(own, every)
        else:
            if accident == "kill":
                own.kill()
            await loop.run_in_executor(None, own.restart if accident == "restart" else own.start)
        # A request that was under way ends with the connection.
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(aiolock.BackendUnavailable):
                    await lease.renew()
                    break
        assert lease.held
        assert not waiter.done()
        await lease.release()
        following = await waiter
        assert following.token > lease.token
        await following.release()
