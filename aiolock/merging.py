"""Many wishes for locks as one list: each lock once, in the order in which everybody takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiolock.contract import Bid, Mode, permits
from aiolock.errors import ConfigError, shorten
from aiolock.lease import Terms
from aiolock.lock import Lock
from aiolock.options import OnLoss
from aiolock.reentrant import ReentrantLock
from aiolock.runtime import Runtime

__all__ = ["Part", "inside", "merged"]

Part = tuple[Lock, Bid, Terms]
"""Who is asked in whose name, what for, and on which terms."""


def inside(lock: Lock) -> tuple[Runtime, Bid, Terms]:
    """What a lock is made of."""
    return lock._follow(), lock._bid, lock._terms  # noqa: SLF001 - this and the lock are of one library


def merged(locks: Sequence[Lock]) -> list[Part]:
    """The locks in the order in which they are taken, each once."""
    if not locks:
        raise ConfigError("lock_all must be given at least one lock, not none")
    by_key: dict[tuple[str, str], Part] = {}
    for lock in locks:
        if not isinstance(lock, Lock):
            raise ConfigError(f"lock_all must be given locks, such as client.lock(…), not {shorten(lock)}")
        _, bid, terms = inside(lock)
        key, part = (bid.name, bid.kind.family.value), (lock, bid, terms)
        by_key[key] = part if key not in by_key else _both(by_key[key], part)
    return [by_key[key] for key in sorted(by_key)]


def _both(one: Part, other: Part) -> Part:
    """Two wishes for one lock as one."""
    (lock, bid, terms), (second, wish, more) = one, other
    name = shorten(bid.name)
    if inside(lock)[0] is not inside(second)[0]:
        raise ConfigError(
            f"lock_all must be given different names where the clients are different: {name} comes from two"
        )
    kind = bid.kind
    if kind.mode is Mode.PERMITS:
        count = kind.permits + wish.kind.permits
        if kind.limit != wish.kind.limit:
            raise ConfigError(f"semaphore {name} must have one limit, not {kind.limit} and {wish.kind.limit}")
        if count > kind.limit:
            raise ConfigError(
                f"permits must be at most the limit of semaphore {name}, which is {kind.limit}, not {count}"
            )
        kind = permits(count, kind.limit)
    elif wish.kind.mode is Mode.WRITE or isinstance(second, ReentrantLock):
        # Who may enter again may be asked for what he has; who may not would wait for himself.
        lock, kind = second, wish.kind
    holds = [each.max_hold for each in (terms, more) if each.max_hold is not None]
    on_loss: OnLoss = "cancel" if "cancel" in (terms.on_loss, more.on_loss) else "signal"
    return (
        lock,
        replace(bid, kind=kind, ttl=min(bid.ttl, wish.ttl), fair=bid.fair or wish.fair),
        Terms(min(holds, default=None), on_loss),
    )
