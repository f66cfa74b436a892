"""A TCP proxy that knows where a frame ends, so that an accident can be staged exactly there.

    async with Proxy(host, port, framing=resp_frames) as proxy:   # clients connect to proxy.host, proxy.port
        dropped = proxy.down.drop_next(1, lambda frame: b"granted" in frame, reset=True)
        ...
        await dropped.wait()

`up` leads from the client to the server, `down` back. A lane's faults hold for all its connections; the reset after a drop or a cut hits
only the connection that carried the frame. A lost SYN cannot be staged: a black hole swallows bytes and closings, but new connections are
still accepted (see `refuse` and `stop_listening`).
"""

from __future__ import annotations

import asyncio
import inspect
import random
import socket
import struct
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Self, cast

Match = Callable[[bytes], bool]
Hook = Callable[[str, bytes], "Awaitable[object] | object"]


class Frames:
    """Cuts a stream into frames; `measure(data, at)` tells where the frame beginning at `at` ends, None while it is incomplete."""

    def __init__(self, measure: Callable[[bytes, int], int | None]) -> None:
        self._measure, self.rest = measure, b""

    def feed(self, data: bytes) -> list[bytes]:
        data, at, frames = self.rest + data, 0, []
        while at < len(data) and (end := self._measure(data, at)) is not None and end <= len(data):
            frames.append(data[at:end])
            at = end
        self.rest = data[at:]
        return frames


def _resp_end(data: bytes, at: int) -> int | None:
    line = data.find(b"\r\n", at)
    if line < 0:
        return None
    kind, end = data[at : at + 1], line + 2
    if kind in b"$!=":
        size = int(data[at + 1 : line])
        return end + size + 2 if size >= 0 else end
    if kind in b"*~>%|":
        # A map counts pairs; an attribute is a map and the value it belongs to.
        for _ in range(int(data[at + 1 : line]) * (2 if kind in b"%|" else 1) + (kind == b"|")):
            inner = _resp_end(data, end)
            if inner is None:
                return None
            end = inner
    return end


def _length_end(data: bytes, at: int) -> int | None:
    size = int.from_bytes(data[at : at + 4], "big")
    if size >> 26:
        return len(data)  # no length but text: ZooKeeper's four-letter commands and their answers
    return at + 4 + size if at + 4 <= len(data) else None


def _mysql_end(data: bytes, at: int) -> int | None:
    return at + 4 + int.from_bytes(data[at : at + 3], "little") if at + 4 <= len(data) else None


def _postgresql_end(data: bytes, at: int) -> int | None:
    # The first message of a client has no letter before its length.
    start = at if data[at] == 0 else at + 1
    return start + int.from_bytes(data[start : start + 4], "big") if start + 4 <= len(data) else None


def _memcached_end(data: bytes, at: int) -> int | None:
    line = data.find(b"\r\n", at)
    if line < 0:
        return None
    words = data[at:line].split()
    # A value follows: in an answer, or in a request to write.
    size = words[1] if words[:1] == [b"VA"] else words[2] if words[:1] == [b"ms"] else None
    return line + 2 + (0 if size is None else int(size) + 2)


def _mongodb_end(data: bytes, at: int) -> int | None:
    return at + int.from_bytes(data[at : at + 4], "little") if at + 4 <= len(data) else None


def _http2_end(data: bytes, at: int) -> int | None:
    if data.startswith(b"PRI * ", at):
        return at + 24
    return at + 9 + int.from_bytes(data[at : at + 3], "big") if at + 9 <= len(data) else None


resp_frames = partial(Frames, _resp_end)
length_frames = partial(Frames, _length_end)
mysql_frames = partial(Frames, _mysql_end)
postgresql_frames = partial(Frames, _postgresql_end)
memcached_frames = partial(Frames, _memcached_end)
mongodb_frames = partial(Frames, _mongodb_end)
http2_frames = partial(Frames, _http2_end)
raw = partial(Frames, lambda data, _at: len(data))


@dataclass(eq=False)
class _Accident:
    match: Match
    left: int
    keep: int
    reset: bool
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Lane:
    """The faults of one direction; what came in as `frames` was `delivered` or `dropped` (cut ones included), or is on its way."""

    def __init__(self, direction: str, seed: int) -> None:
        self.direction = direction
        self.delay = self.jitter = (
            0.0  # seconds of latency: any number of frames is on its way at once, in order
        )
        self.slices = 0  # bytes per write; 0 writes whole frames
        self.frames = self.delivered = self.dropped = 0
        self.random = random.Random(seed)
        self.gate, self.news = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.accidents: list[_Accident] = []
        self.era = self.forgotten = 0  # frames of an era before `forgotten` are dropped

    def blackhole(self) -> None:
        """Hold all bytes and closings; nobody is told anything."""
        self.gate.clear()

    def heal(self, *, release: bool = True) -> None:
        """End a black hole: the bytes held arrive late, or (`release=False`) never. Closings arrive in both cases."""
        self.era += 1
        self.forgotten = self.forgotten if release else self.era
        self.gate.set()

    def drop_next(self, count: int = 1, match: Match = bool, *, reset: bool = False) -> asyncio.Event:
        """Drop the next `count` matching frames, then reset the connection if asked; the event tells when that has happened."""
        self.accidents.append(_Accident(match, count, keep=0, reset=reset))
        return self.accidents[-1].done

    def cut_after(self, size: int, match: Match = bool) -> asyncio.Event:
        """Deliver only `size` bytes of the next matching frame, then reset its connection."""
        self.accidents.append(_Accident(match, 1, keep=size, reset=True))
        return self.accidents[-1].done

    async def arrived(self, frames: int) -> None:
        """Wait until so many frames have come in since the proxy began, whatever became of them."""
        while self.frames < frames:
            self.news.clear()
            await self.news.wait()


_FIN, _RST = object(), object()


class End(asyncio.Protocol):
    """One of the two sockets of a connection: what it reads travels down its lane to the other one."""

    def __init__(self, proxy: Proxy, lane: Lane, other: End | None = None) -> None:
        self.proxy, self.lane = proxy, lane
        self.other = other or End(proxy, proxy.down, self)
        self.gone, self.severed = True, False
        self._frames, self._due = proxy.framing(), 0.0
        self.count, self.stranded = 0, cast("Stranded | None", None)
        self._queue: asyncio.Queue[tuple[float, int, object]] = asyncio.Queue()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport, self.gone = transport, False
        if self.lane is self.proxy.up:
            self.proxy.welcome(self)

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self._send(frame)

    def eof_received(self) -> bool:
        if self._frames.rest:
            self._send(self._frames.rest)
        self._send(_FIN)
        return True  # nothing is closed before the FIN has travelled; then both sides are

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        if exc is not None and not self.severed:
            self._send(_RST)
        if self.other.gone:
            self.proxy.ends -= {self, self.other}
            self._queue.put_nowait((0, 0, None))  # wakes the pumps, which have nothing left to do
            self.other._queue.put_nowait((0, 0, None))

    def _send(self, item: object) -> None:
        lane = self.lane
        latency = lane.delay + lane.random.random() * lane.jitter
        self._due = max(self._due, asyncio.get_running_loop().time() + latency)  # jitter does not reorder
        self._queue.put_nowait((self._due, lane.era, item))
        lane.frames += isinstance(item, bytes)
        self.count += isinstance(item, bytes)
        lane.news.set()

    def reset(self) -> None:
        """Close with RST. The other end does not hear of it: alone, this leaves a half-open connection."""
        self.severed = True
        if not self.gone and not self.transport.is_closing():
            linger = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if not self.gone:
            self.transport.abort()

    async def connect(self) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: self.other, *self.proxy.upstream)
        except OSError:
            self.reset()
        if self.gone or self.severed:
            self.other.reset()
            return
        self.proxy.spawn(self.other.pump())
        await self.pump()

    async def pump(self) -> None:
        lane, time = self.lane, asyncio.get_running_loop().time
        while not (self.gone and self.other.gone):
            due, era, item = await self._queue.get()
            if due > time():
                await asyncio.sleep(due - time())
            if isinstance(item, bytes):
                await self.proxy.tell(lane.direction, item)
            await lane.gate.wait()
            if self.stranded is not None:
                await self.stranded.let_pass(self, item)
            if isinstance(item, bytes):
                await self._deliver(item, forgotten=era < lane.forgotten or self.other.gone)
            elif item is _RST:
                self.other.reset()
            elif item is _FIN:
                for end in (self, self.other):
                    if not end.gone:
                        end.transport.close()

    async def _deliver(self, frame: bytes, *, forgotten: bool) -> None:
        lane, accident = self.lane, None
        if not forgotten:
            accident = next((each for each in lane.accidents if each.match(frame)), None)
        if accident is not None:
            accident.left -= 1
            frame = frame[: accident.keep]
            if not accident.left:
                lane.accidents.remove(accident)
        lost = forgotten or accident is not None
        lane.dropped += lost
        lane.delivered += not lost
        for piece in () if forgotten else _pieces(frame, lane.slices):
            if not self.other.gone and not self.other.transport.is_closing():
                self.other.transport.write(piece)
                await asyncio.sleep(0)
        if accident is not None and not accident.left:
            if accident.reset:
                self.proxy.on_break()
                self.reset()
                self.other.reset()
            accident.done.set()


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)] if size else [data]


class Stranded:
    """What clients send over the connections that they have, from the first frame with `mark` in it; it waits for `deliver`."""

    def __init__(self, ends: Collection[End], mark: bytes) -> None:
        self._mark, self._gate = mark, asyncio.Event()
        self.begun: dict[End, int] = {}  # with the number of frames that had come back by then
        for end in ends:
            end.stranded = self

    async def let_pass(self, end: End, item: object) -> None:
        if end not in self.begun and isinstance(item, bytes) and self._mark in item:
            self.begun[end] = end.other.count
        if end in self.begun:
            await self._gate.wait()

    async def deliver(self) -> None:
        """Let it through, however its client has ended the connection, and wait until the server has said something to it."""
        self._gate.set()
        for end, before in self.begun.items():
            while end.other.count == before and not end.other.gone:
                end.other.lane.news.clear()
                await end.other.lane.news.wait()


class Proxy:
    """`on_frame(direction, frame)` is called, and awaited, when a frame is about to go on: what it stages already holds for that frame.

    `on_break` is called before connections that were made are reset."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        framing: Callable[[], Frames] = raw,
        on_frame: Hook | None = None,
        on_break: Callable[[], object] = lambda: None,
        seed=0,
    ) -> None:
        self.upstream, self.framing, self.on_frame, self.on_break = (host, port), framing, on_frame, on_break
        self.host, self.port = "127.0.0.1", 0
        self.up, self.down = Lane("up", seed), Lane("down", seed + 1)
        self.refuse = False  # True: every new connection is accepted and reset at once
        self.connections = 0  # accepted so far, refused ones included
        self.ends: set[End] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._reserve = self._bind(0)  # never listens: it keeps the port ours while we do not listen
        self.port = self._reserve.getsockname()[1]
        await self.start_listening()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.stop_listening()
        self._reserve.close()
        self.reset_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, asyncio.sleep(0), return_exceptions=True)
        if self._errors and exc_info[1] is None:
            raise self._errors[0]  # a broken hook must not pass for a fault of the network

    def _bind(self, port: int) -> socket.socket:
        # With the protocol named, asyncio has small writes sent at once: a frame that follows another would wait 40 ms.
        sock = socket.socket(proto=socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((self.host, port))
        return sock

    async def start_listening(self) -> None:
        create_server = asyncio.get_running_loop().create_server
        self._server = await create_server(lambda: End(self, self.up), sock=self._bind(self.port))

    def stop_listening(self) -> None:
        """From now on the kernel answers "connection refused"; open connections stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def reset_all(self, *lanes: Lane) -> int:
        """RST to all clients and servers; given one lane only to those who send on it, which leaves the others half-open. Counts resets."""
        ends = [end for end in self.ends if not lanes or end.lane in lanes]
        if ends:
            self.on_break()
        for end in ends:
            end.reset()
        return len(ends)

    @property
    def ports(self) -> list[int]:
        """From where its connections come, as the server sees it."""
        return [
            end.transport.get_extra_info("sockname")[1]
            for end in self.ends
            if end.lane is self.down and not end.gone
        ]

    def strand(self, mark: bytes = b"") -> Stranded:
        """Keep back what comes over the connections that there are, also if their clients close or lose them."""
        return Stranded([end for end in self.ends if end.lane is self.up], mark)

    def blackhole(self) -> None:
        self.up.blackhole()
        self.down.blackhole()

    def heal(self, *, release: bool = True) -> None:
        self.up.heal(release=release)
        self.down.heal(release=release)

    def welcome(self, client: End) -> None:
        self.connections += 1
        self.ends |= {client, client.other}
        if self.refuse:
            client.reset()
        else:
            self.spawn(client.connect())

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._errors.append(error)
            self.reset_all()

    async def tell(self, direction: str, frame: bytes) -> None:
        if self.on_frame is not None and inspect.isawaitable(answer := self.on_frame(direction, frame)):
            await answer
