"""The simple recipe: it excludes, it cleans up, and it costs what its page says."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import AcquireTimeout, BackendRefused, UnsafeBackend
from aiolock.backends.zookeeper import protocol

CREATE2 = 15
DELETE = 2
QUERY = "session_timeout=3&tick_time=0.5&recipe=simple"


@pytest.fixture
async def pair(server, tools):
    async with (
        tools.connect(server.port, query=QUERY, label="one") as one,
        tools.connect(server.port, query=QUERY, label="two") as two,
    ):
        yield one, two


async def test_many_tasks_of_two_clients_are_never_inside_together(pair, tools):
    inside: list[int] = []
    tokens: list[int] = []

    async def work(client, number: int, fair: bool) -> None:
        for _ in range(5):
            async with client.lock("x", fair=fair) as lease:
                inside.append(number)
                assert inside == [number]
                tokens.append(lease.token)
                await asyncio.sleep(0)
                lease.check()
                inside.pop()

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(work(pair[number % 2], number, number > 3))
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 40
    await tools.until(lambda: gone(tools, pair[0]))
    for client in pair:
        assert tools.session_of(client).watchers == {}


async def gone(tools, client) -> bool:
    return await tools.nodes(client, "x") == []


async def test_it_waits_gives_up_and_is_inspected(pair, tools):
    one, two = pair
    async with one.lock("x") as lease:
        assert await two.lock("x").try_acquire() is None
        with pytest.raises(AcquireTimeout):
            await two.lock("x").acquire(timeout=0.05)
        info = await two.lock("x").inspect()
        assert [(holder.label, holder.token) for holder in info.holders] == [("one", lease.token)]
        assert info.waiters == ()
        waiter = asyncio.create_task(two.lock("x").acquire())
        await asyncio.sleep(0.05)
    async with asyncio.timeout(tools.PATIENCE):
        await (await waiter).release()


async def test_an_administrator_takes_it_and_the_old_holder_does_not_touch_the_next_one(pair, tools):
    one, two = pair
    lease = await one.lock("x").acquire()
    assert await two.lock("x").force_release()
    following = await two.lock("x").acquire(timeout=tools.PATIENCE)
    async with asyncio.timeout(tools.PATIENCE):
        assert await lease.wait_lost() == "force-released"
    await lease.release()
    await asyncio.sleep(0.1)
    following.check()
    assert len(await tools.nodes(one, "x")) == 1
    await following.release()


@pytest.mark.parametrize("kind", [CREATE2, DELETE])
async def test_a_lost_reply_leaves_nothing_and_nobody_behind(pair, proxy, tools, kind):
    async with pair[0].lock("x"):
        pass
    async with tools.connect(proxy.port, query=QUERY) as cut:
        lost = proxy.down.drop_next(1, tools.replies(proxy).to(kind), reset=True)
        async with cut.lock("x", timeout=tools.PATIENCE) as lease:
            assert lease.held
            assert await pair[0].lock("x").try_acquire() is None
        await lost.wait()
        async with pair[0].lock("x", timeout=tools.PATIENCE):
            pass


async def test_a_cancelled_create_leaves_nothing_behind(pair, tools):
    one, two = pair
    for passes in range(8):
        task = asyncio.create_task(one.lock("x").acquire())
        for _ in range(passes):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().release()
        async with two.lock("x", timeout=tools.PATIENCE):
            pass


async def test_it_promises_no_order(server, tools):
    async with tools.connect(server.port, query=QUERY) as client:
        assert "fifo" not in client.capabilities
    with pytest.raises(UnsafeBackend, match="fifo"):
        await tools.connect(server.port, query=QUERY, require={"fifo"}).open()


async def test_the_recipes_refuse_each_other(pair, client, tools):
    one, _ = pair
    async with client.lock("x"):
        with pytest.raises(BackendRefused, match="one recipe"):
            await one.lock("x").acquire()
    await tools.until(lambda: gone(tools, client))
    async with one.lock("x"):
        with pytest.raises(BackendRefused, match="one recipe"):
            await client.lock("x").acquire()


async def test_every_release_wakes_all_who_wait(server, tools):
    """The herd, counted: creates per hand-over, beside one waiter that the default wakes."""
    creates = {"simple": 0, "queue": 0}
    for recipe in creates:
        query = f"session_timeout=10&recipe={recipe}"
        clients = [await tools.connect(server.port, query=query).open() for _ in range(8)]
        watcher = tools.session_of(clients[0])
        holder = await clients[0].lock(recipe).acquire()
        tasks = [asyncio.create_task(client.lock(recipe).acquire()) for client in clients[1:]]
        # Everybody watches somebody.
        for client in clients[1:]:
            await tools.until(lambda client=client: tools.session_of(client).watchers)
            await tools.session_of(client).ask(protocol.sync())
        before = sum(tools.session_of(client).xid for client in clients[1:])
        await holder.release()
        while tasks:
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task.result().release()
            tasks = list(pending)
        creates[recipe] = sum(tools.session_of(client).xid for client in clients[1:]) - before
        await watcher.ask(protocol.sync())
        for client in clients:
            await client.aclose()
    print(f"requests for 7 hand-overs between 8 clients: {creates}")
    assert creates["simple"] > 1.5 * creates["queue"]
