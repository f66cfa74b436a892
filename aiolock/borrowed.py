"""A lock inside a transaction of the caller's own: taken on their connection, gone with their commit or rollback."""

from __future__ import annotations

import secrets
from types import TracebackType

from aiolock.contract import Bid, Kind, Loan, LockInfo
from aiolock.errors import AcquireTimeout, LockLost, shorten
from aiolock.options import check_timeout
from aiolock.runtime import Runtime

__all__ = ["TransactionLock"]


class TransactionLock:
    """Mutual exclusion for the rest of a transaction that the caller has begun and will end.

    Made by ``client.lock(name, connection=...)``. It has no lease: nothing is renewed, no token is handed out, and
    nothing is sent on the connection but to take it, and at the end of an ``async with`` block to see that it is there. The
    end of the block does not give it back: the transaction's ``COMMIT`` or ``ROLLBACK`` does, and whatever else ends the
    transaction. Taking it twice in one transaction is harmless.
    """

    __slots__ = ("_bid", "_connection", "_loan", "_marks", "_runtime", "_timeout")

    def __init__(self, runtime: Runtime, bid: Bid, connection: object, timeout: float | None) -> None:
        self._runtime = runtime
        self._bid = bid
        self._connection = connection
        self._loan: Loan = runtime.backend.borrow(bid, connection)
        self._timeout = timeout
        self._marks: list[str] = []
        """The savepoints of the blocks that were entered, the innermost last."""

    @property
    def name(self) -> str:
        """What is locked."""
        return self._bid.name

    @property
    def kind(self) -> Kind:
        """Who may be inside together."""
        return self._bid.kind

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {shorten(self.name)} {self.kind}>"

    def _guard(self) -> None:
        """Raise :class:`RuntimeError` unless the client may be used here; follow it to its latest opening."""
        latest = self._runtime.generations.latest
        if latest is not self._runtime:
            self._runtime = latest
            self._loan = latest.backend.borrow(self._bid, self._connection)
        latest.guard()

    async def acquire(self, timeout: float | None = None) -> None:
        """Wait until the transaction has the lock.

        :param timeout: seconds to wait; 0 tries once, ``None`` is the lock's own, which is for ever unless it was given
            one.

        Raises :class:`AcquireTimeout` when the time is over, and :class:`DeadlockDetected` if the server has rolled the
        transaction back, because transactions wait for each other or this one is older than what it wants to lock: begin it
        again. Before anything is waited for it raises :class:`RuntimeError` if no transaction is open on the
        connection, :class:`ConfigError` if that is to another server than the client's, :class:`BackendRefused` if it has
        another account, so that the wait could not be ended, and :class:`BackendUnavailable`.

        Cancelling it ends the wait at the server and leaves the transaction as it was, except that a lock which came in
        that moment stays with it until it ends. That takes milliseconds, in which further cancellations wait. If the
        server does not end the wait within 2 seconds, the connection is closed; so it is at the end of the timeout, where
        that is :class:`BackendUnavailable`.
        """
        await self._acquire(self._timeout if timeout is None else check_timeout(timeout))

    async def _acquire(self, wait: float | None, mark: str = "") -> None:
        self._guard()
        if not await self._loan.take(wait, mark):
            self._runtime.stats.timeouts += 1
            raise AcquireTimeout(self.name, wait or 0.0)

    async def try_acquire(self) -> bool:
        """Ask once; whether the transaction has the lock. Raises and cancels as :meth:`acquire` does."""
        self._guard()
        return await self._loan.take(0)

    async def __aenter__(self) -> None:
        """As :meth:`acquire`; with a savepoint behind it, which goes when the lock goes."""
        mark = f"aiolock_{secrets.token_hex(8)}"
        await self._acquire(self._timeout, mark)
        self._marks.append(mark)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See that the transaction has had the lock all the time; it goes on, and so does the lock.

        Raises :class:`LockLost` if it has not: it was committed or rolled back inside the block, by you or by a statement that
        does so implicitly, or back to a savepoint from before the block, or its connection was lost. An exception of the
        block is raised as it is, and nothing is sent. Cancelling it leaves the connection in step.
        """
        mark = self._marks.pop()
        if error is None and not await self._loan.keeps(mark):
            raise LockLost(self.name, "transaction")

    async def locked(self) -> bool:
        """Whether anybody holds it at this moment; asked on the client's own connection."""
        return (await self.inspect()).locked

    async def inspect(self) -> LockInfo:
        """Who holds it and who waits, as far as the server knows; asked on the client's own connection."""
        self._guard()
        return await self._runtime.backend.inspect(self._bid.name, self._bid.kind.family)
