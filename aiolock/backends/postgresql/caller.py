"""Connections of callers to a PostgreSQL server: find the driver's, see where it leads, and wait behind a savepoint.

A statement that may wait for others is sent behind a savepoint. A caller who is cancelled, or whose time is over, has it
cancelled, and the transaction goes back to the savepoint: it is as it was, and has not failed.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg

from aiolock.backends.callers import CallerConnection, Callers
from aiolock.backends.postgresql.errors import sqlstate, translate
from aiolock.backends.postgresql.schema import QUERIES
from aiolock.backends.postgresql.store import PostgreSQLStore
from aiolock.errors import BackendUnavailable, ConfigError, DeadlockDetected, LockError, shorten

__all__ = ["FAILED", "NO_LIMIT", "Interrupted", "PostgreSQLConnection", "check_connection"]

ENDED = {"55P03", "57014"}
"""The server ended a wait: by a time-out of the caller's session, or because an administrator or this client cancelled it."""
DEADLOCK = "40P01"
FAILED = "25P02"
"""The transaction has failed: only going back is allowed."""
NO_LIMIT = 1e6
"""Seconds; the driver's limit for a statement, in place of the one that the caller has set."""
POLL = 0.5
"""Seconds for which the client's connection is asked whether a statement waits."""


class Interrupted(Exception):
    """A wait was ended before it had its result; the transaction is as it was before."""


def check_connection(connection: object) -> None:
    """Raise :class:`ConfigError` unless it may be a connection of asyncpg's, or one of SQLAlchemy's over it."""
    if not isinstance(connection, asyncpg.Connection) and not _of_sqlalchemy(connection):
        raise ConfigError(
            "connection must be a connection of asyncpg's, or an AsyncConnection or AsyncSession of SQLAlchemy's, on which you "
            f"began a transaction, not {shorten(connection)}"
        )


def _of_sqlalchemy(connection: object) -> bool:
    # A program that has such an object has imported it.
    module: Any = sys.modules.get("sqlalchemy.ext.asyncio")
    return module is not None and isinstance(connection, module.AsyncConnection | module.AsyncSession)


class PostgreSQLConnection(CallerConnection):
    """A connection of a caller; a statement that waits for a lock is cancelled by the driver."""

    def __init__(self, store: PostgreSQLStore, callers: Callers, connection: Any, address: str) -> None:
        super().__init__(callers, connection, address)
        self.driver: Any = None
        """The connection of the driver; known once it was searched for."""
        self.isolation = ""
        """The isolation level of the transaction, once it was checked."""
        self._store = store
        self._pooled: Any = None
        """The connection of SQLAlchemy's, if it is one."""
        self._pid = 0
        self._statement: asyncio.Task[Any] | None = None

    async def find(self) -> Any:
        """Return the connection of the driver, in whose session a transaction is open.

        Raises :class:`RuntimeError` if there is none, :class:`BackendUnavailable` if the connection is closed.
        """
        if self.gone:
            raise self._ended()
        try:
            self.driver = driver = await self._unwrap()
            closed, begun = driver.is_closed(), driver.is_in_transaction()
        except asyncpg.InterfaceError as error:
            # It went back to its pool.
            raise _unusable(error) from error
        if closed:
            raise self._ended()
        if not begun:
            raise RuntimeError(
                "no transaction is open on this connection: begin one first (async with connection.transaction())"
            )
        return driver

    async def _unwrap(self) -> Any:
        connection = self.connection
        if isinstance(connection, asyncpg.Connection):
            return connection
        if not connection.in_transaction():
            raise RuntimeError(
                "no transaction is open on this connection or session: begin one first (async with connection.begin())"
            )
        try:
            if not hasattr(connection, "get_raw_connection"):
                connection = await connection.connection()
            self._pooled = connection
            driver = (await connection.get_raw_connection()).driver_connection
        except sys.modules["sqlalchemy.exc"].InvalidRequestError as error:
            raise _unusable(error) from error
        if not isinstance(driver, asyncpg.Connection):
            raise ConfigError(f"connection must be one over asyncpg, not over {type(driver).__module__}")
        if not (driver.is_closed() or driver.is_in_transaction()):
            # SQLAlchemy begins a transaction at the server with its first statement.
            await connection.exec_driver_sql("SELECT 1")
        return driver

    async def check(self, there: Any) -> Any:
        """Find the connection of the driver, and see that it leads to the place of the client; return it.

        ``there`` is the client's answer to the same question. Raises :class:`ConfigError` for another place.
        """
        driver = await self.find()
        [here] = await driver.fetch(QUERIES["place"], timeout=NO_LIMIT)
        if here["place"] != there["place"]:
            raise ConfigError(
                f"connection must be to the server and the database that the client is connected to ({self._address}), and "
                f"this one is to another server, or to another database ({shorten(here['database'])})"
            )
        self._pid, self.isolation = int(here["pid"]), here["isolation"].upper()
        return driver

    @property
    def has_snapshot(self) -> bool:
        """True if the transaction reads, to its end, only what was committed before its first statement."""
        return self.isolation not in {"READ COMMITTED", "READ UNCOMMITTED"}

    async def wait(self, statement: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Send a statement that may wait for others, behind a savepoint; return its result.

        Raises :class:`Interrupted` if the server, an administrator or the caller ended the wait.
        """
        driver, name = self.driver, f"aiolock_{secrets.token_hex(8)}"
        await driver.execute(f"SAVEPOINT {name}", timeout=NO_LIMIT)
        result: Any = None
        failure: BaseException | None = None
        if not self.leaving:
            self._statement = self._callers.tasks.spawn(statement(), "aiolock-caller-wait")
            await asyncio.wait({self._statement})
            try:
                result = self._statement.result()
            except (asyncpg.PostgresError, asyncio.CancelledError) as error:
                failure = error
        if failure is None and not self.leaving:
            await driver.execute(f"RELEASE SAVEPOINT {name}", timeout=NO_LIMIT)
            return result
        try:
            await driver.execute(f"ROLLBACK TO SAVEPOINT {name}; RELEASE SAVEPOINT {name}", timeout=NO_LIMIT)
        except Exception:
            if isinstance(failure, asyncpg.PostgresError):
                # The connection has ended, and the first error says why.
                raise failure from None
            raise
        if isinstance(failure, asyncpg.PostgresError) and sqlstate(failure) not in ENDED:
            raise failure
        raise Interrupted from failure

    async def interrupt(self, left: float) -> None:
        """Cancel the statement once the server waits in it: a request that comes before it has begun is ignored.

        If this is cancelled, the statement goes on.
        """
        if self._statement is None or self._statement.done():
            return
        try:
            async with asyncio.timeout(min(left, POLL)):
                waits = bool(await self._store.ask("waits", self._pid))
        except (LockError, TimeoutError):
            # The client cannot check.
            waits = True
        if waits:
            self._statement.cancel()

    def close(self) -> None:
        """Close the connection."""
        if self.driver is not None and not self.gone:
            self.driver.terminate()
        self._invalidate()

    @property
    def gone(self) -> bool:
        """True if the connection has ended, or is back in its pool, since it was found."""
        try:
            return self.driver is not None and bool(self.driver.is_closed())
        except asyncpg.InterfaceError:
            return True

    def _invalidate(self) -> None:
        """Have SQLAlchemy take the connection for lost, as it does after an error of a statement of its own."""
        if self._pooled is not None and not self._pooled.closed:
            self._pooled.sync_connection.invalidate()

    def _ended(self) -> BackendUnavailable:
        self._invalidate()
        return BackendUnavailable(
            f"{self._address}: your connection is closed, and the server has rolled its transaction back"
        )

    def translated(self, error: Exception, name: str) -> Exception:
        """Return the error of this library for one of the driver's, about the lock ``name``."""
        if getattr(error, "severity_en", "") in {"FATAL", "PANIC"}:
            # The last that the server sends on it.
            self.close()
        if self.gone:
            return self._ended()
        code = sqlstate(error)
        if code == DEADLOCK:
            return DeadlockDetected([name])
        if code == FAILED:
            return RuntimeError(
                "the transaction of this connection has failed: roll it back, and begin another one"
            )
        if isinstance(error, asyncpg.InterfaceError):
            return _unusable(error)
        return translate(error, self._address)


def _unusable(error: Exception) -> RuntimeError:
    return RuntimeError(f"this connection cannot be used now: {error}")
