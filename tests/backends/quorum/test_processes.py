"""A client's process dies: holding, waiting, or between two votes; the next one is served, and nothing stays."""

from __future__ import annotations

import asyncio

import aiolock
from tests.faults.lock_process import Worker
from tests.faults.redis_keys import Stopwatch
from tests.faults.staging import PATIENCE, queued, until

TTL = 1.0
SOON = 8.0
"""Seconds that a loaded machine may add to what happens at once."""


def worker(three, urls: list[str], **options):
    """A process of its own."""
    settings = {"namespace": three.namespace, "command_timeout": 5, "label": "worker", **options}
    return Worker.running(urls, **settings)


async def test_kill_nine_of_a_holder_hands_its_locks_on_within_the_ttl(three):
    names = [three.name(position) for position in range(3)]
    async with worker(three, three.urls(), ttl=TTL) as holder, three.client(ttl=30) as client:
        for name in names:
            await holder.acquire(name)
        waiters = [asyncio.create_task(client.lock(name).acquire()) for name in names]
        for name in names:
            await queued(client.lock(name), 1)
        holder.kill()
        since = Stopwatch()
        leases = await asyncio.gather(*waiters)
        assert since.seconds < TTL + SOON
        await asyncio.gather(*(lease.release() for lease in leases))
    await three.nothing_is_left()


async def test_kill_nine_of_a_waiter_costs_the_others_nothing(three):
    """With a ttl that nobody could wait for here; whoever dies is first in the line of the server that decides."""
    name = three.name(1)
    async with (
        worker(three, three.urls(), ttl=300) as doomed,
        three.several(2, ttl=300) as (first, last),
    ):
        held = await first.lock(name).acquire()
        doomed.tell("acquire", name, None)
        await queued(first.lock(name), 1)
        waiter = asyncio.create_task(last.lock(name).acquire())
        await queued(first.lock(name), 2)
        doomed.kill()

        async def gone() -> bool:
            async with three.alone(1) as client:
                info = await client.lock(name).inspect()
            prefix = f"{three.namespace}:1:to:"
            channels = [
                channel.decode().removeprefix(prefix)
                for channel in await three.admins[1].pubsub_channels(f"{prefix}*")
            ]
            return bool(info.holders) and len({channel.partition(":")[0] for channel in channels}) <= 2

        await until(gone)
        await held.release()
        since = Stopwatch()
        async with asyncio.timeout(PATIENCE):
            lease = await waiter
        assert since.seconds < SOON
        await lease.release()
    await three.nothing_is_left()


async def killed_between(three, votes: int) -> None:
    """A client dies when so many servers have said yes, of which it has heard none."""
    name, ways = three.name(votes - 1), await three.more_ways()
    async with (
        worker(three, three.urls(ways), ttl=TTL) as doomed,
        three.client(label="rival", ttl=30) as client,
    ):
        for way in ways[:votes]:
            way.down.blackhole()
        for way in ways[votes:]:
            way.blackhole()
        doomed.tell("acquire", name, None)

        async def granted() -> bool:
            return await three.votes(name) == ["worker"] * votes + ["-"] * (3 - votes)

        await until(granted)
        doomed.kill()
        since = Stopwatch()
        lease = await client.lock(name).acquire()
        assert since.seconds < TTL + SOON
        await lease.release()
        assert doomed.seen("granted") is None


async def test_kill_nine_between_the_votes_costs_a_ttl(three):
    await asyncio.gather(*(killed_between(three, votes) for votes in (1, 2, 3)))
    await three.nothing_is_left()


async def test_a_holder_stopped_beyond_its_ttl_is_lost_before_it_takes_a_step(three):
    name = three.name(2)
    async with worker(three, three.urls(), ttl=TTL) as holder, three.client(ttl=30) as client:
        await holder.acquire(name)
        waiter = asyncio.create_task(client.lock(name).acquire())
        await queued(client.lock(name), 1)
        holder.stop()
        lease = await waiter
        holder.go_on()
        state = await holder.ask("state", name)
        assert not state["held"]
        assert state["lost"]
        await holder.ask("release", name)
        await lease.renew()
        assert lease.held
        await lease.release()
    await three.nothing_is_left()


async def test_a_list_of_addresses_in_any_order_is_one_quorum(three):
    """Processes whose lists are sorted differently exclude each other, and one decides for both."""
    one, two, three_ = three.urls()
    options = {"namespace": three.namespace}
    async with (
        aiolock.connect([three_, one, two], **options) as first,
        aiolock.connect([two, three_, one], **options) as second,
    ):
        for position in range(3):
            name = three.name(position)
            async with first.lock(name):
                waiter = asyncio.create_task(second.lock(name).acquire())
                async with three.alone(position) as seen:
                    await queued(seen.lock(name), 1)
            await (await waiter).release()
