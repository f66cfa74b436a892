"""The answer to a statement that is sent again and again: one number, and always the same around it.

Whoever waits for such an answer waits for nothing else, so it is not taken apart but compared.
"""

from __future__ import annotations

import struct

from aiolock.backends.mysql.rows import readers

__all__ = ["ANY", "BINARY", "TEXT", "Usual"]

ANY, TEXT, BINARY = range(3)
"""What is known of an answer before it comes: nothing; that it is one number, as text; the same of a prepared statement."""

HEAD = b"\1\0\0\1\1"
"""A packet of one byte, the first of the answer: one column."""
END = b"\5\0\0\5\xfe"
"""How the last packet begins, the fifth: one of the column, one of the end of columns, and one of the row were before it."""
ROW = b"\n\0\0\4\0\0"
"""How the row's packet of a prepared statement begins: ten bytes, the fourth of the answer, and no value that is none."""
NUMBER = struct.Struct("<q")
MORE_RESULTS = 0x0008


class Usual:
    """What an answer looked like."""

    __slots__ = ("_begin", "_head", "_size", "_start", "_tail", "shape")

    def __init__(self, head: bytes, tail: bytes, shape: int) -> None:
        """It came before the row's packet, and after it."""
        self.shape = shape
        self._head = head
        self._tail = tail
        self._start = head + ROW
        """Of a prepared one, everything before the number."""
        self._begin = len(self._start)
        self._size = self._begin + NUMBER.size + len(tail)

    def number(self, data: bytes) -> int | None:
        """The number in an answer that looks like it; ``None`` if this one does not."""
        if self.shape == BINARY:
            if len(data) == self._size and data.startswith(self._start) and data.endswith(self._tail):
                number: int = NUMBER.unpack_from(data, self._begin)[0]
                return number
            return None
        return self._text(data)

    def _text(self, data: bytes) -> int | None:
        size = len(self._head)
        begin, end = size + 4, len(data) - len(self._tail)
        if (
            end <= begin
            or data[end:] != self._tail
            or data[:size] != self._head
            or data[size + 1 : begin] != b"\0\0\4"
            or data[size] != end - begin
        ):
            return None
        text = data[begin + 1 : end]
        return int(text) if text.isdigit() and data[begin] == len(text) else None

    @staticmethod
    def learn(data: bytes, shape: int) -> Usual | None:
        """From an answer that has been read; ``None`` if it was not of that kind."""
        try:
            column = 9 + int.from_bytes(data[5:8], "little")
            end = len(data) - 9
            if data[:5] != HEAD or data[end : end + 5] != END or data[end + 7] & MORE_RESULTS:
                return None
            if readers([data[9:column]]) != (int,):
                return None
            usual = Usual(data[: column + 9], data[end:], shape)
            return usual if usual.number(data) is not None else None
        except (IndexError, ValueError, struct.error):
            return None
