"""The nodes of a cluster: which there are, and which of them serves what, as it changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from random import Random
from typing import Any, Protocol

from aiolock.backends.redis.chart import Chart
from aiolock.backends.redis.commands import Script
from aiolock.backends.redis.format import Verify
from aiolock.backends.redis.node import Node, Traffic
from aiolock.backends.redis.seeds import Seeds
from aiolock.backends.redis.slots import SLOTS, Layout, Place
from aiolock.clock import Clock
from aiolock.errors import BackendError
from aiolock.logs import Log, get_logger
from aiolock.tasks import start

__all__ = ["Nodes"]

log: Log = get_logger("aiolock")

AGAIN = 0.05
LONGEST_AGAIN = 1.0
"""Seconds between questions for the layout while something is wrong, doubled from the first to the longest."""
TOLD = 2.0
"""Seconds for which the node that says MOVED is believed rather than others, who may not have heard of it yet."""
GUEST = 30.0
"""Seconds for which a node is kept that was sent something, but has no slot."""


class Sender(Traffic, Protocol):
    """Who sends commands to them."""

    @property
    def waits(self) -> bool:
        """Whether a command waits for a node that takes it."""
        ...

    def reclaim(self, node: Node) -> None:
        """Send elsewhere what waits for a node and is not its business any more."""


class Nodes:
    """Those of one client.

    ``on_node(node)`` is called when there is a new one, before it is connected, ``on_up(node)`` whenever one can be sent
    commands, ``on_moved(slots)`` when slots have got another node, ``on_change()`` when a connection has come or gone.
    """

    def __init__(
        self,
        seeds: Seeds,
        sender: Sender,
        *,
        clock: Clock,
        command_timeout: float,
        channel: str,
        scripts: Iterable[Script],
        on_node: Callable[[Node], object],
        on_up: Callable[[Node], object],
        on_moved: Callable[[set[int]], object],
        on_change: Callable[[], object],
        verify: Verify | None = None,
    ) -> None:
        self._seeds = seeds
        self._sender = sender
        self._clock = clock
        self._timeout = command_timeout
        self._channel = channel
        self._scripts = tuple(scripts)
        self._on_node = on_node
        self._on_up = on_up
        self._on_moved = on_moved
        self._on_change = on_change
        self._verify = verify
        self._random = Random()
        self._chart = Chart(seeds, command_timeout)
        self._told: dict[int, tuple[Node, float]] = {}
        self._guests: dict[Place, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._wanted = False
        self.closed = False
        self.table: list[Node | None] = [None] * SLOTS
        """By slots, as far as we know."""
        self.all: dict[Place, Node] = {}

    # --- opening and closing

    async def open(self) -> None:
        """Find out who they are, and begin to connect; raises :class:`BackendError` if none of them tells."""
        self._apply(await self._chart.ask(()))

    async def aclose(self) -> None:
        """Close every connection."""
        self.closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        nodes, self.all = list(self.all.values()), {}
        self.table = [None] * SLOTS
        await asyncio.gather(*(node.aclose() for node in nodes))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something until it ends, or everything is closed."""
        task = start(work, "aiolock-redis-cluster")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- what nodes say of each other

    def told(self, slot: int, place: Place) -> Node | None:
        """A node says that a slot is another one's: that one, if it is known."""
        node = self.all.get(place)
        if node is not None:
            self._told[slot] = node, self._clock() + TOLD
            self._assign({slot: node})
        return node

    def guest(self, place: Place) -> Node:
        """A node that has a key of a slot which is not yet its own."""
        self._guests[place] = self._clock() + GUEST
        if place not in self.all:
            self._add(place)
        return self.all[place]

    def look(self) -> None:
        """Find out anew who serves what; several times at once is once."""
        self._wanted = True
        if (self._looking is None or self._looking.done()) and not self.closed:
            self._looking = self.spawn(self._look())

    async def _look(self) -> None:
        pause = AGAIN
        while True:
            self._wanted = False
            try:
                layout = await self._chart.ask(self.all.values())
            except BackendError as error:
                log.debug("%s", error)
            else:
                self._apply(layout)
            # The least that lies between two questions, also if there is nothing wrong any more.
            await asyncio.sleep(pause * self._random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_AGAIN)
            if not (self._wanted or self._lame or self._sender.waits):
                return

    @property
    def _lame(self) -> bool:
        """Whether somebody may have to take over from a node."""
        return any(node.slots and not node.ready for node in self.all.values())

    def _apply(self, layout: Layout) -> None:
        if self.closed:
            return
        now = self._clock()
        self._told = {slot: (node, end) for slot, (node, end) in self._told.items() if now < end}
        owners: dict[int, Node | None] = dict.fromkeys(range(SLOTS))
        for first, last, place in layout.ranges:
            if place not in self.all:
                self._add(place)
            owners.update(dict.fromkeys(range(first, last + 1), self.all[place]))
        for slot, (node, _) in self._told.items():
            if self.all.get(node.place) is node:
                owners[slot] = node
        self._assign(owners)
        self._guests = {place: end for place, end in self._guests.items() if now < end}
        for place, node in list(self.all.items()):
            if not node.slots and place not in self._guests:
                del self.all[place]
                self.spawn(self._retire(node))
            elif not node.ready:
                self._sender.reclaim(node)

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
            self._on_moved(moved)

    # --- one node

    def _add(self, place: Place) -> None:
        node = self.all[place] = Node(
            place,
            (self._seeds.at(place), self._seeds.at(place)),
            self._sender,
            channel=self._channel,
            clock=self._clock,
            command_timeout=self._timeout,
            scripts=self._scripts,
            on_up=self._on_up,
            on_change=self._changed,
            verify=self._verify,
        )
        self._on_node(node)
        node.begin()

    def _changed(self) -> None:
        if self._lame:
            self.look()
        self._on_change()

    async def _retire(self, node: Node) -> None:
        """Close a node that has no slot any more, when it has had its time to answer what it was asked."""
        try:
            self._sender.reclaim(node)
            await asyncio.sleep(self._timeout)
            log.debug("%r has no slot any more", node)
        finally:
            await node.aclose()
            self._on_change()
