"""One client's view of a document on a server inside this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from aiolock.backends.memory.machine import Machine, Message
from aiolock.document import Document, Entry
from aiolock.errors import LockError

__all__ = ["MemoryDocument"]

LOOK = 2.0
"""Seconds after which a change is looked for: a message may get lost, and what is forgotten tells nobody."""

Ask = Callable[[Callable[[Machine, float], Any]], Awaitable[Any]]


class MemoryDocument(Document):
    """One of the machine's papers; ``id`` is where its messages go."""

    def __init__(self, ask: Ask, key: tuple[str, str], who: str) -> None:
        self.id: str = who
        self._ask = ask
        self._key = key
        self._woken: asyncio.Future[None] | None = None
        self._watched = False
        """Whether the server may know that we want to be told."""

    async def read(self) -> Entry:
        """As it is now."""
        value, stamp = await self._ask(lambda machine, now: machine.papers.read(self._key, now))
        return Entry(value, stamp)

    async def write(self, value: bytes, stamp: str, keep: float) -> str | None:
        """Replace it, and have those told who look at it."""

        def question(machine: Machine, now: float) -> str | None:
            written, watchers = machine.papers.write(self._key, value, stamp, keep, now)
            machine.outbox += [Message(who, "changed", now) for who in watchers]
            return written

        written: str | None = await self._ask(question)
        return written

    async def changed(self, stamp: str) -> None:
        """Wait for the message that it changed, and not for ever."""
        loop = asyncio.get_running_loop()
        # Before the question is asked: the message may come before its answer.
        self._woken = woken = loop.create_future()
        self._watched = True
        try:
            if await self._ask(lambda machine, now: machine.papers.watch(self._key, self.id, stamp, now)):
                timer = loop.call_later(LOOK, self.wake)
                try:
                    await woken
                finally:
                    timer.cancel()
        finally:
            self._woken = None

    def wake(self) -> None:
        """It changed."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def aclose(self) -> None:
        """Nobody looks any more; a message that nobody hears does no harm."""
        if not self._watched:
            return
        self._watched = False
        with suppress(LockError):
            await self._ask(lambda machine, _: machine.papers.forget(self._key, self.id))
