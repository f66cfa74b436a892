"""The version of the data format: clients of two versions never use one namespace, whichever opens first."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from aiozk import exc
from aiozk import protocol as aiozk_protocol

import aiolock
from aiolock import BackendRefused, Client, UnsafeBackend
from aiolock.backends.zookeeper import protocol
from aiolock.backends.zookeeper.backend import ZooKeeperBackend
from aiolock.backends.zookeeper.format import FORMAT


def of_version(client: Client, version: int) -> Client:
    client._backend.format = version
    return client


@pytest.fixture
async def owner(server, tools):
    """A session of another program."""
    async with tools.session(f"zookeeper://me:secret@127.0.0.1:{server.port}") as session:
        yield session


async def mark(owner, tools):
    return await owner.ask(protocol.get(f"/{tools.namespace}/format", watch=False))


async def test_the_first_client_writes_the_version_and_nobody_lists_it(client, owner, tools):
    reply = await mark(owner, tools)
    assert bytes(reply.data) == b"aiolock format=%d" % FORMAT
    assert reply.stat.ephemeral_owner == 0
    async with client.lock("x"):
        assert [info.name for info in await client.locks()] == ["x"]
    assert await client.locks() == []
    async with tools.connect(owner.conn.port) as second:
        assert await second.lock("x").locked() is False
    assert (await mark(owner, tools)).stat.version == 0


@pytest.mark.parametrize("versions", [(FORMAT, FORMAT + 1), (FORMAT + 1, FORMAT), (FORMAT, FORMAT - 1)])
async def test_whichever_version_is_first_the_other_is_refused(server, owner, tools, versions):
    first, second = (of_version(tools.connect(server.port), version) for version in versions)
    async with first, first.lock("x") as lease:
        nodes = await tools.nodes(first, "x")
        with pytest.raises(UnsafeBackend) as refused:
            await second.open()
        await second.aclose()
        # It names both versions, the place, and what to do.
        for word in (f"format {versions[0]}", f"format {versions[1]}", tools.namespace, "delete"):
            assert word in str(refused.value)
        assert not refused.value.retryable
        lease.check()
        assert await tools.nodes(first, "x") == nodes
    # Also when nothing is held any more: others may be about to ask.
    with pytest.raises(UnsafeBackend):
        await of_version(tools.connect(server.port), versions[1]).open()
    assert bytes((await mark(owner, tools)).data) == b"aiolock format=%d" % versions[0]


@pytest.mark.parametrize("round_", range(5))
async def test_of_two_versions_that_open_together_one_wins(server, owner, tools, round_):
    clients = [of_version(tools.connect(server.port), FORMAT + number % 2) for number in range(6)]
    answers = await asyncio.gather(*(client.open() for client in clients), return_exceptions=True)
    try:
        won = {
            client._backend.format
            for client, answer in zip(clients, answers, strict=True)
            if answer is client
        }
        assert len(won) == 1
        assert sum(isinstance(answer, Client) for answer in answers) == 3
        assert sum(isinstance(answer, UnsafeBackend) for answer in answers) == 3
        assert bytes((await mark(owner, tools)).data) == b"aiolock format=%d" % won.pop()
    finally:
        await asyncio.gather(*(client.aclose() for client in clients))


@pytest.mark.parametrize("data", [b"", b"2", b"aiolock format=", b"aiolock format=\xc2\xb2", b"\xff" * 9])
async def test_what_is_no_version_is_refused(server, owner, tools, data):
    await owner.ask(protocol.container(f"/{tools.namespace}", protocol.OPEN))
    await owner.ask(protocol.persistent(f"/{tools.namespace}/format", data, protocol.OPEN))
    with pytest.raises(UnsafeBackend, match="unknown format"):
        await tools.connect(server.port).open()


async def test_a_new_session_looks_again_before_it_asks_for_anything(server, proxy, owner, tools):
    async with tools.connect(proxy.port) as cut:
        lease = await cut.lock("x").acquire()
        waiter = asyncio.create_task(cut.lock("x", fair=True).acquire())
        await tools.until(lambda: cut.stats()["waiting"] == 1)
        await tools.cut(cut, proxy)
        await tools.expire(tools.session_of(cut), server.port)
        # Everything has stopped, as an administrator thinks, and programs of another version have begun.
        path = f"/{tools.namespace}/format"
        await owner.ask(protocol.put(path, b"aiolock format=%d" % (FORMAT + 1)))
        proxy.refuse = False
        assert await lease.wait_lost()
        with pytest.raises(UnsafeBackend):
            await waiter
        for call in (cut.lock("x").try_acquire, cut.lock("x").inspect, cut.locks):
            with pytest.raises(UnsafeBackend, match=f"format {FORMAT + 1}"):
                await call()
        with contextlib.suppress(exc.NoNode):
            listed = await owner.ask(protocol.listing(f"/{tools.namespace}/lock/x", watch=False))
            assert listed.children == []


async def test_a_lost_reply_to_the_create_of_the_version_is_looked_up(server, proxy, tools):
    create = 15
    lost = proxy.down.drop_next(1, tools.replies(proxy).to(create), reset=True)
    async with tools.connect(proxy.port) as cut:
        assert lost.is_set()
        async with cut.lock("x"):
            pass


async def test_a_lock_costs_no_round_trip_more(client, tools):
    async with client.lock("x"):
        pass
    session = tools.session_of(client)
    asked = []
    send, session.ask_all = (
        session.ask_all,
        lambda *requests, **more: asked.append(requests) or send(*requests, **more),
    )
    async with client.lock("x"):
        pass
    assert [len(requests) for requests in asked] == [2]


# --- beside other programs, and with few rights


async def test_a_namespace_that_another_program_has_begun_is_used(server, owner, tools):
    """Curator makes its path before the first client comes; so did clients before there were versions."""
    steps = f"/{tools.namespace}", f"/{tools.namespace}/lock", tools.path("x")
    for step in steps:
        await owner.ask(protocol.persistent(step, b"", protocol.OPEN))
    curator = protocol.create(f"{tools.path('x')}/_c_0b2c-lock-", b"10.0.0.1", protocol.OPEN, sequential=True)
    name, _ = await owner.ask(curator)
    async with tools.connect(server.port) as client:
        assert await client.lock("x").try_acquire() is None
        await owner.ask(protocol.delete(name))
        async with client.lock("x", timeout=5):
            assert bytes((await mark(owner, tools)).data) == b"aiolock format=%d" % FORMAT


async def test_without_the_right_to_write_it_opening_says_so(server, owner, tools):
    await owner.ask(protocol.container(f"/{tools.namespace}", protocol.CREATOR))
    with pytest.raises(BackendRefused, match="right"):
        await tools.connect(server.port).open()
    # An administrator may write it.
    await owner.ask(
        protocol.persistent(
            f"/{tools.namespace}/format",
            b"aiolock format=%d" % FORMAT,
            protocol.acl(aiozk_protocol.WORLD_READABLE),
        )
    )
    async with tools.connect(server.port) as client:
        with pytest.raises(BackendRefused, match="right"):
            await client.lock("x").acquire()


async def test_users_who_do_not_share_locks_share_a_namespace(server, owner, tools):
    for step in (f"/{tools.namespace}", f"/{tools.namespace}/lock"):
        await owner.ask(protocol.container(step, protocol.OPEN))
    for user in ("one", "two"):
        url = f"zookeeper://{user}:secret@127.0.0.1:{server.port}?acl=creator"
        async with aiolock.connect(url, namespace=tools.namespace) as client, client.lock(user):
            pass


@pytest.mark.parametrize("odd", [".", "..", "zookeeper", "a:b"])
async def test_odd_namespaces_below_a_chroot_that_is_not_there(server, tools, odd):
    url = f"zookeeper://127.0.0.1:{server.port}/{tools.namespace}/deep"
    for _ in range(2):
        async with aiolock.connect(url, namespace=odd) as client, client.lock("x"):
            pass
    with pytest.raises(UnsafeBackend):
        await of_version(aiolock.connect(url, namespace=odd), FORMAT + 1).open()


def test_the_version_is_that_of_the_class():
    assert ZooKeeperBackend.format == FORMAT == 4
