"""A lock in the caller's transaction: an advisory lock that is taken on the caller's connection and ends with the transaction.

A first statement finds out to which server and database the connection is, and a second one takes the lock if it is free. If
it is not, the server waits for it, in the order of arrival and with its search for deadlocks, behind a savepoint: a caller who
is cancelled, or whose time is over, has the statement cancelled, and the transaction goes back to the savepoint. Then it is
as it was, and without the lock.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import sys
from collections.abc import Coroutine
from datetime import UTC, datetime
from random import uniform
from typing import Any

import asyncpg

from aiolock.backends.callers import SHORT, CallerConnection, CallerLoan, Callers
from aiolock.backends.postgresql.errors import sqlstate, translate
from aiolock.backends.postgresql.statements import QUERIES
from aiolock.backends.postgresql.store import PostgreSQLStore
from aiolock.core.backend import Request, Settings
from aiolock.errors import BackendUnavailable, ConfigError, DeadlockDetected, LockError, shorten
from aiolock.types import Holder, LockInfo, Waiting

__all__ = ["AdvisoryLoan", "PostgreSQLConnection", "advisory_key", "check_connection"]

ENDED = {"55P03", "57014"}
"""The server ended a wait: by a time-out of the caller's session, or because an administrator or this client cancelled it."""
DEADLOCK = "40P01"
FAILED = "25P02"
RETRY = (0.05, 0.15)
"""Seconds between tries where the caller's session waits for no lock."""
NO_LIMIT = 1e6
"""Seconds; the driver's limit for a statement, in place of the one that the caller has set."""
LOOK = 0.5
"""Seconds for which the client's connection is asked whether a statement waits."""


def advisory_key(database: str, request: Request, namespace: str) -> int:
    """Return the key of an advisory lock: the first 64 bits of a digest, as the server counts them."""
    parts = "\0".join((database, namespace, request.kind.family.value, request.name))
    return int.from_bytes(hashlib.sha256(parts.encode()).digest()[:8], "big", signed=True)


# --- the caller's connection


def check_connection(connection: object) -> None:
    """Raise :class:`ConfigError` unless it may be a connection of asyncpg's, or one of SQLAlchemy's over it."""
    if not isinstance(connection, asyncpg.Connection) and not _of_sqlalchemy(connection):
        raise ConfigError(
            "connection must be a connection of asyncpg's, or an AsyncConnection or AsyncSession of SQLAlchemy's, on which you "
            f"began a transaction, not {shorten(connection)}"
        )


def _of_sqlalchemy(connection: object) -> bool:
    # Who has such an object has imported it.
    module: Any = sys.modules.get("sqlalchemy.ext.asyncio")
    return module is not None and isinstance(connection, module.AsyncConnection | module.AsyncSession)


class PostgreSQLConnection(CallerConnection):
    """A connection of a caller; a statement that waits for a lock is cancelled by the driver."""

    def __init__(self, store: PostgreSQLStore, callers: Callers, connection: Any, address: str) -> None:
        super().__init__(callers, connection, address)
        self.driver: Any = None
        """The connection of the driver; known once it was looked for."""
        self.pid = 0
        """The process of the server, once it is known."""
        self._store = store
        self._statement: asyncio.Task[Any] | None = None

    async def find(self) -> Any:
        """Return the connection of the driver, in whose session a transaction is open.

        Raises :class:`RuntimeError` if there is none, :class:`BackendUnavailable` if the connection is closed.
        """
        try:
            self.driver = driver = await self._unwrap()
            closed, begun = driver.is_closed(), driver.is_in_transaction()
        except asyncpg.InterfaceError as error:
            # It went back to its pool.
            raise _unusable(error) from error
        if closed:
            raise BackendUnavailable(
                f"{self._address}: your connection is closed, and the server has rolled its transaction back"
            )
        if not begun:
            raise RuntimeError(
                "no transaction is open on this connection, so it cannot hold a lock: begin one first "
                "(async with connection.transaction())"
            )
        return driver

    async def _unwrap(self) -> Any:
        connection = self.connection
        if isinstance(connection, asyncpg.Connection):
            return connection
        if not connection.in_transaction():
            raise RuntimeError(
                "no transaction is open on this connection or session, so it cannot hold a lock: begin one first "
                "(async with connection.begin())"
            )
        try:
            if not hasattr(connection, "get_raw_connection"):
                connection = await connection.connection()
            driver = (await connection.get_raw_connection()).driver_connection
        except sys.modules["sqlalchemy.exc"].InvalidRequestError as error:
            raise _unusable(error) from error
        if not isinstance(driver, asyncpg.Connection):
            raise ConfigError(f"connection must be one over asyncpg, not over {type(driver).__module__}")
        if not (driver.is_closed() or driver.is_in_transaction()):
            # SQLAlchemy tells the server of a transaction with its first statement.
            await connection.exec_driver_sql("SELECT 1")
        return driver

    async def wait_for(self, work: Coroutine[Any, Any, Any]) -> None:
        """Await a statement that may wait for others; raises :class:`asyncio.CancelledError` if it was interrupted."""
        self._statement = self._callers.spawn(work, "aiolock-loan-wait")
        await asyncio.wait({self._statement})
        self._statement.result()

    async def interrupt(self, left: float) -> None:
        """Cancel the statement once the server waits in it: a request that comes before it has begun is ignored."""
        if self._statement is None or self._statement.done():
            return
        try:
            async with asyncio.timeout(min(left, LOOK)):
                waits = bool(await self._store.ask("waits", self.pid))
        except (LockError, TimeoutError):
            # The client cannot look.
            waits = True
        if waits:
            self._statement.cancel()

    def close(self) -> None:
        """Close the connection."""
        if self.driver is not None:
            self.driver.terminate()


def _unusable(error: Exception) -> RuntimeError:
    return RuntimeError(f"this connection cannot be used now: {error}")


# --- the lock


class AdvisoryLoan(CallerLoan):
    """An advisory lock, and a transaction of the caller that is to have it."""

    def __init__(
        self,
        store: PostgreSQLStore,
        address: str,
        settings: Settings,
        callers: Callers,
        request: Request,
        connection: object,
    ) -> None:
        check_connection(connection)
        super().__init__(callers, address, settings.command_timeout)
        self._store, self._settings, self._request = store, settings, request
        self._connection = connection

    def _caller(self) -> PostgreSQLConnection:
        return PostgreSQLConnection(self._store, self._callers, self._connection, self._address)

    async def _take(self, late: float | None, mark: str, *, wait: bool) -> bool:
        """Take the lock."""
        loop, caller = asyncio.get_running_loop(), self._caller()
        async with asyncio.timeout_at(late):
            [there] = await self._store.ask("place")
        while True:
            asked = loop.time()
            if await caller.run(self._lock(caller, there, mark), late):
                return True
            if not wait:
                return False
            if caller.blocks and loop.time() - asked < SHORT:
                async with asyncio.timeout_at(late):
                    await asyncio.sleep(uniform(*RETRY))
            caller.blocks = True

    async def _lock(self, caller: PostgreSQLConnection, there: Any, mark: str) -> bool:
        """Check the connection, and take the lock; run by a task of the client."""
        try:
            driver = await caller.find()
            [here] = await driver.fetch(QUERIES["place"], timeout=NO_LIMIT)
            if here["place"] != there["place"]:
                raise ConfigError(
                    f"connection must be to the server and the database that the client is connected to ({self._address}), and "
                    f"this one is to another server, or to another database ({shorten(here['database'])}): a lock there would "
                    "exclude no other client"
                )
            caller.pid = here["pid"]
            key = advisory_key(here["database"], self._request, self._settings.namespace)
            if not caller.blocks:
                answer = await driver.fetchval(QUERIES["try_advisory"], key, mark, timeout=NO_LIMIT)
                return answer is not None
            return await self._wait(caller, driver, QUERIES["wait_advisory"].format(key=key, mark=mark))
        except (LockError, RuntimeError):
            raise
        except Exception as error:
            raise self._translated(error) from error

    async def _wait(self, caller: PostgreSQLConnection, driver: Any, statement: str) -> bool:
        """Wait for the lock behind a savepoint; return whether it was granted, and nothing is left of it if not."""
        name = f"aiolock_{secrets.token_hex(8)}"
        await driver.execute(f"SAVEPOINT {name}", timeout=NO_LIMIT)
        failure: BaseException | None = None
        if not caller.leaving:
            try:
                await caller.wait_for(driver.execute(statement, timeout=NO_LIMIT))
            except (asyncpg.PostgresError, asyncio.CancelledError) as error:
                failure = error
        if failure is None and not caller.leaving:
            await driver.execute(f"RELEASE SAVEPOINT {name}", timeout=NO_LIMIT)
            return True
        await driver.execute(f"ROLLBACK TO SAVEPOINT {name}; RELEASE SAVEPOINT {name}", timeout=NO_LIMIT)
        if isinstance(failure, asyncpg.PostgresError) and sqlstate(failure) not in ENDED:
            raise failure
        return False

    async def _keeps(self, mark: str, late: float | None) -> bool:
        """Look for the mark in the settings of the transaction."""
        caller = self._caller()
        return await caller.run(self._look_back(caller, mark), late)

    async def _look_back(self, caller: PostgreSQLConnection, mark: str) -> bool:
        try:
            driver = await caller.find()
            found = await driver.fetchval(QUERIES["look_back"], mark, timeout=NO_LIMIT)
        except (RuntimeError, BackendUnavailable):
            # No transaction, or no connection.
            return False
        except Exception as error:
            if sqlstate(error) == FAILED or caller.driver is None or caller.driver.is_closed():
                # The server has given all locks of the transaction back, or of a part of it.
                return False
            raise self._translated(error) from error
        return bool(found)

    def _translated(self, error: Exception) -> Exception:
        code = sqlstate(error)
        if code == DEADLOCK:
            return DeadlockDetected([self._request.name])
        if code == FAILED:
            return RuntimeError(
                "the transaction of this connection has failed: roll it back, and begin another one"
            )
        if isinstance(error, asyncpg.InterfaceError):
            return _unusable(error)
        return translate(error, self._address)

    async def inspect(self) -> LockInfo:
        """Return the transactions that have the lock, and those that wait for it."""
        request = self._request
        [there] = await self._store.ask("place")
        key = advisory_key(there["database"], request, self._settings.namespace)
        rows = await self._store.ask("advisory", key >> 32 & 0xFFFFFFFF, key & 0xFFFFFFFF)
        holders = tuple(
            Holder(label, token=0, since=datetime.fromtimestamp(since, UTC), remaining=math.inf)
            for granted, label, since in rows
            if granted
        )
        waiters = tuple(Waiting(label) for granted, label, _ in rows if not granted)
        return LockInfo(request.name, holders, waiters, request.kind.family)
