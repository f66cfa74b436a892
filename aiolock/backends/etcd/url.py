"""The addresses of the members of an etcd cluster, its login and TLS: parsed without I/O."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Any

from aiolock.backends.urls import Form, Host, direct_tls, file, parse, tls_flag
from aiolock.errors import ConfigError, shorten

__all__ = ["Address", "parameters"]


@dataclass(frozen=True, slots=True)
class Address:
    """The members of a cluster, and how to log in."""

    text: str
    """The URL without its password."""
    hosts: tuple[Host, ...]
    user: str
    """Empty if the cluster has no authentication, or goes by the client's certificate."""
    password: str = field(repr=False)
    tls: ssl.SSLContext | None


def parameters(url: object, given: dict[str, Any]) -> Address:
    """Parse a URL and the options beside it. Raises :class:`ConfigError`, which never shows the password."""
    address = parse(_FORM, url, given)
    if address.path not in ("", "/"):
        raise ConfigError(
            f"etcd has no databases, so the address has no path {shorten(address.path)}: use namespace="
        )
    if bool(address.user) != bool(address.password):
        raise ConfigError(
            "etcd logs in with a user and a password: user:password@ in the address, or neither"
        )
    tls = direct_tls(address.options)
    if tls is not None:
        # gRPC needs HTTP/2, which is agreed on in the handshake.
        tls.set_alpn_protocols(["h2"])
    user = f"{address.user}@" if address.user else ""
    return Address(
        text=f"etcd://{user}{','.join(map(str, address.hosts))}",
        hosts=address.hosts,
        user=address.user,
        password=address.password or "",
        tls=tls,
    )


_FORM = Form(
    "etcd",
    "etcd://user:password@h1:2379,h2:2379,h3:2379",
    ("etcd",),
    2379,
    {"tls": tls_flag, "tls_ca": file, "tls_cert": file, "tls_key": file},
    several=True,
)
