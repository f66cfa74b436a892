"""The connect string: parse servers, chroot, credentials and options of a ZooKeeper ensemble, without I/O."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from aiolock.backends.foreign_parameters import ZOOKEEPER
from aiolock.backends.urls import Form, Host, direct_tls, file, one_of, seconds, tls_flag
from aiolock.backends.urls import parse as parse_address
from aiolock.errors import ConfigError, shorten

__all__ = ["Address", "Host", "Options", "acceptable", "parse"]

PORT = 2181
TLS_PORT = 2281

_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff]|[^\u0000-\uffff]")
"""Characters that ZooKeeper accepts in no path (a path is UTF-16 there, and surrogates are refused)."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``connect`` and of the URL's query, without those of TLS; times are seconds."""

    session_timeout: float | None = None
    tick_time: float | None = None
    acl: str = "open"
    heartbeat: str = "sync"


@dataclass(frozen=True, slots=True)
class Address:
    """The servers of an ensemble, and how to log in."""

    text: str
    """The URL without its password."""
    hosts: tuple[Host, ...]
    chroot: str
    """The path of the root of all nodes, without a slash at its end; empty is the server's root."""
    credentials: bytes | None
    """``user:password`` for digest authentication; never shown."""
    options: Options
    tls: ssl.SSLContext | None

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


def parse(url: object, **given: Any) -> Address:
    """Parse a URL and the options beside it. Raises :class:`ConfigError`, which never shows the password."""
    address = parse_address(_FORM, url, given)
    tls = direct_tls(address.options)
    options = Options(**address.options)
    if options.acl == "creator" and not address.user and tls is None:
        raise ConfigError(
            "acl='creator' needs a creator: user:password@ in the address, or a TLS certificate"
        )
    if bool(address.user) != (address.password is not None) or ":" in address.user:
        raise ConfigError(
            "digest authentication needs user:password@ in the address, and no colon in the name of the user"
        )
    path = unquote(address.path).rstrip("/")
    if not acceptable(path) or path.split("/")[1:2] == ["zookeeper"]:
        raise ConfigError(f"{shorten(path)} is no path that ZooKeeper accepts as a chroot")
    port = PORT if tls is None else TLS_PORT
    hosts = tuple(host if host.port else host._replace(port=port) for host in address.hosts)
    user = f"{address.user}@" if address.user else ""
    return Address(
        text=f"zookeeper://{user}{','.join(map(str, hosts))}{path}",
        hosts=hosts,
        chroot=path,
        credentials=f"{address.user}:{address.password}".encode() if address.user else None,
        options=options,
        tls=tls,
    )


def acceptable(path: str) -> bool:
    """Return True if ZooKeeper accepts this as a path; empty is the root."""
    parts = path.split("/")
    return (
        parts[0] == ""
        and not any(part in ("", ".", "..") for part in parts[1:])
        and not _FORBIDDEN.search(path)
    )


_FORM = Form(
    "ZooKeeper",
    "zookeeper://user:password@h1:2181,h2:2181,[::1]:2181/chroot?session_timeout=10",
    ("zookeeper",),
    0,
    {
        "session_timeout": seconds(0.01, 86_400),
        "tick_time": seconds(0.01, 86_400),
        "acl": one_of("open", "creator"),
        "heartbeat": one_of("sync", "write"),
        "tls": tls_flag,
        "tls_ca": file,
        "tls_cert": file,
        "tls_key": file,
    },
    several=True,
    repeats=True,
    foreign=ZOOKEEPER,
    reserved="/,",
)
