"""The rules about session rows: how long a holder relies on its session, and when others may declare it dead.

A client has one session row for each ttl. One write of it, the heartbeat, renews every hold and queue position that names it.
Pure functions and small state machines without tasks, stores and clocks; times are seconds of one monotonic clock of the
client that asks, unless a parameter says otherwise."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from aiolock.backends.rows.lockrow import FORMAT, UnknownFormat, number, text, whole
from aiolock.backends.rows.store import StoreClock
from aiolock.core.backend import expires_at, margin

__all__ = [
    "DEAD",
    "MOST_ENDED",
    "ClockCheck",
    "EndedClaims",
    "Series",
    "SessionRow",
    "Verdict",
    "continued",
    "decode_session",
    "encode_session",
    "expiry",
    "judge",
    "needs_heartbeat",
    "next_observation",
    "observe",
    "relied_until",
    "remaining",
]

MOST_ENDED = 256
"""Ended claims in one session row; beyond it, new claims get a new session."""

MOST_ANNOUNCED = 2_000
"""Of these, with more releases at once, so many stand in the row: it stays below the longest value that a store takes, and one that
is too long would cost all holds of the session (memcached deletes what it cannot replace)."""

DRIFT = 0.01
"""The share by which two clocks may run at different speeds; as in :func:`aiolock.core.backend.expires_at`."""


# --- the session row


@dataclass(slots=True)
class SessionRow:
    """The content of a session row."""

    ttl: float
    heartbeat: int = 0
    """The number of the heartbeat that wrote it, by which the client recognises its own writes."""
    ended: tuple[str, ...] = ()
    """Claims that the client has ended and whose removal is not known to be durable: they count no more, for any client."""
    dead: bool = False
    """True once another client has declared the session dead: none of its holds and positions counts, for ever."""
    expires: StoreClock | None = None
    """The end of its ttl by the clock that all clients of the store share."""
    kept: float | None = None
    """For a lock that is kept after its release: the end of that by the wall clock, which counts after a reboot only. No process
    renews such a session, and so none has died with the machine."""
    leases: dict[str, tuple[int, float, str, int]] = field(default_factory=dict)
    """By claim, the present lease of those with local waiters or a local hand-over: token, since (seconds since the epoch, by the
    clock of the client), label, local waiters."""
    more: bool = False
    """True if there was no room for all of these."""
    extra: dict[str, Any] = field(default_factory=dict)


DEAD = SessionRow(0.0, dead=True)


def encode_session(row: SessionRow) -> bytes:
    """Return the value of a session row."""
    content = {**row.extra, "d": row.ttl, "n": row.heartbeat}
    if row.ended:
        content["e"] = row.ended
    if row.dead:
        content["x"] = 1
    if row.expires is not None:
        content["c"] = row.expires
    if row.kept is not None:
        content["k"] = row.kept
    if row.leases:
        content["p"] = row.leases
    if row.more:
        content["m"] = 1
    return FORMAT + json.dumps(content, separators=(",", ":")).encode()


def decode_session(value: bytes) -> SessionRow:
    """Return the session row with this value. Raises :class:`UnknownFormat`."""
    try:
        if value[:1] != FORMAT:
            raise UnknownFormat(value)
        content = json.loads(value[1:])
        clock, kept = content.pop("c", None), content.pop("k", None)
        return SessionRow(
            ttl=number(content.pop("d")),
            heartbeat=whole(content.pop("n")),
            ended=tuple(map(text, content.pop("e", ()))),
            dead=bool(content.pop("x", 0)),
            expires=None if clock is None else _clock(*clock),
            kept=None if kept is None else number(kept),
            leases={text(claim): _lease(*lease) for claim, lease in content.pop("p", {}).items()},
            more=bool(content.pop("m", 0)),
            extra=content,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnknownFormat(value) from error


def _clock(seconds: Any, boot: Any = "", zone: Any = "") -> StoreClock:
    return StoreClock(number(seconds), text(boot), text(zone))


def _lease(token: Any, since: Any, label: Any, waiting: Any) -> tuple[int, float, str, int]:
    return whole(token), number(since), text(label), whole(waiting)


# --- the holder


def relied_until(heartbeat: float, shown: float, ttl: float) -> float:
    """Return until when a hold is certain.

    ``heartbeat`` is the time at which the newest heartbeat that was answered was sent; ``shown`` that at which the newest
    step or read was sent whose answer showed the hold in the lock row. Both are needed: the heartbeat keeps others from
    declaring the session dead, and only the lock row shows whether the hold was taken by force or deleted.
    """
    return expires_at(min(heartbeat, shown), ttl)


def needs_heartbeat(now: float, heartbeat: float, ttl: float) -> bool:
    """Test whether an acquire has to send a heartbeat in the same flight: less than half a ttl is left."""
    return expires_at(heartbeat, ttl) - now < ttl / 2


def expiry(clock: StoreClock, read: float, sent: float, ttl: float) -> StoreClock:
    """Return the end, by the shared clock, of a session whose heartbeat is sent at ``sent``.

    ``clock`` was read by a request that was sent at ``read``; so the shared clock shows no more now than it did then and the
    time that has passed since.

    It may lie before the end that an earlier heartbeat has written by an older reading, and takes its place nevertheless: it lies
    a ttl after its own sending, and what was promised at an earlier sending ended earlier. Nor can a copy of an earlier
    heartbeat come after it, since each replaces the version before. The later of the two ends would be wrong for a shorter
    ttl, which the client relies on before it sends it.
    """
    return clock._replace(seconds=clock.seconds + (sent - read) * (1 + DRIFT) + ttl)


# --- the observer


class Series(NamedTuple):
    """An unbroken series of answers that showed one version of a foreign session row."""

    version: str
    """``""``: the row is absent, which is a version like any other."""
    since: float
    """The time at which the first answer of the series arrived."""
    row: SessionRow | None
    """``None`` if the row is absent, or of an unknown format."""


def observe(series: Series | None, version: str, row: SessionRow | None, arrived: float) -> Series:
    """Continue a series with another answer; another version begins it anew. After a reconnect, pass ``None``."""
    if series is not None and series.version == version:
        return series
    return Series(version, arrived, row)


class Verdict(Enum):
    """The judgement on a foreign session."""

    ALIVE = "alive, or not known to be dead"
    OVER = "may be declared dead, by a write against the observed version"
    DEAD = "dead for every client"
    KEPT = "kept since an earlier run of the machine: its end is to be written by the clock of this run, see `continued`"


def judge(
    series: Series,
    ttl: float,
    now: float,
    clock: StoreClock | None = None,
    *,
    trusted: bool = True,
    expires: bool = False,
    wall: float = 0.0,
) -> Verdict:
    """Judge a session at ``now``, the time at which the write that declares it dead would be sent.

    :param ttl: the ttl in the lock row, for a session row that is absent; otherwise the one in the session row counts.
    :param clock: the shared clock, read together with the session row or later.
    :param trusted: whether the shared clock has run in step with the observer's, see :class:`ClockCheck`.
    :param expires: whether the store deletes a session row when its ttl has passed, and only then.
    :param wall: the wall clock, in seconds since the epoch.
    """
    row = series.row
    if row is not None and row.dead:
        return Verdict.DEAD
    if not series.version and expires:
        return Verdict.DEAD
    if row is None and series.version:
        # An unknown format is never written.
        return Verdict.ALIVE
    if row is not None:
        ttl = row.ttl
        if clock is not None and row.expires is not None and trusted:
            if _rebooted(row.expires, clock) and row.kept is not None:
                return Verdict.OVER if row.kept <= wall else Verdict.KEPT
            if _expired(row.expires, clock, ttl):
                return Verdict.OVER
    return Verdict.OVER if now - series.since >= ttl else Verdict.ALIVE


def _rebooted(end: StoreClock, clock: StoreClock) -> bool:
    return end.boot != clock.boot and bool(end.boot and clock.boot)


def _expired(end: StoreClock, clock: StoreClock, ttl: float) -> bool:
    if end.boot != clock.boot:
        return _rebooted(end, clock)
    return end.zone == clock.zone and clock.seconds > end.seconds + margin(ttl)


def remaining(row: SessionRow, clock: StoreClock | None, wall: float) -> float:
    """Return the seconds that a session has left: its whole ttl, unless a clock shows less."""
    left = row.ttl
    if clock is not None and row.expires is not None:
        if _rebooted(row.expires, clock):
            left = 0.0 if row.kept is None else row.kept - wall
        elif row.expires[1:] == clock[1:]:
            # By the clock of another zone it is not known.
            left = row.expires.seconds - clock.seconds
    return max(0.0, min(left, row.ttl))


def continued(row: SessionRow, clock: StoreClock, read: float, sent: float, wall: float) -> SessionRow:
    """Return the row of a kept session for this run of the machine, with what the wall clock says is left.

    That is never more than its ttl, whatever became of the wall clock, and from this write on the clock of the machine counts it.
    ``read`` and ``sent`` are those of :func:`expiry`.
    """
    left = remaining(row, clock, wall)
    return replace(row, ttl=left, expires=expiry(clock, read, sent, left), kept=wall + left)


def next_observation(ttls: list[float]) -> float:
    """Return the seconds until the observed sessions are read again."""
    return min(min(ttls, default=math.inf) / 10, 2.0)


class ClockCheck:
    """Compare the shared clock with the observer's own: one that was stepped proves nothing."""

    def __init__(self) -> None:
        self._last: tuple[StoreClock, float, float] | None = None
        """A reading, and when its request was sent and its answer arrived."""
        self._stepped: float | None = None
        """The time of the last reading that was out of step."""

    def read(self, clock: StoreClock, sent: float, arrived: float) -> None:
        """Record a reading."""
        if self._last is not None:
            before, sent_before, arrived_before = self._last
            if (before.boot, before.zone) == (clock.boot, clock.zone):
                passed = clock.seconds - before.seconds
                least = (sent - arrived_before) * (1 - DRIFT)
                most = (arrived - sent_before) * (1 + DRIFT)
                if not least - 1e-3 <= passed <= most + 1e-3:
                    self._stepped = arrived
        self._last = clock, sent, arrived

    def trusted(self, ttl: float, now: float) -> bool:
        """Test whether the clock has run in step since it was first read, or for the last ``ttl`` seconds."""
        return self._stepped is None or now - self._stepped >= ttl


# --- ended claims


class _Ended(NamedTuple):
    key: str
    """The lock row that the claim was in."""
    name: str
    """The name of the lock."""
    connection: int | None
    """The connection on which an unflushed removal was answered; ``None`` if there is none to count on."""
    order: int
    """The order number of that answer."""


class EndedClaims:
    """The claims that a client has ended, until it is certain that no row shows them any more.

    ``order`` numbers are taken from one counter of the client, at each sending and each arrival.
    """

    def __init__(self) -> None:
        self._claims: dict[str, _Ended] = {}
        self._announced: set[str] = set()

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, claim: str) -> bool:
        return claim in self._claims

    def announce(self) -> tuple[str, ...]:
        """Return the ids for a heartbeat: from its sending on, other clients may remove these claims.

        Those that have ended first, as many as the row has room for; the others follow when these are gone.
        """
        announced = tuple(itertools.islice(self._claims, MOST_ANNOUNCED))
        self._announced = set(announced)
        return announced

    def announced(self, claim: str) -> bool:
        """Test whether another client may have removed a claim because it read of its end."""
        return claim in self._announced

    def unanswered(self, connection: int) -> bool:
        """Test whether a removal was not answered on this connection."""
        return any(ended.connection != connection for ended in self._claims.values())

    def begin(self, claim: str, key: str, name: str) -> None:
        """Record that a claim has ended; its removal is not answered yet."""
        self._claims.setdefault(claim, _Ended(key, name, None, 0))

    def removed(self, claim: str, *, flushed: bool, connection: int, order: int) -> None:
        """Record that the removal was answered, or that a read has shown that it is done."""
        if flushed:
            self._claims.pop(claim, None)
        elif (ended := self._claims.get(claim)) is not None:
            self._claims[claim] = ended._replace(connection=connection, order=order)

    def flushed(self, sent: int, connection: int) -> bool:
        """Record that a flushed write was answered that was sent, on this connection, with the order number ``sent``.

        Return whether there are removals on this connection that wait for a later one.
        """
        waits = False
        for claim, ended in list(self._claims.items()):
            if ended.connection == connection and ended.order < sent:
                del self._claims[claim]
            else:
                waits = waits or ended.connection == connection
        return waits

    def interrupted(self) -> list[tuple[str, str, str]]:
        """Forget all unflushed removals after a reconnect; return each claim, its row and its lock, to be checked again."""
        for claim, ended in self._claims.items():
            self._claims[claim] = ended._replace(connection=None)
        return [(claim, ended.key, ended.name) for claim, ended in self._claims.items()]
