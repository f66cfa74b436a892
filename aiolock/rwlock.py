"""Many readers or one writer: the two locks of one name, and what a task may do inside its own blocks of them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypedDict, Unpack

from aiolock.contract import READ, WRITE
from aiolock.errors import shorten
from aiolock.lease import Lease
from aiolock.lock import Lock, Task
from aiolock.options import OnLoss
from aiolock.reentrant import Level, Levels, at_once

__all__ = ["LockOptions", "Make", "RWLock", "ReadLock", "WriteLock", "check_options"]


class LockOptions(TypedDict, total=False):
    """What :meth:`Client.lock` takes beside the name."""

    ttl: float | None
    timeout: float | None
    on_loss: OnLoss | None
    fair: bool
    max_hold: float | None
    label: str | None


def check_options(method: str, options: Mapping[str, object]) -> None:
    """Raise :class:`TypeError`, as Python does, if ``method`` was given an option that there is not."""
    there = LockOptions.__annotations__
    if unknown := [option for option in options if option not in there]:
        raise TypeError(
            f"{method}() got an unexpected keyword argument {unknown[0]!r}: it takes {', '.join(there)}"
        )


Make = Callable[..., Any]
"""How a client makes a lock: ``make(cls, kind, name, **options)``."""


class RWLock:
    """A name that has many readers or one writer. Made by :meth:`Client.rwlock`; does no I/O.

    Who comes is served in order: a writer that waits stops later readers, so that it is not starved, and readers that
    wait next to each other enter together. Each reader has its own deadline: one that died costs nobody but a writer,
    and that at most its ttl.
    """

    __slots__ = ("_make", "_name")

    def __init__(self, make: Make, name: str) -> None:
        self._make = make
        self._name = name

    @property
    def name(self) -> str:
        """What is locked."""
        return self._name

    def __repr__(self) -> str:
        return f"<RWLock {shorten(self._name)}>"

    def __reduce__(self) -> str:
        raise TypeError(
            "a lock cannot be copied or pickled: pass its name, and ask the client there for the lock"
        )

    def read(self, **options: Unpack[LockOptions]) -> ReadLock:
        """The lock that many may hold at once, as long as nobody writes; ``options`` are those of :meth:`Client.lock`."""
        check_options("RWLock.read", options)
        lock: ReadLock = self._make(ReadLock, READ, self._name, **options)
        return lock

    def write(self, **options: Unpack[LockOptions]) -> WriteLock:
        """The lock that excludes everybody else; ``options`` are those of :meth:`Client.lock`.

        Its lease can be turned into one for reading: ``await lease.downgrade()``.
        """
        check_options("RWLock.write", options)
        lock: WriteLock = self._make(WriteLock, WRITE, self._name, **options)
        return lock


class _Side(Lock):
    """What both have in common: which blocks the asking task is in."""

    __slots__ = ()

    def _writing(self) -> bool:
        """Whether this task is in a block of the write lock."""
        holder = self._runtime.inside[self.kind.family.value].get(self.name)
        return holder is not None and holder.entered_by is self._task() and holder.waited_for

    def _reading(self) -> Lease | None:
        """The lease of the outermost read block that this task is in; not one that was released inside of it."""
        lease: Lease | None = self._runtime.reading.get((self._task(), self.name))
        return lease if lease is not None and (lease.waited_for or lease.lost) else None

    def _enter(self, lease: Lease, *, cancel: bool) -> None:
        super()._enter(lease, cancel=cancel)
        lease.begin_block()

    def _leave(self, task: Task) -> Lease:
        lease = super()._leave(task)
        lease.end_block()
        return lease


class ReadLock(_Side):
    """The lock that many may hold at once, as long as nobody writes.

    Inside its own read block a task reads on: acquiring it again takes another level of the same hold, at once and
    without I/O, because waiting behind a writer who waits for the outer block would never end. Inside its own write
    block it is refused with :class:`RuntimeError` (``try_acquire`` returns ``None``), for the same reason.
    """

    __slots__ = ()

    async def try_acquire(self) -> Lease | None:
        """As :meth:`Lock.try_acquire`; inside this task's own read block it returns another level of that hold."""
        self._guard()
        if (level := self._level()) is not None:
            return level
        return None if self._in_own_block() else await super().try_acquire()

    def _in_own_block(self) -> bool:
        self._guard()
        return self._writing()

    def _ask(self, timeout: float | None) -> Coroutine[Any, Any, Lease | None]:
        self._guard()
        if (level := self._level()) is not None:
            return at_once(level)
        if self._writing():
            raise RuntimeError(
                f"this task is inside its own write block of {shorten(self.name)} and would wait for itself for ever: "
                "turn that lease into one for reading with `await lease.downgrade()`"
            )
        return super()._ask(timeout)

    def _level(self) -> Lease | None:
        """Another level of the hold of this task's own read block, if it is in one."""
        outer = self._reading()
        if outer is None:
            return None
        home = outer.home
        if not isinstance(home, Levels | Level):
            home = outer.move(lambda inner: Levels(outer, inner, None))
        return home.again()


class WriteLock(_Side):
    """The lock that excludes everybody else; its lease can be turned into one for reading (:meth:`Lease.downgrade`).

    Inside this task's own block of the name, for reading or for writing, it is refused with :class:`RuntimeError`
    (``try_acquire`` returns ``None``): a reader that waits to write would wait for itself, and two of them for each
    other.
    """

    __slots__ = ()

    def _waits_to_write(self) -> bool:
        """Test whether this task is in a read block of the name that a writer has to wait for."""
        outer = self._reading()
        return outer is not None and outer.waited_for

    def _in_own_block(self) -> bool:
        self._guard()
        return self._writing() or self._waits_to_write()

    def _ask(self, timeout: float | None) -> Coroutine[Any, Any, Lease | None]:
        self._guard()
        if self._waits_to_write():
            raise RuntimeError(
                f"this task is inside its own read block of {shorten(self.name)}, and a read lock cannot become a write "
                "lock: two readers who want that wait for each other for ever. Leave the read block and take write(); "
                "or take write() at once, and `await lease.downgrade()` when only reading is left"
            )
        if self._writing():
            raise RuntimeError(
                f"this task is inside its own write block of {shorten(self.name)} and would wait for itself for ever: "
                "pass the lease on"
            )
        return super()._ask(timeout)
