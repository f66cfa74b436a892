"""The flash sale on MongoDB: without a lock across processes it sells more than there is, in every other way it does not."""

from __future__ import annotations

import pytest

import aiolock
from examples.flash_sale import __main__ as flash_sale
from examples.flash_sale.app import LOCKS, WRONG
from examples.flash_sale.goods import STORES


@pytest.mark.timeout(600)
async def test_every_way_but_the_wrong_ones_sells_what_there_is(server):
    urls = {"mongodb": server.url}
    sales = [sale async for sale in flash_sale.hold(urls, count=2, stock=10, requests=50, at_once=16)]
    assert [sale.way for sale in sales] == [*WRONG, *STORES["mongodb"].WAYS, *LOCKS]
    for sale in sales:
        assert sale.failed == 0
        assert sale.told == sale.sold
        if sale.way in WRONG:
            assert sale.oversold > 0, sale
        else:
            assert sale.sold == 10, sale


async def test_the_fence_refuses_what_comes_after_a_later_holder(server):
    async with aiolock.connect(server.url) as client, STORES["mongodb"](server.url) as goods:
        await goods.put(1000, 5)
        lock = client.lock("goods")
        first = await lock.acquire()
        assert await goods.fenced_write(1000, 4, first)
        await lock.force_release()
        async with lock as second:
            assert await goods.fenced_write(1000, 3, second)
            assert not await goods.fenced_write(1000, 9, first)
            assert await goods.stock(1000) == 3
