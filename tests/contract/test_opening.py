"""Opening a client before its server is there: `wait_for_server` tries again, `lazy` connects at the first use."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import pytest

from aiolock import (
    BackendRefused,
    BackendUnavailable,
    Client,
    ConfigError,
    LockError,
    UnsafeBackend,
    lock_all,
)
from tests.contract.deployments import LocalRows, Memory, RedisQuorum, Rows, registry
from tests.contract.test_reopening import kinds
from tests.faults.staging import gets_the_lock, nothing_remains, until

AWAY = (BackendUnavailable, BackendRefused)
"""What says that a server is away, if it is retryable: a memcached that closes a connection before its first answer may demand TLS."""

far = pytest.mark.parametrize(
    "server",
    [each for each in registry() if not issubclass(each, (Memory, Rows, LocalRows, RedisQuorum))],
    ids=lambda each: each.name,
    indirect=True,
    scope="session",
)
"""Those that there is a connection to, and that do nothing without it."""
quorum = pytest.mark.parametrize(
    "server",
    [each for each in registry() if issubclass(each, RedisQuorum)],
    ids=lambda each: each.name,
    indirect=True,
    scope="session",
)
"""Those that go on without one of their servers."""


def opened(client: Client) -> bool:
    """Whether a lazy client has reached its server."""
    return client._runtime.connect is None


# --- lazy


async def test_each_first_use_connects(deployment):
    names = list(kinds(deployment.connect(), deployment))
    for name in names:
        client = deployment.connect(lazy=True)
        async with client:
            assert not opened(client)
            await kinds(client, deployment)[name]()
            assert opened(client)


async def test_administration_connects(deployment):
    async with deployment.connect(lazy=True) as client:
        assert not await client.lock("x").locked()
        assert opened(client)
    async with deployment.connect(lazy=True) as client:
        assert await client.diagnose() is not None
        assert opened(client)
    async with deployment.connect(lazy=True) as client:
        if "names" in deployment.kinds:
            assert await client.locks() == []
            assert opened(client)


async def test_many_first_uses_connect_once(deployment, rival):
    async with deployment.connect(lazy=True) as client:

        async def turn(number: int) -> None:
            async with client.lock(f"x{number % 3}"):
                pass

        connects: list[object] = []
        connect = client._runtime.connect
        assert connect is not None

        async def counted() -> None:
            connects.append(None)
            await connect()

        client._runtime.connect = counted
        await asyncio.gather(*map(turn, range(9)))
        assert len(connects) == 1
    for number in range(3):
        await nothing_remains(rival, f"x{number}")


async def test_a_lazy_client_that_is_not_used_opens_and_closes_and_opens_again(deployment):
    client = deployment.connect(lazy=True)
    for _ in range(3):
        async with client:
            assert not opened(client)
    async with client, client.lock("x"):
        assert opened(client)
    # Another opening is lazy as well.
    async with client:
        assert not opened(client)
        async with client.lock("x"):
            pass


async def test_what_is_required_is_checked_before_the_first_grant(deployment, rival):
    async with deployment.connect(lazy=True, require={"miracles"}) as client:
        for _ in range(2):
            with pytest.raises(UnsafeBackend, match="miracles"):
                await client.lock("x").acquire(timeout=5)
            with pytest.raises(UnsafeBackend, match="miracles"):
                await client.lock("x").locked()
        async with rival.lock("x"):
            pass
    await nothing_remains(rival, "x")


@far
@pytest.mark.parametrize("refused", [True, False])
async def test_a_lazy_client_says_in_time_that_the_server_is_away(deployment, rival, refused):
    async with deployment.over(lazy=True, command_timeout=2) as (client, way):
        way.cut(refused=refused)
        calls = [
            client.lock("x").acquire,
            client.lock("x").try_acquire,
            client.lock("x").locked,
            lock_all(client.lock("x"), client.lock("y")).acquire,
        ]
        for call in calls:
            begun = time.monotonic()
            with pytest.raises(AWAY) as caught:
                await call()
            assert caught.value.retryable
            # The command timeout, and what a busy machine adds.
            assert time.monotonic() - begun < 2 + 10
        assert not opened(client)
        way.settle()
        await until(lambda: _gets(client))
        assert opened(client)
    await gets_the_lock(rival, "x")


async def _gets(client: Client) -> bool:
    with suppress(*AWAY):
        async with client.lock("x"):
            return True
    return False


@far
async def test_a_short_timeout_ends_the_wait_for_a_server_that_is_silent(deployment):
    async with deployment.over(lazy=True, command_timeout=60) as (client, way):
        way.cut(refused=False)
        begun = time.monotonic()
        calls = [
            client.lock("x").acquire,
            client.lock("x").try_acquire,
            lock_all(client.lock("x"), client.lock("y")).acquire,
        ]
        for call in calls:
            # Not that it was taken, or that the time is over: nothing is known of it.
            with pytest.raises(BackendUnavailable):
                await call(timeout=0.3)
        assert time.monotonic() - begun < 30
        way.settle()


@far
async def test_closing_ends_the_wait_for_the_server(deployment):
    async with deployment.over(lazy=True, command_timeout=60) as (client, way):
        way.cut(refused=False)
        attempt = asyncio.ensure_future(client.lock("x").acquire())
        await until(lambda: client._runtime.tasks)
        await asyncio.sleep(0.1)
        await client.aclose(timeout=1)
        with pytest.raises((RuntimeError, LockError)):
            await attempt
        way.settle()


@quorum
@pytest.mark.parametrize("options", [{"lazy": True}, {"wait_for_server": 60}], ids=["lazy", "waits"])
async def test_a_quorum_opens_while_one_of_its_servers_is_away(deployment, rival, options):
    async with deployment.over(**options) as (client, way):
        await client.aclose()
        way.cut(refused=True)
        async with client, client.lock("x"):
            assert await rival.lock("x").try_acquire() is None
        way.settle()
    await nothing_remains(rival, "x")


# --- waiting for the server


@far
@pytest.mark.parametrize("refused", [True, False])
async def test_opening_waits_for_the_server(deployment, refused, caplog):
    caplog.set_level(logging.INFO, "aiolock")
    async with deployment.over(wait_for_server=60, command_timeout=1) as (client, way):
        await client.aclose()
        way.cut(refused=refused)
        opening = asyncio.ensure_future(client.open())
        await until(lambda: any("trying again" in each.getMessage() for each in caplog.records))
        assert not opening.done()
        way.settle()
        await opening
        async with client.lock("x"):
            pass
    told = [each.getMessage() for each in caplog.records if "trying again" in each.getMessage()]
    assert len(told) == 1
    assert "password" not in told[0]


@far
@pytest.mark.parametrize("command_timeout", [1, 30])
async def test_opening_gives_up_in_time(deployment, command_timeout):
    """Also where one attempt would take longer."""
    async with deployment.over(wait_for_server=1.5, command_timeout=command_timeout, ttl=120) as (
        client,
        way,
    ):
        await client.aclose()
        way.cut(refused=True)
        begun = time.monotonic()
        with pytest.raises(AWAY) as caught:
            await client.open()
        assert caught.value.retryable
        assert 1.4 < time.monotonic() - begun < 1.5 + 10
        # Nothing is open, and it may be tried again.
        way.settle()
        async with client, client.lock("x"):
            pass


@far
async def test_cancelling_an_opening_that_waits_leaves_nothing_open(deployment):
    async with deployment.over(wait_for_server=60, command_timeout=1) as (client, way):
        await client.aclose()
        way.cut(refused=True)
        before = asyncio.all_tasks()
        for after in (0, 0.01, 0.1, 0.3):
            opening = asyncio.ensure_future(client.open())
            await asyncio.sleep(after)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
        await until(lambda: asyncio.all_tasks() <= before)
        way.settle()
        async with client, client.lock("x"):
            pass


async def test_what_is_refused_for_good_is_not_tried_again(deployment):
    begun = time.monotonic()
    with pytest.raises(UnsafeBackend, match="miracles"):
        await deployment.connect(wait_for_server=600, require={"miracles"}).open()
    assert time.monotonic() - begun < 300


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"lazy": 1}, "lazy must be True or False"),
        ({"lazy": None}, "lazy must be True or False"),
        ({"wait_for_server": -1}, "wait_for_server must be a number of seconds"),
        ({"wait_for_server": "3"}, "wait_for_server must be a number of seconds"),
        ({"wait_for_server": True}, "wait_for_server must be a number of seconds"),
        ({"wait_for_server": float("nan")}, "wait_for_server must be a number of seconds"),
        ({"wait_for_server": 3, "lazy": True}, "give one of them"),
    ],
)
def test_mistakes_are_named_at_once(deployment, options, what):
    with pytest.raises(ConfigError, match=what):
        deployment.connect(**options)
