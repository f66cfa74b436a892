"""Who may enter, and for whom the others wait: pure functions over a lock's queue.

A rule sees the queue in its order and answers for one place in it. A contender can only disappear, and nobody ever
comes in before it: so a rule that says yes stays right, and one that says no is asked again in time if whoever it names
is watched. (A writer that becomes a reader keeps its place: it makes room, and takes none.)

* **mutex, write**: nobody is before. Wait for whoever is immediately before.
* **read**: no writer is before. Wait for the nearest writer.
* **permits**: all who are before, inside or not, and oneself need no more than there are. So a large request at the
  head is not overtaken. Wait for the nearest ones that together with oneself need too many: while all of these stay,
  the answer stays no, so its change is never missed. With one permit that is the mutex.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from aiolock.backends.zookeeper.contenders import Place, mine
from aiolock.contract import Mode

__all__ = ["RULES", "Verdict", "after", "decide", "inside", "next_in_line"]

RESERVE = 3
"""How many of those who may have to be waited for next are remembered; the list tells of the others."""


class Verdict(NamedTuple):
    """The answer to one contender."""

    enter: bool
    watch: tuple[Place, ...] = ()
    """Whose end may change a no: the first of them to go."""
    reserve: tuple[Place, ...] = ()
    """Who may have to be waited for once the one to be watched has gone, the nearest first."""
    demand: bool = False
    """Whether others stand behind."""
    before: int = 0
    """Of how many the end is waited for, one after the other; 0 where somebody may take the place of one who has gone."""


Rule = Callable[[Sequence[Place], int, int], Verdict]
"""From the queue, an index in it and the number of permits to the answer for whoever stands there."""


def _after(blocking: Sequence[Place], before: int, *, demand: bool) -> Verdict:
    """Enter if there is nobody of these, the nearest first; else wait for the nearest."""
    return Verdict(not blocking, tuple(blocking[:1]), tuple(blocking[1 : 1 + RESERVE]), demand, before)


def mutex(places: Sequence[Place], index: int, limit: int) -> Verdict:  # noqa: ARG001 - all rules look alike
    """For a mutex."""
    nearest = places[max(0, index - 1 - RESERVE) : index]
    return _after(nearest[::-1], index, demand=index + 1 < len(places))


def write(places: Sequence[Place], index: int, limit: int) -> Verdict:
    """For a writer: in the place of one who has gone, it may be a reader now."""
    return mutex(places, index, limit)._replace(before=0)


def read(places: Sequence[Place], index: int, limit: int) -> Verdict:  # noqa: ARG001
    """For a reader."""
    writers = [place for place in places[:index] if place.mode is not Mode.READ]
    return _after(writers[-1 - RESERVE :][::-1], len(writers), demand=index + 1 < len(places))


def permits(places: Sequence[Place], index: int, limit: int) -> Verdict:
    """For a request for permits."""
    demand = index + 1 < len(places)
    needed = places[index].permits
    if needed > limit:
        # Nobody's end helps; more permits would.
        return Verdict(enter=False, demand=demand)
    for behind in range(index - 1, -1, -1):
        needed += places[behind].permits
        if needed > limit:
            return Verdict(enter=False, watch=tuple(places[behind:index][::-1]), demand=demand)
    return Verdict(enter=True, demand=demand)


RULES: dict[Mode, Rule] = {
    Mode.MUTEX: mutex,
    Mode.WRITE: write,
    Mode.READ: read,
    Mode.PERMITS: permits,
}
"""By mode."""


def next_in_line(last: Verdict, gone: str) -> bool:
    """Whether it is our turn by ``last`` alone, once the node ``gone`` is certainly deleted."""
    return last.before == 1 and last.watch[0].name == gone


def after(last: Verdict, gone: str, floor: int, *, demand: bool) -> Verdict | None:
    """What follows from ``last``, without the list, once the node ``gone`` is deleted; ``None`` if only the list tells.

    Right only if that node is certainly gone: a floor that reaches somebody of the reserve says nothing of those between
    that one and us.
    """
    if [place.name for place in last.watch] != [gone]:
        return None
    if floor >= last.watch[0].sequence:
        return Verdict(enter=True, demand=demand)
    if last.reserve:
        before = max(0, last.before - 1)
        return Verdict(
            enter=False, watch=last.reserve[:1], reserve=last.reserve[1:], demand=True, before=before
        )
    return None


def inside(places: Sequence[Place], limit: int = 0, upto: int = -1) -> int:
    """How many of the first ones are inside; of a semaphore, all whose number is not above ``upto`` in any case."""
    count = 0
    needed = 0
    for index, place in enumerate(places):
        needed += place.permits
        if place.mode is Mode.PERMITS:
            enters = needed <= limit or place.sequence <= upto
        else:
            enters = index == 0 or (place.mode is Mode.READ and places[0].mode is Mode.READ)
        if not enters:
            break
        count += 1
    return count


def decide(
    rule: Rule, places: Sequence[Place], name: str, attempt: str, limit: int = 0
) -> tuple[Verdict | None, list[str]]:
    """The answer for the node ``name`` of ``attempt``, ``None`` if it is gone; and further nodes of the same attempt.

    A create that was repeated may have left two nodes. Nobody waits for oneself: the others are surplus.
    """
    own = mine(attempt)
    surplus = [place.name for place in places if place.name != name and place.name.startswith(own)]
    if surplus:
        places = [place for place in places if place.name not in surplus]
    for index, place in enumerate(places):
        if place.name == name:
            return rule(places, index, limit), surplus
    return None, surplus
