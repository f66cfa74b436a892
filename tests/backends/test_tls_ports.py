"""A client that speaks TLS where a server does not, or the other way round, or has no certificate, reads which option is at fault."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

import aiolock
from aiolock import BackendError, BackendUnavailable
from aiolock.backends.redis.errors import from_driver
from aiolock.backends.urls import ended_by_peer, is_alert
from aiolock.backends.zookeeper.errors import tls_hint
from tests.certificates import Certificates

PLAIN = {
    "etcd://{where}": "tls=true",
    "zookeeper://{where}": "tls=true",
    "redis://{where}": "use rediss://",
    "postgresql://u:p@{where}/d": "write tls=verify",
    "mysql://u:p@{where}/d": "with tls=verify",
    "mongodb://u:p@{where}/d": "tls=true",
}
"""What is said at a port of TLS."""
ENCRYPTED = {
    "etcd://{where}?tls=true&tls_ca={ca}": (
        "see tls, tls_cert and tls_key",
        "speak no TLS that this client accepts",
    ),
    "zookeeper://{where}?tls=true&tls_ca={ca}": ("tls_cert and tls_key", "not speak TLS at this port (tls)"),
    "rediss://{where}?ssl_ca_certs={ca}": (
        "ssl_certfile and ssl_keyfile",
        "not speak TLS at this port, use redis://",
    ),
    "postgresql://u:p@{where}/d?tls=verify&tls_ca={ca}": (
        "give tls= an ssl.SSLContext",
        "speaks TLS from the beginning",
    ),
    "mysql://u:p@{where}/d?tls=verify&tls_ca={ca}": ("with tls=verify", "speaks TLS from the beginning"),
    "mongodb://u:p@{where}/d?tls=true&tls_ca={ca}": ("tls_cert=", "tls=true"),
}
"""What is said about a certificate of the client, and about a port without TLS."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


async def silent(reader, writer):
    with suppress(OSError):
        await reader.read()
    writer.close()


async def closes(reader, writer):
    await reader.read(10)
    writer.close()


async def error_at(port: int, url: str, words: str, ca: Path) -> BackendError:
    """What a client says that is opened; a busy machine may not get as far as the server's answer at first."""
    for seconds in (1.0, 4.0, 16.0):
        client = aiolock.connect(url.format(where=f"localhost:{port}", ca=ca), command_timeout=seconds)
        with pytest.raises(BackendError) as caught:
            await client.open()
        if words in str(caught.value):
            break
    return caught.value


async def errors(handler, context, wanted: dict[str, str], ca: Path) -> dict[str, BackendError]:
    """What clients say that are opened at the same time; each with the words that are wanted of it."""
    server = await asyncio.start_server(handler, "localhost", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    try:
        found = await asyncio.gather(*(error_at(port, url, words, ca) for url, words in wanted.items()))
    finally:
        server.close()
    assert [
        str(error) for error, words in zip(found, wanted.values(), strict=True) if words not in str(error)
    ] == []
    return dict(zip(wanted, found, strict=True))


def context(made, *, demanding: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.cert, made.key)
    if demanding:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(made.ca)
    return context


async def test_a_plain_client_at_a_port_of_tls_reads_which_option_it_lacks(made):
    await errors(silent, context(made), PLAIN, made.ca)


async def test_a_client_without_a_certificate_reads_which_option_it_lacks(made):
    wanted = {url: certificate for url, (certificate, _) in ENCRYPTED.items()}
    found = await errors(silent, context(made, demanding=True), wanted, made.ca)
    assert {type(error) for error in found.values()} == {BackendUnavailable}


async def test_a_client_of_tls_at_a_plain_port_reads_which_option_is_too_much(made):
    # A server of MySQL speaks first, so a silent one is what it takes for one of TLS.
    await errors(closes, None, {url: plain for url, (_, plain) in ENCRYPTED.items()}, made.ca)


def ssl_error(kind: type[ssl.SSLError], reason: str) -> ssl.SSLError:
    error = kind(1, reason)
    error.reason = reason
    return error


def test_whether_a_server_says_why_it_ends_a_connection_or_not_the_error_is_one():
    alert = ssl_error(ssl.SSLError, "TLSV13_ALERT_CERTIFICATE_REQUIRED")
    foreign = ssl_error(ssl.SSLError, "WRONG_VERSION_NUMBER")
    ends = [alert, ssl_error(ssl.SSLEOFError, "EOF"), ConnectionResetError(), BrokenPipeError()]
    assert all(map(ended_by_peer, ends))
    assert [is_alert(error) for error in [*ends, foreign]] == [True, False, False, False, False]
    assert not ended_by_peer(foreign)
    for error in ends:
        translated = from_driver(error, tls=True, local=False)
        assert type(translated) is BackendUnavailable
        assert "certificate, check ssl_certfile and ssl_keyfile" in str(translated)
        assert ("redis://" in str(translated)) == (error is not alert)
        assert "may demand a certificate of the client: tls_cert and tls_key" in tls_hint(error, tls=True)
    assert "leave tls away" in tls_hint(foreign, tls=True)
    assert "tls_ca=" in tls_hint(ssl.SSLCertVerificationError(), tls=True)
    assert tls_hint(OSError("no way"), tls=True) == ""
