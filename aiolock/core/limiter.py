"""Limit concurrent first requests of the claims of a client: so many are under way at once, the others wait in order (FIFO).

A command timeout measures the server, not the queue of requests before it. Without a limiter, thousands of tasks that ask at
the same moment would fail by the command timeout, or by the limit of a connection, although the server answers all the time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from aiolock.clock import Clock
from aiolock.errors import BackendUnavailable

__all__ = ["Limiter"]

SHARE = 0.9
"""The share of a command timeout after which a request that waits is refused, if the server has answered none of those before it."""


class Limiter:
    """Admits requests in the order in which they came, ``room`` at once.

    A request takes one of the ``room`` itself, or waits for its :meth:`admission`; then it reports :meth:`answered` or
    :meth:`failed`.
    """

    __slots__ = ("_answered", "_clock", "_queue", "_silence", "room")

    def __init__(self, room: int, clock: Clock, timeout: float) -> None:
        self.room: int = room
        """Number of requests that can be admitted at this moment; 0 as long as a request waits."""
        self._clock = clock
        self._silence = SHARE * timeout
        """Seconds without an answer after which requests that wait are refused."""
        self._queue: OrderedDict[asyncio.Future[None], float] = OrderedDict()
        """The requests that wait, each with the time when it came."""
        self._answered = 0.0
        """When the server answered last while requests waited."""

    async def admission(self) -> None:
        """Wait behind the requests that came before; to be called while there is no ``room``.

        Raises :class:`BackendUnavailable` if it has waited for a command timeout in which the server answered none of those
        before it. Cancelling it takes no room.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue[turn] = self._clock()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # Admitted and cancelled in the same step.
                self._next()
            raise
        finally:
            self._queue.pop(turn, None)

    def answered(self) -> None:
        """Admit the next request instead of one that the server has answered."""
        if self._queue:
            self._answered = self._clock()
        self._next()

    def failed(self, error: BaseException) -> None:
        """Admit the next request instead of one that failed, unless the server is silent."""
        if self._queue and isinstance(error, BackendUnavailable) and error.retryable:
            limit = self._clock() - self._silence
            while self._queue and self._answered <= limit and next(iter(self._queue.values())) <= limit:
                turn, _ = self._queue.popitem(last=False)
                if not turn.done():
                    refusal = BackendUnavailable(str(error))
                    refusal.__cause__ = error.__cause__
                    turn.set_exception(refusal)
        self._next()

    def _next(self) -> None:
        while self._queue:
            turn, _ = self._queue.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return
        self.room += 1
