"""Terms, and the timer of a client by which they are renewed, or lost when they end.

A :class:`Term` is arithmetic without a clock: until when a hold is certain, and when to ask again. The
:class:`Watchdog` looks at the clock, asks the backend for many terms at once, and ends a term when the server says
so or when its time is over, whichever is first. Unknown is not lost: an error or silence leads to another request,
sooner, until the term ends.

A term that is over is ended inside the callback of a timer, with no task in between. After a stop of the process all
timers that came due are called in one pass of the loop, before the first task that waited for a timer or a socket goes
on, so that the work under the lease is cancelled instead of continued.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextvars import Context, copy_context
from itertools import chain
from random import Random
from typing import Any, Protocol

from aiolock.clock import Clock
from aiolock.contract import Claim, Grant, News, Notice, Renewal
from aiolock.delivery import expect
from aiolock.errors import LossReason, shorten
from aiolock.figures import SHARES, Histogram
from aiolock.logs import Log, get_logger
from aiolock.suspend import Timer, open_timer

__all__ = ["Keeper", "Term", "Watchdog"]

log: Log = get_logger("aiolock.renew")

LOOK = 0.25
"""Seconds between looks at the clock while anything is held: timers stand still during suspend, the clock does not."""
FULL = 0.9
"""The share of its ttl that a grant has left when it arrives, if it was not pushed and the link is not slow."""
VERIFIED = 30.0
"""Seconds within which a hold that is not prolonged is verified, if its ttl is not shorter than three times that."""
AFTER = 0.01
"""Seconds by which the timer that runs during suspend is set later than that of the loop: it is not to come first."""


class Keeper(Protocol):
    """Whoever has a term, and is told how it ends."""

    def term_lost(self, term: Term, reason: LossReason) -> None:
        """The server may give the lock to somebody else from now on."""

    def term_overstayed(self, term: Term) -> None:
        """``max_hold`` is over; the hold is not renewed any more."""

    def term_requested(self, term: Term, reason: str) -> None:
        """Somebody asks the holder to let go."""


class Term:
    """Until when a hold is certain, by the local clock, and when to renew it."""

    __slots__ = (
        "asked",
        "claim",
        "due",
        "end",
        "full",
        "keeper",
        "left",
        "limit",
        "over",
        "queue",
        "renewed",
        "token",
        "until",
    )

    def __init__(self, claim: Claim, grant: Grant, now: float, keeper: Keeper) -> None:
        self.claim: Claim = claim
        self.keeper: Keeper = keeper
        self.token: int = grant.token
        """The next token to hand out."""
        self.left: int = grant.count
        """How many tokens are still to be handed out."""
        self.limit: float = math.inf
        """When ``max_hold`` ends."""
        self.over: bool = False
        """Released or lost: nothing that arrives later matters."""
        self.asked: bool = False
        """A renewal is under way or failed: nothing has been heard since."""
        self.renewed: bool = True
        """Whether it is prolonged; not any more after ``max_hold``, and not if the claim is fixed."""
        self.end: float = math.inf
        """When it ends if the claim is fixed, whatever the server says."""
        self.queue: dict[Term, None] | None = None
        """Where the watchdog has put it."""
        self.until: float = grant.until
        self.full: bool = grant.until - now >= FULL * claim.bid.ttl
        """Whether it has had a whole ttl: not if the grant was pushed, which the first renewal confirms."""
        # As `_due`, in place: this is done for every acquire.
        due, soon = grant.until - 2 / 3 * claim.bid.ttl, now + (grant.until - now) / 3
        self.due: float = max(soon, due)

    @property
    def ttl(self) -> float:
        """Seconds that a renewal asks for."""
        return self.claim.bid.ttl

    @property
    def pace(self) -> float:
        """The ttl by which requests to the server are spaced: it may be hours if the claim is fixed."""
        return min(self.ttl, 3 * VERIFIED) if self.claim.fixed else self.ttl

    @property
    def asks(self) -> bool:
        """Whether the server is asked about it at all."""
        return self.renewed or self.claim.fixed

    def extend(self, until: float, now: float) -> None:
        """Learn that the hold is certain until then; ask again when two thirds of a ttl are left."""
        self.until = max(self.until, min(until, self.end))
        self.due = self._due(now)

    def fix(self, end: float, now: float) -> None:
        """Prolong it no more, and verify it until ``end``."""
        self.renewed, self.claim.fixed, self.end = False, True, end
        self.until = min(self.until, end)
        self.due = self._due(now)

    def _due(self, now: float) -> float:
        if self.claim.fixed:
            return min(now + self.pace / 3, self.until)
        due, soon = self.until - 2 / 3 * self.ttl, now + (self.until - now) / 3
        # A pushed grant is short: ask after a third of what it has.
        return max(soon, due)

    def patience(self, seconds: float, now: float) -> float:
        """How long to wait before asking again: less towards the end, of which a pushed grant is never far."""
        return max(min(seconds, (self.until - now) / 3), self.pace / 100)

    @property
    def event(self) -> float:
        """When this term needs attention next."""
        return min(self.due, self.until, self.limit) if self.asks else self.until


class Watchdog:
    """Renews the terms of one client, and ends them."""

    def __init__(
        self,
        renew: Callable[[Sequence[Claim]], Awaitable[Sequence[Renewal]]],
        notice: Callable[[], Awaitable[Notice]],
        *,
        clock: Clock,
        random: Random,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        alive: Callable[[], bool],
    ) -> None:
        self._renew = renew
        self._notice = notice
        self._clock = clock
        self._random = random
        self._spawn = spawn
        self._alive = alive
        # Most terms end before the next look, so a newcomer is only noted until then. Terms of one ttl fall due in the
        # order in which they were granted or renewed, so a dict per ttl is a queue from which any term can leave.
        # Whatever does not follow that order is watched one by one.
        self._new: dict[Term, None] = {}
        self._calm: dict[float, dict[Term, None]] = {}
        self._watched: dict[Term, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop on which timers are set; none before the first :meth:`run` and after the end of the client."""
        self._context: Context | None = None
        self._listening = False
        self._timer: asyncio.TimerHandle | None = None
        self._next_look = math.inf
        self._boot_timer: Timer | None = None
        self.renewals: int = 0
        self.failures: int = 0
        self.losses: int = 0
        self.slack: Histogram = Histogram(SHARES)

    # --- what leases do

    def __len__(self) -> int:
        return len(self._new) + sum(map(len, self._calm.values())) + len(self._watched)

    def _terms(self) -> Iterator[Term]:
        """All of them."""
        return chain(self._new, *self._calm.values(), self._watched)

    def add(self, term: Term) -> None:
        """Watch a term until it is discarded or lost."""
        term.claim.term = term
        self._new[term] = None
        term.queue = self._new
        if term.due < self._next_look and self._loop is not None:
            self._set_timer(term.due)

    def discard(self, term: Term) -> None:
        """The hold is given up: nothing more is to be said about it."""
        term.over = True
        term.claim.term = None
        if term.queue is not None:
            del term.queue[term]
            term.queue = None

    def limit(self, term: Term, when: float) -> None:
        """Stop renewing a term at ``when``; ``inf`` lifts an earlier limit."""
        if term.limit != when:
            self._lift(term)
            term.limit = when
            self._settle(term)

    def stop_renewing(self, term: Term, seconds: float) -> None:
        """Let a term end by itself, in ``seconds`` at the latest; until then it is only verified."""
        self._lift(term)
        now = self._clock()
        term.fix(now + seconds, now)
        self._settle(term)

    def learn(self, term: Term, grant: Grant) -> None:
        """A grant came in another way than by a renewal."""
        if not term.over:
            self._learn(term, grant, self._clock())

    def _settle(self, term: Term) -> None:
        queue = self._watched
        if not term.asked and term.limit == math.inf and term.asks:
            calm = self._calm.setdefault(term.pace, {})
            # A grant that was pushed is short, and so falls due before its neighbours.
            if not calm or term.due >= next(reversed(calm)).due:
                queue = calm
        queue[term] = None
        term.queue = queue
        if term.event < self._next_look and self._loop is not None:
            self._set_timer(term.event)

    def _lift(self, term: Term) -> None:
        if term.queue is not None:
            del term.queue[term]
            term.queue = None

    async def renew(self, term: Term) -> None:
        """Renew one term now, in the caller's time; raises what the backend raises, and ends a term that is gone."""
        [answer] = await self._renew([term.claim])
        if term.over:
            return
        if isinstance(answer, str):
            self.lose(term, answer)
        elif isinstance(answer, Exception):
            raise answer
        else:
            self._learn(term, answer, self._clock())

    # --- the timer

    def _set_timer(self, when: float) -> None:
        loop = self._loop
        assert loop is not None  # noqa: S101 - all callers have looked
        if not self._listening:
            # The task that listens was cancelled from outside, and cost the leases of that time.
            self._listening = True
            self._spawn(self.run(), "aiolock-watchdog")
        if self._timer is not None:
            self._timer.cancel()
        # The loop's clock first: a stop between the two must not make the timer late by as much.
        due, now = loop.time(), self._clock()
        self._next_look = min(when, now + LOOK)
        due += max(0.0, self._next_look - now)
        # Not in the context of the task that acquires: it would be kept, by one timer after the other.
        self._timer = loop.call_at(due, self._look, context=self._context)
        expect(loop, self, self._next_look, self._clock)
        if self._boot_timer is not None:
            self._boot_timer.set(self._next_look + AFTER)

    def _unset_timer(self) -> None:
        self._next_look = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop is not None:
            expect(self._loop, self, math.inf, self._clock)

    def _look(self) -> None:
        """Look at the clock: end what is over, renew what is due, and set the timer again if anything is held."""
        self._unset_timer()
        if self._loop is None or not self._alive():
            return
        try:
            self._judge()
            # With nothing held there is nothing to look at: the next `add` sets the timer.
            if len(self):
                self._set_timer(self._next_event())
        except Exception as error:  # noqa: BLE001 - a defect here must not leave a lease that is only believed in
            self._lose_all(repr(error))

    def _lose_all(self, why: str) -> None:
        terms = list(self._terms())
        for term in terms:
            self.lose(term, "closed")
        if terms:
            log.error(
                "renewal ended (%s): %d leases of this client are lost",
                why,
                len(terms),
                extra={"locks": len(terms)},
            )

    async def run(self) -> None:
        """Listen to the server until cancelled, while the timer does the rest.

        Cancelling it ends all terms, unless the client is closed: it can no longer tell of losses.
        """
        loop = self._loop = asyncio.get_running_loop()
        self._context = self._context or copy_context()
        self._listening = True
        if self._boot_timer is None:
            self._boot_timer = open_timer(loop, self._clock, self._look)
        if len(self):
            self._set_timer(self._next_event())
        try:
            await self._listen()
        finally:
            self._listening = False
            if self._alive():
                self._lose_all("its task was cancelled by the program")

    def close(self) -> None:
        """Set no timer any more: the client, or its loop, is closed."""
        self._unset_timer()
        self._loop = None
        if self._boot_timer is not None:
            self._boot_timer.close()
            self._boot_timer = None

    def _next_event(self) -> float:
        # A new dict as well: an emptied one keeps the size that it had.
        new, self._new = self._new, {}
        for term in new:
            self._settle(term)
        for ttl in [ttl for ttl, queue in self._calm.items() if not queue]:
            del self._calm[ttl]
        heads = [next(iter(queue)).event for queue in self._calm.values()]
        heads += [term.event for term in self._watched]
        return min(heads, default=math.inf)

    def _judge(self) -> None:
        now = self._clock()
        if self._next_event() > now:
            return
        due: list[Term] = []
        for queue in self._calm.values():
            for term in queue:
                # A little early is in time: what falls due soon travels along in one request.
                if term.due > now + 0.02 * term.ttl:
                    break
                due.append(term)
        due += [term for term in self._watched if term.event <= now]
        ask: list[Term] = []
        for term in due:
            if term.over:
                continue
            if term.until <= now:
                self.lose(term, "expired")
            elif not term.asks:
                continue
            elif term.limit <= now:
                self._lift(term)
                term.renewed, term.limit = False, math.inf
                self._settle(term)
                self._tell(term, term.keeper.term_overstayed, term)
            elif term.due <= now + 0.02 * term.ttl:
                ask.append(term)
        if ask:
            self._ask(ask, now)

    # --- asking, and what is said unasked

    def _ask(self, terms: list[Term], now: float) -> None:
        for term in terms:
            # Silence is answered by asking again beside the first request, well before the term ends.
            self._await_answer(term, now + term.patience(term.pace / 6, now))
        try:
            self._spawn(self._round(terms), "aiolock-renewal")
        except Exception as error:  # noqa: BLE001 - the application's task factory; they are asked again
            _warn(repr(error), terms, now)

    def _await_answer(self, term: Term, due: float) -> None:
        self._lift(term)
        term.asked = True
        term.due = due
        self._settle(term)

    async def _round(self, terms: list[Term]) -> None:
        self.renewals += sum(term.renewed for term in terms)
        try:
            answers: Sequence[Renewal] = await self._renew([term.claim for term in terms])
        except Exception as error:  # noqa: BLE001 - whatever a backend raises must not end the watching
            answers = [error] * len(terms)
        now = self._clock()
        failed: dict[str, list[Term]] = {}
        for term, answer in zip(terms, answers, strict=True):
            if term.over:
                continue
            if isinstance(answer, str):
                self.lose(term, answer)
            elif isinstance(answer, Exception):
                failed.setdefault(str(answer), []).append(term)
            else:
                self._learn(term, answer, now)
        if failed:
            # The same for all: what failed together is asked together again.
            share = self._random.uniform(0.5, 1.0)
            for why, those in failed.items():
                self.failures += len(those)
                _warn(why, those, now)
                for term in those:
                    self._await_answer(term, now + term.patience(term.pace / 10, now) * share)

    def _learn(self, term: Term, grant: Grant, now: float) -> None:
        claim = term.claim
        if grant.demand and claim.demanded_at is None:
            claim.demanded_at = now
        self._lift(term)
        if term.renewed and term.full:
            self.slack.record((term.until - now) / term.ttl)
        term.full = True
        # A reply that arrives after its own term proves that the hold went on, but not that it still does.
        term.asked = grant.until <= now and not claim.fixed
        term.extend(grant.until, now)
        self._settle(term)

    async def _listen(self) -> None:
        while self._alive():
            try:
                self._hear(await self._notice())
            except Exception as error:  # noqa: BLE001 - whatever a backend raises must not end the listening
                log.warning("listening to the server failed: %r", error)
                await asyncio.sleep(LOOK)

    def _hear(self, notice: Notice) -> None:
        if notice.news is News.LOST and notice.claim is not None:
            lost = getattr(notice.claim, "term", None)
            if isinstance(lost, Term):
                self.lose(lost, notice.reason)
        elif notice.news is News.REQUESTED and notice.claim is not None:
            asked = getattr(notice.claim, "term", None)
            if isinstance(asked, Term):
                self._tell(asked, asked.keeper.term_requested, asked, notice.text)
        elif notice.news is News.DOUBT:
            doubtful = [term for term in self._terms() if term.asks and notice.claim in (None, term.claim)]
            if doubtful:
                self._ask(doubtful, self._clock())

    def lose(self, term: Term, reason: LossReason) -> None:
        """End a term and tell its keeper; the only place where that happens."""
        if not term.over:
            self.discard(term)
            # From here on it is not held, whatever becomes of telling the keeper.
            term.until = min(term.until, self._clock())
            self.losses += 1
            self._tell(term, term.keeper.term_lost, term, reason)

    def _tell(self, term: Term, tell: Callable[..., None], *what: object) -> None:
        try:
            tell(*what)
        except Exception as error:  # noqa: BLE001 - one lease must not cost the others their renewal
            log.error("telling the holder of %s failed", shorten(term.claim.bid.name), exc_info=error)


def _warn(why: str, terms: Sequence[Term], now: float) -> None:
    """One line, however many there are: the term that ends first stands for all."""
    first = min(terms, key=lambda term: term.until)
    name, others = first.claim.bid.name, len(terms) - 1
    log.warning(
        "renewal of %s%s failed: %s",
        shorten(name),
        f" and {others} more" if others else "",
        why,
        extra={"lock": name, "ttl": first.ttl, "left": first.until - now, "locks": len(terms)},
    )
