"""Nobody passes until all have arrived; a round that cannot be completed is broken for all who are in it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from aiolock import BackendRefused, BarrierBroken, ConfigError, WaitTimeout
from aiolock.core import register as registers
from tests.faults.staging import PATIENCE, passes, until

NEEDS = "registers"


async def inside(client, count: int, parties: int) -> None:
    """Wait until so many parties are inside."""

    async def enough() -> bool:
        return await client.barrier("x", parties).waiting() == count

    await until(enough)


async def ends(tasks) -> list[object]:
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def test_nobody_passes_before_all_have_arrived(client, rival):
    tasks = [asyncio.create_task(each.barrier("x", 5).wait()) for each in (client, rival, client, rival)]
    await inside(client, 4, 5)
    await passes(20)
    assert not any(task.done() for task in tasks)
    tasks.append(asyncio.create_task(client.barrier("x", 5).wait()))
    assert sorted(await ends(tasks)) == [0, 1, 2, 3, 4]
    assert await client.barrier("x", 5).waiting() == 0


async def test_it_is_used_again_and_rounds_do_not_mix(client, rival):
    rounds = 5
    done: list[int] = []

    async def party(who) -> None:
        for number in range(rounds):
            done.append(number)
            await who.barrier("x", 4).wait()
            # Everybody has begun this round, and nobody the one after the next.
            assert done.count(number) == 4
            assert done.count(number + 2) == 0

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        for who in (client, rival, client, rival):
            group.create_task(party(who))
    assert len(done) == 4 * rounds


async def test_a_crowd_of_clients_that_arrive_at_the_same_moment_passes_again_and_again(deployment):
    """They compete for one register; who waits is let down by no command timeout that others have used up."""
    crowd, done = 40, []
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(deployment.connect()) for _ in range(crowd)]
        for _ in range(2):
            parties = [asyncio.create_task(each.barrier("x", crowd, ttl=60).wait()) for each in clients]
            done += await ends(parties)
    assert sorted(done) == sorted([*range(crowd), *range(crowd)])


async def test_a_barrier_of_one_is_passed_at_once(client):
    assert [await client.barrier("x", 1).wait(timeout=PATIENCE) for _ in range(3)] == [0, 0, 0]


async def test_a_party_that_is_cancelled_breaks_the_round(client, rival):
    leaver = asyncio.create_task(rival.barrier("x", 3).wait())
    stayer = asyncio.create_task(client.barrier("x", 3).wait())
    await inside(client, 2, 3)
    leaver.cancel()
    left, broken = await ends([leaver, stayer])
    assert isinstance(left, asyncio.CancelledError)
    assert isinstance(broken, BarrierBroken)
    assert "barrier 'x' was broken: a party was cancelled (rival)" in str(broken)
    # The next round is another one.
    assert sorted(
        await ends([asyncio.create_task(each.barrier("x", 3).wait()) for each in (client, rival, client)])
    ) == [
        0,
        1,
        2,
    ]


async def test_a_party_whose_time_is_over_breaks_the_round(deployment, client, rival):
    limit = deployment.seconds(0.3)
    impatient = asyncio.create_task(rival.barrier("x", 3, label="hasty").wait(timeout=limit))
    patient = asyncio.create_task(client.barrier("x", 3).wait())
    late, broken = await ends([impatient, patient])
    assert isinstance(late, WaitTimeout)
    assert f"barrier 'x' was not complete within {limit:g} s: 2 of 3 were there" in str(late)
    assert isinstance(broken, BarrierBroken)
    assert broken.reason == "a party timed out (hasty)"


async def test_a_party_whose_client_is_closed_breaks_the_round(deployment, client):
    other = await deployment.connect(label="other").open()
    tasks = [asyncio.create_task(each.barrier("x", 3).wait()) for each in (other, client)]
    await inside(client, 2, 3)
    await other.aclose()
    closed, broken = await ends(tasks)
    assert isinstance(closed, RuntimeError)
    assert isinstance(broken, BarrierBroken)


async def test_a_party_for_which_there_is_no_room_breaks_the_round(deployment, client, rival, monkeypatch):
    stayers = [asyncio.create_task(each.barrier("x", 4).wait()) for each in (client, rival)]
    await inside(client, 2, 4)
    [register] = client._runtime.registers.values()
    size = len((await register.register.read()).value)
    # Enough for what those who are inside write, and not for the entry of another client.
    monkeypatch.setattr(registers, "MOST_BYTES", size + 40)
    async with deployment.connect(label="other") as other:
        with pytest.raises(BackendRefused, match="has too many users"):
            await other.barrier("x", 4).wait(timeout=PATIENCE)
        for broken in await ends(stayers):
            assert isinstance(broken, BarrierBroken)
            assert broken.reason == "there is no room for another party"
    # The next round is another one, and complete with those for whom there is room.
    monkeypatch.undo()
    assert sorted(await ends([asyncio.create_task(client.barrier("x", 4).wait()) for _ in range(4)])) == [
        0,
        1,
        2,
        3,
    ]


class Silent:
    """A party of a client that stopped: it stands in the register, and nothing more is heard of it."""

    def __init__(self, client, ttl: float) -> None:
        self._client = client
        self._task = asyncio.create_task(client.barrier("x", 3, ttl=ttl, label="silent").wait())

    async def fall_silent(self) -> None:
        await inside(self._client, 1, 3)
        [register] = self._client._runtime.registers.values()
        register.change = lambda change, **_: asyncio.get_running_loop().create_future()

    async def end(self) -> object:
        self._task.cancel()
        [result] = await ends([self._task])
        return result


async def test_a_party_that_died_breaks_the_round_after_its_ttl(deployment, client, rival):
    ttl = deployment.seconds(0.4)
    silent = Silent(rival, ttl)
    await silent.fall_silent()
    begin = asyncio.get_running_loop().time()
    waiter = asyncio.create_task(client.barrier("x", 3, ttl=ttl).wait())
    [broken] = await ends([waiter])
    assert isinstance(broken, BarrierBroken)
    assert broken.reason == "no heartbeat of silent"
    assert asyncio.get_running_loop().time() - begin >= 0.99 * ttl
    await silent.end()


async def test_a_party_that_died_before_the_last_one_came_is_not_counted(deployment, client, rival):
    ttl = deployment.seconds(0.4)
    silent = Silent(rival, ttl)
    await silent.fall_silent()
    # With it there would be three: the roll is called, and it does not answer.
    tasks = [asyncio.create_task(client.barrier("x", 3, ttl=ttl).wait()) for _ in range(2)]
    results = await ends(tasks)
    assert [type(result) for result in results] == [BarrierBroken, BarrierBroken]
    await silent.end()


async def test_a_full_round_whose_parties_all_died_is_broken_by_who_waits_for_the_next(
    deployment, client, rival
):
    """Nobody who is inside can find that out: without the others, nobody would ever pass again."""
    ttl, dead = deployment.seconds(0.4), []
    async with deployment.connect(label="third") as third:
        for number, who in enumerate((rival, third), start=1):
            dead.append(asyncio.create_task(who.barrier("x", 2, ttl=ttl).wait()))
            await inside(client, number, 2)
            for register in who._runtime.registers.values():
                register.change = lambda change, **_: asyncio.get_running_loop().create_future()
        parties = [asyncio.create_task(client.barrier("x", 2, ttl=ttl).wait()) for _ in range(2)]
        assert sorted(await ends(parties)) == [0, 1]
        for task in dead:
            task.cancel()
        assert all(isinstance(end, asyncio.CancelledError | BarrierBroken) for end in await ends(dead))


async def test_parties_that_live_wait_for_longer_than_their_ttl(deployment, client, rival):
    ttl = deployment.lasting(0.3)
    tasks = [asyncio.create_task(each.barrier("x", 3, ttl=ttl).wait()) for each in (client, rival)]
    await asyncio.sleep(1.5 * ttl)
    assert not any(task.done() for task in tasks)
    tasks.append(asyncio.create_task(client.barrier("x", 3, ttl=ttl).wait()))
    assert sorted(await ends(tasks)) == [0, 1, 2]


async def test_everybody_names_the_same_number(client, rival):
    waiter = asyncio.create_task(client.barrier("x", 2).wait())
    await inside(client, 1, 2)
    with pytest.raises(ConfigError, match="barrier 'x' has 2 parties, not 3"):
        await rival.barrier("x", 3).wait()
    await passes(20)
    assert not waiter.done()
    assert await rival.barrier("x", 2).wait(timeout=PATIENCE) == 1
    assert await waiter == 0


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2", None, 1001])
async def test_wrong_numbers_are_refused(client, value):
    with pytest.raises(ConfigError, match=r"^parties must be a whole number from 1 to 1000, not "):
        client.barrier("x", value)
    with pytest.raises(ConfigError, match=r"^timeout must be "):
        await client.barrier("x", 2).wait(timeout="soon")
    with pytest.raises(ConfigError, match=r"^ttl must be "):
        client.barrier("x", 2, ttl=0.01)


async def test_with_no_time_a_party_arrives_only_if_it_is_the_last(client, rival):
    with pytest.raises(WaitTimeout, match="barrier 'x' was not complete within 0 s: 0 of 3 were there"):
        await client.barrier("x", 3).wait(timeout=0)
    tasks = [asyncio.create_task(rival.barrier("x", 3).wait())]
    await inside(client, 1, 3)
    for who in (client, rival):
        with pytest.raises(WaitTimeout, match="1 of 3 were there"):
            await who.barrier("x", 3).wait(timeout=0)
    # Whoever did not arrive breaks nothing.
    tasks.append(asyncio.create_task(client.barrier("x", 3).wait()))
    await inside(client, 2, 3)
    assert not tasks[0].done()
    assert await client.barrier("x", 3).wait(timeout=0) == 2
    assert sorted(await ends(tasks)) == [0, 1]
    assert await client.barrier("y", 1).wait(timeout=0) == 0
    with pytest.raises(ConfigError, match="has 3 parties, not 4"):
        await client.barrier("x", 4).wait(timeout=0)
