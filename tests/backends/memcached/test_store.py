"""The promises of a row store, kept by items: compare-and-set, reads, lists, expiry, ticks."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from itertools import pairwise

import pytest

from aiolock.backends.memcached import protocol
from aiolock.backends.memcached.store import TOKENS
from aiolock.backends.rows.store import MOST_KEY, MOST_VALUE, Edit, Row
from aiolock.errors import BackendUnavailable
from tests.backends.memcached.conftest import figure, opened, say
from tests.backends.stores import (  # noqa: F401 - tests
    absent,
    test_a_row_is_written_only_against_its_version,
    test_an_edit_that_fails_does_not_undo_the_others,
    test_an_insertion_sees_the_rows_of_other_clients,
)
from tests.faults.staging import until

ABSENT = Row(b"", "")


async def test_many_rows_are_read_in_the_order_of_their_keys(store, key):
    keys = [f"{key}{number}" for number in range(1_300)]
    made = await store.compare_and_set([Edit(each, "", "", each.encode()) for each in keys[::2]])
    rows = await store.get(keys[::-1])
    assert [row.value for row in rows[1::2]] == [each.encode() for each in keys[::2]][::-1]
    assert {row.version for row in rows[::2]} == {""}
    assert [row.version for row in await store.versions(keys[::2])] == [row.version for row in made]
    assert {row.value for row in await store.versions(keys)} == {b""}
    assert await store.get([]) == []


@pytest.mark.parametrize("length", [0, 1, 1_023, 1_024, 65_535, MOST_VALUE])
async def test_values_are_bytes_of_any_length(store, key, length):
    value = (bytes(range(256)) + b"\r\nEN\r\nVA 3 c1\r\n") * (length // 256 + 1)
    row = await store.insert(key, value[:length])
    assert await store.read(key) == row._replace(value=value[:length])


async def test_keys_are_data(store, key):
    keys = [
        f"{key}{end}" for end in ("a_b", "a%b", "a*b", "A_b", "a%0Ab", "a:b", "a'b", 'a"b', "a\\b", "a?b#")
    ]
    keys.append(key.ljust(MOST_KEY, "x"))
    for each in keys:
        await store.insert(each, each.encode())
    assert [row.value for row in await store.get(keys)] == [each.encode() for each in keys]
    assert {found: row.value async for found, row in store.scan(key)} == {
        each: each.encode() for each in keys
    }
    assert [found async for found, _ in store.scan(f"{key}a_")] == [f"{key}a_b"]


async def test_a_list_has_many_rows_and_only_those_of_the_prefix(store, key):
    keys = [f"{key}{number:05}" for number in range(1_300)]
    await store.compare_and_set([Edit(each, "", "", each.encode()) for each in keys])
    assert sorted([(found, row.value) async for found, row in store.scan(f"{key}")]) == [
        (each, each.encode()) for each in keys
    ]
    assert [found async for found, _ in store.scan(f"{key}x")] == []


async def test_clients_that_list_at_once_wait_for_each_other(store, key):
    await store.compare_and_set([Edit(f"{key}{number}", "", "", b"") for number in range(100)])

    async def count():
        return len([found async for found, _ in store.scan(key)])

    assert await asyncio.gather(*(count() for _ in range(8))) == [100] * 8


# --- expiry


async def test_a_row_lives_for_its_ttl_and_its_absence_shows_soon_afterwards(store, key):
    loop = asyncio.get_running_loop()
    for ttl in (0.2, 1.0, 1.7):
        # In the middle of a second of the server's clock: the row before was found absent as one began.
        await asyncio.sleep(0.5)
        sent = loop.time()
        await store.insert(f"{key}{ttl}", b"x", ttl=ttl)
        answered = loop.time()
        await until(partial(absent, store, f"{key}{ttl}"))
        assert loop.time() - sent >= ttl
        # Two seconds of the server's clock, and what a busy machine adds.
        assert loop.time() - answered < ttl + 3 + 10


async def test_a_row_lives_for_its_ttl_when_the_clock_of_the_server_skips_a_second(own, key):
    """Its ticks are more than a second apart, so that now and then the next but one whole second has begun at the next tick."""
    ttl, skipped = 1.0, False

    async def up_to(share: float) -> None:
        await asyncio.sleep((share - time.monotonic()) % 1)

    async with opened(own.port) as store:
        while not skipped:
            own.freeze()
            await asyncio.sleep(1)
            await up_to(0.85)
            own.thaw()  # a tick is due
            before = int(figure(own, "uptime"))
            await up_to(0.75)
            sent = time.monotonic()
            row = await store.insert(f"{key}{sent}", b"x", ttl=ttl)
            own.freeze()
            await up_to(0.02)
            own.thaw()
            skipped = int(figure(own, "uptime")) == before + 2
            there = await store.read(f"{key}{sent}")
            # On a busy machine it may be too late to say anything.
            skipped = skipped and time.monotonic() < sent + ttl
    assert there.version == row.version


async def test_a_write_replaces_the_ttl(store, key):
    row = await store.insert(key, b"x", ttl=0.2)
    await store.update(key, row.version, b"y")
    short = await store.insert(f"{key}b", b"x")
    await store.update(f"{key}b", short.version, b"y", ttl=0.2)
    await until(partial(absent, store, f"{key}b"))
    assert (await store.read(key)).value == b"y"


async def test_a_ttl_of_more_than_a_month_is_a_time_of_the_server(store, server, key):
    month = 30 * 86_400
    for days in (29, 31, 400, 40_000):
        await store.insert(f"{key}{days}", b"x", ttl=86_400.0 * days)
    await asyncio.sleep(0)
    lines = say(server, b"lru_crawler metadump hash\r\n", b"END\r\n").decode().splitlines()
    ends = {
        line.split()[0].rpartition("%2F")[2]: int(line.split()[1].removeprefix("exp="))
        for line in lines
        if key.rpartition("/")[2] in line
    }
    name, now = key.rpartition("/")[2], int(figure(server, "time"))
    for days in (29, 31, 400):
        assert 86_400 * days - 60 <= ends[f"{name}{days}"] - now <= 86_400 * days + 60
    assert ends[f"{name}40000"] == 2**31 - 1
    assert protocol.expiry(month - 2, 5e9) == month
    assert protocol.expiry(month, 1.5e9) == 1_500_000_000 + month + 2
    assert protocol.expiry(None, 0) == 0
    assert protocol.expiry(0.0001, 0) == 3


async def test_nothing_is_purged_by_clients(store, key):
    await store.insert(key, b"x")
    assert await store.purge("", 0) == 0
    assert (await store.read(key)).value == b"x"


# --- versions and ticks


async def test_ticks_rise_with_each_write_at_the_server(store, other, key):
    ticks = []
    for number in range(5):
        row = await (store, other)[number % 2].insert(f"{key}{number}")
        assert (await store.read(f"{key}{number}")).tick == row.tick
        ticks.append(row.tick)
    assert all(later - earlier >= TOKENS for earlier, later in pairwise(ticks))
    deleted = await store.insert(key)
    await store.compare_and_set([Edit(key, deleted.version, "", None)])
    assert (await store.insert(key)).tick >= deleted.tick + TOKENS
    assert (await store.read(f"{key}none")).tick == 0


async def test_ticks_begin_at_the_start_of_the_server(own):
    async with opened(own.port) as store:
        row = await store.insert("tests/a")
        assert row.tick // 1_000_000 == int(figure(own, "time")) - int(figure(own, "uptime"))
        for _ in range(200):
            later = await store.update("tests/a", row.version)
            row = later
        # Its clock has a resolution of a second.
        age = int(figure(own, "uptime"))
        await until(lambda: int(figure(own, "uptime")) >= age + 2)
        own.restart()
        await until(lambda: store.interruptions == 1)
        # A read waits for the next connection.
        assert (await store.read("tests/a")).version == ""
        assert (await store.insert("tests/a")).tick > row.tick


async def test_a_version_is_good_on_the_connection_only_that_read_it(own, key):
    async with opened(own.port) as store:
        for number in range(3):
            await store.insert(f"{key}{number}")
        old = await store.insert(key, b"old")
        own.restart()
        await until(lambda: store.interruptions == 1)
        assert await store.read(key) == ABSENT
        # The server counts as before: the new row has the same CAS id.
        async with opened(own.port) as other:
            for number in range(3):
                await other.insert(f"{key}{number}")
            new = await other.insert(key, b"new")
            assert new.version.partition(".")[2] == old.version.partition(".")[2]
        for edit in (Edit(key, old.version, "", b"mine"), Edit(key, old.version, "", None)):
            with pytest.raises(BackendUnavailable, match="on which this version was read"):
                await store.compare_and_set([Edit(f"{key}9", "", "", b"x"), edit])
        assert (await store.read(key)).value == b"new"
        assert await store.read(f"{key}9") == ABSENT


async def test_a_thousand_counters_lose_nothing(store, other, key):
    async def count(store):
        done = 0
        while done < 100:
            row = await store.read(key)
            value = str(int(row.value or b"0") + 1).encode()
            written = await (
                store.update(key, row.version, value) if row.version else store.insert(key, value)
            )
            done += written is not None

    await asyncio.gather(*(count(each) for each in (store, other) * 5))
    assert (await store.read(key)).value == b"1000"
