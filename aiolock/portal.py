"""Locks for synchronous code: a client on an event loop in a thread of its own, shared by all other threads.

::

    import aiolock.portal

    with aiolock.portal.connect("redis://127.0.0.1:6379/0") as client:
        with client.lock("order:42", ttl=10, timeout=2) as lease:
            pay(order=42, fencing_token=lease.token)

Calls run on the loop through anyio's blocking portal (``pip install "python-aiolock[portal]"``). Every kind of lock,
decorator and method of :mod:`aiolock` is here, with the same rules, in which a thread stands for a task. One thing
differs: a thread cannot be cancelled, so a loss is only reported: by ``lost``, ``check()``, ``wait_lost()``, and by
:class:`~aiolock.LockLost` at the end of the block.

One file, because its users read it as one page: each class has the methods of the asynchronous one, with their documentation.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, Self, TypeVar, Unpack, cast

from aiolock import client as core
from aiolock._threads import LoopThread
from aiolock.core.forks import OneProcess
from aiolock.core.hooks import C, Moment, S, check_callback
from aiolock.decorators import Locked, Once, do_once
from aiolock.errors import (
    ConfigError,
    LockLost,
    LossReason,
    MissingDriver,
    UnsupportedKind,
    forgets_arguments,
    shorten,
)
from aiolock.kinds.barrier import Barrier
from aiolock.kinds.election import Campaign, Election
from aiolock.kinds.latch import Latch
from aiolock.kinds.multi import JointLease, LockAll
from aiolock.kinds.multi import lock_all as core_lock_all
from aiolock.kinds.rwlock import RWLock
from aiolock.kinds.semaphore import Semaphore
from aiolock.lease import HoldState, Lease, ReleaseRequest, hold_of
from aiolock.lock import UNSET, Handle, Lock, Unset
from aiolock.metrics import Figures
from aiolock.types import Finding, Kind, Leader, LockEvent, LockInfo
from aiolock.validation import OnError, SyncCampaignOptions, SyncLockOptions, check_options, check_timeout

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = [
    "SyncBarrier",
    "SyncCampaign",
    "SyncClient",
    "SyncElection",
    "SyncJointLease",
    "SyncLatch",
    "SyncLease",
    "SyncLock",
    "SyncLockAll",
    "SyncRWLock",
    "SyncReleaseRequest",
    "SyncSemaphore",
    "connect",
    "lock_all",
]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
I = TypeVar("I", bound=Handle | Lease)  # noqa: E741 - the inner, asynchronous object


ASYNCHRONOUS = "is for connections of asynchronous drivers, which belong to event loops of their own"


@forgets_arguments
def connect(url: str | Sequence[str] | Redis, /, **options: Any) -> SyncClient:
    """Return a synchronous client for the server at ``url``, to be entered with ``with``; does no I/O before.

    Takes the options of :func:`aiolock.connect`, except ``on_loss``. Raises :class:`MissingDriver` without anyio.
    """
    if "on_loss" in options:
        raise ConfigError(
            'on_loss cannot be chosen here: a thread cannot be cancelled, so it is always "signal"'
        )
    return SyncClient(core.connect(url, on_loss="signal", **options))


# --- the client


class SyncClient:
    """Locks on one server, for any number of threads; made by :func:`connect`, or around a client that is not open.

    May be entered again after its block. An exception that a signal handler raises in a waiting thread
    (``KeyboardInterrupt``) cancels the call on the loop like the cancellation of a task: a lock it has got is released.
    """

    def __init__(self, client: core.Client) -> None:
        self._client = client
        try:
            from anyio.from_thread import BlockingPortal  # noqa: PLC0415 - an extra, needed by this class alone
        except ImportError as error:
            raise MissingDriver("anyio", "portal") from error
        if not isinstance(client, core.Client):
            raise ConfigError(f"a synchronous client needs an aiolock.Client, not a {type(client).__name__}")
        self._make_portal = BlockingPortal
        self._loop: LoopThread | None = None
        self._process = OneProcess()

    def __repr__(self) -> str:
        return f"<SyncClient around {self._client!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be copied or pickled: connect anew where it is needed")

    # --- opening and closing

    def open(self) -> Self:
        """Start the loop and connect, as entering ``with`` does; raises what :meth:`aiolock.Client.open` raises.

        Close it with :meth:`close`. A process that forks opens it afterwards, in each child.
        """
        if self._loop is not None and not self._process.forked:
            raise RuntimeError("this client cannot be opened: it is open already")
        self._process.take_over()
        loop = LoopThread(self._make_portal)
        try:
            loop.run(self._client.open, lambda client: client.aclose())
        except BaseException:
            loop.close()
            raise
        self._loop = loop
        return self

    def close(self, timeout: float | None = None) -> None:
        """Close it as :meth:`aiolock.Client.aclose` does; then end the loop and its thread. Idempotent.

        Threads that wait get a :class:`RuntimeError`. In a forked child it does nothing: leases, connections and
        thread are the parent's.
        """
        loop = self._loop
        if loop is None or self._process.forked:
            return
        try:
            loop.run(lambda: self._client.aclose(timeout))
        finally:
            self._loop = None
            loop.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def loop(self) -> LoopThread:
        """The thread with the event loop; :class:`RuntimeError` if the client is not open in this process."""
        if self._loop is None:
            raise RuntimeError("this client is not open: enter it with `with`")
        # A child has no copy of the thread with the loop: the call would wait for ever.
        self._process.refuse_fork("client")
        return self._loop

    # --- locks

    def lock(self, name: str, **options: Unpack[SyncLockOptions]) -> SyncLock:
        """Return a mutex, as :meth:`aiolock.Client.lock`; the options are the same, without ``on_loss``. Does no I/O.

        Raises :class:`UnsupportedKind` with ``connection=``, which is for connections of asynchronous drivers.
        """
        if "connection" in options:
            advice = f"connection= {ASYNCHRONOUS}"
            raise UnsupportedKind("lock inside a transaction", "aiolock.portal", advice)
        check_options("SyncClient.lock", options, SyncLockOptions)
        return SyncLock(self, self._client.lock(name, **options, on_loss="signal"))

    def reentrant_lock(self, name: str, **options: Unpack[SyncLockOptions]) -> SyncLock:
        """Return a lock that the thread that holds it may enter again, as :meth:`aiolock.Client.reentrant_lock`.

        A thread of a pool that forgets a hold lets its next caller in: take it with ``with``.
        """
        check_options("SyncClient.reentrant_lock", options, SyncLockOptions)
        return SyncLock(self, self._client.reentrant_lock(name, **options, on_loss="signal"))

    def rwlock(self, name: str) -> SyncRWLock:
        """Return a read-write lock, as :meth:`aiolock.Client.rwlock`. Does no I/O."""
        return SyncRWLock(self, self._client.rwlock(name))

    def semaphore(
        self, name: str, limit: int, *, permits: int = 1, **options: Unpack[SyncLockOptions]
    ) -> SyncSemaphore:
        """Return a semaphore, as :meth:`aiolock.Client.semaphore`. Does no I/O."""
        check_options("SyncClient.semaphore", options, SyncLockOptions)
        inner = self._client.semaphore(name, limit, permits=permits, **options, on_loss="signal")
        return SyncSemaphore(self, inner)

    def latch(self, name: str, count: int) -> SyncLatch:
        """Return a latch, as :meth:`aiolock.Client.latch`. Does no I/O."""
        return SyncLatch(self, self._client.latch(name, count))

    def barrier(
        self, name: str, parties: int, *, ttl: float | None = None, label: str | None = None
    ) -> SyncBarrier:
        """Return a barrier, as :meth:`aiolock.Client.barrier`. Does no I/O."""
        return SyncBarrier(self, self._client.barrier(name, parties, ttl=ttl, label=label))

    def election(self, name: str, **options: Unpack[SyncCampaignOptions]) -> SyncElection:
        """Return an election, as :meth:`aiolock.Client.election`. Does no I/O."""
        check_options("SyncClient.election", options, SyncCampaignOptions)
        return SyncElection(self, self._client.election(name, **options, on_loss="signal"))

    def locked(self, template: str, **options: Unpack[SyncLockOptions]) -> SyncLocked:
        """Decorate a function: it holds the lock while it runs, as with :meth:`aiolock.Client.locked`.

        The function is made by ``def`` without ``yield``, and keeps its signature and types. Where a framework makes a task
        of it, that decorator stands above this one.
        """
        check_options("SyncClient.locked", options, SyncLockOptions)
        return SyncLocked(self, self._client.locked(template, **options, on_loss="signal"))

    def once(
        self,
        name: str,
        *,
        ttl: float | None = None,
        at_least: float = 0.0,
        max_hold: float | None = None,
        on_error: OnError = "keep",
        at_most: float | None = None,
        label: str | None = None,
    ) -> SyncOnce:
        """Decorate a job that one worker does while the others skip it, as with :meth:`aiolock.Client.once`.

        A thread cannot be cancelled: a job whose lock is lost, or that takes longer than ``max_hold`` or ``at_most``, goes on,
        beside the next worker's, and raises :class:`LockLost` at its end.
        """
        once = self._client.once(
            name,
            ttl=ttl,
            at_least=at_least,
            max_hold=max_hold,
            on_error=on_error,
            at_most=at_most,
            label=label,
        )
        return SyncOnce(self, once)

    # --- callbacks

    def on_acquired(self, callback: C) -> C:
        """Call ``callback`` for each lease that is acquired from now on, as :meth:`aiolock.Client.on_acquired`.

        It runs in the thread of the loop, where it must not call this client: that would wait for itself.
        """
        return self._client.on_acquired(callback)

    def on_released(self, callback: C) -> C:
        """Call ``callback`` when a lease is given back, in the thread of the loop; see :meth:`aiolock.Client.on_released`."""
        return self._client.on_released(callback)

    def on_lost(self, callback: C) -> C:
        """Call ``callback`` when a lease is lost, in the thread of the loop; see :meth:`aiolock.Client.on_lost`.

        No thread of the program is there to be ended: a ``SystemExit`` that it raises is logged, as every error.
        """
        check_callback(Moment.LOST, callback)
        self._client.on_lost(_in_loop_thread(callback))
        return callback

    def on_renewal_failing(self, callback: C) -> C:
        """Call ``callback`` when renewals of a lease begin to fail, in the thread of the loop; see :meth:`aiolock.Client.on_renewal_failing`.

        A ``SystemExit`` that it raises is logged, as by :meth:`on_lost`.
        """
        check_callback(Moment.RENEWAL_FAILING, callback)
        self._client.on_renewal_failing(_in_loop_thread(callback))
        return callback

    def on_skipped(self, callback: S) -> S:
        """Call ``callback`` when a job of :meth:`once` is skipped, in the thread of the loop; see :meth:`aiolock.Client.on_skipped`."""
        return self._client.on_skipped(callback)

    # --- administration

    @property
    def capabilities(self) -> frozenset[str]:
        """The promises of this deployment, as :attr:`aiolock.Client.capabilities`."""
        return self._client.capabilities

    def locks(self, pattern: str = "*") -> list[LockInfo]:
        """List the locks of the namespace that are held or waited for, as :meth:`aiolock.Client.locks`."""
        return self.loop.run(lambda: self._client.locks(pattern))

    def is_current(self, name: str, token: int) -> bool:
        """Return whether a mutex is held under this token, as :meth:`aiolock.Client.is_current`."""
        return self.loop.run(lambda: self._client.is_current(name, token))

    def diagnose(self) -> list[Finding]:
        """Describe this deployment, as :meth:`aiolock.Client.diagnose` does for an open client."""
        return self.loop.run(self._client.diagnose)

    def stats(self) -> Figures:
        """Return the counters of :meth:`aiolock.Client.stats`."""
        return self._client.stats()


def _in_loop_thread(callback: Callable[[LockEvent], object]) -> Callable[[LockEvent], None]:
    """Return a callback that does not end the loop, by which the client would lose every hold."""

    def call(event: LockEvent) -> None:
        try:
            callback(event)
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError("a callback cannot end the program from the thread of the loop") from error

    return call


def inner_client(client: SyncClient) -> core.Client:
    """Return the client whose locks a synchronous client offers to threads."""
    return client._client  # noqa: SLF001 - for exporters, and not for users


class _Facade(Generic[I]):
    """An object of the client, as threads use it."""

    __slots__ = ("_client", "_inner")

    def __init__(self, client: SyncClient, inner: I) -> None:
        self._client = client
        self._inner: I = inner

    @property
    def name(self) -> str:
        """The name under which other processes find the same."""
        return self._inner.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} around {self._inner!r}>"

    def __reduce__(self) -> str:
        return self._inner.__reduce__()

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return self._client.loop.run(work)

    def _until(self, work: Callable[[], Coroutine[Any, Any, T]], timeout: float | None) -> T | None:
        """Run ``work``; ``None`` after ``timeout`` seconds."""
        seconds = check_timeout(timeout)

        async def wait() -> T | None:
            try:
                async with asyncio.timeout(seconds):
                    return await work()
            except TimeoutError:
                return None

        return self._run(wait)


# --- locks


class SyncLock(_Facade[Lock]):
    """A name, a kind and options; may be shared between threads, also at the same time. See :class:`aiolock.Lock`."""

    __slots__ = ()

    @property
    def kind(self) -> Kind:
        """The kind of lock."""
        return self._inner.kind

    def acquire(self, timeout: float | Unset | None = UNSET) -> SyncLease:
        """Wait for the lock, as :meth:`aiolock.Lock.acquire`; the caller releases the lease.

        Raises :class:`RuntimeError` inside this very thread's own open block of the same lock.
        """
        return self._lease(lambda: self._inner.acquire(timeout))

    def try_acquire(self, timeout: float | None = 0) -> SyncLease | None:
        """Wait for at most ``timeout`` seconds: the lease, or ``None`` if the lock was not free by then.

        By default it tries once. ``None`` also inside a block of this thread.
        """
        return self._lease_or_none(lambda: self._inner.try_acquire(timeout))

    def owned(self) -> bool:
        """Return whether this thread is inside a block of the lock, as :meth:`aiolock.Lock.owned`."""

        async def owned() -> bool:
            return self._inner.owned()

        return self._run(owned)

    def __enter__(self) -> SyncLease:
        lease = self._client.loop.run(
            self._inner.__aenter__, lambda _: self._inner.__aexit__(None, None, None)
        )
        return SyncLease(self._client, lease)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release; raise :class:`LockLost` if the lease was lost, unless the block ends with an exception of its own."""
        self._run(lambda: self._inner.__aexit__(None, error, None))

    def locked(self) -> bool:
        """Return whether it is held at this moment, as :meth:`aiolock.Lock.locked`."""
        return self._run(self._inner.locked)

    def inspect(self) -> LockInfo:
        """Return the holders and the waiters, in order."""
        return self._run(self._inner.inspect)

    def force_release(self, token: int | None = None) -> bool:
        """End the holds of the lock, or that of one token, as :meth:`aiolock.Lock.force_release`."""
        return self._run(lambda: self._inner.force_release(token))

    def request_release(self, reason: str = "") -> bool:
        """Ask the holders to release it, as :meth:`aiolock.Lock.request_release`."""
        return self._run(lambda: self._inner.request_release(reason))

    def _lease(self, ask: Callable[[], Coroutine[Any, Any, Lease]]) -> SyncLease:
        return SyncLease(self._client, self._client.loop.run(ask, lambda lease: lease.release()))

    def _lease_or_none(self, ask: Callable[[], Coroutine[Any, Any, Lease | None]]) -> SyncLease | None:
        lease = self._client.loop.run(ask, _release)
        return None if lease is None else SyncLease(self._client, lease)


async def _release(lease: Lease | None) -> None:
    if lease is not None:
        await lease.release()


class SyncRWLock(_Facade[RWLock]):
    """A name with many readers or one writer, as :class:`aiolock.RWLock`."""

    __slots__ = ()

    def read(self, **options: Unpack[SyncLockOptions]) -> SyncLock:
        """Return the lock that many may hold at once while there is no writer."""
        check_options("SyncRWLock.read", options, SyncLockOptions)
        return SyncLock(self._client, self._inner.read(**options, on_loss="signal"))

    def write(self, **options: Unpack[SyncLockOptions]) -> SyncLock:
        """Return the lock that excludes all others; its lease can be downgraded."""
        check_options("SyncRWLock.write", options, SyncLockOptions)
        return SyncLock(self._client, self._inner.write(**options, on_loss="signal"))


class SyncSemaphore(SyncLock):
    """At most ``limit`` permits are held at once, as :class:`aiolock.Semaphore`."""

    __slots__ = ()

    @property
    def limit(self) -> int:
        """The limit that this program names; :meth:`current_limit` asks for the one in force."""
        return self._semaphore.limit

    def current_limit(self) -> int:
        """Return the limit in force, as :meth:`aiolock.Semaphore.current_limit`."""
        return self._run(self._semaphore.current_limit)

    def acquire(self, timeout: float | Unset | None = UNSET, *, permits: int | Unset = UNSET) -> SyncLease:
        """Wait for ``permits`` permits, as :meth:`aiolock.Semaphore.acquire`."""
        return self._lease(lambda: self._semaphore.acquire(timeout, permits=permits))

    def try_acquire(self, timeout: float | None = 0, *, permits: int | Unset = UNSET) -> SyncLease | None:
        """Wait for at most ``timeout`` seconds for ``permits`` permits, as :meth:`aiolock.Semaphore.try_acquire`."""
        return self._lease_or_none(lambda: self._semaphore.try_acquire(timeout, permits=permits))

    def available(self) -> int:
        """Return the number of permits that are not held."""
        return self._run(self._semaphore.available)

    def set_limit(self, limit: int) -> None:
        """Set the number of permits for all users, as :meth:`aiolock.Semaphore.set_limit`."""
        self._run(lambda: self._semaphore.set_limit(limit))

    @property
    def _semaphore(self) -> Semaphore:
        return cast("Semaphore", self._inner)


class SyncLatch(_Facade[Latch]):
    """A count that reaches zero once, as :class:`aiolock.Latch`."""

    __slots__ = ()

    def count_down(self, n: int = 1, *, request_id: str | None = None) -> int:
        """Count down by ``n``, and return what is left, as :meth:`aiolock.Latch.count_down`."""
        return self._run(lambda: self._inner.count_down(n, request_id=request_id))

    def count(self) -> int:
        """Return what is left to count down; 0 once the latch is open."""
        return self._run(self._inner.count)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the count is zero, as :meth:`aiolock.Latch.wait`."""
        self._run(lambda: self._inner.wait(timeout))


class SyncBarrier(_Facade[Barrier]):
    """A barrier that opens when all parties have arrived, as :class:`aiolock.Barrier`."""

    __slots__ = ()

    @property
    def parties(self) -> int:
        """The number of parties that pass together."""
        return self._inner.parties

    def waiting(self) -> int:
        """Return the number of parties inside."""
        return self._run(self._inner.waiting)

    def wait(self, timeout: float | None = None) -> int:
        """Arrive, wait for the others and pass with them, as :meth:`aiolock.Barrier.wait`."""
        return self._run(lambda: self._inner.wait(timeout))


class SyncCampaign(SyncLock):
    """Standing for election: a lock whose lease is the term. Made by :meth:`SyncElection.campaign`."""

    __slots__ = ()

    @property
    def ttl(self) -> float:
        """Seconds after which a term ends that is not renewed."""
        return cast("Campaign", self._inner).ttl


class SyncElection(_Facade[Election]):
    """One leader at a time among all candidates, as :class:`aiolock.Election`."""

    __slots__ = ()

    def campaign(self, *, value: bytes = b"") -> SyncCampaign:
        """Stand for election: ``with election.campaign() as term:`` leads, once elected, until the block ends.

        ``value`` is for :meth:`leader` and :meth:`observe`, as with :meth:`aiolock.Election.campaign`.
        """
        return SyncCampaign(self._client, self._inner.campaign(value=value))

    def resign(self) -> bool:
        """End the terms that were won through this object, as :meth:`aiolock.Election.resign`."""
        return self._run(self._inner.resign)

    def leader(self) -> Leader | None:
        """Return the leader as the server sees it; ``None`` for no leader."""
        return self._run(self._inner.leader)

    def observe(self) -> Iterator[Leader | None]:
        """Iterate over the leader now, and over every change, as :meth:`aiolock.Election.observe`; ends never by itself."""

        async def begin() -> AsyncIterator[Leader | None]:
            return self._inner.observe()

        observer = self._run(begin)

        async def change() -> Leader | None:
            return await anext(observer)

        def changes() -> Iterator[Leader | None]:
            while True:
                yield self._run(change)

        return changes()


def lock_all(*locks: SyncLock | SyncLockAll, timeout: float | Unset | None = UNSET) -> SyncLockAll:
    """Combine several locks of one client, of any kind, as :func:`aiolock.lock_all`: all of them or none.

    Raises :class:`ConfigError` for locks of several clients.
    """
    for lock in locks:
        if not isinstance(lock, SyncLock | SyncLockAll):
            raise ConfigError(f"lock_all must be given locks, such as client.lock(…), not {shorten(lock)}")
    inner = core_lock_all(*(lock._inner for lock in locks), timeout=timeout, on_loss="signal")  # noqa: SLF001 - a lock and several locks are of one module
    return SyncLockAll(locks[0]._client, inner)  # noqa: SLF001 - as above


class SyncLockAll(_Facade[LockAll]):
    """Several locks as one, as :class:`aiolock.LockAll`. Made by :func:`lock_all`."""

    __slots__ = ()

    def acquire(self, timeout: float | Unset | None = UNSET) -> SyncJointLease:
        """Wait for all of them, as :meth:`aiolock.LockAll.acquire`."""
        lease = self._client.loop.run(lambda: self._inner.acquire(timeout), lambda lease: lease.release())
        return SyncJointLease(self._client, lease)

    def try_acquire(self, timeout: float | None = 0) -> SyncJointLease | None:
        """Wait for at most ``timeout`` seconds for all of them, as :meth:`aiolock.LockAll.try_acquire`."""
        lease = self._client.loop.run(lambda: self._inner.try_acquire(timeout), _release)
        return None if lease is None else SyncJointLease(self._client, lease)

    def __enter__(self) -> SyncJointLease:
        lease = self._client.loop.run(
            self._inner.__aenter__, lambda _: self._inner.__aexit__(None, None, None)
        )
        return SyncJointLease(self._client, lease)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release all; raise :class:`LockLost` if one was lost, unless the block ends with an exception of its own."""
        self._run(lambda: self._inner.__aexit__(None, error, None))


# --- leases


class SyncReleaseRequest:
    """A request to release a lease, from :attr:`SyncLease.release_requested`: false until there is one."""

    __slots__ = ("_inner", "_lease")

    def __init__(self, lease: SyncLease, inner: ReleaseRequest) -> None:
        self._lease = lease
        self._inner = inner

    @property
    def reason(self) -> str | None:
        """The reason of the latest request; ``None`` until there is one."""
        return self._inner.reason

    def __bool__(self) -> bool:
        return bool(self._inner)

    def wait(self, timeout: float | None = None) -> str | None:
        """Wait for it: return its reason, or ``None`` if the lease ended before, or after ``timeout`` seconds."""

        async def wait() -> str | None:
            return await self._inner

        return self._lease._until(wait, timeout)  # noqa: SLF001 - a part of the lease

    def __repr__(self) -> str:
        return repr(self._inner)


class SyncLease(HoldState, _Facade[Lease]):
    """A hold, from the grant to the release or the loss; any thread may use it. See :class:`aiolock.Lease`.

    ``remaining()``, ``held``, ``lost`` and ``check()`` read the local clock, and send nothing.
    """

    __slots__ = ("_hold",)

    def __init__(self, client: SyncClient, inner: Lease) -> None:
        super().__init__(client, inner)
        self._hold = hold_of(inner)

    def wait_lost(self, timeout: float | None = None) -> LossReason | None:
        """Wait until the lease ends; return why it was lost, or ``None`` if it was released or after ``timeout`` seconds."""
        return self._until(self._inner.wait_lost, timeout)

    @property
    def release_requested(self) -> SyncReleaseRequest:
        """A request to release: false until there is one, with its ``reason``; ``wait()`` waits for it."""
        return SyncReleaseRequest(self, self._inner.release_requested)

    def renew(self) -> None:
        """Renew for a full ttl now, as :meth:`aiolock.Lease.renew`."""
        self._run(self._inner.renew)

    def extend(self, seconds: float) -> None:
        """Set the life of a hold that is not renewed, as :meth:`aiolock.Lease.extend`."""
        self._run(lambda: self._inner.extend(seconds))

    def release(self, keep: float = 0) -> None:
        """Release the lock, as :meth:`aiolock.Lease.release`; idempotent."""
        self._run(lambda: self._inner.release(keep))

    def confirm(self, connection: object) -> None:
        """Check, inside your own transaction, that the lock is held, as :meth:`aiolock.Lease.confirm`; on SQLite only.

        :param connection: one of ``sqlite3``, to the file of the locks, opened with ``check_same_thread=False``: the thread of
            the client uses it while this one waits.

        Raises what that raises, and :class:`ConfigError` for any other connection.
        """
        import sqlite3  # noqa: PLC0415 - few programs use it, and some Pythons do not have it

        if not isinstance(connection, sqlite3.Connection):
            raise ConfigError(
                f"connection must be one of sqlite3, not {shorten(connection)}: on other servers than SQLite confirm() "
                f"{ASYNCHRONOUS}"
            )
        self._run(lambda: self._inner.confirm(connection))

    def downgrade(self) -> None:
        """Turn this write lease into a read lease, as :meth:`aiolock.Lease.downgrade`."""
        self._run(self._inner.downgrade)

    @contextmanager
    def guard(self) -> Iterator[SyncLease]:
        """Work under this lease in another thread: :class:`LockLost` at the end of the block if it was lost meanwhile.

        Does not release. Raises :class:`LockLost` at once if the lease is already lost.
        """
        self.check()
        try:
            yield self
        except BaseException as error:
            if self.lost and not isinstance(error, LockLost):
                error.add_note(str(self._hold.error()))
            raise
        if self.lost:
            raise self._hold.error()

    def __enter__(self) -> Self:
        self._run(self._inner.__aenter__)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release; raise :class:`LockLost` if the lease was lost, unless the block ends with an exception of its own."""
        self._run(lambda: self._inner.__aexit__(None, error, None))


class SyncJointLease(SyncLease):
    """The lease of several locks, from :func:`lock_all`, with ``parts`` and without a ``token``."""

    __slots__ = ()

    @property
    def token(self) -> int:
        """Each part has a token of its own; this raises :class:`AttributeError`."""
        return cast("JointLease", self._inner).token

    @property
    def parts(self) -> tuple[SyncLease, ...]:
        """The leases, in the order in which they were taken; each with the token of its lock."""
        inner = cast("JointLease", self._inner)
        return tuple(SyncLease(self._client, part) for part in inner.parts)


# --- decorators


def _check_function(function: object, decorator: str) -> None:
    """Refuse what does not run in the calling thread from its call to its end."""
    generates = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if not inspect.isroutine(function) or generates or inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{decorator} must decorate a function made by `def` without `yield`, not {shorten(function)}; a decorator that "
            f"makes something else of the function stands above {decorator}"
        )


class SyncLocked:
    """The decorator of :meth:`SyncClient.locked`."""

    __slots__ = ("_client", "_locked")

    def __init__(self, client: SyncClient, locked: Locked) -> None:
        self._client = client
        self._locked = locked

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with a lock held while it runs."""
        _check_function(function, "locked")
        name = self._locked.template.of_calls(function)

        @functools.wraps(function)
        def run(*args: P.args, **options: P.kwargs) -> R:
            with SyncLock(self._client, self._locked.make(name(args, options))):
                return function(*args, **options)

        return run


class SyncOnce:
    """The decorator of :meth:`SyncClient.once`."""

    __slots__ = ("_client", "_once")

    def __init__(self, client: SyncClient, once: Once) -> None:
        self._client = client
        self._once = once

    def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Return the job, which returns its result, or ``None`` if it was skipped."""
        _check_function(function, "once")

        name = self._once.template.of_calls(function)

        @functools.wraps(function)
        def run(*args: P.args, **options: P.kwargs) -> R | None:
            turn = _Turn(self._client.loop, self._once, self._once.make(name(args, options)))
            if not turn.begin():
                return None
            try:
                result = function(*args, **options)
            except BaseException as error:
                turn.end(error)
                raise
            turn.end(None)
            return result

        return run


class _JobFailed(Exception):
    """Stands for the exception of a job on the loop, where only whether there was one counts."""


class _Turn:
    """One hold of a job: a task on the loop has it, by the rules of :func:`aiolock.decorators.do_once`, until the thread is done."""

    def __init__(self, loop: LoopThread, once: Once, lock: Lock) -> None:
        self._loop = loop
        self._once = once
        self._lock = lock
        self._begun: Future[bool] = Future()
        self._over = asyncio.Event()
        self._error: BaseException | None = None
        """The exception that ended the job in its thread."""
        self._exit: BaseException | None = None
        """The exception of a callback that is to end the program: in the thread that called, not on the loop."""

    async def _do(self) -> None:
        try:
            await do_once(self._once, self._lock, self._wait)
        except (SystemExit, KeyboardInterrupt) as error:
            self._exit = error

    async def _wait(self) -> None:
        self._begun.set_result(True)
        await self._over.wait()
        if isinstance(self._error, Exception):
            raise _JobFailed
        if self._error is not None:
            # The thread was interrupted: that is a cancelled run.
            raise asyncio.CancelledError

    def _ended(self, _: object) -> None:
        if not self._begun.done():
            self._begun.set_result(False)

    def begin(self) -> bool:
        """Return whether the job is this thread's."""
        self._task = self._loop.spawn(self._do)
        self._task.add_done_callback(self._ended)
        try:
            mine = self._begun.result()
        except BaseException:
            # The thread was interrupted.
            self._task.cancel()
            raise
        if not mine:
            self._result()
        return mine

    def _result(self) -> None:
        self._task.result()
        if self._exit is not None:
            raise self._exit

    def end(self, error: BaseException | None) -> None:
        """Release; raise :class:`LockLost` if the hold was lost, or note it in the ``error`` of the job."""
        self._error = error
        self._loop.soon(self._over.set)
        try:
            self._result()
        except LockLost as loss:
            if error is None:
                raise
            error.add_note(str(loss))
        except (_JobFailed, CancelledError):
            if error is None:
                raise
