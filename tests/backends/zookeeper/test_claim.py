"""Locks on one server while everything goes wrong that can: by the numbers Z1 to Z14, and what else a queue must survive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time

import pytest
from aiozk import exc
from aiozk import protocol as aiozk_protocol

import aiolock
from aiolock import AcquireTimeout, BackendRefused, BackendUnavailable, LockLost
from aiolock.backends.zookeeper import protocol
from aiolock.backends.zookeeper.claim import QueueClaim
from aiolock.core.backend import Release, Request
from aiolock.core.inbox import WakeReason
from aiolock.types import MUTEX
from tests.faults.proxy import Proxy, length_frames
from tests.faults.staging import passes
from tests.servers import ZooKeeper

CREATE2 = 15
DELETE = 2
LIST = 8
GET = 4
SYNC = 9


@pytest.fixture
async def cut(proxy, tools):
    """A client behind the proxy."""
    async with tools.connect(proxy.port, label="cut") as opened:
        yield opened


async def waiting(tools, client, lock, count: int = 1) -> asyncio.Task:
    """A task that waits for `lock`, once so many nodes are in the queue."""
    task = asyncio.create_task(lock.acquire())
    await tools.until(lambda: in_queue(tools, client, lock.name, count + 1))
    return task


async def in_queue(tools, client, name: str, count: int) -> bool:
    return len(await tools.nodes(client, name)) >= count


async def in_queue_exactly(tools, client, name: str, count: int) -> bool:
    return len(await tools.nodes(client, name)) == count


async def make_parent(client, name: str) -> None:
    """So that the next create there is not answered with NoNode."""
    async with client.lock(name):
        pass


async def nothing_remains(tools, client, name: str) -> None:
    async def empty() -> bool:
        return await tools.nodes(client, name) == []

    await tools.until(empty, "an empty queue")


async def no_connection(session, proxy, tools) -> None:
    """The client knows that it has none, and gets none for now."""
    proxy.refuse = True
    proxy.reset_all()
    await tools.until(lambda: not session.connected)


def four_letters(server, word: bytes) -> str:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(word)
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
    return answer.decode()


# --- Z1: the session ends


async def test_z1_a_holder_hears_of_the_end_of_its_session_at_once(server, proxy, rival, tools):
    loop = asyncio.get_running_loop()
    client = await tools.connect(proxy.port, query="session_timeout=60").open()
    with pytest.raises(LockLost) as caught:
        async with client.lock("x") as lease:
            following = await waiting(tools, rival, rival.lock("x"))
            await no_connection(tools.session_of(client), proxy, tools)
            await tools.expire(tools.session_of(client), server.port)
            begin = loop.time()
            proxy.refuse = False
            await asyncio.Event().wait()
    assert caught.value.reason == "session"
    assert loop.time() - begin < 15, "a quarter of the session's timeout"
    next_lease = await following
    assert next_lease.token > lease.token
    await next_lease.release()
    # The client goes on in a new session, without being opened again.
    async with client.lock("x", timeout=tools.PATIENCE) as again:
        assert again.token > next_lease.token
    await client.aclose()


async def test_z1_a_waiter_begins_anew_in_its_next_session(server, cut, rival, proxy, tools):
    holder = await rival.lock("x").acquire()
    waiter = await waiting(tools, rival, cut.lock("x"))
    [_, before] = await tools.nodes(rival, "x")
    await no_connection(tools.session_of(cut), proxy, tools)
    await tools.expire(tools.session_of(cut), server.port)
    proxy.refuse = False

    async def replaced() -> bool:
        nodes = await tools.nodes(rival, "x")
        return len(nodes) == 2 and before not in nodes

    await tools.until(replaced)
    assert not waiter.done()
    await holder.release()
    async with asyncio.timeout(tools.PATIENCE):
        lease = await waiter
    await lease.release()
    await nothing_remains(tools, rival, "x")


# --- Z2, Z3: a partition


async def test_z2_whoever_is_cut_off_knows_it_before_the_next_one_has_the_lock(cut, rival, proxy, tools):
    lease = await cut.lock("x").acquire()
    following = await waiting(tools, rival, rival.lock("x"))
    told = asyncio.create_task(lease.wait_lost())
    proxy.blackhole()
    async with asyncio.timeout(tools.PATIENCE):
        next_lease = await following
    # By its own clock; a busy machine may run what is due at the same time a step later.
    assert not lease.held
    await passes(10)
    assert told.done()
    assert told.result() in ("expired", "session")
    assert next_lease.token > lease.token
    proxy.heal(release=False)
    await next_lease.release()
    async with cut.lock("x", timeout=tools.PATIENCE):
        pass


async def test_z3_a_short_break_costs_nobody_a_lock(cut, rival, proxy, tools):
    async with cut.lock("x") as lease:
        for _ in range(3):
            proxy.blackhole()
            await asyncio.sleep(0.3)
            proxy.heal()
            proxy.reset_all()
            await asyncio.sleep(0.3)
            lease.check()
            assert await rival.lock("x").try_acquire() is None
        # It goes on beyond what was certain at the beginning: the break is forgotten.
        until = time.monotonic() + tools.TIMEOUT
        while time.monotonic() < until:
            lease.check()
            await asyncio.sleep(0.1)
    await nothing_remains(tools, rival, "x")


async def test_z3_a_session_that_comes_back_after_the_deadline_does_not_bring_the_lock_back(
    cut, rival, proxy, tools
):
    """The server is late to end it, and we are not: lost is lost, and the node is deleted."""
    lease = await cut.lock("x").acquire()
    session = tools.session_of(cut)
    session._heartbeats.deadline -= 10  # as if the clock had run on
    session._heartbeats.timeout -= 10
    [term] = cut._runtime.scheduler._validities()
    term.until -= 10
    async with asyncio.timeout(tools.PATIENCE):
        assert await lease.wait_lost() == "expired"
    session._heartbeats.timeout += 10
    await nothing_remains(tools, rival, "x")
    async with cut.lock("x", timeout=tools.PATIENCE):
        assert session.certain


# --- Z6: a reply is lost


async def test_z6_a_create_whose_reply_is_lost_is_found_and_adopted(cut, rival, proxy, tools):
    await make_parent(rival, "x")
    lost = proxy.down.drop_next(1, tools.replies(proxy).to(CREATE2), reset=True)
    async with cut.lock("x") as lease:
        assert lost.is_set()
        [node] = await tools.nodes(rival, "x")
        stat = (await tools.session_of(rival).ask(protocol.exists(f"{tools.path('x')}/{node}"))).stat
        assert lease.token == stat.created_zxid * 1024
    await nothing_remains(tools, rival, "x")


async def test_z6_a_waiter_whose_create_was_lost_keeps_its_place(cut, rival, proxy, tools):
    holder = await rival.lock("x").acquire()
    lost = proxy.down.drop_next(1, tools.replies(proxy).to(CREATE2), reset=True)
    waiter = await waiting(tools, rival, cut.lock("x"))
    await lost.wait()
    await asyncio.sleep(0.1)
    assert len(await tools.nodes(rival, "x")) == 2
    await holder.release()
    async with asyncio.timeout(tools.PATIENCE):
        await (await waiter).release()
    await nothing_remains(tools, rival, "x")


async def test_z6_a_create_that_never_arrived_is_made_again(cut, rival, proxy, tools):
    await make_parent(rival, "x")
    lost = proxy.up.drop_next(1, lambda frame: frame[8:12] == struct.pack("!i", CREATE2), reset=True)
    async with cut.lock("x"):
        assert lost.is_set()
        assert len(await tools.nodes(rival, "x")) == 1
    await nothing_remains(tools, rival, "x")


async def test_z6_a_lost_create_of_a_session_that_ended_is_not_adopted(server, cut, rival, proxy, tools):
    await make_parent(rival, "x")
    proxy.refuse = True
    proxy.down.drop_next(1, tools.replies(proxy).to(CREATE2), reset=True)
    acquiring = asyncio.create_task(cut.lock("x").acquire())
    await tools.until(lambda: in_queue(tools, rival, "x", 1))
    [orphan] = await tools.nodes(rival, "x")
    await tools.expire(tools.session_of(cut), server.port)
    proxy.refuse = False
    async with asyncio.timeout(tools.PATIENCE):
        lease = await acquiring
    assert orphan not in await tools.nodes(rival, "x")
    await lease.release()
    await nothing_remains(tools, rival, "x")


@pytest.mark.parametrize("fate", ["reply lost", "never arrived"])
async def test_z6_a_release_in_doubt_is_finished_in_the_background(cut, rival, proxy, tools, fate):
    lease = await cut.lock("x").acquire()
    if fate == "reply lost":
        proxy.down.drop_next(1, tools.replies(proxy).to(DELETE), reset=True)
    else:
        proxy.up.drop_next(1, lambda frame: frame[8:12] == struct.pack("!i", DELETE), reset=True)
    await lease.release()
    async with rival.lock("x", timeout=tools.PATIENCE):
        pass
    await nothing_remains(tools, rival, "x")


@pytest.mark.parametrize("how", ["release", "begin_release"])
async def test_a_release_that_was_cancelled_counts_as_a_copy(cut, rival, proxy, tools, how):
    """What the next copy does not find, the first one may have deleted: that is no loss."""
    claim = cut._backend.claim(Request("x", MUTEX, 30, "cut"))
    assert await claim.acquire(wait=True) is not None
    proxy.down.blackhole()
    released = asyncio.create_task(claim.release())
    await tools.until(lambda: in_queue_exactly(tools, rival, "x", 0))
    released.cancel()
    await asyncio.wait([released])
    proxy.down.heal(release=False)
    session = tools.session_of(cut)
    conn = session.conn
    proxy.reset_all()
    await tools.until(lambda: session.conn is not conn and session.connected)
    if how == "begin_release":
        assert claim.begin_release() is Release.UNKNOWN
    assert await claim.release() is Release.UNKNOWN


async def test_a_release_without_a_connection_is_quick_and_is_done_later(cut, rival, proxy, tools):
    lease = await cut.lock("x").acquire()
    await no_connection(tools.session_of(cut), proxy, tools)
    # Less than a request may take.
    async with asyncio.timeout(9):
        await lease.release()
    assert len(await tools.nodes(rival, "x")) == 1
    proxy.refuse = False
    await nothing_remains(tools, rival, "x")
    assert tools.session_of(cut).connected


@pytest.mark.parametrize("kind", [CREATE2, LIST, GET, SYNC, DELETE])
@pytest.mark.parametrize("number", [1, 2, 3])
async def test_whatever_reply_is_lost_the_lock_is_had_and_given_back(cut, rival, proxy, tools, kind, number):
    """N5: the answer to the n-th request of each kind never comes, and the connection breaks."""
    replies = tools.replies(proxy)
    seen = 0

    def this_one(frame: bytes) -> bool:
        nonlocal seen
        seen += replies.to(kind)(frame)
        return replies.to(kind)(frame) and seen == number

    proxy.down.drop_next(1, this_one, reset=True)
    tokens = []
    for name in ("x", "x", "y"):
        holder = await rival.lock(name).acquire(timeout=tools.PATIENCE)
        waiter = await waiting(tools, rival, cut.lock(name))
        await holder.release()
        async with asyncio.timeout(tools.PATIENCE):
            lease = await waiter
        assert lease.held
        assert lease.token > holder.token
        tokens.append(lease.token)
        await lease.release()
        await nothing_remains(tools, rival, name)
    assert tokens == sorted(tokens)


# --- Z7, Z8: watches


async def test_z7_whoever_goes_between_list_and_watch_is_not_waited_for(cut, rival, proxy, tools):
    holder = await rival.lock("x").acquire()
    released = []

    async def step_in(direction: str, frame: bytes) -> None:
        if direction == "up" and frame[8:12] == struct.pack("!i", GET) and not released:
            released.append(True)
            await holder.release()

    proxy.on_frame = step_in
    async with asyncio.timeout(tools.TIMEOUT):
        lease = await cut.lock("x").acquire()
    assert released
    await lease.release()


@pytest.mark.parametrize("release", ["during the break", "after the break"])
async def test_z8_a_watch_that_dies_with_its_connection_is_set_again(cut, rival, proxy, tools, release):
    holder = await rival.lock("x").acquire()
    waiter = await waiting(tools, rival, cut.lock("x"))
    await no_connection(tools.session_of(cut), proxy, tools)
    if release == "during the break":
        await holder.release()
    proxy.refuse = False
    await tools.session_of(cut).ready()
    if release == "after the break":
        await asyncio.sleep(0.1)
        await holder.release()
    async with asyncio.timeout(tools.TIMEOUT):
        lease = await waiter
    await lease.release()


async def test_a_change_of_data_before_us_does_not_use_up_the_watch(client, rival, tools):
    """Curator asks a holder to let go by setting its data."""
    holder = await rival.lock("x").acquire()
    waiter = await waiting(tools, rival, client.lock("x"))
    [node, _] = await tools.nodes(rival, "x")
    for _ in range(3):
        await tools.session_of(rival).ask(
            aiozk_protocol.SetDataRequest(path=f"{tools.path('x')}/{node}", data=b"__REVOKE__", version=-1)
        )
        await asyncio.sleep(0.05)
    assert not waiter.done()
    assert holder.held
    await holder.release()
    async with asyncio.timeout(tools.TIMEOUT):
        await (await waiter).release()


async def test_a_release_wakes_one_waiter(server, client, tools, monkeypatch):
    """A client each, because watches are counted per connection."""
    holder = await client.lock("x").acquire()
    others = [await tools.connect(server.port).open() for _ in range(5)]
    tasks = [await waiting(tools, client, other.lock("x"), number + 1) for number, other in enumerate(others)]
    for other in others:
        await tools.watching(other, "x")
    woken: list[object] = []
    wake = QueueClaim._wake
    monkeypatch.setattr(
        QueueClaim, "_wake", lambda claim, *why: (woken.append(claim._session), wake(claim, *why))
    )
    await holder.release()
    async with asyncio.timeout(tools.PATIENCE):
        await tasks[0]
    # Whatever the release has led to there has been said by then.
    for other in others:
        await tools.session_of(other).ask(protocol.sync())
    assert woken == [tools.session_of(others[0])]
    for other, task in zip(others, tasks, strict=True):
        await (await task).release()
        await other.aclose()


# --- Z9: administrators


async def test_z9_a_holder_whose_node_is_deleted_is_told(client, rival, tools):
    lease = await client.lock("x").acquire()
    for _ in range(2):
        # Also after somebody has come and gone, and the first watch has fired.
        assert await rival.lock("x").try_acquire() is None
        await asyncio.sleep(0.05)
    [node] = await tools.nodes(rival, "x")
    await tools.session_of(rival).ask(protocol.delete(f"{tools.path('x')}/{node}"))
    async with asyncio.timeout(tools.TIMEOUT):
        assert await lease.wait_lost() == "force-released"


async def test_z9_a_holder_whose_node_is_deleted_while_it_is_cut_off_is_told_on_its_return(
    cut, rival, proxy, tools
):
    lease = await cut.lock("x").acquire()
    await no_connection(tools.session_of(cut), proxy, tools)
    assert await rival.lock("x").force_release()
    proxy.refuse = False
    async with asyncio.timeout(tools.TIMEOUT):
        assert await lease.wait_lost() == "force-released"


async def test_z9_a_waiter_whose_node_is_deleted_queues_again(client, rival, tools):
    holder = await rival.lock("x").acquire()
    waiter = await waiting(tools, rival, client.lock("x"))
    [_, node] = await tools.nodes(rival, "x")
    await tools.session_of(rival).ask(protocol.delete(f"{tools.path('x')}/{node}"))
    await holder.release()
    async with asyncio.timeout(tools.TIMEOUT):
        lease = await waiter
    assert await tools.nodes(rival, "x") != [node]
    await lease.release()


# --- Z10: parents


async def test_z10_tokens_rise_although_the_numbers_begin_again(client, rival, tools):
    tokens, nodes = [], []
    for _ in range(3):
        async with client.lock("x") as lease:
            tokens.append(lease.token)
            nodes += await tools.nodes(rival, "x")
        await nothing_remains(tools, rival, "x")
        await tools.session_of(rival).ask(protocol.delete(tools.path("x")))
    assert {node[-10:] for node in nodes} == {"0000000000"}
    assert tokens == sorted(set(tokens))


async def test_z10_a_parent_that_vanishes_before_the_create_is_made_again(cut, rival, proxy, tools):
    session = tools.session_of(rival)
    deleted = []

    async def step_in(direction: str, frame: bytes) -> None:
        if direction == "up" and frame[8:12] == struct.pack("!i", CREATE2) and len(deleted) < 4:
            with contextlib.suppress(exc.NoNode):
                await session.ask(protocol.delete(tools.path("x")))
            deleted.append(True)

    proxy.on_frame = step_in
    async with cut.lock("x", timeout=tools.PATIENCE):
        assert len(deleted) == 4


async def test_parents_are_containers_that_the_server_removes(tools, monkeypatch):
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-Dznode.container.checkIntervalMs=200")
    with ZooKeeper() as server:
        async with tools.connect(server.port) as client:

            async def reaped() -> bool:
                path = f"/{tools.namespace}"
                return (await tools.session_of(client).ask(protocol.listing(path, watch=False))).children == [
                    "format"
                ]

            for _ in range(3):
                async with client.lock("x"):
                    pass
                await tools.until(reaped)


# --- Z12: rights


async def test_z12_without_rights_every_call_says_so_and_nothing_loops(server, client, tools):
    url = f"zookeeper://me:secret@127.0.0.1:{server.port}"
    async with tools.session(url) as owner:
        await owner.ask(protocol.container(f"/{tools.namespace}/lock", protocol.CREATOR))
        lock = client.lock("x", timeout=5)
        for call in (lock.acquire, lock.try_acquire):
            with pytest.raises(BackendRefused, match="right"):
                await call()
        await asyncio.sleep(0.05)
        xid = tools.session_of(client).xid
        await asyncio.sleep(0.3)
        assert tools.session_of(client).xid - xid <= 2


async def test_z12_creators_share_a_lock_and_strangers_do_not_see_it(server, client, tools):
    address = f"zookeeper://me:secret@127.0.0.1:{server.port}?session_timeout=3&acl=creator"
    async with (
        aiolock.connect(address, namespace=tools.namespace) as first,
        aiolock.connect(address, namespace=tools.namespace) as second,
    ):
        async with first.lock("x"):
            assert await second.lock("x").try_acquire() is None
        async with second.lock("x"):
            with pytest.raises(BackendRefused, match="right"):
                await client.lock("x").inspect()


# --- Z13, Z14


async def test_z13_hundreds_of_waiters_are_served_in_order(server, tools):
    """Each with a node of its own; a handful of sessions would make no difference."""
    many = 400
    async with tools.connect(server.port, query="session_timeout=40", command_timeout=30) as client:
        holder = await client.lock("x", fair=True).acquire()
        order: list[int] = []

        async def turn(number: int) -> None:
            async with client.lock("x", fair=True):
                order.append(number)

        turns: list[asyncio.Task[None]] = []
        try:
            while len(turns) < many:
                # Not all at once: each newcomer reads the whole list, and a small server drowns in its answers.
                turns += [asyncio.create_task(turn(len(turns) + number)) for number in range(50)]
                count = len(turns) + 1
                await tools.until(lambda count=count: in_queue(tools, client, "x", count))
            await holder.release()
            # Generous: it takes a second or two on a machine that has nothing else to do.
            async with asyncio.timeout(150):
                await asyncio.gather(*turns)
        finally:
            for task in turns:
                task.cancel()
            await asyncio.gather(*turns, return_exceptions=True)
        assert order == list(range(many))
        assert tools.session_of(client).watchers == {}
        assert client._backend.session.listeners == set()


async def test_z14_the_negotiated_timeout_is_the_ttl(server, tools):
    for asked, granted in ((0.2, 1.0), (7.0, 7.0), (1000.0, 60.0)):
        client = tools.connect(server.port, query=f"session_timeout={asked}")
        async with client, client.lock("x", ttl=11) as lease:
            assert lease.ttl == granted
            assert 0 < lease.remaining() < granted
    client = tools.connect(server.port, query="heartbeat=sync", ttl=8)
    async with client, client.lock("x") as lease:
        assert lease.ttl == 8


# --- others at the same path


@pytest.mark.parametrize("name", ["lock-0b2c6f3a-0000000000", "_c_0b2c-__WRIT__0000000000"])
async def test_a_stranger_that_would_not_wait_for_us_is_refused(client, tools, name):
    session = tools.session_of(client)
    async with client.lock("x"):
        pass
    await session.ask(protocol.create(f"{tools.path('x')}/{name}", b"", protocol.OPEN, sequential=False))
    for call in (client.lock("x").acquire, client.lock("x").try_acquire, client.lock("x").inspect):
        with pytest.raises(BackendRefused, match="another kind of lock"):
            await call()
    await session.ask(protocol.delete(f"{tools.path('x')}/{name}"))
    await nothing_remains(tools, client, "x")
    async with client.lock("x"):
        pass


@pytest.mark.parametrize("digit", ["\u00b2", "\u0663"])
async def test_a_child_whose_name_ends_in_other_digits_is_no_contender(client, tools, digit):
    session = tools.session_of(client)
    async with client.lock("x"):
        pass
    child = f"{tools.path('x')}/_c_zz-lock-{digit * 10}"
    await session.ask(protocol.create(child, b"token=\xb2", protocol.OPEN, sequential=False))
    # Neither is a child of the folder whose name does not come from a lock's name.
    await session.ask(protocol.persistent(f"{tools.path('x')[:-1]}%ff", b"", protocol.OPEN))
    await session.ask(
        protocol.persistent(f"{tools.path('x')[:-1]}%ff/{child[-16:-10]}0000000001", b"", protocol.OPEN)
    )
    async with client.lock("x", timeout=5) as lease:
        assert await client.lock("x").try_acquire() is None
        info = await client.lock("x").inspect()
        assert [holder.token for holder in info.holders] == [lease.token]
        assert [info.name for info in await client.locks()] == ["x"]
    assert await client.locks() == []


async def test_a_note_that_somebody_left_there_harms_nobody(client, tools):
    async with client.lock("x"):
        pass
    note = protocol.create(f"{tools.path('x')}/do not touch", b"", protocol.OPEN, sequential=False)
    await tools.session_of(client).ask(note)
    async with client.lock("x", timeout=5) as lease:
        info = await client.lock("x").inspect()
        assert [holder.token for holder in info.holders] == [lease.token]
        assert info.waiters == ()


# --- servers that are away


async def test_a_first_attempt_without_a_server_ends_in_time_and_says_so(proxy, tools):
    async with tools.connect(proxy.port, command_timeout=2) as client:
        await no_connection(tools.session_of(client), proxy, tools)
        for call in (client.lock("x").acquire, client.lock("x").try_acquire, client.lock("x").inspect):
            with pytest.raises(BackendUnavailable):
                await call()
        with pytest.raises(BackendUnavailable):
            await client.lock("x", timeout=0.1).acquire()
        proxy.refuse = False
        await tools.session_of(client).ready()
        async with client.lock("x"):
            pass


async def test_opening_without_a_server_ends_in_time_and_says_which(tools):
    async with Proxy("127.0.0.1", 1, framing=length_frames) as nobody:
        client = tools.connect(nobody.port, command_timeout=0.5)
        with pytest.raises(BackendUnavailable, match=str(nobody.port)):
            await client.open()


async def test_a_waiter_survives_an_outage_longer_than_its_session(cut, rival, proxy, tools):
    holder = await rival.lock("x").acquire()
    waiter = await waiting(tools, rival, cut.lock("x"))
    await tools.watching(cut, "x")
    await no_connection(tools.session_of(cut), proxy, tools)

    async def expired() -> bool:
        return len(await tools.nodes(rival, "x")) == 1

    await tools.until(expired)
    proxy.refuse = False
    await tools.until(lambda: in_queue(tools, rival, "x", 2))
    await holder.release()
    async with asyncio.timeout(tools.PATIENCE):
        await (await waiter).release()


# --- logs


async def test_nothing_is_logged_above_debug_when_all_goes_well(server, tools, caplog):
    with caplog.at_level(logging.DEBUG):
        async with tools.connect(server.port) as one, tools.connect(server.port) as two:
            lease = await one.lock("x").acquire()
            waiter = await waiting(tools, one, two.lock("x"))
            await lease.release()
            await (await waiter).release()
    assert any(record.name == "aiolock.zookeeper" for record in caplog.records)
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


def reasons(caplog) -> list[str]:
    """Why waiters woke, in their order."""
    return [record.aiolock_reason for record in caplog.records if record.name == "aiolock.wait"]


async def test_why_a_waiter_woke_is_logged(cut, rival, proxy, tools, caplog):
    holder = await rival.lock("x").acquire()
    with caplog.at_level(logging.DEBUG, "aiolock.wait"):
        waiter = await waiting(tools, rival, cut.lock("x"))

        async def woken_by(reason: WakeReason) -> None:
            await tools.until(lambda: reason.name in reasons(caplog), reason.name)
            caplog.clear()
            await tools.until(lambda: in_queue(tools, rival, "x", 2))

        # Nothing happens: after one or two session timeouts it looks for itself.
        await woken_by(WakeReason.POLL)
        for _ in range(20):
            _, own = await tools.nodes(rival, "x")
            await tools.session_of(rival).ask(protocol.delete(f"{tools.path('x')}/{own}"))
            await tools.until(lambda: {"LAPSED", "POLL"} & set(reasons(caplog)))
            if "LAPSED" in reasons(caplog):
                break
            # It looked for itself at that very moment, and has a new node.
            caplog.clear()
            await tools.until(lambda: in_queue(tools, rival, "x", 2))
        await woken_by(WakeReason.LAPSED)
        proxy.reset_all()
        await woken_by(WakeReason.RECONNECTED)
        await asyncio.sleep(0.2)
        caplog.clear()
        await holder.release()
        await (await waiter).release()
        assert WakeReason.NOTIFIED.name in reasons(caplog)


# --- leaks


async def test_nothing_is_left_of_locks_that_were_had_or_given_up(server, client, rival, tools):
    """H1, H2: nodes, watches at the server, callbacks here."""
    holder = await rival.lock("x").acquire()
    for _ in range(50):
        with pytest.raises(AcquireTimeout):
            await client.lock("x").acquire(timeout=0.01)
        assert await client.lock("x").try_acquire() is None
    await holder.release()
    for number in range(50):
        async with client.lock(f"y{number}"):
            pass
    await nothing_remains(tools, rival, "x")

    def watches() -> int:
        return int(four_letters(server, b"wchs").rpartition("Total watches:")[2])

    await tools.until(lambda: watches() == 0, "a server without watches")
    for one in (client, rival):
        assert tools.session_of(one).watchers == {}
        assert one._backend.session.listeners == set()
        assert len(one._backend.context.cleanup) == 0
