"""Leased permits: never more than the limit, in the order of arrival, with a number that can be changed."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import AcquireTimeout, ConfigError, LockLost
from tests.faults.staging import PATIENCE, passes, queued, until

NEEDS = "semaphore"


async def all_back(semaphore) -> None:
    async def empty() -> bool:
        info = await semaphore.inspect()
        return not info.holders and not info.waiters

    await until(empty)


async def test_many_tasks_never_have_more_permits_than_there_are(client, rival):
    out, most = 0, 0

    async def work(semaphore, count: int) -> None:
        nonlocal out, most
        for _ in range(4):
            async with await semaphore.acquire(permits=count) as lease:
                out += count
                most = max(most, out)
                assert out <= 4
                await passes(2)
                lease.check()
                out -= count

    async with asyncio.TaskGroup() as group:
        for number in range(10):
            who = (client, rival)[number % 2]
            group.create_task(work(who.semaphore("x", 4), 1 + number % 3))
    assert most > 1
    await all_back(client.semaphore("x", 4))


async def test_permits_are_counted(client, rival):
    mine, theirs = client.semaphore("x", 5), rival.semaphore("x", 5)
    assert mine.limit == 5
    assert await mine.available() == 5
    assert not await mine.locked()
    async with mine, await theirs.acquire(permits=3) as three:
        assert await mine.available() == 1
        assert not await theirs.locked()
        assert await mine.try_acquire(permits=2) is None
        last = await mine.try_acquire()
        assert last is not None
        assert len({last.token, three.token}) == 2
        assert await theirs.available() == 0
        assert await theirs.locked()
        assert await theirs.try_acquire() is None
        info = await theirs.inspect()
        assert info.limit == 5
        assert sorted((holder.label, holder.permits, holder.mode) for holder in info.holders) == [
            ("client", 1, "permits"),
            ("client", 1, "permits"),
            ("rival", 3, "permits"),
        ]
        await last.release()
        assert await mine.available() == 1
    assert await mine.available() == 5
    await all_back(mine)


async def test_the_permits_of_a_semaphore_are_taken_unless_others_are_named(client, rival):
    pair, others = client.semaphore("x", 5, permits=2), rival.semaphore("x", 5)
    async with pair:
        assert await others.available() == 3
        async with pair.acquire(permits=3):
            assert await others.available() == 0
        again = await pair.try_acquire()
        assert again is not None
        assert await others.available() == 1
        await again.release()
        one = await pair.try_acquire(permits=1)
        assert one is not None
        assert await others.available() == 2
        await one.release()
    assert await others.available() == 5
    await all_back(pair)


async def test_a_try_waits_for_permits(client, rival):
    semaphore, held = client.semaphore("x", 3), await rival.semaphore("x", 3).acquire(permits=2)

    async def nothing_waits() -> bool:
        return not (await semaphore.inspect()).waiters

    assert await semaphore.try_acquire(timeout=0.05, permits=2) is None
    await until(nothing_waits)
    trying = asyncio.create_task(semaphore.try_acquire(timeout=None, permits=2))
    await queued(semaphore, 1)
    await held.release()
    async with asyncio.timeout(PATIENCE):
        lease = await trying
    assert lease is not None
    await lease.release()
    await all_back(semaphore)


async def test_the_loss_cancels_the_block_of_an_acquire(deployment, client):
    with pytest.raises(LockLost):
        async with client.semaphore("x", 3).acquire(permits=2) as lease:
            await deployment.lose(lease)
            await asyncio.sleep(PATIENCE)
    await all_back(client.semaphore("x", 3))


async def test_a_task_knows_whether_it_is_inside(client, rival):
    semaphore = client.semaphore("x", 3)

    async def elsewhere() -> bool:
        return semaphore.owned()

    for block in (semaphore, semaphore.acquire(permits=2)):
        assert not semaphore.owned()
        async with block as lease:
            assert client.semaphore("x", 3).owned()
            assert not await asyncio.create_task(elsewhere())
            assert not rival.semaphore("x", 3).owned()
            assert not client.semaphore("y", 3).owned()
            assert not client.lock("x").owned()
            assert lease.depth == 1
            await lease.release()
            assert not semaphore.owned()
            assert lease.depth == 0


async def test_a_large_request_is_not_starved_by_small_ones(client, rival):
    semaphore = client.semaphore("x", 3)
    first, second = await semaphore.acquire(), await semaphore.acquire()
    large = asyncio.create_task(rival.semaphore("x", 3).acquire(permits=3))
    await queued(semaphore, 1)
    # One is free, but the large request is before us.
    assert await semaphore.try_acquire() is None
    small = asyncio.create_task(semaphore.acquire())
    await queued(semaphore, 2)
    assert [(place.permits, place.mode) for place in (await semaphore.inspect()).waiters] == [
        (3, "permits"),
        (1, "permits"),
    ]
    await first.release()
    await passes(20)
    assert not large.done()
    await second.release()
    async with asyncio.timeout(PATIENCE):
        lease = await large
    assert not small.done()
    await lease.release()
    async with asyncio.timeout(PATIENCE):
        await (await small).release()
    await all_back(semaphore)


async def test_whoever_fits_enters_when_the_one_before_gives_up(client, rival):
    semaphore = client.semaphore("x", 3)
    held = await semaphore.acquire(permits=2)
    large = asyncio.create_task(rival.semaphore("x", 3).acquire(permits=3))
    await queued(semaphore, 1)
    small = asyncio.create_task(semaphore.acquire())
    await queued(semaphore, 2)
    large.cancel()
    async with asyncio.timeout(PATIENCE):
        lease = await small
    await lease.release()
    await held.release()
    await all_back(semaphore)


async def test_the_permits_of_a_holder_that_died_come_back(deployment, client, rival):
    if not deployment.prolongs:
        # Its hold lives as long as its session, and tests of sessions are elsewhere.
        return
    semaphore = client.semaphore("x", 2, ttl=deployment.seconds(0.3), renew=False)
    silent = await semaphore.acquire(permits=2)
    async with asyncio.timeout(PATIENCE):
        lease = await rival.semaphore("x", 2).acquire()
    assert not silent.held
    await lease.release()


async def test_a_wait_that_times_out_leaves_no_place(client, rival):
    async with client.semaphore("x", 1):
        with pytest.raises(AcquireTimeout):
            await rival.semaphore("x", 1).acquire(timeout=0.05)
        with pytest.raises(AcquireTimeout):
            await rival.semaphore("x", 1, timeout=0).acquire()
    await all_back(rival.semaphore("x", 1))


async def test_losing_permits_cancels_the_block(deployment, client):
    with pytest.raises(LockLost):
        async with client.semaphore("x", 3) as lease:
            await deployment.lose(lease)
            await asyncio.sleep(PATIENCE)
    await all_back(client.semaphore("x", 3))


async def test_force_release_takes_every_permit(deployment, client, rival):
    leases = [await each.semaphore("x", 3).acquire() for each in (client, rival)]
    assert await client.semaphore("x", 3).force_release()
    async with asyncio.timeout(PATIENCE):
        assert [await lease.wait_lost() for lease in leases] == [deployment.reason] * 2
    assert await client.semaphore("x", 3).available() == 3


async def test_force_release_of_permits_serves_who_waits_for_them(deployment, client, rival):
    leases = [await each.semaphore("x", 3).acquire() for each in (client, rival)]
    waiter = asyncio.create_task(rival.semaphore("x", 3).acquire(permits=3))
    await queued(client.semaphore("x", 3), 1)
    assert await client.semaphore("x", 3).force_release()
    async with asyncio.timeout(PATIENCE):
        assert [await lease.wait_lost() for lease in leases] == [deployment.reason] * 2
        successor = await waiter
    # What those who had them do now concerns nobody.
    for lease in leases:
        await lease.release()
    successor.check()
    assert await client.semaphore("x", 3).available() == 0
    await successor.release()
    await all_back(client.semaphore("x", 3))
    assert not await client.semaphore("x", 3).force_release()


# --- the limit


async def test_the_limit_of_the_first_user_stands(client, rival):
    async with client.semaphore("x", 3):
        for ask in (rival.semaphore("x", 4).acquire, rival.semaphore("x", 2).try_acquire):
            with pytest.raises(ConfigError, match=r"'x' .*3.*not [42]"):
                await ask()
        lease = await rival.semaphore("x", 3).try_acquire()
        assert lease is not None
        await lease.release()
    await all_back(client.semaphore("x", 3))
    assert client.stats()["waiting"] == rival.stats()["waiting"] == 0


async def test_who_waits_behind_others_is_asked_for_the_limit_as_well(client, rival):
    async with client.semaphore("x", 1):
        waiter = asyncio.create_task(rival.semaphore("x", 1).acquire())
        await queued(client.semaphore("x", 1), 1)
        with pytest.raises(ConfigError):
            await client.semaphore("x", 2).acquire()
        assert len((await client.semaphore("x", 1).inspect()).waiters) == 1
    async with asyncio.timeout(PATIENCE):
        await (await waiter).release()


async def test_more_permits_let_in_whoever_waits(client, rival):
    semaphore = client.semaphore("x", 1)
    async with semaphore:
        waiters = [asyncio.create_task(rival.semaphore("x", 1).acquire()) for _ in range(2)]
        await queued(semaphore, 2)
        await rival.semaphore("x", 1).set_limit(3)
        async with asyncio.timeout(PATIENCE):
            leases = await asyncio.gather(*waiters)
        assert (await semaphore.inspect()).limit == 3
        assert [await each.current_limit() for each in (semaphore, rival.semaphore("x", 7))] == [3, 3]
        assert semaphore.limit == 1
        assert await semaphore.available() == 0
        for lease in leases:
            await lease.release()
        assert await semaphore.available() == 2
    await all_back(semaphore)


async def test_fewer_permits_take_none_away_and_newcomers_wait(client, rival):
    semaphore = client.semaphore("x", 3)
    leases = [await semaphore.acquire() for _ in range(3)]
    await semaphore.set_limit(1)
    assert all(lease.held for lease in leases)
    assert await semaphore.available() == 0
    waiter = asyncio.create_task(rival.semaphore("x", 3).acquire())
    await queued(semaphore, 1)
    for lease in leases[:2]:
        await lease.release()
    await passes(20)
    assert not waiter.done()
    await leases[0].release()
    await leases[2].release()
    async with asyncio.timeout(PATIENCE):
        await (await waiter).release()
    await all_back(semaphore)


async def test_after_a_change_both_numbers_may_be_said(client, rival):
    async with client.semaphore("x", 3):
        await client.semaphore("x", 3).set_limit(5)
        for limit in (3, 5):
            lease = await rival.semaphore("x", limit).try_acquire()
            assert lease is not None
            await lease.release()
        with pytest.raises(ConfigError):
            await rival.semaphore("x", 4).try_acquire()
    async with rival.semaphore("x", 5) as lease:
        assert lease.held
        four = await client.semaphore("x", 5).try_acquire(permits=4)
        assert four is not None
        await four.release()


async def test_the_limit_of_a_semaphore_that_is_not_used_is_the_program_s_own(client):
    assert await client.semaphore("x", 7).current_limit() == 7
    assert await client.semaphore("x", 4).current_limit() == 4


async def test_a_limit_may_be_set_before_anybody_came(client):
    await client.semaphore("x", 2).set_limit(1)
    async with client.semaphore("x", 2):
        assert await client.semaphore("x", 2).try_acquire() is None
        assert await client.semaphore("x", 1).try_acquire() is None


async def test_a_limit_of_zero_pauses_until_another_is_set(deployment, client, rival):
    mine, theirs = client.semaphore("x", 2, ttl=deployment.lasting(0.5)), rival.semaphore("x", 2)
    held = await mine.acquire()
    behind = [asyncio.create_task(theirs.acquire(permits=2)), asyncio.create_task(theirs.acquire())]
    await queued(mine, 2)
    await theirs.set_limit(0)
    assert [await each.current_limit() for each in (mine, theirs)] == [0, 0]
    assert (await theirs.inspect()).limit == 0
    assert await theirs.available() == 0
    assert await theirs.locked()
    # The holder keeps its permit, and it is renewed.
    await asyncio.sleep(1.2 * held.ttl)
    held.check()
    await held.release()
    assert await mine.try_acquire() is None
    third = asyncio.create_task(mine.acquire())
    await queued(theirs, 3)
    info = await theirs.inspect()
    assert (info.holders, info.limit, len(info.waiters)) == ((), 0, 3)
    assert not any(task.done() for task in (*behind, third))
    with pytest.raises(ConfigError):
        await rival.semaphore("x", 3).acquire()
    await mine.set_limit(3)
    async with asyncio.timeout(PATIENCE):
        first, second = await asyncio.gather(*behind)
    assert await mine.current_limit() == 3
    assert await theirs.available() == 0
    await first.release()
    async with asyncio.timeout(PATIENCE):
        await (await third).release()
    await second.release()
    await all_back(mine)


async def test_a_semaphore_may_be_paused_before_anybody_came(client, rival):
    await client.semaphore("x", 2).set_limit(0)
    assert await rival.semaphore("x", 2).current_limit() == 0
    assert await rival.semaphore("x", 2).try_acquire() is None
    waiter = asyncio.create_task(rival.semaphore("x", 2).acquire())
    await queued(client.semaphore("x", 2), 1)
    await client.semaphore("x", 2).set_limit(0)
    assert not waiter.done()
    await client.semaphore("x", 2).set_limit(2)
    async with asyncio.timeout(PATIENCE):
        await (await waiter).release()
    await all_back(client.semaphore("x", 2))


@pytest.mark.parametrize("count", [0, -1, 4, True, 1.0, "1", None])
async def test_permits_that_there_cannot_be_are_refused(client, count):
    semaphore = client.semaphore("x", 3)
    for ask in (semaphore.acquire, semaphore.try_acquire):
        with pytest.raises(ConfigError, match=r"^permits must be "):
            await ask(permits=count)
    with pytest.raises(ConfigError, match=r"^permits must be "):
        client.semaphore("x", 3, permits=count)
    assert await semaphore.available() == 3


async def test_a_try_that_gets_nothing_is_the_first_use_of_a_limit(client, rival):
    await client.semaphore("x", 3).set_limit(0)
    assert await rival.semaphore("x", 3).try_acquire() is None
    with pytest.raises(ConfigError, match="limit"):
        await client.semaphore("x", 4).acquire(timeout=30)
    assert await client.semaphore("x", 3).try_acquire() is None


async def test_a_wait_that_gets_nothing_is_the_first_use_of_a_limit(client, rival):
    await client.semaphore("x", 3).set_limit(0)
    waiter = asyncio.create_task(rival.semaphore("x", 3).acquire())
    await queued(client.semaphore("x", 3), 1)
    with pytest.raises(ConfigError, match="limit"):
        await client.semaphore("x", 4).acquire(timeout=30)
    await client.semaphore("x", 3).set_limit(1)
    await (await waiter).release()
