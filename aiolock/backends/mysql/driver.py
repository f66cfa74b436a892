"""The edge to aiomysql: everything that relies on how that driver works inside is here, and nowhere else.

aiomysql connects and authenticates. What it lacks is added: a password is not sent in the clear when TLS was asked for and
not offered. After the login its connection is ours: :mod:`aiolock.backends.mysql.wire` sends and reads, tells the end
of the connection when it happens, and gives back all results of a packet of several statements. What the driver does
unasked (reconnecting, pooling) is not used.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

import aiomysql
import pymysql.err
from pymysql.constants import CLIENT, COMMAND

from aiolock.backends.mysql.wire import Heard, Result, Wire

__all__ = ["NO_RSA", "NO_TLS", "Driver", "Result"]

NO_TLS = "the server does not offer TLS, which was asked for"
NO_RSA = (
    "without TLS, the password of this account (MySQL's caching_sha2_password or sha256_password) is sent encrypted by the "
    "package cryptography, which is not installed: use tls=verify, or install cryptography"
)

NO_LOGIN = 2061
"""The number that MySQL's own clients give to a way of logging in that does not work on their side."""

_TCP_KEEPALIVE = (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
"""A dead link under a statement that waits for long is noticed after so many seconds and probes."""


class Driver(aiomysql.Connection):  # type: ignore[misc]  # the driver is untyped
    """One connection of aiomysql's, opened by :meth:`connect`."""

    _ssl_context: ssl.SSLContext | None
    _reader: Any
    _writer: Any
    _wire: Wire

    repeat: Callable[[int, Heard], None]
    """As :meth:`ask`, for a prepared statement that answers one integer: what goes from hand to hand does so by this."""

    def __del__(self) -> None:
        """Do nothing: whoever owns a connection closes it; a forked child must not."""

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
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            for option, value in _TCP_KEEPALIVE:
                if hasattr(socket, option):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._wire = Wire(transport, ended)
        self.repeat = self._wire.execute
        at_end, failed = self._reader.at_eof(), self._reader.exception()
        transport.set_protocol(self._wire)
        if at_end or failed is not None:
            # It ended while the driver still read from it.
            self.abort()
            raise pymysql.err.OperationalError(2013, "the connection was lost")

    async def _request_authentication(self) -> None:
        if self._ssl_context is not None and not self.server_capabilities & CLIENT.SSL:
            raise pymysql.err.OperationalError(2026, NO_TLS)
        try:
            await super()._request_authentication()
        except RuntimeError as error:
            # That is how the driver says that it lacks the package.
            if "cryptography" not in str(error):
                raise
            raise pymysql.err.OperationalError(NO_LOGIN, NO_RSA) from error

    def ask(self, packet: str, heard: Heard, *, usual: bool = False) -> None:
        """Send one packet of one or several statements; ``heard`` is called with all their answers, or an error.

        ``usual`` says that it is one that is asked again and again.
        """
        self._wire.ask(packet, heard, usual=usual)

    def prepare(self, statement: str, heard: Heard) -> None:
        """Have the server prepare a statement; ``heard`` is told its number, or an error."""
        self._wire.prepare(statement, heard)

    def forget(self, number: int) -> None:
        """A prepared statement is of no more use."""
        self._wire.forget(number)

    async def execute(self, packet: str) -> list[Result]:
        """The same for who waits. Cancelling it stops the waiting: the connection is of no more use then."""
        answer: asyncio.Future[list[Result]] = asyncio.get_running_loop().create_future()

        def heard(outcome: list[Result] | Exception) -> None:
            if answer.done():
                return
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        self.ask(packet, heard)
        return await answer

    @property
    def over(self) -> bool:
        """Whether the connection has ended, or is out of step."""
        return self._wire.over

    def abort(self) -> None:
        """Close without waiting for anybody."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._forget()

    def quit(self) -> None:
        """Say goodbye, so that the server does not log an aborted connection, and close."""
        if self._writer is not None and not self._writer.transport.is_closing():
            self._writer.write(b"\x01\x00\x00\x00" + bytes([COMMAND.COM_QUIT]))
            self._writer.transport.close()
        self._forget()

    def _forget(self) -> None:
        if hasattr(self, "_wire"):
            self._wire.close()
        self._writer = self._reader = None
