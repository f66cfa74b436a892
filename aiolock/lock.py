"""Asking for a lock: acquire, try_acquire, async with."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from dataclasses import replace
from threading import get_ident
from types import TracebackType
from typing import Any, Final, NoReturn

from aiolock.contract import Bid, Kind, LockInfo, Release
from aiolock.errors import AcquireTimeout, shorten
from aiolock.frames import in_async_generator
from aiolock.lease import Lease, Terms
from aiolock.options import check_reason, check_timeout
from aiolock.queue import ask
from aiolock.runtime import Runtime, State, current_task

__all__ = ["UNSET", "Lock", "Unset"]

Task = asyncio.Task[Any]

_OPEN, _NOT_OURS = State.OPEN, Release.NOT_OURS
"""Looking a member up in its class costs 0.2 µs on Python 3.11."""

_NOBODY: dict[Task, Lease] = {}
"""Of a lock object that nobody has entered yet; nothing is ever put in here."""


class Unset:
    """The default of a parameter for which ``None`` means something."""

    def __repr__(self) -> str:
        return "the lock's own"


UNSET: Final = Unset()


class Lock:
    """A name, a kind and options; does no I/O and has no state of the server's.

    Made by :meth:`Client.lock` and its siblings. May be reused, and shared between tasks, also at the same time.
    """

    __slots__ = ("__weakref__", "_bid", "_entered", "_inside", "_runtime", "_terms", "_timeout")

    def __init__(self, runtime: Runtime, bid: Bid, terms: Terms, timeout: float | None) -> None:
        self._runtime = runtime
        self._bid = bid
        self._terms = terms
        self._timeout = timeout
        kind = bid.kind
        self._inside: dict[str, Any] | None = runtime.inside[kind.family.value] if kind.exclusive else None
        """The leases of the blocks of this family, for kinds that are alone in there."""
        self._entered = _NOBODY
        """The lease of the innermost block that is open through this object, per task."""

    @property
    def name(self) -> str:
        """What is locked."""
        return self._bid.name

    @property
    def kind(self) -> Kind:
        """Who may be inside together."""
        return self._bid.kind

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {shorten(self.name)} {self.kind} ttl={self._bid.ttl:g}>"

    def __reduce__(self) -> str:
        raise TypeError(
            "a lock cannot be copied or pickled: pass its name, and ask the client there for the lock"
        )

    # --- asking

    async def acquire(self, timeout: float | Unset | None = UNSET) -> Lease:
        """Wait until the lock is ours, and return the hold.

        ``timeout`` is how many seconds to wait (``None``: for ever, 0: try once; default: the lock's option).

        Raises :class:`AcquireTimeout` when the time is over, :class:`BackendUnavailable` if the server cannot be
        reached at the first attempt, :class:`BackendRefused` if it says no, and :class:`RuntimeError` inside this
        very task's own open block of the same lock, where waiting would never end. If it raises, also by being
        cancelled, nothing is held, and every trace of the attempt is removed in the background.

        A lease that comes from here tells its loss (``lost``, ``wait_lost()``, ``check()``) and cancels nothing.
        """
        wait = self._timeout if isinstance(timeout, Unset) else check_timeout(timeout)
        lease = await self._ask(wait)
        return self._in_vain(wait) if lease is None else lease

    async def try_acquire(self) -> Lease | None:
        """Ask once: the hold, or ``None`` if the lock is not free at this moment.

        Ends within the client's ``command_timeout``. Raises and cancels as :meth:`acquire` does, but returns
        ``None`` inside this task's own block.
        """
        if self._in_own_block():
            return None
        return await ask(self._runtime, self._bid, self._terms, 0)

    async def __aenter__(self) -> Lease:
        # Looked at before the first await, while the caller's frame is still the one above.
        cancel = self._terms.on_loss == "cancel" and not in_async_generator(sys._getframe(1))  # noqa: SLF001
        lease = await self._ask(self._timeout)
        if lease is None:
            self._in_vain(self._timeout)
        self._enter(lease, cancel=cancel)
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release, and wait for that until the first cancellation; raise :class:`LockLost` if the lease was lost.

        It was lost as well if the server answers the release with "not yours", unless an earlier copy of it may have been
        carried out or the term is over by then. An outer cancellation wins, then an exception of the block, which gets the
        loss as a note.
        """
        # The block may be one of an earlier opening of the client, in the loop of another thread.
        runtime = self._runtime
        task = (current_task(runtime.loop) if get_ident() == runtime.thread else None) or self._task()
        lease = self._leave(task)
        if not lease.quiet(task):
            rest = lease.leave(task, error)
            if rest is not None:
                await rest
        elif (claim := lease.end()) is not None:
            # As `Lease.give_up`, two coroutines less.
            try:
                answer = await claim.release()
            except BaseException as trouble:
                if not runtime.unreleased(claim, trouble, lease):
                    raise
            else:
                if answer is _NOT_OURS and lease.disown():
                    await lease.tell_loss(task, error)

    # --- generations

    def _follow(self) -> Runtime:
        """Return the latest opening of the client, and use it from now on."""
        before = self._runtime
        runtime = self._runtime = before.generations.latest
        if runtime is not before:
            if self._inside is not None:
                self._inside = runtime.inside[self._bid.kind.family.value]
            if self._bid.label == before.label != runtime.label:
                self._relabel(runtime.label)
        return runtime

    def _relabel(self, label: str) -> None:
        """Ask in the name of a process that was forked."""
        self._bid = replace(self._bid, label=label)

    def _guard(self) -> Task | None:
        """Return the running task if the client may be used here, else raise :class:`RuntimeError`."""
        runtime = self._runtime
        if runtime.state is not _OPEN:
            runtime = self._follow()
        return runtime.guard()

    # --- looking

    async def locked(self) -> bool:
        """Whether anybody holds it at this moment, in whatever kind."""
        return (await self.inspect()).locked

    async def inspect(self) -> LockInfo:
        """Who holds it and who waits, in order, as the server sees it at this moment."""
        self._guard()
        return await self._runtime.backend.inspect(self._bid.name, self._bid.kind.family)

    async def force_release(self) -> bool:
        """Take the lock from whoever holds it; whether anybody did. For administrators.

        The holder is told that its lease is lost, and the next waiter gets the lock. This is the one case in which
        two holds can overlap by design; fencing tokens still tell them apart.
        """
        self._guard()
        return await self._runtime.backend.force_release(self._bid.name, self._bid.kind.family)

    async def request_release(self, reason: str = "") -> bool:
        """Ask whoever holds it to let go; whether anybody does.

        The holder sees ``reason`` (at most 256 bytes of printable text) in :attr:`Lease.release_requested`, with its
        next renewal at the latest, and decides. Nothing is taken from anybody; who waits is not asked.

        Raises :class:`UnsupportedKind` on servers that cannot pass it on.
        """
        self._guard()
        text = check_reason(reason)
        return await self._runtime.backend.request_release(self._bid.name, self._bid.kind.family, text)

    # --- blocks

    def _task(self) -> Task:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("locks are entered by tasks, and this code runs outside of one")
        return task

    def _in_own_block(self) -> bool:
        task = self._guard()
        holder = None if self._inside is None else self._inside.get(self._bid.name)
        return holder is not None and holder.entered_by is task and holder.waited_for

    def _level(self) -> Lease | None:
        """Another level of a hold that this task is in already, for kinds that have such."""
        return None

    def _won(self, lease: Lease) -> Lease:
        """What this kind makes of a hold that its task just got."""
        return lease

    def _ask(self, timeout: float | None) -> Coroutine[Any, Any, Lease | None]:
        runtime = self._runtime
        if runtime.state is not _OPEN:
            runtime = self._follow()
        task = runtime.guard()
        inside = self._inside
        if inside and (outer := inside.get(self._bid.name)) and outer.entered_by is task and outer.waited_for:
            raise RuntimeError(
                f"this task is inside its own block of lock {shorten(self.name)} and would wait for itself for ever: "
                "use reentrant_lock(), or pass the lease on"
            )
        return ask(runtime, self._bid, self._terms, timeout)

    def _in_vain(self, timeout: float | None) -> NoReturn:
        self._runtime.stats.timeouts += 1
        raise AcquireTimeout(self._bid.name, timeout or 0.0)

    def _enter(self, lease: Lease, *, cancel: bool) -> None:
        runtime = self._runtime
        task = (current_task(runtime.loop) if get_ident() == runtime.thread else None) or self._task()
        lease.enter(task, cancel=cancel)
        entered = self._entered
        if entered is _NOBODY:
            entered = self._entered = {}
        elif task in entered:
            lease.below = entered[task]
        entered[task] = lease
        inside = self._inside
        if inside is not None:
            name = self._bid.name
            outer = inside.get(name)
            if outer is None or outer.entered_by is not task or not outer.waited_for:
                inside[name] = lease

    def _leave(self, task: Task) -> Lease:
        """The lease of the block that ends; usually of this task, at worst of a task that lent its block away."""
        entered = self._entered
        found = entered.get(task)
        if found is None:
            if not entered:
                raise RuntimeError(f"no block of lock {shorten(self.name)} is open")
            ended = [other for other in entered if other.done()]
            task = ended[-1] if ended else next(reversed(entered))
            found = entered[task]
        lease: Lease = found
        below = lease.below
        if below is None:
            del entered[task]
        else:
            lease.below = None
            entered[task] = below
        inside = self._inside
        if inside is not None and inside.get(self._bid.name) is lease:
            del inside[self._bid.name]
        return lease
