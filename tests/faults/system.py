"""What a history run asks of every kind of server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiolock
from aiolock.testing.locks import all_can_be_had

__all__ = ["System"]


class System:
    """One private server, or several that are one for clients."""

    namespace = "history"
    lateness = 0.0
    """Seconds, beyond three ttls, after which every lock can be had at the end."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.busy = asyncio.Lock()
        """Held by whoever hurts the whole server."""
        self.replayed = 0
        self.foreign: list[str] = []
        """Replayed requests of nobody that changed somebody's hold."""

    @staticmethod
    def verified_within(ttl: float) -> float:
        """Seconds after which every holder has found out that the server lost its data; the page of the server says so."""
        return ttl / 3 + 0.25

    def overhear(self, direction: str, frame: bytes) -> None:
        """Nothing can be sent again: a request belongs to its session, or names the version that it replaces."""

    async def hygiene(self, names: Sequence[str], ttl: float) -> list[str]:
        """What is left after all workers have left: every lock can be had, and nobody holds or waits."""
        async with aiolock.connect(
            self.server.url, namespace=self.namespace, ttl=5, command_timeout=20
        ) as client:
            found = await all_can_be_had(client, names, 3 * ttl + self.lateness)
            return found + [f"hygiene: {info} is left" for info in await client.locks()]
