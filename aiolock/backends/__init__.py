"""From the scheme of a URL to the backend behind it, imported only when it is asked for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from aiolock.contract import Backend
from aiolock.errors import ConfigError, MissingDriver, shorten

__all__ = ["from_url", "from_urls", "redact"]


class _Entry(NamedTuple):
    path: str
    """Where the class is, as ``module:class``."""
    extra: str = ""
    """What installs it."""
    independent: bool = False
    """Whether several of such servers can make a quorum: each decides alone."""
    hosts: bool = False
    """Whether its addresses list hosts: Python takes such a URL for broken if one but the first is IPv6."""


_REDIS = _Entry("aiolock.backends.redis:RedisBackend", "redis", independent=True)
_CLUSTER = _Entry("aiolock.backends.redis.cluster:ClusterBackend", "redis", hosts=True)
_MYSQL = _Entry("aiolock.backends.mysql:MySQLBackend", "mysql")

SCHEMES = {
    "memory": _Entry("aiolock.backends.memory:MemoryBackend", independent=True),
    "redis": _REDIS,
    "rediss": _REDIS,
    "redis+sentinel": _REDIS._replace(independent=False, hosts=True),
    "rediss+sentinel": _REDIS._replace(independent=False, hosts=True),
    "redis+cluster": _CLUSTER,
    "rediss+cluster": _CLUSTER,
    "redis+unix": _REDIS,
    "unix": _REDIS,
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "zookeeper": _Entry("aiolock.backends.zookeeper:ZooKeeperBackend", "zookeeper", hosts=True),
}

_QUORUM = _Entry("aiolock.backends.quorum:QuorumBackend")

GROUP = "aiolock.backends"
"""Entry points of this group add schemes: their name is the scheme, their value a class like those above."""


def redact(url: str) -> str:
    """A URL as it may be shown: without its password."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        scheme, rest = "", url
    # A password may contain what would end it in a correct URL: everything up to the last @ may belong to it.
    user, at, place = rest.rpartition("@")
    if at and ":" in user:
        user = user.partition(":")[0] + ":***"
    place, question, query = place.partition("?")
    return scheme + mark + user + at + place + (question + "…" if query else "")


def from_url(url: object, options: dict[str, Any]) -> Backend:
    """The backend for ``url``, without I/O; ``options`` are the backend's own.

    Raises :class:`ConfigError` for what is not known, :class:`MissingDriver` with the command that helps.
    """
    if not isinstance(url, str):
        raise ConfigError(
            f"the address of a server must be a str such as 'redis://127.0.0.1', not {shorten(url)}"
        )
    scheme = _scheme(url)
    if scheme is None:
        # Outside of the handler: the error that it handles quotes the URL, and would stay in reach as __context__.
        raise ConfigError(f"{shorten(redact(url))} is not a URL: look at its brackets and special characters")
    external = _external() if scheme not in SCHEMES else {}
    if scheme in external:
        cls = external[scheme].load()
    elif scheme in SCHEMES and "://" in url:
        cls = _load(SCHEMES[scheme])
    else:
        known = ", ".join(f"{name}://" for name in sorted({*SCHEMES, *external}))
        raise ConfigError(f"{shorten(redact(url))} names no backend; known are {known}")
    _check_options(scheme, cls, options)
    backend = cls(url, **options)
    if not isinstance(backend, Backend):
        raise ConfigError(f"{cls!r}, registered for {scheme}://, is not a Backend")
    return backend


def from_urls(urls: Sequence[object], options: dict[str, Any]) -> Backend:
    """The quorum of the servers at ``urls``, in an order that does not depend on how they are listed; without I/O.

    Raises what :func:`from_url` raises, and :class:`ConfigError` for what can be no quorum.
    """
    places = [_place(url) for url in urls]
    if len(set(places)) < len(places):
        raise ConfigError("a quorum is made of independent servers: one of these is named twice")
    backends = [from_url(url, options) for _, url in sorted(zip(places, urls, strict=True))]
    cls = _load(_QUORUM)
    quorum: Backend = cls(backends)
    return quorum


def _place(url: object) -> str:
    """Where a server of a quorum is, without who asks."""
    scheme, mark, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    entry = SCHEMES.get(scheme)
    if not mark or (entry is not None and not entry.independent):
        fit = ", ".join(sorted(f"{name}://" for name, one in SCHEMES.items() if one.independent))
        shown = shorten(redact(url)) if isinstance(url, str) else shorten(url)
        raise ConfigError(f"{shown} cannot be one server of a quorum; such are {fit}")
    host, _, path = rest.rpartition("@")[2].partition("?")[0].partition("/")
    if scheme in {"redis", "rediss"}:
        # The same written in another way.
        host, path = host.lower().removesuffix(":6379"), path.removesuffix("0")
    return f"{host}/{path}"


def _scheme(url: str) -> str | None:
    """What is before the ``://``; ``None`` if the rest is no URL."""
    scheme = url.partition("://")[0]
    if scheme in SCHEMES and SCHEMES[scheme].hosts:
        return scheme
    try:
        return urlsplit(url).scheme
    except ValueError:
        return None


def _external() -> dict[str, Any]:
    # Takes as long to import as everything else here, and is for other people's backends alone.
    from importlib.metadata import entry_points  # noqa: PLC0415

    return {point.name: point for point in entry_points(group=GROUP)}


def _check_options(scheme: str, cls: Any, options: dict[str, Any]) -> None:
    parameters = inspect.signature(cls).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    unknown = [name for name in options if name not in known]
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ConfigError(
            f"{scheme}:// has no option {', '.join(unknown)}; it has {', '.join(known) or 'none of its own'}, "
            "and every server has namespace, ttl, on_loss, label, require, command_timeout"
        )


def _load(entry: _Entry) -> Any:
    module, _, name = entry.path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        # Whatever is not ours comes with the extra: the driver, or something that it stands on.
        package = (error.name or "aiolock").partition(".")[0]
        if not entry.extra or package == "aiolock":
            raise
        raise MissingDriver(package, entry.extra) from error
