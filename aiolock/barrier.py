"""A place where nobody passes until all have arrived; once all have, the next round begins."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from aiolock import rounds
from aiolock.board import LATE, Board, Body, Late, board
from aiolock.contract import Family
from aiolock.errors import BackendRefused, BarrierBroken, WaitTimeout, shorten
from aiolock.options import check_timeout
from aiolock.runtime import Generations

__all__ = ["Barrier"]

KEEP = 86_400.0
"""Seconds for which the number of parties stands after the last use."""

GRACE = 0.05
"""For how many seconds more a party whose time is over finds out whether the others have passed with it."""

Arrive = Callable[[Body, str, int], tuple[Body | None, tuple[int, int]]]
"""The step of a party that comes: from the document, the client's id and the party's number."""

_parties = itertools.count(1)


class Barrier:
    """A place where nobody passes until ``parties`` have arrived. Made by :meth:`Client.barrier`; no I/O until asked.

    Reusable: when all have passed, the next round begins. A party is a call of :meth:`wait`; several may be in one
    process. A round in which a party gives up (cancelled, timed out, its client closed) or dies is broken for all of
    its parties with :class:`BarrierBroken`, and the next round begins. A party counts as dead when another one that
    waits has heard nothing of its client for its ttl.
    """

    __slots__ = ("_generations", "_name", "_own_label", "_parties", "_ttl")

    def __init__(
        self, generations: Generations, name: str, parties: int, ttl: float, label: str | None
    ) -> None:
        self._generations = generations
        self._name = name
        self._parties = parties
        self._ttl = ttl
        self._own_label = label

    @property
    def name(self) -> str:
        """What it is called."""
        return self._name

    @property
    def parties(self) -> int:
        """How many pass together."""
        return self._parties

    @property
    def _label(self) -> str:
        label = self._generations.latest.label if self._own_label is None else self._own_label
        return rounds.short(label)

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

        Exactly one party of each round gets 0. ``timeout`` is how many seconds to wait (``None``: for ever; 0: pass if
        this is the last party that the round waits for, else do not arrive at all, which breaks nothing).

        Raises :class:`WaitTimeout` (a :class:`TimeoutError`) when the time is over, :class:`BarrierBroken` if another
        party gave up or died, :class:`ConfigError` if the barrier has another number of parties, and
        :class:`BackendError` if the server cannot be reached at first; once it waits, it survives outages.

        Whenever it raises, also by being cancelled, a round that has counted this party is broken for the others, who are
        told in the background; a party that the server has not counted yet leaves nothing, and the others wait on. At
        the end of its time it finds out first what came of the round, for at most another 0.05 s, and passes if the
        others did. Two cases remain in which it raises and the others may have passed: the server did not answer
        (:class:`BackendError`, or a :class:`WaitTimeout` that says so), and it was cancelled, or its client closed, in the
        very moment in which they pass.
        """
        limit = check_timeout(timeout)
        found = self._board()
        crew = _Crew.of(found, self._ttl)
        visit = _Visit(self._name, found, crew, self._arrive if limit != 0 else self._complete)
        # The last party still waits for the others to answer the roll call.
        patience = limit if limit != 0 else self._generations.latest.command_timeout
        try:
            answer = await found.wait(visit.look, patience, visit.arrival)
            if answer is LATE:
                answer = await visit.late(f"a party timed out ({self._label})")
        except BarrierBroken:
            raise
        except BaseException as error:
            if isinstance(error, BackendRefused) and found.full:
                visit.refuse(self._board())
            visit.leave(f"a party was cancelled ({self._label})")
            raise
        finally:
            crew.parties.discard(visit.party)
        if answer is None:
            raise WaitTimeout("barrier", self._name, limit or 0.0, visit.missing(self._parties))
        return int(answer)

    def _arrive(self, body: Body, me: str, party: int) -> tuple[Body | None, tuple[int, int]]:
        """The step of a party that comes."""
        return rounds.arrive(body, self._name, self._parties, me, party, self._ttl, self._label)

    def _complete(self, body: Body, me: str, party: int) -> tuple[Body | None, tuple[int, int]]:
        """The step of a party that comes if it is the last."""
        return rounds.complete(body, self._name, self._parties, me, party, self._ttl, self._label)

    def _board(self) -> Board:
        runtime = self._generations.latest
        runtime.guard()
        return board(runtime, self._name, Family.BARRIER, KEEP)


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
        # Of a full round all may be dead: then only those can end it who wait for the next one.
        if gone and (mine is not None or rounds.full(body)):
            board.wish(lambda body: rounds.broken(body, gone))


class _Visit:
    """One call of ``wait``: a party."""

    def __init__(self, name: str, found: Board, crew: _Crew, arrive: Arrive) -> None:
        self.party: int = next(_parties)
        self._inside: int | None = None
        self._round = 0
        self._known = True
        self._name = name
        self._step = arrive
        self._board = found
        self._crew = crew
        crew.parties.add(self.party)
        self.arrival: asyncio.Future[Any] = self._arrive()

    def _arrive(self) -> asyncio.Future[Any]:
        return self._board.wish(self._come)

    def _come(self, body: Body) -> tuple[Body | None, tuple[int, int]]:
        """Arrive in the round that stands in the document."""
        self._round = body["round"] if body else 0
        return self._step(body, self._board.id, self.party)

    def look(self, body: Body) -> int | Late | None:
        """How many came before, once the round has been passed; raises :class:`BarrierBroken` if it was broken."""
        self._crew.look(body)
        self._inside = rounds.inside(body)
        if not self.arrival.done():
            return None
        number, before = self.arrival.result()
        if number == rounds.MISSED:
            return LATE
        if not number:
            # The roll of a full round was being called; this party is one of the next round.
            if not rounds.full(body):
                self.arrival = self._arrive()
            return None
        ended = rounds.outcome(body, number)
        if ended:
            raise BarrierBroken(self._name, ended)
        return None if ended is None else int(before)

    def refuse(self, found: Board) -> None:
        """There is no room for this party, so the others wait in vain: tell them, by way of a new board."""
        number = self._round
        found.wish(lambda body: rounds.refuse(body, number))

    def leave(self, why: str) -> asyncio.Future[Any]:
        """Give up; a future for what came of the round until then, as :func:`rounds.outcome` has it."""
        self._board.take_back(self.arrival)
        return self._board.wish(lambda body: self._leave(body, why))

    def _leave(self, body: Body, why: str) -> tuple[Body | None, str | None]:
        after, _ = rounds.leave(body, self._board.id, {self.party}, why)
        if after is None and self._board.in_doubt(self.arrival):
            # An arrival that was sent and not answered would count for a party that is gone: any write stops it.
            after = dict(body)
        number, _ = self._arrived()
        return after, rounds.outcome(body, number) if number > 0 else None

    def _arrived(self) -> tuple[int, int]:
        """The number of the round that counts this party, if it is known to, and how many came before."""
        arrival = self.arrival
        if not arrival.done() or arrival.cancelled() or arrival.exception() is not None:
            return 0, 0
        number, before = arrival.result()
        return number, before

    async def late(self, why: str) -> int | None:
        """The time is over: give up, or find that the round was passed, and how many came before then.

        Raises the error of an arrival that failed in this very moment: nobody knows whether it counted. Cancelling it
        stops the waiting, not the leaving.
        """
        arrival = self.arrival
        if arrival.done() and not arrival.cancelled() and (failed := arrival.exception()) is not None:
            raise failed
        if self._arrived()[0] == rounds.MISSED:
            return None
        leaving = self.leave(why)
        await asyncio.wait({leaving}, timeout=GRACE)
        self._known = leaving.done() and leaving.exception() is None
        return self._arrived()[1] if self._known and leaving.result() == rounds.PASSED else None

    def missing(self, parties: int) -> str:
        """Why the round was not complete in time, as far as this party knows."""
        if self._inside is None:
            there = "the server did not answer"
        elif self._inside < parties:
            there = f"{self._inside} of {parties} were there"
        else:
            there = f"{parties} of {parties} were there, and not all of them answered"
        return there if self._known else f"{there}; it is not known whether the others have passed since"
