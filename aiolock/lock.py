"""Lock: acquire, try_acquire, async with."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from threading import get_ident
from types import TracebackType
from typing import Any, Final, NoReturn

from aiolock.core.backend import Request
from aiolock.core.cancellation import Task, in_async_generator
from aiolock.core.capabilities import Administration
from aiolock.core.hold import BLOCKS, Hold, LeaseOptions
from aiolock.core.local_queue import ask
from aiolock.core.present import told_apart
from aiolock.core.runtime import Runtime, State, current_task
from aiolock.errors import AcquireTimeout, shorten
from aiolock.lease import Acquisition, Lease, acquires
from aiolock.types import Kind, LockInfo
from aiolock.validation import check_reason, check_timeout, check_token

__all__ = ["UNSET", "Handle", "Lock", "NamedLock", "Unset", "of_another_task"]

_NO_LEASES: dict[Task, tuple[Lease, ...]] = {}
"""The leases of a lock object that has not been entered yet; never changed."""


Ask = Callable[[float | None], Coroutine[Any, Any, Hold | None]]
"""Asks for a hold within so many seconds."""


class Unset:
    """The default of a parameter for which ``None`` means something."""

    def __repr__(self) -> str:
        return "the lock's own"


UNSET: Final = Unset()


class Handle:
    """A named object of a client, such as a lock or a latch; it cannot leave its process."""

    __slots__ = ()

    _noun = "lock"
    """The object in messages."""

    @property
    def name(self) -> str:
        """The name under which other processes find the same."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {shorten(self.name)}>"

    def __reduce__(self) -> str:
        raise TypeError(
            f"{'an' if self._noun[0] in 'aeiou' else 'a'} {self._noun} cannot be copied or pickled: pass its name, and ask "
            f"the client there for the {self._noun}"
        )


class NamedLock(Handle):
    """A lock of a client by its name and kind: the part that is the same with a lease and inside a transaction."""

    __slots__ = ("_request", "_runtime")

    def __init__(self, runtime: Runtime, request: Request) -> None:
        self._runtime = runtime
        self._request = request

    @property
    def name(self) -> str:
        """The name of the lock."""
        return self._request.name

    @property
    def kind(self) -> Kind:
        """The kind of lock."""
        return self._request.kind

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {shorten(self.name)} {self.kind}>"

    def _guard(self) -> Task | None:
        """Return the running task if the client may be used here, else raise :class:`RuntimeError`."""
        raise NotImplementedError

    async def locked(self) -> bool:
        """Return whether it is held at this moment, in any kind; asked on a connection of the client.

        Raises and cancels as :meth:`inspect` does.
        """
        return (await self.inspect()).locked

    async def inspect(self) -> LockInfo:
        """Return the holders and the waiters, in order, as the server sees them; asked on a connection of the client.

        Raises :class:`BackendError` if the server does not answer, and :class:`UnsupportedKind` if it cannot be asked.
        Cancelling it changes nothing.
        """
        self._guard()
        backend = Administration.of(self._runtime.backend, "inspection")
        await self._runtime.reach()
        return told_apart(await backend.inspect(self._request.name, self._request.kind.family))


class Lock(NamedLock):
    """A name, a kind and options; does no I/O and has no state of the server's.

    Made by :meth:`Client.lock` and its siblings. May be reused, and shared between tasks, also at the same time.
    """

    __slots__ = ("__weakref__", "_entered", "_inside", "_options", "_timeout")

    def __init__(
        self, runtime: Runtime, request: Request, options: LeaseOptions, timeout: float | None
    ) -> None:
        super().__init__(runtime, request)
        self._options = options
        self._timeout = timeout
        kind = request.kind
        self._inside = BLOCKS.of(runtime)[kind.family.value] if kind.exclusive else None
        """The holds of the blocks of this family, for exclusive kinds."""
        self._entered = _NO_LEASES
        """The leases of the blocks that are open through this object, per task, innermost last."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {shorten(self.name)} {self.kind} ttl={self._request.ttl:g}>"

    # --- asking

    @acquires
    def acquire(self, timeout: float | Unset | None = UNSET) -> Acquisition[Lease]:
        """Wait until this task has the lock: ``await`` it for the hold, or enter it with ``async with`` as the lock itself.

        ``timeout`` is how many seconds to wait (``None``: for ever, 0: try once; default: the lock's option).

        Raises :class:`AcquireTimeout` when the time is over, :class:`BackendUnavailable` if the server cannot be reached at the
        first attempt within the ``command_timeout``, or when a shorter time is over and the server is known to be away,
        :class:`BackendRefused` if the server refuses, :class:`UnsafeBackend` if another version of the library wrote the lock's
        data, and :class:`RuntimeError` inside this very task's own open block of the same lock, where waiting would never end. If
        it raises, also by being cancelled, nothing is held, and every trace of the attempt is removed in the background.

        A lease that was awaited reports its loss (``lost``, ``wait_lost()``, ``check()``) and cancels nothing.
        """
        return Acquisition(self._acquire(timeout, self._ask))

    async def _acquire(self, timeout: float | Unset | None, asking: Ask) -> Lease:
        wait = self._timeout if isinstance(timeout, Unset) else check_timeout(timeout)
        hold = await asking(wait)
        return self._in_vain(wait) if hold is None else Lease(hold)

    async def try_acquire(self, timeout: float | None = 0) -> Lease | None:
        """Wait for at most ``timeout`` seconds: the hold, or ``None`` if the lock was not free by then.

        With 0, the default, it asks once and joins no queue, and ends within the client's ``command_timeout``; ``None`` waits
        for ever. Raises and cancels as :meth:`acquire` does, but returns ``None`` when the time is over, and at once inside
        this task's own block.
        """
        hold = await self._try(check_timeout(timeout))
        return None if hold is None else Lease(hold)

    def owned(self) -> bool:
        """Return whether the running task is inside a block of this lock whose hold is certain; sends nothing.

        A block of any lock object of the same name and kind counts, until its lease is released or lost. A re-entrant lock
        counts what the task got by :meth:`acquire` without a block as well. ``False`` outside of a task.
        """
        task = self._guard()
        return task is not None and self._owned(task)

    async def __aenter__(self) -> Lease:
        # Determined before the first await, while the caller's frame is still the one above.
        cancel = self._options.on_loss == "cancel" and not in_async_generator(sys._getframe(1))  # noqa: SLF001
        hold = await self._ask(self._timeout)
        if hold is None:
            self._in_vain(self._timeout)
        return self._enter(hold, cancel=cancel)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release, and wait for that until the first cancellation; raise :class:`LockLost` if the lease was lost.

        It was lost as well if the server answers the release with "not held", unless an earlier copy of it may have been
        carried out or the hold has ended by its ttl. An outer cancellation wins, then an exception of the block, which gets the
        loss as a note.
        """
        # The block may be one of an earlier opening of the client, in the loop of another thread.
        runtime = self._runtime
        task = (current_task(runtime.loop) if get_ident() == runtime.thread else None) or self._task()
        # The lease is kept until its hold has ended: one that is collected before that counts as dropped.
        lease = self._leave(task)
        rest = lease._hold.leave(task, error)  # noqa: SLF001 - its own class
        if rest is not None:
            await rest

    # --- generations

    def _follow(self) -> Runtime:
        """Return the latest opening of the client, and use it from now on."""
        before = self._runtime
        runtime = self._runtime = before.generations.latest
        if runtime is not before:
            if self._inside is not None:
                self._inside = BLOCKS.of(runtime)[self._request.kind.family.value]
            if before.caller != runtime.caller:
                self._move(before.caller, runtime.caller)
        return runtime

    def _move(self, before: str, caller: str) -> None:
        """Name another process in requests from now on: the client was opened again, in one that was forked."""
        label = self._request.label.removeprefix(before)
        self._request = replace(self._request, label=f"{caller}{label}")

    def _guard(self) -> Task | None:
        """Return the running task if the client may be used here, else raise :class:`RuntimeError`."""
        runtime = self._runtime
        if runtime.state is not State.OPEN:
            runtime = self._follow()
        return runtime.guard()

    # --- administration

    async def force_release(self, token: int | None = None) -> bool:
        """Take the lock from its holders; return whether there was one. For administrators.

        The loss of their leases is reported to them, and the next waiter gets the lock. This is the one case in which
        two holds can overlap by design; fencing tokens still distinguish them.

        :param token: take it only from the hold that has this token, as :meth:`Client.is_current` decides: who holds it by now under
            another token, and the queue, stay as they are, also if the hold ends at the same moment. A later lease of the same
            client under the same hold is ended with it until a renewal has reported it to the server. A kept lock has no token.

        Raises :class:`BackendError` if the server does not answer, :class:`ConfigError` if ``token`` is no token, and with one
        :class:`UnsupportedKind`, before any I/O, where the server does not know the tokens of holders (quorum, MySQL with
        ``?mode=session`` or ``?mode=row``). Cancelling it leaves it open whether the server received it; it may be called again.
        """
        self._guard()
        backend = self._check_force(token)
        await self._runtime.reach()
        return await backend.force_release(self._request.name, self._request.kind.family, token)

    def _check_force(self, token: int | None) -> Administration:
        """Return the part of the backend that releases by force, if it can do that by ``token``, else raise. No I/O."""
        backend = Administration.of(self._runtime.backend, "force_release")
        if token is not None:
            check_token(token)
            backend.check_tokens("force_release(token=)", "without a token, all holds of the lock are ended")
        return backend

    async def request_release(self, reason: str = "") -> bool:
        """Ask the holders to release it; return whether there is one.

        A holder sees ``reason`` (at most 256 bytes of printable text) in :attr:`Lease.release_requested`, with its
        next renewal at the latest, and decides. Nothing is taken from it; waiters are not asked.

        Raises :class:`UnsupportedKind` on servers that cannot pass it on, and :class:`BackendError` if the server does not
        answer. Cancelling it leaves it open whether the server received it; it may be called again.
        """
        self._guard()
        text = check_reason(reason)
        backend = Administration.of(self._runtime.backend, "request_release")
        await self._runtime.reach()
        return await backend.request_release(self._request.name, self._request.kind.family, text)

    # --- blocks

    def _task(self) -> Task:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("locks are entered by tasks, and this code runs outside of one")
        return task

    def _owned(self, task: Task) -> bool:
        """Test whether ``task`` is inside."""
        holder = None if self._inside is None else self._inside.get(self._request.name)
        return holder is not None and holder.task is task and holder.waited_for()

    def _in_own_block(self) -> bool:
        """Test whether a request of the running task would wait for that task itself."""
        task = self._guard()
        return task is not None and self._owned(task)

    def _level(self) -> Hold | None:
        """Return another level of a hold that this task is in already, for kinds that have levels."""
        return None

    def _won(self, hold: Hold) -> Hold:
        """Prepare a hold that the running task just got, as this kind needs it."""
        return hold

    async def _try(self, timeout: float | None) -> Hold | None:
        """Wait for at most ``timeout`` seconds, unless the running task is inside its own block; cancelling it leaves nothing held."""
        return (
            None if self._in_own_block() else await ask(self._runtime, self._request, self._options, timeout)
        )

    def _ask(self, timeout: float | None) -> Coroutine[Any, Any, Hold | None]:
        runtime = self._runtime
        if runtime.state is not State.OPEN:
            runtime = self._follow()
        task = runtime.guard()
        inside = self._inside
        if inside and (outer := inside.get(self._request.name)) and outer.task is task and outer.waited_for():
            raise RuntimeError(
                f"this task is inside its own block of lock {shorten(self.name)} and would wait for itself for ever: "
                "use reentrant_lock(), or pass the lease on"
            )
        return ask(runtime, self._request, self._options, timeout)

    def _in_vain(self, timeout: float | None) -> NoReturn:
        self._runtime.stats.timeouts_by_template.count(self._options.template)
        request = self._request
        raise AcquireTimeout(request.name, timeout or 0.0, self._runtime.backend.obstacle(request))

    def _enter(self, hold: Hold, *, cancel: bool) -> Lease:
        """Begin the block of the running task; return its lease."""
        lease = Lease(hold)
        task = current_task(self._runtime.loop) or self._task()
        hold.enter(task, cancel=cancel)
        entered = self._entered
        if entered is _NO_LEASES:
            entered = self._entered = {}
        entered[task] = (*entered[task], lease) if task in entered else (lease,)
        inside = self._inside
        if inside is not None:
            name = self._request.name
            outer = inside.get(name)
            if outer is None or outer.task is not task or not outer.waited_for():
                inside[name] = hold
        return lease

    def _leave(self, task: Task) -> Lease:
        """Return the lease of the block that ends; usually of this task, else of the task that most likely lent its block away."""
        entered = self._entered
        found = entered.get(task)
        if found is None:
            if not entered:
                raise RuntimeError(f"no block of lock {shorten(self.name)} is open")
            task, guessed = of_another_task(entered)
            found = entered[task]
            found[-1]._hold.rare().guessed = guessed  # noqa: SLF001 - its own class
        lease = found[-1]
        if len(found) > 1:
            entered[task] = found[:-1]
        else:
            del entered[task]
        inside = self._inside
        if inside is not None and inside.get(self._request.name) is lease._hold:  # noqa: SLF001 - as above
            del inside[self._request.name]
        return lease


def of_another_task(entered: Mapping[Task, Sequence[Lease]]) -> tuple[Task, bool]:
    """Return the task whose innermost block ends where a task leaves that entered none, and whether that is a guess.

    It is none if a single block is open. Otherwise the latest task that has ended is taken: it cannot leave its blocks itself.
    """
    ended = [other for other in entered if other.done()]
    task = ended[-1] if ended else list(entered)[-1]
    return task, len(entered) > 1 or len(entered[task]) > 1
