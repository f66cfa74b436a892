"""What the tasks of one client want of one lock, decided together.

A decision takes the server a few milliseconds, whether it is about one request or many. So those that come while one
is under way wait for its answer, and the next decision takes all of them, in the order in which they came. Nobody
waits for company: a request that finds no decision under way is sent at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from aiolock.backends.mysql.decision import Outcome, Transaction
from aiolock.backends.mysql.statements import quote
from aiolock.errors import BackendError, BackendUnavailable, DeadlockDetected, LockError

if TYPE_CHECKING:
    from aiolock.backends.mysql.shared_claim import SharedClaim
    from aiolock.backends.mysql.sharing import Sharing

__all__ = ["Desk", "Request", "Wish", "together", "transaction"]

MOST = 100
"""How many requests one decision takes."""


class Wish(Enum):
    """What is to become of a claim."""

    WAIT = auto()
    """It wants to be in, or in line."""
    TRY = auto()
    """It wants to be in, or nothing."""
    LEAVE = auto()
    """It gives up whatever it has."""


class Request:
    """One wish, and who waits for what comes of it."""

    __slots__ = ("answer", "claim", "wish")

    def __init__(self, claim: SharedClaim, wish: Wish, answer: asyncio.Future[Outcome]) -> None:
        self.claim = claim
        self.wish = wish
        self.answer = answer


def together(requests: deque[Request], most: int = MOST) -> list[Request]:
    """Take those from the left that can be decided in one step.

    One that does not wait stands in line for a moment all the same, and might be in the way of those behind it: after it only
    others like it are taken, which get no for an answer if it does. Those for which nobody waits any more are dropped.
    """
    taken: list[Request] = []
    tries: int | None = None
    while requests and len(taken) < most:
        request = requests[0]
        if not request.answer.done():
            if tries is not None and (request.wish is not Wish.TRY or request.claim.weight != tries):
                break
            if request.wish is Wish.TRY:
                tries = request.claim.weight
            taken.append(request)
        requests.popleft()
    return taken


def transaction(taken: Sequence[Request]) -> Transaction:
    """What is sent for these."""
    bidders = [request.claim for request in taken if request.wish is not Wish.LEAVE]
    leavers = [request.claim for request in taken if request.wish is Wish.LEAVE]
    tries = [request.claim for request in taken if request.wish is Wish.TRY]
    words = (bidders or leavers)[0].words()
    wants: list[str] = []
    if bidders:
        wants += ["settle", "bid"]
        words["wanted"] = " UNION ALL ".join(claim.wanted(place) for place, claim in enumerate(bidders, 1))
    if leavers:
        # After the bids: somebody may have changed its mind.
        wants.append("depart")
        words["leaving"] = ", ".join(quote(claim.owner) for claim in leavers)
    if tries:
        words["trying"] = ", ".join(quote(claim.owner) for claim in tries)
    after = ["withdraw"] if tries else []
    return Transaction(wants, after, words, [claim.owner for claim in bidders])


class Desk:
    """The requests of this client about one lock; there while there are any."""

    def __init__(self, sharing: Sharing, key: str) -> None:
        self._sharing = sharing
        self._key = key
        self._requests: deque[Request] = deque()
        self._taken: list[Request] = []
        """Those that are being decided."""

    async def ask(self, claim: SharedClaim, wish: Wish) -> Outcome:
        """What the decision comes to that takes this wish.

        Cancelling it takes the wish back if it is not on its way yet; else it is carried out.
        """
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._requests.append(Request(claim, wish, answer))
        if self._sharing.desks.get(self._key) is not self:
            self._sharing.desks[self._key] = self
            serving = self._sharing.backend.sessions.spawn(self._serve(), "aiolock-mysql-decide")
            serving.add_done_callback(self._ended)
        return await answer

    async def _serve(self) -> None:
        """Decide until there is nothing left to decide."""
        while True:
            self._taken = together(self._requests)
            if not self._taken:
                # In the step in which it was seen: who comes from now on finds another desk.
                del self._sharing.desks[self._key]
                return
            try:
                outcome = await self._sharing.decide(self._key, transaction(self._taken))
            except LockError as error:
                _fail(self._taken, error)
                continue
            for request in self._taken:
                if not request.answer.done():
                    request.answer.set_result(outcome)

    def _ended(self, serving: asyncio.Task[None]) -> None:
        """Tell who still waits: the task of a client that is being closed is ended, perhaps before its first step."""
        if self._sharing.desks.get(self._key) is self:
            del self._sharing.desks[self._key]
            error = None if serving.cancelled() else serving.exception()
            _fail([*self._taken, *self._requests], error or BackendUnavailable("the client is closed"))


def _fail(requests: Sequence[Request], error: BaseException) -> None:
    for request in requests:
        if not request.answer.done():
            request.answer.set_exception(_copy(error))


def _copy(error: BaseException) -> BaseException:
    """The same for another task: exceptions collect tracebacks, and must not be shared."""
    if isinstance(error, BackendError):
        copy: BaseException = type(error)(str(error), retryable=error.retryable)
    elif isinstance(error, DeadlockDetected):
        copy = DeadlockDetected(error.cycle)
    else:
        return error
    copy.__cause__ = error.__cause__
    return copy
