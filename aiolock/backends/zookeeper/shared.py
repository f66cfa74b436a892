"""Read-write locks: the same queue as the mutex, and a writer that becomes a reader without a gap.

The reader's node gets the number of the writer's, and one transaction makes the one and deletes the other: at every
moment we have exactly one of them, in the same place. Readers who wait for the writer are woken by its end; a writer
behind us finds the reader when it looks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.claim import QueueClaim
from aiolock.backends.zookeeper.contenders import mine, reader
from aiolock.backends.zookeeper.hold import Hold
from aiolock.backends.zookeeper.janitor import Remains, find
from aiolock.backends.zookeeper.node import BLOCK
from aiolock.backends.zookeeper.outcomes import InDoubt, NotSent, SessionChanged
from aiolock.backends.zookeeper.records import Note
from aiolock.backends.zookeeper.rules import Rule
from aiolock.contract import READ, Bid, Grant, Mode
from aiolock.errors import LockLost

if TYPE_CHECKING:
    from aiolock.backends.zookeeper.backend import ZooKeeperBackend

__all__ = ["ReadWriteClaim"]


class ReadWriteClaim(QueueClaim):
    """A bid for reading or writing."""

    __slots__ = ("_between",)

    def __init__(self, backend: ZooKeeperBackend, bid: Bid, path: str, rule: Rule) -> None:
        super().__init__(backend, bid, path, rule)
        self._between = False
        """Whether the transaction was sent, and nobody knows whether it was carried out."""

    @property
    def settled(self) -> bool:
        """Whether we know which of the two nodes is ours."""
        return not self._between

    async def downgrade(self) -> Grant:
        """One round trip; after a lost reply, looks which of the two nodes is there."""
        async with self._backend.bounded():
            while True:
                try:
                    await self._session.ready()
                    if not self.held:
                        raise LockLost(self.bid.name, "revoked")
                    if self.bid.kind.mode is Mode.READ or await self._become_reader():
                        return Grant(self._token, 1, self._session.deadline, demand=False)
                except SessionChanged as error:
                    raise LockLost(self.bid.name, "session") from error
                except (InDoubt, NotSent):
                    if self._session.closing:
                        raise

    async def _become_reader(self) -> bool:
        """Whether we are one now; else it is to be tried again."""
        if self._between:
            names = await find(self._session, self._remains(None))
            if not names:
                self._between = False
                self._backend.audience.lost(self, "force-released")
                raise LockLost(self.bid.name, "force-released")
            self._settle(names[0])
            if "__READ__" in names[0]:
                return True
        assert self._node is not None  # noqa: S101 - a holder has one
        node = reader(self._node)
        data = Note(self.bid.label, token=self._token // BLOCK).encode()
        create = wire.create(f"{self._path}/{node}", data, self._backend.acl, sequential=False)
        self._between = True
        reply = await self._session.ask(wire.together(create, wire.delete(self.own)), self.owner)
        error = wire.failure(reply)
        if error is None:
            self._settle(node)
            return True
        if isinstance(error, exc.NoNode | exc.NodeExists):
            # It was carried out after all, or somebody has deleted our node: the next look tells.
            return False
        self._between = False
        raise error

    def _settle(self, node: str) -> None:
        """This one is ours."""
        self._between = False
        if node == self._node:
            return
        self._node = node
        self.bid = replace(self.bid, kind=READ)
        if self.held:
            self._watches.off()
            self._hold = Hold(self._backend, self)
            self._hold.look()

    def is_among(self, children: list[str]) -> bool:
        """Whether our node, or in doubt one of the two, is in this list."""
        if self._between:
            return any(name.startswith(mine(self._attempt)) for name in children)
        return super().is_among(children)

    def _remains(self, node: str | None) -> Remains:
        return super()._remains(None if self._between else node)

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._between = False
