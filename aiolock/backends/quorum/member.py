"""One of the servers: its backend, whether it was ever reached, and opening it later if it was not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random

from aiolock.contract import Backend, Claim, Grant
from aiolock.errors import BackendError, BackendUnavailable

__all__ = ["Member"]

log: logging.Logger = logging.getLogger("aiolock")

AGAIN = (0.5, 5.0)
"""Seconds between tries to open a server that could not be reached: at first, and at most."""


class Member:
    """A server among several."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.open = False
        """Whether its backend could be opened; from then on it reconnects by itself."""
        self.failure: BackendError | None = None
        """Why it could not."""

    def __repr__(self) -> str:
        return self.backend.address or repr(self.backend)

    def check(self) -> None:
        """Raise :class:`BackendUnavailable` if it was never reached."""
        if not self.open:
            error = BackendUnavailable(f"{self!r} could not be reached yet: {self.failure}")
            error.__cause__ = self.failure
            raise error

    async def attempt(self, claim: Claim, *, wait: bool) -> Grant | None:
        """As the claim's."""
        self.check()
        return await claim.attempt(wait)

    async def try_to_open(self) -> None:
        """Open it; what can be better later is remembered instead of raised. Cancelling it leaves nothing open."""
        try:
            await self.backend.open()
        except BackendError as error:
            self.failure = error
            await self.backend.aclose()
            if not error.retryable:
                raise
        except BaseException:
            await self.backend.aclose()
            raise
        else:
            self.open, self.failure = True, None

    async def open_later(self, random: Random, opened: Callable[[Member], None]) -> None:
        """Try again until it is open, and say so."""
        pause, most = AGAIN
        while not self.open:
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, most)
            try:
                await self.try_to_open()
            except BackendError as error:
                log.warning("%r does not take part: %s", self, error)
        opened(self)
