"""A client that holds or waits and loses its connection says so once, and says when it is back."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.contract.deployments import Memory, Rows, registry
from tests.faults.staging import until, waiting

pytestmark = pytest.mark.parametrize(
    "server",
    [each for each in registry() if not issubclass(each, (Memory, Rows))],
    ids=lambda each: each.name,
    indirect=True,
    scope="session",
)
"""Those that there is a connection to."""


class Said:
    """What the client said of its connection."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "aiolock.connection")
        self._caplog = caplog

    def __call__(self, level: int) -> list[logging.LogRecord]:
        records = (record for record in self._caplog.records if record.name == "aiolock.connection")
        return [record for record in records if record.levelno == level]


@pytest.fixture
def said(caplog) -> Said:
    return Said(caplog)


def addresses(records: list[logging.LogRecord]) -> list[str]:
    return sorted(record.aiolock_address for record in records)


async def test_an_outage_is_told_once_and_so_is_its_end(deployment, said):
    async with deployment.over(ttl=60, command_timeout=5) as (client, way):
        for number in (1, 2):
            lease = await client.lock("x").acquire()
            way.cut(refused=True)
            await until(lambda number=number: len(said(logging.WARNING)) >= number)
            await asyncio.sleep(0.5)
            way.mend()
            # Some reconnect at once, others when there is something to ask.
            await until(lambda number=number: _asked(client, said, number))
            # Where a lock lives in a session, it is lost.
            await lease.release()
    lost, back = said(logging.WARNING), said(logging.INFO)
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


async def _asked(client, said, number) -> bool:
    try:
        await client.lock("x").locked()
    except Exception:
        return False
    lost, back = said(logging.WARNING), said(logging.INFO)
    return addresses(lost) == addresses(back) and len(back) >= number


async def test_a_client_that_waits_says_it_as_well(deployment, rival, said):
    async with deployment.over(ttl=60, command_timeout=5) as (client, way), rival.lock("x"):
        attempt = asyncio.ensure_future(client.lock("x").acquire())
        await waiting(client, 1)
        way.cut(refused=True)
        await until(lambda: said(logging.WARNING))
        attempt.cancel()
        way.mend()
        await asyncio.wait([attempt])


async def test_a_client_that_neither_holds_nor_waits_says_nothing(deployment, said):
    async with deployment.over(ttl=60, command_timeout=5) as (client, way):
        async with client.lock("x"):
            pass
        await until(lambda: not client._runtime.in_use())
        way.cut(refused=True)
        await asyncio.sleep(0.3)
        way.mend()
        await until(lambda: _reaches(client))
    assert said(logging.WARNING) == said(logging.INFO) == []


async def _reaches(client) -> bool:
    try:
        await client.lock("x").locked()
    except Exception:
        return False
    return True


async def test_closing_is_no_outage(deployment, said):
    async with deployment.connect() as client:
        lease = await client.lock("x").acquire()
    assert lease.lost
    assert said(logging.WARNING) == said(logging.INFO) == []
