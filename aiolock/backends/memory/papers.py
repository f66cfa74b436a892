"""The documents of the memory server: compare-and-set, and who is to be told of a change; as pure as its machine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

__all__ = ["Papers"]

Key = tuple[str, str]


@dataclass(slots=True)
class _Paper:
    value: bytes
    stamp: str
    until: float
    """When it may be forgotten."""


@dataclass(slots=True)
class Papers:
    """All documents of one server."""

    kept: dict[Key, _Paper] = field(default_factory=dict)
    watchers: dict[Key, dict[str, None]] = field(default_factory=dict)
    """Who is told of the next change, once."""
    writes: int = 0

    def read(self, key: Key, now: float) -> tuple[bytes, str]:
        """A document and its stamp; both empty if there is none."""
        paper = self.kept.get(key)
        if paper is None or paper.until <= now:
            self.kept.pop(key, None)
            return b"", ""
        return paper.value, paper.stamp

    def write(
        self, key: Key, value: bytes, stamp: str, keep: float, now: float
    ) -> tuple[str | None, list[str]]:
        """Replace the version with that stamp: the new stamp, or ``None`` if it was not it; and who is to be told."""
        if self.read(key, now)[1] != stamp:
            return None, []
        # Counted over all documents, so that none has the same stamp twice, also not after it was forgotten.
        self.writes += 1
        self.kept.pop(key, None)
        for other in list(itertools.islice(self.kept, 2)):
            self.read(other, now)
        self.kept[key] = _Paper(value, str(self.writes), now + keep)
        return str(self.writes), list(self.watchers.pop(key, ()))

    def watch(self, key: Key, who: str, stamp: str, now: float) -> bool:
        """Tell ``who`` of the next change; not if the stamp is already another one, which is the answer."""
        if self.read(key, now)[1] != stamp:
            return False
        self.watchers.setdefault(key, {})[who] = None
        return True

    def left(self, client: str) -> None:
        """Nobody looks any more of those whose names begin with ``client`` and a colon."""
        for key, watchers in list(self.watchers.items()):
            for who in [who for who in watchers if who.startswith(f"{client}:")]:
                self.forget(key, who)

    def forget(self, key: Key, who: str) -> None:
        """``who`` does not look any more."""
        watchers = self.watchers.get(key)
        if watchers is not None:
            watchers.pop(who, None)
            if not watchers:
                del self.watchers[key]
