"""One place in a lock's queue, from the first look at it to the release."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.contenders import queue
from aiolock.backends.zookeeper.fence import fenced_set
from aiolock.backends.zookeeper.hold import Hold
from aiolock.backends.zookeeper.janitor import remove
from aiolock.backends.zookeeper.node import BLOCK
from aiolock.backends.zookeeper.outcomes import InDoubt, NotSent, SessionChanged
from aiolock.backends.zookeeper.records import Record
from aiolock.backends.zookeeper.rules import Rule, Verdict, decide
from aiolock.backends.zookeeper.waiting import WaitingClaim
from aiolock.backends.zookeeper.watches import CHILDREN
from aiolock.contract import Bid, Grant, Release
from aiolock.errors import BackendUnavailable

if TYPE_CHECKING:
    from aiolock.backends.zookeeper.backend import ZooKeeperBackend

__all__ = ["QueueClaim"]


class QueueClaim(WaitingClaim):
    """A bid that enters by a rule over the queue."""

    __slots__ = ("_begun", "_hold", "_left", "_rule")

    def __init__(self, backend: ZooKeeperBackend, bid: Bid, path: str, rule: Rule) -> None:
        super().__init__(backend, bid, path)
        self._rule = rule
        self._hold: Hold | None = None
        """What we do as the holder, while we are."""
        self._begun: asyncio.Future[Any] | None = None
        """The reply to a deletion that was sent before anyone waited for it."""
        self._left = False
        """Whether a copy of the release may have been sent."""

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

    @property
    def unique(self) -> bool:
        """Whether no other hold ever has a node of the same path, so that its presence proves this hold."""
        return True

    # --- asking

    async def attempt(self, wait: bool) -> Grant | None:
        """Make the node and look who is before it; one round trip if nobody is."""
        async with self._backend.bounded():
            while True:
                told = self._begin_look()
                try:
                    self._belong(await self._session.ready())
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
        self._backend.audience.claims.add(self)

    async def _look_at_all(self) -> Verdict | None:
        """What the whole list says; ``None`` if our node is not in it."""
        return self._judge(await self._place())

    def _judge(self, children: list[str], limit: int = 0) -> Verdict | None:
        places = queue(self._path, self.bid.kind.family, children)
        verdict, surplus = decide(self._rule, places, self._node or "", self._attempt, limit)
        for name in surplus:
            self._backend.janitor.take(self._remains(name))
        return verdict

    def _enter(self, verdict: Verdict, created: int | None = None) -> Grant:
        session, backend, exclusive = self._session, self._backend, self.bid.kind.exclusive
        self._watches.off(keep=(self._path, self.own))
        self._verdict = None
        # Whatever was asked for: the server keeps the hold for as long as it keeps the session.
        self.bid = backend.lasting(self.bid)
        if verdict.demand and self.demanded_at is None:
            self.demanded_at = backend.settings.clock()
        self._hold = hold = Hold(backend, self, created)
        if self._heard:
            hold.armed = True
            hold.hear(self._said)
        if exclusive and not verdict.demand:
            backend.vigil.add(hold)
        else:
            hold.look()
        return Grant(
            self._token, BLOCK if exclusive and not self.bid.fair else 1, session.deadline, verdict.demand
        )

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._hold = None
        self._left = False

    # --- as the holder

    def watch_children(self) -> str:
        """Listen to who comes and goes, and return where; the server is still to be asked."""
        self._watches.on(self._path, self._children_changed, CHILDREN)
        return self._path

    def _children_changed(self, path: str) -> None:  # noqa: ARG002 - there is only one
        if self._hold is not None:
            self._hold.look()

    def _own_changed(self, path: str) -> None:
        super()._own_changed(path)
        if self._hold is not None and path == self.own:
            self._hold.armed = False
            self._hold.look()

    def is_among(self, children: list[str]) -> bool:
        """Whether our node is in this list."""
        return self._node in children

    async def fenced_set(self, path: str, data: bytes, version: int | None) -> int | None:
        """Write to a node elsewhere, if ours is still there; see :func:`aiolock.zookeeper.fenced_set`."""
        return await fenced_set(self._backend, self, path, data, version)

    # --- leaving

    async def release(self, keep: float = 0) -> Release:  # noqa: ARG002 - a capability that is not promised
        """Delete the node, or whatever a create may have left; what cannot be done now is the janitor's."""
        begun, self._begun = self._begun, None
        farewell = self._farewell() if begun is None else None
        self.end()
        if not self._sent:
            return Release.RELEASED
        first, self._left = begun is not None or not self._left, True
        if begun is None and self._gone():
            # What was there ended with its session.
            return Release.NOT_OURS if first else Release.UNKNOWN
        remains = self._remains(self._node)
        found: bool | None = None
        try:
            async with self._backend.bounded():
                if begun is None and farewell is not None:
                    begun = self._session.ask(farewell, self.owner)
                if begun is not None:
                    found = await self._deleted(begun)
                if found is None:
                    found = await remove(self._session, remains)
        except BackendUnavailable as error:
            # Not sent, because the session has ended: the hold ended with it.
            found = False if isinstance(error.__cause__, SessionChanged) else None
            self._backend.janitor.take(remains)
        self._begin_anew()
        if found:
            return Release.RELEASED
        return Release.NOT_OURS if first and found is False else Release.UNKNOWN

    def begin_release(self, keep: float = 0) -> Release | None:  # noqa: ARG002 - as above
        """Send the deletion of a node whose name is known."""
        if self._begun is None:
            if not self._sent or self._node is None or not self.settled or self._remains(self._node).attempt:
                return None
            request = self._farewell() or wire.delete(self.own)
            try:
                self._begun = self._session.ask(request, self.owner)
            except exc.ZKError:
                return None
            # Whoever waited for it may be gone when the client is closed.
            self._begun.add_done_callback(lambda reply: reply.cancelled() or reply.exception())
            self._left = True
            self.end()
        return Release.UNKNOWN

    def _farewell(self) -> Any:
        """What deletes the node of a holder and says in the same step that everybody up to it has gone; if that is of use."""
        if (
            not (self.held and self.settled and self.demanded_at is not None)
            or not self.bid.kind.exclusive
            or not self._backend.may_write
        ):
            return None
        assert self._node is not None  # noqa: S101 - a holder has one
        floor = Record(floor=int(self._node[-10:])).encode()
        return wire.together(wire.put(self._path, floor), wire.delete(self.own))

    async def _deleted(self, begun: asyncio.Future[Any]) -> bool | None:
        """Whether the node was there, by the reply to its deletion; ``None`` if it was not carried out."""
        problem: exc.ResponseError | None = None
        try:
            reply = await begun
        except exc.ResponseError as error:
            problem = error
        else:
            if hasattr(reply, "responses"):
                problem = wire.failure(reply)
        if isinstance(problem, exc.NoAuth):
            # The right to write to the lock's node is no need: those who wait read the list instead.
            self._backend.may_write = False
        if problem is None:
            return True
        return False if isinstance(problem, exc.NoNode) else None

    def end(self) -> None:
        """Nothing that happens at the server concerns us any more."""
        self._hold = self._verdict = None
        self._heard = False
        self._watches.off()
        self._backend.audience.claims.discard(self)
