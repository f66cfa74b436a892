"""What the doctor says of a deployment: every case by the facts alone, and the questions against real servers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import redis.asyncio

from aiolock.backends.redis import RedisBackend
from aiolock.backends.redis.diagnosis import SETTINGS, Facts, Pushing, judge
from aiolock.clock import system_clock
from aiolock.core.backend import Settings
from aiolock.errors import BackendRefused, BackendUnavailable
from aiolock.types import Finding, Level
from tests.contract.deployments import least_rights
from tests.faults.redis_keys import descriptors
from tests.faults.staging import until
from tests.processes import reserve_port
from tests.servers import Redis

FIT: dict[str, str] = {
    "redis_version": "7.0.15",
    "redis_mode": "standalone",
    "role": "master",
    "cluster_enabled": "0",
    "maxmemory": "0",
    "maxmemory_policy": "noeviction",
    "aof_enabled": "1",
    "connected_slaves": "0",
    "connected_clients": "3",
    "maxclients": "10000",
}
"""INFO of a server that leaves little to be said."""


def facts(settings: dict[str, str | None] | None = None, **other: Any) -> Facts:
    """A fit deployment, but for this."""
    info = FIT | other.pop("info", {})
    known: dict[str, str | None] = {"appendfsync": "always", "save": "", "min-replicas-to-write": "0"}
    return Facts(info, known | (settings or {}), **{"ahead": 0.0, "trips": [0.001], **other})


def about(subject: str, given: Facts, ttl: float = 30.0) -> Finding:
    """The one finding about a subject."""
    [found] = [finding for finding in judge(given, ttl) if finding.subject == subject]
    return found


def test_a_fit_deployment_needs_no_advice():
    findings = judge(facts(), 30.0)
    assert {finding.level for finding in findings} <= {Level.OK, Level.NOTE}
    assert not [finding for finding in findings if finding.advice]
    assert len({finding.subject for finding in findings}) == len(findings)


@pytest.mark.parametrize(
    ("subject", "level", "given", "words"),
    [
        ("version", Level.ERROR, {"info": {"redis_version": "6.0.16"}}, "6.0.16"),
        (
            "version",
            Level.OK,
            {"info": {"valkey_version": "8.1.0", "redis_version": "7.2.4"}},
            "Valkey 8.1.0",
        ),
        ("role", Level.ERROR, {"info": {"redis_mode": "sentinel"}}, "Sentinel"),
        ("role", Level.ERROR, {"info": {"redis_mode": "", "server_mode": "sentinel"}}, "Sentinel"),
        ("role", Level.ERROR, {"info": {"cluster_enabled": "1"}}, "Cluster"),
        ("role", Level.ERROR, {"info": {"role": "slave"}}, "read-only replica"),
        ("scripts", Level.ERROR, {"trouble": "NOPERM: no"}, "they fail: NOPERM: no"),
        ("rights", Level.ERROR, {"refused": ("HSET", "PTTL")}, "may not use HSET, PTTL"),
        ("pub/sub", Level.WARNING, {"pushing": Pushing.DENIED}, "asks every 100 ms"),
        ("pub/sub", Level.WARNING, {"pushing": Pushing.APART}, "at another server than the commands"),
        ("pub/sub", Level.NOTE, {"pushing": Pushing.UNCOUNTED}, "asks before it enters"),
        ("scan", Level.NOTE, {"lists": False}, "cannot be listed"),
        ("maxmemory-policy", Level.WARNING, {"info": {"maxmemory_policy": "volatile-ttl"}}, "volatile-ttl"),
        (
            "maxmemory-policy",
            Level.ERROR,
            {"info": {"maxmemory_policy": "allkeys-lru", "maxmemory": "1000"}},
            "hands them out twice",
        ),
        ("memory", Level.WARNING, {"info": {"maxmemory": "1000", "used_memory": "950"}}, "95% of maxmemory"),
        ("persistence", Level.WARNING, {"info": {"aof_enabled": "0"}}, "forgets all locks"),
        (
            "persistence",
            Level.WARNING,
            {"info": {"aof_enabled": "0"}, "settings": {"save": "3600 1"}},
            "latest snapshot",
        ),
        ("persistence", Level.NOTE, {"settings": {"appendfsync": "everysec"}}, "two seconds"),
        ("persistence", Level.WARNING, {"settings": {"appendfsync": "no"}}, "half a minute"),
        ("persistence", Level.NOTE, {"settings": {"appendfsync": None}}, "may not be read"),
        ("disk", Level.ERROR, {"info": {"aof_last_write_status": "err"}}, "cannot write"),
        ("replicas", Level.WARNING, {"info": {"connected_slaves": "2"}}, "two holders may believe"),
        (
            "replicas",
            Level.NOTE,
            {
                "info": {"connected_slaves": "2"},
                "settings": {"min-replicas-to-write": "1", "min-replicas-max-lag": "5"},
            },
            "within 5 s",
        ),
        (
            "replicas",
            Level.NOTE,
            {
                "info": {"connected_slaves": "1", "min_slaves_good_slaves": "1"},
                "settings": {"min-replicas-to-write": None, "min-replicas-max-lag": None},
            },
            "within min-replicas-max-lag",
        ),
        ("maxclients", Level.WARNING, {"info": {"connected_clients": "9000"}}, "9000 of 10000"),
        ("clock", Level.WARNING, {"ahead": 90.0}, "90.0 s ahead of the local one"),
        ("clock", Level.WARNING, {"ahead": -3.0}, "3.0 s behind the local one"),
        ("clock", Level.OK, {"ahead": 0.9, "trips": [0.01]}, "within 900 ms"),
        # As exact as the way is short.
        ("clock", Level.OK, {"ahead": 2.0, "trips": [3.0]}, "within 2000 ms"),
        ("clock", Level.NOTE, {"ahead": None}, "not known"),
        ("round trip", Level.WARNING, {"trips": [2.0, 1.9, 0.1]}, "1900.0 ms, at worst 2000.0 ms"),
        ("round trip", Level.OK, {"trips": [0.002, 0.001, 0.9]}, "2.0 ms"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_fact_is_judged_with_words_and_advice(subject, level, given, words):
    found = about(subject, facts(**given))
    assert found.level is level
    assert words in found.text
    assert bool(found.advice) is (level is not Level.OK), "whoever is warned is told what to do"


def test_what_may_not_be_read_is_a_finding_and_no_promise():
    unknown = Facts({}, dict.fromkeys(SETTINGS), trips=[0.001])
    found = {finding.subject: finding for finding in judge(unknown, 30.0)}
    for subject in ("version", "maxmemory-policy", "persistence", "replicas", "clock"):
        assert "not known" in found[subject].text, subject
        assert found[subject].level is not Level.OK
    # A server that leaves out single lines, as managed ones do.
    quiet = Facts({"redis_version": "7.0.0"}, dict.fromkeys(SETTINGS), trips=[0.001])
    for subject in ("maxmemory-policy", "persistence", "replicas"):
        assert "does not report" in about(subject, quiet).text


# --- real servers


def backend_of(url: str, timeout: float = 10.0) -> RedisBackend:
    backend = RedisBackend(url)
    backend.bind(Settings("f-doctor", "me", 30.0, timeout, system_clock))
    return backend


async def levels(url: str) -> dict[str, Level]:
    return {finding.subject: finding.level for finding in await backend_of(url).diagnose()}


async def test_it_needs_no_open_client_and_leaves_nothing(server, admin):
    keys = await admin.dbsize()
    before = descriptors()
    found = await levels(server.url)
    assert found["persistence"] is Level.WARNING
    assert found["replicas"] is Level.NOTE
    others = {level for subject, level in found.items() if subject not in ("persistence", "replicas")}
    assert others == {Level.OK}
    assert await admin.dbsize() == keys
    await until(lambda: descriptors() <= before)


async def test_it_reads_what_the_server_really_is():
    with Redis(appendonly=True, maxmemory="50mb", maxmemory_policy="allkeys-lru") as server:
        found = await levels(server.url)
        assert found["maxmemory-policy"] is Level.ERROR
        assert found["persistence"] is Level.NOTE
        async with redis.asyncio.Redis(port=server.port) as overseer:
            await overseer.config_set("appendfsync", "always")
            await overseer.config_set("maxmemory-policy", "noeviction")
            found = await levels(server.url)
            assert found["maxmemory-policy"] is found["persistence"] is Level.OK
            await overseer.execute_command("REPLICAOF", "127.0.0.1", "1")
            found = await levels(server.url)
            assert found["role"] is Level.ERROR


async def test_a_cluster_where_no_client_can_be_opened_is_looked_at_all_the_same():
    with (
        contextlib.ExitStack() as ports,
        # It opens the port that is so far above as well.
        Redis(port=reserve_port(ports, 10_000), extra=("--cluster-enabled", "yes")) as server,
    ):
        backend = backend_of(server.url)
        with pytest.raises(BackendUnavailable, match="cluster is down"):
            await backend.open()
        await backend.aclose()
        found = await levels(server.url)
        assert found["role"] is found["scripts"] is Level.ERROR
        assert "rights" not in found


async def test_a_sentinel_is_recognised_by_the_doctor_and_guessed_by_the_client():
    with Redis(sentinel=True) as server:
        backend = backend_of(server.url)
        with pytest.raises(BackendRefused, match="Sentinel"):
            await backend.open()
        await backend.aclose()
        findings = await backend_of(server.url).diagnose()
        assert [finding.text for finding in findings if finding.subject == "role"] == [
            "this is a Sentinel, which keeps no data"
        ]


async def test_every_account_is_told_what_it_lacks():
    users = (
        "user default on nopass ~* &* +@all",
        least_rights("least", "f*"),
        least_rights("blind", "f*", without="+info"),
        least_rights("uncounted", "f*", without="+pubsub|numsub"),
        least_rights("mute", "f*", without="+publish"),
        least_rights("deaf", "f*", without="&aiolock:*"),
        least_rights("short", "f*", without="+hset"),
        "user nobody on >password ~* &* +@all -@scripting -scan -time",
    )
    with Redis(users=users) as server:
        found = {
            name: await levels(f"redis://{name}:password@127.0.0.1:{server.port}")
            for name in ("least", "blind", "uncounted", "mute", "deaf", "short", "nobody")
        }
    # Only what CONFIG tells is missing, which no account for locks should have: it tells passwords as well.
    assert found["least"] == found["least"] | {
        "rights": Level.OK,
        "pub/sub": Level.OK,
        "clock": Level.OK,
        "maxmemory-policy": Level.OK,
        "persistence": Level.WARNING,
    }
    assert "scan" not in found["least"]
    assert found["blind"]["version"] is Level.NOTE
    assert found["blind"]["maxmemory-policy"] is Level.WARNING
    assert found["uncounted"]["pub/sub"] is Level.NOTE
    assert found["mute"]["pub/sub"] is found["deaf"]["pub/sub"] is Level.WARNING
    assert found["short"]["rights"] is Level.ERROR
    assert found["nobody"]["scripts"] is Level.ERROR
    assert found["nobody"]["scan"] is Level.NOTE
    assert found["nobody"]["clock"] is Level.NOTE


async def test_a_server_that_cannot_be_talked_to_is_an_error_in_time(mortal):
    before = descriptors()
    backend = backend_of(mortal.url, timeout=0.5)
    mortal.freeze()
    try:
        async with asyncio.timeout(20):
            with pytest.raises(BackendUnavailable, match="did not answer"):
                await backend.diagnose()
    finally:
        mortal.thaw()
    mortal.kill()
    with pytest.raises(BackendUnavailable, match="nothing listens there"):
        await backend.diagnose()
    await until(lambda: descriptors() <= before)
