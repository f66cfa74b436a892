"""Where the server is and how to get in: from a URL, or from an application's own client.

redis-py connects, does TLS, authenticates (also with a credential provider), selects the database and sets the name
of the connection. Then its connection is taken over: what comes back is a bare transport, and every byte after that
is ours. Its timeouts, retries and features that act by themselves are off, because only we know what may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError

from aiolock.backends.redis.format import Verify
from aiolock.backends.redis.replies import from_driver
from aiolock.errors import BackendError, ConfigError, UnsafeBackend, shorten

__all__ = ["QUOTE", "Endpoint"]

_TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
_IN_URL = ("username", "password", "db", "client_name", *_TLS)
_OPTIONS = (*_IN_URL, "credential_provider")
_CERT_REQS = ("required", "optional", "none")

QUOTE = "write characters such as / ? # @ : in a user name or password as %2F %3F %23 %40 %3A"

_DRIVERS = inspect.signature(AbstractConnection.__init__).parameters
"""What a connection of the installed redis-py takes: it differs from version to version."""
_OURS: dict[str, Any] = {
    # RESP2, because nothing of RESP3 is needed here and pushes would only have to be told from replies; before redis-py 5
    # there was nothing else.
    **({"protocol": 2} if "protocol" in _DRIVERS else {}),
    "socket_timeout": None,
    "socket_connect_timeout": None,
    "retry_on_timeout": False,
    "health_check_interval": 0,
    "decode_responses": False,
}
# None saves two commands of every connection, in which redis-py says its name and version.
_NAMELESS = {name: None for name in ("driver_info", "lib_name", "lib_version") if name in _DRIVERS}
if "driver_info" in _NAMELESS:
    # It stands for the two older ones, which are deprecated beside it.
    _NAMELESS = {"driver_info": None}
_NOT_OURS = (
    "event_dispatcher",
    "himport_registry",
    "parser_class",
    "retry",
    "retry_on_error",
    "redis_connect_func",
)
_NOT_OURS_EITHER = ("maint", "orig_", "oss_cluster_")


class Endpoint:
    """An address with everything that is needed to be let in; no I/O before :meth:`connect`."""

    __slots__ = ("_greeting", "_kind", "_kwargs", "_secret", "address", "local", "tls")

    moves = False
    """Whether the server may be another one, which does not know all that this one knew, whenever we connect."""

    def __init__(self, url: str | None, **options: Any) -> None:
        if not isinstance(url, str):
            raise ConfigError(
                f"the address of a Redis server must be a str such as 'redis://127.0.0.1', not {shorten(url)}"
            )
        self._set(*_from_url(url, options))

    @classmethod
    def of(cls, client: object) -> Endpoint:
        """The server of an application's own ``redis.asyncio.Redis``: same address, user, TLS; connections of our own."""
        if isinstance(client, redis.Redis | redis.RedisCluster):
            raise ConfigError(
                "this is the synchronous client of redis-py; hand over a redis.asyncio.Redis instead"
            )
        if isinstance(client, redis.asyncio.RedisCluster):
            raise ConfigError("this is a cluster's client; give connect() a redis+cluster:// address instead")
        if not isinstance(client, redis.asyncio.Redis):
            raise ConfigError(f"client must be a redis.asyncio.Redis, not a {type(client).__name__}")
        pool = client.connection_pool
        if isinstance(pool, SentinelConnectionPool):
            raise ConfigError(
                "this is a Sentinel's client; give connect() a redis+sentinel:// address instead"
            )
        endpoint = cls.__new__(cls)
        endpoint._set(pool.connection_class, dict(pool.connection_kwargs))  # noqa: SLF001 - its own class
        return endpoint

    def _set(self, kind: type[AbstractConnection], kwargs: dict[str, Any]) -> None:
        self._kind = kind
        self._greeting = kwargs.get("redis_connect_func")
        self._kwargs = {
            name: value
            for name, value in kwargs.items()
            if name not in _NOT_OURS and not name.startswith(_NOT_OURS_EITHER)
        } | _OURS
        self._secret = str(kwargs.get("password") or "")
        self.tls = issubclass(kind, SSLConnection)
        self.local = issubclass(kind, UnixDomainSocketConnection)
        """Whether it is a socket in the file system."""
        scheme = "unix" if self.local else "rediss" if self.tls else "redis"
        user = f"{kwargs['username']}@" if kwargs.get("username") else ""
        if self.local:
            place, db = str(kwargs.get("path", "")), f"?db={kwargs.get('db') or 0}"
        else:
            host = str(kwargs.get("host", "localhost"))
            place = f"[{host}]:" if ":" in host else f"{host}:"
            place, db = place + str(kwargs.get("port", 6379)), f"/{kwargs.get('db') or 0}"
        self.address = f"{scheme}://{user}{place}{db}"
        """The URL without its password."""

    def __str__(self) -> str:
        return self.address

    def __repr__(self) -> str:
        return f"<Endpoint {self.address}>"

    async def connect(
        self, timeout: float, protocol: asyncio.Protocol, verify: Verify | None = None
    ) -> asyncio.WriteTransport:
        """A connection on which the server has just answered a PING; from now on ``protocol`` hears what comes.

        Raises :class:`BackendUnavailable` or :class:`BackendRefused` within ``timeout`` seconds, and what ``verify`` raises.
        Cancelling it leaves no socket behind.
        """
        writers: list[asyncio.StreamWriter] = []
        try:
            async with asyncio.timeout(timeout):
                await self._log_in(writers, verify)
        except BaseException as error:
            for writer in writers:
                # Not closed in good order: that could take long where nobody answers.
                writer.transport.abort()
            if isinstance(error, Exception):
                # In the next pass at the latest. An error of the socket that nobody looks at is one that asyncio logs.
                await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
                if isinstance(error, UnsafeBackend):
                    error.args = (f"{self.address}: {error}",)
                    raise
                raise self._translated(error) from self._cause(error)
            raise
        transport = writers[0].transport
        transport.set_protocol(protocol)
        return transport

    async def _log_in(self, writers: list[asyncio.StreamWriter], verify: Verify | None) -> None:
        """Connect and greet; the streams are taken from the driver as soon as they exist."""

        async def greet(driver: AbstractConnection) -> None:
            writer = driver._writer  # noqa: SLF001 - redis-py has no other way to hand a connection over
            assert writer is not None  # noqa: S101 - it has just connected
            writers.append(writer)
            if self._greeting is None:
                await driver.on_connect()
            elif inspect.isawaitable(greeted := self._greeting(driver)):
                await greeted

        driver = self._kind(**self._kwargs, retry=Retry(NoBackoff(), 0), redis_connect_func=greet)  # type: ignore[arg-type]  # parameters of its protocols have other names
        try:
            await driver.connect()  # type: ignore[no-untyped-call]
            await self._look(driver)
            if verify is not None:
                await verify(driver)
        finally:
            driver._reader = driver._writer = None  # noqa: SLF001 - else it warns about what it no longer owns
        # Else the writer would close the transport when it is collected; in a forked child that would speak to the
        # server in its parent's name.
        writers[0].__class__ = _Silent

    async def _look(self, driver: AbstractConnection) -> None:
        """See that the server answers."""
        await driver.send_command("PING")
        # A user who may not do it is answered as well, which is all that was asked.
        with contextlib.suppress(NoPermissionError):
            await driver.read_response()

    def _translated(self, error: Exception) -> BackendError:
        found = from_driver(error, tls=self.tls, local=self.local)
        text = str(found)
        if self._secret and self._secret in text:
            text = "the server's answer repeats the password, so it is not shown"
        found.args = (f"{self.address}: {text}",)
        return found

    def _cause(self, error: BaseException) -> BaseException | None:
        """The driver's error, unless it or what led to it has the password in its text."""
        link: BaseException | None = error
        while link is not None:
            if self._secret and self._secret in f"{link} {link.args!r}":
                return None
            link = link.__cause__ or link.__context__
        return error


class _Silent(asyncio.StreamWriter):
    """A writer whose end is nobody's business."""

    def __del__(self) -> None:
        """Do nothing."""


def _from_url(url: str, options: Mapping[str, Any]) -> tuple[type[AbstractConnection], dict[str, Any]]:
    """Which kind of connection, and with what; messages never repeat parts of a URL that may be a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # Not chained: the text of this error may be a piece of a password.
        raise ConfigError(f"the address is not a URL; {QUOTE}") from None
    if parts.fragment or "@" in parts.query:
        raise ConfigError(f"the address is not a URL of Redis; {QUOTE}")
    given: dict[str, Any] = {}
    if parts.username:
        given["username"] = unquote(parts.username)
    if parts.password:
        given["password"] = unquote(parts.password)
    kwargs: dict[str, Any] = {}
    if parts.scheme in {"unix", "redis+unix"}:
        kind: type[AbstractConnection] = UnixDomainSocketConnection
        kwargs["path"] = _socket_path(parts)
    else:
        if parts.scheme not in {"redis", "rediss"}:
            raise ConfigError(
                f"the scheme must be redis, rediss (TLS), unix or redis+unix, not {shorten(parts.scheme)}"
            )
        kind = SSLConnection if parts.scheme == "rediss" else Connection
        if "@" in parts.path or (parts.netloc and not parts.hostname):
            raise ConfigError(f"the address names no host, as in redis://host:6379/0; {QUOTE}")
        kwargs["host"] = parts.hostname or "localhost"
        kwargs["port"] = 6379 if port is None else port
        if path := parts.path.strip("/"):
            given["db"] = path
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _IN_URL:
            raise ConfigError(
                f"{shorten(name)} is no parameter of a Redis URL; there are {', '.join(_IN_URL)}"
            )
        if name in given:
            raise ConfigError(f"the address gives {name} twice")
        given[name] = value
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ConfigError(f"{shorten(name)} is no option of Redis; there are {', '.join(_OPTIONS)}")
        if value is None:
            continue
        if name in given:
            raise ConfigError(f"{name} is in the address and an option as well; say it once")
        given[name] = value
    return kind, kwargs | _NAMELESS | _checked(given, tls=kind is SSLConnection)


def _socket_path(parts: SplitResult) -> str:
    if parts.netloc and not parts.netloc.endswith("@"):
        raise ConfigError(f"the path of a socket begins with a slash, as in unix:///run/redis.sock; {QUOTE}")
    path = unquote(parts.path)
    if len(path) < 2:
        raise ConfigError("the address names no socket, as in unix:///run/redis.sock?db=0")
    return path


def _checked(given: dict[str, Any], *, tls: bool) -> dict[str, Any]:
    for name in _TLS:
        if name in given and not tls:
            raise ConfigError(f"{name} is for TLS: use a rediss:// address")
    if given.get("credential_provider") is not None:
        if "username" in given or "password" in given:
            raise ConfigError(
                "a credential_provider brings user name and password, so give neither beside it"
            )
        if not hasattr(given["credential_provider"], "get_credentials"):
            raise ConfigError("credential_provider must be a redis.credentials.CredentialProvider")
    if "db" in given:
        given["db"] = _database(given["db"])
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise ConfigError("ssl_keyfile needs the certificate that it belongs to, ssl_certfile")
    if given.get("ssl_cert_reqs", "required") not in _CERT_REQS:
        raise ConfigError(f"ssl_cert_reqs must be one of {', '.join(_CERT_REQS)}")
    if "ssl_check_hostname" in given:
        given["ssl_check_hostname"] = _flag("ssl_check_hostname", given["ssl_check_hostname"])
    elif tls:
        # Said, because it is not the default of redis-py before version 6.
        given["ssl_check_hostname"] = given.get("ssl_cert_reqs") != "none"
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in given:
            given[name] = os.fspath(given[name])
    for name in ("username", "password", "client_name"):
        if name in given and not isinstance(given[name], str):
            raise ConfigError(f"{name} must be a str")
    return given


def _database(value: object) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit():
        # Not repeated: behind a slash in a password it would be its other half.
        raise ConfigError(f"the database must be a number, as in redis://host:6379/0; {QUOTE}")
    return int(text)


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in {"true", "True", "1", "yes"}:
        return True
    if value in {"false", "False", "0", "no"}:
        return False
    raise ConfigError(f"{name} must be true or false")
