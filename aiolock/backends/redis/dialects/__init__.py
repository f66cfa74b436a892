"""Dialects: locks in the formats of other libraries, on the connections of the Redis backend.

Which one is spoken is an option of the address; :func:`backend_of` finds the backend for it.
"""

from __future__ import annotations

from typing import Any

from aiolock.backends.dialects import scheme_of
from aiolock.backends.redis.backend import RedisBackend
from aiolock.backends.redis.server import RedisServer, SingleServer
from aiolock.core.backend import Backend
from aiolock.errors import ConfigError, forgets_arguments

__all__ = ["backend_of"]


@forgets_arguments
def backend_of(url: str | None = None, **options: Any) -> Backend:
    """Return the backend for an address and its options, or for a ``client`` of redis-py's; no I/O.

    Raises :class:`ConfigError`.
    """
    cluster = url is not None and scheme_of(url).endswith("+cluster")
    spoken = _server(url, options, cluster=cluster).endpoint.spoken
    dialect = spoken.get("dialect", "aiolock")
    if dialect != "aiolock":
        from aiolock.backends.redis.dialects.plain import PlainBackend  # noqa: PLC0415 - few programs need it

        return PlainBackend(lambda: _server(url, options, cluster=cluster))
    if given := [name for name in spoken if name != "dialect"]:
        raise ConfigError(
            f"{', '.join(given)}: this is about locks that are shared with other libraries, as with dialect=plain; the keys "
            "of this library's own locks begin with namespace="
        )
    if cluster:
        from aiolock.backends.redis.cluster.backend import ClusterBackend  # noqa: PLC0415 - few programs need it

        return ClusterBackend(str(url), **options)
    return RedisBackend(url, **options)


def _server(url: str | None, options: dict[str, Any], *, cluster: bool) -> RedisServer:
    if cluster:
        from aiolock.backends.redis.cluster.server import ClusterServer  # noqa: PLC0415 - few programs need it

        return ClusterServer(str(url), **options)
    return SingleServer(url, **options)
