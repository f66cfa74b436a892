"""The state that the parts of the engine share, and the calls of the store with the times that decide what an answer proves."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any, NamedTuple, TypeVar

from aiolock.backends.rows.liveness import ClockCheck, EndedClaims
from aiolock.backends.rows.lockrow import Liveness, TokenSource, UnknownFormat
from aiolock.backends.rows.store import Edit, Entry, Row, RowStore, StoreClock
from aiolock.clock import Clock, Deadline, wall_clock
from aiolock.core.backend import Claim, EventQueue, Settings
from aiolock.core.capabilities import UnreadableLock
from aiolock.core.tasks import TaskSet, reject, settle
from aiolock.errors import BackendUnavailable, closed_error, copy_of, shorten
from aiolock.types import Family
from aiolock.validation import digest, escape

__all__ = ["Context", "Flight", "ReadAnswer", "new_future", "new_version", "row_key", "unreadable"]

T = TypeVar("T")

ALONE = 0.005
"""Seconds after a grant for which no other client is expected to wait, where holders are not notified of them."""

SHORT = 120
"""Characters of a name that a key contains; longer names, and those with spaces or letters beyond ASCII, have a digest there."""


def new_version() -> str:
    """Return a version that no row has ever had: 12 random bytes."""
    return secrets.token_urlsafe(12)


def row_key(namespace: str, sort: str, family: Family, name: str) -> str:
    """Return the key of a lock (``sort`` is l) or register (r): printable, and different for different names."""
    text = escape(name)
    if len(text) > SHORT or not text.isascii() or " " in text:
        text = f"%#{digest(name)}"
    return f"{namespace}/{sort}/{family.value}/{text}"


def unreadable(name: str, error: UnknownFormat) -> UnreadableLock:
    """Return the error about the row of a lock that has an unknown format."""
    return UnreadableLock(
        f"the row of {shorten(name)} was not written by this version of the library: {error}; use one version everywhere, or "
        "replace the row by force_release() or `aiolock force-release`, which ends all holds of the lock"
    )


class Flight(NamedTuple):
    """The sending of one request."""

    sent: float
    """On the local clock."""
    order: int
    """Sendings and arrivals of this client are numbered by one counter."""
    connection: int
    """The number of the connection: an answer that belongs to an earlier one is not remembered."""


class ReadAnswer(NamedTuple):
    """The arrival of the answer to a read which alone does not prove what it shows, see :attr:`RowStore.reads_prove`."""

    connection: int
    order: int
    """On the same counter as :attr:`Flight.order`."""


class Context:
    """One opening of a client, as the parts of the engine see it: the store, the settings, and what its answers have proved.

    Cancelling a call of the store ends the wait for its answer; a write may count.
    """

    def __init__(self, store: RowStore, settings: Settings, events: EventQueue, floor: int) -> None:
        self.store = store
        self.settings = settings
        self.clock: Clock = settings.clock
        self.timeout: float = settings.command_timeout
        self.events = events
        self.floor = floor
        """The highest token that this client has seen."""
        self.address: str = secrets.token_hex(8)
        self.random: Random = settings.random
        self.tasks: TaskSet = TaskSet()
        self.liveness: Liveness = Liveness(own={})
        self.clock_check: ClockCheck = ClockCheck()
        self.reading: tuple[StoreClock, float] | None = None
        """The newest reading of the shared clock, and when its request was sent."""
        self.undurable: set[EndedClaims] = set()
        """Of all sessions, the ended claims of which a removal waits for a flushed write."""
        self.connection = 0
        self._flushed = 0, 0
        """The connection and the order number of the newest flushed write that was answered on it."""
        self.answered_since = False
        """True if the store has answered since the last reconnect."""
        self.closed = False
        self._count = itertools.count(1)

    def order(self) -> int:
        """Return the next number of the counter by which sendings and answers of this client are ordered."""
        return next(self._count)

    def flight(self) -> Flight:
        """Note the sending of a request."""
        return Flight(self.clock(), next(self._count), self.connection)

    def flushed(self, flight: Flight) -> None:
        """Record that a flushed write was answered: it makes earlier writes durable."""
        if flight.connection == self.connection:
            self.answered_since = True
            self._flushed = max(self._flushed, (flight.connection, flight.order))
            for ended in list(self.undurable):
                if not ended.flushed(flight.order, flight.connection):
                    self.undurable.discard(ended)

    def read(self, *, doubt: bool) -> ReadAnswer | None:
        """Note the arrival of an answer to a read, if what it shows may be undone; ``None`` if not.

        :param doubt: a write of this client about the row was given up without an answer.
        """
        if self.store.reads_prove or (self.store.in_order and not doubt):
            return None
        return ReadAnswer(self.connection, self.order())

    def proves(self, read: ReadAnswer) -> bool:
        """Test whether a flushed write was answered that was sent after the answer to a read, without a reconnect between."""
        connection, order = self._flushed
        return read.connection == connection == self.connection and read.order < order

    def source(self, tick: int) -> TokenSource:
        """Return the source of tokens for a row that was read at ``tick``."""
        return TokenSource(self.floor, tick, wall_clock())

    # --- calls of the store

    async def get(self, keys: Sequence[str]) -> tuple[list[Row], Flight]:
        """Read rows."""
        flight = self.flight()
        return self._clocked(await self.store.get(keys), flight), flight

    async def versions(self, keys: Sequence[str]) -> tuple[list[Row], Flight]:
        """Read versions."""
        flight = self.flight()
        return self._clocked(await self.store.versions(keys), flight), flight

    async def write(self, edit: Edit) -> tuple[Row | None, Flight]:
        """Make one edit."""
        flight = self.flight()
        [row] = await self.store.compare_and_set([edit])
        self._clocked([] if row is None else [row], flight)
        return row, flight

    async def enter(self, entry: Entry) -> tuple[Row, str, Flight]:
        """Read a row and enter if its lock is free; return it, its version before, and the sending."""
        flight = self.flight()
        row, before = await self.store.enter(entry)
        self._clocked([row], flight)
        return row, before, flight

    def _clocked(self, rows: list[Row], flight: Flight) -> list[Row]:
        """Process an answer, and the newest reading of the shared clock."""
        self.answered_since = self.answered_since or flight.connection == self.connection
        if rows and (clock := rows[-1].clock) is not None:
            self.clock_check.read(clock, flight.sent, self.clock())
            if self.reading is None or self.reading[1] < flight.sent:
                self.reading = clock, flight.sent
        return rows

    # --- work that outlives its caller

    def begin(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Future[T]:
        """Start work as a task of the client; the future gets its result or error, and cancelling it changes nothing.

        Once the client is closed, nothing is started, and the future is cancelled as those of its tasks are.
        """
        future: asyncio.Future[T] = new_future()
        if self.closed:
            work.close()
            future.cancel()
            return future

        async def run() -> None:
            try:
                result = await work
            except Exception as error:  # noqa: BLE001 - of any kind: it belongs to the callers that wait
                reject(future, error)
            else:
                settle(future, result)
            finally:
                future.cancel()

        # A task that is cancelled before its first step never awaits the work.
        self.tasks.spawn(run(), name).add_done_callback(lambda _: work.close())
        return future

    def expect_others(self, claim: Claim) -> None:
        """Take for granted that other clients wait soon after a grant, if the store does not notify its holder of them."""
        if not self.store.push:
            claim.note_waiters(self.clock() + ALONE)

    def deadline(self) -> Deadline:
        """Return the end of the command timeout that begins now."""
        return Deadline.after(self.timeout, self.clock)

    async def answered(self, future: asyncio.Future[T], deadline: Deadline | None = None) -> T:
        """Return the result of a future by the deadline, or within the command timeout.

        Raises :class:`BackendUnavailable` if it is not done by then, :class:`RuntimeError` if the client was closed, and a copy
        of the error of the future, see :func:`copy_of`. Cancelling it ends the wait, not the work.
        """
        await asyncio.wait({future}, timeout=self.timeout if deadline is None else deadline.left())
        if not future.done():
            raise BackendUnavailable(f"no answer within the command timeout of {self.timeout:g} s")
        if future.cancelled():
            raise closed_error()
        if isinstance(error := future.exception(), Exception):
            # Several callers may wait for one future.
            raise copy_of(error) from error
        return future.result()


def new_future() -> asyncio.Future[Any]:
    """Return a future whose error is no complaint if no caller waits for it any more."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.add_done_callback(_retrieve)
    return future


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
