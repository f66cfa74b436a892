"""A row store in memory whose server can crash, lose rows and step its clock; its transport loses, delays and repeats.

``transport`` carries each step, as that of ``memory://`` does (:class:`tests.faults.links.Link`, :class:`Cuttable`, or the
line of a simulated host). A step that fails there is a lost connection: the engine is told as by a reconnect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

from aiolock.backends.rows.backend import RowBackend
from aiolock.backends.rows.context import new_version
from aiolock.backends.rows.lockrow import LockRow, TokenSource, decode, encode, new_tokens
from aiolock.backends.rows.store import ALL, Edit, Entry, Listener, Row, RowStore, StoreClock
from aiolock.clock import Clock, system_clock
from aiolock.core.backend import Settings
from aiolock.errors import BackendError, BackendUnavailable

__all__ = ["MemoryRowStore", "RowServer", "RowTestBackend", "direct", "forget_hold"]

T = TypeVar("T")
Transport = Callable[[Callable[[], Any]], Awaitable[Any]]

EPOCH = 1.7e9
"""Added to the clock, so that ticks look like the time of day."""


class StoredRow(NamedTuple):
    value: bytes
    version: str
    until: float | None
    """When the row may be deleted."""


class RowServer:
    """The rows, what of them is durable, and who is to be notified."""

    def __init__(
        self,
        clock: Clock = system_clock,
        *,
        push: bool = True,
        shared_clock: bool = True,
        enters: bool = False,
        expires: bool = False,
        standby: bool = False,
        in_order: bool = False,
    ) -> None:
        self.clock = clock
        self.push = push
        self.shared_clock = shared_clock
        """Whether clients see a clock by which sessions expire."""
        self.enters = enters
        """Whether it evaluates statements that enter."""
        self.expires = expires
        """Whether clients take a session without a row for dead."""
        self.standby = standby
        """Whether flushed writes wait for a standby, which takes over by :meth:`crash`."""
        self.in_order = in_order
        """Whether others see a write before it is flushed, and each flush has all writes before it: while it is ``away``, none is flushed,
        and answers are lost."""
        self.away = False
        """Whether the standby is away, and an administrator ends each wait for it: a write is made, and its answer is a warning."""
        self.rows: dict[str, StoredRow] = {}
        self.stores: dict[str, MemoryRowStore] = {}
        """The open stores, by the address of their clients."""
        self.stepped = 0.0
        """By how much the clock was stepped."""
        self.after: Callable[[], None] = lambda: None
        """Called after each write; for invariants."""
        self.writes = 0
        self.reads = 0
        self._undo: list[tuple[str, StoredRow | None]] = []
        """What the rows were before each write that is not durable."""
        self._tick = 0

    # --- requests

    def row(self, key: str, *, value: bool = True) -> Row:
        found = self.rows.get(key)
        self._tick = max(self._tick + 1, int((EPOCH + self.clock() + self.stepped) * 1e6))
        clock = StoreClock(EPOCH + self.clock() + self.stepped) if self.shared_clock else None
        if found is None:
            return Row(b"", "", self._tick, clock)
        return Row(found.value if value else b"", found.version, self._tick, clock)

    def read(self, keys: Sequence[str], *, value: bool) -> list[Row]:
        self.reads += 1
        return [self.row(key, value=value) for key in keys]

    def write(self, edits: Sequence[Edit]) -> list[Row | None]:
        self.writes += 1
        made = [self.edit(edit) for edit in edits]
        if any(edit.flush and row is not None for edit, row in zip(edits, made, strict=True)):
            self._waited()
        return made

    def _flush(self) -> None:
        if not self.away:
            self._undo.clear()

    def _waited(self) -> None:
        if self.away:
            raise BackendUnavailable("the wait for the standby was cancelled")

    def edit(self, edit: Edit) -> Row | None:
        before = self.rows.get(edit.key)
        if (before.version if before else "") != edit.expected:
            return None
        self._undo.append((edit.key, before))
        if edit.value is None:
            del self.rows[edit.key]
        else:
            until = None if edit.ttl is None else self.clock() + edit.ttl
            self.rows[edit.key] = StoredRow(edit.value, edit.version, until)
        if edit.flush:
            self._flush()
        if self.push:
            for address, store in list(self.stores.items()):
                if address in edit.notify or ALL in edit.notify:
                    store.notify(edit.key)
        self.after()
        return self.row(edit.key)

    def enter(self, entry: Entry) -> tuple[Row, str]:
        """Evaluate a statement that enters."""
        found, session = self.row(entry.key), self.rows.get(entry.session)
        value = entered(found.value, entry, found.tick)
        if value is None or session is None or session.version != entry.heartbeat:
            self.reads += 1
            return found, found.version
        self.writes += 1
        self._undo.append((entry.key, self.rows.get(entry.key)))
        self.rows[entry.key] = StoredRow(value, entry.version, None)
        self._flush()
        self.after()
        self._waited()
        return self.row(entry.key), found.version

    def purge(self, prefix: str, idle: float, spared: Collection[str] = ()) -> int:
        end = self.clock() - idle
        over = [
            key
            for key, row in self.rows.items()
            if key.startswith(prefix) and row.until is not None and row.until <= end and key not in spared
        ]
        for key in over:
            del self.rows[key]
        return len(over)

    # --- accidents

    def crash(self) -> None:
        """Lose what is not durable, and all connections."""
        for key, before in reversed(self._undo):
            if before is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = before
        self._undo.clear()
        for store in list(self.stores.values()):
            store.interrupt()

    def forget(self) -> None:
        """Lose everything, and all connections."""
        self.rows.clear()
        self._undo.clear()
        for store in list(self.stores.values()):
            store.interrupt()


def entered(value: bytes, entry: Entry, tick: int) -> bytes | None:
    """Return the value of a row after an entry, or ``None`` if its lock is not free: the rules, written another way."""
    name = decode(f"{entry.head}0}}".encode()).name
    row = decode(value) if value else LockRow(name)
    if encode(row) != encode(LockRow(name, token=row.token, forced=row.forced)):
        return None
    first, count, row.token = new_tokens(row.token, entry.block, TokenSource(entry.floor, tick))
    hold = f'{{"v":"","t":0,"h":[{entry.hold},"b":{count},"t":{first}}}]}}'
    row.holds = decode((entry.head[:1] + hold).encode()).holds
    return encode(row)


def forget_hold(server: RowServer, key: str, claim: str) -> None:
    """Remove a hold as an administrator would who edits the row."""
    found = server.rows[key]
    row = decode(found.value)
    del row.holds[claim]
    server.rows[key] = StoredRow(encode(row), new_version(), found.until)


async def direct(step: Callable[[], Any]) -> Any:
    """A transport that takes no time, but a turn of the loop."""
    await asyncio.sleep(0)
    return step()


class MemoryRowStore(RowStore):
    """One client's way to a server."""

    def __init__(self, server: RowServer, transport: Transport = direct, *, poll: float = 2.0) -> None:
        self.server = server
        self.transport = transport
        self.push = server.push
        self.expires = server.expires
        self.reads_prove = not (server.standby or server.in_order)
        self.in_order = server.in_order
        words = {"exclusion", "fencing", "fifo", "keep", "no-eviction"}
        self.capabilities = frozenset(words | {"push"} if server.push else words)
        self.poll = poll
        self.watched: frozenset[str] = frozenset()
        self._listener: Listener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timeout = 1.0

    @property
    def enters(self) -> bool:
        return self.server.enters

    async def open(self, settings: Settings, listener: Listener) -> None:
        self._listener, self._timeout = listener, settings.command_timeout
        self._loop = asyncio.get_running_loop()
        self.server.stores[listener.address] = self

    async def _ask(self, step: Callable[[], T]) -> T:
        def answered() -> T | BackendError:
            try:
                return step()
            except BackendError as error:
                # A warning of the server, which travels as any other answer.
                return error

        try:
            async with asyncio.timeout(self._timeout):
                answer: T | BackendError = await self.transport(answered)
            if isinstance(answer, BackendError):
                raise answer
        except TimeoutError:
            self.interrupt()
            raise BackendUnavailable("no answer in time") from None
        except BackendError:
            self.interrupt()
            raise
        return answer

    async def get(self, keys: Sequence[str]) -> list[Row]:
        return await self._ask(lambda: self.server.read(keys, value=True))

    async def versions(self, keys: Sequence[str]) -> list[Row]:
        return await self._ask(lambda: self.server.read(keys, value=False))

    async def compare_and_set(self, edits: Sequence[Edit]) -> list[Row | None]:
        return await self._ask(lambda: self.server.write(edits))

    async def enter(self, entry: Entry) -> tuple[Row, str]:
        return await self._ask(lambda: self.server.enter(entry))

    async def scan(self, prefix: str) -> AsyncIterator[tuple[str, Row]]:
        found = await self._ask(
            lambda: [(key, self.server.row(key)) for key in self.server.rows if key.startswith(prefix)]
        )
        for each in found:
            yield each

    async def purge(self, prefix: str, idle: float, spared: Collection[str] = ()) -> int:
        return await self._ask(lambda: self.server.purge(prefix, idle, spared))

    def watch(self, keys: frozenset[str]) -> None:
        self.watched = keys

    def notify(self, key: str) -> None:
        """Deliver a notification on the client's loop."""
        if self._listener is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._listener.changed, key)

    def interrupt(self) -> None:
        """Tell the engine that a connection was lost."""
        if self._listener is not None:
            self._listener.interrupted()

    def abandon(self) -> None:
        if self._listener is not None:
            self.server.stores.pop(self._listener.address, None)
            self._listener = None

    async def aclose(self) -> None:
        self.abandon()


class RowTestBackend(RowBackend):
    """The engine over such a store."""

    name = "rows"
    address = "rows://test"

    def __init__(self, server: RowServer, transport: Transport = direct, *, poll: float = 2.0) -> None:
        self.server = server
        self._transport = transport
        self._poll = poll

    def make_store(self) -> MemoryRowStore:
        return MemoryRowStore(self.server, self._transport, poll=self._poll)
