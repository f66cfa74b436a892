"""Getting in: what addresses and clients mean, what is refused without I/O, and what real servers say no to."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import ssl
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import redis.asyncio
from redis.asyncio.sentinel import Sentinel
from redis.credentials import UsernamePasswordCredentialProvider

import aiolock
from aiolock.backends.redis import RedisBackend
from aiolock.backends.redis.connection import Connection
from aiolock.backends.redis.errors import from_driver
from aiolock.backends.redis.url import Endpoint
from aiolock.clock import system_clock
from aiolock.errors import BackendRefused, BackendUnavailable, ConfigError
from tests.servers import Redis

SECRET = "s3cret-pa/ss@word"
QUOTED = "s3cret-pa%2Fss%40word"


@pytest.fixture(scope="module")
def server():
    users = [
        "user default off",
        f"user app on >{SECRET} ~* &* +@all",
        f"user mute on >{SECRET} ~* &* +@all -ping",
        f"user fixed on >{SECRET} ~* &* +@all -select",
    ]
    with Redis(users=users) as running:
        yield running


@pytest.fixture(scope="module")
def tls_server():
    with Redis(tls=True) as running:
        yield running


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.asynccontextmanager
async def connected(endpoint: Endpoint, timeout: float = 10.0):
    connection = Connection(endpoint, clock=system_clock, command_timeout=timeout)
    await connection.open()
    try:
        yield connection
    finally:
        await connection.aclose()


async def failure(endpoint: Endpoint, timeout: float = 10.0):
    with pytest.raises((BackendRefused, BackendUnavailable)) as caught:
        async with connected(endpoint, timeout):
            pass
    assert endpoint.address in str(caught.value)
    assert caught.value.__cause__ is not None
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown
    assert QUOTED not in shown
    return caught.value


# --- without I/O


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://", "redis://localhost:6379/0"),
        ("redis://example.org", "redis://example.org:6379/0"),
        ("redis://[::1]:7000/3", "redis://[::1]:7000/3"),
        (f"redis://app:{QUOTED}@example.org/2", "redis://app@example.org:6379/2"),
        (f"redis://:{QUOTED}@example.org?db=4", "redis://example.org:6379/4"),
        ("rediss://example.org?ssl_check_hostname=false", "rediss://example.org:6379/0"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        (f"redis+unix://app:{QUOTED}@/run/redis.sock", "unix://app@/run/redis.sock?db=0"),
    ],
)
def test_an_address_is_shown_without_its_password(url, address):
    endpoint = Endpoint(url)
    assert str(endpoint) == endpoint.address == address
    assert repr(endpoint) == f"<Endpoint {address}>"


@pytest.mark.parametrize(
    ("url", "options", "hint"),
    [
        (None, {}, "must be a str"),
        ("http://example.org", {}, "redis, rediss"),
        ("redis://example.org?colour=red", {}, "client_name"),
        ("redis://example.org", {"colour": "red"}, "credential_provider"),
        ("redis://example.org/zero", {}, "number"),
        ("redis://example.org/0?db=1", {}, "twice"),
        ("redis://example.org/0", {"db": 1}, "say it once"),
        ("redis://example.org", {"db": True}, "number"),
        ("redis://example.org", {"db": -1}, "number"),
        ("redis://example.org", {"ssl_ca_certs": "/ca.pem"}, "rediss://"),
        ("rediss://example.org", {"ssl_keyfile": "/key.pem"}, "ssl_certfile"),
        ("rediss://example.org?ssl_cert_reqs=perhaps", {}, "required, optional, none"),
        ("rediss://example.org?ssl_check_hostname=perhaps", {}, "true or false"),
        ("redis://example.org", {"password": b"bytes"}, "must be a str"),
        ("redis://:6379", {}, "names no host"),
        ("unix://run/redis.sock", {}, "begins with a slash"),
        ("unix://", {}, "names no socket"),
        (
            "redis://app@example.org",
            {"credential_provider": UsernamePasswordCredentialProvider("a", "b")},
            "neither",
        ),
        ("redis://example.org", {"credential_provider": object()}, "CredentialProvider"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(url, options, hint):
    with pytest.raises(ConfigError, match=hint):
        Endpoint(url, **options)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cret/word@example.org",
        "redis://:12/s3cret@example.org",
        "redis://app:s3cret?word@example.org",
        "redis://:12?s3cret@example.org",
        "redis://:s3cret#word@example.org",
        "redis://app:12#s3cret@example.org:6379",
        "redis://:[s3cret@example.org",
        "redis://app:pw@example.org/s3cret",
        "unix://:s3cret/word@/run/redis.sock",
    ],
)
def test_a_password_that_breaks_the_address_is_not_repeated(url):
    with pytest.raises(ConfigError) as caught:
        Endpoint(url)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))
    assert "%2F" in str(caught.value)


@pytest.mark.parametrize(
    ("client", "hint"),
    [
        (lambda: redis.Redis(), "redis.asyncio.Redis"),
        (lambda: redis.asyncio.Redis().pipeline(), "pipeline.*redis.asyncio.Redis that made it"),
        (lambda: redis.asyncio.RedisCluster("127.0.0.1", 1), "redis\\+cluster://"),
        (lambda: Sentinel([("127.0.0.1", 1)]).master_for("primary"), "redis\\+sentinel://"),
        (lambda: object(), "not a object"),
        (lambda: redis.asyncio.ConnectionPool(), "not a ConnectionPool"),
    ],
)
async def test_a_client_of_another_kind_is_refused(client, hint):
    with pytest.raises(ConfigError, match=hint):
        Endpoint.of(client())


class FakeAsyncRedis(redis.asyncio.Redis):
    __module__ = "fakeredis.aioredis"


class FakeRedis(redis.Redis):
    __module__ = "fakeredis._server"


class FakeConnection(redis.asyncio.Connection):
    __module__ = "fakeredis.aioredis"


def _faked() -> redis.asyncio.Redis:
    pool = redis.asyncio.ConnectionPool(connection_class=FakeConnection)
    return redis.asyncio.Redis(connection_pool=pool)


@pytest.mark.parametrize(
    "client", [FakeAsyncRedis, FakeRedis, _faked], ids=["asyncio", "synchronous", "pool"]
)
async def test_a_client_of_fakeredis_is_told_of_memory(client):
    with pytest.raises(ConfigError, match="memory://"):
        aiolock.connect(client())


@pytest.mark.parametrize(
    ("module", "name"), [("valkey.asyncio.client", "valkey-py"), ("coredis.client", "coredis")]
)
def test_a_client_of_another_library_is_told_what_to_give_instead(module, name):
    client = type("Redis", (), {"__module__": module})()
    with pytest.raises(
        ConfigError, match=rf"{name}.* 'redis://127\.0\.0\.1:6379/0', or a redis\.asyncio\.Redis"
    ):
        aiolock.connect(client)


@pytest.mark.parametrize("beside", [{"password": "x"}, {"client_name": "x"}])
async def test_nothing_is_given_beside_a_client(beside):
    with pytest.raises(ConfigError, match=rf"{next(iter(beside))}: the client brings"):
        aiolock.connect(redis.asyncio.Redis(), **beside)


def test_a_client_is_one_server_and_of_asyncio():
    with pytest.raises(ConfigError, match=r"hand over a redis\.asyncio\.Redis"):
        aiolock.connect(redis.Redis())
    with pytest.raises(ConfigError, match="an address: the client brings"):
        RedisBackend("redis://h", client=redis.asyncio.Redis())
    with pytest.raises(ConfigError, match="must be a str"):
        aiolock.connect(object())


@pytest.mark.parametrize(
    "address",
    ["redis://h/0", "redis+sentinel://h1,h2/service/0", "redis+cluster://h1,h2", "unix:///run/redis.sock"],
)
def test_parameters_of_redis_py_that_change_nothing_are_ignored(address, caplog):
    caplog.set_level(logging.DEBUG, "aiolock")
    query = "decode_responses=True&health_check_interval=30&socket_timeout=5&max_connections=10&protocol=3"
    aiolock.connect(f"{address}?{query}")
    ignored = [each.getMessage() for each in caplog.records if each.getMessage().endswith("is ignored")]
    assert [each.partition(" ")[0] for each in ignored] == [
        each.partition("=")[0] for each in query.split("&")
    ]
    with pytest.raises(ConfigError, match="decode_responses"):
        aiolock.connect(address, decode_responses=True)


@pytest.mark.parametrize("name", ["ssl_min_version", "ssl_ca_path", "decode_response"])
def test_parameters_that_would_mean_something_are_not(name):
    with pytest.raises(ConfigError, match=f"'{name}' is no parameter"):
        aiolock.connect(f"rediss://h/0?{name}=x")


# --- let in


async def test_locks_by_the_client_of_an_application(server):
    own = redis.asyncio.Redis.from_url(
        server.url.replace("redis://", f"redis://app:{QUOTED}@"), socket_timeout=3
    )
    try:
        client = aiolock.connect(own, ttl=5)
        for _ in range(2):
            async with client, client.lock("x") as lease:
                assert lease.held
                assert await own.exists("aiolock:1:lock:{x}")
        assert await own.ping()
    finally:
        # redis-py 4.6 has no `aclose`, and its `close` leaves the pool of a client from an address as it is.
        await own.connection_pool.disconnect()


async def test_user_password_database_and_name_reach_the_server(server):
    endpoint = Endpoint(f"redis://app:{QUOTED}@127.0.0.1:{server.port}/3?client_name=locks")
    async with connected(endpoint) as connection:
        info = await connection.call("CLIENT", "INFO")
    assert b"name=locks " in info
    assert b" db=3 " in info
    assert b" user=app " in info


async def test_a_credential_provider_is_asked(server):
    provider = UsernamePasswordCredentialProvider("app", SECRET)
    async with connected(
        Endpoint(f"redis://127.0.0.1:{server.port}", credential_provider=provider)
    ) as connection:
        assert await connection.call("ACL", "WHOAMI") == b"app"


async def test_a_socket_in_the_file_system_is_an_address(server):
    async with connected(
        Endpoint(f"unix://{server.socket}?db=1", username="app", password=SECRET)
    ) as connection:
        assert b" db=1 " in await connection.call("CLIENT", "INFO")


async def test_a_user_who_may_not_ping_is_let_in(server):
    endpoint = Endpoint(f"redis://mute:{QUOTED}@127.0.0.1:{server.port}")
    async with connected(endpoint) as connection:
        assert await connection.call("ACL", "WHOAMI") == b"mute"


async def test_an_applications_client_is_handed_over_without_its_habits(server):
    newer = {"protocol": 3} if "protocol" in inspect.signature(redis.asyncio.Redis).parameters else {}
    async with redis.asyncio.Redis(
        port=server.port,
        username="app",
        password=SECRET,
        db=5,
        decode_responses=True,
        health_check_interval=1,
        client_name="theirs",
        **newer,
    ) as client:
        endpoint = Endpoint.of(client)
        assert endpoint.address == f"redis://app@localhost:{server.port}/5"
        async with connected(endpoint) as connection:
            info = await connection.call("CLIENT", "INFO")
            # A dictionary in the newer protocol, which the application speaks.
            assert isinstance(await connection.call("CONFIG", "GET", "port"), list)
        assert b" db=5 " in info
        assert b"name=theirs " in info
        assert await client.client_getname() == "theirs"
        assert client.connection_pool.connection_kwargs.get("protocol") == newer.get("protocol")


async def test_tls_is_verified_by_default_and_works(tls_server):
    url = f"rediss://localhost:{tls_server.port}"
    async with connected(Endpoint(url, ssl_ca_certs=tls_server.certificates.ca)) as connection:
        assert await asyncio.gather(*(connection.call("ECHO", n) for n in range(500))) == [
            b"%d" % n for n in range(500)
        ]
    untrusted = await failure(Endpoint(url))
    assert isinstance(untrusted, BackendRefused)
    assert "ssl_ca_certs" in str(untrusted)


async def test_a_certificate_for_another_name_is_refused(tls_server, monkeypatch):
    endpoint = Endpoint(
        f"rediss://another.example:{tls_server.port}", ssl_ca_certs=tls_server.certificates.ca
    )
    resolve = asyncio.BaseEventLoop.getaddrinfo

    async def here(loop, host, port, **rest):
        return await resolve(loop, "127.0.0.1", port, **rest)

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", here)
    error = await failure(endpoint)
    assert isinstance(error, BackendRefused)
    assert "another name" in str(error)
    assert "ssl_check_hostname" in str(error)


async def test_a_client_certificate_is_shown(tls_server):
    certificates = tls_server.certificates
    url = f"rediss://127.0.0.1:{tls_server.port}?ssl_ca_certs={certificates.ca}&ssl_certfile={certificates.cert}&ssl_keyfile={certificates.key}"
    async with connected(Endpoint(url)) as connection:
        assert await connection.call("PING") == b"PONG"


# --- not let in


@pytest.mark.parametrize(
    ("login", "path", "hint"),
    [
        ("app:wrong@", "", "check username and password"),
        ("nobody:wrong@", "", "check username and password"),
        ("", "", "asks for a password"),
        ("", "/7", "asks for a password"),
        (f"app:{QUOTED}@", "/99", "lower db"),
        (f"fixed:{QUOTED}@", "/1", "'select'"),
    ],
)
async def test_what_will_not_change_by_itself_is_refused_without_waiting(server, login, path, hint):
    # The timeout is one that the test would not survive.
    error = await failure(Endpoint(f"redis://{login}127.0.0.1:{server.port}{path}"), timeout=3600)
    assert isinstance(error, BackendRefused)
    assert not error.retryable
    assert hint in str(error)


async def test_plaintext_at_a_tls_port_and_the_reverse_are_explained(server, tls_server):
    plain = await failure(Endpoint(f"redis://127.0.0.1:{tls_server.port}"), timeout=2)
    assert "rediss://" in str(plain)
    tls = await failure(Endpoint(f"rediss://127.0.0.1:{server.port}"), timeout=2)
    assert "use redis://" in str(tls)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"220 mail ready\r\n"])
async def test_something_that_is_no_redis_is_refused(answer):
    async def respond(reader, writer):
        await reader.readline()
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        error = await failure(Endpoint(f"redis://127.0.0.1:{port}"), timeout=3600)
        assert isinstance(error, BackendRefused)
        assert "not as a Redis server" in str(error)
        error = await failure(Endpoint(f"rediss://127.0.0.1:{port}"), timeout=3600)
        assert "does not speak TLS" in str(error)


async def test_a_server_that_repeats_the_password_is_not_quoted():
    async def respond(reader, writer):
        await reader.readuntil(b"ss@word\r\n")
        writer.write(f"-ERR unknown thing '{SECRET}'\r\n".encode())
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(BackendRefused) as caught:
            async with connected(Endpoint(f"redis://:{QUOTED}@127.0.0.1:{port}")):
                pass
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("redis://127.0.0.1:1", "nothing listens there"),
        ("redis://no.such.host.invalid", "check the name"),
        ("unix:///no/such/redis.sock", "unixsocket"),
    ],
)
async def test_a_server_that_is_not_there_is_unavailable_within_the_timeout(url, hint):
    loop = asyncio.get_running_loop()
    begun = loop.time()
    error = await failure(Endpoint(url), timeout=1)
    assert isinstance(error, BackendUnavailable)
    assert error.retryable
    assert hint in str(error)
    assert loop.time() - begun < 20


async def test_a_missing_certificate_file_is_refused(tls_server):
    error = await failure(
        Endpoint(f"rediss://127.0.0.1:{tls_server.port}", ssl_ca_certs="/no/such/ca.pem"), timeout=3600
    )
    assert isinstance(error, BackendRefused)
    assert "ssl_ca_certs" in str(error)


async def test_a_full_server_is_unavailable():
    with Redis(extra=["--maxclients", "1"]) as full:
        async with connected(Endpoint(full.url)):
            error = await failure(Endpoint(full.url), timeout=1)
    assert isinstance(error, BackendUnavailable)
    assert "maxclients" in str(error)


async def test_a_failing_credential_provider_is_unavailable_and_not_quoted(server):
    class Broken(UsernamePasswordCredentialProvider):
        def get_credentials(self):
            """Fail; redis-py calls this, or the next one, depending on its version."""
            raise LookupError("the token is abc")

        async def get_credentials_async(self):
            raise LookupError("the token is abc")

    error = await failure(
        Endpoint(f"redis://127.0.0.1:{server.port}", credential_provider=Broken("a", "b")), timeout=1
    )
    assert isinstance(error, BackendUnavailable)
    assert "LookupError" in str(error)
    assert "abc" not in str(error)


async def test_the_server_that_comes_up_meanwhile_is_found():
    late = Redis()
    try:
        endpoint = Endpoint(f"redis://127.0.0.1:{late.port}")
        connection = Connection(endpoint, clock=system_clock, command_timeout=60)
        opening = asyncio.ensure_future(connection.open())
        await until(lambda: connection.failure is not None)
        late.start()
        await opening
        assert await connection.call("PING") == b"PONG"
        await connection.aclose()
    finally:
        late.close()


# --- nothing left behind


async def test_cancelling_open_anywhere_leaves_no_socket_and_no_task(server, tls_server):
    endpoints = [
        Endpoint(f"redis://app:{QUOTED}@127.0.0.1:{server.port}/1?client_name=x"),
        Endpoint(f"rediss://localhost:{tls_server.port}", ssl_ca_certs=tls_server.certificates.ca),
    ]
    async with connected(endpoints[0]):
        pass  # what the loop opens once, it has now
    before, tasks = descriptors(), asyncio.all_tasks()
    for endpoint in endpoints:
        for steps in range(0, 60, 2):
            connection = Connection(endpoint, clock=system_clock, command_timeout=10)
            opening = asyncio.ensure_future(connection.open())
            for _ in range(steps):
                await asyncio.sleep(0)
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await opening
            assert asyncio.all_tasks() == tasks or not opening.cancelled()
            await connection.aclose()
    await settled(before)
    assert asyncio.all_tasks() == tasks


async def test_failed_attempts_leave_no_socket(server, tls_server):
    endpoints = [
        Endpoint(f"redis://app:wrong@127.0.0.1:{server.port}"),
        Endpoint(f"rediss://127.0.0.1:{tls_server.port}"),
        Endpoint("redis://127.0.0.1:1"),
    ]
    for endpoint in endpoints:
        await failure(endpoint, timeout=0.2)
    before = descriptors()
    for endpoint in endpoints * 3:
        await failure(endpoint, timeout=0.2)
    await settled(before)


async def settled(before: int) -> None:
    """Sockets close in later passes of the loop; here they have as many as they need."""
    await until(lambda: descriptors() <= before)


async def until(condition: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    give_up = loop.time() + 20
    while not condition():
        assert loop.time() < give_up
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "error", [ssl.SSLError(1, "alert"), ssl.SSLEOFError(8, "EOF"), ConnectionResetError(), BrokenPipeError()]
)
def test_whichever_end_of_a_tls_connection_comes_first_the_certificate_is_named(error):
    """A server that asks its clients for a certificate sends an alert, and closes: either may arrive first."""
    error.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    assert "ssl_certfile and ssl_keyfile" in str(from_driver(error, tls=True, local=False))
