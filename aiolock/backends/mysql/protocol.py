"""MySQL client protocol: log in by aiomysql, then packets of statements out and rows of their answers in.

After the login this module speaks the protocol, because the driver's coroutines cannot pipeline, lose the step when they are
cancelled, and report the end of the connection only to a reader. The driver's reconnecting and pooling are not used.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import pymysql.err
from pymysql.constants import COMMAND, CR, ER, FIELD_TYPE
from pymysql.converters import decoders, through
from pymysql.protocol import FieldDescriptorPacket

from aiolock.backends.mysql.driver import MySQLLogin
from aiolock.core.tasks import settle
from aiolock.core.wakeup import read_little

__all__ = ["Driver", "Result", "Wire"]

MOST = 0xFFFFFF
"""Bytes of one packet; a longer message would take several, and no row or statement of the library is so long."""
KNOWN = 256
"""Number of column lists whose readers are cached: most statements are sent again and again."""
PAUSE = 0.1
"""Seconds for which answers stop in the middle before it is asked whether there are more."""
MORE_RESULTS = 0x0008
OK, NULL, EOF, ERROR = 0x00, 0xFB, 0xFE, 0xFF
"""First bytes of packets, and of a value that is NULL."""
BINARY = 63
"""The character set of bytes."""
TEXTS = {
    *(FIELD_TYPE.VARCHAR, FIELD_TYPE.VAR_STRING, FIELD_TYPE.STRING, FIELD_TYPE.BLOB),
    *(FIELD_TYPE.TINY_BLOB, FIELD_TYPE.MEDIUM_BLOB, FIELD_TYPE.LONG_BLOB),
}


class Result(NamedTuple):
    """The answer to one statement."""

    rows: tuple[tuple[Any, ...], ...]
    changed: int
    """Number of rows that it changed."""


OnAnswer = Callable[[list[Result] | Exception], None]
"""Called with the answers to all statements of a packet, or with the error of the first that failed."""
Reader = Callable[[bytes], Any]
"""Makes a value of its text."""

# --- packets


def _frame(packet: str) -> bytes:
    """Return the bytes of a packet of statements, which is never so long that it would take several."""
    payload = bytes([COMMAND.COM_QUERY]) + packet.encode("utf-8", "surrogateescape")
    return len(payload).to_bytes(3, "little") + b"\0" + payload


def _lost(cause: Exception | None) -> Exception:
    error: Exception = pymysql.err.OperationalError(CR.CR_SERVER_LOST, "the connection was lost")
    error.__cause__ = cause
    return error


def _error_of(packet: bytes) -> Exception:
    try:
        pymysql.err.raise_mysql_exception(packet)
    except pymysql.err.MySQLError as error:
        found: Exception = error
        return found
    raise ValueError(packet)  # it always raises


def _number_at(packet: bytes, start: int) -> tuple[int | None, int]:
    """Return an integer of variable length, and where it ends; ``None`` for NULL."""
    first = packet[start]
    if first < NULL:
        return first, start + 1
    if first == NULL:
        return None, start + 1
    size = {0xFC: 2, 0xFD: 3, 0xFE: 8}[first] if first != ERROR else 0
    end = start + 1 + size
    if not size or end > len(packet):
        raise ValueError(first)
    return int.from_bytes(packet[start + 1 : end], "little"), end


def _row_of(packet: bytes, readers: tuple[Reader, ...]) -> tuple[Any, ...]:
    start = 0
    values: list[Any] = []
    for read in readers:
        size, start = _number_at(packet, start)
        if size is None:
            values.append(None)
            continue
        end = start + size
        if end > len(packet):
            raise ValueError(size)
        values.append(read(packet[start:end]))
        start = end
    return tuple(values)


@lru_cache(KNOWN)
def _readers_of(columns: tuple[bytes, ...]) -> tuple[Reader, ...]:
    """Return the functions that make values of the texts of these columns, as the driver would."""
    return tuple(_reader(FieldDescriptorPacket(column, "utf-8")) for column in columns)


def _reader(column: Any) -> Reader:
    kind = column.type_code
    if kind in TEXTS:
        return bytes if column.charsetnr == BINARY else _text
    convert = decoders.get(kind, through)
    if convert in (int, through):
        return int if convert is int else _text
    return lambda data: convert(_text(data))


def _text(data: bytes) -> str:
    return data.decode("utf-8")


# --- the connection


class _Sent:
    """A packet that was sent, and the answers so far."""

    __slots__ = ("doubted", "number", "on_answer", "results")

    def __init__(self, on_answer: OnAnswer) -> None:
        self.on_answer = on_answer
        self.number = 1
        """Sequence number of the next packet of the answer."""
        self.results: list[Result] = []
        self.doubted = 0
        """Number of answers when the last check found that they had stopped; -1 once the server was asked."""


class Wire(asyncio.Protocol):
    """Pipeline packets on a connection that is logged in, and match the answers to them.

    When KILL QUERY comes between two statements of a packet, the server drops the rest and says nothing. So when answers
    stop in the middle, a statement is sent behind them: if its answer comes first, the rest was dropped.
    """

    def __init__(self, transport: Any, ended: Callable[[], None]) -> None:
        self._transport = transport
        read_little(transport)
        self._ended = ended
        self._sent: deque[_Sent] = deque()
        self._rest = bytearray()
        """The bytes of a packet that is not complete."""
        self._whole = 0
        """The size of the whole of it, as far as that is known."""
        self._columns: list[bytes] = []
        self._left = 0
        """Number of descriptions of columns that are still to come."""
        self._readers: tuple[Reader, ...] | None = None
        self._rows: list[tuple[Any, ...]] = []
        self._timer: asyncio.TimerHandle | None = None
        """The next check whether answers have stopped in the middle."""
        self.over = False
        """True when no packet is answered any more."""

    def ask(self, packet: str, on_answer: OnAnswer) -> None:
        """Send statements; ``on_answer`` is called once, and never from here."""
        if self.over:
            asyncio.get_running_loop().call_soon(on_answer, _lost(None))
            return
        data = _frame(packet)
        self._sent.append(_Sent(on_answer))
        self._transport.write(data)

    # --- reading

    def data_received(self, data: bytes) -> None:
        """Split the bytes into packets."""
        if self._rest:
            # A long packet comes in many pieces: each is copied once, and not with all that came before it.
            self._rest += data
            if len(self._rest) < self._whole:
                return
            data = bytes(self._rest)
        start, end, self._whole = 0, len(data), 4
        while end - start >= 4:
            size = data[start] | data[start + 1] << 8 | data[start + 2] << 16
            begin, start = start, start + 4 + size
            if start > end:
                self._whole, start = start - begin, begin
                break
            sent, number, packet = (
                self._sent[0] if self._sent else None,
                data[begin + 3],
                data[begin + 4 : start],
            )
            if sent is not None and number != sent.number & 255:
                sent = self._after_dropped(sent, number)
            try:
                if sent is None or size == MOST:
                    # Sent by a server that shuts down, an answer too many, or one out of step.
                    raise ValueError(number)
                sent.number += 1
                self._read(sent, packet)
            except (IndexError, ValueError, struct.error):
                self._lose()
            if self.over:
                return
        self._rest = bytearray(data[start:])
        if self._timer is None and self._sent and self._sent[0].results:
            self._timer = asyncio.get_running_loop().call_later(PAUSE, self._check)

    def _read(self, sent: _Sent, packet: bytes) -> None:
        first = packet[0]
        if self._left:
            self._columns.append(packet)
            self._left -= 1
        elif first == ERROR:
            self._answer(sent, _error_of(packet))
        elif self._columns:
            if first != EOF:
                raise ValueError(first)
            self._readers = _readers_of(tuple(self._columns))
            self._columns = []
        elif self._readers is not None:
            if first == EOF and len(packet) < 9:
                rows, self._rows, self._readers = tuple(self._rows), [], None
                sent.results.append(Result(rows, len(rows)))
                self._next(sent, packet[3] | packet[4] << 8)
            else:
                self._rows.append(_row_of(packet, self._readers))
        elif first == OK:
            changed, start = _number_at(packet, 1)
            _, start = _number_at(packet, start)
            sent.results.append(Result((), changed or 0))
            self._next(sent, packet[start] | packet[start + 1] << 8)
        elif first == NULL:
            raise ValueError(first)  # it requests a local file
        else:
            self._left = _number_at(packet, 0)[0] or 0

    def _next(self, sent: _Sent, status: int) -> None:
        if not status & MORE_RESULTS:
            self._answer(sent, sent.results)

    def _answer(self, sent: _Sent, outcome: list[Result] | Exception) -> None:
        self._left, self._columns, self._readers, self._rows = 0, [], None, []
        self._sent.popleft()
        sent.on_answer(outcome)

    # --- answers that stop in the middle

    def _after_dropped(self, sent: _Sent, number: int) -> _Sent | None:
        """Fail a packet of which the rest was dropped; return the next, or ``None`` if the answers are out of step."""
        if not self._stopped(sent) or number != 1 or len(self._sent) == 1:
            return None
        # As the server says itself when it ends a statement.
        self._answer(sent, pymysql.err.OperationalError(ER.QUERY_INTERRUPTED, "the rest was dropped"))
        return self._sent[0] if self._sent else None

    def _stopped(self, sent: _Sent) -> bool:
        """Return whether the next packet begins the answer to another statement or packet."""
        begun = self._left or self._columns or self._readers is not None
        return bool(sent.results) and not begun and sent.number & 255 != 1

    def _check(self) -> None:
        """Ask behind answers that have stopped since the last check."""
        self._timer = None
        sent = self._sent[0] if self._sent else None
        if self.over or sent is None or not sent.results or sent.doubted < 0:
            return
        if sent.doubted == len(sent.results) and self._stopped(sent):
            sent.doubted = -1
            self.ask("DO 0", lambda _: None)
            return
        sent.doubted = len(sent.results)
        self._timer = asyncio.get_running_loop().call_later(PAUSE, self._check)

    # --- the end

    def eof_received(self) -> None:
        """End: everything that was answered has been read."""
        self._lose()

    def connection_lost(self, exc: Exception | None) -> None:
        """End, for whatever reason."""
        self._lose(exc)

    def _lose(self, error: Exception | None = None) -> None:
        if self.over:
            return
        unanswered, self._sent = self._sent, deque()
        self.close()
        self._transport.abort()
        for one in unanswered:
            one.on_answer(_lost(error))
        self._ended()

    def close(self) -> None:
        """Call no callback any more."""
        self.over = True
        self._sent.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# --- the connection that is logged in


class Driver(MySQLLogin):
    """One connection, opened by :meth:`connect`."""

    wire: Wire
    """Sends and reads after the login."""

    async def connect(self, ended: Callable[[], None]) -> None:
        """Connect and log in; from then on ``ended`` is called once, when the connection ends.

        If it raises, also by being cancelled, no socket is left behind.
        """
        try:
            await self._connect()
        except BaseException:
            self.abort()
            raise
        transport = self._writer.transport
        self._probe_link()
        self.wire = Wire(transport, ended)
        at_end, failed = self._reader.at_eof(), self._reader.exception()
        transport.set_protocol(self.wire)
        if at_end or failed is not None:
            # It ended while the driver still read from it.
            self.abort()
            raise _lost(None)

    async def execute(self, packet: str) -> list[Result]:
        """Send a packet and wait for its answers. After a cancellation the connection is of no more use."""
        answer: asyncio.Future[list[Result] | Exception] = asyncio.get_running_loop().create_future()
        self.wire.ask(packet, lambda outcome: settle(answer, outcome))
        outcome = await answer
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def abort(self) -> None:
        """Close at once."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._forget()

    def quit(self) -> None:
        """Close, and notify the server, so that it does not log an aborted connection."""
        if self._writer is not None and not self._writer.transport.is_closing():
            self._writer.write(b"\x01\x00\x00\x00" + bytes([COMMAND.COM_QUIT]))
            self._writer.transport.close()
        self._forget()

    def _forget(self) -> None:
        if hasattr(self, "wire"):
            self.wire.close()
        self._writer = self._reader = None
