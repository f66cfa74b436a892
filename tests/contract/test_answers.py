"""What a late answer and a lost one are worth: a term begins when its request was sent, and no write is repeated."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import BackendError, BackendUnavailable
from aiolock.backends.memcached import MemcachedBackend
from aiolock.backends.rows.backend import RowBackend
from aiolock.backends.rows.context import new_version
from aiolock.backends.rows.store import Edit, Row
from aiolock.clock import system_clock
from aiolock.core.backend import expires_at
from aiolock.types import Family
from tests.faults.staging import PATIENCE, nothing_remains, until

LATE = 0.5
"""Seconds for which an answer is kept back."""


async def test_the_term_of_a_grant_begins_before_its_answer_comes(deployment, rival):
    if not deployment.prolongs:
        # A hold there has the term of a session, which its heartbeats prolong meanwhile.
        return
    async with deployment.over(ttl=60, command_timeout=30) as (client, way):
        lock = client.lock("x")
        async with lock:
            pass
        way.hold()
        acquiring = asyncio.create_task(lock.acquire())
        await until(rival.lock("x").locked)
        # The request has arrived, so it was sent before this moment.
        sent = system_clock()
        await asyncio.sleep(LATE)
        way.let_go()
        lease = await acquiring
        # The end itself, because a clock that is read twice goes on meanwhile.
        assert lease._hold.validity.until <= expires_at(sent, lease.ttl)
        await lease.release()


async def test_a_write_whose_answer_was_lost_is_an_error_and_not_repeated(deployment):
    """The rules of a store adapter, where there is one."""
    async with deployment.over(command_timeout=5) as (client, way):
        backend = client._runtime.backend
        if not isinstance(backend, RowBackend):
            return
        first = Edit(f"{deployment.namespace}/r/latch/x", "", new_version(), b"first", 60.0)
        [made] = await backend.store.compare_and_set([first])
        assert made is not None
        connection = backend.context.connection
        second = first._replace(expected=made.version, version=new_version(), value=b"second")
        way.lose_answer()
        with pytest.raises(BackendError):
            await backend.store.compare_and_set([second])
        # The engine was told to forget what it knew.
        await until(lambda: backend.context.connection > connection)
        found: list[Row] = []

        async def read() -> bool:
            try:
                found[:] = await backend.store.get([first.key])
            except BackendError:
                return False
            return True

        await until(read)
        # Of several answers to one write, the first may have been lost: then it was not made.
        assert found[0].value in {first.value, second.value}
        if made.version == first.version:
            # The writer chooses the versions, and not the server.
            assert found[0].version == {first.value: first, second.value: second}[found[0].value].version


async def test_a_lost_race_is_an_answer_and_only_the_callers_own_timeout_ends_the_wait(deployment, rival):
    """Whenever the client writes the row of the lock, another client has changed it just before."""
    limit = deployment.seconds(1.0)
    async with (
        deployment.connect(label="client", command_timeout=limit) as client,
        deployment.connect(label="third") as third,
    ):
        backend = client._runtime.backend
        if isinstance(backend, MemcachedBackend):
            backend = backend._at("x", Family.RW)
        if not isinstance(backend, RowBackend):
            return
        # Where the server lets requests enter by a statement, it does so for a lock that is free.
        held = await rival.rwlock("x").read().acquire()
        write, lost, racing = backend.store.compare_and_set, 0, True

        async def late(edits):
            nonlocal lost
            if racing and edits[0].key.startswith(f"{deployment.namespace}/l/"):
                lost += 1
                await (await third.rwlock("x").read().acquire(timeout=PATIENCE)).release()
            return await write(edits)

        backend.store.compare_and_set = late
        begun = system_clock()
        waiting = asyncio.create_task(client.rwlock("x").write().acquire(timeout=PATIENCE))
        await until(lambda: lost >= 5 and system_clock() > begun + 1.5 * limit)
        assert not waiting.done()
        with pytest.raises(BackendUnavailable, match="other clients changed the row of 'x' first"):
            await client.rwlock("x").read().try_acquire()
        racing = False
        await held.release()
        await (await waiting).release()
    await nothing_remains(rival, "x")
