"""A lock in the caller's transaction: an advisory lock that is taken on the caller's connection and ends with the transaction.

A first statement finds out to which server and database the connection is, and a second one takes the lock if it is free. If
it is not, the server waits for it, in the order of arrival and with its search for deadlocks. A block leaves a mark in a
setting of the transaction, which goes when the lock goes, so the end of the block finds out.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from datetime import UTC, datetime
from typing import Any

from aiolock.backends.callers import SHORT, Callers, ConnectionLock
from aiolock.backends.postgresql.caller import (
    FAILED,
    NO_LIMIT,
    Interrupted,
    PostgreSQLConnection,
    check_connection,
)
from aiolock.backends.postgresql.errors import sqlstate
from aiolock.backends.postgresql.schema import QUERIES
from aiolock.backends.postgresql.store import PostgreSQLStore
from aiolock.clock import Deadline
from aiolock.core.backend import Request, Settings
from aiolock.errors import BackendUnavailable, ConfigError, LockError
from aiolock.types import Holder, LockInfo, Waiting

__all__ = ["CallerAdvisoryLock", "advisory_key"]

RETRY = (0.05, 0.15)
"""Seconds between tries where the caller's session waits for no lock."""


def advisory_key(database: str, request: Request, namespace: str) -> int:
    """Return the key of an advisory lock: the first 64 bits of a digest, as the server counts them."""
    parts = "\0".join((database, namespace, request.kind.family.value, request.name))
    return int.from_bytes(hashlib.sha256(parts.encode()).digest()[:8], "big", signed=True)


class CallerAdvisoryLock(ConnectionLock):
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
        super().__init__(callers, address, settings)
        self._store, self._request, self._connection = store, request, connection

    def _caller(self) -> PostgreSQLConnection:
        return PostgreSQLConnection(self._store, self._callers, self._connection, self._address)

    async def _take(self, deadline: Deadline, mark: str, *, wait: bool) -> bool:
        """Take the lock."""
        caller, clock = self._caller(), self._settings.clock
        async with asyncio.timeout(deadline.left()):
            [there] = await self._store.ask("place")
        while True:
            asked = clock()
            if await caller.run(self._lock(caller, there, mark), deadline):
                return True
            if not wait:
                return False
            if caller.blocks and clock() - asked < SHORT:
                # Not a Backoff: a server that does not wait has to be polled, and longer pauses would only be late.
                async with asyncio.timeout(deadline.left()):
                    await asyncio.sleep(self._settings.random.uniform(*RETRY))
            caller.blocks = True

    async def _lock(self, caller: PostgreSQLConnection, there: Any, mark: str) -> bool:
        """Check the connection, and take the lock; run by a task of the client."""
        try:
            driver = await caller.check(there)
            if caller.has_snapshot:
                raise ConfigError(
                    f"the transaction on this connection is {caller.isolation}, and would not see what the holder before has "
                    "committed, because its snapshot is older than the lock: begin it as READ COMMITTED (asyncpg: "
                    "connection.transaction(isolation='read_committed'), SQLAlchemy: isolation_level='READ COMMITTED'); or take "
                    "the lock without connection= before the transaction begins"
                )
            key = advisory_key(there["database"], self._request, self._settings.namespace)
            if not caller.blocks:
                answer = await driver.fetchval(QUERIES["try_advisory"], str(key), mark, timeout=NO_LIMIT)
                return answer is not None
            statement = QUERIES["wait_advisory"].format(key=key, mark=mark)
            await caller.wait(lambda: driver.execute(statement, timeout=NO_LIMIT))
        except (LockError, RuntimeError):
            raise
        except Interrupted:
            return False
        except Exception as error:
            raise caller.translated(error, self._request.name) from error
        return True

    async def _keeps(self, mark: str, deadline: Deadline) -> bool:
        """Search for the mark in the settings of the transaction."""
        caller = self._caller()
        return await caller.run(self._find_mark(caller, mark), deadline)

    async def _find_mark(self, caller: PostgreSQLConnection, mark: str) -> bool:
        try:
            driver = await caller.find()
            found = await driver.fetchval(QUERIES["find_mark"], mark, timeout=NO_LIMIT)
        except (RuntimeError, BackendUnavailable):
            # No transaction, or no connection.
            return False
        except Exception as error:
            translated = caller.translated(error, self._request.name)
            if sqlstate(error) == FAILED or caller.gone:
                # The server has given all locks of the transaction back, or of a part of it.
                return False
            raise translated from error
        return found not in {None, "0"}

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
