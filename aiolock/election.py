"""One leader at a time: a term is a hold, its number is the fencing token, and everybody can follow who leads."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from weakref import WeakSet

from aiolock.contract import ELECTION, Bid, Holder
from aiolock.document import Document
from aiolock.errors import BackendError, LockError, UnsupportedKind, shorten
from aiolock.lease import Lease, Terms
from aiolock.lock import Lock
from aiolock.runtime import Generations, Runtime, State

__all__ = ["Campaign", "Election"]

KEEP = 86_400.0
"""Seconds for which the hint that the leader changed is kept."""
LOOK = 2.0
"""Seconds after which an observer looks at the latest, whatever it was told."""


class Election:
    """One leader at a time, among all who campaign. Made by :meth:`Client.election`; does no I/O until it is asked.

    A campaign is won like a lock, in the order in which they began; the lease that comes from it is the term. Its
    ``token`` is the number of the term, greater than that of every earlier one; its loss is told as that of every lease.
    """

    __slots__ = ("_campaign", "_generations")

    def __init__(self, generations: Generations, campaign: Campaign) -> None:
        self._generations = generations
        self._campaign = campaign

    @property
    def name(self) -> str:
        """What it is about."""
        return self._campaign.name

    @property
    def _runtime(self) -> Runtime:
        return self._generations.latest

    def __repr__(self) -> str:
        return f"<Election {shorten(self.name)}>"

    def __reduce__(self) -> str:
        raise TypeError(
            "an election cannot be copied or pickled: pass its name, and ask the client there for the election"
        )

    def campaign(self) -> Campaign:
        """Stand for election: ``async with election.campaign() as term:`` leads, once elected, until the block ends.

        What comes back is a :class:`Lock` with everything that a lock has: ``acquire(timeout=…)``, ``try_acquire()``,
        ``inspect()``, ``request_release()``.
        """
        return self._campaign

    async def resign(self) -> bool:
        """End the terms that were won through this object; whether there was one. The next in line is elected.

        A block under such a term goes on, and ends without an error: it has to see for itself that the term is over
        (``term.held``). Cancelling it stops the waiting, not the resignation.
        """
        self._runtime.guard()
        terms = [term for term in self._campaign.terms if term.open]
        for term in terms:
            await term.release()
        return bool(terms)

    async def leader(self) -> Holder | None:
        """Who leads at this moment, as the server sees it: with ``label``, ``token`` (the term) and ``since``; or nobody.

        Ends within the ``command_timeout``; cancelling it changes nothing.
        """
        self._runtime.guard()
        info = await self._runtime.backend.inspect(self.name, ELECTION.family)
        return info.holders[0] if info.holders else None

    def observe(self) -> AsyncIterator[Holder | None]:
        """Who leads, and after that every change: ``async for leader in election.observe():``.

        ``None`` stands for nobody. A change is seen at once where the server pushes, and else after ``min(ttl / 3, 2)``
        seconds; a term that was shorter than that may be missed. Raises :class:`BackendError` if the server cannot be
        reached at first; later outages are survived. It never ends by itself; leaving the loop leaves nothing behind.
        """
        self._runtime.guard()
        return _Observer(self, self._runtime, self._campaign.ttl)


class _Observer(AsyncIterator["Holder | None"]):
    """What one observer has seen, and the hint that there may be something new."""

    def __init__(self, election: Election, runtime: Runtime, ttl: float) -> None:
        self._election = election
        self._runtime = runtime
        self._look = min(ttl / 3, LOOK)
        self._last: int | None = -1
        """The term that was told last; -1 for none yet."""

    async def __anext__(self) -> Holder | None:
        self._runtime.guard()
        try:
            document = self._runtime.backend.document(self._election.name, ELECTION.family)
        except UnsupportedKind:
            return await self._next(None)
        try:
            return await self._next(document)
        finally:
            await document.aclose()

    async def _next(self, document: Document | None) -> Holder | None:
        while True:
            self._runtime.guard()
            try:
                # The hint is read before the truth: what changes in between is told.
                stamp = "" if document is None else (await document.read()).stamp
                leader = await self._election.leader()
            except BackendError as error:
                if self._last == -1 or not error.retryable:
                    raise
                await asyncio.sleep(self._runtime.random.uniform(0.1, 0.5))
                continue
            term = None if leader is None else leader.token
            if term != self._last:
                self._last = term
                return leader
            await self._hint(document, stamp)

    async def _hint(self, document: Document | None, stamp: str) -> None:
        try:
            async with asyncio.timeout(self._look):
                if document is None:
                    await asyncio.get_running_loop().create_future()
                else:
                    await document.changed(stamp)
        except TimeoutError:
            pass
        except BackendError:
            await asyncio.sleep(self._runtime.random.uniform(0.1, 0.5))


class Campaign(Lock):
    """Standing for election: a lock whose lease is the term. Made by :meth:`Election.campaign`."""

    __slots__ = ("terms",)

    def __init__(self, runtime: Runtime, bid: Bid, terms: Terms, timeout: float | None) -> None:
        super().__init__(runtime, bid, terms, timeout)
        self.terms: WeakSet[Lease] = WeakSet()
        """What was won."""

    @property
    def ttl(self) -> float:
        """Seconds for which a term is kept that is not renewed."""
        return self._bid.ttl

    async def try_acquire(self) -> Lease | None:
        """As :meth:`Lock.try_acquire`: the term, or ``None`` if somebody else leads."""
        term = await super().try_acquire()
        return None if term is None else self._won(term)

    async def _ask(self, timeout: float | None) -> Lease | None:
        term = await super()._ask(timeout)
        return None if term is None else self._won(term)

    def _won(self, lease: Lease) -> Lease:
        self.terms.add(lease)
        runtime = lease.home.runtime
        self._tell(runtime)
        lease.watch().add_done_callback(lambda _: self._tell(runtime))
        return lease

    def _tell(self, runtime: Runtime) -> None:
        """Hint to observers that there may be another leader; they look for themselves."""
        if not runtime.forked and runtime.state is State.OPEN:
            runtime.spawn(self._hint(runtime), "aiolock-election")

    async def _hint(self, runtime: Runtime) -> None:
        try:
            document = runtime.backend.document(self.name, ELECTION.family)
        except UnsupportedKind:
            return
        try:
            for _ in range(3):
                _, stamp = await document.read()
                # Whoever else wrote in between has told them.
                if await document.write(secrets.token_bytes(8), stamp, KEEP) is not None:
                    return
        except LockError:
            # They look for themselves.
            pass
        finally:
            await document.aclose()
