"""The edge to aiomysql: everything that relies on how that driver works inside is here, and nowhere else.

aiomysql connects, authenticates and parses packets. What it lacks is added: a password is not sent in the clear when
TLS was asked for and not offered, the end of the connection is told when it happens instead of at the next command, and a packet of
several statements gives back all of their results. What it does unasked (reconnecting, pooling) is not used.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Any, NamedTuple

import aiomysql
import pymysql.err
from pymysql.constants import CLIENT, COMMAND

__all__ = ["NO_TLS", "Driver", "Result"]

NO_TLS = "the server does not offer TLS, which was asked for"

_TCP_KEEPALIVE = (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
"""A dead link under a statement that waits for long is noticed after so many seconds and probes."""


class Result(NamedTuple):
    """What one statement answered."""

    rows: tuple[tuple[Any, ...], ...]
    changed: int
    """How many rows it changed."""


class Driver(aiomysql.Connection):  # type: ignore[misc]  # the driver is untyped
    """One connection of aiomysql's, opened by :meth:`connect`."""

    _ssl_context: ssl.SSLContext | None
    _reader: Any
    _writer: Any
    _result: Any

    def __del__(self) -> None:
        """Do nothing: whoever owns a connection closes it; a forked child must not."""

    async def connect(self, ended: Callable[[], None]) -> None:
        """Connect and log in; from then on ``ended`` is called, once or more, when the connection ends.

        If it raises, also by being cancelled, no socket is left behind.
        """
        try:
            await self._connect()
        except BaseException:
            self.abort()
            raise
        sock = self._writer.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            for option, value in _TCP_KEEPALIVE:
                if hasattr(socket, option):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        _tell(self._reader, ended)

    async def _request_authentication(self) -> None:
        if self._ssl_context is not None and not self.server_capabilities & CLIENT.SSL:
            raise pymysql.err.OperationalError(2026, NO_TLS)
        await super()._request_authentication()

    async def execute(self, packet: str) -> list[Result]:
        """Send one packet of one or several statements, and read all their answers."""
        await self.query(packet)
        results = [self._answer()]
        while self._result.has_next:
            await self.next_result()
            results.append(self._answer())
        return results

    def _answer(self) -> Result:
        return Result(self._result.rows or (), self._result.affected_rows or 0)

    @property
    def usable(self) -> bool:
        """Whether the next command can be sent; the driver closes itself when it is cancelled or out of step."""
        return self._writer is not None and not self._reader.at_eof()

    def abort(self) -> None:
        """Close without waiting for anybody."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._writer = self._reader = None

    def quit(self) -> None:
        """Say goodbye, so that the server does not log an aborted connection, and close."""
        if self._writer is not None and not self._writer.transport.is_closing():
            self._writer.write(b"\x01\x00\x00\x00" + bytes([COMMAND.COM_QUIT]))
            self._writer.transport.close()
        self._writer = self._reader = None


def _tell(reader: Any, ended: Callable[[], None]) -> None:
    """Have a stream reader call ``ended`` when its stream ends: the transport tells it, and it tells nobody."""
    feed_eof, set_exception = reader.feed_eof, reader.set_exception

    def at_eof() -> None:
        feed_eof()
        ended()

    def at_error(error: Exception) -> None:
        set_exception(error)
        ended()

    reader.feed_eof, reader.set_exception = at_eof, at_error
