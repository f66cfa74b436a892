"""Locks in a file: holders that die, stand still or lose the file, and what decides about them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from subprocess import run

import pytest

import aiolock
from aiolock.backends.rows import engine, observer
from aiolock.backends.sqlite import connection
from aiolock.clock import system_clock, wall_clock
from aiolock.errors import LockLost, UnsafeBackend
from tests.backends.sqlite.conftest import until
from tests.faults.staging import in_line, queued
from tests.pace import pace

TTL = 4.0
"""Seconds of a holder in another process: a disk that others write to answers within a third of it."""

HOLD = """
import asyncio, sys
import aiolock
from datetime import UTC, datetime
async def main():
    async with aiolock.connect("sqlite://" + sys.argv[1], ttl=float(sys.argv[2])) as client:
        try:
            async with client.lock("x") as lease:
                print("inside", lease.token, flush=True)
                await asyncio.sleep(60)
        except aiolock.LockLost as error:
            print("lost", error.reason, flush=True)
asyncio.run(main())
"""


def connect(path: Path, **options):
    return aiolock.connect(f"sqlite://{path}", **{"ttl": 2.0, **options})


@pytest.fixture
def another_boot(tmp_path, monkeypatch):
    """What the kernel says after a reboot, to clients that connect from then on."""

    def reboot() -> None:
        file = tmp_path / "boot_id"
        file.write_text("00000000-1111-2222-3333-444444444444\n")
        monkeypatch.setattr(connection, "_BOOT", file)

    return reboot


async def test_a_holder_that_is_killed_is_followed_after_its_ttl_by_one_that_watched(path, child):
    holder = child(HOLD, path, TTL)
    assert (await holder.line()).startswith("inside")
    async with connect(path) as client:
        holder.kill()
        start = system_clock()
        async with client.lock("x", timeout=30):
            assert system_clock() - start < TTL + 10


async def test_the_log_tells_a_waiter_that_goes_on_because_a_hold_expired_from_one_that_follows_a_release(
    path, child, caplog
):
    def reasons() -> list[str]:
        lines = [each for each in caplog.records if each.getMessage().startswith("waiter for 'x'")]
        return [each.aiolock_reason for each in lines]

    holder = child(HOLD, path, TTL)
    assert (await holder.line()).startswith("inside")
    with caplog.at_level(logging.DEBUG, "aiolock.wait"):
        async with connect(path) as client, connect(path) as rival:
            waiting = asyncio.create_task(client.lock("x").acquire())
            await in_line(client)
            holder.kill()
            lease = await waiting
            assert reasons() == ["EXPIRED"]
            waiting = asyncio.create_task(rival.lock("x").acquire())
            await in_line(rival)
            await lease.release()
            await (await waiting).release()
            assert reasons() == ["EXPIRED", "GRANTED"]


async def test_a_holder_that_is_killed_is_followed_by_one_try_of_one_that_comes_later(path, child):
    holder = child(HOLD, path, TTL)
    word = await holder.line()
    holder.kill()
    await asyncio.sleep(TTL + 0.5)
    async with connect(path) as client:
        lease = await client.lock("x").try_acquire()
        assert lease is not None
        assert lease.token > int(word.split()[1])
        await lease.release()


async def test_a_holder_that_is_stopped_is_followed_and_told_when_it_goes_on(path, child):
    holder = child(HOLD, path, TTL)
    assert (await holder.line()).startswith("inside")
    os.kill(holder.pid, signal.SIGSTOP)
    async with connect(path) as client, client.lock("x", timeout=30):
        os.kill(holder.pid, signal.SIGCONT)
        assert (await holder.line()).startswith("lost")


async def test_after_a_reboot_nobody_is_waited_for(path, child, another_boot):
    holder = child(HOLD, path, 3_600.0)
    assert (await holder.line()).startswith("inside")
    holder.kill()
    async with connect(path) as client:
        assert await client.lock("x").try_acquire() is None
    another_boot()
    async with connect(path) as client:
        lease = await client.lock("x").try_acquire()
        assert lease is not None
        await lease.release()


async def taken(path: Path) -> bool:
    """Whether a client that is opened for it, tries once and leaves finds the lock taken, as a cron job does."""
    async with connect(path) as client:
        if (lease := await client.lock("x").try_acquire()) is not None:
            await lease.release()
        return lease is None


async def remaining(path: Path) -> float:
    async with connect(path) as client:
        [kept] = (await client.lock("x").inspect()).kept
        return (kept.until - datetime.now(UTC)).total_seconds()


@pytest.fixture
def pass_seconds(monkeypatch):
    """Let seconds pass by the clock of the machine, or by the wall clock; a client that is open notices a step."""

    def let(machine: float = 0.0, wall: float = 0.0) -> None:
        monkeypatch.setattr(connection, "system_clock", lambda: system_clock() + machine)
        monkeypatch.setattr(observer, "wall_clock", lambda: wall_clock() + wall)

    return let


@pytest.mark.parametrize("how", ["release", "once"])
async def test_a_reboot_ends_no_kept_time(path, another_boot, pass_seconds, how):
    ran = []
    async with connect(path) as client:
        if how == "release":
            await (await client.lock("x").acquire()).release(keep=3_600)
        else:
            assert not await client.once("x", at_most=3_600, at_least=3_600)(ran_by(ran))()
            assert ran == ["ran"]
    assert await taken(path)
    another_boot()
    assert 3_500 < await remaining(path) <= 3_600
    assert await taken(path)
    # The first try has written the end by the clock of this run of the machine, so the wall clock counts no more.
    pass_seconds(machine=3_500, wall=100_000)
    assert await taken(path)
    pass_seconds(machine=3_700, wall=3_700)
    if how == "once":
        async with connect(path) as client:
            await client.once("x", at_most=3_600, at_least=3_600)(ran_by(ran))()
        assert ran == ["ran", "ran"]
    else:
        assert not await taken(path)


def ran_by(ran: list[str]):
    async def job() -> None:
        ran.append("ran")

    return job


async def test_a_kept_time_that_ended_while_the_machine_was_off_is_over_at_once(
    path, another_boot, pass_seconds
):
    async with connect(path) as client:
        await (await client.lock("x").acquire()).release(keep=3_600)
    another_boot()
    pass_seconds(wall=3_601)
    assert not await taken(path)


async def test_a_wall_clock_that_stands_back_after_a_reboot_adds_no_more_than_the_kept_time(
    path, another_boot, pass_seconds
):
    async with connect(path) as client:
        await (await client.lock("x").acquire()).release(keep=3_600)
    another_boot()
    pass_seconds(wall=-1_000_000)
    assert await taken(path)
    pass_seconds(wall=-1_000_000, machine=3_500)
    assert await taken(path)
    pass_seconds(wall=-1_000_000, machine=3_700)
    assert not await taken(path)


async def test_a_waiter_follows_a_lock_that_was_kept_before_a_reboot_at_its_end(path, another_boot):
    async with connect(path) as client:
        begin = system_clock()
        await (await client.lock("x").acquire()).release(keep=3.0)
    another_boot()
    async with connect(path) as client, client.lock("x", timeout=30):
        assert system_clock() - begin >= 3.0


async def test_the_clock_of_another_time_namespace_is_not_believed(path, child, monkeypatch):
    """By that clock the holder's ttl has long been over: it is observed instead, and lives."""
    holder = child(HOLD, path, TTL)
    assert (await holder.line()).startswith("inside")
    boot, zone = connection.machine()
    monkeypatch.setattr(connection, "machine", lambda: (boot, f"not {zone}"))
    monkeypatch.setattr(connection, "system_clock", lambda: system_clock() + 100_000)
    async with connect(path) as client:
        with pytest.raises(aiolock.AcquireTimeout):
            await client.lock("x", timeout=TTL + 2).acquire()
        holder.kill()
        async with client.lock("x", timeout=30):
            pass


async def test_the_wall_clock_decides_about_no_hold(path, monkeypatch):
    async with connect(path) as client, connect(path) as rival, client.lock("x") as lease:
        now = connection.wall_clock
        monkeypatch.setattr(connection, "wall_clock", lambda: now() + 100_000)
        with pytest.raises(aiolock.AcquireTimeout):
            await rival.lock("x", timeout=1).acquire()
        assert lease.held


@pytest.mark.parametrize("how", ["deleted", "replaced", "a copy"])
async def test_a_file_that_goes_away_costs_its_holders_their_locks_within_a_renewal(path, how):
    async with connect(path) as client:
        start = system_clock()
        with pytest.raises(LockLost) as loss:
            async with client.lock("x", ttl=9.0):
                if how == "a copy":
                    # In which the hold stands: SQLite reads it together with the -wal beside it. The copy is made by another process:
                    # this one would lose its locks of the file.
                    await asyncio.to_thread(run, ["cp", path, path.with_name("copy")], check=True)
                    path.with_name("copy").replace(path)
                else:
                    for each in path.parent.glob("locks.db*"):
                        each.unlink()
                if how == "replaced":
                    path.touch()
                await asyncio.sleep(30)
        assert loss.value.reason == "revoked"
        assert system_clock() - start < 9.0
        # And goes on with the new one.
        async with client.lock("x", timeout=20), connect(path) as rival:
            assert await rival.lock("x").try_acquire() is None


async def test_a_waiter_goes_on_in_the_new_file(path):
    async with connect(path) as client, connect(path) as rival:
        lease = await rival.lock("x").acquire()
        waiting = asyncio.create_task(client.lock("x", timeout=30).acquire())
        await until(lambda: client._runtime.backend.store._worker.watched)
        for each in path.parent.glob("locks.db*"):
            each.unlink()
        await (await waiting).release()
        await lease.release()


async def test_two_namespaces_in_one_file_know_nothing_of_each_other(path):
    async with connect(path, namespace="one") as one, connect(path, namespace="two") as two, one.lock("x"):
        lease = await two.lock("x").acquire()
        assert [info.name for info in await one.locks()] == ["x"]
        assert await two.lock("x").force_release()
        await until(lambda: lease.lost)
        assert len((await one.lock("x").inspect()).holders) == 1


async def test_what_a_file_does_not_promise_is_refused(path, monkeypatch):
    monkeypatch.setattr(connection, "mount_of", lambda _: ("/", "ext4"))
    with pytest.raises(UnsafeBackend, match="push"):
        await connect(path, require={"push"}).open()
    async with connect(path, require={"exclusion", "fencing", "fifo", "keep", "survives-restart"}):
        pass
    monkeypatch.setattr(connection, "mount_of", lambda _: ("/run", "tmpfs"))
    with pytest.raises(UnsafeBackend, match="survives-restart"):
        await connect(path, require={"survives-restart"}).open()


def test_it_has_no_options():
    with pytest.raises(aiolock.ConfigError, match="no option mode"):
        aiolock.connect("sqlite:///tmp/x.db", mode="wal")


async def test_a_thousand_holds_are_renewed_by_one_write_and_verified_by_one_read(path):
    async with connect(path, ttl=600) as client:
        leases = [await client.lock(f"{number}").acquire() for number in range(1_000)]
        backend, statements = client._runtime.backend, []
        [session] = backend._engine.sessions.open.values()
        await backend.store._ask(lambda opened: opened._db.set_trace_callback(statements.append))
        await backend._engine.renew(session)
        await backend.store._ask(lambda opened: opened._db.set_trace_callback(None))
        kinds = [statement.partition(" ")[0] for statement in statements]
        assert sorted(kinds) == ["BEGIN", "COMMIT", "SELECT", "UPDATE"], statements
        assert all(lease.held for lease in leases)


async def test_more_names_can_be_asked_for_at_once_than_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "REMEMBERED_ROWS", 2)
    ttl = 6 * pace()
    async with aiolock.connect(f"sqlite:///{tmp_path}/locks.db", ttl=ttl) as client:
        leases = await asyncio.gather(*(client.lock(f"{number}").acquire() for number in range(8)))
        await until(lambda: client.stats()["renewals"] >= 2 * len(leases))
        assert all(lease.held for lease in leases)
        assert client.stats()["lost"] == 0


async def test_a_waiter_whose_row_another_program_has_rewritten_hears_it_and_no_other_waiter_does(tmp_path):
    path = tmp_path / "locks.db"
    async with connect(path) as client, connect(path) as other:
        leases = [await client.lock(name).acquire() for name in ("x", "y")]
        first, second = [asyncio.create_task(other.lock(name).acquire(timeout=60)) for name in ("x", "y")]
        await queued(client.lock("x"), 1)
        await queued(client.lock("y"), 1)
        with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as db:
            [[key]] = db.execute("SELECT key FROM aiolock WHERE key LIKE '%/l/%/x'")
            db.execute("UPDATE aiolock SET value = ?, version = 'other' WHERE key = ?", [b"9{}", key])
        with pytest.raises(UnsafeBackend, match="was not written by this version"):
            async with asyncio.timeout(15):
                await first
        assert not second.done()
        await leases[1].release()
        await (await second).release()
