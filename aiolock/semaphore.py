"""At most so many permits out at once; every permit is leased."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from aiolock.contract import Bid, permits
from aiolock.errors import ConfigError, shorten
from aiolock.lease import Lease, Terms
from aiolock.lock import UNSET, Lock, Unset
from aiolock.options import check_count, check_timeout
from aiolock.queue import ask
from aiolock.runtime import Runtime, State

__all__ = ["Semaphore"]


class Semaphore(Lock):
    """At most ``limit`` permits are out at once. Made by :meth:`Client.semaphore`.

    Every permit is leased: those of a holder that died come back after its ttl. Who comes is served in order, so a
    request for many waits at the head until there are enough, and is not starved by requests for few. A task may take
    permits inside its own block; if there are none left but its own, it waits for itself.

    The number is that of the first user of the name; who says another gets :class:`ConfigError` when it asks the server.
    :meth:`set_limit` changes it.
    """

    __slots__ = ("_bids",)

    def __init__(self, runtime: Runtime, bid: Bid, terms: Terms, timeout: float | None) -> None:
        super().__init__(runtime, bid, terms, timeout)
        self._bids = {1: bid}

    @property
    def limit(self) -> int:
        """How many permits this program says that there are; :meth:`inspect` tells what the server says."""
        return self._bid.kind.limit

    async def acquire(self, timeout: float | Unset | None = UNSET, *, permits: int = 1) -> Lease:
        """Wait until ``permits`` permits are ours, and return the hold of all of them.

        ``timeout`` is how many seconds to wait (``None``: for ever, 0: try once; default: the semaphore's option).

        Raises :class:`ConfigError` if there are not so many, or if the server knows another limit; otherwise as
        :meth:`Lock.acquire`. If it raises, also by being cancelled, nothing is held.
        """
        wait = self._timeout if isinstance(timeout, Unset) else check_timeout(timeout)
        lease = await self._ask(wait, permits)
        return self._in_vain(wait) if lease is None else lease

    async def try_acquire(self, *, permits: int = 1) -> Lease | None:
        """Ask once: the hold of ``permits`` permits, or ``None`` if there are not so many at this moment.

        Ends within the client's ``command_timeout``. Raises and cancels as :meth:`acquire` does.
        """
        return await self._ask(0, permits)

    async def locked(self) -> bool:
        """Whether a permit could not be had at this moment without waiting, as with :class:`asyncio.Semaphore`."""
        info = await self.inspect()
        return (
            bool(info.waiters) or self._left(info.limit, sum(holder.permits for holder in info.holders)) < 1
        )

    async def available(self) -> int:
        """How many permits are not out at this moment, as the server sees it; those who wait come first.

        Ends within the client's ``command_timeout``; cancelling it changes nothing.
        """
        info = await self.inspect()
        return self._left(info.limit, sum(holder.permits for holder in info.holders))

    def _left(self, limit: int | None, out: int) -> int:
        return max(0, (self.limit if limit is None else limit) - out)

    async def set_limit(self, limit: int) -> None:
        """Let there be ``limit`` permits from now on, for everybody, until 24 hours after the last use.

        More than before: who is next in line enters at once. Fewer: nobody loses a permit, and newcomers wait until
        enough came back. A request for more than there are waits, and everybody behind it, until the number is raised.
        Programs may go on saying the number that the first user said, or say the new one.

        Ends within the client's ``command_timeout``. Cancelling it leaves open whether the server heard it.
        """
        self._guard()
        await self._runtime.backend.set_limit(self.name, check_count("limit", limit))

    def _ask(self, timeout: float | None, count: int = 1) -> Coroutine[Any, Any, Lease | None]:
        if self._runtime.state is not State.OPEN:
            self._follow()
        bid = self._bids.get(count) if type(count) is int else None
        if bid is None:
            bid = self._bids[count] = self._bid_for(count)
        self._guard()
        return ask(self._runtime, bid, self._terms, timeout)

    def _relabel(self, label: str) -> None:
        super()._relabel(label)
        self._bids = {1: self._bid}

    def _bid_for(self, count: int) -> Bid:
        """What is asked for with ``count`` permits; :class:`ConfigError` if there cannot be so many."""
        if check_count("permits", count) > self.limit:
            raise ConfigError(
                f"permits must be at most the limit of semaphore {shorten(self.name)}, which is {self.limit}, not {count}"
            )
        bid = self._bid
        return Bid(bid.name, permits(count, self.limit), bid.ttl, bid.label, bid.fair)
