"""One place in a lock's queue: an ephemeral sequential node, from its creation to its end.

A create whose reply is lost may have happened: the node carries the uuid of its attempt, and is looked for before
anything else is done. It is adopted only if it belongs to our present session; a node of an earlier session is on its
way out. Every wake-up, for whatever reason, only leads to another look at the list.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from aiozk import exc, protocol

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.janitor import Remains, find, remove
from aiolock.backends.zookeeper.rules import Rule, Verdict, decide, prefix, queue
from aiolock.backends.zookeeper.wire import InDoubt, NotSent, SessionChanged
from aiolock.contract import Bid, Claim, Grant
from aiolock.errors import BackendUnavailable

if TYPE_CHECKING:
    from aiolock.backends.zookeeper.backend import ZooKeeperBackend

__all__ = ["BLOCK", "QueueClaim"]

BLOCK = 1024
"""How many tokens the zxid of one node is worth: holders of this process that pass the lock on have their own."""

_DELETED = protocol.WatchEvent.DELETED
_DATA_CHANGED = protocol.WatchEvent.DATA_CHANGED
_CHILDREN_CHANGED = protocol.WatchEvent.CHILDREN_CHANGED


class QueueClaim(Claim):
    """A bid, the node that stands for it, and what is watched on its behalf."""

    __slots__ = (
        "_attempt",
        "_backend",
        "_held",
        "_node",
        "_path",
        "_rule",
        "_sent",
        "_session",
        "_sleeper",
        "_spent",
        "_token",
        "_watched",
        "_woken",
        "owner",
    )

    def __init__(self, backend: ZooKeeperBackend, bid: Bid, path: str, rule: Rule) -> None:
        super().__init__(bid)
        self._backend = backend
        self._session = backend.session
        self._path = path
        self._rule = rule
        self.owner: int | None = None
        """The session that the node is in, or may be in."""
        self._attempt = str(uuid4())
        self._sent = False
        """Whether a create was sent whose node may be there."""
        self._node: str | None = None
        self._token = 0
        self._held = False
        self._spent = False
        """Whether the watch on the children has fired since the last list."""
        self._watched: set[tuple[int, str]] = set()
        self._woken = False
        self._sleeper: asyncio.Future[None] | None = None

    @property
    def held(self) -> bool:
        """Whether the ensemble has made us the holder, and not taken it back."""
        return self._held

    # --- asking

    async def attempt(self, wait: bool) -> Grant | None:
        """Make the node and look who is before it; one round trip if nobody is."""
        async with self._backend.bounded():
            while True:
                self._woken = False
                try:
                    self._belong(await self._session.ready())
                    children = await self._place()
                    verdict, surplus = decide(
                        self._rule, queue(self._path, children), self._node or "", self._attempt
                    )
                    for name in surplus:
                        self._backend.janitor.take(self._remains(name))
                    if verdict is None:
                        # Somebody deleted it while we waited: begin anew, at the back.
                        self._begin_anew()
                    elif verdict.wait_for is None:
                        if self._session.certain and not self._gone():
                            return self._enter(verdict)
                        # The session lives, but that is not certain enough to tell anybody that the lock is theirs.
                        await self._session.until(lambda: self._session.certain or self._gone())
                    elif not wait:
                        await self.release()
                        return None
                    elif await self._watch(verdict.wait_for):
                        return None
                except (InDoubt, NotSent, SessionChanged):
                    if self._session.closing:
                        raise

    def _gone(self) -> bool:
        return self._session.session_id != self.owner

    def _belong(self, owner: int) -> None:
        """From now on, what we send is in this session."""
        if self.owner != owner:
            if self.owner is not None:
                # What we had ended with its session.
                self._begin_anew()
            self.owner = owner
        self._backend.register(self)

    async def _place(self) -> list[str]:
        """Have a node, and return the list that it is in, or should be in."""
        if self._node is None and self._sent:
            await self._adopt()
        if self._node is None:
            return await self._create()
        try:
            children: list[str] = (await self._session.ask(self._listing(), self.owner)).children
        except exc.NoNode:
            return []
        return children

    async def _create(self) -> list[str]:
        while True:
            self._sent = True
            request = wire.create(
                f"{self._path}/{prefix(self._attempt)}",
                self.bid.label.encode(),
                self._backend.acl,
                sequential=True,
            )
            with self._session.asked(request, self._listing(), owner=self.owner) as (created, listed):
                try:
                    reply = await created
                except exc.NoNode:
                    # The usual way to find that the parent is not there yet, or not any more.
                    self._sent = False
                    await self._backend.make_parents(self._path)
                    continue
                except (exc.NoAuth, exc.InvalidACL):
                    self._sent = False
                    raise
                self._node = reply.path.rpartition("/")[2]
                self._token = reply.stat.created_zxid * BLOCK
                children: list[str] = (await listed).children
                return children

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

    def _listing(self) -> protocol.GetChildrenRequest:
        # Watched, because the holder has to learn who comes, and whether its own node goes. A waiter does not care;
        # its watch fires once, and is not renewed.
        self._on(_CHILDREN_CHANGED, self._path)
        self._spent = False
        return wire.listing(self._path, watch=True)

    def _enter(self, verdict: Verdict) -> Grant:
        self._held = True
        self._off(keep=(_CHILDREN_CHANGED, self._path))
        session = self._session
        # Whatever was asked for: the server keeps the hold for as long as it keeps the session.
        self.bid = replace(self.bid, ttl=session.timeout)
        if verdict.demand and self.demanded_at is None:
            self.demanded_at = self._backend.settings.clock()
        if self._spent:
            self.look()
        return Grant(self._token, 1 if self.bid.fair else BLOCK, session.deadline, verdict.demand)

    def _begin_anew(self) -> None:
        self._off()
        self._attempt, self._sent, self._node, self._held = str(uuid4()), False, None, False

    # --- waiting

    async def _watch(self, name: str) -> bool:
        """Be told when the one before us changes; whether it is still there."""
        path = f"{self._path}/{name}"
        self._off(keep=(_CHILDREN_CHANGED, self._path))
        self._on(_DELETED, path)
        self._on(_DATA_CHANGED, path)
        try:
            await self._session.ask(wire.get(path, watch=True), self.owner)
        except exc.NoNode:
            return False
        return True

    async def changed(self) -> None:
        """Wait for the one before us, for a change of the session, and at most for a while."""
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
        """Something happened: whoever waits here should look again."""
        self._woken = True
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    # --- holding

    def look(self) -> None:
        """As the holder, see whether others have come, and whether our node is still there; the answer comes later."""
        session = self._session
        if not session.connected or self._node is None:
            return
        path = f"{self._path}/{self._node}"
        try:
            if self.demanded_at is None:
                request = self._listing()
            else:
                self._on(_DELETED, path)
                self._on(_DATA_CHANGED, path)
                request = wire.get(path, watch=True)
            reply = session.ask(request, self.owner)
        except exc.ZKError:
            # The session will have changed, or come back: both lead here again.
            return
        reply.add_done_callback(self._looked)

    def _looked(self, reply: asyncio.Future[Any]) -> None:
        if reply.cancelled() or not self._held:
            return
        error = reply.exception()
        if isinstance(error, exc.NoNode):
            self._backend.lost(self, "force-released")
        elif error is None and isinstance(reply.result(), protocol.GetDataResponse):
            if reply.result().stat.created_zxid * BLOCK != self._token:
                self._backend.lost(self, "force-released")
        elif error is None:
            children = reply.result().children
            # Whoever has come here is one who waits.
            if self._node not in children:
                self._backend.lost(self, "force-released")
            elif self.demanded_at is None and len(children) > 1:
                self.demanded_at = self._backend.settings.clock()

    # --- leaving

    async def release(self, keep: float = 0) -> None:  # noqa: ARG002 - a capability that is not promised
        """Delete the node, or whatever a create may have left; what cannot be done now is the janitor's."""
        self.end()
        if not self._sent or self._gone():
            return
        remains = self._remains(self._node)
        try:
            async with self._backend.bounded():
                await remove(self._session, remains)
        except BackendUnavailable:
            self._backend.janitor.take(remains)
        self._begin_anew()

    def end(self) -> None:
        """Nothing that happens at the server concerns us any more."""
        self._held = False
        self._off()
        self._backend.forget(self)

    def _remains(self, node: str | None) -> Remains:
        return Remains(self.owner or 0, self._path, prefix(self._attempt), node)

    # --- watches

    def _on(self, kind: int, path: str) -> None:
        if (kind, path) not in self._watched:
            self._watched.add((kind, path))
            self._session.add_watch_callback(kind, path, self._event)

    def _off(self, keep: tuple[int, str] | None = None) -> None:
        for kind, path in self._watched:
            if (kind, path) != keep:
                self._session.remove_watch_callback(kind, path, self._event)
        self._watched &= {keep}

    def _event(self, path: str) -> None:
        if self._held:
            self.look()
        elif path == self._path:
            self._spent = True
        else:
            self.wake()
