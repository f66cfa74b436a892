"""The addresses of memcached servers: parse them, without I/O, and choose one of them by the name of a lock."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from aiolock.backends.urls import Form, Host, parse
from aiolock.errors import ConfigError, shorten

__all__ = ["choose", "hosts_of"]

_FORM = Form(
    "memcached",
    "memcached://10.0.0.1:11211,10.0.0.2:11211",
    ("memcached", "memcacheds"),
    11211,
    {},
    several=True,
)


def hosts_of(url: object) -> list[Host]:
    """Return the servers that ``url`` names, in an order that does not depend on theirs. Raises :class:`ConfigError`."""
    address = parse(_FORM, url, {})
    if address.scheme == "memcacheds":
        raise ConfigError(
            "memcached is reached without TLS, as memcached://: keep it in a private network, or use a server that is reached "
            "with TLS, such as rediss://"
        )
    if address.user or address.password is not None:
        raise ConfigError(
            "memcached:// has no user and no password: SASL and the authentication file of memcached are not supported; "
            "let only trusted machines reach the server"
        )
    if address.path not in ("", "/"):
        raise ConfigError(
            f"memcached has no databases, so the address has no path {shorten(address.path)}: use namespace="
        )
    return sorted(address.hosts)


def choose(hosts: Sequence[str], key: str) -> int:
    """Return the index of the host of a key: rendezvous hashing, by which one host more or less moves as few keys as possible.

    It depends on the spelling of the hosts, so that all clients have to name them alike.
    """
    if len(hosts) == 1:
        return 0
    weights = [blake2b(f"{host} {key}".encode(), digest_size=8).digest() for host in hosts]
    return weights.index(max(weights))
