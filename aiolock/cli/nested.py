"""A run inside a run of the same lock: it passes through, because waiting for oneself never ends.

The outer run leaves word in the environment of its command. A word can be old, for example in a process that outlived its
lock, so it counts only if the server has that very hold at this moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from aiolock.errors import ConfigError, shorten
from aiolock.info import LockInfo
from aiolock.kinds import Kind, Mode

__all__ = ["VARIABLE", "Word", "add", "confirmed", "find", "identity"]

VARIABLE = "AIOLOCK_HELD"
"""Words about all locks that are held around a command, innermost last."""


class Word(NamedTuple):
    """What an outer run says about its hold."""

    identity: str
    token: int
    mode: str
    permits: int

    def __str__(self) -> str:
        return f"{self.identity}:{self.token}:{self.mode}:{self.permits}"


def identity(url: str, namespace: str, kind: Kind, name: str) -> str:
    """Which lock it is, without telling the environment anything about the server."""
    parts = (" ".join(sorted(map(_place, url.split()))), namespace, kind.family.value, name)
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _place(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    return scheme.lower() + mark + rest.rpartition("@")[2]


def add(held: str, word: Word) -> str:
    """The words that are there, and one more."""
    return f"{held} {word}".strip()


def find(held: str, wanted: str) -> Word | None:
    """The innermost word about one lock; what cannot be read is none."""
    for text in reversed(held.split()):
        parts = text.split(":")
        if len(parts) == 4 and parts[0] == wanted and parts[1].isdecimal() and parts[3].isdecimal():
            return Word(parts[0], int(parts[1]), parts[2], int(parts[3]))
    return None


def confirmed(word: Word, kind: Kind, info: LockInfo, command: Sequence[str]) -> bool:
    """Whether ``command`` may run under the outer hold.

    Raises :class:`ConfigError` where neither passing through nor waiting is right: the outer hold is there, and is
    weaker than what is asked for; or the server does not say whose its holds are.
    """
    holders = [holder for holder in info.holders if holder.token == word.token]
    if not holders:
        if any(holder.token == 0 for holder in info.holders):
            raise ConfigError(
                f"{command[0]} was started by a run that holds {shorten(info.name)}, and this server does not tell the "
                "tokens of its holders: whether the hold is still there cannot be checked"
            )
        return False
    if kind.mode is Mode.PERMITS:
        # Further permits may well be free.
        return word.permits >= kind.permits
    if kind.exclusive and word.mode == Mode.READ.value:
        raise ConfigError(
            f"{shorten(info.name)} is held shared by the run around this one, and exclusive use would wait for that for "
            "ever: use -x outside as well"
        )
    return True
