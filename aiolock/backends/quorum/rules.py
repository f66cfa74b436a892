"""What follows from the votes of several servers: pure arithmetic, no event loop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from zlib import crc32

from aiolock.contract import Holder, LockInfo, Waiting

__all__ = ["certain", "combined", "lacking", "majority", "promised", "rotation"]

NOT_KEPT = frozenset({"fencing", "fifo"})
"""What each server may promise and all of them together cannot: a majority that has not seen the last token gives out
one by its own clock, and the line is at another server while the first is away."""


def majority(servers: int) -> int:
    """How many of so many servers are more than half: any two majorities have a server in common."""
    return servers // 2 + 1


def certain(untils: Iterable[float], needed: int) -> float:
    """Until when at least ``needed`` votes are certain, given until when each of them is; ``-inf`` if never."""
    ordered = sorted(untils, reverse=True)
    return ordered[needed - 1] if len(ordered) >= needed else -math.inf


def rotation(name: str, servers: int) -> int:
    """At which server the line of waiters for a lock is: the same for every client, and spread over the servers."""
    return crc32(name.encode()) % servers


def promised(capabilities: Sequence[frozenset[str]]) -> frozenset[str]:
    """What several servers promise together, given what each of them does."""
    together = frozenset.intersection(*capabilities) - NOT_KEPT
    # Without that, one that has died and comes back has forgotten whom it gave its vote.
    return together | {"survives-failover"} if "survives-restart" in together else together


def lacking(required: frozenset[str], capabilities: frozenset[str]) -> frozenset[str]:
    """What one server, that comes to the others later, would have to promise for all of them to keep what is required."""
    needed = required - {"survives-failover"}
    if needed != required:
        needed |= {"survives-restart"}
    return needed - capabilities


def combined(infos: Sequence[LockInfo], needed: int) -> LockInfo:
    """How a lock looks that several servers know.

    A holder is whoever is one on ``needed`` of them; the others are on their way in or out. The line is that of the first,
    and whoever waits at another one only, because the first was away, comes behind it.
    """
    first = infos[0]
    counts = [Counter(_who(holder) for holder in info.holders) for info in infos]
    holders: list[Holder] = []
    for who in dict.fromkeys(_who(holder) for info in infos for holder in info.holders):
        # As often as at least `needed` of them say.
        times = (
            sorted((count[who] for count in counts), reverse=True)[needed - 1] if len(counts) >= needed else 0
        )
        holders += _merged(
            [holder for info in infos for holder in info.holders if _who(holder) == who], times, needed
        )
    line: list[Waiting] = []
    for info in infos:
        known = Counter(map(_whom, line))
        for waiting in info.waiters:
            known[_whom(waiting)] -= 1
            if known[_whom(waiting)] < 0:
                line.append(waiting)
    return LockInfo(first.name, tuple(holders), tuple(line), first.family)


def _whom(waiting: Waiting) -> tuple[str, str]:
    return waiting.label, waiting.mode


def _who(holder: Holder) -> tuple[str, str]:
    return holder.label, holder.mode


def _merged(seen: Sequence[Holder], times: int, needed: int) -> list[Holder]:
    """The holders behind what several servers say of one label that is inside so many times."""
    if not times:
        return []
    if times > 1:
        # Which of one server is which of another, nobody knows.
        return list(seen[:times])
    remaining = certain((holder.remaining for holder in seen), needed)
    since = min(holder.since for holder in seen)
    first = seen[0]
    return [Holder(first.label, first.token, since, max(0.0, remaining), first.permits, first.mode)]
