"""Parse server addresses and their options: no I/O, and no message that repeats a password.

::

    scheme://user:password@host:port,host:port/path?option=value

A server describes its addresses in a :class:`Form`; :func:`parse` returns an :class:`Address` or raises
:class:`ConfigError` with what would be right. Text on the wrong side of a special character may be part of a password,
so messages name the position of a mistake, and quote only names of options and values that are no credentials."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unicodedata import normalize
from urllib.parse import parse_qsl, quote, unquote

from aiolock.backends.foreign_parameters import (
    PARTS,
    PRISMA,
    ForeignParameters,
    meaning_of,
    plain_name,
    scheme_of,
)
from aiolock.core.logs import Log, get_logger
from aiolock.errors import ConfigError, meant, shorten

__all__ = [
    "NAME_AUTHORITY",
    "QUOTE",
    "Address",
    "Form",
    "Host",
    "Reader",
    "absolute_path",
    "count",
    "direct_tls",
    "ended_by_peer",
    "file",
    "flag",
    "given_twice",
    "is_alert",
    "one_of",
    "optional_tls",
    "parse",
    "seconds",
    "text",
    "tls_context",
    "tls_flag",
    "tls_mode",
]

log: Log = get_logger("aiolock")

QUOTE = "write characters such as / ? # @ : in a user name or password as %2F %3F %23 %40 %3A"

NAME_AUTHORITY = "name the authority that signed the server's certificate with tls_ca=, and the server as its certificate does"

_HOST = re.compile(
    r"\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\](?::([0-9]{1,9}))?"
    r"|([^\[\]:/?#@\\,%\s\x00-\x1f\x7f-\x9f\ud800-\udfff]+)(?::([0-9]{1,9}))?"
)

Reader = Callable[[str, Any], Any]
"""Check and convert one option: its name, and its value as text from the URL or as given in Python."""


class Host(NamedTuple):
    """One server, by name or number."""

    name: str
    port: int

    @property
    def local(self) -> bool:
        """True if connections to it stay on this machine."""
        return self.name in ("127.0.0.1", "::1", "localhost")

    def __str__(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class Form:
    """The addresses and options of one kind of server."""

    server: str
    """The server's name in messages."""
    example: str
    schemes: tuple[str, ...]
    port: int
    """The default port; 0 if it depends on the options."""
    options: Mapping[str, Reader]
    """Options that may stand in the query of the URL or beside the URL."""
    beside: Mapping[str, Reader] = field(default_factory=dict)
    """Options that may stand only beside the URL: values that have no text form."""
    several: bool = False
    """True if hosts may be listed; then at least one is needed, unless it is ``hostless``."""
    hostless: bool = False
    """True if an address that names no host means this machine, although hosts may be listed."""
    repeats: bool = False
    """True if a host may be listed twice."""
    foreign: ForeignParameters = field(default_factory=dict)
    """The meanings of parameters of other programs' URLs for the same server."""
    alone: str = ""
    """Why it is one host, and what would be right; for an address that lists several."""
    reserved: str = "/[]"
    """Characters that must be percent-encoded in user name and password."""

    def error(self, why: str) -> ConfigError:
        """The error for a URL that is malformed; ``why`` quotes nothing of it."""
        return ConfigError(f"the address is not a URL of {self.server}: {why}, as in {self.example}; {QUOTE}")


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL and its options."""

    scheme: str
    user: str
    password: str | None = field(repr=False)
    """``None`` if the URL has no colon behind its user name."""
    hosts: tuple[Host, ...]
    """Empty if the URL names no host."""
    host_list: str
    """The hosts as the URL writes them."""
    path: str
    """The path as the URL writes it, percent-encoded, with its leading slash."""
    options: dict[str, Any] = field(repr=False)
    """The values that were given, checked and converted."""


def parse(form: Form, url: object, given: Mapping[str, Any]) -> Address:
    """Parse ``url`` and the options ``given`` beside it; ``None`` as a value means that the option is not given.

    Raises :class:`ConfigError`, never with a part of the password.
    """
    if not isinstance(url, str):
        raise ConfigError(
            f"the address of a {form.server} server must be a str such as {form.example!r}, not a {type(url).__name__}"
        )
    scheme, (_, _, rest) = scheme_of(url), url.partition("://")
    if scheme not in form.schemes:
        raise ConfigError(f"the scheme must be one of {', '.join(form.schemes)}, as in {form.example}")
    if "#" in rest:
        raise form.error("it contains a #")
    rest, _, query = rest.partition("?")
    if "@" in query:
        raise form.error("an @ stands behind a ?")
    # A password may contain what would end it in a correct URL: everything up to the last @ is taken for the login.
    login, _, rest = rest.rpartition("@") if rest[:1] != "/" else ("", "", rest)
    host_list, slash, path = rest.partition("/")
    many = form.several and (not form.hostless or "," in login + host_list)
    if set(form.reserved) & set(login) or (many and "@" in login):
        raise form.error("user name and password stand once, before the first host")
    name, colon, secret = login.partition(":")
    if "unix_socket" in form.options and (socket := _socket_in_query(host_list)):
        host_list, query = "", f"{query}&{socket}"
    options, parts = _options(form, query, given)
    if parts.get("host") == "" and host_list.lower() == "localhost":
        # As Prisma writes it where the query names a socket.
        host_list = ""
    user = _once("user", parts, _decoded(name)) or ""
    password = _once("password", parts, _decoded(secret) if colon else None)
    host_list = _once("host", parts, host_list) or ""
    if database := parts.get("database"):
        slash, path = "/", quote(_once("database", parts, path) or database, safe="")
    if "port" in parts:
        host_list = _with_ports(host_list, parts["port"])
    hosts = tuple(_hosts(form, host_list)) if host_list or (form.several and not form.hostless) else ()
    if len(set(hosts)) < len(hosts) and not form.repeats:
        raise ConfigError("a host is named twice in the address")
    return Address(
        scheme,
        user,
        password,
        hosts,
        ",".join(each.strip() for each in host_list.split(",")),
        slash + path,
        options,
    )


def _once(part: str, parts: Mapping[str, str], written: str | None) -> str | None:
    """Return a part of the address from the place where it is written, before the query or in it."""
    if part in parts and written:
        raise part_given_twice(part)
    return parts.get(part, written)


def _with_ports(host_list: str, ports: str) -> str:
    """Return hosts with the ports that the query has for them: one for all, or one for each."""
    hosts, each = host_list.split(","), ports.split(",")
    if len(each) not in {1, len(hosts)} or not all(_HOST.fullmatch(f"h:{port}") for port in each):
        raise ConfigError("port in the address must be a number, or as many of them as there are hosts")
    if any((match := _HOST.fullmatch(host.strip())) and (match[2] or match[4]) for host in hosts):
        raise part_given_twice("port")
    return ",".join(
        f"{host.strip() or 'localhost'}:{port}"
        for host, port in zip(hosts, each * (len(hosts) // len(each)), strict=True)
    )


def _hosts(form: Form, host_list: str) -> Iterable[Host]:
    if not form.several and form.alone and "," in host_list:
        raise ConfigError(f"the address lists several hosts: {form.alone}")
    for number, each in enumerate(host_list.split(",") if form.several else [host_list], 1):
        which = f"host {number}" if form.several else "its host"
        if not each.strip() or each.startswith(":"):
            raise form.error(f"{which} is missing: it names no host" if form.several else "it names no host")
        # Normalized as for a name resolution: a character that becomes a / or @ there would move the border of a password.
        match = _HOST.fullmatch(each.strip())
        if match is None or not _HOST.fullmatch(normalize("NFKC", each.strip())):
            raise form.error(f"{which} is no host and port")
        name, percent, zone = (match[1] or match[3]).partition("%")
        port = match[2] or match[4]
        if match[1] is not None and not _is_ipv6(name):
            raise form.error(f"{which} is no IPv6 address")
        if port is not None and not 0 < int(port) < 65536:
            raise form.error(f"{which} is no host and port from 1 to 65535")
        yield Host(name.lower() + percent + zone, form.port if port is None else int(port))


def _is_ipv6(name: str) -> bool:
    try:
        ipaddress.IPv6Address(name)
    except ValueError:
        return False
    return True


def _decoded(part: str) -> str:
    # The codec's error holds the password: this one is raised outside of its handler, and has no context.
    decoded: str | None
    try:
        decoded = unquote(part, errors="strict")
        decoded.encode()
    except UnicodeError:
        decoded = None
    if decoded is None:
        raise ConfigError("user name and password in the address must be UTF-8, percent-encoded")
    return decoded


def _options(form: Form, query: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options of the query and those beside the URL, and the parts of the address that stand in the query.

    An option by its own name counts, whatever parameters of other programs' URLs say about it.
    """
    found: dict[str, Any] = {}
    foreign: dict[str, tuple[str, str]] = {}
    pairs = parse_qsl(query, keep_blank_values=True)
    own_tls = given.get("tls") or ("tls" in form.options and dict(pairs).get("tls"))
    if given.get("unix_socket") is not None or any(_names_socket(*pair) for pair in pairs):
        own_tls = "off"
    for name, value in pairs:
        meaning = meaning_of(form.foreign, name, own_tls=own_tls)
        if name in form.options and not (meaning is not None and (name, value) == PRISMA):
            if name in found:
                raise given_twice(name)
            found[name] = value
        elif meaning is not None:
            _translate(form, foreign, name, meaning(name, value))
        else:
            raise ConfigError(
                f"{shorten(name)} is no parameter of a {form.server} URL; it has {', '.join(form.options) or 'none'}"
                f"{meant(name, form.options)}"
            )
    every = {**form.options, **form.beside}
    for name, value in given.items():
        if name not in every:
            raise ConfigError(
                f"{shorten(name)} is no option of {form.server}; it has {', '.join(every)}{meant(name, every)}"
            )
        if value is not None:
            if name in found:
                raise given_twice(name)
            found[name] = value
    # A host that is a path is the server's socket.
    hosts, source = foreign.get("host", ("", ""))
    if "unix_socket" in every and any(host.startswith("/") for host in hosts.split(",")):
        if "," in hosts:
            raise ConfigError(
                f"{source} in the address lists several places, and one of them is a socket: name one socket, or hosts alone"
            )
        foreign.setdefault("unix_socket", foreign.pop("host"))
    parts = {name: value for name, (value, _) in foreign.items() if name in PARTS}
    if "unix_socket" in foreign:
        parts["host"] = ""
    options = {name: value for name, (value, _) in foreign.items() if name not in PARTS} | found
    return {name: every[name](name, value) for name, value in options.items()}, parts


def _names_socket(name: str, value: str) -> bool:
    """Return whether a parameter says that the server is reached by a socket in the file system, where other clients use no TLS."""
    plain = plain_name(name)
    return plain in {"unixsocket", "unixsock"} or (plain == "host" and value.startswith("/"))


def _translate(
    form: Form, foreign: dict[str, tuple[str, str]], name: str, meaning: Mapping[str, str]
) -> None:
    """Add what a parameter means to ``foreign``, the values and the parameters that they come from by option."""
    if not meaning:
        log.debug("%s of a %s URL means nothing here, and is ignored", name, form.server)
    for option, value in meaning.items():
        before, source = foreign.get(option, (value, name))
        if option == "host" and option in foreign:
            # SQLAlchemy names each host in a parameter of its own.
            value = f"{before},{value}"
        elif before != value:
            raise ConfigError(f"{source} and {name} in the address contradict each other: leave one away")
        foreign[option] = value, name


def _socket_in_query(host_list: str) -> str:
    """Return the parameters that a percent-encoded path in place of a host becomes, and perhaps its port; empty for anything else."""
    if host_list[:3].upper() != "%2F":
        return ""
    folder, colon, port = host_list.rpartition(":")
    if not (colon and port.isdecimal()):
        return f"host={quote(unquote(host_list), safe='')}"
    return f"host={quote(unquote(folder), safe='')}&port={port}"


def given_twice(name: str) -> ConfigError:
    """The error for an option that the address gives twice, or that stands in the address and beside it."""
    return ConfigError(f"{name} is given twice; say it once, in the address or as an option")


def part_given_twice(name: str) -> ConfigError:
    """The error for a part of the address that stands at its place, and in a parameter."""
    return ConfigError(
        f"{name} is given twice, at its place in the address and as a parameter behind the ?: leave one of both away"
    )


# --- readers of options


def text(name: str, value: object) -> str:
    """Read text; it may be a password, and is not shown."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a str, not a {type(value).__name__}")
    return value


def file(name: str, value: object) -> str:
    """Read the name of a file, which is not opened."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(f"{name} must be the name of a file, not {shorten(value)}")
    return path


def flag(name: str, value: object) -> bool:
    """Read ``True``, ``False``, ``true`` or ``false``."""
    if isinstance(value, bool):
        return value
    if value not in ("true", "false"):
        raise ConfigError(f"{name} must be true or false, not {shorten(value)}")
    return value == "true"


def tls_flag(name: str, value: object) -> bool | ssl.SSLContext:
    """Read the option ``tls`` of a server whose connections are encrypted from their beginning, or not at all."""
    if isinstance(value, ssl.SSLContext):
        return value
    if isinstance(value, bool) or value in ("true", "false"):
        return flag(name, value)
    raise ConfigError(f"{name} must be true, false or an ssl.SSLContext, not {shorten(value)}")


def one_of(*choices: str) -> Callable[[str, object], str]:
    """Return a reader of one of these values."""

    def read(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            expected = ", ".join(choices)
            raise ConfigError(
                f"{name} must be {'one of ' if len(choices) > 1 else ''}{expected}, not {shorten(value)}"
            )
        return value

    return read


def absolute_path(what: str) -> Callable[[str, object], str]:
    """Return a reader of an absolute path, of ``what``."""

    def read(name: str, value: object) -> str:
        if not isinstance(value, str) or not value.startswith("/"):
            raise ConfigError(f"{name} must be {what}, not {shorten(value)}")
        return value

    return read


def seconds(low: float, high: float) -> Callable[[str, object], float]:
    """Return a reader of seconds from ``low`` to ``high``."""

    def read(name: str, value: object) -> float:
        try:
            number = float(value) if isinstance(value, str | int | float) else -1.0
        except (ValueError, OverflowError):
            number = -1.0
        if isinstance(value, bool) or not low <= number <= high:
            raise ConfigError(
                f"{name} must be a number of seconds from {low:g} to {high:g}, not {shorten(value)}"
            )
        return number

    return read


def count(low: int, high: int) -> Callable[[str, object], int]:
    """Return a reader of a whole number from ``low`` to ``high``."""

    def read(name: str, value: object) -> int:
        digits = "" if isinstance(value, bool) else str(value)
        if not re.fullmatch("[0-9]{1,9}", digits) or not low <= int(digits) <= high:
            raise ConfigError(f"{name} must be a number from {low} to {high}, not {shorten(value)}")
        return int(digits)

    return read


def tls_context(ca: str | None, cert: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """Return a context that verifies the server with ``ca`` (default: the system's), and shows it ``cert``.

    Raises :class:`ConfigError` if a file cannot be read.
    """
    if key is not None and cert is None:
        raise ConfigError("tls_key needs tls_cert: the certificate that this is the key of")
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:
        files = {"tls_ca": ca, "tls_cert": cert, "tls_key": key}
        shown = ", ".join(f"{name}={shorten(value)}" for name, value in files.items() if value is not None)
        raise ConfigError(f"{shown} cannot be read: {error}") from error
    return context


def ended_by_peer(error: BaseException) -> bool:
    """Return whether the other side ended a TLS connection, by an alert or without one.

    A server that demands a certificate of the client sends an alert and closes the connection. Which of both a client sees is chance.
    """
    if isinstance(error, ssl.SSLError):
        return isinstance(error, ssl.SSLEOFError) or is_alert(error)
    return isinstance(error, ConnectionResetError | ConnectionAbortedError | BrokenPipeError | EOFError)


def is_alert(error: BaseException) -> bool:
    """Return whether the other side of a TLS connection has said why it ended it."""
    return isinstance(error, ssl.SSLError) and "ALERT" in (getattr(error, "reason", None) or "").upper()


def direct_tls(options: dict[str, Any]) -> ssl.SSLContext | None:
    """Take ``tls`` (see :func:`tls_flag`) and the files of TLS out of ``options``; return their context, ``None`` without TLS.

    Raises :class:`ConfigError`.
    """
    tls = options.pop("tls", False)
    files = [options.pop(name, None) for name in ("tls_ca", "tls_cert", "tls_key")]
    if isinstance(tls, ssl.SSLContext):
        if any(files):
            raise ConfigError(
                "tls is an ssl.SSLContext: load what tls_ca, tls_cert and tls_key name into that"
            )
        return tls
    if any(files) and not tls:
        raise ConfigError("tls_ca, tls_cert and tls_key need tls=true")
    return tls_context(*files) if tls else None


def tls_mode(name: str, value: object) -> str | ssl.SSLContext:
    """Read the option ``tls`` of a server whose connections begin without it."""
    choices = "off", "encrypt", "verify"
    if isinstance(value, ssl.SSLContext) or (isinstance(value, str) and value in choices):
        return value
    raise ConfigError(
        f"{name} must be one of {', '.join(choices)}, or an ssl.SSLContext, not {shorten(value)}"
    )


def optional_tls(tls: str | ssl.SSLContext, ca: str | None, *, local: bool) -> ssl.SSLContext | None:
    """Return the context for ``tls`` off, encrypt (any certificate) or verify, or a context of the caller's; ``None`` is off.

    Raises :class:`ConfigError`.
    """
    if ca is not None and tls != "verify":
        raise ConfigError(
            "tls_ca is for tls=verify: an SSLContext brings its authorities with it, and other modes verify nothing"
        )
    if tls == "off":
        return None
    if local:
        raise ConfigError("a socket in the file system needs no TLS: leave one of unix_socket and tls away")
    if isinstance(tls, ssl.SSLContext):
        return tls
    context = tls_context(ca)
    if tls == "encrypt":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
