"""Turning a write lease into a read lease, without a moment in which another client can write."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import LockLost
from tests.contract.test_readwrite import line, nothing_remains
from tests.faults.staging import PATIENCE, passes, queued, until, waiting

NEEDS = "downgrade"


async def test_downgrading_lets_readers_in_and_no_writer(client, rival):
    async with client.rwlock("x").write() as lease:
        writer = asyncio.create_task(rival.rwlock("x").write().acquire())
        await queued(client.rwlock("x").read(), 1)
        assert lease.kind.mode.value == "write"
        token = lease.token
        await lease.downgrade()
        assert lease.kind.mode.value == "read"
        assert lease.token == token
        assert lease.held
        lease.check()
        await passes(20)
        assert not writer.done()
        [holder] = (await rival.rwlock("x").read().inspect()).holders
        assert holder.mode == "read"
        await lease.renew()
    async with asyncio.timeout(PATIENCE):
        written = await writer
    assert written.token > token
    await written.release()
    await nothing_remains(client)


async def test_readers_who_are_next_enter_with_the_downgrade(client, rival):
    async with client.rwlock("x").write() as lease:
        tasks, inside, gates = await line([rival, rival, client], ["read", "read", "write"])
        await lease.downgrade()
        await until(lambda: sorted(inside) == [0, 1])
        assert lease.held
        for gate in gates:
            gate.set()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*tasks)
    await nothing_remains(client)


async def test_local_writers_go_on_waiting_after_a_downgrade(client):
    lock = client.rwlock("x").write()
    lease = await lock.acquire()
    writer = asyncio.create_task(lock.acquire())
    await waiting(client, 1)
    await lease.downgrade()
    await queued(lock, 1)
    await passes(20)
    assert not writer.done()
    await lease.release()
    async with asyncio.timeout(PATIENCE):
        await (await writer).release()
    await nothing_remains(client)


async def test_a_downgraded_lease_is_lost_like_any_other(deployment, client):
    with pytest.raises(LockLost) as caught:
        async with client.rwlock("x").write() as lease:
            await lease.downgrade()
            await deployment.lose(lease)
            await asyncio.sleep(PATIENCE)
    assert caught.value.reason == deployment.reason
    await nothing_remains(client)


async def test_only_a_write_lease_can_be_downgraded(client):
    async with client.rwlock("x").read() as reading, client.lock("x") as locked:
        for lease in (reading, locked):
            with pytest.raises(RuntimeError, match="no write lease"):
                await lease.downgrade()
    with pytest.raises(RuntimeError, match="released"):
        await reading.downgrade()
    async with client.rwlock("x").write() as lease:
        await lease.downgrade()
        # It is what was asked for, so asking again is no mistake.
        await lease.downgrade()
        token = lease.token
    with pytest.raises(RuntimeError, match="released"):
        await lease.downgrade()
    assert lease.token == token
    await nothing_remains(client)


@pytest.mark.parametrize("steps", [1, 2, 4])
async def test_a_cancelled_downgrade_can_be_asked_for_again(client, rival, steps):
    lease = await client.rwlock("x").write().acquire()
    asking = asyncio.create_task(lease.downgrade())
    await passes(steps)
    asking.cancel()
    await asyncio.wait([asking])
    await until(lambda: lease.kind.mode == "read")
    for _ in range(3):
        await lease.downgrade()
        await passes(5)
    await (await rival.rwlock("x").read().acquire(timeout=PATIENCE)).release()
    await lease.release()
    await nothing_remains(client)


async def test_after_a_downgrade_the_block_is_one_for_reading(client):
    lock = client.rwlock("x")
    async with lock.write() as lease:
        await lease.downgrade()
        async with lock.read() as level:
            assert level.token == lease.token
        assert lease.held
        with pytest.raises(RuntimeError, match="read block"):
            await lock.write().acquire()
    async with lock.write(timeout=PATIENCE):
        pass
    await nothing_remains(client)
