"""A hand-over without the list: it costs the same however many wait, and nobody enters by it who must not."""

from __future__ import annotations

import asyncio
import struct

import pytest
from aiozk import exc
from aiozk.protocol.acl import ACL

from aiolock.backends.zookeeper import context, protocol
from aiolock.backends.zookeeper.format import REVOKE, Note, Record
from aiolock.backends.zookeeper.protocol import Several

LIST = 8
MULTI = 14


async def drain(client, tools, proxy, name: str, waiters: int) -> tuple[float, int]:
    """Requests per hand-over of a queue of so many, and how many of them were for the list."""
    holder = await client.lock(name, fair=True).acquire()
    order: list[int] = []
    lists: list[bytes] = []

    async def turn(number: int) -> None:
        async with client.lock(name, fair=True):
            order.append(number)

    def count(direction: str, frame: bytes) -> None:
        if direction == "up" and frame[8:12] == struct.pack("!i", LIST):
            lists.append(frame)

    turns = [asyncio.create_task(turn(number)) for number in range(waiters)]

    async def in_line() -> bool:
        return len(await tools.nodes(client, name)) == waiters + 1

    await tools.until(in_line)
    await tools.watching(client, name, count=waiters)
    proxy.on_frame = count
    before = tools.session_of(client).xid
    await holder.release()
    async with asyncio.timeout(tools.PATIENCE):
        await asyncio.gather(*turns)
    proxy.on_frame = None
    assert order == list(range(waiters))
    return (tools.session_of(client).xid - before) / waiters, len(lists)


async def test_a_hand_over_costs_three_small_requests_however_many_wait(proxy, tools):
    async with tools.connect(proxy.port, query="session_timeout=30") as client:
        few, _ = await drain(client, tools, proxy, "few", 5)
        many, lists = await drain(client, tools, proxy, "many", 100)
    print(f"requests per hand-over: {few:.2f} with 5 waiters, {many:.2f} with 100; {lists} lists")
    assert many <= few + 0.2
    # The last one finds nobody behind it, and has to learn whether somebody comes.
    assert lists <= 3


async def test_a_holder_says_when_it_leaves_that_all_before_it_have_gone(client, rival, tools):
    lease = await client.lock("x").acquire()
    waiter = await tools.waiting(rival, rival.lock("x"))
    numbers = [int(node[-10:]) for node in await tools.nodes(rival, "x")]
    # It has to know that somebody waits; else it has nobody to tell.
    await tools.until(lambda: lease._hold.validity.claim.contended_since is not None)
    await lease.release()
    following = await waiter
    data = (await tools.session_of(rival).ask(protocol.get(tools.path("x"), watch=False))).data
    assert Record.decode(data).floor == numbers[0]
    await following.release()


async def test_whoever_gives_up_is_not_taken_for_a_holder(client, rival, tools):
    holder = await client.lock("x").acquire()
    between = await tools.waiting(client, rival.lock("x", fair=True), 1)
    last = await tools.waiting(client, rival.lock("x", fair=True), 2)
    between.cancel()

    async def gone() -> bool:
        return len(await tools.nodes(client, "x")) == 2

    await tools.until(gone)
    await asyncio.sleep(0.1)
    assert not last.done()
    await holder.release()
    async with asyncio.timeout(tools.TIMEOUT):
        await (await last).release()


async def test_whoever_was_asked_to_let_go_while_it_waited_is_not_taken_for_a_holder(client, rival, tools):
    """The same, with the event of a change of data before the one of the end."""
    holder = await client.lock("x").acquire()
    between = await tools.waiting(client, rival.lock("x", fair=True), 1)
    last = await tools.waiting(client, rival.lock("x", fair=True), 2)
    _, node, _ = await tools.nodes(client, "x")
    await tools.session_of(client).ask(protocol.put(f"{tools.path('x')}/{node}", REVOKE))
    between.cancel()
    await asyncio.sleep(0.2)
    assert not last.done()
    await holder.release()
    async with asyncio.timeout(tools.TIMEOUT):
        await (await last).release()


@pytest.mark.parametrize("kind", ["mutex", "write", "read"])
@pytest.mark.parametrize("data", [REVOKE, b"", b"aiolock floor=99"])
async def test_whoever_waits_is_not_taken_for_gone_because_somebody_writes_to_its_node(
    client, rival, tools, kind, data
):
    """The holder's end then says nothing of who stands between."""
    family = "lock" if kind == "mutex" else "rw"
    port = tools.session_of(client)._address.hosts[0].port
    # So long that no poll can put right what a wake-up got wrong.
    async with tools.connect(port, label="last", query="session_timeout=30&tick_time=0.5") as third:
        locks = {
            "mutex": lambda of: of.lock("x"),
            "write": lambda of: of.rwlock("x").write(),
            "read": lambda of: of.rwlock("x").read(),
        }
        before = locks["mutex" if kind == "mutex" else "write"]
        holder = await before(client).acquire()
        between = await tools.waiting(client, before(rival), 1)
        last = await tools.waiting(client, locks[kind](third), 2)
        await tools.until(lambda: holder._hold.validity.claim.contended_since is not None)
        _, node, _ = await tools.nodes(client, "x", family)
        path = f"{tools.path('x', family)}/{node}"
        [claim] = await tools.watching(third, "x", family)
        old = claim._verdict
        await tools.session_of(client).ask(protocol.put(path, data))
        # It has looked again.
        await tools.until(lambda: claim._verdict is not old and claim.inbox._waiter is not None)
        await holder.release()
        async with asyncio.timeout(tools.TIMEOUT):
            lease = await between
        # Whatever the holder's end has led to there has been asked and answered by then.
        for _ in range(5):
            await tools.session_of(third).ask(protocol.sync())
            await asyncio.sleep(0.02)
        assert not last.done()
        lease.check()
        await lease.release()
        async with asyncio.timeout(tools.TIMEOUT):
            following = await last
        assert following.token > lease.token
        await following.release()


@pytest.mark.parametrize("release", ["while it does not hear", "after it has heard"])
async def test_whoever_has_lost_its_place_does_not_enter_by_what_it_last_saw(
    client, rival, proxy, tools, release
):
    """The one behind it has been waiting for the holder since, and enters."""
    async with tools.connect(proxy.port, label="cut", query="session_timeout=20") as cut:
        holder = await client.lock("x").acquire()
        displaced = await tools.waiting(client, cut.lock("x"), 1)
        behind = await tools.waiting(client, rival.lock("x"), 2)
        _, node, _ = await tools.nodes(client, "x")
        if release == "while it does not hear":
            proxy.down.blackhole()
        await tools.session_of(client).ask(protocol.delete(f"{tools.path('x')}/{node}"))
        await tools.until(lambda: holder._hold.validity.claim.contended_since is not None)
        await holder.release()
        async with asyncio.timeout(tools.PATIENCE):
            lease = await behind
        proxy.down.heal()
        await asyncio.sleep(0.3)
        assert not displaced.done()
        lease.check()
        await lease.release()
        async with asyncio.timeout(tools.PATIENCE):
            following = await displaced
        assert following.token > lease.token
        await following.release()


@pytest.mark.parametrize("data", [b"", b"127.0.0.1", b"aiolock floor=x", b"aiolock floor=-7", b"\xff\xfe"])
async def test_whatever_somebody_wrote_into_the_node_of_the_lock_nobody_is_misled(client, rival, tools, data):
    holder = await client.lock("x").acquire()
    first = await tools.waiting(client, rival.lock("x", fair=True), 1)
    second = await tools.waiting(client, rival.lock("x", fair=True), 2)
    await tools.session_of(client).ask(protocol.put(tools.path("x"), data))
    first.cancel()
    await asyncio.sleep(0.1)
    assert not second.done()
    await holder.release()
    async with asyncio.timeout(tools.TIMEOUT):
        await (await second).release()


async def test_without_the_right_to_write_to_the_node_of_the_lock_the_list_is_read(client, rival, tools):
    """READ, CREATE and DELETE on it are enough."""
    session = tools.session_of(client)
    await client._backend.context.nodes.make(f"/{tools.namespace}/lock")
    acl = protocol.acl(ACL.make("world", "anyone", read=True, create=True, delete=True))
    await session.ask(protocol.container(tools.path("x"), acl))
    for _ in range(3):
        lease = await client.lock("x").acquire()
        waiter = await tools.waiting(rival, rival.lock("x"))
        await tools.until(lambda lease=lease: lease._hold.validity.claim.contended_since is not None)
        await lease.release()
        async with asyncio.timeout(tools.TIMEOUT):
            await (await waiter).release()
    assert not client._backend.context.nodes.may_write
    await tools.empty(client, "x")


async def test_a_farewell_whose_reply_is_lost_is_finished_in_the_background(proxy, rival, tools):
    async with tools.connect(proxy.port, label="cut") as cut:
        lease = await cut.lock("x").acquire()
        waiter = await tools.waiting(rival, rival.lock("x"))
        await tools.until(lambda: lease._hold.validity.claim.contended_since is not None)
        lost = proxy.up.drop_next(1, lambda frame: frame[8:12] == struct.pack("!i", MULTI), reset=True)
        await lease.release()
        assert lost.is_set()
        async with asyncio.timeout(tools.PATIENCE):
            await (await waiter).release()
        await tools.empty(rival, "x")


# --- what nodes say


def test_notes_and_records_are_read_as_they_were_written():
    for note in (
        Note("me"),
        Note("me", attempt="0b2c", token=7, asked=""),
        Note("", asked="two\nlines"),
        Note("a=b"),
    ):
        assert Note.decode(note.encode()) == note
    for record in (Record(), Record(floor=7), Record(limit=3, declared=2, inside=12)):
        assert Record.decode(record.encode()) == record


@pytest.mark.parametrize(
    "data", [None, b"", b"\xff", b"aiolock floor=", b"aiolock  floor=1", b"aiolock floor=1 "]
)
def test_what_is_no_record_says_nothing(data):
    assert Record.decode(data) == Record()


@pytest.mark.parametrize("data", [None, b"", b"\xff\n\xff", b"me\ntoken=x", b"me\nasked={", b"\n\n="])
def test_whatever_stands_in_a_node_is_read_without_harm(data):
    note = Note.decode(data)
    assert isinstance(note.label, str)
    assert note.token == 0


def test_why_a_transaction_failed_is_told_from_what_failed_with_it():
    reply = Several([exc.RolledBack(), exc.BadVersion(), exc.RuntimeInconsistency()])
    assert isinstance(protocol.failure(reply), exc.BadVersion)
    assert protocol.failure(Several([])) is None


# --- what a turn costs


SYNC = 9


@pytest.fixture
def unhurried(monkeypatch):
    """However slow this machine is, nobody looks whether others have come."""
    monkeypatch.setattr(context, "TICK", 60.0)


def opcodes(seen: list[bytes]) -> list[int]:
    """Of requests, heartbeats aside."""
    return [code for frame in seen if (code := struct.unpack_from("!i", frame, 8)[0]) != SYNC]


async def test_a_free_lock_costs_three_requests_in_two_writes_and_nothing_is_said_unasked(
    proxy, tools, unhurried
):
    async with tools.connect(proxy.port, query="session_timeout=30") as client:
        lock = client.lock("x")
        async with lock:
            pass
        up: list[bytes] = []
        events: list[bytes] = []

        def see(direction: str, frame: bytes) -> None:
            if direction == "up":
                up.append(frame)
            elif struct.unpack_from("!i", frame, 4)[0] == -1:
                events.append(frame)

        proxy.on_frame = see
        for _ in range(10):
            async with lock:
                pass
        proxy.on_frame = None
    assert opcodes(up) == [15, LIST, 2] * 10
    assert events == []


async def test_whoever_waits_for_the_holder_alone_enters_without_asking(client, proxy, tools, unhurried):
    async with tools.connect(proxy.port, query="session_timeout=30") as waiter:
        holder = await client.lock("x").acquire()
        following = await tools.waiting(client, waiter.lock("x"))
        await tools.watching(waiter, "x")
        up: list[bytes] = []
        proxy.on_frame = lambda direction, frame: up.append(frame) if direction == "up" else None
        await holder.release()
        async with asyncio.timeout(tools.PATIENCE):
            lease = await following
        proxy.on_frame = None
        assert opcodes(up) == []
        lease.check()
        # And still it is told of the end of its node.
        [node] = await tools.nodes(client, "x")
        await tools.session_of(client).ask(protocol.delete(f"{tools.path('x')}/{node}"))
        async with asyncio.timeout(tools.PATIENCE):
            assert await lease.wait_lost() == "force-released"
        await lease.release()


async def test_whoever_has_lost_its_node_does_not_enter_when_the_holder_goes(client, rival, tools):
    """Its position is behind those who have come since."""
    holder = await client.lock("x").acquire()
    first = await tools.waiting(client, rival.lock("x", fair=True), 1)
    second = await tools.waiting(client, rival.lock("x", fair=True), 2)
    session = tools.session_of(client)
    nodes = await tools.nodes(client, "x")
    # Both in one step, in this order.
    paths = [f"{tools.path('x')}/{node}" for node in (nodes[1], nodes[0])]
    await session.ask(protocol.together(*(protocol.delete(path) for path in paths)))
    async with asyncio.timeout(tools.PATIENCE):
        lease = await second
    assert not first.done()
    await lease.release()
    async with asyncio.timeout(tools.PATIENCE):
        await (await first).release()
    await holder.release()
