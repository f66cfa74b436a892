"""Renewing many holds of a cluster: a node that does not answer keeps nobody waiting for what the others have said.

A hold of which the answer is late is reported as not known, and asked for again. The late answer counts all the same,
when it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiolock.backends.redis.claim import RedisClaim
from aiolock.backends.redis.router import Router
from aiolock.backends.redis.slots import shown
from aiolock.contract import Renewal
from aiolock.errors import BackendError, BackendUnavailable

if TYPE_CHECKING:
    from aiolock.backends.redis.cluster import ClusterBackend

__all__ = ["Renewals"]

PATIENCE = 1 / 12
"""The share of the shortest ttl for which those who have answered wait for those who have not: half of the time after which
silence is answered by asking again."""

Reply = tuple["asyncio.Future[Any]", float]
"""An answer that will come, and when it was asked for."""


class Renewals:
    """Those of one client."""

    def __init__(self, backend: ClusterBackend, router: Router) -> None:
        self._backend = backend
        self._router = router
        self._late: dict[RedisClaim, list[Reply]] = {}

    async def renew(self, claims: Sequence[RedisClaim]) -> list[Renewal]:
        """Ask for all of them in one pass, and answer when all have, or have had their time."""
        backend = self._backend
        sent = backend.settings.clock()
        late, self._late = self._late, {}
        replies = {claim: [*late.pop(claim, ()), (backend.renewal([claim]), sent)] for claim in claims}
        # Those of others that are under way; what has been given back meanwhile is asked for by nobody.
        self._late = {
            claim: some for claim, some in late.items() if any(not reply.done() for reply, _ in some)
        }
        nodes = {self._router.node(claim.key) for claim in claims}
        # Who asks one node alone waits for that one.
        limit = PATIENCE * min(claim.ttl for claim in claims) if len(nodes) > 1 else None
        await asyncio.wait([replies[claim][-1][0] for claim in claims], timeout=limit)
        return [self._answer(claim, replies[claim]) for claim in claims]

    def _answer(self, claim: RedisClaim, replies: list[Reply]) -> Renewal:
        error: BackendError | None = None
        left: list[Reply] = []
        for reply, sent in reversed(replies):
            if not reply.done():
                left.insert(0, (reply, sent))
            elif reply.cancelled():
                continue
            elif (failure := reply.exception()) is None:
                return self._backend.renewed(claim, reply.result()[1], sent)
            elif isinstance(failure, BackendError):
                error = error or failure
            else:
                return failure if isinstance(failure, Exception) else RuntimeError(repr(failure))
        if left:
            self._late[claim] = left
        if error is None:
            node = self._router.node(claim.key)
            error = BackendUnavailable(f"{shown(node.place) if node else 'no node'} has not answered yet")
        return error
