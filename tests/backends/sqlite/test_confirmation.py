"""`lease.confirm(connection)`: what a transaction writes is committed before a later holder, or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import suppress
from subprocess import run

import pytest

import aiolock
import aiolock.portal
from aiolock import BackendUnavailable, ConfigError, LockLost, UnsupportedKind


def connect(path, **options):
    return aiolock.connect(f"sqlite://{path}", **{"ttl": 30.0, "on_loss": "signal", **options})


@pytest.fixture
def database(path):
    """A connection of the application to the file of the locks, which has a table of its own."""
    connection = sqlite3.connect(path, isolation_level=None)
    yield connection
    connection.close()


@pytest.fixture
async def client(path):
    async with connect(path) as opened:
        yield opened


@pytest.fixture
async def rival(path):
    async with connect(path) as opened:
        yield opened


def work(connection):
    [[count]] = connection.execute("SELECT count(*) FROM work")
    return count


async def test_no_other_client_enters_before_the_commit(client, rival, database, path):
    database.execute("CREATE TABLE work (n INT)")
    lease = await client.lock("x").acquire()
    database.execute("BEGIN IMMEDIATE")
    database.execute("INSERT INTO work VALUES (1)")
    await lease.confirm(database)
    taking = asyncio.create_task(rival.lock("x").force_release())
    await asyncio.sleep(1)
    assert not taking.done()
    database.execute("COMMIT")
    assert await taking
    other = sqlite3.connect(path)
    assert work(other) == 1
    other.close()
    database.execute("BEGIN IMMEDIATE")
    with pytest.raises(LockLost):
        await lease.confirm(database)
    database.execute("ROLLBACK")
    assert lease.lost


@pytest.mark.parametrize("how", ["replaced", "deleted", "replaced by a copy"])
async def test_a_connection_to_a_file_that_was_replaced_confirms_nothing(client, database, path, how):
    """Its file shows the hold, and its path leads to the file of the locks; a later holder uses another file."""
    lease = await client.lock("x").acquire()
    database.execute("BEGIN IMMEDIATE")
    if how == "replaced by a copy":
        # By another process: this one would lose its locks of the file.
        await asyncio.to_thread(run, ["cp", path, path.with_name("copy")], check=True)
        path.with_name("copy").replace(path)
    else:
        for each in path.parent.glob("locks.db*"):
            each.unlink()
        if how == "replaced":
            sqlite3.connect(path).close()
    with pytest.raises(ConfigError if how == "deleted" else LockLost):
        await lease.confirm(database)
    database.execute("ROLLBACK")
    with suppress(LockLost):
        await lease.release()


async def test_a_transaction_that_only_reads_is_made_one_that_writes(client, rival, database):
    lease = await client.lock("x").acquire()
    database.execute("BEGIN")
    await lease.confirm(database)
    taking = asyncio.create_task(rival.lock("x").force_release())
    await asyncio.sleep(0.5)
    assert not taking.done()
    database.execute("COMMIT")
    assert await taking
    await lease.release()


async def test_a_transaction_with_an_old_snapshot_or_beside_a_writer_is_to_begin_again(
    client, database, path
):
    [[patience]] = database.execute("PRAGMA busy_timeout")
    lease = await client.lock("x").acquire()
    database.execute("BEGIN")
    database.execute("SELECT * FROM aiolock").fetchall()
    await (await client.lock("y").acquire()).release()
    with pytest.raises(BackendUnavailable, match="BEGIN IMMEDIATE"):
        await lease.confirm(database)
    database.execute("ROLLBACK")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    database.execute("BEGIN")
    with pytest.raises(BackendUnavailable, match="BEGIN IMMEDIATE"):
        # At once: the event loop does not wait.
        await lease.confirm(database)
    other.execute("ROLLBACK")
    other.close()
    await lease.confirm(database)
    database.execute("ROLLBACK")
    assert lease.held
    assert database.execute("PRAGMA busy_timeout").fetchall() == [(patience,)]
    await lease.release()


async def test_a_transaction_is_not_confirmed_on_what_it_cannot_see(client, database, path, monkeypatch):
    """Its snapshot is older than what the holder before, a task of the same client, has committed without a confirmation."""
    # A slow disk takes longer than a client hands a lock over inside while it cannot know whether others wait.
    monkeypatch.setattr("aiolock.backends.rows.context.ALONE", 60.0)
    await (await client.lock("x").acquire()).release()
    database.execute("CREATE TABLE work (n INT)")
    other = sqlite3.connect(path, isolation_level=None)
    lease = await client.lock("x").acquire()
    following = asyncio.create_task(client.lock("x").acquire())
    await asyncio.sleep(0)
    database.execute("BEGIN")
    assert work(database) == 0
    other.execute("INSERT INTO work VALUES (0)")
    other.close()
    await lease.release()
    lease = await following
    assert client.stats()["passed"] == 1
    assert work(database) == 0
    with pytest.raises(BackendUnavailable, match="BEGIN IMMEDIATE"):
        await lease.confirm(database)
    database.execute("ROLLBACK")
    database.execute("BEGIN")
    assert work(database) == 1
    await lease.confirm(database)
    database.execute("COMMIT")
    await lease.release()


async def test_a_hold_of_every_kind_can_be_confirmed(client, rival, database):
    name = "order:42 🔒"
    database.row_factory = sqlite3.Row
    database.text_factory = bytes
    async with (
        client.lock(name) as lock,
        client.reentrant_lock("again") as outer,
        client.rwlock(name).read() as reader,
        rival.rwlock(name).read() as other_reader,
        client.semaphore(name, 3) as permit,
        aiolock.lock_all(client.lock("a"), client.lock("b")) as joint,
        client.election(name).campaign() as term,
    ):
        database.execute("BEGIN IMMEDIATE")
        for lease in (lock, outer, reader, other_reader, permit, joint, term):
            await lease.confirm(database)
        database.execute("COMMIT")


async def test_what_cannot_be_is_told(client, database, path, tmp_path):
    async with client.lock("x") as lease:
        with pytest.raises(RuntimeError, match="no transaction is open"):
            await lease.confirm(database)
        for connection in (None, object(), str(path)):
            with pytest.raises(ConfigError, match="sqlite3 or aiosqlite"):
                await lease.confirm(connection)
        for place in (":memory:", tmp_path / "other.db"):
            other = sqlite3.connect(place, isolation_level=None)
            other.execute(f"ATTACH '{path}' AS locks")
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(ConfigError, match="must be to the file of the locks"):
                await lease.confirm(other)
            other.close()
        with pytest.raises(RuntimeError, match="cannot be used now"):
            await lease.confirm(other)
        made = []

        def begin() -> None:
            made.append(sqlite3.connect(path, isolation_level=None))
            made[0].execute("BEGIN IMMEDIATE")

        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="cannot be used now"):
            await lease.confirm(made.pop())
        assert lease.held


async def test_a_symbolic_link_is_the_same_file(client, path, tmp_path):
    link = tmp_path / "link.db"
    link.symlink_to(path)
    other = sqlite3.connect(link, isolation_level=None)
    async with client.lock("x") as lease:
        other.execute("BEGIN IMMEDIATE")
        await lease.confirm(other)
        other.execute("ROLLBACK")
    other.close()


async def test_connections_of_aiosqlite_can_be_confirmed_on(client, rival, path):
    aiosqlite = pytest.importorskip("aiosqlite", reason="pip install --group test")
    async with aiosqlite.connect(path, isolation_level=None) as database:
        lease = await client.lock("x").acquire()
        with pytest.raises(RuntimeError, match="no transaction is open"):
            await lease.confirm(database)
        await database.execute("BEGIN IMMEDIATE")
        await lease.confirm(database)
        taking = asyncio.create_task(rival.lock("x").force_release())
        await asyncio.sleep(0.5)
        assert not taking.done()
        await database.commit()
        assert await taking
        await database.execute("BEGIN IMMEDIATE")
        with pytest.raises(LockLost):
            await lease.confirm(database)
        await database.rollback()
    second = await client.lock("y").acquire()
    with pytest.raises(RuntimeError, match="cannot be used now"):
        await second.confirm(database)
    await second.release()


def test_a_thread_confirms_in_its_own_transaction(path):
    with (
        aiolock.portal.connect(f"sqlite://{path}") as client,
        aiolock.portal.connect(f"sqlite://{path}") as rival,
    ):
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        database.execute("CREATE TABLE work (n INT)")
        lease = client.lock("x").acquire()
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO work VALUES (1)")
        lease.confirm(database)
        taking = threading.Thread(target=rival.lock("x").force_release)
        taking.start()
        taking.join(0.5)
        assert taking.is_alive()
        database.execute("COMMIT")
        taking.join()
        assert work(database) == 1
        database.execute("BEGIN IMMEDIATE")
        with pytest.raises(LockLost):
            lease.confirm(database)
        database.execute("ROLLBACK")
        assert lease.lost
        database.close()


def test_a_thread_hears_which_connection_it_can_confirm_on(path):
    with aiolock.portal.connect(f"sqlite://{path}") as client, client.lock("x") as lease:
        database = sqlite3.connect(path, isolation_level=None)
        database.execute("BEGIN IMMEDIATE")
        with pytest.raises(RuntimeError, match="check_same_thread=False"):
            lease.confirm(database)
        database.execute("ROLLBACK")
        with pytest.raises(ConfigError, match=r"sqlite3.*asynchronous drivers"):
            lease.confirm(object())
        with pytest.raises(UnsupportedKind, match="asynchronous drivers"):
            client.lock("y", connection=database)
        database.close()
