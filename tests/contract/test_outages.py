"""A client that holds or waits and loses its connection says so once, and says when it is back."""

from __future__ import annotations

import asyncio
import logging

import pytest

from aiolock import AcquireTimeout, BackendUnavailable, lock_all
from aiolock.errors import BackendError
from tests.contract.deployments import LocalRows, Memory, RedisQuorum, Rows, registry
from tests.faults.staging import gets_the_lock, in_line, queued, until, waiting

there = pytest.mark.parametrize(
    "server",
    [each for each in registry() if not issubclass(each, (Memory, Rows))],
    ids=lambda each: each.name,
    indirect=True,
    scope="session",
)
"""Those that there is a connection to."""
single = pytest.mark.parametrize(
    "server",
    [each for each in registry() if not issubclass(each, (Memory, Rows, RedisQuorum))],
    ids=lambda each: each.name,
    indirect=True,
    scope="session",
)
"""Those of them that do nothing without it."""


class Records:
    """What the client said of its connection."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "aiolock.connection")
        self._caplog = caplog

    def __call__(self, level: int) -> list[logging.LogRecord]:
        records = (record for record in self._caplog.records if record.name == "aiolock.connection")
        return [record for record in records if record.levelno == level]


@pytest.fixture
def records(caplog) -> Records:
    return Records(caplog)


def addresses(records: list[logging.LogRecord]) -> list[str]:
    return sorted(record.aiolock_address for record in records)


@there
async def test_an_outage_is_told_once_and_so_is_its_end(deployment, records):
    async with deployment.over(ttl=60, command_timeout=5) as (client, way):
        for number in (1, 2):
            lease = await client.lock("x").acquire()
            way.cut(refused=True)
            await until(lambda number=number: len(records(logging.WARNING)) >= number)
            await asyncio.sleep(0.5)
            way.mend()
            # Some reconnect at once, others when there is something to ask.
            await until(lambda number=number: _asked(client, records, number))
            # Where a lock lives in a session, it is lost.
            await lease.release()
    lost, back = records(logging.WARNING), records(logging.INFO)
    # Once for each outage and each server of the deployment that was away.
    assert addresses(lost) == addresses(back)
    assert len(lost) == 2 * len(set(addresses(lost)))
    for record in back:
        assert 0 < record.aiolock_seconds < 60
        assert "is back after" in record.getMessage()
    for record in (*lost, *back):
        assert record.aiolock_address in record.getMessage()
        assert "secret" not in record.getMessage()
        assert "password" not in record.getMessage()


async def _asked(client, records, number) -> bool:
    try:
        await client.lock("x").locked()
    except Exception:
        return False
    lost, back = records(logging.WARNING), records(logging.INFO)
    return addresses(lost) == addresses(back) and len(back) >= number


@there
async def test_a_client_that_waits_says_it_as_well(deployment, rival, records):
    async with deployment.over(ttl=60, command_timeout=5) as (client, way), rival.lock("x"):
        attempt = asyncio.ensure_future(client.lock("x").acquire())
        await waiting(client, 1)
        way.cut(refused=True)
        await until(lambda: records(logging.WARNING))
        attempt.cancel()
        way.mend()
        await asyncio.wait([attempt])


@there
async def test_a_client_that_neither_holds_nor_waits_says_nothing(deployment, records):
    async with deployment.over(ttl=60, command_timeout=5) as (client, way):
        async with client.lock("x"):
            pass
        await until(lambda: not client._runtime.in_use())
        way.cut(refused=True)
        await asyncio.sleep(0.3)
        way.mend()
        await until(lambda: _reaches(client))
    assert records(logging.WARNING) == records(logging.INFO) == []


async def _reaches(client) -> bool:
    try:
        await client.lock("x").locked()
    except Exception:
        return False
    return True


@single
async def test_a_client_that_begins_to_wait_during_an_outage_says_it_once(deployment, records):
    async with deployment.over(ttl=60, command_timeout=5) as (client, way):
        assert await client.lock("x").locked() is False
        way.cut(refused=True)
        if not isinstance(deployment, LocalRows):
            # A file that cannot be used is noticed by those who ask for something.
            await until(client._runtime.outages.describe)
        assert records(logging.WARNING) == []
        for _ in range(4):
            with pytest.raises(BackendUnavailable):
                await client.lock("x").acquire(timeout=0.2)
            assert records(logging.WARNING)
        lost = records(logging.WARNING)
        assert lost
        assert len(lost) == len(set(addresses(lost)))
        assert records(logging.INFO) == []
        way.mend()
        await until(lambda: _gets(client))
        await until(lambda: _asked(client, records, 1))
        # Also if its request is answered in the end.
        way.cut(refused=True)
        if not isinstance(deployment, LocalRows):
            await until(client._runtime.outages.describe)
            waiter = asyncio.ensure_future(client.lock("x").acquire(timeout=30))
            await until(lambda: len(records(logging.WARNING)) > len(lost))
            waiter.cancel()
            await asyncio.wait([waiter])
        way.mend()
        await until(lambda: _gets(client))
        await until(lambda: _asked(client, records, 1))
    assert addresses(records(logging.INFO)) == addresses(records(logging.WARNING))


@single
@pytest.mark.parametrize("refused", [True, False])
async def test_an_acquire_that_is_not_answered_says_that_the_server_is_away(deployment, rival, refused):
    """And not that the lock is taken, however short its timeout is."""
    # In the session mode of MySQL a silent session is given up after a ttl.
    async with deployment.over(ttl=6, command_timeout=2) as (client, way):
        await (await client.lock("y").acquire()).release()
        way.cut(refused=refused)
        # A server that is silent may not be known to be away yet. The request may be carried out later: another name each time.
        for timeout in (2, 3):
            with pytest.raises(BackendUnavailable):
                await client.lock(f"x{timeout}").acquire(timeout=timeout)
        await until(client._runtime.outages.describe)

        @client.locked("x", timeout=0.2)
        async def work() -> None:
            raise AssertionError("the server is away")

        for call in (
            lambda: client.lock("x").acquire(timeout=0.2),
            lambda: client.lock("x").try_acquire(timeout=0.2),
            client.lock("x", fair=True, timeout=0.2).acquire,
            client.reentrant_lock("x", timeout=0.2).acquire,
            lambda: lock_all(client.lock("x"), client.lock("z")).acquire(timeout=0.2),
            client.lock("x").try_acquire,
            work,
        ):
            with pytest.raises(BackendUnavailable) as caught:
                await call()
            assert caught.type is BackendUnavailable
        # The second and third stand behind the first, in this client.
        attempts = [client.lock("x").acquire(timeout=each) for each in (1.5, 0.2, 0)]
        outcomes = await asyncio.gather(*attempts, return_exceptions=True)
        assert [type(each) for each in outcomes] == [BackendUnavailable] * 3, outcomes
        way.settle()
        way.mend()
        await until(lambda: _gets(client))
    await gets_the_lock(rival, "x")


async def _gets(client) -> bool:
    try:
        await (await client.lock("x").acquire(timeout=5)).release()
    except BackendError:
        return False
    return True


@there
async def test_a_lock_that_is_known_to_be_taken_is_not_a_server_that_is_away(deployment, rival, records):
    async with deployment.over(ttl=60, command_timeout=5) as (client, way), rival.lock("x"):
        lease = await client.lock("mine").acquire()
        attempts = [client.lock(name).acquire(timeout=3) for name in ("x", "mine")]
        waiters = [asyncio.ensure_future(attempt) for attempt in attempts]
        await waiting(client, 2)
        await queued(rival.lock("x"), 1)
        await in_line(client)
        way.cut(refused=True)
        await until(lambda: records(logging.WARNING))
        outcomes = await asyncio.gather(*waiters, return_exceptions=True)
        if isinstance(deployment, RedisQuorum):
            # The majority has answered.
            with pytest.raises(AcquireTimeout):
                await client.lock("x").acquire(timeout=3)
        way.mend()
        # Where a lock lives in a session, the one of this client is lost, and asked for again.
        assert type(outcomes[0]) is AcquireTimeout
        assert type(outcomes[1]) is AcquireTimeout or lease.lost
        await lease.release()


@there
async def test_closing_is_no_outage(deployment, records):
    async with deployment.connect() as client:
        lease = await client.lock("x").acquire()
    assert lease.lost
    assert records(logging.WARNING) == records(logging.INFO) == []
