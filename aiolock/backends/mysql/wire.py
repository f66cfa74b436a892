"""The server's protocol after the login: packets of statements out, the rows of their answers in.

Several packets may be on their way; the server answers them one after the other. Whoever sent one is called with its
answers, or with the error of the first statement that failed, as soon as the last byte is there: no task stands between.

When KILL QUERY comes between two statements of a packet, the server drops the rest without a word. So when the answers stop in
the middle, something is asked behind them: if its answer comes first, the rest was dropped.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from aiolock.backends.mysql.packets import (
    MOST,
    closing,
    dropped,
    error_of,
    execution,
    frame,
    known_frame,
    lost,
    preparing,
)
from aiolock.backends.mysql.rows import Reader, number_at, prepared_number, readers, row_of
from aiolock.backends.mysql.usual import ANY, BINARY, MORE_RESULTS, TEXT, Usual
from aiolock.delivery import read_little

__all__ = ["Heard", "Result", "Wire"]

OK, NULL, EOF, ERROR = 0x00, 0xFB, 0xFE, 0xFF
"""How packets begin, and a value that is none."""
PAUSE = 0.1
"""For how many seconds answers stop in the middle before it is asked whether there are more."""


class Result(NamedTuple):
    """What one statement answered."""

    rows: tuple[tuple[Any, ...], ...]
    changed: int
    """How many rows it changed."""


Heard = Callable[[list[Result] | Exception], None]
"""Who is told how a packet ended."""


class _Asked:
    """A packet that was sent, and what has been answered."""

    __slots__ = ("doubted", "heard", "number", "results", "shape")

    def __init__(self, heard: Heard, number: int, shape: int = ANY) -> None:
        self.heard = heard
        self.number = number
        """That of the next packet of the answer."""
        self.shape = shape
        self.results: list[Result] = []
        self.doubted = 0
        """How many answers there were when the last look found that they had stopped; below zero once it was asked."""


class _Preparing(_Asked):
    """A statement that was sent to be prepared."""

    __slots__ = ("left",)

    def read(self, packet: bytes) -> bool:
        """Take in a packet of the answer; whether it was the last."""
        if not self.results:
            number, columns, parameters = struct.unpack("<IHH", packet[1:9])
            self.results.append(Result(((number,),), 0))
            # Each kind is described by so many packets and an end.
            self.left = sum(count + 1 for count in (columns, parameters) if count)
        else:
            self.left -= 1
        return not self.left


class Wire(asyncio.Protocol):
    """What reads from a connection that is logged in, and writes to it."""

    def __init__(self, transport: Any, ended: Callable[[], None]) -> None:
        self._transport = transport
        read_little(transport)
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
        self._usual: Usual | None = None
        """How the last answer looked to a statement that is asked again and again."""
        self._timer: asyncio.TimerHandle | None = None
        """Of the next look whether answers have stopped in the middle."""
        self.over = False
        """Nothing is answered any more."""

    def ask(self, packet: str, heard: Heard, *, usual: bool = False) -> None:
        """Send statements; ``heard`` is called once, with the answers of all or with an error, and never from here.

        ``usual`` says that this one is asked again and again, and answered by one row.
        """
        if self.over:
            asyncio.get_running_loop().call_soon(heard, lost(None))
            return
        data, number = known_frame(packet) if usual else frame(packet)
        self._asked.append(_Asked(heard, number, TEXT if usual else ANY))
        self._transport.write(data)

    def prepare(self, statement: str, heard: Heard) -> None:
        """Have the server prepare a statement without parameters; ``heard`` is told its number, or an error."""
        if self.over:
            asyncio.get_running_loop().call_soon(heard, lost(None))
            return
        self._asked.append(_Preparing(heard, 1))
        self._transport.write(preparing(statement))

    def execute(self, number: int, heard: Heard) -> None:
        """As :meth:`ask`, for a statement that was prepared, and answers one integer."""
        if self.over:
            asyncio.get_running_loop().call_soon(heard, lost(None))
            return
        # What is behind the writing is not waited for by the server, and nothing is read before we are done.
        self._transport.write(execution(number))
        self._asked.append(_Asked(heard, 1, BINARY))

    def forget(self, number: int) -> None:
        """A prepared statement is of no more use; nothing is answered."""
        if not self.over:
            self._transport.write(closing(number))

    # --- reading

    def data_received(self, data: bytes) -> None:
        """Take apart what came."""
        usual, waiting = self._usual, self._asked
        if usual is not None and waiting and not self._missing:
            # Whoever waits for such an answer waits for nothing else, so this is the shortest way.
            asked = waiting[0]
            if (
                asked.shape == usual.shape
                and asked.number == 1
                and (number := usual.number(data)) is not None
            ):
                waiting.popleft()
                asked.heard([Result(((number,),), 1)])
                return
        if self._missing:
            self._parts.append(data)
            self._missing -= len(data)
            if self._missing > 0:
                return
            data = b"".join(self._parts)
            self._parts.clear()
            self._missing = 0
        start, end = 0, len(data)
        first = self._asked[0] if self._asked else None
        whole = first is not None and first.shape and first.number == 1
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
                if not self._stopped(asked) or data[begin + 3] != 1 or len(self._asked) == 1:
                    self._lose()
                    return
                self._answer(asked, dropped())
                if self.over:
                    return
                asked = self._asked[0]
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
        elif whole and first is not None and len(first.results) == 1:
            self._usual = Usual.learn(data, first.shape)
        if self._timer is None and self._asked and self._asked[0].results:
            self._timer = asyncio.get_running_loop().call_later(PAUSE, self._look)

    def _stopped(self, asked: _Asked) -> bool:
        """Whether it has answers, and what comes next is another one's first packet, or the first of another answer."""
        begun = self._left or self._columns or self._readers is not None or self._long
        return (
            bool(asked.results)
            and not begun
            and asked.number & 255 != 1
            and not isinstance(asked, _Preparing)
        )

    def _look(self) -> None:
        """Have the answers stopped? Most have come to their end long before anybody looks."""
        self._timer = None
        asked = self._asked[0] if self._asked else None
        if self.over or asked is None or not asked.results or asked.doubted < 0:
            return
        if asked.doubted == len(asked.results) and self._stopped(asked):
            asked.doubted = -1
            self.ask("DO 0", _nothing)
            return
        asked.doubted = len(asked.results)
        self._timer = asyncio.get_running_loop().call_later(PAUSE, self._look)

    def _read(self, asked: _Asked, packet: bytes) -> None:
        first = packet[0]
        if isinstance(asked, _Preparing):
            if first == ERROR and not asked.results:
                self._answer(asked, error_of(packet))
            elif asked.read(packet):
                self._answer(asked, asked.results)
        elif self._left:
            self._columns.append(packet)
            self._left -= 1
        elif first == ERROR:
            self._answer(asked, error_of(packet))
        elif self._columns:
            if first != EOF:
                raise ValueError(first)
            self._readers = () if asked.shape == BINARY else readers(self._columns)
            self._columns = []
        elif self._readers is not None:
            if first == EOF and len(packet) < 9:
                rows, self._rows, self._readers = tuple(self._rows), [], None
                asked.results.append(Result(rows, len(rows)))
                self._next(asked, packet[3] | packet[4] << 8)
            else:
                row = (prepared_number(packet),) if asked.shape == BINARY else row_of(packet, self._readers)
                self._rows.append(row)
        elif first == OK:
            changed, place = number_at(packet, 1)
            _, place = number_at(packet, place)
            asked.results.append(Result((), changed or 0))
            self._next(asked, packet[place] | packet[place + 1] << 8)
        elif first == NULL:
            raise ValueError(first)  # it wants a file of ours
        else:
            self._left = number_at(packet, 0)[0] or 0

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
        self._no_look()
        self.over = True
        self._transport.abort()
        asked, self._asked = self._asked, deque()
        for one in asked:
            one.heard(lost(error))
        self._ended()

    def close(self) -> None:
        """Nobody wants to hear anything any more."""
        self._no_look()
        self.over = True
        self._asked.clear()

    def _no_look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _nothing(outcome: list[Result] | Exception) -> None:
    """Who hears what was asked only to see that it is answered."""
