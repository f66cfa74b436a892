"""Another life for a hold of a quorum that is not renewed: of which answers it is made."""

from __future__ import annotations

import asyncio

from tests.faults.staging import PATIENCE, until


async def test_the_answer_to_a_request_that_another_has_followed_is_an_answer(three):
    async with three.client(command_timeout=30) as client:
        lease = await client.lock("x", ttl=50, renew=False).acquire()
        votes = lease._hold.validity.claim.votes
        await until(lambda: all(vote.granted for vote in votes), "three votes")
        # From now on the servers know the script.
        await lease.extend(40)
        for way in three.ways:
            way.down.blackhole()
        first = asyncio.create_task(lease.extend(90))
        for admin, vote in zip(three.admins, votes, strict=True):

            async def carried_out(admin=admin, vote=vote) -> bool:
                return (await admin.hget(vote.claim.key, "extended") or b"").endswith(b" 2")

            await until(carried_out)
        for way in three.ways:
            way.up.blackhole()
        second = asyncio.create_task(lease.extend(20))
        await until(lambda: all(vote.extension == 3 for vote in votes), "asked again")
        for way in three.ways:
            way.down.heal()
        async with asyncio.timeout(PATIENCE):
            await first
        assert not second.done()
        assert lease.remaining() < 20
        for way in three.ways:
            way.up.heal()
        async with asyncio.timeout(PATIENCE):
            await second
        assert 15 < lease.remaining() < 20
        await lease.release()
    await three.nothing_is_left()


async def test_a_vote_that_comes_late_is_extended_as_well(three):
    name = three.name(0)
    async with three.client(command_timeout=30) as client:
        three.ways[2].down.blackhole()
        lease = await client.lock(name, ttl=50, renew=False).acquire()
        three.ways[1].blackhole()
        extending = asyncio.create_task(lease.extend(90))
        await asyncio.wait([extending], timeout=0.1)
        assert not extending.done()
        three.ways[2].down.heal()
        async with asyncio.timeout(PATIENCE):
            await extending
        assert 50 < lease.remaining() < 90
        three.ways[1].heal()
        await lease.release()
    await three.nothing_is_left()
