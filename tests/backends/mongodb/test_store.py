"""The promises of a row store, kept by documents of MongoDB: compare-and-set, reads, lists, expiry, ticks, clocks."""

from __future__ import annotations

import asyncio
import secrets
import time

import pytest

from aiolock import BackendRefused, BackendUnavailable, UnsafeBackend
from aiolock.backends.rows.store import MOST_KEY, MOST_VALUE, Edit
from tests.backends.mongodb.conftest import opened, through
from tests.backends.stores import (  # noqa: F401 - tests
    test_a_row_is_written_only_against_its_version,
    test_an_edit_that_fails_does_not_undo_the_others,
    test_an_insertion_sees_the_rows_of_other_clients,
)
from tests.faults.proxy import Proxy, mongodb_frames


async def test_the_version_of_a_row_is_the_one_that_its_writer_chose(store, other, key):
    [row] = await store.compare_and_set([Edit(key, "", "$chosen", b"one")])
    assert row.version == (await other.read(key)).version == "$chosen"
    [row] = await other.compare_and_set([Edit(key, "$chosen", "$$NOW", b"$two")])
    assert (await store.read(key))[:2] == (b"$two", "$$NOW")


async def test_many_first_writers_of_a_row_are_one(store, other, key):
    """A server may answer a race of insertions by an error or by nothing at all."""
    for number in range(20):
        rows = await asyncio.gather(
            *(each.change(f"{key}{number}", "", b"x") for each in (store, other) for _ in range(4))
        )
        made = [row.version for row in rows if row is not None]
        assert made == [(await store.read(f"{key}{number}")).version]


async def test_of_many_writers_against_one_version_one_succeeds(store, other, key):
    row = await store.change(key, "", b"0")
    for number in range(20):
        rows = await asyncio.gather(
            *(
                each.change(key, row.version, str(number).encode())
                for each in (store, other)
                for _ in range(4)
            )
        )
        [row] = [row for row in rows if row is not None]
        assert (await other.read(key)).version == row.version


async def test_more_rows_are_read_than_one_answer_has_in_the_order_of_their_keys(store, key):
    keys = [f"{key}{number}" for number in range(250)]
    made = await store.compare_and_set([Edit(each, "", each, each.encode()) for each in keys[::2]])
    rows = await store.get(keys[::-1])
    assert [row.value for row in rows[1::2]] == [each.encode() for each in keys[::2]][::-1]
    assert {row.version for row in rows[::2]} == {""}
    assert [row.version for row in await store.versions(keys[::2])] == [row.version for row in made]
    assert {row.value for row in await store.versions(keys)} == {b""}
    assert await store.get([]) == []
    assert [(found, row.value) async for found, row in store.scan(key)] == sorted(
        (each, each.encode()) for each in keys[::2]
    )
    assert [found async for found, _ in store.scan(f"{key}x")] == []


async def test_each_row_of_a_batch_is_no_older_than_the_sending_of_the_read(store, other, key):
    """MongoDB documents this for a read of one document; rows may be read at different moments, but none may be missed."""
    keys = [f"{key}{number:03}" for number in range(120)]
    made = {each: await other.insert(each, b"0") for each in keys[::10]}
    answered = dict.fromkeys(made, 0)

    async def write(each):
        row = made[each]
        for number in range(1, 25):
            row = await other.update(each, row.version, str(number).encode())
            answered[each] = number

    writers, reads = [asyncio.create_task(write(each)) for each in made], 0
    while not all(writer.done() for writer in writers):
        before = dict(answered)
        rows = dict(zip(keys, await store.get(keys), strict=True))
        assert [each for each in keys if rows[each].version] == list(made)
        assert [each for each in made if int(rows[each].value) < before[each]] == []
        reads += 1
    await asyncio.gather(*writers)
    assert reads > 3


async def test_a_batch_of_reads_is_one_request(server, key):
    requests = []

    def noted(direction, frame):
        if direction == "up" and b"aggregate" in frame:
            requests.append(frame)

    port = int(server.url.partition("127.0.0.1:")[2].partition("/")[0])
    async with (
        Proxy("127.0.0.1", port, framing=mongodb_frames, on_frame=noted) as proxy,
        opened(through(server.url, proxy.port)) as store,
    ):
        await store.get([f"{key}{number}" for number in range(90)])
        await store.versions([f"{key}{number}" for number in range(90)])
    assert len(requests) == 2
    assert all(b"linearizable" in request for request in requests)


async def test_a_write_waits_for_the_journals_of_a_majority_and_carries_no_number_of_a_retry(server, key):
    writes = []

    def noted(direction, frame):
        if direction == "up" and b"findAndModify" in frame:
            writes.append(frame)

    port = int(server.url.partition("127.0.0.1:")[2].partition("/")[0])
    async with (
        Proxy("127.0.0.1", port, framing=mongodb_frames, on_frame=noted) as proxy,
        opened(through(server.url, proxy.port)) as store,
    ):
        row = await store.change(key, "", b"x")
        await store.change(key, row.version, None)
    assert len(writes) == 3  # with that at open
    for write in writes:
        assert b"\x02w\0\x09\0\0\0majority\0\x08j\0\x01" in write
        assert b"txnNumber" not in write


@pytest.mark.parametrize("length", [0, 1, 16_383, 65_535, MOST_VALUE])
async def test_values_are_bytes_of_any_length(store, key, length):
    value = (bytes(range(256)) * (length // 256 + 1))[:length]
    row = await store.change(key, "", value)
    assert (await store.read(key))[:2] == (value, row.version)


async def test_many_long_values_are_written_and_read_at_once(store, key):
    values = {f"{key}{number}": secrets.token_bytes(MOST_VALUE) for number in range(40)}
    await store.compare_and_set([Edit(each, "", each, value) for each, value in values.items()])
    assert [row.value for row in await store.get(list(values))] == list(values.values())


async def test_keys_are_data(store, key):
    keys = [
        f"{key}{end}"
        for end in ("a_b", "a%b", "a*b", "A_b", "a.b", "a$b", "a'b", 'a"b', "a\\b", "a?b#", "a~", "$set")
    ]
    keys.append(key.ljust(MOST_KEY, "x"))
    for each in keys:
        await store.change(each, "", each.encode())
    assert [row.value for row in await store.get(keys)] == [each.encode() for each in keys]
    assert {found: row.value async for found, row in store.scan(key)} == {
        each: each.encode() for each in keys
    }
    assert [found async for found, _ in store.scan(f"{key}a_")] == [f"{key}a_b"]
    assert [found async for found, _ in store.scan(f"{key}a_b")] == [f"{key}a_b"]


async def test_ticks_rise_with_each_write_and_over_deletions(store, other, key):
    ticks = []
    for _ in range(3):
        row = await store.change(key, "")
        ticks += [row.tick]
        await other.change(f"{key}{len(ticks)}", "")
        gone = await store.change(key, row.version, None)
        ticks += [gone.tick]
        # An absent row as well, read after that.
        ticks += [(await other.read(key)).tick + 1]
    assert all(before < after for before, after in zip(ticks[::3], ticks[1::3], strict=True))
    assert all(before <= after - 1 for before, after in zip(ticks[1::3], ticks[2::3], strict=True))
    assert all(before <= after for before, after in zip(ticks[2::3], ticks[3::3], strict=False))


async def test_each_answer_to_a_read_has_the_clock_of_the_server(store, key):
    before = await store.read(key)
    await asyncio.sleep(0.3)
    await store.change(key, "")
    for row in [*await store.get([key]), *await store.versions([f"{key}2"])]:
        assert 0.29 < row.clock.seconds - before.clock.seconds < 60
        assert abs(row.clock.seconds - time.time()) < 60


# --- expiry


async def test_rows_are_purged_after_their_ttl_and_not_before(store, other, key):
    await store.change(f"{key}a", "", b"x", ttl=0.1)
    await store.change(f"{key}b", "", b"x", ttl=60)
    row = await store.change(f"{key}c", "", b"x", ttl=0.1)
    await store.change(f"{key}c", row.version, b"used again")
    await store.compare_and_set([Edit(f"{key}{number:03}", "", "v", b"", 0.1) for number in range(120)])
    await asyncio.sleep(0.2)
    assert await other.purge(key, 30) == 0
    assert await other.purge(f"{key}11", 0, [f"{key}110"]) == 9
    assert await other.purge(f"{key}11", 0) == 1
    assert await other.purge(key, 0) == 111
    assert [found async for found, _ in store.scan(key)] == [f"{key}b", f"{key}c"]
    assert (await store.read(f"{key}a")).version == ""


# --- what other programs do to the collection


async def test_a_collection_that_is_dropped_is_told_until_a_client_is_opened(server, key):
    """A write would make the collection again, as if nothing had been in it."""
    async with opened(server.url, "dropped") as store:
        await store.change(key, "")
        server.ask({"drop": "dropped"})
        for ask in (store.get, store.versions):
            with pytest.raises(
                BackendRefused, match="dropped was dropped or emptied, and its locks are void"
            ):
                await ask([key])
        await store.change(f"{key}2", "")
        with pytest.raises(BackendRefused, match="dropped or emptied"):
            await store.read(key)
        async with opened(server.url, "dropped"):
            assert (await store.read(key)).version == ""
            assert (await store.read(f"{key}2")).version


async def test_a_collection_of_another_format_is_refused(server):
    async with opened(server.url, "formats") as store:
        change = {"q": {"_id": "aiolock"}, "u": {"$set": {"format": 47}}}
        server.ask({"update": "formats", "updates": [change]})
        with pytest.raises(UnsafeBackend, match="has the format 47, and this library writes format 1"):
            await store.read("x")
        with pytest.raises(UnsafeBackend, match="has the format 47"):
            async with opened(server.url, "formats"):
                pass
    server.ask({"drop": "formats"})


async def test_a_value_of_another_type_concerns_one_row(server, store, key):
    await store.change(f"{key}a", "", b"x")
    server.ask({"insert": "aiolock", "documents": [{"_id": f"{key}b", "v": "v", "d": "text"}]})
    assert [row.value for row in await store.get([f"{key}a", f"{key}b"])] == [b"x", b"'text'"]


# --- lost answers and connections


async def test_a_lost_answer_is_an_error_and_the_write_was_made_once(server, key):
    port = int(server.url.partition("127.0.0.1:")[2].partition("/")[0])
    async with (
        Proxy("127.0.0.1", port, framing=mongodb_frames) as proxy,
        opened(through(server.url, proxy.port)) as store,
    ):
        row = await store.change(key, "", b"1")
        lost = proxy.down.drop_next(1, lambda frame: b"lastErrorObject" in frame, reset=True)
        edit = Edit(key, row.version, "second", b"2")
        with pytest.raises(BackendUnavailable):
            await store.compare_and_set([edit])
        assert lost.is_set()
        assert store.interruptions
        assert (await store.read(key))[:2] == (b"2", "second")
        # A copy of it finds another version.
        assert await store.compare_and_set([edit]) == [None]


async def test_a_write_during_which_a_connection_is_lost_raises_and_a_read_does_not(store, other, key):
    """What it relies on was read before."""
    await store.change(key, "", b"0")
    writing = asyncio.ensure_future(store.compare_and_set([Edit(f"{key}2", "", "v", b"x")]))
    reading = asyncio.ensure_future(store.read(key))
    # Passes of the loop and no time, in which the server would answer.
    for _ in range(100):
        if len(store._connection._tasks) == 2:
            break
        await asyncio.sleep(0)
    store._connection._lost()
    with pytest.raises(BackendUnavailable, match="a connection was lost meanwhile"):
        await writing
    assert (await reading).value == b"0"
    assert store.interruptions == 1
    assert (await other.read(f"{key}2")).version == "v"


async def test_a_cancelled_call_keeps_its_connection(store, key):
    row = await store.change(key, "", b"0")
    for number in range(20):
        writing = asyncio.ensure_future(store.change(key, row.version, b"%d" % number))
        await asyncio.sleep(0.0005 * number)
        writing.cancel()
        await asyncio.wait([writing])
        if not writing.cancelled():
            row = writing.result() or row
        row = await store.read(key)
    assert store.interruptions == 0
