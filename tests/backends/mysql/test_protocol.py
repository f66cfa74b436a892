"""Answers are read whatever the pieces they come in, long ones too; what is out of step ends the connection."""

from __future__ import annotations

import asyncio
import random

import pymysql.err
import pytest

from aiolock.backends.mysql import protocol
from aiolock.backends.mysql.protocol import Result, Wire
from tests.faults.staging import until


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


class Line:
    """A wire, and what whoever asks on it hears."""

    def __init__(self) -> None:
        self.transport = Transport()
        self.ends = 0
        self.heard: list[list[Result] | Exception] = []
        self.wire = Wire(self.transport, self.end)

    def end(self) -> None:
        self.ends += 1

    def ask(self, packet: str = "SELECT 1") -> None:
        self.wire.ask(packet, self.heard.append)


def packets(*payloads: bytes, first: int = 1) -> bytes:
    return b"".join(
        len(payload).to_bytes(3, "little") + bytes([(first + index) & 255]) + payload
        for index, payload in enumerate(payloads)
    )


def text(value: bytes | None) -> bytes:
    if value is None:
        return b"\xfb"
    if len(value) < 251:
        return bytes([len(value)]) + value
    return b"\xfd" + len(value).to_bytes(3, "little") + value


def column(name: bytes, kind: int, charset: int = 45) -> bytes:
    words = b"".join(text(word) for word in (b"def", b"", b"", b"", name, b""))
    return words + b"\x0c" + charset.to_bytes(2, "little") + bytes(4) + bytes([kind]) + bytes(5)


def end(more: bool = False) -> bytes:
    return b"\xfe\0\0" + (8 if more else 2).to_bytes(2, "little")


def ok(changed: int = 0, more: bool = False) -> bytes:
    return b"\0" + bytes([changed, 0]) + (8 if more else 2).to_bytes(2, "little") + b"\0\0"


NUMBER, WORD, BLOB = column(b"n", 8), column(b"w", 253), column(b"b", 252, 63)
ERROR = b"\xff\x25\x05#70100Query execution was interrupted"
ANSWER = packets(
    *(ok(3, more=True), b"\x03", NUMBER, WORD, BLOB, end()),
    *(text(b"42") + text("ü".encode()) + text(b"\xfe\xff"), text(None) * 3, end(more=True), b"\x01", NUMBER),
    *(end(), end()),
)
RESULTS = [Result((), 3), Result(((42, "ü", b"\xfe\xff"), (None, None, None)), 2), Result((), 0)]


@pytest.mark.parametrize("seed", range(20))
async def test_the_answers_do_not_depend_on_the_pieces_they_come_in(seed):
    rng, line = random.Random(seed), Line()
    for _ in range(3):
        line.ask()
    data = ANSWER * 3
    while data:
        size = rng.choice((1, 2, 3, 4, 5, 17, len(data)))
        line.wire.data_received(data[:size])
        data = data[size:]
    assert line.heard == [RESULTS] * 3
    assert not line.ends


async def test_a_long_packet_is_gathered_without_copying_what_came_before():
    line, value = Line(), random.Random(1).randbytes(4 << 20)
    line.ask()
    answer = packets(b"\x01", BLOB, end(), text(value), end())
    line.wire.data_received(answer[:1000])
    gathered = line.wire._rest
    last = answer.index(value) + len(value)
    for start in range(1000, last - 1, 1000):
        line.wire.data_received(answer[start : min(start + 1000, last - 1)])
        # Every piece is put behind the others.
        assert line.wire._rest is gathered
    assert len(gathered) == 4 + len(text(value)) - 1
    assert not line.heard
    line.wire.data_received(answer[last - 1 :])
    assert line.heard == [[Result(((value,),), 1)]]
    assert not line.wire._rest


async def test_an_error_is_the_end_of_one_packet_and_not_of_the_connection():
    line = Line()
    line.ask()
    line.ask()
    line.wire.data_received(packets(ok(1, more=True), ERROR) + ANSWER)
    error, results = line.heard
    assert isinstance(error, pymysql.err.OperationalError)
    assert error.args[0] == 1317
    assert results == RESULTS
    line.ask()
    line.wire.data_received(packets(b"\x01", NUMBER, end(), text(b"1"), ERROR) + b"")
    assert isinstance(line.heard[-1], pymysql.err.OperationalError)


@pytest.mark.parametrize(
    "data",
    [
        packets(ok(), first=7),
        packets(b"\xfb/etc/passwd"),
        packets(b"\x01", NUMBER, end(), b"\x05ab"),
        packets(b"\x01", NUMBER, ok()),
        b"\xff\xff\xff\x01" + bytes(0xFFFFFF),
    ],
    ids=["number", "file", "short", "no end of columns", "a packet that goes on in another"],
)
async def test_what_is_out_of_step_ends_the_connection(data):
    line = Line()
    line.ask()
    line.ask()
    line.wire.data_received(data)
    assert line.wire.over
    assert line.transport.aborted
    assert line.ends == 1
    assert [error.args[0] for error in line.heard] == [2013, 2013]


def test_an_answer_that_nobody_asked_for_ends_the_connection():
    line = Line()
    line.wire.data_received(packets(ERROR, first=0))
    assert line.wire.over
    assert line.ends == 1


async def test_who_asks_after_the_end_hears_of_it():
    line = Line()
    line.wire.eof_received()
    line.wire.connection_lost(None)
    assert line.ends == 1
    line.ask()
    assert not line.heard
    await asyncio.sleep(0)
    assert [error.args[0] for error in line.heard] == [2013]


# --- answers that stop in the middle


async def test_the_rest_of_a_packet_that_the_server_has_dropped_is_an_error_and_no_more(monkeypatch):
    monkeypatch.setattr(protocol, "PAUSE", 0.001)
    line = Line()
    line.ask("SET @a = 1; SELECT 2")
    line.wire.data_received(packets(ok(more=True)))
    line.transport.written = b""
    await until(lambda: line.transport.written)
    assert line.transport.written.endswith(b"\x03DO 0")
    # What was asked behind it is answered, so it is over.
    line.wire.data_received(packets(ok()))
    assert [error.args[0] for error in line.heard] == [1317]
    line.ask()
    line.wire.data_received(packets(b"\x01", NUMBER, end(), text(b"5"), end()))
    assert line.heard[1:] == [[Result(((5,),), 1)]]
    assert not line.ends


async def test_an_answer_that_is_late_in_the_middle_is_whole(monkeypatch):
    monkeypatch.setattr(protocol, "PAUSE", 0.001)
    line = Line()
    line.ask("SET @a = 1; SELECT 2")
    line.wire.data_received(packets(ok(more=True)))
    line.transport.written = b""
    await until(lambda: line.transport.written)
    rest = packets(b"\x01", NUMBER, end(), text(b"5"), end(), first=2)
    line.wire.data_received(rest + packets(ok()))
    assert line.heard == [[Result((), 0), Result(((5,),), 1)]]
    assert not line.ends


async def test_nothing_is_asked_behind_answers_that_come_in_time(monkeypatch):
    monkeypatch.setattr(protocol, "PAUSE", 0.001)
    line = Line()
    line.ask("SET @a = 1; SELECT 2")
    line.wire.data_received(packets(ok(more=True)))
    line.wire.data_received(packets(ok(), first=2))
    line.ask("SELECT SLEEP(100)")
    line.transport.written = b""
    await asyncio.sleep(0.02)
    assert line.transport.written == b""
    line.wire.close()


# --- one answer after the other


def one(value: bytes | None) -> bytes:
    return packets(b"\x01", NUMBER, end(), text(value), end())


@pytest.mark.parametrize(
    ("answer", "rows"),
    [
        (one(b"7"), ((7,),)),
        (one(b"1234567890123456"), ((1234567890123456,),)),
        (one(b"-1"), ((-1,),)),
        (one(None), ((None,),)),
        (packets(b"\x01", NUMBER, end(), text(b"1"), text(b"2"), end()), ((1,), (2,))),
        (packets(b"\x01", NUMBER, end(), end()), ()),
        (packets(b"\x01", WORD, end(), text(b"ab"), end()), (("ab",),)),
    ],
    ids=["short", "long", "negative", "none", "two rows", "no row", "word"],
)
def test_an_answer_is_the_same_whatever_the_one_before_it_looked_like(answer, rows):
    line = Line()
    for before in (one(b"42"), answer, one(b"43"), answer, answer):
        line.ask()
        line.wire.data_received(before)
    results = [outcome[0].rows for outcome in line.heard]
    assert results == [((42,),), rows, ((43,),), rows, rows]
    assert not line.ends
