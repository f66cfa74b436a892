"""Asking a holder to let go: it is told why, decides for itself, and keeps what it has until then."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import ConfigError
from tests.faults.staging import PATIENCE, passes, queued, until, waiting

NEEDS = "requests"


async def test_the_holder_is_told_why_and_may_go_on(client, rival):
    async with client.lock("x", ttl=3) as lease:
        asked = lease.release_requested
        assert not asked
        assert asked.reason is None
        waiter = asyncio.create_task(wait(lease))
        await passes(3)
        assert await rival.lock("x").request_release("deploy of 14:00")
        async with asyncio.timeout(PATIENCE):
            assert await waiter == "deploy of 14:00"
            assert await lease.release_requested == "deploy of 14:00"
        assert asked
        assert asked.reason == "deploy of 14:00"
        assert lease.held
        lease.check()


async def wait(lease) -> str | None:
    return await lease.release_requested


async def test_nobody_is_asked_where_nobody_holds(client, rival):
    assert not await rival.lock("x").request_release()
    async with client.lock("x", ttl=3) as lease:
        await passes(20)
        assert not lease.release_requested
    async with client.lock("y"):
        assert not await rival.lock("x").request_release("why")


async def test_who_waits_for_a_request_is_told_when_the_lease_ends(client):
    lease = await client.lock("x").acquire()
    waiter = asyncio.create_task(wait(lease))
    await passes(3)
    await lease.release()
    async with asyncio.timeout(PATIENCE):
        assert await waiter is None
        assert await wait(lease) is None


async def test_a_cancelled_wait_changes_nothing(client, rival):
    async with client.lock("x", ttl=3) as lease:
        waiter = asyncio.create_task(wait(lease))
        await passes(3)
        waiter.cancel()
        await asyncio.wait([waiter])
        assert waiter.cancelled()
        await rival.lock("x").request_release("now")
        async with asyncio.timeout(PATIENCE):
            assert await wait(lease) == "now"


async def test_the_next_holder_was_not_asked(client, rival):
    lease = await client.lock("x", ttl=3).acquire()
    waiters = [asyncio.create_task(each.lock("x", ttl=3).acquire()) for each in (client, rival)]
    await waiting(client, 1)
    await queued(client.lock("x"), 1)
    assert await rival.lock("x").request_release("mine now")
    async with asyncio.timeout(PATIENCE):
        await wait(lease)
    await lease.release()
    # It is not passed on here first: that would not be letting go.
    async with asyncio.timeout(PATIENCE):
        theirs = await waiters[1]
        assert not theirs.release_requested
        await theirs.release()
        mine = await waiters[0]
        assert not mine.release_requested
        await mine.release()


async def test_everybody_inside_is_asked(client, rival, deployment):
    if "semaphore" not in deployment.kinds:
        return
    leases = [await each.semaphore("x", 3, ttl=3).acquire() for each in (client, rival)]
    assert await rival.semaphore("x", 3).request_release("all of you")
    async with asyncio.timeout(PATIENCE):
        assert [await wait(lease) for lease in leases] == ["all of you"] * 2
    for lease in leases:
        await lease.release()


async def test_every_level_of_a_hold_is_asked(client, rival):
    async with client.reentrant_lock("x", ttl=3) as outer, client.reentrant_lock("x") as inner:
        await rival.lock("x").request_release("both")
        await until(lambda: inner.release_requested)
        assert outer.release_requested.reason == inner.release_requested.reason == "both"


@pytest.mark.parametrize("reason", [None, 3, b"now", "two\nlines", "x" * 257, "\ud800"])
async def test_reasons_that_nobody_can_read_are_refused(client, reason):
    with pytest.raises(ConfigError, match=r"^reason must be "):
        await client.lock("x").request_release(reason)


async def test_what_is_kept_for_nobody_has_nobody_to_ask(deployment, client, rival):
    if "keep" not in deployment.promises:
        return
    kinds = [lambda who: who.lock("x")]
    if "read-write" in deployment.kinds:
        kinds += [lambda who: who.rwlock("x").write(), lambda who: who.rwlock("y").read()]
    if "semaphore" in deployment.kinds:
        kinds.append(lambda who: who.semaphore("x", 2))
    for make in kinds:
        lease = await make(client).acquire()
        assert await make(rival).request_release("now")
        await lease.release(keep=deployment.seconds(2))
        assert len((await make(rival).inspect()).kept) == 1
        assert not await make(rival).request_release("now")
        assert await make(rival).force_release()


async def test_another_thread_is_refused_at_once(client):
    lease = await client.lock("x").acquire()

    async def impatient() -> None:
        # Nothing that this thread does could wake it.
        async with asyncio.timeout(PATIENCE):
            await wait(lease)

    def elsewhere() -> str:
        with pytest.raises(RuntimeError) as caught:
            asyncio.run(impatient())
        return str(caught.value)

    assert "belongs to another event loop or thread" in await asyncio.to_thread(elsewhere)
    await lease.release()
