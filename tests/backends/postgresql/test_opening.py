"""Bad input and bad luck when a client opens: the documented error, in bounded time, and never the password."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path

import pytest

from aiolock.errors import BackendRefused, BackendUnavailable
from tests.backends.postgresql.tools import key, opened, put
from tests.faults.proxy import Proxy
from tests.faults.staging import until
from tests.processes import reserve_port
from tests.servers import Certificates, PostgreSQL, Redis

PASSWORD = "s3cret/pass@word"
QUOTED = "s3cret%2Fpass%40word"


INIT = (
    f"CREATE ROLE app LOGIN PASSWORD '{PASSWORD}'",
    "CREATE ROLE onlytls LOGIN",
    "GRANT ALL ON SCHEMA public TO app, onlytls",
)
HBA = ("host all app all scram-sha-256",)


@pytest.fixture(scope="module")
def guarded():
    """A server that asks for a password."""
    with PostgreSQL(init=INIT, hba=HBA) as server:
        yield server


@pytest.fixture(scope="module")
def encrypted(with_tls):
    """A server that offers TLS, and one of whose roles must use it."""
    hba = (*HBA, "hostssl all onlytls all trust", "hostnossl all onlytls all reject")
    with PostgreSQL(init=INIT, hba=hba, tls=True, binary=with_tls) as server:
        yield server


def url_of(server, login=f"app:{QUOTED}", database="test", query="", port=None):
    return f"postgresql://{login}@127.0.0.1:{port or server.port}/{database}{query}"


async def refused(url, error, words, *, seconds=15.0, **options):
    """Open a store, which must raise in time and without the password."""
    began = time.monotonic()
    with pytest.raises(error, match=words) as caught:
        async with opened(url, **options):
            pass
    assert time.monotonic() - began < seconds
    chain, told = caught.value, ""
    while chain is not None:
        told += str(chain)
        chain = chain.__cause__
    assert PASSWORD not in told
    assert QUOTED not in told


def sockets() -> int:
    """How many this process has."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the folder
            found += str(entry.readlink()).startswith("socket:")
    return found


async def test_the_right_password_opens(guarded):
    async with opened(url_of(guarded)) as store:
        await put(store, key())
        assert PASSWORD not in repr(store._address) + repr(vars(store))


@pytest.mark.parametrize("login", [f"app:{QUOTED}x", "app", f"nobody:{QUOTED}"])
async def test_a_wrong_login_is_refused(guarded, login):
    await refused(url_of(guarded, login), BackendRefused, r"password|role \"nobody\" does not exist")


async def test_a_wrong_database_is_refused(guarded):
    await refused(url_of(guarded, database="absent"), BackendRefused, 'database "absent" does not exist')


async def test_a_port_where_no_server_listens_is_unavailable():
    with contextlib.ExitStack() as until:
        port = reserve_port(until)
        await refused(url_of(None, port=port), BackendUnavailable, f"127.0.0.1:{port}")


async def test_a_host_that_does_not_exist_is_unavailable():
    await refused(
        "postgresql://app@no-such-host.invalid/test", BackendUnavailable, "no-such-host", seconds=20
    )


async def test_another_kind_of_server_is_told_in_time():
    with Redis() as redis:
        await refused(url_of(None, port=redis.port), BackendUnavailable, "127.0.0.1", command_timeout=1.0)


async def test_a_server_that_says_nothing_is_unavailable_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        await refused(url_of(None, port=port), BackendUnavailable, "no answer in time", command_timeout=0.3)


async def test_a_frozen_server_is_unavailable_in_time(own):
    own.freeze()
    try:
        await refused(own.url, BackendUnavailable, "no answer in time", command_timeout=0.5)
    finally:
        own.thaw()


async def test_a_cancelled_opening_leaves_nothing_open(own):
    own.freeze()
    try:
        task = asyncio.create_task(refused(own.url, BackendUnavailable, None, command_timeout=30.0))
        await asyncio.sleep(0.1)
        task.cancel()
        async with asyncio.timeout(15):
            await asyncio.wait([task])
        assert task.cancelled()
    finally:
        own.thaw()


async def test_tls_is_used_and_verified(encrypted):
    ca = encrypted.certificates.ca
    for query in (f"?tls=verify&tls_ca={ca}", "?tls=encrypt"):
        async with opened(url_of(encrypted, "onlytls", query=query)) as store:
            await put(store, key())
            [[ssl]] = await store._open().writer().fetch(store._statements("encrypted"))
            assert ssl is True


@pytest.mark.parametrize("query", ["", "?tls=encrypt"])
@pytest.mark.parametrize("answers", [1, 3, 4, 5])
async def test_a_server_that_falls_silent_in_the_login_leaves_no_socket_open(encrypted, query, answers):
    def silence(direction, _frame):
        if direction == "down" and proxy.down.frames >= answers:
            proxy.blackhole()

    async with Proxy("127.0.0.1", encrypted.port, on_frame=silence) as proxy:
        before = sockets()
        url = url_of(encrypted, "postgres", query=query, port=proxy.port)
        await refused(url, BackendUnavailable, "no answer in time", command_timeout=1.0)
        async with asyncio.timeout(15):
            # The proxy has two of each connection.
            await until(lambda: sockets() - before <= 2 * proxy.connections)


async def test_a_server_that_demands_tls_has_the_option_named(encrypted):
    await refused(url_of(encrypted, "onlytls"), BackendRefused, "onlytls.*TLS alone.* tls=verify")
    # Another reason why a login is refused.
    await refused(url_of(encrypted, f"no_such:{QUOTED}"), BackendRefused, r"no_such.*\]$")


async def test_a_certificate_that_is_not_trusted_is_refused(encrypted):
    await refused(url_of(encrypted, query="?tls=verify"), BackendRefused, "certificate.*tls_ca=")


async def test_a_certificate_for_another_host_is_refused(with_tls, tmp_path):
    certificates = Certificates(tmp_path / "tls", names="DNS:elsewhere")
    with PostgreSQL(tls=certificates, binary=with_tls) as server:
        query = f"?tls=verify&tls_ca={certificates.ca}"
        await refused(url_of(server, "postgres", query=query), BackendRefused, "certificate")
        # Encryption alone does not look at names.
        async with opened(url_of(server, "postgres", query="?tls=encrypt")) as store:
            await put(store, key())


async def test_tls_that_the_server_does_not_offer_is_refused_before_the_password(server):
    await refused(
        url_of(server, query="?tls=encrypt"), BackendRefused, "does not offer TLS, which tls= asks for"
    )


async def test_a_standby_is_refused():
    with PostgreSQL() as server:
        server.stop()
        (server.data / "standby.signal").touch(mode=0o644)
        server.start()
        await refused(server.url, BackendRefused, "is a standby or recovers.*connect to the primary")


async def test_a_socket_in_the_file_system_is_a_way_to_the_server(server):
    url = f"postgresql://postgres@/test?unix_socket={server.folder}"
    async with opened(url.replace("@/", f"@127.0.0.1:{server.port}/")) as store:
        await put(store, key())


async def test_too_many_connections_are_unavailable_for_now():
    # One more than the first client needs: the session of an administrator may not be over yet.
    with PostgreSQL(settings=["max_connections = 5", "superuser_reserved_connections = 2"]) as server:
        server.ask("CREATE ROLE app LOGIN", "GRANT ALL ON SCHEMA public TO app")
        url = server.url.replace("postgres@", "app@")
        async with opened(url):
            await refused(url, BackendUnavailable, "connection slots|too many clients|remaining")
