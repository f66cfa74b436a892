"""Having a node in a lock's queue: making it, finding it after a lost reply, and knowing what may be left of it.

A create whose reply is lost may have happened: the node carries the uuid of its attempt, and is looked for before
anything else is done. It is adopted only if it belongs to our present session; a node of an earlier session is on its
way out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.contenders import mine, new_attempt, prefix
from aiolock.backends.zookeeper.janitor import Remains, find
from aiolock.backends.zookeeper.outcomes import said
from aiolock.backends.zookeeper.records import Note
from aiolock.contract import Bid, Claim

if TYPE_CHECKING:
    from aiolock.backends.zookeeper.backend import ZooKeeperBackend

__all__ = ["BLOCK", "NodeClaim"]

BLOCK = 1024
"""How many tokens the zxid of one node is worth: holders of this process that pass the lock on have their own."""


class NodeClaim(Claim):
    """A bid and the node that stands for it."""

    __slots__ = ("_attempt", "_backend", "_node", "_path", "_sent", "_session", "_token", "owner")

    def __init__(self, backend: ZooKeeperBackend, bid: Bid, path: str) -> None:
        super().__init__(bid)
        self._backend = backend
        self._session = backend.session
        self._path = path
        self.owner: int | None = None
        """The session that the node is in, or may be in."""
        self._attempt = new_attempt()
        self._sent = False
        """Whether a create was sent whose node may be there."""
        self._node: str | None = None
        self._token = 0

    @property
    def own(self) -> str:
        """The path of our node."""
        return f"{self._path}/{self._node}"

    def _gone(self) -> bool:
        return self._session.session_id != self.owner

    def _begin_anew(self) -> None:
        """What we had is over; the next node will be another attempt's."""
        self._attempt, self._sent, self._node = new_attempt(), False, None

    def _remains(self, node: str | None) -> Remains:
        return Remains(self.owner or 0, self._path, mine(self._attempt), node)

    async def _place(self) -> list[str]:
        """Have a node, and return the list that it is in, or should be in."""
        if self._node is None and self._sent:
            await self._adopt()
        if self._node is None:
            return await self._create()
        requests = wire.listing(self._path, watch=False), *self._besides()
        listed, *rest = await self._session.ask_all(*requests, owner=self.owner)
        try:
            children: list[str] = said(listed).children
            await self._learn(rest)
        except exc.NoNode:
            return []
        return children

    def _besides(self) -> tuple[Any, ...]:
        """What is asked for together with the list."""
        return ()

    async def _learn(self, replies: list[Any]) -> None:
        """Take in what was asked for together with the list."""

    async def _create(self) -> list[str]:
        while True:
            self._sent = True
            create = wire.create(
                f"{self._path}/{prefix(self._attempt, self.bid.kind)}",
                Note(self.bid.label).encode(),
                self._backend.acl,
                sequential=True,
            )
            requests = create, wire.listing(self._path, watch=False), *self._besides()
            created, listed, *rest = await self._session.ask_all(*requests, owner=self.owner)
            try:
                path, stat = said(created)
            except exc.NoNode:
                # The usual way to find that the parent is not there yet, or not any more.
                self._sent = False
                await self._make_parents()
                continue
            except (exc.NoAuth, exc.InvalidACL):
                self._sent = False
                raise
            self._node = path.rpartition("/")[2]
            self._token = stat.created_zxid * BLOCK
            children: list[str] = said(listed).children
            await self._learn(rest)
            return children

    async def _make_parents(self) -> None:
        await self._backend.parents.make(self._path)

    async def _adopt(self) -> None:
        """Find the node of a create whose reply was lost, if there is one."""
        names = await find(self._session, self._remains(None))
        if not names:
            self._sent = False
            return
        try:
            stat = (await self._session.ask(wire.exists(f"{self._path}/{names[0]}"), self.owner)).stat
        except exc.NoNode:
            self._begin_anew()
            return
        if stat.ephemeral_owner != self.owner:
            self._begin_anew()
            return
        self._node, self._token = names[0], stat.created_zxid * BLOCK
