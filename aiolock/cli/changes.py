"""What happened between two looks at the locks: a pure function, so that a program can follow along."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from aiolock.info import Holder, LockInfo

__all__ = ["changes"]


def changes(before: Iterable[LockInfo], after: Iterable[LockInfo]) -> Iterator[dict[str, Any]]:
    """``released``, ``granted`` and ``waiting`` (the queue has another length), lock by lock, in the order of names.

    A hold is known by its token and label: one that ended and one that began between the looks are two events. What began
    *and* ended between them is not seen.
    """
    old = {_key(info): info for info in before}
    new = {_key(info): info for info in after}
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key), new.get(key)
        held, holds = _holders(was), _holders(now)
        for who, holder in held.items():
            if who not in holds:
                yield _event("released", key, holder, now)
        for who, holder in holds.items():
            if who not in held:
                yield _event("granted", key, holder, now)
        waited, waiting = _waiting(was), _waiting(now)
        if waited != waiting:
            yield {"event": "waiting", "name": key[0], "family": key[1], "waiting": waiting}


def _key(info: LockInfo) -> tuple[str, str]:
    return info.name, info.family.value


def _holders(info: LockInfo | None) -> dict[tuple[int, str], Holder]:
    return {} if info is None else {(holder.token, holder.label): holder for holder in info.holders}


def _waiting(info: LockInfo | None) -> int:
    return 0 if info is None else len(info.waiters)


def _event(what: str, key: tuple[str, str], holder: Holder, now: LockInfo | None) -> dict[str, Any]:
    return {
        "event": what,
        "name": key[0],
        "family": key[1],
        "label": holder.label,
        "token": holder.token,
        "mode": holder.mode,
        "permits": holder.permits,
        "since": holder.since.isoformat(),
        "waiting": _waiting(now),
    }
