"""One of the servers: its backend, whether it was ever reached, and opening it later if it was not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

from aiolock.contract import Backend, Claim, Grant
from aiolock.errors import BackendError, BackendUnavailable, ConfigError
from aiolock.logs import Log, get_logger

__all__ = ["Member"]

T = TypeVar("T")

log: Log = get_logger("aiolock")

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
        self.silent = False
        """Whether the last question was not answered."""

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
        return await self.hear(claim.attempt(wait))

    async def hear(self, answer: Awaitable[T]) -> T:
        """An answer of its backend, or its error; whether there was one is remembered."""
        try:
            said = await answer
        except BackendUnavailable:
            self.silent = True
            raise
        except BackendError:
            self.silent = False
            raise
        self.silent = False
        return said

    async def try_to_open(self, suits: Callable[[], Awaitable[None]] | None = None) -> None:
        """Open it; what can be better later is remembered instead of raised. Cancelling it leaves nothing open.

        ``suits`` raises if it may not take part; it does not before.
        """
        self.open = False
        try:
            await self.backend.open()
            if suits is not None:
                await suits()
        except BackendError as error:
            self.failure = error
            await self.backend.aclose()
            if not error.retryable:
                raise
        except BaseException:
            await self.backend.aclose()
            raise
        else:
            self.open, self.silent, self.failure = True, False, None

    async def open_later(self, random: Random, suits: Callable[[], Awaitable[None]]) -> None:
        """Try again until it is open, or until it is clear that it never will take part."""
        pause, most = AGAIN
        while not self.open:
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, most)
            before = str(self.failure)
            try:
                await self.try_to_open(suits)
            except BackendError as error:
                # Somebody has to do something about it, and may.
                if str(error) != before:
                    log.warning("%r does not take part: %s", self, error)
            except ConfigError as error:
                log.error("%r will not take part: %s", self, error)  # noqa: TRY400 - where it was found is no news
                return
