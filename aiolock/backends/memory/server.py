"""The memory server: one machine, a clock, and the addresses of those whom it has to tell something."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from aiolock.backends.memory.machine import Machine, Message
from aiolock.clock import Clock, system_clock

__all__ = ["MemoryServer"]

T = TypeVar("T")

Deliver = Callable[[Message], None]


class MemoryServer:
    """Locks shared by every client of this process that connects to it, from whatever event loop or thread."""

    def __init__(self, clock: Clock = system_clock) -> None:
        self.clock = clock
        self._machine = Machine()
        self._mutex = threading.Lock()
        self._clients: dict[str, Deliver] = {}

    def attach(self, client: str, deliver: Deliver) -> None:
        """Send the messages for requests whose id starts with ``client`` and a colon to ``deliver``."""
        self._clients[client] = deliver

    def detach(self, client: str) -> None:
        """The client is gone; what it held ends by its ttl."""
        self._clients.pop(client, None)
        with self._mutex:
            self._machine.papers.left(client)

    def abandon(self, client: str) -> None:
        """The client is gone for certain: give back its holds and its queue positions."""
        self.detach(client)
        self.ask(lambda machine, now: machine.abandon(f"{client}:", now))

    def ask(self, question: Callable[[Machine, float], T]) -> T:
        """One atomic step of the machine, and the messages that it leads to."""
        with self._mutex:
            answer = question(self._machine, self.clock())
            if not self._machine.outbox:
                return answer
            messages, self._machine.outbox = self._machine.outbox, []
        for message in messages:
            deliver = self._clients.get(message.to.partition(":")[0])
            if deliver is not None:
                deliver(message)
        return answer


_servers: dict[str, MemoryServer] = {}


def shared(name: str) -> MemoryServer:
    """The server of that name in this process; its tokens go on for as long as the process lives."""
    return _servers.setdefault(name, MemoryServer())
