"""Connections of a SQL server: a pipeline carries out one statement at a time, and two pipelines live and end together.

Callers wait on futures, and the pipeline's own task calls the driver: a driver sends a request to cancel the statement, or loses
the step, when its caller is cancelled, and a statement may be carried out all the same. So no call of the driver is ever cancelled.
An answer that is late ends both connections instead, and the server finds out by itself.

One file, because a pipeline that ends, the pair of pipelines and their log-in are one state: neither pipeline outlives the other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from aiolock.clock import Deadline
from aiolock.core.backend import Settings
from aiolock.core.tasks import Backoff, TaskSet, end
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, LockError, copy_of

__all__ = ["CLOSED", "MOST_ITEMS", "Connections", "Pipeline", "PipelineDriver"]

MOST_ITEMS = 256
"""Items of one statement, unless a single call has more."""

CLOSE_WITHIN = 1.0
"""Seconds for which closing waits until the server has been notified."""

CLOSED = "the client is closed"


class PipelineDriver(Protocol):
    """A connection of a driver as a pipeline uses it; its calls are never cancelled."""

    def on_end(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` when the connection has ended, also while nothing is asked."""

    async def fetch(self, *statement: Any) -> Sequence[Any]:
        """Execute one statement; its records."""
        ...

    def doubt(self) -> str:
        """Return why what was committed since the last call may be undone; empty if the server did not say so."""
        ...

    def failure(self, error: Exception, address: str) -> tuple[BackendError, bool]:
        """Return the error of this library for one of the driver's, and whether the connection is of no more use."""
        ...

    def is_closed(self) -> bool:
        """Return whether no statement can be sent any more."""
        ...

    def terminate(self) -> None:
        """Close at once."""

    async def quit(self, within: float) -> None:
        """Close in good order, within so many seconds. Cancelling it may leave the connection open."""


D = TypeVar("D", bound=PipelineDriver)


@dataclass(slots=True, eq=False)
class _Call:
    """Items whose answers one caller waits for, or a plain statement."""

    items: Sequence[Any]
    late: float
    """When, by the loop's clock, the answer is late."""
    keys: frozenset[str] = frozenset()
    """Keys that no other call of the same statement may have."""
    statement: tuple[Any, ...] = ()
    answer: asyncio.Future[Sequence[Any]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(copy_of(error))
            # The caller may be gone.
            self.answer.exception()


class Pipeline(Generic[D]):
    """One connection, and the calls that wait for their turn on it.

    Calls that wait go out together, as one statement, when the present one is answered: a commit costs one flush, however
    many edits it has.
    """

    def __init__(
        self,
        driver: D,
        execute: Callable[[D, Sequence[Any]], Awaitable[Sequence[Any]]],
        address: str,
        timeout: float,
        tasks: TaskSet,
        lost: Callable[[Pipeline[D], BackendError], None],
    ) -> None:
        """Take the function that carries out items of several calls in one round trip, and the one to call at the end."""
        self.driver = driver
        self._execute = execute
        self._address = address
        self._timeout = timeout
        self._tasks = tasks
        self._lost = lost
        self._calls: deque[_Call] = deque()
        self._current: list[_Call] = []
        self.busy = False
        """True while a statement is under way, and the next call has to wait for its turn."""
        self.over = False
        driver.on_end(self._ended)

    async def ask(self, items: Sequence[Any], keys: frozenset[str] = frozenset()) -> list[Any]:
        """Carry out ``items`` in one round trip, perhaps together with those of other calls that do not share ``keys``.

        Ends within the command timeout. Cancelling it before its turn withdraws the call; later it leaves open whether the
        items were carried out.
        """
        return list(await self._put(_Call(items, self._late(), keys)))

    async def fetch(self, *statement: Any) -> list[Any]:
        """Execute one statement with its arguments, in its turn; its records. Ends, and is cancelled, as :meth:`ask`."""
        return list(await self._put(_Call((), self._late(), statement=statement)))

    def _late(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout

    async def _put(self, call: _Call) -> Sequence[Any]:
        if self.over:
            raise BackendUnavailable(f"{self._address}: the connection was lost")
        self._calls.append(call)
        if not self.busy:
            self.busy = True
            self._tasks.spawn(self._work(), "aiolock-pipeline")
        return await call.answer

    async def _work(self) -> None:
        try:
            while not self.over and self._take():
                await self._carry_out()
        finally:
            self.busy = False
            if self._current:
                # The application cancels every task that there is: the outcome of the statement is not known.
                self._lost(self, BackendUnavailable(f"{self._address}: the connection was closed"))

    def _take(self) -> bool:
        """Take the calls that go out together: one plain statement, or as many others as fit."""
        taken: list[_Call] = []
        keys: set[str] = set()
        room = MOST_ITEMS
        while self._calls:
            call = self._calls[0]
            if not call.answer.done():
                fits = not call.statement and len(call.items) <= room and not keys & call.keys
                if taken and not fits:
                    break
                taken.append(call)
                keys |= call.keys
                room = 0 if call.statement else room - len(call.items)
            self._calls.popleft()
        self._current = taken
        return bool(taken)

    async def _carry_out(self) -> None:
        loop = asyncio.get_running_loop()
        calls = self._current
        timer = loop.call_at(min(call.late for call in calls), self._too_late)
        self.driver.doubt()
        try:
            if calls[0].statement:
                answers: Sequence[Any] = await self.driver.fetch(*calls[0].statement)
            else:
                answers = await self._execute(self.driver, [item for call in calls for item in call.items])
            if doubt := self.driver.doubt():
                raise BackendUnavailable(f"{self._address}: {doubt}")
        except LockError as error:
            self._failed(error, dead=True)
        except Exception as error:  # noqa: BLE001 - any error of the driver
            translated, dead = self.driver.failure(error, self._address)
            translated.__cause__ = error
            self._failed(translated, dead=dead or self.driver.is_closed())
        else:
            self._current = []
            start = 0
            for call in calls:
                end = start + len(call.items)
                if not call.answer.done():
                    call.answer.set_result(answers if call.statement else answers[start:end])
                start = end
        finally:
            timer.cancel()

    def _failed(self, error: LockError, *, dead: bool) -> None:
        for call in self._current:
            call.fail(error)
        self._current = []
        if dead:
            self._lost(self, error if isinstance(error, BackendError) else BackendUnavailable(str(error)))

    def _too_late(self) -> None:
        self._lost(self, BackendUnavailable(f"{self._address}: no answer in time"))

    def _ended(self) -> None:
        if not self.over:
            self._lost(self, BackendUnavailable(f"{self._address}: the connection was lost"))

    def end(self, error: Exception) -> None:
        """Close the connection at once, and raise ``error`` in every call."""
        if self.over:
            return
        self.over = True
        self.driver.terminate()
        for call in [*self._current, *self._calls]:
            call.fail(error)
        self._current = []
        self._calls.clear()

    async def quit(self) -> None:
        """Close in good order if nothing is under way, else at once. Cancelling it closes at once."""
        if not self.over and not self.busy:
            self.over = True
            try:
                await self.driver.quit(CLOSE_WITHIN)
            except Exception:  # noqa: BLE001 - it is closed then as well
                self.driver.terminate()
        self.end(BackendUnavailable(CLOSED))


class Connections(Generic[D]):
    """The two connections of a client, reopened together: one for writes, and one for reads and notifications.

    Two, because a renewal sends a write and a read in one flight. When one of them is lost, the other one is closed: what
    was read on it and what was written before are then distinguished by one border.
    """

    def __init__(
        self,
        address: str,
        settings: Settings,
        connect: Callable[[], Awaitable[tuple[D, D]]],
        read: Callable[[D, Sequence[Any]], Awaitable[Sequence[Any]]],
        write: Callable[[D, Sequence[Any]], Awaitable[Sequence[Any]]],
        interrupted: Callable[[], None],
    ) -> None:
        """Take the functions that make the reader and the writer, that carry out reads and writes, and that report the loss.

        ``connect`` raises errors of this library, and leaves nothing open if it does or is cancelled.
        """
        self._address = address
        self._settings = settings
        self._log_in = connect
        self._read, self._write = read, write
        self._interrupted = interrupted
        self._pipelines: tuple[Pipeline[D], Pipeline[D]] | None = None
        self._there = asyncio.Event()
        self._error: BackendError | None = None
        self._tasks = TaskSet()
        self._backoff = Backoff(settings.random)
        self._reconnecting: asyncio.Task[None] | None = None
        self.closed = False

    async def open(self) -> None:
        """Open both connections, once; raises why it cannot. Cancelling it leaves nothing open."""
        task = self._tasks.spawn(self._connect(), "aiolock-connect")
        try:
            await asyncio.wait([task])
        except BaseException:
            self.closed = True
            task.cancel()
            await asyncio.wait([task])
            raise
        if (refused := task.result()) is not None:
            raise refused

    async def reader(self, deadline: Deadline) -> Pipeline[D]:
        """Return the connection for reads; waits until there is one, or raises why there is none.

        Cancelling it ends the wait only.
        """
        while self._pipelines is None:
            if self.closed:
                raise BackendUnavailable(CLOSED)
            self._begin_reconnecting()
            try:
                async with asyncio.timeout(deadline.left()):
                    await self._there.wait()
            except TimeoutError:
                raise self._absent() from None
        return self._pipelines[0]

    @property
    def reader_now(self) -> Pipeline[D] | None:
        """The connection for reads, if it is there."""
        return None if self._pipelines is None else self._pipelines[0]

    @property
    def idle(self) -> bool:
        """True if it is connected and nothing is written, so that a write would be sent at once."""
        return self._pipelines is not None and not self._pipelines[1].busy

    def writer(self) -> Pipeline[D]:
        """Return the connection for writes; raises if it was lost, because what is to be written rests on earlier reads."""
        if self._pipelines is None:
            raise self._absent()
        return self._pipelines[1]

    def _absent(self) -> BackendError:
        if self.closed:
            return BackendUnavailable(CLOSED)
        if self._error is not None:
            return copy_of(self._error)
        return BackendUnavailable(f"{self._address}: the connection was lost")

    async def _connect(self) -> BackendError | None:
        """Open both; return why it cannot."""
        try:
            drivers = await self._log_in()
        except BackendError as error:
            self._error = error
            return error
        if self.closed or any(driver.is_closed() for driver in drivers):
            for driver in drivers:
                driver.terminate()
            self._error = BackendUnavailable(
                CLOSED if self.closed else f"{self._address}: the connection was lost"
            )
            return self._error
        reader, writer = (
            Pipeline(driver, execute, self._address, self._settings.command_timeout, self._tasks, self._lost)
            for driver, execute in zip(drivers, (self._read, self._write), strict=True)
        )
        self._pipelines, self._error = (reader, writer), None
        self._backoff.reset()
        self._there.set()
        if self._settings.outages is not None:
            self._settings.outages.up(self, self._address)
        return None

    def _lost(self, pipeline: Pipeline[D], error: BackendError) -> None:
        if self._pipelines is None or pipeline not in self._pipelines:
            # It is over already, and other connections may have taken its place.
            return
        pipelines, self._pipelines, self._error = self._pipelines, None, error
        self._there.clear()
        for pipeline in pipelines:
            pipeline.end(error)
        if self.closed:
            return
        if self._settings.outages is not None:
            self._settings.outages.down(self, self._address, error)
        self._interrupted()
        self._begin_reconnecting()

    def _begin_reconnecting(self) -> None:
        task = asyncio.current_task()
        # One that was cancelled by the application with all others would leave a task behind; the next read begins it.
        cancelled = task is not None and task.cancelling() > 0
        if not self.closed and not cancelled and (self._reconnecting is None or self._reconnecting.done()):
            self._reconnecting = self._tasks.spawn(self._reconnect(), "aiolock-reconnect")

    async def _reconnect(self) -> None:
        while not self.closed and self._pipelines is None and (error := await self._connect()) is not None:
            if isinstance(error, BackendRefused) and error.retryable:
                # The address led to a server that takes writes, and will again.
                self._error = BackendUnavailable(str(error))
            await self._backoff.pause()

    async def aclose(self) -> None:
        """Close both, and end every task. Cancelling it stops the waiting, not the closing."""
        self.closed = True
        self._there.set()
        if self._settings.outages is not None:
            self._settings.outages.forget(self, self._address)
        pipelines, self._pipelines = self._pipelines, None
        if pipelines is not None:
            await asyncio.wait(
                [self._tasks.spawn(pipeline.quit(), "aiolock-close") for pipeline in pipelines]
            )
        await end(self._tasks)
