"""Distributed locks for asyncio: ``async with`` over Redis, and in one process.

>>> async with aiolock.connect("memory://") as client:  # doctest: +SKIP
...     async with client.lock("order:42", ttl=10, timeout=2) as lease:
...         await pay(order=42, fencing_token=lease.token)

``connect`` makes a client, a client makes locks, a lock that is held is a lease.
"""

import importlib
import typing

from aiolock.client import Client, connect
from aiolock.contract import Holder, LockInfo, Waiting
from aiolock.errors import (
    AcquireTimeout,
    BackendError,
    BackendRefused,
    BackendUnavailable,
    BarrierBroken,
    ConfigError,
    DeadlockDetected,
    InvalidName,
    LockError,
    LockLost,
    MissingDriver,
    UnsafeBackend,
    UnsupportedKind,
    WaitTimeout,
)
from aiolock.lease import Lease, ReleaseRequest
from aiolock.lock import Lock

if typing.TYPE_CHECKING:
    from aiolock.barrier import Barrier
    from aiolock.borrowed import TransactionLock
    from aiolock.combine import LockAll, lock_all
    from aiolock.election import Election
    from aiolock.joint import JointLease
    from aiolock.latch import Latch
    from aiolock.reentrant import ReentrantLock
    from aiolock.rwlock import ReadLock, RWLock, WriteLock
    from aiolock.semaphore import Semaphore
    from aiolock.signals import run_until_signal

__version__ = "0.1.0"

__all__ = [
    "AcquireTimeout",
    "BackendError",
    "BackendRefused",
    "BackendUnavailable",
    "Barrier",
    "BarrierBroken",
    "Client",
    "ConfigError",
    "DeadlockDetected",
    "Election",
    "Holder",
    "InvalidName",
    "JointLease",
    "Latch",
    "Lease",
    "Lock",
    "LockAll",
    "LockError",
    "LockInfo",
    "LockLost",
    "MissingDriver",
    "RWLock",
    "ReadLock",
    "ReentrantLock",
    "ReleaseRequest",
    "Semaphore",
    "TransactionLock",
    "UnsafeBackend",
    "UnsupportedKind",
    "WaitTimeout",
    "Waiting",
    "WriteLock",
    "connect",
    "lock_all",
    "run_until_signal",
]

_LATER = {
    "Barrier": "barrier",
    "Election": "election",
    "JointLease": "joint",
    "Latch": "latch",
    "LockAll": "combine",
    "RWLock": "rwlock",
    "ReadLock": "rwlock",
    "ReentrantLock": "reentrant",
    "Semaphore": "semaphore",
    "TransactionLock": "borrowed",
    "WriteLock": "rwlock",
    "lock_all": "combine",
    "run_until_signal": "signals",
}
"""What most programs do not use is imported when it is first asked for."""

if not typing.TYPE_CHECKING:
    # Checkers of types would take it to mean that every name exists.

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})
