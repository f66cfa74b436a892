"""One TCP connection to one server: connected within a bound, and known to be dead the moment it is.

aiozk's framing, serialisation and matching of replies are used. Its ways to connect, to read and to close are not:
they probe without a bound, busy-wait inside a frame, and do not tell when the peer has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from random import Random
from typing import Any

from aiozk import connection, exc, protocol

from aiolock.backends.zookeeper.address import Host
from aiolock.backends.zookeeper.wire import InDoubt

__all__ = ["Connection", "Refused", "Resolver"]


log = logging.getLogger("aiolock.zookeeper")


_NOT_OURS = (exc.SessionExpired, exc.SessionMoved, exc.UnknownSession)


class Refused(Exception):
    """The server was reached and closed the connection instead of answering the handshake."""


class Resolver:
    """The addresses behind names; about each name one question at a time, however long the answer takes."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._asked: dict[Host, asyncio.Future[list[str]]] = {}

    async def resolve(self, host: Host) -> list[str]:
        """Every address behind a name, in random order; asked anew each time, because addresses change.

        Cancelling it leaves the question open: the next call waits for the same answer. Raises :class:`OSError`.
        """
        try:
            return [str(ipaddress.ip_address(host.name))]
        except ValueError:
            pass
        asked = self._asked.get(host)
        if asked is None:
            asked = self._asked[host] = _look_up(host)
        await asyncio.wait([asked])
        self._asked.pop(host, None)
        addresses = asked.result()
        return self._random.sample(addresses, len(addresses))


def _look_up(host: Host) -> asyncio.Future[list[str]]:
    """Ask the resolver in a thread that nobody waits for: one that hangs would keep the loop's executor from ending."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[str]] = loop.create_future()

    def tell(addresses: list[str] | None, error: OSError | None) -> None:
        if error is not None:
            _fail(found, error)
        else:
            found.set_result(addresses or [])

    def work() -> None:
        addresses: list[str] | None = None
        failure: OSError | None = None
        try:
            answers = socket.getaddrinfo(host.name, host.port, type=socket.SOCK_STREAM)
            addresses = [str(answer[4][0]) for answer in answers]
        except (OSError, UnicodeError) as error:
            failure = (
                error if isinstance(error, OSError) else OSError(f"{host.name} is no host name: {error}")
            )
        # The loop may be gone by now, and with it whoever asked.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, addresses, failure)

    threading.Thread(target=work, name="aiolock-zookeeper-resolve", daemon=True).start()
    return found


class _Ending(asyncio.StreamReaderProtocol):
    """Every end of a connection is the end of what is read.

    Otherwise a connection that was reset, and that nobody waits for any more, is complained about when it is collected.
    """

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - see above
        super().connection_lost(None)


class Connection(connection.Connection):  # type: ignore[misc]
    """aiozk's connection, with its ends repaired.

    ``on_reply`` hears the zxid of each reply, ``on_event`` each watch event, ``on_dead`` the end.
    """

    def __init__(
        self,
        host: Host,
        address: str,
        tls: ssl.SSLContext | None,
        on_reply: Callable[[int], None],
        on_event: Callable[[Any], None],
    ) -> None:
        super().__init__(address, host.port, watch_handler=on_event, read_timeout=None)
        self.where = host
        self._tls = tls
        self._on_reply = on_reply
        self.on_dead: Callable[[Connection], None] | None = None
        """Set once the session has accepted this connection."""
        self.dead = False

    async def connect(self) -> None:
        """Open the socket, and TLS on it; the caller sets the bound. Cancelling it leaves nothing open."""
        loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(loop=loop)
        protocol = _Ending(self.reader, loop=loop)
        transport, _ = await loop.create_connection(
            lambda: protocol,
            self.host,
            self.port,
            ssl=self._tls,
            server_hostname=None if self._tls is None else self.where.name,
        )
        self.writer = asyncio.StreamWriter(transport, protocol, self.reader, loop)

    async def handshake(self, request: Any) -> Any:
        """Send the ConnectRequest and return the ConnectResponse; raises :class:`Refused` if there is none."""
        payload = request.serialize()
        self.writer.write(connection.size_struct.pack(len(payload)) + payload)
        try:
            _, _, response = await self.read_response(initial_connect=True)
        except ConnectionError as error:
            raise Refused(f"{self.host}:{self.port} closed the connection in the handshake") from error
        return response

    async def _read(self, size: int = -1) -> bytes:
        try:
            data: bytes = await self.reader.readexactly(size)
        except asyncio.IncompleteReadError as error:
            raise ConnectionAbortedError from error
        return data

    async def read_loop(self) -> None:
        """Hand each reply to whoever asked, until the connection ends, for whatever reason."""
        try:
            while True:
                reply: Any = await self.read_response()
                xid, zxid, response = reply
                if xid == protocol.WATCH_XID:
                    self.watch_handler(response)
                    continue
                if xid in protocol.SPECIAL_XIDS:
                    future = self.pending_specials[xid].pop(0)
                else:
                    future = self.pending.pop(xid)
                if zxid > 0:
                    self._on_reply(zxid)
                if isinstance(response, _NOT_OURS):
                    # This server does not have our session any more: another connection will tell what became of it.
                    response = InDoubt(self.host, self.port)
                    self.die()
                if future.done():
                    continue
                if isinstance(response, Exception):
                    _fail(future, response)
                else:
                    future.set_result(response)
        except OSError as error:
            # Every way in which a connection ends is the same for us.
            log.debug("%s:%s: %r", self.host, self.port, error)
        except Exception:
            log.exception("%s:%s sent what cannot be understood", self.host, self.port)
        finally:
            self.die()

    def die(self) -> None:
        """It is over: whoever waits for a reply is in doubt now, and the session looks for another server."""
        if self.dead:
            return
        self.dead = self.closing = True
        for future in self.drain_all_pending():
            if not future.done():
                _fail(future, InDoubt(self.host, self.port))
        if self.read_loop_task is not None:
            self.read_loop_task.cancel()
        if self.writer is not None:
            self.writer.transport.abort()
        if self.on_dead is not None:
            self.on_dead(self)

    def abort(self, exception: type[Exception] = exc.ConnectError) -> None:  # noqa: ARG002 - aiozk's signature
        """What aiozk calls when writing has failed."""
        self.die()

    @property
    def broken(self) -> bool:
        """Whether nothing that is written will arrive; may be true a moment before the reading ends."""
        return self.dead or self.writer.transport.is_closing()

    async def closed(self) -> None:
        """Wait until nothing of it is left, after :meth:`die`."""
        if self.read_loop_task is not None:
            await asyncio.wait([self.read_loop_task])
        if self.writer is not None:
            with contextlib.suppress(OSError):
                await self.writer.wait_closed()


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    future.set_exception(error)
    # Whoever asked may have been cancelled in this very step: then nobody looks at it, and that is no mistake.
    future.exception()
