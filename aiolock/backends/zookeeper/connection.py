"""Connection to one server of an ensemble: name resolution, host selection, framing and xid matching."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from struct import Struct
from typing import Any, cast

from aiozk import exc
from aiozk import protocol as aiozk_protocol

from aiolock.backends.dial import first, numeric
from aiolock.backends.zookeeper.errors import InDoubt, Refused
from aiolock.backends.zookeeper.protocol import INT, Operation, WatchEvent, read_event
from aiolock.backends.zookeeper.url import Host
from aiolock.core.logs import Log, get_logger
from aiolock.core.tasks import reject, settle
from aiolock.core.wakeup import read_little

__all__ = ["Connection", "Resolver", "Search", "Unheard"]

log: Log = get_logger("aiolock.zookeeper")

Future = asyncio.Future[Any]

# --- host selection


class Unheard(TimeoutError):
    """A server accepted the connection and did not answer in time."""


class Resolver:
    """Resolve host names, anew each time, because addresses change."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._queries: dict[Host, asyncio.Future[list[str]]] = {}

    async def resolve(self, host: Host) -> list[str]:
        """Return every address of a name in random order. Raises :class:`OSError`.

        Cancelling it leaves the query open: the next call for this name waits for the same answer.
        """
        try:
            return [str(ipaddress.ip_address(host.name))]
        except ValueError:
            pass
        query = self._queries.get(host)
        if query is None:
            query = self._queries[host] = asyncio.get_running_loop().create_future()
            # In a daemon thread: a resolver that hangs would keep the loop's executor from ending.
            name = "aiolock-zookeeper-resolve"
            threading.Thread(target=_query, args=(host, query), name=name, daemon=True).start()
        await asyncio.wait([query])
        self._queries.pop(host, None)
        addresses = query.result()
        return self._random.sample(addresses, len(addresses))


def _query(host: Host, query: asyncio.Future[list[str]]) -> None:
    answer: list[str] | OSError
    try:
        infos = socket.getaddrinfo(host.name, host.port, type=socket.SOCK_STREAM)
        answer = [str(info[4][0]) for info in infos]
    except OSError as error:
        answer = error
    except UnicodeError as error:
        answer = OSError(f"{host.name} is no host name: {error}")
    # The loop may be closed by now.
    with contextlib.suppress(RuntimeError):
        query.get_loop().call_soon_threadsafe(_settle, query, answer)


class Search:
    """Find a server that works: try every address of every host in random order, each for a bounded time.

    ``attempt(host, addresses, seconds)`` returns whether it ended with a connected session. It uses the address that answers
    first, and takes out of the list what is not to be tried again.
    """

    def __init__(
        self,
        hosts: tuple[Host, ...],
        random: Random,
        attempt: Callable[[Host, list[str], float], Awaitable[bool]],
    ) -> None:
        self._hosts = hosts
        self._random = random
        self._resolver = Resolver(random)
        self._attempt = attempt
        self.silent: Host | None = None
        """The server that last left a heartbeat unanswered; it is tried last."""
        self.error: Exception | None = None
        """The last error of an attempt."""
        self._errors: set[type[Exception]] = set()

    async def once(self, seconds: float) -> bool:
        """Try all of them within about ``seconds`` until one works; return whether one does.

        Cancelling it cancels the attempt that is under way.
        """
        limit = max(0.3, seconds / len(self._hosts))
        self._errors.clear()
        shuffled = self._random.sample(self._hosts, len(self._hosts))
        for host in sorted(shuffled, key=lambda host: host == self.silent):
            try:
                async with asyncio.timeout(limit):
                    addresses = await self._resolver.resolve(host)
            except (OSError, TimeoutError) as error:
                self.error = error
                continue
            while addresses:
                try:
                    if await self._attempt(host, addresses, limit):
                        return True
                except Exception as error:  # noqa: BLE001 - whatever goes wrong, the next server is tried
                    self.error = error
                    self._errors.add(type(error))
        return False

    def met(self, kind: type[Exception]) -> bool:
        """Return whether an attempt of the last pass raised this."""
        return kind in self._errors


# --- connection

LONGEST = 2**27
"""The longest message in bytes; a longer one does not come from a ZooKeeper server."""

_REQUEST_HEADER = Struct("!iii")
"""Length of the rest, xid, opcode."""
_REPLY_HEADER = Struct("!iqi")
"""xid, zxid, error."""

_SESSION_GONE = (exc.SessionExpired, exc.SessionMoved, exc.UnknownSession)


@dataclass(slots=True)
class _Batch:
    """Requests that were sent together: done when the last of them is answered or in doubt."""

    future: Future
    replies: list[Any]
    left: int


class Connection(asyncio.Protocol):
    """One TCP connection: replies complete futures in the callback that reads them.

    ``on_reply`` gets the zxid of each reply, ``on_event`` each watch event, ``on_dead`` the end of the connection.
    Requests of tasks that were woken by the same bytes are written together.
    """

    def __init__(
        self,
        host: Host,
        address: str,
        tls: ssl.SSLContext | None,
        on_reply: Callable[[int], None],
        on_event: Callable[[WatchEvent], None],
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
        self._handshake: Future | None = None
        self._pending: dict[int, tuple[Callable[[bytes], Any], Future | _Batch, int]] = {}
        """By xid: the decoder of the reply, its future or batch, and the index in the batch."""
        self._rest = b""
        self._corked = False
        """True if writes are collected until the tasks have run that the last bytes woke."""
        self._out: list[bytes] = []
        self._ended: Future = self._loop.create_future()

    # --- opening

    async def connect(self, addresses: Sequence[str] = ()) -> None:
        """Open the socket, at the first of these addresses that answers, and TLS on it; the caller bounds it.

        Cancelling it leaves nothing open.
        """
        where = [each for address in addresses or [self.host] for each in numeric(address, self.port)]
        opened = await first(where)
        self.host = opened.getpeername()[0]
        tls, name = self._tls, None if self._tls is None else self.where.name
        await self._loop.create_connection(lambda: self, sock=opened, ssl=tls, server_hostname=name)

    async def handshake(self, request: aiozk_protocol.ConnectRequest) -> Any:
        """Send the ConnectRequest and return the ConnectResponse; raises :class:`Refused` if there is none.

        If it is cancelled, the caller has to end the connection; the server may have made a session.
        """
        payload = request.serialize()
        self._handshake = reply = self._loop.create_future()
        self._write(INT.pack(len(payload)) + payload)
        return await reply

    # --- sending

    def send(self, request: Any, xid: int) -> Future:
        """Write one request; return the future of its reply."""
        future: Future = self._loop.create_future()
        self._write(self._frame(request, xid, future, 0))
        return future

    def send_all(self, requests: Sequence[Any], xid: int) -> Future:
        """Write requests numbered from ``xid``; return the future of a list of replies or errors."""
        batch = _Batch(self._loop.create_future(), [None] * len(requests), len(requests))
        frames = [self._frame(request, xid + index, batch, index) for index, request in enumerate(requests)]
        self._write(b"".join(frames))
        return batch.future

    def _frame(self, request: Any, xid: int, target: Future | _Batch, index: int) -> bytes:
        frame, xid, read = framed(request, xid)
        self._pending[xid] = read, target, index
        return frame

    def _write(self, data: bytes) -> None:
        if self.dead:
            self._fail_pending()
        elif self._corked:
            self._out.append(data)
        else:
            try:
                assert self.transport is not None  # noqa: S101 - nothing is written before it is connected
                self.transport.write(data)
            except Exception:
                log.exception("writing to %s:%s failed", self.host, self.port)
                self.die()

    def _uncork(self) -> None:
        self._corked = False
        if self._out and not self.dead:
            data = b"".join(self._out)
            self._out.clear()
            self._write(data)

    # --- receiving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast("asyncio.Transport", transport)
        read_little(transport)

    def data_received(self, data: bytes) -> None:
        """Complete the future of each reply that is whole."""
        if self._rest:
            data = self._rest + data
        corked, self._corked = self._corked, True
        at, size = 0, len(data)
        try:
            while size - at >= 4:
                length = INT.unpack_from(data, at)[0]
                if not 0 <= length <= LONGEST:
                    raise ValueError(f"a message of {length} bytes")
                begin = at + 4
                if begin + length > size:
                    break
                at = begin + length
                self._receive(data[begin:at])
                if self.dead:
                    return
        except Exception as error:  # noqa: BLE001 - the peer may be any program
            if self._handshake is not None:
                _settle(self._handshake, error)
            else:
                log.exception("%s:%s sent what cannot be understood", self.host, self.port)
            self.die()
            return
        finally:
            if not corked:
                # After every task that these replies wake.
                self._loop.call_soon(self._uncork)
        self._rest = data[at:]

    def _receive(self, message: bytes) -> None:
        if self._handshake is not None:
            _settle(self._handshake, aiozk_protocol.ConnectResponse.deserialize(message))
            self._handshake = None
            return
        xid, zxid, error = _REPLY_HEADER.unpack_from(message)
        if xid == aiozk_protocol.WATCH_XID:
            self._on_event(read_event(message))
            return
        read, target, index = self._pending[xid]
        reply: Any = exc.get_response_error(error) if error else read(message[16:])
        # Not before: a request whose reply cannot be decoded is in doubt.
        del self._pending[xid]
        if zxid > 0:
            self._on_reply(zxid)
        if isinstance(reply, _SESSION_GONE):
            # This server does not serve the session any more; the next connection learns what became of it.
            reply = InDoubt(self.host, self.port)
            self.die()
        _complete(target, index, reply)

    # --- ending

    def connection_lost(self, exc: Exception | None) -> None:
        log.debug("the connection to %s:%s ended: %s", self.host, self.port, exc or "closed")
        self.die()
        if not self._ended.done():
            self._ended.set_result(None)

    def die(self) -> None:
        """Abort the connection: pending requests are in doubt, and ``on_dead`` is called. Idempotent."""
        if self.dead:
            return
        self.dead = True
        self._fail_pending()
        if self.transport is not None:
            self.transport.abort()
        if self.on_dead is not None:
            self.on_dead(self)

    def _fail_pending(self) -> None:
        if self._handshake is not None:
            _settle(
                self._handshake, Refused(f"{self.host}:{self.port} closed the connection in the handshake")
            )
        pending = list(self._pending.values())
        self._pending.clear()
        for _, target, index in pending:
            _complete(target, index, InDoubt(self.host, self.port))

    @property
    def broken(self) -> bool:
        """True if nothing that is written will arrive; may be true before ``connection_lost`` is called."""
        return self.dead or self.transport is None or self.transport.is_closing()

    async def closed(self) -> None:
        """Wait for the end of the connection. Cancelling it ends the wait only."""
        if self.transport is not None:
            await asyncio.wait([self._ended])


def framed(request: Any, xid: int) -> tuple[bytes, int, Callable[[bytes], Any]]:
    """Return the bytes of a request, its xid, and the decoder of its reply."""
    if type(request) is Operation:
        opcode, body, read = request
        return _REQUEST_HEADER.pack(len(body) + 8, xid, opcode) + body, xid, read
    # One of aiozk's; some have a fixed xid.
    number: int = request.special_xid or xid
    payload: bytes = request.serialize(number)
    read = aiozk_protocol.response_xref[request.opcode].deserialize
    return INT.pack(len(payload)) + payload, number, read


def _complete(target: Future | _Batch, index: int, reply: Any) -> None:
    if isinstance(target, _Batch):
        target.replies[index] = reply
        target.left -= 1
        if target.left == 0:
            _settle(target.future, target.replies)
    else:
        _settle(target, reply)


def _settle(future: Future, reply: Any) -> None:
    if isinstance(reply, Exception):
        reject(future, reply)
    else:
        settle(future, reply)
