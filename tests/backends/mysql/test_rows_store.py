"""Rows in a table: every rule of the store that a live server can show."""

from __future__ import annotations

import asyncio
import secrets
import time

import pymysql
import pytest

from aiolock.backends.mysql import store as module
from aiolock.backends.mysql import wake
from aiolock.backends.mysql.errors import DEADLOCK
from aiolock.backends.rows.pipeline import MOST_ITEMS
from aiolock.backends.rows.store import ALL, MOST_VALUE, Row
from aiolock.clock import system_clock
from aiolock.errors import BackendRefused, BackendUnavailable
from tests.backends.mysql.rows import Heard, administrator, edit, key, opened, put
from tests.backends.mysql.tools import as_root, sessions
from tests.pace import pace


@pytest.fixture
def url(deployment):
    """The address of an account that may use tables of its database and nothing else."""
    return deployment.url()


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

        async def counted(driver, edits, locked):
            sent.append(len(edits))
            return await make(driver, edits, locked)

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
        await until(lambda: one in theirs.changed)
        assert one not in mine.changed
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
        # A note for all may still be there, from just before.
        assert one not in theirs.changed


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


async def test_each_client_hears_of_a_row_once_and_of_every_one(url):
    """Notes have a time, and two may have the same."""
    mine, theirs = Heard(), Heard()
    async with opened(url, mine) as store, opened(url, theirs):
        keys = [key() for _ in range(100)]
        notify = frozenset({theirs.address})
        await asyncio.gather(*(store.compare_and_set([edit(one, notify=notify)]) for one in keys))
        await until(lambda: set(keys) <= set(theirs.changed))
        assert all(theirs.changed.count(one) == 1 for one in keys)


async def test_one_that_is_gone_keeps_no_other_from_being_told(url):
    theirs = Heard()
    async with opened(url) as store, opened(url, theirs):
        one = key()
        # In the order of addresses, so that one that is gone comes before and one behind.
        [made] = await store.compare_and_set([edit(one, notify=frozenset({"0", theirs.address, "z"}))])
        assert made is not None
        await until(lambda: one in theirs.changed)


async def test_a_listener_whose_connection_is_lost_comes_back_and_says_so(url):
    theirs = Heard()
    async with opened(url) as store, opened(url, theirs) as other:
        other._wake._driver.terminate()
        await until(lambda: theirs.changed)
        assert theirs.changed == [None]
        assert theirs.interruptions == 0
        await until(lambda: other._wake._driver is not None)
        one = key()
        await store.compare_and_set([edit(one, notify=frozenset({theirs.address}))])
        await until(lambda: theirs.changed == [None, one])


async def test_notes_are_deleted(url, mariadb, monkeypatch):
    monkeypatch.setattr(wake, "TIDY", 0)
    monkeypatch.setattr(module, "NOTES_LAST", 0.0)
    theirs = Heard()
    async with opened(url) as store, opened(url, theirs):
        for _ in range(3):
            one = key()
            await store.compare_and_set([edit(one, notify=frozenset({theirs.address, "gone"}))])
            await until(lambda one=one: one in theirs.changed)
        await store.purge("", 3600)
        assert await as_root(mariadb, "SELECT * FROM aiolock_notes WHERE address LIKE '%gone'") == ()
        assert len(await as_root(mariadb, "SELECT * FROM aiolock_notes")) <= 1


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


async def test_a_purge_leaves_a_row_alone_that_another_transaction_changes(url, mariadb):
    async with opened(url) as store, administrator(mariadb) as cursor:
        one = key()
        await put(store, one, ttl=0.001)
        await asyncio.sleep(0.05)
        await cursor.execute(f"UPDATE aiolock_rows SET expires = NULL WHERE k = '{one}'")
        await store.purge("", 0)
        await cursor.execute("COMMIT")
        [row] = await store.versions([one])
        assert row.version != ""


# --- transactions that the server undoes


async def test_a_row_that_a_transaction_keeps_locked_is_not_written_and_holds_up_no_other(url, mariadb):
    async with opened(url) as store:
        locked, free, other = key("a"), key("b"), key("c")
        versions = {one: await put(store, one) for one in (locked, free, other)}
        async with administrator(mariadb) as cursor:
            await cursor.execute(f"SELECT 1 FROM aiolock_rows WHERE k = '{locked}' LOCK IN SHARE MODE")
            edits = [edit(one, versions[one], notify=frozenset({"a"})) for one in (locked, free)]
            [no, row] = await store.compare_and_set(edits)
            assert (no, row.version) == (None, edits[1].version)
            # From now on it is known, and no write waits for it.
            start = system_clock()
            for _ in range(5):
                assert await store.compare_and_set([edit(locked, versions[locked])]) == [None]
                assert await store.compare_and_set([edit(locked, versions[locked], "", None)]) == [None]
            [row] = await store.compare_and_set([edit(other, versions[other])])
            assert row is not None
            assert system_clock() - start < 5 * pace()
        [row] = await store.compare_and_set([edit(locked, versions[locked], value=b"new", ttl=5.0)])
        assert row is not None
        assert row.tick
        assert (await store.get([locked]))[0].value == b"new"


class Undone:
    """The next transaction of a driver fails with this error behind a statement of its own: as a deadlock, or a row that is locked."""

    def __init__(self, driver, number, statement):
        self.run, self.number, self.statement = driver.run, number, statement
        self.left = 1
        driver.run = self

    async def __call__(self, packet, answers=None):
        if not self.left or not packet.startswith("START"):
            return await self.run(packet, answers)
        self.left -= 1
        parts = packet.split("; ")
        await self.run("; ".join(parts[: self.statement]))
        if self.number in DEADLOCK:
            await self.run("ROLLBACK")
        raise pymysql.err.OperationalError(self.number, "staged")


@pytest.mark.parametrize("number", [1213, 1205, 1317])
@pytest.mark.parametrize("statement", [1, 2, 3])
async def test_a_transaction_that_is_undone_is_repeated_and_leaves_no_part_of_it(
    url, mariadb, number, statement
):
    """After 1205 and 1317 the server leaves the transaction open: a part of it would be committed with the next one."""
    async with opened(url) as store:
        stale, one, other = key("a"), key("b"), key("c")
        versions = {each: await put(store, each) for each in (stale, one, other)}
        Undone(store._open().writer().driver, number, statement)
        edits = [edit(stale, "another"), edit(one, versions[one]), edit(other, versions[other], "", None)]
        answers = await store.compare_and_set(edits)
        assert [answer and answer.version for answer in answers] == [None, edits[1].version, ""]
        shown = await as_root(mariadb, f"SELECT version FROM aiolock_rows WHERE k IN ('{one}', '{other}')")
        assert [bytes(version).decode() for (version,) in shown] == [edits[1].version]
        assert not store._open().writer().driver.get_transaction_status()


async def test_a_transaction_that_has_counted_and_is_said_to_be_undone_is_refused_when_repeated(url):
    async with opened(url) as store:
        one, other = key("a"), key("b")
        Undone(store._open().writer().driver, 1317, 4)
        edits = [edit(one), edit(other)]
        # It found its own rows: the engine reads, and recognises the versions.
        assert await store.compare_and_set(edits) == [None, None]
        assert [row.version for row in await store.versions([one, other])] == [each.version for each in edits]


async def test_an_error_that_repeating_does_not_mend_leaves_no_transaction_open(url):
    async with opened(url) as store:
        one, other = key("a"), key("b")
        driver = store._open().writer().driver
        Undone(driver, 1114, 2)
        with pytest.raises(BackendRefused, match="1114"):
            await store.compare_and_set([edit(one), edit(other)])
        assert not driver.get_transaction_status()
        assert [row.version for row in await store.versions([one, other])] == ["", ""]
        await put(store, one)


async def test_values_that_are_too_long_together_go_out_in_parts(url):
    async with opened(url) as store:
        keys = [key() for _ in range(40)]
        edits = [edit(one, value=secrets.token_bytes(MOST_VALUE)) for one in keys]
        made = await store.compare_and_set(edits)
        assert [row.version for row in made] == [each.version for each in edits]
        assert [row.value for row in await store.get(keys)] == [each.value for each in edits]


# --- the end


async def test_a_closed_store_refuses_and_closes_twice(url):
    async with opened(url) as store:
        await store.aclose()
        for call in (store.get([key()]), store.compare_and_set([edit(key())])):
            with pytest.raises(BackendUnavailable, match="closed"):
                await call


async def test_closing_leaves_no_connection_at_the_server(url, mariadb):
    # Those of tests before may be about to end.
    deadline = time.monotonic() + 10 * pace()
    while await sessions(mariadb):
        assert time.monotonic() < deadline
    async with opened(url, namespace="closing"):
        assert 1 < len(await sessions(mariadb)) <= 3
    # At once: the server would not notice during a sleep.
    for _ in range(100):
        if not await sessions(mariadb):
            return
    pytest.fail(f"still there: {await sessions(mariadb)}")


async def test_a_connection_that_is_lost_ends_both_and_is_reported_once(url, mariadb):
    heard = Heard()
    async with opened(url, heard) as store:
        one = key()
        await put(store, one)
        await as_root(mariadb, f"KILL {store._open().writer().driver.thread_id()}")
        await until(lambda: heard.interruptions)
        await put(store, one)
        assert heard.interruptions == 1
