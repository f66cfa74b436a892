"""One bid at a Redis server: its requests, its grants, and how it is given up from every state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from aiolock.contract import Bid, Claim, Grant, Release
from aiolock.delivery import Waking, wake_soon
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable

if TYPE_CHECKING:
    from aiolock.backends.redis.backend import RedisBackend
    from aiolock.backends.redis.many import Many

__all__ = ["RedisClaim", "Stage"]

BLOCK = "1024"
"""Most tokens of a grant that may be passed on inside the process."""


class Stage(Enum):
    """What the server knows of a claim, as far as we know."""

    NEW = "not asked"
    ASKED = "asked"
    PLACED = "in line"
    HELD = "held"
    RELEASING = "held, and a first copy of the release may have been sent"
    DENIED = "not ours any more, by the answer to the first copy; a place may be left"
    LEAVING = "being given up"
    OVER = "given up"


NEW, ASKED, PLACED, HELD, RELEASING, DENIED, LEAVING, OVER = Stage
RELEASED, NOT_OURS, UNKNOWN = Release
"""Looking a member up in its class costs 0.2 µs on Python 3.11, and a turn passes through most of them."""


class _Begun(NamedTuple):
    """A release that was sent before anyone waited for its answer."""

    answer: asyncio.Future[int]
    simple: bool
    """Whether it is about nothing but a hold."""
    sent: float


class _Ear:
    """What only a claim has that waits or waited."""

    __slots__ = ("call", "changed", "placed", "pushed", "ticket", "woken")

    def __init__(self) -> None:
        self.call: Callable[[], Waking | None] | None = None
        self.changed: asyncio.Future[None] | None = None
        self.placed = False
        self.pushed: Grant | None = None
        self.ticket = -1
        self.woken = False

    def take(self) -> Grant | None:
        """The grant that was pushed, once."""
        grant, self.pushed = self.pushed, None
        return grant


class RedisClaim(Claim):
    """A claim whose attempts, pushed grants and release share one request id."""

    __slots__ = (
        "_backend",
        "_begun",
        "_doubts",
        "_ear",
        "_stage",
        "asked",
        "number",
    )

    asks_again = True

    def __init__(self, backend: RedisBackend | Many, bid: Bid, number: int) -> None:
        # Instead of super().__init__, which costs as much as all of this.
        self.bid = bid
        self.demanded_at = self.term = None
        self._begun: _Begun | None = None
        """A release that was sent, until somebody waits for its answer."""
        self.fixed = False
        self._backend = backend
        self.number: int = number
        """Which one of this client it is."""
        self.asked = 0
        """When (server µs) it was asked to let go, of what was told of that."""
        self._stage = NEW
        self._doubts = 0
        """How many attempts were sent whose answer was not heard: they may still arrive."""
        self._ear: _Ear | None = None

    # What follows from others is worked out each time: it would stay with every hold otherwise.

    @property
    def key(self) -> str:
        """Where the lock is on the server."""
        return self._backend.key(self)

    @property
    def request(self) -> str:
        """How the server calls this claim."""
        return self._backend.request(self)

    @property
    def ttl(self) -> float:
        """Seconds for which the server keeps it if it is not renewed."""
        return self.bid.ttl

    @property
    def ttl_ms(self) -> int:
        """The same as scripts want it."""
        return round(self.bid.ttl * 1000)

    async def attempt(self, wait: bool) -> Grant | None:
        """One ``enter``, or the grant that was pushed."""
        backend = self._backend
        clock = backend.clock
        ear, ticket = self._ear, -1
        if ear is not None:
            if (pushed := ear.take()) is not None and pushed.until > clock():
                return pushed
            ear.placed, ticket = False, ear.ticket
        if self._stage is NEW:
            # Known before the first byte is sent: a grant may be pushed before its answer arrives.
            backend.claims[self.number] = self
            self._stage = ASKED
        self._doubts += 1
        sent = clock()
        try:
            answer = await backend.enter(self, wait, ticket)
        except BackendError as error:
            if backend.never_sent(error):
                self._doubts -= 1
                if self._stage is ASKED and not self._doubts:
                    self._forget(NEW)
            elif isinstance(error, BackendRefused):
                # It has arrived. What it wrote before it was refused is for ``leave`` to find.
                self._doubts -= 1
            raise
        self._doubts -= 1
        if answer[0] == 1:
            _, token, count, server, waiting = answer
            if self._stage is PLACED:
                backend.wakeups.remove(self)
            self._stage = HELD
            backend.learn(server, sent)
            return self._granted(token, count, sent + self.bid.certain, demand=waiting != 0)
        backend.learn(answer[2], sent)
        if not wait:
            if not self._doubts:
                self._forget(NEW)
            return None
        ear = self._listening()
        if (pushed := ear.take()) is not None:
            # Granted and pushed while the answer was on its way.
            return pushed
        ear.ticket = answer[1]
        self._stage = PLACED
        ear.placed = True
        backend.wakeups.add(self)
        backend.wakeups.ends(self.key, answer[3] / 1_000_000, first=answer[4] == 1)
        return None

    async def changed(self) -> None:
        """Wait for a push, or until the heartbeat has found something."""
        ear = self._listening()
        if ear.pushed is None and not ear.woken:
            ear.changed = asyncio.get_running_loop().create_future()
            try:
                await ear.changed
            finally:
                ear.changed = None
        ear.woken = False

    def listen(self, call: Callable[[], Waking | None]) -> bool:
        """Instead of a task that waits for :meth:`changed`."""
        ear = self._listening()
        if ear.pushed is not None or ear.woken:
            return False
        ear.call = call
        return True

    def take_pushed(self) -> Grant | None:
        """What :meth:`attempt` would find."""
        return None if self._ear is None else self._ear.take()

    def leave_again(self, keep: float) -> None:
        """Another server may not have heard of the release; nobody waits for this."""
        if self._stage is HELD or self._stage is RELEASING:
            # What the release is answered from now on may be due to this.
            self._stage = LEAVING
        self._backend.leave(self, bury=False, keep=keep)

    async def release(self, keep: float = 0) -> Release:
        """Give up the hold, the place, or what may still arrive, whichever there is."""
        backend, stage, begun = self._backend, self._stage, self._begun
        if self._ear is not None:
            self._ear.call = None
        if begun is not None:
            self._begun = None
            answer, simple, sent = begun
        elif stage is HELD and not self._doubts and not keep:
            # As `_release`, without the tuple.
            self._stage = RELEASING
            sent, simple = backend.clock(), True
            answer = backend.release(self)
        elif stage is OVER or stage is NEW:
            return RELEASED
        else:
            answer, simple, sent = self._leave(keep)
        try:
            served = await answer
            if not served and simple:
                # Nobody was waiting.
                self._stage = OVER
                backend.claims.pop(self.number, None)
                return RELEASED
            if served == -2 and self._stage is RELEASING:
                self._stage = DENIED
            if served == -2 and simple:
                # An attempt that arrived late may have left a place, for instance.
                served = await self._in_time(self._leave(keep).answer, sent)
        except BackendError as error:
            if self._stage is RELEASING and backend.never_sent(error):
                self._stage = HELD
            raise
        denied = self._stage is DENIED
        if served:
            backend.served(self.key, served)
        self._forget(OVER)
        return NOT_OURS if denied else RELEASED

    def begin_release(self, keep: float = 0) -> Release | None:
        """Send it; nothing is lost if nobody waits for the answer."""
        if self._stage is OVER or self._stage is NEW:
            return RELEASED
        if self._begun is None:
            if self._ear is not None:
                self._ear.call = None
            simple = self._stage is HELD and not self._doubts and not keep
            self._begun = self._release() if simple else self._leave(keep)
        return UNKNOWN

    def _release(self) -> _Begun:
        """Send the release of what is simply a hold of ours."""
        self._stage = RELEASING
        return _Begun(self._backend.release(self), simple=True, sent=self._backend.clock())

    def _leave(self, keep: float) -> _Begun:
        """Send the release of whatever there is."""
        stage = self._stage
        if stage is PLACED:
            self._backend.wakeups.remove(self)
        if stage is not DENIED:
            self._stage = RELEASING if stage is HELD else LEAVING
        answer = self._backend.leave(self, bury=self._doubts > 0, keep=keep)
        return _Begun(answer, simple=False, sent=0.0)

    async def _in_time(self, answer: asyncio.Future[int], since: float) -> int:
        """The answer to the second step of a call, which has no more time than a call of one step.

        Raises :class:`BackendUnavailable` when that is over. Cancelling it does not take the step back.
        """
        limit, now = self._backend.settings.command_timeout, self._backend.clock()
        await asyncio.wait((answer,), timeout=max(0.0, since + limit - now))
        if not answer.done():
            raise BackendUnavailable(f"the server did not answer within {limit:g} s")
        return answer.result()

    def _forget(self, stage: Stage) -> None:
        self._stage = stage
        self._backend.claims.pop(self.number, None)

    def _listening(self) -> _Ear:
        if self._ear is None:
            self._ear = _Ear()
        return self._ear

    # --- what the server says

    def push(self, token: int, count: int, until: float, *, demand: bool) -> None:
        """We were made the holder while we waited."""
        self._held()
        self._listening().pushed = self._granted(token, count, until, demand=demand)
        self.wake()

    def wake(self) -> None:
        """Ask again."""
        ear = self._listening()
        if ear.call is not None:
            call, ear.call = ear.call, None
            if (waking := call()) is not None:
                # Others may be told of in the same message first.
                wake_soon(waking)
            return
        ear.woken = True
        if ear.changed is not None and not ear.changed.done():
            ear.changed.set_result(None)

    @property
    def waiting(self) -> bool:
        """Whether a grant that is pushed now is wanted."""
        return self._stage is PLACED or (self._doubts > 0 and (self._stage is ASKED or self._stage is HELD))

    @property
    def taken(self) -> bool:
        """Whether somebody works under the hold: a grant that was pushed has been fetched."""
        return self._stage is HELD and (self._ear is None or self._ear.pushed is None)

    @property
    def placed(self) -> bool:
        """The server has told us of our place, and no further attempt is under way."""
        return self._ear is not None and self._ear.placed

    def _held(self) -> None:
        if self._stage is PLACED:
            self._backend.wakeups.remove(self)
        self._stage = HELD

    def _granted(self, token: int, count: int, until: float, *, demand: bool) -> Grant:
        backend = self._backend
        backend.saw(token + count - 1)
        # Without pushes nobody tells us that others wait until the next renewal: unknown counts as demand.
        return Grant(token, count, until, demand or not backend.wakeups.pushed)
