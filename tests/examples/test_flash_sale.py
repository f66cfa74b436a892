"""The flash sale: without a lock across processes the shop sells more than it has, in every other way it does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

import aiolock
from examples.flash_sale import __main__ as flash_sale
from examples.flash_sale.app import LOCKS, WRONG
from examples.flash_sale.goods import STORES
from tests.servers import SERVERS, Etcd, MariaDB, Memcached, PostgreSQL, Redis, ServerMissing, ZooKeeper

MORE = {
    "zookeeper": ZooKeeper,
    "mysql": MariaDB,
    "postgresql": PostgreSQL,
    "memcached": Memcached,
    "etcd": Etcd,
}


@pytest.fixture(scope="module")
def urls(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Redis and SQLite always, the others if the run is about them."""
    with contextlib.ExitStack() as stack:
        found = {"redis": stack.enter_context(Redis()).url}
        found["sqlite"] = f"sqlite://{tmp_path_factory.mktemp('flash')}/locks.db"
        for store, server in MORE.items():
            if {"mysql": "mariadb"}.get(store, store) in SERVERS:
                found[store] = stack.enter_context(server()).url
        yield found


@pytest.mark.timeout(600)
async def test_a_lock_across_processes_sells_what_there_is_and_others_sell_more(urls):
    urls = await flash_sale.there(urls)
    sales = [sale async for sale in flash_sale.hold(urls, count=2, stock=20, requests=100, at_once=16)]
    assert [(sale.store, sale.way) for sale in sales] == [
        (store, way) for store in urls for way in (*WRONG, *STORES[store].WAYS, *LOCKS)
    ]
    for sale in sales:
        assert sale.failed == 0
        assert sale.told == sale.sold
        if sale.way in WRONG:
            assert sale.oversold > 0, sale
        else:
            assert sale.sold == 20, sale


async def test_the_fence_refuses_what_comes_after_a_later_holder(urls):
    for store, url in urls.items():
        async with aiolock.connect(url) as client, STORES[store](url) as goods:
            await goods.prepare()
            await goods.put(1000, 5)
            lock = client.lock("goods")
            first = await lock.acquire()
            assert await goods.fenced_write(1000, 4, first)
            await lock.force_release()
            async with lock as second:
                assert await goods.fenced_write(1000, 3, second)
                assert not await goods.fenced_write(1000, 9, first)
                assert await goods.stock(1000) == 3


async def test_a_lease_of_the_lock_service_is_kept_alive_in_the_queue_and_may_be_gone_at_its_end(
    urls, monkeypatch
):
    if "etcd" not in urls:
        pytest.skip("this run is not about etcd")
    monkeypatch.setattr("examples.flash_sale.goods.TTL", 5)
    async with STORES["etcd"](urls["etcd"]) as goods:
        goods.work = 1.0  # so that the last buyers wait for longer than a lease lives
        await goods.put(1001, 8)
        told = await asyncio.gather(*(goods.lock_service(1001, f"b{buyer}") for buyer in range(12)))
        assert sum(told) == await goods.sold(1001) == 8
        async with goods._lease() as lease:
            await goods._ask("lease/revoke", ID=lease)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "mysql://root@127.0.0.1:1/test"])
async def test_a_server_that_is_not_there_is_left_out_with_one_sentence(urls, url, capsys):
    store = url.partition(":")[0]
    words = [f"--{store}-url", url, "--sqlite-url", urls["sqlite"]]
    words += ["--workers", "2", "--stock", "5", "--requests", "30", "--at-once", "8"]
    assert await flash_sale.main(flash_sale.parse(words)) == 0
    left_out, *table = capsys.readouterr().out.splitlines()
    assert left_out.startswith(f"{store} is left out: ")
    assert "127.0.0.1:1" in left_out
    assert not any(store in line for line in table)
    assert all(any(way in line for line in table) for way in (*WRONG, *STORES["sqlite"].WAYS, *LOCKS))
    assert await flash_sale.main(flash_sale.parse([f"--{store}-url", url])) == 1


async def test_one_way_is_sold_by_its_name_where_it_is(urls, capsys):
    words = [
        "--redis-url",
        urls["redis"],
        "--sqlite-url",
        urls["sqlite"],
        "--way",
        "SET NX PX",
        "version column",
    ]
    words += ["--workers", "2", "--stock", "5", "--requests", "30", "--at-once", "8"]
    assert await flash_sale.main(flash_sale.parse(words)) == 0
    lines = capsys.readouterr().out.splitlines()[3:]
    assert [line[:30].split() for line in lines] == [
        ["redis", "SET", "NX", "PX"],
        ["sqlite", "version", "column"],
    ]
    with pytest.raises(SystemExit):
        flash_sale.parse(["--way", "hope"])
    assert "SET NX PX" in capsys.readouterr().err


async def test_a_server_that_is_not_installed_is_left_out_with_one_sentence(monkeypatch, capsys):
    def nothing() -> None:
        raise ServerMissing("there is no such program; install it")

    for server in ("Redis", "ZooKeeper", "MariaDB", "PostgreSQL", "Memcached", "Etcd", "MongoDB"):
        monkeypatch.setattr(f"tests.servers.{server}", nothing)
    with contextlib.ExitStack() as stack:
        assert list(dict(flash_sale.started(stack))) == ["sqlite"]
    output = capsys.readouterr().out.splitlines()
    assert output == [
        f"{store} is left out: there is no such program; install it" for store in STORES if store != "sqlite"
    ]
