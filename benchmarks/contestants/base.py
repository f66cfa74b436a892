"""What every contestant can do: opened with a URL, handing out locks, and taking turns with them.

A lock is an object for ``async with``, made once and used for several blocks, as the documentation of each library
allows. A library without coroutines overrides what is measured as a whole, so that it pays for its own threads only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Self

__all__ = [
    "BATCH",
    "PARTS",
    "RENEWALS",
    "SEATS",
    "SHARED",
    "TTL",
    "Block",
    "Contestant",
    "InBlocks",
    "OneByOne",
    "Polling",
    "Pooled",
    "Span",
    "again_and_again",
    "parts",
]

TTL = 30.0
SEATS = 10
PARTS = 5
RENEWALS = 3
"""By hand, what is held is renewed so often in a ttl."""
SHARED = 10
"""Connections of a process whose waiters sleep between tries, and so can share them."""
BATCH = 50
"""How many join a line, or are asked for, at the same moment."""

Span = tuple[float, float, float, int]
"""When a turn was asked for, entered and left, and the number of its contender."""

# time.monotonic is one clock for all processes of a machine.


class Contestant:
    """One library, connected to one server."""

    ttl = TTL
    """Seconds; may be set before it is opened."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def lock(self, name: str) -> Any:
        """A lock for one contender."""
        raise NotImplementedError

    def read(self, name: str) -> Any:
        """The readers' side of a read-write lock."""
        raise NotImplementedError

    def write(self, name: str) -> Any:
        """The writers' side of it."""
        raise NotImplementedError

    def seat(self, name: str) -> Any:
        """One of ``SEATS`` permits of a semaphore."""
        raise NotImplementedError

    def every(self, name: str) -> Any:
        """``PARTS`` locks as one."""
        raise NotImplementedError

    def asked(self, what: str) -> Any:
        """What a contender wants: the name of a lock, or another kind and its name, as in ``read document``."""
        kind, _, name = what.rpartition(" ")
        return getattr(self, kind or "lock")(name)

    async def prepare(self, names: Sequence[str]) -> None:
        """Before anything is measured: have everybody's connections, and whatever the locks of these names need."""
        await self.each(names, 1)

    async def turns(self, name: str, count: int) -> None:
        """Take and leave one lock so many times."""
        lock = self.asked(name)
        for _ in range(count):
            async with lock:
                pass

    async def each(self, names: Sequence[str], count: int) -> None:
        """Take and leave each of several locks so many times, all at the same time."""
        await asyncio.gather(*(self.turns(name, count) for name in names))

    async def take(self, lock: Any) -> float:
        """Enter; return when that was."""
        await lock.__aenter__()
        return time.monotonic()

    async def leave(self, lock: Any) -> float:
        """Leave; return when it was left, before the request."""
        left = time.monotonic()
        await lock.__aexit__(None, None, None)
        return left

    async def drain(self, names: Sequence[str], turns: int, hold: float, spans: list[Span]) -> None:
        """One contender for each name; each wants so many turns of ``hold`` seconds, and asks again at once."""
        await asyncio.gather(
            *(self._contend(name, turns, hold, spans, number) for number, name in enumerate(names))
        )

    async def _contend(self, name: str, turns: int, hold: float, spans: list[Span], number: int) -> None:
        clock, lock = time.monotonic, self.asked(name)
        for _ in range(turns):
            asked = clock()
            async with lock:
                entered = clock()
                await asyncio.sleep(hold)
                left = clock()
            spans.append((asked, entered, left, number))

    def keep(self, names: Sequence[str]) -> AbstractAsyncContextManager[None]:
        """Hold all of these locks for a while, and renew them as often as they need it."""
        raise NotImplementedError

    async def line(self, name: str, count: int, ready: Callable[[], Awaitable[None]]) -> list[float]:
        """Have so many wait in line, then let them pass one after the other: when the first was let in, and each."""
        entered: list[float] = []

        async def waiter() -> None:
            async with self.lock(name):
                entered.append(time.monotonic())

        async with self.lock(name):
            waiters: list[asyncio.Task[None]] = []
            while len(waiters) < count:
                # Not all at once: each newcomer reads the whole list, and a small server drowns in its answers.
                waiters += [asyncio.create_task(waiter()) for _ in range(min(BATCH, count - len(waiters)))]
                await self.all_wait(len(waiters))
            await ready()
            entered.append(time.monotonic())
        await asyncio.gather(*waiters)
        return entered

    async def all_wait(self, count: int) -> None:
        """Until so many tasks wait, as far as one can know here; the server is asked by somebody else."""
        del count
        await asyncio.sleep(0.1)


@asynccontextmanager
async def again_and_again(work: Callable[[], Awaitable[object]], seconds: float) -> AsyncIterator[None]:
    """Do something at once, and every so many seconds until the block ends."""

    async def repeat() -> None:
        while True:
            await work()
            await asyncio.sleep(seconds)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def parts(name: str) -> list[str]:
    """The names of the locks that are taken together, in the order in which everybody takes them."""
    return [f"{name}:{number}" for number in range(PARTS)]


class Block:
    """A lock that its owner has as a block, for ``async with``, again and again."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name

    async def __aenter__(self) -> None:
        self._open = self._owner.block(self._name)
        await self._open.__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await self._open.__aexit__(None, None, None)


class InBlocks(Contestant):
    """One whose lock is a block."""

    def lock(self, name: str) -> Any:
        return Block(self, name)

    def block(self, name: str) -> Any:
        """An asynchronous context manager that is the lock."""
        raise NotImplementedError


class Polling(InBlocks):
    """One that is refused, and asks again every ``interval`` seconds."""

    def __init__(self, url: str, interval: float = 0.1) -> None:
        super().__init__(url)
        self._interval = interval

    def pause(self) -> float:
        """How long to wait before the next try."""
        return self._interval

    async def enter(self, name: str) -> bool:
        """Try it; whether it was free."""
        raise NotImplementedError

    async def exit(self, name: str) -> None:
        """Free it."""
        raise NotImplementedError

    @asynccontextmanager
    async def block(self, name: str) -> AsyncIterator[None]:
        while not await self.enter(name):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(self.pause())
        yield
        await self.exit(name)


class Pooled(InBlocks):
    """Connections on demand, as many as are in use at once but no more than ``most``."""

    most = 100_000

    async def __aenter__(self) -> Self:
        self._idle: list[Any] = []
        self._all: list[Any] = []
        self._gate = asyncio.Semaphore(self.most)
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._all:
            if (closing := connection.close()) is not None:
                await closing

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        async with self._gate:
            if self._idle:
                connection = self._idle.pop()
            else:
                self._all.append(connection := await self._connect())
            yield connection
            self._idle.append(connection)

    async def _connect(self) -> Any:
        raise NotImplementedError


class OneByOne:
    """Several asynchronous context managers, entered one after the other."""

    def __init__(self, locks: Sequence[Any]) -> None:
        self._locks = locks

    async def __aenter__(self) -> None:
        self._stack = AsyncExitStack()
        for lock in self._locks:
            await self._stack.enter_async_context(lock)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
