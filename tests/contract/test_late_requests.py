"""Requests that reach the server late, over a connection that their client has lost: later ones were answered by then."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from aiolock import BackendUnavailable
from tests.contract.test_lifetimes import ACTS, NEEDS, extending, validity
from tests.faults.staging import PATIENCE, until


@pytest.mark.parametrize("act", ["mutex", "read", "permits"])
async def test_a_request_to_extend_that_arrives_after_the_answer_to_a_later_one_changes_nothing(
    deployment, rival, act
):
    """The connection that carried it is lost to the client, and the server reads it all the same."""
    if not extending(deployment) or not NEEDS.get(act, set()) <= deployment.kinds:
        return
    short = deployment.seconds(0.4)
    async with deployment.over(label="client") as (client, way):
        lease = await ACTS[act](client, ttl=100, renew=False).acquire()
        claim = validity(lease).claim
        # From now on the server knows whatever has to be told to it only once.
        await claim.extend(50, 1)
        way.strand(deployment.extends)
        first = asyncio.create_task(claim.extend(short, 2))
        await until(lambda: way.stranded, "the request is on its way")
        # All of it, on every connection.
        await asyncio.wait([first], timeout=min(1.0, deployment.seconds(0.3)))
        way.break_off()
        with contextlib.suppress(BackendUnavailable):
            await first

        async def later() -> bool:
            try:
                await claim.extend(80, 3)
            except BackendUnavailable:
                return False
            return True

        await until(later)
        async with asyncio.timeout(PATIENCE):
            await way.deliver()
        # Where the server has no clock, the session of the holder is looked at every two seconds.
        wait = 1.5 * short + (0 if deployment.tells else 5.0)
        assert await ACTS["write" if act == "read" else act](rival).try_acquire(timeout=wait) is None
        if deployment.tells:
            [holder] = (await ACTS[act](rival).inspect()).holders
            assert holder.remaining > 60, "the late request has ended it earlier"
        await client._runtime.scheduler.renew(validity(lease))
        assert lease.held
        await lease.release()
