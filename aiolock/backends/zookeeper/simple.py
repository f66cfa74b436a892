"""The recipe of the literature: one node that whoever creates it holds, and that all others wait for.

There is no order, and every release wakes everybody who waits: n waiters cost n creates for one hand-over. It is here
for few contenders, and for comparison. A release reads the node before it deletes it, because the next holder's has
the same name; that is all that protects it if an administrator deletes the node in between.
"""

from __future__ import annotations

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.claim import QueueClaim
from aiolock.backends.zookeeper.contenders import SIMPLE, Place, alone
from aiolock.backends.zookeeper.janitor import Remains
from aiolock.backends.zookeeper.node import BLOCK
from aiolock.backends.zookeeper.outcomes import InDoubt, NotSent, SessionChanged, said
from aiolock.backends.zookeeper.records import Note
from aiolock.backends.zookeeper.rules import Verdict
from aiolock.contract import Grant, Mode

__all__ = ["SimpleClaim"]

_TAKEN = Verdict(enter=False, watch=(Place(0, Mode.MUTEX, SIMPLE),), demand=True)
_OURS = Verdict(enter=True, demand=True)
"""Who waits leaves no trace, so there is always somebody, for all that we know."""


class SimpleClaim(QueueClaim):
    """A bid for the one node; while it waits, there is nothing of it at the server but a watch."""

    __slots__ = ()

    @property
    def unique(self) -> bool:
        """Every holder's node has the same path: a check for it proves that there is a holder, not which one."""
        return False

    async def attempt(self, wait: bool) -> Grant | None:
        """Create the node; one round trip if nobody has."""
        async with self._backend.bounded():
            while True:
                self._begin_look()
                try:
                    self._belong(await self._session.ready())
                    if not await self._have():
                        if not wait:
                            self.end()
                            return None
                        if await self._watch(_TAKEN):
                            return None
                    elif self._session.certain and not self._gone():
                        return self._enter(_OURS, created=self._token // BLOCK)
                    else:
                        await self._session.until(lambda: self._session.certain or self._gone())
                except (InDoubt, NotSent, SessionChanged):
                    if self._session.closing:
                        raise

    async def _have(self) -> bool:
        """Whether the node is there and ours."""
        if self._node is None and self._sent:
            await self._adopt()
        data = Note(self.bid.label, attempt=self._attempt).encode()
        while self._node is None:
            request = wire.create(f"{self._path}/{SIMPLE}", data, self._backend.acl, sequential=False)
            others = wire.listing(self._path, watch=False)
            self._sent = True
            created, listed = await self._session.ask_all(request, others, owner=self.owner)
            try:
                stat = said(created).stat
            except exc.NodeExists:
                self._sent = False
                return False
            except exc.NoNode:
                self._sent = False
                await self._backend.parents.make(self._path)
                continue
            self._node, self._token = SIMPLE, stat.created_zxid * BLOCK
            alone(self._path, said(listed).children)
        return True

    async def _adopt(self) -> None:
        """Find out whether a create whose reply was lost was ours."""
        requests = wire.sync(), wire.get(f"{self._path}/{SIMPLE}", watch=False)
        fresh, found = await self._session.ask_all(*requests, owner=self.owner)
        said(fresh)
        try:
            reply = said(found)
        except exc.NoNode:
            self._sent = False
            return
        if Note.decode(reply.data).attempt == self._attempt and reply.stat.ephemeral_owner == self.owner:
            self._node, self._token = SIMPLE, reply.stat.created_zxid * BLOCK
        else:
            self._sent = False

    def _farewell(self) -> None:
        return None

    def _remains(self, node: str | None) -> Remains:  # noqa: ARG002 - the name is always the same
        return Remains(self.owner or 0, self._path, SIMPLE, SIMPLE, self._attempt)
