"""A server that becomes read_only while clients are connected: another one is likely to give out locks by now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiomysql
import pymysql
import pytest

import aiolock
from aiolock import BackendError, BackendRefused, BackendUnavailable, ConfigError
from aiolock.backends.mysql.errors import takes_no_writes, translate
from tests import servers
from tests.backends.mysql.conftest import ACCOUNT, PASSWORD, Deployment
from tests.backends.mysql.tools import as_root
from tests.faults.proxy import Proxy
from tests.faults.staging import PATIENCE, gets_the_lock, in_time, until, waiting


@pytest.fixture(scope="module")
def own():
    """A server of this module's own: the setting is everybody's."""
    with servers.MariaDB(init=ACCOUNT) as server:
        yield server


@asynccontextmanager
async def demoted(server) -> AsyncIterator[None]:
    await as_root(server, "SET GLOBAL read_only = 1")
    try:
        yield
    finally:
        await as_root(server, "SET GLOBAL read_only = 0")


@pytest.mark.parametrize("mode", ["session", "row"])
async def test_holds_end_with_their_terms_and_no_new_ones_are_given(own, mode):
    deployment = Deployment(own)
    async with deployment.connect(mode, ttl=1.5) as client:
        lease = await client.lock("held").acquire()
        await gets_the_lock(client, "known")
        async with demoted(own):
            # By the server itself, or by us where the account may write all the same.
            with pytest.raises(BackendRefused, match=r"read.only"):
                await client.lock("known").acquire(timeout=PATIENCE)
            with pytest.raises(BackendError):
                await client.lock("new").acquire(timeout=PATIENCE)
            async with asyncio.timeout(PATIENCE):
                assert await lease.wait_lost() == "expired"
        for name in ("held", "known", "new"):
            await gets_the_lock(client, name)


@pytest.mark.parametrize("mode", ["session", "row"])
async def test_a_term_that_the_setting_outlives_not_goes_on(own, mode):
    """An administrator who is quick."""
    deployment = Deployment(own)
    async with deployment.connect(mode, ttl=6) as client:
        lease = await client.lock("held").acquire()
        async with demoted(own):
            with pytest.raises(BackendRefused, match=r"read.only"):
                await lease.renew()
        await lease.renew()
        assert lease.held
        await lease.release()


@pytest.mark.parametrize("mode", ["session", "row"])
async def test_whoever_waits_is_told_instead_of_let_in(own, mode):
    deployment = Deployment(own)
    async with deployment.connect(mode) as client, deployment.connect(mode) as rival:
        lease = await rival.lock("x").acquire()
        waiters = [asyncio.create_task(client.lock("x").acquire()) for _ in range(3)]
        await waiting(client, 3)
        async with demoted(own):
            await lease.release()
            async with asyncio.timeout(PATIENCE):
                await asyncio.wait(waiters)
            for waiter in waiters:
                assert isinstance(waiter.exception(), aiolock.BackendRefused)
        await gets_the_lock(rival, "x")


@pytest.mark.parametrize("mode", ["session", "row"])
async def test_an_account_that_may_write_all_the_same_gets_none_either(own, mode):
    url = f"{own.url}?mode={mode}"
    async with aiolock.connect(url, namespace=Deployment(own).namespace, ttl=5) as client:
        await gets_the_lock(client, "x")
        async with demoted(own):
            with pytest.raises(BackendRefused, match=r"read.only"):
                await client.lock("x").acquire(timeout=PATIENCE)
        await gets_the_lock(client, "x")


async def test_waiters_of_leases_get_their_turn_when_the_setting_is_taken_back(own):
    """Their positions end with the connections, and they ask again until they are answered."""
    deployment = Deployment(own)
    async with deployment.connect("lease") as client, deployment.connect("lease") as rival:
        lease = await rival.lock("x").acquire()
        waiter = asyncio.create_task(client.lock("x").acquire(timeout=PATIENCE))
        await waiting(client, 1)
        async with demoted(own):
            with pytest.raises(BackendUnavailable, match=r"read.only") as caught:
                await client.lock("y").acquire(timeout=PATIENCE)
            assert caught.value.retryable
            await lease.release()
            assert not waiter.done()
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()


# --- another server behind the same name


@pytest.fixture(scope="module")
def successor():
    """The server that takes over."""
    with servers.MariaDB(init=ACCOUNT) as server:
        yield server


@pytest.fixture
async def name(own):
    """An address that leads to `own`, until its `upstream` is changed for connections that are new then."""
    async with Proxy(own.host, own.port) as proxy:
        yield proxy


def replicate(old: servers.MariaDB, new: servers.MariaDB) -> None:
    """Copy what the one server knows of locks to the other, as replication does all the time."""

    def connect(server: servers.MariaDB) -> pymysql.Connection:
        return pymysql.connect(
            host=server.host, port=server.port, user="root", database="test", autocommit=True
        )

    with connect(old) as one, connect(new) as two:
        source, target = one.cursor(), two.cursor()
        for table in ("aiolock", "aiolock_requests", "aiolock_registers"):
            source.execute(f"SELECT * FROM {table}")
            if rows := source.fetchall():
                marks = ", ".join(["%s"] * len(rows[0]))
                target.executemany(f"REPLACE INTO {table} VALUES ({marks})", rows)


def move(name: Proxy, server: servers.MariaDB) -> None:
    name.upstream = (server.host, server.port)


async def test_locks_go_on_at_the_server_that_has_taken_over(own, successor, name, caplog):
    """Connections that are open stay at the old server, which answers every read: only a refused write tells."""
    deployment = Deployment(own)
    async with deployment.connect(port=successor.port):
        pass  # it has the tables
    async with deployment.connect(port=name.port) as client, deployment.connect(port=name.port) as rival:
        kept, shared = await rival.lock("kept").acquire(), await rival.semaphore("shared", 1).acquire()
        mutex = asyncio.create_task(client.lock("kept").acquire(timeout=PATIENCE))
        permit = asyncio.create_task(client.semaphore("shared", 1).acquire(timeout=PATIENCE))
        opened = asyncio.create_task(client.latch("gate", 1).wait(timeout=PATIENCE))
        await waiting(client, 3)
        stale = set(name.ends)
        replicate(own, successor)
        async with demoted(own):
            # The name still leads to the old server.
            for _ in range(3):
                with pytest.raises(BackendUnavailable, match=r"read.only") as caught:
                    await client.lock("new").acquire(timeout=PATIENCE)
                assert caught.value.retryable
            move(name, successor)
            await in_time(lambda: gets_the_lock(client, "new"))
            await in_time(kept.renew)
            await in_time(rival.latch("gate", 1).count_down)
            async with asyncio.timeout(PATIENCE):
                await opened
                for lease, waiter in ((kept, mutex), (shared, permit)):
                    await lease.release()
                    await (await waiter).release()
            await until(lambda: not stale & name.ends, "the end of the connections to the old server")
    told = [
        record.getMessage()
        for record in caplog.records
        if (record.name, record.levelname) == ("aiolock.connection", "WARNING")
    ]
    assert len(told) == 2, told  # one of each client
    for text in told:
        assert f":{name.port}/test" in text
        assert "takes no writes any more" in text


async def test_what_the_old_server_granted_ends_by_its_own_deadline(own, successor, name):
    """The server that took over does not know the hold."""
    deployment = Deployment(own)
    async with deployment.connect(port=successor.port):
        pass
    async with deployment.connect(port=name.port, ttl=3) as client:
        lease = await client.lock("lost").acquire()
        verified = await client.lock("verified", renew=False).acquire()
        async with demoted(own):
            async with asyncio.timeout(PATIENCE):
                # The name leads nowhere else.
                assert await lease.wait_lost() == "expired"
                assert await verified.wait_lost() == "expired"
        lease = await in_time(client.lock("lost").acquire)
        async with demoted(own):
            move(name, successor)
            async with asyncio.timeout(PATIENCE):
                assert await lease.wait_lost() == "revoked"


async def test_a_lock_in_a_transaction_follows_to_the_other_server(own, successor, name):
    """The client only reads there, and the connection of the caller is never closed."""
    deployment = Deployment(own)

    async def connect(server):
        login = {"user": "app", "password": PASSWORD, "db": "test"}
        return await aiomysql.connect(host=server.host, port=server.port, **login)

    async with deployment.connect("row", port=successor.port) as other:
        await gets_the_lock(other, "x")
    async with deployment.connect("row", port=name.port) as client:
        await gets_the_lock(client, "x")
        old, new = await connect(own), await connect(successor)
        try:
            await old.begin()
            async with demoted(own):
                with pytest.raises(BackendUnavailable, match=r"read.only"):
                    await client.lock("x", connection=old).acquire(timeout=PATIENCE)
                move(name, successor)
                with pytest.raises(
                    ConfigError, match="must be to the server that the client is connected to"
                ):
                    await client.lock("x", connection=old).acquire(timeout=PATIENCE)
                await new.begin()
                await client.lock("x", connection=new).acquire(timeout=PATIENCE)
                await new.rollback()
            async with old.cursor() as cursor:
                await cursor.execute("SELECT 1")
        finally:
            old.close()
            new.close()


@pytest.mark.parametrize(
    ("number", "text", "over"),
    [
        (1290, "The MariaDB server is running with the --read-only option so it cannot execute this statement", True),
        (1290, "The MySQL server is running with the --super-read-only option so it cannot execute this", True),
        (1290, "Der MySQL-Server läuft mit der Option super_read_only und kann diese Anweisung nicht ausführen", True),
        (1290, "The MySQL server is running with the --secure-file-priv option so it cannot execute this", False),
        (1290, "The MySQL server is running with the --skip-grant-tables option so it cannot execute this", False),
        (1836, "Running in read-only mode", True),
        (1874, "InnoDB is in read only mode.", True),
        (1047, "WSREP has not yet prepared node for application use", True),
        (1047, "Unknown command", False),
        (1792, "Cannot execute statement in a READ ONLY transaction.", False),
    ],
)  # fmt: skip
def test_only_a_server_that_takes_no_writes_ends_connections(number, text, over):
    error = pymysql.err.OperationalError(number, text)
    assert takes_no_writes(error) is over
    assert isinstance(translate(error, "here"), BackendUnavailable if over else BackendRefused)


async def connections(server) -> int:
    """The number of logins that the server has seen."""
    [(_, count)] = await as_root(server, "SHOW GLOBAL STATUS LIKE 'Connections'")
    return int(count)


@pytest.mark.parametrize("kind", ["mutex", "semaphore"])
async def test_a_holder_does_not_log_in_again_and_again_at_the_server_that_takes_no_writes(own, kind):
    """A session that is refused had no holds to be verified: each one opened the next at once, 300 a second."""
    deployment = Deployment(own)
    async with deployment.connect("lease", ttl=3) as client:
        lock = client.lock("x") if kind == "mutex" else client.semaphore("x", 2)
        lease = await lock.acquire()
        async with demoted(own):
            before = await connections(own)
            async with asyncio.timeout(PATIENCE):
                assert await lease.wait_lost() == "expired"
            # In a ttl the renewal is tried ten times or so, on two or three connections.
            assert await connections(own) - before < 120
