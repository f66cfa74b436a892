"""Semaphore: a limited number of permits, each of them leased."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from aiolock.core.capabilities import Administration
from aiolock.core.hold import Hold
from aiolock.core.local_queue import ask
from aiolock.core.runtime import State
from aiolock.errors import ConfigError, shorten
from aiolock.lease import Lease
from aiolock.lock import UNSET, Lock, Unset
from aiolock.types import permits
from aiolock.validation import check_count, check_timeout

__all__ = ["Semaphore"]


class Semaphore(Lock):
    """At most ``limit`` permits are held at once. Made by :meth:`Client.semaphore`.

    Every permit is leased: those of a holder that died come back after its ttl. Requests are served in order, so one for
    many permits waits at the head until there are enough, and is not starved by requests for few. A task may take permits
    inside its own block; if only its own are left, it waits for itself.

    The limit is that of the first user of the name; requests with another one raise :class:`ConfigError`, and
    :meth:`set_limit` changes it.
    """

    __slots__ = ()

    @property
    def limit(self) -> int:
        """The limit that this program names; :meth:`inspect` returns the one in force."""
        return self._request.kind.limit

    async def acquire(self, timeout: float | Unset | None = UNSET, *, permits: int = 1) -> Lease:
        """Wait for ``permits`` permits, and return the hold of all of them.

        ``timeout`` is in seconds (``None``: no limit, 0: try once; default: the semaphore's option).

        Raises :class:`ConfigError` if there are fewer, or if the server knows another limit; otherwise as
        :meth:`Lock.acquire`. If it raises, also by being cancelled, nothing is held.
        """
        wait = self._timeout if isinstance(timeout, Unset) else check_timeout(timeout)
        hold = await self._ask(wait, permits)
        return self._in_vain(wait) if hold is None else Lease(hold)

    async def try_acquire(self, *, permits: int = 1) -> Lease | None:
        """Try once: return the hold of ``permits`` permits, or ``None`` if fewer are available.

        Ends within the client's ``command_timeout``. Raises and cancels as :meth:`acquire` does.
        """
        hold = await self._ask(0, permits)
        return None if hold is None else Lease(hold)

    async def locked(self) -> bool:
        """Return whether a request for one permit would wait, as with :class:`asyncio.Semaphore`."""
        info = await self.inspect()
        return (
            bool(info.waiters) or self._left(info.limit, sum(holder.permits for holder in info.holders)) < 1
        )

    async def available(self) -> int:
        """Return the number of permits that are not held; waiters are served first.

        Ends within the client's ``command_timeout``; cancelling it changes nothing.
        """
        info = await self.inspect()
        return self._left(info.limit, sum(holder.permits for holder in info.holders))

    def _left(self, limit: int | None, out: int) -> int:
        return max(0, (self.limit if limit is None else limit) - out)

    async def set_limit(self, limit: int) -> None:
        """Set the number of permits for all users, until 24 hours after the last use.

        More than before: the next waiters enter at once. Fewer: no holder loses a permit, and requests wait until enough
        came back. A request for more than there are waits, with all requests behind it, until the limit is raised. Programs
        may go on naming the limit of the first user, or name the new one.

        Ends within the client's ``command_timeout``. Cancelling it leaves it open whether the server received it.
        """
        self._guard()
        backend = Administration.of(self._runtime.backend, "semaphore")
        checked = check_count("limit", limit)
        await self._runtime.reach()
        await backend.set_limit(self.name, checked)

    def _ask(self, timeout: float | None, count: int = 1) -> Coroutine[Any, Any, Hold | None]:
        if self._runtime.state is not State.OPEN:
            self._follow()
        request = self._request
        if check_count("permits", count) != 1:
            if count > self.limit:
                raise ConfigError(
                    f"permits must be at most the limit of semaphore {shorten(self.name)}, which is {self.limit}, not {count}"
                )
            request = replace(request, kind=permits(count, self.limit))
        self._guard()
        return ask(self._runtime, request, self._options, timeout)
