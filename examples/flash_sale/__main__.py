"""Start the shop with several workers, let a crowd buy in every way on every server, and print which ways oversold."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp

import aiolock
from examples.flash_sale.app import LOCKS, WRONG
from examples.flash_sale.goods import STORES, Goods

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Sale:
    """The result of one way on one server."""

    store: str
    way: str
    stock: int
    requests: int
    told: int
    """Buyers whose request was answered with a piece."""
    sold: int
    """Recorded buyers."""
    failed: int
    seconds: float

    @property
    def oversold(self) -> int:
        return max(0, self.sold - self.stock)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port for the workers to share, by a socket that does not listen."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@asynccontextmanager
async def workers(count: int, port: int, urls: dict[str, str]) -> AsyncIterator[None]:
    """Run uvicorn workers until the end of the block."""
    environment = {**os.environ, **{f"FLASH_{store.upper()}_URL": url for store, url in urls.items()}}
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "examples.flash_sale.app", str(port)),
            cwd=ROOT,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            if await process.stdout.readline() != b"open\n":
                raise RuntimeError("a worker of the shop did not open")
        yield
    finally:
        for process in processes:
            if process.returncode is None:
                process.terminate()
        for process in processes:
            await process.wait()


async def crowd(address: str, query: dict[str, str], requests: int, at_once: int) -> tuple[int, int]:
    """Send requests, some at the same time; return how many bought a piece and how many got no answer."""
    told = failed = 0
    buyers = iter(range(requests))

    async def buy(session: aiohttp.ClientSession) -> None:
        nonlocal told, failed
        for buyer in buyers:
            async with session.get(f"{address}/kill", params={**query, "buyer": f"b{buyer}"}) as answer:
                if answer.status != 200:
                    failed += 1
                    continue
                body = await answer.json()
                # After the last await: `told += (await …)` would read `told` before it, and lose buyers.
                told += body["sold"]

    connector = aiohttp.TCPConnector(limit=at_once)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(buy(session))
    return told, failed


async def hold(
    urls: dict[str, str],
    *,
    count: int,
    stock: int,
    requests: int,
    at_once: int,
    ways: Collection[str] = (),
) -> AsyncIterator[Sale]:
    """Sell in every way on every server, or in some ``ways`` where they are, one sale after the other."""
    with reserved_port() as port:
        async with AsyncExitStack() as stack:
            shops: dict[str, Goods] = {}
            for store, url in urls.items():
                shops[store] = await stack.enter_async_context(STORES[store](url))
                await shops[store].prepare()
            await stack.enter_async_context(workers(count, port, urls))
            number = 0
            for store, goods in shops.items():
                for way in (*WRONG, *goods.WAYS, *LOCKS):
                    if ways and way not in ways:
                        continue
                    number += 1
                    await goods.put(number, stock)
                    query = {"id": str(number), "store": store, "way": way}
                    begin = time.perf_counter()
                    told, failed = await crowd(f"http://127.0.0.1:{port}", query, requests, at_once)
                    seconds = time.perf_counter() - begin
                    yield Sale(store, way, stock, requests, told, await goods.sold(number), failed, seconds)


def started(stack: ExitStack) -> Iterator[tuple[str, str]]:
    """Start a private server of each kind that is installed; yield its store and its address."""
    # Only a clone has them; an installed library starts no servers.
    from tests.servers import (
        Etcd,
        MariaDB,
        Memcached,
        MongoDB,
        PostgreSQL,
        Redis,
        ServerFailed,
        ServerMissing,
        ZooKeeper,
    )

    for store, server in {
        "redis": Redis,
        "zookeeper": ZooKeeper,
        "mysql": MariaDB,
        "postgresql": PostgreSQL,
        "memcached": Memcached,
        "etcd": Etcd,
        "mongodb": MongoDB,
    }.items():
        try:
            yield store, stack.enter_context(server()).url
        except (ServerMissing, ServerFailed) as error:
            print(f"{store} is left out: {error}")
    yield "sqlite", f"sqlite://{stack.enter_context(TemporaryDirectory())}/locks.db"


async def there(urls: dict[str, str]) -> dict[str, str]:
    """Return the servers that locks can be had from; say of the others why not."""
    found = {}
    for store, url in urls.items():
        try:
            async with aiolock.connect(url, namespace="flash"):
                found[store] = url
        except aiolock.LockError as error:
            print(f"{store} is left out: {error}")
    return found


def row(store: str, way: str, *numbers: object) -> str:
    widths = zip(numbers, (6, 10, 8, 12), strict=True)
    return f"{store:12}{way:18}" + "".join(f"{number!s:>{width}}" for number, width in widths)


async def main(arguments: argparse.Namespace) -> int:
    with ExitStack() as stack:
        given = {store: getattr(arguments, f"{store}_url") for store in STORES}
        urls = {store: url for store, url in given.items() if url} or dict(started(stack))
        urls = await there(urls)
        if not urls:
            return 1
        print(
            f"{arguments.stock} pieces, {arguments.requests} buyers, {arguments.at_once} at a time, "
            f"{arguments.workers} workers\n"
        )
        print(row("server", "way", "sold", "oversold", "failed", "requests/s"), flush=True)
        wrong = 0
        async for sale in hold(
            urls,
            count=arguments.workers,
            stock=arguments.stock,
            requests=arguments.requests,
            at_once=arguments.at_once,
            ways=arguments.way,
        ):
            rate = f"{sale.requests / sale.seconds:.0f}"
            print(row(sale.store, sale.way, sale.sold, sale.oversold, sale.failed, rate), flush=True)
            if sale.way not in WRONG:
                wrong += sale.oversold + sale.failed + (sale.told != sale.sold)
    return 1 if wrong else 0


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m examples.flash_sale", description=__doc__)
    for store in STORES:
        parser.add_argument(
            f"--{store}-url", default="", help="yours; without any URL, private ones are started"
        )
    names = dict.fromkeys([*WRONG, *(way for goods in STORES.values() for way in goods.WAYS), *LOCKS])
    parser.add_argument(
        "--way", nargs="+", default=(), choices=names, metavar="NAME", help=f"only these: {', '.join(names)}"
    )
    parser.add_argument("--workers", type=int, default=4, help="uvicorn workers (default: 4)")
    parser.add_argument("--stock", type=int, default=100, help="pieces (default: 100)")
    parser.add_argument("--requests", type=int, default=600, help="buyers (default: 600)")
    parser.add_argument("--at-once", type=int, default=64, help="buyers at a time (default: 64)")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse())))
