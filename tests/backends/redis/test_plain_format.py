"""Locks in the plain format: they exclude those of redis-py, are refused what the format has not, and leave nothing but notes."""

from __future__ import annotations

import asyncio
import functools
import re
import secrets
import time
import uuid
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

import aiolock
from aiolock import (
    AcquireTimeout,
    BackendRefused,
    Client,
    ConfigError,
    InvalidName,
    UnsafeBackend,
    UnsupportedKind,
)
from aiolock.backends.redis.dialects.backend import key_of_note, note_of
from tests.backends.redis.conftest import SLOW
from tests.backends.redis.test_sentinel import answers, staged
from tests.faults.staging import PATIENCE, queued, until

NOWHERE = "redis://127.0.0.1:1"
"""Whoever is refused before any I/O never hears that nothing listens there."""


@pytest.fixture
def connect(server, namespace) -> Callable[..., Client]:
    """A client of the plain format with a prefix of its own."""
    return functools.partial(plain, server.url, namespace)


def plain(url: str, namespace: str, **options: Any) -> Client:
    return aiolock.connect(
        url, **({"dialect": "plain", "namespace": namespace, "prefix": f"{namespace}:"} | SLOW | options)
    )


# --- exclusion


class Room:
    """Whoever is in it notes when it came and went, by one clock; the name of a side is a prefix."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float, str]] = []

    def turns(self, side: str) -> int:
        return sum(who == side for *_, who in self.spans)

    def overlaps(self) -> list[Any]:
        spans = sorted(self.spans)
        return [(one, other) for one, other in pairwise(spans) if one[1] > other[0]]


def theirs(url: str, key: str, room: Room, turns: int) -> None:
    """Take turns with redis-py's synchronous lock, in a thread."""
    with redis.Redis.from_url(url) as client:
        for _ in range(turns):
            lock = client.lock(key, timeout=60)
            assert lock.acquire(blocking_timeout=120)
            begun = time.monotonic()
            time.sleep(0.001)
            room.spans.append((begun, time.monotonic(), "synchronous"))
            lock.release()


async def test_ours_and_those_of_redis_py_are_never_inside_together(server, connect, namespace):
    room, key = Room(), f"{namespace}:x"

    async def ours(client: Client) -> None:
        for _ in range(20):
            async with client.lock("x", ttl=60, timeout=120):
                begun = time.monotonic()
                await asyncio.sleep(0.001)
                room.spans.append((begun, time.monotonic(), "ours"))

    async def foreign() -> None:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            for _ in range(4):
                async with client.lock(key, timeout=60, blocking_timeout=120):
                    begun = time.monotonic()
                    await asyncio.sleep(0.001)
                    room.spans.append((begun, time.monotonic(), "asyncio"))

    async with connect() as one, connect() as two:
        await asyncio.gather(
            *(ours(client) for client in (one, one, two, two)),
            foreign(),
            asyncio.to_thread(theirs, server.url, key, room, 4),
        )
    assert [room.turns(side) for side in ("ours", "asyncio", "synchronous")] == [80, 4, 4]
    assert room.overlaps() == []


async def test_a_lone_foreign_client_gets_its_turns_beside_twenty_tasks_of_ours(server, connect, namespace):
    got = asyncio.Event()

    async def ours(client: Client) -> None:
        while not got.is_set():
            async with client.lock("x", ttl=60, timeout=120):
                await asyncio.sleep(0)

    async with (
        connect() as one,
        connect() as two,
        redis.asyncio.Redis.from_url(server.url) as foreign,
    ):
        tasks = [asyncio.create_task(ours(client)) for client in (one, two) for _ in range(10)]
        await until(lambda: one.stats()["acquired"] > 20)
        for _ in range(3):
            async with foreign.lock(f"{namespace}:x", timeout=60, blocking_timeout=PATIENCE):
                pass
        got.set()
        await asyncio.gather(*tasks)


async def test_each_side_sees_the_other(server, connect, namespace):
    async with connect() as client, redis.asyncio.Redis.from_url(server.url) as driver:
        lock = driver.lock(f"{namespace}:x", timeout=60)
        async with client.lock("x", label="worker 7"):
            assert await lock.locked()
            assert not await lock.acquire(blocking=False)
            [holder] = (await client.lock("x").inspect()).holders
            assert (holder.label, holder.token) == ("worker 7", 0)
        await lock.acquire(token=(secret := uuid.uuid4().hex))
        assert await client.lock("x").try_acquire() is None
        [holder] = (await client.lock("x").inspect()).holders
        assert holder.label == f"foreign: {secret[:8]}…"
        assert 50 < holder.remaining <= 60
        [info] = await client.locks()
        assert info.name == "x"


async def test_a_thief_is_noticed_and_keeps_what_it_took(connect, admin, namespace):
    async with connect() as client:
        lease = await client.lock("x", ttl=1).acquire()
        await admin.set(f"{namespace}:x", "thief")
        assert await lease.wait_lost() == "revoked"
        await lease.release()
        assert await admin.get(f"{namespace}:x") == b"thief"


async def test_who_gave_up_is_not_granted_the_lock_by_a_late_copy(server, connect, admin, namespace):
    async with connect() as client:
        backend = client._runtime.backend
        request = client.lock("x")._request
        claim = backend.claim(request)
        sent = backend.call("enter", claim.key, claim.owner, 30_000, 1, backend.process, *backend._terms)
        copy = backend.scripts["enter"].encode(
            backend.keys(claim.key), [claim.owner, 30_000, 1, backend.process, *backend._terms]
        )
        assert (await sent)[0] == 1
        await backend.leave(claim, tombstone=True, keep=0)
        assert (await backend._server.issue(copy))[0] == 0
        assert not await admin.exists(claim.key)


# --- what is left


async def test_nothing_but_notes_is_left_and_they_expire(connect, admin, namespace):
    async with connect() as client, connect() as rival:
        holder = await client.lock("x").acquire()
        waiter = asyncio.create_task(rival.lock("x").acquire())
        await queued(client.lock("x"), 1)
        await holder.release()
        await (await waiter).release()
        for _ in range(3):
            with pytest.raises(AcquireTimeout):
                async with client.lock("y"):
                    await rival.lock("y").acquire(timeout=0.05)
    keys = [key.decode() async for key in admin.scan_iter(f"{namespace}*")]
    assert sorted(keys) == sorted(note_of(namespace, "plain", f"{namespace}:{name}") for name in "xy")
    for key in keys:
        assert 0 < await admin.pttl(key) <= 120_000
        assert not [field for field in await admin.hkeys(key) if field.startswith(b"w:")]


async def test_what_clients_that_died_left_in_a_note_is_deleted(connect, admin, namespace):
    note = note_of(namespace, "plain", f"{namespace}:x")
    old, new = {f"{kind}:{number}": 1 for kind in "wx" for number in range(50)}, int(time.time() * 1000)
    await admin.hset(note, mapping={**old, "x:fresh": new, "since": 1})
    async with connect() as client, connect() as rival, client.lock("x"):
        assert await rival.lock("x").try_acquire(timeout=0.3) is None
    fields = {field.decode() for field in await admin.hkeys(note)}
    assert {"x:fresh", "since"} <= fields
    assert not [field for field in fields if field in old]


async def test_a_lock_stays_taken_for_a_while_after_its_release(connect, server, namespace):
    async with connect() as client, redis.asyncio.Redis.from_url(server.url) as driver:
        lease = await client.lock("x", label="nightly").acquire()
        await lease.release(keep=60)
        assert not await driver.lock(f"{namespace}:x", timeout=5).acquire(blocking=False)
        info = await client.lock("x").inspect()
        assert (info.holders, info.kept[0].last_holder) == ((), "nightly")


# --- what is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dialect": "redlock"}, "dialect must be one of aiolock, plain"),
        ({"prefix": "app:"}, "prefix: this is about locks that are shared with other libraries"),
        ({"dialect": "aiolock", "yield_to_foreign": 0.2}, "yield_to_foreign: this is about"),
        ({"dialect": "plain", "prefix": "x" * 257}, "prefix must be text of at most 256 bytes"),
        ({"dialect": "plain", "prefix": "\ud800"}, "prefix must be text"),
        ({"dialect": "plain", "replicas": 1}, "replicas= is for this library's own locks"),
        ({"dialect": "plain", "prefix": 7}, "prefix must be a str"),
        (
            {"dialect": "plain", "yield_to_foreign": -1},
            "yield_to_foreign must be a number of seconds from 0 to 10",
        ),
    ],
)
def test_options_that_cannot_be_meant(options, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        aiolock.connect(NOWHERE, **options)


def test_options_may_stand_in_the_address_and_beside_a_client_of_redis_py():
    backend = aiolock.connect(f"{NOWHERE}?dialect=plain&prefix=a%3A&yield_to_foreign=0.5")._runtime.backend
    assert (backend.dialect, backend.prefix, backend._terms[2]) == ("plain", "a:", 500)
    with pytest.raises(ConfigError, match="dialect is given twice"):
        aiolock.connect(f"{NOWHERE}?dialect=plain", dialect="plain")
    driver = redis.asyncio.Redis(port=1)
    assert aiolock.connect(driver, dialect="plain", prefix="b:")._runtime.backend.prefix == "b:"
    assert aiolock.connect(driver)._runtime.backend.dialect == ""
    assert aiolock.connect(f"{NOWHERE}?dialect=aiolock")._runtime.backend.dialect == ""


def test_a_list_of_servers_has_no_dialect():
    urls = [f"redis://127.0.0.1:{port}?dialect=plain" for port in (1, 2, 3)]
    with pytest.raises(ConfigError, match="dialect=plain is for one server"):
        aiolock.connect(urls)


@pytest.mark.parametrize("word", ["fencing", "fifo", "push"])
def test_what_the_format_has_not_cannot_be_required(word):
    with pytest.raises(UnsafeBackend, match=f"dialect=plain does not promise {word}"):
        aiolock.connect(NOWHERE, dialect="plain", require={word})


async def test_a_lease_has_no_token(connect):
    async with connect() as client, client.lock("x") as lease:
        with pytest.raises(UnsupportedKind, match="has no fencing tokens"):
            _ = lease.token
        assert "token=-" in repr(lease)
        with pytest.raises(UnsupportedKind):
            await client._runtime.backend.force_release("x", lease.kind.family, 7)
        lease.check()


async def test_a_key_of_another_type_is_refused_and_left_alone(connect, admin, namespace):
    await admin.hset(f"{namespace}:x", "f", "1")
    async with connect() as client:
        with pytest.raises(
            BackendRefused, match=r"WRONGTYPE: the key '.*:x' is no lock of Redis with dialect=plain"
        ):
            await client.lock("x").acquire(timeout=5)
        with pytest.raises(BackendRefused, match="WRONGTYPE"):
            await client.lock("x").inspect()
        assert await admin.hgetall(f"{namespace}:x") == {b"f": b"1"}
        lease = await client.lock("y", ttl=1).acquire()
        await admin.delete(f"{namespace}:y")
        await admin.rpush(f"{namespace}:y", "1")
        assert await lease.wait_lost() == "revoked"
        assert await admin.type(f"{namespace}:y") == b"list"


async def test_a_foreign_holder_without_an_expiry_is_named_and_its_secret_is_not(connect, server, namespace):
    secret = f"s{secrets.token_hex(16)}"
    async with connect() as client, redis.asyncio.Redis.from_url(server.url) as driver:
        await driver.lock(f"{namespace}:x").acquire(token=secret)
        with pytest.raises(AcquireTimeout) as caught:
            await client.lock("x").acquire(timeout=0.2)
        text = str(caught.value)
        assert f"{namespace}:x" in text
        assert "without an expiry" in text
        assert secret[:8] in text
        found = {finding.subject: finding for finding in await client.diagnose()}
        assert "dialect=plain" in found["dialect"].text
        assert f"{namespace}:NAME" in found["dialect"].text
        assert (found["foreign holders"].level.value, f"{namespace}:x" in found["foreign holders"].text) == (
            "warning",
            True,
        )
        assert "data format" not in found
        assert secret not in repr((text, found, await client.lock("x").inspect()))
        await driver.delete(f"{namespace}:x")
        async with client.lock("x"):
            # What was remembered of another holder is over.
            assert client._runtime.backend.obstacle(client.lock("x")._request) == ""


async def test_the_documented_account_suffices(server, namespace, admin):
    page = Path(__file__).parents[3] / "docs" / "how-to" / "share-a-lock.md"
    found = re.search(r"ACL SETUSER app (on .*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    rights = [
        right.replace("app:*", f"{namespace}:*").replace("aiolock:*", f"{namespace}*")
        for right in found[1].split()
    ]
    await admin.execute_command("ACL", "SETUSER", namespace, *rights)
    url = f"redis://{namespace}:password@127.0.0.1:{server.port}/0"
    async with plain(url, namespace) as client, plain(url, namespace) as rival:
        lease = await client.lock("x", ttl=1).acquire()
        waiter = asyncio.create_task(rival.lock("x").acquire(timeout=PATIENCE))
        await queued(client.lock("x"), 1)
        await until(lambda: client.stats()["renewals"] > 0)
        assert [info.name for info in await client.locks()] == ["x"]
        await lease.release()
        await (await waiter).release(keep=1)
        assert await client.lock("x").force_release()
        found = {finding.subject: finding for finding in await client.diagnose()}
        assert found["rights"].level.value == "ok"


# --- keys


@given(st.text(st.sampled_from("ab{}:"), min_size=1, max_size=9))
def test_a_note_leads_back_to_its_key(key):
    assert key_of_note("ns", "plain", note_of("ns", "plain", key)) == key


async def test_names_with_braces_are_locks_of_their_own(connect):
    names = ["a}b", "{}x", "{t}x", "{t}y", "t", "{", "}", "x{t"]
    async with connect(prefix="") as client, connect(prefix="") as rival:
        mine = [f"{client._runtime.backend.process[:6]}{name}" for name in names]
        leases = [await client.lock(name).acquire(timeout=5) for name in mine]
        assert [await rival.lock(name).try_acquire() for name in mine] == [None] * len(mine)
        assert {info.name for info in await rival.locks()} >= set(mine)
        for lease in leases:
            await lease.release()


# --- a cluster, and Sentinels


async def test_on_a_cluster_it_excludes_redis_py_as_well(cluster, namespace):
    with redis.RedisCluster(host="127.0.0.1", port=cluster.ports[0]) as driver:
        async with plain(cluster.url, namespace) as client, plain(cluster.url, namespace) as rival:
            for name in ("x", "{t}y", "order{7}"):
                async with client.lock(name) as lease:
                    assert not await asyncio.to_thread(
                        driver.lock(f"{namespace}:{name}", timeout=9).acquire, blocking=False
                    )
                    waiter = asyncio.create_task(rival.lock(name).acquire(timeout=PATIENCE))
                    await queued(client.lock(name), 1)
                    lease.check()
                await (await waiter).release()
                lock = driver.lock(f"{namespace}:{name}", timeout=60, thread_local=False)
                await asyncio.to_thread(lock.acquire)
                assert await client.lock(name).try_acquire() is None
                await asyncio.to_thread(lock.release)
            for name in ("a}b", "{}x"):
                with pytest.raises(InvalidName, match="closing brace and no hash tag"):
                    await client.lock(name).acquire()
            leases = [await client.lock(f"many{number}", ttl=2).acquire() for number in range(20)]
            await until(lambda: client.stats()["renewals"] >= 40)
            assert all(lease.held for lease in leases)
            assert len(await rival.locks("many*")) == 20


async def test_behind_sentinels_a_failover_is_followed():
    with staged() as watched:
        async with plain(watched.url, "sentinel", ttl=60) as client, client.lock("x") as lease:
            watched.copied()
            watched.first.kill()
            await answers(client)
            async with client.lock("y", timeout=PATIENCE):
                lease.check()
            with redis.Redis(port=watched.second.port) as admin:
                assert admin.get("sentinel:x").startswith(b"aiolock:")
