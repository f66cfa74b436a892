"""Three Redis servers that are one, of which any can be hurt in every way, and looked at alone."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Self

import redis
import redis.asyncio

import aiolock
from aiolock import Client
from aiolock.backends.quorum import QuorumBackend
from aiolock.backends.quorum.rules import rotation
from aiolock.backends.redis import RedisBackend
from tests.faults.proxy import Proxy
from tests.faults.staging import until
from tests.servers import Redis

__all__ = ["AWAY", "REFUSES", "SERVERS", "SILENT", "Three", "server"]

SERVERS = 3
USERS = (
    "user default on nopass ~* &* +@all",
    "user admin on >admin ~* &* +@all",
    "user careful on >geheim ~* &* +@all",
)
"""Clients are the first, whose rights can be taken away; the second looks on, the third has a password to hide."""

SILENT = ("killed", "black-holed", "frozen")
REFUSES = ("read-only", "without rights", "full")
AWAY = (*SILENT, *REFUSES)
"""What may happen to a server, after which it decides about nothing."""


def server(**options: Any) -> Redis:
    """One of the three."""
    return Redis(users=USERS, **options)


class Three:
    """The servers, a way to each of them that can be cut, and somebody who sees everything."""

    def __init__(self, servers: list[Redis]) -> None:
        self.servers = servers
        self.namespace = f"q{secrets.token_hex(4)}"
        self.ways: list[Proxy] = []
        self.admins: list[redis.asyncio.Redis] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.ways = await self.more_ways()
        for one in self.servers:
            admin = redis.asyncio.Redis(port=one.port, username="admin", password="admin")
            self.admins.append(await self._stack.enter_async_context(admin))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()
        for one in self.servers:
            self._restore(one)

    @staticmethod
    def _restore(one: Redis) -> None:
        one.thaw()
        if not one.children[0].running:
            one.start()
        with redis.Redis(port=one.port, username="admin", password="admin") as admin:
            admin.execute_command("ACL", "SETUSER", *USERS[0].split(" ")[1:])
            admin.execute_command("REPLICAOF", "NO", "ONE")
            admin.config_set("maxmemory", 0)

    async def more_ways(self) -> list[Proxy]:
        """A way to each server, for some of the clients."""
        ways = [await self._stack.enter_async_context(Proxy("127.0.0.1", 1)) for _ in self.servers]
        # As connect() sorts a list of addresses.
        ways.sort(key=lambda way: str(way.port))
        for way, one in zip(ways, self.servers, strict=True):
            way.upstream = "127.0.0.1", one.port
        return ways

    # --- clients

    def urls(self, ways: list[Proxy] | None = None) -> list[str]:
        """What a worker connects to: the servers, in their order."""
        return [f"redis://127.0.0.1:{place.port}/0" for place in ways or self.servers]

    def client(self, ways: list[Proxy] | None = None, **options: Any) -> Client:
        """A client of all three, over its own ways or over those of everybody."""
        return self.of(*self.urls(ways or self.ways), **options)

    def of(self, *urls: str, **options: Any) -> Client:
        """A client of these servers, in this order."""
        settings = {"namespace": self.namespace, "ttl": 1.5, "command_timeout": 1.5, **options}
        return Client(QuorumBackend([RedisBackend(url) for url in urls]), **settings)

    @asynccontextmanager
    async def several(self, count: int, **options: Any) -> AsyncIterator[list[Client]]:
        """So many open clients."""
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(self.client(label=f"client {number}", **options))
                for number in range(count)
            ]

    @staticmethod
    def name(position: int, prefix: str = "x") -> str:
        """The name of a lock about which the server of that number decides."""
        return next(
            name for number in range(1000) if rotation(name := f"{prefix}{number}", SERVERS) == position
        )

    # --- accidents

    @asynccontextmanager
    async def away(self, how: str, number: int) -> AsyncIterator[None]:
        """One server is hurt for as long as this lasts."""
        one, way, admin = self.servers[number], self.ways[number], self.admins[number]
        if how == "killed":
            one.kill()
            yield
            one.start()
        elif how == "frozen":
            one.freeze()
            yield
            one.thaw()
        elif how == "black-holed":
            way.blackhole()
            yield
            way.heal(release=False)
            way.reset_all()
        elif how == "read-only":
            await admin.execute_command("REPLICAOF", "127.0.0.1", "1")
            yield
            await admin.execute_command("REPLICAOF", "NO", "ONE")
        elif how == "without rights":
            await admin.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")
            yield
            await admin.execute_command("ACL", "SETUSER", "default", "+@all")
        else:
            assert how == "full"
            await admin.config_set("maxmemory", 1)
            yield
            await admin.config_set("maxmemory", 0)

    # --- looking

    @asynccontextmanager
    async def alone(self, number: int, **options: Any) -> AsyncIterator[Client]:
        """A client of one of them, to whom a vote is a lock."""
        url = f"redis://admin:admin@127.0.0.1:{self.servers[number].port}"
        async with aiolock.connect(url, namespace=self.namespace, **options) as client:
            yield client

    async def nothing_is_left(self, *numbers: int) -> None:
        """Wait until neither a hold nor a place is left at these servers, or at any."""

        async def clean(client: Client) -> bool:
            return not await client.locks()

        for number in numbers or range(SERVERS):
            async with self.alone(number) as client:
                await until(partial(clean, client), f"nothing at server {number}")

    async def votes(self, name: str, *numbers: int) -> list[str]:
        """Who has a lock at each of the servers, '-' for nobody; seen by a plain client of each."""
        labels = []
        for number in numbers or range(SERVERS):
            async with self.alone(number) as client:
                holders = (await client.lock(name).inspect()).holders
            labels.append(",".join(holder.label for holder in holders) or "-")
        return labels

    async def commands(self, number: int) -> int:
        """How many commands of clients one of them has executed."""
        stats = await self.admins[number].info("commandstats")
        return sum(
            figures["calls"]
            for name, figures in stats.items()
            if name.startswith(("cmdstat_eval", "cmdstat_p"))
        )
