"""Connections to a PostgreSQL server: the log-in, the checks of a server and of what stands before it, and the driver's errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import asyncpg

from aiolock.backends.diagnosis import numbers
from aiolock.backends.dial import Dialer
from aiolock.backends.postgresql.errors import READ_ONLY, SWAPPED, TEMPORARY, sqlstate, translate
from aiolock.backends.postgresql.primary import Role, find
from aiolock.backends.postgresql.replication import Replication
from aiolock.backends.postgresql.schema import Statements
from aiolock.backends.postgresql.url import Address
from aiolock.core.backend import Settings
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, LockError, UnsafeBackend

__all__ = [
    "OLDEST",
    "UNTRIED_VERSION",
    "Driver",
    "Facts",
    "connect",
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

LOCKED = 100
"""Milliseconds, at most, for which a write waits for a row that another transaction keeps locked; at most a tenth of the command timeout."""
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

    _warning = ""
    """The last message since :meth:`doubt` that says that a commit may be missing on the standby."""

    def on_end(self, ended: Callable[[], None]) -> None:
        """Call ``ended`` when the connection has ended; from now on, note what :meth:`doubt` returns."""
        self.add_log_listener(self._logged)
        self.add_termination_listener(lambda _: ended())

    def _logged(self, _: Any, message: Any) -> None:
        if doubts_commit(message):
            self._warning = str(message)

    def doubt(self) -> str:
        """Return the warning that a commit may not be on the standby for which it should have waited."""
        warning, self._warning = self._warning, ""
        return warning

    def failure(self, error: Exception, address: str) -> tuple[BackendError, bool]:
        """Return the error of this library for one of the driver's, and whether the connection is of no more use."""
        translated = translate(error, address)
        dead = not isinstance(error, asyncpg.PostgresError) or isinstance(translated, UnsafeBackend)
        # Where the server takes no writes any more, connecting again finds the one that has taken over.
        return translated, dead or sqlstate(error) == READ_ONLY

    async def quit(self, within: float) -> None:
        """Close in good order, within so many seconds; it is closed at once if it is cancelled."""
        await self.close(timeout=within)

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


async def connect(
    address: Address,
    statements: Statements,
    settings: Settings,
    prepare: Callable[[Driver, Facts], Awaitable[None]],
) -> tuple[Driver, Driver]:
    """Return two connections to the primary: one for reads, on which ``prepare`` checks the server and subscribes, and one for writes.

    Raises errors of this library; nothing is left open if it does or is cancelled.
    """
    opened: list[Driver] = []
    servers: list[Facts] = []
    try:
        found = await primary(address, statements, settings)
        for _ in range(2):
            driver, facts = await login(found, statements, settings)
            opened.append(driver)
            servers.append(facts)
            refuse(facts, found.text)
        if servers[0].run != servers[1].run:
            raise BackendUnavailable(
                f"{found.text}: the connection for reads led to another server than the one for writes: the name is coming "
                "to mean another server, or several stand behind it"
            )
        try:
            async with asyncio.timeout(settings.command_timeout):
                if await swaps_sessions(opened[0], opened[1], statements):
                    raise UnsafeBackend(f"{address.text}: {SWAPPED}")
                await prepare(opened[0], servers[0])
                wait = max(1, min(LOCKED, round(settings.command_timeout * 100)))
                await opened[1].execute(statements("writer_settings").replace("{lock_timeout}", str(wait)))
        except LockError:
            raise
        except Exception as error:
            raise translate(error, address.text) from error
    except BaseException as error:
        told = explain(error, opened) if isinstance(error, BackendError) else error
        for driver in opened:
            driver.terminate()
        if told is error:
            raise
        raise told from error
    return opened[0], opened[1]
