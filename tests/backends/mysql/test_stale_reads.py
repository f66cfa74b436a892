"""A transaction that has read before the lock was acquired sees old rows: nothing that it decides on them is committed unnoticed."""

from __future__ import annotations

import asyncio

import aiomysql
import pytest

from aiolock import BackendUnavailable
from aiolock.mysql import Conflict, compare_and_set, fenced_update
from tests.backends.mysql.conftest import PASSWORD
from tests.backends.mysql.tools import as_root

ISOLATION = ["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
SNAPSHOT = "REPEATABLE READ"
"""The one isolation level in which plain reads answer from a snapshot."""


@pytest.fixture
async def connect(deployment):
    """Connections of the application, with a counter."""
    opened = []

    async def one(isolation: str = SNAPSHOT):
        connection = await aiomysql.connect(
            host=deployment.server.host,
            port=deployment.server.port,
            user="app",
            password=PASSWORD,
            db="test",
            autocommit=False,
        )
        opened.append(connection)
        await run(connection, f"SET SESSION TRANSACTION ISOLATION LEVEL {isolation}")
        if await run(connection, "SHOW VARIABLES LIKE 'innodb_snapshot_isolation'"):
            # Where it is on the server itself refuses.
            await run(connection, "SET SESSION innodb_snapshot_isolation = OFF")
        await connection.rollback()
        return connection

    await as_root(
        deployment.server,
        "CREATE TABLE orders (id INT PRIMARY KEY, n INT NOT NULL, note INT NOT NULL DEFAULT 0, "
        "version INT NOT NULL DEFAULT 0, fence_token BIGINT UNSIGNED NOT NULL DEFAULT 0)",
    )
    await as_root(deployment.server, "INSERT INTO orders (id, n) VALUES (1, 0), (2, 0)")
    yield one
    for connection in opened:
        connection.close()
    await as_root(deployment.server, "DROP TABLE orders")


@pytest.fixture
async def client(deployment):
    async with deployment.connect(ttl=30, on_loss="signal") as opened:
        yield opened


@pytest.fixture
async def rival(deployment):
    async with deployment.connect(ttl=30, on_loss="signal") as opened:
        yield opened


async def run(connection, statement: str) -> tuple:
    async with connection.cursor() as cursor:
        await cursor.execute(statement)
        return await cursor.fetchall()


async def counted(connection, columns: str = "n", number: int = 1) -> tuple:
    [row] = await run(connection, f"SELECT {columns} FROM orders WHERE id = {number}")
    return row


def lock(client, kind: str):
    return client.lock("x") if kind == "mutex" else client.rwlock("x").write()


@pytest.mark.parametrize("isolation", ISOLATION)
@pytest.mark.parametrize("kind", ["mutex", "write"])
async def test_a_count_is_not_confirmed_on_what_was_read_before_the_lock(
    client, rival, connect, kind, isolation
):
    """Two turns end with 2, or the second one is told to begin again."""
    mine, other = await connect(isolation), await connect(isolation)
    await mine.begin()
    if isolation == SNAPSHOT:
        await counted(mine, number=2)
    async with lock(rival, kind) as lease:
        await other.begin()
        await run(other, "UPDATE orders SET n = 1 WHERE id = 1")
        await lease.confirm(other)
        await other.commit()
    async with lock(client, kind) as lease:
        [n] = await counted(mine)
        if isolation == SNAPSHOT:
            assert n == 0
            with pytest.raises(BackendUnavailable, match="READ COMMITTED"):
                await lease.confirm(mine)
            await mine.rollback()
            await mine.begin()
            [n] = await counted(mine)
        assert n == 1
        await run(mine, f"UPDATE orders SET n = {n + 1} WHERE id = 1")
        await lease.confirm(mine)
        await mine.commit()
    assert await counted(other) == (2,)


@pytest.mark.parametrize("isolation", ISOLATION)
@pytest.mark.parametrize("kind", ["mutex", "write"])
@pytest.mark.parametrize("reads", [True, False])
async def test_a_count_is_not_confirmed_on_what_was_read_before_a_hand_over_inside_the_client(
    client, connect, monkeypatch, kind, isolation, reads
):
    """The task before had the lock by the same grant, and has committed without a confirmation."""
    # A slow machine takes longer than a client hands a lock over inside while it cannot know whether others wait.
    monkeypatch.setattr("aiolock.backends.mysql.context.ALONE", 60.0)
    mine, other = await connect(isolation), await connect(isolation)
    lease = await lock(client, kind).acquire()
    following = asyncio.create_task(lock(client, kind).acquire())
    await asyncio.sleep(0)
    await mine.begin()
    if isolation == SNAPSHOT and reads:
        await counted(mine, number=2)
    await run(other, "UPDATE orders SET n = 1 WHERE id = 1")
    await other.commit()
    await lease.release()
    async with await following as lease:
        assert client.stats()["passed"] == 1
        if isolation == SNAPSHOT and reads:
            assert await counted(mine) == (0,)
            with pytest.raises(BackendUnavailable, match="fair=True"):
                await lease.confirm(mine)
            await mine.rollback()
            await mine.begin()
        # One that has read no row before has a snapshot that is young enough.
        await lease.confirm(mine)
        assert await counted(mine) == (1,)
        await mine.commit()


@pytest.mark.parametrize("isolation", ISOLATION)
async def test_a_fenced_update_is_refused_on_what_was_read_before_the_last_one(connect, isolation):
    mine, other = await connect(isolation), await connect(isolation)
    await mine.begin()
    if isolation == SNAPSHOT:
        await counted(mine, number=2)
    assert await fenced_update(other, "orders", {"id": 1}, {"n": 1}, token=7)
    await other.commit()
    [n] = await counted(mine)
    if isolation == SNAPSHOT:
        assert n == 0
        with pytest.raises(Conflict, match="READ COMMITTED"):
            await fenced_update(mine, "orders", {"id": 1}, {"n": n + 1}, token=8)
        await mine.rollback()
        await mine.begin()
        [n] = await counted(mine)
    assert n == 1
    assert await fenced_update(mine, "orders", {"id": 1}, {"n": n + 1}, token=8)
    # The transaction sees what it has written itself.
    assert await fenced_update(mine, "orders", {"id": 1}, {"note": 1}, token=8)
    await mine.commit()
    assert await counted(other, "n, note, fence_token") == (2, 1, 8)


@pytest.mark.parametrize("isolation", ISOLATION)
async def test_a_version_that_was_read_before_a_change_is_refused(connect, isolation):
    mine, other = await connect(isolation), await connect(isolation)
    await mine.begin()
    if isolation == SNAPSHOT:
        await counted(mine, number=2)
    assert await compare_and_set(other, "orders", {"id": 1}, 0, {"n": 1})
    await other.commit()
    n, version = await counted(mine, "n, version")
    if isolation == SNAPSHOT:
        assert (n, version) == (0, 0)
        assert not await compare_and_set(mine, "orders", {"id": 1}, version, {"n": n + 1})
        await mine.rollback()
        await mine.begin()
        n, version = await counted(mine, "n, version")
    assert await compare_and_set(mine, "orders", {"id": 1}, version, {"n": n + 1})
    await mine.commit()
    assert await counted(other, "n, version") == (2, 2)
