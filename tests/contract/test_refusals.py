"""A waiter whose server begins to refuse hears the reason; it does not wait until its timeout is over."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import BackendRefused
from tests.contract.deployments import registry
from tests.faults.staging import PATIENCE, waiting
from tests.servers import EXTERNAL

pytestmark = pytest.mark.parametrize(
    "server",
    [each for each in registry() if each.refuses and each.needs not in EXTERNAL],
    ids=lambda each: each.name,
    indirect=True,
    scope="session",
)
"""Not those that belong to others."""

LOCKS = {
    "mutex": lambda client: client.lock("x"),
    "fair": lambda client: client.lock("x", fair=True),
    "permit": lambda client: client.semaphore("s", 1),
    "read": lambda client: client.rwlock("w").read(),
}
"""What is waited for."""
HELD = {"read": lambda client: client.rwlock("w").write()}
"""What is held meanwhile, if not the same."""
TTL = 3.0


async def test_who_waits_hears_why_the_server_refuses(deployment):
    """All kinds at once: some servers are put in order again only by the next client that is opened."""
    has = {"permit": "semaphore", "read": "read-write"}
    kinds = [kind for kind in LOCKS if kind not in has or has[kind] in deployment.kinds]
    async with deployment.connect(ttl=TTL) as holder, deployment.connect(ttl=TTL) as client:
        held = [await HELD.get(kind, LOCKS[kind])(holder).acquire() for kind in kinds if kind != "fair"]
        waiters = [
            asyncio.create_task(LOCKS[kind](client).acquire(timeout=2 * PATIENCE), name=kind)
            for kind in kinds
        ]
        await waiting(client, len(kinds))
        await deployment.refuse()
        try:
            await asyncio.wait(waiters, timeout=PATIENCE)
            heard = {waiter.get_name(): repr(waiter.done() and waiter.exception()) for waiter in waiters}
        finally:
            await deployment.allow()
            for waiter in waiters:
                waiter.cancel()
        await asyncio.gather(*(lease.release() for lease in held), return_exceptions=True)
    assert {kind: error.partition("(")[0] for kind, error in heard.items()} == dict.fromkeys(
        kinds, BackendRefused.__name__
    )
