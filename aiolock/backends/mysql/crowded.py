"""Locks of which somebody has a row locked for long: what is asked about them must hold up nobody else.

A session does one thing at a time, so a statement that waits for such a row delays all that is asked behind it. That cannot be known
before the first one has waited. Those that come in the next seconds go another way, or first ask without waiting.
"""

from __future__ import annotations

__all__ = ["MEMORY", "Crowded"]

MEMORY = 10.0
"""For how many seconds it is remembered."""


class Crowded:
    """Those of one client."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def add(self, key: str, now: float) -> None:
        """A statement about this lock has waited in vain."""
        # Here, so that it does not grow: this is rare.
        self._until = {other: until for other, until in self._until.items() if until > now}
        self._until[key] = now + MEMORY

    def has(self, key: str, now: float) -> bool:
        """Whether one has of late."""
        return bool(self._until) and self._until.get(key, now) > now
