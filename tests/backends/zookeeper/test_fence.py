"""Writes to data in the ensemble that only the present holder can make."""

from __future__ import annotations

import asyncio

import pytest
from aiozk import exc
from aiozk import protocol as aiozk_protocol
from kazoo.client import KazooClient

import aiolock
from aiolock import BackendRefused, BackendUnavailable, ConfigError, LockLost, UnsupportedKind
from aiolock.backends.zookeeper import protocol
from aiolock.zookeeper import fenced_set, node

MULTI = 14


@pytest.fixture
async def data(client, tools):
    """The path of a node that locks protect."""
    path = f"/{tools.namespace}-data"
    await tools.session_of(client).ask(protocol.persistent(path, b"0", protocol.OPEN))
    return path


async def value(client, tools, path: str) -> bytes:
    return (await tools.session_of(client).ask(protocol.get(path, watch=False))).data


async def test_a_holder_writes_and_may_name_the_version(client, tools, data):
    async with client.lock("x") as lease:
        assert await fenced_set(lease, data, b"1") == 1
        assert await fenced_set(lease, data, b"2", version=1) == 2
        assert await fenced_set(lease, data, b"3", version=1) is None
        assert await value(client, tools, data) == b"2"
    with pytest.raises(RuntimeError, match="released"):
        await fenced_set(lease, data, b"4")
    assert await value(client, tools, data) == b"2"


@pytest.mark.parametrize("kind", ["read", "write", "permits", "downgraded", "reentrant"])
async def test_holders_of_every_kind_write(client, tools, data, kind):
    lock = {
        "read": client.rwlock("x").read(),
        "permits": client.semaphore("x", 2),
        "reentrant": client.reentrant_lock("x"),
    }.get(kind, client.rwlock("x").write())
    lease = await lock.acquire()
    if kind == "downgraded":
        await lease.downgrade()
    assert await fenced_set(lease, data, kind.encode()) == 1
    await lease.release()


async def test_a_holder_that_does_not_know_yet_writes_nothing(client, rival, tools, data, proxy):
    """The race that tokens are for, staged: the lease looks held, and the ensemble knows better."""
    async with tools.connect(proxy.port, query="session_timeout=20", label="cut") as cut:
        lease = await cut.lock("x").acquire()
        proxy.down.blackhole()
        assert await rival.lock("x").force_release()
        async with rival.lock("x") as following:
            assert await fenced_set(following, data, b"following") == 1
        task = asyncio.create_task(fenced_set(lease, data, b"stale"))
        await asyncio.sleep(0.05)
        proxy.down.heal()
        with pytest.raises(LockLost):
            await task
        assert await value(client, tools, data) == b"following"


async def test_a_session_that_has_ended_writes_nothing(server, tools, data, proxy, client):
    async with tools.connect(proxy.port, query="session_timeout=20", label="cut") as cut:
        lease = await cut.lock("x").acquire()
        await tools.cut(cut, proxy)
        await tools.expire(tools.session_of(cut), server.port)
        task = asyncio.create_task(fenced_set(lease, data, b"stale"))
        await asyncio.sleep(0)
        proxy.refuse = False
        with pytest.raises(LockLost):
            await task
        assert await value(client, tools, data) == b"0"


async def test_a_lost_reply_leaves_open_whether_it_was_written_and_says_so(client, tools, data, proxy):
    async with tools.connect(proxy.port, query="session_timeout=20", label="cut") as cut:
        lease = await cut.lock("x").acquire()
        proxy.down.drop_next(1, tools.replies(proxy).to(MULTI), reset=True)
        with pytest.raises(BackendUnavailable):
            await fenced_set(lease, data, b"1")
        assert await value(client, tools, data) == b"1"
        assert lease.held
        await lease.release()


async def test_what_cannot_be_written_is_refused_by_name(client, tools, data):
    session = tools.session_of(client)
    async with client.lock("x") as lease:
        with pytest.raises(BackendRefused, match="there is no node '/none'"):
            await fenced_set(lease, "/none", b"1")
        await session.ask(
            protocol.persistent(f"{data}/mine", b"", protocol.acl(aiozk_protocol.WORLD_READABLE))
        )
        with pytest.raises(BackendRefused, match="right"):
            await fenced_set(lease, f"{data}/mine", b"1")
        for path in ("relative", "/ends/", 7, "/\ud800", "/a//b", "/a/../b", "/a\0b"):
            with pytest.raises(ConfigError, match="path"):
                await fenced_set(lease, path, b"1")
        for wrong in ("text", b"x" * 1_000_001):
            with pytest.raises(ConfigError, match="data"):
                await fenced_set(lease, data, wrong)
        for wrong in (-1, True, "1"):
            with pytest.raises(ConfigError, match="version"):
                await fenced_set(lease, data, b"1", version=wrong)
    with pytest.raises(ConfigError, match="lease"):
        await fenced_set("lease", data, b"1")


async def test_other_servers_have_no_such_node():
    async with aiolock.connect("memory://fence") as client, client.lock("x") as lease:
        with pytest.raises(UnsupportedKind, match="zookeeper"):
            await fenced_set(lease, "/x", b"1")
        with pytest.raises(UnsupportedKind, match="zookeeper"):
            node(lease)


async def test_below_a_chroot_paths_are_the_applications(server, client, tools, data):
    session = tools.session_of(client)
    await session.ask(protocol.persistent(f"{data}/app", b"", protocol.OPEN))
    url = f"zookeeper://127.0.0.1:{server.port}{data}?session_timeout=5"
    async with aiolock.connect(url, namespace="ns") as inner, inner.lock("x") as lease:
        assert await fenced_set(lease, "/app", b"1") == 1
        assert node(lease).startswith(f"{data}/ns/lock/x/_c_")


async def test_a_transaction_of_another_client_can_check_for_the_node(server, client, rival, data):
    def write(path: str, text: bytes) -> bool:
        kazoo = KazooClient(f"127.0.0.1:{server.port}")
        kazoo.start()
        try:
            transaction = kazoo.transaction()
            transaction.check(path, -1)
            transaction.set_data(data, text)
            return not any(isinstance(result, Exception) for result in transaction.commit())
        finally:
            kazoo.stop()
            kazoo.close()

    lease = await client.lock("x").acquire()
    path = node(lease)
    assert await asyncio.to_thread(write, path, b"1")
    await rival.lock("x").force_release()
    assert not await asyncio.to_thread(write, path, b"2")
    await lease.wait_lost()
    with pytest.raises(LockLost):
        node(lease)
    with pytest.raises(exc.NoNode):
        await rival._backend.session.ask(protocol.get(path, watch=False))
