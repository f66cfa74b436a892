"""A FastAPI application in which an order is paid by one request at a time, whichever worker it comes to.

pip install "python-aiolock[redis,fastapi]" uvicorn
AIOLOCK_URL=redis://127.0.0.1:6379/0 uvicorn examples.fastapi_app:app --workers 4
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, HTTPException

from aiolock import Lease
from aiolock.fastapi import LockClient, exception_handlers, lifespan, locked

URL = os.environ.get("AIOLOCK_URL", "memory://")

paid: dict[int, int] = {}


class Bank:
    """A stand-in for a payment provider: requests with one idempotency key are charged once."""

    def __init__(self) -> None:
        self.charged: set[str] = set()

    async def charge(self, idempotency_key: str) -> None:
        await asyncio.sleep(0.01)
        self.charged.add(idempotency_key)


bank = Bank()


@asynccontextmanager
async def own(app: FastAPI) -> AsyncIterator[None]:
    """The application's own start: the client is open already."""
    async with app.state.aiolock.lock("migration"):
        paid.clear()
    yield


app = FastAPI(lifespan=lifespan(URL, own), exception_handlers=exception_handlers)

OrderLease = Annotated[Lease, locked("order:{order_id}", timeout=2)]


@app.post("/orders/{order_id}/pay")
async def pay(order_id: int, lease: OrderLease) -> dict[str, int]:
    """Answer 409 if the lock is not free within two seconds; 503 if it is lost on the way."""
    if order_id in paid:
        raise HTTPException(410, "this order is paid")
    # The key is the order's id, the same in every retry. A fencing token is another one for each request: the customer
    # would pay twice if this process died after the charge.
    await bank.charge(idempotency_key=f"order:{order_id}")
    paid[order_id] = lease.token
    return {"order": order_id, "token": lease.token}


@app.get("/orders/{order_id}")
async def look(order_id: int, locks: LockClient) -> dict[str, object]:
    """Show the holders of the lock, without taking it."""
    info = await locks.lock(f"order:{order_id}").inspect()
    return {"paid": order_id in paid, "at work": [holder.host for holder in info.holders]}
