"""What is written into nodes: who stands there, and what a lock's own node knows; read without trust.

The data of a contender's node begins with its label, as people should see it; further lines are ``name=value``. Curator
asks a holder to let go by replacing the data of its node with ``__REVOKE__``, and that is understood.

The data of a lock's own node is one line, ``aiolock floor=7`` or ``aiolock limit=3 declared=2 inside=-1``. Whatever
else stands there is nobody's word, and counts as nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

__all__ = ["REVOKE", "Note", "Record"]

REVOKE = b"__REVOKE__"
"""What Curator's Revoker writes."""


@dataclass(frozen=True, slots=True)
class Note:
    """The data of a contender's node."""

    label: str
    attempt: str = ""
    """Whose it is, where the name does not say it."""
    token: int = 0
    """The first token of the hold, where the node does not say it."""
    asked: str | None = None
    """Why the holder should let go, if somebody asked."""

    def encode(self) -> bytes:
        """As it is stored."""
        lines = [self.label]
        if self.attempt:
            lines.append(f"attempt={self.attempt}")
        if self.token:
            lines.append(f"token={self.token}")
        if self.asked is not None:
            lines.append(f"asked={json.dumps(self.asked)}")
        return "\n".join(lines).encode()

    @classmethod
    def decode(cls, data: bytes | None) -> Note:
        """What somebody stored, whoever it was."""
        if data == REVOKE:
            return cls("", asked="")
        label, *lines = bytes(data or b"").decode("utf-8", "replace").split("\n")
        said = {name: value for name, _, value in (line.partition("=") for line in lines)}
        return cls(label, said.get("attempt", ""), _number(said.get("token")), _text(said.get("asked")))


_DIGITS = re.compile(r"[0-9]{1,19}")


def _number(text: str | None) -> int:
    return int(text) if text is not None and _DIGITS.fullmatch(text) else 0


def _text(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        # An escape such as \\ud800 makes a lone surrogate, which no stream and no server takes.
        return str(json.loads(text)).encode("utf-8", "replace").decode()
    except (ValueError, RecursionError):
        return ""


_RECORD = re.compile(rb"aiolock((?: [a-z]+=-?\d{1,19})*)")


@dataclass(frozen=True, slots=True)
class Record:
    """The data of a lock's own node, under which its queue stands."""

    floor: int = -1
    """Every contender whose number is not above this has gone, for good: a holder said so when it left."""
    limit: int = 0
    """How many permits there are; 0 if nobody has said it."""
    declared: int = 0
    """How many the first user of the semaphore named."""
    inside: int = -1
    """Whoever's number is not above this was inside when the permits became fewer."""

    def encode(self) -> bytes:
        """As it is stored."""
        empty = Record()
        words = [
            f" {name}={getattr(self, name)}"
            for name in ("floor", "limit", "declared", "inside")
            if getattr(self, name) != getattr(empty, name)
        ]
        return ("aiolock" + "".join(words)).encode()

    @classmethod
    def decode(cls, data: bytes | None) -> Record:
        """What somebody stored, whoever it was."""
        match = _RECORD.fullmatch(bytes(data or b""))
        if match is None:
            return cls()
        known = {"floor", "limit", "declared", "inside"}
        words = (word.partition("=") for word in match[1].decode().split())
        return cls(**{name: int(value) for name, _, value in words if name in known})
