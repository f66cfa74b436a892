"""The tasks of this process that want one lock: one claim for all of them, and the lock passed on among them.

A :class:`Cohort` is what one name, kind and ttl have in this client while anybody holds or wants them. Its first
task asks the server in its own time; if the answer is a place in the queue, a task of the client waits there for
everybody, so that a waiter that is cancelled or times out costs nothing but its future. The holder's successor is
the next local task as long as :func:`may_pass` allows; then the claim goes back, and the next bid of the cohort
stands behind the other processes. With ``fair=True``, and for holds that are not alone, every task has a cohort of
its own: one claim, one place, no passing.

Bounded local passing is lock cohorting (Dice, Marathe, Shavit, PPoPP 2012).
"""

from __future__ import annotations

import asyncio
import math
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from aiolock.contract import READ, Bid, Claim, Grant, Kind, margin
from aiolock.errors import BackendError, BackendUnavailable, LossReason, shorten
from aiolock.lease import Lease, Terms
from aiolock.runtime import Runtime
from aiolock.watchdog import Term

__all__ = ["Cohort", "ask", "closed_error", "copy_of", "may_pass"]

PASSES = 16
"""How often a hold is passed on locally once it is known that others wait."""
PASSING = 0.005
"""For how many seconds it is passed on once that is known."""

Waiter = asyncio.Future["Lease | None"]

_NOBODY: OrderedDict[Waiter, Terms] = OrderedDict()
"""The line of a cohort that nobody has joined yet; nothing is ever put in here."""


def may_pass(left: int, certain: float, ttl: float, passes: int, demanded_for: float | None) -> bool:
    """Whether the next local task may have the hold without asking the server.

    ``left`` tokens are there to hand out, the hold is certain for ``certain`` seconds, and others have been known to
    wait for ``demanded_for`` seconds (``None``: nobody does), in which it was passed on ``passes`` times.
    """
    if left <= 0 or certain <= margin(ttl):
        return False
    return demanded_for is None or (passes < PASSES and demanded_for < PASSING)


def ask(runtime: Runtime, bid: Bid, terms: Terms, timeout: float | None) -> Coroutine[Any, Any, Lease | None]:
    """Get a lease of ``bid`` within ``timeout`` seconds, or ``None``; 0 tries once and takes no place.

    Cancelling it leaves nothing held; what the server may have granted meanwhile is given to the next local task or
    released in the background.
    """
    if bid.fair or not bid.kind.exclusive:
        return Cohort(runtime, bid, None).lead(terms, timeout)
    key = bid.key
    cohort: Cohort | None = runtime.shared.get(key)
    if cohort is None:
        cohort = runtime.shared[key] = Cohort(runtime, bid, key)
        return cohort.lead(terms, timeout)
    return _taken() if timeout == 0 else cohort.join(terms, timeout)


async def _taken() -> None:
    """Somebody of this client holds it, or waits for it already."""


class Cohort:
    """One claim, and the tasks of this client behind it."""

    __slots__ = (
        "__weakref__",
        "_bid",
        "_claim",
        "_driver",
        "_ended",
        "_key",
        "_lasting",
        "_lease",
        "_passes",
        "_requested",
        "_since",
        "_term",
        "_waiters",
        "_weight",
        "runtime",
    )

    def __init__(self, runtime: Runtime, bid: Bid, key: Any, claim: Claim | None = None) -> None:
        self.runtime: Runtime = runtime
        self._bid = bid
        self._key = key
        self._claim = runtime.backend.claim(bid) if claim is None else claim
        self._term: Term | None = None
        """The hold, while there is one."""
        self._lease: weakref.ref[Lease] | None = None
        """Whose turn it is. Weak: a lease that was dropped is not renewed for ever."""
        self._waiters = _NOBODY
        """In the order in which they came. Not a plain dict, which is slow to give its first item."""
        self._driver: asyncio.Task[None] | None = None
        """Waits at the server for everybody; ``None`` while the first task asks, and during a hold."""
        self._lasting = False
        """Whether the server knew this cohort once: from then on its waiters survive an outage."""
        self._ended = False
        self._passes = 0
        self._weight = 0
        """For how many holds this one stands if it is measured, else 0."""
        self._since = 0.0
        """When it began, if it is."""
        self._requested = False
        """Somebody asked the holder to let go: the hold is not passed on here."""
        runtime.contenders[self] = None

    @property
    def kind(self) -> Kind:
        """What kind of hold it is."""
        return self._bid.kind

    @property
    def waiting(self) -> int:
        """How many tasks of this client wait behind the claim."""
        return len(self._waiters)

    # --- coming

    async def lead(self, terms: Terms, timeout: float | None) -> Lease | None:
        """Ask the server as the first task of this cohort, and wait if it is taken."""
        runtime = self.runtime
        wait = timeout != 0
        start = runtime.clock() if timeout else 0.0
        try:
            if not timeout or timeout > runtime.command_timeout:
                # The backend bounds it.
                grant = await self._claim.attempt(wait)
            else:
                async with asyncio.timeout(timeout):
                    grant = await self._claim.attempt(wait=True)
        except BackendError as error:
            if self._ended:
                raise closed_error() from error
            self._fail(error)
            raise
        except TimeoutError:
            self._desert()
            return None
        except BaseException:
            self._desert()
            raise
        if self._ended:
            raise closed_error()
        if grant is not None and grant.until > runtime.clock():
            self._begin(grant)
            return self._lend(terms)
        if not wait:
            if grant is None:
                self._carry_on()
                return None
            self._desert()
            raise BackendUnavailable(
                f"the answer about lock {shorten(self._bid.name)} came later than its ttl of {self._bid.ttl:g} s: "
                "the link is slower than that, choose a longer ttl"
            )
        if grant is not None:
            self._renounce()
        waiter = self._line_up(terms)
        self._waiters.move_to_end(waiter, last=False)
        self._drive(placed=grant is None)
        return await self._wait(
            waiter, None if timeout is None else max(0.0, timeout - (runtime.clock() - start))
        )

    def join(self, terms: Terms, timeout: float | None) -> Coroutine[Any, Any, Lease | None]:
        """Wait behind the other tasks of this cohort."""
        return self._wait(self._line_up(terms), timeout)

    def _line_up(self, terms: Terms) -> Waiter:
        waiter: Waiter = asyncio.Future(loop=self.runtime.loop)
        if self._waiters is _NOBODY:
            self._waiters = OrderedDict()
        self._waiters[waiter] = terms
        return waiter

    async def _wait(self, waiter: Waiter, timeout: float | None) -> Lease | None:
        runtime, timer = self.runtime, None
        stats = runtime.stats
        stats.waited += 1
        weight = 0 if stats.waited & stats.mask else stats.weigh()
        begun = runtime.clock() if weight else 0.0
        if timeout is not None:
            timer = asyncio.get_running_loop().call_later(timeout, _time_out, waiter)
        try:
            lease = await waiter
        except BaseException:
            # The lease may have been handed over in the very step in which we were cancelled, or the coroutine closed.
            if (
                waiter.done()
                and not waiter.cancelled()
                and waiter.exception() is None
                and (given := waiter.result()) is not None
            ):
                given.abandon()
            self._forget(waiter)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if weight:
                stats.waits.record(runtime.clock() - begun, weight)
        if lease is None:
            self._forget(waiter)
        return lease

    def _forget(self, waiter: Waiter) -> None:
        self._waiters.pop(waiter, None)
        if not self._waiters and self._driver is not None:
            # It ends by what it looks at; this only hurries it. Not at once: a task that is cancelled before its
            # first step never runs, and would leave the clean-up undone.
            asyncio.get_running_loop().call_soon(self._driver.cancel)

    # --- waiting at the server

    def _drive(self, *, placed: bool) -> None:
        self._driver = self.runtime.spawn(self._wait_at_server(placed), "aiolock-wait")

    async def _wait_at_server(self, placed: bool) -> None:
        try:
            grant = await self._granted(placed)
        except asyncio.CancelledError:
            self._driver = None
            self._desert()
            raise
        except Exception as error:  # noqa: BLE001 - whatever a backend raises, those who wait hear of it
            self._driver = None
            self._fail(error)
            return
        self._driver = None
        if grant is not None and not self._ended:
            self._begin(grant)
            if self._hand_over():
                return
        self._desert()

    async def _granted(self, placed: bool) -> Grant | None:
        """Ask and wait until there is a grant, or nobody who wants it."""
        runtime = self.runtime
        pause = 0.02
        while self._live() and not runtime.forked:
            if placed:
                self._lasting = True
                await self._claim.changed()
            try:
                grant = await self._claim.attempt(wait=True)
            except BackendError as error:
                if not error.retryable or not self._lasting:
                    raise
                await asyncio.sleep(pause * runtime.random.uniform(0.5, 1.0))
                pause = min(2 * pause, 1.0)
                placed = False
                continue
            pause = 0.02
            if grant is None:
                placed = True
            elif grant.until > runtime.clock():
                return grant
            else:
                self._renounce()
                placed = False
        return None

    # --- the hold

    def _begin(self, grant: Grant) -> None:
        now = self.runtime.clock()
        if grant.demand and self._claim.demanded_at is None:
            self._claim.demanded_at = now
        self._lasting = True
        self._passes = 0
        self._requested = False
        self._term = Term(self._claim, grant, now, self)
        self.runtime.watchdog.add(self._term)

    def _lend(self, terms: Terms) -> Lease:
        runtime, term = self.runtime, self._term
        assert term is not None  # noqa: S101 - only called where a term has just been seen
        if terms.max_hold is not None or term.limit != math.inf:
            limit = math.inf if terms.max_hold is None else runtime.clock() + terms.max_hold
            runtime.watchdog.limit(term, limit)
        lease = Lease(self, term, terms.on_loss, term.take_token())
        self._lease = weakref.ref(lease, self._dropped)
        stats = runtime.stats
        stats.acquired += 1
        # Two looks at the clock and a count for each hold would be felt: most are not measured.
        self._weight = 0 if stats.acquired & stats.mask else stats.weigh()
        if self._weight:
            self._since = runtime.clock()
        return lease

    def _hand_over(self) -> bool:
        while self._waiters:
            waiter, terms = self._waiters.popitem(last=False)
            if not waiter.done():
                waiter.set_result(self._lend(terms))
                return True
        return False

    def leave(self, lease: Lease, keep: float = 0) -> Claim | None:
        """End the turn of ``lease``: pass the hold on, or return the claim that is to be released."""
        term = self._term
        if self._lease is None or self._lease() is not lease or term is None:
            return None
        self._lease = None
        stats = self.runtime.stats
        stats.released += 1
        if self._weight:
            stats.holds.record(self.runtime.clock() - self._since, self._weight)
        if self._waiters and not keep and self._may_pass(term) and self._hand_over():
            self._passes += term.claim.demanded_at is not None
            stats.passed += 1
            return None
        return self._yield_claim(term)

    def _may_pass(self, term: Term) -> bool:
        now = self.runtime.clock()
        since = term.claim.demanded_at
        waited = None if since is None else now - since
        return (
            term.renewed
            and not self._requested
            and may_pass(term.left, term.until - now, term.ttl, self._passes, waited)
        )

    def _yield_claim(self, term: Term) -> Claim:
        """The hold goes back to the server; whoever waits here bids again, behind the other processes."""
        claim = self._claim
        self.runtime.watchdog.discard(term)
        self._term = None
        if self._waiters and self._live():
            self._claim = self.runtime.backend.claim(self._bid)
            self._drive(placed=False)
        else:
            self._end()
        return claim

    def weaken(self, lease: Lease) -> Cohort:
        """The hold of ``lease`` becomes a read hold, of a cohort that nobody else joins; who waits here bids anew."""
        term = self._term
        if term is None or self._lease is None or self._lease() is not lease:
            raise RuntimeError(f"this lease of {shorten(self._bid.name)} has no hold of its own any more")
        alone = Cohort(self.runtime, replace(self._bid, kind=READ), None, self._claim)
        alone._lasting = True
        alone._term = term
        alone._lease = weakref.ref(lease, alone._dropped)
        term.keeper = alone
        self._lease = self._term = None
        if self._waiters and self._live():
            self._claim = self.runtime.backend.claim(self._bid)
            self._drive(placed=False)
        else:
            self._end()
        return alone

    def _dropped(self, ref: weakref.ref[Lease]) -> None:
        """Somebody acquired a lease and lost sight of it. May run in any thread, whenever memory is collected."""
        loop = self.runtime.loop
        if self._lease is ref and loop is not None and not loop.is_closed() and not self.runtime.forked:
            loop.call_soon_threadsafe(self._recover, ref)

    def _recover(self, ref: weakref.ref[Lease]) -> None:
        if self._lease is not ref or self._term is None:
            return
        self._lease = None
        if not (self._waiters and self._may_pass(self._term) and self._hand_over()):
            self.runtime.clean_up(self._yield_claim(self._term))
        warnings.warn(
            f"a lease of {shorten(self._bid.name)} was dropped without a release: keep it, or use `async with`",
            ResourceWarning,
            stacklevel=1,
        )

    # --- the ends

    def _live(self) -> bool:
        return any(not waiter.done() for waiter in self._waiters)

    def _end(self) -> None:
        self._ended = True
        self.runtime.contenders.pop(self, None)
        if self._key is not None and self.runtime.shared.get(self._key) is self:
            del self.runtime.shared[self._key]

    def _carry_on(self) -> None:
        """The server said no to a task that does not wait, and keeps nothing of it."""
        if self._live():
            self._drive(placed=False)
        else:
            self._end()

    def _desert(self) -> None:
        """Whoever was asking is gone, and nobody knows what the server knows of it."""
        if self._ended:
            return
        if self._live():
            self._drive(placed=False)
            return
        if self._term is not None:
            self.runtime.watchdog.discard(self._term)
            self._term = None
        self.runtime.clean_up(self._claim)
        self._end()

    def _renounce(self) -> None:
        """A grant came later than its own term: it is no success."""
        self.runtime.clean_up(self._claim)
        self._claim = self.runtime.backend.claim(self._bid)

    def _fail(self, error: Exception) -> None:
        if self._ended:
            return
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(copy_of(error))
        self._waiters.clear()
        self.runtime.clean_up(self._claim)
        self._end()

    def term_lost(self, term: Term, reason: LossReason) -> None:
        """Tell the holder, and let those who wait begin anew."""
        lease = None if self._lease is None else self._lease()
        self._lease = None
        # Also if the server says that the hold is gone: a request on its way may have taken a place since.
        self.runtime.clean_up(self._yield_claim(term))
        if lease is not None:
            lease.lose(reason)

    def term_overstayed(self, term: Term) -> None:  # noqa: ARG002 - a keeper may have several terms
        """The holder is told; the lock stays until it leaves or the ttl ends, so that it can leave in order."""
        if self._lease is not None and (lease := self._lease()) is not None:
            lease.lose("max_hold")

    def term_requested(self, term: Term, reason: str) -> None:  # noqa: ARG002 - a keeper may have several terms
        """The holder is told, and whoever waits here bids anew instead of following."""
        self._requested = True
        if self._lease is not None and (lease := self._lease()) is not None:
            lease.request(reason)

    def close(self) -> Claim:
        """The client is being closed: tell everybody, and return the claim to release."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(closed_error())
        self._waiters.clear()
        lease = None if self._lease is None else self._lease()
        self._lease = None
        if self._term is not None:
            self.runtime.watchdog.discard(self._term)
            self._term = None
        if lease is not None:
            lease.lose("closed")
        self._end()
        if self._driver is not None:
            self._driver.cancel()
        return self._claim


def _time_out(waiter: Waiter) -> None:
    if not waiter.done():
        waiter.set_result(None)


def closed_error() -> RuntimeError:
    """What tasks hear that wait when their client is closed."""
    return RuntimeError("the client was closed while this task waited for a lock: connect anew")


def copy_of(error: Exception) -> BackendError:
    """The same error for another task: exceptions collect tracebacks, and must not be shared."""
    if isinstance(error, BackendError):
        copy = type(error)(str(error), retryable=error.retryable)
        copy.__cause__ = error.__cause__
    else:
        copy = BackendError(f"the backend failed unexpectedly: {error!r}")
        copy.__cause__ = error
    return copy
