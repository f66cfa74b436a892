"""Locks that several may be in, on MariaDB: what transactions, the listener and the table of requests do when things go wrong."""

from __future__ import annotations

import asyncio
import contextlib

import aiomysql
import pytest

import aiolock
from aiolock import BackendRefused, ConfigError, UnsafeBackend
from aiolock.backends.mysql import MySQLBackend
from aiolock.backends.mysql.diagnosis import findings
from aiolock.backends.mysql.listener import presence
from aiolock.backends.mysql.protocol import Wire
from aiolock.backends.mysql.shared import ALL
from aiolock.types import READ, WRITE, Family, Level, permits
from tests.backends.mysql.tools import as_root, sessions
from tests.faults.proxy import Proxy, mysql_frames
from tests.faults.staging import PATIENCE, queued, until, waiting
from tests.servers import is_mysql


async def gets(lock) -> int:
    lease = await lock.acquire(timeout=PATIENCE)
    await lease.release()
    return lease.token


async def no_requests(deployment) -> bool:
    rows = await as_root(
        deployment.server,
        f"SELECT COUNT(*) FROM aiolock_requests b JOIN aiolock t ON t.id = b.lock_id WHERE t.namespace = '{deployment.namespace}'",
    )
    return rows[0][0] == 0


# --- decisions


async def test_a_decision_that_fails_half_way_leaves_no_transaction_open(deployment, mariadb):
    """What is done next on the same connection must not be a part of it, and undone with it."""
    async with deployment.connect() as client, deployment.connect() as rival:
        reader = await client.rwlock("x").read().acquire()
        admin = await aiomysql.connect(**{**mariadb.admin, "db": "test"})
        try:
            async with admin.cursor() as cursor:
                # The row of the hold: a decision waits for it after it has changed the row of the lock.
                await cursor.execute("SELECT owner FROM aiolock_requests FOR UPDATE")
                writer = asyncio.create_task(client.rwlock("x").write().acquire())
                other = asyncio.create_task(client.lock("y").acquire())
                lease = await other
                # The mutex came after a try that failed, and is there for everybody.
                assert await rival.lock("y").try_acquire() is None
                rows = await as_root(
                    mariadb,
                    f"SELECT owner FROM aiolock WHERE namespace = '{deployment.namespace}' AND name = 'y'",
                )
                assert rows[0][0] is not None
            await admin.rollback()
        finally:
            admin.close()
        await reader.release()
        async with asyncio.timeout(PATIENCE):
            await (await writer).release()
        await lease.release()
    assert await no_requests(deployment)


def undo_before(monkeypatch, words: str) -> list[str]:
    """Have the next decision undone before these words, and the rest of it carried out: so does a node of a cluster, without a word."""
    real, undone = Wire.ask, []

    def ask(wire: Wire, packet: str, heard) -> None:
        if words in packet and not undone:
            undone.append(packet)
            packet = packet.replace(words, f"ROLLBACK; {words}", 1)
        real(wire, packet, heard)

    monkeypatch.setattr(Wire, "ask", ask)
    return undone


of_a_cluster = pytest.mark.skipif(
    is_mysql(), reason="Galera's nodes are of MariaDB, and only they are asked what they undid"
)


@of_a_cluster
@pytest.mark.parametrize(
    ("words", "keep"),
    [("SELECT owner FROM `aiolock_requests` FORCE", 0), ("UPDATE `aiolock_requests` SET state = 4", 0.2)],
)
async def test_a_release_that_a_node_carried_out_in_part_is_no_loss(deployment, monkeypatch, words, keep):
    async with deployment.connect() as client, deployment.connect() as rival:
        async with client.semaphore("x", 2) as lease:
            undone = undo_before(monkeypatch, words)
            if keep:
                await lease.release(keep)
        assert len(undone) == 1
        assert client.stats()["lost"] == 0
        assert await gets(rival.semaphore("x", 2)) > lease.token


@of_a_cluster
async def test_a_forced_release_that_a_node_carried_out_in_part_is_told(deployment, monkeypatch):
    async with deployment.connect() as client, deployment.connect() as rival:
        lease = await client.semaphore("x", 2).acquire(permits=2)
        undone = undo_before(monkeypatch, "UPDATE `aiolock_requests` FORCE INDEX (lock_id) SET state = 3")
        assert await rival.semaphore("x", 2).force_release()
        assert len(undone) == 1
        async with asyncio.timeout(PATIENCE):
            assert await lease.wait_lost() == "force-released"


async def test_the_answer_to_a_bid_that_is_lost_is_found_again(deployment):
    async with (
        Proxy(deployment.server.host, deployment.server.port, framing=mysql_frames) as proxy,
        deployment.connect(port=proxy.port) as client,
        deployment.connect() as rival,
    ):
        for _ in range(5):
            cut = proxy.down.drop_next(1, reset=True)
            lease = await client.semaphore("x", 2).acquire(timeout=PATIENCE, permits=2)
            await cut.wait()
            lease.check()
            assert await rival.semaphore("x", 2).available() == 0
            await lease.release()
            assert await rival.semaphore("x", 2).available() == 2
    assert await no_requests(deployment)


async def test_holds_survive_the_end_of_every_session(deployment, mariadb):
    async with deployment.connect(ttl=60) as client, deployment.connect() as rival:
        leases = [await client.rwlock("x").read().acquire() for _ in range(3)]
        writer = asyncio.create_task(rival.rwlock("x").write().acquire())
        await queued(client.rwlock("x").read(), 1)
        before = client.stats()["renewals"]
        for number, *_ in await sessions(mariadb):
            with contextlib.suppress(aiomysql.OperationalError):  # one that has ended by itself
                await as_root(mariadb, f"KILL {number}")
        await until(lambda: client.stats()["renewals"] >= before + 3)
        for lease in leases:
            lease.check()
            await lease.release()
        async with asyncio.timeout(PATIENCE):
            await (await writer).release()


@pytest.mark.ends_server
@pytest.mark.slow
async def test_a_restart_with_readers_writers_and_permits(deployment, mariadb):
    # What is committed survives the kill; the next start has the old value again.
    await as_root(mariadb, "SET GLOBAL innodb_flush_log_at_trx_commit = 2")
    async with deployment.connect(ttl=20) as client, deployment.connect(ttl=20) as rival:
        held = [await client.rwlock(f"x{number}").read().acquire() for number in range(20)]
        held += [await client.semaphore("s", 20).acquire() for _ in range(20)]
        waiters = [asyncio.create_task(gets(rival.rwlock(f"x{number}").write())) for number in range(20)]
        waiters += [asyncio.create_task(gets(rival.semaphore("s", 20))) for _ in range(20)]
        await waiting(rival, 40)
        mariadb.kill()
        mariadb.start()
        await until(lambda: client.stats()["renewals"] >= 40)
        for lease in held:
            lease.check()
            await lease.release()
        async with asyncio.timeout(60):
            await asyncio.gather(*waiters)
    assert await no_requests(deployment)


# --- waiting


async def test_a_wake_up_that_is_lost_costs_time_and_no_grant(deployment, mariadb):
    async with deployment.connect(ttl=3) as client, deployment.connect(ttl=3) as rival:
        lease = await client.semaphore("x", 1).acquire()
        waiter = asyncio.create_task(rival.semaphore("x", 1).acquire())
        await queued(client.semaphore("x", 1), 1)
        # Whoever is granted something is told on nobody's session.
        sleep = rival._backend.mode.sharing.listener._sleep
        wake_lock = sleep.wake_lock
        sleep.wake_lock = lambda client: wake_lock(client)[::-1]
        listener = await rival._backend.sessions.listener()
        await as_root(mariadb, f"KILL {listener.id}")
        await until(lambda: not listener.alive)
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()


async def test_a_waiter_that_died_holds_the_queue_up_for_its_claim_only(deployment):
    async with (
        Proxy(deployment.server.host, deployment.server.port, framing=mysql_frames) as proxy,
        deployment.connect(ttl=30) as client,
        deployment.connect(ttl=30) as third,
        deployment.connect(port=proxy.port, ttl=2) as rival,
    ):
        lease = await client.semaphore("x", 1).acquire()
        dead = asyncio.create_task(rival.semaphore("x", 1).acquire())
        await waiting(rival, 1)
        await queued(client.semaphore("x", 1), 1)
        waiter = asyncio.create_task(third.semaphore("x", 1).acquire())
        await queued(client.semaphore("x", 1), 2)
        proxy.blackhole()
        await lease.release()
        # Its claim is 1 s; that it is over is seen by whoever waits behind it.
        async with asyncio.timeout(PATIENCE):
            successor = await waiter
        proxy.heal()
        await successor.release()
        async with asyncio.timeout(PATIENCE):
            await (await dead).release()
    assert await no_requests(deployment)


async def test_a_request_that_arrives_after_it_was_given_up_is_deleted(deployment, mariadb):
    async with deployment.connect() as client, deployment.connect() as rival:
        lease = await client.semaphore("x", 2).acquire()
        waiter = asyncio.create_task(client.semaphore("x", 2).acquire(permits=2))
        await queued(rival.semaphore("x", 2), 1)
        # A grant of this client's that none of its claims knows.
        await as_root(
            mariadb,
            "INSERT INTO aiolock_requests SELECT REVERSE(owner), lock_id, client, 1, arrival + 1, mode, 1, block, label, ttl, "
            f"confirmation_window, token + 7, since, expires_at, requested, present, extension FROM aiolock_requests WHERE state = 2 "
            f"AND lock_id = (SELECT id FROM aiolock WHERE namespace = '{deployment.namespace}' AND name = 'x')",
        )

        async def deleted() -> bool:
            return len((await rival.semaphore("x", 2).inspect()).holders) == 1

        await until(deleted)
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()
    assert await no_requests(deployment)


async def test_a_waiter_that_was_away_for_long_asks_again(deployment, mariadb):
    async with deployment.connect(ttl=2, command_timeout=10) as client, deployment.connect(ttl=30) as rival:
        lease = await rival.semaphore("x", 1).acquire()
        waiter = asyncio.create_task(client.semaphore("x", 1).acquire())
        await queued(rival.semaphore("x", 1), 1)
        await as_root(mariadb, "DELETE FROM aiolock_requests WHERE state = 0")
        await queued(rival.semaphore("x", 1), 1)
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()


async def test_many_who_wait_for_many_locks_cost_one_connection(deployment, mariadb):
    async with deployment.connect(ttl=30) as client, deployment.connect(ttl=30) as rival:
        held = [await rival.rwlock(f"x{number}").write().acquire() for number in range(20)]
        before = len(await sessions(mariadb))
        waiters = [
            asyncio.create_task(gets(client.rwlock(f"x{number % 20}").read())) for number in range(200)
        ]
        await waiting(client, 200)
        await queued(rival.rwlock("x19").read(), 10)
        assert len(await sessions(mariadb)) == before + 1
        for lease in held:
            await lease.release()
        async with asyncio.timeout(60):
            tokens = await asyncio.gather(*waiters)
        assert len(set(tokens)) == 200
        assert len(await sessions(mariadb)) <= before + 1
    assert await no_requests(deployment)


async def test_a_waiting_client_asks_the_server_seldom(deployment, mariadb):
    """It sleeps at the server: no busy polling."""
    async with deployment.connect(ttl=30) as client, deployment.connect(ttl=30) as rival:
        lease = await rival.semaphore("x", 1).acquire()
        waiters = [asyncio.create_task(gets(client.semaphore("x", 1))) for _ in range(20)]
        await queued(rival.semaphore("x", 1), 20)

        async def questions() -> int:
            return int((await as_root(mariadb, "SHOW GLOBAL STATUS LIKE 'Questions'"))[0][1])

        before = await questions()
        await asyncio.sleep(3)
        # Each second: a look of four statements, a sleep, and the prolonging of places; and what root asked.
        assert await questions() - before < 60
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*waiters)


# --- what is remembered, and for how long


async def test_a_limit_is_forgotten_when_nobody_has_used_it_for_long(deployment, mariadb):
    async def age(seconds: int) -> None:
        await as_root(
            mariadb,
            f"UPDATE aiolock SET since = since - INTERVAL {seconds} SECOND WHERE namespace = '{deployment.namespace}'",
        )

    async with deployment.connect() as client:
        await gets(client.semaphore("x", 3))
        with pytest.raises(ConfigError, match="has 3 permits, not 4"):
            await client.semaphore("x", 4).acquire()
        lease = await client.semaphore("x", 3).acquire()
        await age(120)
        # Somebody holds it.
        with pytest.raises(ConfigError):
            await client.semaphore("x", 4).acquire()
        await lease.release()
        # The refused ones are cleaned up in the background, and every decision is a use.
        await until(lambda: not client._runtime.cleanups)
        await age(120)
        await gets(client.semaphore("x", 4))
        await client.semaphore("x", 4).set_limit(9)
        await age(7200)
        assert (await client.semaphore("x", 4).inspect()).limit == 9
        await gets(client.semaphore("x", 9))
        await age(90_000)
        assert (await client.semaphore("x", 4).inspect()).limit is None
        await gets(client.semaphore("x", 5))
        assert (await client.semaphore("x", 5).inspect()).limit == 5


async def test_purging_spares_what_is_in_use(deployment, mariadb):
    backend = MySQLBackend(deployment.url())
    async with aiolock.Client(backend, namespace=deployment.namespace) as client:
        held = await client.rwlock("held").read().acquire()
        last = await gets(client.rwlock("old").write())
        register = backend.register("old", Family.LATCH)
        stamp = await register.write(b"1", "", 1.0)
        await as_root(
            mariadb,
            "UPDATE aiolock SET expires_at = expires_at - INTERVAL 2 HOUR, token = token - 7200000000 * 64 "
            f"WHERE namespace = '{deployment.namespace}'",
        )
        await as_root(
            mariadb,
            f"UPDATE aiolock_registers SET expires_at = expires_at - INTERVAL 2 HOUR WHERE namespace = '{deployment.namespace}'",
        )
        await backend.purge(3600)
        rows = await as_root(mariadb, f"SELECT name FROM aiolock WHERE namespace = '{deployment.namespace}'")
        assert rows == (("held",),)
        rows = await as_root(
            mariadb, f"SELECT COUNT(*) FROM aiolock_registers WHERE namespace = '{deployment.namespace}'"
        )
        assert rows == ((0,),)
        held.check()
        await held.renew()
        assert await gets(client.rwlock("old").write()) > last
        again = await register.write(b"1", "", 60.0)
        assert again is not None
        assert int(again) > int(stamp)
        await held.release()


async def test_tables_of_an_earlier_version_are_refused_with_what_to_do(deployment, mariadb):
    tables = ("early", "early_requests")
    for table in tables:
        await as_root(mariadb, f"CREATE TABLE {table} (id CHAR(40) PRIMARY KEY, name VARCHAR(1024))")
    with pytest.raises(UnsafeBackend, match="data format 1, and this client has format 6") as caught:
        await aiolock.connect(deployment.url(), table="early").open()
    assert "DROP TABLE `early`, `early_requests`;\nCREATE TABLE" in str(caught.value)
    for table in tables:
        await as_root(mariadb, f"ALTER TABLE {table} COMMENT='aiolock data format 2'")
    client = aiolock.connect(deployment.url(), table="early")
    with pytest.raises(UnsafeBackend, match="data format 2, and this client has format 6") as caught:
        await client.open()
    [found] = [one for one in await client.diagnose() if one.subject == "tables"]
    assert "data format 2, and this client has format 6" in found.text
    # No table is made beside them; what the message says is enough.
    assert await as_root(mariadb, "SHOW TABLES LIKE 'early\\_reg%'") == ()
    for statement in str(caught.value).partition("make them anew:\n")[2].split(";\n"):
        await as_root(mariadb, statement)
    async with client, client.rwlock("x").write():
        pass


# --- what is found out


async def test_a_server_that_is_refused_can_be_diagnosed(deployment, mariadb):
    await as_root(mariadb, "SET GLOBAL read_only = 1")
    try:
        client = deployment.connect()
        with pytest.raises(BackendRefused):
            await client.open()
        found = await deployment.connect().diagnose()
    finally:
        await as_root(mariadb, "SET GLOBAL read_only = 0")
    [writes] = [finding for finding in found if finding.subject == "read_only"]
    assert writes.level is Level.ERROR
    assert "takes writes" in writes.advice
    async with deployment.connect() as client:
        found = await client.diagnose()
    assert {finding.subject for finding in found} >= {"version", "read_only", "cluster", "tls", "tables"}
    # Private servers do not flush each commit.
    [durable] = [one for one in found if one.subject == "innodb_flush_log_at_trx_commit"]
    assert durable.level is Level.WARNING
    assert [one.subject for one in found if one.level is Level.ERROR] == []


def test_settings_lead_to_findings():
    def level(facts: dict[str, str], subject: str, mode: str = "lease") -> Level:
        good = {"version": "10.11.9-MariaDB", "read_only": "OFF", "max_connections": "151"}
        good |= {"innodb_flush_log_at_trx_commit": "1"}
        [found] = [one for one in findings(good | facts, mode) if one.subject == subject]
        assert bool(found.advice) is (found.level is not Level.OK) or found.text.endswith("may not be read")
        return found.level

    assert level({}, "version") is Level.OK
    assert level({"version": "10.5.1-MariaDB"}, "version") is Level.ERROR
    assert level({"version": "5.7.44"}, "version") is Level.ERROR
    assert level({"version": "8.4.0"}, "version") is Level.OK
    assert level({"super_read_only": "ON"}, "super_read_only") is Level.ERROR
    assert level({"innodb_flush_log_at_trx_commit": "2"}, "innodb_flush_log_at_trx_commit") is Level.WARNING
    assert level({"log_bin": "ON", "sync_binlog": "0"}, "sync_binlog") is Level.WARNING
    assert level({"log_bin": "ON", "sync_binlog": "1"}, "replication") is Level.NOTE
    assert level({"wsrep_on": "ON"}, "cluster") is Level.NOTE
    assert level({"wsrep_on": "ON"}, "cluster", "session") is Level.ERROR
    assert level({}, "mode", "session") is Level.NOTE
    assert level({}, "session settings") is Level.OK
    for name, value in {
        "max_statement_time": "10.000000",
        "max_execution_time": "10",
        "init_connect": "SET autocommit=0",
        "autocommit": "OFF",
        "completion_type": "CHAIN",
        "sql_safe_updates": "ON",
        "transaction_isolation": "SERIALIZABLE",
    }.items():
        [finding] = [one for one in findings({name: value}, "lease") if one.subject == name]
        assert value in finding.text
        assert "overridden" in finding.text
    logged = {"log_bin": "ON", "binlog_format": "STATEMENT"}
    assert level(logged, "binlog_format") is Level.ERROR
    assert level(logged, "binlog_format", "row") is Level.ERROR
    assert level(logged, "binlog_format", "session") is Level.OK
    assert level(logged | {"binlog_format": "MIXED"}, "binlog_format") is Level.OK
    assert level({"max_connections": "20"}, "max_connections") is Level.NOTE
    assert level({"innodb_snapshot_isolation": "OFF"}, "innodb_snapshot_isolation", "row") is Level.OK
    assert level({"innodb_snapshot_isolation": "ON"}, "innodb_snapshot_isolation", "row") is Level.NOTE
    for mode, facts in (("row", {}), ("lease", {"innodb_snapshot_isolation": "ON"})):
        assert "innodb_snapshot_isolation" not in {one.subject for one in findings(facts, mode)}


def test_weights_make_one_rule_of_all_kinds():
    assert READ.weigh(ALL) == (1, ALL)
    assert WRITE.weigh(ALL) == (ALL, ALL)
    assert permits(3, 10).weigh(ALL) == (3, 10)


async def test_two_that_arrived_with_one_number_have_tokens_of_their_own(deployment, mariadb):
    """Two nodes of a cluster may have given them that."""
    async with deployment.connect() as client, deployment.connect() as other:
        first = await client.semaphore("x", 2).acquire(permits=2)
        waiters = [asyncio.create_task(each.semaphore("x", 2).acquire()) for each in (client, other)]
        await queued(client.semaphore("x", 2), 2)
        await as_root(mariadb, "UPDATE aiolock_requests SET arrival = 7 WHERE state = 0")
        await first.release()
        one, two = await asyncio.gather(*waiters)
        assert len({first.token, one.token, two.token}) == 3
        await one.release()
        await two.release()


async def test_a_hold_that_was_taken_away_before_it_was_known_is_asked_for_anew(deployment):
    """Between the grant and its arrival; the row says so until its term is over, and that is long."""
    async with deployment.connect(ttl=120) as client, deployment.connect(ttl=120) as rival:
        lease = await rival.rwlock("x").write().acquire()
        waiter = asyncio.create_task(client.rwlock("x").write().acquire())
        await queued(rival.rwlock("x").write(), 1)
        sharing = client._backend.mode.sharing
        client_id = sharing.context.client
        await as_root(
            deployment.server,
            f"UPDATE aiolock_requests SET state = 3 WHERE client = '{client_id}' AND state = 0",
        )
        await as_root(deployment.server, f"KILL IFNULL(IS_USED_LOCK('{presence(client_id)}'), 0)")
        await queued(rival.rwlock("x").write(), 1)
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()
