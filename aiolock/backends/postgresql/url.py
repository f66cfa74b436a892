"""Server addresses: where a PostgreSQL server is and how to log in, from a URL and options, without I/O."""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self
from urllib.parse import unquote

from aiolock.backends.foreign_parameters import POSTGRESQL
from aiolock.backends.sql import check_table
from aiolock.backends.urls import Form, Host, absolute_path, file, one_of, optional_tls, parse, tls_mode
from aiolock.errors import ConfigError

__all__ = ["Address", "parameters"]


def _table(_: str, value: object) -> str:
    table = check_table("postgresql", value)
    return table if "." in table else f"public.{table}"


def _creation(name: str, value: object) -> object:
    try:
        return one_of("auto", "check")(name, value)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; the schema of the table is a part of its name, as in table=app.aiolock"
        ) from None


_FORM = Form(
    "PostgreSQL",
    "postgresql://user:password@host:5432/database",
    ("postgresql",),
    5432,
    {
        "schema": _creation,
        "table": _table,
        "tls": tls_mode,
        "tls_ca": file,
        "unix_socket": absolute_path("the folder of the server's socket"),
        "failover": one_of("furthest"),
    },
    several=True,
    hostless=True,
    foreign=POSTGRESQL,
)


class _TLS(ssl.SSLObject):
    """TLS that ends without waiting for the server to confirm it: asyncio keeps the socket of a silent one open for 30 s."""

    def unwrap(self) -> None:
        with suppress(ssl.SSLWantReadError):
            super().unwrap()


@dataclass(frozen=True, slots=True)
class Address:
    """A server, a database and credentials; made by :func:`parameters` and never shown with its password."""

    text: str
    local: bool
    """True if connections stay on this machine."""
    arguments: dict[str, Any] = field(repr=False)
    """The arguments of the driver's ``connect``, with the password; of the first host, if there are several."""
    hosts: tuple[Host, ...] = ()
    """Servers of which one is the primary, if the address names several; see :func:`~aiolock.backends.postgresql.primary.find`."""

    @property
    def plain(self) -> bool | None:
        """True if connections go over a network without TLS; ``None`` if they go over a socket of this machine."""
        return None if self.arguments["host"].startswith("/") else not self.arguments["ssl"]

    def at(self, host: Host) -> Self:
        """Return the address of one of its hosts."""
        arguments = self.arguments | {"host": host.name, "port": host.port}
        text = f"postgresql://{arguments['user']}@{host}/{arguments['database']}"
        return replace(self, text=text, local=host.local, arguments=arguments, hosts=())


def parameters(url: object, given: dict[str, Any]) -> tuple[Address, dict[str, Any]]:
    """Parse a URL and the options given beside it: the address, and the other options with their values.

    Raises :class:`ConfigError`, never with a part of the password.
    """
    address = parse(_FORM, url, given)
    options = address.options
    database = unquote(address.path.strip("/"))
    if not database or "/" in database or "\0" in database:
        raise ConfigError(f"the address must name a database, as in {_FORM.example}")
    if not address.user or "\0" in address.user + (address.password or ""):
        raise ConfigError(f"the address must name a user, as in {_FORM.example}")
    folder = options.pop("unix_socket", None)
    tls = options.pop("tls", "off")
    context = optional_tls(tls, options.pop("tls_ca", None), local=folder is not None)
    if context is not None and context is not tls:
        context.sslobject_class = _TLS
    host = address.hosts[0] if address.hosts else Host("127.0.0.1", _FORM.port)
    arguments = {
        # Each is given, so that no environment variable, service file or password file of the driver has a say.
        "host": folder or host.name,
        "port": host.port,
        "user": address.user,
        "password": address.password or "",
        "database": database,
        "ssl": context if context is not None else False,
        "direct_tls": False,
        "target_session_attrs": "any",
        "server_settings": {"application_name": "aiolock"},
    }
    if folder is not None and len(address.hosts) > 1:
        raise ConfigError(
            "unix_socket is one server, and the address lists several hosts: leave one of both away"
        )
    hosts = address.hosts if len(address.hosts) > 1 else ()
    text = f"postgresql://{address.user}@{folder or ','.join(map(str, hosts)) or host}/{database}"
    local = folder is not None or all(each.local for each in hosts or [host])
    return Address(text, local, arguments, hosts), options
