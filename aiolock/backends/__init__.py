"""Registry of backends: find the class for the scheme of a URL, and import it only then."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiolock.core.backend import Backend
from aiolock.errors import ConfigError, MissingDriver, clear_locals, meant, redact, shorten

if TYPE_CHECKING:
    # The import takes as long as all others of this module together, and only backends of other packages need it.
    from importlib.metadata import EntryPoint

__all__ = ["from_url", "from_urls", "redact"]


class _Entry(NamedTuple):
    path: str
    """The class, or a function that returns its instance, as ``module:name``."""
    extra: str = ""
    """The extra of the package that installs its driver."""
    independent: bool = False
    """True if several such servers can form a quorum: each decides alone."""


_REDIS = _Entry("aiolock.backends.redis.dialects:backend_of", "redis", independent=True)
_POSTGRESQL = _Entry("aiolock.backends.postgresql:PostgreSQLBackend", "postgresql")
_MYSQL = _Entry("aiolock.backends.mysql:MySQLBackend", "mysql")
_MEMCACHED = _Entry("aiolock.backends.memcached:MemcachedBackend")
_ETCD = _Entry("aiolock.backends.etcd:EtcdBackend", "etcd")
_MONGODB = _Entry("aiolock.backends.mongodb:MongoDBBackend", "mongodb")

SCHEMES = {
    "memory": _Entry("aiolock.backends.memory:MemoryBackend", independent=True),
    "redis": _REDIS,
    "rediss": _REDIS,
    "redis+sentinel": _REDIS._replace(independent=False),
    "rediss+sentinel": _REDIS._replace(independent=False),
    "redis+cluster": _REDIS._replace(independent=False),
    "rediss+cluster": _REDIS._replace(independent=False),
    "unix": _REDIS,
    "mysql": _MYSQL,
    "sqlite": _Entry("aiolock.backends.sqlite:SqliteBackend"),
    "memcached": _MEMCACHED,
    "memcacheds": _MEMCACHED,
    "etcd": _ETCD,
    "mongodb": _MONGODB,
    "mongodb+srv": _MONGODB,
    "postgresql": _POSTGRESQL,
    "zookeeper": _Entry("aiolock.backends.zookeeper:ZooKeeperBackend", "zookeeper"),
}

_PRIVATE = {"mysql+rows": _Entry("aiolock.backends.mysql.rows_backend:MySQLRowsBackend", "mysql")}
"""Schemes for the tests of what is not done yet."""

_CLIENTS = {"valkey": "valkey-py", "coredis": "coredis"}
"""Clients of a Redis or Valkey that cannot be handed over, by their package."""

_QUORUM = _Entry("aiolock.backends.quorum:QuorumBackend")

EVERY = (
    *("namespace", "ttl", "timeout", "on_loss", "label", "require"),
    *("command_timeout", "wait_for_server", "lazy"),
)
"""Options of :func:`aiolock.connect` for every server."""

GROUP = "aiolock.backends"
"""Entry points of this group add schemes: the name is the scheme in lower case, the value a subclass of :class:`Backend`.
Those above cannot be replaced. Provisional until 1.0."""


def from_url(url: object, options: dict[str, Any]) -> Backend:
    """Return the backend for ``url``, without I/O; ``options`` are the backend's own. A client of redis-py's serves as well.

    Raises :class:`ConfigError` for an unknown scheme, option or value, and :class:`MissingDriver` with the command that
    installs the driver.
    """
    if any(cls.__module__.partition(".")[0] == "redis" for cls in type(url).__mro__):
        cls = _load(_REDIS)
        _check_options("redis", cls, options)
        handed_over: Backend = cls(client=url, **options)
        return handed_over
    if (other := _CLIENTS.get(type(url).__module__.partition(".")[0])) is not None:
        raise ConfigError(
            f"this is a client of {other}, and connections are made with redis-py, which serves Valkey as well: give the address of "
            "the server, such as 'redis://127.0.0.1:6379/0', or a redis.asyncio.Redis"
        )
    if not isinstance(url, str):
        raise ConfigError(
            f"the address of a server must be a str such as 'redis://127.0.0.1', not a {type(url).__name__}"
        )
    from aiolock.backends.foreign_parameters import ALIASES, scheme_of  # noqa: PLC0415

    scheme = scheme_of(url)
    others = _others() if scheme and scheme not in SCHEMES.keys() | _PRIVATE.keys() else {}
    if scheme in others:
        cls = _load_other(scheme, others[scheme])
    elif (entry := SCHEMES.get(scheme) or _PRIVATE.get(scheme)) is not None:
        cls = _load(entry)
    else:
        # Those of other libraries are taken as well, and are no news to those who have them.
        known = sorted({*SCHEMES, "mariadb", "valkey", "valkeys", *others})
        raise ConfigError(
            f"{shorten(redact(url))} names no backend; known are {', '.join(f'{name}://' for name in known)}"
            f"{meant(scheme, [*SCHEMES, *ALIASES, *others], '://') if scheme else ''}"
        )
    _check_options(scheme, cls, options)
    try:
        backend: Backend = cls(url, **options)
    except BaseException as error:
        # The class of another package, which has the URL among its local variables as those of this one do.
        clear_locals(error.__traceback__, cls.__module__)
        raise
    return backend


def from_urls(urls: Sequence[object], options: dict[str, Any]) -> Backend:
    """Return the quorum of the servers at ``urls``, in an order that does not depend on their order; without I/O.

    Raises what :func:`from_url` raises, and :class:`ConfigError` if the servers cannot form a quorum.
    """
    servers = [_server(url) for url in urls]
    if len(set(servers)) < len(servers):
        raise ConfigError("a quorum is made of independent servers: one of these is named twice")
    backends = [from_url(url, options) for _, url in sorted(zip(servers, urls, strict=True))]
    if dialect := next((backend.dialect for backend in backends if backend.dialect), None):
        raise ConfigError(
            f"dialect={dialect} is for one server: other libraries that lock on several need not meet a lock on a majority of "
            "these; give one address, or leave the dialect away"
        )
    cls = _load(_QUORUM)
    quorum: Backend = cls(backends)
    return quorum


def _server(url: object) -> str:
    """Return the host and path of a server of a quorum, without the account."""
    from aiolock.backends.foreign_parameters import scheme_of  # noqa: PLC0415

    scheme, rest = (scheme_of(url), url.partition("://")[2]) if isinstance(url, str) else ("", "")
    entry = SCHEMES.get(scheme)
    if not scheme or (entry is not None and not entry.independent):
        fit = ", ".join(sorted(f"{name}://" for name, one in SCHEMES.items() if one.independent))
        shown = shorten(redact(url)) if isinstance(url, str) else f"a {type(url).__name__}"
        raise ConfigError(f"{shown} cannot be one server of a quorum; such are {fit}")
    host, _, path = rest.rpartition("@")[2].partition("?")[0].partition("/")
    if scheme in {"redis", "rediss"}:
        # Two spellings of the same server.
        host, path = host.lower().removesuffix(":6379"), path.removesuffix("0")
    return f"{host}/{path}"


def _others() -> dict[str, list[EntryPoint]]:
    """Return the entry points of other packages by scheme."""
    from importlib.metadata import entry_points  # noqa: PLC0415

    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def _load_other(scheme: str, points: Sequence[EntryPoint]) -> type[Backend]:
    """Return the class that another package registered. Raises :class:`ConfigError`, which names that package."""
    packages = [f"{point.dist.name} {point.dist.version}" if point.dist else point.value for point in points]
    if len(points) > 1:
        raise ConfigError(
            f"{scheme}:// is registered by several packages, {' and '.join(sorted(packages))}: uninstall all but one"
        )
    what = f"{scheme}:// is registered by {packages[0]} as {points[0].value}, which"
    try:
        cls = points[0].load()
    except Exception as error:
        raise ConfigError(f"{what} cannot be loaded: {error!r}") from error
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise ConfigError(f"{what} is {shorten(cls)}, not a subclass of aiolock.core.backend.Backend")
    if inspect.isabstract(cls):
        raise ConfigError(f"{what} lacks {', '.join(sorted(cls.__abstractmethods__))}")
    return cls


def _check_options(scheme: str, cls: Any, options: dict[str, Any]) -> None:
    parameters = inspect.signature(cls).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    if passed_on := getattr(cls, "passed_on", None):
        # A client stands in the place of an address: the class says so itself.
        known = [*(name for name in known if name != "client"), *passed_on(scheme)]
    unknown = [name for name in options if name not in known and name != "client"]
    if unknown and (passed_on or not any(each.kind is each.VAR_KEYWORD for each in parameters)):
        raise ConfigError(
            f"connect() has no option {', '.join(unknown)}; it has {', '.join(EVERY)}, and for {scheme}:// "
            f"{', '.join(known) or 'none more'}{meant(unknown[0], [*EVERY, *known])}"
        )


def _load(entry: _Entry) -> Any:
    module, _, name = entry.path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        # A module of another package comes with the extra: the driver, or a dependency of the driver.
        package = (error.name or "aiolock").partition(".")[0]
        if not entry.extra or package == "aiolock":
            raise
        raise MissingDriver(package, entry.extra) from error
