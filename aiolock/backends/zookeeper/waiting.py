"""Waiting for one's turn: whom a place in the queue watches, what wakes it, and what it may conclude from that.

A wake-up leads to another look at the list, except the one that happens most: the one before us has gone. If nobody else
was before us, it is our turn. Else, if that one was a holder, it said when it left that everybody up to it has gone (the
*floor*, written in the same transaction that deleted its node); then one small read is as good as the list, and costs
the same however many wait. Both need our own node to be there: it is watched as long as we wait, and a server tells of
ends in their order. The argument is on the backend's page.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.node import NodeClaim
from aiolock.backends.zookeeper.outcomes import said
from aiolock.backends.zookeeper.records import Record
from aiolock.backends.zookeeper.rules import Verdict, after, next_in_line
from aiolock.backends.zookeeper.watches import DATA, DELETED, Watches
from aiolock.contract import Bid, Mode

if TYPE_CHECKING:
    from aiolock.backends.zookeeper.backend import ZooKeeperBackend

__all__ = ["WaitingClaim"]


class WaitingClaim(NodeClaim):
    """A bid, its node, and what is watched on its behalf while it waits."""

    __slots__ = ("_heard", "_said", "_sleeper", "_told", "_verdict", "_watches", "_woken")

    def __init__(self, backend: ZooKeeperBackend, bid: Bid, path: str) -> None:
        super().__init__(backend, bid, path)
        self._verdict: Verdict | None = None
        """What the last look led to, and whom we wait for by it."""
        self._watches = Watches(backend.session)
        self._heard = False
        """Whether the server will say what happens to our node, and has not said anything since it was read."""
        self._said: bytes | None = None
        """What our node said when it was read."""
        self._told: str | None = None
        """Whose end has woken us, if nothing else has: a node that is certainly deleted."""
        self._woken = False
        self._sleeper: asyncio.Future[None] | None = None

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._watches.off()
        self._verdict, self._heard = None, False

    # --- looking

    def _begin_look(self) -> str | None:
        """From now on, whatever happens leads to another look; whose end has led to this one."""
        told, self._told, self._woken = self._told, None, False
        return told

    async def _ask_around(self, gone: str) -> Verdict | None:
        """Without the list: is it our turn now that this node is deleted? ``None`` if that is not certain.

        Only a holder writes the floor, and whoever is up to it never comes back. Our node must still be there: whoever
        stands behind us has been waiting for somebody else if it is not.
        """
        last = self._verdict
        if last is None or not self._heard or self.bid.kind.mode is Mode.PERMITS:
            return None
        if next_in_line(last, gone):
            return Verdict(enter=True, demand=last.demand)
        try:
            known = await self._session.ask(wire.get(self._path, watch=False), self.owner)
        except exc.NoNode:
            return None
        if self._woken:
            return None
        return after(last, gone, Record.decode(known.data).floor, demand=known.stat.num_children > 1)

    async def _watch(self, verdict: Verdict) -> bool:
        """Be told when one of those before us goes, or our own node; whether all of them are still there."""
        paths = [f"{self._path}/{place.name}" for place in verdict.watch]
        known = [path for path in paths if path in self._watches] if len(paths) > 1 else []
        self._verdict = verdict
        self._watches.off(keep=(self._path, self.own, *known))
        requests = []
        own = self._node is not None and not self._heard
        if own:
            requests.append(wire.get(self.watch_own(), watch=True))
        for path in paths:
            if path not in known:
                self._watches.on(path, self._somebody_left, DELETED)
                self._watches.on(path, self._somebody_changed, DATA)
                requests.append(wire.get(path, watch=True))
        if not requests:
            return True
        replies = await self._session.ask_all(*requests, owner=self.owner)
        try:
            if own:
                self._said = said(replies[0]).data
                # Unless it has changed between this answer and now.
                self._heard = self.own in self._watches
            for reply in replies:
                said(reply)
        except exc.NoNode:
            return False
        return True

    # --- sleeping

    async def changed(self) -> None:
        """Wait for those before us, for a change of the session, and at most for a while."""
        if self._woken:
            return
        loop = asyncio.get_running_loop()
        self._sleeper = loop.create_future()
        poll = loop.call_later(self._session.timeout * self._backend.random.uniform(1, 2), self.wake)
        try:
            await self._sleeper
        finally:
            poll.cancel()
            self._sleeper = None

    def wake(self) -> None:
        """Something happened: whoever waits here should look at everything again."""
        # The server may have forgotten what we asked it to tell.
        self._watches.off()
        self._heard = False
        self._rouse(None)

    def _rouse(self, told: str | None) -> None:
        # After a wake-up for another reason, the whole list is looked at in any case.
        self._told = None if self._woken else told
        self._woken = True
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    def _somebody_left(self, path: str) -> None:
        self._watches.forget(path)
        self._rouse(path.rpartition("/")[2])

    def _somebody_changed(self, path: str) -> None:
        # Still there, and the server will not tell of its end any more.
        self._watches.forget(path)
        self._rouse(None)

    # --- our own node

    def watch_own(self) -> str:
        """Listen to what happens to our node, and return its path; the server is still to be asked."""
        own = self.own
        self._watches.on(own, self._own_changed, DELETED, DATA)
        return own

    def _own_changed(self, path: str) -> None:
        if path == self.own:
            self._watches.forget(path)
            self._heard = False
            self._rouse(None)
