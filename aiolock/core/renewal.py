"""Renewal scheduler: renew the holds of a client in batches, and end those that are lost.

A :class:`Validity` is arithmetic without a clock: until when a hold is certain, and when to renew it. The
:class:`RenewalScheduler` renews many holds in one call of the backend, and ends a validity when the server answers that the
hold is gone or when its time is over, whichever is first. Unknown is not lost: an error or silence leads to another request,
sooner, until the validity ends.

A validity is ended inside the callback of a timer, with no task in between. After a stop of the process all timers that came
due are called in one pass of the loop, before the first task that waited for a timer or a socket goes on, so that the work
under the lease is cancelled instead of continued.

One file, because the order in which the scheduler keeps validities follows from their arithmetic.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextvars import Context, copy_context
from dataclasses import replace
from itertools import chain
from random import Random
from typing import Any

from aiolock.clock import Clock
from aiolock.core.backend import (
    Backend,
    Certainty,
    Claim,
    Event,
    EventKind,
    Grant,
    Renewal,
    expires_at,
)
from aiolock.core.capabilities import Extension
from aiolock.core.logs import Log, get_logger
from aiolock.core.present import PresentLease
from aiolock.core.suspend import Timer, open_timer
from aiolock.core.wakeup import expect
from aiolock.errors import LossReason, shorten
from aiolock.metrics import SHARES, Histogram

__all__ = ["RenewalScheduler", "Validity"]

log: Log = get_logger("aiolock.renew")

CHECK_EVERY = 0.25
"""Seconds between readings of the clock while anything is held: timers stand still during suspend, the clock does not."""
FULL = 0.9
"""The share of its ttl that a grant has left when it arrives, unless it was pushed or the connection is slow."""
VERIFIED = 30.0
"""Limit in seconds between verifications of a hold that is not prolonged; a third of its ttl if that is less."""
AFTER = 0.01
"""Seconds by which the timer that runs during suspend is later than that of the loop, so that it does not come first."""


class Validity(Certainty):
    """Until when a hold is certain, by the local clock, and when to renew it."""

    __slots__ = (
        "asked",
        "claim",
        "due",
        "end",
        "extensions",
        "full",
        "grace",
        "left",
        "limit",
        "present",
        "queue",
        "renewed",
        "report",
        "token",
        "until",
    )

    def __init__(self, claim: Claim, grant: Grant, now: float, report: Callable[[Event], None]) -> None:
        self.claim: Claim = claim
        self.report: Callable[[Event], None] = report
        """Called with the loss, each request to release and each renewal that failed. While the validity is not ``over``, a loss is that of the holder:
        by ``max_hold`` or ``grace``, earlier than the server may grant the lock to another client."""
        self.present: Callable[[float], PresentLease | None] | None = None
        """Returns the present lease at a time, for the server; ``None`` while only the first lease of the grant can be present."""
        self.token: int = grant.token
        """The next token to give out."""
        self.left: int = grant.count
        """The number of tokens that can still be given out."""
        self.limit: float = math.inf
        """The end of ``max_hold``."""
        self.asked: bool = False
        """True while a renewal is under way or has failed."""
        self.renewed: bool = True
        """True while it is prolonged: not after ``max_hold``, and not if the claim is fixed."""
        self.end: float = math.inf
        """The end of the hold if the claim is fixed, whatever the server answers; with ``grace``."""
        self.queue: dict[Validity, None] | None = None
        """The queue of the renewal scheduler that it is in; ``None`` before it was added, and once it is over."""
        request = claim.request
        self.grace: float = (grace := request.grace)
        """Seconds by which the holder loses it before the server can grant it to another; 0 once that has happened."""
        until = grant.until - grace
        self.until: float = until
        self.full: bool = grant.until - now >= FULL * request.ttl
        """False for a pushed grant, until its first renewal confirms it."""
        self.due: float = self._due(now)
        if request.life != math.inf:
            self._begin_life(now)

    @property
    def over(self) -> bool:
        """True once it was released or lost: nothing that arrives later matters."""
        return self.queue is None

    @property
    def ttl(self) -> float:
        """Seconds that a renewal asks for."""
        return self.claim.request.ttl

    @property
    def pace(self) -> float:
        """The ttl that the times of requests follow; that of a fixed claim may be hours."""
        return min(self.ttl, 3 * VERIFIED) if self.claim.fixed else self.ttl

    @property
    def asks(self) -> bool:
        """True if the server is asked about it at all."""
        return self.renewed or self.claim.fixed

    def note_present(self, now: float) -> None:
        """Give the claim the present lease, for a renewal that is sent ``now``."""
        self.claim.present = None if self.present is None else self.present(now)

    def prolong(self, until: float, now: float) -> None:
        """Record that the server does not grant it to another before ``until``; it is due again when two thirds of a ttl are left."""
        if self.renewed and self.claim.request.life != math.inf and until > now:
            self._fix(now)
        self.until = max(self.until, min(until, self.end) - self.grace)
        self.due = self._due(now)

    def begin_extension(self, seconds: float, now: float) -> tuple[int, float]:
        """Number a request for a life of ``seconds`` that is about to be sent; return the number, and the end of that life.

        From now on an earlier end counts. A later one does not before the answer: the server may never receive the request.
        """
        if self.renewed:
            # Not confirmed yet, which this request does as well.
            self._fix(now)
        self.extensions += 1
        end = expires_at(now, seconds)
        self.end = min(self.end, end)
        self.until = min(self.until, self.end - self.grace)
        self.due = self._due(now)
        return self.extensions, end

    def extended(self, number: int, end: float, grant: Grant, now: float) -> None:
        """Process the answer to such a request; the server may have carried out a later one by now, which then decides."""
        if number == self.extensions:
            self.end = end
            self.prolong(min(grant.until, end), now)

    def _begin_life(self, now: float) -> None:
        """Begin a life that is not prolonged: with this grant, or if it was pushed with the renewal that confirms it, at once."""
        self.until = min(self.until, now + self.claim.request.life - self.grace)
        self.due = now
        if self.full:
            self._fix(now)
            self.due = self._due(now)

    def _fix(self, now: float) -> None:
        """Prolong it no more, but verify it."""
        self.extensions: int = 0
        """The number of requests for another life."""
        self.renewed, self.claim.fixed, self.end = False, True, now + self.claim.request.life

    def _due(self, now: float) -> float:
        if self.claim.fixed:
            return min(now + self.pace / 3, self.until)
        due, soon = self.until - 2 / 3 * self.ttl, now + (self.until - now) / 3
        # A pushed grant is short: ask after a third of what it has.
        return max(soon, due)

    def retry_after(self, seconds: float, now: float) -> float:
        """Return at most ``seconds``, the time before the next request: less towards the end, which a pushed grant is near."""
        return max(min(seconds, (self.until - now) / 3), self.pace / 100)

    @property
    def event(self) -> float:
        """The time of its next event: renewal, end of ``max_hold``, or end."""
        return min(self.due, self.until, self.limit) if self.asks else self.until


class RenewalScheduler:
    """Renew the holds of one client, and end their validities."""

    def __init__(
        self,
        backend: Backend,
        *,
        clock: Clock,
        random: Random,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        alive: Callable[[], bool],
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._random = random
        self._spawn = spawn
        self._alive = alive
        # Most validities end before the next check, so a new one is only noted until then. Validities of one ttl fall due in the
        # order in which they were granted or renewed, so a dict for each ttl is a queue from which any of them can leave; so is
        # another for those whose max_hold ends before they fall due. What does not follow such an order is watched one by one,
        # so each of them is read whenever the clock is.
        self._new: dict[Validity, None] = {}
        self._calm: dict[tuple[float, bool], dict[Validity, None]] = {}
        self._watched: dict[Validity, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of the timers; ``None`` before the first :meth:`run` and after the end of the client."""
        self._context: Context | None = None
        self._listening = False
        self._timer: asyncio.TimerHandle | None = None
        self._next_check = math.inf
        self._boot_timer: Timer | None = None
        self.renewals: int = 0
        self.failures: int = 0
        self.losses: int = 0
        self.slack: Histogram = Histogram(SHARES)

    # --- holds begin and end

    def __len__(self) -> int:
        return len(self._new) + sum(map(len, self._calm.values())) + len(self._watched)

    def _validities(self) -> Iterator[Validity]:
        """Iterate over all validities."""
        return chain(self._new, *self._calm.values(), self._watched)

    def add(self, validity: Validity) -> None:
        """Watch a validity until it is discarded or lost."""
        claim = validity.claim
        claim.validity = validity
        if claim.early is not None:
            # There is no holder yet to report it to.
            self._backend.events.put(claim.early)
            claim.early = None
        self._new[validity] = None
        validity.queue = self._new
        self._attend(validity.due)

    def discard(self, validity: Validity) -> None:
        """Forget a validity, whose hold is released."""
        validity.claim.validity = None
        self._lift(validity)

    def limit(self, validity: Validity, when: float) -> None:
        """Stop renewing a validity at ``when``; ``inf`` lifts an earlier limit."""
        before, validity.limit = validity.event, when
        if validity.queue is self._new or validity.event == before:
            self._attend(validity.event)
        else:
            self._lift(validity)
            self._settle(validity)

    def learn(self, validity: Validity, grant: Grant) -> None:
        """Record a grant that came by another request than a renewal."""
        if not validity.over:
            self._learn(validity, grant, self._clock())

    def _settle(self, validity: Validity) -> None:
        queue = self._watched
        if not validity.asked and validity.asks:
            calm = self._calm.setdefault((validity.pace, validity.limit <= validity.due), {})
            # A grant that was pushed is short, and so falls due before its neighbours.
            if not calm or validity.event >= next(reversed(calm)).event:
                queue = calm
        queue[validity] = None
        validity.queue = queue
        self._attend(validity.event)

    def _attend(self, when: float) -> None:
        """Have the clock read at ``when``, or earlier."""
        if when < self._next_check and self._loop is not None:
            self._set_timer(when)

    def _lift(self, validity: Validity) -> None:
        if validity.queue is not None:
            del validity.queue[validity]
            validity.queue = None

    async def renew(self, validity: Validity) -> None:
        """Renew one hold now; raises what the backend raises, and ends the validity if the hold is gone.

        Cancelling it changes nothing but that the server may have done it.
        """
        validity.note_present(self._clock())
        [answer] = await self._backend.renew([validity.claim])
        if (error := self._take(validity, answer)) is not None:
            raise error

    async def extend(self, validity: Validity, claim: Extension, seconds: float) -> None:
        """Give a hold that is not renewed another life; raises what the backend raises.

        An earlier end counts before this sends anything. Cancelling it changes nothing but that the server may have done it.
        """
        self._lift(validity)
        number, end = validity.begin_extension(seconds, self._clock())
        self._settle(validity)
        claim.request = replace(claim.request, life=max(seconds, claim.request.life))
        grant = await claim.extend(seconds, number)
        if not validity.over:
            self._lift(validity)
            validity.extended(number, end, grant, self._clock())
            self._settle(validity)

    # --- the timer

    def _set_timer(self, when: float) -> None:
        loop = self._loop
        assert loop is not None  # noqa: S101 - all callers have tested it
        if not self._listening:
            # The task of `run` was cancelled from outside, which cost the leases of that time.
            self._listening = True
            self._spawn(self.run(), "aiolock-renewal-scheduler")
        if self._timer is not None:
            self._timer.cancel()
        # The loop's clock first: a stop between the two must not make the timer late by as much.
        due, now = loop.time(), self._clock()
        self._next_check = min(when, now + CHECK_EVERY)
        due += max(0.0, self._next_check - now)
        # Not in the context of the task that acquires, which one timer after the other would keep.
        self._timer = loop.call_at(due, self._check_clock, context=self._context)
        expect(loop, self, self._next_check, self._clock)
        if self._boot_timer is not None:
            self._boot_timer.set(self._next_check + AFTER)

    def _unset_timer(self) -> None:
        self._next_check = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop is not None:
            expect(self._loop, self, math.inf, self._clock)

    def _check_clock(self) -> None:
        """Read the clock: end what is over, renew what is due, and set the timer again if anything is held."""
        self._unset_timer()
        if self._loop is None or not self._alive():
            return
        try:
            self._judge()
            # With nothing held the timer stays unset: the next `add` sets it.
            if len(self):
                self._set_timer(self._next_event())
        except Exception as error:  # noqa: BLE001 - a defect here must not leave a lease that is only believed in
            self._lose_all(repr(error))
        except BaseException:
            # A callback ends the program; until it has ended, what is held is still watched.
            if len(self):
                self._set_timer(self._next_event())
            raise

    def _lose_all(self, why: str) -> None:
        validities = list(self._validities())
        for validity in validities:
            self.lose(validity, "closed")
        if validities:
            log.error(
                "renewal ended (%s): %d leases of this client are lost",
                why,
                len(validities),
                extra={"locks": len(validities)},
            )

    async def run(self) -> None:
        """React to the events of the server until cancelled, while the timer does the rest.

        Cancelling it loses all leases, unless the client is closed: losses could not be reported any more.
        """
        loop = self._loop = asyncio.get_running_loop()
        self._context = self._context or copy_context()
        self._listening = True
        if self._boot_timer is None:
            self._boot_timer = open_timer(loop, self._clock, self._check_clock)
        if len(self):
            self._set_timer(self._next_event())
        try:
            await self._listen()
        finally:
            self._listening = False
            if self._alive():
                self._lose_all("its task was cancelled by the program")

    def close(self) -> None:
        """Set no timer any more, because the client or its loop is closed."""
        self._unset_timer()
        self._loop = None
        if self._boot_timer is not None:
            self._boot_timer.close()
            self._boot_timer = None

    def _next_event(self) -> float:
        # A new dict as well: an emptied one keeps the size that it had.
        new, self._new = self._new, {}
        for validity in new:
            self._settle(validity)
        for key in [key for key, queue in self._calm.items() if not queue]:
            del self._calm[key]
        heads = [next(iter(queue)).event for queue in self._calm.values()]
        heads += [validity.event for validity in self._watched]
        return min(heads, default=math.inf)

    def _judge(self) -> None:
        now, lead = self._clock(), self._backend.renewal_lead
        if self._next_event() > now:
            return
        due: list[Validity] = []
        for queue in self._calm.values():
            for validity in queue:
                # A little early: what falls due soon goes into the same batch.
                if validity.event > now + lead * validity.ttl:
                    break
                due.append(validity)
        due += [validity for validity in self._watched if validity.event <= now]
        ask: list[Validity] = []
        for validity in due:
            if validity.over:
                continue
            if validity.until <= now:
                self._expire(validity)
            elif not validity.asks:
                continue
            elif validity.limit <= now:
                self._lift(validity)
                validity.renewed, validity.limit = False, math.inf
                self._settle(validity)
                self._report(validity, Event(EventKind.LOST, validity.claim, "max_hold"))
            elif validity.due <= now + lead * validity.ttl:
                ask.append(validity)
        if ask:
            self._ask(ask, now)

    # --- requests and events

    def _ask(self, validities: list[Validity], now: float) -> None:
        for validity in validities:
            # Without an answer another request follows beside the first, well before the validity ends.
            self._await_answer(validity, now + validity.retry_after(validity.pace / 6, now))
        try:
            self._spawn(self._round(validities), "aiolock-renewal")
        except Exception as error:  # noqa: BLE001 - the application's task factory; they are asked again
            _warn(repr(error), validities, now)

    def _await_answer(self, validity: Validity, due: float) -> None:
        self._lift(validity)
        validity.asked = True
        validity.due = due
        self._settle(validity)

    async def _round(self, validities: list[Validity]) -> None:
        """Renew in the batches of the backend, all at the same time; what has failed is requested again soon.

        Cancelling it does not end the batches; what fails in them is requested again as if there had been no answer.
        """
        self.renewals += sum(validity.renewed for validity in validities)
        failed: dict[str, list[Validity]] = {}
        batches = self._backend.batches(validities, lambda validity: validity.claim)
        await asyncio.wait(
            [self._spawn(self._renew_batch(batch, failed), "aiolock-renewal") for batch in batches]
        )
        if not failed:
            return
        # The same for all: what failed together is requested together again.
        now, share = self._clock(), self._random.uniform(0.5, 1.0)
        for why, those in failed.items():
            self.failures += len(those)
            _warn(why, those, now)
            # One may have been released while other batches were under way.
            for validity in [validity for validity in those if not validity.over]:
                self._await_answer(validity, now + validity.retry_after(validity.pace / 10, now) * share)
        # After that, because a callback of the application may end the program.
        for why, those in failed.items():
            for validity in those:
                if validity.renewed and not validity.over:
                    self._report(validity, Event(EventKind.FAILING, validity.claim, text=why))

    async def _renew_batch(self, batch: list[Validity], failed: dict[str, list[Validity]]) -> None:
        """Renew in one call of the backend; add what is unknown afterwards to ``failed``, by the error.

        After cancelling it the server may have prolonged the holds, and no validity has been prolonged.
        """
        now = self._clock()
        for validity in batch:
            validity.note_present(now)
        try:
            answers: Sequence[Renewal] = await self._backend.renew([validity.claim for validity in batch])
        except Exception as error:  # noqa: BLE001 - whatever a backend raises must not end the watching
            answers = [error] * len(batch)
        for validity, answer in zip(batch, answers, strict=True):
            if (failure := self._take(validity, answer)) is not None:
                failed.setdefault(str(failure), []).append(validity)

    def _take(self, validity: Validity, answer: Renewal) -> Exception | None:
        """Process the answer about one hold; return it if it is an error."""
        if validity.over:
            return None
        if isinstance(answer, str):
            self.lose(validity, answer)
        elif isinstance(answer, Exception):
            return answer
        else:
            self._learn(validity, answer, self._clock())
        return None

    def _learn(self, validity: Validity, grant: Grant, now: float) -> None:
        claim = validity.claim
        if grant.demand:
            claim.note_waiters(now)
        self._lift(validity)
        if validity.renewed and validity.full:
            self.slack.record((validity.until - now) / validity.ttl)
        validity.full = True
        # An answer that arrives after its own end proves that the hold went on, but not that it still does.
        validity.asked = grant.until <= now and not claim.fixed
        validity.prolong(grant.until, now)
        self._settle(validity)

    async def _listen(self) -> None:
        while self._alive():
            try:
                self._react(await self._backend.events.get())
            except Exception as error:  # noqa: BLE001 - whatever a backend raises must not end the listening
                log.warning("listening to the server failed: %r", error)
                await asyncio.sleep(CHECK_EVERY)

    def _react(self, event: Event) -> None:
        validity = None if event.claim is None else event.claim.validity
        if event.kind is EventKind.LOST and isinstance(validity, Validity):
            if event.reason == "expired":
                self._expire(validity)
            else:
                self.lose(validity, event.reason)
        elif event.kind is EventKind.REQUESTED and isinstance(validity, Validity):
            self._report(validity, event)
        elif event.kind is EventKind.REQUESTED and event.claim is not None:
            event.claim.early = event
        elif event.kind is EventKind.DOUBT:
            doubtful = [
                validity
                for validity in self._validities()
                if validity.asks and event.claim in (None, validity.claim)
            ]
            if doubtful:
                self._ask(doubtful, self._clock())

    def _expire(self, validity: Validity) -> None:
        """Record that the time of a holder is over; with ``grace``, the server keeps the lock until the block has ended, if not longer."""
        if not validity.grace:
            self.lose(validity, "expired")
            return
        self._lift(validity)
        validity.until, validity.grace, validity.renewed = validity.until + validity.grace, 0.0, False
        self._settle(validity)
        self._report(validity, Event(EventKind.LOST, validity.claim, "expired"))

    def lose(self, validity: Validity, reason: LossReason) -> None:
        """End a validity and report it; the only place where that happens."""
        if not validity.over:
            self.discard(validity)
            # From here on it is not held, even if reporting it fails.
            validity.until = min(validity.until, self._clock())
            self.losses += 1
            self._report(validity, Event(EventKind.LOST, validity.claim, reason))

    def _report(self, validity: Validity, event: Event) -> None:
        try:
            validity.report(event)
        except Exception as error:  # noqa: BLE001 - one lease must not cost the others their renewal
            name = validity.claim.request.name
            log.error(
                "notifying the holder of %s failed", shorten(name), exc_info=error, extra={"lock": name}
            )


def _warn(why: str, validities: Sequence[Validity], now: float) -> None:
    """Log one line for all: the validity that ends first stands for the others."""
    first = min(validities, key=lambda validity: validity.until)
    name, others = first.claim.request.name, len(validities) - 1
    log.warning(
        "renewal of %s%s failed: %s",
        shorten(name),
        f" and {others} more" if others else "",
        why,
        extra={"lock": name, "ttl": first.ttl, "left": first.until - now, "locks": len(validities)},
    )
