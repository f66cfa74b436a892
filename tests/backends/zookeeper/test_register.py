"""Registers: compare-and-set that no lost reply and no forgetting can confuse, and changes that are always heard of."""

from __future__ import annotations

import asyncio

import pytest
from aiozk import exc

from aiolock import BackendError, ConfigError
from aiolock.backends.zookeeper import protocol
from aiolock.core.capabilities import ABSENT, MOST_BYTES
from aiolock.types import Family
from tests.servers import ZooKeeper

PUT = 5
GET = 4
MULTI = 14
DAY = 86_400.0


def paper(client, name: str = "x"):
    return client._backend.register(name, Family.LATCH)


async def test_a_register_is_written_read_and_replaced_by_its_stamp(client, rival):
    one, two = paper(client), paper(rival)
    assert await one.read() == ABSENT
    first = await one.write(b"1", "", DAY)
    assert await two.read() == (b"1", first)
    assert await two.write(b"2", "", DAY) is None
    second = await two.write(b"2", first, DAY)
    assert await one.write(b"3", first, DAY) is None
    assert await one.read() == (b"2", second)
    assert len({first, second, ""}) == 3
    with pytest.raises(ConfigError):
        await one.write(b"x" * (MOST_BYTES + 1), second, DAY)


async def test_one_of_many_who_write_at_once_has_written(client, rival):
    stamps = await asyncio.gather(
        *(paper(each).write(str(number).encode(), "", DAY) for each in (client, rival) for number in range(5))
    )
    assert len([stamp for stamp in stamps if stamp]) == 1
    stamp = next(stamp for stamp in stamps if stamp)
    stamps = await asyncio.gather(*(paper(each).write(b"n", stamp, DAY) for each in (client, rival) * 5))
    assert len([stamp for stamp in stamps if stamp]) == 1


async def test_a_stamp_of_a_register_of_long_ago_does_not_fit_its_successor(client, tools):
    """Version numbers begin again; a writer that was stopped meanwhile must not hit the wrong one."""
    register, session = paper(client), tools.session_of(client)
    stamps = []
    path = f"/{tools.namespace}/register/latch/x"
    for _ in range(3):
        old = await register.write(b"old", "", DAY)
        stamps.append(old)
        stale = paper(client)
        [node] = (await session.ask(protocol.listing(path, watch=False))).children
        await session.ask(protocol.delete(f"{path}/{node}"))
        assert await register.read() == ABSENT
        assert await register.write(b"new", old, DAY) is None
        new = await register.write(b"new", "", DAY)
        assert await stale.write(b"stale", old, DAY) is None
        assert (await register.read()).value == b"new"
        stamps.append(new)
        await session.ask(
            protocol.delete(f"{path}/{(await session.ask(protocol.listing(path, watch=False))).children[0]}")
        )
    assert len(set(stamps)) == len(stamps)


async def test_a_server_forgets_it_after_its_time_and_not_before(tools):
    with ZooKeeper(switches=["-Dznode.container.checkIntervalMs=100"]) as server:
        async with tools.connect(server.port) as client:
            short, long = paper(client, "short"), paper(client, "long")
            # Longer than a busy machine takes for the next two requests.
            stamp = await short.write(b"1", "", 3)
            assert await long.write(b"1", await long.write(b"0", "", 3) or "", DAY)
            assert (await short.read()).stamp == stamp

            async def forgotten() -> bool:
                return await short.read() == ABSENT

            await tools.until(forgotten)
            assert (await long.read()).value == b"1", "it was to be kept for longer when it was written again"
            assert await short.write(b"2", stamp, 3) is None
            assert await short.write(b"2", "", DAY)


async def test_a_server_without_such_nodes_keeps_it(tools):
    with ZooKeeper(
        switches=["-Dzookeeper.extendedTypesEnabled=false", "-Dznode.container.checkIntervalMs=100"]
    ) as server:
        async with tools.connect(server.port) as client:
            register = paper(client)
            stamp = await register.write(b"1", "", 0.1)
            await asyncio.sleep(0.5)
            assert await register.read() == (b"1", stamp)
            assert await register.write(b"2", stamp, 0.1)
            await client.semaphore("s", 2).set_limit(3)
            assert (await client.semaphore("s", 2).inspect()).limit == 3
            subjects = {finding.subject for finding in await client.diagnose()}
            assert "extendedTypesEnabled" in subjects


async def test_where_a_server_forgets_nothing_its_administrator_may_delete_what_is_over(tools):
    """As the page of the backend says: the name of a register tells for how many milliseconds it is kept."""
    with ZooKeeper(
        switches=["-Dzookeeper.extendedTypesEnabled=false", "-Dznode.container.checkIntervalMs=100"]
    ) as server:
        async with tools.connect(server.port) as client:
            register, session = paper(client), tools.session_of(client)
            stamp = await register.write(b"1", "", 0.5)
            shelf = register._path
            [node] = (await session.ask(protocol.listing(shelf, watch=False))).children
            assert node.endswith("-500")
            await session.ask(protocol.delete(f"{shelf}/{node}"))
            # A write that was under way is refused, and whoever looks finds nothing.
            assert await register.write(b"2", stamp, 0.5) is None
            assert await register.read() == ABSENT
            later = await register.write(b"3", "", 0.5)
            assert await register.read() == (b"3", later)
            [node] = (await session.ask(protocol.listing(shelf, watch=False))).children
            await session.ask(protocol.delete(f"{shelf}/{node}"))

            async def is_gone() -> bool:
                try:
                    await session.ask(protocol.exists(shelf))
                except exc.NoNode:
                    return True
                return False

            # The node above is a container: nobody has to delete that one.
            await tools.until(is_gone)


@pytest.mark.parametrize("opcode", [GET, PUT, MULTI])
async def test_after_a_lost_reply_the_register_is_one_of_the_two(proxy, rival, tools, opcode):
    async with tools.connect(proxy.port) as cut:
        register = paper(cut)
        stamp = ""
        proxy.down.drop_next(1, tools.replies(proxy).to(opcode), reset=True)
        for number in range(3):
            value = str(number).encode()
            try:
                stamp = await register.write(value, stamp, DAY)
            except BackendError:
                entry = await register.read()
                assert entry.value in (value, str(number - 1).encode() if number else b"")
                stamp = entry.stamp
                if entry.value != value:
                    stamp = await register.write(value, stamp, DAY)
            assert await paper(rival).read() == (value, stamp)


@pytest.mark.parametrize("there", [True, False])
async def test_a_change_is_heard_of_at_once(client, rival, tools, there):
    stamp = await paper(client).write(b"1", "", DAY) if there else ""
    register = paper(rival)
    waiter = asyncio.create_task(register.changed(stamp))
    await asyncio.sleep(0.1)
    assert not waiter.done()
    await paper(client).write(b"2", stamp, DAY)
    # Before it would look for itself.
    async with asyncio.timeout(tools.TIMEOUT):
        await waiter
    # What has changed before anybody looked is no change to wait for.
    async with asyncio.timeout(tools.TIMEOUT):
        await register.changed(stamp)
    await register.aclose()


async def test_a_change_while_there_was_no_connection_is_heard_of(proxy, rival, tools):
    async with tools.connect(proxy.port) as cut:
        stamp = await paper(rival).write(b"1", "", DAY)
        register = paper(cut)
        waiter = asyncio.create_task(register.changed(stamp))
        await asyncio.sleep(0.1)
        await tools.cut(cut, proxy)
        await paper(rival).write(b"2", stamp, DAY)
        proxy.refuse = False
        async with asyncio.timeout(tools.PATIENCE):
            while True:
                try:
                    await waiter
                    break
                except BackendError:
                    waiter = asyncio.create_task(register.changed(stamp))
        assert (await register.read()).value == b"2"


async def test_whoever_stops_looking_leaves_no_watch_behind(server, client, tools):
    session = tools.session_of(client)
    for there in (False, True):
        register = paper(client, f"x{there}")
        stamp = await register.write(b"1", "", DAY) if there else ""
        waiter = asyncio.create_task(register.changed(stamp))
        await asyncio.sleep(0.1)
        waiter.cancel()
        await asyncio.wait([waiter])
        assert waiter.cancelled()
        await register.aclose()
        await register.aclose()
    assert session.watchers == {}
    assert client._backend.session.listeners == set()

    async def forgotten() -> bool:
        return "xFalse" not in await asyncio.to_thread(tools.four_letters, server, b"wchp")

    await tools.until(forgotten, "a server without a watch of what nobody will ever make")
