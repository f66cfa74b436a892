"""A holder that is stopped right after its grant, however long ago the last heartbeat of its client was: no other client is let
in while it believes in its hold, and the next one is soon afterwards. Real processes and the real server, on servers of rows."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.contract.deployments import Deployment, LocalRows, Stored, registry
from tests.faults.lock_process import Worker

pytestmark = pytest.mark.parametrize(
    "server",
    [each for each in registry() if issubclass(each, (Stored, LocalRows)) and each.url is not Deployment.url],
    ids=lambda each: each.name,
    indirect=True,
    scope="session",
)

TTL = 3.0
"""Seconds, on a quiet machine."""


@pytest.mark.parametrize("tenths", [1, 3, 5, 7, 9])
async def test_a_holder_that_is_stopped_at_once_is_followed_after_its_time(deployment, tenths):
    ttl = TTL * deployment.pace
    options = {"namespace": deployment.namespace, "ttl": ttl, "command_timeout": 15.0}
    async with Worker.running(deployment.url(), **options) as holder, deployment.connect(ttl=ttl) as rival:
        # Its client has been idle for longer than it sends heartbeats.
        await holder.acquire("another")
        await holder.ask("release", "another")
        await asyncio.sleep(ttl * (1 + tenths / 10))
        believed = (await holder.acquire("x"))["until"]
        holder.stop()
        stopped = time.monotonic()
        lease = await rival.lock("x").acquire(timeout=4 * ttl + 60)
        followed = time.monotonic()
        assert followed >= believed
        assert followed < stopped + 2 * ttl + 15
        holder.go_on()
        assert (await holder.event("lost"))["name"] == "x"
        await lease.release()
