"""Two nodes of a Galera cluster that both take writes: in the lease mode and over rows a lock has one holder on both."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator

import pytest

import aiolock
from aiolock import UnsafeBackend
from aiolock.types import Family
from tests.backends.mysql.rows import OVER_ROWS
from tests.faults.staging import PATIENCE, until
from tests.galera import Galera


@pytest.fixture(scope="module")
def cluster() -> Iterator[Galera]:
    """Two nodes; started once for this file."""
    with Galera() as running:
        yield running


@pytest.fixture(params=["mysql", *(f"mysql+{rows}" for rows in OVER_ROWS)])
async def nodes(cluster, request):
    """A client at each node, in a namespace of the test's own."""
    namespace = f"t{secrets.token_hex(6)}"
    first, second = (url.replace("mysql:", f"{request.param}:") for url in cluster.urls)
    async with (
        aiolock.connect(first, namespace=namespace, ttl=10) as one,
        aiolock.connect(second, namespace=namespace, ttl=10) as other,
    ):
        yield one, other


@pytest.mark.parametrize("mode", ["session", "row"])
async def test_modes_whose_locks_are_each_node_s_own_are_refused(cluster, mode):
    for url in cluster.urls:
        with pytest.raises(UnsafeBackend, match="Galera"):
            await aiolock.connect(url, mode=mode).open()


async def crowd(nodes, lock_of, turns: int, room: int) -> list[tuple[int, int]]:
    """Several tasks at each node take and leave a lock; the tokens with the order in which their holders came."""
    inside = 0
    seen: list[tuple[int, int]] = []

    async def worker(client) -> None:
        nonlocal inside
        for _ in range(turns):
            async with lock_of(client) as lease:
                inside += 1
                assert inside <= room
                seen.append((len(seen), lease.token))
                await asyncio.sleep(0.001)
                lease.check()
                inside -= 1

    async with asyncio.timeout(60):
        await asyncio.gather(*(worker(client) for client in nodes for _ in range(4)))
    return seen


async def test_a_lock_has_one_holder_on_both_nodes(nodes):
    seen = await crowd(nodes, lambda client: client.lock("x", timeout=PATIENCE), 10, 1)
    tokens = [token for _, token in seen]
    assert tokens == sorted(set(tokens))


async def test_a_write_lock_has_one_holder_on_both_nodes(nodes):
    seen = await crowd(nodes, lambda client: client.rwlock("x").write(timeout=PATIENCE), 5, 1)
    tokens = [token for _, token in seen]
    assert tokens == sorted(set(tokens))


async def test_permits_are_counted_over_both_nodes(nodes):
    seen = await crowd(nodes, lambda client: client.semaphore("x", 3, timeout=PATIENCE), 5, 3)
    assert len({token for _, token in seen}) == len(seen) == 40


async def test_a_hold_is_seen_and_waited_for_on_the_other_node(nodes):
    one, other = nodes
    async with one.lock("x") as lease:
        assert await other.lock("x").try_acquire() is None
        assert (await other.lock("x").inspect()).holders[0].token == lease.token
        waiter = asyncio.create_task(other.lock("x").acquire())
        await asyncio.sleep(0.1)
        assert not waiter.done()
    async with asyncio.timeout(PATIENCE):
        await (await waiter).release()


async def test_force_release_on_one_node_is_learnt_on_the_other(nodes):
    one, other = nodes
    lease = await one.rwlock("x").read().acquire()
    # What one node has answered, the other has a moment later.
    await until(other.rwlock("x").read().locked)
    assert await other.rwlock("x").read().force_release()
    async with asyncio.timeout(PATIENCE):
        assert await lease.wait_lost() == "force-released"


async def test_a_register_is_changed_by_one_at_a_time_on_both_nodes(nodes):
    async def count(client) -> None:
        register = client._backend.register("x", Family.LATCH)
        for _ in range(10):
            while True:
                value, stamp = await register.read()
                if await register.write(str(int(value or b"0") + 1).encode(), stamp, 60.0):
                    break
                await asyncio.sleep(0.001)
        await register.aclose()

    async with asyncio.timeout(60):
        await asyncio.gather(*(count(client) for client in nodes for _ in range(2)))
    for client in nodes:
        assert (await client._backend.register("x", Family.LATCH).read()).value == b"40"
