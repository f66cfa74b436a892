"""What a holder watches: that its own node stays, whether it is asked to let go, and whether others come."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.frames import Data
from aiolock.backends.zookeeper.records import Note

if TYPE_CHECKING:
    from aiolock.backends.zookeeper.backend import ZooKeeperBackend
    from aiolock.backends.zookeeper.claim import QueueClaim

__all__ = ["Hold"]


class Hold:
    """A claim from its grant to its end. Nobody waits for what is asked here; answers that come too late are dropped."""

    __slots__ = ("_backend", "_claim", "armed", "asked", "created")

    def __init__(self, backend: ZooKeeperBackend, claim: QueueClaim, created: int | None = None) -> None:
        self._backend = backend
        self._claim = claim
        self.created = created
        """The zxid that made our node, where others may have one of the same name."""
        self.armed = False
        """Whether the server will say what happens to our node."""
        self.asked: str | None = None
        """Why we were asked to let go, if we were."""

    def begin_again(self) -> None:
        """There is another connection, on which nothing is watched."""
        self.armed = False
        self.look()

    def look(self, *, own: bool = False) -> None:
        """See whether our node is still there; and whether others have come, or if that is known, what it says."""
        claim, session = self._claim, self._backend.session
        if claim.hold is not self or not session.connected:
            return
        own = (own or claim.demanded_at is not None or not claim.bid.kind.exclusive) and claim.settled
        if own and self.armed:
            return
        path = claim.own
        try:
            if own:
                reply = session.ask(wire.get(claim.watch_own(), watch=True), claim.owner)
            else:
                reply = session.ask(wire.listing(claim.watch_children(), watch=True), claim.owner)
        except exc.ZKError:
            # The session will have changed, or come back: both lead here again.
            return
        self.armed = self.armed or own
        reply.add_done_callback(lambda done: self._looked(path, done))

    def _looked(self, path: str, reply: asyncio.Future[Any]) -> None:
        if reply.cancelled():
            return
        error = reply.exception()
        claim = self._claim
        if claim.hold is not self or (path != claim.own and claim.settled):
            return
        if isinstance(error, exc.NoNode):
            # Its node is not there, or the lock's own.
            if claim.settled:
                self._backend.audience.lost(claim, "force-released")
        elif error is not None:
            self.armed = False
        elif isinstance(reply.result(), Data):
            if self.created not in (None, reply.result().stat.created_zxid):
                self._backend.audience.lost(claim, "force-released")
            else:
                self.hear(reply.result().data)
        else:
            self._see(reply.result().children)

    def _see(self, children: list[str]) -> None:
        claim = self._claim
        if not claim.is_among(children):
            self._backend.audience.lost(claim, "force-released")
        elif claim.demanded_at is None and len(children) > 1:
            # Whoever has come here is one who waits.
            claim.demanded_at = self._backend.settings.clock()

    def hear(self, data: bytes | None) -> None:
        """Read our node: somebody may ask us to let go. Each reason is told once."""
        asked = Note.decode(data).asked
        if asked is not None and asked != self.asked:
            self.asked = asked
            self._backend.audience.requested(self._claim, asked)
