"""Decisions about one shared lock: a transaction that is sent in one packet, and the queue of requests for the next one.

A decision takes the server a few milliseconds, whether it is about one request or many. So requests that come while one
is under way wait for its answer, and the next decision takes all of them, in order. A request that finds no
decision under way is sent at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from aiolock.backends.mysql.connection import MySQLSession
from aiolock.backends.mysql.context import UNDONE, Context, quote
from aiolock.backends.mysql.errors import NOT_NOW, code, hit
from aiolock.backends.mysql.protocol import Result
from aiolock.core.tasks import reject, settle
from aiolock.errors import BackendError, BackendUnavailable, LockError, copy_of

__all__ = ["Action", "DecisionQueue", "Outcome", "PendingDecision", "Transaction", "execute", "together"]

# --- one decision


class Transaction(NamedTuple):
    """One decision, as it is sent."""

    before: Sequence[str]
    """Statements between the start and the serving of the next waiters."""
    after: Sequence[str]
    """Statements between that and the end."""
    values: dict[str, Any]
    asking: Sequence[str]
    """The owners of the claims that ask for the state of their requests."""


class Outcome(NamedTuple):
    """The outcome of a decision."""

    stand: Mapping[str, tuple[int | None, int]]
    """By owner, the state and the token of the claims that asked, and of those of this client that hold the lock."""
    limits: tuple[int, int]
    """The capacity that the first user declared, and the one that counts now."""
    changed: tuple[int, ...]
    """The number of rows that each statement changed."""
    sent: float
    inside: frozenset[str] | None
    """The owners that left and had a hold until then; ``None`` if that is not known."""


async def execute(
    context: Context, packet: str, key: str, *, repeat: bool = True
) -> tuple[list[Result], float, bool]:
    """Return the answers to a decision about ``key``, when it was sent, and whether an earlier copy may have been carried out,
    in whole or in part.

    Decisions that meet on two nodes of a cluster, or in a deadlock, are undone by the server and tried again. A node does
    not always report that: so the result is read after the commit. One that has met a row that stays locked
    is tried again on a session of its own, and so are others about that lock for a while. With ``repeat=False``, one whose
    answer is lost is not tried again. Cancelling it leaves open whether the server received it.
    """
    clock, again = context.clock, False
    while True:
        session = None
        if context.crowded(key):
            with suppress(BackendError):
                session = await context.sessions.take()
        session = session or await context.sessions.main()
        sent = clock()
        try:
            answers = await _answers(context, session, packet)
            inside, _, stand = answers[-3:]
            if int(inside.rows[0][0]) and stand.rows:
                return answers, sent, again
            # A node of a cluster undid the beginning without notice: what came after it was carried out by itself.
            again = True
        except (BackendUnavailable, asyncio.CancelledError) as error:
            context.failed(key, error, sent)
            if isinstance(error, asyncio.CancelledError):
                raise
            if code(error.__cause__) not in NOT_NOW:
                lost = not session.alive
                if not repeat or not (hit(error) or (lost and not again)):
                    raise
                again = True
                if lost:
                    continue
        await context.pause(UNDONE)


async def _answers(context: Context, session: MySQLSession, packet: str) -> list[Result]:
    """Have it carried out; a session of its own is given back when it has been, also if the caller is cancelled."""
    work = context.execute(packet, session, atomic=True, repeat=False)
    if not session.contended:
        return await work
    deciding = context.sessions.tasks.spawn(context.within(work), "aiolock-mysql-decide-apart")
    deciding.add_done_callback(lambda _: context.sessions.give(session))
    await asyncio.wait([deciding])
    if deciding.cancelled():
        raise BackendUnavailable("the client is closed")
    return deciding.result()


# --- batching


MOST = 100
"""Number of requests that one decision takes at most."""


class Action(Enum):
    """The outcome that a claim asks for."""

    WAIT = auto()
    """To hold the lock, or to have a position in the queue."""
    TRY = auto()
    """To hold the lock, or nothing."""
    LEAVE = auto()
    """To give up what it has."""


@dataclass(slots=True, eq=False)
class PendingDecision:
    """A request of a claim to the next decision, and the future of its outcome."""

    action: Action
    owner: str = ""
    weight: int = 1
    lock: dict[str, Any] = field(default_factory=dict)
    """The values for the statements about its lock."""
    row: dict[str, Any] = field(default_factory=dict)
    """The values for the row that it asks for."""
    answer: asyncio.Future[Outcome] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


def together(requests: deque[PendingDecision], most: int = MOST) -> list[PendingDecision]:
    """Take those from the left that can be decided in one step.

    A request that does not wait is in the queue for a moment all the same, and might be in the way of those behind it: after
    it only others like it are taken, which are refused if it is. Those whose callers were cancelled are dropped.
    """
    taken: list[PendingDecision] = []
    tries: int | None = None
    while requests and len(taken) < most:
        request = requests[0]
        if not request.answer.done():
            if tries is not None and (request.action is not Action.TRY or request.weight != tries):
                break
            if request.action is Action.TRY:
                tries = request.weight
            taken.append(request)
        requests.popleft()
    return taken


def _transaction(context: Context, taken: Sequence[PendingDecision]) -> Transaction:
    """Return the transaction for these requests."""
    entering = [request for request in taken if request.action is not Action.LEAVE]
    leaving = ", ".join(quote(request.owner) for request in taken if request.action is Action.LEAVE)
    trying = ", ".join(quote(request.owner) for request in taken if request.action is Action.TRY)
    rows = (
        context.statements("request_row", ordinal=ordinal, **request.row)
        for ordinal, request in enumerate(entering, 1)
    )
    values = (entering or taken)[0].lock | {
        "rows": " UNION ALL ".join(rows),
        "leaving": leaving,
        "trying": trying,
    }
    # Requests to leave come after the others: a claim may have changed its mind.
    before = [*(("settle", "enqueue") if entering else ()), *(("depart",) if leaving else ())]
    return Transaction(
        before, ["withdraw"] if trying else [], values, [request.owner for request in entering]
    )


class DecisionQueue:
    """The requests of this client about one lock; it exists while there are any."""

    def __init__(
        self,
        context: Context,
        key: str,
        queues: dict[str, DecisionQueue],
        decide: Callable[[str, Transaction], Awaitable[Outcome]],
    ) -> None:
        self._context = context
        self._key = key
        self._queues = queues
        """The queues of the client, by lock; this one is there while it serves."""
        self._decide = decide
        self._requests: deque[PendingDecision] = deque()
        self._taken: list[PendingDecision] = []
        """The requests that are being decided."""

    def begin(self, request: PendingDecision) -> asyncio.Future[Outcome]:
        """Add a request to the next decision, without waiting: the future of its outcome.

        Cancelling the future withdraws the request if its decision was not sent yet.
        """
        self._requests.append(request)
        if self._queues.get(self._key) is not self:
            self._queues[self._key] = self
            serving = self._context.sessions.tasks.spawn(self._serve(), "aiolock-mysql-decide")
            serving.add_done_callback(self._ended)
        return request.answer

    def leaving(self) -> list[asyncio.Future[Outcome]]:
        """Return the outcomes of the requests to leave that are not decided yet."""
        return [
            request.answer for request in (*self._taken, *self._requests) if request.action is Action.LEAVE
        ]

    async def _serve(self) -> None:
        """Decide until there is nothing left to decide."""
        while self._requests:
            self._taken = together(self._requests)
            if self._taken:
                try:
                    outcome = await self._decide(self._key, _transaction(self._context, self._taken))
                except LockError as error:
                    _fail(self._taken, error)
                else:
                    for request in self._taken:
                        settle(request.answer, outcome)
                self._taken = []
        # In the step in which it was seen: requests that come from now on find another queue.
        del self._queues[self._key]

    def _ended(self, serving: asyncio.Task[None]) -> None:
        """Fail the requests that still wait: the task of a client that is being closed ends, perhaps before its first step."""
        if self._queues.get(self._key) is self:
            del self._queues[self._key]
            error = None if serving.cancelled() else serving.exception()
            closed = BackendUnavailable("the client is closed")
            _fail([*self._taken, *self._requests], error if isinstance(error, Exception) else closed)


def _fail(requests: Sequence[PendingDecision], error: Exception) -> None:
    for request in requests:
        reject(request.answer, copy_of(error))
