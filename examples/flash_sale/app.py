"""The shop: `GET /kill?id=1&store=redis&way=aiolock` sells one piece, if there is one.

One process of it is a uvicorn worker; several share a port, as `python -m examples.flash_sale` starts them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated

import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request

import aiolock
from aiolock.fastapi import exception_handlers
from examples.flash_sale.goods import PATIENCE, STORES, TTL, Goods


class Shop:
    """One store, and the locks on the same server."""

    def __init__(self, goods: Goods, locks: aiolock.Client) -> None:
        self.goods = goods
        self.locks = locks
        self.here: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)


# --- ways to sell that are the same on every server; goods.py has those that a server has itself


async def no_lock(shop: Shop, number: int, buyer: str) -> bool:
    return await shop.goods.take(number, buyer)


async def in_process_lock(shop: Shop, number: int, buyer: str) -> bool:
    async with shop.here[number]:
        return await shop.goods.take(number, buyer)


async def lock(shop: Shop, number: int, buyer: str) -> bool:
    async with shop.locks.lock(f"goods:{number}", timeout=PATIENCE):
        return await shop.goods.take(number, buyer)


async def fenced_lock(shop: Shop, number: int, buyer: str) -> bool:
    async with shop.locks.lock(f"goods:{number}", timeout=PATIENCE) as lease:
        stock = await shop.goods.stock(number)
        if stock <= 0:
            return False
        await asyncio.sleep(shop.goods.work)
        if not await shop.goods.fenced_write(number, stock - 1, lease):
            raise HTTPException(503, "a later request was faster; nothing was sold")
        await shop.goods.sell(number, buyer)
        return True


Way = Callable[[Shop, int, str], Awaitable[bool]]
WRONG: dict[str, Way] = {"no lock": no_lock, "in-process lock": in_process_lock}
"""Ways that sell more than there is."""
LOCKS: dict[str, Way] = {"aiolock": lock, "aiolock, fenced": fenced_lock}


# --- the application


@asynccontextmanager
async def shops(_: FastAPI) -> AsyncIterator[dict[str, object]]:
    """A shop for each server that there is."""
    open_shops: dict[str, Shop] = {}
    async with AsyncExitStack() as stack:
        for store, make in STORES.items():
            if url := os.environ.get(f"FLASH_{store.upper()}_URL"):
                locks = await stack.enter_async_context(aiolock.connect(url, namespace="flash", ttl=TTL))
                open_shops[store] = Shop(await stack.enter_async_context(make(url)), locks)
        print("open", flush=True)
        yield {"shops": open_shops}


app = FastAPI(lifespan=shops, exception_handlers=exception_handlers)


@app.get("/kill")
async def kill(
    request: Request,
    number: Annotated[int, Query(alias="id")],
    store: str,
    way: str,
    buyer: str = "somebody",
) -> dict[str, bool]:
    shop: Shop = request.state.shops[store]
    if common := (WRONG | LOCKS).get(way):
        return {"sold": await common(shop, number, buyer)}
    return {"sold": await shop.goods.WAYS[way](shop.goods, number, buyer)}


def serve(port: int) -> None:
    """Be one of several workers at a port: the kernel deals out the connections."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(("127.0.0.1", port))
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listening])


if __name__ == "__main__":
    serve(int(sys.argv[1]))
