"""One place in a lock's queue, from the first look at it to the release.

A wake-up leads to another look at the list, except the one that happens most: the one before us has gone. If it was a
holder, it said when it left that everybody up to it has gone (the *floor*, written in the same transaction that deleted
its node); then two small reads are as good as the list, and cost the same however many wait. The argument is on the
backend's page.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from aiozk import exc, protocol

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.contenders import queue
from aiolock.backends.zookeeper.fence import fenced_set
from aiolock.backends.zookeeper.hold import Hold
from aiolock.backends.zookeeper.janitor import remove
from aiolock.backends.zookeeper.node import BLOCK, NodeClaim
from aiolock.backends.zookeeper.records import Record
from aiolock.backends.zookeeper.rules import Rule, Verdict, after, decide
from aiolock.backends.zookeeper.watches import CHILDREN, DATA, DELETED, Watches
from aiolock.backends.zookeeper.wire import InDoubt, NotSent, SessionChanged
from aiolock.contract import Bid, Grant, Mode
from aiolock.errors import BackendUnavailable

if TYPE_CHECKING:
    from aiolock.backends.zookeeper.backend import ZooKeeperBackend

__all__ = ["QueueClaim"]


class QueueClaim(NodeClaim):
    """A bid, the node that stands for it, and what is watched on its behalf."""

    __slots__ = (
        "_hold",
        "_rule",
        "_said",
        "_sleeper",
        "_spent",
        "_told",
        "_verdict",
        "_watches",
        "_woken",
    )

    def __init__(self, backend: ZooKeeperBackend, bid: Bid, path: str, rule: Rule) -> None:
        super().__init__(backend, bid, path)
        self._rule = rule
        self._hold: Hold | None = None
        """What we do as the holder, while we are."""
        self._verdict: Verdict | None = None
        """What the last look led to, and whom we wait for by it."""
        self._watches = Watches(backend.session)
        self._said: bytes | None = None
        """What our node says, if the last look was at it."""
        self._spent = False
        """Whether the watch on the children has fired since the last list."""
        self._told: str | None = None
        """Whose end has woken us, if nothing else has: a node that is certainly deleted."""
        self._woken = False
        self._sleeper: asyncio.Future[None] | None = None

    @property
    def held(self) -> bool:
        """Whether the ensemble has made us the holder, and not taken it back."""
        return self._hold is not None

    @property
    def hold(self) -> Hold | None:
        """What we do as the holder, while we are."""
        return self._hold

    @property
    def settled(self) -> bool:
        """Whether we know for certain which node is ours."""
        return True

    # --- asking

    async def attempt(self, wait: bool) -> Grant | None:
        """Make the node and look who is before it; one round trip if nobody is."""
        async with self._backend.bounded():
            while True:
                told, self._told, self._woken = self._told, None, False
                try:
                    self._belong(await self._session.ready())
                    self._said = None
                    verdict = None if told is None else await self._ask_around(told)
                    if verdict is None:
                        verdict = await self._look_at_all()
                    if verdict is None:
                        # Somebody deleted our node while we waited: begin anew, at the back.
                        self._begin_anew()
                    elif verdict.enter:
                        if self._session.certain and not self._gone():
                            return self._enter(verdict)
                        # The session lives, but that is not certain enough to tell anybody that the lock is theirs.
                        await self._session.until(lambda: self._session.certain or self._gone())
                    elif not wait:
                        await self.release()
                        return None
                    elif await self._watch(verdict):
                        return None
                except (InDoubt, NotSent, SessionChanged):
                    if self._session.closing:
                        raise

    def _belong(self, owner: int) -> None:
        """From now on, what we send is in this session."""
        if self.owner != owner:
            if self.owner is not None:
                # What we had ended with its session.
                self._begin_anew()
            self.owner = owner
        self._backend.register(self)

    async def _look_at_all(self) -> Verdict | None:
        """What the whole list says; ``None`` if our node is not in it."""
        return self._judge(await self._place())

    def _judge(self, children: list[str], limit: int = 0) -> Verdict | None:
        places = queue(self._path, self.bid.kind.family, children)
        verdict, surplus = decide(self._rule, places, self._node or "", self._attempt, limit)
        for name in surplus:
            self._backend.janitor.take(self._remains(name))
        return verdict

    def listing(self) -> protocol.GetChildrenRequest:
        """The request for the list."""
        if not self.bid.kind.exclusive:
            return wire.listing(self._path, watch=False)
        # Watched, because such a holder has to learn who comes. A waiter does not care; its watch fires once, and is
        # not renewed.
        self._watches.on(self._path, self._children_changed, CHILDREN)
        self._spent = False
        return wire.listing(self._path, watch=True)

    async def _ask_around(self, gone: str) -> Verdict | None:
        """Without the list: is it our turn now that this node is deleted? ``None`` if that is not certain.

        Only a holder writes the floor, and whoever is up to it never comes back. Our node must still be there: whoever
        stands behind us has been waiting for somebody else since it went.
        """
        last = self._verdict
        if last is None or self.bid.kind.mode is Mode.PERMITS:
            return None
        requests = (wire.get(self._path, watch=False), wire.get(self.watch_own(), watch=True))
        with self._session.asked(*requests, owner=self.owner) as (parent, own):
            try:
                known, self._said = await parent, (await own).data
            except exc.NoNode:
                return None
        return after(last, gone, Record.decode(known.data).floor, demand=known.stat.num_children > 1)

    def _enter(self, verdict: Verdict, created: int | None = None) -> Grant:
        session, exclusive = self._session, self.bid.kind.exclusive
        self._watches.off(keep=(self._path, self.own))
        self._verdict = None
        # Whatever was asked for: the server keeps the hold for as long as it keeps the session.
        self.bid = replace(self.bid, ttl=session.timeout)
        if verdict.demand and self.demanded_at is None:
            self.demanded_at = self._backend.settings.clock()
        self._hold = Hold(self._backend, self, created)
        if self._said is not None:
            # Our node was read, and is watched since.
            self._hold.armed = True
            self._hold.hear(self._said)
        if self._spent or not exclusive or not self._watches.has(CHILDREN, self._path):
            self._hold.look()
        block = BLOCK if exclusive and not self.bid.fair else 1
        return Grant(self._token, block, session.deadline, verdict.demand)

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._watches.off()
        self._hold = self._verdict = None

    # --- waiting

    async def _watch(self, verdict: Verdict) -> bool:
        """Be told when one of those before us goes; whether all of them are still there."""
        paths = [f"{self._path}/{place.name}" for place in verdict.watch]
        known = [path for path in paths if path in self._watches] if len(paths) > 1 else []
        self._verdict = verdict
        self._watches.off(keep=(self._path, self.own, *known))
        requests = []
        for path in paths:
            if path not in known:
                self._watches.on(path, self._somebody_left, DELETED)
                self._watches.on(path, self._somebody_changed, DATA)
                requests.append(wire.get(path, watch=True))
        with self._session.asked(*requests, owner=self.owner) as replies:
            try:
                for reply in replies:
                    await reply
            except exc.NoNode:
                return False
        return True

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
        self._told = None
        # The server may have forgotten what we asked it to tell.
        self._watches.off()
        self._rouse()

    def _rouse(self) -> None:
        self._woken = True
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    def _somebody_left(self, path: str) -> None:
        self._watches.forget(path)
        # After a wake-up for another reason, the whole list is looked at in any case.
        self._told = None if self._woken else path.rpartition("/")[2]
        self._rouse()

    def _somebody_changed(self, path: str) -> None:
        # Still there, and the server will not tell of its end any more.
        self._watches.forget(path)
        self._told = None
        self._rouse()

    def _own_changed(self, path: str) -> None:
        if self._hold is None:
            self.wake()
        elif path == self.own:
            self._hold.armed = False
            self._hold.look()

    def _children_changed(self, path: str) -> None:  # noqa: ARG002 - there is only one
        self._spent = True
        if self._hold is not None:
            self._hold.look()

    # --- leaving

    async def release(self, keep: float = 0) -> None:  # noqa: ARG002 - a capability that is not promised
        """Delete the node, or whatever a create may have left; what cannot be done now is the janitor's."""
        farewell = self.held and self.settled and self.demanded_at is not None
        self.end()
        if not self._sent or self._gone():
            return
        remains = self._remains(self._node)
        try:
            async with self._backend.bounded():
                if not (farewell and await self._say_farewell()):
                    await remove(self._session, remains)
        except BackendUnavailable:
            self._backend.janitor.take(remains)
        self._begin_anew()

    async def _say_farewell(self) -> bool:
        """Delete the node and say in the same step that everybody up to it has gone; whether nothing is left to do."""
        if not self.bid.kind.exclusive or not self._backend.may_write:
            return False
        assert self._node is not None  # noqa: S101 - a holder has one
        floor = Record(floor=int(self._node[-10:])).encode()
        requests = wire.put(self._path, floor), wire.delete(self.own)
        try:
            reply = await self._session.ask(wire.together(*requests), self.owner)
        except exc.ResponseError as error:
            problem: exc.ResponseError | None = error
        else:
            problem = wire.failure(reply)
        if isinstance(problem, exc.NoAuth):
            # The right to write to the lock's node is no need: those who wait read the list instead.
            self._backend.may_write = False
        return problem is None or isinstance(problem, exc.NoNode)

    def end(self) -> None:
        """Nothing that happens at the server concerns us any more."""
        self._hold = self._verdict = None
        self._watches.off()
        self._backend.forget(self)

    # --- our node

    def watch_own(self) -> str:
        """Listen to what happens to our node, and return its path; the server is still to be asked."""
        own = self.own
        self._watches.on(own, self._own_changed, DELETED, DATA)
        return own

    async def fenced_set(self, path: str, data: bytes, version: int | None) -> int | None:
        """Write to a node elsewhere, if ours is still there; see :func:`aiolock.zookeeper.fenced_set`."""
        return await fenced_set(self._backend, self, path, data, version)

    def is_among(self, children: list[str]) -> bool:
        """Whether our node is in this list."""
        return self._node in children
