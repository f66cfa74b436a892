"""Writes to keys of an application that only the present holder can make."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import pytest

import aiolock
from aiolock import BackendUnavailable, ConfigError, LockLost, UnsupportedKind
from aiolock.etcd import fenced_put
from tests.faults.staging import queued, waiting


@pytest.fixture
def key():
    return f"app/{secrets.token_hex(6)}"


@pytest.fixture
def namespace():
    return f"t{secrets.token_hex(4)}"


@pytest.fixture
async def client(server, namespace):
    async with aiolock.connect(server.url, namespace=namespace) as client:
        yield client


async def test_a_holder_writes_until_it_has_released(server, client, key):
    async with client.lock("x") as lease:
        first = await fenced_put(lease, key, b"1")
        assert await fenced_put(lease, key, b"2") > first
    with pytest.raises(RuntimeError, match="released"):
        await fenced_put(lease, key, b"3")
    assert server.ctl("get", key) == f"{key}\n2\n"


@pytest.mark.parametrize("kind", ["read", "write", "permits", "reentrant"])
async def test_holders_of_every_kind_write(server, client, key, kind):
    lock = {
        "read": client.rwlock("x").read(),
        "permits": client.semaphore("x", 2),
        "reentrant": client.reentrant_lock("x"),
        "write": client.rwlock("x").write(),
    }[kind]
    async with lock as lease:
        await fenced_put(lease, key, kind.encode())
    assert server.ctl("get", key) == f"{key}\n{kind}\n"


async def test_a_holder_that_does_not_know_yet_writes_nothing(server, client, namespace, key):
    """The race that tokens are for, staged between the look at the row and the write."""
    lease = await client.lock("x").acquire()
    store = client._runtime.backend.store
    write = store.put_while_shown
    async with aiolock.connect(server.url, namespace=namespace) as other:

        async def late(*words):
            store.put_while_shown = write
            assert await other.lock("x").force_release()
            async with other.lock("x") as following:
                await fenced_put(following, key, b"theirs")
            return await write(*words)

        store.put_while_shown = late
        with pytest.raises(LockLost):
            await fenced_put(lease, key, b"mine")
        with contextlib.suppress(LockLost):
            await lease.release()
        assert server.ctl("get", key) == f"{key}\ntheirs\n"


@pytest.mark.parametrize("given_up", ["lost", "cancelled"])
async def test_a_late_copy_writes_nothing_after_the_next_task_of_the_same_client(
    server, client, key, given_up
):
    """A client hands a lock over between its tasks without a change of the row, but not after a write of its holder."""
    store = client._runtime.backend.store
    write, late, sent = store.put_while_shown, [], asyncio.Event()

    async def lose(*words):
        store.put_while_shown = write
        late.append(words)
        sent.set()
        if given_up == "cancelled":
            await asyncio.Event().wait()
        raise BackendUnavailable("no answer")

    async def first():
        async with client.lock("x") as lease:
            writing = asyncio.create_task(fenced_put(lease, key, b"first"))
            await sent.wait()
            if given_up == "cancelled":
                writing.cancel()
            [error] = await asyncio.gather(writing, return_exceptions=True)
            assert isinstance(error, asyncio.CancelledError | BackendUnavailable)

    async def second():
        async with client.lock("x") as lease:
            await fenced_put(lease, key, b"second")
            assert await write(*late[0]) is None

    store.put_while_shown = lose
    # A hold that was granted while tasks wait may be handed over between them.
    async with client.lock("x"):
        tasks = [asyncio.create_task(first())]
        await waiting(client, 1)
        tasks.append(asyncio.create_task(second()))
        await waiting(client, 2)
    await asyncio.gather(*tasks)
    assert server.ctl("get", key) == f"{key}\nsecond\n"


async def test_a_queue_that_changes_meanwhile_does_not_matter(server, client, namespace, key):
    lease = await client.lock("x").acquire()
    async with aiolock.connect(server.url, namespace=namespace) as other:
        store = client._runtime.backend.store
        write, waiting = store.put_while_shown, []

        async def late(*words):
            store.put_while_shown = write
            waiting.append(asyncio.create_task(other.lock("x").acquire()))
            await queued(client.lock("x"), 1)
            return await write(*words)

        store.put_while_shown = late
        assert await fenced_put(lease, key, b"1")
        await lease.release()
        following = await waiting[0]
        await fenced_put(following, key, b"2")
        await following.release()
    assert server.ctl("get", key) == f"{key}\n2\n"


async def test_what_is_no_lease_of_etcd_or_no_key_of_the_application_is_refused(client, namespace, key):
    async with client.lock("x") as lease:
        for wrong in ("", 7, f"{namespace}/l/lock/x"):
            with pytest.raises(ConfigError, match="outside of the namespace"):
                await fenced_put(lease, wrong, b"")
        with pytest.raises(ConfigError, match="key must be valid Unicode"):
            await fenced_put(lease, "\ud800", b"")
        with pytest.raises(ConfigError, match="at most 1000000 bytes"):
            await fenced_put(lease, key, "text")
        with pytest.raises(ConfigError, match="a lease is needed"):
            await fenced_put("x", key, b"")
    async with aiolock.lock_all(client.lock("a"), client.lock("b")) as both:
        with pytest.raises(ConfigError, match="several rows"):
            await fenced_put(both, key, b"")
    async with aiolock.connect("memory://") as memory, memory.lock("x") as lease:
        with pytest.raises(UnsupportedKind, match="only etcd:// has"):
            await fenced_put(lease, key, b"")
