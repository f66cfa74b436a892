"""The version of the data format: clients of two versions never work in one namespace, whichever came first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis.asyncio

import aiolock
from aiolock import UnsafeBackend
from aiolock.backends.redis import commands as data_format
from tests.faults.staging import until
from tests.servers import Redis

OWN_PREFIX = data_format.FORMAT
OTHER = OWN_PREFIX + 1


@contextmanager
def of_version(version: int) -> Iterator[None]:
    """Clients that connect meanwhile are of a program with this format."""
    before, data_format.FORMAT = data_format.FORMAT, version
    try:
        yield
    finally:
        data_format.FORMAT = before


@pytest.fixture(scope="module")
def three():
    """The servers of a quorum."""
    with Redis() as a, Redis() as b, Redis() as c:
        yield [a, b, c]


@pytest.fixture(params=["server", "cluster", "quorum"])
def url(request: pytest.FixtureRequest) -> Any:
    """What clients connect to."""
    if request.param == "quorum":
        return [one.url for one in request.getfixturevalue("three")]
    return request.getfixturevalue(request.param).url


@pytest.mark.parametrize("first", [OWN_PREFIX, OTHER])
async def test_a_client_of_another_format_is_refused_whichever_came_first(url, connect, namespace, first):
    second = OWN_PREFIX + OTHER - first
    with of_version(first):
        client = connect(url)
        async with client, client.lock("x") as lease:
            with of_version(second), pytest.raises(UnsafeBackend) as caught:
                await connect(url).open()
            for word in (f"format {first}", f"format {second}", "namespace="):
                assert word in str(caught.value)
            assert lease.held
    # The format stays when everybody has left.
    with of_version(second), pytest.raises(UnsafeBackend):
        await connect(url).open()
    # Who has the same one comes and goes, and another namespace is another matter.
    with of_version(first):
        async with connect(url) as client, client.lock("x"):
            pass
    with of_version(second):
        async with connect(url, namespace=f"{namespace}-other") as client, client.lock("x"):
            pass


async def test_the_script_lets_one_version_win(admin, namespace):
    key = f"{namespace}:format"
    answers = await asyncio.gather(
        *(
            admin.eval(data_format._FORMAT.source.decode(), 1, key, version)
            for version in (OWN_PREFIX, OTHER) * 10
        )
    )
    assert len(set(answers)) == 1
    assert await admin.hgetall(key) == {b"version": answers[0]}
    assert await admin.pttl(key) == -1


async def test_it_is_asked_again_before_the_first_command_of_every_connection(
    mortal, master, connect, namespace
):
    """The server lost its data, and somebody with another version came first."""
    async with connect(mortal.url, ttl=30) as client:
        lease = await client.lock("x").acquire()
        holder = await client.lock("y").acquire()
        waiting = asyncio.create_task(client.lock("y", fair=True).acquire())
        await until(lambda: client.stats()["waiting"] == 1)
        await master.flushall()
        await master.hset(f"{namespace}:format", "version", OTHER)
        before = await commands(master)
        await master.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(UnsafeBackend, match=f"format {OTHER}"):
            await waiting
        with pytest.raises(UnsafeBackend, match=f"format {OTHER}"):
            await client.lock("z").try_acquire()
        assert await commands(master) == before
        assert await master.keys("*") == [f"{namespace}:format".encode()]
        # When the server is the right one again, so is the client.
        await master.delete(f"{namespace}:format")

        async def works() -> bool:
            try:
                async with client.lock("z", timeout=1):
                    return True
            except aiolock.BackendError:
                return False

        await until(works, "the client to work again")
        assert int(await master.hget(f"{namespace}:format", "version")) == OWN_PREFIX
        del lease, holder


async def commands(admin: redis.asyncio.Redis) -> int:
    """How many scripts of locks were executed."""
    stats = await admin.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {}).get("calls", 0))


async def test_a_loss_of_data_is_noticed_without_a_new_connection(mortal, master, connect, namespace):
    async with connect(mortal.url, ttl=1.0) as client:
        lease = await client.lock("x").acquire()
        await master.flushall()
        await until(lambda: lease.lost)

        async def marked() -> bool:
            return await master.hget(f"{namespace}:format", "version") == str(OWN_PREFIX).encode()

        await until(marked)
        lease = await client.lock("x").acquire()
        await master.flushall()
        await master.hset(f"{namespace}:format", "version", OTHER)
        await until(lambda: lease.lost)

        async def refused() -> bool:
            try:
                # Granted if it is asked before the answer about the format has arrived.
                async with client.lock("y", timeout=0):
                    return False
            except UnsafeBackend:
                return True
            except (aiolock.BackendError, aiolock.LockLost, aiolock.AcquireTimeout):
                return False

        await until(refused)


async def test_doctor_says_which_format_the_data_have(server, admin, connect, namespace):
    assert "data format" not in {finding.subject for finding in await connect(server.url).diagnose()}
    assert not await admin.exists(f"{namespace}:format")
    async with connect(server.url):
        pass
    [fine] = [finding for finding in await connect(server.url).diagnose() if finding.subject == "data format"]
    assert (fine.level.value, str(OWN_PREFIX) in fine.text) == ("ok", True)
    with of_version(OTHER):
        [bad] = [
            finding for finding in await connect(server.url).diagnose() if finding.subject == "data format"
        ]
    assert bad.level.value == "error"
    assert f"format {OWN_PREFIX}" in bad.text


async def test_a_full_server_and_a_list_of_locks_do_not_mind_the_key(mortal, master, connect, namespace):
    await master.config_set("maxmemory", 1)
    async with connect(mortal.url) as client:
        assert await client.locks() == []
    assert await master.hget(f"{namespace}:format", "version") == str(OWN_PREFIX).encode()
