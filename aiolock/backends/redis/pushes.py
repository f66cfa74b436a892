"""What the server says unasked, on the channel of this client: grants for those who wait, and words for those who hold."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiolock.backends.redis.claim import RedisClaim
from aiolock.backends.redis.pairing import Pairing
from aiolock.contract import News, Notice, certain_until
from aiolock.errors import LossReason
from aiolock.notices import Notices

if TYPE_CHECKING:
    from aiolock.backends.redis.backend import RedisBackend
    from aiolock.backends.redis.document import Documents

__all__ = ["GONE", "Pushes"]

GONE: Mapping[int, LossReason] = {0: "revoked", -1: "force-released"}
"""What ``renew`` says of a hold that is not ours any more."""

_NUMBER = re.compile(r"-?[0-9]{1,18}")


class Pushes:
    """From a message to the claim that it is about. What is nobody's is dropped: anybody may write into our channel."""

    def __init__(
        self, backend: RedisBackend, notices: Notices, pairing: Pairing, documents: Documents
    ) -> None:
        self._backend = backend
        self._notices = notices
        self._pairing = pairing
        self._documents = documents
        self._clock = backend.settings.clock

    def heard(self, payload: bytes) -> None:
        """Take in one message; one that is not as the scripts write it is dropped."""
        what, _, rest = payload.decode("utf-8", "replace").partition(" ")
        request, *numbers = rest.split(" ")
        claim = self._named(request)
        if what == "g" and len(numbers) == 5 and all(map(_NUMBER.fullmatch, numbers)):
            self._pushed(claim, *(int(number) for number in numbers))
        elif what == "d" and claim is not None and claim.demanded_at is None:
            claim.demanded_at = self._clock()
        elif what == "f" and claim is not None:
            self._notices.put(Notice(News.LOST, claim, "force-released"))
        elif what == "a" and claim is not None and claim.taken:
            # As long as nobody works under it, there is nobody to tell: the next renewal says it again.
            _, stamp, reason = (*rest.split(" ", 2), "", "")[:3]
            if _NUMBER.fullmatch(stamp):
                self._asked(claim, int(stamp), reason)
        elif what == "c":
            self._documents.heard(rest)

    def _named(self, request: str) -> RedisClaim | None:
        """The claim that the server calls so; anybody may write into our channel."""
        process, _, number = request.partition(":")
        try:
            return self._backend.claims.get(int(number, 16)) if process == self._backend.process else None
        except ValueError:
            return None

    def _asked(self, claim: RedisClaim, when: int, reason: str) -> None:
        if when > claim.asked:
            claim.asked = when
            self._notices.put(Notice(News.REQUESTED, claim, text=reason))

    def _pushed(
        self, claim: RedisClaim | None, token: int, count: int, server: int, milliseconds: int, waiting: int
    ) -> None:
        if claim is None or not claim.waiting:
            # Whoever asked has left; its own leaving may have come before the grant.
            return
        now = self._clock()
        age = self._pairing.age(server / 1_000_000, now)
        seconds = milliseconds / 1000
        if age is None or not age.credible(seconds):
            # Too old or of unknown age: asking again finds the grant, and is its confirmation.
            claim.wake()
            return
        # The confirmation is on the wire before the waiter runs, so even a block that never awaits has sent it.
        confirmation = self._backend.renewal([claim])
        confirmation.add_done_callback(lambda reply: self._confirmed(claim, reply))
        until = certain_until(now - age.most, seconds)
        claim.push(token, count, until, demand=waiting != 0)

    def _confirmed(self, claim: RedisClaim, reply: asyncio.Future[Any]) -> None:
        if reply.cancelled() or reply.exception() is not None:
            return
        state = reply.result()[1]
        if type(state) is not list and state <= 0:
            self._notices.put(Notice(News.LOST, claim, GONE[state]))
