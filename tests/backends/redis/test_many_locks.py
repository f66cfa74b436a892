"""Thousands of locks that become free at once, for one client that is slower than their ttl."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

import aiolock
from aiolock.core.runtime import ASKING
from tests.faults.redis_keys import nothing_is_left
from tests.faults.staging import waiting

MANY = 2000


class Enters:
    """Counts the requests that a client sends."""

    def __init__(self, client: aiolock.Client) -> None:
        backend: Any = client._runtime.backend
        commands = backend._mutex.commands
        self._enter = commands.enter
        commands.enter = self.enter
        self.sent = self.under_way = self.most = 0

    def enter(self, *arguments: Any) -> asyncio.Future[Any]:
        self.sent += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        reply: asyncio.Future[Any] = self._enter(*arguments)
        reply.add_done_callback(self.answered)
        return reply

    def answered(self, reply: asyncio.Future[Any]) -> None:
        del reply
        self.under_way -= 1


@pytest.mark.parametrize("stopped", [0.0, 1.0])
async def test_grants_that_came_too_late_are_asked_for_again_by_the_same_request_a_few_at_a_time(
    server, admin, connect, namespace, stopped
):
    async with (
        connect(server.url, ttl=60, command_timeout=60.0) as holder,
        connect(server.url, ttl=0.5, command_timeout=60.0) as client,
    ):
        held = [await holder.lock(f"x{n}").acquire() for n in range(MANY)]

        async def use(n: int) -> None:
            # One that was granted before the stop is lost in it, rightly.
            lease = await client.lock(f"x{n}").acquire()
            await lease.release()

        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            for n in range(MANY):
                group.create_task(use(n))
            await waiting(client, MANY)
            enters = Enters(client)
            released = [asyncio.ensure_future(lease.release()) for lease in held]
            await asyncio.wait(released)
            # The client is held up for longer than any grant stands.
            time.sleep(stopped)  # noqa: ASYNC251
        # Each was asked for once more, and now and then once again.
        assert enters.sent <= 2 * MANY
        assert enters.most <= ASKING
        assert not stopped or enters.sent >= MANY / 10
    await nothing_is_left(admin, namespace)


async def test_an_answer_that_came_too_late_is_asked_for_again_by_the_same_request(
    server, admin, connect, namespace, monkeypatch
):
    """Given back, the lock would go to others while this client is as slow as it is."""
    async with connect(server.url, ttl=0.5, command_timeout=60.0) as client:
        backend: Any = client._runtime.backend
        ends: list[str] = []
        for word in ("release", "leave"):
            monkeypatch.setattr(backend._mutex.commands, word, lambda *_, **__: ends.append("gave back"))
        enters = Enters(client)
        asking = asyncio.create_task(client.lock("x").acquire())
        while not enters.sent:  # noqa: ASYNC110 - no longer than that: the answer must not have come
            await asyncio.sleep(0)
        # The client is held up for longer than the grant stands.
        time.sleep(1.0)  # noqa: ASYNC251
        lease = await asking
        assert ends == []
        assert enters.sent >= 2
        monkeypatch.undo()
        await lease.release()
    await nothing_is_left(admin, namespace)
