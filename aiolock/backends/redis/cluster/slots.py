"""Hash slots, and the seed addresses of a cluster."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Container
from typing import Any, NamedTuple

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection

from aiolock.backends.foreign_parameters import REDIS
from aiolock.backends.redis.url import BESIDE, IN_URL, Endpoint, credentials, form_of
from aiolock.backends.urls import Form, Host
from aiolock.backends.urls import parse as parse_address
from aiolock.errors import ConfigError

__all__ = [
    "SLOTS",
    "Layout",
    "NodeEndpoint",
    "Seeds",
    "key_in",
    "key_of",
    "parse",
    "redirection",
    "slot_of",
]

SLOTS = 16384


class Layout(NamedTuple):
    """The nodes of all slots, as reported by one node."""

    ranges: tuple[tuple[int, int, Host], ...]
    """First and last slot, and the primary; sorted."""
    replicas: tuple[tuple[Host, int], ...]
    """Number of replicas of each primary."""

    @property
    def primaries(self) -> tuple[Host, ...]:
        """Every primary, in the order of their slots."""
        return tuple(dict.fromkeys(host for _, _, host in self.ranges))

    @property
    def covered(self) -> int:
        """Number of slots that are served."""
        return sum(last - first + 1 for first, last, _ in self.ranges)

    def slots(self, host: Host) -> list[int]:
        """Return the slots of a primary."""
        return [
            slot for first, last, owner in self.ranges if owner == host for slot in range(first, last + 1)
        ]


def slot_of(key: bytes) -> int:
    """Return the hash slot of a key, by the part in braces if there is one."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1) if start >= 0 else -1
    return crc_hqx(key[start + 1 : end] if end > start + 1 else key, 0) % SLOTS


def key_of(command: bytes) -> bytes | None:
    """Return the key of an encoded command; ``None`` if it is not about one key."""
    words = command.split(b"\r\n", 9)
    if words[2] in {b"EVALSHA", b"EVAL"}:
        return words[8]
    return words[4] if words[2] == b"HMGET" else None


def key_in(slots: Container[int], prefix: str, start: int = 0) -> str:
    """Return a key in one of these slots, of which there must be at least one; another ``start`` may find another one."""
    number = start
    while crc_hqx(b"%d" % number, 0) % SLOTS not in slots:
        number += 1
    return f"{prefix}{{{number}}}"


def parse(reply: Any, asked: str) -> Layout:
    """Parse the answer to ``CLUSTER SLOTS`` of the node at the host ``asked``; raises :class:`ValueError`."""
    ranges, replicas = [], {}
    try:
        for first, last, primary, *others in reply:
            host = Host(_text(primary[0]) or asked, int(primary[1]))
            ranges.append((int(first), int(last), host))
            replicas[host] = len(others)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ValueError("this is no answer to CLUSTER SLOTS") from error
    return Layout(tuple(sorted(ranges)), tuple(sorted(replicas.items())))


def redirection(text: str, asked: str) -> tuple[int, Host] | None:
    """Return slot and host that ``MOVED 3999 host:port`` or ``ASK …`` names; ``None`` if it names none."""
    try:
        _, slot, address = text.split(" ")[:3]
        name, _, port = address.rpartition(":")
        return (int(slot), Host(_known(name) or asked, int(port))) if name != "?" else None
    except ValueError:
        return None


def _text(value: bytes | str | None) -> str:
    return _known(value.decode() if isinstance(value, bytes) else value or "")


def _known(name: str) -> str:
    # A node that does not know its name reports nothing, or a question mark.
    return "" if name == "?" else name


# --- seeds
# A cluster by the addresses of some of its nodes, and its nodes by the addresses that they report of each other.


_FORM = Form(
    "Redis",
    "redis+cluster://user:password@h1:7000,h2:7000",
    ("redis+cluster", "rediss+cluster"),
    6379,
    IN_URL,
    BESIDE,
    several=True,
    foreign=REDIS,
    reserved="/",
)


class Seeds(Endpoint):
    """The nodes that are asked for the layout; account and TLS are the same for all nodes.

    :param url: ``redis+cluster://[user:password@]host:7000,host:7001``, some nodes of the cluster, of which one has to
        answer. ``rediss+cluster://`` is TLS for all of them.
    :param options: those of :class:`Endpoint`.
    """

    moves = True

    def __init__(self, url: str, **options: Any) -> None:
        address = parse_address(form_of(_FORM, url), url, options)
        self.replicas = address.options.pop("replicas", 0)
        kind = SSLConnection if address.scheme == "rediss+cluster" else Connection
        self._set(kind, credentials(address, address.path))
        if self._kwargs.get("db"):
            raise ConfigError("a cluster has database 0 alone: leave the number out")
        self.seeds = [self.at(host) for host in address.hosts]
        """The nodes that the address names."""
        self.address = f"{address.scheme}://{self.user}{address.host_list}"

    def at(self, host: Host) -> NodeEndpoint:
        """Return the endpoint of one node."""
        node = self.elsewhere(NodeEndpoint, host)
        node.host, node.node = host.name, None
        return node


class NodeEndpoint(Endpoint):
    """A node of a cluster, which is asked for its id."""

    host: str
    node: str | None
    """Id of the node that answered last: an address may be given to another node."""

    async def _check_server(self, driver: AbstractConnection) -> None:
        await super()._check_server(driver)
        await driver.send_command("CLUSTER", "MYID")
        answer = await driver.read_response()
        self.node = answer.decode() if isinstance(answer, bytes) else str(answer)
