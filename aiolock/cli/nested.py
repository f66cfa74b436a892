"""What a run says of its hold in the environment of its command, for runs of the same lock inside it.

Such a run would wait for itself, so it works under the outer hold instead (:mod:`aiolock.cli.inner_runs`). What it finds in
the environment can be old, for example in a process that outlived its lock: it counts if the outer run still answers.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple
from urllib.parse import quote, unquote

from aiolock.errors import shorten
from aiolock.kinds import Kind, Mode

__all__ = ["VARIABLE", "Word", "add", "covers", "find", "identity", "refusal"]

VARIABLE = "AIOLOCK_HELD"
"""Words about all locks that are held around a command, innermost last."""


class Word(NamedTuple):
    """What an outer run says about its hold."""

    identity: str
    token: int
    mode: str
    permits: int
    address: str
    """Where the outer run answers."""

    def __str__(self) -> str:
        return f"{self.identity}:{self.token}:{self.mode}:{self.permits}:{quote(self.address)}"


_WORD = re.compile(r"([0-9a-f]+):([0-9]{1,19}):([a-z]+):([0-9]{1,19}):(\S+)")


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
        match = _WORD.fullmatch(text)
        if match is not None and match[1] == wanted:
            return Word(match[1], int(match[2]), match[3], int(match[4]), unquote(match[5]))
    return None


def covers(word: Word, kind: Kind) -> bool:
    """Whether the outer hold is what is asked for; if not, the server is asked, which may well have further permits."""
    return kind.mode is not Mode.PERMITS or word.permits >= kind.permits


def refusal(word: Word, kind: Kind, name: str) -> str:
    """Why the outer hold is too weak for what is asked for; empty if it is not."""
    if kind.exclusive and word.mode == Mode.READ.value:
        return (
            f"{shorten(name)} is held shared by the run around this one, and exclusive use would wait for that for ever: "
            "use -x outside as well"
        )
    return ""
