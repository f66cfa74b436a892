"""One TCP connection to one server: connected within a bound, known to be dead the moment it is, and read as bytes come.

aiozk's connection probes without a bound, busy-waits inside a frame, and does not tell when the peer has gone. This one
is a protocol of the event loop: an answer wakes who waits for it, and nothing else. What the tasks woken by the same
bytes have to say is written together.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, cast

from aiozk import exc, protocol

from aiolock.backends.zookeeper.address import Host
from aiolock.backends.zookeeper.frames import INT, Event, Request, read_event
from aiolock.backends.zookeeper.outcomes import InDoubt
from aiolock.delivery import read_little
from aiolock.logs import Log, get_logger

__all__ = ["Connection", "Refused", "framed"]

log: Log = get_logger("aiolock.zookeeper")

LONGEST = 2**27
"""Bytes that a message may have: what claims to be longer comes from a stranger."""

_SENT = Struct("!iii")
"""What stands before a request: the length of the rest, its number, its opcode."""
_ANSWERED = Struct("!iqi")
"""What a reply begins with: the number of its request, a zxid, an error."""

_NOT_OURS = (exc.SessionExpired, exc.SessionMoved, exc.UnknownSession)

Future = asyncio.Future[Any]
Read = Callable[[bytes], Any]


class Refused(Exception):
    """The server was reached and closed the connection instead of answering the handshake."""


class _Batch:
    """Several requests that were sent together: done when the last of them is answered, or will never be."""

    __slots__ = ("future", "left", "replies")

    def __init__(self, future: Future, count: int) -> None:
        self.future = future
        self.replies: list[Any] = [None] * count
        self.left = count


class Connection(asyncio.Protocol):
    """``on_reply`` hears the zxid of each reply, ``on_event`` each watch event, ``on_dead`` the end."""

    def __init__(
        self,
        host: Host,
        address: str,
        tls: ssl.SSLContext | None,
        on_reply: Callable[[int], None],
        on_event: Callable[[Event], None],
    ) -> None:
        self.where = host
        self.host = address
        self.port = host.port
        self.transport: asyncio.Transport | None = None
        self._tls = tls
        self._on_reply = on_reply
        self._on_event = on_event
        self.on_dead: Callable[[Connection], None] | None = None
        """Set once the session has accepted this connection."""
        self.dead = False
        self._loop = asyncio.get_running_loop()
        self._greeting: Future | None = None
        """The answer to the handshake, until it is there."""
        self._asked: dict[int, tuple[Read, Future | None, _Batch | None, int]] = {}
        """By the numbers of the requests: how to read the reply, and whose it is."""
        self._rest = b""
        self._together = False
        """Whether what is written waits for what others, woken by the same bytes, have to say."""
        self._out: list[bytes] = []
        self._ended: Future = self._loop.create_future()

    # --- beginning

    async def connect(self) -> None:
        """Open the socket, and TLS on it; the caller sets the bound. Cancelling it leaves nothing open."""
        await self._loop.create_connection(
            lambda: self,
            self.host,
            self.port,
            ssl=self._tls,
            server_hostname=None if self._tls is None else self.where.name,
        )

    async def handshake(self, request: protocol.ConnectRequest) -> Any:
        """Send the ConnectRequest and return the ConnectResponse; raises :class:`Refused` if there is none."""
        if self.dead:
            raise self._refused()
        payload = request.serialize()
        self._greeting = greeting = self._loop.create_future()
        self._write(INT.pack(len(payload)) + payload)
        return await greeting

    def _refused(self) -> Refused:
        return Refused(f"{self.host}:{self.port} closed the connection in the handshake")

    # --- sending

    def send(self, request: Any, xid: int) -> Future:
        """Write one request; the future of its reply."""
        future: Future = self._loop.create_future()
        frame, xid, read = framed(request, xid)
        self._asked[xid] = (read, future, None, 0)
        self._write(frame)
        return future

    def send_all(self, requests: Sequence[Any], xid: int) -> Future:
        """Write several at once, numbered from ``xid``; the future of a list of their replies, or of what came instead."""
        batch = _Batch(self._loop.create_future(), len(requests))
        out = []
        for index, request in enumerate(requests):
            frame, number, read = framed(request, xid + index)
            self._asked[number] = (read, None, batch, index)
            out.append(frame)
        self._write(b"".join(out))
        return batch.future

    def _write(self, data: bytes) -> None:
        if self.dead:
            self._doubt()
        elif self._together:
            self._out.append(data)
        else:
            try:
                assert self.transport is not None  # noqa: S101 - nobody writes before it is connected
                self.transport.write(data)
            except Exception:
                log.exception("writing to %s:%s failed", self.host, self.port)
                self.die()

    def _write_together(self) -> None:
        self._together = False
        if self._out and not self.dead:
            data = b"".join(self._out)
            self._out.clear()
            self._write(data)

    # --- reading

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open, and TLS on it."""
        # What create_connection makes; uvloop's are no subclasses.
        self.transport = cast("asyncio.Transport", transport)
        read_little(transport)

    def data_received(self, data: bytes) -> None:
        """Hand each reply that is complete to whoever asked for it."""
        if self._rest:
            data = self._rest + data
        first, self._together = not self._together, True
        at, size = 0, len(data)
        try:
            while size - at >= 4:
                length = INT.unpack_from(data, at)[0]
                if not 0 <= length <= LONGEST:
                    raise ValueError(f"a message of {length} bytes")  # noqa: TRY301 - one end for all
                begin = at + 4
                if begin + length > size:
                    break
                at = begin + length
                self._take(data[begin:at])
                if self.dead:
                    return
        except Exception as error:  # noqa: BLE001 - whatever a stranger says
            self._misunderstood(error)
            return
        finally:
            if first:
                # After every task that these answers wake.
                self._loop.call_soon(self._write_together)
        self._rest = data[at:] if at < size else b""

    def _take(self, message: bytes) -> None:
        if self._greeting is not None:
            _settle(self._greeting, protocol.ConnectResponse.deserialize(message))
            self._greeting = None
            return
        xid, zxid, error = _ANSWERED.unpack_from(message)
        if xid == protocol.WATCH_XID:
            self._on_event(read_event(message))
            return
        read, future, batch, index = self._asked[xid]
        reply: Any = exc.get_response_error(error) if error else read(message[16:])
        # Not before: whoever asked for what cannot be read is in doubt like the others.
        del self._asked[xid]
        if zxid > 0:
            self._on_reply(zxid)
        if isinstance(reply, _NOT_OURS):
            # This server does not have our session any more: another connection will tell what became of it.
            reply = InDoubt(self.host, self.port)
            self.die()
        _answer(reply, future, batch, index)

    def _misunderstood(self, error: Exception) -> None:
        if self._greeting is not None:
            # Whoever shakes hands hears of it, and tries the next one.
            _settle(self._greeting, error)
        else:
            log.error("%s:%s sent what cannot be understood: %r", self.host, self.port, error, exc_info=error)
        self.die()

    # --- ending

    def connection_lost(self, exc: Exception | None) -> None:
        """Every way in which a connection ends is the same for us."""
        log.debug("%s:%s: %r", self.host, self.port, exc)
        self.die()
        if not self._ended.done():
            self._ended.set_result(None)

    def die(self) -> None:
        """It is over: whoever waits for a reply is in doubt now, and the session looks for another server."""
        if self.dead:
            return
        self.dead = True
        if self._greeting is not None:
            _settle(self._greeting, self._refused())
        self._doubt()
        if self.transport is not None:
            self.transport.abort()
        if self.on_dead is not None:
            self.on_dead(self)

    def _doubt(self) -> None:
        asked = list(self._asked.values())
        self._asked.clear()
        for _, future, batch, index in asked:
            _answer(InDoubt(self.host, self.port), future, batch, index)

    @property
    def broken(self) -> bool:
        """Whether nothing that is written will arrive; may be true a moment before the reading ends."""
        return self.dead or self.transport is None or self.transport.is_closing()

    async def closed(self) -> None:
        """Wait until nothing of it is left, after :meth:`die`."""
        if self.transport is not None:
            await asyncio.wait([self._ended])


def framed(request: Any, xid: int) -> tuple[bytes, int, Read]:
    """A request as it is sent, its number, and how to read its reply."""
    if type(request) is Request:
        opcode, body, read = request
        return _SENT.pack(len(body) + 8, xid, opcode) + body, xid, read
    # One of aiozk's own; some have a number that is always the same.
    number: int = request.special_xid or xid
    payload: bytes = request.serialize(number)
    read = protocol.response_xref[request.opcode].deserialize
    return INT.pack(len(payload)) + payload, number, read


def _answer(reply: Any, future: Future | None, batch: _Batch | None, index: int) -> None:
    if batch is not None:
        batch.replies[index] = reply
        batch.left -= 1
        if not batch.left and not batch.future.done():
            batch.future.set_result(batch.replies)
    elif future is not None:
        _settle(future, reply)


def _settle(future: Future, reply: Any) -> None:
    if future.done():
        return
    if isinstance(reply, Exception):
        future.set_exception(reply)
        # Whoever asked may have been cancelled in this very step: then nobody looks at it, and that is no mistake.
        future.exception()
    else:
        future.set_result(reply)
