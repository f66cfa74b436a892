"""What an administrator sees and may do: holders, waiters in order, and taking a lock by force."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from aiolock import Client, Holder, Lock, LockLost, UnsupportedKind
from tests.faults.staging import (
    PATIENCE,
    gets_the_lock,
    nothing_remains,
    queued,
    shown_token,
    token_of,
    until,
    waiting,
)


async def test_a_free_lock_shows_nobody(client):
    info = await client.lock("never used").inspect()
    assert (info.name, info.holders, info.waiters, info.locked) == ("never used", (), (), False)
    assert await client.lock("never used").locked() is False


async def test_the_holder_is_shown_with_label_token_and_what_remains(deployment, client, rival):
    lease = await client.lock("x", label="night job", ttl=5).acquire()
    info = await rival.lock("x").inspect()
    (holder,) = info.holders
    assert info.locked
    assert (holder.permits, holder.mode) == (1, "mutex")
    if not deployment.shows:
        # Somebody has it, and more is not known.
        assert (holder.label, holder.token) != ("night job", lease.token)
        assert holder.remaining > 0
        await lease.release()
        await nothing_remains(rival, "x")
        return
    assert (holder.label, holder.token) == ("night job", shown_token(lease))
    assert 0 < holder.remaining <= deployment.ttl_of(5)
    assert abs(datetime.now(UTC) - holder.since) < timedelta(minutes=1)
    # What the holder believes is never more than what the server grants.
    remaining = lease.remaining()
    (holder,) = (await rival.lock("x").inspect()).holders
    assert remaining <= deployment.ttl_of(5)
    assert lease.remaining() <= holder.remaining + 0.05
    assert await rival.lock("x").locked() is True
    await lease.release()
    await nothing_remains(rival, "x")


async def test_the_label_of_the_client_is_the_default(deployment, client, rival):
    async with client.lock("x"):
        labels = [holder.label for holder in (await rival.lock("x").inspect()).holders]
        assert len(labels) == 1
        assert (labels == ["client"]) is deployment.shows


@pytest.mark.parametrize("label", ["", "a label", "é" * 128])
async def test_host_and_process_are_shown_beside_the_label(deployment, client, rival, label):
    """Of a holder, of one that waits, of a later task of the holder's client, and of what is kept."""
    if not deployment.shows:
        return
    here = socket.gethostname().encode("ascii", "replace")[:64].decode(), os.getpid()
    # A lock without a label has that of its client.
    options, shown = ({"label": label}, label) if label else ({}, "client")
    await gets_the_lock(client, "x")  # without a history some servers give no tokens to hand on
    lock = client.lock("x", **options)
    lease = await lock.acquire()
    [holder] = (await rival.lock("x").inspect()).holders
    assert (holder.label, holder.host, holder.pid) == (shown, *here)
    waiter = asyncio.create_task(gets_the_lock(rival, "x"))
    await queued(client.lock("x"), 1)
    [waiting_one] = (await client.lock("x").inspect()).waiters
    assert (waiting_one.host, waiting_one.pid) == here
    waiter.cancel()
    await asyncio.wait([waiter])
    later = asyncio.create_task(lock.acquire())
    await waiting(client, 1)
    await lease.release()
    async with asyncio.timeout(PATIENCE):
        second = await later
    await second.renew()
    [holder] = (await rival.lock("x").inspect()).holders
    assert (holder.label, holder.host, holder.pid) == (shown, *here)
    if "keep" in deployment.promises:
        await second.release(keep=60)
        [kept] = (await rival.lock("x").inspect()).kept
        assert (kept.last_holder, kept.host, kept.pid) == (shown, *here)
        assert await rival.lock("x").force_release()
    else:
        await second.release()


async def test_waiters_are_shown_in_the_order_in_which_they_will_be_served(deployment, client):
    holder = await client.lock("x").acquire()
    clients = [await deployment.connect(label=f"number {number}").open() for number in range(3)]
    tasks = []
    for number, other in enumerate(clients):
        tasks.append(asyncio.create_task(gets_the_lock(other, "x")))
        await queued(client.lock("x"), number + 1)
    info = await client.lock("x").inspect()
    assert [waiter.label for waiter in info.waiters] == ["number 0", "number 1", "number 2"]
    assert all((waiter.mode, waiter.permits) == ("mutex", 1) for waiter in info.waiters)
    await holder.release()
    await asyncio.gather(*tasks)
    for other in clients:
        await other.aclose()
    await nothing_remains(client, "x")


async def test_the_order_of_waiters_is_that_of_their_coming_whatever_their_connections_were_before(
    deployment, client
):
    """Clients wait once in one order, which some servers' lists of connections keep, and then in another."""
    order = [3, 1, 4, 0, 2]
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(deployment.connect(label=str(number))) for number in sorted(order)
        ]
        for numbers in (sorted(order), order):
            holder = await client.lock("x", fair=True).acquire()
            tasks = []
            for place, number in enumerate(numbers):
                tasks.append(asyncio.create_task(gets_the_lock(clients[number], "x")))
                await queued(client.lock("x"), place + 1)
            for _ in range(2):
                info = await client.lock("x").inspect()
                assert [waiter.label for waiter in info.waiters] == [str(number) for number in numbers]
            await holder.release()
            await asyncio.gather(*tasks)
    await nothing_remains(client, "x")


async def test_looking_changes_nothing(client, rival):
    lease = await client.lock("x").acquire()
    waiter = asyncio.create_task(gets_the_lock(rival, "x"))
    await queued(client.lock("x"), 1)
    for _ in range(20):
        info = await client.lock("x").inspect()
        assert len(info.holders) == len(info.waiters) == 1
    lease.check()
    await lease.release()
    await waiter


async def test_a_free_lock_cannot_be_released_by_force(client):
    assert await client.lock("x").force_release() is False
    await gets_the_lock(client, "x")


async def test_force_release_tells_the_holder_and_serves_the_next(deployment, client, rival):
    lease = await client.lock("x").acquire()
    next_one = asyncio.create_task(rival.lock("x").acquire())
    await queued(client.lock("x"), 1)
    if not deployment.forces:
        with pytest.raises(UnsupportedKind):
            await rival.lock("x").force_release()
        await lease.release()
        await (await next_one).release()
        return
    assert await rival.lock("x").force_release() is True
    async with asyncio.timeout(PATIENCE):
        successor = await next_one
        assert await lease.wait_lost() == deployment.reason
    assert token_of(successor) > token_of(lease)
    assert successor.held
    with pytest.raises(LockLost, match=deployment.reason):
        lease.check()
    # What the old holder does now concerns nobody.
    await lease.release()
    assert await client.lock("x").try_acquire() is None
    successor.check()
    await successor.release()


async def test_a_token_is_current_while_its_lease_is_the_hold(deployment, client, rival):
    if "tokens" not in deployment.kinds:
        # That it is refused is tested in `test_kinds.py`.
        return
    lock = client.lock("x", fair=True)
    lease = await lock.acquire()
    for asked in (client, rival):
        assert await asked.is_current("x", lease.token) is True
        # A token that no lease has, locks of other families, and other names.
        assert not await asked.is_current("x", lease.token - 1)
        assert not await asked.is_current("x", 2**63 - 1)
        assert not await asked.is_current("y", lease.token)
    election = await rival.election("x").campaign().acquire()
    if election.token != lease.token:
        assert not await client.is_current("x", election.token)
    await election.release()
    successor = asyncio.create_task(rival.lock("x", fair=True).acquire())
    await queued(lock, 1)
    assert await rival.is_current("x", lease.token)
    await lease.release()
    async with asyncio.timeout(PATIENCE):
        second = await successor
    assert await client.is_current("x", second.token)
    assert not await client.is_current("x", lease.token)
    await client.lock("x").force_release()
    assert not await client.is_current("x", second.token)
    await second.release()


async def test_the_lease_of_a_reentrant_lock_is_current_until_its_last_level(deployment, client, rival):
    if "tokens" not in deployment.kinds:
        return
    lock = client.reentrant_lock("x")
    async with lock as outer:
        async with lock as inner:
            assert inner.token == outer.token
        assert await rival.is_current("x", outer.token)
    assert not await rival.is_current("x", outer.token)


async def test_tokens_that_a_client_hands_on_are_current_as_long_as_its_hold(deployment, client, rival):
    if "tokens" not in deployment.kinds:
        return
    lock = client.lock("x")
    await gets_the_lock(client, "x")  # a lock without history has no tokens to hand on, on some servers
    first = await lock.acquire()
    second = asyncio.create_task(lock.acquire())
    await waiting(client, 1)
    await first.release()
    async with asyncio.timeout(PATIENCE):
        lease = await second
    assert lease.token > first.token
    assert await rival.is_current("x", lease.token)
    await lease.release()
    await gets_the_lock(rival, "x")
    assert not await rival.is_current("x", first.token)
    assert not await rival.is_current("x", lease.token)


async def test_a_lock_that_is_kept_after_its_release_has_no_present_token(deployment, client, rival):
    if "tokens" not in deployment.kinds or "keep" not in deployment.promises:
        return
    lease = await client.lock("x").acquire()
    await lease.release(keep=30)
    assert await rival.lock("x").locked()
    assert not await rival.is_current("x", lease.token)
    await rival.lock("x").force_release()


def reading(client: Client, **options: Any) -> Lock:
    return client.rwlock("x").read(**options)


def two_permits(client: Client, **options: Any) -> Lock:
    return client.semaphore("x", 3, permits=2, **options)


KEEPING = {
    "mutex": lambda client, **options: client.lock("x", **options),
    "read-write": reading,
    "semaphore": two_permits,
}


@pytest.mark.parametrize("kind", KEEPING)
async def test_what_is_kept_after_its_release_has_no_holder(deployment, client, rival, kind):
    if "keep" not in deployment.promises or (kind != "mutex" and kind not in deployment.kinds):
        return
    make = KEEPING[kind]
    lease = await make(client, label="the first").acquire()
    before = datetime.now(UTC)
    await lease.release(keep=60)
    info = await make(rival).inspect()
    assert (info.holders, info.locked, info.local_waiters) == ((), True, None)
    [kept] = info.kept
    assert (kept.last_holder, kept.permits) == ("the first", 2 if kind == "semaphore" else 1)
    # As exact as the clocks of the server and of this machine agree; where only observation tells, no end is known.
    assert before - timedelta(seconds=30) < kept.until < before + timedelta(seconds=150)
    assert [listed.kept[0].last_holder for listed in await rival.locks("x")] == ["the first"]
    if kind == "mutex":
        assert await rival.lock("x").try_acquire() is None
    else:
        # Beside a living holder it is shown as such.
        single = rival.rwlock("x").read() if kind == "read-write" else rival.semaphore("x", 3)
        async with single.acquire(timeout=PATIENCE):
            info = await make(rival).inspect()
            assert [holder.permits for holder in info.holders] == [1]
            assert [one.last_holder for one in info.kept] == ["the first"]
            if kind == "semaphore":
                assert await rival.semaphore("x", 3).available() == 0
    assert await make(rival).force_release()
    assert not await make(rival).locked()
    async with make(rival, timeout=PATIENCE):
        pass


def mutex(client: Client, **options: Any) -> Lock:
    return client.lock("x", **options)


def writing(client: Client, **options: Any) -> Lock:
    return client.rwlock("x").write(**options)


@pytest.mark.parametrize("make", [mutex, writing])
async def test_waiters_in_the_holders_client_and_the_present_lease_are_shown_once_it_renews(
    deployment, client, rival, make
):
    if make is writing and "read-write" not in deployment.kinds:
        return
    await (await make(client).acquire()).release()  # without a history some servers give no tokens to hand on
    first = await make(client, label="first").acquire()
    second = asyncio.create_task(make(client, label="second, with a space").acquire())
    others = [asyncio.create_task(make(client).acquire()) for _ in range(2)]
    await waiting(client, 3)

    async def shown() -> Holder:
        info = await make(rival).inspect()
        [holder] = info.holders
        assert info.local_waiters == holder.local_waiters
        return holder

    async def waiters(count: int) -> None:
        async def learned() -> bool:
            return (await shown()).local_waiters == count

        await until(learned, f"{count} local waiters")

    if not deployment.reports:
        await first.renew()
        holder = await shown()
        assert holder.local_waiters is None
        assert not deployment.shows or "tokens" not in deployment.kinds or holder.token == first.token
    else:
        assert (await shown()).local_waiters == 0
        await first.renew()
        await waiters(3)
        holder = await shown()
        assert (holder.label, holder.token) == ("first", shown_token(first))
        began = holder.since
        # Another client's waiter stands in the queue of the server.
        queueing = asyncio.create_task(make(rival).acquire())
        await queued(make(rival), 1)
        await first.renew()
        await waiters(3)
        queueing.cancel()
        await asyncio.wait([queueing])
        await first.release()
        lease = await second
        assert token_of(lease) > token_of(first)
        if (await shown()).tokens > 1:
            # Handed over without the server, which learns of it with the next renewal.
            await lease.renew()
            await waiters(2)
        holder = await shown()
        assert (holder.label, holder.token) == ("second, with a space", shown_token(lease))
        assert holder.since > began - timedelta(seconds=1)
        assert holder.remaining > 0
        if make is mutex:
            assert await rival.is_current("x", lease.token)
            assert not await rival.is_current("x", first.token)
        first = lease
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    if deployment.reports:
        await first.renew()
        await waiters(0)
    await first.release()
    if not deployment.reports:
        await (await second).release()


async def test_force_release_by_the_holders_own_client_tells_it_as_well(deployment, client):
    lease = await client.lock("x").acquire()
    assert await client.lock("x").force_release() is True
    async with asyncio.timeout(PATIENCE):
        # Its own client knows more than one that finds the hold gone.
        assert await lease.wait_lost() in {"force-released", deployment.reason}
    await gets_the_lock(client, "x")


async def test_a_release_by_force_under_a_token_ends_that_hold_alone(deployment, client, rival):
    if "tokens" not in deployment.kinds:
        with pytest.raises(UnsupportedKind, match="tokens of holders"):
            await client.lock("x").force_release(token=1)
        return
    lock = rival.lock("x")
    assert await lock.force_release(token=1) is False
    first = await client.lock("x").acquire()
    assert await lock.force_release(first.token - 1) is False
    assert await lock.force_release(token=2**63 - 1) is False
    next_one = asyncio.create_task(rival.lock("x").acquire())
    await queued(client.lock("x"), 1)
    assert await lock.force_release(first.token) is True
    async with asyncio.timeout(PATIENCE):
        second = await next_one
        assert await first.wait_lost() in {"force-released", deployment.reason}
    assert second.token > first.token
    # The hold of the token is over, and the guard is for the one that came next, and for its queue.
    waiter = asyncio.create_task(gets_the_lock(client, "x"))
    await queued(lock, 1)
    assert await lock.force_release(first.token) is False
    await second.renew()
    second.check()
    assert len((await lock.inspect()).waiters) == 1
    await second.release()
    async with asyncio.timeout(PATIENCE):
        await waiter
    if "keep" in deployment.promises:
        kept = await client.lock("x").acquire()
        await kept.release(keep=30)
        assert await lock.force_release(kept.token) is False
        assert await lock.locked()
        assert await lock.force_release() is True


async def test_a_late_release_by_force_harms_none_that_enters_meanwhile(deployment, client, rival):
    """A hold ends while an administrator ends it by its token, and others follow each other: none of them is ended."""
    if "tokens" not in deployment.kinds:
        return
    lock = rival.lock("x")
    for _ in range(5):
        lease = await client.lock("x", fair=True).acquire()
        follower = asyncio.create_task(rival.lock("x", fair=True).acquire())
        await queued(lock, 1)
        releasing = asyncio.create_task(lease.release())
        forced = [asyncio.create_task(lock.force_release(lease.token)) for _ in range(3)]
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(releasing, return_exceptions=True)
            successor = await follower
            ended = await asyncio.gather(*forced)
        assert sum(ended) <= 1
        assert await lock.force_release(lease.token) is False
        await successor.renew()
        successor.check()
        await successor.release()
    await nothing_remains(rival, "x")


async def test_a_token_of_an_earlier_task_of_the_holders_client_is_over_once_it_was_reported(
    deployment, client, rival
):
    if "tokens" not in deployment.kinds or not deployment.reports:
        return
    await gets_the_lock(client, "x")  # without a history some servers give no tokens to hand on
    first = await client.lock("x").acquire()
    second = asyncio.create_task(client.lock("x").acquire())
    await waiting(client, 1)
    await first.release()
    async with asyncio.timeout(PATIENCE):
        lease = await second
    await lease.renew()

    async def over() -> bool:
        return not await rival.is_current("x", first.token)

    await until(over, "the later lease to be reported")
    assert await rival.lock("x").force_release(first.token) is False
    lease.check()
    assert await rival.lock("x").force_release(lease.token) is True
    async with asyncio.timeout(PATIENCE):
        assert await lease.wait_lost() in {"force-released", deployment.reason}


@pytest.mark.parametrize("kind", ["read-write", "semaphore"])
async def test_a_release_by_force_under_a_token_leaves_the_other_holders(deployment, client, rival, kind):
    if kind not in deployment.kinds or "tokens" not in deployment.kinds:
        return
    one, other = (
        KEEPING[kind](client),
        rival.rwlock("x").read() if kind == "read-write" else rival.semaphore("x", 3),
    )
    first, second = await one.acquire(), await other.acquire()
    exclusive = client.rwlock("x").write() if kind == "read-write" else client.semaphore("x", 3, permits=2)
    waiter = asyncio.create_task(exclusive.acquire())
    await queued(other, 1)
    assert await other.force_release(first.token) is True
    async with asyncio.timeout(PATIENCE):
        assert await first.wait_lost() in {"force-released", deployment.reason}
    await second.renew()
    second.check()
    assert second.token in [holder.token for holder in (await other.inspect()).holders]
    assert await other.force_release(first.token) is False
    await second.release()
    async with asyncio.timeout(PATIENCE):
        await (await waiter).release()


async def test_the_counters_of_a_client_count(client):
    assert set(client.stats()) == {
        *("held", "waiting", "acquired", "released", "passed", "lost", "timeouts", "timeouts_by_template"),
        *(
            "skipped",
            "skipped_by_template",
            "renewals",
            "renewal_failures",
            "cleanups",
            "waited",
            "losses",
            "waits",
            "holds",
            "slack",
        ),
    }
    lease = await client.lock("x").acquire()
    waiter = asyncio.create_task(gets_the_lock(client, "x"))
    await until(lambda: client.stats()["waiting"] == 1)
    stats = client.stats()
    assert (stats["held"], stats["acquired"], stats["released"]) == (1, 1, 0)
    await lease.release()
    await waiter
    stats = client.stats()
    assert (stats["held"], stats["waiting"], stats["acquired"], stats["released"]) == (0, 0, 2, 2)
    assert stats["passed"] in (0, 1)
