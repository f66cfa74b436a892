"""The promises of a row store, kept by keys of etcd: compare-and-set, reads, lists, leases, notifications, ticks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from functools import partial

import pytest

from aiolock import BackendUnavailable
from aiolock.backends import transport
from aiolock.backends.etcd.channel import LAST
from aiolock.backends.etcd.leases import SPARE, for_session
from aiolock.backends.etcd.messages import STATUS
from aiolock.backends.rows.store import ALL, MOST_KEY, MOST_VALUE, Edit
from tests.backends.etcd.conftest import opened
from tests.backends.stores import (  # noqa: F401 - tests
    absent,
    test_a_row_is_written_only_against_its_version,
    test_an_edit_that_fails_does_not_undo_the_others,
    test_an_insertion_sees_the_rows_of_other_clients,
)
from tests.faults.proxy import Proxy
from tests.faults.staging import until


@pytest.fixture
def session():
    return f"tests/s/{secrets.token_hex(8)}"


async def test_what_many_tasks_ask_at_once_is_written_together(store, key):
    connection = store._connection._transport
    written, write = [], connection.write
    connection.write = lambda data: (written.append(data), write(data))
    rows = await asyncio.gather(*(store.get([f"{key}{number}"]) for number in range(100)))
    assert len(rows) == 100
    # The first one waits for no other; answers that come in between are acknowledged.
    assert len(written) < 20


async def test_more_rows_are_read_than_one_transaction_may_name_in_the_order_of_their_keys(store, key):
    keys = [f"{key}{number}" for number in range(250)]
    made = await store.compare_and_set([Edit(each, "", "", each.encode()) for each in keys[::2]])
    rows = await store.get(keys[::-1])
    assert [row.value for row in rows[1::2]] == [each.encode() for each in keys[::2]][::-1]
    assert {row.version for row in rows[::2]} == {""}
    assert [row.version for row in await store.versions(keys[::2])] == [row.version for row in made]
    assert {row.value for row in await store.versions(keys)} == {b""}
    assert await store.get([]) == []
    assert sorted([(found, row.value) async for found, row in store.scan(key)]) == sorted(
        (each, each.encode()) for each in keys[::2]
    )
    assert [found async for found, _ in store.scan(f"{key}x")] == []


@pytest.mark.parametrize("length", [0, 1, 16_383, 65_535, MOST_VALUE])
async def test_values_are_bytes_of_any_length(store, key, length):
    value = (bytes(range(256)) * (length // 256 + 1))[:length]
    row = await store.insert(key, value)
    read = await store.read(key)
    assert read[:2] == (value, row.version)


async def test_many_long_values_are_written_and_read_at_once(store, key):
    values = {f"{key}{number}": secrets.token_bytes(MOST_VALUE) for number in range(8)}
    await store.compare_and_set([Edit(each, "", "", value) for each, value in values.items()])
    assert [row.value for row in await store.get(list(values))] == list(values.values())


async def test_keys_are_data(store, key):
    keys = [
        f"{key}{end}"
        for end in ("a_b", "a%b", "a*b", "A_b", "a%0Ab", "a:b", "a'b", 'a"b', "a\\b", "a?b#", "a~")
    ]
    keys.append(key.ljust(MOST_KEY, "x"))
    for each in keys:
        await store.insert(each, each.encode())
    assert [row.value for row in await store.get(keys)] == [each.encode() for each in keys]
    assert {found: row.value async for found, row in store.scan(key)} == {
        each: each.encode() for each in keys
    }
    assert [found async for found, _ in store.scan(f"{key}a_")] == [f"{key}a_b"]


async def test_a_version_is_good_on_the_connection_only_that_read_it(server, key):
    async with Proxy("127.0.0.1", server.port) as proxy, opened(f"etcd://127.0.0.1:{proxy.port}") as store:
        row = await store.insert(key, b"one")
        proxy.reset_all()
        await until(lambda: store.interruptions == 1)
        read = await store.read(key)
        assert read.value == b"one"
        assert read.version != row.version
        with pytest.raises(BackendUnavailable, match="connection was lost"):
            await store.update(key, row.version, b"two")
        assert await store.update(key, read.version, b"two")


async def test_ticks_rise_with_each_write_of_the_cluster_and_over_deletions(store, other, key):
    ticks = []
    for _ in range(3):
        row = await store.insert(key)
        ticks += [row.tick]
        await other.insert(f"{key}{len(ticks)}")
        [gone] = await store.compare_and_set([Edit(key, row.version, "", None)])
        ticks += [gone.tick]
    assert ticks == sorted(set(ticks))
    assert (await store.read(key)).tick >= ticks[-1]


async def test_a_client_that_is_idle_keeps_its_connection(server, key, monkeypatch):
    """etcd ends connections that send it nothing but pings of HTTP/2, by default more often than every five seconds."""
    monkeypatch.setattr(transport, "PING_EVERY", 0.1)
    async with opened(server.url) as store:
        channel, calls = store._connection._channel, []
        call = channel.call
        channel.call = lambda path, *more: (calls.append(path), call(path, *more))
        await until(lambda: len(calls) == 20 or store.interruptions)
        assert store.interruptions == 0
        assert set(calls) == {STATUS}


async def test_a_connection_whose_numbers_of_streams_are_used_up_is_replaced(store, key):
    """HTTP/2 has some 10 ** 9 of them, which a busy client uses up within days."""
    row = await store.insert(key, b"one")
    store._connection._channel._h2.highest_outbound_stream_id = LAST - 3
    with contextlib.suppress(BackendUnavailable):
        await asyncio.gather(*(store.read(key) for _ in range(3)))
    await until(lambda: store.interruptions == 1)
    read = await store.read(key)
    assert (read.value, read.version != row.version) == (b"one", True)
    assert await store.update(key, read.version, b"two")


# --- leases


async def test_the_key_of_a_session_lives_for_its_ttl_and_not_much_longer(store, other, session):
    loop = asyncio.get_running_loop()
    sent = loop.time()
    await store.insert(session, b"x", ttl=1.0)
    answered = loop.time()
    await until(partial(absent, other, session))
    assert loop.time() - sent >= 1.0
    # The lease, what etcd takes to end it, and what a busy machine adds.
    assert loop.time() - answered < for_session(1.0) + 1 + 10


async def test_heartbeats_keep_the_key_of_a_session_by_further_leases(server, store, other, session):
    row, leases = await store.insert(session, b"0", ttl=1.0), set()
    for number in range(1, 9):
        await asyncio.sleep((1.0 + SPARE) / 4)
        row = await store.update(session, row.version, b"%d" % number, ttl=1.0)
        assert row is not None
        leases.add(json.loads(server.ctl("get", session, "-w", "json"))["kvs"][0]["lease"])
    assert (await other.read(session)).value == b"8"
    assert len(leases) > 1


async def test_a_row_that_is_used_again_is_not_deleted(server, store, key):
    row = await store.insert(key, b"free", ttl=60.0)
    assert json.loads(server.ctl("get", key, "-w", "json"))["kvs"][0]["lease"]
    row = await store.update(key, row.version, b"held")
    assert "lease" not in json.loads(server.ctl("get", key, "-w", "json"))["kvs"][0]


async def test_rows_share_leases_and_sessions_others(server, store, key, session):
    await store.compare_and_set([Edit(f"{key}{number}", "", "", b"", 60.0) for number in range(5)])
    await store.compare_and_set([Edit(f"{session}{number}", "", "", b"", 60.0) for number in range(3)])
    kept = json.loads(server.ctl("get", "--prefix", key, "-w", "json"))["kvs"]
    assert len({each["lease"] for each in kept}) == 1
    leases = {each["lease"] for each in kept}
    kept = json.loads(server.ctl("get", "--prefix", session, "-w", "json"))["kvs"]
    assert len(kept) == 3
    assert len(leases | {each["lease"] for each in kept}) == 2


async def test_leases_that_an_administrator_revoked_are_replaced(server, store, key, session):
    row = await store.insert(session, b"x", ttl=30.0)
    held = await store.insert(key, b"x")
    await store.insert(f"{key}2", b"x", ttl=60.0)
    server.revoke_leases()
    # One is made at once, and the others are refused for want of their leases.
    made = await store.compare_and_set(
        [
            Edit(key, held.version, "", b"y"),
            Edit(f"{key}3", "", "", b"x", 60.0, notify=frozenset({ALL})),
            Edit(session, row.version, "", b"y", 30.0),
            Edit(f"{session}2", "", "", b"x", 30.0),
        ]
    )
    assert [each is not None for each in made] == [True, True, False, True]
    found = await store.get([key, f"{key}2", f"{key}3", session, f"{session}2"])
    assert [row.value for row in found] == [b"y", b"", b"x", b"", b"x"]


# --- notifications


async def test_those_are_notified_that_an_edit_names(store, other, key):
    row = await store.insert(key, notify=frozenset({"other"}))
    await until(lambda: other.changed == [key])
    await store.update(key, row.version, b"x", notify=frozenset({ALL}))
    await until(lambda: other.changed == [key, key])
    await until(lambda: store.changed == [key])
    assert await store.update(key, row.version, b"y", notify=frozenset({ALL})) is None
    await store.insert(f"{key}2", notify=frozenset({ALL}))
    await until(lambda: other.changed == [key, key, f"{key}2"])


async def test_more_are_notified_than_one_transaction_may_name(store, other, key):
    assert await store.insert(key, notify=frozenset({"other", *map(str, range(500))}))
    await until(lambda: other.changed == [key])


async def test_a_watch_that_ends_as_soon_as_it_is_ready_is_made_again(store, other, key):
    connection, watch, ended = other._connection, other._connection._watch, []

    async def ends(made):
        await watch(made)
        if not ended:
            ended.append(made)
            connection._watch_ended(made.channel, BackendUnavailable("no leader"))

    connection._watch = ends
    connection.leave()
    await until(lambda: ended and other.interruptions >= 2 and connection.generation >= 3)
    await other.read(key)
    await store.insert(key, notify=frozenset({"other"}))
    await until(lambda: key in other.changed)


async def test_the_history_may_be_compacted_at_any_time(server, store, other, key):
    row = await store.insert(key, b"x")
    revision = json.loads(server.ctl("get", key, "-w", "json"))["header"]["revision"]
    server.ctl("compact", str(revision))
    assert await store.update(key, row.version, b"y", notify=frozenset({"other"}))
    await until(lambda: other.changed == [key])
    assert (await other.read(key)).value == b"y"


async def test_keys_and_values_are_readable_with_etcdctl(server, store, key):
    assert server.ctl("get", "tests/format") == "tests/format\n1\n"
    await store.insert(key, b'3{"v":"name"}')
    assert server.ctl("get", key) == f'{key}\n3{{"v":"name"}}\n'
