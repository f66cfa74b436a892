"""Locks for synchronous code: a client on an event loop in a thread of its own, shared by all other threads.

::

    import aiolock.portal

    with aiolock.portal.connect("redis://127.0.0.1:6379/0") as client:
        with client.lock("order:42", ttl=10, timeout=2) as lease:
            pay(order=42, fencing_token=lease.token)

Calls run on the loop through anyio's blocking portal (``pip install "python-aiolock[portal]"``). The rules are those of
:mod:`aiolock`, with two differences. A thread cannot be cancelled, so a loss is only reported: by ``lost``, ``check()``,
``wait_lost()``, and by :class:`~aiolock.LockLost` at the end of the block. And there is no re-entrant lock: a pool's
thread serves many callers, and would enter again for the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from threading import Thread, get_ident
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack

from aiolock import client as core
from aiolock.core.forks import OneProcess
from aiolock.errors import ConfigError, LossReason, MissingDriver, shorten
from aiolock.lease import Lease, hold_of
from aiolock.lock import UNSET, Lock, Unset
from aiolock.metrics import Figures
from aiolock.types import Kind, LockInfo
from aiolock.validation import SyncLockOptions, check_options, check_timeout

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

__all__ = ["SyncClient", "SyncLease", "SyncLock", "connect"]

T = TypeVar("T")
L = TypeVar("L", Lock, Lease)


def connect(url: str, /, **options: Any) -> SyncClient:
    """Return a synchronous client for the server at ``url``, to be entered with ``with``; does no I/O before.

    Takes the options of :func:`aiolock.connect`, except ``on_loss``. Raises :class:`MissingDriver` without anyio.
    """
    if "on_loss" in options:
        raise ConfigError(
            'on_loss cannot be chosen here: a thread cannot be cancelled, so it is always "signal"'
        )
    return SyncClient(core.connect(url, on_loss="signal", **options))


class SyncClient:
    """Locks on one server, for any number of threads; made by :func:`connect`, or around a client that is not open.

    May be entered again after its block. An exception that a signal handler raises in a waiting thread
    (``KeyboardInterrupt``) cancels the call on the loop like the cancellation of a task: a lock it has got is released.
    """

    def __init__(self, client: core.Client) -> None:
        try:
            from anyio.from_thread import BlockingPortal  # noqa: PLC0415 - an extra, needed by this class alone
        except ImportError as error:
            raise MissingDriver("anyio", "portal") from error
        if not isinstance(client, core.Client):
            raise ConfigError(f"a synchronous client needs an aiolock.Client, not {shorten(client)}")
        self._client = client
        self._make_portal = BlockingPortal
        self._portal: BlockingPortal | None = None
        self._thread: Thread | None = None
        self._process = OneProcess()
        self.blocks: dict[tuple[str, int], list[SyncLease]] = {}
        """The leases of the open blocks, innermost last, by name of the lock and thread."""

    def __repr__(self) -> str:
        return f"<SyncClient around {self._client!r}>"

    def __enter__(self) -> Self:
        """Start the loop and connect; raises what :meth:`aiolock.Client.open` raises."""
        if self._thread is not None and not self._process.forked:
            raise RuntimeError("this client cannot be entered: it is open already")
        self._process.take_over()
        self.blocks.clear()
        ready: Future[BlockingPortal] = Future()
        self._thread = Thread(target=self._live, args=(ready,), name="aiolock-portal", daemon=True)
        self._thread.start()
        try:
            self._portal = ready.result()
            self.run(self._client.open)
        except BaseException:
            self._portal = ready.result()
            self._stop()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release every lease, wake every waiting thread, close the connections and end the loop and its thread."""
        if self._process.forked:
            # Leases, connections and thread are the parent's.
            return
        try:
            self.run(self._client.aclose)
        finally:
            self._stop()

    def _live(self, ready: Future[BlockingPortal]) -> None:
        async def serve() -> None:
            async with self._make_portal() as portal:
                ready.set_result(portal)
                await portal.sleep_until_stopped()

        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - a thread waits for `ready`
            if not ready.done():
                ready.set_exception(error)

    def _stop(self) -> None:
        portal, self._portal = self._portal, None
        if portal is not None and self._thread is not None:
            portal.call(portal.stop, True)  # noqa: FBT003 - cancels the tasks that still run
            self._thread.join()
        self._thread = None

    def lock(self, name: str, **options: Unpack[SyncLockOptions]) -> SyncLock:
        """Return a mutex; the options are those of :meth:`aiolock.Client.lock`, without ``on_loss``. Does no I/O."""
        check_options("SyncClient.lock", options, SyncLockOptions)
        return SyncLock(self, self._client.lock(name, **options))

    def stats(self) -> Figures:
        """Return the counters of :meth:`aiolock.Client.stats`."""
        return self._client.stats()

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start ``work`` on the client's loop."""
        if self._portal is None:
            raise RuntimeError("this client is not open: enter it with `with`")
        # A child has no copy of the thread with the loop: the call would wait for ever.
        self._process.refuse_fork("client")
        return self._portal.start_task_soon(work)

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` on the client's loop and wait for it; an interruption of this thread cancels it."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()


class _Attempt:
    """One acquire on the loop for a thread that may be interrupted while it waits."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, Lease | None]]) -> None:
        self._ask = ask
        self._lease: Lease | None = None
        self._task: asyncio.Task[Any] | None = None
        self._abandoned = False

    async def run(self) -> Lease | None:
        self._task = asyncio.current_task()
        lease = await self._ask()
        if self._abandoned and lease is not None:
            # anyio does not cancel a task whose awaited result is already there.
            hold_of(lease).abandon()
        self._lease = lease
        return lease

    async def undo(self) -> None:
        """Release the lease, or have it released when it comes."""
        self._abandoned = True
        if self._lease is not None:
            await self._lease.release()

    async def cancel(self) -> None:
        """Undo an attempt whose thread was interrupted before it had a future to cancel."""
        if self._task is not None:
            self._task.cancel()
        await self.undo()


class _Facade(Generic[L]):
    """A lock or lease, as threads use it."""

    __slots__ = ("_client", "_inner")

    def __init__(self, client: SyncClient, inner: L) -> None:
        self._client = client
        self._inner: L = inner

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._inner.name

    @property
    def kind(self) -> Kind:
        """The kind of the lock or hold."""
        return self._inner.kind

    def __repr__(self) -> str:
        return f"<{type(self).__name__} around {self._inner!r}>"


class SyncLock(_Facade[Lock]):
    """A name and options; may be shared between threads, also at the same time."""

    __slots__ = ()

    def acquire(self, timeout: float | Unset | None = UNSET) -> SyncLease:
        """Wait for the lock, as :meth:`aiolock.Lock.acquire`; the caller releases the lease.

        Raises :class:`RuntimeError` inside this very thread's own open block of the same lock.
        """
        if not isinstance(timeout, Unset):
            check_timeout(timeout)
        if self._in_own_block():
            raise RuntimeError(
                f"this thread is inside its own block of lock {shorten(self.name)} and would wait for itself for ever: "
                "pass the lease on"
            )
        lease = self._attempt(lambda: self._inner.acquire(timeout))
        assert lease is not None  # noqa: S101 - `acquire` returns a lease or raises
        return lease

    def try_acquire(self) -> SyncLease | None:
        """Try once: return the lease, or ``None`` if the lock is not free, or taken by a block of this thread."""
        return None if self._in_own_block() else self._attempt(self._inner.try_acquire)

    def __enter__(self) -> SyncLease:
        lease = self.acquire()
        self._client.blocks.setdefault((self.name, get_ident()), []).append(lease)
        return lease

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release; raise :class:`LockLost` if the lease was lost, unless the block ends with an exception of its own."""
        key = self.name, get_ident()
        leases = self._client.blocks[key]
        lease = leases.pop()
        if not leases:
            del self._client.blocks[key]
        lease.__exit__(kind, error, trace)

    def locked(self) -> bool:
        """Return True if the lock is held at this moment."""
        return self._client.run(self._inner.locked)

    def inspect(self) -> LockInfo:
        """Return the holders and the waiters, in order."""
        return self._client.run(self._inner.inspect)

    def force_release(self) -> bool:
        """End all holds of the lock, as :meth:`aiolock.Lock.force_release`."""
        return self._client.run(self._inner.force_release)

    def _in_own_block(self) -> bool:
        leases = self._client.blocks.get((self.name, get_ident()), ())
        return any(lease.waited_for for lease in leases)

    def _attempt(self, ask: Callable[[], Coroutine[Any, Any, Lease | None]]) -> SyncLease | None:
        attempt = _Attempt(ask)
        future: Future[Lease | None] | None = None
        try:
            future = self._client.start(attempt.run)
            lease = future.result()
            return None if lease is None else SyncLease(self._client, lease)
        except BaseException as error:
            if future is None:
                if not isinstance(error, Exception):
                    # The signal arrived inside `start`; the loop may have the work already.
                    self._client.run(attempt.cancel)
            elif future.cancel() or future.exception() is None:
                # The thread was interrupted; the attempt did not fail.
                self._client.run(attempt.undo)
            raise


class SyncLease(_Facade[Lease]):
    """A hold, from the grant to the release or the loss; any thread may use it.

    ``remaining()``, ``held``, ``lost`` and ``check()`` read the local clock, and send nothing.
    """

    __slots__ = ()

    @property
    def token(self) -> int:
        """The fencing token: greater than that of every earlier grant of this name."""
        return self._inner.token

    @property
    def ttl(self) -> float:
        """Seconds for which the server keeps the hold if it is not renewed."""
        return self._inner.ttl

    def remaining(self) -> float:
        """Return the seconds for which the hold is certain; 0 if it is not."""
        return self._inner.remaining()

    @property
    def held(self) -> bool:
        """True if it is certain at this moment that this lease holds the lock."""
        return self._inner.held

    @property
    def lost(self) -> bool:
        """True if the lease ended before it was released."""
        return self._inner.lost

    @property
    def waited_for(self) -> bool:
        """True if another request for the lock would wait for this lease."""
        return hold_of(self._inner).waited_for()

    def check(self) -> None:
        """Raise :class:`LockLost` if the hold is not certain, :class:`RuntimeError` if it was released."""
        self._inner.check()

    def renew(self) -> None:
        """Renew for a full ttl now, as :meth:`aiolock.Lease.renew`."""
        self._client.run(self._inner.renew)

    def release(self, keep: float = 0) -> None:
        """Release the lock, as :meth:`aiolock.Lease.release`; idempotent."""
        self._client.run(lambda: self._inner.release(keep))

    def wait_lost(self, timeout: float | None = None) -> LossReason | None:
        """Wait until the lease ends; return why it was lost, or ``None`` if it was released or after ``timeout`` seconds."""
        seconds = check_timeout(timeout)

        async def wait() -> LossReason | None:
            try:
                async with asyncio.timeout(seconds):
                    return await self._inner.wait_lost()
            except TimeoutError:
                return None

        return self._client.run(wait)

    def __enter__(self) -> Self:
        self.check()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release; raise :class:`LockLost` if the lease was lost, unless the block ends with an exception of its own."""

        async def leave() -> None:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - a coroutine on the loop is run by a task
            # A thread has no task: this one stands for the block, so that the rules of its end are written once.
            hold = hold_of(self._inner)
            hold.enter(task, cancel=False)
            rest = hold.leave(task, error)
            if rest is not None:
                await rest

        self._client.run(leave)
