"""gRPC over one HTTP/2 connection: calls with one answer each, and a stream of messages. Does no I/O of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from urllib.parse import unquote

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

from aiolock.backends.etcd.errors import INTERNAL, UNAVAILABLE, UNIMPLEMENTED, RpcError, lost_login, translate
from aiolock.backends.etcd.messages import Malformed
from aiolock.core.logs import hide_debug
from aiolock.core.tasks import reject, settle
from aiolock.errors import BackendError

__all__ = ["Channel", "ProtocolError"]

WINDOW = 1 << 24
"""Bytes that the server may send ahead, for each stream and for the connection."""
SETTINGS = b"\4"
"""The type of the first frame of a server."""
LAST = (1 << 31) - (1 << 20)
"""The last stream number that is used. Numbers are never used again, so a connection that has come so far is replaced."""

# At DEBUG it shows each header, and so the token of the login.
hide_debug("hpack")


class ProtocolError(Exception):
    """Bytes that are no HTTP/2."""


class _Call:
    """One stream: its request, as far as it has to be sent, and its answer so far."""

    __slots__ = ("ends", "error", "future", "id", "message", "out", "path", "received")

    def __init__(
        self, path: str, future: asyncio.Future[bytes], message: Callable[[bytes], None] | None
    ) -> None:
        self.path = path
        self.future = future
        self.message = message
        """Gets each message of a stream that goes on; ``None`` for a call with one answer."""
        self.id = 0
        self.out = b""
        self.ends = True
        """True if the request ends with the last byte of ``out``."""
        self.received = bytearray()
        self.error: RpcError | None = RpcError(INTERNAL, "the answer ended without a status")
        """The status of the answer so far; ``None`` if it is a success."""


def _framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


class Channel:
    """The calls on one connection; a caller that stops waiting leaves its call in place, whose answer is discarded.

    :param address: of the server, for messages.
    :param authority: the host and port, for the server.
    """

    def __init__(self, address: str, authority: str, *, tls: bool) -> None:
        self.address = address
        self.send: Callable[[bytes], None] = _nowhere
        """Writes to the connection; set before :meth:`begin`."""
        self.token = ""
        """The login of each call."""
        self.ended: str = ""
        """The reason for which the connection is of no use any more, once the server has said so."""
        self._authority = authority
        self._scheme = "https" if tls else "http"
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        codes = h2.settings.SettingCodes
        self._h2.local_settings = h2.settings.Settings(
            client=True, initial_values={codes.ENABLE_PUSH: 0, codes.INITIAL_WINDOW_SIZE: WINDOW}
        )
        self._greeted = False
        self._calls: dict[int, _Call] = {}
        self._waiting: deque[_Call] = deque()
        """Calls beyond the number of streams that the server admits at once."""

    def begin(self) -> None:
        """Send what comes first."""
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW)
        self.flush()

    def call(self, path: str, message: bytes, future: asyncio.Future[bytes]) -> None:
        """Prepare a call; the future gets its answer, or an error. :meth:`flush` sends it."""
        call = _Call(path, future, None)
        call.out = _framed(message)
        self._waiting.append(call)
        self._start()

    def stream(
        self, path: str, messages: Iterable[bytes], received: Callable[[bytes], None]
    ) -> asyncio.Future[bytes]:
        """Prepare a stream that stays open; ``received`` gets each message, and the future its error when it ends."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        call = _Call(path, future, received)
        call.out, call.ends = b"".join(map(_framed, messages)), False
        self._waiting.append(call)
        self._start()
        return future

    def flush(self) -> None:
        """Write what was prepared."""
        if data := self._h2.data_to_send():
            self.send(data)

    def fail(self, error: Callable[[], BackendError]) -> None:
        """Reject all calls: the connection is lost."""
        calls = [*self._calls.values(), *self._waiting]
        self._calls.clear()
        self._waiting.clear()
        for call in calls:
            reject(call.future, error())

    def _start(self) -> None:
        """Open streams for calls that wait, as many as the server admits."""
        while (
            self._waiting and self._h2.open_outbound_streams < self._h2.remote_settings.max_concurrent_streams
        ):
            call = self._waiting.popleft()
            call.id = self._h2.get_next_available_stream_id()
            if call.id >= LAST:
                self.ended = "its numbers of streams are used up"
            headers = [
                (":method", "POST"),
                (":scheme", self._scheme),
                (":path", call.path),
                (":authority", self._authority),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "grpc-python-aiolock"),
            ]
            if self.token:
                headers.append(("token", self.token))
            if call.message is not None:
                # The server ends the stream when its member has lost the leader.
                headers.append(("hasleader", "true"))
            self._h2.send_headers(call.id, headers)
            self._calls[call.id] = call
            self._pump(call)

    def _pump(self, call: _Call) -> None:
        """Send as much of a request as the server takes."""
        while call.out:
            size = min(
                len(call.out),
                self._h2.local_flow_control_window(call.id),
                self._h2.max_outbound_frame_size,
            )
            if size <= 0:
                return
            chunk, call.out = call.out[:size], call.out[size:]
            self._h2.send_data(call.id, chunk, end_stream=call.ends and not call.out)

    # --- answers

    def receive(self, data: bytes) -> None:
        """Process bytes of the server. Raises :class:`ProtocolError`."""
        if not self._greeted:
            # The first frame is one of settings, and short. Text looks like the header of a frame that is never complete.
            if data[:1] != b"\0" or data[3:4] not in (b"", SETTINGS):
                raise ProtocolError
            self._greeted = True
        try:
            for event in self._h2.receive_data(data):
                self._take(event)
            self._start()
        except (h2.exceptions.ProtocolError, Malformed, ValueError) as error:
            raise ProtocolError from error
        self.flush()

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived):
            if event.flow_controlled_length:
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id or 0)
            if (call := self._calls.get(event.stream_id or 0)) is not None:
                call.received += event.data or b""
                self._messages(call)
        elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            if (call := self._calls.get(event.stream_id or 0)) is not None:
                self._headers(call, {str(name): str(value) for name, value in event.headers or []})
        elif isinstance(event, h2.events.StreamEnded):
            self._end(event.stream_id or 0)
        elif isinstance(event, h2.events.StreamReset):
            if (call := self._calls.get(event.stream_id or 0)) is not None and call.error is not None:
                call.error = RpcError(UNAVAILABLE, f"the stream was reset with the code {event.error_code}")
            self._end(event.stream_id or 0)
        elif isinstance(event, h2.events.ConnectionTerminated):
            detail = bytes(event.additional_data or b"").decode(errors="replace")
            self.ended = f"the server ends the connection with the code {event.error_code} {detail}".rstrip()
        elif isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
            for call in list(self._calls.values()):
                if call.out:
                    self._pump(call)

    def _headers(self, call: _Call, headers: dict[str, str]) -> None:
        if "grpc-status" in headers:
            status = int(headers["grpc-status"])
            call.error = RpcError(status, unquote(headers.get("grpc-message", ""))) if status else None
        elif (http := headers.get(":status", "200")) != "200":
            # What stands between, and is no etcd, may be away for a while.
            code = UNAVAILABLE if http in {"429", "502", "503", "504"} else UNIMPLEMENTED
            call.error = RpcError(code, f"the server answered with the HTTP status {http}")
        elif ":status" in headers and not headers.get("content-type", "").startswith("application/grpc"):
            call.error = RpcError(UNIMPLEMENTED, "the server answered with no message of gRPC")

    def _messages(self, call: _Call) -> None:
        """Hand out the messages of a stream; the answer to a call is taken when its stream ends."""
        if call.message is None:
            return
        while (message := _unframed(call.received)) is not None:
            call.message(message)

    def _end(self, stream: int) -> None:
        call = self._calls.pop(stream, None)
        if call is None:
            return
        if call.error is not None:
            reject(call.future, translate(self.address, call.error))
            if lost_login(call.error):
                self.ended = "the login has ended"
        elif (message := _unframed(call.received)) is not None:
            settle(call.future, message)
        else:
            reject(call.future, translate(self.address, RpcError(INTERNAL, "the answer has no message")))


def _unframed(received: bytearray) -> bytes | None:
    """Take the first message from what was received; ``None`` while it is incomplete. Raises :class:`Malformed`."""
    if len(received) < 5:
        return None
    if received[0]:
        raise Malformed("a message is compressed")
    end = 5 + int.from_bytes(received[1:5], "big")
    if len(received) < end:
        return None
    message = bytes(received[5:end])
    del received[:end]
    return message


def _nowhere(data: bytes) -> None:
    del data
