"""Cyclic barrier: parties wait for each other, round after round.

A round ends in one of two ways. It is *passed* when all parties are inside and then every client that has some has confirmed
it with another write: a client that died before the last party arrived does not confirm, so its parties are not counted. It is
*broken* when a party gives up, or when other clients see for a ttl that a client's heartbeat does not
change. Either way the next round begins. Each observer measures with its own clock, so that no two clocks have to agree.

The body of the register has ``parties``, ``round`` (a number), ``inside`` (client -> ``ids`` of its parties, ``beat``,
``ttl``, ``label``, ``here``) and ``broken`` (the last broken rounds, each with the reason).

One file, because a party applies these rules to the register and judges the result by them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from functools import partial

from aiolock.core.register_writer import LATE, Body, Late, RegisterWriter
from aiolock.core.runtime import Generations, OpeningState, Runtime
from aiolock.errors import BackendRefused, BarrierBroken, ConfigError, WaitTimeout, shorten
from aiolock.lock import Handle
from aiolock.types import BARRIER
from aiolock.validation import check_timeout

__all__ = [
    "MISSED",
    "PASSED",
    "Barrier",
    "Heartbeats",
    "arrive",
    "broken",
    "dead",
    "full",
    "heartbeat",
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
"""Bytes of a label in the register, so that 500 clients fit whatever their labels are."""

REASON = 60
"""Bytes of a reason in the register."""

PASSED = ""
MISSED = -1
"""The round of a party that was not the last, and so did not arrive."""
Heartbeats = dict[str, tuple[int, float]]
"""The last heartbeat of each client, and the time at which it was seen first, by the observer's clock."""


# --- rounds: pure functions of the body


def _opened(body: Body, name: str, parties: int) -> Body:
    if not body:
        return {"parties": parties, "round": 1, "inside": {}, "broken": []}
    if body["parties"] != parties:
        raise ConfigError(
            f"barrier {shorten(name)} has {body['parties']} parties, not {parties}: every client has to name the same number; "
            "for another one, take another name"
        )
    return body


def short(text: str, most: int = LABEL) -> str:
    """Return the beginning of a text that takes at most ``most`` bytes in the register, where non-ASCII letters take six."""
    while len(json.dumps(text)) - 2 > most:
        text = text[: min(len(text) - 1, most)]
    return text


def inside(body: Body) -> int:
    """Return the number of parties inside."""
    return sum(len(entry["ids"]) for entry in body["inside"].values()) if body else 0


def full(body: Body) -> bool:
    """Test whether all parties are inside, so that the clients confirm the round."""
    return bool(body) and inside(body) >= body["parties"]


def missing(body: Body) -> int:
    """Return how many parties have to arrive, or how many clients to confirm; 0 for a barrier without a party."""
    if full(body):
        return sum(not entry["here"] for entry in body["inside"].values())
    return body["parties"] - inside(body) if body else 0


def _ended(body: Body, why: str) -> Body:
    ends = [*body["broken"], [body["round"], short(why, REASON)]][-ENDS:] if why else body["broken"]
    return {**body, "round": body["round"] + 1, "inside": {}, "broken": ends}


def _passed_if_confirmed(body: Body) -> Body:
    """End the round as passed if every client has confirmed it."""
    if full(body) and all(entry["here"] for entry in body["inside"].values()):
        return _ended(body, PASSED)
    return body


def arrive(
    body: Body, name: str, parties: int, me: str, party: int, ttl: float, label: str, *, last: bool = False
) -> tuple[Body | None, tuple[int, int]]:
    """Add a party of client ``me``; return the new body (``None``: leave it), the round, and how many parties were inside before.

    For a party that is inside already the body is ``None``, and the other parties inside are counted. The round is 0 while a
    full round is being confirmed: the party belongs to the next one, and has to arrive again. With ``last``, only the last
    party of a round is added; otherwise the round is :data:`MISSED`. Raises :class:`ConfigError` for another number of parties.
    """
    body = _opened(body, name, parties)
    before = inside(body)
    entry = body["inside"].get(me, {"ids": [], "beat": 0})
    if party in entry["ids"]:
        return None, (body["round"], before - 1)
    if last and before != parties - 1:
        return None, (MISSED, before)
    if full(body):
        return None, (0, 0)
    mine = {
        "ids": [*entry["ids"], party],
        "beat": entry["beat"] + 1,
        "ttl": ttl,
        "label": label,
        "here": before + 1 >= parties,
    }
    return _passed_if_confirmed({**body, "inside": {**body["inside"], me: mine}}), (body["round"], before)


def heartbeat(body: Body, me: str) -> tuple[Body | None, None]:
    """Record that client ``me`` is alive, and confirm the round if it is full; a client that has confirmed needs no heartbeat."""
    if not body or me not in body["inside"] or body["inside"][me]["here"]:
        return None, None
    entry = body["inside"][me]
    entry = {**entry, "beat": entry["beat"] + 1, "here": full(body)}
    return _passed_if_confirmed({**body, "inside": {**body["inside"], me: entry}}), None


def leave(body: Body, me: str, parties: set[int], why: str) -> tuple[Body | None, None]:
    """Break the round if one of these parties of client ``me`` is inside."""
    if not body or me not in body["inside"] or not parties.intersection(body["inside"][me]["ids"]):
        return None, None
    return _ended(body, why), None


def refuse(body: Body, number: int) -> tuple[Body | None, None]:
    """Break round ``number``, which cannot be completed because the register has no room for another party; ``None`` if it is over."""
    if not body or body["round"] != number or not body["inside"]:
        return None, None
    return _ended(body, "there is no room for another party"), None


def broken(body: Body, gone: Mapping[str, int]) -> tuple[Body | None, None]:
    """Break the round if a client that was found dead is still inside with the same heartbeat."""
    if not body:
        return None, None
    found = [client for client, last in gone.items() if body["inside"].get(client, {}).get("beat") == last]
    if not found:
        return None, None
    labels = ", ".join(sorted(body["inside"][client]["label"] for client in found))
    return _ended(body, f"no heartbeat of {labels}"), None


def dead(body: Body, me: str, heartbeats: Heartbeats, now: float) -> dict[str, int]:
    """Return the other clients that have not confirmed and whose heartbeat has not changed for their ttl, each with that heartbeat.

    Updates ``heartbeats``.
    """
    clients = body["inside"] if body else {}
    for client in [client for client in heartbeats if client not in clients]:
        del heartbeats[client]
    gone = {}
    for client, entry in clients.items():
        last, since = heartbeats.get(client, (-1, now))
        if entry["beat"] != last:
            heartbeats[client] = (entry["beat"], now)
        elif client != me and not entry["here"] and now - since >= entry["ttl"]:
            gone[client] = last
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
        return await self._writer().apply(lambda body: (None, inside(body)))

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
        writer = self._writer()
        local = _LocalParties.of(self._runtime(), writer, self._ttl)
        party = _Party(self, local, self._ttl, self._label, last=limit == 0)
        # The last party still waits for the other clients to confirm.
        longest = left if limit != 0 else self._generations.latest.command_timeout
        try:
            before: int | Late | None = await writer.wait(party.condition, longest, party.arrival)
            if isinstance(before, Late):
                before = await party.late(f"a party timed out ({self._label})")
        except BarrierBroken:
            raise
        except BaseException as error:
            if isinstance(error, BackendRefused) and writer.full:
                # The others wait in vain: notify them, by a new writer.
                self._writer().submit(partial(refuse, number=party.round))
            party.leave(f"a party was cancelled ({self._label})")
            raise
        finally:
            local.parties.discard(party.number)
        if before is None:
            raise WaitTimeout("barrier", self._name, limit or 0.0, party.missing())
        return before

    def _runtime(self) -> Runtime:
        runtime = self._generations.latest
        runtime.guard()
        return runtime

    def _writer(self) -> RegisterWriter:
        return self._runtime().writer(self._name, BARRIER.family, KEEP)


class _LocalParties:
    """The parties of one client: they share a heartbeat, and watch the other clients together."""

    def __init__(self, runtime: Runtime, writer: RegisterWriter, ttl: float) -> None:
        self._all = LOCAL_PARTIES.of(runtime)
        self._all[writer] = self
        self.writer = writer
        self.parties: set[int] = set()
        self._ttl = ttl
        self._heartbeats: Heartbeats = {}
        self._observed_at = writer.clock()
        self._body: Body | None = None
        self._confirmed = 0
        """The round for which a confirmation was submitted."""
        writer.rivals = missing
        writer.on_close(lambda body: leave(body, writer.id, self.parties, "the client of a party was closed"))
        asyncio.get_running_loop().call_later(ttl / 3, self._send_heartbeat)

    @classmethod
    def of(cls, runtime: Runtime, writer: RegisterWriter, ttl: float) -> _LocalParties:
        """Return the parties of a client at one barrier."""
        return LOCAL_PARTIES.of(runtime).get(writer) or cls(runtime, writer, ttl)

    def _send_heartbeat(self) -> None:
        if not self.writer.ended and self.parties:
            self.writer.submit(partial(heartbeat, me=self.writer.id))
            asyncio.get_running_loop().call_later(self._ttl / 3, self._send_heartbeat)
        else:
            del self._all[self.writer]

    def _confirm(self) -> None:
        if not self.writer.ended:
            self.writer.submit(partial(heartbeat, me=self.writer.id), patient=True)

    def observe(self, body: Body) -> None:
        """Confirm a full round, and find dead clients, once for each version."""
        if body is self._body:
            return
        self._body = body
        writer, now = self.writer, self.writer.clock()
        mine = body["inside"].get(writer.id) if body else None
        if mine is not None and not mine["here"] and full(body) and self._confirmed != body["round"]:
            self._confirmed = body["round"]
            # One after the other, in the order in which they arrived: those that confirm at the same moment lose races.
            before = list(body["inside"]).index(writer.id)
            delay = min(before * writer.round, self._ttl / 3)
            asyncio.get_running_loop().call_later(delay, self._confirm)
        if now - self._observed_at > self._ttl * 2 / 3:
            # This client was stopped or cut off, and has missed the heartbeats of the others.
            self._heartbeats.clear()
        self._observed_at = now
        gone = dead(body, writer.id, self._heartbeats, now)
        # All clients of a full round may be dead: then only those that wait for the next round can end it.
        if gone and (mine is not None or full(body)):
            writer.submit(partial(broken, gone=gone))


LOCAL_PARTIES = OpeningState[dict[RegisterWriter, _LocalParties]](dict)
"""The parties of a client, by the writer of the register of their barrier."""

_numbers = itertools.count(1)


class _Party:
    """One party: a call of ``wait``. With ``last``, it arrives only as the last one of its round."""

    def __init__(self, barrier: Barrier, local: _LocalParties, ttl: float, label: str, *, last: bool) -> None:
        self.number: int = next(_numbers)
        self.round = 0
        """The round in which the party arrives."""
        self._inside: int | None = None
        """The number of parties inside, as far as it is known."""
        self._known = True
        """False if the outcome of the round is not known."""
        self._barrier = barrier
        self._ttl = ttl
        self._label = label
        self._last = last
        self._local = local
        self._writer = local.writer
        local.parties.add(self.number)
        self.arrival: asyncio.Future[tuple[int, int]] = self._writer.submit(self._arrive, patient=True)

    def _arrive(self, body: Body) -> tuple[Body | None, tuple[int, int]]:
        self.round = body["round"] if body else 0
        barrier, me = self._barrier, self._writer.id
        return arrive(
            body, barrier.name, barrier.parties, me, self.number, self._ttl, self._label, last=self._last
        )

    def condition(self, body: Body) -> int | Late | None:
        """Return how many came before, once the round was passed; raise :class:`BarrierBroken` if it was broken."""
        self._local.observe(body)
        self._inside = inside(body)
        if not self.arrival.done():
            return None
        number, before = self.arrival.result()
        if number == MISSED:
            return LATE
        if not number:
            # A full round was being confirmed; this party is one of the next round.
            if not full(body):
                self.arrival = self._writer.submit(self._arrive, patient=True)
            return None
        ended = outcome(body, number)
        if ended:
            raise BarrierBroken(self._barrier.name, ended)
        return None if ended is None else before

    def leave(self, why: str) -> asyncio.Future[str | None]:
        """Give up; the future gets the :func:`outcome` of the round until then."""
        self._writer.withdraw(self.arrival)

        def update(body: Body) -> tuple[Body | None, str | None]:
            after, _ = leave(body, self._writer.id, {self.number}, why)
            if after is None and self._writer.in_doubt(self.arrival):
                # An arrival that was sent and not answered would count for a party that is gone: any write stops it.
                after = dict(body)
            number, _ = self._arrived()
            return after, outcome(body, number) if number > 0 else None

        return self._writer.submit(update)

    def _arrived(self) -> tuple[int, int]:
        """Return the round that is known to count this party, and how many came before; 0 for none."""
        arrival = self.arrival
        if not arrival.done() or arrival.cancelled() or arrival.exception() is not None:
            return 0, 0
        number, before = arrival.result()
        return number, before

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
