"""Lease: what a caller has between acquire and release.

Most of the file is the docstrings of the public methods.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from aiolock.core.backend import Claim
from aiolock.core.cancellation import CancelScope, in_async_generator
from aiolock.core.capabilities import Confirmation, Downgrade, Extension
from aiolock.core.hold import Hold, log, running_task
from aiolock.core.runtime import State
from aiolock.errors import LockLost, LossReason, UnsupportedKind, shorten
from aiolock.types import WRITE, Kind
from aiolock.validation import GRACE, MIN_TTL, check_seconds

__all__ = ["Acquisition", "HoldState", "Lease", "ReleaseRequest", "acquires", "hold_of"]

L = TypeVar("L", bound="Lease")
F = TypeVar("F", bound=Callable[..., Any])


class ReleaseRequest:
    """A request to release a lease, from :attr:`Lease.release_requested`: false until there is one.

    ``await`` waits for it and returns the reason, or ``None`` if the lease ended before; cancelling that changes nothing. In
    another loop or thread than the client's it raises :class:`RuntimeError`.
    """

    __slots__ = ("_hold",)

    def __init__(self, hold: Hold) -> None:
        self._hold = hold

    @property
    def reason(self) -> str | None:
        """The reason of the latest request; ``None`` until there is one."""
        return self._hold.request_reason

    def __bool__(self) -> bool:
        return self.reason is not None

    def __await__(self) -> Generator[Any, None, str | None]:
        hold = self._hold
        if hold.open:
            hold.parent.runtime.guard()
            if self.reason is None:
                watcher, watchers = hold.watch(), hold.rare().request_watchers
                watchers.add(watcher)
                try:
                    yield from watcher
                finally:
                    watchers.discard(watcher)
                    watcher.cancel()
        return self.reason

    def __repr__(self) -> str:
        return f"<ReleaseRequest: {'not asked' if self.reason is None else shorten(self.reason)}>"


class HoldState:
    """The part of a lease that reads the local clock and sends nothing: the same for threads (:mod:`aiolock.portal`)."""

    __slots__ = ()

    _hold: Hold

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._hold.name

    @property
    def kind(self) -> Kind:
        """The kind of hold."""
        return self._hold.kind

    @property
    def token(self) -> int:
        """The fencing token: greater than that of every earlier grant of this name.

        Raises :class:`UnsupportedKind` where there is none: for a lock in the format of another library.
        """
        token = self._hold.token
        if not token:
            raise self._hold.no_token()
        return token

    @property
    def ttl(self) -> float:
        """Seconds for which the server keeps the hold if it is not renewed."""
        return self._hold.ttl

    def remaining(self) -> float:
        """Return the seconds for which the hold is still certain, by the local clock; 0 when it is not.

        Counted from the moment before the last successful request was sent, less a margin and the ``grace`` of the lock.
        """
        return self._hold.remaining()

    @property
    def held(self) -> bool:
        """True while it is certain that the lock is held."""
        return self._hold.remaining() > 0

    @property
    def lost(self) -> bool:
        """True if the lease ended before it was released, as far as is known; the server's answer to the release may say so."""
        return self._hold.lost()

    def check(self) -> None:
        """Raise :class:`LockLost` if it is not certain that the lock is held, :class:`RuntimeError` if it was released.

        Call it before every step that must not be taken without the lock.
        """
        self._hold.check()

    @property
    def depth(self) -> int:
        """The number of levels of the hold that its task has open; 0 once all of them were released.

        Above 1 only where the same task entered again: a re-entrant lock, or a read lock inside its own read block.
        """
        hold = self._hold
        return hold.parent.levels() or int(not hold.released)


class Lease(HoldState):
    """A lock that is held, from the grant to the release or the loss.

    Comes from ``async with lock as lease`` or ``await lock.acquire()``; not made by hand. Every property reads the clock, so
    it is right even if the event loop was stopped. Usable on the loop of its client. A lease that is collected without a
    release is released in the background, with a :class:`ResourceWarning`.
    """

    __slots__ = ("__weakref__", "_hold")

    def __init__(self, hold: Hold) -> None:
        self._hold = hold

    def __del__(self) -> None:
        # In any thread, whenever memory is collected.
        hold = self._hold
        if not hold.released:
            hold.drop()

    # --- ends

    async def wait_lost(self) -> LossReason | None:
        """Wait until the lease ends; return the reason of its loss, or ``None`` if it was released in good order.

        It ends when the release begins, and does not wait for the server's answer. Cancelling it changes nothing.
        """
        hold = self._hold
        if hold.open:
            hold.parent.runtime.guard()
            watcher = hold.watch()
            try:
                await watcher
            finally:
                watcher.cancel()
        return hold.loss

    @property
    def release_requested(self) -> ReleaseRequest:
        """A request to release: false until there is one, with its ``reason``, and awaitable.

        See :meth:`Lock.request_release`. The hold goes on until it is released.
        """
        return ReleaseRequest(self._hold)

    # --- requests to the server

    async def renew(self) -> None:
        """Ask the server for a full ttl now, instead of when the client would do it by itself.

        Raises :class:`TypeError` on a lease with ``renew=False``, which :meth:`extend` is for, :class:`LockLost` if the hold is
        gone, and :class:`BackendError` if that could not be found out; the lease then goes on until its validity ends.
        Cancelling it changes nothing but that the server may have done it.
        """
        hold = self._hold
        runtime = hold.parent.runtime
        runtime.guard()
        self._refuse_life()
        if not hold.open:
            hold.check()
        await runtime.scheduler.renew(hold.validity)
        hold.check()

    def _refuse_life(self) -> None:
        """Raise :class:`TypeError` if the hold is not renewed."""
        if self._hold.validity.claim.request.life != math.inf:
            raise TypeError(
                f"the lease of {shorten(self.name)} was acquired with renew=False, and cannot be renewed: use extend()"
            )

    async def extend(self, seconds: float) -> None:
        """Set the life of a hold with ``renew=False``: from now on it ends after so many seconds, and not after its ttl.

        :param seconds: at least 0.1, and three times the ``grace`` of the lock; fewer than are left make it end earlier.

        Counted from the sending of the request. An earlier end counts at once, a later one when the server has answered. Of
        several requests the last one counts, in whatever order the server receives them. ``max_hold`` stays what it is.

        Raises :class:`TypeError` on a lease that is renewed, :class:`ConfigError` for other numbers,
        :class:`UnsupportedKind` where the server keeps no life of a hold, :class:`LockLost` if the hold is gone, and
        :class:`BackendError` if it is not known whether the server received the request: then the hold ends at the
        earlier of the two times, unless this is called again. Cancelling it stops the waiting, not the request.
        """
        claim, life = self._extensible(seconds)
        hold = self._hold
        hold.check()
        await self._ask(hold.parent.runtime.scheduler.extend(hold.validity, claim, life), "extend")

    def _extensible(self, seconds: float) -> tuple[Extension, float]:
        """Return the claim, and the seconds that it is to be extended by; raise what :meth:`extend` raises before any I/O."""
        hold = self._hold
        runtime, claim = hold.parent.runtime, hold.validity.claim
        runtime.guard()
        if claim.request.life == math.inf:
            raise TypeError(
                f"the lease of {shorten(self.name)} is renewed, and has no end that can be set: acquire it with renew=False"
            )
        life = check_seconds("seconds", seconds, max(MIN_TTL, GRACE * claim.request.grace * (1 - 1e-9)))
        if not isinstance(claim, Extension):
            raise UnsupportedKind(
                "extend()", runtime.backend.name, "the server keeps no life of a hold that could be changed"
            )
        return claim, life

    async def _ask(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Carry out a request about the hold in a task of the client; cancelling this stops the waiting."""
        hold = self._hold
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The caller may be gone, and may have released the hold, before the server has answered.
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        hold.parent.runtime.spawn(_carry_out(hold, work, what, done), f"aiolock-{what}")
        await done
        hold.check()

    async def release(self, keep: float = 0) -> None:
        """Give the lock back, to the next local task or to the server; idempotent.

        With ``keep``, the lock stays taken for that many more seconds, by no holder. Raises nothing if the lease was lost,
        also if the server says so only in answer to this: then ``lost`` is true afterwards, and it is logged and counted.
        Raises nothing if the server cannot be reached: the client goes on trying in the background. Cancelling it stops the
        waiting, not the release.

        Raises :class:`UnsupportedKind` if ``keep`` is asked of a server that cannot.
        """
        hold = self._hold
        runtime = hold.parent.runtime
        if keep != 0:
            keep = check_seconds("keep", keep, 0)
            if "keep" not in runtime.backend.capabilities:
                raise UnsupportedKind("release(keep=…)", runtime.backend.name, "release without keep")
        if hold.released:
            return
        if runtime.state is State.OPEN or runtime.forked:
            runtime.guard()
        await hold.release(keep)

    async def confirm(self, connection: object) -> None:
        """Check, inside your own transaction, that the lock is held; no other task or client enters before it ends.

        :param connection: a connection of your own to the server and the database of the lock, with an open transaction.
            PostgreSQL: one of asyncpg's, or an ``AsyncConnection`` or ``AsyncSession`` of SQLAlchemy's over it. MySQL and
            MariaDB in the ``lease`` mode: one of aiomysql's. SQLite: one of ``sqlite3`` or aiosqlite to the same file.

        What the transaction writes and this check are committed together: a later holder sees all of it, or
        :class:`LockLost` is raised here. Let it be the last statement before the commit, because the row of the lock is
        locked until then: others wait to queue up, and on MySQL and MariaDB this lease cannot be renewed.

        Raises :class:`LockLost` if the lock is not held any more: roll the transaction back. Raises
        :class:`UnsupportedKind` on other servers, :class:`ConfigError` if the connection is to another server,
        :class:`RuntimeError` if no transaction is open on it, :class:`DeadlockDetected` if transactions wait for each other,
        and :class:`BackendError` if it could not be found out, also because the connection has ended, or the transaction has a
        snapshot that is too old (roll it back, and begin it again).
        It ends within the ``command_timeout``, of which the last quarter, at most 2 seconds, is for ending a wait. Cancelling it
        ends the wait as well: the connection is in step, and the transaction open. That takes milliseconds; a connection on
        which the server does not end the wait within that time is closed.
        """
        hold = self._hold
        runtime = hold.parent.runtime
        runtime.guard()
        hold.check()
        advice = "write with a fencing token instead"
        backend = Confirmation[Claim].of(runtime.backend, "confirm() inside a transaction", advice)
        # The next task of this client has to ask the server as well, where it waits for the end of the transaction. So also
        # after a cancellation, which may have come too late for the row.
        hold.validity.left = 0
        hold.validity.note_present(runtime.clock())
        if not await backend.confirm(hold.validity.claim, connection):
            runtime.scheduler.lose(hold.validity, "revoked")
            raise hold.error()

    async def downgrade(self) -> None:
        """Turn this write lease into a read lease, without a moment in which another client can write.

        From the call on it counts as a read lease here. Readers who are next in the queue enter, and so may this task
        (``rwlock.read()`` inside the block is another level of it); tasks of this client that wait to write go on
        waiting. The token stays. Cancelling it stops the waiting, not the downgrade; it can be called again, and returns
        as soon as the server has done it.

        Raises :class:`RuntimeError` if this was never a write lease, :class:`UnsupportedKind` with several Redis servers as one
        (before any I/O: it stays a write lease), :class:`LockLost` if the hold is gone, and
        :class:`BackendError` if it is not known whether the server received it: then readers may have to wait on, and
        it can be called again.
        """
        hold = self._hold
        runtime = hold.parent.runtime
        runtime.guard()
        hold.check()
        if hold.validity.claim.request.kind != WRITE:
            if hold.rare().downgraded:
                return
            raise RuntimeError(
                f"lease of {shorten(self.name)} is no write lease: only those of rwlock(…).write() can be downgraded"
            )
        claim = hold.validity.claim
        if not isinstance(claim, Downgrade):
            advice = "release it, acquire read(), and look again at what you read: another writer may have come between"
            raise UnsupportedKind("downgrade of a write lease", runtime.backend.name, advice)
        if hold.kind == WRITE:
            hold.downgrade()
        await self._ask(_downgrade(hold, claim), "downgrade")

    # --- blocks

    @contextmanager
    def guard(self) -> Iterator[Lease]:
        """Protect another task that works under this lease: ``with lease.guard():`` cancels it on loss.

        The block then raises :class:`LockLost`, by the same rules as ``async with lock``. Does not release.

        Raises :class:`LockLost` at once if the lease is already lost.
        """
        hold, task = self._hold, running_task()
        hold.check()
        hold.parent.runtime.guard()
        # The frames above are this function's and the context manager's.
        apart = in_async_generator(sys._getframe(2), sync=True)  # noqa: SLF001 - the caller decides whether it is cancelled
        scope = CancelScope(task) if apart else hold.scopes().enter(task)
        error: BaseException | None = None
        try:
            yield self
        except BaseException as caught:
            error = caught
            raise
        finally:
            hold.scopes().exit(scope)
            if hold.lost() and (loss := scope.resolve(error, hold.error())) is not None:
                raise loss from error

    async def __aenter__(self) -> Self:
        hold = self._hold
        hold.parent.runtime.guard()
        if hold.task is not None:
            raise RuntimeError(
                f"lease of {shorten(self.name)} was entered already: acquire one for each block"
            )
        hold.check()
        self._begin(apart=in_async_generator(sys._getframe(1)))  # noqa: SLF001 - as in guard
        return self

    def _begin(self, *, apart: bool) -> None:
        """Begin a block of the running task; its loss cancels no task if the block is ``apart``, in an async generator."""
        hold = self._hold
        hold.enter(running_task(), cancel=hold.on_loss == "cancel" and not apart)
        hold.begin_block()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hold.end_block()
        rest = self._hold.leave(running_task(), error)
        if rest is not None:
            await rest

    def __repr__(self) -> str:
        hold = self._hold
        if hold.loss is not None:
            state = f"lost ({hold.loss})"
        elif hold.released:
            state = "released"
        else:
            state = f"{self.remaining():.3f} s"
        return f"<Lease {shorten(self.name)} {self.kind} token={hold.token or '-'} {state}>"

    def __reduce__(self) -> str:
        raise TypeError("a lease cannot be copied or pickled: it is one hold of one process")


class Acquisition(Coroutine[Any, Any, L], Generic[L]):
    """An ``acquire()`` that has not begun: ``await`` it for the lease, or enter it with ``async with``, once.

    ``async with lock.acquire(timeout=2) as lease:`` is a block as ``async with lock`` is: it releases at its end, and a loss
    cancels it. A coroutine in every other respect: it may be run as a task.
    """

    __slots__ = ("_asking", "_lease")

    def __init__(self, asking: Coroutine[Any, Any, L]) -> None:
        self._asking = asking
        self._lease: L
        """The lease of the block."""

    if not TYPE_CHECKING:  # type checkers would miss a forgotten `await`

        def __getattr__(self, name: str) -> Any:
            """Answer as the coroutine: its name, frame and state, which asyncio, anyio and debuggers read."""
            return getattr(self._asking, name)

    def __await__(self) -> Generator[Any, Any, L]:
        return self._asking.__await__()

    def send(self, value: Any, /) -> Any:
        """Go on, as a coroutine does."""
        return self._asking.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception inside, as a coroutine does."""
        return self._asking.throw(*error)

    def close(self) -> None:
        """End it, as a coroutine is ended."""
        self._asking.close()

    async def __aenter__(self) -> L:
        # Determined before the first await, while the caller's frame is still the one above.
        apart = in_async_generator(sys._getframe(1))  # noqa: SLF001 - as in guard
        lease = self._lease = await self._asking
        lease._begin(apart=apart)  # noqa: SLF001 - of this module
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._lease.__aexit__(kind, error, trace)


def acquires(function: F) -> F:
    """Mark a function that returns an :class:`Acquisition` as a coroutine function, for those who ask, such as mocks."""
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(function)
    function._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined] # noqa: SLF001 - what there is
    return function


def hold_of(lease: Lease) -> Hold:
    """Return the hold behind a lease, for other modules of the library."""
    return lease._hold  # noqa: SLF001 - the one way in


async def _downgrade(hold: Hold, claim: Downgrade) -> None:
    hold.parent.runtime.scheduler.learn(hold.validity, await claim.downgrade())


async def _carry_out(
    hold: Hold, work: Coroutine[Any, Any, None], what: str, done: asyncio.Future[None]
) -> None:
    try:
        if hold.open:
            await work
        else:
            # Released or lost since the call: the caller gets the reason.
            work.close()
    except LockLost as error:
        hold.parent.runtime.scheduler.lose(hold.validity, error.reason)
        if not done.done():
            done.set_exception(hold.error())
    except Exception as error:  # noqa: BLE001 - raised in the task that waits for it, whatever a backend raises
        if not done.done():
            done.set_exception(error)
        else:
            extra = {"lock": hold.name}
            log.info("%s of %s was not confirmed: %s", what, shorten(hold.name), error, extra=extra)
    finally:
        if not done.done():
            done.set_result(None)
