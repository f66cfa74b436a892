"""Who may enter, and for whom the others wait: pure functions over the names of a lock's children.

A rule sees the queue in its order and answers for one place in it. A contender can only disappear, and nobody ever
comes in before it: so a rule that says yes stays right, and one that waits for a single contender is woken in time if
it looks again whenever that one changes.

Names of other libraries count: Curator's are the same as ours, and kazoo's are understood. A child that looks like a
contender, numbered by the server, and that nobody here understands is refused: its owner would not wait for us.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aiolock.contract import Mode
from aiolock.errors import BackendRefused, shorten

__all__ = ["RULES", "SIMPLE", "Place", "Verdict", "alone", "decide", "prefix", "queue"]

_CONTENDER = re.compile(r"(?:-lock-|__lock__)(-?\d{10})$")
_NUMBERED = re.compile(r"-?\d{10}$")

SIMPLE = "simple"
"""The node of the other recipe: whoever finds it here must not believe that it is alone."""

LAST = 2**31 - 2**20
"""The server's numbers are 32 bits wide and wrap; long before that we stop."""


class Place(NamedTuple):
    """One contender."""

    sequence: int
    name: str


class Verdict(NamedTuple):
    """The answer to one contender."""

    wait_for: str | None
    """The one contender whose end may change the answer; ``None`` is a yes."""
    demand: bool
    """Whether others stand behind."""


Rule = Callable[[Sequence[Place], int], Verdict]
"""From the queue and an index in it to the answer for whoever stands there."""


def prefix(attempt: str) -> str:
    """What the server appends its number to; Curator's form, whose uuid protects a create against a lost reply."""
    return f"_c_{attempt}-lock-"


def queue(path: str, children: Sequence[str]) -> list[Place]:
    """The contenders in their order. Raises :class:`BackendRefused` where exclusion would be broken."""
    places = []
    for name in children:
        match = _CONTENDER.search(name)
        if match is None:
            if name == SIMPLE or _NUMBERED.search(name):
                raise BackendRefused(
                    f"{shorten(f'{path}/{name}')} belongs to another kind of lock, whose owner does not wait for ours: "
                    "use one recipe per path"
                )
            continue
        sequence = int(match[1])
        if not 0 <= sequence < LAST:
            raise BackendRefused(
                f"the numbers of {shorten(path)} are used up: let its last holder leave, and delete it"
            )
        places.append(Place(sequence, name))
    places.sort()
    return places


def alone(path: str, children: Sequence[str]) -> None:
    """For the other recipe: raise :class:`BackendRefused` if somebody queues at its path."""
    if places := queue(path, [name for name in children if name != SIMPLE]):
        raise BackendRefused(
            f"somebody queues at {shorten(path)}, as {places[0].name}: use one recipe per path"
        )


def mutex(places: Sequence[Place], index: int) -> Verdict:
    """The first one is inside; everybody else waits for whoever is immediately before."""
    demand = index + 1 < len(places)
    return Verdict(None if index == 0 else places[index - 1].name, demand)


RULES: dict[Mode, Rule] = {Mode.MUTEX: mutex}
"""By mode. One that is not here has no mechanism on this backend."""


def decide(rule: Rule, places: Sequence[Place], name: str, attempt: str) -> tuple[Verdict | None, list[str]]:
    """The answer for the node ``name`` of ``attempt``, ``None`` if it is gone; and further nodes of the same attempt.

    A create that was repeated may have left two nodes. Nobody waits for oneself: the others are surplus.
    """
    own = prefix(attempt)
    surplus = [place.name for place in places if place.name != name and place.name.startswith(own)]
    if surplus:
        places = [place for place in places if place.name not in surplus]
    for index, place in enumerate(places):
        if place.name == name:
            return rule(places, index), surplus
    return None, surplus
