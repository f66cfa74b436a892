"""A program's own codecs are for its own values: nothing of ours is misread through them."""

from __future__ import annotations

import asyncio
import secrets

import asyncpg
import pytest

import aiolock
from aiolock import LockLost
from aiolock.postgresql import compare_and_set, fenced_update
from tests.faults.staging import until

TYPES = ["bool", "bytea", "float8", "int4", "int8", "json", "numeric", "oid", "text"]


def _raise(_):
    raise AssertionError("a value of ours came to a codec of the program")


CODECS = {
    "raising": (_raise, _raise),
    "blind": (lambda _: "", lambda _: None),
    "lying": (lambda _: "1", lambda _: "1"),
}


@pytest.fixture(params=CODECS)
async def mine(request, server):
    """A connection with codecs for everything that could be ours."""
    connection = await asyncpg.connect(server.url)
    encoder, decoder = CODECS[request.param]
    try:
        for name in TYPES:
            await connection.set_type_codec(name, schema="pg_catalog", encoder=encoder, decoder=decoder)
        yield connection
    finally:
        connection.terminate()


@pytest.fixture
async def plain(server):
    connection = await asyncpg.connect(server.url)
    yield connection
    await connection.close()


@pytest.fixture
async def client(server):
    async with aiolock.connect(
        server.url, namespace=secrets.token_hex(6), ttl=30, on_loss="signal"
    ) as opened:
        yield opened


async def test_a_lease_is_confirmed(client, mine, plain):
    lease = await client.lock("x").acquire()
    await mine.execute("BEGIN")
    await lease.confirm(mine)
    await mine.execute("COMMIT")
    async with plain.transaction():
        await plain.execute("SELECT FROM aiolock FOR UPDATE")
        await mine.execute("BEGIN")
        confirming = asyncio.create_task(lease.confirm(mine))
        await until(lambda: plain.fetchval("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"))
    await confirming
    await mine.execute("COMMIT")
    assert await client.lock("x").force_release()
    await mine.execute("BEGIN")
    with pytest.raises(LockLost):
        await lease.confirm(mine)


async def test_a_lock_is_taken_and_looked_back_at(client, mine, plain):
    lock, other = client.lock("x", connection=mine), client.lock("x", connection=plain)
    await plain.execute("BEGIN")
    await mine.execute("BEGIN")
    async with lock:
        assert not await other.try_acquire()
    await mine.execute("COMMIT")
    assert await other.try_acquire()
    await mine.execute("BEGIN")
    assert not await lock.try_acquire()
    waiting = asyncio.create_task(lock.acquire())
    await until(lambda: plain.fetchval("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"))
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    await plain.execute("COMMIT")
    with pytest.raises(LockLost):
        async with lock:
            await mine.execute("COMMIT; BEGIN")
    await mine.execute("COMMIT")


async def test_writes_of_the_helpers_count_and_compare(mine, plain):
    table = f"t{secrets.token_hex(6)}"
    await plain.execute(
        f"CREATE TABLE {table} (id date PRIMARY KEY, at date, version bigint DEFAULT 7, fence_token bigint DEFAULT 50)"
    )
    await plain.execute(f"INSERT INTO {table} VALUES ('2020-01-01')")
    one = await plain.fetchval(f"SELECT id FROM {table}")
    assert await compare_and_set(mine, table, {"id": one}, 7, {"at": one})
    assert not await compare_and_set(mine, table, {"id": one}, 7, {"at": one})
    assert await fenced_update(mine, table, {"id": one}, {"at": one}, token=2**62)
    assert not await fenced_update(mine, table, {"id": one}, {"at": one}, token=2**62 - 1)
    [row] = await plain.fetch(f"SELECT * FROM {table}")
    assert tuple(row) == (one, one, 8, 2**62)
    await plain.execute(f"DROP TABLE {table}")
