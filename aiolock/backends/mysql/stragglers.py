"""Holds whose rows somebody else has locked when they are to be renewed: they are asked for apart from the others.

Such a row may be locked for a moment, by a rival's question, or for minutes, by an administrator's transaction. What waits for
it must hold up neither the renewals of other holds nor whatever else the session is asked. So it waits in a session
of its own, one row after the other; and until there is an answer nobody knows whether the hold goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from aiolock.backends.mysql.failures import NOT_NOW, code
from aiolock.contract import Claim, Grant, Renewal, certain_until
from aiolock.errors import BackendUnavailable, LockError

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["FRESH", "Stragglers", "prolonged"]

FRESH = 0.8
"""A row that is held for more than this share of its ttl need not be renewed, whoever has renewed it."""
PATIENCE = 0.05
"""For what share of a ttl the answers about the others wait for that about a straggler."""


class Stragglers:
    """Those of one client."""

    def __init__(self, backend: MySQLBackend) -> None:
        self._backend = backend
        self._waiting: dict[Claim, tuple[str, asyncio.Future[Renewal]]] = {}
        """What is to be asked for each, and who waits for what comes of it."""
        self._asking = False

    def __contains__(self, claim: Claim) -> bool:
        return claim in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, packets: Mapping[Claim, str]) -> dict[Claim, Renewal]:
        """What comes of these in the time that the others can spare; each packet is one statement, which waits.

        Cancelling it cancels the waiting alone.
        """
        loop = asyncio.get_running_loop()
        for claim, packet in packets.items():
            self._waiting.setdefault(claim, (packet, loop.create_future()))
        answers = {claim: self._waiting[claim][1] for claim in packets}
        if not self._asking:
            self._asking = True
            self._backend.sessions.spawn(self._ask_for_each(), "aiolock-mysql-stragglers")
        await asyncio.wait(answers.values(), timeout=PATIENCE * min(claim.bid.ttl for claim in packets))
        return {
            claim: answer.result() if answer.done() else self._unknown() for claim, answer in answers.items()
        }

    async def _ask_for_each(self) -> None:
        """Until none is left. One at a time, so that nobody's row waits together with another that stays locked."""
        try:
            while self._waiting:
                claim, (packet, _) = next(iter(self._waiting.items()))
                answer = await self._ask(claim, packet)
                self._waiting.pop(claim)[1].set_result(answer)
        finally:
            self._asking = False
            self._waiting.clear()

    async def _ask(self, claim: Claim, packet: str) -> Renewal:
        backend = self._backend
        try:
            session = await backend.sessions.take()
            if session is None:
                return self._unknown()
            sent = backend.settings.clock()
            try:
                [renewed] = await session.run(packet, backend.settings.command_timeout)
            except LockError:
                backend.sessions.give(session)
                raise
        except LockError as error:
            return self._unknown() if code(error.__cause__) in NOT_NOW else error
        backend.sessions.give(session)
        # What else has become of it, the next renewal tells.
        if not renewed.changed:
            return self._unknown()
        return Grant(0, 0, certain_until(sent, claim.bid.ttl), demand=True)

    def _unknown(self) -> BackendUnavailable:
        return BackendUnavailable(f"{self._backend.address}: somebody else has its row locked")


def prolonged(microseconds: int, ttl: float, sent: float) -> Grant | None:
    """What it proves that a row is ours for so many µs more, when that was asked at ``sent``; ``None`` if nobody has
    prolonged it of late."""
    left = microseconds / 1_000_000
    # As if it had been prolonged by a question that was sent so much earlier.
    return Grant(0, 0, certain_until(sent - (ttl - left), ttl), demand=True) if left > FRESH * ttl else None
