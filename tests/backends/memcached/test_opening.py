"""What is refused when a client connects, and when it connects again: by a sentence that says what to do."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import pytest

import aiolock
from aiolock import BackendRefused, BackendUnavailable, ConfigError, UnsafeBackend
from aiolock.backends.memcached.url import choose, hosts_of
from tests.backends.memcached.conftest import Opened, opened, say
from tests.certificates import Certificates
from tests.faults.proxy import Proxy, memcached_frames
from tests.faults.staging import until
from tests.servers import Memcached, Redis


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("memcached://10.0.0.1", ["10.0.0.1:11211"]),
        ("memcached://b:1,a:2", ["a:2", "b:1"]),
        ("MEMCACHED://Example.org:11212/", ["example.org:11212"]),
        ("memcached://[::1]:5,[fe80::1]", ["[::1]:5", "[fe80::1]:11211"]),
    ],
)
def test_an_address_names_servers_in_any_order(url, hosts):
    assert list(map(str, hosts_of(url))) == hosts


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("memcached://", "names no host"),
        ("memcached://a,,b", "names no host"),
        ("memcached://a:70000", "port"),
        ("memcached://a,a:11211", "named twice"),
        ("memcached://user:secret@a", "no user and no password: SASL"),
        ("memcached://:secret@a", "no user and no password: SASL"),
        ("memcacheds://a", "without TLS, as memcached://.*rediss://"),
        ("memcached://a/0", "no databases"),
        ("memcached://a?timeout=5", "timeout.*no parameter of a memcached URL; it has none"),
        ("memcached:///var/run/memcached.sock", "names no host"),
        (7, "must be a str"),
    ],
)
def test_what_names_no_server_is_refused(url, why):
    with pytest.raises(ConfigError, match=why) as refusal:
        hosts_of(url)
    assert "secret" not in str(refusal.value)
    if isinstance(url, str):
        with pytest.raises(ConfigError, match=why):
            aiolock.connect(url)


def test_a_server_more_takes_its_share_of_the_names_and_moves_no_others():
    three, keys = ["a:11211", "b:11211", "c:11211"], [f"aiolock/lock/{number}" for number in range(3_000)]
    before = [three[choose(three, key)] for key in keys]
    assert all(800 < before.count(host) < 1_200 for host in three)
    four = [*three, "d:11211"]
    after = [four[choose(four, key)] for key in keys]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"d:11211"}
    assert 550 < len(moved) < 950
    # The choice is a part of the format: another version must not make another one.
    assert [before[number] for number in range(8)] == [three[choose(three, key)] for key in keys[:8]]


async def refused(port: int, timeout: float = 5.0) -> Exception:
    """The error with which a store refuses to open."""
    store = Opened(port)
    with pytest.raises(aiolock.BackendError) as refusal:
        await store.begin(timeout)
    await store.aclose()
    assert str(port) in str(refusal.value)
    return refusal.value


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"VERSION 1.6.12\r\n", "is memcached '1.6.12'; locks need 1.6.13 or later"),
        (b"VERSION 1.5.22\r\n", "is memcached '1.5.22'"),
        (b"VERSION 37.0.0-mcrouter\r\n", None),
        (b"VERSION mcrouter\r\n", "is no memcached"),
        (b"-ERR unknown command\r\n", "is no memcached"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no memcached"),
        (b"x" * 100_000, "is no memcached"),
        (b"\xff\xfe\r\n", "is no memcached"),
        (b"CLIENT_ERROR unauthenticated\r\n", "demands a password"),
        (b"VERSION 1.6.18\r\nERROR\r\n", "ERROR"),
        (b"VERSION 1.6.18\r\n" + b"MN\r\n" * 4 + b"ERROR\r\n", "ERROR"),
        (b"ERROR Too many open connections\r\n", "Too many open connections"),
        (b"VERSION 1.6.18\r\n" + b"MN\r\n" * 4 + b"END\r\n", None),
    ],
)
async def test_other_answers_than_those_of_a_new_memcached_are_refused(answer, why):
    async def serve(reader, writer):
        await reader.readline()
        writer.write(answer)
        await reader.read(1_000)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        error = await refused(listening.sockets[0].getsockname()[1], 1.0)
    if why is not None:
        assert isinstance(error, BackendUnavailable if b"Too many" in answer else BackendRefused)
        assert why in str(error)


async def test_another_server_at_that_port_is_named_as_such():
    with Redis() as redis:
        error = await refused(redis.port)
    assert isinstance(error, BackendRefused)
    assert "is no memcached" in str(error)


async def test_a_server_that_demands_a_password_is_refused(own, tmp_path):
    (tmp_path / "passwords").write_text("user:password\n")
    own.stop()
    own.set("-Y", str(tmp_path / "passwords"))
    own.start()
    error = await refused(own.port)
    assert isinstance(error, BackendRefused)
    assert "demands a password (-Y), which is not supported" in str(error)


async def test_a_server_that_demands_tls_is_refused(tmp_path):
    # Debian's memcached has neither TLS nor SASL; of such a server the client sees only that its handshake is asked for.
    made = Certificates(tmp_path / "tls")
    secured = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    secured.load_cert_chain(made.cert, made.key)
    listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=secured)
    async with listening:
        error = await refused(listening.sockets[0].getsockname()[1], 1.0)
    assert "it may demand TLS (-Z) or SASL (-S), which are not supported" in str(error)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("-C",), "started with -C, and locks need CAS ids"),
        (("-I", "16k", "-o", "slab_chunk_max=8"), "at most 16,384 bytes.*-I 128k"),
    ],
)
async def test_settings_that_locks_cannot_work_with_are_refused(words, why):
    with Memcached(extra=words) as server:
        error = await refused(server.port)
    assert isinstance(error, BackendRefused)
    with pytest.raises(type(error), match=why):
        raise error


async def test_no_server_there_and_one_that_gives_no_answer_are_unavailable(own):
    own.freeze()
    try:
        assert isinstance(await refused(own.port, 0.5), BackendUnavailable)
    finally:
        own.thaw()
    own.stop()
    assert isinstance(await refused(own.port, 0.5), BackendUnavailable)


async def test_one_of_several_servers_that_is_away_is_named(own, server):
    own.stop()
    client = aiolock.connect(f"memcached://127.0.0.1:{server.port},127.0.0.1:{own.port}", command_timeout=0.5)
    with pytest.raises(BackendUnavailable, match=str(own.port)):
        await client.open()
    await client.aclose()


# --- the format of a namespace


async def test_a_namespace_of_another_format_is_refused_until_it_is_forgotten(own):
    async with opened(own.port) as store:
        await store.insert("tests/l/lock/a")
    assert say(own, b"mg tests/format v\r\n", b"\r\n1\r\n") == b"VA 1\r\n1\r\n"
    assert say(own, b"ms tests/format 2\r\n47\r\n", b"\r\n") == b"HD\r\n"
    error = await refused(own.port)
    assert isinstance(error, UnsafeBackend)
    assert "namespace tests has keys of version '47', and this library writes version 1" in str(error)
    async with opened(own.port, namespace="other"):
        pass
    say(own, b"flush_all\r\n", b"OK\r\n")
    async with opened(own.port) as store:
        assert (await store.read("tests/l/lock/a")).version == ""
    assert say(own, b"mg tests/format v\r\n", b"\r\n1\r\n") == b"VA 1\r\n1\r\n"


async def test_a_client_that_connects_again_to_another_format_stops(own):
    async with (
        Proxy("127.0.0.1", own.port, framing=memcached_frames) as proxy,
        opened(proxy.port, timeout=30.0) as store,
    ):
        proxy.stop_listening()
        proxy.reset_all()
        await until(lambda: store.interruptions == 1)
        reading = asyncio.create_task(store.read("tests/a"))
        say(own, b"ms tests/format 1\r\n2\r\n", b"\r\n")
        await proxy.start_listening()
        with pytest.raises(UnsafeBackend, match="version '2'"):
            await reading
        with pytest.raises(UnsafeBackend, match="version '2'"):
            await store.read("tests/a")
        say(own, b"ms tests/format 1\r\n1\r\n", b"\r\n")

        async def read():
            with contextlib.suppress(UnsafeBackend):
                return await store.read("tests/a")

        await until(read)


async def test_a_restarted_server_is_marked_again(own):
    async with opened(own.port) as store:
        own.restart()
        await until(lambda: store.interruptions == 1)
        await store.read("tests/a")
        assert say(own, b"mg tests/format v\r\n", b"\r\n1\r\n") == b"VA 1\r\n1\r\n"


# --- capabilities


@pytest.mark.parametrize("word", ["exclusion", "fencing", "no-eviction", "survives-restart"])
async def test_what_a_cache_cannot_promise_is_refused_with_the_reason(server, word):
    client = aiolock.connect(server.url, require={word, "fifo"})
    why = f"memcached does not promise {word}: it forgets locks when it restarts, and may when its memory is full"
    with pytest.raises(UnsafeBackend, match=why):
        await client.open()
    with pytest.raises(UnsafeBackend, match="does not promise push"):
        await aiolock.connect(server.url, require={"push"}).open()


async def test_what_it_does_promise(server):
    async with aiolock.connect(server.url, require={"fifo", "keep"}) as client:
        assert client.capabilities == {"fifo", "keep"}
