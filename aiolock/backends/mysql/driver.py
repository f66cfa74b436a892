"""Connections by aiomysql: log in, packets of statements out, and rows, counts and numbers of their answers in.

The driver's pooling and reconnecting are not used, and its coroutines are never cancelled: they lose the step then.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import aiomysql
import pymysql.err
from aiomysql.connection import _open_connection
from pymysql.constants import CLIENT, CR

from aiolock.backends.dial import open_socket
from aiolock.backends.mysql.errors import deadly, takes_no_writes, translate
from aiolock.errors import BackendError, BackendUnavailable, DeadlockDetected

__all__ = ["NO_RSA", "NO_TLS", "MySQLDriver", "MySQLLogin", "StatementAnswer"]

NO_TLS = "the server does not offer TLS, which tls= asks for"
NO_RSA = (
    "without TLS, the password of this account (MySQL's caching_sha2_password or sha256_password) is sent encrypted by the "
    "package cryptography, which is not installed: use tls=verify, or install cryptography"
)

NO_LOGIN = 2061
"""MySQL's error number for a way of logging in that the client does not have."""

_TCP_KEEPALIVE = (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
"""Seconds and probes after which a dead link under a statement that waits for long is noticed."""


class MySQLLogin(aiomysql.Connection):  # type: ignore[misc]  # the driver is untyped
    """A connection that logs in as the driver does, but to the first address of a host that answers, and by TLS only if told to."""

    _ssl_context: Any
    _reader: Any
    _writer: Any

    def __del__(self) -> None:
        """Do nothing: the owner of a connection closes it, and a forked child must not."""

    async def _connect(self) -> None:
        if self._unix_socket:
            await super()._connect()
            return
        try:
            opened = await open_socket(self._host, self._port)
            self._reader, self._writer = await _open_connection(sock=opened)
            self._set_keep_alive()
            self._set_nodelay(True)  # noqa: FBT003 - a method of the driver
            self._next_seq_id = 0
            await self._get_server_information()
            await self._request_authentication()
        except OSError as error:
            text = f"Can't connect to MySQL server on {self._host!r}"
            raise pymysql.err.OperationalError(CR.CR_CONN_HOST_ERROR, text) from error

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

    def _probe_link(self) -> None:
        """Have the system find out that the server's machine is gone, also while no answer is due."""
        sock = self._writer.transport.get_extra_info("socket")
        for option, value in _TCP_KEEPALIVE if sock.family != socket.AF_UNIX else ():
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class StatementAnswer(NamedTuple):
    """The answer to one statement."""

    rows: tuple[tuple[Any, ...], ...]
    changed: int
    """The number of rows that it changed."""
    number: int
    """The last argument of LAST_INSERT_ID; 0 without one."""


class MySQLDriver(MySQLLogin):
    """A connection as pipelines use it."""

    server = ""
    """The identity of the server."""
    where = ""
    """The name of the server."""
    clock_stands = False
    """True if SYSDATE is NOW on this server: a statement shows the time at which it began."""

    async def login(self) -> None:
        """Connect and log in. If it raises, also by being cancelled, no socket is left behind."""
        try:
            await self._connect()
        except BaseException:
            self.terminate()
            raise
        self._probe_link()

    async def run(self, packet: str, answers: list[StatementAnswer] | None = None) -> list[StatementAnswer]:
        """Send a packet of statements; the answers to all.

        Raises the error of the first statement that fails, after which the server executes no other one: ``answers`` then has
        those that came before. After a cancellation the connection is of no more use.
        """
        answers = [] if answers is None else answers
        await self.query(packet)
        while True:
            found: Any = self._result
            answers.append(
                StatementAnswer(tuple(found.rows or ()), found.affected_rows or 0, found.insert_id or 0)
            )
            if not found.has_next:
                return answers
            await self.next_result()

    async def fetch(self, *statement: Any) -> list[StatementAnswer]:
        """Send a packet of statements; the answers to all. After a cancellation the connection is of no more use."""
        [packet] = statement
        return await self.run(packet)

    def on_end(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` when the connection has ended: the driver reports that to a reader only."""
        reader, loop = self._reader, asyncio.get_running_loop()
        feed_eof, set_exception = reader.feed_eof, reader.set_exception

        def end() -> None:
            feed_eof()
            loop.call_soon(ended)

        def fail(error: Exception) -> None:
            set_exception(error)
            loop.call_soon(ended)

        reader.feed_eof, reader.set_exception = end, fail

    def doubt(self) -> str:
        """Return an empty string: a server that has committed says nothing more."""
        return ""

    def failure(self, error: Exception, address: str) -> tuple[BackendError, bool]:
        """Return the error of this library for one of the driver's, and whether the connection is of no more use."""
        translated = translate(error, address)
        # Where the server takes no writes any more, connecting again finds the one that has taken over.
        dead = deadly(error) or takes_no_writes(error)
        if isinstance(translated, DeadlockDetected):
            return BackendUnavailable(f"{address}: the server has undone the transaction"), dead
        assert isinstance(translated, BackendError)  # noqa: S101 - all others are
        return translated, dead

    def is_closed(self) -> bool:
        """Return whether no statement can be sent any more."""
        if self._writer is None or self._writer.transport.is_closing():
            return True
        return bool(self._reader.at_eof() or self._reader.exception() is not None)

    def terminate(self) -> None:
        """Close at once."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    async def quit(self, within: float) -> None:
        """Close in good order, so that the server logs no aborted connection. Cancelling it may leave it open."""
        async with asyncio.timeout(within):
            await self.ensure_closed()
