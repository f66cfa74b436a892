"""Fork detection: mark in a forked child whatever belongs to its parent."""

from __future__ import annotations

import os
from collections.abc import Callable
from weakref import WeakSet

__all__ = ["OneProcess", "call_in_child"]


class OneProcess:
    """Belongs to the process that made it, or that took it over: no other may use its connections and threads."""

    __slots__ = ("__weakref__", "forked")

    def __init__(self) -> None:
        self.take_over()

    def take_over(self) -> None:
        """Belong to the running process from now on."""
        self.forked: bool = False
        """True in a child process that was forked afterwards."""
        _made.add(self)

    def refuse_fork(self, noun: str, hint: str = "connect anew in the child") -> None:
        """Raise :class:`RuntimeError` in a child process that was forked afterwards."""
        if self.forked:
            raise RuntimeError(
                f"this {noun} was made before a fork, and a forked child must not use it: {hint}"
            )


_made: WeakSet[OneProcess] = WeakSet()


def _mark() -> None:
    for each in list(_made):
        each.forked = True


def call_in_child(call: Callable[[], None]) -> None:
    """Have ``call`` called in each child process that is forked from now on, where processes fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


call_in_child(_mark)
