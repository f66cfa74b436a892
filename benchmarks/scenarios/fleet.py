"""Several servers at once, for scenarios that put the same question to each of them."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.scenarios.context import Context

__all__ = ["Fleet", "Member"]


@dataclass(slots=True)
class Member:
    """One way to lock: a server, and how its locks are asked for."""

    who: str
    """The contestant."""
    context: Context | None
    """``None``: no server, one process."""
    query: str = ""

    @property
    def url(self) -> str:
        return "memory://" if self.context is None else f"{self.context.url}{self.query}"


@dataclass(slots=True)
class Fleet:
    """What competes, by the name in the tables; and a context to play in."""

    members: dict[str, Member]
    context: Context
    """Of whichever server: for rounds, workers and patience."""
