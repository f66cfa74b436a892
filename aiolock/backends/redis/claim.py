"""Redis claims: one request at the server until its release."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from aiolock.backends.redis.commands import Arg, Commands, Reply
from aiolock.backends.redis.connection import Pairing
from aiolock.backends.redis.errors import was_sent
from aiolock.backends.redis.replicas import Confirm
from aiolock.backends.redis.waiting import Waiter, Wakeups
from aiolock.clock import Clock, Deadline
from aiolock.core.backend import NEVER, Grant, Release, Request, expires_at
from aiolock.core.capabilities import Downgrade, Extension
from aiolock.core.inbox import WakeReason
from aiolock.core.logs import Log, get_logger, log_change
from aiolock.errors import (
    BackendError,
    BackendRefused,
    BackendUnavailable,
    ConfigError,
    LockLost,
    LossReason,
    shorten,
)
from aiolock.types import READ

__all__ = ["GONE", "MOST", "ClaimState", "Context", "RedisClaim", "Released", "SharedClaim", "renewal"]

GONE: Mapping[int, LossReason] = {0: "revoked", -1: "force-released"}
"""The answers to a renewal of a hold that is gone, with the reason."""
MOST = 4096
"""Most released claims that are remembered: earlier ones have most likely been replicated."""


class ClaimState(Enum):
    """The state of a claim at the server, as far as this client knows.

    ============= ==================================================== ============================================
    State         Event                                                Next state
    ============= ==================================================== ============================================
    ``NEW``       a request is about to be sent                        ``ASKED``
    ``NEW``       release                                              ``NEW``: the server knows nothing of it
    ``ASKED``     answer: granted                                      ``HELD``
    ``ASKED``     answer: a position                                   ``QUEUED``
    ``ASKED``     answer: refused; or nothing was sent                 ``NEW``, if no other request is unanswered
    ``QUEUED``    a grant was pushed                                   ``HELD``
    ``QUEUED``    woken: asks again, and keeps the state meanwhile     by the answer, as from ``ASKED``
    ``HELD``      asks again: a pushed grant ended or was lost         ``ASKED``
    ``HELD``      release                                              ``RELEASING``
    ``RELEASING`` answer: released                                     ``OVER``
    ``RELEASING`` answer: not held                                     ``DENIED``, then its position is given up
    ``RELEASING`` the release was not sent                             ``HELD``
    ``RELEASING`` sent again to a server that may not know of it       ``LEAVING``
    ``DENIED``    answer to the second step                            ``OVER``: the hold had been lost
    ``LEAVING``   answer                                               ``OVER``
    any other     release while a request is unanswered, or none holds ``LEAVING``, with a tombstone against late copies
    ============= ==================================================== ============================================

    A late copy of a request that is answered after ``OVER`` finds the tombstone.
    """

    NEW = "not requested"
    ASKED = "requested"
    QUEUED = "in the queue"
    HELD = "held"
    RELEASING = "releasing"
    """Held, and a first copy of the release may have been sent."""
    DENIED = "not held any more"
    """By the answer to the first copy of the release; a position in the queue may be left."""
    LEAVING = "being given up"
    OVER = "given up"


NEW, ASKED, QUEUED, HELD, RELEASING, DENIED, LEAVING, OVER = ClaimState
RELEASED, NOT_HELD, UNKNOWN = Release
"""Looking up an enum member takes 0.1 µs on Python 3.11, and a free turn of 43 µs needs 15 of them: 3 %."""

log: Log = get_logger("aiolock.claim")
_logger: logging.Logger = log.logger


@dataclass(frozen=True, slots=True)
class Context:
    """Services and state that all claims of one client share, for one family of locks."""

    clock: Clock
    command_timeout: float
    commands: Commands
    wakeups: Wakeups
    claims: dict[int, RedisClaim]
    """Claims that the server may know, by number."""
    released: Released | None
    """``None`` for a server that no other takes over from."""
    pairing: Pairing | None
    """The latest pair of server time and local time; ``None`` in a cluster, where the time in a reply may be that of any node."""
    confirm: Confirm | None = None
    """Waits until enough replicas have what was answered; ``None`` if what the primary answers counts."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """The numbers of further claims."""


Begun = tuple["asyncio.Future[int]", bool, float]
"""A release whose answer has not been awaited yet: the answer, whether it is about nothing but a hold, when it was sent."""


class RedisClaim(Extension):
    """A claim whose attempts, pushed grants and release share one request id."""

    __slots__ = ("_begun", "_context", "_doubts", "_lost", "_state", "_ticket", "_waiter", "asked", "number")

    asks_again = True

    def __init__(self, context: Context, request: Request, number: int) -> None:
        super().__init__(request)
        self._context = context
        self.number: int = number
        """Number of the claim within this client."""
        self.asked = 0
        """Server time (µs) of the latest release request that was reported to the holder."""
        self._state = NEW
        self._doubts = 0
        """Requests that were sent and not answered: they may still arrive."""
        self._lost = False
        """A loss was reported since the latest request was sent, so a grant that answers it may be the one that is lost."""
        self._ticket = -1
        """The ticket of the latest position in the queue, to which the claim may come back."""
        self._waiter: Waiter | None = None
        """The position, while it has one."""
        self._begun: Begun | None = None

    # Derived values are computed each time, because every hold would keep them.

    @property
    def key(self) -> str:
        """Key of the lock."""
        return self._context.commands.key(self.request.name, self.request.kind.family)

    @property
    def request_id(self) -> str:
        """Name of the claim at the server."""
        return self._context.commands.request_id(self.number)

    @property
    def commands(self) -> Commands:
        """The commands of its family of locks."""
        return self._context.commands

    async def acquire(self, wait: bool) -> Grant | None:
        """Send one ``enter``, or return the grant that was pushed."""
        context = self._context
        clock = context.clock
        inbox = self._inbox
        if (
            inbox is not None
            and (pushed := inbox.take()) is not None
            and pushed.until - self.request.grace > clock()
        ):
            return pushed
        if self._waiter is not None:
            self._waiter.queued = False
        first = self._state is NEW
        if first:
            # Before the first byte is sent: a grant may be pushed before the answer arrives.
            context.claims[self.number] = self
        if first or self._state is HELD:
            self._become(ASKED)
        self._doubts += 1
        self._lost = False
        sent = clock()
        try:
            reply = context.commands.enter(
                self.request, self.number, wait, self._ticket, context.wakeups.terms
            )
            answer = await reply
        except BackendError as error:
            if not was_sent(error):
                self._doubts -= 1
                if first and not self._doubts:
                    self._forget(NEW)
            elif isinstance(error, BackendRefused):
                # It has arrived. What it wrote before it was refused is for ``leave`` to find.
                self._doubts -= 1
            raise
        self._doubts -= 1
        if answer[0] == 1:
            _, token, count, server, waiting = answer
            if self._waiter is not None:
                self._leave_queue()
            self._become(HELD)
            if (pairing := context.pairing) is not None:
                pairing.latest = server, sent, pairing.received
            if self._inbox is not None:
                # The same grant may have been pushed.
                self._inbox.take()
            if context.confirm is not None and not self._lost:
                await self._confirm(context.confirm, reply, sent)
            if self._lost:
                self._taken_back(wait=wait)
                return None
            return self._granted(token, count, sent + self.request.valid_for, demand=waiting != 0)
        if answer[0] == 2:
            raise ConfigError(
                f"semaphore {shorten(self.request.name)} has {answer[1]} permits, not {self.request.kind.limit}: "
                "every client has to name the same limit; set_limit() changes it"
            )
        if (pairing := context.pairing) is not None:
            pairing.latest = answer[2], sent, pairing.received
        if not wait:
            if not self._doubts:
                self._forget(NEW)
            return None
        if self.inbox.pushed is not None:
            # Pushed while the answer was on its way.
            return self.inbox.take()
        waiter = self._waiter
        if waiter is None:
            waiter = self._waiter = Waiter(self.key, self.number, self.request.ttl, self.inbox)
        waiter.queued = True
        self._ticket = answer[1]
        self._become(QUEUED)
        context.wakeups.add(waiter)
        context.wakeups.ends(waiter.key, answer[3] / 1_000_000, first=answer[4] == 1)
        return None

    async def _confirm(self, confirm: Confirm, reply: Reply, sent: float) -> None:
        """Wait until enough replicas have the grant; raises :class:`BackendUnavailable` if too few do, and gives it back.

        Cancelling it leaves the hold, which :meth:`release` gives up.
        """
        try:
            await confirm(reply, sent + self.request.valid_for, sent)
        except BackendUnavailable:
            if self._state is HELD:
                self._give_back()
            raise

    def _give_back(self) -> None:
        """Give the grant up without waiting for the answer, so that the next waiter is served.

        The next request has another number: a late copy of this release ends no other hold.
        """
        context, key = self._context, self.key

        def answered(window: asyncio.Future[int]) -> None:
            if not window.cancelled() and window.exception() is None:
                context.wakeups.handed_over(key, window.result())

        tombstone = self._doubts > 0
        context.commands.leave(self.request, self.number, tombstone=tombstone, keep=0).add_done_callback(
            answered
        )
        self._forget(NEW)
        self.number, self._ticket, self._doubts = next(context.numbers), -1, 0

    def _taken_back(self, *, wait: bool) -> None:
        """Take in that the lock was granted and lost while the answer was on its way, as if the request had been refused."""
        self._become(ASKED)
        if wait:
            self.inbox.wake(WakeReason.NOTIFIED)
        elif not self._doubts:
            self._forget(NEW)

    def lose(self) -> bool:
        """Take in that the hold is lost, or may be, if no grant of it was taken yet: it is requested anew. Else return False."""
        if self.validity is not None:
            return False
        self._lost = True
        self.inbox.pushed = None
        self.inbox.wake(WakeReason.NOTIFIED)
        return True

    def push(self, token: int, count: int, until: float, *, demand: bool) -> None:
        """Accept a grant that the server pushed."""
        self._leave_queue()
        self._become(HELD)
        self.inbox.put(self._granted(token, count, until, demand=demand))

    @property
    def waiting(self) -> bool:
        """True if a grant that is pushed now is of use."""
        return self._state is QUEUED or (self._doubts > 0 and self._state is ASKED)

    @property
    def taken(self) -> bool:
        """True while the hold is in use: a grant that was pushed has been taken from the inbox."""
        return self._state is HELD and (self._inbox is None or self._inbox.pushed is None)

    def _become(self, state: ClaimState) -> None:
        """Change the state; all transitions pass through here."""
        if _logger.isEnabledFor(logging.DEBUG):
            what = f"claim {self.number}"
            log_change(log, what, self.request.name, self._state, state, claim=self.number)
        self._state = state

    def _leave_queue(self) -> None:
        if self._waiter is not None:
            self._context.wakeups.remove(self._waiter)
            self._waiter = None

    def _granted(self, token: int, count: int, until: float, *, demand: bool) -> Grant:
        context = self._context
        tokens, last = context.commands.tokens, token + count - 1
        if last > tokens.highest:
            tokens.highest = last
        # Without pushes, demand is not known before the next renewal: unknown counts as demand.
        return Grant(token, count, until, demand or not context.wakeups.pushed)

    async def extend(self, seconds: float, number: int) -> Grant:
        """Send one script."""
        context = self._context
        sent = context.clock()
        reply = context.commands.extend(self.request, self.number, seconds, number)
        server, state = await reply
        if (pairing := context.pairing) is not None:
            pairing.latest = server, sent, pairing.received
        if state <= 0:
            raise LockLost(self.request.name, GONE[state])
        if context.confirm is not None:
            await context.confirm(reply, expires_at(sent, seconds), sent)
        return Grant(0, 0, expires_at(sent, seconds), demand=state == 2)

    # --- giving up

    async def release(self, keep: float = 0) -> Release:
        """Give up the hold, the position in the queue, and a request that may still arrive."""
        if self.begin_release(keep) is RELEASED:
            return RELEASED
        begun, self._begun = self._begun, None
        assert begun is not None  # noqa: S101 - it has just begun
        answer, simple, sent = begun
        try:
            window = await answer
            if window == -2 and self._state is RELEASING:
                self._become(DENIED)
            if window == -2 and simple:
                # An attempt that arrived late may have left a position, for instance.
                deadline = Deadline(sent + self._context.command_timeout, self._context.clock)
                window = await self._in_time(self._leave(keep)[0], deadline)
            if keep and self._context.confirm is not None and self._state is not DENIED:
                await self._context.confirm(answer, math.inf, self._context.clock())
        except BackendError as error:
            if self._state is RELEASING and not was_sent(error):
                self._become(HELD)
            raise
        denied = self._state is DENIED
        if window:
            self._context.wakeups.handed_over(self.key, window)
        self._forget(OVER)
        return NOT_HELD if denied else RELEASED

    def begin_release(self, keep: float = 0) -> Release:
        """Send the release; nothing is lost if its answer is never awaited."""
        state = self._state
        if state is NEW or state is OVER:
            return RELEASED
        if self._begun is None:
            if self._inbox is not None:
                self._inbox.close()
            if state is HELD and not self._doubts and not keep:
                context = self._context
                self._become(RELEASING)
                if context.released is not None:
                    context.released.add(self)
                sent = context.clock()
                self._begun = context.commands.release(self.request, self.number), True, sent
            else:
                self._begun = self._leave(keep)
        return UNKNOWN

    def leave_again(self, keep: float) -> None:
        """Send the release to a server that may not know of it; the answer is not awaited."""
        if self._state in (HELD, RELEASING):
            # Later answers to the release may be due to this one.
            self._become(LEAVING)
        self._send_leave(tombstone=False, keep=keep)

    def _leave(self, keep: float) -> Begun:
        """Send the release of a hold, a position, and a request that may still arrive."""
        self._leave_queue()
        if self._state is not DENIED:
            self._become(RELEASING if self._state is HELD else LEAVING)
        return self._send_leave(tombstone=self._doubts > 0, keep=keep), False, 0.0

    def _send_leave(self, *, tombstone: bool, keep: float) -> asyncio.Future[int]:
        context = self._context
        if context.released is not None:
            context.released.add(self, keep)
        return context.commands.leave(self.request, self.number, tombstone=tombstone, keep=keep)

    async def _in_time(self, answer: asyncio.Future[int], deadline: Deadline) -> int:
        """Return the answer to the second step of a call, which shares the deadline of the first.

        Raises :class:`BackendUnavailable` when it has passed. Cancelling it does not take the step back.
        """
        await asyncio.wait((answer,), timeout=deadline.left())
        if not answer.done():
            limit = self._context.command_timeout
            raise BackendUnavailable(f"the server did not answer within {limit:g} s")
        return answer.result()

    def _forget(self, state: ClaimState) -> None:
        self._become(state)
        self._context.claims.pop(self.number, None)


class SharedClaim(RedisClaim, Downgrade):
    """A claim of a lock with several holders."""

    __slots__ = ()

    async def downgrade(self) -> Grant:
        """Send one script; the read hold stands for a full ttl from then, unless it is fixed.

        With replicas it is believed for no longer than the write hold was: its next renewal waits for them.
        """
        sent, fixed = self._context.clock(), self.fixed
        ttl = 0.0 if fixed else self.request.ttl
        answer = await self._context.commands.downgrade(self.request, self.number, ttl)
        if (pairing := self._context.pairing) is not None:
            pairing.latest = answer[-1] if len(answer) == 2 else answer[3], sent, pairing.received
        if answer[0] != 1:
            raise LockLost(self.request.name, GONE[answer[0]])
        _, token, _, _, waiting, claim = answer
        if self.request.kind != READ:
            self.request = replace(self.request, kind=READ)
        self._context.wakeups.handed_over(self.key, claim)
        known = not fixed and self._context.confirm is None
        until = sent + self.request.valid_for if known else NEVER
        return self._granted(token, 1, until, demand=waiting != 0)


class Released:
    """Claims released within their ttl: a primary that takes over may not know of it, and would keep them for their ttl."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._released: OrderedDict[RedisClaim, tuple[float, float]] = OrderedDict()

    def add(self, claim: RedisClaim, keep: float = 0) -> None:
        """Note that a claim is being released, and that its lock stays taken for ``keep`` seconds."""
        released, now = self._released, self._clock()
        known = released.get(claim)
        # A repeated release does not restart the ttl: the hold was not renewed since the first.
        released[claim] = known[0] if known else now + claim.request.stays, now + keep
        # In the order in which they came, which is near to that in which they end.
        while released and (len(released) > MOST or next(iter(released.values()))[0] <= now):
            released.popitem(last=False)

    def again(self) -> list[tuple[RedisClaim, float]]:
        """Return the claims that a server may still keep, and for how many seconds more each lock stays taken."""
        now = self._clock()
        return [(claim, max(0.0, kept - now)) for claim, (end, kept) in self._released.items() if end > now]


def renewal(claims: Sequence[RedisClaim]) -> Reply:
    """Send the renewal of claims of one family; claims that are ``fixed`` are verified and not prolonged."""
    arguments: list[Arg] = []
    for claim in claims:
        present = "" if claim.present is None else claim.present.encode()
        arguments += (claim.request_id, 0 if claim.fixed else round(claim.request.ttl * 1000), present)
    return claims[0].commands.renew([claim.key for claim in claims], arguments)
