"""Distributed locks for asyncio: ``async with`` over Redis, and in one process.

>>> async with aiolock.connect("memory://") as client:  # doctest: +SKIP
...     async with client.lock("order:42", ttl=10, timeout=2) as lease:
...         await pay(order=42, fencing_token=lease.token)

``connect`` makes a client, a client makes locks, a lock that is held is a lease.
"""

from aiolock.client import Client, connect
from aiolock.contract import Holder, LockInfo, Waiting
from aiolock.errors import (
    AcquireTimeout,
    BackendError,
    BackendRefused,
    BackendUnavailable,
    ConfigError,
    DeadlockDetected,
    InvalidName,
    LockError,
    LockLost,
    MissingDriver,
    UnsafeBackend,
    UnsupportedKind,
)
from aiolock.lease import Lease
from aiolock.lock import Lock
from aiolock.reentrant import ReentrantLock

__version__ = "0.1.0"

__all__ = [
    "AcquireTimeout",
    "BackendError",
    "BackendRefused",
    "BackendUnavailable",
    "Client",
    "ConfigError",
    "DeadlockDetected",
    "Holder",
    "InvalidName",
    "Lease",
    "Lock",
    "LockError",
    "LockInfo",
    "LockLost",
    "MissingDriver",
    "ReentrantLock",
    "UnsafeBackend",
    "UnsupportedKind",
    "Waiting",
    "connect",
]
