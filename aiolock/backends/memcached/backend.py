"""The memcached backend: one engine over rows for each server.

A session row lives on the server of the locks that name it, because only that server can prove, by the expiry of the item,
that a session was not renewed, and because a server that restarts, evicts or is away then concerns its own locks only. So
each server has an engine, a connection and sessions of its own, and a lock belongs to the one that its name chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from aiolock.backends.memcached.diagnosis import diagnose
from aiolock.backends.memcached.store import MemcachedStore
from aiolock.backends.memcached.url import choose, hosts_of
from aiolock.backends.rows.backend import RowBackend
from aiolock.backends.rows.claim import RowClaim, RowRegister
from aiolock.backends.urls import Host
from aiolock.core.backend import Claim, Renewal, Request, Settings
from aiolock.core.capabilities import Administration, Diagnosis, RegisterStore
from aiolock.core.tasks import start
from aiolock.errors import UnsafeBackend, forgets_arguments
from aiolock.types import Family, Finding, LockInfo

__all__ = ["MemcachedBackend"]

T = TypeVar("T")

FORGOTTEN = frozenset({"exclusion", "fencing", "no-eviction", "survives-restart"})
"""Capabilities that no server has which may forget a lock that is held."""


class _Server(RowBackend):
    """The locks of one server."""

    name = "memcached"

    def __init__(self, host: Host) -> None:
        self.host = host
        self.address = f"memcached://{host}"

    def make_store(self) -> MemcachedStore:
        """Return a store on the server."""
        return MemcachedStore(self.host)

    async def examine(self) -> list[Finding]:
        """Diagnose the server on a connection of its own."""
        return await diagnose(self.host, self.settings.command_timeout)


class MemcachedBackend(Administration, RegisterStore, Diagnosis):
    """The locks on one memcached server (1.6.13 or later), or shared out among several by their names.

    :param url: ``memcached://host:11211,host:11211``; it has no options.
    """

    name = "memcached"
    concurrency = RowBackend.concurrency
    renewal_lead = RowBackend.renewal_lead
    keeps_values = RowBackend.keeps_values

    @forgets_arguments
    def __init__(self, url: str) -> None:
        hosts = hosts_of(url)
        self.address = f"memcached://{','.join(map(str, hosts))}"
        self.servers = [_Server(host) for host in hosts]
        self._hosts = [str(host) for host in hosts]

    def _at(self, name: str, family: Family) -> _Server:
        """Return the server of a lock or register."""
        return self.servers[choose(self._hosts, f"{self.settings.namespace}/{family.value}/{name}")]

    async def _all(self, *work: Coroutine[Any, Any, T]) -> list[T]:
        """Do work on all servers at once; raise the first error when all have ended. Cancelling it cancels all."""
        done = await asyncio.gather(
            *(start(each, "aiolock-memcached") for each in work), return_exceptions=True
        )
        results: list[T] = []
        for each in done:
            if isinstance(each, BaseException):
                raise each
            results.append(each)
        return results

    def again(self) -> Self:
        """Return a backend for the next opening, whose tokens are above all that this one has seen."""
        other = super().again()
        other.servers = [server.again() for server in self.servers]
        return other

    def abandon(self) -> None:
        """Forget this opening: its sessions end by their ttl."""
        for server in self.servers:
            server.abandon()

    def bind(self, settings: Settings) -> None:
        """Make a store and an engine for each server."""
        super().bind(settings)
        for server in self.servers:
            server.events = self.events
            server.bind(settings)

    async def open(self) -> None:
        """Connect to all servers."""
        if missing := self.settings.require & FORGOTTEN:
            raise UnsafeBackend(
                f"{self.name} does not promise {', '.join(sorted(missing))}: it forgets locks when it restarts, and may when its "
                "memory is full; use another server for what must not happen twice"
            )
        try:
            await self._all(*(server.open() for server in self.servers))
        except BaseException:
            await self.aclose()
            raise
        self.capabilities = self.servers[0].capabilities

    async def settle(self, timeout: float) -> None:
        """Wait for the releases under way."""
        await self._all(*(server.settle(timeout) for server in self.servers))

    async def aclose(self) -> None:
        """End sessions, tasks and connections."""
        await self._all(*(server.aclose() for server in self.servers))

    def claim(self, request: Request) -> RowClaim:
        """Return a new claim, of any kind."""
        return self._at(request.name, request.kind.family).claim(request)

    def register(self, name: str, family: Family) -> RowRegister:
        """Return a view of a register."""
        return self._at(name, family).register(name, family)

    def renewal_group(self, claim: Claim) -> Hashable:
        """Return the server of a claim, and what it has in common with others there."""
        server = self._at(claim.request.name, claim.request.kind.family)
        return server.host, server.renewal_group(claim)

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Renew the claims of one group, which have one server."""
        request = claims[0].request
        return await self._at(request.name, request.kind.family).renew(claims)

    # --- administration

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Return the holders and the queue of a lock."""
        return await self._at(name, family).inspect(name, family)

    async def force_release(self, name: str, family: Family, token: int | None = None) -> bool:
        """End all holds of a lock, or that of a token."""
        return await self._at(name, family).force_release(name, family, token)

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Notify the holders of a lock."""
        return await self._at(name, family).request_release(name, family, reason)

    async def set_limit(self, name: str, limit: int) -> None:
        """Set the limit of a semaphore."""
        await self._at(name, Family.SEMAPHORE).set_limit(name, limit)

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Return the locks of this namespace on all servers."""
        found = await self._all(*(server.names(pattern) for server in self.servers))
        return sorted({each for names in found for each in names})

    async def empty(self) -> None:
        """Empty all servers."""
        await self._all(*(server.empty() for server in self.servers))

    async def diagnose(self) -> list[Finding]:
        """Return the findings of all servers."""
        found = await self._all(*(server.diagnose() for server in self.servers))
        if len(found) == 1:
            return found[0]
        return [
            replace(finding, text=f"{server.host}: {finding.text}")
            for server, findings in zip(self.servers, found, strict=True)
            for finding in findings
        ]
