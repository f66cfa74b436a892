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
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from aiolock.contract import READ, Bid, Claim, Grant, Kind, margin
from aiolock.delivery import Waking, answer
from aiolock.errors import BackendError, BackendUnavailable, LossReason, shorten
from aiolock.lease import Lease, Terms
from aiolock.line import Line, Waiter
from aiolock.runtime import Runtime
from aiolock.watchdog import Term

__all__ = ["Cohort", "ask", "closed_error", "copy_of", "may_pass"]

PASSES = 16
"""How often a hold is passed on locally once it is known that others wait."""
PASSING = 0.005
"""For how many seconds it is passed on once that is known."""

_NEVER = math.inf


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
        "_dozing",
        "_driver",
        "_ended",
        "_key",
        "_lasting",
        "_lease",
        "_line",
        "_passes",
        "_requested",
        "_since",
        "_term",
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
        self._lease: _Borrower | None = None
        """Whose turn it is. Weak: a lease that was dropped is not renewed for ever."""
        self._line: Line | None = None
        """Who waits; made when somebody does."""
        self._driver: asyncio.Task[None] | None = None
        """Waits at the server for everybody; ``None`` while the first task asks, while we doze, and during a hold."""
        self._dozing = False
        """Nobody asks or waits at the server, because the claim calls us when there is a reason to."""
        self._lasting = False
        """Whether the server knew this cohort once: from then on its waiters survive an outage."""
        self._ended = False
        # What only a hold has begins with it, in `_begin` and `_lend`.
        self._passes: int
        self._weight: int
        """For how many holds this one stands if it is measured, else 0."""
        self._since: float
        """When it began, if it is."""
        self._requested: bool
        """Somebody asked the holder to let go: the hold is not passed on here."""
        if key is None:
            # Those that are shared are found among those.
            runtime.contenders[self] = None

    @property
    def kind(self) -> Kind:
        """What kind of hold it is."""
        return self._bid.kind

    @property
    def waiting(self) -> int:
        """How many tasks of this client wait behind the claim."""
        return 0 if self._line is None else sum(1 for _ in self._line)

    # --- coming

    async def lead(self, terms: Terms, timeout: float | None) -> Lease | None:
        """Ask the server as the first task of this cohort, and wait if it is taken."""
        runtime = self.runtime
        wait, clock, gate = timeout != 0, runtime.clock, runtime.gate
        start = clock() if timeout else 0.0
        try:
            if not gate.room:
                async with asyncio.timeout(timeout if wait else runtime.command_timeout):
                    grant = await gate.through(lambda: self._first(wait=wait))
            else:
                # As `Gate.through`, two coroutines less.
                gate.room -= 1
                try:
                    if not timeout or timeout > 2 * runtime.command_timeout:
                        # The backend bounds it.
                        grant = await self._claim.attempt(wait)
                    else:
                        async with asyncio.timeout(timeout):
                            grant = await self._claim.attempt(wait=True)
                except BaseException as error:
                    gate.failed(error)
                    raise
                if gate.room:
                    gate.room += 1
                else:
                    gate.answered()
        except BackendError as error:
            if self._ended:
                raise closed_error() from error
            self._fail(error)
            raise
        except TimeoutError:
            self._desert()
            if wait:
                return None
            name, limit = shorten(self._bid.name), runtime.command_timeout
            raise BackendUnavailable(
                f"lock {name} was not asked for within {limit:g} s: too many requests of this client came first"
            ) from None
        except BaseException:
            self._desert()
            raise
        if self._ended:
            raise closed_error()
        if grant is not None and grant.until > (now := clock()):
            self._begin(grant, now)
            return self._lend(terms, now)
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
            self._outdated()
        waiter = self._line_up(terms, first=True)
        self._drive(placed=grant is None, again=grant is not None)
        return await self._wait(waiter, None if timeout is None else max(0.0, timeout - (clock() - start)))

    async def _first(self, *, wait: bool) -> Grant | None:
        """Ask when it is our turn; the client may have been closed before it came."""
        if self._ended:
            raise closed_error()
        return await self._claim.attempt(wait)

    def join(self, terms: Terms, timeout: float | None) -> Coroutine[Any, Any, Lease | None]:
        """Wait behind the other tasks of this cohort."""
        return self._wait(self._line_up(terms), timeout)

    def _line_up(self, terms: Terms, *, first: bool = False) -> Waiter:
        waiter: Waiter = asyncio.Future(loop=self.runtime.loop)
        line = self._line
        if line is None:
            line = self._line = Line()
        if first:
            line.lead(waiter, terms)
        else:
            line.join(waiter, terms)
        return waiter

    async def _wait(self, waiter: Waiter, timeout: float | None) -> Lease | None:
        # Every name in here is part of what a waiting task costs.
        timer = None
        weight = self.runtime.stats.wait()
        begun = self.runtime.clock() if weight else 0.0
        if timeout is not None:
            timer = asyncio.get_running_loop().call_later(timeout, _time_out, waiter)
        try:
            lease = await waiter
        except BaseException:
            self._give_up(waiter)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if weight:
                self.runtime.stats.waits.record(self.runtime.clock() - begun, weight)
        if lease is None:
            self._forget(waiter)
        return lease

    def _give_up(self, waiter: Waiter) -> None:
        # The lease may have been handed over in the very step in which we were cancelled, or the coroutine closed.
        if (
            waiter.done()
            and not waiter.cancelled()
            and waiter.exception() is None
            and (given := waiter.result()) is not None
        ):
            given.abandon()
        self._forget(waiter)

    def _forget(self, waiter: Waiter) -> None:
        if self._line is None:
            return
        self._line.give_up(waiter)
        if self._line:
            return
        driver = self._driver
        if driver is not None and self._claim.begin_release() is not None:
            # The server knows, or is told before anything else that this task asks: there is nothing to wait for.
            self._driver = None
            driver.cancel()
            self._desert()
        elif driver is not None:
            # It ends by what it looks at; this only hurries it. Not at once: a task that is cancelled before its
            # first step never runs, and would leave the clean-up undone.
            asyncio.get_running_loop().call_soon(driver.cancel)
        elif self._dozing:
            self._dozing = False
            self._desert()

    # --- waiting at the server

    def _drive(self, *, placed: bool, again: bool = False) -> None:
        """Have a task of the client ask and wait; ``again`` says that the claim was asked for before."""
        if not (placed and self._doze()):
            self._driver = self.runtime.spawn(self._wait_at_server(placed, again), "aiolock-wait")

    def _doze(self) -> bool:
        self._lasting = True
        self._dozing = self._claim.listen(self._roused)
        return self._dozing

    def _roused(self) -> Waking | None:
        """The claim has something to tell, most likely a grant: who goes on with it."""
        if not self._dozing:
            return None
        self._dozing = False
        grant, now = self._claim.take_pushed(), self.runtime.clock()
        if grant is None or grant.until <= now:
            self._drive(placed=False, again=True)
            return None
        self._begin(grant, now)
        head = None if self._line is None else self._line.next()
        if head is None:
            self._desert()
            return None
        waiter, terms = head
        return answer(waiter, self._lend(terms, now))

    async def _wait_at_server(self, placed: bool, again: bool) -> None:
        try:
            grant = await self._granted(placed, again)
        except asyncio.CancelledError:
            self._driver = None
            self._desert()
            raise
        except Exception as error:  # noqa: BLE001 - whatever a backend raises, those who wait hear of it
            self._driver = None
            self._fail(error)
            return
        self._driver = None
        if self._dozing:
            return
        if grant is not None and not self._ended:
            now = self.runtime.clock()
            self._begin(grant, now)
            if self._hand_over(now):
                return
        self._desert()

    async def _granted(self, placed: bool, again: bool) -> Grant | None:
        """Ask and wait until there is a grant, or no waiter is left; cancelling it leaves the claim to its caller.

        Claims that ask again take turns, a few at a time: when thousands of locks become free at once, each answer then comes
        long before its grant ends, however short the ttl is.
        """
        runtime = self.runtime
        pause = 0.02
        while self._live() and not runtime.forked:
            if placed:
                if self._doze():
                    return None
                await self._claim.changed()
            again = again or placed
            try:
                if again:
                    async with runtime.asking:
                        grant = await self._claim.attempt(wait=True)
                else:
                    grant = await runtime.gate.through(lambda: self._first(wait=True))
            except BackendError as error:
                if not error.retryable or not self._lasting:
                    raise
                await asyncio.sleep(pause * runtime.random.uniform(0.5, 1.0))
                pause = min(2 * pause, 1.0)
                placed, again = False, True
                continue
            if grant is None:
                pause = 0.02
                placed = True
            elif grant.until > runtime.clock():
                return grant
            else:
                self._outdated()
                await asyncio.sleep(pause * runtime.random.uniform(0.5, 1.0))
                pause = min(2 * pause, 1.0)
                placed, again = False, True
        return None

    # --- the hold

    def _begin(self, grant: Grant, now: float) -> None:
        claim = self._claim
        if grant.demand and claim.demanded_at is None:
            claim.demanded_at = now
        self._lasting = True
        self._passes = 0
        self._requested = False
        self._term = term = Term(claim, grant, now, self)
        self.runtime.watchdog.add(term)

    def _lend(self, terms: Terms, now: float) -> Lease:
        runtime, term = self.runtime, self._term
        assert term is not None  # noqa: S101 - only called where a term has just been seen
        if terms.max_hold is not None or term.limit != _NEVER:
            runtime.watchdog.limit(term, _NEVER if terms.max_hold is None else now + terms.max_hold)
        token = term.token
        term.token = token + 1
        term.left -= 1
        lease = Lease(self, term, terms.on_loss, token)
        self._lease = ref = _Borrower(lease, _dropped)
        ref.cohort = self
        stats = runtime.stats
        stats.acquired += 1
        # Counting each hold would be felt: most are not measured.
        self._weight = 0 if stats.acquired & stats.mask else stats.weigh()
        self._since = now
        return lease

    def _hand_over(self, now: float) -> bool:
        head = None if self._line is None else self._line.next()
        if head is None:
            return False
        waiter, terms = head
        waiter.set_result(self._lend(terms, now))
        return True

    def leave(self, lease: Lease, keep: float = 0) -> Claim | None:
        """End the turn of ``lease``: pass the hold on, or return the claim that is to be released."""
        term, runtime = self._term, self.runtime
        if self._lease is None or self._lease() is not lease or term is None:
            return None
        self._lease = None
        now = runtime.clock()
        weight, begun = self._weight, self._since
        claim = None
        if not keep and self._line is not None and self._may_pass(term, now) and self._hand_over(now):
            since = term.claim.demanded_at
            self._passes += since is not None and since <= now
            runtime.stats.passed += 1
        else:
            claim = self._yield_claim(term, at_once=not keep)
        # Whoever is next does not wait for this.
        stats = runtime.stats
        stats.released += 1
        if weight:
            stats.holds.record(now - begun, weight)
        return claim

    def shared(self) -> bool:
        """Test whether other levels of the hold are open: a cohort lends it to one lease at a time."""
        return False

    def _may_pass(self, term: Term, now: float) -> bool:
        since = term.claim.demanded_at
        waited = None if since is None or since > now else now - since
        return (
            term.renewed
            and not self._requested
            and may_pass(term.left, term.until - now, term.ttl, self._passes, waited)
        )

    def _yield_claim(self, term: Term, *, at_once: bool = True) -> Claim | None:
        """The hold goes back to the server; whoever waits here bids again, behind the other processes.

        What is returned is still to be released; nothing if, ``at_once``, one step did both.
        """
        claim, live = self._claim, self._live()
        heir = claim.give_way() if at_once and live else None
        self.runtime.watchdog.discard(term)
        self._term = None
        if not live:
            self._end()
            return claim
        if heir is None:
            self._claim = self.runtime.backend.claim(self._bid)
            self._drive(placed=False)
            return claim
        self._claim = heir
        self._drive(placed=True)
        return None

    def weaken(self, lease: Lease) -> Cohort:
        """The hold of ``lease`` becomes a read hold, of a cohort that nobody else joins; who waits here bids anew."""
        term = self._term
        if term is None or self._lease is None or self._lease() is not lease:
            raise RuntimeError(f"this lease of {shorten(self._bid.name)} has no hold of its own any more")
        alone = Cohort(self.runtime, replace(self._bid, kind=READ), None, self._claim)
        alone._lasting = True
        alone._passes = alone._weight = 0
        alone._since = self._since
        alone._requested = False
        alone._term = term
        alone._lease = ref = _Borrower(lease, _dropped)
        ref.cohort = alone
        term.keeper = alone
        self._lease = self._term = None
        if self._live():
            self._claim = self.runtime.backend.claim(self._bid)
            self._drive(placed=False)
        else:
            self._end()
        return alone

    def dropped(self, ref: _Borrower) -> None:
        """Somebody acquired a lease and lost sight of it. May run in any thread, whenever memory is collected."""
        loop = self.runtime.loop
        if self._lease is ref and loop is not None and not loop.is_closed() and not self.runtime.forked:
            loop.call_soon_threadsafe(self._recover, ref)

    def _recover(self, ref: _Borrower) -> None:
        if self._lease is not ref or self._term is None:
            return
        self._lease = None
        now = self.runtime.clock()
        if not (self._line and self._may_pass(self._term, now) and self._hand_over(now)):
            self._clean_up(self._yield_claim(self._term))
        warnings.warn(
            f"a lease of {shorten(self._bid.name)} was dropped without a release: keep it, or use `async with`",
            ResourceWarning,
            stacklevel=1,
        )

    # --- the ends

    def _live(self) -> bool:
        return bool(self._line)

    def _end(self) -> None:
        self._ended = True
        runtime, key = self.runtime, self._key
        if key is None:
            runtime.contenders.pop(self, None)
        elif runtime.shared.get(key) is self:
            del runtime.shared[key]

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

    def _clean_up(self, claim: Claim | None) -> None:
        if claim is not None:
            self.runtime.clean_up(claim)

    def _outdated(self) -> None:
        """A grant came later than its own end, which is no success: the claim asks again, or a new one does."""
        if not self._claim.asks_again:
            self.runtime.clean_up(self._claim)
            self._claim = self.runtime.backend.claim(self._bid)

    def _fail(self, error: Exception) -> None:
        if self._ended:
            return
        for waiter in self._line or ():
            waiter.set_exception(copy_of(error))
        self.runtime.clean_up(self._claim)
        self._end()

    def term_lost(self, term: Term, reason: LossReason) -> None:
        """Tell the holder, and let those who wait begin anew."""
        lease = None if self._lease is None else self._lease()
        self._lease = None
        if lease is not None:
            lease.lose(reason)
        # Also if the server says that the hold is gone: a request on its way may have taken a place since.
        self._clean_up(self._yield_claim(term, at_once=False))

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
        for waiter in self._line or ():
            waiter.set_exception(closed_error())
        lease = None if self._lease is None else self._lease()
        self._lease = None
        if self._term is not None:
            self.runtime.watchdog.discard(self._term)
            self._term = None
        if lease is not None:
            lease.lose("closed")
        self._end()
        self._dozing = False
        if self._driver is not None:
            self._driver.cancel()
        return self._claim

    def bury(self) -> None:
        """Mark the hold as lost without the event loop, which was closed."""
        lease = None if self._lease is None else self._lease()
        self._lease = self._term = None
        self._ended = True
        if lease is not None:
            lease.bury()


class _Borrower(weakref.ref[Lease]):
    """Whose turn it is, and of which cohort: a weak reference whose callback needs no bound method of its own."""

    __slots__ = ("cohort",)

    cohort: Cohort


def _dropped(ref: _Borrower) -> None:
    ref.cohort.dropped(ref)


def _time_out(waiter: Waiter) -> None:
    if not waiter.done():
        waiter.set_result(None)


def closed_error() -> RuntimeError:
    """What tasks hear that wait when their client is closed."""
    return RuntimeError("the client was closed while this task waited for a lock")


def copy_of(error: Exception) -> BackendError:
    """The same error for another task: exceptions collect tracebacks, and must not be shared."""
    if isinstance(error, BackendError):
        copy = type(error)(str(error), retryable=error.retryable)
        copy.__cause__ = error.__cause__
    else:
        copy = BackendError(f"the backend failed unexpectedly: {error!r}")
        copy.__cause__ = error
    return copy
