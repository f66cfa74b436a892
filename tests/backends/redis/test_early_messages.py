"""Messages about a grant that its client has not heard of yet: it was lost meanwhile, or its holder is asked to release."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from aiolock.backends.redis.claim import HELD, RedisClaim
from aiolock.core.inbox import WakeReason
from tests.backends.redis.test_claim import GRANT, POSITION, UNKNOWN, Server, acquire, push
from tests.faults.staging import PATIENCE, queued, until

KINDS = {
    "lock": lambda client: client.lock("x"),
    "fair": lambda client: client.lock("x", fair=True),
    "semaphore": lambda client: client.semaphore("x", 1),
    "write": lambda client: client.rwlock("x").write(),
}


def claim_of(client) -> RedisClaim:
    [claim] = client._backend.claims.values()
    return claim


def stop_hearing(transport) -> Callable[[], None]:
    """Read nothing from a connection until the returned function is called."""
    connection = transport._transport
    connection.pause_reading()
    return connection.resume_reading


@pytest.fixture(params=KINDS)
def lock_of(request):
    return KINDS[request.param]


async def test_a_lock_that_was_forced_before_its_grant_was_heard_is_requested_anew(server, connect, lock_of):
    url = server.url
    async with connect(url, ttl=300) as one, connect(url, ttl=300) as two, connect(url, ttl=300) as three:
        # From then on the server knows the scripts.
        await (await lock_of(two).acquire()).release()
        hear = stop_hearing(two._backend._server.connection)
        entering = asyncio.create_task(lock_of(two).acquire())

        async def held() -> bool:
            return bool((await lock_of(one).inspect()).holders)

        await until(held)
        assert await lock_of(three).force_release()
        lease = await lock_of(one).acquire()
        await until(lambda: claim_of(two).inbox.woken, "the message")
        hear()
        await queued(lock_of(three), 1)
        assert not entering.done()
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            assert (await entering).token > lease.token


async def test_a_try_that_was_forced_before_its_grant_was_heard_has_failed(server, connect):
    async with connect(server.url, ttl=300) as one, connect(server.url, ttl=300) as two:
        hear = stop_hearing(two._backend._server.connection)
        trying = asyncio.create_task(two.lock("x").try_acquire())

        async def forced() -> bool:
            return await one.lock("x").force_release()

        await until(forced)
        await until(lambda: claim_of(two).inbox.woken, "the message")
        hear()
        async with asyncio.timeout(PATIENCE):
            assert await trying is None
        assert not two._backend.claims


async def test_a_pushed_grant_that_was_forced_before_it_was_taken_is_none(server, connect, lock_of):
    url = server.url
    async with connect(url, ttl=300) as one, connect(url, ttl=300) as two, connect(url, ttl=300) as three:
        held = await lock_of(one).acquire()
        waiter = asyncio.create_task(lock_of(two).acquire())
        await queued(lock_of(one), 1)
        hear, read = (
            stop_hearing(two._backend._server.connection),
            stop_hearing(two._backend._server.subscriber),
        )
        await held.release()
        assert await lock_of(three).force_release()
        lease = await lock_of(three).acquire()
        claim_of(two).inbox.wake(WakeReason.EXPIRED)
        await queued(lock_of(one), 1)
        read()
        await until(lambda: claim_of(two)._lost, "the message")
        hear()
        await asyncio.wait([waiter], timeout=0.1)
        assert not waiter.done()
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            assert (await waiter).token > lease.token


async def test_a_holder_whose_grant_was_pushed_and_answered_is_asked_to_release(
    server, connect, lock_of, admin, namespace
):
    url = server.url
    async with connect(url, ttl=300) as one, connect(url, ttl=300) as two:
        held = await lock_of(one).acquire()
        waiter = asyncio.create_task(lock_of(two).acquire())
        await queued(lock_of(one), 1)
        hear, read = (
            stop_hearing(two._backend._server.connection),
            stop_hearing(two._backend._server.subscriber),
        )
        await held.release()
        claim = claim_of(two)
        claim.inbox.wake(WakeReason.EXPIRED)

        async def confirmed() -> bool:
            fields = await admin.hgetall(claim.key)
            hold = fields.get(f"h:{claim.request_id}".encode())
            return hold.split()[1] == b"0" if hold else fields[b"provisional"] == b"0"

        await until(confirmed, "the second request at the server")
        read()
        await until(lambda: claim.inbox.pushed is not None, "the message")
        hear()
        async with asyncio.timeout(PATIENCE):
            lease = await waiter
            assert await lock_of(one).request_release("please")
            await until(lambda: lease.release_requested, "the request")


# --- the claim alone


async def test_a_confirmation_that_finds_no_hold_before_the_grant_was_taken_is_a_loss():
    server = Server(POSITION, GRANT)
    await acquire(server)
    push(server)
    assert server.claim.lose()
    assert server.claim.inbox.woken
    assert (await acquire(server)).token == GRANT[1]


async def test_no_grant_is_pushed_to_a_hold_in_use_whatever_is_still_unanswered():
    server = Server(UNKNOWN, GRANT)
    await acquire(server)
    assert server.claim.waiting
    await acquire(server)
    assert server.claim._state is HELD
    assert not server.claim.waiting


async def test_a_loss_before_the_request_was_sent_says_nothing_about_its_grant():
    server = Server(POSITION, GRANT)
    await acquire(server)
    server.claim.lose()
    assert (await acquire(server)).token == GRANT[1]
