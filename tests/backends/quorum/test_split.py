"""Clients that do not see the same servers contend for the same locks: never two inside, and everybody gets in."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from aiolock import BackendUnavailable, Client
from tests.faults.proxy import Proxy
from tests.pace import pace

TURNS = 3


class Inside:
    """How many are inside of each lock."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self.turns = 0

    async def stay(self, name: str) -> None:
        """A turn."""
        self._count[name] += 1
        assert self._count[name] == 1
        await asyncio.sleep(0.005)
        assert self._count[name] == 1
        self._count[name] -= 1
        self.turns += 1


async def contend(client: Client, name: str, inside: Inside, turns: int) -> None:
    """Take so many turns. A question that two links broke under is asked again."""
    while turns:
        try:
            async with client.lock(name):
                await inside.stay(name)
        except BackendUnavailable:
            await asyncio.sleep(0.01)
        else:
            turns -= 1


def heal(*ways: Proxy) -> None:
    """Nothing is cut any more."""
    for way in ways:
        way.refuse = False
        way.heal(release=False)
        way.reset_all()


@pytest.mark.parametrize("how", ["refused", "black-holed"])
async def test_each_is_cut_off_another_server(three, how):
    names, inside = [three.name(position) for position in range(3)], Inside()
    async with AsyncExitStack() as stack:
        ways = [await three.more_ways() for _ in range(3)]
        clients = [
            await stack.enter_async_context(three.client(each, ttl=12 * pace(), command_timeout=4 * pace()))
            for each in ways
        ]
        cut = [each[number] for number, each in enumerate(ways)]
        stack.callback(heal, *cut)
        for way in cut:
            if how == "refused":
                way.refuse = True
                way.reset_all()
            else:
                way.blackhole()
        async with asyncio.TaskGroup() as group:
            for client in clients:
                for name in names:
                    group.create_task(contend(client, name, inside, TURNS))
        assert inside.turns == 9 * TURNS
        # What they could not say goes on being said while the client is open, or ends by its ttl.
        heal(*cut)
        await three.nothing_is_left()


async def test_links_that_break_and_heal_at_random(three):
    names, inside, done = [three.name(position) for position in range(3)], Inside(), asyncio.Event()

    async def cut_links(ways: list[Proxy], number: int) -> None:
        # Another server at a time for each client.
        while not done.is_set():
            way = ways[number % 3]
            way.refuse = number % 2 == 0
            way.reset_all()
            if number % 2:
                way.blackhole()
            await asyncio.sleep(0.15)
            way.refuse = False
            way.heal(release=number % 3 == 0)
            way.reset_all()
            number += 1

    async with AsyncExitStack() as stack:
        ways = [await three.more_ways() for _ in range(3)]
        clients = [
            await stack.enter_async_context(three.client(each, ttl=12 * pace(), command_timeout=4 * pace()))
            for each in ways
        ]
        async with asyncio.TaskGroup() as faults:
            for number, each in enumerate(ways):
                faults.create_task(cut_links(each, number))
            async with asyncio.TaskGroup() as group:
                for client in clients:
                    for name in names:
                        group.create_task(contend(client, name, inside, TURNS))
            done.set()
        assert inside.turns == 9 * TURNS
        await three.nothing_is_left()
