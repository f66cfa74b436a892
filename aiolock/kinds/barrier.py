"""Cyclic barrier: parties wait for each other, round after round.

A round ends in one of two ways. It is *passed* when all parties are inside and then each of them has confirmed it: one that
died before the last party arrived does not confirm, so it is not counted. It is *broken* when a party gives up, or when other
parties see for its ttl that its heartbeat does not change. Either way the next round begins. Each observer measures with its
own clock, so that no two clocks have to agree.

The body of the register has ``parties``, ``round`` (a number), ``inside`` (the parties: id -> ``[count, ttl, label, confirmed]``)
and ``broken`` (the last broken rounds, each with the reason).

One file, because a party applies these rules to the register and judges the result by them."""

from __future__ import annotations

import asyncio
import json
import secrets
from functools import partial

from aiolock.core.register import LATE, Body, Late, RegisterFull, SharedRegister
from aiolock.core.runtime import Generations, Runtime
from aiolock.errors import BarrierBroken, ConfigError, WaitTimeout, shorten
from aiolock.lock import Handle
from aiolock.types import BARRIER
from aiolock.validation import check_timeout

__all__ = [
    "MISSED",
    "PASSED",
    "Barrier",
    "arrive",
    "broken",
    "dead",
    "full",
    "heartbeat",
    "inside",
    "leave",
    "outcome",
    "refuse",
    "short",
]

KEEP = 86_400.0
"""Seconds after its last use for which a barrier keeps its number of parties."""
GRACE = 0.05
"""Seconds after its timeout in which a party finds out whether the others have passed with it."""
ENDS = 32
"""Number of broken rounds that are remembered."""
LABEL = 24
"""Bytes of a label in the register, so that 1,000 parties fit whatever their labels are."""
REASON = 60
"""Bytes of a reason in the register."""

PASSED = ""
MISSED = -1
"""The round of a party that was not the last, and so did not arrive."""
Heartbeats = dict[str, tuple[int, float]]
"""The last heartbeat of each party, and the time at which it was seen first, by the observer's clock."""


# --- rounds: pure functions of the body


def short(text: str, most: int = LABEL) -> str:
    """Return the beginning of a text that takes at most ``most`` bytes in the register, where non-ASCII letters take six."""
    while len(json.dumps(text)) - 2 > most:
        text = text[: min(len(text) - 1, most)]
    return text


def inside(body: Body) -> int:
    """Return the number of parties inside."""
    return len(body["inside"]) if body else 0


def full(body: Body) -> bool:
    """Test whether all parties are inside, so that they confirm the round."""
    return bool(body) and inside(body) >= body["parties"]


def _ended(body: Body, why: str) -> Body:
    ends = [*body["broken"], [body["round"], short(why, REASON)]][-ENDS:] if why else body["broken"]
    return {**body, "round": body["round"] + 1, "inside": {}, "broken": ends}


def _with(body: Body, party: str, entry: list[object]) -> Body:
    """Return the body with a party's entry; the round is passed if it is full and each party has confirmed it."""
    after = {**body, "inside": {**body["inside"], party: entry}}
    if full(after) and all(confirmed for *_, confirmed in after["inside"].values()):
        return _ended(after, PASSED)
    return after


def arrive(
    body: Body, name: str, parties: int, party: str, ttl: float, label: str, *, last: bool = False
) -> tuple[Body | None, tuple[int, int]]:
    """Add a party; return the new body (``None``: leave it), the round, and how many parties were inside before.

    The round is 0 while a full round is being confirmed: the party belongs to the next one, and has to arrive again. With
    ``last``, only the last party of a round is added; otherwise the round is :data:`MISSED`. Raises :class:`ConfigError` for
    another number of parties.
    """
    body = body or {"parties": parties, "round": 1, "inside": {}, "broken": []}
    if body["parties"] != parties:
        raise ConfigError(
            f"barrier {shorten(name)} has {body['parties']} parties, not {parties}: every client has to name the same number; "
            "for another one, take another name"
        )
    before = inside(body)
    if last and before != parties - 1:
        return None, (MISSED, before)
    if full(body):
        return None, (0, 0)
    return _with(body, party, [0, round(ttl, 3), label, int(before + 1 >= parties)]), (body["round"], before)


def heartbeat(body: Body, party: str) -> tuple[Body | None, None]:
    """Record that a party is alive, and confirm the round if it is full; a party that has confirmed needs no heartbeat."""
    if not body or party not in body["inside"]:
        return None, None
    count, ttl, label, confirmed = body["inside"][party]
    return (None if confirmed else _with(body, party, [count + 1, ttl, label, int(full(body))])), None


def leave(body: Body, party: str, why: str) -> tuple[Body | None, None]:
    """Break the round if the party is inside."""
    return (_ended(body, why) if body and party in body["inside"] else None), None


def refuse(body: Body, number: int) -> tuple[Body | None, None]:
    """Break round ``number``, which cannot be completed because the register has no room for another party; ``None`` if it is over."""
    if not body or body["round"] != number or not body["inside"]:
        return None, None
    return _ended(body, "there is no room for another party"), None


def broken(body: Body, gone: dict[str, int]) -> tuple[Body | None, None]:
    """Break the round if a party that was found dead is still inside with the same heartbeat."""
    entries = body["inside"] if body else {}
    found = {
        entries[party][2] for party, count in gone.items() if party in entries and entries[party][0] == count
    }
    return (_ended(body, f"no heartbeat of {', '.join(sorted(found))}") if found else None), None


def dead(body: Body, party: str, heartbeats: Heartbeats, now: float) -> dict[str, int]:
    """Return the other parties that have not confirmed and whose heartbeat has not changed for their ttl, each with that heartbeat.

    Updates ``heartbeats``.
    """
    entries = body["inside"] if body else {}
    for other in heartbeats.keys() - entries.keys():
        del heartbeats[other]
    gone = {}
    for other, (count, ttl, _, confirmed) in entries.items():
        last, since = heartbeats.get(other, (-1, now))
        if count != last:
            heartbeats[other] = (count, now)
        elif other != party and not confirmed and now - since >= ttl:
            gone[other] = count
    return gone


def outcome(body: Body, number: int) -> str | None:
    """Return why a round was broken; empty if it was passed, ``None`` if it is still open."""
    if not body or body["round"] < number:
        return "the server has forgotten it"
    if body["round"] == number:
        return None
    ends = dict(body["broken"])
    if number in ends:
        return str(ends[number])
    if len(ends) == ENDS and number < min(ends):
        return "this party was away for so long that the server has forgotten how the round ended"
    return PASSED


# --- the handle


class Barrier(Handle):
    """A barrier that opens when ``parties`` have arrived. Made by :meth:`Client.barrier`; no I/O until asked.

    Reusable: when all have passed, the next round begins. A party is a call of :meth:`wait`; several may be in one
    process. A round in which a party gives up (cancelled, timed out, its client closed) or dies is broken for all of
    its parties with :class:`BarrierBroken`, and the next round begins. A party counts as dead when another one that
    waits has received no heartbeat of its client for its ttl.
    """

    __slots__ = ("_generations", "_name", "_own_label", "_parties", "_ttl")

    _noun = "barrier"

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
        """The name of the barrier."""
        return self._name

    @property
    def parties(self) -> int:
        """The number of parties that pass together."""
        return self._parties

    @property
    def _label(self) -> str:
        """The label of the barrier or of the client, else host and process of its latest opening, which differ after a fork."""
        latest = self._generations.latest
        return short(self._own_label or latest.label or latest.caller)

    def __repr__(self) -> str:
        return f"<Barrier {shorten(self._name)} of {self._parties} ttl={self._ttl:g}>"

    async def waiting(self) -> int:
        """Return the number of parties inside.

        Raises :class:`BackendError` if the server does not answer within the ``command_timeout``, and :class:`UnsupportedKind` on
        servers without barriers. Cancelling it changes nothing.
        """
        return await self._register().change(lambda body: (None, inside(body)))

    async def wait(self, timeout: float | None = None) -> int:
        """Arrive, wait for the others and pass with them; return how many parties came before, from 0.

        Exactly one party of each round gets 0. ``timeout`` is in seconds (``None``: no limit; 0: pass if this is the last
        party that the round waits for, otherwise do not arrive at all, which breaks nothing).

        Raises :class:`WaitTimeout` (a :class:`TimeoutError`) when the time is over, :class:`BarrierBroken` if another
        party gave up or died, :class:`ConfigError` if the barrier has another number of parties, and
        :class:`BackendError` if the server cannot be reached at first; once it waits, it survives outages.

        Whenever it raises, also by being cancelled, a round that has counted this party is broken for the others, which
        are notified in the background; a party that the server has not counted yet leaves nothing, and the others wait on. At
        the end of its time it finds out first what came of the round, for at most another 0.05 s, and passes if the
        others did. Two cases remain in which it raises and the others may have passed: the server did not answer
        (:class:`BackendError`, or a :class:`WaitTimeout` that says so), and it was cancelled, or its client closed, in the
        very moment in which they pass.
        """
        limit = check_timeout(timeout)
        left = await self._runtime().reach(limit)
        register = self._register()
        party = _Party(self, register, self._ttl, self._label, last=limit == 0)
        # The last party still waits for the others to confirm.
        longest = left if limit != 0 else self._generations.latest.command_timeout
        closing = partial(leave, party=party.id, why="the client of a party was closed")
        try:
            before: int | Late | None = await register.wait(party.condition, longest, party.arrival, closing)
            if isinstance(before, Late):
                before = await party.late(f"a party timed out ({self._label})")
        except BarrierBroken:
            raise
        except BaseException as error:
            if isinstance(error, RegisterFull):
                # The others wait in vain.
                self._register().change(partial(refuse, number=party.round))
            party.leave(f"a party was cancelled ({self._label})")
            raise
        finally:
            party.over = True
        if before is None:
            raise WaitTimeout("barrier", self._name, limit or 0.0, party.missing())
        return before

    def _runtime(self) -> Runtime:
        runtime = self._generations.latest
        runtime.guard()
        return runtime

    def _register(self) -> SharedRegister:
        return self._runtime().register(self._name, BARRIER.family, KEEP)


class _Party:
    """One party: a call of ``wait``. With ``last``, it arrives only as the last one of its round."""

    def __init__(
        self, barrier: Barrier, register: SharedRegister, ttl: float, label: str, *, last: bool
    ) -> None:
        self.id = secrets.token_urlsafe(6)
        self.over = False
        """True once the wait has ended: then there are no more heartbeats."""
        self.round = 0
        """The round in which the party arrives."""
        self._inside: int | None = None
        """The number of parties inside, as far as it is known."""
        self._known = True
        """False if the outcome of the round is not known."""
        self._barrier = barrier
        self._register = register
        self._ttl = ttl
        self._label = label
        self._last = last
        self._confirming = 0
        """The round that this party has begun to confirm."""
        self._heartbeats: Heartbeats = {}
        self._observed = register.clock()
        self.arrival: asyncio.Future[tuple[int, int]] = register.change(self._arrive, patient=True)
        asyncio.get_running_loop().call_later(ttl / 3, self._send_heartbeat)

    def _arrive(self, body: Body) -> tuple[Body | None, tuple[int, int]]:
        self.round = body["round"] if body else 0
        barrier = self._barrier
        return arrive(body, barrier.name, barrier.parties, self.id, self._ttl, self._label, last=self._last)

    def _send_heartbeat(self) -> None:
        if not self.over and not self._register.ended:
            self._register.change(self._observe)
            asyncio.get_running_loop().call_later(self._ttl / 3, self._send_heartbeat)

    def _observe(self, body: Body) -> tuple[Body | None, None]:
        """Break the round if another party is dead, else record that this one lives."""
        now = self._register.clock()
        if now - self._observed > self._ttl * 2 / 3:
            # This process was stopped or cut off, and has missed the heartbeats of the others.
            self._heartbeats.clear()
        self._observed = now
        ended, _ = broken(body, dead(body, self.id, self._heartbeats, now))
        return heartbeat(body, self.id) if ended is None else (ended, None)

    def condition(self, body: Body) -> int | Late | None:
        """Return how many came before, once the round was passed; raise :class:`BarrierBroken` if it was broken."""
        self._inside = inside(body)
        if not self.arrival.done():
            return None
        number, before = self.arrival.result()
        if number == MISSED:
            return LATE
        if not number:
            if not full(body):
                # A full round was being confirmed; this party is one of the next round.
                self.arrival = self._register.change(self._arrive, patient=True)
            return None
        ended = outcome(body, number)
        if ended:
            raise BarrierBroken(self._barrier.name, ended)
        if ended is None and full(body) and self._confirming != number:
            self._confirming = number
            self._register.change(partial(heartbeat, party=self.id), patient=True)
        return None if ended is None else before

    def leave(self, why: str) -> asyncio.Future[str | None]:
        """Give up; the future gets the :func:`outcome` of the round until then."""
        self._register.withdraw(self.arrival)

        def update(body: Body) -> tuple[Body | None, str | None]:
            # The reading before may have shown that an arrival without an answer has counted.
            number, _ = self._arrived()
            return leave(body, self.id, why)[0], outcome(body, number) if number > 0 else None

        return self._register.change(update)

    def _arrived(self) -> tuple[int, int]:
        """Return the round that is known to count this party, and how many came before; 0 for none."""
        arrival = self.arrival
        if not arrival.done() or arrival.cancelled() or arrival.exception() is not None:
            return 0, 0
        return arrival.result()

    async def late(self, why: str) -> int | None:
        """Give up after the timeout; return how many came before if the round turns out to be passed, else ``None``.

        Raises the error of an arrival that failed in this very moment: it may have counted. Cancelling it ends the wait,
        not the leaving.
        """
        arrival = self.arrival
        if arrival.done() and not arrival.cancelled() and (failed := arrival.exception()) is not None:
            raise failed
        if self._arrived()[0] == MISSED:
            return None
        leaving = self.leave(why)
        await asyncio.wait({leaving}, timeout=GRACE)
        self._known = leaving.done() and leaving.exception() is None
        return self._arrived()[1] if self._known and leaving.result() == PASSED else None

    def missing(self) -> str:
        """Describe why the round was not complete in time, as far as this party knows."""
        parties = self._barrier.parties
        if self._inside is None:
            there = "the server did not answer"
        elif self._inside < parties:
            there = f"{self._inside} of {parties} were there"
        else:
            there = f"{parties} of {parties} were there, and not all of them answered"
        return there if self._known else f"{there}; it is not known whether the others have passed since"
