"""One node of a cluster: its two connections, and how its clock relates to ours.

What a node pushes is judged by its own clock alone. So the pairs of times are those of ``TIME``, which is asked here and
answered by this node; the answers to scripts may come from wherever a lock has moved to.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Protocol

from hiredis import ReplyError

from aiolock.backends.redis.commands import Arg, Script, encode
from aiolock.backends.redis.connection import Connection
from aiolock.backends.redis.format import Verify
from aiolock.backends.redis.link import Hook, State
from aiolock.backends.redis.pairing import Pairing
from aiolock.backends.redis.pubsub import Subscriber
from aiolock.backends.redis.seeds import NodeEndpoint
from aiolock.backends.redis.slots import Place, shown
from aiolock.clock import Clock

__all__ = ["REDIRECTIONS", "Node", "Traffic"]

REDIRECTIONS = frozenset({"MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"})
"""What a node says that has not executed a command, and that another node may, or the same in a moment."""
PAIRED = 5.0
"""Seconds after which a pair of times is made anew while it may be needed."""


class Traffic(Protocol):
    """Who sends commands on that came to the wrong node."""

    def redirect(
        self, node: Node, future: asyncio.Future[Any], command: bytes, issued: float, text: str
    ) -> None:
        """Nobody has executed this one."""


class Node:
    """A node, from when it is known until it is closed.

    ``on_change()`` is called whenever one of its connections comes or goes, ``on_up(node)`` when commands can be sent.
    """

    def __init__(
        self,
        place: Place,
        endpoints: tuple[NodeEndpoint, NodeEndpoint],
        traffic: Traffic,
        *,
        channel: str,
        clock: Clock,
        command_timeout: float,
        scripts: tuple[Script, ...],
        on_up: Callable[[Node], object],
        on_change: Hook,
        verify: Verify | None = None,
    ) -> None:
        self.place = place
        self.host = place[0]
        self.slots: set[int] = set()
        """Those that it serves."""
        self.pairing = Pairing()
        self._clock = clock
        self._asked = -math.inf
        self._on_up = on_up
        self._on_change = on_change
        self._endpoints = endpoints
        self.connection = _Connection(
            endpoints[0],
            clock=clock,
            command_timeout=command_timeout,
            scripts=scripts,
            on_up=self._up,
            on_down=self._down,
            verify=verify,
        )
        self.connection.redirected = lambda *slot: traffic.redirect(self, *slot)
        self.subscriber = _Subscriber(
            endpoints[1],
            channel,
            clock=clock,
            command_timeout=command_timeout,
            on_message=lambda payload: self.on_message(payload),
            on_up=self._subscribed,
            on_down=on_change,
        )
        self.on_message: Callable[[bytes], object] = _nobody
        self.begun: list[asyncio.Future[None]] = []
        """Each says that a connection stands for the first time, or what refuses it."""

    def __repr__(self) -> str:
        return f"<Node {shown(self.place)}, {self.connection.state.value}>"

    def begin(self) -> None:
        """Connect in the background."""
        self.begun = [self.connection.begin(), self.subscriber.begin()]

    async def aclose(self) -> None:
        """Close both connections."""
        await asyncio.gather(self.connection.aclose(), self.subscriber.aclose())

    @property
    def ready(self) -> bool:
        """Whether commands can be sent."""
        return self.connection.state is State.READY

    @property
    def settled(self) -> bool:
        """Whether both connections stand, or will not for a while."""
        down = {State.CONNECTING, State.BROKEN}
        return self.ready and self.subscriber.state not in down

    def pair(self) -> None:
        """See that pushes can be judged."""
        now = self._clock()
        if now - self._asked < PAIRED or not self.ready:
            return
        self._asked = now
        generation = self.connection.generation

        def answered(reply: asyncio.Future[Any]) -> None:
            if reply.cancelled() or reply.exception() is not None or generation != self.connection.generation:
                return
            seconds, microseconds = reply.result()
            time = int(seconds) * 1_000_000 + int(microseconds)
            self.pairing.latest = time, now, self.connection.received

        self.connection.call("TIME").add_done_callback(answered)

    def _up(self) -> None:
        self._down_again()
        self._agree(self.subscriber)
        self.pair()
        self._on_up(self)
        self._on_change()

    def _down(self) -> None:
        self._down_again()
        self._on_change()

    def _down_again(self) -> None:
        self.pairing.forget()
        self._asked = -math.inf

    def _subscribed(self) -> None:
        self._agree(self.connection)
        self._on_change()

    def _agree(self, other: Connection | Subscriber) -> None:
        """An address may be given to another node: what was connected before that is connected to somebody else."""
        mine, theirs = (endpoint.node for endpoint in self._endpoints)
        if other.state is State.READY and mine != theirs:
            other.leave()


def _nobody(payload: bytes) -> None:
    del payload


class _Connection(Connection):
    """One that knows who sends on what came to the wrong node."""

    __slots__ = ("redirected",)

    redirected: Callable[[asyncio.Future[Any], bytes, float, str], object]

    def _refuse(self, future: asyncio.Future[Any], command: bytes, issued: float, reply: ReplyError) -> None:
        text = str(reply)
        if text.partition(" ")[0] in REDIRECTIONS:
            self.redirected(future, command, issued, text)
        else:
            super()._refuse(future, command, issued, reply)

    def _unheard(self, command: bytes, issued: float, reply: ReplyError) -> None:
        # Nobody waits for the answer; a hold that is given back is given back all the same.
        text = str(reply)
        if text.partition(" ")[0] in REDIRECTIONS:
            future = asyncio.get_running_loop().create_future()
            self.redirected(future, command, issued, text)


class _Subscriber(Subscriber):
    """Listens to the channel that this process has at this node alone."""

    __slots__ = ("_channel",)

    def __init__(self, endpoint: NodeEndpoint, channel: Arg, **options: Any) -> None:
        super().__init__(endpoint, channel, **options)
        self._channel = channel

    def _greet(self, transport: asyncio.WriteTransport) -> None:
        assert isinstance(self._endpoint, NodeEndpoint)  # noqa: S101 - see above
        self._subscribe = encode("SUBSCRIBE", f"{self._channel!s}@{self._endpoint.node}")
        super()._greet(transport)
