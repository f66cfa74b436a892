"""An address that lists several hosts: all connections go to the primary, whichever host that is."""

from __future__ import annotations

import asyncio
import secrets

import pytest

import aiolock
from aiolock.backends.postgresql.primary import Role, choose
from aiolock.backends.postgresql.url import parameters
from aiolock.errors import BackendRefused, BackendUnavailable
from tests.faults.silence import SILENT, black_hole
from tests.servers import PostgreSQL

PATIENCE = 60.0
"""Seconds after which something that has to happen counts as never."""
CONNECTIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'aiolock'"


def listed(*servers):
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return f"postgresql://postgres@{hosts}/test?target_session_attrs=read-write"


@pytest.fixture
def primary():
    with PostgreSQL() as server:
        yield server


@pytest.fixture
def standby(primary):
    with PostgreSQL(primary=primary) as server:
        yield server


async def test_a_server_that_takes_over_is_found_among_the_hosts(standby, primary):
    options = {"namespace": secrets.token_hex(6)}
    async with aiolock.connect(listed(standby, primary), **options) as client:
        async with client.lock("x"):
            assert await asyncio.to_thread(primary.ask, CONNECTIONS) == [["2"]]
            assert await asyncio.to_thread(standby.ask, CONNECTIONS) == [["0"]]
        findings = await client.diagnose()
        assert findings
        await asyncio.to_thread(standby.promote)
        # Both take writes now: no host is chosen by chance.
        with pytest.raises(BackendRefused, match="both take writes"):
            async with aiolock.connect(listed(standby, primary), **options):
                pass
        await asyncio.to_thread(primary.kill)
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    async with client.lock("x"):
                        break
                except aiolock.BackendUnavailable:
                    await asyncio.sleep(0.02)
        assert await asyncio.to_thread(standby.ask, CONNECTIONS) == [["2"]]


async def test_a_silent_host_does_not_keep_from_the_primary(primary):
    url = listed(primary).replace("@", f"@{SILENT}:{primary.port},")
    with black_hole(primary.port):
        async with (
            asyncio.timeout(PATIENCE / 2),
            aiolock.connect(url, command_timeout=PATIENCE, ttl=4 * PATIENCE) as client,
            client.lock(secrets.token_hex(6)),
        ):
            pass


async def test_no_primary_among_the_hosts(primary, standby):
    closed = PostgreSQL()
    with pytest.raises(BackendUnavailable, match="every host that answers is a standby"):
        async with aiolock.connect(listed(standby, closed), command_timeout=5):
            pass
    with pytest.raises(BackendUnavailable, match="no host answers"):
        async with aiolock.connect(
            listed(closed, closed).replace(f"127.0.0.1:{closed.port},", "localhost:1,")
        ):
            pass


def test_one_server_under_two_names_is_one_primary():
    address, _ = parameters("postgresql://app@h1,h2,h3/base", {})
    one, two, three = (address.at(host) for host in address.hosts)
    assert choose([]) is None
    assert choose([Role(one, recovering=True, run="1")]) is None
    assert choose([Role(one, recovering=True, run="1"), Role(two, recovering=False, run="2")]) is two
    assert choose([Role(three, recovering=False, run="1"), Role(two, recovering=False, run="1")]) is three
    with pytest.raises(
        BackendRefused, match=r"h1:5432/base and postgresql://app@h2:5432/base both"
    ) as caught:
        choose([Role(one, recovering=False, run="1"), Role(two, recovering=False, run="2")])
    assert caught.value.retryable
