"""The locks of a history run: of which kind each is, which its name says, and what can be asked of it.

A wish is one way to be inside: its mode and permits are the words of the history, so the checker knows who excludes whom.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aiolock

__all__ = [
    "FAMILIES",
    "KINDS",
    "LIMIT",
    "Wish",
    "all_can_be_had",
    "capacity",
    "kind_of",
    "name_locks",
    "wish",
]

LIMIT = 3
"""The permits of every semaphore."""
MODES: dict[str, tuple[str, ...]] = {
    "mutex": ("mutex",),
    "reentrant": ("reentrant",),
    "read-write": ("read", "read", "write"),
    "permits": ("permits",),
}
"""The modes of a wish for a lock of each kind, as often as they are to be drawn."""
KINDS = tuple(MODES)
FAMILIES = {"mutex": "lock", "reentrant": "lock", "read-write": "rw", "permits": "sem"}


@dataclass(frozen=True)
class Wish:
    """One way to be inside of the lock of that name."""

    name: str
    mode: str
    permits: int = 1

    @property
    def alone(self) -> bool:
        """Return whether no other is inside, so that the holder may write to the resource."""
        return self.mode not in {"read", "permits"}

    def lock(self, client: aiolock.Client, **options: Any) -> aiolock.Lock:
        """The lock, for `async with`, which takes one permit."""
        if self.mode == "permits":
            return client.semaphore(self.name, LIMIT, **options)
        if self.mode == "reentrant":
            return client.reentrant_lock(self.name, **options)
        if self.mode == "mutex":
            mutex: aiolock.Lock = client.lock(self.name, **options)
            return mutex
        pair = client.rwlock(self.name)
        if self.mode == "read":
            return pair.read(**options)
        return pair.write(**options)

    async def ask(self, lock: aiolock.Lock, *, once: bool) -> aiolock.Lease | None:
        """Acquire the lock, or with ``once`` try to. Cancelling it leaves no hold."""
        if isinstance(lock, aiolock.Semaphore):
            if once:
                return await lock.try_acquire(permits=self.permits)
            return await lock.acquire(permits=self.permits)
        return await (lock.try_acquire() if once else lock.acquire())


def name_locks(count: int, kinds: Sequence[str]) -> list[str]:
    """So many names, of these kinds in turn."""
    return [f"{kinds[number % len(kinds)]} {number}" for number in range(count)]


def kind_of(name: str) -> str:
    """Return the kind that a name says."""
    return name.partition(" ")[0]


def wish(rng: random.Random, name: str) -> Wish:
    """Draw a wish for the lock of that name."""
    mode = rng.choice(MODES[kind_of(name)])
    return Wish(name, mode, rng.randint(1, LIMIT) if mode == "permits" else 1)


def capacity(names: Iterable[str]) -> dict[str, int]:
    """Return the permits of the semaphores, by name."""
    return {name: LIMIT for name in names if kind_of(name) == "permits"}


async def all_can_be_had(client: aiolock.Client, names: Iterable[str], timeout: float) -> list[str]:
    """Have each lock alone, as is possible at the end of a run; return a sentence about each that could not be had.

    Cancelling it leaves no hold.
    """
    found = []
    for name in names:
        mode = MODES[kind_of(name)][-1]
        whole = Wish(name, mode, LIMIT if mode == "permits" else 1)
        try:
            lease = await whole.ask(whole.lock(client, timeout=timeout), once=False)
            if lease is not None:
                await lease.release()
        except aiolock.LockError as error:
            found.append(f"hygiene: {name!r} cannot be had at the end: {error!r}")
    return found
