"""The answer to a statement that is sent again and again: one number, and always the same around it.

Whoever waits for such an answer waits for nothing else, so it is not taken apart but compared.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from aiolock.backends.mysql.rows import readers

__all__ = ["Usual"]

HEAD = b"\1\0\0\1\1"
"""A packet of one byte, the first of the answer: one column."""
END = b"\5\0\0\5\xfe"
"""How the last packet begins, the fifth: one of the column, one of the end of columns, and one of the row were before it."""
MORE_RESULTS = 0x0008


class Usual(NamedTuple):
    """What an answer looked like."""

    head: bytes
    """What came before the row's packet."""
    tail: bytes
    """What came after it."""
    prepared: bool
    """Whether the statement was prepared: numbers are sent as such then, and else as text."""

    def number(self, data: bytes) -> int | None:
        """The number in an answer that looks like it; ``None`` if this one does not."""
        size = len(self.head)
        begin, end = size + 4, len(data) - 9
        if (
            end <= begin
            or data[end:] != self.tail
            or data[:size] != self.head
            or data[size + 1 : begin] != b"\0\0\4"
        ):
            return None
        length = data[size]
        if length != end - begin:
            return None
        if self.prepared:
            if length != 10 or data[begin] or data[begin + 1]:
                return None
            return int.from_bytes(data[begin + 2 : end], "little", signed=True)
        text = data[begin + 1 : end]
        return int(text) if text.isdigit() and data[begin] == length - 1 else None

    @staticmethod
    def learn(data: bytes, prepared: bool) -> Usual | None:
        """From an answer that has been read; ``None`` if it was not of that kind."""
        try:
            column = 9 + int.from_bytes(data[5:8], "little")
            end = len(data) - 9
            if data[:5] != HEAD or data[end : end + 5] != END or data[end + 7] & MORE_RESULTS:
                return None
            if readers([data[9:column]]) != (int,):
                return None
            usual = Usual(data[: column + 9], data[end:], prepared)
            return usual if usual.number(data) is not None else None
        except (IndexError, ValueError, struct.error):
            return None
