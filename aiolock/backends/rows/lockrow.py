"""The rules over one lock row: pure functions from a row and the steps of a client's tasks to the next row.

A row contains holds, the queue, the last token and the limit of a semaphore. Holds and queue entries name the session of
their client; whether they count is known from the session rows, and passed in as a :class:`Liveness`. An entry that is known
not to count is removed by the next writer, of any client, and the head of the queue enters as far as it is compatible.

Nothing here knows tasks, stores or clocks. One file, because each rule is read together with the row that it changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from aiolock.backends.rows.rules import SET_LIMIT, UNSET_LIMIT, Granted, StoredRequest, admits

__all__ = [
    "MOST_SHARED",
    "Ask",
    "Batch",
    "Downgrade",
    "Enter",
    "Entered",
    "Force",
    "ForceOne",
    "Leave",
    "Liveness",
    "LockRow",
    "RowHold",
    "RowRequest",
    "Serve",
    "SetLimit",
    "Step",
    "TokenSource",
    "UnknownFormat",
    "address_of",
    "apply",
    "decode",
    "encode",
    "keep_row",
    "new_tokens",
    "number",
    "template",
    "text",
    "whole",
]

FORMAT = b"3"
"""First byte of a row: the format of the rest. A program refuses to write a row of another format."""

MOST_SHARED = 49_152
"""Bytes to which requests may let a row grow; the rest of its 65,536 belongs to the holders."""

GRANT = 48
"""Most bytes by which a queue entry grows when it becomes a hold: there has to be room for all of them in one write."""

MOST_GRANTED = 61_440
"""Bytes to which requests may let a row grow when its whole queue is granted."""

MOST_ASKED = 64_000
"""Bytes to which the reasons of requests to release may let it grow then; what is left is for releases that keep the lock."""

SHARE = 0.75
"""Part of that room beyond which only clients enter that have fewer than :data:`FEW` holds and requests in the row."""

FEW = 8
"""Holds and requests of one client, for which there is room beyond its share."""

LATEST = 250_000_000_000.0
"""Seconds since the epoch, before the year 9999: the calendar of Python ends there."""

HIGHEST = 2**62
"""Above all tokens: servers count to 2 ** 63 - 1."""


class UnknownFormat(Exception):
    """The row was written by another version of the library, or by another program."""

    def __init__(self, value: bytes) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        found, known = (ascii(text[:1].decode("latin-1")) for text in (self.value, FORMAT))
        return "it is damaged" if found == known else f"it has format {found}, not {known}"


# --- what may stand in a row


def number(value: Any) -> float:
    """Return seconds, of a duration or since the epoch, else raise :class:`ValueError`."""
    if type(value) not in (int, float) or not 0 <= value < LATEST:
        raise ValueError("no number of seconds")
    return float(value)


def whole(value: Any) -> int:
    """Return a whole number that is not negative, else raise :class:`ValueError`."""
    if type(value) is not int or not 0 <= value < HIGHEST:
        raise ValueError("no whole number")
    return value


def text(value: Any) -> str:
    """Return a text, else raise :class:`ValueError`."""
    if type(value) is not str or not (value.isascii() or value.encode()):
        raise ValueError("no text")
    return value


def some_text(value: Any) -> str:
    """Return a text that is not empty, else raise :class:`ValueError`."""
    if not text(value):
        raise ValueError("no text")
    return str(value)


def part_of_key(value: Any) -> str:
    """Return a text that may be a part of a key, else raise :class:`ValueError`."""
    if type(value) is not str or not (value.isascii() and value.isprintable()):
        raise ValueError("no part of a key")
    return value


# --- the row


@dataclass(frozen=True, slots=True)
class RowRequest(StoredRequest):
    """A request as a row keeps it: it lives as long as its session."""

    session: str = ""
    extra: tuple[tuple[str, Any], ...] = ()
    """Fields that this version does not know."""


@dataclass(slots=True)
class RowHold(Granted):
    """A hold, until its holder leaves or its session is dead; one that is ``kept`` has a session of its own."""

    request: RowRequest  # pyright: ignore[reportIncompatibleVariableOverride] # never another


@dataclass(slots=True)
class LockRow:
    """One lock: holds and queue by the id of the request, in the order in which they came."""

    name: str = ""
    holds: dict[str, RowHold] = field(default_factory=dict)
    queue: dict[str, RowRequest] = field(default_factory=dict)
    token: int = 0
    """The last token that was given."""
    declared: int = 0
    """The limit that the first user of a semaphore named; 0 if it is not known."""
    current: int | None = None
    """The limit in force, 0 while the semaphore is paused; ``None`` if there is none."""
    used: int = 0
    """The time of the store (µs) at the last use of the limit."""
    forced: tuple[str, ...] = ()
    """The holds that the last release by force has ended."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields that this version does not know."""

    @property
    def free(self) -> bool:
        """True if nothing is held, kept or waited for: the row may be deleted after a while."""
        return not self.holds and not self.queue

    def ahead(self, claims: Collection[str]) -> list[RowRequest]:
        """Return the holds and the part of the queue ahead of the last of these claims: all of it if one is not in the queue."""
        queue = list(self.queue.values())
        if all(claim in self.queue for claim in claims):
            while queue and queue.pop().id not in claims:
                pass
        return [*(hold.request for hold in self.holds.values()), *queue]

    def copy(self) -> LockRow:
        """Return a row that can be changed."""
        return replace(
            self, holds={owner: replace(hold) for owner, hold in self.holds.items()}, queue=dict(self.queue)
        )


_REQUEST = {
    "i": "id",
    "s": "session",
    "m": "mode",
    "d": "ttl",
    "a": "label",
    "n": "permits",
    "l": "limit",
    "b": "block",
    "u": "value",
}
"""Fields of a request in the row, by their short names; those with their default are left out."""
_DEFAULTS = StoredRequest("", "", 0.0)
_CHECKS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("m", "a", "u"), text),
    "i": some_text,
    **dict.fromkeys(("n", "l", "b"), whole),
    "s": part_of_key,
    "d": number,
}


def _pack(request: RowRequest) -> dict[str, Any]:
    packed = {
        short: getattr(request, name)
        for short, name in _REQUEST.items()
        if getattr(request, name) != getattr(_DEFAULTS, name, "")
    }
    return {**packed, **dict(request.extra)}


def _unpack(packed: dict[str, Any], known: Iterable[str] = ()) -> RowRequest:
    fields = {_REQUEST[short]: _CHECKS[short](value) for short, value in packed.items() if short in _REQUEST}
    fields["extra"] = tuple(
        (key, value) for key, value in packed.items() if key not in _REQUEST and key not in known
    )
    return RowRequest(**{"mode": "", "ttl": 0.0, **fields})


def encode(row: LockRow) -> bytes:
    """Return the value of a row."""
    content: dict[str, Any] = dict(row.extra)
    content.update(v=row.name, t=row.token)
    if row.holds:
        content["h"] = [
            {
                **_pack(hold.request),
                "t": hold.token,
                "w": round(hold.since, 3),
                **({"r": hold.asked} if hold.asked is not None else {}),
                **({"k": 1} if hold.kept else {}),
            }
            for hold in row.holds.values()
        ]
    if row.queue:
        content["q"] = [_pack(request) for request in row.queue.values()]
    if row.current is not None:
        content["c"] = [row.declared, row.current, row.used]
    if row.forced:
        content["f"] = row.forced
    return FORMAT + json.dumps(content, separators=(",", ":")).encode()


def decode(value: bytes) -> LockRow:
    """Return the row with this value; an empty value is an empty row. Raises :class:`UnknownFormat`."""
    if not value:
        return LockRow()
    if value[:1] != FORMAT:
        raise UnknownFormat(value)
    try:
        content = json.loads(value[1:])
        holds = [
            RowHold(
                _unpack(packed, "twrk"),
                whole(packed["t"]),
                number(packed["w"]),
                None if packed.get("r") is None else text(packed["r"]),
                "k" in packed,
            )
            for packed in content.pop("h", ())
        ]
        # The fields of a hold have no meaning there, and would get in the way of its own when the entry becomes one.
        queue = [_unpack(packed, "twrk") for packed in content.pop("q", ())]
        limits = content.pop("c", None)
        declared, current, used = (0, None, 0) if limits is None else map(whole, limits)
        return LockRow(
            name=text(content.pop("v")),
            token=whole(content.pop("t")),
            holds={hold.request.id: hold for hold in holds},
            queue={request.id: request for request in queue},
            declared=declared,
            current=current,
            used=used,
            forced=tuple(map(text, content.pop("f", ()))),
            extra=content,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnknownFormat(value) from error


def template(name: str, request: RowRequest, wall: float) -> tuple[str, str]:
    """Return two ASCII texts, HEAD and HOLD, to which a server adds the tokens.

    The value of a free row is HEAD, its token, END; END is ``}``, or ``,"f":[…]}`` with the claims that were ended by force.
    The value of the row with the hold is HEAD, the last new token, ``,"h":[``, HOLD, ``,"b":``, the number of new tokens,
    ``,"t":``, the first new token, ``}]``, END.
    """
    head = json.dumps({"v": name, "t": 0}, separators=(",", ":"))[: -len("0}")]
    hold = json.dumps({**_pack(replace(request, block=1)), "w": round(wall, 3)}, separators=(",", ":"))[:-1]
    return FORMAT.decode() + head, hold


def keep_row(row: LockRow) -> float | None:
    """Return the ttl of the row in the store: none while anything is held, kept or waited for; longer if a limit was set."""
    if not row.free:
        return None
    if row.current is None:
        return UNSET_LIMIT
    return UNSET_LIMIT if 0 != row.current == row.declared else SET_LIMIT


def address_of(session: str) -> str:
    """Return the address of the client that has a session."""
    return session.partition("-")[0]


# --- what counts


class Liveness:
    """The knowledge of a client about sessions: which are dead, which claims have ended, and which of its own claims live."""

    def __init__(
        self,
        dead: Iterable[str] = (),
        ended: Mapping[str, frozenset[str]] | None = None,
        own: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self.dead: set[str] = set(dead)
        """Sessions of which it is known that they are marked dead, or whose absence proves it."""
        self.ended: dict[str, frozenset[str]] = dict(ended or {})
        """By session, the ids of claims that its client has ended."""
        self.own: dict[str, Collection[str]] = dict(own or {})
        """The sessions of this client, and the claims of each that are live: all others of them have ended."""

    def counts(self, request: RowRequest) -> bool:
        """Test whether a hold or queue entry counts: for all that is known, its session lives and its claim has not ended."""
        session, own = request.session, self.own.get(request.session)
        if session in self.dead or request.id in self.ended.get(session, ()):
            return False
        return own is None or request.id in own


# --- tokens


class TokenSource(NamedTuple):
    """Where the tokens of a grant come from, besides the row."""

    floor: int
    """The highest token that this client has seen; survives reopening."""
    tick: int
    """The time of the store in µs, at or after the read of the version that is replaced; 0 if it has none."""
    wall: float = 0.0
    """Seconds since the epoch, by the writer's clock; shown to people only."""


def new_tokens(last: int, block: int, source: TokenSource) -> tuple[int, int, int]:
    """Return the first token of a grant, their number (at most ``block``), and the last one, which the row remembers.

    All lie above ``last`` and ``floor``, and a block not above the time of the store: a row that was lost or purged begins
    again above it. A row without history gives one token: a block below the time of the store could contain tokens that were
    given before the row was lost.
    """
    top = max(last + 1, source.floor + 1, source.tick)
    first = max(last, source.floor, top - block) + 1 if last else top
    return first, top - first + 1, top


# --- steps


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a task; ``id`` is the claim that it is about."""

    id: str = ""


@dataclass(frozen=True, slots=True)
class Enter(Step):
    """Acquire the lock, or with ``wait`` join the queue; repeated, it finds its hold or position."""

    request: RowRequest = RowRequest("", "", 0.0)
    wait: bool = False


@dataclass(frozen=True, slots=True)
class Leave(Step):
    """Give up the hold or position; with ``kept``, that request takes the place of the hold."""

    kept: RowRequest | None = None


@dataclass(frozen=True, slots=True)
class Downgrade(Step):
    """Turn a write hold into a read hold."""


@dataclass(frozen=True, slots=True)
class Force(Step):
    """End all holds."""


@dataclass(frozen=True, slots=True)
class ForceOne(Step):
    """End one hold by force."""


@dataclass(frozen=True, slots=True)
class Ask(Step):
    """Ask the holders to release."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class SetLimit(Step):
    """Set the limit of a semaphore."""

    limit: int = 1


@dataclass(frozen=True, slots=True)
class Serve(Step):
    """Remove what does not count and serve the queue."""


SHRINKING = Leave, Force, ForceOne
"""The steps that shrink a row."""


class Entered(NamedTuple):
    """The result of :class:`Enter` and :class:`Downgrade`: a grant, or a refusal with ``token`` 0."""

    token: int = 0
    tokens: int = 0
    limit: int | None = None
    """The limit in force, if the request named another one."""


Result = Entered | bool
"""The result of a step: that of an ``Enter``, or for the other steps whether there was a hold."""


class Batch(NamedTuple):
    """The next row, and what becomes of the steps."""

    row: LockRow
    changed: bool
    results: list[Result | None]
    """In the order of the steps; ``None``: there is no room for it in the row."""
    flush: bool
    """False if the write may be lost in a crash: releases with an empty queue only."""
    notify: frozenset[str]
    """Addresses of clients that have to read the row."""


def apply(
    row: LockRow, steps: Sequence[Step], known: Liveness, source: TokenSource, *, doubt: bool = False
) -> Batch:
    """Apply the steps of one client's tasks, those that shrink the row first; ``row`` stays as it is.

    A request for which there is no room lets none of those after it enter. It leaves no trace in the row, so no other client counts it,
    and its own client can let it wait and try it again; whatever shrinks the row has been carried out before.

    ``doubt``: an earlier write of this client was not answered, and a copy may be late. Then a leave changes the version
    although it finds nothing, by a write that is flushed.
    """
    work = _Work(row.copy(), known, source)
    work.serve()
    results: list[Result | None] = [None] * len(steps)
    for number in sorted(range(len(steps)), key=lambda number: not isinstance(steps[number], SHRINKING)):
        results[number] = work.step(steps[number])
    if doubt and any(isinstance(step, Leave) for step in steps):
        work.changed = work.durable = True
    notify = frozenset(map(address_of, work.notify))
    return Batch(work.row, work.changed, results, work.durable or not work.row.free, notify)


class _Room:
    """The room in a row for more requests of one client: measured once, and counted while they enter.

    What leaves later in the same batch is not counted, and what is granted later has its room already.
    """

    def __init__(self, row: LockRow, known: Liveness) -> None:
        requests = [*(hold.request for hold in row.holds.values()), *row.queue.values()]
        self._length = len(encode(row))
        self._granted = self._length + GRANT * len(row.queue)
        """The length once the whole queue has been granted."""
        self._own = sum(request.session in known.own for request in requests)
        self._over = False

    def take(self, length: int, later: int, shared: float, granted: float) -> bool:
        """Take ``length`` bytes, and ``later`` when the queue is granted, if the row has room for them within these limits."""
        fits = self._length + length <= shared and self._granted + length + later <= granted
        if fits:
            self._length += length
            self._granted += length + later
        return fits

    def enter(self, request: RowRequest, *, granted: bool) -> bool:
        """Take the room for a request, if it is there, and was there for those before it."""
        length = len(json.dumps(_pack(request), separators=(",", ":"))) + 1
        share = 1 if self._own < FEW else SHARE
        sizes = length + GRANT * granted, GRANT * (not granted)
        if self._over or not self.take(*sizes, share * MOST_SHARED, share * MOST_GRANTED):
            self._over = True
            return False
        self._own += 1
        return True


class _Work:
    """One row that is being changed."""

    def __init__(self, row: LockRow, known: Liveness, source: TokenSource) -> None:
        self.row = row
        self.known = known
        self.source = source
        self.changed = False
        self.durable = False
        self.notify: set[str] = set()
        """Sessions."""
        self._measured: _Room | None = None

    @property
    def _room(self) -> _Room:
        if self._measured is None:
            self._measured = _Room(self.row, self.known)
        return self._measured

    def serve(self) -> None:
        """Remove what does not count, and let the head of the queue enter as far as it is compatible."""
        row, counts = self.row, self.known.counts
        over = [owner for owner, hold in row.holds.items() if not counts(hold.request)]
        gone = [waiter for waiter, request in row.queue.items() if not counts(request)]
        for owner in over:
            del row.holds[owner]
        for waiter in gone:
            del row.queue[waiter]
        self.changed = self.changed or bool(over or gone)
        while row.queue and admits(row.holds, request := next(iter(row.queue.values())), row.current):
            del row.queue[request.id]
            self._grant(request)
            self.notify.add(request.session)

    def _grant(self, request: RowRequest) -> Entered:
        first, count, self.row.token = new_tokens(self.row.token, request.block, self.source)
        # The number of tokens is read from the hold again when the grant is found there.
        self.row.holds[request.id] = RowHold(replace(request, block=count), first, self.source.wall)
        self.changed = self.durable = True
        return Entered(first, count)

    def step(self, step: Step) -> Result | None:
        """Carry out one step, or return ``None`` if there is no room for it."""
        match step:
            case Enter():
                return self._enter(step.request, wait=step.wait)
            case Leave():
                return self._leave(step)
            case Downgrade():
                return self._downgrade(step.id)
            case Force():
                return self._force(list(self.row.holds))
            case ForceOne():
                return self._force([step.id] if step.id in self.row.holds else [])
            case Ask():
                return self._ask(step.reason)
            case SetLimit():
                self.row.current, self.row.used = step.limit, self.source.tick
                self.changed = self.durable = True
        self.serve()
        return True

    def _enter(self, request: RowRequest, *, wait: bool) -> Entered | None:
        row = self.row
        if (hold := row.holds.get(request.id)) is not None:
            return Entered(hold.token, hold.request.block)
        if request.id in row.queue:
            return Entered()
        if request.mode == "permits" and (limit := self._limit(request.limit)) is not None:
            return Entered(limit=limit)
        enters = not row.queue and admits(row.holds, request, row.current)
        if not enters and not wait:
            return Entered()
        if not self._room.enter(request, granted=enters):
            return None
        if enters:
            return self._grant(request)
        if not row.queue:
            # The first that waits: from now on the holder's client does not pass the lock on for long.
            self.notify.update(hold.request.session for hold in row.holds.values() if hold.request.block > 1)
        row.queue[request.id] = request
        self.changed = self.durable = True
        return Entered()

    def _limit(self, named: int) -> int | None:
        """Return the limit in force if a request may not name that one, else ``None``."""
        row, keep = self.row, keep_row(self.row)
        forgotten = keep is not None and row.used + keep * 1e6 <= self.source.tick
        if row.current is None or forgotten:
            row.declared = row.current = named
        elif not row.declared:
            # Also written for a try that gets nothing: it is the first user.
            row.declared, self.changed = named, True
        row.used = self.source.tick
        return None if named in (row.declared, row.current) else row.current

    def _leave(self, step: Leave) -> bool:
        row = self.row
        hold = row.holds.pop(step.id, None)
        if row.queue.pop(step.id, None) is not None or hold is not None:
            self.changed = True
        if hold is not None and step.kept is not None:
            row.holds[step.kept.id] = RowHold(step.kept, hold.token, hold.since, kept=True)
            self.durable = True
        if row.current is not None:
            row.used = self.source.tick
        self.serve()
        return hold is not None

    def _downgrade(self, owner: str) -> Entered:
        hold = self.row.holds.get(owner)
        if hold is None:
            return Entered()
        if hold.request.mode != "read":
            hold.request = replace(hold.request, mode="read", block=1)
            self.changed = self.durable = True
            self.serve()
        return Entered(hold.token, 1)

    def _force(self, owners: Sequence[str]) -> bool:
        row = self.row
        if owners:
            self.notify.update(row.holds.pop(owner).request.session for owner in owners)
            # Those that may not have learnt it yet, and no more: the row must not grow.
            row.forced = (*row.forced[-FEW:], *owners) if row.holds else tuple(owners)
            self.changed = self.durable = True
        self.serve()
        return bool(owners)

    def _ask(self, reason: str) -> bool | None:
        asked = [hold for hold in self.row.holds.values() if not hold.kept]
        longer = sum(_reason_length(reason) - _reason_length(hold.asked) for hold in asked)
        if longer > 0 and not self._room.take(longer, 0, MOST_ASKED, MOST_ASKED):
            return None
        for hold in asked:
            hold.asked = reason
            self.notify.add(hold.request.session)
        self.changed = self.changed or bool(asked)
        self.durable = self.durable or bool(asked)
        return bool(asked)


def _reason_length(reason: str | None) -> int:
    return 0 if reason is None else len(json.dumps(reason)) + len(',"r":')
