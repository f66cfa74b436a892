"""Commands find the node that serves their slot, also while slots move and nodes fail.

Whoever issues a command knows nothing of this: its future gets an answer, from whichever node gives one within the
command timeout. A node that says ``MOVED``, ``ASK``, ``TRYAGAIN`` or ``CLUSTERDOWN`` has executed nothing, so asking
again, elsewhere or in a moment, is safe. What is under way on a connection that breaks is not asked again: nobody knows
whether that was executed, and those who asked do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from aiolock.backends.redis.commands import Arg, Script, encode
from aiolock.backends.redis.connection import LIMIT
from aiolock.backends.redis.link import Forks
from aiolock.backends.redis.node import Node
from aiolock.backends.redis.nodes import Nodes
from aiolock.backends.redis.replies import NotSent, from_reply
from aiolock.backends.redis.scripts import clustered
from aiolock.backends.redis.seeds import Seeds
from aiolock.backends.redis.slots import key_of, redirection, shown, slot_of
from aiolock.clock import Clock
from aiolock.errors import BackendError, BackendUnavailable, UnsafeBackend

__all__ = ["Router", "in_cluster"]

EAGER = 2
"""So many times a command is sent on at once; then nodes contradict each other, and it waits in between."""
PAUSE = 0.01
LONGEST_PAUSE = 0.2
"""Seconds before a command is tried again, doubled from the first to the longest."""
MOST = 2000
"""So many of them are tried again in a second."""

_ASKING = encode("ASKING")
_scripts: dict[Script, Script] = {}


def in_cluster(script: Script) -> Script:
    """What a script is at a node of a cluster."""
    if script not in _scripts:
        _scripts[script] = Script(clustered(script.source.decode()))
    return _scripts[script]


@dataclass(eq=False, slots=True)
class _Trip:
    """A command that was sent to the wrong node, or to none."""

    command: bytes
    issued: float
    late: asyncio.TimerHandle
    hops: int = 0
    """How often it was sent on since it waited last."""
    pauses: int = 0
    error: BackendError | None = None
    again: asyncio.TimerHandle | None = None
    """Set while it is nowhere under way."""


class Router:
    """What :class:`Connection` is to one server, for a cluster; ``options`` are those of its :class:`Nodes`."""

    def __init__(
        self,
        seeds: Seeds,
        *,
        clock: Clock,
        command_timeout: float,
        scripts: Iterable[Script],
        **options: Any,
    ) -> None:
        self._seeds = seeds
        self._clock = clock
        self._timeout = command_timeout
        self._random = Random()
        self._trips: dict[asyncio.Future[Any], _Trip] = {}
        self._fork = Forks.generation
        self.refusal: UnsafeBackend | None = None
        """Why no lock of this cluster can be used, if its data have another format."""
        self.trouble: BackendError | None = None
        """Why a command was not executed where it was sent, the latest."""
        self.nodes = Nodes(
            seeds,
            self,
            clock=clock,
            command_timeout=command_timeout,
            scripts=map(in_cluster, scripts),
            **options,
        )

    # --- for callers: see Connection

    def issue(self, command: bytes) -> asyncio.Future[Any]:
        """Issue an encoded command about one key."""
        key = key_of(command)
        assert key is not None  # noqa: S101 - what is about no key is asked of a node
        return self._issue(slot_of(key), command)

    def script(self, script: Script, keys: Sequence[Arg], args: Sequence[Arg] = ()) -> asyncio.Future[Any]:
        """Issue a script with one key."""
        key = keys[0]
        command = in_cluster(script).encode(keys, args)
        return self._issue(slot_of(key.encode() if isinstance(key, str) else bytes(key)), command)

    def call(self, *args: Arg) -> asyncio.Future[Any]:
        """Issue a command about one key."""
        return self.issue(encode(*args))

    def node(self, key: str) -> Node | None:
        """Who serves a key, as far as we know."""
        return self.nodes.table[slot_of(key.encode())]

    def _issue(self, slot: int, command: bytes) -> asyncio.Future[Any]:
        node = self.nodes.table[slot]
        if self.refusal is not None:
            refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            _reject(refused, UnsafeBackend(str(self.refusal)))
            return refused
        if node is not None:
            node.pair()
            return node.connection.issue(command)
        if self._fork != Forks.generation:
            raise RuntimeError(
                "this connection was made before a fork, and a forked child must not use it: connect anew in the child"
            )
        if self.nodes.closed:
            raise RuntimeError("this client is closed")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if len(self._trips) >= LIMIT:
            _reject(future, NotSent(f"overloaded: {LIMIT} commands to {self._seeds} wait already"))
            return future
        trip = self._trip(future, command, self._clock())
        trip.error = BackendUnavailable(f"no node serves slot {slot}")
        self._hold(future, trip)
        return future

    async def aclose(self) -> None:
        """Close every connection; whoever still waits gets an error."""
        await self.nodes.aclose()
        for future in list(self._trips):
            _reject(future, NotSent(f"the connection to {self._seeds} was closed"))

    # --- commands that came to the wrong node

    def redirect(
        self, node: Node, future: asyncio.Future[Any], command: bytes, issued: float, text: str
    ) -> None:
        """Send on what a node has not executed, for one of the reasons of :data:`REDIRECTIONS`."""
        trip = self._trips.get(future) or self._trip(future, command, issued)
        if future.done():
            return
        if self.nodes.closed:
            # Nobody may connect to a node any more.
            _reject(future, NotSent(f"the connection to {self._seeds} was closed"))
            return
        trip.command, trip.hops = command, trip.hops + 1
        where = redirection(text, node.host)
        if where is None:
            trip.error = from_reply(text)
        else:
            code, place = text.partition(" ")[0], shown(where[1])
            trip.error = BackendUnavailable(
                f"{shown(node.place)} says that slot {where[0]} is at {place} ({code})"
            )
        self.trouble = trip.error
        if text.startswith("ASK ") and where is not None:
            target = self.nodes.guest(where[1])
            if target.ready and trip.hops <= EAGER:
                target.connection.reissue(future, command, issued, _ASKING)
                return
        else:
            self.nodes.look()
        if text.startswith("MOVED ") and where is not None:
            found = self.nodes.told(*where)
            if found is not None and found is not node and trip.hops <= EAGER:
                found.connection.reissue(future, command, issued)
                return
        self._hold(future, trip)

    def _trip(self, future: asyncio.Future[Any], command: bytes, issued: float) -> _Trip:
        loop = asyncio.get_running_loop()
        left = max(0.0, issued + self._timeout - self._clock())
        trip = self._trips[future] = _Trip(command, issued, loop.call_later(left, self._late, future))
        future.add_done_callback(self._arrived)
        if left <= 0:
            self._late(future)
        return trip

    def _arrived(self, future: asyncio.Future[Any]) -> None:
        trip = self._trips.pop(future)
        trip.late.cancel()
        if trip.again is not None:
            trip.again.cancel()

    def _late(self, future: asyncio.Future[Any]) -> None:
        trip = self._trips.get(future)
        if trip is None or future.done():
            return
        why = f": {trip.error}" if trip.error is not None else ""
        if trip.again is not None or not (trip.hops or trip.pauses):
            error: BackendError = NotSent(
                f"{self._seeds}: no node took this command within {self._timeout:g} s{why}"
            )
        else:
            before = f" (before that: {trip.error})" if trip.error is not None else ""
            error = BackendUnavailable(
                f"{self._seeds} did not answer within {self._timeout:g} s; "
                f"whether it executed this command is not known{before}"
            )
        error.__cause__ = trip.error
        _reject(future, error)

    def _hold(self, future: asyncio.Future[Any], trip: _Trip) -> None:
        """Try it again in a moment."""
        if future.done():
            return
        trip.hops, trip.pauses = 0, trip.pauses + 1
        pause = max(min(PAUSE * 2 ** min(trip.pauses, 8), LONGEST_PAUSE), len(self._trips) / MOST)
        pause *= self._random.uniform(0.5, 1.0)
        trip.again = asyncio.get_running_loop().call_later(pause, self._retry, future)
        self.nodes.look()

    def _retry(self, future: asyncio.Future[Any]) -> None:
        trip = self._trips.get(future)
        if trip is None or future.done():
            return
        trip.again = None
        key = key_of(trip.command)
        node = self.nodes.table[slot_of(key)] if key is not None else None
        if node is None:
            self._hold(future, trip)
        else:
            node.connection.reissue(future, trip.command, trip.issued)

    @property
    def waits(self) -> bool:
        """Whether a command waits for a node that takes it."""
        return any(trip.again is not None for trip in self._trips.values())

    def reclaim(self, node: Node) -> None:
        """What waits for a node that cannot be reached goes to the one that has its slot now."""

        def owner(command: bytes) -> Node | None:
            key = key_of(command)
            return node if key is None else self.nodes.table[slot_of(key)]

        for future, command, issued in node.connection.reclaim(
            lambda command: owner(command) in {node, None}
        ):
            trip = self._trips.get(future) or self._trip(future, command, issued)
            trip.hops += 1
            found = owner(command)
            if found is not None and not future.done():
                found.connection.reissue(future, command, issued)


def _reject(future: asyncio.Future[Any], error: BackendError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # looked at: whoever does not wait need not be warned
