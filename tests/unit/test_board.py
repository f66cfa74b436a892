"""The work on a document: steps count once whatever gets lost, races end, and nothing is left when nobody waits."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

import aiolock
from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.board import LATE, board
from aiolock.contract import Family
from aiolock.errors import BackendRefused, BackendUnavailable, WaitTimeout
from tests.contract.staging import passes, until, waiting


class Lossy:
    """A way to a server on which requests and answers get lost, and copies of lost requests arrive late."""

    def __init__(self, seed: int, trouble: float) -> None:
        self.random = Random(seed)
        self.trouble = trouble
        self.lost = 0

    async def __call__(self, step):
        await asyncio.sleep(0)
        fate = self.random.random() / self.trouble if self.trouble else 9
        if fate > 1:
            answer = step()
            await asyncio.sleep(0)
            return answer
        self.lost += 1
        if fate < 0.4:
            step()
        elif fate < 0.7:
            asyncio.get_running_loop().call_later(self.random.random() * 0.02, step)
        raise BackendUnavailable("the connection is lossy")


def connect(server: MemoryServer, transport=None, **options) -> aiolock.Client:
    return aiolock.Client(MemoryBackend(server=server, transport=transport), command_timeout=8, **options)


@pytest.mark.parametrize("seed", range(12))
async def test_every_count_counts_once_whatever_gets_lost(seed):
    server = MemoryServer()
    ways = [Lossy(seed, 0.4), Lossy(seed + 100, 0.4), None]
    clients = [connect(server, way) for way in ways]
    for client in clients:
        await client.open()
    left = []

    async def count(client: aiolock.Client) -> None:
        for _ in range(8):
            rest = await client.latch("x", 200).count_down(2)
            left.append(rest)

    await asyncio.gather(*(count(client) for client in clients for _ in range(3)))
    assert await clients[2].latch("x", 200).count() == 200 - 2 * 3 * 3 * 8
    assert sum(way.lost for way in ways if way) > 10
    assert min(left) == 200 - 2 * 3 * 3 * 8
    for way in ways[:2]:
        way.trouble = 0
    for client in clients:
        assert client._runtime.boards == {}
        await client.aclose()


@pytest.mark.parametrize("seed", range(6))
async def test_a_barrier_is_passed_by_all_of_a_round_whatever_gets_lost(seed):
    server = MemoryServer()
    ways = [Lossy(seed, 0.3), Lossy(seed + 100, 0.3)]
    clients = [connect(server, way) for way in ways]
    for client in clients:
        await client.open()
    for _ in range(4):
        places = await asyncio.gather(
            *(client.barrier("x", 4, ttl=30).wait() for client in clients for _ in range(2))
        )
        assert sorted(places) == [0, 1, 2, 3]
    for way in ways:
        way.trouble = 0
    for client in clients:
        await client.aclose()


async def test_counts_of_one_moment_travel_together():
    server = MemoryServer()
    steps = 0

    async def counted(step):
        nonlocal steps
        steps += 1
        await asyncio.sleep(0)
        return step()

    async with connect(server, counted) as client:
        await asyncio.gather(*(client.latch("x", 500).count_down() for _ in range(300)))
        assert steps <= 6
        assert await client.latch("x", 500).count() == 200


async def test_a_server_that_is_gone_is_told_within_the_command_timeout():
    way = Lossy(1, 0.0)
    async with aiolock.Client(
        MemoryBackend(server=MemoryServer(), transport=way), command_timeout=0.2
    ) as client:
        way.trouble = 1e9
        for ask in (client.latch("x", 2).count_down, client.latch("x", 2).wait, client.barrier("x", 2).wait):
            with pytest.raises(
                BackendUnavailable, match=r"within the command timeout of 0.2 s: the connection is lossy"
            ):
                await ask()
        await until(lambda: not client._runtime.boards)
        way.trouble = 0


async def test_who_waits_survives_an_outage():
    server = MemoryServer()
    way = Lossy(1, 0.0)
    async with (
        aiolock.Client(MemoryBackend(server=server, transport=way), command_timeout=0.2) as client,
        connect(server) as other,
    ):
        waiter = asyncio.create_task(client.latch("x", 1).wait())
        await waiting(client, 1)
        await until(lambda: next(iter(client._runtime.boards.values()))._seen)
        way.trouble = 1e9
        await asyncio.sleep(0.5)
        assert not waiter.done()
        with pytest.raises(WaitTimeout):
            await client.latch("x", 1).wait(timeout=0.05)
        await other.latch("x", 1).count_down()
        way.trouble = 0
        async with asyncio.timeout(20):
            await waiter


async def test_what_a_step_or_a_look_raises_reaches_its_own_task_only():
    async with connect(MemoryServer()) as client:
        work = board(client._runtime, "x", Family.LATCH, 60)

        def wrong(body):
            raise ZeroDivisionError

        bad, good = work.wish(wrong), work.wish(lambda body: ({"n": 1}, "done"))
        with pytest.raises(ZeroDivisionError):
            await bad
        assert await good == "done"

        async def follow() -> int:
            work = board(client._runtime, "x", Family.LATCH, 60)
            return await work.wait(lambda body: body["n"] if body["n"] == 2 else None, None)

        calm = asyncio.create_task(follow())
        await waiting(client, 1)
        work = board(client._runtime, "x", Family.LATCH, 60)
        with pytest.raises(ZeroDivisionError):
            await work.wait(wrong, None)
        assert await work.wait(lambda body: None, 0.01) is LATE
        assert not calm.done()
        await work.change(lambda body: ({"n": 2}, None))
        assert await calm == 2


async def test_a_document_that_grows_too_long_is_refused():
    async with connect(MemoryServer()) as client:
        work = board(client._runtime, "x", Family.LATCH, 60)
        with pytest.raises(BackendRefused, match="too many users"):
            await work.change(lambda body: ({"long": "x" * 70_000}, None))
        assert await board(client._runtime, "x", Family.LATCH, 60).change(lambda body: (None, body)) == {}


async def test_a_board_that_has_ended_takes_no_wishes():
    async with connect(MemoryServer()) as client:
        work = board(client._runtime, "x", Family.LATCH, 60)
        await work.change(lambda body: (None, 1))
        await passes(3)
        assert work.over
        for ask in (work.change(lambda body: (None, 1)), work.wait(lambda body: 1, None)):
            with pytest.raises(BackendUnavailable, match="has ended"):
                await ask
        assert board(client._runtime, "x", Family.LATCH, 60) is not work


async def test_clients_that_were_seen_long_ago_are_forgotten():
    server = MemoryServer()
    async with connect(server) as client:
        for _ in range(300):
            await client.latch("x", 1000).count_down()
            await until(lambda: not client._runtime.boards)
        document = client._backend.document("x", Family.LATCH)
        entry = await document.read()
        assert len(entry.value) < 8000
        assert await client.latch("x", 1000).count() == 700
