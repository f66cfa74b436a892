"""Lock paths, the queue of a lock, and its admission rules (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

from aiolock.errors import BackendRefused, shorten
from aiolock.types import Family, Kind, Mode

__all__ = [
    "RULES",
    "Position",
    "Verdict",
    "after",
    "component",
    "decide",
    "inside",
    "is_next",
    "mine",
    "name_of",
    "parents",
    "positions",
    "prefix",
    "queue",
    "reader",
]

# --- paths


def component(name: str) -> str:
    """Encode a name as one part of a path: as in a URL, with ``%2F`` for a slash; injective."""
    text = quote(name, safe=" !$&'()*+,:;=@")
    if text in (".", ".."):
        return text.replace(".", "%2E")
    # At the root, this one is ZooKeeper's own.
    return "%7Aookeeper" if text == "zookeeper" else text


def name_of(text: str) -> str:
    """Decode what :func:`component` encoded."""
    return unquote(text)


def parents(path: str) -> list[str]:
    """Return every node on the way to ``path`` from the root, itself included."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(2, len(parts) + 1)]


# --- contenders
#
# Names of other libraries count: for the mutex and the read-write lock Curator has the same, and kazoo's are understood. A
# child that looks like a contender, numbered by the server, but of an unknown form is refused: its owner would not wait.

LAST = 2**31 - 2**20
"""The server's numbers are 32 bits wide and wrap; numbers from here on are refused."""

_QUEUED = ((("-lock-", "__lock__"), Mode.MUTEX),)
_SHARED = ((("__READ__", "__rlock__"), Mode.READ), (("__WRIT__", "__lock__"), Mode.WRITE))
_PERMITS = re.compile(r"-permits-([0-9]{1,10})-$")

_NUMBERED = re.compile(r"[0-9]{10}$|-[0-9]{9}$")
"""The end that a server gives a name, also after its numbers have wrapped; digits of ASCII only."""


class Position(NamedTuple):
    """The position of a contender in a queue."""

    sequence: int
    mode: Mode
    name: str
    permits: int = 1


def mine(attempt: str) -> str:
    """Return the beginning of all node names of an attempt."""
    return f"_c_{attempt}-"


def prefix(attempt: str, kind: Kind) -> str:
    """Return the name to which the server appends its number; Curator's form, whose uuid survives a lost reply."""
    if kind.counted:
        return f"{mine(attempt)}permits-{kind.permits}-"
    return mine(attempt) + {Mode.READ: "__READ__", Mode.WRITE: "__WRIT__"}.get(kind.mode, "lock-")


def reader(writer: str) -> str:
    """Return the name, at the same position, of the reader that a writer becomes; Curator's form."""
    return writer.replace("__WRIT__", "__READ__")


def _contender(family: Family, head: str) -> tuple[Mode, int] | None:
    """Read mode and permits from the part of a name before its number."""
    if family.counted:
        found = _PERMITS.search(head)
        return None if found is None else (Mode.PERMITS, int(found[1]))
    for marks, mode in _SHARED if family.shareable else _QUEUED:
        if head.endswith(marks):
            return mode, 1
    return None


def positions(family: Family, children: Iterable[str]) -> tuple[list[Position], list[str]]:
    """Return the contenders in their order, and the names of other children."""
    found: list[Position] = []
    others: list[str] = []
    # Nearly all of thousands of names have the plainest form: they are not examined twice.
    plain = not family.shareable
    for name in children:
        digits = name[-10:]
        if not (digits.isascii() and digits.isdigit()):
            others.append(name)
        elif plain and name[-16:-10] == "-lock-":
            found.append(Position(int(digits), Mode.MUTEX, name))
        elif (contender := _contender(family, name[:-10])) is not None:
            found.append(Position(int(digits), contender[0], name, contender[1]))
        else:
            others.append(name)
    found.sort()
    return found, others


def queue(path: str, family: Family, children: Sequence[str]) -> list[Position]:
    """Return the contenders in their order. Raises :class:`BackendRefused` where exclusion would be broken."""
    found, others = positions(family, children)
    for name in others:
        if _NUMBERED.search(name):
            head = name[:-10]
            if _contender(family, head) or _contender(family, head.removesuffix("-")):
                # A negative number, with nine digits or ten.
                raise _used_up(path)
            raise BackendRefused(
                f"{shorten(f'{path}/{name}')} belongs to another kind of lock, whose owner does not wait for this one: "
                "use one recipe per path"
            )
    if found and found[-1].sequence >= LAST:
        raise _used_up(path)
    return found


def _used_up(path: str) -> BackendRefused:
    return BackendRefused(
        f"the numbers of {shorten(path)} are used up: let its last holder leave, and delete it"
    )


# --- rules
#
# A rule sees the queue in its order and answers for one position. A contender can only disappear, and none ever comes in
# before another: so a rule that admits stays right, and one that does not is asked again in time if the contenders that
# it names are watched. (A writer that becomes a reader keeps its position: it makes room, and takes none.)
#
# * **mutex, write**: none is ahead. Watch the predecessor.
# * **read**: no writer is ahead. Watch the nearest writer.
# * **permits**: all ahead, holders or not, and this one need no more than the limit, so a large request at the head is not
#   overtaken. Watch the nearest ones that together with this one need too many: while all of these stay the answer
#   stays no, so its change is never missed. With one permit that is the mutex.

RESERVE = 3
"""The number of contenders to be watched next that a verdict remembers; the list has the others."""


class Verdict(NamedTuple):
    """The answer for one contender."""

    enter: bool
    watch: tuple[Position, ...] = ()
    """The contenders whose end may change a no: the first of them to go."""
    reserve: tuple[Position, ...] = ()
    """The contenders to be watched once that one has gone, the nearest first."""
    demand: bool = False
    """True if others are behind."""
    before: int = 0
    """The number of holds that must end, one after the other; 0 where another may follow one that has gone."""


Rule = Callable[[Sequence[Position], int, int], Verdict]
"""From the queue, an index in it and the number of permits to the verdict on the contender at that index."""


def _behind(blocking: Sequence[Position], before: int, *, demand: bool) -> Verdict:
    """Enter if there is none of these, the nearest first; else wait for the nearest."""
    return Verdict(not blocking, tuple(blocking[:1]), tuple(blocking[1 : 1 + RESERVE]), demand, before)


def mutex(positions: Sequence[Position], index: int, limit: int) -> Verdict:  # noqa: ARG001 - the form of a rule
    """Judge a mutex."""
    nearest = positions[max(0, index - 1 - RESERVE) : index]
    return _behind(nearest[::-1], index, demand=index + 1 < len(positions))


def write(positions: Sequence[Position], index: int, limit: int) -> Verdict:
    """Judge a writer: at the position of a writer that has gone there may be a reader now."""
    return mutex(positions, index, limit)._replace(before=0)


def read(positions: Sequence[Position], index: int, limit: int) -> Verdict:  # noqa: ARG001
    """Judge a reader."""
    writers = [position for position in positions[:index] if position.mode is not Mode.READ]
    return _behind(writers[-1 - RESERVE :][::-1], len(writers), demand=index + 1 < len(positions))


def permits(positions: Sequence[Position], index: int, limit: int) -> Verdict:
    """Judge a request for permits."""
    demand = index + 1 < len(positions)
    needed = positions[index].permits
    if needed > limit:
        # No end of another helps; a higher limit would.
        return Verdict(enter=False, demand=demand)
    for ahead in range(index - 1, -1, -1):
        needed += positions[ahead].permits
        if needed > limit:
            return Verdict(enter=False, watch=tuple(positions[ahead:index][::-1]), demand=demand)
    return Verdict(enter=True, demand=demand)


RULES: dict[Mode, Rule] = {Mode.MUTEX: mutex, Mode.WRITE: write, Mode.READ: read, Mode.PERMITS: permits}


def is_next(last: Verdict, gone: str) -> bool:
    """Return whether ``last`` alone admits, once the node ``gone`` is certainly deleted."""
    return last.before == 1 and last.watch[0].name == gone


def after(last: Verdict, gone: str, floor: int, *, demand: bool) -> Verdict | None:
    """Return what follows from ``last`` without the list, once the node ``gone`` is deleted; ``None`` if the list is needed.

    Right only if that node is certainly gone: a floor that reaches a contender of the reserve says nothing of those between
    it and this one.
    """
    if [position.name for position in last.watch] != [gone]:
        return None
    if floor >= last.watch[0].sequence:
        return Verdict(enter=True, demand=demand)
    if last.reserve:
        before = max(0, last.before - 1)
        return Verdict(
            enter=False, watch=last.reserve[:1], reserve=last.reserve[1:], demand=True, before=before
        )
    return None


def inside(positions: Sequence[Position], limit: int = 0, upto: int = -1) -> int:
    """Count the positions at the head that hold the lock.

    Of a semaphore, those whose permits together fit into ``limit`` or whose sequence number is at most ``upto``.
    """
    count = needed = 0
    for index, position in enumerate(positions):
        needed += position.permits
        if position.mode is Mode.PERMITS:
            enters = needed <= limit or position.sequence <= upto
        else:
            enters = index == 0 or (position.mode is Mode.READ and positions[0].mode is Mode.READ)
        if not enters:
            break
        count += 1
    return count


def decide(
    rule: Rule, positions: Sequence[Position], name: str, attempt: str, limit: int = 0
) -> tuple[Verdict | None, list[str]]:
    """Return the verdict on the node ``name`` of ``attempt``, ``None`` if it is gone; and other nodes of that attempt.

    A create that was repeated may have left two nodes. The others are surplus, and not waited for.
    """
    own = mine(attempt)
    surplus = [
        position.name for position in positions if position.name != name and position.name.startswith(own)
    ]
    if surplus:
        positions = [position for position in positions if position.name not in surplus]
    for index, position in enumerate(positions):
        if position.name == name:
            return rule(positions, index, limit), surplus
    return None, surplus
