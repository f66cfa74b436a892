"""Semaphore: a limited number of permits, each of them leased."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from aiolock.core.cancellation import Task
from aiolock.core.capabilities import Administration
from aiolock.core.hold import Hold
from aiolock.core.local_queue import LocalQueue, ask
from aiolock.core.runtime import State
from aiolock.errors import ConfigError, shorten
from aiolock.lease import Acquisition, Lease, acquires
from aiolock.lock import UNSET, Lock, Unset
from aiolock.types import Kind, permits
from aiolock.validation import check_count, check_timeout

__all__ = ["Semaphore", "kind_of"]


class Semaphore(Lock):
    """At most ``limit`` permits are held at once. Made by :meth:`Client.semaphore`.

    Every permit is leased: those of a holder that died come back after its ttl. Requests are granted in order, so one for
    many permits waits at the head until there are enough, and is not starved by requests for few. A task may take permits
    inside its own block; a request that needs permits which the task itself holds waits until its timeout. ``async with
    semaphore`` takes the permits that the semaphore was made with, ``async with semaphore.acquire(permits=3)`` another number.

    The limit is that of the first user of the name; requests with another one raise :class:`ConfigError`, and
    :meth:`set_limit` changes it.
    """

    __slots__ = ()

    @property
    def limit(self) -> int:
        """The limit that this program names; :meth:`current_limit` asks for the one in force."""
        return self._request.kind.limit

    async def current_limit(self) -> int:
        """Return the limit in force: that of the first user, or the one that was set since; 0 while it is paused.

        Where no client uses the semaphore, and none is known at the server, it is the limit that this program names. Ends
        within the client's ``command_timeout``; cancelling it changes nothing. Raises :class:`UnsupportedKind` on servers
        without semaphores.
        """
        info = await self.inspect()
        return self.limit if info.limit is None else info.limit

    @acquires
    def acquire(
        self, timeout: float | Unset | None = UNSET, *, permits: int | Unset = UNSET
    ) -> Acquisition[Lease]:
        """Wait for ``permits`` permits: ``await`` it for the hold of all of them, or enter it with ``async with``.

        ``timeout`` is in seconds (``None``: no limit, 0: try once; default: the semaphore's option). ``permits`` is as many
        as the semaphore was made with, unless it is given.

        Raises :class:`ConfigError` if ``permits`` is more than :attr:`limit`, or the server knows another limit; otherwise as
        :meth:`Lock.acquire`. If :meth:`set_limit` left fewer permits, it waits. If it raises, also by being cancelled, nothing is
        held.
        """
        return Acquisition(self._acquire(timeout, partial(self._ask, count=permits)))

    async def try_acquire(self, timeout: float | None = 0, *, permits: int | Unset = UNSET) -> Lease | None:
        """Wait for at most ``timeout`` seconds: the hold of ``permits`` permits, or ``None`` if too few came back by then.

        With 0, the default, it tries once, and ends within the client's ``command_timeout``; ``None`` waits for ever.
        Raises and cancels as :meth:`acquire` does.
        """
        hold = await self._ask(check_timeout(timeout), permits)
        return None if hold is None else Lease(hold)

    async def locked(self) -> bool:
        """Return whether a request for one permit would wait, as with :class:`asyncio.Semaphore`.

        Raises and cancels as :meth:`inspect` does.
        """
        info = await self.inspect()
        return bool(info.waiters) or self._left(info.limit, info.permits) < 1

    async def available(self) -> int:
        """Return the number of permits that are not held; waiters come first.

        Ends within the client's ``command_timeout``. Raises and cancels as :meth:`inspect` does.
        """
        info = await self.inspect()
        return self._left(info.limit, info.permits)

    def _left(self, limit: int | None, out: int) -> int:
        return max(0, (self.limit if limit is None else limit) - out)

    async def set_limit(self, limit: int) -> None:
        """Set the number of permits for all users, from 0 to 1,000,000, until 24 hours after the last use.

        More than before: the next waiters enter at once. Fewer: no holder loses a permit, and requests wait until enough
        came back. 0 pauses the semaphore: holders keep their permits, and requests wait until another limit is set. A
        request for more than there are waits, with all requests behind it, until the limit is raised. Programs
        may go on naming the limit of the first user, or name the new one.

        Ends within the client's ``command_timeout``. Raises :class:`ConfigError` for an invalid ``limit``,
        :class:`UnsupportedKind` on servers without semaphores, and :class:`BackendError` if the server does not answer.
        Cancelling it leaves it open whether the server received it.
        """
        self._guard()
        backend = Administration.of(self._runtime.backend, "semaphore")
        checked = check_count("limit", limit, low=0)
        await self._runtime.reach()
        await backend.set_limit(self.name, checked)

    def _ask(self, timeout: float | None, count: int | Unset = UNSET) -> Coroutine[Any, Any, Hold | None]:
        if self._runtime.state is not State.OPEN:
            self._follow()
        request = self._request
        if not isinstance(count, Unset):
            request = replace(request, kind=kind_of(self.name, self.limit, count))
        self._guard()
        return ask(self._runtime, request, self._options, timeout)

    def _owned(self, task: Task) -> bool:
        # No table of these blocks is kept: a task may be in several, and this question is rare.
        queues = [queue for queue in self._runtime.contenders if isinstance(queue, LocalQueue)]
        return any(queue.inside(self.name, task) for queue in queues)

    def _in_own_block(self) -> bool:
        """Return False: a task may take permits inside its own block."""
        self._guard()
        return False


def kind_of(name: str, limit: int, count: int) -> Kind:
    """Return the kind that takes ``count`` permits of a semaphore. Raises :class:`ConfigError` if ``limit`` is less."""
    if check_count("permits", count) > limit:
        raise ConfigError(
            f"permits must be at most the limit of semaphore {shorten(name)}, which is {limit}, not {count}"
        )
    return permits(count, limit)
