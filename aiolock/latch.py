"""A count that reaches zero once, and opens for everybody who waits."""

from __future__ import annotations

import base64
import hashlib

from aiolock.board import LATE, Board, Body, Step, board
from aiolock.contract import Family
from aiolock.errors import ConfigError, WaitTimeout, shorten
from aiolock.options import check_count, check_request_id, check_timeout
from aiolock.runtime import Generations

__all__ = ["Latch", "counted", "left"]

KEEP = 86_400.0
"""Seconds for which a latch is remembered after its last count: for so long one that opened stays open."""

MOST_REQUESTS = 1000
"""From how much a latch may count for which requests have names: so many are remembered, so none is ever forgotten."""


def left(body: Body, name: str, count: int) -> int:
    """How much is left of a latch; :class:`ConfigError` if its first user said another count."""
    if not body:
        return count
    if body["count"] != count:
        raise ConfigError(
            f"latch {shorten(name)} counts from {body['count']}, not {count}: everybody has to name the same count; "
            "to count anew, take another name"
        )
    return int(body["left"])


def counted(body: Body, name: str, count: int, n: int, request: str | None = None) -> tuple[Body | None, int]:
    """The latch after a count-down by ``n``, and what is left; it stays at zero.

    A ``request`` that has counted counts no more. When the latch is open, none counts, so none is remembered.
    """
    before = left(body, name, count)
    seen = body.get("requests", [])
    if not before or request in seen:
        return None, before
    after = max(0, before - n)
    requests = seen if request is None else [*seen, request]
    changed: Body = {"count": count, "left": after}
    if requests and after:
        changed["requests"] = requests
    return changed, after


def digest(request_id: str) -> str:
    """What of a request's name stands in the document: as long as all others, and different for different ones."""
    return base64.b64encode(hashlib.blake2b(request_id.encode(), digest_size=12).digest()).decode()


class Latch:
    """A count that reaches zero once. Made by :meth:`Client.latch`; does no I/O until it is asked.

    Everybody names the same count; that of who counts down first stands. A latch that opened stays open for 24 hours,
    and one that nobody has counted down for so long begins anew.
    """

    __slots__ = ("_count", "_generations", "_name")

    def __init__(self, generations: Generations, name: str, count: int) -> None:
        self._generations = generations
        self._name = name
        self._count = count

    @property
    def name(self) -> str:
        """What it is called."""
        return self._name

    def __repr__(self) -> str:
        return f"<Latch {shorten(self._name)} from {self._count}>"

    def __reduce__(self) -> str:
        raise TypeError(
            "a latch cannot be copied or pickled: pass its name, and ask the client there for the latch"
        )

    async def count_down(self, n: int = 1, *, request_id: str | None = None) -> int:
        """Count down by ``n``, and return what is left; at zero everybody who waits goes on, and it stays there.

        :param n: how many at once, from 1.
        :param request_id: what this count is called, for example the number of the job that is done: however often and
            by whomever it is asked for under this name, it counts once, with the ``n`` that came first. Remembered for as long as
            the latch is. At most 1,024 UTF-8 bytes, and for latches that count from at most 1,000.

        Counts once, also if an answer of the server gets lost and the client asks again. Raises :class:`ConfigError` if
        the latch counts from another number, and :class:`BackendError` if after the ``command_timeout`` it is not known
        whether it counted: asking again with the same ``request_id`` is right then, and without one it may count twice.
        Cancelling it stops the waiting, not the counting.
        """
        check_count("n", n)
        request = None
        if request_id is not None:
            request = digest(check_request_id(request_id))
            if self._count > MOST_REQUESTS:
                raise ConfigError(
                    f"latch {shorten(self._name)} must count from at most {MOST_REQUESTS}, not {self._count}, to remember every "
                    "request_id: count without it, or with several latches"
                )
        return await self._change(lambda body: counted(body, self._name, self._count, n, request))

    async def count(self) -> int:
        """What is left to count down; 0 once it is open.

        Ends within the ``command_timeout``; raises as :meth:`count_down` does. Cancelling it changes nothing.
        """
        return await self._change(lambda body: (None, left(body, self._name, self._count)))

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until the count is zero, for at most ``timeout`` seconds (``None``: for ever, 0: look once).

        Raises :class:`WaitTimeout` (a :class:`TimeoutError`) when the time is over, :class:`ConfigError` if the latch
        counts from another number, and :class:`BackendError` if the server cannot be reached at first; once it waits, it
        survives outages. Cancelling it leaves nothing behind.
        """
        limit = check_timeout(timeout)
        if limit == 0:
            rest = await self.count()
            if rest:
                raise WaitTimeout("latch", self._name, 0.0, self._missing(rest))
            return
        seen: int | None = None

        def look(body: Body) -> bool | None:
            nonlocal seen
            seen = left(body, self._name, self._count)
            return None if seen else True

        if await self._board().wait(look, limit) is LATE:
            missing = "the server did not answer" if seen is None else self._missing(seen)
            raise WaitTimeout("latch", self._name, limit or 0.0, missing)

    def _missing(self, rest: int) -> str:
        return f"{rest} of {self._count} are left to count down"

    async def _change(self, step: Step) -> int:
        answer: int = await self._board().change(step)
        return answer

    def _board(self) -> Board:
        runtime = self._generations.latest
        runtime.guard()
        return board(runtime, self._name, Family.LATCH, KEEP)
