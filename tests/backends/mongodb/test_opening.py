"""What is refused when a client connects, and when it connects again: by a sentence that says what to do."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import time
import traceback
import warnings

import pytest

import aiolock
import aiolock.aiohttp
import aiolock.fastapi
import aiolock.portal
import aiolock.starlette
from aiolock import BackendRefused, BackendUnavailable, ConfigError, UnsafeBackend
from aiolock.backends.mongodb import MongoDBBackend
from aiolock.backends.mongodb.connection import Connection
from aiolock.backends.mongodb.diagnosis import diagnose
from aiolock.backends.mongodb.url import parameters
from aiolock.clock import system_clock
from aiolock.core.backend import Settings
from aiolock.errors import ExperimentalWarning
from aiolock.types import Level
from tests.backends.mongodb.conftest import Opened, opened
from tests.certificates import Certificates
from tests.faults.staging import until
from tests.servers import Memcached, MongoStandIn, Redis

PASSWORD = "pass%word"
READ_WRITE = {"app": (PASSWORD, ["readWrite"])}

ends_server = pytest.mark.ends_server


@pytest.mark.parametrize(
    ("url", "hosts", "database", "arguments"),
    [
        ("mongodb://10.0.0.1/locks", ["10.0.0.1:27017"], "locks", {}),
        ("mongodb://b:1,a:2/x?replicaSet=rs0", ["b:1", "a:2"], "x", {"replicaSet": "rs0"}),
        ("MONGODB://[::1]:5,h/x", ["[::1]:5", "h:27017"], "x", {}),
        (
            "mongodb://app:p%40ss@h/x?tls=true&retryWrites=true&w=majority",
            ["h:27017"],
            "x",
            {"username": "app", "password": "p@ss", "authSource": "x", "tls": True},
        ),
        (
            "mongodb://app:p%40ss@h/x?authSource=admin&directConnection=true",
            ["h:27017"],
            "x",
            {"username": "app", "password": "p@ss", "authSource": "admin", "directConnection": True},
        ),
    ],
)
def test_an_address_names_members_a_database_and_a_login(url, hosts, database, arguments):
    address = parameters(url, {})
    assert list(map(str, address.hosts)) == hosts
    assert (address.database, address.collection) == (database, "aiolock")
    assert address.arguments == arguments
    assert "p@ss" not in repr(address)
    assert "p@ss" not in address.text


@pytest.mark.parametrize(
    ("url", "options", "why"),
    [
        ("mongodb://", {}, "names no host"),
        ("mongodb://a,,b/x", {}, "names no host"),
        ("mongodb://a:70000/x", {}, "port"),
        ("mongodb://a,a:27017/x", {}, "named twice"),
        ("mongodb://a", {}, "must name a database"),
        ("mongodb://a/x/y", {}, "must name a database"),
        ("mongodb://a/$x", {}, "must name a database"),
        ("mongodb://a/local", {}, "local is not replicated"),
        ("mongodb://a%2Fb.sock/x", {}, "host 1 is no host and port"),
        ("mongodb://a,b/x?directConnection=true", {}, "one member: name that one alone, or leave it out"),
        ("mongodb://u:secret@a,b/x?directConnection=true&replicaSet=r", {}, "name that one alone"),
        ("mongodb://a/x?replicaSet=", {}, "replicaSet must be a name, not empty"),
        ("mongodb://u:secret@a/x?authSource=", {}, "authSource must be a name, not empty"),
        ("mongodb://user@a/x", {}, "a user and a password"),
        ("mongodb://:secret@a/x", {}, "a user and a password"),
        ("mongodb+srv://user:secret@a.example.org/x", {}, r"mongodb\+srv:// is not supported.*name them"),
        ("mongodb://a/x?authSources=admin", {}, "no parameter of a MongoDB URL.*did you mean authSource"),
        ("mongodb://a/x?tls=maybe", {}, "tls must be true or false"),
        ("mongodb://a/x?tls_ca=x", {}, "need tls=true"),
        ("mongodb://a/x?tls=true&tls_ca=/nowhere", {}, "cannot be read"),
        ("mongodb://a/x?collection=a.b", {}, "collection must be 1 to 63 letters"),
        ("mongodb://a/x", {"collection": ""}, "collection must be 1 to 63 letters"),
        ("mongodb://a/x", {"table": "x"}, "no option table; it has namespace, .* for mongodb:// collection"),
    ],
)
def test_what_names_no_replica_set_is_refused(url, options, why):
    with pytest.raises(ConfigError, match=why) as refusal:
        aiolock.connect(url, **options)
    assert "secret" not in str(refusal.value)


def make_driver(url: str, timeout: float = 5.0, **options) -> None:
    """Make the driver's client, which connects later."""
    settings = Settings("tests", "label", 10.0, timeout, system_clock)
    Connection(parameters(url, options), settings, lambda: None)


async def test_the_driver_takes_every_combination_that_an_address_may_have(tmp_path):
    ca = Certificates(tmp_path / "tls").ca
    choices = {
        "hosts": ["a", "a,b:1", "[::1]", "[fe80::1%eth0]", "a.sock", "a_b", "u.example"],
        "login": ["", "u:secret@", "%00:%00@", "u:%F0%9F%98%80@"],
        "replicaSet": [None, "rs0", "r s", "%00"],
        "authSource": [None, "admin", "$external", "a.b"],
        "directConnection": [None, "false", "true"],
        "readPreference": [None, "nearest"],
        "tls": [None, "true"],
    }
    taken = 0
    for hosts, login, *values in itertools.product(*choices.values()):
        words = dict(zip(list(choices)[2:], values, strict=True))
        if "," in hosts and words["directConnection"] == "true":
            continue
        query = "&".join(f"{name}={value}" for name, value in words.items() if value)
        make_driver(f"mongodb://{login}{hosts}/x?{query}", **({"tls_ca": ca} if words["tls"] else {}))
        taken += 1
    assert taken > 4000


async def test_what_the_driver_refuses_all_the_same_is_a_config_error_without_the_password(tmp_path):
    client = aiolock.connect("mongodb://u:secret@a/x", command_timeout=2_000_000)
    with pytest.raises(
        ConfigError, match="driver refuses these options: serverSelectionTimeoutMS"
    ) as refusal:
        await client.open()
    shown = "".join(traceback.TracebackException.from_exception(refusal.value, capture_locals=True).format())
    assert isinstance(refusal.value.__cause__, ValueError)
    assert "secret" not in shown
    ca = tmp_path / "ca.crt"
    ca.write_bytes(Certificates(tmp_path / "tls").ca.read_bytes())
    client = aiolock.connect("mongodb://a/x", tls=True, tls_ca=ca)
    ca.unlink()
    with pytest.raises(ConfigError, match=r"driver refuses these options: .*ca\.crt") as refusal:
        await client.open()
    assert isinstance(refusal.value.__cause__, OSError)


MAKERS = {
    "connect": aiolock.connect,
    "portal": aiolock.portal.connect,
    "backend": MongoDBBackend,
    "aiohttp": aiolock.aiohttp.cleanup_ctx,
    "starlette": aiolock.starlette.lifespan,
    "fastapi": aiolock.fastapi.lifespan,
}
"""Everything that takes a URL."""


@pytest.mark.parametrize("maker", MAKERS)
def test_it_is_said_once_at_the_line_of_the_caller_that_this_is_experimental(maker):
    make, line = MAKERS[maker], inspect.currentframe().f_lineno + 2
    with pytest.warns(ExperimentalWarning, match="tested with a stand-in, and never with a MongoDB") as told:
        make("mongodb://a/x")
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, line)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ExperimentalWarning)
        make("mongodb://a/x")


async def refused(url: str, timeout: float = 5.0, **options) -> Exception:
    """The error with which a store refuses to open, in time."""
    store, begun = Opened(url, **options), time.monotonic()
    with pytest.raises(aiolock.BackendError) as refusal:
        await store.begin(timeout)
    # What closing may take, and what a busy machine adds.
    assert time.monotonic() - begun < timeout + 3 + 20
    await store.aclose()
    assert PASSWORD not in str(refusal.value)
    return refusal.value


async def test_what_is_required_and_not_promised_is_refused_with_the_reason(server):
    for word in ("exclusion", "survives-failover"):
        with pytest.raises(UnsafeBackend, match=f"{word} while it is experimental: it was tested with a"):
            await aiolock.connect(server.url, require={word}).open()
    async with aiolock.connect(server.url, require={"fencing", "fifo", "keep", "survives-restart"}):
        pass


@ends_server
@pytest.mark.parametrize("other", [Redis, Memcached])
async def test_another_server_at_that_port_is_an_error(other):
    with other() as running:
        error = await refused(f"mongodb://127.0.0.1:{running.port}/test", 2.0)
    assert isinstance(error, BackendRefused | BackendUnavailable)
    assert str(running.port) in str(error)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 100, b"\0" * 100])
async def test_what_speaks_another_protocol_is_refused(answer):
    async def serve(reader, writer):
        await reader.read(10)
        writer.write(answer)
        await reader.read(1_000)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        error = await refused("mongodb://{}:{}/test".format(*listening.sockets[0].getsockname()), 2.0)
    assert isinstance(error, BackendRefused)
    assert "this is no MongoDB, or it demands TLS: tls=true" in str(error)


@ends_server
async def test_no_server_there_and_one_that_gives_no_answer_are_unavailable(own):
    own.freeze()
    try:
        error = await refused(own.url, 1.0)
    finally:
        own.thaw()
    assert isinstance(error, BackendUnavailable)
    own.stop()
    error = await refused(own.url, 2.0)
    assert isinstance(error, BackendUnavailable)
    assert "Connect call failed" in str(error) or "refused" in str(error)


@ends_server
async def test_a_standalone_server_is_refused():
    with MongoStandIn(extra=["--standalone"]) as server:
        error = await refused(server.url)
        assert isinstance(error, BackendRefused)
        assert "start it with --replSet, and call rs.initiate() once" in str(error)
        settings = Settings("tests", "label", 10.0, 5.0, system_clock)
        found = await diagnose(parameters(server.url, {}), settings)
        assert ("replica set", Level.ERROR) in {(each.subject, each.level) for each in found}


async def test_a_collection_that_compares_keys_in_another_way_is_found(server):
    collation = {"locale": "en", "strength": 1}
    server.ask({"create": "collated", "collation": collation})
    for collection, level in (("collated", Level.ERROR), ("never-made", Level.NOTE), ("aiolock", Level.OK)):
        async with aiolock.connect(server.url, collection="aiolock") as client:
            settings = client._runtime.backend.settings
        found = await diagnose(parameters(server.url, {"collection": collection}), settings)
        assert [each.level for each in found if each.subject == "collection"] == [level]
    server.ask({"drop": "collated"})


async def test_a_replica_set_of_another_name_is_an_error(server):
    error = await refused(f"{server.url}&replicaSet=another", 2.0)
    assert isinstance(error, BackendUnavailable | BackendRefused)
    assert "another" in str(error)


@ends_server
async def test_a_member_that_takes_no_writes_is_refused_and_may_be_tried_again(own):
    async with opened(own.url) as store:
        await store.change("tests/x", "")
        own.ask({"replSetStepDown": 3600, "force": True}, database="admin")
        with pytest.raises(BackendUnavailable):
            await store.change("tests/y", "")
    error = await refused(own.url)
    assert isinstance(error, BackendRefused)
    assert error.retryable
    assert "is not the primary" in str(error)


# --- logging in


@ends_server
async def test_a_login_is_demanded_wrong_or_right(caplog):
    caplog.set_level(logging.DEBUG)
    with MongoStandIn(users=READ_WRITE) as server:
        error = await refused(server.url)
        assert isinstance(error, BackendRefused)
        assert "authentication" in str(error)
        right = server.url.replace("mongodb://", "mongodb://app:pass%25word@")
        error = await refused(right.replace("pass%25word", "guess"))
        assert isinstance(error, BackendRefused)
        assert "authSource=, if that is where the user is" in str(error)
        assert "guess" not in str(error)
        error = await refused(f"{right}&authSource=admin")
        assert isinstance(error, BackendRefused)
        error = await refused(f"{right}&authSource={'x' * 64}")
        assert isinstance(error, BackendRefused)
        assert "authSource= must name a database" in str(error)
        error = await refused(right.replace("pass%25word", "%F0%9F%98%80"))
        assert isinstance(error, BackendRefused)
        assert "characters that SCRAM-SHA-256 does not allow" in str(error)
        async with aiolock.connect(right, namespace="tests") as client, client.lock("x") as lease:
            await lease.renew()
            assert await client.locks()
            assert await client.diagnose()
            shown = f"{client!r} {vars(client._runtime.backend)} {vars(client._runtime.backend.store)}"
    for secret in ("pass%word", "pass%25word"):
        assert secret not in caplog.text
        assert secret not in shown


@ends_server
async def test_a_user_without_the_rights_is_refused():
    users = {"app": (PASSWORD, ["read"])}
    with MongoStandIn(users=users) as server:
        error = await refused(server.url.replace("mongodb://", "mongodb://app:pass%25word@"))
    assert isinstance(error, BackendRefused)
    assert "needs the rights to find, insert, update and remove" in str(error)


# --- TLS


@ends_server
async def test_tls_by_a_known_authority_and_by_others(tmp_path):
    made = Certificates(tmp_path / "tls")
    with MongoStandIn(certificates=made) as server:
        options = f"&tls=true&tls_ca={made.ca}"
        async with (
            aiolock.connect(server.url + options, namespace="tests") as client,
            client.lock("x") as lease,
        ):
            assert lease.held
        error = await refused(f"{server.url}&tls=true", 3.0)
        assert isinstance(error, BackendRefused)
        assert "name its authority with tls_ca=" in str(error)
        error = await refused(server.url, 3.0)
        assert isinstance(error, BackendUnavailable | BackendRefused)


async def test_a_server_without_tls_is_an_error(server, tmp_path):
    made = Certificates(tmp_path / "tls")
    error = await refused(f"{server.url}&tls=true&tls_ca={made.ca}", 3.0)
    assert isinstance(error, BackendUnavailable)


# --- a server that stops to answer


@ends_server
async def test_a_frozen_server_ends_a_hold_by_its_ttl_and_locks_work_when_it_is_back(own):
    async with aiolock.connect(own.url, ttl=3, command_timeout=2) as client:
        lease = await client.lock("x").acquire()
        own.freeze()
        try:
            assert await lease.wait_lost() == "expired"
            begun = time.monotonic()
            with pytest.raises(BackendUnavailable):
                await client.lock("y").acquire()
            assert time.monotonic() - begun < 2 + 20
        finally:
            own.thaw()

        async def works():
            try:
                async with client.lock("x", timeout=2):
                    return True
            except (aiolock.BackendError, aiolock.AcquireTimeout):
                return False

        await until(works)


@ends_server
async def test_a_disk_that_is_full_is_refused_and_may_be_tried_again(own):
    """Staged by what the server is told to answer."""
    own = MongoStandIn(extra=["--enable-test-commands"])
    with own:
        async with opened(own.url) as store:
            await store.change("tests/x", "")
            fail = {"failCommands": ["findAndModify"], "errorCode": 14031}
            own.ask({"configureFailPoint": "failCommand", "mode": "alwaysOn", "data": fail}, database="admin")
            with pytest.raises(BackendRefused, match="14031") as refusal:
                await store.change("tests/y", "")
            assert refusal.value.retryable
            concern = {"code": 64, "codeName": "WriteConcernFailed", "errmsg": "waiting timed out"}
            fail = {"failCommands": ["findAndModify"], "writeConcernError": concern}
            own.ask(
                {"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": fail}, database="admin"
            )
            with pytest.raises(
                BackendUnavailable, match="no majority has confirmed the write: waiting timed out"
            ):
                await store.change("tests/z", "")
            # It was made all the same.
            assert (await store.read("tests/z")).version
