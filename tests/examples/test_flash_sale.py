"""The flash sale: without a lock across processes the shop sells more than it has, with one it does not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from examples.flash_sale import __main__ as flash_sale
from examples.flash_sale.app import VERSIONS
from examples.flash_sale.goods import MySQLGoods, RedisGoods
from tests.servers import SERVERS, MariaDB, Redis


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """Redis always, MariaDB if the run is about it."""
    with contextlib.ExitStack() as stack:
        found = {"redis": stack.enter_context(Redis()).url}
        if "mariadb" in SERVERS:
            found["mysql"] = stack.enter_context(MariaDB()).url
        yield found


async def test_a_lock_across_processes_sells_what_there_is_and_others_sell_more(urls):
    sales = [sale async for sale in flash_sale.hold(urls, count=2, stock=20, requests=100, at_once=16)]
    assert [(sale.store, sale.version) for sale in sales] == [
        (store, version) for store in urls for version in VERSIONS
    ]
    for sale in sales:
        assert sale.failed == 0
        assert sale.told == sale.sold
        if sale.version.startswith("aiolock"):
            assert sale.sold == 20
        else:
            assert sale.oversold > 0, sale


async def test_the_fence_refuses_what_comes_after_a_later_holder(urls):
    stores = {"redis": RedisGoods, "mysql": MySQLGoods}
    for store, url in urls.items():
        async with stores[store](url) as goods:
            if isinstance(goods, MySQLGoods):
                await goods.make_tables()
            await goods.put(1000, 5)
            assert await goods.fenced_write(1000, 4, 2**62)
            assert await goods.fenced_write(1000, 3, 2**62)
            assert not await goods.fenced_write(1000, 9, 2**62 - 1)
            assert await goods.stock(1000) == 3


async def test_the_program_prints_the_table(urls, capsys):
    words = [
        "--redis-url",
        urls["redis"],
        "--workers",
        "2",
        "--stock",
        "5",
        "--requests",
        "30",
        "--at-once",
        "8",
    ]
    assert await flash_sale.main(flash_sale.parse(words)) == 0
    printed = capsys.readouterr().out
    assert all(version in printed for version in VERSIONS)
    assert "oversold" in printed
