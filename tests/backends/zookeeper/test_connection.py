"""One connection: whatever pieces its bytes come in, each reply is its asker's; and what is unwrap together is written together."""

from __future__ import annotations

import asyncio
import struct

import pytest
from aiozk import exc
from aiozk import protocol as aiozk_protocol

from aiolock.backends.zookeeper import protocol
from aiolock.backends.zookeeper.connection import LONGEST, Connection
from aiolock.backends.zookeeper.errors import InDoubt, NotSent, Refused, unwrap
from aiolock.backends.zookeeper.url import Host

STAT = struct.pack("!qqqqiiiqiiq", *range(1, 12))
NO_NODE = -101
EXPIRED = -112


class Wires(asyncio.Transport):
    """Remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.open = True

    def write(self, data) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return not self.open

    def abort(self) -> None:
        self.open = False


class Stage:
    """A connection that is open, and what it has unwrap and heard."""

    def __init__(self) -> None:
        self.zxids: list[int] = []
        self.events: list[tuple[int, str]] = []
        self.ends = 0
        self.wires = Wires()
        self.conn = Connection(Host("h", 1), "127.0.0.1", None, self.zxids.append, self.heard)
        self.conn.on_dead = self.ended
        self.conn.connection_made(self.wires)

    def heard(self, event) -> None:
        self.events.append((event.type, event.path))

    def ended(self, _) -> None:
        self.ends += 1


@pytest.fixture
async def stage() -> Stage:
    return Stage()


def frame(body: bytes) -> bytes:
    return struct.pack("!i", len(body)) + body


def text(value: str) -> bytes:
    return struct.pack("!i", len(value)) + value.encode()


def reply(xid: int, body: bytes = b"", *, zxid: int = 7, error: int = 0) -> bytes:
    return frame(struct.pack("!iqi", xid, zxid, error) + body)


def event(path: str, kind: int = 2) -> bytes:
    return frame(struct.pack("!iqi", -1, -1, 0) + struct.pack("!ii", kind, 3) + text(path))


STREAM = (
    reply(1, text("data") + STAT)
    + event("/gone")
    + reply(2, struct.pack("!i", 2) + text("a") + text("b"), zxid=9)
    + reply(3, error=NO_NODE, zxid=8)
)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 17, 40, len(STREAM)])
async def test_in_whatever_pieces_bytes_come_each_reply_is_its_askers(stage, size):
    got = stage.conn.send(protocol.get("/x", watch=True), 1)
    listed = stage.conn.send(protocol.listing("/x", watch=False), 2)
    deleted = stage.conn.send(protocol.delete("/none"), 3)
    for begin in range(0, len(STREAM), size):
        stage.conn.data_received(STREAM[begin : begin + size])
    assert (await got).data == b"data"
    assert (await listed).children == ["a", "b"]
    with pytest.raises(exc.NoNode):
        await deleted
    assert stage.events == [(2, "/gone")]
    assert stage.zxids == [7, 9, 8]
    assert not stage.conn.dead


async def test_several_that_are_asked_together_are_one_write_and_one_answer(stage):
    asked = stage.conn.send_all([protocol.sync(), protocol.get("/x", watch=False), protocol.delete("/x")], 5)
    assert len(stage.wires.written) == 1
    stage.conn.data_received(reply(5, text("/")) + reply(6, error=NO_NODE))
    assert not asked.done()
    stage.conn.data_received(reply(7))
    fresh, found, deleted = await asked
    assert unwrap(fresh)
    with pytest.raises(exc.NoNode):
        unwrap(found)
    assert unwrap(deleted)


async def test_what_was_answered_before_the_end_is_known_and_the_rest_in_doubt(stage):
    asked = stage.conn.send_all([protocol.sync(), protocol.delete("/x")], 1)
    alone = stage.conn.send(protocol.delete("/y"), 3)
    stage.conn.data_received(reply(1, text("/")))
    stage.conn.connection_lost(ConnectionResetError())
    fresh, deleted = await asked
    assert unwrap(fresh)
    with pytest.raises(InDoubt):
        unwrap(deleted)
    with pytest.raises(InDoubt):
        await alone
    assert stage.ends == 1
    # Who asks later learns it as well.
    with pytest.raises(InDoubt):
        await stage.conn.send(protocol.sync(), 4)


async def test_what_the_tasks_say_that_were_woken_together_is_one_write(stage):
    async def turn(number: int) -> None:
        await stage.conn.send(protocol.sync(), number)
        await stage.conn.send(protocol.sync(), number + 10)

    tasks = [asyncio.create_task(turn(number)) for number in range(1, 6)]
    await asyncio.sleep(0)
    before = len(stage.wires.written)
    stage.conn.data_received(b"".join(reply(number, text("/")) for number in range(1, 6)))
    await asyncio.sleep(0)
    assert len(stage.wires.written) == before + 1
    assert stage.wires.written[-1].count(struct.pack("!i", 9) + text("/")) == 5
    # Afterwards, whoever speaks is heard at once.
    extra = stage.conn.send(protocol.sync(), 99)
    assert len(stage.wires.written) == before + 2
    stage.conn.data_received(b"".join(reply(number, text("/")) for number in [*range(11, 16), 99]))
    await asyncio.gather(*tasks, extra)


async def test_whoever_gave_up_is_not_answered_and_disturbs_nobody(stage):
    first, second = (
        stage.conn.send(protocol.sync(), 1),
        stage.conn.send_all([protocol.sync(), protocol.sync()], 2),
    )
    first.cancel()
    second.cancel()
    third = stage.conn.send(protocol.sync(), 4)
    stage.conn.data_received(b"".join(reply(number, text("/")) for number in range(1, 5)))
    assert await third
    assert not stage.conn.dead


@pytest.mark.parametrize(
    "data",
    [
        reply(42),
        frame(b""),
        frame(b"\0" * 7),
        struct.pack("!i", -5),
        struct.pack("!i", LONGEST + 1),
        reply(1, struct.pack("!i", 99) + b"short"),
        reply(1, text("no stat")),
        frame(struct.pack("!iqi", -1, -1, 0) + b"\0"),
    ],
)
async def test_what_cannot_be_understood_ends_the_connection(stage, caplog, data):
    asked = stage.conn.send(protocol.get("/x", watch=False), 1)
    stage.conn.data_received(data)
    with pytest.raises(InDoubt):
        await asked
    assert stage.conn.dead
    assert not stage.wires.open
    assert "cannot be understood" in caplog.text


async def test_a_server_that_has_not_our_session_any_more_is_left_with_everything_in_doubt(stage):
    asked, other = stage.conn.send(protocol.sync(), 1), stage.conn.send(protocol.delete("/x"), 2)
    stage.conn.data_received(reply(1, error=EXPIRED) + reply(2))
    for future in (asked, other):
        with pytest.raises(InDoubt):
            await future
    assert stage.ends == 1


@pytest.mark.parametrize("how", ["closed", "nonsense", "closed before"])
async def test_a_handshake_that_comes_to_nothing_is_told(stage, how):
    request = aiozk_protocol.ConnectRequest(
        protocol_version=0, last_seen_zxid=0, timeout=1000, session_id=0, password=b"", read_only=False
    )
    if how == "closed before":
        stage.conn.connection_lost(None)
    hands = asyncio.ensure_future(stage.conn.handshake(request))
    await asyncio.sleep(0)
    if how == "closed":
        stage.conn.connection_lost(None)
    elif how == "nonsense":
        stage.conn.data_received(frame(b"HTTP"))
    with pytest.raises(struct.error if how == "nonsense" else Refused):
        await hands
    assert stage.conn.dead


def test_an_outcome_says_what_it_is():
    assert "no connection" in str(NotSent())
