"""Distributed locks for asyncio: ``async with`` over Redis, and in one process.

>>> async with aiolock.connect("memory://") as client:  # doctest: +SKIP
...     async with client.lock("order:42", ttl=10, timeout=2) as lease:
...         await pay(order=42, fencing_token=lease.token)

``connect`` makes a client, a client makes locks, a lock that is held is a lease.
"""

import importlib
import typing

from aiolock.client import Client, connect
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
from aiolock.types import Holder, Kept, Leader, LockEvent, LockInfo, SkipEvent, Waiting

if typing.TYPE_CHECKING:
    from aiolock.kinds.barrier import Barrier
    from aiolock.kinds.election import Election
    from aiolock.kinds.latch import Latch
    from aiolock.kinds.multi import JointLease, LockAll, lock_all
    from aiolock.kinds.reentrant import ReentrantLock
    from aiolock.kinds.rwlock import ReadLock, RWLock, WriteLock
    from aiolock.kinds.semaphore import Semaphore
    from aiolock.signals import run_until_signal
    from aiolock.transaction_lock import TransactionLock

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
    "Kept",
    "Latch",
    "Leader",
    "Lease",
    "Lock",
    "LockAll",
    "LockError",
    "LockEvent",
    "LockInfo",
    "LockLost",
    "MissingDriver",
    "RWLock",
    "ReadLock",
    "ReentrantLock",
    "ReleaseRequest",
    "Semaphore",
    "SkipEvent",
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
    "Barrier": "kinds.barrier",
    "Election": "kinds.election",
    "JointLease": "kinds.multi",
    "Latch": "kinds.latch",
    "LockAll": "kinds.multi",
    "RWLock": "kinds.rwlock",
    "ReadLock": "kinds.rwlock",
    "ReentrantLock": "kinds.reentrant",
    "Semaphore": "kinds.semaphore",
    "TransactionLock": "transaction_lock",
    "WriteLock": "kinds.rwlock",
    "lock_all": "kinds.multi",
    "run_until_signal": "signals",
}
"""Names that most programs do not use, by module: each is imported at its first use."""

if not typing.TYPE_CHECKING:
    # Type checkers would conclude that every name exists.

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})
