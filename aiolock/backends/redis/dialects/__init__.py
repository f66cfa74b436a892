"""Dialects: locks in the formats of other libraries, on the connections of the Redis backend.

Which one is spoken is an option of the address; :func:`backend_of` finds the backend for it.
"""

from __future__ import annotations

from typing import Any

from aiolock.backends.foreign_parameters import scheme_of
from aiolock.backends.redis.backend import RedisBackend
from aiolock.backends.redis.server import SingleServer
from aiolock.core.backend import Backend
from aiolock.errors import ConfigError, forgets_arguments

__all__ = ["backend_of"]


@forgets_arguments
def backend_of(url: str | None = None, **options: Any) -> Backend:
    """Return the backend for an address and its options, or for a ``client`` of redis-py's; no I/O.

    Raises :class:`ConfigError`.
    """
    cluster = url is not None and scheme_of(url).endswith("+cluster")
    if cluster:
        from aiolock.backends.redis.cluster.backend import ClusterBackend  # noqa: PLC0415 - few programs need it
        from aiolock.backends.redis.cluster.server import ClusterServer  # noqa: PLC0415 - few programs need it

        native: Any = ClusterBackend
        kind: Any = ClusterServer
    else:
        native, kind = RedisBackend, SingleServer
    first = kind(url, **options)
    servers = [first]

    def make() -> Any:
        # The first one is made already; another opening of the client has its own.
        return servers.pop() if servers else kind(url, **options)

    spoken = first.endpoint.spoken
    dialect = spoken.get("dialect", "aiolock")
    if dialect != "aiolock":
        if first.endpoint.replicas:
            raise ConfigError(
                f"replicas= is for this library's own locks: with dialect={dialect}, other libraries hold a lock that no replica has yet"
            )
        from aiolock.backends.redis.dialects.plain import PlainBackend  # noqa: PLC0415 - few programs need it

        return PlainBackend(make)
    if given := [name for name in spoken if name != "dialect"]:
        raise ConfigError(
            f"{', '.join(given)}: this is about locks that are shared with other libraries, as with dialect=plain; the keys "
            "of this library's own locks begin with namespace="
        )
    backend: Backend = native(make=make)
    return backend


# As a class of a backend has it: the registry checks the names of options by it.
backend_of.passed_on = RedisBackend.passed_on  # type: ignore[attr-defined]
