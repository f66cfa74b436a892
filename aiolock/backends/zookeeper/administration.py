"""What people ask of a lock from outside: who is there, let go, give it up, how many permits; and which locks there are.

Each begins with a ``sync``, so that the answer is what the leader knew when the question came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.contenders import SIMPLE, Place, places, queue
from aiolock.backends.zookeeper.outcomes import said
from aiolock.backends.zookeeper.paths import component as encoded
from aiolock.backends.zookeeper.paths import name_of
from aiolock.backends.zookeeper.records import REVOKE, Note, Record
from aiolock.backends.zookeeper.rules import inside
from aiolock.backends.zookeeper.session import Session
from aiolock.contract import Family, Holder, LockInfo, Mode, Waiting

__all__ = ["Desk"]

FAMILIES = (Family.LOCK, Family.RW, Family.SEMAPHORE, Family.ELECTION)
"""Those with a queue."""

AT_ONCE = 200
"""Requests on their way together, where there may be thousands."""


class _View(NamedTuple):
    queue: list[Place]
    record: Record
    version: int
    """Of the record; -1 if there is no such lock."""

    @property
    def inside(self) -> int:
        return inside(self.queue, self.record.limit, self.record.inside)


class Desk:
    """All of these, in one session; ``block`` is how many tokens a zxid is worth. Raises what aiozk raises."""

    def __init__(self, session: Session, *, simple: bool, block: int) -> None:
        self._session = session
        self._simple = simple
        self._block = block

    async def _view(self, path: str, family: Family) -> _View:
        requests = wire.sync(), wire.listing(path, watch=False), wire.get(path, watch=False)
        await self._session.ready()
        fresh, listed, found = await self._session.ask_all(*requests)
        said(fresh)
        try:
            children, known = said(listed).children, said(found)
        except exc.NoNode:
            return _View([], Record(), -1)
        if self._simple:
            # Of the simple recipe, only the holder can be seen.
            contenders = [Place(0, Mode.MUTEX, SIMPLE)] if SIMPLE in children else []
        else:
            contenders = queue(path, family, children)
        return _View(contenders, Record.decode(known.data), known.stat.version)

    async def _each(self, requests: Sequence[Any]) -> list[Any]:
        """The answers to many requests; ``None`` where there is no such node."""
        answers: list[Any] = []
        for begin in range(0, len(requests), AT_ONCE):
            answers += await self._session.ask_all(*requests[begin : begin + AT_ONCE])
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, exc.NoNode):
                raise answer
        return [None if isinstance(answer, BaseException) else answer for answer in answers]

    async def inspect(self, path: str, name: str, family: Family) -> LockInfo:
        """The queue, with the data of each node."""
        view = await self._view(path, family)
        replies = await self._each([wire.get(f"{path}/{place.name}", watch=False) for place in view.queue])
        present = [
            (place, reply) for place, reply in zip(view.queue, replies, strict=True) if reply is not None
        ]
        entered = inside([place for place, _ in present], view.record.limit, view.record.inside)
        holders = tuple(self._holder(place, reply) for place, reply in present[:entered])
        waiters = tuple(
            Waiting(Note.decode(reply.data).label, place.mode.value, place.permits)
            for place, reply in present[entered:]
        )
        return LockInfo(name, holders, waiters, family, view.record.limit or None)

    def _holder(self, place: Place, reply: Any) -> Holder:
        note = Note.decode(reply.data)
        return Holder(
            label=note.label,
            token=(note.token or reply.stat.created_zxid) * self._block,
            since=datetime.fromtimestamp(reply.stat.created / 1000, UTC),
            remaining=self._session.timeout,
            permits=place.permits,
            mode=place.mode.value,
        )

    async def force_release(self, path: str, family: Family) -> bool:
        """Delete the nodes of whoever is inside; their owners watch them."""
        while True:
            view = await self._view(path, family)
            nodes = [place.name for place in view.queue[: view.inside]]
            if not nodes:
                return False
            replies = await self._each([wire.delete(f"{path}/{node}") for node in nodes])
            if any(reply is not None for reply in replies):
                return True

    async def request_release(self, path: str, family: Family, reason: str) -> bool:
        """Write it into the nodes of whoever is inside; their owners watch them."""
        view = await self._view(path, family)
        told = [await self._tell(f"{path}/{place.name}", reason) for place in view.queue[: view.inside]]
        return any(told)

    async def _tell(self, node: str, reason: str) -> bool:
        while True:
            try:
                reply = await self._session.ask(wire.get(node, watch=False))
                # An empty node is of somebody who uses Curator and can be asked in its words.
                data = replace(Note.decode(reply.data), asked=reason).encode() if reply.data else REVOKE
                await self._session.ask(wire.put(node, data, reply.stat.version))
            except exc.BadVersion:
                continue
            except exc.NoNode:
                return False
            return True

    async def set_limit(self, path: str, limit: int) -> bool:
        """Write the number of permits; whether there was a node to write it into."""
        while True:
            view = await self._view(path, Family.SEMAPHORE)
            if view.version < 0:
                return False
            # Whoever has entered by the old number stays inside; people are to see that.
            upto = max((place.sequence for place in view.queue[: view.inside]), default=-1)
            record = replace(view.record, limit=limit, inside=max(view.record.inside, upto))
            try:
                await self._session.ask(wire.put(path, record.encode(), view.version))
            except exc.BadVersion:
                continue
            except exc.NoNode:
                return False
            return True

    async def names(self, base: str, pattern: str) -> list[tuple[str, Family]]:
        """Every lock with a queue."""
        await self._session.ready()
        await self._session.ask(wire.sync())
        folders = await self._each(
            [wire.listing(f"{base}/{family.value}", watch=False) for family in FAMILIES]
        )
        found = [
            (family, component)
            for family, folder in zip(FAMILIES, folders, strict=True)
            for component in (folder.children if folder is not None else ())
            # Another program may have made a node whose name does not come from a lock's name.
            if component == encoded(name_of(component)) and fnmatchcase(name_of(component), pattern)
        ]
        lists = await self._each(
            [wire.listing(f"{base}/{family.value}/{component}", watch=False) for family, component in found]
        )
        return sorted(
            (name_of(component), family)
            for (family, component), listed in zip(found, lists, strict=True)
            if listed is not None and (SIMPLE in listed.children or places(family, listed.children)[0])
        )
