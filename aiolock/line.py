"""The tasks of this process that wait for one lock, in their order; made for many who wait and many who give up.

Who gives up stays in the line until it comes to the front or until half of the line has given up: then nobody has to be
looked for. One who is alone in line, as most are, costs nothing but its entry.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

from aiolock.lease import Lease, Terms

__all__ = ["Line", "Waiter"]

Waiter = asyncio.Future[Lease | None]
"""Done with a lease when it is its turn, with ``None`` when its time is over."""

FEW = 32
"""So many who gave up may stay in any line."""


class Line:
    """Waiters and what each of them asks of its lease."""

    __slots__ = ("_first", "_gone", "_rest", "_terms")

    def __init__(self) -> None:
        self._first: Waiter | None = None
        self._terms: Terms | None = None
        self._rest: deque[Any] | None = None
        """Behind the first: a waiter, its terms, the next waiter, and so on."""
        self._gone = 0
        """How many in there have given up, at most."""

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        while (first := self._first) is not None and first.done():
            self._advance()
        return first is not None

    def __iter__(self) -> Iterator[Waiter]:
        """Everybody who has not given up."""
        if self._first is not None and not self._first.done():
            yield self._first
        rest = list(self._rest or ())
        for waiter in rest[::2]:
            if not waiter.done():
                yield waiter

    def join(self, waiter: Waiter, terms: Terms) -> None:
        """Stand at the end."""
        if self._first is None:
            self._first, self._terms = waiter, terms
            return
        if self._rest is None:
            self._rest = deque()
        self._rest.append(waiter)
        self._rest.append(terms)

    def lead(self, waiter: Waiter, terms: Terms) -> None:
        """Stand at the front: whoever came first may have been asking the server meanwhile."""
        if self._first is not None:
            if self._rest is None:
                self._rest = deque()
            self._rest.appendleft(self._terms)
            self._rest.appendleft(self._first)
        self._first, self._terms = waiter, terms

    def next(self) -> tuple[Waiter, Terms] | None:
        """Whoever is first leaves the line, if there is anybody."""
        while (waiter := self._first) is not None:
            terms, rest = self._terms, self._rest
            if rest:
                self._first, self._terms = rest.popleft(), rest.popleft()
            else:
                self._first = self._terms = None
            if not waiter.done():
                assert terms is not None  # noqa: S101 - whoever waits has said what it wants
                return waiter, terms
        return None

    def give_up(self, waiter: Waiter) -> None:
        """Somebody does not wait any more, or did not get as far as to wait."""
        waiter.cancel()
        self._gone += 1
        rest = self._rest
        if rest is not None and self._gone > FEW and 4 * self._gone > len(rest):
            self._gone = 0
            found = list(rest)
            rest.clear()
            for other, terms in zip(found[::2], found[1::2], strict=True):
                if not other.done():
                    rest += (other, terms)

    def clear(self) -> None:
        """Nobody waits any more."""
        self._first = self._terms = self._rest = None

    def _advance(self) -> None:
        rest = self._rest
        if rest:
            self._first = rest.popleft()
            self._terms = rest.popleft()
        else:
            self._first = self._terms = None
