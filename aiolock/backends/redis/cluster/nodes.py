"""Cluster topology: the nodes, their connections, and the discovery of which node serves which slots."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from hiredis import ReplyError

from aiolock.backends.redis.cluster.slots import SLOTS, Layout, NodeEndpoint, Seeds, key_in, parse
from aiolock.backends.redis.commands import Reply, Script
from aiolock.backends.redis.connection import Connection
from aiolock.backends.redis.pubsub import Subscriber
from aiolock.backends.redis.replicas import Barriers, noting
from aiolock.backends.redis.run_id import RunId
from aiolock.backends.redis.url import Verify
from aiolock.backends.survey import answers, survey, why_none
from aiolock.backends.transport import ConnectionState, Hook, Options
from aiolock.backends.urls import Host
from aiolock.core.logs import Log, get_logger
from aiolock.core.tasks import Backoff, TaskSet, end
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable

__all__ = ["REDIRECTIONS", "Discovery", "Node", "NodeContext", "Nodes"]

log: Log = get_logger("aiolock")

REDIRECTIONS = frozenset({"MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"})
"""Errors of a node that has not executed a command: another node may, or the same in a moment."""
PAIRED = 5.0
"""Seconds after which a pair of times is made anew while it may be needed."""

Redirect = Callable[["Node", Reply, bytes, float, str], object]
"""Resend a command that a node has not executed; the last two arguments are when it was issued, and the node's error."""


@dataclass(frozen=True, slots=True)
class NodeContext:
    """Options and callbacks that the nodes of one client share."""

    options: Options
    prefix: str
    """Of keys."""
    channel: str
    scripts: Sequence[Script]
    verify: Verify | None
    on_message: Callable[[Node, bytes], object]
    on_up: Callable[[Node], object]
    """Is called whenever commands can be sent to a node again."""
    on_moved: Callable[[set[int]], object]
    """Is called when slots have got another node."""
    on_change: Hook
    """Is called when a connection has come or gone."""


class Node:
    """A node, from its discovery until it is closed.

    What a node pushes is judged by its own clock alone. So the pairs of times are those of ``TIME``, which is answered by
    this node; the answers to scripts may come from wherever a lock has moved to.
    """

    def __init__(self, seeds: Seeds, host: Host, context: NodeContext, redirect: Redirect) -> None:
        self.host = host
        self.slots: set[int] = set()
        """Slots that it serves."""
        self._clock = context.options["clock"]
        self._paired = -math.inf
        self._on_up = context.on_up
        self._on_change = context.on_change
        self._endpoints = seeds.at(host), seeds.at(host)
        server = RunId()
        self.connection = _Connection(
            self._endpoints[0],
            scripts=context.scripts,
            verify=noting(server, context.verify) if seeds.replicas else context.verify,
            on_up=self._up,
            on_down=self._down,
            **context.options,
        )
        self.connection.redirected = partial(redirect, self)
        # The channel of this client has another name at each node.
        self.subscriber = Subscriber(
            self._endpoints[1],
            lambda: [f"{context.channel}@{self._endpoints[1].node}"],
            on_message=partial(context.on_message, self),
            on_up=self._subscribed,
            on_down=context.on_change,
            **context.options,
        )
        self.barriers: Barriers | None = None
        if seeds.replicas:

            def key() -> str:
                return key_in(
                    self.slots or range(SLOTS), f"{context.prefix}replicas:", random.randrange(SLOTS)
                )

            self.barriers = Barriers(
                seeds.at(host), seeds.replicas, self.connection, server, key, **context.options
            )
        self.begun: list[asyncio.Future[None]] = []
        """Done when a connection stands for the first time, or is refused."""

    def __repr__(self) -> str:
        return f"<Node {self.host}, {self.connection.state.value}>"

    def begin(self) -> None:
        """Connect in the background."""
        self.begun = [self.connection.begin(), self.subscriber.begin()]
        if self.barriers is not None:
            self.begun.append(self.barriers.connection.begin())

    async def aclose(self) -> None:
        """Close its connections. Cancelling it may leave some open, for another call."""
        some = self.connection, self.subscriber, self.barriers
        await asyncio.gather(*(each.aclose() for each in some if each is not None))

    @property
    def ready(self) -> bool:
        """True while commands can be sent."""
        return self.connection.state is ConnectionState.READY

    @property
    def settled(self) -> bool:
        """True if both connections stand, or will not for a while."""
        return self.ready and self.subscriber.state not in (
            ConnectionState.CONNECTING,
            ConnectionState.BROKEN,
        )

    def pair(self) -> None:
        """Have a fresh pair of times, by which pushed grants are judged."""
        now = self._clock()
        if now - self._paired < PAIRED or not self.ready:
            return
        self._paired = now
        generation = self.connection.generation

        def answered(reply: Reply) -> None:
            if reply.cancelled() or reply.exception() is not None or generation != self.connection.generation:
                return
            seconds, microseconds = reply.result()
            pairing = self.connection.pairing
            pairing.latest = int(seconds) * 1_000_000 + int(microseconds), now, pairing.received

        self.connection.call("TIME").add_done_callback(answered)

    def _up(self) -> None:
        self._paired = -math.inf
        self._agree(self.subscriber)
        if self.barriers is not None:
            self.barriers.compare()
        self.pair()
        self._on_up(self)
        self._on_change()

    def _down(self) -> None:
        self._paired = -math.inf
        self._on_change()

    def _subscribed(self) -> None:
        self._agree(self.connection)
        self._on_change()

    def _agree(self, other: Connection | Subscriber) -> None:
        """Reconnect the other connection of this address if another node has the address now than when that one was made."""
        mine, theirs = (endpoint.node for endpoint in self._endpoints)
        if other.state is ConnectionState.READY and mine != theirs:
            other.leave()


class _Connection(Connection):
    """A connection whose redirected commands are resent elsewhere."""

    redirected: Callable[[Reply, bytes, float, str], object]

    def _refuse(self, future: Reply, command: bytes, issued: float, reply: ReplyError) -> None:
        text = str(reply)
        if text.partition(" ")[0] in REDIRECTIONS:
            self.redirected(future, command, issued, text)
        else:
            super()._refuse(future, command, issued, reply)

    def _on_late_refusal(self, command: bytes, issued: float, reply: ReplyError) -> None:
        # A release has to be executed although its answer is not awaited.
        if str(reply).partition(" ")[0] in REDIRECTIONS:
            self.redirected(asyncio.get_running_loop().create_future(), command, issued, str(reply))


# --- discovery

SOME = 3
"""Nodes that are asked: one may not know yet what has happened."""
SOON = 1.0
"""Seconds after which a connected node has answered."""

QUESTION = "CLUSTER", "SLOTS"


class Discovery:
    """Find the layout of a cluster: from nodes that are connected, or else from any that is known."""

    def __init__(self, seeds: Seeds, command_timeout: float) -> None:
        self._seeds = seeds
        self._timeout = command_timeout
        self._random = Random()

    async def ask(self, nodes: Iterable[Node]) -> Layout:
        """Return the layout on which most of the answering nodes agree; raises :class:`BackendError` if none does.

        Cancelling it leaves no socket behind.
        """
        known = list(nodes)
        ready = [node for node in known if node.ready]
        if ready:
            some = self._random.sample(ready, min(SOME, len(ready)))
            with contextlib.suppress(BackendError):
                return await self._most([_connected(node) for node in some], min(SOON, self._timeout))
        others = {node.host: self._seeds.at(node.host) for node in known}
        endpoints = {endpoint.address: endpoint for endpoint in (*self._seeds.seeds, *others.values())}
        timeout = self._timeout
        return await self._most([_unconnected(each, timeout) for each in endpoints.values()], timeout)

    async def _most(self, asking: Sequence[Coroutine[Any, Any, Layout]], timeout: float) -> Layout:
        def majority(layouts: list[Layout]) -> bool | None:
            return 2 * max(_votes(layouts).values()) > len(asking) if layouts else None

        tasks = await survey(asking, timeout, majority)
        layouts = answers(tasks)
        if not layouts:
            raise why_none(tasks, f"{self._seeds}: no node says who serves what")
        votes = _votes(layouts)
        return max(layouts, key=lambda layout: (votes[layout.ranges], layout.covered))


def _votes(layouts: Iterable[Layout]) -> Counter[tuple[tuple[int, int, Host], ...]]:
    """Count the nodes that agree about the slots; about replicas they may differ for a while."""
    return Counter(layout.ranges for layout in layouts)


async def _connected(node: Node) -> Layout:
    return _layout(await node.connection.call(*QUESTION), node.host.name, node)


async def _unconnected(node: NodeEndpoint, timeout: float) -> Layout:
    return _layout(await node.ask(timeout, *QUESTION), node.host, node)


def _layout(answer: Any, host: str, node: object) -> Layout:
    try:
        layout = parse(answer, host)
    except ValueError as error:
        raise BackendRefused(f"{node} gave no answer to CLUSTER SLOTS that could be understood") from error
    if not layout.ranges:
        raise BackendUnavailable(
            f"{node} knows of no node that serves a slot: it is not, or not yet, in a cluster"
        )
    return layout


# --- nodes

AGAIN = 0.05
LONGEST_AGAIN = 1.0
"""Seconds between discoveries while something is wrong, doubled from the first to the longest."""
BELIEVED = 2.0
"""Seconds for which a MOVED reply counts for more than the layouts of other nodes, which may be older."""
IMPORTING = 30.0
"""Seconds for which a node without slots is kept after a command was redirected to it."""


class Nodes:
    """The nodes of one client.

    :param redirect: resends what a node has not executed.
    :param reclaim: resends elsewhere what waits for a node and is not about its slots any more.
    :param waits: returns whether a command waits for a node that takes it.
    """

    def __init__(
        self,
        seeds: Seeds,
        context: NodeContext,
        *,
        redirect: Redirect,
        reclaim: Callable[[Node], object],
        waits: Callable[[], bool],
    ) -> None:
        self._seeds = seeds
        self._timeout = context.options["command_timeout"]
        self._context = context
        self._of_nodes = replace(context, on_change=self._changed)
        self._redirect = redirect
        self._reclaim = reclaim
        self._waits = waits
        self._clock = context.options["clock"]
        self._random = Random()
        self._discovery = Discovery(seeds, self._timeout)
        self._announced: dict[int, tuple[Node, float]] = {}
        self._importing: dict[Host, float] = {}
        self._tasks = TaskSet()
        self._discovering: asyncio.Task[None] | None = None
        self._wanted = False
        self.closed = True
        self.table: list[Node | None] = [None] * SLOTS
        """The node of each slot, as far as is known."""
        self.all: dict[Host, Node] = {}

    async def open(self) -> None:
        """Find the nodes, and begin to connect; raises :class:`BackendError` if none of them answers.

        Cancelling it leaves no socket behind.
        """
        self.closed = False
        self._announced.clear()
        self._importing.clear()
        self._apply(await self._discovery.ask(()))

    async def aclose(self) -> None:
        """Close every connection. Cancelling it may leave some open, for another call."""
        self.closed = True
        await end(self._tasks)
        self.table = [None] * SLOTS
        await asyncio.gather(*(node.aclose() for node in self.all.values()))
        self.all.clear()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task until it ends, or everything is closed."""
        return self._tasks.spawn(work, "aiolock-redis-cluster")

    def announced(self, slot: int, host: Host) -> Node | None:
        """Assign a slot to the node at ``host``, as another node announced; return that node if it is known."""
        node = self.all.get(host)
        if node is not None:
            self._announced[slot] = node, self._clock() + BELIEVED
            self._assign({slot: node})
        return node

    def importing(self, host: Host) -> Node:
        """Return a node that has a key of a slot which is not yet its own."""
        self._importing[host] = self._clock() + IMPORTING
        return self.all.get(host) or self._add(host)

    def discover(self) -> None:
        """Start a discovery of the layout in the background, or have the one under way followed by another."""
        self._wanted = True
        if (self._discovering is None or self._discovering.done()) and not self.closed:
            self._discovering = self.spawn(self._discover())

    async def _discover(self) -> None:
        backoff = Backoff(self._random, AGAIN, LONGEST_AGAIN)
        while True:
            self._wanted = False
            try:
                layout = await self._discovery.ask(self.all.values())
            except BackendError as error:
                log.debug("%s", error)
            else:
                self._apply(layout)
            # Two discoveries are never closer together, also if nothing is wrong any more.
            await backoff.pause()
            if not (self._wanted or self._degraded or self._waits()):
                return

    @property
    def _degraded(self) -> bool:
        """True if another node may have to take over."""
        return any(node.slots and not node.ready for node in self.all.values())

    def _apply(self, layout: Layout) -> None:
        if self.closed:
            return
        now = self._clock()
        self._announced = {slot: (node, end) for slot, (node, end) in self._announced.items() if now < end}
        owners: dict[int, Node | None] = dict.fromkeys(range(SLOTS))
        for first, last, host in layout.ranges:
            node = self.all.get(host) or self._add(host)
            owners.update(dict.fromkeys(range(first, last + 1), node))
        for slot, (node, _) in self._announced.items():
            if self.all.get(node.host) is node:
                owners[slot] = node
        self._assign(owners)
        self._importing = {host: end for host, end in self._importing.items() if now < end}
        for host, node in list(self.all.items()):
            if not node.slots and host not in self._importing:
                del self.all[host]
                self.spawn(self._retire(node))
            elif not node.ready:
                self._reclaim(node)

    def _assign(self, owners: dict[int, Node | None]) -> None:
        table, moved = self.table, set()
        for slot, node in owners.items():
            before = table[slot]
            if before is node:
                continue
            table[slot] = node
            moved.add(slot)
            if before is not None:
                before.slots.discard(slot)
            if node is not None:
                node.slots.add(slot)
        if moved:
            self._context.on_moved(moved)

    def _add(self, host: Host) -> Node:
        node = self.all[host] = Node(self._seeds, host, self._of_nodes, self._redirect)
        node.begin()
        return node

    def _changed(self) -> None:
        if self._degraded:
            self.discover()
        self._context.on_change()

    async def _retire(self, node: Node) -> None:
        """Close a node that has no slot any more, when it has had its time to answer what it was asked."""
        try:
            self._reclaim(node)
            await asyncio.sleep(self._timeout)
            log.debug("%r has no slot any more", node)
        finally:
            await node.aclose()
            self._context.on_change()
