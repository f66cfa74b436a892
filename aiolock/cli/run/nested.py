"""Refuse a run inside a run of the same lock if it would wait for itself.

A run lists in the environment of its command the locks that it holds, with their tokens. What is listed may be long over, as for a
daemon that outlived its run: a hold counts while the server says that this token still holds the lock.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from aiolock.core.present import has_token, labelled_by, named
from aiolock.errors import ConfigError, shorten
from aiolock.types import READ, Holder, Kind, LockInfo

__all__ = ["VARIABLE", "Entry", "find", "identity", "mark", "refuse"]

VARIABLE = "AIOLOCK_HELD"
"""Entries for all locks that are held around a command, innermost last."""


class Entry(NamedTuple):
    """The hold of an outer run, as in the environment of its command."""

    identity: str
    token: int
    """The fencing token, or :func:`mark` where there is none."""

    def __str__(self) -> str:
        return f"{self.identity}:{self.token}"


_ENTRY = re.compile(r"([0-9a-f]+):([0-9]{1,19})")


def identity(url: str, namespace: str, kind: Kind, name: str) -> str:
    """Return a digest of the lock's server, namespace, family and name, without passwords."""
    servers = sorted(
        scheme.lower() + mark + rest.rpartition("@")[2]
        for scheme, mark, rest in (address.partition("://") for address in url.split())
    )
    parts = (" ".join(servers), namespace, kind.family.value, name)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def find(held: str, wanted: str) -> list[int]:
    """Return the tokens that are listed for one lock; malformed entries are ignored."""
    matches = map(_ENTRY.fullmatch, held.split())
    return [int(match[2]) for match in matches if match is not None and match[1] == wanted]


def refuse(info: LockInfo, tokens: Sequence[int], kind: Kind) -> None:
    """Raise :class:`ConfigError` if a request of ``kind`` would wait for a hold with one of these tokens.

    :param info: of the lock, as the server sees it.
    """
    around = [holder for holder in info.holders if any(_has(holder, token) for token in tokens)]
    if not around:
        return
    if kind.counted:
        limit = kind.limit if info.limit is None else info.limit
        if sum(holder.permits for holder in around) + kind.permits <= limit:
            return
        remedy = "ask for fewer permits"
    elif all(holder.mode == READ.mode.value for holder in around):
        if kind == READ:
            return
        remedy = "use -x for the outer run"
    else:
        remedy = "call the command without aiolock here"
    raise ConfigError(
        f"{shorten(info.name)} is held by the run around this one ({_named(around[-1])}), which ends after this run, so this run would "
        f"wait for itself: {remedy}, or give one of the two another name"
    )


def mark(caller: str, label: str) -> int:
    """Return what stands for the token of a hold that has none: a digest of its process and label."""
    text = labelled_by(caller, label)
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=7).digest())


def _has(holder: Holder, token: int) -> bool:
    return (
        has_token(holder, token)
        if holder.token
        else token == mark(f"{holder.host}:{holder.pid}", holder.label)
    )


def _named(holder: Holder) -> str:
    return f"{named(holder)}, token {holder.token or '-'}"
