"""Semaphores: the same queue, and a number of permits that the lock's own node knows.

Whoever makes that node writes what it takes for the number; everybody else reads it with the list. The list is read
first: a yes is then right at the moment at which the number was read, because those before us can only have become fewer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.claim import QueueClaim
from aiolock.backends.zookeeper.outcomes import said
from aiolock.backends.zookeeper.records import Record
from aiolock.backends.zookeeper.rules import Rule, Verdict
from aiolock.backends.zookeeper.watches import DATA
from aiolock.contract import Bid
from aiolock.errors import ConfigError, shorten

if TYPE_CHECKING:
    from aiolock.backends.zookeeper.backend import ZooKeeperBackend

__all__ = ["PermitsClaim"]


class PermitsClaim(QueueClaim):
    """A bid for some of the permits."""

    __slots__ = ("_admitted", "_limit")

    def __init__(self, backend: ZooKeeperBackend, bid: Bid, path: str, rule: Rule) -> None:
        super().__init__(backend, bid, path, rule)
        self._admitted = False
        """Whether our number of permits was compared; whoever has a place keeps it when another is set."""
        self._limit = 0

    async def _look_at_all(self) -> Verdict | None:
        children = await self._place()
        return self._judge(children, self._limit) if children else None

    async def _make_parents(self) -> None:
        limit = self.bid.kind.limit
        await self._backend.parents.make(self._path, Record(limit=limit, declared=limit).encode())

    def _besides(self) -> tuple[Any, ...]:
        self._watches.on(self._path, self._limit_changed, DATA)
        return (wire.get(self._path, watch=True),)

    async def _learn(self, replies: list[Any]) -> None:
        """How many permits there are; raises :class:`ConfigError` for who has named another number."""
        reply = said(replies[0])
        record = Record.decode(reply.data)
        named = self.bid.kind.limit
        while not record.declared:
            # Nobody has named a number, or only an administrator has.
            record = replace(record, declared=named, limit=record.limit or named)
            try:
                await self._session.ask(wire.put(self._path, record.encode(), reply.stat.version), self.owner)
            except exc.BadVersion:
                [request] = self._besides()
                reply = await self._session.ask(request, self.owner)
                record = Record.decode(reply.data)
        if not self._admitted and named not in (record.declared, record.limit):
            await self.release()
            raise ConfigError(
                f"semaphore {shorten(self.bid.name)} has {record.limit} permits, not {named}: "
                "everybody has to name the same limit; set_limit() changes it"
            )
        self._admitted = True
        self._limit = record.limit
        if record.limit != record.declared:
            self._backend.keep(self._path)

    def _limit_changed(self, path: str) -> None:  # noqa: ARG002 - there is only one
        if not self.held:
            self.wake()

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._admitted = False
