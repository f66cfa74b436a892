"""The address of a MongoDB replica set, its login and TLS: parsed without I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from aiolock.backends.foreign_parameters import MONGODB
from aiolock.backends.urls import Form, Host, file, flag, parse, text, tls_context
from aiolock.errors import ConfigError, shorten

__all__ = ["Address", "parameters"]

_PART = re.compile(r"[A-Za-z0-9_-]{1,63}")


@dataclass(frozen=True, slots=True)
class Address:
    """Members of a replica set, a collection of it, and how to log in."""

    text: str
    """The URL without its password and its query."""
    hosts: tuple[Host, ...]
    database: str
    collection: str
    arguments: dict[str, Any] = field(repr=False)
    """Arguments of the driver: those of the login, the set and TLS."""


def parameters(url: object, given: dict[str, Any]) -> Address:
    """Parse a URL and the options beside it. Raises :class:`ConfigError`, which never shows the password."""
    address = parse(_FORM, url, given)
    if address.scheme == "mongodb+srv":
        raise ConfigError(
            "mongodb+srv:// is not supported, because members are not looked up in the DNS: name them, as in "
            f"{_FORM.example}&tls=true"
        )
    database = unquote(address.path.strip("/"))
    if not _PART.fullmatch(database):
        raise ConfigError(
            f"the address must name a database of letters, digits, _ and -, as in {_FORM.example}"
        )
    if database == "local":
        raise ConfigError("the database local is not replicated, each member has its own: name another one")
    if bool(address.user) != bool(address.password):
        raise ConfigError(
            "MongoDB logs in with a user and a password: user:password@ in the address, or neither"
        )
    options = dict(address.options)
    if options.get("directConnection") and len(address.hosts) > 1:
        raise ConfigError("directConnection=true keeps to one member: name that one alone, or leave it out")
    collection = options.pop("collection", "aiolock")
    user = f"{address.user}@" if address.user else ""
    login = {"username": address.user, "password": address.password, "authSource": database}
    return Address(
        text=f"mongodb://{user}{','.join(map(str, address.hosts))}/{database}",
        hosts=address.hosts,
        database=database,
        collection=collection,
        arguments={**(login if user else {}), **_tls(options), **options},
    )


def _tls(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of TLS away; return them as the driver has them."""
    tls, ca, cert = options.pop("tls", False), options.pop("tls_ca", None), options.pop("tls_cert", None)
    if not tls:
        if ca or cert:
            raise ConfigError("tls_ca and tls_cert need tls=true")
        return {}
    tls_context(ca, cert)  # refuses what cannot be read; the driver makes its own
    files = {"tlsCAFile": ca, "tlsCertificateKeyFile": cert}
    return {"tls": True, **{name: path for name, path in files.items() if path is not None}}


def _name(name: str, value: object) -> str:
    if not isinstance(value, str) or not _PART.fullmatch(value):
        raise ConfigError(f"{name} must be 1 to 63 letters, digits, _ and -, not {shorten(value)}")
    return value


def _filled(name: str, value: object) -> str:
    if not (filled := text(name, value)):
        raise ConfigError(f"{name} must be a name, not empty; leave it out if there is none to give")
    return filled


_FORM = Form(
    "MongoDB",
    "mongodb://user:password@h1:27017,h2:27017,h3:27017/database?replicaSet=rs0",
    ("mongodb", "mongodb+srv"),
    27017,
    {
        "replicaSet": _filled,
        "authSource": _filled,
        "directConnection": flag,
        "collection": _name,
        "tls": flag,
        "tls_ca": file,
        "tls_cert": file,
    },
    several=True,
    foreign=MONGODB,
)
