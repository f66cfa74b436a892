"""The addresses of the members of an etcd cluster, its login and TLS: parsed without I/O."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Any

from aiolock.backends.urls import Form, Host, file, given_twice, parse, tls_context, tls_flag
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
    if len(set(address.hosts)) < len(address.hosts):
        raise given_twice("a member")
    if bool(address.user) != bool(address.password):
        raise ConfigError(
            "etcd logs in with a user and a password: user:password@ in the address, or neither"
        )
    user = f"{address.user}@" if address.user else ""
    return Address(
        text=f"etcd://{user}{','.join(map(str, address.hosts))}",
        hosts=address.hosts,
        user=address.user,
        password=address.password or "",
        tls=_context(address.options),
    )


_FORM = Form(
    "etcd",
    "etcd://user:password@h1:2379,h2:2379,h3:2379",
    ("etcd",),
    2379,
    {"tls": tls_flag, "tls_ca": file, "tls_cert": file, "tls_key": file},
    several=True,
)


def _context(options: dict[str, Any]) -> ssl.SSLContext | None:
    tls = options.get("tls", False)
    files = options.get("tls_ca"), options.get("tls_cert"), options.get("tls_key")
    if isinstance(tls, ssl.SSLContext):
        if any(files):
            raise ConfigError(
                "tls is an ssl.SSLContext: load what tls_ca, tls_cert and tls_key name into that"
            )
        context = tls
    elif tls:
        context = tls_context(*files)
    elif any(files):
        raise ConfigError("tls_ca, tls_cert and tls_key need tls=true")
    else:
        return None
    # gRPC needs HTTP/2, which is agreed on in the handshake.
    context.set_alpn_protocols(["h2"])
    return context
