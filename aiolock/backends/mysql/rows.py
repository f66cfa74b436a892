"""Values out of the rows of answers: as text, which is what statements answer, and the numbers of prepared ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pymysql.constants import FIELD_TYPE
from pymysql.converters import decoders, through
from pymysql.protocol import FieldDescriptorPacket

__all__ = ["Reader", "number_at", "prepared_number", "readers", "row_of"]

NULL, ERROR = 0xFB, 0xFF
"""How a value begins that is none, and what no value begins with."""
BINARY = 63
"""The number of the character set of what is no text."""
TEXTS = {
    *(FIELD_TYPE.VARCHAR, FIELD_TYPE.VAR_STRING, FIELD_TYPE.STRING, FIELD_TYPE.BLOB),
    *(FIELD_TYPE.TINY_BLOB, FIELD_TYPE.MEDIUM_BLOB, FIELD_TYPE.LONG_BLOB),
}
KNOWN = 256
"""How many kinds of rows are remembered."""

Reader = Callable[[bytes], Any]
"""What makes a value of its text."""

_known: dict[bytes, tuple[Reader, ...]] = {}
"""How to read rows, by what the server says about their columns: most statements are sent again and again."""


def number_at(packet: bytes, place: int) -> tuple[int | None, int]:
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


def row_of(packet: bytes, how: tuple[Reader, ...]) -> tuple[Any, ...]:
    """The values of a row."""
    place = 0
    values: list[Any] = []
    for read in how:
        size = packet[place]
        if size < NULL:
            place += 1
        else:
            number, place = number_at(packet, place)
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


def readers(columns: list[bytes]) -> tuple[Reader, ...]:
    """How to read rows of such columns."""
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


def prepared_number(packet: bytes) -> int | None:
    """The only value of a row of a prepared statement, which must be an integer; that of GET_LOCK is not a large one."""
    if len(packet) in (6, 10) and packet[:2] == b"\0\0":
        return int.from_bytes(packet[2:], "little", signed=True)
    if packet == b"\0\4":
        return None
    raise ValueError(packet)
