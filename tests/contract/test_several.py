"""Several locks as one: all or nothing, in one order for everybody, lost and released together."""

from __future__ import annotations

import asyncio
import random

import pytest

from aiolock import AcquireTimeout, ConfigError, LockLost, lock_all
from tests.faults.staging import PATIENCE, nothing_remains, passes, queued, token_of, until, verdict, waiting


async def all_free(client, *names: str) -> None:
    for name in names:
        await nothing_remains(client, name)
    assert client.stats()["held"] == client.stats()["waiting"] == 0


async def test_all_are_held_and_all_are_released(deployment, client, rival):
    async with lock_all(client.lock("b"), client.lock("a"), client.lock("c")) as lease:
        assert [part.name for part in lease.parts] == ["a", "b", "c"]
        assert lease.name == "a, b, c"
        assert lease.held
        assert not lease.lost
        assert 0 < lease.remaining() <= lease.ttl
        # Of several servers as one, another decides about each lock.
        assert "fencing" not in deployment.promises or len({part.token for part in lease.parts}) == 3
        assert not hasattr(lease, "token")
        with pytest.raises(AttributeError, match="each of its parts has one"):
            _ = lease.token
        for name in "abc":
            assert await rival.lock(name).try_acquire() is None
        lease.check()
        await lease.renew()
    assert not lease.held
    assert not lease.lost
    await all_free(client, "a", "b", "c")


async def test_it_is_all_or_nothing(client, rival):
    locks = [client.lock(name) for name in "abc"]
    for taken in "abc":
        async with rival.lock(taken):
            assert await lock_all(*locks).try_acquire() is None
            with pytest.raises(AcquireTimeout) as caught:
                await lock_all(*locks).acquire(timeout=0)
            assert caught.value.name == taken
            with pytest.raises(AcquireTimeout):
                await lock_all(*locks, timeout=0.05).acquire()
            for name in set("abc") - {taken}:
                await (await rival.lock(name).acquire(timeout=PATIENCE)).release()
    async with lock_all(*locks, timeout=PATIENCE):
        pass
    await all_free(client, "a", "b", "c")


async def test_it_waits_for_what_is_missing(client, rival):
    holders = [await rival.lock(name).acquire() for name in ("a", "c")]
    waiter = asyncio.create_task(lock_all(*(client.lock(name) for name in "dcba")).acquire())
    await queued(client.lock("a"), 1)
    await holders[0].release()
    await queued(client.lock("c"), 1)
    assert not waiter.done()
    # What comes after the one that it waits for is free for others.
    await (await rival.lock("d").acquire(timeout=PATIENCE)).release()
    assert await rival.lock("b").try_acquire() is None
    await holders[1].release()
    async with asyncio.timeout(PATIENCE):
        lease = await waiter
    await lease.release()
    await all_free(client, *"abcd")


async def test_crossing_orders_do_not_deadlock(client, rival):
    inside: set[str] = set()

    async def work(who, seed: int) -> None:
        shuffled = random.Random(seed)
        for _ in range(4):
            names = shuffled.sample("abcd", 3)
            async with lock_all(*(who.lock(name) for name in names)) as lease:
                assert not inside.intersection(names)
                inside.update(names)
                await passes(2)
                lease.check()
                inside.difference_update(names)

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(work((client, rival)[number % 2], number))
    await all_free(client, *"abcd")


async def test_one_timeout_counts_for_all(client, rival):
    async with rival.lock("a"), rival.lock("b"):
        both = lock_all(client.lock("a", timeout=30), client.lock("b", timeout=0.2))
        loop = asyncio.get_running_loop()
        begin = loop.time()
        with pytest.raises(AcquireTimeout, match=r"'a' was not free within 0.2 s \(of 2 locks\)"):
            async with both:
                pass
        assert loop.time() - begin < PATIENCE / 2
    await all_free(client, "a", "b")


async def test_kinds_may_be_mixed(deployment, client, rival):
    locks = [client.lock("x"), client.reentrant_lock("y")]
    if "elections" in deployment.kinds:
        locks += [client.election("x").campaign()]
    if "read-write" in deployment.kinds:
        locks += [client.rwlock("x").read(), client.rwlock("z").write()]
    if "semaphore" in deployment.kinds:
        locks += [client.semaphore("x", 3), client.semaphore("x", 3)]
    async with lock_all(*locks) as lease:
        kinds = [(part.name, part.kind.family.value, str(part.kind)) for part in lease.parts]
        assert kinds == sorted(kinds)
        if "semaphore" in deployment.kinds:
            assert ("x", "sem", "2 of 3 permits") in kinds
            assert await rival.semaphore("x", 3).available() == 1
        if "read-write" in deployment.kinds:
            assert await rival.rwlock("x").write().try_acquire() is None
            theirs = await rival.rwlock("x").read().try_acquire()
            assert theirs is not None
            await theirs.release()
            assert await rival.rwlock("z").read().try_acquire() is None
        async with client.reentrant_lock("y") as level:
            assert token_of(level) in [token_of(part) for part in lease.parts]
    await all_free(client, "x", "y")


async def test_locks_of_two_clients_are_refused(client, rival):
    for other in (rival.lock("a"), rival.lock("b"), lock_all(rival.lock("b"))):
        with pytest.raises(ConfigError, match=r"locks of one client: 'a' and '[ab]' come from two"):
            lock_all(client.lock("a"), other)


async def test_it_may_be_tried_for_some_time(client, rival):
    both, holder = lock_all(client.lock("a"), client.lock("b")), await rival.lock("b").acquire()
    assert await both.try_acquire() is None
    assert await both.try_acquire(timeout=0.05) is None
    trying = asyncio.create_task(both.try_acquire(timeout=None))
    await queued(rival.lock("b"), 1)
    await holder.release()
    async with asyncio.timeout(PATIENCE):
        lease = await trying
    assert lease is not None
    assert [part.name for part in lease.parts] == ["a", "b"]
    async with lease:
        # At once: the task is inside already.
        assert await both.try_acquire(timeout=PATIENCE) is None
    await all_free(client, "a", "b")


async def test_an_acquire_is_a_block_as_well(client, rival):
    async with lock_all(client.lock("a"), client.lock("b")).acquire(timeout=PATIENCE) as lease:
        assert [part.held for part in lease.parts] == [True, True]
        assert client.lock("a").owned()
        assert await rival.lock("b").try_acquire() is None
    assert not client.lock("a").owned()
    await all_free(client, "a", "b")


async def test_the_same_lock_twice_is_one(deployment, client):
    async with lock_all(client.lock("a", ttl=9), client.lock("a", ttl=4)) as lease:
        assert len(lease.parts) == 1
        assert lease.ttl == deployment.ttl_of(4)
    if "read-write" in deployment.kinds:
        pair = client.rwlock("a")
        for locks in ([pair.read(), pair.write()], [pair.write(), pair.read()], [pair.read(), pair.read()]):
            async with lock_all(*locks) as lease:
                modes = {lock.kind.mode.value for lock in locks}
                assert [part.kind.mode.value for part in lease.parts] == [
                    "write" if "write" in modes else "read"
                ]
    with pytest.raises(ConfigError, match="which is 2, not 3"):
        lock_all(*[client.semaphore("s", 2)] * 3)
    with pytest.raises(ConfigError, match="must have one limit, not 2 and 3"):
        lock_all(client.semaphore("s", 2), client.semaphore("s", 3))
    await all_free(client, "a")


@pytest.mark.parametrize("lost", range(3))
async def test_losing_one_loses_all(deployment, client, lost):
    with pytest.raises(LockLost) as caught:
        async with lock_all(*(client.lock(name) for name in "abc")) as lease:
            await deployment.lose(lease.parts[lost])
            await asyncio.sleep(PATIENCE)
            raise AssertionError("the block was not cancelled")
    # Where holds live in one session they are lost together.
    assert caught.value.name == "abc"[lost] or deployment.reason == "session"
    assert caught.value.reason == deployment.reason
    assert lease.lost
    assert not lease.held
    await all_free(client, "a", "b", "c")


async def test_a_bare_lease_tells_the_loss_of_a_part(client):
    lease = await lock_all(client.lock("a"), client.lock("b")).acquire()
    watcher = asyncio.create_task(lease.wait_lost())
    await passes(2)
    verdict(lease.parts[1])
    assert lease.lost
    assert lease.remaining() == 0
    with pytest.raises(LockLost, match="'b'"):
        lease.check()
    async with asyncio.timeout(PATIENCE):
        assert await watcher == "expired"
    # What is still held is held until it is released.
    assert lease.parts[0].held
    await lease.release()
    await all_free(client, "a", "b")


async def test_guard_protects_other_tasks(client):
    lease = await lock_all(client.lock("a"), client.lock("b")).acquire()

    async def child() -> None:
        with lease.guard():
            await asyncio.sleep(PATIENCE)

    task = asyncio.create_task(child())
    await passes(3)
    verdict(lease.parts[0])
    with pytest.raises(LockLost):
        await task
    await lease.release()
    await all_free(client, "a", "b")


async def test_a_part_may_be_given_back_early(client, rival):
    async with lock_all(client.lock("a"), client.lock("b")) as lease:
        await lease.parts[0].release()
        assert lease.held
        await (await rival.lock("a").acquire(timeout=PATIENCE)).release()
    await all_free(client, "a", "b")


async def test_a_lease_may_be_entered_and_handed_over(client):
    lease = await lock_all(client.lock("a"), client.lock("b")).acquire()

    async def child() -> None:
        async with lease:
            with pytest.raises(RuntimeError, match="own block"):
                await client.lock("b").acquire()
        assert not lease.held

    await asyncio.create_task(child())
    await all_free(client, "a", "b")


async def released_when_waited_for(lease, lock) -> None:
    await queued(lock, 1)
    await lease.release()


async def test_a_level_is_kept_while_another_lock_is_waited_for(deployment, client, rival):
    """Asked for anew, it would be waited for by the very task that has it."""
    both = lock_all(client.lock("a"), client.lock("b"), client.reentrant_lock("r"))
    async with client.reentrant_lock("r") as outer:
        for busy in "ab":
            lease = await rival.lock(busy).acquire()
            assert await both.try_acquire() is None
            with pytest.raises(AcquireTimeout, match=f"'{busy}'"):
                await both.acquire(timeout=0)
            with pytest.raises(AcquireTimeout, match=f"'{busy}'"):
                await both.acquire(timeout=deployment.seconds(0.2))
            releasing = asyncio.create_task(released_when_waited_for(lease, client.lock(busy)))
            async with asyncio.timeout(PATIENCE), both as joint:
                assert token_of(joint.parts[-1]) == token_of(outer)
            await releasing
        assert outer.held
        assert await rival.lock("r").try_acquire() is None
    await all_free(client, *"abr")


async def test_ones_own_block_is_refused_in_both_directions(client):
    both = lock_all(client.lock("a"), client.lock("b"))
    async with client.lock("b"):
        with pytest.raises(RuntimeError, match="own block of 'b'"):
            await both.acquire()
        assert await both.try_acquire() is None
    async with both:
        with pytest.raises(RuntimeError, match="own block"):
            await client.lock("a").acquire()
        with pytest.raises(RuntimeError, match="own block"):
            await both.acquire()
        assert await client.lock("b").try_acquire() is None
    async with (
        client.reentrant_lock("a") as outer,
        lock_all(client.reentrant_lock("a"), client.lock("b")) as lease,
    ):
        assert token_of(lease.parts[0]) == token_of(outer)
    await all_free(client, "a", "b")


async def test_who_is_cancelled_while_it_waits_holds_none(client, rival):
    for taken in "ab":
        async with rival.lock(taken):
            waiter = asyncio.create_task(
                lock_all(client.lock("a"), client.lock("b"), client.lock("c")).acquire()
            )
            await queued(client.lock(taken), 1)
            waiter.cancel()
            await asyncio.wait([waiter])
            assert waiter.cancelled()
        await all_free(client, "a", "b", "c")


async def test_local_tasks_take_turns(client):
    both = lock_all(client.lock("a"), client.lock("b"))
    inside = 0

    async def turn() -> None:
        nonlocal inside
        async with both:
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(turn() for _ in range(20)))
    await all_free(client, "a", "b")


async def test_a_request_to_one_is_a_request_to_all(deployment, client, rival):
    if "requests" not in deployment.kinds:
        return
    async with lock_all(client.lock("a", ttl=3), client.lock("b", ttl=3)) as lease:
        await rival.lock("b").request_release("please")
        async with asyncio.timeout(PATIENCE):
            assert await lease.release_requested == "please"
        assert not lease.parts[0].release_requested
        assert lease.parts[1].release_requested


async def test_keep_keeps_all(deployment, client, rival):
    lease = await lock_all(client.lock("a"), client.lock("b")).acquire()
    if "keep" not in deployment.promises:
        await lease.release()
        return
    await lease.release(keep=deployment.seconds(0.3))
    assert [await rival.lock(name).locked() for name in "ab"] == [True, True]
    # Where no clock tells that it is over, only a waiter finds it out.
    for name in "b" if deployment.tells else "ba":
        await (await rival.lock(name).acquire(timeout=PATIENCE)).release()
    await all_free(client, "a", "b")


async def test_closing_the_client_loses_all(deployment, client):
    other = await deployment.connect(label="other").open()
    lease = await lock_all(other.lock("a"), other.lock("b")).acquire()
    await other.aclose()
    assert lease.lost
    with pytest.raises(LockLost, match="closed"):
        lease.check()
    await lease.release()
    await all_free(client, "a", "b")


async def test_what_is_no_lock_is_refused(client):
    for wrong in ([], [None], [client], [client.rwlock("a")], [client.latch("a", 1)], ["a"]):
        with pytest.raises(ConfigError, match=r"^lock_all must be given "):
            lock_all(*wrong)
    with pytest.raises(ConfigError, match=r"^timeout must be "):
        lock_all(client.lock("a"), timeout=-1)
    with pytest.raises(ConfigError, match=r"^timeout must be "):
        await lock_all(client.lock("a")).acquire(timeout="1")
    with pytest.raises(ConfigError, match=r"^on_loss must be "):
        lock_all(client.lock("a"), on_loss="ignore")
    await until(lambda: client.stats()["held"] == 0)
    await waiting(client, 0)


async def test_a_level_of_one_part_is_given_back_if_another_part_is_lost(client):
    first, second = client.reentrant_lock("a"), client.reentrant_lock("b")
    both = lock_all(first, second)
    async with first:
        lost = await second.acquire()
        verdict(lost)
        for ask in (both.acquire, both.try_acquire):
            with pytest.raises(LockLost, match="'b'"):
                await ask()
        await lost.release()
    # Leaving the block was the last level: nothing had to be found and collected.
    assert client.stats()["held"] == 0
    await all_free(client, "a", "b")


async def test_a_task_that_has_all_of_them_may_ask_for_all_of_them(client, rival):
    both = lock_all(client.reentrant_lock("a"), client.reentrant_lock("b"))
    async with both as outer:
        for again in (await both.try_acquire(), await both.acquire(timeout=0)):
            assert again is not None
            assert [token_of(part) for part in again.parts] == [token_of(part) for part in outer.parts]
            await again.release()
        assert outer.held
        assert [await rival.lock(name).try_acquire() for name in "ab"] == [None, None]
    await all_free(client, "a", "b")


@pytest.mark.parametrize("on_loss", ["cancel", "signal"])
async def test_closing_the_client_ends_a_block(deployment, client, on_loss):
    other = await deployment.connect(label="other").open()
    with pytest.raises(LockLost, match="closed"):
        # The ttl is longer than anybody here waits.
        async with lock_all(other.lock("a"), other.lock("b", ttl=10 * PATIENCE), on_loss=on_loss):
            await other.aclose()
            await passes(3)
    await all_free(client, "a", "b")


async def test_a_lease_whose_parts_were_all_given_back_was_released(client):
    lease = await lock_all(client.lock("a"), client.lock("b")).acquire()
    for part in lease.parts:
        lease.check()
        await part.release()
    assert not lease.held
    assert not lease.lost
    with pytest.raises(RuntimeError, match="every part of the lease of 'a, b' was released"):
        lease.check()
    await lease.release()
    with pytest.raises(RuntimeError, match="was released"):
        lease.check()
    await all_free(client, "a", "b")
