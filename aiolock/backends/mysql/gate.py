"""How many new bids of a client are on their way at once; the others wait here, for as long as the server answers.

A command timeout is about the server, not about our own line in front of it. Without this, a thousand tasks that ask in the
same moment would time each other out while the server is well.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiolock.errors import BackendUnavailable

__all__ = ["Gate"]

T = TypeVar("T")

MOST = 32
"""How many are let through together: enough that the server is never idle, and so few that whoever comes for something else
does not wait for long behind them."""
SHARE = 0.9
"""Of a command timeout, for those who were let through."""


class Gate:
    """Lets so many through, in the order in which they came."""

    def __init__(self, clock: Callable[[], float], timeout: float) -> None:
        self._clock = clock
        self._timeout = timeout
        self._inside = 0
        self._waiting: deque[asyncio.Future[bool]] = deque()

    async def through(self, work: Callable[[float], Coroutine[Any, Any, T]]) -> T | None:
        """What ``work`` returns or raises, when it is its turn; it is told how many seconds it may take.

        ``None`` if its turn does not come within a command timeout: whoever asks again stands at the end.
        If the server lets one of those before us wait for all of its time, which is a little less, all who are still
        here get :class:`BackendUnavailable`. Cancelling it before its turn starts nothing.
        """
        if self._inside < MOST:
            self._inside += 1
        elif not await self._turn():
            return None
        limit, begun = SHARE * self._timeout, self._clock()
        try:
            return await work(limit)
        except BackendUnavailable as error:
            if self._clock() - begun >= SHARE * limit:
                self._refuse(error)
            raise
        finally:
            self._next()

    async def _turn(self) -> bool:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(self._timeout, _expire, turn)
        self._waiting.append(turn)
        try:
            return await turn
        except BaseException:
            if not turn.cancelled() and turn.done() and turn.exception() is None and turn.result():
                # It came in the same moment.
                self._next()
            raise
        finally:
            timer.cancel()

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self._inside -= 1

    def _refuse(self, error: BackendUnavailable) -> None:
        waiting, self._waiting = self._waiting, deque()
        for turn in waiting:
            if not turn.done():
                refusal = BackendUnavailable(str(error))
                refusal.__cause__ = error.__cause__
                turn.set_exception(refusal)


def _expire(turn: asyncio.Future[bool]) -> None:
    if not turn.done():
        turn.set_result(False)
