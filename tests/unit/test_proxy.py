"""Every fault of the proxy does what it says: shown with small line and RESP servers in this process."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.faults.proxy import (
    Frames,
    Proxy,
    _pieces,
    length_frames,
    mysql_frames,
    postgresql_frames,
    raw,
    resp_frames,
)

RESP = [
    b"+OK\r\n",
    b"-NOSCRIPT No matching script\r\n",
    b":42\r\n",
    b"$5\r\nhe\r\no\r\n",
    b"$0\r\n\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"_\r\n",
    b"#t\r\n",
    b",1.5\r\n",
    b"*2\r\n*2\r\n:1\r\n$1\r\na\r\n*1\r\n*0\r\n",
    b">3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$3\r\nabc\r\n",
    b"%2\r\n+a\r\n:1\r\n+b\r\n*1\r\n:2\r\n",
    b"~2\r\n:1\r\n:2\r\n",
    b"|1\r\n+ttl\r\n:9\r\n$1\r\nv\r\n",
    b"=7\r\ntxt:abc\r\n",
]


def length_frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def mysql_frame(number: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "little") + bytes([number]) + body


FRAMED = [
    (resp_frames, RESP),
    (length_frames, [length_frame(b"ping"), length_frame(b""), length_frame(b"x" * 300)]),
    (mysql_frames, [mysql_frame(0, b"select 1"), mysql_frame(1, b""), mysql_frame(2, b"y" * 70_000)]),
    (postgresql_frames, [b"\0\0\0\x09\0\x03\0\0\0", b"S\0\0\0\x04", b"D\0\0\0\x09\0\x01abc"]),
]


@pytest.mark.parametrize(("framing", "frames"), FRAMED)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1_000_000])
def test_a_stream_falls_apart_into_the_same_frames_however_it_is_cut(framing, frames, chunk):
    cutter: Frames = framing()
    stream = b"".join(frames)
    if len(stream) > 10_000 and chunk < 7:
        stream = b"".join(frames[:-1])
        frames = frames[:-1]
    got = [frame for at in range(0, len(stream), chunk) for frame in cutter.feed(stream[at : at + chunk])]
    assert got == frames
    assert cutter.rest == b""


@pytest.mark.parametrize(("framing", "frames"), FRAMED)
def test_an_incomplete_frame_is_kept_back(framing, frames):
    for frame in frames:
        cutter = framing()
        assert cutter.feed(frame[:-1]) == []
        assert cutter.rest == frame[:-1]
        assert cutter.feed(frame[-1:]) == [frame]


def test_four_letter_words_of_zookeeper_pass_length_framing():
    cutter = length_frames()
    assert cutter.feed(b"ruok") == [b"ruok"]
    assert cutter.feed(length_frame(b"ping")) == [length_frame(b"ping")]


def test_raw_passes_what_it_gets():
    cutter = raw()
    assert cutter.feed(b"abc") + cutter.feed(b"d") == [b"abc", b"d"]


class Echo:
    """A server that keeps what it heard, in whole RESP bulk strings, and says it again."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.reads: list[int] = []
        self.ends: list[str] = []  # how its connections ended, as it saw it
        self.news = asyncio.Condition()
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames, end = resp_frames(), "fin"
        self.writers.append(writer)
        try:
            while data := await reader.read(65536):
                self.reads.append(len(data))
                for frame in frames.feed(data):
                    self.heard.append(frame)
                    writer.write(frame)
                async with self.news:
                    self.news.notify_all()
        except ConnectionError:
            end = "rst"
        writer.close()
        self.ends.append(end)
        async with self.news:
            self.news.notify_all()

    async def until(self, seen) -> None:
        async with self.news:
            await self.news.wait_for(seen)


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(text), text)


@asynccontextmanager
async def echo_behind(**options) -> AsyncIterator[tuple[Echo, Proxy]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(30):
        try:
            async with Proxy("127.0.0.1", port, framing=resp_frames, **options) as proxy:
                yield echo, proxy
            await echo.until(lambda: len(echo.ends) == len(echo.writers))
        finally:
            server.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *texts: bytes) -> None:
        self.writer.write(b"".join(bulk(text) for text in texts))

    async def receive(self) -> bytes:
        size = int((await self.reader.readuntil(b"\r\n"))[1:])
        return (await self.reader.readexactly(size + 2))[:-2]

    async def ask(self, text: bytes) -> bytes:
        self.send(text)
        return await self.receive()

    async def ends(self) -> str:
        """How the connection ended: 'fin', or 'rst'; what is still readable is thrown away."""
        try:
            while await self.reader.read(4096):
                pass
        except ConnectionError:
            return "rst"
        return "fin"


@asynccontextmanager
async def client_of(proxy: Proxy) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


async def waits(coroutine) -> asyncio.Task:
    """Start it, and show that it does not end by itself once everything that could end it has run."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0.05)  # not needed to be right: a longer look only makes the test stricter
    assert not task.done()
    return task


async def test_without_faults_frames_pass_both_ways_and_are_counted():
    async with echo_behind() as (echo, proxy), client_of(proxy) as client:
        for text in (b"a", b"b", b"c"):
            assert await client.ask(text) == text
        async with client_of(proxy) as other:
            assert await other.ask(b"d") == b"d"
        assert proxy.connections == 2
        for lane in (proxy.up, proxy.down):
            assert (lane.frames, lane.delivered, lane.dropped) == (4, 4, 0)
        assert echo.heard == [bulk(text) for text in (b"a", b"b", b"c", b"d")]


async def test_small_frames_are_sent_at_once_both_ways():
    """Each frame of an answer would else wait 40 ms for the one before: no client with a short timeout could log in."""
    async with echo_behind() as (_, proxy), client_of(proxy) as client:
        await client.ask(b"a")
        sockets = [end.transport.get_extra_info("socket") for end in proxy.ends]
        assert [made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for made in sockets] == [1, 1]


async def test_a_closed_client_is_closed_at_the_server_too():
    async with echo_behind() as (echo, proxy), client_of(proxy) as client:
        await client.ask(b"a")
        client.writer.close()
        await echo.until(lambda: echo.ends == ["fin"])


async def test_a_closing_server_closes_the_client_after_its_last_words():
    async with echo_behind() as (echo, proxy), client_of(proxy) as client:
        await client.ask(b"a")
        echo.writers[0].write(bulk(b"bye"))
        echo.writers[0].close()
        assert await client.receive() == b"bye"
        assert await client.ends() == "fin"


async def test_delay_is_latency_not_bandwidth():
    loop = asyncio.get_running_loop()
    async with echo_behind() as (_, proxy), client_of(proxy) as client:
        await client.ask(b"warm")
        proxy.up.delay = 0.3
        began = loop.time()
        texts = [b"%d" % number for number in range(40)]
        for number, text in enumerate(texts):
            client.send(text)
            await proxy.up.arrived(2 + number)
        assert [await client.receive() for _ in texts] == texts
        assert 0.3 <= loop.time() - began < 0.3 * len(texts)  # one after the other they would take 12 s


async def test_jitter_does_not_reorder():
    async with echo_behind(seed=3) as (_, proxy), client_of(proxy) as client:
        proxy.up.jitter = proxy.down.jitter = 0.05
        texts = [b"%d" % number for number in range(50)]
        client.send(*texts)
        assert [await client.receive() for _ in texts] == texts


async def test_a_black_hole_holds_bytes_and_closings_and_delivers_them_late():
    async with echo_behind() as (echo, proxy), client_of(proxy) as client:
        await client.ask(b"before")
        proxy.blackhole()
        client.send(b"late")
        await proxy.up.arrived(2)
        await waits(client.reader.read(1))
        assert echo.heard == [bulk(b"before")]
        client.writer.transport.abort()  # the sender is long gone when its packet arrives
        await asyncio.sleep(0.02)
        assert echo.ends == []
        proxy.heal()
        await echo.until(lambda: echo.heard == [bulk(b"before"), bulk(b"late")] and echo.ends)


async def test_a_black_hole_holds_a_closing_without_bytes():
    async with echo_behind() as (echo, proxy), client_of(proxy) as client:
        await client.ask(b"before")
        proxy.blackhole()
        client.writer.close()
        await waits(echo.until(lambda: echo.ends))
        proxy.heal()
        await echo.until(lambda: echo.ends == ["fin"])


async def test_a_reset_client_is_executed_late_as_well():
    async with echo_behind() as (echo, proxy), client_of(proxy) as client:
        await client.ask(b"before")
        proxy.up.blackhole()
        client.send(b"late")
        await proxy.up.arrived(2)
        linger = struct.pack("ii", 1, 0)
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        client.writer.transport.abort()
        while not all(end.gone for end in proxy.ends if end.lane is proxy.up):  # noqa: ASYNC110
            await asyncio.sleep(0)
        proxy.up.heal()
        await echo.until(lambda: bulk(b"late") in echo.heard and echo.ends)


async def test_what_a_black_hole_swallowed_may_be_dropped():
    async with echo_behind() as (echo, proxy), client_of(proxy) as client:
        proxy.up.blackhole()
        client.send(b"lost", b"lost too")
        await proxy.up.arrived(2)
        proxy.up.heal(release=False)
        assert await client.ask(b"after") == b"after"
        assert echo.heard == [bulk(b"after")]
        assert (proxy.up.dropped, proxy.up.delivered) == (2, 1)
        proxy.up.blackhole()
        client.send(b"kept")
        await proxy.up.arrived(4)
        proxy.up.heal()
        assert await client.receive() == b"kept"


async def test_a_one_way_black_hole_lets_the_server_hear_and_not_answer():
    async with echo_behind() as (echo, proxy), client_of(proxy) as client:
        proxy.down.blackhole()
        client.send(b"executed")
        await echo.until(lambda: echo.heard == [bulk(b"executed")])
        reading = await waits(client.receive())
        proxy.down.heal()
        assert await reading == b"executed"


async def test_the_next_matching_frames_are_dropped_and_no_others():
    async with echo_behind() as (echo, proxy), client_of(proxy) as client:
        done = proxy.up.drop_next(2, lambda frame: b"x" in frame)
        client.send(b"a", b"x1", b"b", b"x2", b"x3")
        assert [await client.receive() for _ in range(3)] == [b"a", b"b", b"x3"]
        assert done.is_set()
        assert len(echo.heard) == 3
        assert proxy.up.dropped == 2


async def test_a_reply_can_be_lost_with_its_connection_after_it_was_executed():
    async with echo_behind() as (echo, proxy), client_of(proxy) as client, client_of(proxy) as other:
        await other.ask(b"other")
        done = proxy.down.drop_next(1, lambda frame: b"grant" in frame, reset=True)
        client.send(b"grant")
        await done.wait()
        assert await client.ends() == "rst"
        await echo.until(lambda: echo.ends == ["rst"])
        assert bulk(b"grant") in echo.heard
        assert await other.ask(b"still") == b"still"  # only the connection that carried the frame


@pytest.mark.parametrize("size", [0, 1, 4, 7])
async def test_a_reply_can_be_cut_at_any_byte(size):
    async with echo_behind() as (_, proxy), client_of(proxy) as client:
        await client.ask(b"whole")
        done = proxy.down.cut_after(size)
        client.send(b"torn")
        got = b""
        with pytest.raises(ConnectionResetError):
            while data := await client.reader.read(100):
                got += data
        assert got == bulk(b"torn")[:size]
        assert done.is_set()


async def test_slices_of_one_byte_change_nothing_but_the_number_of_writes():
    async with echo_behind() as (echo, proxy), client_of(proxy) as client:
        proxy.up.slices = 1
        text = b"0123456789" * 10
        assert await client.ask(text) == text
        assert sum(echo.reads) == len(bulk(text))
    # How many of them a busy reader gets in one read is up to the kernel.
    assert _pieces(b"abc", 1) == [b"a", b"b", b"c"]


async def test_refused_connections_are_reset_and_counted():
    async with echo_behind() as (echo, proxy):
        proxy.refuse = True
        async with client_of(proxy) as client:
            assert await client.ends() == "rst"
        assert proxy.connections == 1
        proxy.refuse = False
        async with client_of(proxy) as client:
            assert await client.ask(b"a") == b"a"
        assert len(echo.writers) == 1


async def test_not_listening_refuses_at_the_kernel_and_keeps_port_and_connections():
    async with echo_behind() as (_, proxy), client_of(proxy) as client:
        await client.ask(b"a")
        port = proxy.port
        proxy.stop_listening()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(proxy.host, port)
        assert await client.ask(b"b") == b"b"
        await proxy.start_listening()
        assert proxy.port == port
        async with client_of(proxy) as other:
            assert await other.ask(b"c") == b"c"


async def test_a_server_that_is_away_resets_the_client():
    async with echo_behind() as (_, gone):
        gone.stop_listening()
        async with Proxy(gone.host, gone.port) as proxy, client_of(proxy) as client:
            assert await client.ends() == "rst"


async def test_reset_all_resets_both_sides_of_every_connection():
    async with echo_behind() as (echo, proxy), client_of(proxy) as one, client_of(proxy) as two:
        await one.ask(b"1")
        await two.ask(b"2")
        assert proxy.reset_all() == 4
        assert (await one.ends(), await two.ends()) == ("rst", "rst")
        await echo.until(lambda: echo.ends == ["rst", "rst"])


async def test_half_open_towards_the_server():
    async with echo_behind() as (echo, proxy), client_of(proxy) as client:
        await client.ask(b"a")
        proxy.reset_all(proxy.up)
        assert await client.ends() == "rst"
        echo.writers[0].write(bulk(b"anybody there?"))
        await proxy.down.arrived(2)
        await asyncio.sleep(0.02)
        assert echo.ends == []


async def test_half_open_towards_the_client():
    async with echo_behind() as (echo, proxy), client_of(proxy) as client:
        await client.ask(b"a")
        proxy.reset_all(proxy.down)
        await echo.until(lambda: echo.ends == ["rst"])
        client.send(b"anybody there?")
        await proxy.up.arrived(2)
        await waits(client.reader.read(1))
        assert echo.heard == [bulk(b"a")]


async def test_a_hook_stages_an_accident_for_the_very_frame_it_sees():
    seen = []

    async def hook(direction: str, frame: bytes) -> None:
        seen.append((direction, frame))
        if direction == "down" and b"grant" in frame:
            proxy.down.blackhole()
            await asyncio.sleep(0)

    async with echo_behind(on_frame=hook) as (echo, proxy), client_of(proxy) as client:
        assert await client.ask(b"a") == b"a"
        client.send(b"grant")
        await proxy.down.arrived(2)
        reading = await waits(client.receive())
        assert echo.heard[-1] == bulk(b"grant")
        proxy.heal()
        assert await reading == b"grant"
        assert seen == [(way, bulk(text)) for text in (b"a", b"grant") for way in ("up", "down")]


async def test_a_hook_may_be_a_plain_function():
    seen = []
    async with (
        echo_behind(on_frame=lambda *frame: seen.append(frame)) as (_, proxy),
        client_of(proxy) as client,
    ):
        await client.ask(b"a")
    assert seen == [("up", bulk(b"a")), ("down", bulk(b"a"))]


async def test_a_broken_hook_does_not_pass_for_a_network_fault():
    def hook(direction: str, frame: bytes) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with echo_behind(on_frame=hook) as (_, proxy), client_of(proxy) as client:
            client.send(b"a")
            assert await client.ends() == "rst"
