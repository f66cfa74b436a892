"""Connections to a PostgreSQL server: a pipeline carries out one statement at a time, and two pipelines live and end together.

Callers wait on futures, and the pipeline's own task calls the driver: asyncpg sends a request to cancel the statement when its
caller is cancelled, and a statement may be carried out all the same. So no call of the driver is ever cancelled. An answer
that is late ends both connections instead, and the server finds out by itself.

One file, because a pipeline that ends, the pair of pipelines and their log-in are one state: neither pipeline outlives the other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import asyncpg

from aiolock.backends.diagnosis import numbers
from aiolock.backends.dial import Dialer
from aiolock.backends.postgresql.errors import READ_ONLY, SWAPPED, TEMPORARY, sqlstate, translate
from aiolock.backends.postgresql.primary import Role, find
from aiolock.backends.postgresql.replication import Replication
from aiolock.backends.postgresql.schema import Statements
from aiolock.backends.postgresql.url import Address
from aiolock.clock import Deadline
from aiolock.core.backend import Settings
from aiolock.core.tasks import Backoff, TaskSet, end
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, LockError, UnsafeBackend, copy_of

__all__ = [
    "OLDEST",
    "UNTRIED_VERSION",
    "Connections",
    "Driver",
    "Facts",
    "Pipeline",
    "doubts_commit",
    "explain",
    "login",
    "primary",
    "swaps_sessions",
]

REFUSED = ("CockroachDB", "Aurora DSQL")
"""Servers that speak PostgreSQL's protocol and lack something that locks rely on."""
UNTRIED_VERSION = "-YB-"
"""A part of the version of YugabyteDB, of which it is not known whether all that locks rely on is as on PostgreSQL."""

OLDEST = 15
"""The oldest version that is tested; older ones are refused."""

MOST_ITEMS = 256
"""Items of one statement, unless a single call has more."""

CLOSE_WITHIN = 1.0
"""Seconds for which closing waits until the server has been notified."""

LOCKED = 100
"""Milliseconds, at most, for which a write waits for a row that another transaction keeps locked; at most a tenth of the command timeout."""
CLOSED = "the client is closed"
STANDBY_WAIT = "SyncRepWaitForLSN"
"""The function of the server that waits for standbys, and warns when that wait was ended before."""
CONNECTION_DENIED = "08"
"""The beginning of the codes with which a pooler ends a connection that it gives no session, at once or after a while."""
ONE_SESSION = (
    "a pooler such as PgBouncer stands in between and gave one session and no second one: each client that is open needs two, so "
    "raise default_pool_size (or max_db_connections, max_user_connections, max_client_conn), or connect to the server itself"
)


class Driver(asyncpg.Connection):  # type: ignore[misc]  # the driver is untyped
    """A connection of the driver, whose owner closes it."""

    process = 0
    """The server's process that answered the login."""
    timeline = ""
    """The server's line of history, which is another one after a failover; its clock is compared within one only."""

    @property
    def pooled(self) -> bool:
        """True if a pooler such as PgBouncer stands in between, which makes up numbers of processes."""
        return bool(self.process != self.get_server_pid())

    def __del__(self) -> None:
        """Do nothing: a forked child must not touch the connection, nor may one whose event loop was closed."""


class Facts(NamedTuple):
    """Facts about a server and a connection to it."""

    version: str
    recovering: bool
    pid: int
    fsync: str
    full_page_writes: str
    replication: Replication
    run: str
    """The time at which the server started."""


async def login(address: Address, statements: Statements, settings: Settings) -> tuple[Driver, Facts]:
    """Connect, log in and set the session up, within the command timeout; nothing is left if it raises or is cancelled.

    Raises errors of this library. The server may be one that clients refuse to use.
    """
    try:
        async with asyncio.timeout(settings.command_timeout):
            driver = await asyncpg.connect(
                **address.arguments,
                connection_class=Driver,
                loop=Dialer(),
                # Statements are prepared once, and live as long as the connection.
                max_cached_statement_lifetime=0,
                timeout=None,  # pyright: ignore[reportArgumentType] # the limit is the one around it
            )
            try:
                wait = max(1, round(settings.command_timeout * 1000))
                try:
                    await driver.execute(statements("settings").replace("{lock_timeout}", str(wait)))
                except asyncpg.PostgresError:
                    # Another product may have other settings: its name says more.
                    await refuse_product(driver, statements, address.text)
                    raise
                await refuse_product(driver, statements, address.text)
                if driver.get_server_version().major >= 17:  # noqa: PLR2004 - the version that brought it
                    await driver.execute(statements("settings_17"))
                found = await driver.fetchrow(statements("facts"))
                facts = Facts(
                    found["version"],
                    found["recovering"],
                    found["pid"],
                    found["fsync"],
                    found["full_page_writes"],
                    Replication(found["names"], tuple(found["followers"])),
                    found["run"],
                )
                driver.process = facts.pid
                driver.timeline = await _timeline(driver, statements, facts)
            except BaseException:
                driver.terminate()
                raise
    except LockError:
        raise
    except Exception as error:
        raise translate(error, address.text, plain=address.plain) from error
    return driver, facts


async def _timeline(driver: Driver, statements: Statements, facts: Facts) -> str:
    """Return the timeline, or the present run of a server that does not tell it: another run may be another server.

    Cancelling it is cancelling :func:`login`.
    """
    try:
        return str(await driver.fetchval(statements("timeline")))
    except asyncpg.PostgresError as error:
        # The role may not call these functions, or a relative of PostgreSQL does not have them.
        if driver.is_closed() or sqlstate(error).startswith(TEMPORARY):
            raise
        return facts.run


async def refuse_product(driver: Driver, statements: Statements, address: str) -> None:
    """Raise :class:`BackendRefused` for a server that is only spoken to as a PostgreSQL; do nothing if it cannot be asked.

    Cancelling it is cancelling :func:`login`.
    """
    try:
        product = str(await driver.fetchval(statements("product")))
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        return
    for name in REFUSED:
        if name in product:
            raise BackendRefused(
                f"{address}: this is {name}, which speaks PostgreSQL's protocol, and whose sessions, notifications and rows "
                "are not those that locks here rely on: connect to a PostgreSQL"
            )


async def primary(address: Address, statements: Statements, settings: Settings) -> Address:
    """Return the address of the host to log in to. Raises :class:`BackendError`; cancelling it leaves no socket behind."""

    async def ask(one: Address) -> Role:
        driver, facts = await login(one, statements, settings)
        driver.terminate()
        return Role(one, facts.recovering, facts.run)

    return await find(address, ask)


def refuse(facts: Facts, address: str) -> None:
    """Raise :class:`BackendRefused` for a server that is no PostgreSQL, too old, or a standby."""
    if not facts.version.startswith("PostgreSQL "):
        raise BackendRefused(f"{address}: this is no PostgreSQL, but {facts.version.split(' ')[0]}")
    if numbers(facts.version)[0] < OLDEST:
        raise BackendRefused(f"{address}: {facts.version.split(',')[0]} is older than {OLDEST}")
    if facts.recovering:
        raise BackendRefused(
            f"{address}: the server is a standby or recovers, and locks taken here do not exclude clients of its primary: "
            "connect to the primary",
            # It may be promoted.
            retryable=True,
        )


def explain(error: BackendError, opened: Sequence[Driver]) -> BackendError:
    """Return the error of a login while these connections are open, or why a pooler that gave one session gave no second one."""
    denied = isinstance(error.__cause__, TimeoutError) or sqlstate(error.__cause__).startswith(
        CONNECTION_DENIED
    )
    if len(opened) != 1 or not opened[0].pooled or not denied:
        return error
    explained = BackendUnavailable(
        f"{error}; {ONE_SESSION}",
    )
    explained.__cause__ = error
    return explained


async def swaps_sessions(one: Driver, other: Driver, statements: Statements) -> bool:
    """Return whether a pooler gives two connections one session of the server, or one connection several.

    Each has a session of its own if there is no pooler, or one that pools whole sessions. Where many programs use a pooler
    that pools transactions, all answers may happen to come from the right sessions; so reads verify it. Whether there is a
    pooler is not known: it may pass on the numbers of the server's processes, as the server would.
    If it is cancelled, the caller has to end both connections.
    """
    # In this order a pooler that takes the next session each time is found out as well.
    answers = [
        await each.fetchval(statements("process")) == each.process for each in (one, other, other, one)
    ]
    return one.process == other.process or not all(answers)


def doubts_commit(message: Any) -> bool:
    """Test whether a message of the server says that a commit may be missing on the standby that it should have waited for.

    By the function of the server that wrote it, because texts are translated, and every other warning is about something else
    (a trigger of an administrator, transaction numbers that run out). A warning without that field, as a proxy may pass it on,
    may be this one.
    """
    function = getattr(message, "server_source_function", None)
    return getattr(message, "severity_en", None) == "WARNING" and function in {None, "", STANDBY_WAIT}


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


class Pipeline:
    """One connection, and the calls that wait for their turn on it.

    Calls that wait go out together, as one statement, when the present one is answered: a commit costs one flush, however
    many edits it has.
    """

    def __init__(
        self,
        driver: Driver,
        execute: Callable[[Driver, Sequence[Any]], Awaitable[Sequence[Any]]],
        address: str,
        timeout: float,
        tasks: TaskSet,
        lost: Callable[[Pipeline, BackendError], None],
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
        self._warning = ""
        self.over = False
        driver.add_log_listener(self._logged)
        driver.add_termination_listener(self._terminated)

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
            self._tasks.spawn(self._work(), "aiolock-postgresql-pipeline")
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
        self._warning = ""
        try:
            if calls[0].statement:
                answers: Sequence[Any] = await self.driver.fetch(*calls[0].statement)
            else:
                answers = await self._execute(self.driver, [item for call in calls for item in call.items])
            if self._warning:
                # The commit may not be on the standby for which it should have waited.
                raise BackendUnavailable(f"{self._address}: {self._warning}")
        except LockError as error:
            self._failed(error, dead=True)
        except Exception as error:  # noqa: BLE001 - any error of the driver
            translated = translate(error, self._address)
            translated.__cause__ = error
            dead = self.driver.is_closed() or not isinstance(error, asyncpg.PostgresError)
            # Where the server takes no writes any more, connecting again finds the one that has taken over.
            dead = dead or sqlstate(error) == READ_ONLY or isinstance(translated, UnsafeBackend)
            self._failed(translated, dead=dead)
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

    def _logged(self, _: Any, message: Any) -> None:
        if doubts_commit(message):
            self._warning = str(message)

    def _terminated(self, _: Any) -> None:
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
                await self.driver.close(timeout=CLOSE_WITHIN)
            except Exception:  # noqa: BLE001 - it is closed then as well
                self.driver.terminate()
        self.end(BackendUnavailable(CLOSED))


class Connections:
    """The two connections of a client, reopened together: one for writes, and one for reads and notifications.

    Two, because a renewal sends a write and a read in one flight. When one of them is lost, the other one is closed: what
    was read on it and what was written before are then distinguished by one border.
    """

    def __init__(
        self,
        address: Address,
        statements: Statements,
        settings: Settings,
        read: Callable[[Driver, Sequence[Any]], Awaitable[Sequence[Any]]],
        write: Callable[[Driver, Sequence[Any]], Awaitable[Sequence[Any]]],
        prepare: Callable[[Driver, Facts], Awaitable[None]],
        interrupted: Callable[[], None],
    ) -> None:
        """Take the functions that carry out reads and writes, that check the server and subscribe, and that report the loss."""
        self._address = address
        self._statements = statements
        self._settings = settings
        self._read, self._write, self._prepare = read, write, prepare
        self._interrupted = interrupted
        self._pipelines: tuple[Pipeline, Pipeline] | None = None
        self._there = asyncio.Event()
        self._error: BackendError | None = None
        self._tasks = TaskSet()
        self._backoff = Backoff(settings.random)
        self._reconnecting: asyncio.Task[None] | None = None
        self.closed = False

    async def open(self) -> None:
        """Open both connections, once; raises why it cannot. Cancelling it leaves nothing open."""
        task = self._tasks.spawn(self._connect(), "aiolock-postgresql-connect")
        try:
            await asyncio.wait([task])
        except BaseException:
            self.closed = True
            task.cancel()
            await asyncio.wait([task])
            raise
        if (refused := task.result()) is not None:
            raise refused

    async def reader(self, deadline: Deadline) -> Pipeline:
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
    def idle(self) -> bool:
        """True if it is connected and nothing is written, so that a write would be sent at once."""
        return self._pipelines is not None and not self._pipelines[1].busy

    def writer(self) -> Pipeline:
        """Return the connection for writes; raises if it was lost, because what is to be written rests on earlier reads."""
        if self._pipelines is None:
            raise self._absent()
        return self._pipelines[1]

    def _absent(self) -> BackendError:
        if self.closed:
            return BackendUnavailable(CLOSED)
        if self._error is not None:
            return copy_of(self._error)
        return BackendUnavailable(f"{self._address.text}: the connection was lost")

    async def _connect(self) -> LockError | None:
        """Open both; return why it cannot."""
        opened: list[Driver] = []
        servers: list[Facts] = []
        try:
            address = await primary(self._address, self._statements, self._settings)
            for _ in range(2):
                driver, facts = await login(address, self._statements, self._settings)
                opened.append(driver)
                servers.append(facts)
                refuse(facts, address.text)
            if servers[0].run != servers[1].run:
                raise BackendUnavailable(
                    f"{address.text}: the connection for reads led to another server than the one for writes: the name is coming "
                    "to mean another server, or several stand behind it"
                )
            try:
                async with asyncio.timeout(self._settings.command_timeout):
                    if await swaps_sessions(opened[0], opened[1], self._statements):
                        raise UnsafeBackend(f"{self._address.text}: {SWAPPED}")
                    await self._prepare(opened[0], servers[0])
                    wait = max(1, min(LOCKED, round(self._settings.command_timeout * 100)))
                    writing = self._statements("writer_settings").replace("{lock_timeout}", str(wait))
                    await opened[1].execute(writing)
            except LockError:
                raise
            except Exception as error:
                raise translate(error, self._address.text) from error
            if self.closed:
                raise BackendUnavailable(CLOSED)
            if any(driver.is_closed() for driver in opened):
                raise BackendUnavailable(f"{self._address.text}: the connection was lost")
        except BaseException as error:
            told = explain(error, opened) if isinstance(error, BackendError) else None
            for driver in opened:
                driver.terminate()
            if told is None:
                raise
            self._error = told
            return told
        reader, writer = (
            Pipeline(
                driver, execute, self._address.text, self._settings.command_timeout, self._tasks, self._lost
            )
            for driver, execute in zip(opened, (self._read, self._write), strict=True)
        )
        self._pipelines, self._error = (reader, writer), None
        self._backoff.reset()
        self._there.set()
        if self._settings.outages is not None:
            self._settings.outages.up(self, self._address.text)
        return None

    def _lost(self, pipeline: Pipeline, error: BackendError) -> None:
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
            self._settings.outages.down(self, self._address.text, error)
        self._interrupted()
        self._begin_reconnecting()

    def _begin_reconnecting(self) -> None:
        task = asyncio.current_task()
        # One that was cancelled by the application with all others would leave a task behind; the next read begins it.
        cancelled = task is not None and task.cancelling() > 0
        if not self.closed and not cancelled and (self._reconnecting is None or self._reconnecting.done()):
            self._reconnecting = self._tasks.spawn(self._reconnect(), "aiolock-postgresql-reconnect")

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
            self._settings.outages.forget(self, self._address.text)
        pipelines, self._pipelines = self._pipelines, None
        if pipelines is not None:
            await asyncio.wait(
                [self._tasks.spawn(pipeline.quit(), "aiolock-postgresql-close") for pipeline in pipelines]
            )
        await end(self._tasks)
