"""Many readers or one writer: who may be inside, and who is next."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import LockLost, lock_all
from tests.faults.staging import PATIENCE, passes, queued, until, waiting

NEEDS = "read-write"


async def nothing_remains(client) -> None:
    lock = client.rwlock("x").read()

    async def empty() -> bool:
        info = await lock.inspect()
        return not info.holders and not info.waiters

    await until(empty)


async def line(clients, modes):
    """Tasks that want the lock, in this order at the server, each through a client of its own; and who came in so far."""
    inside: list[int] = []
    gates = [asyncio.Event() for _ in modes]

    async def one(number: int, client, mode: str) -> None:
        async with getattr(client.rwlock("x"), mode)(fair=True):
            inside.append(number)
            await gates[number].wait()
        inside.remove(number)

    tasks = []
    look = clients[0].rwlock("x").read()
    before = len((await look.inspect()).waiters)
    for number, (client, mode) in enumerate(zip(clients, modes, strict=True)):
        tasks.append(asyncio.create_task(one(number, client, mode)))
        await queued(look, before + number + 1)
    return tasks, inside, gates


# --- who may be inside together


async def test_readers_are_inside_together_and_a_writer_is_alone(client, rival):
    first, second = client.rwlock("x"), rival.rwlock("x")
    async with first.read() as one, second.read() as other, asyncio.timeout(PATIENCE):
        assert one.held
        assert other.held
        assert one.token != other.token
        assert await asyncio.create_task(first.write().try_acquire()) is None
        assert await asyncio.create_task(second.write().try_acquire()) is None
    async with first.write(timeout=PATIENCE) as lease:
        assert lease.token > max(one.token, other.token)
        assert await second.read().try_acquire() is None
        assert await second.write().try_acquire() is None
        assert await asyncio.create_task(first.read().try_acquire()) is None
    await nothing_remains(client)


@pytest.mark.parametrize("fair", [False, True], ids=["plain", "fair"])
async def test_many_readers_and_writers_never_meet(deployment, client, rival, fair):
    inside = {"read": 0, "write": 0}
    most = 0

    async def work(lock, mode: str) -> None:
        nonlocal most
        for _ in range(3):
            async with getattr(lock, mode)(fair=fair) as lease:
                inside[mode] += 1
                assert inside["write"] == 0 or inside == {"read": 0, "write": 1}
                most = max(most, inside["read"])
                await passes(2)
                lease.check()
                inside[mode] -= 1

    async with asyncio.TaskGroup() as group:
        for number in range(12):
            who = (client, rival)[number % 2]
            group.create_task(work(who.rwlock("x"), "write" if number % 3 == 0 else "read"))
    # Behind a network, whether readers meet in so short a time is chance.
    assert most > 1 or deployment.slow > 1
    await nothing_remains(client)


async def test_it_is_another_lock_than_the_mutex_of_that_name(client):
    async with client.lock("x"), client.rwlock("x").write() as lease:
        assert lease.held


async def test_readers_are_shown_as_readers(client, rival):
    async with client.rwlock("x").read(label="one") as lease, rival.rwlock("x").read():
        waiter = asyncio.create_task(rival.rwlock("x").write().acquire())
        await queued(client.rwlock("x").read(), 1)
        info = await rival.rwlock("x").write().inspect()
        assert sorted((holder.label, holder.mode) for holder in info.holders) == [
            ("one", "read"),
            ("rival", "read"),
        ]
        assert lease.token in {holder.token for holder in info.holders}
        assert [(place.label, place.mode) for place in info.waiters] == [("rival", "write")]
    await (await waiter).release()


# --- who is next


async def test_a_waiting_writer_stops_later_readers(client, rival):
    reader = await client.rwlock("x").read().acquire()
    writer = asyncio.create_task(rival.rwlock("x").write().acquire())
    await queued(client.rwlock("x").read(), 1)
    assert await client.rwlock("x").read().try_acquire() is None
    later = asyncio.create_task(client.rwlock("x").read().acquire())
    await queued(client.rwlock("x").read(), 2)
    await reader.release()
    async with asyncio.timeout(PATIENCE):
        writing = await writer
    assert not later.done()
    await writing.release()
    async with asyncio.timeout(PATIENCE):
        reading = await later
    assert reading.token > writing.token
    await reading.release()
    await nothing_remains(client)


async def test_the_order_is_that_of_arrival_and_neighbours_enter_together(client, rival):
    holder = await client.rwlock("x").write().acquire()
    modes = ["read", "read", "write", "read", "read", "write"]
    tasks, inside, gates = await line([client, rival] * 3, modes)
    await holder.release()
    for together in ([0, 1], [2], [3, 4], [5]):
        await until(lambda together=together: sorted(inside) == together)
        await passes(20)
        assert sorted(inside) == together
        for number in together:
            gates[number].set()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*tasks)
    await nothing_remains(client)


async def test_readers_enter_when_the_writer_before_them_gives_up(client, rival):
    holder = await client.rwlock("x").read().acquire()
    tasks, inside, gates = await line([rival, client, rival], ["write", "read", "read"])
    tasks[0].cancel()
    await until(lambda: sorted(inside) == [1, 2])
    assert holder.held
    for gate in gates:
        gate.set()
    await holder.release()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*tasks, return_exceptions=True)
    await nothing_remains(client)


async def test_a_reader_that_died_costs_only_itself(deployment, client, rival):
    if not deployment.prolongs:
        # Its hold lives as long as its session, and tests of sessions are elsewhere.
        return
    alive = await rival.rwlock("x").read().acquire()
    silent = await client.rwlock("x").read(ttl=deployment.seconds(0.3), renew=False).acquire()
    writer = asyncio.create_task(rival.rwlock("x").write().acquire())
    assert await silent.wait_lost() == "expired"

    async def one_left() -> bool:
        return [holder.label for holder in (await rival.rwlock("x").read().inspect()).holders] == ["rival"]

    await until(one_left)
    assert alive.held
    assert not writer.done()
    await alive.release()
    async with asyncio.timeout(PATIENCE):
        await (await writer).release()


async def test_writers_of_one_client_pass_it_on_among_themselves(client):
    lock, tokens = client.rwlock("x").write(), []

    async def turn() -> None:
        async with lock as lease:
            tokens.append(lease.token)

    first = await lock.acquire()
    tasks = [asyncio.create_task(turn()) for _ in range(5)]
    await waiting(client, 5)
    await first.release()
    await asyncio.gather(*tasks)
    assert tokens == sorted(set(tokens))
    # Not all of them: a server that does not say whether others wait is asked again after some milliseconds.
    assert client.stats()["passed"] >= 1
    await nothing_remains(client)


# --- one's own blocks


async def test_a_read_level_is_kept_while_lock_all_waits_for_another_lock(client, rival):
    """The writer waits for this task: asked for anew, the read lock would wait behind that writer."""
    lock = client.rwlock("x")
    busy = await rival.lock("a").acquire()

    async def let_go() -> None:
        await queued(client.lock("a"), 1)
        await busy.release()

    async with lock.read():
        writer = asyncio.create_task(rival.rwlock("x").write().acquire())
        await queued(lock.write(), 1)
        releasing = asyncio.create_task(let_go())
        async with asyncio.timeout(PATIENCE), lock_all(client.lock("a"), client.lock("b"), lock.read()):
            assert not writer.done()
        await releasing
    async with asyncio.timeout(PATIENCE):
        await (await writer).release()
    await nothing_remains(client)


async def test_a_reader_cannot_become_a_writer(client):
    lock = client.rwlock("x")
    async with lock.read():
        with pytest.raises(RuntimeError, match="Leave the read block and take write"):
            await lock.write().acquire(timeout=PATIENCE)
        with pytest.raises(RuntimeError, match="downgrade"):
            async with client.rwlock("x").write():
                pass
        assert await lock.write().try_acquire() is None
    async with await lock.read().acquire():
        with pytest.raises(RuntimeError, match="read block"):
            await lock.write().acquire()
    await (await lock.write().acquire(timeout=PATIENCE)).release()
    await nothing_remains(client)


async def test_after_a_release_inside_its_block_a_task_may_read_and_write(client):
    lock = client.rwlock("x")
    for side in (lock.read(), lock.write()):
        async with side as outer:
            await outer.release()
            async with asyncio.timeout(PATIENCE), lock.write():
                with pytest.raises(RuntimeError, match="own write block"):
                    await lock.write().acquire(timeout=PATIENCE)
            async with asyncio.timeout(PATIENCE), lock.read():
                with pytest.raises(RuntimeError, match="own read block"):
                    await lock.write().acquire(timeout=PATIENCE)
    async with lock.read() as outer, lock.read():
        await outer.release()
        with pytest.raises(RuntimeError, match="own read block"):
            await lock.write().acquire(timeout=PATIENCE)
    await nothing_remains(client)


async def test_a_writer_who_wants_to_read_is_told_how(client):
    lock = client.rwlock("x")
    async with lock.write():
        with pytest.raises(RuntimeError, match="downgrade"):
            await lock.read().acquire()
        with pytest.raises(RuntimeError, match="own write block"):
            await lock.write().acquire()
        assert await lock.read().try_acquire() is None
        assert await lock.write().try_acquire() is None
    await nothing_remains(client)


async def test_a_reader_reads_on_even_if_a_writer_waits(client, rival):
    lock = client.rwlock("x").read()
    async with lock as outer:
        writer = asyncio.create_task(rival.rwlock("x").write().acquire())
        await queued(lock, 1)
        async with asyncio.timeout(PATIENCE), lock as inner, client.rwlock("x").read() as innermost:
            assert outer.token == inner.token == innermost.token
            level = await lock.try_acquire()
            assert level is not None
        assert outer.held
        assert not inner.held
    # One level is left, and holds it.
    await passes(20)
    assert not writer.done()
    assert level.held
    await level.release()
    async with asyncio.timeout(PATIENCE):
        await (await writer).release()
    await nothing_remains(client)


async def test_who_reads_for_too_long_does_not_read_on(client):
    lock = client.rwlock("x").read(ttl=60, max_hold=0.03, on_loss="signal")
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(LockLost, match="max_hold"):
            async with lock as lease:
                assert await lease.wait_lost() == "max_hold"
                for again in (lock.acquire, lock.try_acquire):
                    with pytest.raises(LockLost, match="max_hold"):
                        await again()
    await nothing_remains(client)


async def test_another_task_reads_with_a_hold_of_its_own(client):
    lock = client.rwlock("x").read()
    async with lock as mine:
        theirs = await asyncio.create_task(lock.acquire())
        assert theirs.token != mine.token
    assert theirs.held
    await theirs.release()
    await nothing_remains(client)


async def test_force_release_tells_every_reader(deployment, client, rival):
    leases = [await each.rwlock("x").read().acquire() for each in (client, client, rival)]
    assert await rival.rwlock("x").write().force_release()
    async with asyncio.timeout(PATIENCE):
        assert [await lease.wait_lost() for lease in leases] == [deployment.reason] * 3
    await nothing_remains(client)
