"""Rows in a SQLite file: a thread that has the connection, and the store in front of it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from random import uniform
from threading import Event, Thread
from typing import Any, NamedTuple, TypeVar

from aiolock.backends.rows.store import Edit, Listener, Row, RowStore
from aiolock.backends.sqlite.connection import Connection
from aiolock.backends.sqlite.diagnosis import examine, examine_path
from aiolock.backends.sqlite.errors import FAILED, code, late, translate
from aiolock.clock import system_clock
from aiolock.core.backend import Settings
from aiolock.core.tasks import reject, settle
from aiolock.errors import BackendError, BackendUnavailable
from aiolock.types import Finding

__all__ = ["SqliteStore"]

T = TypeVar("T")

RETRY = 0.0003, 0.001
"""Seconds between two tries while another process writes: a write takes a tenth of that, or as long as the disk needs."""
POLL, IDLE_POLL = 0.001, 0.02
"""Seconds between two polls for changes: after a change, and after some time without one."""
CLOSING = 1.0
"""Seconds for which closing waits for the thread: a disk that does not answer does not keep a client open."""


class _Job(NamedTuple):
    """A request, and the future of its answer."""

    step: Callable[[Connection], Any]
    future: asyncio.Future[Any]
    deadline: float
    epoch: int | None = None
    """The connection whose versions a write relies on; ``None`` for a read."""


class _Worker:
    """The thread of one opened store.

    The connection is a local variable of the thread's function. A forked child has no such thread, and so it never touches
    the connection, not even to close it: SQLite does not allow either.
    """

    def __init__(self, given: str, store: SqliteStore) -> None:
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        """Requests; ``None`` has the thread poll for changes now."""
        self.watched: frozenset[str] = frozenset()
        self._given = given
        self._path = Path(given)
        """Without symbolic links, as they were when the file was opened."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        # A store that is dropped without being closed ends its thread.
        self._store = weakref.ref(store, lambda _: self.close())
        self._closing = Event()
        self._epoch = 0
        self._deadline = 0.0
        """When the present step gives up waiting for other processes."""
        self._polled: frozenset[str] = frozenset()
        """The rows that the latest poll was about."""
        self._wait = self._due = 0.0
        self.thread = Thread(target=self._run, name=f"aiolock {given}", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Have the thread end after its present step."""
        self._closing.set()
        self.jobs.put(None)

    def _run(self) -> None:
        connection: Connection | None = None
        while not self._closing.is_set():
            connection = self._turn(connection)
        if connection is not None:
            connection.close()
        while not self.jobs.empty():
            if (job := self.jobs.get()) is not None:
                self._call(reject, job.future, BackendUnavailable(f"{self._path}: the client was closed"))
        self._call(settle, self.ended, None)

    def _turn(self, connection: Connection | None) -> Connection | None:
        """Carry out a request, or poll for changes; return the connection for the next turn."""
        job, result, error = self._next(), None, None
        try:
            if job is None:
                self._poll(connection)
            elif not job.future.done():
                self._deadline = job.deadline
                if connection is None:
                    self._path = _real(self._given)
                    connection = Connection(self._path, self._given, self._pause)
                if job.epoch not in (None, self._epoch):
                    raise self._void()
                result = job.step(connection)
        except Exception as failure:  # noqa: BLE001 - the task that waits for the answer gets it
            error = failure
        # Checked after the step, so that no answer comes from a file that was replaced before.
        if connection is not None and ((replaced := connection.replaced()) or code(error) in FAILED):
            connection.close()
            connection = None
            self._epoch += 1
            self._report(SqliteStore.interrupted, replaced)
            error = error or self._void()
        if isinstance(error, sqlite3.Error | OSError):
            cause, error = error, translate(error, self._path)
            error.__cause__ = cause
        if job is not None:
            self._call(settle, job.future, result) if error is None else self._call(reject, job.future, error)
        return connection

    def _next(self) -> _Job | None:
        """Wait for a request, or until it is time to poll for changes."""
        if not self.watched:
            return self.jobs.get()
        left = self._due - system_clock()
        try:
            return self.jobs.get(timeout=left) if left > 0 else None
        except Empty:
            return None

    def _poll(self, connection: Connection | None) -> None:
        """Report which of the watched rows other processes have changed."""
        start, watched, self._deadline = system_clock(), self.watched, 0.0
        fresh, self._polled = watched - self._polled, watched
        changed = connection.changed(tuple(watched), anyway=bool(fresh)) if connection and watched else []
        for key in changed:
            self._report(SqliteStore.changed, key)
        self._wait = POLL if changed or fresh else min(1.1 * self._wait, IDLE_POLL)
        # However many rows are watched, polling takes no more than a tenth of the time.
        self._due = system_clock() + max(self._wait, 10 * (system_clock() - start))

    def _pause(self) -> bool:
        """Wait a moment for another process; return False when the present step has taken too long."""
        # Not a Backoff: a thread waits here, and for one write.
        return system_clock() < self._deadline and not self._closing.wait(uniform(*RETRY))

    def _void(self) -> BackendUnavailable:
        return BackendUnavailable(f"{self._given} was replaced or deleted, and its locks are void")

    def _report(self, method: Callable[..., None], *values: object) -> None:
        if (store := self._store()) is not None:
            self._call(method, store, *values)

    def _call(self, function: Callable[..., None], *values: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *values)
        except RuntimeError:
            # The loop was closed, and the client was not.
            self._closing.set()


class SqliteStore(RowStore):
    """The rows in one file, for the processes of one machine.

    :param path: the absolute path of the file, which is created if it is missing, but not its directory.

    A request that its thread has begun is carried out, also if the task that waits for the answer is cancelled.
    """

    capabilities = frozenset({"exclusion", "fencing", "fifo", "keep", "no-eviction", "survives-restart"})

    def __init__(self, path: str) -> None:
        self.path = path
        self._worker: _Worker | None = None
        self._epoch = 0

    async def open(self, settings: Settings, listener: Listener) -> None:
        """Open the file, and make the table in a new one."""
        self._timeout, self._outages = settings.command_timeout, settings.outages
        self._listener, self._epoch = listener, 0
        self._worker = worker = _Worker(self.path, self)
        try:
            if await self._request(lambda connection: connection.in_memory):
                self.capabilities -= {"survives-restart"}
        except BaseException:
            self._worker = None
            worker.close()
            raise

    async def _ask(self, step: Callable[[Connection], T], epoch: int | None = None) -> T:
        """Have a request answered, and report when the file begins and ceases to answer."""
        outages, what = self._outages, (self, epoch is None)
        try:
            answer = await self._request(step, epoch)
        except BackendError as error:
            if outages is not None and self._worker is not None:
                outages.down(what, self.path, error)
            raise
        if outages is not None:
            outages.up(what, self.path)
        return answer

    async def _request(self, step: Callable[[Connection], T], epoch: int | None = None) -> T:
        """Have the thread carry out a step; cancelling it ends the wait for the answer only."""
        if self._worker is None:
            raise BackendUnavailable(f"{self.path}: the client is closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        # The thread gives up a little earlier, because it can say for which process it waits.
        self._worker.jobs.put(_Job(step, future, system_clock() + 0.9 * self._timeout, epoch))
        try:
            async with asyncio.timeout(self._timeout):
                return await future
        except TimeoutError:
            raise late(_real(self.path), self._timeout) from None

    async def get(self, keys: Sequence[str]) -> list[Row]:
        """Return rows."""
        return await self._ask(lambda connection: connection.get(keys))

    async def versions(self, keys: Sequence[str]) -> list[Row]:
        """Return rows without their values."""
        return await self._ask(lambda connection: connection.get(keys, values=False))

    async def compare_and_set(self, edits: Sequence[Edit]) -> list[Row | None]:
        """Make all edits that can be made, in one transaction."""
        return await self._ask(lambda connection: connection.compare_and_set(edits), self._epoch)

    async def scan(self, prefix: str) -> AsyncIterator[tuple[str, Row]]:
        """Yield the rows whose key begins with ``prefix``, in the order of their keys."""
        after = ""
        while page := await self._ask(partial(Connection.page, prefix=prefix, after=after)):
            for each in page:
                yield each
            after = page[-1][0]

    async def purge(self, prefix: str, idle: float, spared: Collection[str] = ()) -> int:
        """Delete the rows of a prefix whose ttl ended ``idle`` seconds ago; return their number."""
        count = 0
        while some := await self._ask(lambda connection: connection.purge(prefix, idle, spared)):
            count += some
        return count

    def watch(self, keys: frozenset[str]) -> None:
        """Poll for changes of these rows from now on."""
        if self._worker is not None:
            fresh, self._worker.watched = keys - self._worker.watched, keys
            if fresh:
                self._worker.jobs.put(None)

    def changed(self, key: str) -> None:
        """Pass on that another process has changed a row."""
        self._listener.changed(key)

    def interrupted(self, replaced: bool) -> None:
        """Pass on that the file was replaced or the connection failed; versions that were read from it are void."""
        self._epoch += 1
        if replaced:
            # Also by a copy: what it shows is older than what clients have believed.
            self._listener.replaced()
        self._listener.interrupted()

    async def diagnose(self) -> list[Finding]:
        """Examine the file, or only its place if it is not open."""
        return examine_path(_real(self.path)) if self._worker is None else await self._ask(examine)

    def abandon(self) -> None:
        """End the thread, which may hold on to the client otherwise."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            worker.thread.join(CLOSING)

    async def aclose(self) -> None:
        """Close the file and end the thread; cancelling it ends the wait for that only."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSING):
                    await worker.ended
                worker.thread.join(CLOSING)


def _real(path: str) -> Path:
    """Return the path without symbolic links; links that lead to each other stay in it."""
    return Path(os.path.realpath(path))
