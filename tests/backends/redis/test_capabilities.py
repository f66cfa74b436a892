"""What is promised follows from what the server says, and what it does not say is not promised."""

from __future__ import annotations

import asyncio

import pytest

from aiolock.backends.redis.commands import PROBE
from aiolock.backends.redis.diagnosis import assess, may_publish, parse_info, probe
from aiolock.errors import BackendRefused, BackendUnavailable

FIT = {
    "redis_version": "7.0.15",
    "role": "master",
    "cluster_enabled": "0",
    "maxmemory_policy": "noeviction",
    "aof_enabled": "0",
}
ALWAYS = {"exclusion", "fencing", "fifo", "keep"}


def test_a_fit_server_promises_what_it_can_and_warns_of_nothing():
    verdict = assess(FIT, pushed=True)
    assert verdict.capabilities == ALWAYS | {"push", "no-eviction"}
    assert verdict.warnings == ()


def test_an_append_only_file_survives_a_restart():
    assert "survives-restart" in assess(FIT | {"aof_enabled": "1"}, pushed=True).capabilities


def test_without_push_there_is_a_warning_that_says_what_to_grant():
    verdict = assess(FIT, pushed=False)
    assert "push" not in verdict.capabilities
    [warning] = verdict.warnings
    assert "100 ms" in warning
    assert "channels" in warning


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "volatile-random"])
def test_a_server_that_evicts_promises_less_and_is_warned_about(policy):
    verdict = assess(FIT | {"maxmemory_policy": policy}, pushed=True)
    assert "no-eviction" not in verdict.capabilities
    [warning] = verdict.warnings
    assert policy in warning
    assert "noeviction" in warning


def test_what_is_not_known_is_not_promised():
    verdict = assess({}, pushed=True)
    assert verdict.capabilities == ALWAYS | {"push"}
    [warning] = verdict.warnings
    assert "INFO" in warning
    # A server that leaves out single lines, as managed ones do, is unknown in these points.
    assert assess({"redis_version": "7.0.0"}, pushed=True).capabilities == ALWAYS | {"push"}


def test_servers_that_each_take_writes_are_refused_for_good():
    with pytest.raises(BackendRefused, match=r"KeyDB.*without active-replica") as caught:
        assess(FIT | {"redis_version": "6.3.4", "role": "active-replica"}, pushed=True)
    assert not caught.value.retryable


@pytest.mark.parametrize("version", ["6.2.0", "6.2.14", "7.0.15", "7.2.4", "8.0.1", "255.255.255", "10.0"])
def test_versions_from_6_2_are_accepted(version):
    assess(FIT | {"redis_version": version}, pushed=True)


@pytest.mark.parametrize("version", ["6.0.16", "5.0.3", "2.8.9"])
def test_older_versions_are_refused_by_their_number(version):
    with pytest.raises(BackendRefused, match=version) as refused:
        assess(FIT | {"redis_version": version}, pushed=True)
    assert "6.2" in str(refused.value)
    assert not refused.value.retryable


def test_a_replica_is_refused_for_now_and_a_cluster_for_good():
    with pytest.raises(BackendRefused, match="primary") as refused:
        assess(FIT | {"role": "slave"}, pushed=True)
    assert refused.value.retryable
    with pytest.raises(BackendRefused, match="Cluster") as refused:
        assess(FIT | {"cluster_enabled": "1"}, pushed=True)
    assert not refused.value.retryable


def test_info_is_read_as_a_dictionary_of_its_lines():
    text = "# Server\r\nredis_version:7.0.15\r\nexecutable:/a:b\r\n\r\n# Memory\r\nmaxmemory:0\r\n"
    assert parse_info(text) == {"redis_version": "7.0.15", "executable": "/a:b", "maxmemory": "0"}
    assert parse_info("") == {}


class Server:
    """Answers the questions of the probe from a table, by their first word."""

    def __init__(self, **answers: object) -> None:
        self.answers: dict[str, object] = {
            "EVAL": [],
            "EVALSHA": [],
            "INFO": b"a:1\r\n",
            "PUBLISH": 0,
        } | answers
        self.asked: list[tuple[object, ...]] = []

    def __call__(self, *words: object):
        self.asked.append(words)
        answer = asyncio.get_running_loop().create_future()
        known = self.answers[str(words[0])]
        if isinstance(known, Exception):
            answer.set_exception(known)
            answer.exception()
        else:
            answer.set_result(known)
        return answer


async def test_the_probe_asks_everything_before_it_waits_for_the_first_answer():
    server = Server()
    assert await probe(server, "ns:1:probe:{p}") == {"a": "1"}
    assert [words[0] for words in server.asked] == ["EVAL", "EVALSHA", *["INFO"] * 5]
    assert server.asked[0] == ("EVAL", PROBE.source, "1", "ns:1:probe:{p}")
    assert server.asked[1] == ("EVALSHA", PROBE.sha, "1", "ns:1:probe:{p}")


async def test_commands_that_are_refused_are_named_all_at_once():
    refused = [b"HSET", b"ERR no", b"PTTL", b"ERR no", b"HSET", b"ERR no"]
    with pytest.raises(BackendRefused, match=r"may not use HSET, PTTL on keys such as k,") as caught:
        await probe(Server(EVAL=refused), "k")
    assert "ACL" in str(caught.value)
    assert not caught.value.retryable


async def test_a_server_that_takes_no_writes_is_no_matter_of_rights():
    refused = [b"HDEL", b"-READONLY You can't write against a read only replica.", b"PEXPIRE", b"-READONLY"]
    with pytest.raises(BackendRefused, match="primary") as caught:
        await probe(Server(EVAL=refused), "k")
    assert caught.value.retryable


async def test_info_that_may_not_be_asked_is_empty_and_one_that_cannot_be_heard_is_an_error():
    assert await probe(Server(INFO=BackendRefused("no")), "k") == {}
    with pytest.raises(BackendUnavailable):
        await probe(Server(INFO=BackendUnavailable("gone")), "k")


@pytest.mark.parametrize(
    ("counts", "may"), [([0, 0], True), ([-1, 1], True), ([0, -1], False), ([-1, -1], False)]
)
async def test_who_may_publish_need_not_count(counts, may):
    assert await may_publish(Server(EVAL=counts)("EVAL")) is may


async def test_a_server_that_takes_no_script_that_publishes_is_none_that_denies_it():
    assert await may_publish(Server(EVAL=BackendRefused("bad lua script"))("EVAL")) is None
    for error in (BackendRefused("full", retryable=True), BackendUnavailable("gone")):
        with pytest.raises(type(error)):
            await may_publish(Server(EVAL=error)("EVAL"))


async def test_the_probe_leaves_no_key_behind(server, admin, connect, namespace):
    async with connect(server.url):
        assert [key async for key in admin.scan_iter(f"{namespace}:*")] == [f"{namespace}:format".encode()]
