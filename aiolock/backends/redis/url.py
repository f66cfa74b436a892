"""Server endpoints: where a Redis server is and how to log in, and questions to one or to several of them.

redis-py connects, does TLS, authenticates (also with a credential provider), selects the database and sets the name
of the connection. Then its transport is taken over, and redis-py sends no byte after that. Its timeouts, retries and
features that act by themselves are off, because only this library knows which requests may be repeated."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import redis
import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError

from aiolock.backends.dial import open_socket
from aiolock.backends.foreign_parameters import REDIS, REDISS, scheme_of
from aiolock.backends.redis.errors import from_driver
from aiolock.backends.urls import (
    QUOTE,
    Address,
    Form,
    Host,
    Reader,
    count,
    file,
    flag,
    given_twice,
    one_of,
    parse,
    seconds,
    text,
)
from aiolock.errors import BackendError, ConfigError, shorten

__all__ = [
    "BESIDE",
    "IN_URL",
    "REPLICAS",
    "SPOKEN",
    "Endpoint",
    "Verify",
    "credentials",
    "form_of",
]

Verify = Callable[[AbstractConnection], Awaitable[None]]
"""Use a connection before it is handed over, for example to check the server; may raise :class:`UnsafeBackend`."""

_DRIVERS = inspect.signature(AbstractConnection.__init__).parameters
"""Arguments that a connection of the installed redis-py takes: they differ from version to version."""
_FIXED: dict[str, Any] = {
    # RESP2 is enough, and has no pushes among the replies; redis-py before version 5 has no such argument.
    **({"protocol": 2} if "protocol" in _DRIVERS else {}),
    "socket_timeout": None,
    "socket_connect_timeout": None,
    "retry_on_timeout": False,
    "health_check_interval": 0,
    "decode_responses": False,
}
"""Arguments that this library sets, whatever the application's connections have."""
# None saves two commands of every connection, in which redis-py sends its name and version.
_NAMELESS = {name: None for name in ("driver_info", "lib_name", "lib_version") if name in _DRIVERS}
if "driver_info" in _NAMELESS:
    # It stands for the two older ones, which are deprecated beside it.
    _NAMELESS = {"driver_info": None}
_DROPPED = (
    "event_dispatcher",
    "himport_registry",
    "parser_class",
    "retry",
    "retry_on_error",
    "redis_connect_func",
)
_DROPPED_PREFIXES = ("maint", "orig_", "oss_cluster_")
"""Arguments, and their prefixes, of the application's connections that are not taken over."""

# --- options


def _database(_: str, value: object) -> int:
    digits = str(value)
    if isinstance(value, bool) or not digits.isascii() or not digits.isdigit():
        # Not repeated: behind a slash in a password it would be its other half.
        raise ConfigError(f"the database must be a number, as in redis://host:6379/0; {QUOTE}")
    return int(digits)


def _provider(name: str, value: object) -> object:
    if not hasattr(value, "get_credentials"):
        raise ConfigError(f"{name} must be a redis.credentials.CredentialProvider")
    return value


def _flag(name: str, value: object) -> bool:
    return flag(
        name, {"1": "true", "yes": "true", "0": "false", "no": "false"}.get(v := str(value).lower(), v)
    )


def _certificate(name: str, value: object) -> str:
    # By its name in the module ssl, as Celery has it.
    named = value.removeprefix("CERT_").lower() if isinstance(value, str) and value.isupper() else value
    return one_of("required", "optional", "none")(name, named)


MOST_PREFIX = 256
"""Most bytes of the prefix of keys that are shared with other libraries."""


def _prefix(name: str, value: object) -> str:
    given = text(name, value)
    if len(given.encode(errors="surrogatepass")) > MOST_PREFIX or not _encodes(given):
        raise ConfigError(
            f"{name} must be text of at most {MOST_PREFIX} bytes in UTF-8, not {shorten(given)}"
        )
    return given


def _encodes(given: str) -> bool:
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True


SPOKEN: Final[Mapping[str, Reader]] = {
    "dialect": one_of("aiolock", "plain"),
    "prefix": _prefix,
    "yield_to_foreign": seconds(0, 10),
}
"""Options of the format in which locks are written; see :mod:`aiolock.backends.redis.dialects`."""
REPLICAS: Final[Reader] = count(0, 100)
IN_URL: Final[Mapping[str, Reader]] = {
    "username": text,
    "password": text,
    "db": _database,
    "client_name": text,
    "ssl_ca_certs": file,
    "ssl_certfile": file,
    "ssl_keyfile": file,
    "ssl_cert_reqs": _certificate,
    "ssl_check_hostname": _flag,
    "replicas": REPLICAS,
    **SPOKEN,
}
"""Options that may stand in the query of an address."""
BESIDE: Final[Mapping[str, Reader]] = {"credential_provider": _provider}
_FORM = Form(
    "Redis",
    "redis://user:password@host:6379/0",
    ("redis", "rediss", "unix"),
    6379,
    IN_URL,
    BESIDE,
    foreign=REDIS,
    alone="a cluster is redis+cluster://, and Sentinels are redis+sentinel://",
)

E = TypeVar("E", bound="Endpoint")


def form_of(form: Form, url: object) -> Form:
    """Return the form of an address with what foreign parameters mean under its scheme: ``rediss`` has TLS already."""
    return (
        replace(form, foreign=REDISS)
        if isinstance(url, str) and scheme_of(url).startswith("rediss")
        else form
    )


class Endpoint:
    """A server's address, and everything that is needed to log in; no I/O before :meth:`connect`.

    :param url: ``redis://[user:password@]host:6379/0``, ``rediss://`` (TLS), ``unix:///path/to.sock?db=0``.
    :param options: those of ``IN_URL`` and ``BESIDE``.
    """

    address = ""
    """The URL without its password."""
    spoken: Mapping[str, Any] = {}
    """The options of the format of locks that were given."""
    moves = False
    """True if each connection may reach another server, which does not know everything that this one knew."""
    replicas: int = 0
    """The number of replicas that have to confirm a grant."""

    def __init__(self, url: str | None, **options: Any) -> None:
        address = parse(form_of(_FORM, url), url, options)
        self.replicas = address.options.pop("replicas", 0)
        if address.scheme != "unix":
            if not address.hosts and (address.user or address.password):
                raise _FORM.error("it names no host")
            host, port = address.hosts[0] if address.hosts else ("localhost", _FORM.port)
            kind = SSLConnection if address.scheme == "rediss" else Connection
            self._set(kind, credentials(address, address.path) | {"host": host, "port": port})
            return
        if address.host_list:
            raise ConfigError(
                f"the path of a socket begins with a slash, as in unix:///run/redis.sock; {QUOTE}"
            )
        path = unquote(address.path)
        if len(path) < 2:
            raise ConfigError("the address names no socket, as in unix:///run/redis.sock?db=0")
        self._set(UnixDomainSocketConnection, credentials(address, "") | {"path": path})

    @classmethod
    def of(cls, client: object) -> Endpoint:
        """Return the server of an application's ``redis.asyncio.Redis``: same address, user and TLS, other connections."""
        pool = getattr(client, "connection_pool", None)
        if _fake(type(client)) or _fake(getattr(pool, "connection_class", object)):
            raise ConfigError(
                "this is a client of fakeredis, which has no server that others could connect to: in tests, give connect() "
                "memory:// or the address of a real server"
            )
        if isinstance(client, redis.Redis | redis.RedisCluster):
            raise ConfigError(
                "this is the synchronous client of redis-py; hand over a redis.asyncio.Redis instead"
            )
        if isinstance(client, redis.asyncio.RedisCluster):
            raise ConfigError("this is a cluster's client; give connect() a redis+cluster:// address instead")
        if isinstance(client, Pipeline):
            raise ConfigError("this is a pipeline; hand over the redis.asyncio.Redis that made it instead")
        if not isinstance(client, redis.asyncio.Redis):
            raise ConfigError(
                f"client must be a redis.asyncio.Redis, not a {type(client).__name__}: give the address of the server instead"
            )
        pool = client.connection_pool
        if isinstance(pool, SentinelConnectionPool):
            raise ConfigError(
                "this is a Sentinel's client; give connect() a redis+sentinel:// address instead"
            )
        endpoint = cls.__new__(cls)
        endpoint._set(pool.connection_class, dict(pool.connection_kwargs))  # noqa: SLF001 - its own class
        return endpoint

    def elsewhere(self, kind: type[E], host: Host, **changed: Any) -> E:
        """Return the server at another host and port; account, database and TLS are the same but for what is ``changed``."""
        endpoint = kind.__new__(kind)
        endpoint._set(self._kind, self._kwargs | {"host": host.name, "port": host.port} | changed)  # noqa: SLF001 - its own class
        endpoint.replicas = self.replicas
        return endpoint

    def _set(self, kind: type[AbstractConnection], kwargs: dict[str, Any]) -> None:
        self._kind = kind
        self.spoken = {name: kwargs.pop(name) for name in SPOKEN if name in kwargs}
        self._greeting = kwargs.get("redis_connect_func")
        self._kwargs = {
            name: value
            for name, value in kwargs.items()
            if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
        } | _FIXED
        self._secret = str(kwargs.get("password") or "")
        self.tls = issubclass(kind, SSLConnection)
        self.local = issubclass(kind, UnixDomainSocketConnection)
        """True for a socket in the file system."""
        scheme = "unix" if self.local else "rediss" if self.tls else "redis"
        db = kwargs.get("db") or 0
        rest = (
            f"{kwargs.get('path', '')}?db={db}"
            if self.local
            else f"{Host(str(kwargs.get('host', 'localhost')), kwargs.get('port', 6379))}/{db}"
        )
        self.address = f"{scheme}://{self.user}{rest}"

    @property
    def user(self) -> str:
        """``user@`` as it stands in a URL, or nothing."""
        return f"{self._kwargs['username']}@" if self._kwargs.get("username") else ""

    def __str__(self) -> str:
        return self.address

    def __repr__(self) -> str:
        return f"<Endpoint {self.address}>"

    async def connect(
        self, timeout: float, protocol: asyncio.Protocol, verify: Verify | None = None
    ) -> asyncio.WriteTransport:
        """Connect, log in and PING; ``protocol`` receives what the server sends afterwards.

        Raises :class:`BackendUnavailable` or :class:`BackendRefused` within ``timeout`` seconds, and what ``verify`` raises.
        Cancelling it leaves no socket behind.
        """
        writers: list[asyncio.StreamWriter] = []
        try:
            async with asyncio.timeout(timeout):
                await self._log_in(writers, verify)
        except BaseException as error:
            for writer in writers:
                # Aborted, because closing waits for the peer.
                writer.transport.abort()
            if isinstance(error, Exception):
                # Ends in the next pass at the latest. asyncio would log an error of the socket that is not retrieved.
                await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
                if isinstance(error, BackendError):
                    error.args = (f"{self.address}: {error}",)
                    raise
                raise self._translated(error) from self._cause(error)
            raise
        transport = writers[0].transport
        transport.set_protocol(protocol)
        return transport

    async def ask(self, timeout: float, *arguments: str) -> Any:
        """Send one command on a connection of its own, and return the answer within ``timeout`` seconds.

        Raises :class:`BackendError`. Cancelling it leaves no socket behind.
        """
        answers: list[Any] = []

        async def ask(driver: AbstractConnection) -> None:
            await driver.send_command(*arguments)
            answers.append(await driver.read_response())

        (await self.connect(timeout, asyncio.Protocol(), ask)).abort()
        return answers[0]

    async def _log_in(self, writers: list[asyncio.StreamWriter], verify: Verify | None) -> None:
        """Connect and authenticate; take the streams from the driver as soon as they exist."""

        async def greet(driver: AbstractConnection) -> None:
            writer = driver._writer  # noqa: SLF001 - redis-py has no other way to hand a connection over
            assert writer is not None  # noqa: S101 - it has just connected
            writers.append(writer)
            if self._greeting is None:
                await driver.on_connect()
            elif inspect.isawaitable(greeted := self._greeting(driver)):
                await greeted

        driver = self._kind(**self._kwargs, retry=Retry(NoBackoff(), 0), redis_connect_func=greet)  # type: ignore[arg-type]  # parameters of its protocols have other names
        if isinstance(driver, Connection):
            await self._dial(driver)
        try:
            await driver.connect()  # type: ignore[no-untyped-call]
            await self._check_server(driver)
            if verify is not None:
                await verify(driver)
        finally:
            driver._reader = driver._writer = None  # noqa: SLF001 - else it warns about what it no longer owns
        # A collected writer closes its transport; in a forked child it would write to the parent's connection.
        writers[0].__class__ = _Silent

    async def _dial(self, driver: Connection) -> None:
        """Have the driver connect by a socket that leads to the first address of the host that answers."""
        arguments = {**driver._connection_arguments()}  # noqa: SLF001 - the driver has no other way to take a socket
        host = arguments.pop("host")
        opened = await open_socket(host, arguments.pop("port"))
        name = host if arguments.get("ssl") else None
        arguments = {"server_hostname": name} | arguments | {"sock": opened}
        driver._connection_arguments = lambda: arguments  # type: ignore[method-assign] # noqa: SLF001 - see above

    async def _check_server(self, driver: AbstractConnection) -> None:
        """Test that the server answers."""
        await driver.send_command("PING")
        # A refusal is an answer as well.
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
        """Return the driver's error, unless it or a cause of it contains the password."""
        link: BaseException | None = error
        while link is not None:
            if self._secret and self._secret in f"{link} {link.args!r}":
                return None
            link = link.__cause__ or link.__context__
        return error


def _fake(kind: type) -> bool:
    return any(cls.__module__.partition(".")[0] == "fakeredis" for cls in kind.__mro__)


class _Silent(asyncio.StreamWriter):
    """A writer that leaves its transport alone when it is collected."""

    def __del__(self) -> None:
        """Do nothing."""


def credentials(address: Address, path: str) -> dict[str, Any]:
    """The arguments of the driver for everything but the host: the options of an address and its database in ``path``.

    Raises :class:`ConfigError` for options that exclude each other.
    """
    given = dict(address.options)
    for name, value in (("username", address.user), ("password", address.password), ("db", path.strip("/"))):
        if value:
            if name in given:
                raise given_twice(name)
            given[name] = IN_URL[name](name, value)
    tls = address.scheme.startswith("rediss")
    for name in given:
        if name.startswith("ssl_") and not tls:
            raise ConfigError(f"{name} is for TLS: use a rediss:// address")
    if "credential_provider" in given and ("username" in given or "password" in given):
        raise ConfigError("a credential_provider brings user name and password, so give neither beside it")
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise ConfigError("ssl_keyfile needs the certificate that it belongs to, ssl_certfile")
    if tls:
        # Explicit, because it is not the default of redis-py before version 6.
        given.setdefault("ssl_check_hostname", given.get("ssl_cert_reqs") != "none")
    return _NAMELESS | given
