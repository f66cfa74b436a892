"""The local queue: tasks of one client that request one lock share a claim and hand it over (lock cohorting).

A :class:`LocalQueue` exists for each name, kind and ttl while tasks of this client hold or request them. Its first task sends
the request itself. If the server answers with a position in its queue, the inbox of the claim wakes the local queue, so that
a waiter costs a future, and nothing at the server when it gives up. The next holder is the next waiter as long as
:func:`may_hand_over` allows; then the claim goes back, and the next request of the local queue stands behind the other clients.
With ``fair=True``, and for locks that are not exclusive, each task has a local queue of its own.

Bounded local passing is lock cohorting (Dice, Marathe, Shavit, PPoPP 2012). The file is long because the local queue is one
state machine: who waits, what the server was asked, and the hold change together, in every transition.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Coroutine
from dataclasses import replace
from enum import Enum
from typing import Any, cast

from aiolock.core.backend import Claim, Event, EventKind, Grant, Request, margin
from aiolock.core.cancellation import Task
from aiolock.core.hold import Hold, LeaseOptions
from aiolock.core.inbox import WakeReason, log_wake
from aiolock.core.logs import Log, get_logger, log_change
from aiolock.core.present import PresentLease
from aiolock.core.renewal import Validity
from aiolock.core.runtime import Runtime
from aiolock.core.tasks import Backoff
from aiolock.errors import BackendError, BackendUnavailable, closed_error, copy_of, shorten
from aiolock.types import READ, Kind

__all__ = ["LocalQueue", "QueueState", "Waiter", "Waiters", "ask", "may_hand_over"]

log: Log = get_logger("aiolock.queue")
_logger: logging.Logger = log.logger

MOST_HAND_OVERS = 16
"""Number of hand-overs in the client once it is known that other clients wait."""
LONGEST_HANDING_OVER = 0.005
"""Seconds in which the lock is handed over in the client once that is known."""

FEW = 32
"""Number of tasks that gave up that any local queue may keep."""

_NEVER = math.inf

Waiter = asyncio.Future[Hold | None]
"""Done with a hold, or with ``None`` when the timeout is over."""


class QueueState(Enum):
    """The state of a local queue.

    ============== ================================================ =============================================================
    State          Event                                            Next state
    ============== ================================================ =============================================================
    ``IDLE``       the first task asks                              ``REQUESTING``
    ``REQUESTING`` granted                                          ``HELD``
    ``REQUESTING`` refused, and tasks wait                          ``WAITING``
    ``REQUESTING`` refused, or not answered in time: none waits     ``ENDED``
    ``REQUESTING`` error that no retry mends                        ``ENDED``
    ``WAITING``    a grant was pushed                               ``HELD``
    ``WAITING``    any other message, poll, or connection that came ``REQUESTING``
    ``WAITING``    the last waiter gives up                         ``ENDED``
    ``HELD``       the holder leaves, and may hand over             ``HELD``, with the next waiter
    ``HELD``       the holder leaves, or the hold is lost           ``REQUESTING`` with a new claim if tasks wait, else ``ENDED``
    any            the client is closed                             ``ENDED``
    ============== ================================================ =============================================================
    """

    IDLE = "idle"
    REQUESTING = "requesting"
    """A request for the claim is under way, in the first task or in a task of the client."""
    WAITING = "waiting"
    """The claim has a position in the server's queue."""
    HELD = "held"
    ENDED = "ended"


# Looking members up in their class would cost 3 to 4 % of a free acquire and release on memory:// (Python 3.11).
_IDLE, _REQUESTING, _WAITING, _HELD, _ENDED = QueueState


class Waiters:
    """The tasks that wait, in order, each with the options of its lease.

    A task that gives up stays until it is first, or until many others have given up: none has to be searched for. The first is
    kept apart, because most queues have a single one, and a deque takes 600 bytes.
    """

    __slots__ = ("_first", "_removed", "_rest")

    def __init__(self) -> None:
        self._first: tuple[Waiter, LeaseOptions] | None = None
        self._rest: deque[tuple[Waiter, LeaseOptions]] | None = None
        self._removed = 0
        """The number of tasks that gave up since the queue was last cleaned of them."""

    def __bool__(self) -> bool:
        """Return whether a task waits; those that were cancelled and have not run since do not count."""
        while (first := self._first) is not None and first[0].done():
            self._advance()
        return first is not None

    def waiting(self) -> list[Waiter]:
        """Return the waiters that are not done."""
        entries = [] if self._first is None else [self._first, *(self._rest or ())]
        return [waiter for waiter, _ in entries if not waiter.done()]

    def join(self, waiter: Waiter, options: LeaseOptions, *, first: bool = False) -> None:
        """Add a waiter at the end, or as the first one."""
        entry, front = (waiter, options), self._first
        if front is None:
            self._first = entry
            return
        if self._rest is None:
            self._rest = deque()
        if first:
            self._first = entry
            self._rest.appendleft(front)
        else:
            self._rest.append(entry)

    def next(self) -> tuple[Waiter, LeaseOptions] | None:
        """Remove and return the first waiter."""
        while (first := self._first) is not None:
            rest = self._rest
            self._first = rest.popleft() if rest else None
            if not first[0].done():
                return first
        return None

    def remove(self, waiter: Waiter) -> None:
        """Cancel a waiter, which counts no more."""
        waiter.cancel()
        self._removed += 1
        rest = self._rest
        if rest is not None and self._removed > FEW and 2 * self._removed > len(rest):
            self._removed = 0
            self._rest = deque(entry for entry in rest if not entry[0].done())

    def _advance(self) -> None:
        self._first = self._rest.popleft() if self._rest else None


def may_hand_over(
    left: int, certain: float, margin: float, hand_overs: int, contended_for: float | None
) -> bool:
    """Return whether the next local task may have the lock without a request to the server.

    ``left`` tokens can be given out, the claim is certain for ``certain`` seconds, of which the last ``margin`` do not count,
    and other clients have been known to wait for ``contended_for`` seconds (``None`` or less than 0: none waits), in which it
    was handed over ``hand_overs`` times in this client.
    """
    if left <= 0 or certain <= margin:
        return False
    return contended_for is None or (hand_overs < MOST_HAND_OVERS and contended_for < LONGEST_HANDING_OVER)


def ask(
    runtime: Runtime, request: Request, options: LeaseOptions, timeout: float | None
) -> Coroutine[Any, Any, Hold | None]:
    """Get a hold of ``request`` within ``timeout`` seconds, or ``None``; 0 tries once and joins no queue.

    Cancelling it leaves nothing held: a lock that the server may have granted meanwhile is handed over to the next local
    task or released in the background.
    """
    if runtime.connect is not None:
        return _reach_first(runtime, request, options, timeout)
    if request.fair or not request.kind.exclusive:
        asking: Coroutine[Any, Any, Hold | None] = LocalQueue(runtime, request, None).lead(options, timeout)
    elif (queue := runtime.shared.get(request.key)) is None:
        key = request.key
        runtime.shared[key] = first = LocalQueue(runtime, request, key)
        asking = first.lead(options, timeout)
    else:
        assert isinstance(queue, LocalQueue)  # noqa: S101 - only they are shared
        asking = queue.refuse() if timeout == 0 else queue.join(options, timeout)
    return _observe(runtime, options, asking) if runtime.hooks.active else asking


async def _observe(
    runtime: Runtime, options: LeaseOptions, asking: Coroutine[Any, Any, Hold | None]
) -> Hold | None:
    """Report the hold that ``asking`` returns to the callbacks of the client. Cancelling it is cancelling ``asking``."""
    begun = runtime.clock()
    hold = await asking
    if hold is not None:
        try:
            # The task may have waited for its turn since the grant.
            hold.observe(options.template, begun, cast("LocalQueue", hold.parent)._since)  # noqa: SLF001 - its own class
        except BaseException:
            # A callback ends the program.
            hold.abandon()
            raise
    return hold


async def _reach_first(
    runtime: Runtime, request: Request, options: LeaseOptions, timeout: float | None
) -> Hold | None:
    """Connect a lazy client, then ask: what a claim needs to know of the server is found out by connecting.

    Cancelling it leaves nothing held; the attempt to connect goes on.
    """
    left = await runtime.reach(timeout)
    return await ask(runtime, request, options, left)


class LocalQueue:
    """One claim, and the tasks of this client that wait for it."""

    __slots__ = (
        "__weakref__",
        "_claim",
        "_hand_overs",
        "_hold",
        "_key",
        "_known",
        "_label",
        "_queued",
        "_reason",
        "_request",
        "_since",
        "_state",
        "_task",
        "_validity",
        "_waiters",
        "runtime",
    )

    def __init__(
        self, runtime: Runtime, request: Request, key: str | None, claim: Claim | None = None
    ) -> None:
        self.runtime: Runtime = runtime
        self._request = request
        self._key = key
        """The key in the runtime's table of shared local queues; ``None`` if no other task joins."""
        self._claim = runtime.backend.claim(request) if claim is None else claim
        self._state = _IDLE
        self._validity: Validity | None = None
        """The validity of the claim's hold, while the state is HELD."""
        self._hold: Hold | None = None
        """The present hold, while the state is HELD."""
        self._waiters: Waiters | None = None
        """Made when a task has to wait."""
        self._task: asyncio.Task[None] | None = None
        """The task of the client that sends a request; ``None`` while the first task does."""
        self._label: str | None = None
        """The label of the lock object whose waiter got the hold, or empty; ``None`` before the first: it is that of the request."""
        self._known = False
        """True once the server has answered: from then on waiters survive an outage."""
        self._queued = False
        """True while the claim is known to have, or have had, a position in the server's queue."""
        self._reason = WakeReason.GRANTED
        """Why the latest waiter was given the hold, or ``CLOSED``."""
        # What only a hold has is set in `_begin` and `_lend`.
        self._hand_overs: int
        self._since: float
        if key is None:
            runtime.contenders[self] = None

    @property
    def kind(self) -> Kind:
        """The kind of lock."""
        return self._request.kind

    @property
    def waiting(self) -> int:
        """The number of tasks that wait."""
        return 0 if self._waiters is None else len(self._waiters.waiting())

    @property
    def ended(self) -> bool:
        """True if no task can hold or wait here any more."""
        return self._state is _ENDED

    def inside(self, name: str, task: Task) -> bool:
        """Test whether ``task`` is in a block under permits of the semaphore ``name``."""
        hold, request = self._hold, self._request
        if hold is None or hold.task is not task or request.name != name or not request.kind.counted:
            return False
        return hold.waited_for()

    def _become(self, state: QueueState) -> None:
        """Change the state; all transitions pass through here."""
        if _logger.isEnabledFor(logging.DEBUG):
            log_change(log, "local queue", self._request.name, self._state, state)
        self._state = state

    def _log_wake(self, reason: WakeReason, error: BaseException | None = None, *, own: bool = False) -> None:
        log_wake(self._request.name, self._request.kind, reason, error, own=own)

    # --- the first task

    async def lead(self, options: LeaseOptions, timeout: float | None) -> Hold | None:
        """Send the first request, and wait if the lock is taken. Cancelling it gives up the claim in the background."""
        runtime = self.runtime
        wait, clock = timeout != 0, runtime.clock
        start = clock() if timeout else 0.0
        self._become(_REQUESTING)
        if runtime.outages.open:
            runtime.outages.report()
        try:
            if runtime.limiter.room and (not timeout or timeout > 2 * runtime.command_timeout):
                # The backend bounds it.
                grant = await self._first_request(wait)
            else:
                async with asyncio.timeout(timeout if wait else runtime.command_timeout):
                    grant = await self._first_request(wait)
        except BackendError as error:
            if self._state is _ENDED:
                raise closed_error() from error
            self._log_wake(WakeReason.FAILED, error, own=True)
            if wait or not self._waiters:
                self._fail(error)
            else:
                # It concerns a task that does not wait. The others ask for themselves.
                self.runtime.clean_up(self._claim)
                self._request_anew()
            raise
        except TimeoutError:
            self._log_wake(WakeReason.TIMEOUT, own=True)
            unanswered = self.unanswered(timeout, whole=True) if timeout else self._not_asked()
            self._abandon()
            if unanswered is None:
                return None
            raise unanswered from None
        except BaseException as error:
            if isinstance(error, Exception):
                self._log_wake(WakeReason.FAILED, error, own=True)
            else:
                self._log_wake(WakeReason.CANCELLED, own=True)
            self._abandon()
            raise
        if self._state is _ENDED:
            self._log_wake(WakeReason.CLOSED, own=True)
            raise closed_error()
        if grant is not None and grant.until - self._request.grace > (now := clock()):
            self._begin(grant, now)
            return self._lend(options, now)
        if not wait:
            if grant is None:
                # The server keeps nothing of this request; tasks that wait go on with the claim.
                if self._waiters:
                    self._request_in_background()
                else:
                    self._end()
                return None
            self._abandon()
            raise BackendUnavailable(
                f"the answer about lock {shorten(self._request.name)} came later than its ttl of {self._request.ttl:g} s: "
                "the connection is slower than that, choose a longer ttl"
            )
        waiter = self._enqueue(options, first=True)
        if grant is None:
            self._wait_at_server()
        else:
            self._replace_outdated()
            self._request_in_background(again=True)
        return await self._wait(waiter, None if timeout is None else max(0.0, timeout - (clock() - start)))

    def unanswered(self, timeout: float, *, whole: bool = False) -> BackendUnavailable | None:
        """Return the error of a task whose time is over if the server has not answered; see :meth:`Runtime.unanswered`."""
        if self._state is not _REQUESTING or self._queued:
            return None
        return self.runtime.unanswered(self._request.name, timeout, whole=whole)

    def _not_asked(self) -> BackendUnavailable:
        name, limit = shorten(self._request.name), self.runtime.command_timeout
        return BackendUnavailable(
            f"lock {name} was not asked for within {limit:g} s: too many requests of this client came first"
        )

    async def _first_request(self, wait: bool) -> Grant | None:
        """Send the first request of the claim, once it is admitted. Cancelling it before that sends nothing."""
        limiter = self.runtime.limiter
        if limiter.room:
            limiter.room -= 1
        else:
            await limiter.admission()
        try:
            if self._state is _ENDED:
                # The client was closed before the admission.
                raise closed_error()
            grant = await self._claim.acquire(wait)
        except BaseException as error:
            limiter.failed(error)
            raise
        if limiter.room:
            # No request waits for its admission.
            limiter.room += 1
        else:
            limiter.answered()
        return grant

    # --- waiters

    def join(self, options: LeaseOptions, timeout: float | None) -> Coroutine[Any, Any, Hold | None]:
        """Wait behind the other tasks. Cancelling it changes nothing for them."""
        return self._wait(self._enqueue(options), timeout)

    async def refuse(self) -> None:
        """Return ``None`` to a task that does not wait: another one of this client holds the lock or waits for it."""
        unanswered = self.unanswered(0)
        if unanswered is not None:
            raise unanswered

    def _enqueue(self, options: LeaseOptions, *, first: bool = False) -> Waiter:
        waiter: Waiter = asyncio.Future(loop=self.runtime.loop)
        if self._waiters is None:
            self._waiters = Waiters()
            if self._validity is not None:
                self._validity.present = self.present
        self._waiters.join(waiter, options, first=first)
        return waiter

    async def _wait(self, waiter: Waiter, timeout: float | None) -> Hold | None:
        """Wait for a hold; return ``None`` if there is none after ``timeout`` seconds.

        Cancelling it gives back a hold that was handed over in the same step; with the last waiter the claim is given up.
        """
        # Every name in here is part of what a waiting task costs.
        timer = None
        self.runtime.stats.waited += 1
        begun = self.runtime.clock()
        if timeout is not None:
            timer = asyncio.get_running_loop().call_later(timeout, _time_out, self, waiter, timeout)
        try:
            hold = await waiter
        except BaseException:
            self.runtime.stats.waits.record(self.runtime.clock() - begun)
            self._give_up(waiter)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        # The hold has not left before this task goes on, so the reason is still its own.
        self._log_wake(WakeReason.TIMEOUT if hold is None else self._reason, own=True)
        if hold is None:
            self._forget(waiter)
        self.runtime.stats.waits.record((self.runtime.clock() if hold is None else self._since) - begun)
        return hold

    def _give_up(self, waiter: Waiter) -> None:
        # A hold may have been handed over in the very step in which the task was cancelled, or the coroutine closed.
        if not waiter.done() or waiter.cancelled():
            self._log_wake(WakeReason.CANCELLED, own=True)
        elif (error := waiter.exception()) is not None:
            if self._reason is WakeReason.CLOSED:
                self._log_wake(WakeReason.CLOSED, own=True)
            else:
                self._log_wake(WakeReason.FAILED, error, own=True)
        elif (given := waiter.result()) is not None:
            given.abandon()
        self._forget(waiter)

    def _forget(self, waiter: Waiter) -> None:
        """Remove a waiter; without any, the claim is given up."""
        if self._waiters is None:
            waiter.cancel()
            return
        self._waiters.remove(waiter)
        if self._waiters:
            return
        task = self._task
        if self._state is _WAITING or (task is not None and self._claim.begin_release() is not None):
            # The server knows, or is notified before any other request of this task: there is nothing to wait for.
            self._task = None
            if task is not None:
                task.cancel()
            self._abandon()
        elif task is not None:
            # It ends by the state that it checks; this only hurries it. Not at once: a task that is cancelled before its
            # first step never runs, and would leave the clean-up undone.
            asyncio.get_running_loop().call_soon(task.cancel)

    # --- requests in the background

    def _request_in_background(self, *, again: bool = False) -> None:
        """Have a task of the client send the request; ``again`` if the claim has sent one before."""
        self._become(_REQUESTING)
        self._task = self.runtime.spawn(self._request_until_answered(again), "aiolock-wait")

    async def _request_until_answered(self, again: bool) -> None:
        """Send the request until it is answered, as long as tasks wait. Cancelling it gives up the claim.

        Claims that ask again take turns, a few at a time: when thousands of locks become free at once, each answer then comes
        long before its grant ends, however short the ttl is.
        """
        runtime = self.runtime
        backoff = Backoff(runtime.random)
        try:
            while self._waiters and not runtime.forked and self._state is _REQUESTING:
                try:
                    if again:
                        async with runtime.asking:
                            grant = await self._claim.acquire(wait=True)
                    else:
                        grant = await self._first_request(wait=True)
                except BackendError as error:
                    if not error.retryable or not self._known:
                        raise
                    await backoff.pause()
                    again = True
                    continue
                if self._state is not _REQUESTING:
                    break
                if grant is None and not self._waiters:
                    break
                if grant is None:
                    self._wait_at_server()
                    return
                if grant.until - self._request.grace > (now := runtime.clock()):
                    self._grant(grant, now)
                    return
                self._replace_outdated()
                await backoff.pause()
                again = True
        except asyncio.CancelledError:
            self._abandon()
            raise
        except Exception as error:  # noqa: BLE001 - raised in the tasks that wait, whatever a backend raises
            self._fail(error)
            return
        self._abandon()

    def _wait_at_server(self) -> None:
        """Wait until the inbox of the claim reports."""
        self._known = self._queued = True
        self._become(_WAITING)
        self._task = None
        if not self._claim.inbox.on_ready(self._wake):
            self._wake()

    def _wake(self, _: WakeReason | None = None) -> None:
        """Hand over a grant that was pushed, or request again."""
        if self._state is not _WAITING:
            return
        grant, now = self._claim.inbox.take(), self.runtime.clock()
        if grant is None or grant.until - self._request.grace <= now:
            self._request_in_background(again=True)
        else:
            self._grant(grant, now)

    def _grant(self, grant: Grant, now: float) -> None:
        self._task = None
        self._begin(grant, now)
        if not self._hand_over(now, WakeReason.GRANTED):
            self._abandon()

    def _replace_outdated(self) -> None:
        """Ask again, with this claim or a new one, after a grant that came later than its own end, which is no success."""
        if not self._claim.asks_again:
            self.runtime.clean_up(self._claim)
            self._claim = self.runtime.backend.claim(self._request)
            self._queued = False

    # --- the hold

    def _begin(self, grant: Grant, now: float) -> None:
        claim = self._claim
        if grant.demand:
            claim.note_waiters(now)
        self._known = True
        self._hand_overs = 0
        self._validity = validity = Validity(claim, grant, now, self)
        if self._waiters is not None:
            validity.present = self.present
        self.runtime.scheduler.add(validity)
        self._become(_HELD)

    def _lend(self, options: LeaseOptions, now: float) -> Hold:
        runtime, validity = self.runtime, self._validity
        assert validity is not None  # noqa: S101 - only called where a validity has just been seen
        if options.max_hold is not None or validity.limit != _NEVER:
            runtime.scheduler.limit(validity, _NEVER if options.max_hold is None else now + options.max_hold)
        token = validity.token
        if token:
            validity.token = token + 1
        validity.left -= 1
        self._hold = hold = Hold(self, validity, options.on_loss, token)
        runtime.stats.acquired += 1
        self._since = now
        return hold

    def _hand_over(self, now: float, reason: WakeReason) -> bool:
        """Give the claim to the next waiter, if there is one, which logs the reason."""
        first = None if self._waiters is None else self._waiters.next()
        if first is None:
            return False
        waiter, options = first
        self._reason, self._label = reason, options.label
        waiter.set_result(self._lend(options, now))
        return True

    def leave(self, hold: Hold, keep: float = 0) -> Claim | None:
        """End ``hold``: hand the claim over, or return it to be released."""
        validity, runtime = self._validity, self.runtime
        if self._hold is not hold or validity is None:
            return None
        self._hold = None
        now = runtime.clock()
        begun, claim, stats = self._since, None, runtime.stats
        if (
            not keep
            and self._waiters is not None
            and self._may_hand_over(hold, now)
            and self._hand_over(now, WakeReason.HANDED_OVER)
        ):
            since = validity.claim.contended_since
            self._hand_overs += since is not None and since <= now
            stats.passed += 1
        else:
            claim = self._yield_claim(validity)
        stats.released += 1
        stats.holds.record(now - begun)
        if hold.observed is not None and hold.loss is None:
            try:
                hold.observed.released(now)
            except BaseException:
                # A callback ends the program, so the caller cannot release what it would have got.
                if claim is not None:
                    runtime.clean_up(claim, keep, hold.disown)
                raise
        return claim

    def levels(self) -> int:
        """Return 0: one hold at a time has the claim."""
        return 0

    def _may_hand_over(self, hold: Hold, now: float) -> bool:
        validity, claim = hold.validity, hold.validity.claim
        since = claim.contended_since
        waited = None if since is None else now - since
        # The claim may have another ttl than was asked for: that of a session.
        return (
            validity.renewed
            and may_hand_over(
                validity.left, validity.until - now, margin(claim.request.ttl), self._hand_overs, waited
            )
            and hold.request_reason is None
        )

    def _yield_claim(self, validity: Validity) -> Claim:
        """Return the claim to be released; tasks that wait request again, behind the other clients."""
        claim = self._claim
        self.runtime.scheduler.discard(validity)
        self._validity = None
        self._request_anew()
        return claim

    def downgrade(self, hold: Hold) -> LocalQueue:
        """Turn a write hold into a read hold, in a local queue that no other task joins; tasks that wait request anew."""
        validity = self._validity
        if validity is None or self._hold is not hold:
            raise RuntimeError(f"this lease of {shorten(self._request.name)} has no hold of its own any more")
        alone = LocalQueue(self.runtime, replace(self._request, kind=READ), None, self._claim)
        alone._known, alone._hand_overs, alone._since, alone._label = True, 0, self._since, self._label
        alone._validity, alone._hold = validity, hold
        alone._become(_HELD)
        validity.report, validity.present = alone, alone.present
        self._hold = self._validity = None
        self._request_anew()
        return alone

    # --- called by the renewal scheduler

    def present(self, now: float) -> PresentLease | None:
        """Return the present lease for a renewal; ``None`` if no task waits and the hold was not given to a waiter."""
        hold, waiting, label = self._hold, self.waiting, self._label
        if hold is None or (label is None and not waiting):
            return None
        who = self._request.label if label is None else self.runtime.identity(label)
        return PresentLease(hold.token, now - self._since, who, waiting)

    def __call__(self, event: Event) -> None:
        """Pass a loss, a request to release, or a renewal that failed, on to the hold.

        After a loss, tasks that wait request again. After ``max_hold`` or a loss with ``grace``, the lock stays until the
        holder leaves or the ttl ends.
        The local queue itself is what its validity calls: a bound method of it would cost every acquire 444 instructions.
        """
        hold, validity = self._hold, self._validity
        if event.kind is EventKind.REQUESTED:
            if hold is not None:
                hold.request(event.text)
        elif event.kind is EventKind.FAILING:
            if hold is not None:
                hold.renewal_failed(event.text)
        elif validity is not None and not validity.over:
            if hold is not None:
                hold.lose(event.reason)
        elif validity is not None:
            self._hold = None
            try:
                if hold is not None:
                    hold.lose(event.reason)
            finally:
                # Also if the server says that the hold is gone: a request on its way may have joined the queue since. And also
                # if a callback ends the program.
                self.runtime.clean_up(self._yield_claim(validity))

    # --- the end

    def _request_anew(self) -> None:
        """Request with a new claim for the tasks that wait, or end."""
        if self._waiters:
            self._claim = self.runtime.backend.claim(self._request)
            self._queued = False
            self._request_in_background()
        else:
            self._end()

    def _abandon(self) -> None:
        """Give up the claim, whose state at the server is unknown; tasks that wait go on with it."""
        if self._state is _ENDED:
            return
        if self._state is _WAITING:
            self._claim.inbox.close()
        self._task = None
        if self._waiters:
            self._request_in_background()
            return
        if self._validity is not None:
            self.runtime.scheduler.discard(self._validity)
            self._validity = None
        self.runtime.clean_up(self._claim)
        self._end()

    def _fail(self, error: Exception) -> None:
        if self._state is _ENDED:
            return
        self._task = None
        for waiter in self._waiters.waiting() if self._waiters is not None else ():
            waiter.set_exception(copy_of(error))
        self.runtime.clean_up(self._claim)
        self._end()

    def _end(self) -> None:
        self._become(_ENDED)
        runtime, key = self.runtime, self._key
        if key is None:
            runtime.contenders.pop(self, None)
        elif runtime.shared.get(key) is self:
            del runtime.shared[key]

    def close(self) -> Claim:
        """End because the client is closed: fail the waiters, lose the hold, and return the claim to be released."""
        for waiter in self._waiters.waiting() if self._waiters is not None else ():
            waiter.set_exception(closed_error())
        self._reason = WakeReason.CLOSED
        hold, self._hold = self._hold, None
        if self._validity is not None:
            self.runtime.scheduler.discard(self._validity)
            self._validity = None
        if hold is not None:
            hold.lose("closed")
        if self._state is _WAITING:
            self._claim.inbox.close()
        self._end()
        if self._task is not None:
            self._task.cancel()
        return self._claim

    def end_without_loop(self) -> None:
        """Lose the hold without the event loop, which was closed."""
        hold, self._hold, self._validity = self._hold, None, None
        self._become(_ENDED)
        if hold is not None:
            hold.end_without_loop()


def _time_out(queue: LocalQueue, waiter: Waiter, timeout: float) -> None:
    # Here, and not when the task goes on: the first of several whose time is over together ends the queue.
    if waiter.done():
        return
    unanswered = queue.unanswered(timeout)
    if unanswered is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(unanswered)
