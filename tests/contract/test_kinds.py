"""What a deployment has not, it refuses with `UnsupportedKind` before any I/O; and what it has, it lists."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest

import aiolock
from aiolock import Client, UnsupportedKind
from aiolock.types import Family
from tests.contract.deployments import KINDS, registry
from tests.faults.staging import queued

ASK: dict[str, list[Callable[[Client], Awaitable[object]]]] = {
    "read-write": [
        lambda client: client.rwlock("x").read().acquire(),
        lambda client: client.rwlock("x").write(fair=True).try_acquire(),
        lambda client: aiolock.lock_all(client.lock("a"), client.rwlock("x").read()).acquire(),
    ],
    "downgrade": [lambda client: downgraded(client)],
    "semaphore": [
        lambda client: client.semaphore("x", 3).acquire(),
        lambda client: client.semaphore("x", 3).try_acquire(permits=2),
        lambda client: client.semaphore("x", 3).set_limit(2),
    ],
    "registers": [
        lambda client: client.latch("x", 2).count_down(),
        lambda client: client.latch("x", 2).wait(),
        lambda client: client.barrier("x", 2).wait(),
    ],
    "requests": [lambda client: client.lock("x").request_release("please")],
    "names": [lambda client: client._runtime.backend.names("*")],
    "tokens": [lambda client: client.is_current("x", 1)],
    "elections": [
        lambda client: client.election("x").campaign().acquire(),
        lambda client: client.election("x").campaign().try_acquire(),
    ],
    "extension": [lambda client: extended(client)],
    "values": [lambda client: client.election("x").campaign(value=b"host:1").acquire()],
}


async def downgraded(client: Client) -> None:
    """Turn a write hold into one for reading; where that is refused, it stays what it is."""
    async with client.rwlock("x").write() as lease:
        try:
            await lease.downgrade()
        finally:
            assert lease.held
            assert lease.kind.mode == "write"


async def extended(client: Client) -> None:
    """Give a hold another life; where that is refused, it keeps the one that it has."""
    async with client.lock("x", ttl=50, renew=False) as lease:
        before = lease._hold.validity.until
        try:
            await lease.extend(20)
        finally:
            assert lease._hold.validity.until == before


def test_every_word_has_a_question():
    assert set(ASK) == KINDS


async def test_what_is_not_there_is_refused_at_once(deployment, client):
    for word in sorted(KINDS - deployment.kinds):
        for ask in ASK[word]:
            with pytest.raises(UnsupportedKind, match=re.escape(client._backend.name)):
                async with asyncio.timeout(5):
                    await ask(client)
    gauges = client.stats()
    assert (gauges["held"], gauges["waiting"]) == (0, 0)


@pytest.mark.parametrize(
    "server", [cls for cls in registry() if "names" in cls.kinds], ids=lambda cls: cls.name, indirect=True
)
async def test_the_list_has_what_is_held_or_waited_for(deployment, client, rival):
    async def names(pattern: str) -> list[tuple[str, Family]]:
        return [(info.name, info.family) for info in await client.locks(pattern)]

    assert await names("*") == []
    held = [await client.lock(name).acquire() for name in ("b*", "a\n", "é")]
    waiter = asyncio.create_task(rival.lock("b*").acquire())
    await queued(client.lock("b*"), 1)
    family = held[0].kind.family
    assert await names("*") == [("a\n", family), ("b*", family), ("é", family)]
    assert await names("?") == [("é", family)]
    assert await names("b[*]") == [("b*", family)]
    assert await names("c*") == []
    for lease in held:
        await lease.release()
    last = await waiter
    assert await names("*") == [("b*", family)]
    await last.release()
    assert await names("*") == []
    async with deployment.connect(namespace=f"{deployment.namespace}x") as stranger, stranger.lock("y"):
        assert await names("*") == []


async def test_holds_of_every_kind_are_renewed_together(deployment, client, rival):
    ttl = deployment.lasting(0.5)
    locks = [client.lock("x", ttl=ttl)]
    others = [rival.lock("x")]
    if "elections" in deployment.kinds:
        locks += [client.election("x", ttl=ttl).campaign()]
        others += [rival.election("x").campaign()]
    if "read-write" in deployment.kinds:
        locks += [client.rwlock("x").read(ttl=ttl), client.rwlock("y").write(ttl=ttl)]
        others += [rival.rwlock("x").write(), rival.rwlock("y").read()]
    if "semaphore" in deployment.kinds:
        locks += [client.semaphore("x", 1, ttl=ttl)]
        others += [rival.semaphore("x", 1)]
    leases = [await lock.acquire() for lock in locks]
    for _ in range(3):
        await asyncio.sleep(0.5 * ttl)
        assert all(lease.held for lease in leases)
        assert [await other.try_acquire() for other in others] == [None] * len(others)
    for lease in leases:
        await lease.release()
    for other in others:
        async with other:
            pass
