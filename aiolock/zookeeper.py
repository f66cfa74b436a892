"""Fenced writes to data in ZooKeeper itself, which only the present holder of a lock can make.

A lease's node lives as long as its hold. So a transaction that checks for that node and writes is fencing without a token:
the ensemble carries out both or none, also for a holder that was stopped and woke up late. :func:`fenced_set` does that
through the lease's client; :func:`node` is for transactions through kazoo or any other client.
"""

from __future__ import annotations

from aiolock.core.capabilities import FencedNode
from aiolock.errors import ConfigError, UnsupportedKind, shorten
from aiolock.lease import Lease, hold_of

__all__ = ["fenced_set", "node"]


async def fenced_set(lease: Lease, path: str, data: bytes, *, version: int | None = None) -> int | None:
    """Replace the data of a node, if ``lease`` is still held as the ensemble sees it.

    :param lease: of a client of ``zookeeper://``; any kind of lock.
    :param path: the absolute path of a node that exists, below the chroot of the client's address.
    :param data: at most a megabyte.
    :param version: write only if this is the version of the data; ``None`` is any.

    Returns the new version, or ``None`` if the data has another version than the one that was named. Raises
    :class:`LockLost` if the hold has ended (:class:`RuntimeError` if it was released), :class:`ConfigError` for a wrong
    argument, :class:`UnsupportedKind` on other servers, :class:`BackendRefused` if there is no such
    node or no right to write to it, and :class:`BackendUnavailable` if no answer came within the ``command_timeout``: then it is
    open whether it was written, and a read shows it. Cancelling it leaves that open as well.
    """
    _check(path, data, version)
    claim = _claim(lease)
    lease.check()
    return await claim.fenced_set(path, data, version)


def node(lease: Lease) -> str:
    """Return the absolute path of the node of ``lease``, chroot included, for a transaction of another client.

    No other hold ever has a node of this path. With kazoo: ``transaction.check(node(lease), -1)``, then the
    writes, then ``commit()``. After :meth:`Lease.downgrade` it is another one. Raises :class:`LockLost` if the hold has
    ended, as far as this process knows (:class:`RuntimeError` if it was released), :class:`ConfigError` for anything but one
    lease of one lock, and :class:`UnsupportedKind` as :func:`fenced_set` does.
    """
    claim = _claim(lease)
    lease.check()
    return claim.own


_MOST_BYTES = 1_000_000
"""A server closes a connection that sends it much more."""


def _check(path: object, data: object, version: object) -> None:
    if not isinstance(path, str) or not path.startswith("/") or path.endswith("/"):
        raise ConfigError(f"path must be absolute, as /app/config, not {shorten(path)}")
    if not isinstance(data, bytes) or len(data) > _MOST_BYTES:
        raise ConfigError(f"data must be at most {_MOST_BYTES} bytes, not {shorten(data)}")
    if version is not None and (type(version) is not int or version < 0):
        raise ConfigError(f"version must be a whole number from 0, or None for any, not {shorten(version)}")


def _claim(lease: object) -> FencedNode:
    if not isinstance(lease, Lease):
        raise ConfigError(f"a lease is needed, not {shorten(lease)}")
    if hasattr(lease, "parts"):
        raise ConfigError("a lease of several locks has several nodes: name one of its parts")
    hold = hold_of(lease)
    claim = hold.validity.claim
    if not isinstance(claim, FencedNode):
        raise UnsupportedKind("node for a lease", hold.parent.runtime.backend.name, "only zookeeper:// has")
    return claim
