"""The promises of a row store, kept by files: compare-and-set, reads, hints, purge, cancellation."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading

import pytest

from aiolock.backends.rows.store import Edit
from aiolock.errors import BackendUnavailable
from tests.backends.sqlite.conftest import Opened, until


async def test_a_row_is_written_only_against_its_version(make):
    store = await make()
    assert await store.read("test:a") == (b"", "")
    assert await store.insert("test:a", b"one", "v1")
    assert not await store.insert("test:a", b"two", "v2")
    assert not await store.update("test:a", "v2", "v3", b"three")
    assert await store.read("test:a") == (b"one", "v1")
    assert await store.update("test:a", "v1", "v4", b"four")
    assert await store.read("test:a") == (b"four", "v4")
    assert await store.compare_and_set([Edit("test:a", "v1", "", None)]) == [None]
    [gone] = await store.compare_and_set([Edit("test:a", "v4", "", None)])
    assert gone.version == ""
    assert await store.read("test:a") == (b"", "")
    assert not await store.update("test:a", "v4", "v5")


async def test_a_row_without_a_version_is_no_row(make, path):
    store = await make()
    await store.insert("test:a", b"one", "v1")
    with sqlite3.connect(path) as other:
        other.execute("UPDATE aiolock SET version = ''")
    other.close()
    assert await store.read("test:a") == (b"", "")
    assert [key async for key, _ in store.scan("test:")] == []
    assert await store.insert("test:a", b"two", "v2")
    assert not await store.insert("test:a", b"three", "v3")
    assert await store.read("test:a") == (b"two", "v2")


async def test_an_edit_that_fails_does_not_undo_the_others(make):
    store, other = await make(), await make()
    await store.insert("test:a", version="v1")
    edits = [
        Edit("test:a", "v0", "v2", b"x"),
        Edit("test:b", "", "v3", b"y"),
        Edit("test:c", "v0", "v4", b"z"),
    ]
    failed, made, missing = await store.compare_and_set(edits)
    assert (failed, made.version, missing) == (None, "v3", None)
    assert [row.version for row in await other.get(["test:a", "test:b", "test:c"])] == ["v1", "v3", ""]


async def test_many_rows_are_read_in_the_order_of_their_keys(make):
    store = await make()
    keys = [f"test:{number}" for number in range(1_300)]
    await store.compare_and_set([Edit(key, "", f"v{key}", key.encode()) for key in keys[::2]])
    rows = await store.get(keys[::-1])
    assert [row.value for row in rows[1::2]] == [key.encode() for key in keys[::2]][::-1]
    assert {row.version for row in rows[::2]} == {""}
    assert [(row.value, row.version) for row in await store.versions(keys)] == [
        (b"", row.version) for row in rows[::-1]
    ]


async def test_values_and_versions_are_bytes_and_keys_are_data(make):
    store = await make()
    keys = ["test:a_b", "test:a%b", "test:a*b", "test:A_b", "test:axb", "test:';--", "test:ab"]
    for key in keys:
        assert await store.insert(key, bytes(range(256)) + key.encode(), f"v{key}")
    for key in keys:
        assert await store.read(key) == (bytes(range(256)) + key.encode(), f"v{key}")
    assert [key async for key, _ in store.scan("test:a_")] == ["test:a_b"]
    assert sorted([key async for key, _ in store.scan("test:a")]) == sorted(
        key for key in keys if key[5] == "a"
    )


async def test_a_scan_goes_over_many_pages(make):
    store = await make()
    keys = [f"test:{number:05}" for number in range(1_300)]
    await store.compare_and_set([Edit(key, "", "v", key.encode()) for key in keys])
    await store.insert("other:1")
    await store.insert("tesu")
    assert [(key, row.value) async for key, row in store.scan("test:")] == [
        (key, key.encode()) for key in keys
    ]


async def test_purge_deletes_what_has_ended_and_nothing_else(make, path):
    store = await make()
    await store.insert("test:for ever", version="v1")
    await store.insert("test:long", version="v1", ttl=3_600)
    await store.compare_and_set([Edit(f"test:{number}", "", "v", b"", ttl=0) for number in range(1_200)])
    await store.insert("test:renewed", version="v1", ttl=0)
    await store.update("test:renewed", "v1", "v2")
    assert await store.purge("", 3_600) == 0
    spared = [f"test:{number}" for number in range(600, 610)]
    assert await store.purge("", 0, spared) == 1_190
    assert [key for key in spared if await store.read(key) != (b"", "")] == spared
    assert await store.purge("", 0) == 10
    assert [key async for key, _ in store.scan("")] == ["test:for ever", "test:long", "test:renewed"]


async def test_ticks_rise_and_the_clock_is_that_of_the_machine(make):
    store, other = await make(), await make()
    [first] = await store.get(["test:a"])
    [written] = await other.compare_and_set([Edit("test:a", "", "v1", b"")])
    [later] = await store.versions(["test:a"])
    assert 1_500_000_000_000_000 < first.tick <= written.tick <= later.tick
    assert first.clock.seconds <= written.clock.seconds <= later.clock.seconds
    assert len({(row.clock.boot, row.clock.zone) for row in (first, written, later)}) == 1
    assert len(first.clock.boot) == 36
    assert first.clock.zone.startswith("time:[")


# --- hints


async def test_changes_of_watched_rows_by_others_are_reported(make):
    store, other = await make(), await make()
    await store.insert("test:a", version="v1")
    await store.insert("test:b", version="v1")
    store.watch(frozenset({"test:a", "test:missing"}))
    await other.update("test:b", "v1", "v2")
    await other.update("test:a", "v1", "v2")
    await until(lambda: "test:a" in store.heard)
    assert set(store.heard) <= {"test:a", "test:missing"}
    await store.get(["test:a", "test:missing"])
    store.heard.clear()
    await other.insert("test:missing", version="v1")
    await until(lambda: "test:missing" in store.heard)
    assert set(store.heard) == {"test:missing"}


async def test_a_change_between_the_read_and_the_watch_is_reported(make):
    store, other = await make(), await make()
    await store.insert("test:a", version="v1")
    await other.update("test:a", "v1", "v2")
    await store.get(["test:b"])
    store.watch(frozenset({"test:a"}))
    await until(lambda: store.heard == ["test:a"])


async def test_own_writes_and_rows_that_are_no_longer_watched_are_not_reported(make):
    store, other = await make(), await make()
    await store.insert("test:a", version="v1")
    await store.insert("test:b", version="v1")
    store.watch(frozenset({"test:a"}))
    await store.update("test:a", "v1", "v2")
    store.watch(frozenset({"test:b"}))
    await other.update("test:a", "v2", "v3")
    await other.update("test:b", "v1", "v2")
    await until(lambda: store.heard)
    assert store.heard == ["test:b"]


async def test_a_busy_store_still_looks_for_changes(make):
    store, other = await make(), await make()
    await store.insert("test:a", version="v1")
    store.watch(frozenset({"test:a"}))

    async def keep_busy():
        while not store.heard:
            await store.get(["test:b"])

    busy = [asyncio.create_task(keep_busy()) for _ in range(4)]
    await other.update("test:a", "v1", "v2")
    await until(lambda: store.heard)
    await asyncio.gather(*busy)


# --- processes that write

COUNT = """
import asyncio, secrets, sys
from pathlib import Path
from tests.backends.sqlite.conftest import Opened
async def main():
    store = await Opened(Path(sys.argv[1])).begin()
    done = 0
    while done < int(sys.argv[2]):
        value, version = await store.read("test:counter")
        new = str(int(value or b"0") + 1).encode()
        done += await store.update("test:counter", version, secrets.token_hex(12), new, flush=False)
    await store.aclose()
    print("done")
asyncio.run(main())
"""


async def test_processes_that_create_the_file_and_count_in_it_together_lose_nothing(make, path, child):
    processes = [child(COUNT, path, 200) for _ in range(4)]
    for each in processes:
        assert await each.end() == "done\n"
    store = await make()
    assert (await store.read("test:counter"))[0] == b"800"


async def test_a_writer_that_is_killed_again_and_again_leaves_a_sound_file(make, path, child):
    store = await make()
    last = 0
    for _ in range(8):
        writer = child(COUNT, path, 1_000_000)
        before = last
        while last < before + 20:
            last = int((await store.read("test:counter"))[0] or b"0")
        writer.kill()
        value, version = await store.read("test:counter")
        assert await store.update("test:counter", version, f"after {value!r}", value)
        last = int(value)
    assert "ok" in {finding.level.value for finding in await store.diagnose() if finding.subject == "content"}


# --- cancellation, closing, forgetting


async def test_a_call_that_was_begun_is_carried_out_although_its_task_is_cancelled(make, path):
    store = await make()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    write = asyncio.create_task(store.insert("test:a", b"written", "v1"))
    await asyncio.sleep(0)
    await until(store._worker.jobs.empty)
    write.cancel()
    await asyncio.wait([write])
    assert write.cancelled()
    other.execute("COMMIT")
    other.close()
    assert await store.read("test:a") == (b"written", "v1")


async def test_cancelling_at_random_moments_mixes_up_no_answers(make):
    store = await make()
    for number in range(20):
        await store.insert(f"test:{number}", str(number).encode())
    for number in range(200):
        task = asyncio.create_task(store.read(f"test:{number % 20}"))
        for _ in range(number % 5):
            await asyncio.sleep(0)
        task.cancel()
        assert await store.read(f"test:{(number + 7) % 20}") == (str((number + 7) % 20).encode(), "v1")


async def test_closing_ends_the_thread_also_while_another_process_writes(make, path):
    store = await make()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    write = asyncio.create_task(store.insert("test:a"))
    await asyncio.sleep(0)
    await until(store._worker.jobs.empty)
    waiting = asyncio.create_task(store.read("test:a"))
    await asyncio.sleep(0)
    thread = store._worker.thread
    await store.aclose()
    assert not thread.is_alive()
    for task in (write, waiting):
        with pytest.raises(BackendUnavailable):
            await task
    with pytest.raises(BackendUnavailable, match="closed"):
        await store.read("test:a")
    await store.aclose()
    other.close()


async def test_opening_that_is_cancelled_leaves_no_thread(path):
    store = Opened(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    opening = asyncio.create_task(store.begin())
    await until(lambda: store._worker is not None)
    thread = store._worker.thread
    opening.cancel()
    await asyncio.wait([opening])
    await until(lambda: not thread.is_alive())
    other.close()


async def test_a_store_that_is_dropped_ends_its_thread(path):
    store = await Opened(path).begin()
    thread = store._worker.thread
    del store
    gc.collect()
    await until(lambda: not thread.is_alive())


def test_a_loop_that_is_closed_first_ends_the_thread(path):
    async def use() -> Opened:
        store = await Opened(path).begin()
        store.watch(frozenset({"test:a"}))
        return store

    store = asyncio.run(use())
    thread = store._worker.thread
    other = sqlite3.connect(path)
    other.execute("INSERT INTO aiolock VALUES ('test:a', 'v1', x'', NULL)")
    other.commit()
    other.close()
    thread.join(10)
    assert not thread.is_alive()
    assert thread not in threading.enumerate()


async def test_nothing_flushes_unless_it_is_asked_to(make):
    store = await make()
    levels = []
    for flush in (True, False, True, False, False, True):
        await store.compare_and_set([Edit(f"test:{len(levels)}", "", "v", b"", flush=flush)])
        levels += await store._ask(lambda connection: connection.run("PRAGMA synchronous"))
    assert levels == [(2,), (1,), (2,), (1,), (1,), (2,)]
