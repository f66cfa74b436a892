"""At most one live holder per name, whoever asks, from wherever."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import LockLost, UnsafeBackend
from tests.contract.deployments import WORDS
from tests.faults.staging import PATIENCE, gets_the_lock, nothing_remains, passes, rising, token_of, until


@pytest.mark.parametrize("fair", [False, True], ids=["plain", "fair"])
async def test_many_tasks_of_two_clients_are_never_inside_together(client, rival, fair):
    inside: list[str] = []
    tokens: list[int] = []

    async def work(who: str, lock) -> None:
        for _ in range(5):
            async with lock as lease:
                inside.append(who)
                assert len(inside) == 1
                tokens.append(token_of(lease))
                await passes(2)
                lease.check()
                inside.pop()

    # One object per client, shared by all of its tasks.
    locks = {"client": client.lock("x", fair=fair), "rival": rival.lock("x", fair=fair)}
    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            for who, lock in locks.items():
                group.create_task(work(who, lock))
    assert len(tokens) == 60
    assert rising(tokens)
    await nothing_remains(client, "x")


async def test_a_lock_that_is_held_is_not_granted_to_another_client(client, rival):
    async with client.lock("x"):
        assert await rival.lock("x").try_acquire() is None
    lease = await rival.lock("x").try_acquire()
    assert lease is not None
    await lease.release()


async def test_options_do_not_make_another_lock(client, rival):
    variants = [
        client.lock("x", ttl=3),
        client.lock("x", ttl=4, fair=True),
        client.lock("x", max_hold=60),
        client.lock("x", label="another", on_loss="signal"),
        client.reentrant_lock("x"),
        rival.lock("x"),
        rival.reentrant_lock("x", fair=True),
    ]
    for held in variants:
        lease = await held.acquire()
        for other in variants:

            async def attempt(other=other):
                return await other.try_acquire()

            # In a task of its own: the re-entrant ones would be let in here.
            assert await asyncio.create_task(attempt()) is None
        await lease.release()


async def test_namespaces_do_not_exclude_each_other(deployment, client):
    stranger = deployment.connect(namespace=f"{deployment.namespace}-other")
    async with stranger, client.lock("x"), stranger.lock("x") as lease:
        assert lease.held


async def test_one_client_may_hold_many_names_at_once(client):
    leases = [await client.lock(f"x{number}").acquire() for number in range(20)]
    assert all(lease.held for lease in leases)
    for lease in leases:
        await lease.release()


async def test_a_lock_object_is_not_a_hold_and_can_be_reused(client):
    lock = client.lock("x")
    tokens = []
    for _ in range(3):
        async with lock as lease:
            tokens.append(token_of(lease))
        assert not lease.held
    assert rising(tokens)


# --- one's own block


async def test_waiting_for_ones_own_block_is_refused_instead_of_hanging(client):
    async with client.lock("x"):
        with pytest.raises(RuntimeError, match="own block"):
            await client.lock("x").acquire()
        with pytest.raises(RuntimeError, match="own block"):
            async with client.lock("x", ttl=3):
                pass
        with pytest.raises(RuntimeError, match="own block"):
            await client.reentrant_lock("x").acquire()
        assert await client.lock("x").try_acquire() is None
    await gets_the_lock(client, "x")


async def test_another_task_may_wait_for_my_block(client):
    lock = client.lock("x")
    async with lock:
        waiter = asyncio.create_task(gets_the_lock(client, "x"))
        await passes(3)
        assert not waiter.done()
    async with asyncio.timeout(PATIENCE):
        await waiter


async def test_ones_own_block_is_known_until_its_outermost_level_ends(client):
    async with client.reentrant_lock("x"):
        async with client.reentrant_lock("x"):
            pass
        with pytest.raises(RuntimeError, match="own block"):
            await client.lock("x").acquire(timeout=PATIENCE)
    await gets_the_lock(client, "x")


async def test_after_a_release_inside_its_block_a_task_may_ask_again(client):
    lock = client.lock("x")
    async with lock as outer:
        await outer.release()
        async with asyncio.timeout(PATIENCE), lock as inner:
            assert token_of(inner) > token_of(outer)
            with pytest.raises(RuntimeError, match="own block"):
                await lock.acquire()
        again = await lock.try_acquire()
        assert again is not None
        async with again:
            assert await lock.try_acquire() is None
        async with asyncio.timeout(PATIENCE), await client.lock("x").acquire():
            pass
    await gets_the_lock(client, "x")


async def test_after_a_loss_a_block_that_goes_on_may_ask_again(deployment, client):
    lock = client.lock("x", on_loss="signal")
    with pytest.raises(LockLost):
        async with lock as outer:
            await deployment.lose(outer)
            await until(lambda: outer.lost)
            async with asyncio.timeout(PATIENCE), lock as inner:
                assert token_of(inner) > token_of(outer)
    await gets_the_lock(client, "x")


async def test_a_level_that_is_left_is_still_ones_own_block(client):
    lock = client.reentrant_lock("x")
    async with lock as outer, lock:
        await outer.release()
        with pytest.raises(RuntimeError, match="own block"):
            await client.lock("x").acquire(timeout=PATIENCE)
    await gets_the_lock(client, "x")


async def test_a_block_left_in_another_task_releases_and_says_so(client):
    lock = client.lock("x")
    lease = await lock.__aenter__()

    async def leave() -> None:
        await lock.__aexit__(None, None, None)

    with pytest.raises(RuntimeError, match="another task"):
        await asyncio.create_task(leave())
    assert not lease.held
    await gets_the_lock(client, "x")


async def test_leaving_a_block_that_is_not_open_is_refused(client):
    with pytest.raises(RuntimeError, match="no block"):
        await client.lock("x").__aexit__(None, None, None)


# --- what a deployment promises


@pytest.mark.parametrize("word", sorted(WORDS))
async def test_what_is_required_is_promised_or_refused_at_open(deployment, word):
    if word in deployment.promises:
        async with deployment.connect(require={word}) as client:
            assert word in client.capabilities
    else:
        with pytest.raises(UnsafeBackend, match=word):
            await deployment.connect(require={word}).open()


async def test_a_promise_that_nobody_makes_is_refused(deployment):
    with pytest.raises(UnsafeBackend, match="does not promise miracles"):
        await deployment.connect(require={"miracles"}).open()
