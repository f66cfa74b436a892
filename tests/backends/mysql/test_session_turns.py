"""The session mode between busy processes, when every turn goes through the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pymysql
import pytest

import aiolock
from aiolock.backends.mysql import queue, session_mode
from aiolock.backends.mysql.session_mode import user_lock
from aiolock.core import local_queue
from aiolock.types import Family
from tests import servers
from tests.backends.mysql.tools import as_root, sessions
from tests.faults.proxy import Proxy, mysql_frames
from tests.faults.staging import PATIENCE, gets_the_lock, queued


@pytest.fixture(autouse=True)
def nothing_is_passed_on_locally(monkeypatch):
    """Every turn goes to the server."""
    monkeypatch.setattr(local_queue, "may_hand_over", lambda *_: False)


async def drain(clients, turns: int, tasks: int = 3, **options) -> list[int]:
    """Several tasks of several clients take turns; the tokens in the order of their turns."""
    inside = 0
    tokens: list[int] = []

    async def worker(client) -> None:
        nonlocal inside
        for _ in range(turns):
            with contextlib.suppress(aiolock.AcquireTimeout, aiolock.LockLost):
                async with client.lock("hot", **options) as lease:
                    inside += 1
                    assert inside == 1
                    tokens.append(lease.token)
                    try:
                        await asyncio.sleep(0)
                    finally:
                        inside -= 1

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(worker(client) for client in clients for _ in range(tasks)))
    return tokens


async def is_free(deployment, client) -> bool:
    lock = user_lock(client._backend._context, "hot", Family.LOCK)
    return (await as_root(deployment.server, f"SELECT IS_USED_LOCK('{lock}')"))[0][0] is None


async def test_whoever_ends_the_statement_leaves_the_lock_to_one(deployment):
    """The lock may have come in the same moment; it goes to one waiter all the same."""
    over = False

    async def killer() -> None:
        while not over:
            for number, _, statement in await sessions(deployment.server):
                if statement and "GET_LOCK" in statement:
                    with contextlib.suppress(pymysql.err.MySQLError):
                        await as_root(deployment.server, f"KILL QUERY {number}")
            await asyncio.sleep(0.005)

    async with deployment.connect("session", ttl=30) as one, deployment.connect("session", ttl=30) as other:
        killing = asyncio.create_task(killer())
        tokens = await drain([one, other], 20)
        over = True
        await killing
        assert len(tokens) == 120
        assert tokens == sorted(set(tokens))
        assert await is_free(deployment, one)


async def test_waiters_that_give_up_leave_nothing(deployment):
    async with (
        deployment.connect("session", ttl=30) as one,
        deployment.connect("session", ttl=30) as other,
        deployment.connect("session", ttl=30) as third,
    ):
        await drain([one, other], 40, timeout=0.002)
        assert await gets_the_lock(third, "hot") > 0

        async def freed() -> None:
            while not await is_free(deployment, one):  # noqa: ASYNC110 - another server's state
                await asyncio.sleep(0.01)

        async with asyncio.timeout(PATIENCE):
            await freed()


async def test_a_cancelled_release_is_carried_out_by_whoever_follows(deployment):
    async with deployment.connect("session", ttl=30) as one, deployment.connect("session", ttl=30) as other:
        await drain([one, other], 2)

        async def worker(client) -> None:
            async with client.lock("hot"):
                await asyncio.sleep(0)
                # The next await is the release.
                asyncio.current_task().cancel()

        for _ in range(20):
            tasks = [asyncio.create_task(worker(client)) for client in (one, other) for _ in range(3)]
            async with asyncio.timeout(PATIENCE):
                await asyncio.wait(tasks)
            assert all(task.cancelled() for task in tasks)
        assert await gets_the_lock(other, "hot") > 0


async def test_tokens_rise_on_a_server_whose_sysdate_is_now():
    with servers.MariaDB(extra=["--sysdate-is-now"]) as server:
        url = f"{server.url}?mode=session"
        async with aiolock.connect(url, ttl=30) as one, aiolock.connect(url, ttl=30) as other:
            assert one._backend.sessions.facts.clock_stands
            tokens = await drain([one, other], 10)
            assert len(tokens) == 60
            assert tokens == sorted(set(tokens))


async def test_a_turn_whose_message_is_lost_is_found(deployment, monkeypatch):
    monkeypatch.setattr(session_mode, "POLL", 0.2)
    monkeypatch.setattr(queue, "GRACE", 0.1)
    monkeypatch.setattr(session_mode, "GRACE", 0.1)
    async with (
        Proxy(deployment.server.host, deployment.server.port, framing=mysql_frames) as proxy,
        deployment.connect("session", port=proxy.port, ttl=30) as client,
        deployment.connect("session", ttl=30) as rival,
    ):
        lease = await rival.lock("hot").acquire()
        waiter = asyncio.create_task(client.lock("hot").acquire(timeout=PATIENCE))
        await queued(rival.lock("hot"), 1)
        # A number of columns, one column, two ends and a row.
        lost = proxy.down.drop_next(5)
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            await lost.wait()
            await (await waiter).release()
        assert await is_free(deployment, rival)


@pytest.mark.parametrize("mode", ["lease", "session", "row"])
async def test_the_states_of_a_position_are_logged_with_the_name_of_the_lock(deployment, mode, caplog):
    async with deployment.connect(mode) as client, deployment.connect(mode) as rival:
        lease = await rival.lock("x").acquire()
        with caplog.at_level(logging.DEBUG, "aiolock.claim"):
            waiter = asyncio.create_task(client.lock("x").acquire())
            await queued(rival.lock("x"), 1)
            await lease.release()
            await (await waiter).release()
    [record] = [each for each in caplog.records if each.name == "aiolock.claim"]
    assert record.aiolock_lock == "x"
    assert (record.aiolock_before, record.aiolock_after) == (
        queue.PositionState.WAITING.value,
        queue.PositionState.TURN.value,
    )
    assert record.getMessage().startswith("position in the queue of 'x': blocked")
