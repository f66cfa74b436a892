"""What `doctor` is told about an ensemble: what is good, what is not, and what would be better."""

from __future__ import annotations

import pytest

import aiolock
from aiolock.backends.zookeeper import diagnosis, protocol
from aiolock.backends.zookeeper.diagnosis import Server
from aiolock.backends.zookeeper.url import Host, parse
from aiolock.types import Level
from tests.faults.proxy import Proxy, length_frames
from tests.servers import ZooKeeper

STATUS = {"Zookeeper version": "3.8.0-abc, built on 2022", "Mode": "follower"}
SETTINGS = {
    "tickTime": "2000",
    "minSessionTimeout": "4000",
    "maxSessionTimeout": "40000",
    "maxClientCnxns": "60",
    "syncLimit": "5",
}


def judged(
    *servers: tuple[dict[str, str], dict[str, str]], url: str = "zookeeper://h1,h2,h3", error: str = ""
):
    address = parse(url)
    told = [
        Server(host, status, settings, error)
        for host, (status, settings) in zip(address.hosts, servers, strict=False)
    ]
    return {finding.subject: finding for finding in diagnosis.judge(address, told)}


def test_a_good_ensemble_is_called_good():
    leader = {**STATUS, "Mode": "leader"}
    found = judged((leader, SETTINGS), (STATUS, SETTINGS), (STATUS, SETTINGS))
    assert {finding.level for finding in found.values()} == {Level.OK}
    assert "3 of its servers" in found["ensemble"].text


@pytest.mark.parametrize(
    ("status", "settings", "subject", "level"),
    [
        ({**STATUS, "Zookeeper version": "3.4.14-1, built"}, SETTINGS, "h1:2181", Level.ERROR),
        ({**STATUS, "Mode": "standalone"}, SETTINGS, "ensemble", Level.WARNING),
        ({**STATUS, "Mode": "read-only"}, SETTINGS, "ensemble", Level.ERROR),
        ({}, {}, "4lw.commands.whitelist", Level.NOTE),
        (STATUS, {}, "conf", Level.NOTE),
        (STATUS, {**SETTINGS, "minSessionTimeout": "1000"}, "minSessionTimeout", Level.ERROR),
        (STATUS, {**SETTINGS, "maxClientCnxns": "5"}, "maxClientCnxns", Level.NOTE),
    ],
)
def test_what_is_not_good_is_named_with_what_would_be_better(status, settings, subject, level):
    finding = judged((status, settings))[subject]
    assert finding.level is level
    assert finding.advice


def test_a_tick_that_was_named_is_no_problem():
    short = {**SETTINGS, "minSessionTimeout": "1000"}
    assert "minSessionTimeout" not in judged((STATUS, short), url="zookeeper://h1?tick_time=2")
    assert "minSessionTimeout" in judged((STATUS, short), url="zookeeper://h1?tick_time=1")


def test_an_even_number_of_servers_and_a_missing_leader_are_noted():
    found = judged((STATUS, SETTINGS), (STATUS, SETTINGS), url="zookeeper://h1,h2")
    assert found["ensemble"].level is Level.NOTE


def test_a_server_that_cannot_be_reached_is_named():
    found = judged(({}, {}), error="refused")
    assert found["h1:2181"].level is Level.WARNING
    assert "refused" in found["h1:2181"].text


def test_a_password_in_the_clear_is_warned_of_and_not_shown():
    found = judged((STATUS, SETTINGS), url="zookeeper://me:secret@h1")
    assert found["tls"].level is Level.WARNING
    assert "secret" not in str(found)


def test_a_session_is_compared_with_what_was_asked_for():
    servers = [Server(Host("h1", 2181), STATUS, SETTINGS)]

    def levels(granted: float, wanted: float, *, forgets: bool = True) -> dict[str, Level]:
        found = diagnosis.judge_session(granted, wanted, servers, forgets=forgets)
        return {finding.subject: finding.level for finding in found}

    assert levels(30, 30) == {"session timeout": Level.OK}
    assert levels(40, 60)["session timeout"] is Level.NOTE
    assert levels(10, 10)["syncLimit"] is Level.NOTE
    assert levels(30, 30, forgets=False)["extendedTypesEnabled"] is Level.WARNING


async def test_the_real_server_is_asked(client, server):
    async with client.lock("x"):
        found = {finding.subject: finding for finding in await client.diagnose()}
    assert found["ensemble"].level is Level.WARNING
    assert found["session timeout"].level is Level.OK
    assert found[f"127.0.0.1:{server.port}"].text.startswith("version 3.")
    assert found["acl"].level is Level.NOTE
    assert "conf" not in found


async def test_rights_are_looked_at_where_the_locks_are(server, tools):
    url = f"zookeeper://me:secret@127.0.0.1:{server.port}?acl=creator"
    async with aiolock.connect(url, namespace=tools.namespace) as client:
        async with client.lock("x"):
            found = {finding.subject: finding for finding in await client.diagnose()}
        assert found["acl"].level is Level.OK
        assert "secret" not in str(found)


async def test_it_answers_before_there_is_a_session(tools):
    with ZooKeeper() as server:
        backend = aiolock.connect(
            f"{server.url},127.0.0.1:1", namespace=tools.namespace, command_timeout=1
        )._backend
        found = {finding.subject: finding for finding in await backend.diagnose()}
        assert found["127.0.0.1:1"].level is Level.WARNING
        assert "session timeout" not in found


async def test_a_server_that_says_nothing_costs_no_more_than_a_call_may(server, tools):
    async with Proxy("127.0.0.1", server.port, framing=length_frames) as frozen:
        frozen.blackhole()
        client = aiolock.connect(f"zookeeper://127.0.0.1:{frozen.port}", command_timeout=0.3)
        [finding] = await client._backend.diagnose()
        assert finding.level is Level.WARNING
        assert "0.3 s" in finding.text
        frozen.heal(release=False)


async def test_the_list_has_every_family_and_no_note(client, tools):
    session = tools.session_of(client)
    async with client.lock("a/b"), client.rwlock("a/b").read(), client.semaphore("c", 2):
        await client._backend.context.nodes.make(tools.path("empty"))
        await session.ask(
            protocol.create(f"{tools.path('empty')}/note", b"", protocol.OPEN, sequential=False)
        )
        found = [(info.name, info.family) for info in await client.locks()]
        assert found == [("a/b", "lock"), ("a/b", "rw"), ("c", "sem")]
        assert [(info.name, info.family) for info in await client.locks("a*")] == found[:2]
    assert await client.locks() == []
