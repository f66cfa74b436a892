"""Cluster router: commands find the node that serves their slot, also while slots move and nodes fail.

A caller's future gets the first answer of a node within the command timeout. A node that replies ``MOVED``,
``ASK``, ``TRYAGAIN`` or ``CLUSTERDOWN`` has executed nothing, so asking again, elsewhere or in a moment, is safe. What is
under way on a connection that breaks is not sent again: it may have been executed, and the caller knows what to do then.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from weakref import WeakKeyDictionary

from aiolock.backends.redis.cluster.nodes import Node, NodeContext, Nodes
from aiolock.backends.redis.cluster.slots import Seeds, key_of, redirection, slot_of
from aiolock.backends.redis.commands import Reply, encode
from aiolock.backends.redis.connection import LIMIT
from aiolock.backends.redis.errors import from_reply, not_sent
from aiolock.core.forks import OneProcess
from aiolock.core.tasks import Backoff, reject
from aiolock.errors import BackendError, BackendUnavailable, UnsafeBackend

__all__ = ["Router"]

EAGER = 2
"""Times that a command is resent at once; then the nodes contradict each other, and it waits in between."""
PAUSES = 0.02, 0.2
"""Most seconds before a command is tried again: at first, and after many times."""
MOST = 2000
"""Commands that are tried again per second."""

_ASKING = encode("ASKING")


@dataclass(eq=False, slots=True)
class _Rerouted:
    """A command that was sent to the wrong node, or to none."""

    command: bytes
    issued: float
    late: asyncio.TimerHandle
    hops: int = 0
    """Times that it was resent since it waited last."""
    backoff: Backoff | None = None
    """Set when it waits for the first time."""
    error: BackendError | None = None
    again: asyncio.TimerHandle | None = None
    """Set while it is under way nowhere."""


class Router(OneProcess):
    """Route each command to the node of its slot; the counterpart of :class:`Connection` for a cluster."""

    def __init__(self, seeds: Seeds, context: NodeContext) -> None:
        self._address = str(seeds)
        self._clock = context.options["clock"]
        self._timeout = context.options["command_timeout"]
        self._random = Random()
        self._rerouted: dict[Reply, _Rerouted] = {}
        super().__init__()
        self.refusal: UnsafeBackend | None = None
        """Why no lock of this cluster can be used, if its data have another format."""
        self.trouble: BackendError | None = None
        """Why a command was not executed where it was sent, the latest."""
        self.sent: WeakKeyDictionary[Reply, Node] | None = WeakKeyDictionary() if seeds.replicas else None
        """The node that each command was sent to last, which is the one that has answered it; ``None`` without replicas."""
        self.nodes = Nodes(seeds, context, redirect=self.redirect, reclaim=self._reclaim, waits=self._waits)

    # --- for callers: see Connection

    def issue(self, command: bytes) -> Reply:
        """Issue an encoded command about one key."""
        key = key_of(command)
        assert key is not None  # noqa: S101 - other commands are sent to a node
        slot = slot_of(key)
        node = self.nodes.table[slot]
        loop = asyncio.get_running_loop()
        if self.refusal is not None:
            refused: Reply = loop.create_future()
            reject(refused, UnsafeBackend(str(self.refusal)))
            return refused
        if node is not None:
            node.pair()
            reply = node.connection.issue(command)
            if self.sent is not None:
                self.sent[reply] = node
            return reply
        self.refuse_fork("connection")
        if self.nodes.closed:
            raise RuntimeError("this client is closed")
        future: Reply = loop.create_future()
        if len(self._rerouted) >= LIMIT:
            reject(future, not_sent(f"overloaded: {LIMIT} commands to {self._address} wait already"))
            return future
        entry = self._reroute(future, command, self._clock())
        entry.error = BackendUnavailable(f"no node serves slot {slot}")
        self._hold(future, entry)
        return future

    def node(self, key: str) -> Node | None:
        """Return the node that serves a key, as far as is known."""
        return self.nodes.table[slot_of(key.encode())]

    async def open(self) -> None:
        """Find the nodes, and begin to connect; raises, and is cancelled, as :meth:`Nodes.open`."""
        self.refusal, self.trouble = None, None
        self.take_over()
        await self.nodes.open()

    async def aclose(self) -> None:
        """Close every connection; callers that still wait get an error.

        Cancelling it may leave some connections open, and some callers waiting.
        """
        await self.nodes.aclose()
        for future in list(self._rerouted):
            reject(future, not_sent(f"the connection to {self._address} was closed"))

    # --- commands that came to the wrong node

    def redirect(self, node: Node, future: Reply, command: bytes, issued: float, text: str) -> None:
        """Resend what a node has not executed, for one of the reasons of :data:`REDIRECTIONS`."""
        entry = self._rerouted.get(future) or self._reroute(future, command, issued)
        if future.done():
            return
        if self.nodes.closed:
            # No connection may be made any more.
            reject(future, not_sent(f"the connection to {self._address} was closed"))
            return
        entry.command, entry.hops = command, entry.hops + 1
        code = text.partition(" ")[0]
        where = redirection(text, node.host.name)
        target: Node | None = None
        if where is None:
            entry.error = from_reply(text)
        else:
            slot, host = where
            entry.error = BackendUnavailable(f"{node.host} says that slot {slot} is at {host} ({code})")
            if code == "ASK":
                target = self.nodes.importing(host)
            elif code == "MOVED":
                target = self.nodes.announced(slot, host)
        self.trouble = entry.error
        if code != "ASK" or where is None:
            self.nodes.discover()
        asking = code == "ASK"
        if target is None or entry.hops > EAGER or not (target.ready if asking else target is not node):
            self._hold(future, entry)
        else:
            self._reissue(target, future, command, issued, *((_ASKING,) if asking else ()))

    def _reissue(self, node: Node, future: Reply, command: bytes, issued: float, *before: bytes) -> None:
        if self.sent is not None:
            self.sent[future] = node
        node.connection.reissue(future, command, issued, *before)

    def _reroute(self, future: Reply, command: bytes, issued: float) -> _Rerouted:
        loop = asyncio.get_running_loop()
        left = max(0.0, issued + self._timeout - self._clock())
        entry = self._rerouted[future] = _Rerouted(command, issued, loop.call_later(left, self._late, future))
        future.add_done_callback(self._arrived)
        if left <= 0:
            self._late(future)
        return entry

    def _arrived(self, future: Reply) -> None:
        entry = self._rerouted.pop(future)
        entry.late.cancel()
        if entry.again is not None:
            entry.again.cancel()

    def _late(self, future: Reply) -> None:
        entry = self._rerouted.get(future)
        if entry is None or future.done():
            return
        why = f": {entry.error}" if entry.error is not None else ""
        if entry.again is not None or not (entry.hops or entry.backoff):
            error: BackendError = not_sent(
                f"{self._address}: no node took this command within {self._timeout:g} s{why}"
            )
        else:
            before = f" (before that: {entry.error})" if entry.error is not None else ""
            error = BackendUnavailable(
                f"{self._address} did not answer within {self._timeout:g} s; "
                f"whether it executed this command is not known{before}"
            )
        error.__cause__ = entry.error
        reject(future, error)

    def _hold(self, future: Reply, entry: _Rerouted) -> None:
        """Try it again in a moment."""
        if future.done():
            return
        entry.hops, entry.backoff = 0, entry.backoff or Backoff(self._random, *PAUSES)
        pause = entry.backoff.next(len(self._rerouted) / MOST)
        entry.again = asyncio.get_running_loop().call_later(pause, self._retry, future)
        self.nodes.discover()

    def _retry(self, future: Reply) -> None:
        entry = self._rerouted.get(future)
        if entry is None or future.done():
            return
        entry.again = None
        node = self._owner(entry.command)
        if node is None:
            self._hold(future, entry)
        else:
            self._reissue(node, future, entry.command, entry.issued)

    def _waits(self) -> bool:
        return any(entry.again is not None for entry in self._rerouted.values())

    def _owner(self, command: bytes) -> Node | None:
        key = key_of(command)
        return None if key is None else self.nodes.table[slot_of(key)]

    def _reclaim(self, node: Node) -> None:
        """Send what waits for an unreachable node to the node that has its slot now."""
        for future, command, issued in node.connection.reclaim(
            lambda command: self._owner(command) in {node, None}
        ):
            entry = self._rerouted.get(future) or self._reroute(future, command, issued)
            entry.hops += 1
            found = self._owner(command)
            if found is not None and not future.done():
                self._reissue(found, future, command, issued)
