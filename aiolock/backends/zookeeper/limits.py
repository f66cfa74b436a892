"""How many permits a semaphore has when somebody has set it, and for how long that is remembered.

The number stands in the semaphore's node, which the server removes when nobody has used it for a while. A child keeps
that one there: it lasts for a day after it was last written to.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.records import Record

if TYPE_CHECKING:
    from aiolock.backends.zookeeper.backend import ZooKeeperBackend

__all__ = ["Limits"]

AN_HOUR = 3600.0
A_DAY = 24 * AN_HOUR

KEEPER = "kept"
"""The child that keeps a semaphore's node."""


class Limits:
    """Those of one client."""

    def __init__(self, backend: ZooKeeperBackend) -> None:
        self._backend = backend
        self._used: dict[str, float] = {}
        """When each was used last, by the clock; an hour is near enough."""

    async def set(self, path: str, limit: int) -> None:
        """Write the number, and remember it for a day. Raises what aiozk raises."""
        backend = self._backend
        while True:
            while not await backend.desk.set_limit(path, limit):
                await backend.parents.make(path, Record(limit=limit).encode())
            if await self._keep(f"{path}/{KEEPER}"):
                break
            # The server has removed the unused node after we wrote to it.
        self._used[path] = backend.settings.clock()

    async def _keep(self, keeper: str) -> bool:
        """Have the child, written to just now; whether there is a node that it can be a child of."""
        backend = self._backend
        try:
            if backend.forgets:
                try:
                    await backend.session.ask(wire.lasting(keeper, b"", backend.acl, A_DAY + AN_HOUR))
                except exc.Unimplemented:
                    backend.forgets = False
            if not backend.forgets:
                await backend.session.ask(wire.persistent(keeper, b"", backend.acl))
        except exc.NodeExists:
            try:
                await backend.session.ask(wire.put(keeper, b""))
            except exc.NoNode:
                return False
        except exc.NoNode:
            return False
        return True

    def used(self, path: str) -> None:
        """Somebody uses this one: remember its number for another day. Nobody waits for that."""
        now = self._backend.settings.clock()
        if self._used.get(path, -math.inf) < now - AN_HOUR:
            try:
                touched = self._backend.session.ask(wire.put(f"{path}/{KEEPER}", b""))
            except exc.ZKError:
                # The next use brings another.
                return
            self._used[path] = now
            touched.add_done_callback(_heard)


def _heard(reply: asyncio.Future[Any]) -> None:
    # Whatever it was: the next hour brings another.
    if not reply.cancelled():
        reply.exception()
