"""A name that comes to mean another server: while that takes no writes it is away for now, and nobody has to open again."""

from __future__ import annotations

import asyncio
import secrets

import pytest

import aiolock
from aiolock import BackendUnavailable
from aiolock.backends.postgresql import connection
from tests.backends.postgresql.test_failover import address, primary, replicates, standby
from tests.faults.proxy import Proxy
from tests.faults.staging import PATIENCE, gets_the_lock, in_time, until, waiting

__all__ = ["primary", "standby"]

TAKES_NO_WRITES = (
    "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION SQLSTATE '25006'; END $$",
    "CREATE TRIGGER refuse BEFORE INSERT OR UPDATE OR DELETE ON aiolock EXECUTE FUNCTION refuse()",
)


def told(caplog):
    """What was said about lost connections."""
    return [
        record.getMessage()
        for record in caplog.records
        if (record.name, record.levelname) == ("aiolock.connection", "WARNING")
    ]


async def test_a_server_that_takes_no_writes_any_more_is_left(own, server, caplog):
    """Behind a proxy of its own the connections stay, and only a refused write tells."""
    options = {"namespace": secrets.token_hex(6), "ttl": 30.0}
    async with (
        Proxy("127.0.0.1", own.port) as proxy,
        aiolock.connect(f"postgresql://postgres@127.0.0.1:{proxy.port}/test", **options) as client,
    ):
        lease = await client.lock("held").acquire()
        await asyncio.to_thread(own.ask, *TAKES_NO_WRITES)
        stale = set(proxy.ends)
        with pytest.raises(BackendUnavailable, match="25006") as caught:
            await client.lock("x").acquire(timeout=PATIENCE)
        assert caught.value.retryable
        await until(lambda: not stale & proxy.ends, "the end of the connections")
        proxy.upstream = ("127.0.0.1", server.port)
        proxy.reset_all()
        await in_time(lambda: gets_the_lock(client, "x"))
        async with asyncio.timeout(PATIENCE):
            # The other server does not know the hold.
            assert await lease.wait_lost() == "revoked"
    assert told(caplog)
    assert all(str(proxy.port) in text for text in told(caplog))


async def test_a_standby_behind_the_name_is_away_until_it_is_promoted(primary, standby, caplog):
    options = {"namespace": secrets.token_hex(6), "ttl": 60.0}
    async with address(primary) as (url, lead_to), aiolock.connect(url, **options) as client:
        lease = await client.lock("held").acquire()
        waiter = asyncio.create_task(client.lock("held").acquire(timeout=PATIENCE))
        await waiting(client, 1)
        await replicates(primary, "async")
        primary.kill()
        lead_to(standby)

        async def refused_as_a_standby():
            with pytest.raises(BackendUnavailable) as caught:
                await client.lock("new").acquire(timeout=PATIENCE)
            return "is a standby or recovers" in str(caught.value)

        await until(refused_as_a_standby)
        await asyncio.to_thread(standby.promote)
        await in_time(lease.renew)
        assert lease.held
        await lease.release()
        await (await waiter).release()
    assert len(told(caplog)) == 1


async def test_two_connections_that_lead_to_two_servers_are_none(own, server, monkeypatch):
    """Between the two logins the name has moved, while the server before still takes writes."""
    login = connection.login
    async with Proxy("127.0.0.1", own.port) as proxy:
        url = f"postgresql://postgres@127.0.0.1:{proxy.port}/test"

        async def moving(*args):
            opened = await login(*args)
            proxy.upstream = ("127.0.0.1", server.port)
            return opened

        monkeypatch.setattr(connection, "login", moving)
        client = aiolock.connect(url, namespace=secrets.token_hex(6))
        with pytest.raises(BackendUnavailable, match="another server than the one for writes"):
            await client.open()
        # From now on the name means one server.
        async with client, client.lock("x", timeout=PATIENCE):
            pass
