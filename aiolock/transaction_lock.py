"""A lock inside a transaction of the caller's own: taken on their connection, gone with their commit or rollback."""

from __future__ import annotations

import secrets

from aiolock.core.backend import Request
from aiolock.core.cancellation import Task
from aiolock.core.capabilities import CallerLock, TransactionLocks
from aiolock.core.present import told_apart
from aiolock.core.runtime import Runtime
from aiolock.errors import AcquireTimeout, LockLost
from aiolock.lock import NamedLock
from aiolock.types import LockInfo
from aiolock.validation import check_timeout

__all__ = ["TransactionLock"]


class TransactionLock(NamedLock):
    """Mutual exclusion for the rest of a transaction that the caller has begun and will end.

    Made by ``client.lock(name, connection=...)``. It has no lease: nothing is renewed, no token is handed out, and
    nothing is sent on the connection but to take it, and at the end of an ``async with`` block to see that it is there. The
    end of the block does not give it back: the transaction's ``COMMIT`` or ``ROLLBACK`` does, and whatever else ends the
    transaction. Taking it twice in one transaction is harmless.

    On PostgreSQL it is an advisory lock, and excludes other locks with ``connection=`` only: ``client.lock(name)`` without it
    is another lock. On MySQL and MariaDB it is a row of the ``row`` mode, and excludes the other locks of that mode as well.
    """

    __slots__ = ("_connection", "_lock", "_marks", "_timeout")

    def __init__(self, runtime: Runtime, request: Request, connection: object, timeout: float | None) -> None:
        super().__init__(runtime, request)
        self._connection = connection
        self._lock = self._caller_lock(runtime)
        self._timeout = timeout
        self._marks: list[str] = []
        """The marks of the blocks that were entered, the innermost last."""

    def _caller_lock(self, runtime: Runtime) -> CallerLock:
        advice = "connection= is for PostgreSQL, and for MySQL and MariaDB with ?mode=row"
        backend = TransactionLocks.of(runtime.backend, "lock inside a transaction", advice)
        return backend.caller_lock(self._request, self._connection)

    def _guard(self) -> Task | None:
        """Return the running task; raise :class:`RuntimeError` unless the client, at its latest opening, may be used here."""
        latest = self._runtime.generations.latest
        if latest is not self._runtime:
            self._runtime = latest
            self._lock = self._caller_lock(latest)
        return latest.guard()

    async def acquire(self, timeout: float | None = None) -> None:
        """Wait until the transaction has the lock.

        :param timeout: seconds to wait; 0 tries once, ``None`` is the lock's own, which is for ever unless it was given
            one.

        Raises :class:`AcquireTimeout` when the time is over, and :class:`DeadlockDetected` if transactions wait for each other,
        or (MySQL, MariaDB) this one is older than the row that it requests: end the transaction, which MySQL and MariaDB have
        rolled back already, and begin it again. Before anything is waited for it raises :class:`RuntimeError` if no
        transaction is open on the connection, :class:`ConfigError` if that is to another server than the client's (on
        PostgreSQL also to another database), :class:`BackendRefused` if it has another account, so that the wait could not
        be ended (MySQL, MariaDB), and :class:`BackendUnavailable`.

        Cancelling it ends the wait at the server and leaves the transaction as it was, except that a lock which came in
        that moment stays with it until it ends. That takes milliseconds, in which further cancellations wait. If the
        server does not end the wait within 2 seconds, the connection is closed; so it is at the end of the timeout, where
        that is :class:`BackendUnavailable`.
        """
        await self._acquire(self._timeout if timeout is None else check_timeout(timeout))

    async def _acquire(self, wait: float | None, mark: str = "") -> None:
        if not await self._take(wait, mark):
            self._runtime.stats.timeouts_by_template.count("")
            raise AcquireTimeout(self.name, wait or 0.0)

    async def _reach(self, timeout: float | None = None) -> float | None:
        """Connect a lazy client; return what is left of ``timeout``. Cancelling it ends the wait; the attempt goes on."""
        self._guard()
        runtime = self._runtime
        if runtime.connect is not None:
            timeout = await runtime.reach(timeout)
            self._lock = self._caller_lock(runtime)
        return timeout

    async def _take(self, wait: float | None, mark: str = "") -> bool:
        left = await self._reach(wait)
        return await self._lock.take(left, mark)

    async def try_acquire(self, timeout: float | None = 0) -> bool:
        """Wait for at most ``timeout`` seconds (0: ask once, ``None``: for ever); return whether the transaction has the lock.

        Raises and cancels as :meth:`acquire` does, but returns ``False`` when the time is over.
        """
        return await self._take(check_timeout(timeout))

    async def inspect(self) -> LockInfo:
        """Return the transactions that have it and those that wait for it; asked on a connection of the client.

        Raises :class:`BackendError` if the server does not answer. Cancelling it changes nothing.
        """
        await self._reach()
        return told_apart(await self._lock.inspect())

    async def __aenter__(self) -> None:
        """As :meth:`acquire`; with a mark in the transaction behind it, which goes when the lock goes."""
        mark = f"aiolock_{secrets.token_hex(8)}"
        await self._acquire(self._timeout, mark)
        self._marks.append(mark)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """See that the transaction has had the lock all the time; it goes on, and so does the lock.

        Raises :class:`LockLost` if it has not: it was committed or rolled back inside the block, by you or by a statement that
        does so implicitly, or back to a savepoint from before the block, or its connection was lost. An exception of the
        block is raised as it is, and nothing is sent. Cancelling it leaves the connection in step.
        """
        mark = self._marks.pop()
        if error is None and not await self._lock.keeps(mark):
            raise LockLost(self.name, "transaction")
