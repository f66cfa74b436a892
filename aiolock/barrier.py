"""A place where nobody passes until all have arrived; once all have, the next round begins."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from aiolock import rounds
from aiolock.board import LATE, Board, Body, board
from aiolock.contract import Family
from aiolock.errors import BarrierBroken, WaitTimeout, shorten
from aiolock.options import check_timeout
from aiolock.runtime import Runtime

__all__ = ["Barrier"]

KEEP = 86_400.0
"""Seconds for which the number of parties stands after the last use."""
LABEL = 60
"""How much of a label stands in the document."""

Arrive = Callable[[Body, str, int], tuple[Body | None, tuple[int, int]]]
"""The step of a party that comes: from the document, the client's id and the party's number."""

_parties = itertools.count(1)


class Barrier:
    """A place where nobody passes until ``parties`` have arrived. Made by :meth:`Client.barrier`; no I/O until asked.

    Reusable: when all have passed, the next round begins. A party is a call of :meth:`wait`; several may be in one
    process. A round in which a party gives up (cancelled, timed out, its client closed) or dies is broken for all of
    its parties with :class:`BarrierBroken`, and the next round begins. A party counts as dead when nothing was heard of
    its client for its ttl.
    """

    __slots__ = ("_label", "_name", "_parties", "_runtime", "_ttl")

    def __init__(self, runtime: Runtime, name: str, parties: int, ttl: float, label: str) -> None:
        self._runtime = runtime
        self._name = name
        self._parties = parties
        self._ttl = ttl
        self._label = label[:LABEL]

    @property
    def name(self) -> str:
        """What it is called."""
        return self._name

    @property
    def parties(self) -> int:
        """How many pass together."""
        return self._parties

    def __repr__(self) -> str:
        return f"<Barrier {shorten(self._name)} of {self._parties} ttl={self._ttl:g}>"

    def __reduce__(self) -> str:
        raise TypeError(
            "a barrier cannot be copied or pickled: pass its name, and ask the client there for the barrier"
        )

    async def waiting(self) -> int:
        """How many parties are inside at this moment. Ends within the ``command_timeout``; cancelling changes nothing."""
        answer: int = await self._board().change(lambda body: (None, rounds.inside(body)))
        return answer

    async def wait(self, timeout: float | None = None) -> int:
        """Arrive, wait for the others, and pass with them: how many came before, from 0.

        Exactly one party of each round gets 0. ``timeout`` is how many seconds to wait (``None``: for ever).

        Raises :class:`WaitTimeout` (a :class:`TimeoutError`) when the time is over, :class:`BarrierBroken` if another
        party gave up or died, :class:`ConfigError` if the barrier has another number of parties, and
        :class:`BackendError` if the server cannot be reached at first; once it waits, it survives outages. Whenever it
        raises, also by being cancelled, the round is broken for the others, who are told in the background.
        """
        limit = check_timeout(timeout)
        found = self._board()
        crew = _Crew.of(found, self._ttl)
        visit = _Visit(self._name, found, crew, self._arrive)
        why = "a party was cancelled"
        try:
            answer = await found.wait(visit.look, limit, visit.arrival)
            if answer is not LATE:
                return int(answer)
            why = "a party timed out"
            raise WaitTimeout(
                "barrier", self._name, limit or 0.0, f"{visit.inside} of {self._parties} were there"
            )
        except BarrierBroken:
            raise
        except BaseException:
            found.take_back(visit.arrival)
            found.wish(lambda body: rounds.leave(body, found.id, {visit.party}, f"{why} ({self._label})"))
            raise
        finally:
            crew.parties.discard(visit.party)

    def _arrive(self, body: Body, me: str, party: int) -> tuple[Body | None, tuple[int, int]]:
        """The step of a party that comes."""
        return rounds.arrive(body, self._name, self._parties, me, party, self._ttl, self._label)

    def _board(self) -> Board:
        self._runtime.guard()
        return board(self._runtime, self._name, Family.BARRIER, KEEP)


class _Crew:
    """What the parties of one client have in common: they are alive together, and watch the others together."""

    def __init__(self, found: Board, ttl: float) -> None:
        self.parties: set[int] = set()
        self._board = found
        self._ttl = ttl
        self._sightings: rounds.Sightings = {}
        self._looked = found.clock()
        self._body: Body | None = None
        found.farewell(
            lambda body: rounds.leave(body, found.id, self.parties, "the client of a party was closed")
        )
        asyncio.get_running_loop().call_later(ttl / 3, self._beat)

    @classmethod
    def of(cls, found: Board, ttl: float) -> _Crew:
        """The crew of a client, which lives as long as its board."""
        if not isinstance(found.user, _Crew):
            found.user = cls(found, ttl)
        return found.user

    def _beat(self) -> None:
        if not self._board.over and self.parties:
            self._board.wish(lambda body: rounds.beat(body, self._board.id))
            asyncio.get_running_loop().call_later(self._ttl / 3, self._beat)
        elif self._board.user is self:
            self._board.user = None

    def look(self, body: Body) -> None:
        """Answer a roll call, and see who is dead; each version is looked at once."""
        if body is self._body:
            return
        self._body = body
        board, now = self._board, self._board.clock()
        mine = body["inside"].get(board.id) if body else None
        if mine is not None and not mine["here"] and rounds.full(body):
            board.wish(lambda body: rounds.beat(body, board.id))
        if now - self._looked > self._ttl * 2 / 3:
            # We did not see what the others did meanwhile: stopped, or cut off as they may have been.
            self._sightings.clear()
        self._looked = now
        gone = rounds.dead(body, board.id, self._sightings, now)
        if gone and mine is not None:
            board.wish(lambda body: rounds.broken(body, gone))


class _Visit:
    """One call of ``wait``: a party."""

    def __init__(self, name: str, found: Board, crew: _Crew, arrive: Arrive) -> None:
        self.party: int = next(_parties)
        self.inside = 0
        self._name = name
        self._step = arrive
        self._board = found
        self._crew = crew
        crew.parties.add(self.party)
        self.arrival: asyncio.Future[Any] = self._arrive()

    def _arrive(self) -> asyncio.Future[Any]:
        me, party = self._board.id, self.party
        return self._board.wish(lambda body: self._step(body, me, party))

    def look(self, body: Body) -> int | None:
        """How many came before, once the round has been passed; raises :class:`BarrierBroken` if it was broken."""
        self._crew.look(body)
        self.inside = rounds.inside(body)
        if not self.arrival.done():
            return None
        number, before = self.arrival.result()
        if not number:
            # The roll of a full round was being called; this party is one of the next round.
            if not rounds.full(body):
                self.arrival = self._arrive()
            return None
        ended = rounds.outcome(body, number)
        if ended:
            raise BarrierBroken(self._name, ended)
        return None if ended is None else int(before)
