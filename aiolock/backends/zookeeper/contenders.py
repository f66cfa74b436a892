"""Who stands in a lock's queue: from the names of its children to places in their order.

Names of other libraries count: for the mutex and the read-write lock Curator's are the same as ours, and kazoo's are
understood. A child that looks like a contender, numbered by the server, and that nobody here understands is refused:
its owner would not wait for us.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aiolock.contract import Family, Kind, Mode
from aiolock.errors import BackendRefused, shorten

__all__ = ["LAST", "SIMPLE", "Place", "alone", "mine", "new_attempt", "places", "prefix", "queue", "reader"]

SIMPLE = "simple"
"""The node of the other recipe: whoever finds it here must not believe that it is alone."""

LAST = 2**31 - 2**20
"""The server's numbers are 32 bits wide and wrap; long before that we stop."""

_QUEUED = ((("-lock-", "__lock__"), Mode.MUTEX),)
_SHARED = ((("__READ__", "__rlock__"), Mode.READ), (("__WRIT__", "__lock__"), Mode.WRITE))
_PERMITS = re.compile(r"-permits-([0-9]{1,10})-$")

_NUMBERED = re.compile(r"[0-9]{10}$|-[0-9]{9}$")
"""As the server ends a name, also after its numbers have wrapped: ASCII digits, never other digits of Unicode."""


class Place(NamedTuple):
    """One contender."""

    sequence: int
    mode: Mode
    name: str
    permits: int = 1


def prefix(attempt: str, kind: Kind) -> str:
    """What the server appends its number to; Curator's form, whose uuid protects a create against a lost reply."""
    if kind.mode is Mode.PERMITS:
        return f"{mine(attempt)}permits-{kind.permits}-"
    return mine(attempt) + {Mode.READ: "__READ__", Mode.WRITE: "__WRIT__"}.get(kind.mode, "lock-")


def new_attempt() -> str:
    """A random uuid, as text."""
    hexa = secrets.token_hex(16)
    variant = "89ab"[int(hexa[16], 16) & 3]
    return f"{hexa[:8]}-{hexa[8:12]}-4{hexa[13:16]}-{variant}{hexa[17:20]}-{hexa[20:]}"


def mine(attempt: str) -> str:
    """How all nodes of an attempt begin."""
    return f"_c_{attempt}-"


def reader(writer: str) -> str:
    """The name, in the same place, of the reader that a writer becomes; as Curator calls it."""
    return writer.replace("__WRIT__", "__READ__")


def _contender(family: Family, head: str) -> tuple[Mode, int] | None:
    """What somebody wants, by what stands before the number."""
    if family is Family.SEMAPHORE:
        found = _PERMITS.search(head)
        return None if found is None else (Mode.PERMITS, int(found[1]))
    for marks, mode in _SHARED if family is Family.RW else _QUEUED:
        if head.endswith(marks):
            return mode, 1
    return None


def places(family: Family, children: Iterable[str]) -> tuple[list[Place], list[str]]:
    """The contenders in their order, and the names that are none."""
    found: list[Place] = []
    others: list[str] = []
    # Of thousands of names nearly all are the plainest of all: they are not looked at twice.
    plain = family is not Family.RW and family is not Family.SEMAPHORE
    for name in children:
        digits = name[-10:]
        if not (digits.isascii() and digits.isdigit()):
            others.append(name)
        elif plain and name[-16:-10] == "-lock-":
            found.append(Place(int(digits), Mode.MUTEX, name))
        elif (want := _contender(family, name[:-10])) is not None:
            found.append(Place(int(digits), want[0], name, want[1]))
        else:
            others.append(name)
    found.sort()
    return found, others


def queue(path: str, family: Family, children: Sequence[str]) -> list[Place]:
    """The contenders in their order. Raises :class:`BackendRefused` where exclusion would be broken."""
    found, others = places(family, children)
    for name in others:
        if name == SIMPLE or _NUMBERED.search(name):
            head = name[:-10]
            if _contender(family, head) or _contender(family, head.removesuffix("-")):
                # A negative number, with nine digits or ten.
                raise _used_up(path)
            raise BackendRefused(
                f"{shorten(f'{path}/{name}')} belongs to another kind of lock, whose owner does not wait for ours: "
                "use one recipe per path"
            )
    if found and found[-1].sequence >= LAST:
        raise _used_up(path)
    return found


def _used_up(path: str) -> BackendRefused:
    return BackendRefused(
        f"the numbers of {shorten(path)} are used up: let its last holder leave, and delete it"
    )


def alone(path: str, children: Sequence[str]) -> None:
    """For the other recipe: raise :class:`BackendRefused` if somebody queues at its path."""
    if found := queue(path, Family.LOCK, [name for name in children if name != SIMPLE]):
        raise BackendRefused(
            f"somebody queues at {shorten(path)}, as {found[0].name}: use one recipe per path"
        )
