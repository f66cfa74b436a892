"""Mutex claims: ephemeral sequential nodes that watch their predecessor.

**Node.** A create whose reply is lost may have happened: the node's name has the uuid of its attempt, and is searched for
before anything else is done. It is adopted only if it belongs to the present session; a node of an earlier session is on
its way out.

**Waiting.** A wake-up leads to another read of the list, except the most frequent one: the predecessor is gone. If no
other was ahead, the claim is next. Else, if the predecessor was a holder, it has written when it left that every
contender up to its number is gone (the *floor*, in the transaction that deleted its node); then one small read is as
good as the list, and costs the same however many wait. Both need this claim's own node to be there: it is watched during
the wait, and a server announces ends in their order. The argument is on the backend's page.

**Holding.** A holder watches its own node, which an administrator may delete or write a release request into, and the
queue until it knows that others wait. Most holds end within a millisecond; they do not watch the queue at all, because
each watch costs a request, and its event a message for each turn.

The file is long because all of this is one state machine: a wake-up, a reply or a new session may come in each state.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any
from uuid import uuid4

from aiozk import exc

from aiolock.backends.zookeeper import protocol
from aiolock.backends.zookeeper.context import BLOCK, Context, Leftover, Watches, find, remove
from aiolock.backends.zookeeper.errors import InDoubt, NotSent, SessionChanged, unwrap
from aiolock.backends.zookeeper.format import Note, Record
from aiolock.backends.zookeeper.protocol import Data, Operation, WatchEvent
from aiolock.backends.zookeeper.queue import (
    RULES,
    Verdict,
    after,
    decide,
    is_next,
    mine,
    prefix,
    queue,
)
from aiolock.backends.zookeeper.session import CHILDREN, DELETED
from aiolock.backends.zookeeper.url import acceptable
from aiolock.core.backend import Event, EventKind, Grant, Release, Request
from aiolock.core.capabilities import FencedNode
from aiolock.core.inbox import WakeReason
from aiolock.errors import BackendRefused, BackendUnavailable, ConfigError, LockLost, LossReason, shorten

__all__ = ["QueueClaim"]


class QueueClaim(FencedNode):
    """One request and its node in the queue of a lock."""

    __slots__ = (
        *("_attempt", "_begun", "_context", "_gone", "_node", "_own_data", "_own_watched"),
        *("_path", "_reason", "_release_sent", "_sent", "_session", "_token", "_verdict"),
        *("_watches", "_woken", "held", "owner"),
    )

    settled: bool = True
    """True if it is certain which node is the own one."""

    def __init__(self, context: Context, request: Request, path: str) -> None:
        super().__init__(request)
        self._context = context
        self._session = context.session
        self._path = path
        self._watches = Watches(context.session)
        self.owner: int | None = None
        """The session that the node is in, or may be in."""
        self._token = 0
        self._own_data: bytes | None = None
        """The data of the own node when it was last read."""
        self._reason: str | None = None
        """The reason of the last release request that was reported."""
        self._woken = False
        """True if an event has come since the last verdict was begun."""
        self._gone: str | None = None
        """The node whose certain end is the only event since then."""
        self._begun: tuple[asyncio.Future[Any], bool] | None = None
        """The reply to a deletion that was sent and not awaited, and whether it is the first copy."""
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget the node: the next one belongs to another attempt."""
        self._attempt = ""
        self._sent = False
        """True if a create was sent whose node may be there."""
        self._node: str | None = None
        self._verdict: Verdict | None = None
        """The latest verdict."""
        self._own_watched = False
        """True if the server will announce what happens to the own node, and has not since it was read."""
        self.held = False
        """True if the ensemble has granted the lock, and not taken it back."""
        self._release_sent = False
        """True if a copy of the release may have been sent."""
        self._watches.off()

    @property
    def own(self) -> str:
        """The path of the own node."""
        return f"{self._path}/{self._node}"

    def _other_session(self) -> bool:
        return self._session.session_id != self.owner

    def _leftover(self, node: str | None) -> Leftover:
        return Leftover(self.owner or 0, self._path, mine(self._attempt), node)

    # --- acquire

    async def acquire(self, wait: bool) -> Grant | None:
        """Create the node and list those ahead; one round trip if there is none."""
        if not self._woken:
            # After a poll: the server may have forgotten the watches.
            self._unwatch()
        session = self._session
        async with self._context.bounded():
            while True:
                gone, self._gone, self._woken = self._gone, None, False
                if self._inbox is not None:
                    self._inbox.take()
                try:
                    self._belong(await session.ready())
                    verdict = await self._judge(gone)
                    if verdict is None:
                        # The node was deleted during the wait: begin anew, at the back.
                        self._begin_anew()
                    elif verdict.enter:
                        if session.certain and not self._other_session():
                            return self._enter(verdict)
                        # The session lives, but not certainly enough to grant the lock.
                        await session.until(lambda: session.certain or self._other_session())
                    elif not wait:
                        await self.release()
                        return None
                    elif await self._watch(verdict):
                        self.inbox.wake_after(self._context.poll_delay(), WakeReason.POLL)
                        return None
                except (InDoubt, NotSent, SessionChanged):
                    if session.closing:
                        raise

    def _belong(self, owner: int) -> None:
        if self.owner != owner:
            if self.owner is not None:
                # The node ended with its session.
                self._begin_anew()
            self.owner = owner
        if not self._attempt:
            self._attempt = str(uuid4())
        self._session.listeners.add(self._session_changed)

    async def _judge(self, gone: str | None) -> Verdict | None:
        """Return the verdict on the own node; ``None`` if it is not in the queue."""
        verdict = None if gone is None else await self._infer(gone)
        if verdict is None:
            children = await self._enqueue()
            contenders = queue(self._path, self.request.kind.family, children)
            rule = RULES[self.request.kind.mode]
            verdict, surplus = decide(rule, contenders, self._node or "", self._attempt, self._limit())
            for name in surplus:
                self._context.cleanup.take(self._leftover(name))
        return verdict

    def _limit(self) -> int:
        """Return the number of permits of a semaphore."""
        return 0

    async def _infer(self, gone: str) -> Verdict | None:
        """Decide without the list, now that the node ``gone`` is deleted; ``None`` if that is not certain.

        Only a holder writes the floor, and no contender up to it comes back. The own node must still be there: those behind
        have been waiting for another one if it is not. Cancelling it changes nothing.
        """
        last = self._verdict
        if last is None or not self._own_watched or self.request.kind.counted:
            return None
        if is_next(last, gone):
            return Verdict(enter=True, demand=last.demand)
        try:
            known = await self._session.ask(protocol.get(self._path, watch=False), self.owner)
        except exc.NoNode:
            return None
        if self._woken:
            return None
        return after(last, gone, Record.decode(known.data).floor, demand=known.stat.num_children > 1)

    def _enter(self, verdict: Verdict) -> Grant:
        session, context = self._session, self._context
        self._watches.off(self._path, self.own)
        self._verdict = None
        if self._inbox is not None:
            self._inbox.close()
        if self.request.ttl != session.timeout:
            # Whatever was asked for: the server keeps the hold for as long as it keeps the session.
            self.request = replace(self.request, ttl=session.timeout)
        if verdict.demand:
            self.note_waiters(context.clock())
        self.held = True
        self._reason = None
        if self._own_watched:
            self._read_request(self._own_data)
        exclusive = self.request.kind.exclusive
        if exclusive and not verdict.demand:
            context.timer.call(self.check)
        else:
            self.check()
        count = BLOCK if exclusive and not self.request.fair else 1
        return Grant(self._token, count, session.deadline, verdict.demand)

    # --- the node

    async def _enqueue(self) -> list[str]:
        """Create the node if there is none, and return the list of children that it is or should be in."""
        if self._node is None and self._sent:
            await self._adopt()
        if self._node is None:
            return await self._create()
        requests = protocol.listing(self._path, watch=False), *self._besides()
        listed, *rest = await self._session.ask_all(*requests, owner=self.owner)
        try:
            children: list[str] = unwrap(listed).children
            await self._learn(rest)
        except exc.NoNode:
            return []
        return children

    def _besides(self) -> tuple[Operation, ...]:
        """Return the requests to send together with the list."""
        return ()

    async def _learn(self, replies: list[Any]) -> None:
        """Read the replies to the requests that :meth:`_besides` added to the list."""

    async def _create(self) -> list[str]:
        name = f"{self._path}/{prefix(self._attempt, self.request.kind)}"
        note = Note(self.request.label, value=self.request.value)
        create = protocol.create(name, note.encode(), self._context.nodes.acl, sequential=True)
        while True:
            self._sent = True
            requests = create, protocol.listing(self._path, watch=False), *self._besides()
            created, listed, *rest = await self._session.ask_all(*requests, owner=self.owner)
            try:
                path, stat = unwrap(created)
            except exc.NoNode:
                # The parent is missing: not tested before, because it usually exists.
                self._sent = False
                await self._make_parents()
                continue
            except (exc.NoAuth, exc.InvalidACL):
                self._sent = False
                raise
            self._node, self._token = path.rpartition("/")[2], stat.created_zxid * BLOCK
            children: list[str] = unwrap(listed).children
            await self._learn(rest)
            return children

    async def _make_parents(self) -> None:
        await self._context.nodes.make(self._path)

    async def _adopt(self) -> None:
        """Find the node of a create whose reply was lost, if there is one."""
        names = await find(self._session, self._leftover(None))
        if not names:
            self._sent = False
            return
        with contextlib.suppress(exc.NoNode):
            stat = (await self._session.ask(protocol.exists(f"{self._path}/{names[0]}"), self.owner)).stat
            if stat.ephemeral_owner == self.owner:
                self._node, self._token = names[0], stat.created_zxid * BLOCK
                return
        self._begin_anew()

    # --- events

    async def _watch(self, verdict: Verdict) -> bool:
        """Watch the contenders that the verdict names and the own node; return whether all of them are still there."""
        paths = [f"{self._path}/{node.name}" for node in verdict.watch]
        known = [path for path in paths if path in self._watches] if len(paths) > 1 else []
        self._verdict = verdict
        self._watches.off(self._path, self.own, *known)
        own = self._node is not None and not self._own_watched
        wanted = [self.own] if own else []
        wanted += [path for path in paths if path not in known]
        if not wanted:
            return True
        requests = [protocol.get(self._watches.on(path, self._event), watch=True) for path in wanted]
        replies = await self._session.ask_all(*requests, owner=self.owner)
        try:
            data = [unwrap(reply).data for reply in replies]
        except exc.NoNode:
            return False
        if own:
            self._own_data = data[0]
            # Unless it has changed between this reply and now.
            self._own_watched = self.own in self._watches
        return True

    def _event(self, event: WatchEvent) -> None:
        """Handle what the server announces of a watched node."""
        path, deleted = event.path, event.type == DELETED
        if path == self._path:
            if event.type == CHILDREN and self.held:
                self.check()
            return
        # Still there or not, the server announces nothing more of it.
        self._watches.forget(path)
        if path != self.own:
            self._wake(WakeReason.NOTIFIED, path.rpartition("/")[2] if deleted else None)
            return
        self._own_watched = False
        if self.held:
            self.check()
        else:
            self._wake(WakeReason.LAPSED if deleted else WakeReason.NOTIFIED)

    def _session_changed(self) -> None:
        if not self.held:
            self._unwatch()
            self._wake(WakeReason.RECONNECTED)
        elif self._other_session():
            self._lose("session")
        else:
            # Nothing is watched on another connection.
            self._own_watched = False
            self.check()

    def _unwatch(self) -> None:
        self._watches.off()
        self._own_watched = False

    def _wake(self, reason: WakeReason, gone: str | None = None) -> None:
        # After any event but the end of one node, the list is read.
        self._gone = None if self._woken else gone
        self._woken = True
        self.inbox.wake(reason)

    # --- hold

    def check(self, *, own: bool = False) -> None:
        """Read and watch the own node, or until it is known that others wait the queue; does not wait for the reply.

        A loss or a release request becomes an event. A node whose changes the server will announce is not read.
        """
        session = self._session
        if not self.held or not session.connected:
            return
        own = (own or self.contended_since is not None or not self.request.kind.exclusive) and self.settled
        if own and self._own_watched:
            return
        node, path, read = self.own, self._path, protocol.listing
        if own:
            path, read = node, protocol.get
        # Without a connection: the session will change or come back, and both lead here again.
        with contextlib.suppress(exc.ZKError):
            reply = session.ask(read(self._watches.on(path, self._event), watch=True), self.owner)
            self._own_watched = self._own_watched or own
            reply.add_done_callback(lambda reply: self._checked(node, reply))

    def _checked(self, node: str, reply: asyncio.Future[Any]) -> None:
        if reply.cancelled() or not self.held or (self.settled and node != self.own):
            return
        error = reply.exception()
        found = True
        if isinstance(error, exc.NoNode):
            # The own node is gone, or the lock's.
            found = not self.settled
        elif error is not None:
            self._own_watched = False
        elif isinstance(data := reply.result(), Data):
            self._read_request(data.data)
        else:
            children = data.children
            found = self._is_among(children)
            if len(children) > 1:
                self.note_waiters(self._context.clock())
        if not found:
            self._lose("force-released")

    def _is_among(self, children: list[str]) -> bool:
        return self._node in children

    def _read_request(self, data: bytes | None) -> None:
        """Report a release request in the data of the own node; each reason once."""
        reason = Note.decode(data).asked
        if reason is not None and reason != self._reason:
            self._reason = reason
            self._context.events.put(Event(EventKind.REQUESTED, self, text=reason))

    def _lose(self, reason: LossReason) -> None:
        self._end()
        self._context.events.put(Event(EventKind.LOST, self, reason))

    async def fenced_set(self, path: str, data: bytes, version: int | None) -> int | None:
        """Write to a node elsewhere if the own one is there; see :func:`aiolock.zookeeper.fenced_set`. Sent once."""
        name, session = self.request.name, self._session
        if not acceptable(path):
            raise ConfigError(f"path must be one that ZooKeeper accepts, as /app/config, not {shorten(path)}")
        if not self.held:
            raise LockLost(name, "revoked")
        if not self.settled:
            raise BackendUnavailable(
                f"it is not known whether {shorten(name)} was downgraded: do that again first"
            )
        put = protocol.put(self._context.address.chroot + path, data, -1 if version is None else version)
        async with self._context.bounded():
            await session.ready()
            try:
                reply = await session.ask(protocol.together(protocol.check(self.own), put), self.owner)
            except SessionChanged as error:
                raise LockLost(name, "session") from error
            checked, written = reply.responses
            if isinstance(checked, exc.NoNode):
                raise LockLost(name, "force-released") from checked
            if isinstance(written, exc.BadVersion):
                return None
            if isinstance(written, exc.NoNode):
                message = f"there is no node {shorten(path)} to write to: create it first"
                raise BackendRefused(message) from written
            if (failure := protocol.failure(reply)) is not None:
                raise failure
            return int(written.stat.version)

    # --- release

    async def release(self, keep: float = 0) -> Release:  # noqa: ARG002 - a capability that is not promised
        """Delete the node, or the nodes that a create may have left; after a failure the clean-up does it."""
        if self.begin_release() is None:
            self._end()
        begun, self._begun = self._begun, None
        if not self._sent:
            return Release.RELEASED
        if begun is None:
            first, self._release_sent = not self._release_sent, True
            if self._other_session():
                # The node ended with its session.
                return Release.of(held=False, first=first)
        else:
            first = begun[1]
        leftover = self._leftover(self._node)
        found: bool | None = None
        try:
            async with self._context.bounded():
                if begun is not None:
                    found = await self._deleted(begun[0])
                if found is None:
                    found = await remove(self._session, leftover)
        except BackendUnavailable as error:
            # Not sent because the session has ended: the hold ended with it.
            found = False if isinstance(error.__cause__, SessionChanged) else None
            self._context.cleanup.take(leftover)
        self._begin_anew()
        return Release.of(found, first=first)

    def begin_release(self, keep: float = 0) -> Release | None:  # noqa: ARG002 - as above
        """Send the deletion of a node whose name is certain."""
        if self._begun is None:
            if not (self._sent and self._node is not None and self.settled):
                return None
            try:
                reply = self._session.ask(self._deletion(), self.owner)
            except exc.ZKError:
                return None
            self._begun = reply, not self._release_sent
            self._release_sent = True
            self._end()
        return Release.UNKNOWN

    def _deletion(self) -> Operation:
        """Return the request that deletes the own node; with others waiting it writes the floor in the same transaction."""
        delete = protocol.delete(self.own)
        if (
            not self.held
            or self.contended_since is None
            or not self.request.kind.exclusive
            or not self._context.nodes.may_write
        ):
            return delete
        floor = Record(floor=int(self.own[-10:])).encode()
        return protocol.together(protocol.put(self._path, floor), delete)

    async def _deleted(self, begun: asyncio.Future[Any]) -> bool | None:
        """Return whether the node was there, by the reply to its deletion; ``None`` if it was not carried out."""
        problem: exc.ResponseError | None = None
        try:
            reply = await begun
            if isinstance(reply, protocol.Several):
                problem = protocol.failure(reply)
        except exc.ResponseError as error:
            problem = error
        if isinstance(problem, exc.NoAuth):
            # The right to write to the lock's node is optional: without the floor, waiters read the list.
            self._context.nodes.may_write = False
        if problem is None:
            return True
        return False if isinstance(problem, exc.NoNode) else None

    def _end(self) -> None:
        """Stop watching and waiting: nothing at the server concerns this claim any more."""
        self.held, self._verdict = False, None
        self._unwatch()
        self._session.listeners.discard(self._session_changed)
        if self._inbox is not None:
            self._inbox.close()
