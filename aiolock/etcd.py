"""Fenced writes to keys of an application in etcd itself, which only the present holder of a lock can make.

The row of a lock shows its holds, and no other client enters before that row was changed. So a transaction that compares the revision
of the row and writes is fencing without a token: the cluster carries out both or none, also for a holder that was
stopped and woke up late."""

from __future__ import annotations

from aiolock.core.backend import Claim
from aiolock.core.capabilities import FencedPut
from aiolock.core.hold import Hold
from aiolock.errors import ConfigError, shorten
from aiolock.lease import Lease, hold_of

__all__ = ["fenced_put"]

_MOST_BYTES = 1_000_000
"""Bytes of a value; etcd refuses requests of 1.5 MiB."""


async def fenced_put(lease: Lease, key: str, value: bytes) -> int:
    """Set a key, if ``lease`` is still held as the cluster sees it.

    :param lease: of a client of ``etcd://``; any kind of lock.
    :param key: a key of the application, outside of the namespace of the locks.
    :param value: at most 1,000,000 bytes.

    Returns the revision of the change. Raises :class:`LockLost` if the hold has ended (:class:`RuntimeError` if it was
    released), :class:`ConfigError` for a wrong argument, :class:`UnsupportedKind` on other servers, :class:`BackendRefused` if
    the user may not write the key, and :class:`BackendUnavailable` within the ``command_timeout``: if no answer came, it is
    open whether the key was written, and a read shows it; if other clients changed the row of the lock again and again,
    nothing was written, as the message says. Cancelling it leaves open whether the key was written. After this call, the client
    does not hand the lock over among its own tasks: the next one enters at the cluster.
    """
    hold = _hold(lease)
    backend = FencedPut[Claim].of(
        hold.parent.runtime.backend, "write that the cluster fences", "only etcd:// has"
    )
    _check(key, value, backend.settings.namespace)
    lease.check()
    # The next task of this client enters by a change of the row as well: a copy of this write may be late, also after a
    # cancellation.
    hold.validity.left = 0
    return await backend.fenced_put(hold.validity.claim, key, value, lease.check)


def _check(key: object, value: object, namespace: str) -> None:
    if not isinstance(key, str) or not key or key.startswith(f"{namespace}/"):
        raise ConfigError(f"key must be one outside of the namespace of the locks, not {shorten(key)}")
    try:
        key.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"key must be valid Unicode without lone surrogates: {shorten(key)}") from None
    if not isinstance(value, bytes) or len(value) > _MOST_BYTES:
        raise ConfigError(f"value must be at most {_MOST_BYTES} bytes, not {shorten(value)}")


def _hold(lease: object) -> Hold:
    if not isinstance(lease, Lease):
        raise ConfigError(f"a lease is needed, not {shorten(lease)}")
    if hasattr(lease, "parts"):
        raise ConfigError("a lease of several locks has several rows: name one of its parts")
    return hold_of(lease)
