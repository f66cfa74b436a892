"""The server's protocol after the login: packets of statements out, the rows of their answers in.

Several packets may be on their way; the server answers them one after the other. Whoever sent one is called with its
answers, or with the error of the first statement that failed, as soon as the last byte is there: no task stands between.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pymysql.err
from pymysql.constants import COMMAND, CR, FIELD_TYPE
from pymysql.converters import decoders, through
from pymysql.protocol import FieldDescriptorPacket

__all__ = ["Heard", "Result", "Wire"]

MOST = 0xFFFFFF
"""Bytes of one packet; what is longer goes into several."""
OK, NULL, EOF, ERROR = 0x00, 0xFB, 0xFE, 0xFF
"""How packets begin, and a value that is none."""
MORE_RESULTS = 0x0008
BINARY = 63
"""The number of the character set of what is no text."""
TEXTS = {
    *(FIELD_TYPE.VARCHAR, FIELD_TYPE.VAR_STRING, FIELD_TYPE.STRING, FIELD_TYPE.BLOB),
    *(FIELD_TYPE.TINY_BLOB, FIELD_TYPE.MEDIUM_BLOB, FIELD_TYPE.LONG_BLOB),
}
KNOWN = 256
"""How many kinds of rows are remembered."""


class Result(NamedTuple):
    """What one statement answered."""

    rows: tuple[tuple[Any, ...], ...]
    changed: int
    """How many rows it changed."""


Heard = Callable[[list[Result] | Exception], None]
"""Who is told how a packet ended."""

Reader = Callable[[bytes], Any]

_known: dict[bytes, tuple[Reader, ...]] = {}
"""How to read rows, by what the server says about their columns: most statements are sent again and again."""


class _Asked:
    """A packet that was sent, and what has been answered."""

    __slots__ = ("heard", "number", "results")

    def __init__(self, heard: Heard, number: int) -> None:
        self.heard = heard
        self.number = number
        """That of the next packet of the answer."""
        self.results: list[Result] = []


class Wire(asyncio.Protocol):
    """What reads from a connection that is logged in, and writes to it."""

    def __init__(self, transport: Any, ended: Callable[[], None]) -> None:
        self._transport = transport
        self._ended = ended
        self._asked: deque[_Asked] = deque()
        self._parts: list[bytes] = []
        """What has come of a packet that is not complete."""
        self._missing = 0
        self._long: list[bytes] = []
        """The pieces of a message that is longer than a packet."""
        self._columns: list[bytes] = []
        self._left = 0
        """How many descriptions of columns are to come."""
        self._readers: tuple[Reader, ...] | None = None
        self._rows: list[tuple[Any, ...]] = []
        self.over = False
        """Nothing is answered any more."""

    def ask(self, packet: str, heard: Heard) -> None:
        """Send statements; ``heard`` is called once, with the answers of all or with an error, and never from here."""
        if self.over:
            asyncio.get_running_loop().call_soon(heard, _lost(None))
            return
        payload = bytes([COMMAND.COM_QUERY]) + packet.encode("utf-8", "surrogateescape")
        number = 0
        if len(payload) < MOST:
            data = len(payload).to_bytes(3, "little") + b"\0" + payload
        else:
            pieces = [payload[start : start + MOST] for start in range(0, len(payload) + 1, MOST)]
            number = len(pieces) - 1
            data = b"".join(
                len(piece).to_bytes(3, "little") + bytes([place & 255]) + piece
                for place, piece in enumerate(pieces)
            )
        self._asked.append(_Asked(heard, number + 1))
        self._transport.write(data)

    # --- reading

    def data_received(self, data: bytes) -> None:
        """Take apart what came."""
        if self._missing:
            self._parts.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return
            data = b"".join(self._parts)
            self._parts.clear()
            self._missing = 0
        start, end = 0, len(data)
        while end - start >= 4:
            size = data[start] | data[start + 1] << 8 | data[start + 2] << 16
            begin, start = start, start + 4 + size
            if start > end:
                self._parts.append(data[begin:])
                self._missing = start - end
                return
            if not self._asked:
                # Said by a server that shuts down, or by one that has an answer too many.
                self._lose()
                return
            asked = self._asked[0]
            if data[begin + 3] != asked.number & 255:
                self._lose()
                return
            asked.number += 1
            packet = data[begin + 4 : start]
            if size == MOST or self._long:
                self._long.append(packet)
                if size == MOST:
                    continue
                packet = b"".join(self._long)
                self._long.clear()
            try:
                self._read(asked, packet)
            except (IndexError, ValueError, struct.error):
                self._lose()
            if self.over:
                return
        if start < end:
            # Less than the head of a packet.
            self._parts.append(data[start:])
            self._missing = 4 - (end - start)

    def _read(self, asked: _Asked, packet: bytes) -> None:
        first = packet[0]
        if self._left:
            self._columns.append(packet)
            self._left -= 1
        elif first == ERROR:
            self._answer(asked, _error(packet))
        elif self._columns:
            if first != EOF:
                raise ValueError(first)
            self._readers = _readers(self._columns)
            self._columns = []
        elif self._readers is not None:
            if first == EOF and len(packet) < 9:
                rows, self._rows, self._readers = tuple(self._rows), [], None
                asked.results.append(Result(rows, len(rows)))
                self._next(asked, packet[3] | packet[4] << 8)
            else:
                self._rows.append(_row(packet, self._readers))
        elif first == OK:
            changed, place = _number(packet, 1)
            _, place = _number(packet, place)
            asked.results.append(Result((), changed or 0))
            self._next(asked, packet[place] | packet[place + 1] << 8)
        elif first == NULL:
            raise ValueError(first)  # it wants a file of ours
        else:
            self._left = _number(packet, 0)[0] or 0

    def _next(self, asked: _Asked, status: int) -> None:
        if not status & MORE_RESULTS:
            self._answer(asked, asked.results)

    def _answer(self, asked: _Asked, outcome: list[Result] | Exception) -> None:
        self._left, self._columns, self._readers, self._rows = 0, [], None, []
        self._asked.popleft()
        asked.heard(outcome)

    # --- the end

    def eof_received(self) -> None:
        """Everything that was answered has been read."""
        self._lose()

    def connection_lost(self, exc: Exception | None) -> None:
        """The same; the reason does not matter."""
        self._lose(exc)

    def _lose(self, error: Exception | None = None) -> None:
        if self.over:
            return
        self.over = True
        self._transport.abort()
        asked, self._asked = self._asked, deque()
        for one in asked:
            one.heard(_lost(error))
        self._ended()

    def close(self) -> None:
        """Nobody wants to hear anything any more."""
        self.over = True
        self._asked.clear()


def _lost(error: Exception | None) -> Exception:
    lost: Exception = pymysql.err.OperationalError(CR.CR_SERVER_LOST, "the connection was lost")
    lost.__cause__ = error
    return lost


def _error(packet: bytes) -> Exception:
    try:
        pymysql.err.raise_mysql_exception(packet)
    except pymysql.err.MySQLError as error:
        said: Exception = error
        return said
    raise ValueError(packet)  # it always raises


def _number(packet: bytes, place: int) -> tuple[int | None, int]:
    """A number of variable length, and where it ends; ``None`` for a value that is none."""
    first = packet[place]
    if first < NULL:
        return first, place + 1
    if first == NULL:
        return None, place + 1
    size = {0xFC: 2, 0xFD: 3, 0xFE: 8}[first] if first != ERROR else 0
    end = place + 1 + size
    if not size or end > len(packet):
        raise ValueError(first)
    return int.from_bytes(packet[place + 1 : end], "little"), end


def _row(packet: bytes, readers: tuple[Reader, ...]) -> tuple[Any, ...]:
    place = 0
    values: list[Any] = []
    for read in readers:
        size = packet[place]
        if size < NULL:
            place += 1
        else:
            number, place = _number(packet, place)
            if number is None:
                values.append(None)
                continue
            size = number
        end = place + size
        if end > len(packet):
            raise ValueError(size)
        values.append(read(packet[place:end]))
        place = end
    return tuple(values)


def _readers(columns: list[bytes]) -> tuple[Reader, ...]:
    key = b"".join(columns)
    known = _known.get(key)
    if known is None:
        if len(_known) >= KNOWN:
            _known.clear()
        known = _known[key] = tuple(_reader(FieldDescriptorPacket(column, "utf-8")) for column in columns)
    return known


def _reader(column: Any) -> Reader:
    """What makes a value of this column out of its text, as the driver would."""
    kind = column.type_code
    if kind in TEXTS:
        return bytes if column.charsetnr == BINARY else _text
    convert = decoders.get(kind, through)
    if convert is int:
        return int
    if convert is through:
        return _text
    return lambda data: convert(_text(data))


def _text(data: bytes) -> str:
    return data.decode("utf-8")
