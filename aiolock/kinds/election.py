"""Leader election: a term is a hold, its number is the fencing token, and observers follow who leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from weakref import WeakSet

from aiolock.core.backend import Request
from aiolock.core.capabilities import Administration
from aiolock.core.hold import Hold, LeaseOptions
from aiolock.core.present import told_apart
from aiolock.core.register import Body, SharedRegister
from aiolock.core.runtime import Generations, Runtime, State
from aiolock.core.tasks import Backoff
from aiolock.errors import BackendError, LockError, UnsupportedKind
from aiolock.lock import Handle, Lock
from aiolock.types import ELECTION, Leader
from aiolock.validation import check_value

__all__ = ["Campaign", "Election"]

KEEP = 86_400.0
"""Seconds for which the register with the last change of leader is kept."""
POLL = 2.0
"""Most seconds after which an observer asks again, whether or not it was notified."""


class Election(Handle):
    """One leader at a time among all candidates. Made by :meth:`Client.election`; does no I/O until it is asked.

    Campaigns are won like locks, in the order in which they began; the lease is the term. Its ``token`` is the number of
    the term, greater than that of every earlier one; a lost term is reported as every lost lease.
    """

    __slots__ = ("_campaign", "_generations")

    _noun = "election"

    def __init__(self, generations: Generations, campaign: Campaign) -> None:
        self._generations = generations
        self._campaign = campaign

    @property
    def name(self) -> str:
        """The name of the election."""
        return self._campaign.name

    @property
    def _runtime(self) -> Runtime:
        return self._generations.latest

    def campaign(self, *, value: bytes = b"") -> Campaign:
        """Stand for election: ``async with election.campaign() as term:`` leads, once elected, until the block ends.

        :param value: at most 256 bytes that :meth:`leader` and :meth:`observe` return to all clients while it leads, such as
            the address of its service.

        Returns a :class:`Lock` with everything that a lock has: ``acquire(timeout=…)``, ``try_acquire()``,
        ``inspect()``, ``request_release()``. Does no I/O. Raises :class:`ConfigError` for another value, and
        :class:`UnsupportedKind` for one where the server knows nothing of holders (MySQL with ``?mode=session`` or
        ``?mode=row``).
        """
        if not check_value(value):
            return self._campaign
        backend = self._runtime.backend
        if not isinstance(backend, Administration) or not backend.keeps_values:
            raise UnsupportedKind("value of a campaign", backend.name, "the server keeps none with a holder")
        return self._campaign.with_value(value)

    async def resign(self) -> bool:
        """End the terms that were won through this object, and return whether there was one. The next candidate is elected.

        A block under such a term goes on, and ends without an error: it has to check ``term.held``. Cancelling it ends the
        wait, not the resignation.
        """
        self._runtime.guard()
        terms = [term for term in self._campaign.terms if term.open]
        for term in terms:
            await term.release()
        return bool(terms)

    async def leader(self) -> Leader | None:
        """Return the leader as the server sees it: ``holder``, ``token`` (the term) and ``value``; ``None`` for no leader.

        Ends within the ``command_timeout``; cancelling it changes nothing.
        """
        self._runtime.guard()
        backend = Administration.of(self._runtime.backend, "inspection")
        await self._runtime.reach()
        info = told_apart(await backend.inspect(self.name, ELECTION.family))
        return Leader(info.holders[0]) if info.holders else None

    def observe(self) -> AsyncIterator[Leader | None]:
        """Iterate over the leader now, and over every change: ``async for leader in election.observe():``.

        ``None`` stands for no leader. A change is seen at once where the server pushes, otherwise after ``min(ttl / 3, 2)``
        seconds; a term that was shorter than that may be missed. Raises :class:`BackendError` if the server cannot be
        reached at first; later outages are survived. It never ends by itself; leaving the loop leaves nothing behind,
        nor does cancelling the task that iterates.
        """
        self._runtime.guard()
        return _Observer(self, self._runtime, self._campaign.ttl)


class _Observer(AsyncIterator["Leader | None"]):
    """The iterator of one observer: the register of the election, which counts the changes of leader, shows when to ask again."""

    def __init__(self, election: Election, runtime: Runtime, ttl: float) -> None:
        self._election = election
        self._runtime = runtime
        self._poll = min(ttl / 3, POLL)
        self._last: int | None = -1
        """The term that was returned last; -1 before the first."""

    async def __anext__(self) -> Leader | None:
        self._runtime.guard()
        await self._runtime.reach()
        failing = Backoff(self._runtime.random, limit=0.5)
        while True:
            self._runtime.guard()
            try:
                # The register is read first: a change between the two requests is then notified.
                changes = await self._changes()
                leader = await self._election.leader()
            except BackendError as error:
                if self._last == -1 or not error.retryable:
                    raise
                await failing.pause()
                continue
            term = None if leader is None else leader.token
            if term != self._last:
                self._last = term
                return leader
            try:
                await self._another(changes)
            except BackendError:
                await failing.pause()

    async def _changes(self) -> int | None:
        """Return the number of changes of leader so far; ``None`` where the server keeps no registers."""
        try:
            register = _register(self._runtime, self._election.name)
        except UnsupportedKind:
            return None
        return await register.change(lambda body: (None, _number(body)))

    async def _another(self, changes: int | None) -> None:
        """Wait for a change of leader, at most until the next poll; cancelling it ends the wait."""
        if changes is None:
            await asyncio.sleep(self._poll)
            return
        register = _register(self._runtime, self._election.name)
        await register.wait(lambda body: None if _number(body) == changes else True, self._poll)


def _register(runtime: Runtime, name: str) -> SharedRegister:
    return runtime.register(name, ELECTION.family, KEEP)


def _number(body: Body) -> int:
    return int(body.get("changes", 0))


def _another_leader(body: Body) -> tuple[Body, None]:
    return {"changes": _number(body) + 1}, None


class Campaign(Lock):
    """Standing for election: a lock whose lease is the term. Made by :meth:`Election.campaign`."""

    __slots__ = ("terms",)

    def __init__(
        self, runtime: Runtime, request: Request, options: LeaseOptions, timeout: float | None
    ) -> None:
        super().__init__(runtime, request, options, timeout)
        self.terms: WeakSet[Hold] = WeakSet()
        """The terms that were won."""

    @property
    def ttl(self) -> float:
        """Seconds after which a term ends that is not renewed."""
        return self._request.ttl

    def with_value(self, value: bytes) -> Campaign:
        """Return the same campaign with that value; its terms count as terms of this one."""
        request = replace(self._request, value=value)
        campaign = Campaign(self._follow(), request, self._options, self._timeout)
        campaign.terms = self.terms
        return campaign

    async def _try(self, timeout: float | None) -> Hold | None:
        term = await super()._try(timeout)
        return None if term is None else self._won(term)

    async def _ask(self, timeout: float | None) -> Hold | None:
        term = await super()._ask(timeout)
        return None if term is None else self._won(term)

    def _won(self, hold: Hold) -> Hold:
        self.terms.add(hold)
        runtime = hold.parent.runtime
        self._tell(runtime)
        hold.watch().add_done_callback(lambda _: self._tell(runtime))
        return hold

    def _tell(self, runtime: Runtime) -> None:
        """Notify observers in the background that there may be another leader."""
        if not runtime.forked and runtime.state is State.OPEN:
            runtime.spawn(self._touch(runtime), "aiolock-election")

    async def _touch(self, runtime: Runtime) -> None:
        """Count a change of leader in the register. Cancelling it leaves open whether it was; observers poll."""
        with suppress(LockError):
            await _register(runtime, self.name).change(_another_leader)
