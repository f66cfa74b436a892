"""Selling the goods of the flash sale by each method that articles name: a sale, and what follows the death of a seller."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import aiolock
from benchmarks.contestants.ours import connect
from benchmarks.worker import Stage
from examples.flash_sale.goods import STORES, Goods

__all__ = ["buyers", "doomed", "followers", "prepared", "sold", "stocked"]

WORK = 0.001
"""Seconds between reading the stock and writing it."""
TTL = 10.0
"""Seconds; as in the flash sale's own locks that expire."""
SETTLED = 2.0
"""Seconds after which a buyer has the lock, or waits for it."""

Method = dict[str, str]
"""The store, its URL, the way to sell, and the URL of the locks for those of aiolock."""


class _Seller:
    """One way to sell the goods of one store."""

    def __init__(self, method: Method, goods: Goods, locks: aiolock.Client) -> None:
        self._way = method["way"]
        self._goods = goods
        self._locks = locks

    @classmethod
    @asynccontextmanager
    async def opened(cls, method: Method, work: float = WORK) -> AsyncIterator[_Seller]:
        async with (
            STORES[method["store"]](method["url"]) as goods,
            connect(method["locks"], ttl=TTL) as locks,
        ):
            goods.work = work
            yield cls(method, goods, locks)

    async def sell(self, number: int, buyer: str) -> bool:
        """Sell a piece; return whether there was one."""
        if self._way in self._goods.WAYS:
            return await self._goods.WAYS[self._way](self._goods, number, buyer)
        if self._way == "no lock":
            return await self._goods.take(number, buyer)
        async with self._locks.lock(f"goods:{number}"):
            return await self._goods.take(number, buyer)


async def prepared(stage: Stage, stores: Sequence[Sequence[str]]) -> None:
    """Make what some stores need, each a name and a URL."""
    del stage
    for store, url in stores:
        async with STORES[store](url) as goods:
            await goods.prepare()


async def stocked(stage: Stage, methods: Sequence[Method], number: int, stock: int) -> None:
    """Put a stock for each of several methods, under a number of its own from ``number`` on."""
    del stage
    for place, method in enumerate(methods):
        async with STORES[method["store"]](method["url"]) as goods:
            await goods.put(number + place, stock)


async def buyers(
    stage: Stage, method: Method, number: int, warm: int, tasks: int
) -> list[tuple[float, float]]:
    """Buy until nothing is left, with several tasks: when each piece was asked for, and when it was there.

    Before that, all of them buy pieces of number ``warm``, so that connections are there.
    """
    bought: list[tuple[float, float]] = []
    async with _Seller.opened(method) as seller:

        async def buy(task: int) -> None:
            while True:
                asked = time.monotonic()
                if not await seller.sell(number, f"{os.getpid()}-{task}-{len(bought)}"):
                    return
                bought.append((asked, time.monotonic()))

        await asyncio.gather(*(seller.sell(warm, f"{os.getpid()}-{task}") for task in range(tasks)))
        await stage.pause()
        await asyncio.gather(*(buy(task) for task in range(tasks)))
        await stage.pause()
    return bought


async def sold(stage: Stage, method: Method, number: int) -> int:
    """How many buyers there are."""
    del stage
    async with STORES[method["store"]](method["url"]) as goods:
        return await goods.sold(number)


async def doomed(stage: Stage, methods: Sequence[Method], number: int) -> None:
    """Begin a sale by each method, each of goods of their own, and stop before the write, until we are killed."""
    async with AsyncExitStack() as stack:
        sales = []
        for place, method in enumerate(methods):
            seller = await stack.enter_async_context(_Seller.opened(method, work=3600))
            sales.append(asyncio.create_task(seller.sell(number + place, "doomed")))
        await asyncio.sleep(SETTLED)
        await stage.pause()
        await asyncio.gather(*sales)


async def followers(stage: Stage, methods: Sequence[Method], number: int, limit: float) -> list[float | None]:
    """Sell a piece by each method, of which others are in the middle: when it was sold, or ``None`` after ``limit`` seconds."""
    sold: list[float | None] = [None] * len(methods)
    async with AsyncExitStack() as stack:
        sellers = [await stack.enter_async_context(_Seller.opened(method)) for method in methods]

        async def follow(place: int, seller: _Seller) -> None:
            await seller.sell(number + place, "follower")
            sold[place] = time.monotonic()

        tasks = [asyncio.create_task(follow(place, seller)) for place, seller in enumerate(sellers)]
        await asyncio.sleep(SETTLED)
        await stage.pause()
        await asyncio.wait(tasks, timeout=limit)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return sold
