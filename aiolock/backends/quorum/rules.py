"""Conclusions from the votes of several servers: pure functions, no event loop."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from zlib import crc32

from aiolock.types import Holder, Kept, LockInfo, Waiting

__all__ = ["combined", "lacking", "majority", "majority_until", "promised", "rotation"]

NOT_KEPT = frozenset({"fencing", "fifo"})
"""Capabilities that every member may have and the quorum has not: a majority that has not seen the last token counts on
from its own clock, and waiters queue at another member while the first is away."""


def majority(servers: int) -> int:
    """Return the number that is more than half of ``servers``: any two majorities have a server in common."""
    return servers // 2 + 1


def majority_until(untils: Iterable[float], needed: int) -> float:
    """Return until when at least ``needed`` votes are valid, given the end of each; ``-inf`` if there are fewer."""
    ordered = sorted(untils, reverse=True)
    return ordered[needed - 1] if len(ordered) >= needed else -math.inf


def rotation(name: str, servers: int) -> int:
    """Return the number of the server that has the queue of a lock: equal in every client, spread over the servers."""
    return crc32(name.encode()) % servers


def promised(capabilities: Sequence[frozenset[str]]) -> frozenset[str]:
    """Return the capabilities of the quorum, given those of its members."""
    together = frozenset.intersection(*capabilities) - NOT_KEPT
    # A member that does not survive its restart has forgotten its votes when it comes back.
    return together | {"survives-failover"} if "survives-restart" in together else together


def lacking(required: frozenset[str], capabilities: frozenset[str]) -> frozenset[str]:
    """Return what a member that is reached late lacks for the quorum to keep its required capabilities."""
    needed = required - {"survives-failover"}
    if needed != required:
        needed |= {"survives-restart"}
    return needed - capabilities


def combined(infos: Sequence[LockInfo], needed: int) -> LockInfo:
    """Combine what several servers know of a lock.

    A holder is inside at ``needed`` servers or more; the others are about to enter or leave. The queue is that of the first
    server, followed by the waiters that are known at others only, because the first was away.
    """
    first = infos[0]
    counts = [Counter(_identity(holder) for holder in info.holders) for info in infos]
    holders: list[Holder] = []
    for identity in dict.fromkeys(_identity(holder) for info in infos for holder in info.holders):
        seen = [holder for info in infos for holder in info.holders if _identity(holder) == identity]
        often = sorted((count[identity] for count in counts), reverse=True)
        holders += _merged(seen, often[needed - 1] if len(counts) >= needed else 0, needed)
    queue: list[Waiting] = []
    for info in infos:
        known = Counter(map(_identity, queue))
        for waiting in info.waiters:
            known[_identity(waiting)] -= 1
            if known[_identity(waiting)] < 0:
                queue.append(waiting)
    # Each member has tokens of its own, which the present lease of a hold has not.
    shown = tuple(replace(holder, local_waiters=None) for holder in holders)
    return LockInfo(first.name, shown, tuple(queue), first.family, kept=_kept(infos, needed))


def _kept(infos: Sequence[LockInfo], needed: int) -> tuple[Kept, ...]:
    """Return what is kept at ``needed`` servers or more, until that many of them forget it."""
    ends: dict[tuple[str, int, int], list[datetime]] = defaultdict(list)
    for info in infos:
        # Of several that nothing distinguishes, the longest of each server are taken for one, and so on.
        seen: Counter[tuple[str, int]] = Counter()
        for one in sorted(info.kept, key=lambda one: one.until, reverse=True):
            which = one.last_holder, one.permits
            ends[*which, seen[which]].append(one.until)
            seen[which] += 1
    return tuple(
        Kept(sorted(times, reverse=True)[needed - 1], permits, who)
        for (who, permits, _), times in ends.items()
        if len(times) >= needed
    )


def _identity(one: Holder | Waiting) -> tuple[str, str]:
    return one.label, one.mode


def _merged(seen: Sequence[Holder], times: int, needed: int) -> list[Holder]:
    """Return the holders of one label that is inside ``times`` times, from what several servers report of them."""
    if not times:
        return []
    if times > 1:
        # Nothing distinguishes holders of one label across servers.
        return list(seen[:times])
    remaining = majority_until((holder.remaining for holder in seen), needed)
    since = min(holder.since for holder in seen)
    return [replace(seen[0], since=since, remaining=max(0.0, remaining))]
