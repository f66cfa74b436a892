"""Rows in a table: every rule of the store that a live server can show."""

from __future__ import annotations

import asyncio
import secrets
import time

import pytest

from aiolock.backends.postgresql import store as module
from aiolock.backends.rows.pipeline import MOST_ITEMS
from aiolock.backends.rows.store import ALL, MOST_VALUE, Row
from aiolock.errors import BackendUnavailable
from tests.backends.postgresql.tools import Heard, edit, key, opened, put


async def until(condition, seconds=10.0):
    """Wait for a condition of this loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met"
        await asyncio.sleep(0.005)


# --- compare-and-set


async def test_an_edit_is_made_against_its_version_only(url):
    async with opened(url) as store:
        one = key()
        [made] = await store.compare_and_set([edit(one, "", "v1", b"a")])
        assert made.version == "v1"
        assert await store.compare_and_set([edit(one, "", "v2", b"b")]) == [None]
        assert await store.compare_and_set([edit(one, "v0", "v2", b"b")]) == [None]
        [made] = await store.compare_and_set([edit(one, "v1", "v2", b"b")])
        assert made.version == "v2"
        [row] = await store.get([one])
        assert (row.value, row.version) == (b"b", "v2")


async def test_an_absent_row_has_no_version_and_a_clock_all_the_same(url):
    async with opened(url) as store:
        [row] = await store.get([key()])
        assert row.value == b""
        assert row.version == ""
        assert row.tick > 1_600_000_000_000_000
        assert row.clock.seconds == pytest.approx(row.tick / 1e6)


async def test_a_row_is_deleted_by_its_version_only(url):
    async with opened(url) as store:
        one = key()
        version = await put(store, one)
        assert await store.compare_and_set([edit(one, "other", "", None)]) == [None]
        [gone] = await store.compare_and_set([edit(one, version, "", None)])
        assert gone.version == ""
        [row] = await store.get([one])
        assert row.version == ""


async def test_edits_of_one_call_are_independent(url):
    async with opened(url) as store:
        there, absent, stale, old = key("a"), key("b"), key("c"), key("d")
        version, _, last = await put(store, there), await put(store, stale), await put(store, old)
        edits = [
            edit(there, version, "next"),
            edit(absent, "", "first"),
            edit(stale, "another", "never"),
            edit(old, last, "", None),
        ]
        answers = await store.compare_and_set(edits)
        assert [answer and answer.version for answer in answers] == ["next", "first", None, ""]
        rows = await store.versions([there, absent, stale, old])
        assert [row.version for row in rows] == ["next", "first", rows[2].version, ""]
        assert rows[2].version not in ("never", "")


async def test_versions_are_without_values_and_in_the_order_of_the_keys(url):
    async with opened(url) as store:
        keys = [key() for _ in range(5)]
        versions = [await put(store, one) for one in keys]
        order = [keys[3], key(), keys[0], keys[3]]
        rows = await store.versions(order)
        assert [row.version for row in rows] == [versions[3], "", versions[0], versions[3]]
        assert {row.value for row in rows} == {b""}
        rows = await store.get(order)
        assert [row.value for row in rows] == [b"value", b"", b"value", b"value"]


async def test_keys_are_data(url):
    async with opened(url) as store:
        base = key()
        names = ["a_c", "abc", "a%c", "a'c", 'a"c', "a\\c", "a;--", "A_C", "a/c", "$1", "{x}", "~" * 200]
        for name in names:
            await put(store, f"{base}/{name}", name.encode())
        rows = await store.get([f"{base}/{name}" for name in names])
        assert [row.value.decode() for row in rows] == names
        found = {each: row.value async for each, row in store.scan(f"{base}/a_")}
        assert found == {f"{base}/a_c": b"a_c"}


@pytest.mark.parametrize("size", [0, 1, 5_000, MOST_VALUE])
async def test_values_are_bytes_of_any_size(url, size):
    async with opened(url) as store:
        one, other = key(), key()
        value = secrets.token_bytes(size)
        version = await put(store, one, value)
        await store.compare_and_set([edit(one, version, value=value[::-1]), edit(other, value=value)])
        assert [row.value for row in await store.get([one, other])] == [value[::-1], value]


async def test_clients_race_for_a_row_and_one_wins(url):
    async with opened(url) as first, opened(url) as second:
        one = key()
        version, wins = await put(first, one), []
        for _ in range(30):
            answers = await asyncio.gather(
                *(store.compare_and_set([edit(one, version)]) for store in (first, second) for _ in range(2))
            )
            made = [row for [row] in answers if row is not None]
            assert len(made) == 1
            wins.append(answers.index([made[0]]))
            version = made[0].version
        [row] = await second.get([one])
        assert row.version == version


async def test_clients_race_to_insert_a_row_and_one_wins(url):
    async with opened(url) as first, opened(url) as second:
        for _ in range(30):
            one = key()
            answers = await asyncio.gather(*(store.compare_and_set([edit(one)]) for store in (first, second)))
            assert sum(row is not None for [row] in answers) == 1


async def test_statements_with_many_edits_do_not_wait_for_each_other_in_a_circle(url):
    async with opened(url) as first, opened(url) as second:
        keys = [key() for _ in range(20)]
        for one in keys[::2]:
            await put(first, one)

        async def write(store, order):
            for _ in range(20):
                rows = await store.versions(order)
                await store.compare_and_set(
                    [edit(one, row.version) for one, row in zip(order, rows, strict=True)]
                )

        # A deadlock would raise, after a second, in one of them.
        await asyncio.gather(write(first, keys), write(second, keys[::-1]), write(first, keys[::-1]))


async def test_a_read_sees_what_was_answered_before_it_was_sent(url):
    async with opened(url) as writer, opened(url) as reader:
        one = key()
        version = await put(writer, one, b"0")
        for number in range(50):
            [made] = await writer.compare_and_set([edit(one, version, value=b"%d" % number)])
            version = made.version
            for store in (writer, reader):
                [row] = await store.get([one])
                assert row.version == version


async def test_calls_of_many_tasks_go_out_together(url):
    async with opened(url) as store:
        keys = [key() for _ in range(3 * MOST_ITEMS)]
        sent = []
        make = store._make

        async def counted(driver, edits, skip):
            sent.append(len(edits))
            return await make(driver, edits, skip)

        store._make = counted
        answers = await asyncio.gather(*(store.compare_and_set([edit(one, "", one)]) for one in keys))
        assert [row.version for [row] in answers] == keys
        assert max(sent) == MOST_ITEMS
        assert len(sent) <= 5
        rows = await asyncio.gather(*(store.get([one]) for one in keys))
        assert [row.version for [row] in rows] == keys


async def test_calls_about_one_row_go_out_one_after_the_other(url):
    async with opened(url) as store:
        one = key()
        versions = [f"v{number}" for number in range(20)]
        edits = [edit(one, before, after) for before, after in zip(["", *versions], versions, strict=False)]
        answers = await asyncio.gather(*(store.compare_and_set([each]) for each in edits))
        assert [row.version for [row] in answers] == versions


async def test_an_unflushed_write_is_seen_and_the_next_one_is_flushed_again(url):
    async with opened(url) as store:
        one, other = key(), key()
        version = await put(store, one, flush=False)
        writer = store._open().writer()
        [[setting]] = await writer.fetch("SHOW synchronous_commit")
        assert setting == "on"
        [row] = await store.get([one])
        assert row.version == version
        made = await store.compare_and_set([edit(one, version, flush=False), edit(other, flush=False)])
        assert None not in made
        assert await writer.fetch("SHOW synchronous_commit") == [("on",)]


async def test_a_cancelled_caller_leaves_the_connections_in_step(url):
    async with opened(url) as store:
        one, other = key(), key()
        await put(store, one, b"one")
        await put(store, other, b"other")
        for number in range(100):
            [row] = await store.versions([one])
            write = store.compare_and_set([edit(one, row.version, value=b"one")])
            calls = [asyncio.create_task(call) for call in (store.get([one]), write)]
            for _ in range(number % 8):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            new = key()
            [[row], [made]] = await asyncio.gather(
                store.get([other]), store.compare_and_set([edit(new, "", new)])
            )
            assert row.value == b"other"
            assert made.version == new
            await asyncio.wait(calls)


async def test_a_tick_is_taken_between_the_request_and_its_answer(url):
    async with opened(url) as store:
        one = key()
        [first] = await store.get([one])
        [made] = await store.compare_and_set([edit(one)])
        [last] = await store.versions([one])
        assert first.tick <= made.tick <= last.tick


# --- notifications


async def test_an_addressed_client_is_notified_of_the_row(url):
    mine, theirs = Heard(), Heard()
    async with opened(url, mine) as store, opened(url, theirs):
        one, other = key(), key()
        version = await put(store, one)
        await store.compare_and_set([edit(one, version, notify=frozenset({theirs.address}))])
        await until(lambda: theirs.changed)
        assert theirs.changed == [one]
        assert mine.changed == []
        await store.compare_and_set([edit(other, notify=frozenset({ALL}))])
        await until(lambda: other in theirs.changed and other in mine.changed)


async def test_an_edit_that_was_not_made_notifies_no_client(url):
    mine, theirs = Heard(), Heard()
    async with opened(url, mine) as store, opened(url, theirs):
        one, last = key(), key()
        await put(store, one)
        notify = frozenset({theirs.address})
        assert await store.compare_and_set([edit(one, "another", notify=notify)]) == [None]
        await store.compare_and_set([edit(last, notify=notify)])
        await until(lambda: last in theirs.changed)
        assert theirs.changed == [last]


async def test_clients_of_another_namespace_are_not_notified(url):
    mine, theirs, others = Heard(), Heard(), Heard()
    async with (
        opened(url, mine) as store,
        opened(url, theirs),
        opened(url, others, namespace="elsewhere"),
    ):
        one = key()
        await store.compare_and_set([edit(one, notify=frozenset({ALL}))])
        await until(lambda: theirs.changed)
        assert others.changed == []


@pytest.fixture
def full(monkeypatch):
    """A store's queue of notifications is full: it holds 8 GB, so a function that raises the same error stands for it."""

    async def fill(store):
        create = "CREATE FUNCTION pg_temp.full(text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'no room' USING ERRCODE = '54000'; END $$"
        await store._open().writer().driver.execute(create)
        several = store._statements("several")
        queries = store._statements._queries
        monkeypatch.setitem(
            queries, "several", several.replace("pg_notify($8 || address, m.key)", "pg_temp.full($8)")
        )

    return fill


async def test_a_notification_without_room_is_left_out_and_the_edit_is_made(url, full):
    async with opened(url) as store:
        await full(store)
        one, other = key(), key()
        made = await store.compare_and_set([edit(one, notify=frozenset({"x"})), edit(other)])
        assert None not in made
        assert None not in await store.compare_and_set([edit(key(), notify=frozenset({"x"}))])
        [row, _] = await store.get([one, other])
        assert row.version == made[0].version


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
async def test_a_locked_row_and_a_notification_without_room_cost_no_other_edit(server, full, names):
    """In the order of keys, so either error comes first."""
    async with opened(server.url) as store:
        await full(store)
        locked, free = map(key, names)
        versions = {one: await put(store, one) for one in (locked, free)}
        reader = store._open()._pipelines[0].driver
        async with reader.transaction():
            await reader.execute(f"SELECT FROM {store._statements.table} WHERE key = $1 FOR SHARE", locked)
            edits = [edit(one, versions[one], notify=frozenset({"a"})) for one in (locked, free)]
            [no, row] = await store.compare_and_set(edits)
            assert (no, row.version) == (None, edits[1].version)


# --- maintenance


async def test_a_scan_yields_every_row_of_a_prefix_once(url, monkeypatch):
    monkeypatch.setattr(module, "PAGE", 7)
    async with opened(url) as store:
        base = key()
        names = {f"{base}/{number}" for number in range(30)}
        for one in names:
            await put(store, one, one.encode())
        await put(store, base[:-1] + "~")
        found = [(each, row) async for each, row in store.scan(f"{base}/")]
        assert {each for each, _ in found} == names
        assert len(found) == len(names)
        assert all(row.value.decode() == each and isinstance(row, Row) for each, row in found)


async def test_a_purge_deletes_what_is_past_its_ttl_and_nothing_else(url, monkeypatch):
    monkeypatch.setattr(module, "PAGE", 3)
    async with opened(url) as store:
        old = [key() for _ in range(10)]
        for one in old:
            await put(store, one, ttl=0.001)
        kept, later, renewed = key(), key(), key()
        await put(store, kept)
        await put(store, later, ttl=3600)
        await put(store, renewed, ttl=0.001)
        await put(store, renewed)
        await asyncio.sleep(0.05)
        assert await store.purge("", 3600) == 0
        assert await store.purge("", 0, old[:4]) >= len(old) - 4
        versions = [row.version for row in await store.versions(old)]
        assert ("" in versions[:4], versions[4:]) == (False, [""] * (len(old) - 4))
        assert await store.purge("", 0) >= 4
        versions = [row.version for row in await store.versions([*old, kept, later, renewed])]
        assert versions[:-3] == [""] * len(old)
        assert "" not in versions[-3:]


async def test_a_purge_leaves_a_row_alone_that_another_transaction_changes(server):
    async with opened(server.url) as store:
        one = key()
        await put(store, one, ttl=0.001)
        await asyncio.sleep(0.05)
        other = store._open().writer().driver
        # The reader's connection has the row while the writer purges.
        reader = store._open()._pipelines[0].driver
        async with reader.transaction():
            await reader.execute(f"UPDATE {store._statements.table} SET expires = NULL WHERE key = $1", one)
            assert other is not reader
            await store.purge("", 0)
        [row] = await store.versions([one])
        assert row.version != ""


async def test_a_row_that_a_transaction_keeps_locked_is_not_written_and_holds_up_no_other(server):
    async with opened(server.url) as store:
        locked, free = key(), key()
        versions = {one: await put(store, one) for one in (locked, free)}
        reader = store._open()._pipelines[0].driver
        async with reader.transaction():
            await reader.execute(f"SELECT FROM {store._statements.table} WHERE key = $1 FOR SHARE", locked)
            edits = [edit(one, versions[one], notify=frozenset({"a"})) for one in (locked, free)]
            [no, row] = await store.compare_and_set(edits)
            assert (no, row.version) == (None, edits[1].version)
            assert await store.compare_and_set([edit(locked, versions[locked])]) == [None]
            assert await store.compare_and_set([edit(locked)]) == [None]
        [row] = await store.compare_and_set([edit(locked, versions[locked])])
        assert row is not None


# --- the end


async def test_a_closed_store_refuses_and_closes_twice(url):
    async with opened(url) as store:
        await store.aclose()
        for call in (store.get([key()]), store.compare_and_set([edit(key())])):
            with pytest.raises(BackendUnavailable, match="closed"):
                await call


async def test_closing_leaves_no_connection_at_the_server(server):
    async with opened(server.url, namespace="closing"):
        [[there]] = server.ask("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'aiolock'")
        assert int(there) >= 2
    await until(
        lambda: (
            server.ask("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'aiolock'") == [["0"]]
        )
    )
