"""The connect string: everything that people write is read or refused, before anything else sees it."""

from __future__ import annotations

import dataclasses
import ssl
import traceback

import pytest

import aiolock
from aiolock import ConfigError
from aiolock.backends.zookeeper import ZooKeeperBackend
from aiolock.backends.zookeeper.queue import component, parents
from aiolock.backends.zookeeper.url import Host, Options, parse
from tests.certificates import Certificates


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("h1", [("h1", 2181)]),
        ("h1:2182", [("h1", 2182)]),
        ("h1:1, h2:2 ,h3", [("h1", 1), ("h2", 2), ("h3", 2181)]),
        ("[::1]", [("::1", 2181)]),
        ("[::1]:2182,h2,[fe80::1%eth0]:1", [("::1", 2182), ("h2", 2181), ("fe80::1%eth0", 1)]),
        ("127.0.0.1:2181", [("127.0.0.1", 2181)]),
    ],
)
def test_hosts_are_read(hosts, expected):
    assert parse(f"zookeeper://{hosts}/app").hosts == tuple(Host(*each) for each in expected)


@pytest.mark.parametrize(
    ("path", "expected"),
    [("", ""), ("/", ""), ("/app", "/app"), ("/app/", "/app"), ("/a/b%20c", "/a/b c"), ("/ü", "/ü")],
)
def test_the_chroot_is_read(path, expected):
    assert parse(f"zookeeper://h1{path}").chroot == expected


def test_user_and_password_are_read_and_never_shown():
    address = parse("zookeeper://me:se%40cr%3Aet@h1:2181,h2:2181/app?acl=creator")
    assert address.credentials == b"me:se@cr:et"
    backend = ZooKeeperBackend("zookeeper://me:se%40cr%3Aet@h1,h2")
    for shown in (str(address), repr(address), repr(backend), repr(aiolock.Client(backend))):
        assert "cr" not in shown.replace("creator", "")


@pytest.mark.parametrize(
    "url",
    [
        "zookeeper://",
        "zookeeper://h1,,h2",
        "zookeeper://h1:",
        "zookeeper://h1:0",
        "zookeeper://h1:65536",
        "zookeeper://h1:port",
        "zookeeper://::1",
        "zookeeper://[h1]",
        "zookeeper://[1:2]:3",
        "zookeeper://h1 h2",
        "zookeeper://h1/a//b",
        "zookeeper://h1/../b",
        "zookeeper://h1/./b",
        "zookeeper://h1/zookeeper",
        "zookeeper://h1/a%00b",
        "zookeeper://h1/😀",
        "zookeeper://h1/a#b",
        "zookeeper://user@h1",
        "zookeeper://:password@h1",
        "zookeeper://h1?sesion_timeout=3",
        "zookeeper://h1?session_timeout=x",
        "zookeeper://h1?session_timeout=0",
        "zookeeper://h1?session_timeout=nan",
        "zookeeper://h1?recipe=best",
        "zookeeper://h1?acl=creator",
        "zookeeper://h1?on_suspend=lost",
        "zookeeper://h1?tls=yes",
        "zookeeper://h1?tls_ca=file",
        "zookeeper://h1?tls=true&tls_ca=/nowhere/at/all",
        "zookeeper://h1?tls=true&tls_key=file",
        "zookeeper://h1?tls=true&tls_ca=",
        "zookeeper://h1?heartbeat=often",
        "zookeeper://a\0b",
        "zookeeper://h1:\u0662181",
        "zookeeper://h1:" + "9" * 5000,
        "zookeeper://h1,me:pw@h2",
        "zookeeper://h1:2181,me:pw@h2",
        "zookeeper://me:pw@h1,me:pw@h2",
        "zookeeper://h1:2181/app@home",
        "zookeeper://me%3Ayou:pw@h1",
        "zookeeper://me:%ff@h1",
        "zookeeper://me:\ud800@h1",
        "zk://h1",
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_io(url):
    with pytest.raises(ConfigError):
        aiolock.connect(url)
    with pytest.raises(ConfigError):
        parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "zookeeper://me:se?SECRET@h1",
        "zookeeper://me:SECRET?x@h1",
        "zookeeper://me:a@b?SECRET@h1",
        "zookeeper://me:se#SECRET@h1",
        "zookeeper://me:se/SECRET@h1",
        "zookeeper://me:se,SECRET@h1",
        "zookeeper://h1,me:SECRET@h2",
        "zookeeper://me:SECRET@",
        "zookeeper://me:SECRET",
        "zookeeper://:SECRET@h1",
        "zookeeper://SECRET@h1",
        "zookeeper://me:SECRET%ff@h1",
    ],
)
def test_nothing_that_may_be_a_password_is_in_an_error(url):
    for read in (aiolock.connect, parse):
        with pytest.raises(ConfigError) as caught:
            read(url)
        assert "SECRET" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("name", ["tls_ca", "tls_cert", "tls_key"])
@pytest.mark.parametrize("wrong", [5, "", b"file", "a\0b"])
def test_files_of_tls_have_names(name, wrong):
    with pytest.raises(ConfigError, match=name):
        aiolock.connect("zookeeper://h1", tls=True, **{name: wrong})
    with pytest.raises(ConfigError, match="SSLContext"):
        parse("zookeeper://h1", tls=ssl.create_default_context(), tls_ca="file")


def test_an_option_is_given_in_the_address_or_beside_it():
    assert parse("zookeeper://h1?session_timeout=12.5&tick_time=2").options.session_timeout == 12.5
    assert parse("zookeeper://h1", heartbeat="write").options.heartbeat == "write"
    with pytest.raises(ConfigError, match="twice"):
        parse("zookeeper://h1?heartbeat=write", heartbeat="sync")
    with pytest.raises(
        ConfigError,
        match=r"'heartbeats' is no parameter of a ZooKeeper URL; it has session_timeout.*did you mean heartbeat\?",
    ):
        parse("zookeeper://h1?heartbeats=write")
    with pytest.raises(
        ConfigError,
        match=r"no option heartbeats; it has .* for zookeeper:// session_timeout.*did you mean heartbeat\?",
    ):
        aiolock.connect("zookeeper://h1", heartbeats="write")


@pytest.mark.parametrize("recipe", ["simple", "queue"])
def test_a_recipe_is_refused_with_what_there_is_instead(recipe):
    with pytest.raises(
        ConfigError,
        match=r"recipe in the address is not obeyed.*sequential nodes, so leave the parameter out",
    ):
        aiolock.connect(f"zookeeper://h1?recipe={recipe}")


def test_tls_has_a_port_and_a_context_of_its_own(tmp_path):
    made = Certificates(tmp_path)
    address = parse(f"zookeeper://h1,h2:1?tls=true&tls_ca={made.ca}&tls_cert={made.cert}&tls_key={made.key}")
    assert [host.port for host in address.hosts] == [2281, 1]
    assert address.tls is not None
    assert address.tls.verify_mode is ssl.CERT_REQUIRED
    context = ssl.create_default_context()
    assert parse("zookeeper://h1", tls=context, acl="creator").tls is context
    with pytest.raises(ConfigError, match="tls must be"):
        parse("zookeeper://h1", tls="yes")


NAMES = [
    "x",
    ".",
    "..",
    "...",
    "/",
    "a/b",
    "a%2Fb",
    "zookeeper",
    "Zookeeper",
    "\0",
    "\x7f",
    "é",
    "e\u0301",
    "😀",
    " ",
    "%",
]


def test_names_become_parts_of_paths_one_to_one():
    made = [component(name) for name in NAMES]
    assert len(set(made)) == len(NAMES)
    for part in made:
        assert part not in (".", "..", "zookeeper", "")
        assert part.isascii()
        assert part.isprintable()
        assert "/" not in part
    assert component("order:42") == "order:42"


def test_parents_are_every_node_on_the_way():
    assert parents("/a/b/c") == ["/a", "/a/b", "/a/b/c"]


def test_hosts_in_any_order_are_no_broken_url():
    client = aiolock.connect("zookeeper://h1:2181,[::1]:2182,h2/app")
    assert client._backend._address.hosts == (Host("h1", 2181), Host("::1", 2182), Host("h2", 2181))
    with pytest.raises(ConfigError, match="is no IPv6 address"):
        aiolock.connect("zookeeper://h1,[1:2]")
    with pytest.raises(ConfigError, match="lists several hosts: a cluster is redis"):
        aiolock.connect("redis://h1,[::1]:2182")


@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(Options)])
def test_every_option_of_an_address_may_stand_beside_it(option):
    value = {
        "session_timeout": 7.5,
        "tick_time": 0.5,
        "heartbeat": "write",
        "acl": "creator",
        "tls": ssl.create_default_context(),
    }.get(option)
    if value is None:
        # Files: one that is missing is named.
        with pytest.raises(ConfigError, match=option):
            aiolock.connect("zookeeper://h1", tls=True, **{option: "/none.pem"})
        return
    client = aiolock.connect("zookeeper://me:secret@h1", **{option: value})
    assert getattr(client._backend._address.options, option) == value
