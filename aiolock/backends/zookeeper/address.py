"""The connect string: which servers, under which path, as whom, and with which options; parsed before anything else sees it."""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote

from aiolock.errors import ConfigError, shorten

__all__ = ["Address", "Host", "Options", "acceptable", "parse"]

PORT = 2181
TLS_PORT = 2281

_FORM = "zookeeper://user:password@h1:2181,h2:2181,[::1]:2181/chroot?session_timeout=10"
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff]|[^\u0000-\uffff]")
"""What ZooKeeper accepts in no path (a path is UTF-16 there, and surrogates are refused)."""


@dataclass(frozen=True, slots=True)
class Host:
    """One server, by name or number."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class Options:
    """What ``connect`` or the part of the URL after ``?`` says; seconds where it is a time."""

    session_timeout: float | None = None
    tick_time: float | None = None
    acl: str = "open"
    recipe: str = "queue"
    on_suspend: str = "hold"
    heartbeat: str = "sync"
    tls: bool | ssl.SSLContext = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """Where the ensemble is, and how to get in."""

    hosts: tuple[Host, ...]
    chroot: str
    """Without a slash at its end: empty is the root."""
    credentials: bytes | None
    """``user:password`` for digest authentication; never shown."""
    options: Options
    tls: ssl.SSLContext | None

    def __str__(self) -> str:
        user = "" if self.credentials is None else f"{self.credentials.decode().partition(':')[0]}:***@"
        return f"zookeeper://{user}{','.join(map(str, self.hosts))}{self.chroot}"

    __repr__ = __str__


def parse(url: object, **given: Any) -> Address:
    """Read a URL and the options beside it. Raises :class:`ConfigError`, which never shows the password."""
    if not isinstance(url, str) or not url.startswith("zookeeper://"):
        raise ConfigError(f"the address of a ZooKeeper must look like {_FORM}")
    place, _, query = url.removeprefix("zookeeper://").partition("?")
    # What stands on the wrong side of such a character may be a part of a password: nothing is quoted.
    if "#" in url:
        raise ConfigError("write a # in the address of a ZooKeeper as %23")
    if "@" in query:
        raise ConfigError("write a ? in a password as %3F, and an @ after the ? as %40")
    login, at, place = place.rpartition("@")
    if re.search("[@,/]", login):
        raise ConfigError(
            "user:password@ stands once, before the first host, for all of them: "
            "write @ , / in a password as %40 %2C %2F, and an @ in a path as %40"
        )
    hosts, slash, path = place.partition("/")
    options = _options(query, given)
    tls = _context(options)
    if options.acl == "creator" and not at and tls is None:
        raise ConfigError(
            "acl='creator' needs a creator: user:password@ in the address, or a TLS certificate"
        )
    return Address(
        hosts=tuple(_host(text.strip(), PORT if tls is None else TLS_PORT) for text in hosts.split(",")),
        chroot=_chroot(slash + path),
        credentials=_credentials(login) if at else None,
        options=options,
        tls=tls,
    )


def _credentials(login: str) -> bytes:
    user, colon, password = login.partition(":")
    if not user or not colon:
        raise ConfigError("digest authentication needs user:password@ in the address")
    try:
        user, password = unquote(user, errors="strict"), unquote(password, errors="strict")
        credentials = f"{user}:{password}".encode()
    except UnicodeError:
        # The cause would show what it could not read.
        raise ConfigError("user and password in the address must be UTF-8, percent-encoded") from None
    if ":" in user:
        raise ConfigError("a user of digest authentication has no colon in its name")
    return credentials


_HOST = re.compile(
    r"\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\](?::([0-9]{1,9}))?"
    r"|([^\[\]:\s/\x00-\x1f\x7f-\x9f\ud800-\udfff]+)(?::([0-9]{1,9}))?"
)


def _host(text: str, default: int) -> Host:
    match = _HOST.fullmatch(text)
    if match is None:
        # What stands after a colon and is no port may be a password whose @ is missing.
        shown = text if text.startswith("[") else text.partition(":")[0]
        raise ConfigError(
            f"the host that begins with {shorten(shown)} is none: write h1:2181,h2:2181 or [::1]:2181, as in {_FORM}"
        )
    name, port = match[1] or match[3], match[2] or match[4]
    if match[1] is not None:
        try:
            ipaddress.IPv6Address(name.partition("%")[0])
        except ValueError:
            raise ConfigError(f"{shorten(text)} is no IPv6 address") from None
    number = default if port is None else int(port)
    if not 0 < number < 65536:
        raise ConfigError(f"the port of {shorten(text)} must be between 1 and 65535")
    return Host(name, number)


def acceptable(path: str) -> bool:
    """Whether ZooKeeper accepts this as a path; empty is the root."""
    parts = path.split("/")
    return (
        parts[0] == ""
        and not any(part in ("", ".", "..") for part in parts[1:])
        and not _FORBIDDEN.search(path)
    )


def _chroot(path: str) -> str:
    path = unquote(path).rstrip("/")
    if not acceptable(path) or path.split("/")[1:2] == ["zookeeper"]:
        raise ConfigError(f"{shorten(path)} is no path that ZooKeeper accepts as a chroot")
    return path


def _options(query: str, given: dict[str, Any]) -> Options:
    values = {name: value for name, value in given.items() if value is not None}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in _READ:
            raise ConfigError(f"zookeeper:// has no parameter {shorten(name)}; it has {', '.join(_READ)}")
        if name in values:
            raise ConfigError(f"{name} is given twice: in the address and as an option")
        values[name] = _READ[name](name, text)
    options = Options(**values)
    for name in ("session_timeout", "tick_time"):
        seconds = getattr(options, name)
        if seconds is not None and not (_is_number(seconds) and 0.01 <= seconds <= 86_400):
            raise ConfigError(
                f"{name} must be a number of seconds from 0.01 to 86400, not {shorten(seconds)}"
            )
    for name, words in _WORDS.items():
        if getattr(options, name) not in words:
            raise ConfigError(
                f"{name} must be {' or '.join(map(repr, words))}, not {shorten(getattr(options, name))}"
            )
    return options


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} must be a number of seconds, not {shorten(text)}") from None


def _flag(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigError(f"{name} must be true or false, not {shorten(text)}")
    return text == "true"


def _text(_: str, text: str) -> str:
    return text


_WORDS = {
    "acl": ("open", "creator"),
    "recipe": ("queue", "simple"),
    "on_suspend": ("hold", "lost"),
    "heartbeat": ("sync", "write"),
}

_READ: dict[str, Callable[[str, str], Any]] = {
    "session_timeout": _seconds,
    "tick_time": _seconds,
    "acl": _text,
    "recipe": _text,
    "on_suspend": _text,
    "heartbeat": _text,
    "tls": _flag,
    "tls_ca": _text,
    "tls_cert": _text,
    "tls_key": _text,
}


def _context(options: Options) -> ssl.SSLContext | None:
    files = {name: getattr(options, name) for name in ("tls_ca", "tls_cert", "tls_key")}
    for name, file in files.items():
        if file is not None and not (isinstance(file, str) and file):
            raise ConfigError(f"{name} must be the name of a file in PEM, not {shorten(file)}")
    given = any(files.values())
    if isinstance(options.tls, ssl.SSLContext):
        if given:
            raise ConfigError(
                "tls is an ssl.SSLContext: load what tls_ca, tls_cert and tls_key name into that"
            )
        return options.tls
    if not isinstance(options.tls, bool):
        raise ConfigError(f"tls must be True, False or an ssl.SSLContext, not {shorten(options.tls)}")
    if not options.tls:
        if given:
            raise ConfigError("tls_ca, tls_cert and tls_key need tls=true")
        return None
    if options.tls_key is not None and options.tls_cert is None:
        raise ConfigError("tls_key needs tls_cert: the certificate that this is the key of")
    try:
        context = ssl.create_default_context(cafile=options.tls_ca)
        if options.tls_cert is not None:
            context.load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the files of tls_ca, tls_cert and tls_key cannot be used: {error}") from error
    return context
