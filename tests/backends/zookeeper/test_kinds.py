"""Read-write locks and semaphores while replies are lost, sessions end and administrators interfere."""

from __future__ import annotations

import asyncio
import struct

import pytest

from aiolock import AcquireTimeout, ConfigError, LockLost
from aiolock.backends.zookeeper import protocol
from aiolock.backends.zookeeper.format import REVOKE, Record
from aiolock.types import Family
from tests.servers import ZooKeeper

CREATE2 = 15
DELETE = 2
LIST = 8
GET = 4
SYNC = 9
MULTI = 14


@pytest.fixture
async def cut(proxy, tools):
    """A client behind the proxy."""
    async with tools.connect(proxy.port, label="cut") as opened:
        yield opened


def request(opcode: int):
    return lambda frame: frame[8:12] == struct.pack("!i", opcode)


# --- downgrade


@pytest.mark.parametrize("fate", ["reply lost", "never arrived"])
async def test_a_downgrade_in_doubt_is_looked_up(cut, rival, proxy, tools, fate):
    lease = await cut.rwlock("x").write().acquire()
    writer = await tools.waiting(rival, rival.rwlock("x").write())
    if fate == "reply lost":
        lost = proxy.down.drop_next(1, tools.replies(proxy).to(MULTI), reset=True)
    else:
        lost = proxy.up.drop_next(1, request(MULTI), reset=True)
    token = lease.token
    await lease.downgrade()
    assert lost.is_set()
    assert lease.token == token
    info = await rival.rwlock("x").read().inspect()
    assert [(holder.mode, holder.token) for holder in info.holders] == [("read", token)]
    assert not writer.done()
    await lease.release()
    async with asyncio.timeout(tools.PATIENCE):
        following = await writer
    assert following.token > token
    await following.release()
    await tools.empty(rival, "x", "rw")


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_downgrade_that_is_cancelled_leaves_one_hold_that_can_be_released(
    cut, rival, proxy, tools, arrives
):
    lease = await cut.rwlock("x").write().acquire()
    lane = proxy.down if arrives else proxy.up
    before = proxy.up.frames
    lane.blackhole()
    task = asyncio.create_task(lease.downgrade())
    await proxy.up.arrived(before + 1)
    if arrives:

        async def done() -> bool:
            return "__READ__" in (await tools.nodes(rival, "x", "rw"))[0]

        await tools.until(done)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    lane.heal()
    await asyncio.sleep(0.1)
    assert not lease.lost
    assert len(await tools.nodes(rival, "x", "rw")) == 1
    assert await rival.rwlock("x").write().try_acquire() is None
    await lease.release()
    await tools.empty(rival, "x", "rw")


async def test_a_downgrade_after_the_node_was_deleted_is_a_loss(client, rival, tools):
    lease = await client.rwlock("x").write().acquire()
    session = tools.session_of(client)
    [node] = await tools.nodes(rival, "x", "rw")
    await tools.session_of(rival).ask(protocol.delete(f"{tools.path('x', 'rw')}/{node}"))
    await session.ask(protocol.sync())
    with pytest.raises(LockLost):
        await lease.downgrade()
    assert lease.lost
    await tools.empty(rival, "x", "rw")


async def test_a_downgrade_in_a_session_that_has_ended_is_a_loss(server, cut, rival, proxy, tools):
    lease = await cut.rwlock("x").write().acquire()
    await tools.cut(cut, proxy)
    await tools.expire(tools.session_of(cut), server.port)
    task = asyncio.create_task(lease.downgrade())
    await asyncio.sleep(0)
    proxy.refuse = False
    with pytest.raises(LockLost):
        await task
    await tools.empty(rival, "x", "rw")


async def test_a_reader_that_was_a_writer_is_still_told_of_the_end_of_its_node(client, rival, tools):
    lease = await client.rwlock("x").write().acquire()
    await lease.downgrade()
    assert await rival.rwlock("x").write().force_release()
    async with asyncio.timeout(tools.TIMEOUT):
        assert await lease.wait_lost() == "force-released"


# --- permits


async def test_whichever_holder_leaves_first_the_next_in_line_enters(client, rival, tools):
    """Whoever waited for one of them alone would sleep while permits are free."""
    for leaves in range(3):
        name = f"x{leaves}"
        semaphore = client.semaphore(name, 3)
        leases = [await semaphore.acquire() for _ in range(3)]
        first = await tools.waiting(rival, rival.semaphore(name, 3), 1)
        second = await tools.waiting(rival, rival.semaphore(name, 3), 2)
        await leases.pop(leaves).release()
        async with asyncio.timeout(tools.TIMEOUT):
            await (await first).release()
            await (await second).release()
        for lease in leases:
            await lease.release()


async def test_the_number_of_permits_stands_in_the_node_of_the_semaphore(client, rival, tools):
    path = tools.path("x", "sem")
    lease = await client.semaphore("x", 3).acquire()
    data = (await tools.session_of(rival).ask(protocol.get(path, watch=False))).data
    assert Record.decode(data) == Record(limit=3, declared=3)
    with pytest.raises(ConfigError, match="3 permits, not 4"):
        await rival.semaphore("x", 4).acquire()
    assert len(await tools.nodes(rival, "x", "sem")) == 1
    await lease.release()


@pytest.mark.parametrize("data", [b"", b"127.0.0.1", b"aiolock limit=x", None])
async def test_a_node_that_somebody_made_before_gets_the_number_of_the_first_user(client, tools, data):
    session, path = tools.session_of(client), tools.path("x", "sem")
    await client._backend.context.nodes.make(path)
    if data is not None:
        await session.ask(protocol.put(path, data))
    leases = await asyncio.gather(*(client.semaphore("x", 2).acquire() for _ in range(2)))
    assert (await client.semaphore("x", 2).inspect()).limit == 2
    with pytest.raises(ConfigError):
        await client.semaphore("x", 5).try_acquire()
    for lease in leases:
        await lease.release()


async def test_a_number_that_was_set_is_remembered_and_one_that_was_said_is_forgotten(tools):
    """Nodes that nobody uses are removed by the server; the one with a number that was set stays for a day."""
    with ZooKeeper(switches=["-Dznode.container.checkIntervalMs=200"]) as server:
        async with tools.connect(server.port) as client:
            await (await client.semaphore("said", 2).acquire()).release()
            async with client.semaphore("set", 2):
                # While it is used, its node is not removed.
                await client.semaphore("set", 2).set_limit(3)

            async def reaped() -> bool:
                session = tools.session_of(client)
                folder = await session.ask(protocol.listing(f"/{tools.namespace}/sem", watch=False))
                return folder.children == ["set"]

            await tools.until(reaped)
            async with client.semaphore("said", 7):
                pass
            assert (await client.semaphore("set", 2).inspect()).limit == 3
            assert await client.locks() == []
            with pytest.raises(ConfigError, match="3 permits, not 7"):
                await client.semaphore("set", 7).acquire()


async def test_a_number_is_set_although_the_server_removes_the_unused_node_in_between(client, tools):
    await (await client.semaphore("x", 2).acquire()).release()
    backend, session = client._backend, tools.session_of(client)
    real, removed = backend._write_limit, []

    async def set_and_be_removed(path, limit):
        done = await real(path, limit)
        if done and not removed:
            await session.ask(protocol.delete(path))
            removed.append(path)
        return done

    backend._write_limit = set_and_be_removed
    await client.semaphore("x", 2).set_limit(3)
    assert removed
    assert (await client.semaphore("x", 2).inspect()).limit == 3
    assert "kept" in await tools.nodes(client, "x", "sem")


async def test_more_permits_wake_those_who_wait_and_fewer_revoke_nobody(client, rival, tools):
    semaphore = client.semaphore("x", 2)
    leases = [await semaphore.acquire() for _ in range(2)]
    waiters = [await tools.waiting(rival, rival.semaphore("x", 2), number + 1) for number in range(2)]
    await semaphore.set_limit(3)
    async with asyncio.timeout(tools.TIMEOUT):
        leases.append(await waiters[0])
    assert not waiters[1].done()
    await semaphore.set_limit(1)
    await asyncio.sleep(0.1)
    assert all(lease.held for lease in leases)
    info = await semaphore.inspect()
    assert (len(info.holders), len(info.waiters), info.limit) == (3, 1, 1)
    for lease in leases[:2]:
        await lease.release()
        await asyncio.sleep(0.05)
        assert not waiters[1].done(), "one is inside, and there is one permit"
    await leases[2].release()
    async with asyncio.timeout(tools.TIMEOUT):
        await (await waiters[1]).release()


# --- all kinds under faults


def lock_of(client, kind: str):
    if kind == "permits":
        return client.semaphore("x", 1)
    return getattr(client.rwlock("x"), kind)()


def against(client, kind: str):
    """What the above has to wait for."""
    return client.semaphore("x", 1) if kind == "permits" else client.rwlock("x").write()


FAMILY = {"permits": "sem", "read": "rw", "write": "rw"}


@pytest.mark.parametrize("kind", ["read", "write", "permits"])
@pytest.mark.parametrize("opcode", [CREATE2, LIST, GET, SYNC, DELETE, MULTI])
async def test_whatever_reply_is_lost_the_lock_is_had_and_given_back(cut, rival, proxy, tools, kind, opcode):
    """N5 for each kind: for holders, for waiters, and for those who leave."""
    proxy.down.drop_next(1, tools.replies(proxy).to(opcode), reset=True)
    tokens = []
    for _ in range(2):
        holder = await against(rival, kind).acquire(timeout=tools.PATIENCE)
        waiter = await tools.waiting(rival, lock_of(cut, kind))
        await holder.release()
        async with asyncio.timeout(tools.PATIENCE):
            lease = await waiter
        assert lease.held
        tokens += [holder.token, lease.token]
        await lease.release()
        await tools.empty(rival, "x", FAMILY[kind])
    assert tokens == sorted(tokens)


@pytest.mark.parametrize("kind", ["read", "write", "permits"])
async def test_watches_that_die_with_their_connection_are_set_again(cut, rival, proxy, tools, kind):
    holder = await against(rival, kind).acquire()
    waiter = await tools.waiting(rival, lock_of(cut, kind))
    await tools.cut(cut, proxy)
    proxy.refuse = False
    await tools.session_of(cut).ready()
    await asyncio.sleep(0.1)
    await holder.release()
    async with asyncio.timeout(tools.TIMEOUT):
        await (await waiter).release()


@pytest.mark.parametrize("kind", ["read", "write", "permits"])
async def test_a_holder_whose_session_ends_is_told_and_followed(server, cut, rival, proxy, tools, kind):
    lease = await lock_of(cut, kind).acquire()
    waiter = await tools.waiting(rival, against(rival, kind))
    await tools.cut(cut, proxy)
    await tools.expire(tools.session_of(cut), server.port)
    proxy.refuse = False
    async with asyncio.timeout(tools.TIMEOUT):
        assert await lease.wait_lost() == "session"
        following = await waiter
    assert following.token > lease.token
    await following.release()


@pytest.mark.parametrize("kind", ["read", "write", "permits"])
async def test_nothing_is_left_of_those_who_gave_up(client, rival, tools, kind):
    holder = await against(rival, kind).acquire()
    for _ in range(20):
        with pytest.raises(AcquireTimeout):
            await lock_of(client, kind).acquire(timeout=0.01)
        assert await lock_of(client, kind).try_acquire() is None
    await holder.release()
    await tools.empty(rival, "x", FAMILY[kind])
    assert tools.session_of(client).watchers == {}
    assert client._backend.session.listeners == set()


# --- requests to let go


async def test_a_request_is_heard_also_by_who_was_cut_off(cut, rival, proxy, tools):
    lease = await cut.lock("x").acquire()
    await tools.cut(cut, proxy)
    assert await rival.lock("x").request_release("maintenance")
    proxy.refuse = False
    async with asyncio.timeout(tools.PATIENCE):
        assert await lease.release_requested == "maintenance"
    assert lease.held
    info = await rival.lock("x").inspect()
    assert [holder.label for holder in info.holders] == ["cut"]
    await lease.release()


async def test_a_request_in_curators_words_is_heard(client, rival, tools):
    lease = await client.lock("x").acquire()
    [node] = await tools.nodes(rival, "x")
    await tools.session_of(rival).ask(protocol.put(f"{tools.path('x')}/{node}", REVOKE))
    async with asyncio.timeout(tools.PATIENCE):
        assert await lease.release_requested == ""
    await lease.release()


async def test_whoever_has_left_its_node_empty_is_asked_in_curators_words(client, tools):
    session, path = tools.session_of(client), tools.path("x")
    async with client.lock("x"):
        pass
    await session.ask(protocol.create(f"{path}/_c_0-lock-", b"", protocol.OPEN, sequential=True))
    assert await client.lock("x").request_release("please")
    [node] = await tools.nodes(client, "x")
    assert (await session.ask(protocol.get(f"{path}/{node}", watch=False))).data == REVOKE
    await session.ask(protocol.delete(f"{path}/{node}"))
    assert not await client.lock("x").request_release("please")


async def test_a_strange_reason_arrives_as_it_is(client, rival, tools):
    reason = 'two\nlines = \U0001f511 "quoted"'
    async with client.semaphore("x", 1) as lease:
        assert await rival._backend.request_release("x", Family.SEMAPHORE, reason)
        async with asyncio.timeout(tools.PATIENCE):
            assert await lease.release_requested == reason
