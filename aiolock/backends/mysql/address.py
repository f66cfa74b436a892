"""Where the server is and how to get in: from a URL and options, without I/O."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from aiolock.backends.mysql.driver import Driver
from aiolock.errors import ConfigError, shorten

__all__ = ["Address", "parameters"]

_QUOTE = "write characters such as / ? # @ : in a user name or password as %2F %3F %23 %40 %3A"
_TLS = ("off", "encrypt", "verify")


class Address:
    """A server, a database and credentials; made by :func:`parameters` and never shown with its password."""

    __slots__ = ("_kwargs", "text")

    def __init__(self, text: str, kwargs: dict[str, Any]) -> None:
        self.text = text
        self._kwargs = kwargs

    def __repr__(self) -> str:
        return f"<Address {self.text}>"

    @property
    def local(self) -> bool:
        """Whether connections stay on this machine."""
        return bool(self._kwargs["unix_socket"]) or self._kwargs["host"] in ("127.0.0.1", "::1", "localhost")

    @property
    def database(self) -> str:
        """The database in which the tables are."""
        return str(self._kwargs["db"])

    async def connect(self, ended: Callable[[], None]) -> Driver:
        """A connection that is logged in; raises what the driver raises, and leaves nothing behind if it does.

        Its settings are the server's: the first packet on it is `settings`.
        """
        driver = Driver(**self._kwargs)
        await driver.connect(ended)
        return driver


def parameters(
    url: object, options: dict[str, Any], known: tuple[str, ...]
) -> tuple[Address, dict[str, Any]]:
    """The address in a URL, and the other parameters of the URL together with ``options``.

    ``known`` are the names of those other parameters. Raises :class:`ConfigError`, never with a part of the password.
    """
    if not isinstance(url, str):
        raise ConfigError(f"the address must be a str such as 'mysql://user:pw@host/db', not {shorten(url)}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # Not chained: the text of this error may be a piece of a password.
        raise ConfigError(f"the address is not a URL; {_QUOTE}") from None
    if parts.fragment or "@" in parts.path or "@" in parts.query:
        raise ConfigError(f"the address is not a URL of MySQL; {_QUOTE}")
    given: dict[str, Any] = {}
    names = (*known, "tls", "tls_ca", "unix_socket")
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in names:
            raise ConfigError(f"{shorten(name)} is no parameter of a MySQL URL; there are {', '.join(names)}")
        if name in given:
            raise ConfigError(f"the address gives {name} twice")
        given[name] = value
    for name, value in options.items():
        if value is None:
            continue
        if name in given:
            raise ConfigError(f"{name} is in the address and an option as well; say it once")
        given[name] = value
    database = unquote(parts.path.strip("/"))
    if not database or "/" in database:
        raise ConfigError("the address must name a database, as in mysql://user:pw@host:3306/db")
    host = parts.hostname or "127.0.0.1"
    path = given.pop("unix_socket", None)
    if path is not None and (not isinstance(path, str) or not path.startswith("/")):
        raise ConfigError(f"unix_socket must be the path of a socket, not {shorten(path)}")
    context = _tls(given.pop("tls", "off"), given.pop("tls_ca", None), local=path is not None)
    user = unquote(parts.username) if parts.username else None
    kwargs = {
        "host": host,
        "port": 3306 if port is None else port,
        "user": user,
        # Servers keep passwords in UTF-8, and the driver sends one byte for each letter.
        "password": unquote(parts.password).encode().decode("latin-1") if parts.password else "",
        "db": database,
        "unix_socket": path,
        "ssl": context,
        "charset": "utf8mb4",
        # As the server has it: `settings` says what it is to be.
        "autocommit": None,
        "program_name": "aiolock",
    }
    place = path or (f"[{host}]" if ":" in host else host) + f":{kwargs['port']}"
    return Address(f"mysql://{f'{user}@' if user else ''}{place}/{database}", kwargs), given


def _tls(tls: object, ca: object, *, local: bool) -> ssl.SSLContext | None:
    if isinstance(tls, ssl.SSLContext):
        if ca is not None:
            raise ConfigError("an SSLContext brings its authorities with it, so give no tls_ca beside it")
        context = tls
    elif tls == "off":
        if ca is not None:
            raise ConfigError("tls_ca is for tls=verify")
        return None
    elif tls == "encrypt":
        if ca is not None:
            raise ConfigError("tls=encrypt looks at no certificate; tls_ca is for tls=verify")
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif tls == "verify":
        context = ssl.create_default_context()
        if ca is not None:
            try:
                context = ssl.create_default_context(cafile=Path(str(ca)))
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"tls_ca={shorten(str(ca))} cannot be read: {error}") from error
    else:
        raise ConfigError(f"tls must be one of {', '.join(_TLS)}, or an ssl.SSLContext, not {shorten(tls)}")
    if local:
        raise ConfigError("a socket in the file system needs no TLS: leave one of unix_socket and tls away")
    return context
