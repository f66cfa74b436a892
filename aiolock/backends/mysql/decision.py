"""One decision about a lock: the transaction that is sent, again if the server undid it, and what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.failures import NOT_NOW, code, hit, locked
from aiolock.errors import BackendUnavailable, DeadlockDetected, LockError

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["Outcome", "Transaction", "carried_out"]

AGAIN = (0.001, 0.01)
"""Seconds before a decision is tried again that met another one."""


class Transaction(NamedTuple):
    """One decision, as it is sent."""

    wants: Sequence[str]
    """Statements between the start and the serving of who is next."""
    after: Sequence[str]
    """Statements between that and the end."""
    words: dict[str, Any]
    asking: Sequence[str]
    """The owners of those who want to know how their bids stand."""


class Outcome(NamedTuple):
    """What a decision came to."""

    stand: Mapping[str, tuple[int | None, int]]
    """By owner the state and the token of those who asked, and of those of ours who are inside."""
    limits: tuple[int, int]
    """What the first user declared, and what counts now."""
    changed: tuple[int, ...]
    """How many rows each statement changed."""
    sent: float
    inside: frozenset[str] | None
    """Of those who left, who was inside until then; ``None`` if that is not known."""


async def carried_out(
    backend: MySQLBackend, packet: str, key: str, *, repeat: bool = True
) -> tuple[list[Result], float, bool]:
    """The answers to a decision about ``key``, when it was sent, and whether it may have been carried out before, unheard.

    Decisions that meet on two nodes of a cluster, or in a deadlock, are undone by the server and tried again. A node does
    not always say that it has: so what came of it is read after the commit. One that has met a row that somebody keeps locked
    is tried again on a session of its own, and so are others about that lock for a while. With ``repeat=False``, one whose
    answer is lost is not tried again. Cancelling it leaves open whether the server heard it.
    """
    clock, again = backend.settings.clock, False
    give_up = clock() + backend.settings.command_timeout
    while True:
        error: LockError | None = None
        session = await _session(backend, contended=backend.crowded.has(key, clock()))
        sent = clock()
        try:
            answers = await _answers(backend, session, packet, max(0.0, give_up - clock()))
            inside, _, stand = answers[-3:]
            if int(inside.rows[0][0]) and stand.rows:
                return answers, sent, again
        except (DeadlockDetected, BackendUnavailable) as failure:
            error = failure
            if locked(error):
                backend.crowded.add(key, clock())
            if not isinstance(error, DeadlockDetected) and code(error.__cause__) not in NOT_NOW:
                lost = not session.alive
                if not repeat or clock() >= give_up or not (hit(error) or (lost and not again)):
                    raise
                again = True
                if lost:
                    continue
        if clock() >= give_up:
            raise BackendUnavailable(f"{backend!r}: too many decisions about one lock at once") from error
        await backend.pause(AGAIN)


async def _session(backend: MySQLBackend, *, contended: bool) -> Session:
    session = await backend.sessions.take() if contended else None
    return session or await backend.sessions.main()


async def _answers(backend: MySQLBackend, session: Session, packet: str, timeout: float) -> list[Result]:
    """Have it carried out; a session of its own is given back when it has been, whatever becomes of the caller."""
    work = backend.undisturbed(session, packet, timeout, atomic=True, repeat=False)
    if not session.contended:
        return await work
    deciding = backend.sessions.spawn(work, "aiolock-mysql-decide-apart")
    deciding.add_done_callback(lambda _: backend.sessions.give(session))
    await asyncio.wait([deciding])
    if deciding.cancelled():
        raise BackendUnavailable("the client is closed")
    answers: list[Result] = deciding.result()
    return answers
