"""Redis Cluster backend: the library's own protocol on the nodes of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from aiolock.backends.redis.backend import BaseBackend
from aiolock.backends.redis.claim import RedisClaim, renewal
from aiolock.backends.redis.cluster.server import ClusterServer
from aiolock.core.backend import Claim, Renewal
from aiolock.errors import BackendUnavailable, forgets_arguments

__all__ = ["ClusterBackend"]

WAIT_FOR_OTHERS = 1 / 12
"""Share of the shortest ttl for which a batch of renewals waits for the other answers once the first has come."""


class ClusterBackend(BaseBackend[ClusterServer]):
    """A Redis or Valkey Cluster; :class:`ClusterServer` has the parameters, and ``make`` returns one in their place."""

    name = "Redis Cluster"
    clustered = True

    @forgets_arguments
    def __init__(
        self, url: str = "", *, make: Callable[[], ClusterServer] | None = None, **options: Any
    ) -> None:
        super().__init__(ClusterServer(url, **options) if make is None else make())

    def renewal_group(self, claim: Claim) -> Hashable:
        """Return the node of the lock's slot: one that does not answer does not delay the holds at the others."""
        return self._server.router.node(claim.key) if isinstance(claim, RedisClaim) else None

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Send one call for each hold, those of one node together.

        A twelfth of the shortest ttl after the first answer, each hold without an answer is reported as unknown, and the
        renewal scheduler asks for it again: its slot may move, and the call be on its way to a node that does not answer.
        """
        mine = [claim for claim in claims if isinstance(claim, RedisClaim)]
        sent = self.settings.clock()
        replies = [renewal([claim]) for claim in mine]
        _, late = await asyncio.wait(replies, return_when=asyncio.FIRST_COMPLETED)
        if late:
            _, late = await asyncio.wait(
                late, timeout=WAIT_FOR_OTHERS * min(claim.request.ttl for claim in mine)
            )
        for reply in late:
            reply.add_done_callback(_ignore)
        return [self._renewed_by(claim, reply, sent) for claim, reply in zip(mine, replies, strict=True)]

    def _renewed_by(self, claim: RedisClaim, reply: asyncio.Future[Any], sent: float) -> Renewal:
        if not reply.done() or reply.cancelled():
            return BackendUnavailable(f"{self.address} has not answered yet")
        error = reply.exception()
        if error is None:
            return self._renewed(claim, reply.result()[1], sent)
        return error if isinstance(error, Exception) else RuntimeError(repr(error))


def _ignore(reply: asyncio.Future[Any]) -> None:
    """Retrieve the error of an answer that came too late, which nothing else does."""
    if not reply.cancelled():
        reply.exception()
