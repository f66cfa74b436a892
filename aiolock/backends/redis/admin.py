"""Inspect locks, and list the keys of a namespace."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any

from aiolock.backends.redis.commands import WHOLE
from aiolock.core.present import decode_present, decode_value, presented
from aiolock.errors import BackendRefused, shorten
from aiolock.types import Family, Holder, LockInfo, Mode, Waiting
from aiolock.validation import escape, unescape

__all__ = ["MOST", "empty", "key_pattern", "names", "read", "split"]

MOST = 10_000
"""Most locks that are listed."""
STEP = 500
"""Keys that one SCAN examines: it delays other commands by about a tenth of a millisecond."""

Call = Callable[..., Awaitable[Any]]
Lock = tuple[str, Family]
Inspect = Callable[[str, Family], Coroutine[Any, Any, LockInfo]]


def read(answer: Sequence[Any], name: str, family: Family) -> LockInfo:
    """Read the answer of the script ``inspect`` of a lock's family."""
    if family.shareable:
        return _shared(*answer, name=name, family=family)
    now, until, token, tokens, since, label, present, *waiting = answer
    holder = (_holder(_text(label), now, (token, tokens, since, until), present),) if until else ()
    return LockInfo.of_holds(
        name, holder, (Waiting(_text(other).partition("\n")[0]) for other in waiting), family
    )


def _shared(
    now: int,
    limit: int,
    holds: list[bytes],
    positions: list[bytes],
    present: bytes,
    *,
    name: str,
    family: Family,
) -> LockInfo:
    holders, waiters = [], []
    for hold in holds:
        until, weight, token, tokens, since, label = _text(hold).split(" ", 5)
        record = token, tokens, since, until
        holders.append(_holder(label, now, record, present, *_mode(int(weight), family)))
    for position in positions:
        weight, _, label = _text(position).partition(" ")
        waiters.append(Waiting(label, *_mode(int(weight), family)))
    known = limit if limit >= 0 and family.counted else None
    return LockInfo.of_holds(name, holders, waiters, family, known)


def _mode(weight: int, family: Family) -> tuple[str, int]:
    """Return mode and permits of a hold of that weight."""
    if family.counted:
        return Mode.PERMITS.value, weight
    return (Mode.WRITE if weight == WHOLE else Mode.READ).value, 1


def _holder(
    label: str,
    now: int,
    record: Sequence[str | bytes | int],
    present: bytes,
    mode: str = "mutex",
    permits: int = 1,
) -> Holder:
    """Return the holder of a hold by its token, the number of its tokens, and the times (µs) of its grant and of its end."""
    token, tokens, since, until = map(int, record)
    start = datetime.fromtimestamp(since / 1_000_000, UTC)
    # The value of a campaign is on a line of its own.
    label, _, value = label.partition("\n")
    left = (until - now) / 1_000_000
    holder = Holder(label, token, start, left, permits, mode, tokens, decode_value(value))
    return presented(holder, decode_present(_text(present)))


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def split(key: str, prefix: str) -> Lock | None:
    """Return the name and family of the lock under a key; ``None`` for a key that is not a lock."""
    family, mark, name = key.removeprefix(prefix).partition(":{")
    if not key.startswith(prefix) or not mark or not name.endswith("}"):
        return None
    try:
        kind = Family(family)
    except ValueError:
        # A register, a probe, or of a later version.
        return None
    lock = unescape(name[:-1])
    # Another program may have written a key that no lock's name is escaped to.
    return (lock, kind) if escape(lock) == name[:-1] else None


def key_pattern(prefix: str, pattern: str) -> str:
    """Return a pattern for ``SCAN`` that matches at least the keys whose names match ``pattern``."""
    literal = escape(re.split(r"[*?\[]", pattern, maxsplit=1)[0]).replace("\\", "\\\\")
    return f"{prefix}*:{{{literal}*"


async def names(calls: Sequence[Call], prefix: str, pattern: str, inspect: Inspect) -> list[Lock]:
    """List every lock that is held or waited for and whose name matches a glob pattern, sorted.

    ``calls`` send a command to each server. A lock that became free has a key for another minute, and a busy service thousands of
    such keys: each page is inspected when it is read, and what is free is forgotten. Raises :class:`BackendRefused` if more than
    10,000 are left. Each command ends within the command timeout. Cancelling it changes nothing.
    """
    found: set[Lock] = set()
    for call in calls:
        async for page in _pages(call, prefix, pattern):
            found.update(await _used(page - found, inspect))
            if len(found) > MOST:
                text = f"more than {MOST:,} locks that match {shorten(pattern)} are held or waited for: narrow the pattern"
                raise BackendRefused(text, retryable=False)
    return sorted(found)


async def empty(calls: Sequence[Call], namespace: str) -> None:
    """Delete every key of a namespace. Each command ends within the command timeout. Cancelling it leaves the rest."""
    for call in calls:
        cursor = b""
        while cursor != b"0":
            cursor, keys = await call("SCAN", cursor or b"0", "MATCH", f"{namespace}:*", "COUNT", STEP)
            for key in keys:
                # This deletes it at once, and needs no right that locks do not need. One by one: in a cluster each has a slot of its own.
                await call("PEXPIRE", key, 0)


async def _pages(call: Call, prefix: str, pattern: str) -> AsyncIterator[set[Lock]]:
    """Yield the locks whose keys one SCAN after the other finds."""
    cursor = b""
    while cursor != b"0":
        # A key of another type belongs to another program.
        scan = "SCAN", cursor or b"0", "MATCH", key_pattern(prefix, pattern), "COUNT", STEP, "TYPE", "hash"
        cursor, keys = await call(*scan)
        locks = (split(_text(key), prefix) for key in keys)
        yield {lock for lock in locks if lock is not None and fnmatchcase(lock[0], pattern)}


async def _used(page: Iterable[Lock], inspect: Inspect) -> list[Lock]:
    """Return the locks of a page that are held or waited for."""
    locks = list(page)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(inspect(*lock)) for lock in locks]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    infos = [task.result() for task in tasks]
    return [lock for lock, info in zip(locks, infos, strict=True) if info.locked or info.waiters]
