"""Lost answers, half answers, garbage, a frozen server: every call is answered or fails in time, and none with another's answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from pathlib import Path

import pytest

from aiolock.backends.memcached.protocol import Parser, ProtocolError
from aiolock.backends.rows.store import Edit
from aiolock.errors import BackendUnavailable
from tests.backends.memcached.conftest import Opened, opened
from tests.faults.proxy import Proxy, memcached_frames
from tests.faults.staging import until


@pytest.fixture
def key():
    return f"tests/l/lock/{secrets.token_hex(8)}"


@contextlib.asynccontextmanager
async def behind(server, **options):
    """A proxy before a server, and a store behind it."""
    async with (
        Proxy("127.0.0.1", server.port, framing=memcached_frames) as proxy,
        opened(proxy.port, **options) as store,
    ):
        yield proxy, store


async def test_what_many_tasks_ask_at_once_is_written_together(server, key):
    async with opened(server.port) as store:
        connection = store._connection._transport
        written, write = [], connection.write
        connection.write = lambda data: (written.append(data), write(data))
        rows = await asyncio.gather(*(store.insert(f"{key}{number}") for number in range(100)))
        assert all(row.version for row in rows)
        # The first one waits for no other.
        assert len(written) == 2


async def test_answers_behind_a_stall_are_read_before_one_of_their_calls_has_failed(server, key):
    """One pass of the loop reads a small part of them, and the program takes its time with each."""
    async with opened(server.port, timeout=0.3) as store:
        assert await store.insert(key, b"x" * 32_000)
        reads = [asyncio.ensure_future(store.read(key)) for _ in range(500)]
        for read in reads:
            read.add_done_callback(lambda _: time.sleep(0.001))
        for _ in range(3):
            await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251 - the whole loop stands still
        found = await asyncio.gather(*reads, return_exceptions=True)
        assert [answer for answer in found if isinstance(answer, Exception)] == []


async def test_what_was_asked_last_is_written_before_the_connection_is_closed(server, other, key):
    store = await Opened(server.port).begin()
    asked = [asyncio.create_task(store.insert(f"{key}{number}", b"1")) for number in range(3)]
    await asyncio.sleep(0)
    await store.aclose()
    await asyncio.wait(asked)
    assert all(isinstance(task.exception(), BackendUnavailable) for task in asked)
    for number in range(3):
        # Other threads of the server carry out what this connection asks.
        while not (await other.read(f"{key}{number}")).value:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kept", [0, 1, 3], ids=["none of it", "a byte", "half a line"])
async def test_a_lost_answer_is_an_error_and_the_write_is_not_repeated(server, other, key, kept):
    async with behind(server) as (proxy, store):
        row = await store.insert(key, b"0")
        lost = proxy.down.cut_after(kept, lambda frame: frame.startswith(b"HD c"))
        with pytest.raises(BackendUnavailable, match="whether it executed this is not known"):
            await store.update(key, row.version, b"1")
        await lost.wait()
        assert store.interruptions == 1
        found = await store.read(key)
        assert found.value == b"1"
        assert int(found.version.partition(".")[2]) == int((await other.read(key)).version.partition(".")[2])
        assert await store.update(key, found.version, b"2")


async def test_half_a_value_is_no_value(server, other, key):
    await other.insert(key, b"x" * 40_000)
    async with behind(server) as (proxy, store):
        proxy.down.cut_after(20_000, lambda frame: frame.startswith(b"VA 40000 "))
        with pytest.raises(BackendUnavailable):
            await store.read(key)
        assert (await store.read(key)).value == b"x" * 40_000


async def test_answers_in_pieces_are_put_together(server, key):
    async with behind(server) as (proxy, store):
        proxy.down.slices = 7
        keys = [f"{key}{number}" for number in range(20)]
        value = b"VA 3 c5\r\nEN\r\n" * 20
        await store.compare_and_set([Edit(each, "", "", value) for each in keys])
        assert [row.value for row in await store.get(keys)] == [value] * 20


async def test_a_write_whose_request_was_lost_raises_and_is_not_made_later(server, other, key):
    async with behind(server) as (proxy, store):
        proxy.up.cut_after(10, lambda frame: frame.startswith(f"ms {key}".encode()))
        with pytest.raises(BackendUnavailable):
            await store.insert(key, b"1")
        await until(lambda: store.interruptions == 1)
        assert (await store.read(key)).version == ""
        assert (await other.read(key)).version == ""


async def test_the_interruption_is_reported_before_anything_is_sent_on_the_next_connection(server, key):
    sent = []

    async with Proxy("127.0.0.1", server.port, framing=memcached_frames) as proxy:
        store = Opened(proxy.port)
        proxy.on_frame = lambda direction, frame: (
            sent.append(store.interruptions) if direction == "up" else None
        )
        try:
            await store.begin()
            await store.insert(key)
            before = len(sent)
            proxy.reset_all()
            await until(lambda: store.interruptions == 1)
            await store.read(key)
            assert set(sent[:before]) == {0}
            assert set(sent[before:]) == {1}
        finally:
            await store.aclose()


async def test_without_a_connection_reads_wait_and_writes_are_refused(server, key):
    async with behind(server) as (proxy, store):
        row = await store.insert(key, b"1")
        proxy.stop_listening()
        proxy.reset_all()
        await until(lambda: store.interruptions == 1)
        reading = asyncio.create_task(store.read(key))
        for edit in (Edit(key, row.version, "", b"2"), Edit(f"{key}b", "", "", b"2")):
            with pytest.raises(BackendUnavailable):
                await store.compare_and_set([edit])
        await proxy.start_listening()
        assert (await reading).value == b"1"
        assert (await store.read(f"{key}b")).version == ""


async def test_what_is_asked_of_a_connection_that_breaks_fails_without_a_warning_of_asyncio(server, caplog):
    async with behind(server) as (proxy, store):
        proxy.reset_all()
        asked = [asyncio.create_task(store.read(f"tests/{number}")) for number in range(20)]
        await asyncio.wait(asked)
        assert {type(each.exception()) for each in asked} == {BackendUnavailable}
        assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_a_read_that_finds_no_connection_fails_within_the_command_timeout(own):
    async with opened(own.port, timeout=0.5) as store:
        own.stop()
        await until(lambda: store.interruptions == 1)
        async with asyncio.timeout(20):
            with pytest.raises(BackendUnavailable, match=str(own.port)):
                await store.read("tests/a")


async def test_a_frozen_server_fails_calls_in_time_and_their_answers_are_not_taken_for_others(own, key):
    async with opened(own.port, timeout=0.3) as store:
        row = await store.insert(key, b"1")
        own.freeze()
        try:
            async with asyncio.timeout(20):
                with pytest.raises(BackendUnavailable, match="did not answer within"):
                    await store.update(key, row.version, b"2")
                with pytest.raises(BackendUnavailable):
                    await store.read(f"{key}other")
        finally:
            own.thaw()
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(BackendUnavailable):
                    found, absent = await store.get([key, f"{key}other"])
                    break
        # The write was made when the server went on, late, and once.
        assert (found.value, absent.version) == (b"2", "")


async def test_a_silent_server_is_found_by_pings(own, monkeypatch):
    monkeypatch.setattr("aiolock.backends.transport.PING_EVERY", 0.1)
    monkeypatch.setattr("aiolock.backends.transport.PING_WITHIN", 0.2)
    async with opened(own.port, timeout=0.5) as store:
        await store.insert("tests/a", b"1")
        await asyncio.sleep(0.5)
        assert store.interruptions == 0
        own.freeze()
        try:
            await until(lambda: store.interruptions == 1)
        finally:
            own.thaw()
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(BackendUnavailable):
                    assert (await store.read("tests/a")).value == b"1"
                    break


@pytest.mark.parametrize(
    "garbage", [b"HD\r\n", b"EN\r\n", b"WHAT\r\n", b"\r\n", b"VA 1 c1\r\nxyz", b"MN\r\n", b"\x00" * 5_000]
)
async def test_an_answer_that_fits_no_command_ends_the_connection(garbage):
    """HD without a CAS id, the answer of another command, a value of another length."""
    connections = 0

    async def talk(reader, writer):
        nonlocal connections
        connections += 1
        while line := await reader.readline():
            if line == b"version\r\n":
                writer.write(b"VERSION 1.6.18\r\n")
            elif line == b"mn\r\n":
                writer.write(b"MN\r\n")
            elif line == b"stats\r\n":
                writer.write(b"STAT time 1000\r\nSTAT uptime 10\r\nEND\r\n")
            elif line == b"stats settings\r\n":
                writer.write(b"STAT cas_enabled yes\r\nEND\r\n")
            elif line.startswith(b"ms tests/format "):
                await reader.readline()
                writer.write(b"NS\r\n")
            elif line.startswith(b"mg tests/format "):
                writer.write(b"VA 1 c1\r\n1\r\n")
            elif line.startswith(b"ms "):
                await reader.readline()
                writer.write(garbage)
        writer.close()

    async def serve(reader, writer):
        # The client ends the connection while it is written to.
        with contextlib.suppress(ConnectionError):
            await talk(reader, writer)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening, opened(listening.sockets[0].getsockname()[1], timeout=5.0) as store:
        with pytest.raises(BackendUnavailable, match="no command had asked for"):
            await store.insert("tests/a")
        await until(lambda: connections == 2)
        assert store.interruptions == 1


async def test_cancelling_at_random_moments_mixes_up_no_answers(server, store, key):
    keys = [f"{key}{number}" for number in range(20)]
    await store.compare_and_set([Edit(each, "", "", each.encode()) for each in keys])
    chance = random.Random(5)
    for number in range(300):
        task = asyncio.create_task(store.get(chance.sample(keys, 5)))
        for _ in range(chance.randrange(5)):
            await asyncio.sleep(0)
        task.cancel()
        wanted = keys[(number + 7) % 20]
        assert (await store.read(wanted)).value == wanted.encode()


async def test_calls_of_many_tasks_travel_on_one_connection(server, key):
    async with behind(server) as (proxy, store):
        await asyncio.gather(*(store.insert(f"{key}{number}", str(number).encode()) for number in range(200)))
        rows = await asyncio.gather(*(store.read(f"{key}{number}") for number in range(200)))
        assert [row.value for row in rows] == [str(number).encode() for number in range(200)]
        assert proxy.connections == 1


async def test_closing_fails_what_waits_and_later_calls_and_may_be_repeated(own):
    async with opened(own.port, timeout=15.0) as store:
        own.freeze()
        try:
            waiting = asyncio.create_task(store.read("tests/a"))
            await asyncio.sleep(0)
            async with asyncio.timeout(10):
                await store.aclose()
                with pytest.raises(BackendUnavailable):
                    await waiting
        finally:
            own.thaw()
        for call in (store.read("tests/a"), store.insert("tests/a"), store.versions(["tests/a"])):
            with pytest.raises(BackendUnavailable, match="closed"):
                await call
        await store.aclose()


def sockets() -> int:
    return sum(each.is_socket() for each in Path("/proc/self/fd").iterdir())


async def test_opening_that_is_cancelled_leaves_no_socket(own):
    before = sockets()
    own.freeze()
    try:
        for passes in (0, 1, 2, 5, 50):
            store = Opened(own.port)
            opening = asyncio.create_task(store.begin())
            for _ in range(passes):
                await asyncio.sleep(0.001)
            opening.cancel()
            await asyncio.wait([opening])
            assert opening.cancelled()
            await store.aclose()
    finally:
        own.thaw()
    await until(lambda: sockets() == before)


def test_the_parser_finds_the_same_answers_however_bytes_arrive():
    stream = b"HD c5 s3\r\nVA 3 c77\r\na\r\n\r\nEN\r\nEX c0\r\nNF\r\nMN\r\nHD\r\nVA 0 c1 \r\n\r\nSERVER_ERROR out of memory\r\n"
    whole = list(Parser().feed(stream))
    assert [(answer.code, answer.cas, answer.value) for answer in whole] == [
        (b"HD", "5", b""),
        (b"VA", "77", b"a\r\n"),
        (b"EN", "", b""),
        (b"EX", "0", b""),
        (b"NF", "", b""),
        (b"MN", "", b""),
        (b"HD", "", b""),
        (b"VA", "1", b""),
        (b"ERROR", "", b"SERVER_ERROR out of memory"),
    ]
    for size in (1, 2, 3, 5, 17):
        parser, found = Parser(), []
        for at in range(0, len(stream), size):
            found += parser.feed(stream[at : at + size])
        assert found == whole
    for bad in (b"HDc5\r\n", b"VA x c5\r\n", b"VA 1\r\nabc", b"hello\r\n", b"x" * 5_000):
        with pytest.raises(ProtocolError):
            list(Parser().feed(bad))
