"""A network in virtual time between clients and a memory server: slow, lossy, and cut at will.

Requests and replies take random times, overtake each other, get lost, and copies of lost requests may arrive late. What
the server says unasked arrives in its order. Each client has a :class:`Line`, which is the ``transport`` of its
backend and gives up after the command timeout, as drivers do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import Any

from aiolock.backends.memory import MemoryServer
from aiolock.backends.rows.rules import Message
from aiolock.errors import BackendUnavailable
from tests.simulation import virtual
from tests.simulation.virtual import Host, VirtualClock

__all__ = ["LATEST", "Line", "Network", "Server"]

LATEST = 50.0
"""Seconds after which no copy of a packet arrives any more; the server's tombstones last longer."""

Step = Callable[[], Any]
Reply = asyncio.Future[tuple[Any] | None]


class Network:
    """What happens to packets; its own work belongs to no host, so that no stop holds it back."""

    def __init__(self, random: Random, unit: float, *, trouble: float, slowness: float) -> None:
        self.random = random
        self.unit = unit
        """The usual ttl; times are multiples of it."""
        self.trouble = trouble
        """How often something is lost."""
        self.slowness = slowness
        """How often something takes very long, also longer than a ttl."""
        self.loop = virtual.host_loop()
        self.lines: dict[Host, Line] = {}
        self._context = Context()

    def later(self, delay: float, callback: Callable[..., None], *args: Any) -> None:
        self.loop.call_later(delay, callback, *args, context=self._context)

    def delay(self) -> float:
        if self.random.random() < self.slowness:
            return self.random.uniform(0.1, 1.5) * self.unit
        return self.random.uniform(0.0005, 0.02) * self.unit

    def send(self, line: Line, step: Step, reply: Reply) -> None:
        """Carry a request to the server and its answer back, or not."""
        there, back, fate = self.delay(), self.delay(), self.random.random()
        if line.cut or fate < self.trouble / 2:
            self._copy(0.1, there, step)
        elif fate < self.trouble:
            self.later(there, self._arrive, step)
            self._copy(0.3, there, step)
        else:
            self.later(there, self._arrive, step, line, back, reply)

    def _copy(self, probability: float, there: float, step: Step) -> None:
        """Something that was given up may be on its way for long."""
        if self.random.random() < probability:
            self.later(min(LATEST, there + self.random.uniform(0, 3) * self.unit), self._arrive, step)

    def _arrive(
        self, step: Step, line: Line | None = None, back: float = 0.0, reply: Reply | None = None
    ) -> None:
        answer = step()
        if line is not None and reply is not None and not line.cut:
            self.later(back, settle, reply, (answer,))

    def heal(self) -> None:
        """From now on nothing is lost, slow or cut."""
        self.trouble = self.slowness = 0.0
        for line in self.lines.values():
            line.cut_until = 0.0


class Line:
    """One client's way to the server."""

    def __init__(self, network: Network, host: Host, command_timeout: float) -> None:
        self.network = network
        self.host = host
        self.command_timeout = command_timeout
        self.cut_until = 0.0
        self.refusing = False
        """Whether a cut is noticed at once."""
        self._last = 0.0
        network.lines[host] = self

    @property
    def cut(self) -> bool:
        return self.network.loop.now < self.cut_until

    async def carry(self, step: Step) -> Any:
        """An answer, or an error after the command timeout; runs on the client's host."""
        if self.cut and self.refusing:
            raise BackendUnavailable("connection refused")
        loop = asyncio.get_running_loop()
        reply: Reply = loop.create_future()
        timer = loop.call_later(self.command_timeout, settle, reply, None)
        self.network.send(self, step, reply)
        try:
            answer = await reply
        finally:
            timer.cancel()
        if answer is None:
            raise BackendUnavailable("no answer in time")
        return answer[0]

    def post(self, deliver: Callable[[Message], None], message: Message) -> None:
        """Bring what the server says unasked: in its order, late, and sometimes never."""
        network = self.network
        if self.cut or network.random.random() < network.trouble / 2:
            return
        self._last = max(self._last, network.loop.now + network.delay())
        network.loop.call_at(self._last, deliver, message, context=self.host.context.copy())


class Server(MemoryServer):
    """The memory server at the other end; ``look`` is called after each of its steps."""

    def __init__(self, network: Network, clock: VirtualClock, look: Callable[[], None]) -> None:
        super().__init__(clock)
        self.clock: VirtualClock = clock
        self.network = network
        self.machine = self._machine
        self.look = look

    def attach(self, client: str, deliver: Callable[[Message], None]) -> None:
        """Called by the client's own task, and so on its host."""
        host = virtual.current_host()
        assert host is not None
        line = self.network.lines[host]
        super().attach(client, lambda message: line.post(deliver, message))

    def ask(self, question: Callable[[Any, float], Any]) -> Any:
        answer = super().ask(question)
        self.look()
        return answer

    def advance(self) -> None:
        """End what is over, as the next visitor of each lock would."""
        for key in list(self.machine.locks):
            self.ask(lambda machine, now, key=key: machine.advance(key, now))


def settle(reply: Reply, answer: tuple[Any] | None) -> None:
    if not reply.done():
        reply.set_result(answer)
