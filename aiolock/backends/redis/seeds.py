"""A cluster by the addresses of some of its nodes, and its nodes by the addresses that they tell of each other."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from redis.asyncio.connection import AbstractConnection

from aiolock.backends.redis.endpoint import QUOTE, Endpoint
from aiolock.backends.redis.slots import Place
from aiolock.errors import ConfigError

__all__ = ["SCHEMES", "NodeEndpoint", "Seeds"]

SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
"""Those of addresses of clusters, and of the connections that are made."""
PORT = 6379


class Seeds(Endpoint):
    """Where one asks who the nodes are; the account and TLS are the same for all of them.

    :param url: ``redis+cluster://[user:password@]host:7000,host:7001``, some nodes of the cluster, of which one has to
        answer. ``rediss+cluster://`` is TLS for all of them.
    :param options: those of :class:`Endpoint`.
    """

    __slots__ = ("seeds",)

    moves = True

    def __init__(self, url: str, **options: Any) -> None:
        scheme, _, rest = url.partition("://")
        place, mark, query = rest.partition("?")
        account, at, hosts_and_path = place.rpartition("@")
        hosts, _, db = hosts_and_path.partition("/")
        if not hosts:
            raise ConfigError(
                f"the address of a cluster names some of its nodes, as in redis+cluster://h1:7000,h2:7000; {QUOTE}"
            )
        if "@" in account:
            # As it is after a name and password before each of the hosts.
            raise ConfigError(f"name and password of the nodes stand once, before the first of them; {QUOTE}")
        kind = SCHEMES[scheme.lower()]
        super().__init__(f"{kind}://{account}{at}localhost/{db}{mark}{query}", **options)
        if self._kwargs.get("db"):
            raise ConfigError("a cluster has database 0 alone: leave the number out")
        names = [host.strip() for host in hosts.split(",")]
        self.seeds = [self.at(_place(kind, name)) for name in names]
        """Those that the address names."""
        if len({seed.address for seed in self.seeds}) < len(names):
            raise ConfigError("one of the nodes is named twice in the address")
        user = f"{self._kwargs['username']}@" if self._kwargs.get("username") else ""
        self.address = f"{scheme}://{user}{','.join(names)}"

    def at(self, place: Place) -> NodeEndpoint:
        """One node."""
        host, port = place
        node = NodeEndpoint.__new__(NodeEndpoint)
        node._set(self._kind, self._kwargs | {"host": host, "port": port})  # noqa: SLF001 - its own class
        node.host, node.node = host, None
        return node


class NodeEndpoint(Endpoint):
    """A node of a cluster, which says who it is."""

    __slots__ = ("host", "node")

    host: str
    node: str | None
    """Who answered last at that address: an address may be given to another node."""

    async def _look(self, driver: AbstractConnection) -> None:
        await super()._look(driver)
        await driver.send_command("CLUSTER", "MYID")
        answer = await driver.read_response()
        self.node = answer.decode() if isinstance(answer, bytes) else str(answer)


def _place(kind: str, host: str) -> Place:
    """A host and a port, of one of them."""
    try:
        parts = urlsplit(f"{kind}://{host}")
        port = parts.port
    except ValueError:
        port, parts = None, None
    if parts is None or not parts.hostname or set("/#@\\ ") & set(host):
        raise ConfigError("one of the addresses of nodes is no host and port, as h1:7000 is") from None
    return parts.hostname, PORT if port is None else port
