"""One command of a session: a packet on its way, who wants its answer, and what its end means for the session."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from aiolock.backends.mysql.driver import Result
from aiolock.errors import LockError

__all__ = ["Command", "Told"]

Told = Callable[[list[Result] | LockError], None]
"""Who is called with the answers to a command, or with why there are none."""


class Command:
    """A packet, and what is to happen when it has been answered."""

    answer: asyncio.Future[list[Result]] | None = None
    """Who waits for the answer, if anybody does."""
    heard: Told | None = None
    """Who is called with it."""
    blocks = False
    """Whether it waits for others, as it should: nobody waits for its end when the session is closed."""
    atomic = False
    """Whether it is a transaction: what is left of one that failed must not become part of the next command."""
    silence = 0
    """After how many seconds without a word the server is to end the session from then on; 0: as it is."""
    changes = False
    """Whether it was sent together with a new silence."""
    then: Callable[[], None] | None = None
    """What is called when it is done; a command with this is sent even if nobody waits for it any more."""
    again = False
    """Whether it was sent before, and refused."""

    def __init__(self, packet: str, timeout: float) -> None:
        self.packet = packet
        self.timeout = timeout
        """How many seconds the answer may take; ``inf``: as many as it likes."""
        self.late = math.inf
        """When, by the loop's clock, it should have come, once it was asked for."""

    @property
    def unwanted(self) -> bool:
        """Nobody waits for it any more, and it need not be sent."""
        return self.answer is not None and self.answer.done() and self.then is None

    def tell(self, outcome: list[Result] | LockError) -> None:
        """It has ended, one way or the other; said once."""
        heard, self.heard = self.heard, None
        if heard is not None:
            heard(outcome)
        elif self.answer is not None and not self.answer.done():
            if isinstance(outcome, LockError):
                self.answer.set_exception(outcome)
            else:
                self.answer.set_result(outcome)
