"""An aiohttp application in which an order is paid by one request at a time, whichever process it comes to.

pip install "python-aiolock[redis,aiohttp]"
AIOLOCK_URL=redis://127.0.0.1:6379/0 python examples/aiohttp_app.py
"""

from __future__ import annotations

import asyncio
import os

from aiohttp import web

from aiolock import Lease
from aiolock.aiohttp import CLIENT, cleanup_ctx, locked

PAID: web.AppKey[dict[int, int]] = web.AppKey("paid", dict)


class Bank:
    """Stands for a payment provider: requests with one idempotency key are charged once."""

    def __init__(self) -> None:
        self.charged: set[str] = set()

    async def charge(self, idempotency_key: str) -> None:
        await asyncio.sleep(0.01)
        self.charged.add(idempotency_key)


bank = Bank()


@locked(lambda request: f"order:{int(request.match_info['order_id'])}", timeout=2)
async def pay(request: web.Request, lease: Lease) -> web.Response:
    """409 if it takes longer than two seconds to be next; 503 if the lock is lost on the way."""
    order, paid = int(request.match_info["order_id"]), request.app[PAID]
    if order in paid:
        raise web.HTTPGone(text="this order is paid")
    # The key is the order's id, the same in every retry. A fencing token is another one for each request: the customer
    # would pay twice if this process died after the charge.
    await bank.charge(idempotency_key=f"order:{order}")
    paid[order] = lease.token
    return web.json_response({"order": order, "token": lease.token})


async def look(request: web.Request) -> web.Response:
    """Needs no lock; says who has it."""
    order = int(request.match_info["order_id"])
    info = await request.config_dict[CLIENT].lock(f"order:{order}").inspect()
    at_work = [holder.host for holder in info.holders]
    return web.json_response({"paid": order in request.app[PAID], "at work": at_work})


def make_app(url: str) -> web.Application:
    app = web.Application()
    app[PAID] = {}
    app.cleanup_ctx.append(cleanup_ctx(url))
    app.router.add_post(r"/orders/{order_id:\d+}/pay", pay)
    app.router.add_get(r"/orders/{order_id:\d+}", look)
    return app


if __name__ == "__main__":
    # A handler whose client went away is cancelled, and gives its lock back.
    web.run_app(make_app(os.environ.get("AIOLOCK_URL", "memory://")), handler_cancellation=True)
