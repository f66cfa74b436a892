"""Where the tasks of one client say what they want of one document, and wait for it: latches and barriers stand on it.

A *step* is a pure function from what stands in the document to what shall stand there and an answer; every step counts
once, whatever gets lost. A *look* is a function that says whether the wait is over.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiolock.clock import Clock
from aiolock.contract import Bid, Claim, Family, Grant, Kind, Mode, Release
from aiolock.errors import BackendUnavailable, shorten
from aiolock.pen import Body, Step, settle
from aiolock.queue import closed_error, copy_of
from aiolock.runtime import Runtime
from aiolock.scribe import Look, Scribe, Wants

__all__ = ["LATE", "Board", "Body", "Late", "Look", "Step", "board"]


class Late:
    """The answer of a wait whose time was over."""


LATE: Final = Late()


def board(runtime: Runtime, name: str, family: Family, keep: float) -> Board:
    """The one that this client has for that document; made if there is none. ``keep`` is for the server, in seconds."""
    found: Board | None = runtime.boards.get((family.value, name))
    return Board(runtime, name, family, keep) if found is None else found


class Board:
    """The wishes and waits of one client concerning one document; gone when there are none."""

    def __init__(self, runtime: Runtime, name: str, family: Family, keep: float) -> None:
        self.name: str = name
        self.family: Family = family
        self._runtime = runtime
        document = runtime.backend.document(name, family)
        what = f"{family.value} {shorten(name)}"
        self._scribe = Scribe(document, what, keep, runtime.clock, runtime.random)
        self._wants: Wants = self._scribe.wants
        self.over: bool = False
        """Whether its work has ended: the next user makes a new one."""
        self._idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._farewell: Step | None = None
        self.user: Any = None
        """What whoever uses this board keeps beside it."""
        runtime.boards[family.value, name] = self
        runtime.contenders[self] = None
        runtime.spawn(self._work(), f"aiolock-{family.value}")

    @property
    def id(self) -> str:
        """Who this is, in the document."""
        return self._scribe.pen.id

    @property
    def clock(self) -> Clock:
        """The client's clock."""
        return self._runtime.clock

    @property
    def waiting(self) -> int:
        """How many tasks of this client wait here."""
        return len(self._wants.waits)

    # --- what tasks do

    @property
    def full(self) -> bool:
        """Whether the work has ended because there is no room in the document for what was wished."""
        return self._scribe.full

    def wish(self, step: Step) -> asyncio.Future[Any]:
        """Have a step carried out; a future for its answer, which fails after the command timeout.

        Cancelling the future takes nothing back.
        """
        wish: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._limit(wish)
        if self.over:
            wish.set_exception(BackendUnavailable("the work on this document has ended"))
        else:
            self._wants.wishes[wish] = step
            self._scribe.hurry()
        return wish

    async def change(self, step: Step) -> Any:
        """Have a step carried out, and return its answer.

        Raises what the step raises, and :class:`BackendError` if it could not be carried out, or nobody knows whether it
        was, within the command timeout. Cancelling it stops the waiting, not the step.
        """
        return await self.wish(step)

    async def wait(self, look: Look, timeout: float | None, first: asyncio.Future[Any] | None = None) -> Any:
        """The answer of ``look`` as soon as it has one, or :data:`LATE` after ``timeout`` seconds.

        Raises what ``look`` raises, what the wish ``first`` raises, and :class:`BackendError` if the server cannot be
        reached at first. Cancelling it leaves nothing behind.
        """
        loop = asyncio.get_running_loop()
        if self.over:
            raise BackendUnavailable("the work on this document has ended")
        wait: asyncio.Future[Any] = loop.create_future()
        self._wants.waits[wait] = look
        self._limit(wait)
        if first is not None:
            first.add_done_callback(lambda _: None if first.cancelled() else _fail_with(wait, first))
        timer = None if timeout is None else loop.call_later(timeout, settle, wait, LATE)
        self._scribe.hurry()
        try:
            return await wait
        finally:
            if timer is not None:
                timer.cancel()
            wait.cancel()
            self._wants.waits.pop(wait, None)
            self._wants.seen.discard(wait)
            self._scribe.hurry()

    def take_back(self, wish: asyncio.Future[Any]) -> None:
        """Forget a step that was not carried out yet; one that is under way may still be."""
        self._wants.wishes.pop(wish, None)

    def in_doubt(self, wish: asyncio.Future[Any]) -> bool:
        """Whether a step stood in a write that was sent, and that may still count although nobody heard so."""
        return self._scribe.pen.in_doubt(wish)

    def farewell(self, step: Step) -> None:
        """What is to be carried out if the client is closed while somebody waits here."""
        self._farewell = step

    def close(self) -> Claim:
        """The client is being closed: tell everybody; what is returned finishes what is under way."""
        for wait in self._wants.waits:
            if not wait.done():
                wait.set_exception(closed_error())
        if self._wants.waits and self._farewell is not None:
            self.wish(self._farewell)
        self._wants.waits.clear()
        self._scribe.hurry()
        bid = Bid(
            self.name,
            Kind(self.family, Mode.MUTEX),
            max(self._runtime.command_timeout, 0.1),
            self._runtime.label,
        )
        return _Rest(bid, self._idle)

    def bury(self) -> None:
        """Do nothing: a board holds nothing."""

    def _limit(self, future: asyncio.Future[Any]) -> None:
        timer = asyncio.get_running_loop().call_later(self._runtime.command_timeout, self._give_up, future)

        def done(_: asyncio.Future[Any]) -> None:
            # A wish that nobody waits for any more is carried out all the same, but not tried for ever.
            if not future.cancelled():
                timer.cancel()
                future.exception()

        future.add_done_callback(done)

    def _give_up(self, future: asyncio.Future[Any]) -> None:
        self._wants.wishes.pop(future, None)
        if future.done() or future in self._wants.seen:
            self._scribe.hurry()
            return
        limit = self._runtime.command_timeout
        # Who loses races gets his answers, each in a short time.
        silent = self.clock() - self._scribe.sent > limit / 2
        why = "the server did not answer" if silent else "too many change it at the same time"
        error = BackendUnavailable(
            f"{self.family.value} {shorten(self.name)} could not be reached or changed within the command timeout of "
            f"{limit:g} s: {self._scribe.trouble or why}"
        )
        error.__cause__ = self._scribe.trouble
        future.set_exception(error)

    def _end(self) -> None:
        self.over = True
        if self._runtime.boards.get((self.family.value, self.name)) is self:
            del self._runtime.boards[self.family.value, self.name]

    async def _work(self) -> None:
        scribe = self._scribe
        try:
            try:
                await scribe.serve()
            except Exception as error:  # noqa: BLE001 - whatever a backend raises, those who wait hear of it
                failure = error
                scribe.wants.fail(lambda: copy_of(failure))
            self._end()
            await scribe.document.aclose()
        except asyncio.CancelledError:
            # The client is closed, and its time is over: what the server remembers of us ends by itself.
            scribe.wants.fail(closed_error)
            raise
        finally:
            self._end()
            self._runtime.contenders.pop(self, None)
            settle(self._idle)


def _fail_with(wait: asyncio.Future[Any], wish: asyncio.Future[Any]) -> None:
    if (error := wish.exception()) is not None and isinstance(error, Exception):
        settle(wait, error=error)


class _Rest(Claim):
    """What is still to be written when a client is closed; not a hold, but finished like one."""

    __slots__ = ("_idle",)

    def __init__(self, bid: Bid, idle: asyncio.Future[None]) -> None:
        super().__init__(bid)
        self._idle = idle

    async def attempt(self, wait: bool) -> Grant | None:  # noqa: ARG002 - there is nothing to ask for
        """Never asked."""
        return None

    async def changed(self) -> None:
        """Never waited for."""

    async def release(self, keep: float = 0) -> Release:  # noqa: ARG002 - there is nothing to keep
        """Wait until nothing is left to write."""
        await asyncio.shield(self._idle)
        return Release.RELEASED
