"""Start the shop with several workers, let a crowd buy, and print which versions oversold."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from examples.flash_sale.app import VERSIONS
from examples.flash_sale.goods import Goods, MySQLGoods, RedisGoods

ROOT = Path(__file__).parents[2]
STORES: dict[str, type[RedisGoods | MySQLGoods]] = {"redis": RedisGoods, "mysql": MySQLGoods}


@dataclass(frozen=True)
class Sale:
    """The result of one version on one store."""

    version: str
    store: str
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
                body = await answer.json()
                # After the last await: `told += (await …)` would read `told` before it, and lose buyers.
                if answer.status == 200:
                    told += body["sold"]
                else:
                    failed += 1

    connector = aiohttp.TCPConnector(limit=at_once)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(buy(session))
    return told, failed


async def hold(
    urls: dict[str, str], *, count: int, stock: int, requests: int, at_once: int
) -> AsyncIterator[Sale]:
    """Run every version on every store, one sale after the other."""
    with reserved_port() as port:
        stores: dict[str, Goods] = {store: STORES[store](url) for store, url in urls.items()}
        for goods in stores.values():
            async with goods:
                if isinstance(goods, MySQLGoods):
                    await goods.make_tables()
        async with workers(count, port, urls):
            number = 0
            for store in urls:
                async with STORES[store](urls[store]) as goods:
                    for version in VERSIONS:
                        number += 1
                        await goods.put(number, stock)
                        query = {"id": str(number), "store": store, "version": version}
                        begin = time.perf_counter()
                        told, failed = await crowd(f"http://127.0.0.1:{port}", query, requests, at_once)
                        seconds = time.perf_counter() - begin
                        sold = await goods.sold(number)
                        yield Sale(version, store, stock, requests, told, sold, failed, seconds)


def row(*cells: object) -> str:
    widths = (17, 8, 7, 7, 10, 8, 11)
    first, second, *numbers = cells
    left = [str(first).ljust(widths[0]), str(second).ljust(widths[1])]
    return "".join(left + [str(cell).rjust(width) for cell, width in zip(numbers, widths[2:], strict=True)])


async def main(arguments: argparse.Namespace) -> int:
    with ExitStack() as stack:
        urls = {"redis": arguments.redis_url, "mysql": arguments.mysql_url}
        if not any(urls.values()):
            # Only a clone has them; an installed library starts no servers.
            from tests.servers import MariaDB, Redis

            urls = {"redis": stack.enter_context(Redis()).url, "mysql": stack.enter_context(MariaDB()).url}
        urls = {store: url for store, url in urls.items() if url}
        print(
            f"{arguments.stock} pieces, {arguments.requests} buyers, {arguments.at_once} at a time, "
            f"{arguments.workers} workers\n"
        )
        print(row("version", "store", "stock", "sold", "oversold", "failed", "requests/s"), flush=True)
        wrong = 0
        async for sale in hold(
            urls,
            count=arguments.workers,
            stock=arguments.stock,
            requests=arguments.requests,
            at_once=arguments.at_once,
        ):
            rate = f"{sale.requests / sale.seconds:.0f}"
            print(
                row(sale.version, sale.store, sale.stock, sale.sold, sale.oversold, sale.failed, rate),
                flush=True,
            )
            if sale.version.startswith("aiolock"):
                wrong += sale.oversold + sale.failed + (sale.told != sale.sold)
    return 1 if wrong else 0


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m examples.flash_sale", description=__doc__)
    parser.add_argument(
        "--redis-url", default="", help="a Redis of yours; without any URL, private servers are started"
    )
    parser.add_argument("--mysql-url", default="", help="a MySQL or MariaDB of yours")
    parser.add_argument("--workers", type=int, default=4, help="uvicorn workers (default: 4)")
    parser.add_argument("--stock", type=int, default=100, help="pieces (default: 100)")
    parser.add_argument("--requests", type=int, default=600, help="buyers (default: 600)")
    parser.add_argument("--at-once", type=int, default=64, help="buyers at a time (default: 64)")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse())))
