"""Locks for synchronous code: a client on an event loop in a thread of its own, used by all the others.

::

    import aiolock.portal

    with aiolock.portal.connect("redis://127.0.0.1:6379/0") as client:
        with client.lock("order:42", ttl=10, timeout=2) as lease:
            pay(order=42, fencing_token=lease.token)

Every call travels to the loop and back through anyio's blocking portal (``pip install "python-aiolock[portal]"``). The
rules are those of :mod:`aiolock`, with two differences. A thread cannot be cancelled, so a loss is only told: by
``lost``, ``check()``, ``wait_lost()``, and by :class:`~aiolock.LockLost` at the end of the block. And there is no
re-entrant lock: threads of a pool serve many callers, and the next one would be let in on the hold of the one before.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from threading import Thread, get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from aiolock import client as core
from aiolock.contract import Kind, LockInfo
from aiolock.errors import ConfigError, LossReason, MissingDriver, shorten
from aiolock.figures import Figures
from aiolock.lease import Lease
from aiolock.lock import UNSET, Lock, Unset
from aiolock.options import check_timeout

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

__all__ = ["SyncClient", "SyncLease", "SyncLock", "connect"]

T = TypeVar("T")


def connect(url: str, /, **options: Any) -> SyncClient:
    """A synchronous client for the server at ``url``, to be entered with ``with``; does no I/O before.

    Takes what :func:`aiolock.connect` takes, except ``on_loss``. Raises :class:`MissingDriver` without anyio.
    """
    if "on_loss" in options:
        raise ConfigError(
            'on_loss cannot be chosen here: a thread cannot be cancelled, so it is always "signal"'
        )
    return SyncClient(core.connect(url, on_loss="signal", **options))


class SyncClient:
    """Locks on one server, for any number of threads; made by :func:`connect`, or around a client that is not open.

    It may be entered again after its block.

    An exception that a signal handler raises in a waiting thread (``KeyboardInterrupt``) cancels the call on the loop
    as the cancellation of a task would: whatever it had got is given back.
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
        self._process = os.getpid()
        self.blocks: dict[tuple[str, int], list[SyncLease]] = {}
        """The leases of the open blocks, innermost last, by the name of their lock and their thread."""

    def __repr__(self) -> str:
        return f"<SyncClient around {self._client!r}>"

    def __enter__(self) -> Self:
        """Start the loop and connect; raises what :meth:`aiolock.Client.open` raises."""
        if self._thread is not None and self._process == os.getpid():
            raise RuntimeError("this client cannot be entered: it is open already")
        self._process = os.getpid()
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release every lease, wake every waiting thread, close the connections and end the loop and its thread."""
        if os.getpid() != self._process:
            # All of that is the parent's.
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
        except BaseException as error:  # noqa: BLE001 - without a loop, whoever waits for it must not wait for ever
            if not ready.done():
                ready.set_exception(error)

    def _stop(self) -> None:
        portal, self._portal = self._portal, None
        if portal is not None and self._thread is not None:
            portal.call(portal.stop, True)  # noqa: FBT003 - whatever still runs there is cancelled
            self._thread.join()
        self._thread = None

    def lock(
        self,
        name: str,
        *,
        ttl: float | None = None,
        timeout: float | None = None,
        fair: bool = False,
        max_hold: float | None = None,
        label: str | None = None,
    ) -> SyncLock:
        """Mutual exclusion, with the options of :meth:`aiolock.Client.lock`. Does no I/O."""
        lock = self._client.lock(name, ttl=ttl, timeout=timeout, fair=fair, max_hold=max_hold, label=label)
        return SyncLock(self, lock)

    def stats(self) -> Figures:
        """As :meth:`aiolock.Client.stats`."""
        return self._client.stats()

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Begin ``work`` on the client's loop."""
        if self._portal is None:
            raise RuntimeError("this client is not open: enter it with `with`")
        if os.getpid() != self._process:
            # The thread with the loop has not come along: nobody would ever answer.
            raise RuntimeError("this client was opened before a fork: connect anew in the child")
        return self._portal.start_task_soon(work)

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Have the loop do ``work``, and wait for it; an interruption of this thread cancels it."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()


class _Attempt:
    """One acquire on the loop, for a thread that may be interrupted while it waits for the answer."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, Lease | None]]) -> None:
        self._ask = ask
        self._lease: Lease | None = None
        self._abandoned = False

    async def run(self) -> Lease | None:
        lease = await self._ask()
        if self._abandoned and lease is not None:
            # A cancellation of anyio's does not reach a task that already has its answer.
            lease.abandon()
        self._lease = lease
        return lease

    async def undo(self) -> None:
        """Give back what there is, or what still comes."""
        self._abandoned = True
        if self._lease is not None:
            await self._lease.release()


class SyncLock:
    """A name and options; may be shared between threads, and used by several at the same time."""

    __slots__ = ("_client", "_lock")

    def __init__(self, client: SyncClient, lock: Lock) -> None:
        self._client = client
        self._lock = lock

    @property
    def name(self) -> str:
        """What is locked."""
        return self._lock.name

    @property
    def kind(self) -> Kind:
        """Who may be inside together."""
        return self._lock.kind

    def __repr__(self) -> str:
        return f"<SyncLock around {self._lock!r}>"

    def acquire(self, timeout: float | Unset | None = UNSET) -> SyncLease:
        """Wait until the lock is ours, as :meth:`aiolock.Lock.acquire`; the caller releases the lease.

        Raises :class:`RuntimeError` inside this very thread's own open block of the same lock.
        """
        if not isinstance(timeout, Unset):
            check_timeout(timeout)
        if self._in_own_block():
            raise RuntimeError(
                f"this thread is inside its own block of lock {shorten(self.name)} and would wait for itself for ever: "
                "pass the lease on"
            )
        lease = self._attempt(lambda: self._lock.acquire(timeout))
        assert lease is not None  # noqa: S101 - `acquire` returns a lease or raises
        return lease

    def try_acquire(self) -> SyncLease | None:
        """Ask once: the hold, or ``None`` if the lock is not free at this moment (or taken by this thread's block)."""
        return None if self._in_own_block() else self._attempt(self._lock.try_acquire)

    def __enter__(self) -> SyncLease:
        lease = self.acquire()
        self._client.blocks.setdefault((self.name, get_ident()), []).append(lease)
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release; raise :class:`LockLost` if the lease was lost, unless the block ends with an exception of its own."""
        key = self.name, get_ident()
        leases = self._client.blocks[key]
        lease = leases.pop()
        if not leases:
            del self._client.blocks[key]
        lease.__exit__(kind, error, trace)

    def locked(self) -> bool:
        """Whether anybody holds it at this moment."""
        return self._client.run(self._lock.locked)

    def inspect(self) -> LockInfo:
        """Who holds it and who waits, in order."""
        return self._client.run(self._lock.inspect)

    def force_release(self) -> bool:
        """Take the lock from whoever holds it, as :meth:`aiolock.Lock.force_release`."""
        return self._client.run(self._lock.force_release)

    def _in_own_block(self) -> bool:
        leases = self._client.blocks.get((self.name, get_ident()), ())
        return any(lease.waited_for for lease in leases)

    def _attempt(self, ask: Callable[[], Coroutine[Any, Any, Lease | None]]) -> SyncLease | None:
        attempt = _Attempt(ask)
        future = self._client.start(attempt.run)
        try:
            lease = future.result()
            return None if lease is None else SyncLease(self._client, lease)
        except BaseException:
            if future.cancel() or future.exception() is None:
                # It was this thread that was interrupted, not the attempt that failed.
                self._client.run(attempt.undo)
            raise


class SyncLease:
    """A hold, from the grant to the release or the loss, for whatever thread has it.

    What only looks (``remaining()``, ``held``, ``lost``, ``check()``) reads the clock and asks nobody.
    """

    __slots__ = ("_client", "_lease")

    def __init__(self, client: SyncClient, lease: Lease) -> None:
        self._client = client
        self._lease = lease

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._lease.name

    @property
    def kind(self) -> Kind:
        """What kind of hold this is."""
        return self._lease.kind

    @property
    def token(self) -> int:
        """The fencing token: greater than that of every earlier grant of this name."""
        return self._lease.token

    @property
    def ttl(self) -> float:
        """Seconds for which the server keeps the hold if it is not renewed."""
        return self._lease.ttl

    def remaining(self) -> float:
        """Seconds for which the hold is still certain; 0 when it is not."""
        return self._lease.remaining()

    @property
    def held(self) -> bool:
        """Whether it is certain at this moment that the lock is ours."""
        return self._lease.held

    @property
    def lost(self) -> bool:
        """Whether the lease ended before it was released."""
        return self._lease.lost

    @property
    def waited_for(self) -> bool:
        """Test whether another request for the lock would have to wait for this lease."""
        return self._lease.waited_for

    def check(self) -> None:
        """Raise :class:`LockLost` if it is not certain that we hold the lock, :class:`RuntimeError` if it was released."""
        self._lease.check()

    def renew(self) -> None:
        """Ask the server for a full ttl now, as :meth:`aiolock.Lease.renew`."""
        self._client.run(self._lease.renew)

    def release(self, keep: float = 0) -> None:
        """Give the lock back, as :meth:`aiolock.Lease.release`; idempotent."""
        self._client.run(lambda: self._lease.release(keep))

    def wait_lost(self, timeout: float | None = None) -> LossReason | None:
        """Wait until the lease ends: why it was lost, or ``None`` if it was released or ``timeout`` seconds are over."""
        seconds = check_timeout(timeout)

        async def wait() -> LossReason | None:
            try:
                async with asyncio.timeout(seconds):
                    return await self._lease.wait_lost()
            except TimeoutError:
                return None

        return self._client.run(wait)

    def __enter__(self) -> Self:
        self.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release; raise :class:`LockLost` if the lease was lost, unless the block ends with an exception of its own."""

        async def leave() -> None:
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - a coroutine on the loop is run by a task
            # The thread has no task, so the block becomes one for its last step: the rules of its end are written once.
            self._lease.enter(task, cancel=False)
            rest = self._lease.leave(task, error)
            if rest is not None:
                await rest

        self._client.run(leave)

    def __repr__(self) -> str:
        return f"<SyncLease around {self._lease!r}>"
