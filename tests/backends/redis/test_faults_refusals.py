"""What a client is told when it cannot work here: the documented error with a sentence that helps, in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

import aiolock
from aiolock import BackendRefused, BackendUnavailable, UnsafeBackend
from tests.faults.proxy import resp_frames
from tests.faults.redis_keys import Stopwatch, descriptors, nothing_is_left
from tests.faults.staging import gets_the_lock, queued, until
from tests.servers import Redis

SOON = 8.0
"""Seconds that a loaded machine may add to what happens at once."""
SECRET = "s3cret"


async def refusal(client: aiolock.Client, bound: float = 0.0) -> aiolock.BackendError:
    """What opening it raises, within some seconds, with nothing left open."""
    before = descriptors()
    since = Stopwatch()
    with pytest.raises((BackendRefused, BackendUnavailable, UnsafeBackend)) as caught:
        await client.open()
    assert since.seconds < bound + SOON
    await until(lambda: descriptors() <= before)
    assert SECRET not in str(caught.value)
    return caught.value


@pytest.fixture(scope="module")
def secured():
    """A server that asks for a password, and knows a user who may not run scripts."""
    users = (f"user default on >{SECRET} ~* &* +@all", f"user reader on >{SECRET} ~* &* +@all -@scripting")
    with Redis(password=SECRET, users=users) as running:
        yield running


@pytest.fixture(scope="module")
def private():
    """A server that speaks TLS."""
    with Redis(tls=True) as running:
        yield running


@contextlib.asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[int]:
    """A port where somebody says one thing to everything, or nothing at all."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1000):
                if answer is not None:
                    writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


# --- credentials and databases


@pytest.mark.parametrize(
    ("user", "sentence"),
    [
        (":wrong@", "check username and password"),
        ("nobody:wrong@", "check username and password"),
        ("", "asks for a password"),
    ],
)
async def test_a_wrong_password_is_refused_at_once(secured, connect, user, sentence):
    error = await refusal(connect(f"redis://{user}127.0.0.1:{secured.port}"))
    assert isinstance(error, BackendRefused)
    assert not error.retryable
    assert sentence in str(error)


async def test_a_password_that_becomes_wrong_is_said_when_the_connection_has_to_be_made_again(connect):
    with Redis(password=SECRET) as server:
        async with (
            redis.asyncio.Redis(port=server.port, password=SECRET) as overseer,
            connect(server.url, ttl=300, command_timeout=1.5) as client,
        ):
            held = await client.lock("x").acquire()
            await overseer.config_set("requirepass", "another")
            await overseer.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await until(lambda: client._backend._server.connection.state.value != "ready")
            with pytest.raises(BackendUnavailable, match="check username and password"):
                await client.lock("y").acquire()
            assert held.held
            # Somebody puts it right, and nobody has to restart anything.
            await overseer.config_set("requirepass", SECRET)
            await until(lambda: client._backend._server.connection.state.value == "ready")
            await held.renew()
            await held.release()


async def test_a_database_that_is_not_there_is_refused_at_once(server, connect):
    error = await refusal(connect(f"redis://127.0.0.1:{server.port}/99"))
    assert isinstance(error, BackendRefused)
    assert "no database of this number" in str(error)


async def test_an_account_without_scripts_is_refused_at_once(secured, connect):
    error = await refusal(connect(f"redis://reader:{SECRET}@127.0.0.1:{secured.port}"))
    assert isinstance(error, BackendRefused)
    assert not error.retryable
    assert "scripts" in str(error)


# --- something else at the port


async def test_a_port_where_nobody_listens_is_unavailable(connect):
    with Redis() as gone:
        url = gone.url
    error = await refusal(connect(url, command_timeout=1.0), 1.0)
    assert isinstance(error, BackendUnavailable)
    assert "nothing listens there" in str(error)


async def test_something_that_is_no_redis_is_refused(connect):
    async with answering(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as port:
        error = await refusal(connect(f"redis://127.0.0.1:{port}"))
    assert isinstance(error, BackendRefused)
    assert "not as a Redis server does" in str(error)


async def test_a_port_that_never_answers_is_given_up_in_time(connect):
    async with answering(None) as port:
        error = await refusal(connect(f"redis://127.0.0.1:{port}", command_timeout=0.5), 0.5)
    assert isinstance(error, BackendUnavailable)
    assert "did not answer" in str(error)


async def test_tls_to_a_port_without_it_is_refused(server, connect):
    error = await refusal(connect(f"rediss://127.0.0.1:{server.port}", command_timeout=2.0), 2.0)
    assert isinstance(error, BackendRefused | BackendUnavailable)
    assert "redis://" in str(error)


async def test_no_tls_to_a_port_with_it_is_refused(private, connect):
    error = await refusal(connect(f"redis://127.0.0.1:{private.port}", command_timeout=2.0), 2.0)
    assert isinstance(error, BackendRefused | BackendUnavailable)
    assert "rediss://" in str(error)


async def test_a_certificate_of_nobody_known_is_refused(private, connect):
    error = await refusal(connect(f"rediss://127.0.0.1:{private.port}"))
    assert isinstance(error, BackendRefused)
    assert "ssl_ca_certs" in str(error)


async def test_locks_work_over_tls(private, connect):
    url = f"rediss://127.0.0.1:{private.port}"
    async with (
        connect(url, ssl_ca_certs=private.certificates.ca) as one,
        connect(url, ssl_ca_certs=private.certificates.ca) as two,
    ):
        held = await one.lock("x").acquire()
        waiter = asyncio.create_task(two.lock("x").acquire())
        await queued(one.lock("x"), 1)
        await held.release()
        await (await waiter).release()


# --- a Redis that cannot serve


async def test_a_read_only_replica_is_refused_with_a_hint_at_the_primary(mortal, master, connect, namespace):
    await master.execute_command("REPLICAOF", "127.0.0.1", "1")
    error = await refusal(connect(mortal.url))
    assert isinstance(error, BackendRefused)
    assert error.retryable
    assert "primary" in str(error)
    await master.execute_command("REPLICAOF", "NO", "ONE")
    async with connect(mortal.url) as client, client.lock("x"):
        pass
    await nothing_is_left(master, namespace)


async def test_a_primary_that_becomes_a_replica_is_unavailable_and_may_come_back(
    mortal, master, connect, namespace
):
    async with connect(mortal.url, ttl=300) as one, connect(mortal.url, ttl=300) as two:
        held = await one.lock("x").acquire()
        waiter = asyncio.create_task(two.lock("x").acquire())
        await queued(one.lock("x"), 1)
        await master.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(BackendUnavailable, match="primary") as refused:
            await one.lock("y").acquire()
        assert refused.value.retryable
        assert held.held
        assert not waiter.done()
        await master.execute_command("REPLICAOF", "NO", "ONE")
        await until(lambda: one._backend._server.connection.state.value == "ready")
        await held.release()
        await (await waiter).release()
        await nothing_is_left(master, namespace)


async def test_a_server_that_still_loads_its_data_is_waited_for(connect):
    # Each step of its log is a step of loading, a thousand of them pass between two looks at its connections.
    slow = ("--aof-use-rdb-preamble", "no", "--key-load-delay", "-2")
    with Redis(appendonly=True, extra=slow) as server:
        async with redis.asyncio.Redis(port=server.port) as overseer:
            await overseer.eval("for n = 1, 120000 do redis.call('SET', KEYS[1], n) end", 1, "filler")
            server.kill()
            # `restart` waits until it serves; this is about the time before.
            server.children[0].start()
            await until(lambda: _is_loading(overseer))
        error = await refusal(connect(server.url, command_timeout=1.5), 1.5)
        assert isinstance(error, BackendUnavailable)
        assert "loading" in str(error)
        async with connect(server.url, command_timeout=60) as client, client.lock("x"):
            pass


async def _is_loading(overseer: redis.asyncio.Redis) -> bool:
    try:
        return (await overseer.info("persistence"))["loading"] == 1
    except redis.exceptions.ConnectionError:
        return False


async def test_a_frozen_server_is_given_up_in_time(mortal, connect):
    mortal.freeze()
    try:
        error = await refusal(connect(mortal.url, command_timeout=0.5), 0.5)
    finally:
        mortal.thaw()
    assert isinstance(error, BackendUnavailable)
    assert "did not answer" in str(error)


async def test_a_server_with_no_connection_to_spare_says_so(mortal, master, connect):
    await master.ping()
    await master.config_set("maxclients", "1")
    error = await refusal(connect(mortal.url, command_timeout=1.5), 1.5)
    assert isinstance(error, BackendUnavailable)
    assert "maxclients" in str(error)


async def test_a_server_that_is_busy_with_a_script_is_waited_for(mortal, master, connect):
    # Its name before version 7, which all have kept.
    await master.config_set("lua-time-limit", "50")
    async with connect(mortal.url, ttl=300, command_timeout=5) as client:
        endless = asyncio.create_task(_endless(mortal.port))
        with pytest.raises(BackendUnavailable, match="SCRIPT KILL"):
            while True:
                await gets_the_lock(client, "x")
        async with redis.asyncio.Redis(port=mortal.port) as overseer:
            await overseer.script_kill()
        await endless
        await gets_the_lock(client, "x")


async def _endless(port: int) -> None:
    async with redis.asyncio.Redis(port=port, socket_timeout=None) as one:
        with contextlib.suppress(redis.exceptions.RedisError):
            await one.eval("while true do end", 0)


# --- require=


@pytest.mark.parametrize("word", ["survives-restart", "survives-failover", "quorum"])
async def test_what_a_deployment_does_not_promise_can_be_required_to_no_avail(server, connect, word):
    error = await refusal(connect(server.url, require={"exclusion", word}))
    assert isinstance(error, UnsafeBackend)
    message = str(error)
    assert f"does not promise {word};" in message
    assert "fencing" in message


async def test_what_a_deployment_promises_can_be_required(server, connect):
    words = {"exclusion", "fencing", "fifo", "keep", "push", "no-eviction"}
    async with connect(server.url, require=words) as client:
        assert client.capabilities == words


async def test_a_server_that_evicts_is_warned_about_and_can_be_refused(connect, caplog):
    with Redis(maxmemory="50mb", maxmemory_policy="allkeys-lru") as server:
        async with connect(server.url) as client:
            assert "no-eviction" not in client.capabilities
        assert "allkeys-lru" in caplog.text
        assert "set maxmemory-policy to noeviction" in caplog.text
        error = await refusal(connect(server.url, require={"no-eviction"}))
    assert isinstance(error, UnsafeBackend)
    assert "no-eviction" in str(error)


# --- a proxy that knows few commands


@contextlib.asynccontextmanager
async def closing(patience: int) -> AsyncIterator[str]:
    """The address of what answers PING, and closes the connection at any other command, so many times."""
    left = patience

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        frames = resp_frames()
        with contextlib.closing(writer):
            while data := await reader.read(65536):
                for frame in frames.feed(data):
                    if b"PING" in frame:
                        writer.write(b"+PONG\r\n")
                    elif left:
                        left -= 1
                        return
                    else:
                        writer.write(b"-ERR unknown command\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_proxy_without_scripts_is_refused_by_that_name(connect):
    async with closing(1_000_000) as url:
        with pytest.raises(BackendRefused, match=r"proxies such as twemproxy.* address of the server itself"):
            await connect(url).open()


async def test_one_connection_that_is_closed_at_that_moment_is_no_proxy(connect):
    async with closing(1) as url:
        with pytest.raises(BackendRefused, match="unknown command"):
            await connect(url).open()
