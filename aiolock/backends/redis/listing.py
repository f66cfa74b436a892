"""Which locks there are: the keys of a namespace, looked at one by one, many at a time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from aiolock.contract import Family, LockInfo
from aiolock.errors import BackendRefused, BackendUnavailable, shorten
from aiolock.names import escape, unescape

if TYPE_CHECKING:
    from aiolock.backends.redis.backend import RedisBackend

__all__ = ["MOST", "busy", "key_pattern", "split"]

MOST = 10_000
"""How many locks may match; more is a question that nobody can read the answer to."""
STEP = 500
"""How many keys one SCAN looks through: it holds up everybody else for about a tenth of a millisecond."""
AT_ONCE = 100
"""How many locks are looked at in one write."""


def split(key: str, prefix: str) -> tuple[str, Family] | None:
    """The name and family of the lock under a key; ``None`` for what is no lock."""
    family, mark, name = key.removeprefix(prefix).partition(":{")
    if not key.startswith(prefix) or not mark or not name.endswith("}"):
        return None
    try:
        kind = Family(family)
    except ValueError:
        # A document, a probe, or of a later version.
        return None
    lock = unescape(name[:-1])
    # Another program may have written a key that no lock's name is escaped to.
    return (lock, kind) if escape(lock) == name[:-1] else None


def key_pattern(prefix: str, pattern: str) -> str:
    """A pattern for ``SCAN`` that every key matches whose name matches ``pattern``; more may match."""
    literal = escape(re.split(r"[*?\[]", pattern, maxsplit=1)[0]).replace("\\", "\\\\")
    return f"{prefix}*:{{{literal}*"


Call = Callable[..., Awaitable[Any]]


async def busy(
    backend: RedisBackend, calls: Sequence[Call], prefix: str, pattern: str
) -> list[tuple[str, Family]]:
    """Every lock that is held or waited for and whose name matches a glob pattern, sorted; ``calls`` ask each server.

    Raises :class:`BackendRefused` if they are more than 10,000, and :class:`BackendUnavailable` if it takes longer
    than the command timeout.
    """
    limit = backend.settings.command_timeout
    try:
        async with asyncio.timeout(limit):
            found: set[tuple[str, Family]] = set()
            for call in calls:
                await _scan(call, prefix, pattern, found)
            return sorted(await _busy_ones(backend, list(found)))
    except TimeoutError as error:
        raise BackendUnavailable(
            f"listing the locks that match {shorten(pattern)} took longer than {limit:g} s: narrow the pattern"
        ) from error


async def _scan(call: Call, prefix: str, pattern: str, found: set[tuple[str, Family]]) -> None:
    cursor = b"0"
    while True:
        cursor, keys = await call("SCAN", cursor, "MATCH", key_pattern(prefix, pattern), "COUNT", STEP)
        for key in keys:
            lock = split(key.decode("utf-8", "replace"), prefix)
            if lock is not None and fnmatchcase(lock[0], pattern):
                found.add(lock)
        if len(found) > MOST:
            raise BackendRefused(
                f"more than {MOST:,} locks match {shorten(pattern)}: narrow the pattern", retryable=False
            )
        if cursor == b"0":
            return


async def _busy_ones(backend: RedisBackend, locks: list[tuple[str, Family]]) -> list[tuple[str, Family]]:
    answer = []
    for start in range(0, len(locks), AT_ONCE):
        some = locks[start : start + AT_ONCE]
        infos = await asyncio.gather(*(backend.inspect(*lock) for lock in some), return_exceptions=True)
        for lock, info in zip(some, infos, strict=True):
            if isinstance(info, LockInfo):
                if info.holders or info.waiters:
                    answer.append(lock)
            elif not str(info).startswith("WRONGTYPE"):
                # Another program's key under a name of ours is no lock, and no reason to list none.
                raise info
    return answer
