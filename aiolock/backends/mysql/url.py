"""Server addresses: where a MySQL server is and how to log in, from a URL and options, without I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from aiolock.backends.foreign_parameters import MYSQL
from aiolock.backends.mysql.protocol import Driver
from aiolock.backends.sql import check_table
from aiolock.backends.urls import (
    Form,
    Host,
    absolute_path,
    count,
    file,
    one_of,
    optional_tls,
    parse,
    tls_mode,
)
from aiolock.errors import ConfigError

__all__ = ["Address", "parameters"]


_FORM = Form(
    "MySQL",
    "mysql://user:password@host:3306/database",
    ("mysql",),
    3306,
    {
        "mode": one_of("lease", "session", "row"),
        "schema": one_of("auto", "manual"),
        "table": lambda _, value: check_table("mysql", value),
        "connections": count(1, 10_000),
        "tls": tls_mode,
        "tls_ca": file,
        "unix_socket": absolute_path("the path of a socket"),
    },
    foreign=MYSQL,
    alone="name the server that takes writes, or the name at which it is always found",
)


@dataclass(frozen=True, slots=True)
class Address:
    """A server, a database and credentials; made by :func:`parameters` and never shown with its password."""

    text: str
    database: str
    """The database that holds the tables."""
    local: bool
    """True if connections stay on this machine."""
    arguments: dict[str, Any] = field(repr=False)
    """The arguments of the driver, with the password."""

    @property
    def plain(self) -> bool | None:
        """True if connections go over a network without TLS; ``None`` if they go over a socket of this machine."""
        return None if self.arguments["unix_socket"] is not None else self.arguments["ssl"] is None

    async def connect(self, ended: Callable[[], None]) -> Driver:
        """Log in and return the connection; ``ended`` is called when it ends. Raises errors of the driver.

        Its settings are the server's: the first packet on it is `settings`. Cancelling it, like an error, leaves
        nothing behind.
        """
        driver = Driver(**self.arguments)
        await driver.connect(ended)
        return driver


def parameters(url: object, given: dict[str, Any]) -> tuple[Address, dict[str, Any]]:
    """Parse a URL and the options given beside it: the address, and the other options with their values.

    Raises :class:`ConfigError`, never with a part of the password.
    """
    address = parse(_FORM, url, given)
    options = address.options
    database = unquote(address.path.strip("/"))
    if not database or "/" in database:
        raise ConfigError(f"the address must name a database, as in {_FORM.example}")
    path = options.pop("unix_socket", None)
    context = optional_tls(options.pop("tls", "off"), options.pop("tls_ca", None), local=path is not None)
    host = address.hosts[0] if address.hosts else Host("127.0.0.1", _FORM.port)
    local = path is not None or host.local
    arguments = {
        "host": host.name,
        "port": host.port,
        "user": address.user or None,
        # Servers keep passwords in UTF-8, and the driver sends one byte for each letter.
        "password": (address.password or "").encode().decode("latin-1"),
        "db": database,
        "unix_socket": path,
        "ssl": context,
        "charset": "utf8mb4",
        # As the server has it: `settings` sets it.
        "autocommit": None,
        "program_name": "aiolock",
    }
    user = f"{address.user}@" if address.user else ""
    return Address(f"mysql://{user}{path or host}/{database}", database, local, arguments), options
