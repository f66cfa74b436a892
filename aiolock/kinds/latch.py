"""Count-down latch: a count that reaches zero once and releases every task that waits for it."""

from __future__ import annotations

import base64
import hashlib

from aiolock.core.register import LATE, Body, Change, SharedRegister
from aiolock.core.runtime import Generations, Runtime
from aiolock.errors import ConfigError, WaitTimeout, shorten
from aiolock.lock import Handle
from aiolock.types import LATCH
from aiolock.validation import check_count, check_request_id, check_timeout

__all__ = ["Latch", "counted", "left"]

KEEP = 86_400.0
"""Seconds for which a latch is kept after its last count: an open latch stays open for as long."""

MOST_REQUESTS = 1000
"""Largest count of a latch whose counts have request ids: so many are remembered, so that none is ever forgotten."""


def left(body: Body, name: str, count: int) -> int:
    """Return what is left to count down; :class:`ConfigError` if the first user of the latch gave another count."""
    if not body:
        return count
    if body["count"] != count:
        raise ConfigError(
            f"latch {shorten(name)} counts from {body['count']}, not {count}: every client has to name the same count; "
            "to count anew, take another name"
        )
    return int(body["left"])


def counted(body: Body, name: str, count: int, n: int, request: str | None = None) -> tuple[Body | None, int]:
    """Return the latch after a count-down by ``n``, and what is left; it stays at zero.

    A ``request`` counts once. An open latch counts no more, so it remembers no requests.
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
    """Return the form of a request id in the register: of fixed length, and different for different ids."""
    return base64.b64encode(hashlib.blake2b(request_id.encode(), digest_size=12).digest()).decode()


class Latch(Handle):
    """A count that reaches zero once. Made by :meth:`Client.latch`; does no I/O until it is asked.

    All users name the same count; that of the first count-down stands. An open latch stays open for 24 hours, and one that
    was not counted down for so long begins anew.
    """

    __slots__ = ("_count", "_generations", "_name")

    _noun = "latch"

    def __init__(self, generations: Generations, name: str, count: int) -> None:
        self._generations = generations
        self._name = name
        self._count = count

    @property
    def name(self) -> str:
        """The name of the latch."""
        return self._name

    def __repr__(self) -> str:
        return f"<Latch {shorten(self._name)} from {self._count}>"

    async def count_down(self, n: int = 1, *, request_id: str | None = None) -> int:
        """Count down by ``n``, and return what is left; at zero all waiting tasks go on, and the count stays there.

        :param n: the number to count down by, from 1.
        :param request_id: identifies this count, for example by the number of the job that is done: requested again under
            this id, by any client, it counts once, with the ``n`` that came first. Remembered for as long as the latch is.
            At most 1,024 UTF-8 bytes, and for latches that count from at most 1,000.

        Counts once, also if an answer of the server gets lost and the client asks again. Raises :class:`ConfigError` if
        the latch counts from another number, and :class:`BackendError` if after the ``command_timeout`` it is not known
        whether it counted: asking again with the same ``request_id`` is right then, and without one it may count twice.
        Cancelling it ends the wait, not the count-down.
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
        """Return what is left to count down; 0 once the latch is open.

        Ends within the ``command_timeout``; raises as :meth:`count_down` does. Cancelling it changes nothing.
        """
        return await self._change(lambda body: (None, left(body, self._name, self._count)))

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until the count is zero, for at most ``timeout`` seconds (``None``: no limit, 0: check once).

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

        def opened(body: Body) -> bool | None:
            nonlocal seen
            seen = left(body, self._name, self._count)
            return None if seen else True

        wait = await self._runtime().reach(limit)
        if await self._register().wait(opened, wait) is LATE:
            missing = "the server did not answer" if seen is None else self._missing(seen)
            raise WaitTimeout("latch", self._name, limit or 0.0, missing)

    def _missing(self, rest: int) -> str:
        return f"{rest} of {self._count} are left to count down"

    async def _change(self, change: Change[int]) -> int:
        await self._runtime().reach()
        return await self._register().change(change)

    def _runtime(self) -> Runtime:
        runtime = self._generations.latest
        runtime.guard()
        return runtime

    def _register(self) -> SharedRegister:
        return self._runtime().register(self._name, LATCH.family, KEEP)
