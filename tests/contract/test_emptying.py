"""Deleting all that a namespace has, which ``aiolock verify`` does at its end."""

from __future__ import annotations

from aiolock.core.capabilities import Administration
from tests.faults.staging import PATIENCE


async def test_an_emptied_namespace_has_no_holds_and_no_registers(deployment, client):
    held = await client.lock("x", ttl=30).acquire()
    latch = "registers" in deployment.kinds
    if latch:
        await client.latch("opened", 1).count_down()
    other = deployment.connect(namespace=f"{deployment.namespace}-other")
    async with deployment.connect() as rival, other:
        kept = await other.lock("x", ttl=30).acquire()
        backend = rival._backend
        assert isinstance(backend, Administration)
        await backend.empty()
        if deployment.name.startswith("memory"):
            # It all ends with this process.
            assert await rival.lock("x").locked()
        elif "names" in deployment.kinds:
            assert await rival.locks() == []
            # Free at once, though its holder lives and renews.
            lease = await rival.lock("x").acquire(timeout=PATIENCE)
            await lease.release()
            if latch:
                assert await rival.latch("opened", 1).count() == 1
        kept.check()
        await kept.renew()
        await kept.release()
    await held.release()
