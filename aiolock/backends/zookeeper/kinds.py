"""Claims of read-write locks and of semaphores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aiozk import exc

from aiolock.backends.zookeeper import protocol
from aiolock.backends.zookeeper.claim import QueueClaim
from aiolock.backends.zookeeper.context import BLOCK, Leftover, find
from aiolock.backends.zookeeper.errors import InDoubt, NotSent, SessionChanged, unwrap
from aiolock.backends.zookeeper.format import Note, Record
from aiolock.backends.zookeeper.protocol import Operation, WatchEvent
from aiolock.backends.zookeeper.queue import mine, reader
from aiolock.backends.zookeeper.session import DATA
from aiolock.core.backend import Grant
from aiolock.core.capabilities import Downgrade
from aiolock.core.inbox import WakeReason
from aiolock.errors import ConfigError, LockLost, shorten
from aiolock.types import READ

__all__ = ["PermitsClaim", "ReadWriteClaim"]


class ReadWriteClaim(QueueClaim, Downgrade):
    """A request for reading or writing, whose writer can become a reader without a gap.

    The reader's node gets the number of the writer's, and one transaction creates the one and deletes the other: at every
    moment exactly one of them is there, in the same position. The writer's end wakes waiting readers; a writer behind
    finds the reader when it lists the queue.
    """

    __slots__ = ("settled",)

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self.settled = True
        """False while the transaction was sent, and its outcome is not known."""

    async def downgrade(self) -> Grant:
        """Become a reader in one round trip; after a lost reply, read which of the two nodes is there."""
        async with self._context.bounded():
            while True:
                try:
                    await self._session.ready()
                    if not self.held:
                        raise LockLost(self.request.name, "revoked")
                    if not self.request.kind.exclusive or await self._become_reader():
                        return Grant(self._token, 1, self._session.deadline, demand=False)
                except SessionChanged as error:
                    raise LockLost(self.request.name, "session") from error
                except (InDoubt, NotSent):
                    if self._session.closing:
                        raise

    async def _become_reader(self) -> bool:
        """Return True as a reader, False if the caller has to try again."""
        if not self.settled:
            names = await find(self._session, self._leftover(None))
            if not names:
                self.settled = True
                self._lose("force-released")
                raise LockLost(self.request.name, "force-released")
            self._settle(names[0])
            if not self.request.kind.exclusive:
                return True
        assert self._node is not None  # noqa: S101 - a holder has one
        node = reader(self._node)
        data = Note(self.request.label, token=self._token // BLOCK).encode()
        create = protocol.create(f"{self._path}/{node}", data, self._context.nodes.acl, sequential=False)
        self.settled = False
        reply = await self._session.ask(protocol.together(create, protocol.delete(self.own)), self.owner)
        error = protocol.failure(reply)
        if error is None:
            self._settle(node)
            return True
        if isinstance(error, exc.NoNode | exc.NodeExists):
            # It was carried out after all, or the node was deleted: the next read decides.
            return False
        self.settled = True
        raise error

    def _settle(self, node: str) -> None:
        self.settled = True
        if node == self._node:
            return
        self._node = node
        self.request = replace(self.request, kind=READ)
        if self.held:
            self._unwatch()
            self._reason = None
            self.check()

    def _is_among(self, children: list[str]) -> bool:
        if not self.settled:
            return any(name.startswith(mine(self._attempt)) for name in children)
        return super()._is_among(children)

    def _leftover(self, node: str | None) -> Leftover:
        return super()._leftover(node if self.settled else None)


class PermitsClaim(QueueClaim):
    """A request for some permits of a semaphore, whose number stands in the lock's own node.

    The client that creates that node writes the number; the others read it with the list. The list is read first: a yes
    is then right at the moment at which the number was read, because those ahead can only have become fewer.
    """

    __slots__ = ("_admitted", "_permits")

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._permits = 0
        self._admitted = False
        """True if the declared number was compared; a claim in the queue stays there when another is set."""

    def _limit(self) -> int:
        return self._permits

    async def _make_parents(self) -> None:
        limit = self.request.kind.limit
        await self._context.nodes.make(self._path, Record(limit=limit, declared=limit).encode())

    def _besides(self) -> tuple[Operation, ...]:
        return (protocol.get(self._watches.on(self._path, self._event), watch=True),)

    async def _learn(self, replies: list[Any]) -> None:
        """Read the number of permits; raises :class:`ConfigError` if the request declares another one."""
        reply = unwrap(replies[0])
        record = Record.decode(reply.data)
        declared = self.request.kind.limit
        while not record.declared:
            # No client has declared a number, or only an administrator has set one.
            record = replace(record, declared=declared, limit=declared if record.limit < 0 else record.limit)
            try:
                put = protocol.put(self._path, record.encode(), reply.stat.version)
                await self._session.ask(put, self.owner)
            except exc.BadVersion:
                [get] = self._besides()
                reply = await self._session.ask(get, self.owner)
                record = Record.decode(reply.data)
        if not self._admitted and declared not in (record.declared, record.limit):
            await self.release()
            raise ConfigError(
                f"semaphore {shorten(self.request.name)} has {record.limit} permits, not {declared}: "
                "all users have to declare the same limit; set_limit() changes it"
            )
        self._admitted = True
        self._permits = record.limit
        if record.limit != record.declared:
            self._context.nodes.keep_used(self._path)

    def _event(self, event: WatchEvent) -> None:
        if event.path == self._path and event.type == DATA and not self.held:
            # The limit has changed.
            self._unwatch()
            self._wake(WakeReason.NOTIFIED)
        else:
            super()._event(event)
