"""Removes what a failed or interrupted release left in the queue, for as long as the ensemble would keep it.

An ephemeral node lives as long as its session, which may be as long as this process. So whatever may still be there
is looked for by the uuid of its attempt, and deleted, until that succeeds or the session is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.outcomes import said
from aiolock.backends.zookeeper.records import Note
from aiolock.backends.zookeeper.session import Session
from aiolock.errors import LockError, shorten
from aiolock.logs import Log, get_logger
from aiolock.tasks import start

__all__ = ["Janitor", "Remains", "find", "remove"]

log: Log = get_logger("aiolock.zookeeper")

PAUSE = 0.05
"""Seconds after a failure."""


class Remains(NamedTuple):
    """What may be left of an attempt: one node if its name is known, else whatever starts with ``prefix``."""

    owner: int
    path: str
    prefix: str
    node: str | None
    attempt: str = ""
    """What its data must say, where its name does not say whose it is."""


async def find(session: Session, remains: Remains) -> list[str]:
    """The nodes of an attempt, in their order, as the leader knows them now."""
    requests = wire.sync(), wire.listing(remains.path, watch=False)
    fresh, listed = await session.ask_all(*requests, owner=remains.owner)
    said(fresh)
    try:
        children: list[str] = said(listed).children
    except exc.NoNode:
        return []
    return sorted(
        (name for name in children if name.startswith(remains.prefix)),
        key=lambda name: name[len(remains.prefix) :],
    )


async def remove(session: Session, remains: Remains) -> bool:
    """Delete what is there; nothing is there afterwards, unless this raises. Whether anything was."""
    if remains.attempt and not await _is_ours(session, remains):
        return False
    found = False
    for name in [remains.node] if remains.node is not None else await find(session, remains):
        with contextlib.suppress(exc.NoNode):
            await session.ask(wire.delete(f"{remains.path}/{name}"), remains.owner)
            found = True
    return found


async def _is_ours(session: Session, remains: Remains) -> bool:
    requests = wire.sync(), wire.get(f"{remains.path}/{remains.node}", watch=False)
    fresh, found = await session.ask_all(*requests, owner=remains.owner)
    said(fresh)
    try:
        return Note.decode(said(found).data).attempt == remains.attempt
    except exc.NoNode:
        return False


class Janitor:
    """One task, while there is something to do."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._remains: dict[Remains, None] = {}
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._remains)

    def take(self, remains: Remains) -> None:
        """From now on this is ours to remove."""
        self._remains[remains] = None
        if self._task is None or self._task.done():
            self._task = start(self._work(), "aiolock-zookeeper-janitor")

    async def _work(self) -> None:
        while self._remains:
            try:
                owner = await self._session.ready()
                for remains in list(self._remains):
                    if remains.owner == owner:
                        await remove(self._session, remains)
                    # Nodes of another session are gone, or the ensemble is removing them.
                    self._remains.pop(remains, None)
            except exc.NoAuth:
                remains = next(iter(self._remains))
                del self._remains[remains]
                log.warning(
                    "may not remove what is left in %s, it ends with the session", shorten(remains.path)
                )
            except (exc.ZKError, LockError) as error:
                log.debug("removing what is left will be tried again: %s", error)
                if self._session.closing or self._session.failure is not None:
                    return
                await asyncio.sleep(PAUSE)

    async def aclose(self) -> None:
        """Stop; what is left ends with the session."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
