"""What is refused when a client connects, and when it connects again: by a sentence that says what to do."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time

import pytest

import aiolock
from aiolock import BackendRefused, BackendUnavailable, ConfigError, UnsafeBackend
from aiolock.backends.etcd import diagnosis
from aiolock.backends.etcd.errors import unreachable
from aiolock.backends.etcd.url import parameters
from aiolock.backends.urls import Host
from aiolock.core.backend import Settings
from tests.backends.etcd.conftest import Opened, demand_login, opened
from tests.certificates import Certificates
from tests.faults.staging import until
from tests.servers import Etcd, Redis


@pytest.mark.parametrize(
    ("url", "hosts", "user"),
    [
        ("etcd://10.0.0.1", ["10.0.0.1:2379"], ""),
        ("etcd://b:1,a:2", ["b:1", "a:2"], ""),
        ("ETCD://user:p%40ss@Example.org:2380/", ["example.org:2380"], "user"),
        ("etcd://[::1]:5,h", ["[::1]:5", "h:2379"], ""),
    ],
)
def test_an_address_names_members_and_a_login(url, hosts, user):
    address = parameters(url, {})
    assert list(map(str, address.hosts)) == hosts
    assert address.user == user
    assert "p@ss" not in repr(address)
    assert "p@ss" not in address.text


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("etcd://", {}, "names no host"),
        ("etcd://a,,b", {}, "names no host"),
        ("etcd://a:70000", {}, "port"),
        ("etcd://a,a:2379", {}, "named twice"),
        ("etcd://user@a", {}, "a user and a password"),
        ("etcd://:secret@a", {}, "a user and a password"),
        ("etcd://a/0", {}, "no databases"),
        ("etcd://a?timeout=5", {}, "timeout.*no parameter of a etcd URL; it has tls"),
        ("etcd://a?tls=maybe", {}, "tls must be true, false"),
        ("etcd://a?tls_ca=x", {}, "need tls=true"),
        ("etcd://a?tls=true&tls_ca=/nowhere", {}, "cannot be read"),
        ("etcd://a", {"tls": ssl.create_default_context(), "tls_ca": "x"}, "load what tls_ca"),
    ],
)
def test_what_names_no_cluster_is_refused(url, options, why):
    with pytest.raises(ConfigError, match=why) as refusal:
        aiolock.connect(url, **options)
    assert "secret" not in str(refusal.value)


async def refused(url: str, timeout: float = 5.0, namespace: str = "tests") -> Exception:
    """The error with which a store refuses to open."""
    store = Opened(url)
    with pytest.raises(aiolock.BackendError) as refusal:
        await store.begin(timeout, namespace)
    await store.aclose()
    assert "pass%word" not in str(refusal.value)
    return refusal.value


@pytest.mark.parametrize(
    "answer",
    [
        b"-ERR unknown command\r\n",
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        b"x" * 100_000,
    ],
)
async def test_other_answers_than_those_of_http2_are_refused(answer):
    async def serve(reader, writer):
        await reader.read(10)
        writer.write(answer)
        await reader.read(1_000)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        error = await refused("etcd://{}:{}".format(*listening.sockets[0].getsockname()), 2.0)
    assert isinstance(error, BackendRefused)
    assert "is no etcd, or it demands TLS: tls=true" in str(error)


async def test_another_server_at_that_port_is_no_etcd():
    with Redis() as redis:
        error = await refused(f"etcd://127.0.0.1:{redis.port}", 2.0)
    assert isinstance(error, BackendRefused | BackendUnavailable)
    assert str(redis.port) in str(error)


async def test_no_server_there_and_one_that_gives_no_answer_are_unavailable(own):
    own.freeze()
    try:
        assert isinstance(await refused(own.url, 0.5), BackendUnavailable)
    finally:
        own.thaw()
    own.stop()
    assert isinstance(await refused(own.url, 0.5), BackendUnavailable)


# --- logging in


async def test_a_login_is_demanded_wrong_or_right(own, caplog):
    caplog.set_level(logging.DEBUG)
    url = demand_login(own)
    error = await refused(own.url)
    assert isinstance(error, BackendRefused)
    assert "the cluster demands a login: user:password@ in the address" in str(error)
    error = await refused(url.replace("pass%25word", "guess"))
    assert isinstance(error, BackendRefused)
    assert "authentication failed" in str(error)
    assert "guess" not in str(error)
    async with aiolock.connect(url, namespace="tests") as client, client.lock("x") as lease:
        assert await lease.renew() is None
        assert await client.locks()
        token = client._runtime.backend.store._connection._channel.token
        assert any("etcd" in finding.text for finding in await client.diagnose())
    assert token
    for secret in (token, "pass%word", "pass%25word"):
        assert secret not in caplog.text


@pytest.mark.parametrize(("prefix", "right"), [("others/", "readwrite"), ("tests/", "read")])
async def test_a_user_without_the_rights_is_refused(own, prefix, right):
    url = demand_login(own, prefix=prefix, right=right)
    error = await refused(url)
    assert isinstance(error, BackendRefused)
    assert "needs the right to read and write all keys that begin with the namespace and a slash" in str(
        error
    )


async def test_a_client_logs_in_again_when_rights_were_changed(own):
    url = demand_login(own)
    async with aiolock.connect(url, namespace="tests", ttl=5, command_timeout=15) as client:
        lease = await client.lock("x").acquire()
        own.ctl("--user=root:password", "user", "add", "more:word")

        async def works():
            try:
                async with client.lock("y", timeout=2):
                    return True
            except aiolock.BackendError:
                return False

        await until(works)
        await lease.renew()
        assert lease.held


# --- TLS


async def test_tls_by_a_known_authority_and_by_others(tmp_path):
    made = Certificates(tmp_path / "tls")
    with Etcd(certificates=made) as server:
        options = f"?tls=true&tls_ca={made.ca}"
        async with (
            aiolock.connect(server.url + options, namespace="tests") as client,
            client.lock("x") as lease,
        ):
            assert lease.held
        error = await refused(f"{server.url}?tls=true", 3.0)
        assert isinstance(error, BackendRefused)
        assert "name its authority with tls_ca=" in str(error)
        assert "it may demand TLS: tls=true" in str(await refused(server.url, 2.0))


async def test_a_server_without_tls_is_an_error(server, tmp_path):
    made = Certificates(tmp_path / "tls")
    error = await refused(f"{server.url}?tls=true&tls_ca={made.ca}", 2.0)
    assert isinstance(error, BackendUnavailable)
    assert "or speak no TLS that this client accepts at this port" in str(error)


def alert() -> ssl.SSLError:
    error = ssl.SSLError(1, "tlsv13 alert certificate required")
    error.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    return error


@pytest.mark.parametrize(
    "error",
    [
        alert(),
        ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
        ConnectionResetError(104, "Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
        EOFError(),
    ],
)
def test_whichever_end_of_a_tls_connection_comes_first_the_sentence_is_one(error):
    made = unreachable(Host("h", 2379), error, tls=True)
    # It may pass: a server that starts again ends connections as well.
    assert type(made) is BackendUnavailable
    assert str(made) == (
        "h:2379 ended the TLS connection before it could be used; it may demand a certificate of the client, or speak no TLS that "
        "this client accepts at this port: see tls, tls_cert and tls_key"
    )


def test_an_answer_that_is_no_tls_is_refused():
    error = ssl.SSLError(1, "wrong version number")
    error.reason = "WRONG_VERSION_NUMBER"
    made = unreachable(Host("h", 2379), error, tls=True)
    assert type(made) is BackendRefused
    assert str(made) == (
        "h:2379 does not speak TLS at this port (WRONG_VERSION_NUMBER): leave tls away, or name its port for TLS"
    )


async def test_a_certificate_is_demanded_and_names_the_user(tmp_path):
    made, others = Certificates(tmp_path / "made"), Certificates(tmp_path / "others")
    login = f"--cert={made.cert}", f"--key={made.key}"
    with Etcd(certificates=made, extra=["--client-cert-auth", f"--trusted-ca-file={made.ca}"]) as server:
        url = f"{server.url}?tls=true&tls_ca={made.ca}"
        for wrong in ("", f"&tls_cert={others.cert}&tls_key={others.key}"):
            error = await refused(url + wrong, 3.0)
            assert type(error) is BackendUnavailable
            assert (
                "it may demand a certificate of the client, or speak no TLS that this client accepts at this port: see tls, tls_cert and tls_key"
                in str(error)
            )
        # The common name of the certificate.
        for words in (
            ("role", "add", "locks"),
            ("role", "grant-permission", "locks", "readwrite", "--prefix=true", "tests/"),
            ("user", "add", "root:password"),
            ("user", "grant-role", "root", "root"),
            ("user", "add", "aiolock tests", "--no-password"),
            ("user", "grant-role", "aiolock tests", "locks"),
            ("auth", "enable"),
        ):
            server.ctl(*login, *words)
        url += f"&tls_cert={made.cert}&tls_key={made.key}"
        async with aiolock.connect(url, namespace="tests") as client, client.lock("x") as lease:
            await lease.renew()
        error = await refused(url, namespace="others")
        assert isinstance(error, BackendRefused)
        assert "needs the right" in str(error)


# --- the cluster and the format of a namespace


async def test_a_namespace_of_another_format_is_refused(own):
    async with opened(own.url) as store:
        await store.insert("tests/l/lock/a")
    assert own.ctl("get", "tests/format") == "tests/format\n1\n"
    own.ctl("put", "tests/format", "47")
    error = await refused(own.url)
    assert isinstance(error, UnsafeBackend)
    assert "namespace tests has keys of version '47', and this library writes version 1" in str(error)
    async with opened(own.url, namespace="other"):
        pass


async def test_members_of_another_cluster_are_refused(own):
    """A client that loses its cluster does not go on with another one, in which its locks are free."""
    with Etcd() as second:
        both = {own.port: own, second.port: second}
        url = ",".join(f"127.0.0.1:{port}" for port in both)
        async with opened(f"etcd://{url}", timeout=3.0) as store:
            chosen = int(store._connection._channel.address.rpartition(":")[2])
            both[chosen].stop()
            await until(lambda: store.interruptions >= 1)

            async def refuses():
                try:
                    await store.read("tests/a")
                except UnsafeBackend as error:
                    return "belongs to another cluster" in str(error)
                except BackendUnavailable:
                    return False

            await until(refuses)


async def test_what_one_member_and_three_promise(server):
    async with aiolock.connect(server.url, require={"exclusion", "fencing", "survives-restart"}) as client:
        assert "survives-failover" not in client.capabilities
    with pytest.raises(UnsafeBackend, match="survives-failover"):
        await aiolock.connect(server.url, require={"survives-failover"}).open()


async def test_a_diagnosis_that_is_cancelled_closes_the_connections_that_it_has(monkeypatch):
    made, connect = [], diagnosis.new_connection

    async def first_only(host, *options):
        if host.port == 1:
            await asyncio.Event().wait()
        made.append(await connect(host, *options))
        return made[0]

    monkeypatch.setattr(diagnosis, "new_connection", first_only)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:1"
        settings = Settings("tests", "", 5.0, 5.0, time.monotonic)
        task = asyncio.create_task(diagnosis.diagnose(parameters(f"etcd://{hosts}", {}), settings))
        await until(lambda: made)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert made[0].transport.is_closing()
