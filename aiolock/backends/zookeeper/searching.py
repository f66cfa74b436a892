"""Finding a server that works: all of the ensemble's in random order, each for a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

from aiolock.backends.zookeeper.address import Host
from aiolock.backends.zookeeper.connecting import Refused
from aiolock.backends.zookeeper.resolving import Resolver

__all__ = ["Attempt", "Search", "Unheard"]

Attempt = Callable[[Host, str, float], Awaitable[bool]]
"""Tries one address of a host for so many seconds: whether it ended with a connected session."""


class Search:
    """What is known of the servers of one address.

    ``attempt`` raises what went wrong, :class:`Unheard` if the server took the connection and was silent.
    """

    def __init__(self, hosts: tuple[Host, ...], random: Random, attempt: Attempt) -> None:
        self._hosts = hosts
        self._random = random
        self._resolver = Resolver(random)
        self._attempt = attempt
        self.silent: Host | None = None
        """Which server has last left a heartbeat unanswered."""
        self.refused = False
        """Whether a server that could be reached refused us, when all were last tried."""
        self.unheard = False
        """Whether a server took our connection and said nothing, when all were last tried."""
        self.error: BaseException | None = None
        """The last reason for which an attempt failed."""

    async def once(self, seconds: float) -> bool:
        """Try all of them within about so many seconds, until one works; whether one does. Never raises of itself."""
        limit = max(0.3, seconds / len(self._hosts))
        self.refused = self.unheard = False
        # Whoever was silent comes last: trying it again may cost what is left of the deadline.
        shuffled = self._random.sample(self._hosts, len(self._hosts))
        for host in sorted(shuffled, key=lambda host: host == self.silent):
            try:
                async with asyncio.timeout(limit):
                    addresses = await self._resolver.resolve(host)
            except (OSError, TimeoutError) as error:
                self.error = error
                continue
            for where in addresses:
                try:
                    if await self._attempt(host, where, limit):
                        return True
                except Unheard as error:
                    self.error, self.unheard = error, True
                except Refused as error:
                    self.error, self.refused = error, True
                except Exception as error:  # noqa: BLE001 - whatever a stranger answers, the next one is tried
                    self.error = error
        return False


class Unheard(TimeoutError):
    """A server took the connection and did not answer in time."""
