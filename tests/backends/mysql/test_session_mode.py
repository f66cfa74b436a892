"""Holds that are a session's: how long it may be silent, that releases are not forgotten, and rows that are gone."""

from __future__ import annotations

import asyncio
import signal

import aiomysql
import pymysql
import pymysql.err
import pytest

import aiolock
from aiolock import BackendUnavailable, validation
from aiolock.backends.mysql.protocol import Wire
from tests.backends.mysql.test_faults import blocked, every_mode, session_of, spawn
from tests.backends.mysql.tools import as_root, sessions
from tests.faults.proxy import Proxy
from tests.faults.staging import PATIENCE, gets_the_lock, queued, until

by_session = pytest.mark.parametrize("mode", ["session", "row"])


async def silence_of(lease) -> int:
    """After how many seconds the server really ends the session."""
    [answer] = await session_of(lease).run("SELECT @@wait_timeout")
    return int(answer.rows[0][0])


# --- how long a session may be silent


@by_session
async def test_a_session_may_be_silent_for_as_long_as_its_hold_however_it_was_won(deployment, mode):
    async with deployment.connect(mode, ttl=5) as client, deployment.connect(mode) as rival:
        for ttl, seconds in ((1, 1), (60, 60), (2.5, 3), (5, 5), (1, 1)):
            lease = await client.lock("x", ttl=ttl).acquire()
            assert await silence_of(lease) == seconds
            await lease.release()
            held = await rival.lock("x").acquire()
            waiter = asyncio.create_task(client.lock("x", ttl=ttl).acquire())
            await until(lambda: blocked(deployment))
            await held.release()
            lease = await waiter
            assert await silence_of(lease) == seconds
            await lease.release()


@by_session
async def test_a_claim_that_was_cancelled_before_it_was_sent_leaves_no_wrong_belief(deployment, mode):
    async with deployment.connect(mode, ttl=1, command_timeout=10) as client:
        await gets_the_lock(client, "x")
        for passes in range(1, 8):
            look = asyncio.create_task(client.lock("other").inspect())
            await asyncio.sleep(0)
            claim = asyncio.create_task(client.lock("x", ttl=60).acquire())
            for _ in range(passes):
                await asyncio.sleep(0)
            claim.cancel()
            await asyncio.wait([look, claim])
            if not claim.cancelled():
                await claim.result().release()
            async with asyncio.timeout(PATIENCE):
                lease = await client.lock("x", ttl=60).acquire()
            assert await silence_of(lease) == 60
            await lease.release()


async def test_holds_of_one_ttl_share_a_session_and_the_cap_holds(deployment):
    async with deployment.connect("session", ttl=5, connections=2) as client:
        leases = [
            await client.lock(f"{ttl}-{number}", ttl=ttl).acquire()
            for number in range(10)
            for ttl in (30, 60)
        ]
        assert len(await sessions(deployment.server)) == 3
        with pytest.raises(BackendUnavailable, match="connections="):
            await client.lock("third", ttl=90).try_acquire()
        for lease in leases[::2]:
            await lease.release()
        # The session for a ttl that nobody uses any more makes room.
        third = await client.lock("third", ttl=90).acquire()
        assert await silence_of(third) == 90
        for lease in (third, *leases[1::2]):
            lease.check()
            await lease.release()


@by_session
async def test_a_stopped_holder_of_a_short_ttl_is_succeeded_soon_though_its_client_s_is_long(
    deployment, mode
):
    async with deployment.connect(mode, ttl=30) as client:
        process = await spawn(deployment, mode, "x", 30, 1)
        try:
            process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(15):
                await (await client.lock("x").acquire()).release()
        finally:
            process.kill()
            await process.wait()
            process._transport.close()


# --- releases


@pytest.mark.ends_server
async def test_a_release_that_could_not_be_sent_is_sent_later(mariadb, deployment):
    """The server stands still for longer than the ttl, and for longer than anybody tries."""
    async with (
        deployment.connect("session", ttl=30, command_timeout=0.3) as client,
        deployment.connect("session", ttl=30) as rival,
    ):
        leases = [await client.lock(name, ttl=ttl).acquire() for name, ttl in (("x", 1), ("y", 30))]
        kept = await client.lock("z", ttl=30).acquire()
        mariadb.freeze()
        try:
            for lease in leases:
                # Something is on its way already, and the release has to wait behind it.
                session_of(lease).send("DO 0")
                await asyncio.sleep(0)
                await lease.release()
            await asyncio.sleep(2.5)
        finally:
            mariadb.thaw()
        async with asyncio.timeout(PATIENCE):
            for name in "xy":
                await (await rival.lock(name).acquire()).release()
        kept.check()
        await kept.release()


async def test_a_release_that_was_cancelled_before_it_was_sent_is_sent(deployment):
    async with deployment.connect("session", ttl=30) as client, deployment.connect("session") as rival:
        for passes in range(1, 7):
            lease = await client.lock("x").acquire()
            look = asyncio.create_task(session_of(lease).run("SELECT SLEEP(0.05)"))
            await asyncio.sleep(0)
            claim = lease._hold.validity.claim
            giving = asyncio.create_task(claim.release())
            for _ in range(passes):
                await asyncio.sleep(0)
            giving.cancel()
            await asyncio.wait([look, giving])
            async with asyncio.timeout(PATIENCE):
                await (await rival.lock("x").acquire()).release()
            await lease.release()


@every_mode
async def test_a_release_that_the_server_undoes_once_is_done_all_the_same(deployment, mode, monkeypatch):
    async with deployment.connect(mode, ttl=60) as client, deployment.connect(mode) as rival:
        lease = await client.lock("x").acquire()
        undone = undo(monkeypatch, "owner = NULL" if mode == "lease" else ("RELEASE_LOCK", "ROLLBACK"))
        await lease.release()
        assert undone
        async with asyncio.timeout(PATIENCE):
            await (await rival.lock("x").acquire()).release()


def undo(monkeypatch, words: str | tuple[str, ...], times: int = 1) -> list[str]:
    """Have the next packets with such words end as they do when the server prefers another's."""
    real, undone = Wire.ask, []

    def ask(wire: Wire, packet: str, heard) -> None:
        if len(undone) >= times or not any(
            word in packet for word in ([words] if isinstance(words, str) else words)
        ):
            real(wire, packet, heard)
            return
        undone.append(packet)
        error = pymysql.err.OperationalError(1213, "Deadlock found when trying to get lock")
        # What stands before the statement that is undone was done.
        before = packet.split(";")[0] if "@turn" in packet else "DO 0"
        real(wire, before, lambda _: heard(error))

    monkeypatch.setattr(Wire, "ask", ask)
    return undone


async def test_an_entry_that_the_server_undoes_is_tried_again(deployment, monkeypatch):
    async with deployment.connect() as client, deployment.connect() as rival:
        undone = undo(monkeypatch, "ON DUPLICATE KEY", times=3)
        lease = await client.lock("x").acquire(timeout=PATIENCE)
        assert len(undone) == 3
        turnstile = lease._hold.validity.claim.turnstile
        waiters = [asyncio.create_task(rival.lock("x").acquire(timeout=PATIENCE)) for _ in range(3)]
        await queued(client.lock("x"), 1)
        undone.clear()
        await lease.release()
        for waiter in waiters:
            await (await waiter).release()
        assert len(undone) == 3
        # A user lock that was got twice would have to be given back twice.
        assert await as_root(deployment.server, f"SELECT IS_USED_LOCK('{turnstile}')") == ((None,),)


async def test_an_entry_that_is_undone_for_ever_is_unavailable(deployment, monkeypatch):
    async with deployment.connect(command_timeout=0.3) as client:
        with monkeypatch.context() as patch:
            undo(patch, "ON DUPLICATE KEY", times=1_000_000)
            with pytest.raises(BackendUnavailable) as caught:
                await client.lock("x").try_acquire()
            assert caught.value.retryable
        await gets_the_lock(client, "x")


# --- rows that are gone


async def test_a_row_that_was_deleted_is_made_anew_and_excludes(deployment):
    async with deployment.connect("row") as client, deployment.connect("row") as rival:
        for one in (client, rival):
            await gets_the_lock(one, "x")
        await delete_rows(deployment)
        lease = await client.lock("x").try_acquire()
        assert lease is not None
        assert await rival.lock("x").try_acquire() is None
        await lease.release()
        await gets_the_lock(rival, "x")


async def test_a_row_that_is_deleted_under_its_waiters_lets_in_one_after_the_other(deployment):
    async with (
        deployment.connect("row") as client,
        deployment.connect("row") as rival,
        deployment.connect("row") as third,
    ):
        inside, most = 0, 0

        async def one_row() -> bool:
            return await rows(deployment) == 1

        async def enter(one: aiolock.Client) -> None:
            nonlocal inside, most
            async with one.lock("x", timeout=PATIENCE):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0.3)
                # One that is gone excludes nobody as soon as the server has cleaned up.
                await until(one_row)
                inside -= 1

        lease = await client.lock("x").acquire()
        deletion = asyncio.create_task(delete_rows(deployment))
        await until(lambda: deleting(deployment))
        # Behind it: what they wait for is gone when it is their turn.
        waiters = [asyncio.create_task(enter(one)) for one in (rival, third)]
        await until(lambda: two_blocked(deployment))
        await lease.release()
        await deletion
        await asyncio.gather(*waiters)
        assert most == 1


async def two_blocked(deployment) -> bool:
    return len(await blocked(deployment)) == 2


async def deleting(deployment) -> bool:
    rows = await sessions(deployment.server, "root")
    return any(row[2] and row[2].startswith("DELETE") for row in rows)


async def rows(deployment) -> int:
    [[count]] = await as_root(
        deployment.server, f"SELECT COUNT(*) FROM aiolock WHERE namespace = '{deployment.namespace}'"
    )
    return count


async def delete_rows(deployment) -> None:
    await as_root(deployment.server, f"DELETE FROM aiolock WHERE namespace = '{deployment.namespace}'")


async def test_sessions_that_the_server_ended_unnoticed_are_replaced(deployment):
    """The loop was blocked in the meantime: nobody has heard of the ends yet."""
    async with deployment.connect("row") as client:
        leases = [await client.lock(f"x{number}").acquire() for number in range(3)]
        numbers = [session_of(lease).id for lease in leases]
        for lease in leases:
            await lease.release()
        server = deployment.server.admin
        options = {"database" if word == "db" else word: value for word, value in server.items()}
        with pymysql.connect(**options) as admin, admin.cursor() as cursor:
            for number in numbers:
                cursor.execute(f"KILL {number}")
        lease = await client.lock("x0").try_acquire()
        assert lease is not None
        assert session_of(lease).id not in numbers
        await lease.release()


async def test_a_server_that_is_away_is_named_also_by_a_lock_that_was_used_before(deployment):
    async with (
        Proxy(deployment.server.host, deployment.server.port) as proxy,
        deployment.connect("row", port=proxy.port) as client,
    ):
        await gets_the_lock(client, "x")
        proxy.stop_listening()
        proxy.reset_all()
        with pytest.raises(aiolock.BackendUnavailable):
            await client.lock("x").acquire(timeout=PATIENCE)
        await proxy.start_listening()
        await gets_the_lock(client, "x")


# --- purging


async def test_the_session_mode_has_no_rows_to_purge(deployment):
    async with deployment.connect("session") as client:
        with pytest.raises(aiolock.UnsupportedKind, match="mode=session"):
            await client._backend.purge(3600)


@pytest.mark.parametrize("mode", ["lease", "row"])
async def test_rows_are_purged_while_their_locks_go_from_hand_to_hand(deployment, mode, monkeypatch):
    monkeypatch.setattr(validation, "LEAST_IDLE", 0)
    inside: dict[str, int] = {}
    tokens: dict[str, list[int]] = {}
    purged = 0

    async def worker(client, name: str) -> None:
        while purged < 20:
            async with client.lock(name, timeout=PATIENCE) as lease:
                inside[name] = inside.get(name, 0) + 1
                assert inside[name] == 1
                tokens.setdefault(name, []).append(lease.token)
                await asyncio.sleep(0.002)
                lease.check()
                inside[name] -= 1
            await asyncio.sleep(0.03)

    async with (
        deployment.connect(mode) as one,
        deployment.connect(mode) as other,
        deployment.connect(mode) as third,
    ):
        workers = [
            asyncio.create_task(worker(client, f"x{number}"))
            for client in (one, other)
            for number in range(3)
            for _ in range(2)
        ]
        async with asyncio.timeout(PATIENCE):
            while purged < 20:
                purged += await third._backend.purge(0)
            await asyncio.gather(*workers)
    assert sum(map(len, tokens.values())) >= 20
    for given in tokens.values():
        assert given == sorted(set(given))


async def test_a_row_that_cannot_be_made_is_an_error_and_not_taken_for_a_held_lock(deployment):
    async with deployment.connect("row", command_timeout=PATIENCE) as client:
        await gets_the_lock(client, "y")
        admin = await aiomysql.connect(**{**deployment.server.admin, "db": "test"})
        try:
            async with admin.cursor() as cursor:
                await cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                await cursor.execute("BEGIN")
                # Every place for a row is locked as well.
                await cursor.execute("SELECT id FROM aiolock FOR UPDATE")
                assert await cursor.fetchall()
            with pytest.raises(BackendUnavailable, match="1205"):
                await client.lock("x").try_acquire()
            assert await client.lock("y").try_acquire() is None
        finally:
            await admin.rollback()
            await admin.ensure_closed()
        await gets_the_lock(client, "x")
