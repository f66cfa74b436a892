"""Read-write lock: many readers or one writer, and the rules for a task inside its own blocks."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar, Unpack

from aiolock.core.cancellation import Task
from aiolock.core.hold import BLOCKS, READING, Hold
from aiolock.errors import shorten
from aiolock.kinds.reentrant import Levels, at_once
from aiolock.lease import Lease, hold_of
from aiolock.lock import Handle, Lock
from aiolock.types import READ, WRITE, Kind
from aiolock.validation import LockOptions, check_options

__all__ = ["Make", "RWLock", "ReadLock", "WriteLock"]


L = TypeVar("L", bound=Lock)


class Make(Protocol):
    """Makes a lock of a client."""

    def __call__(self, cls: type[L], kind: Kind, name: str, options: LockOptions, /) -> L:
        """Return a lock of this class."""
        ...


class RWLock(Handle):
    """A name with many readers or one writer. Made by :meth:`Client.rwlock`; does no I/O.

    Requests are granted in order: a waiting writer stops later readers, so that it is not starved, and readers next to each
    other in the queue enter together. Each reader has its own deadline: one that died delays only a writer, by its ttl at
    most.
    """

    __slots__ = ("_make", "_name", "_ttl")

    def __init__(self, make: Make, name: str, ttl: float) -> None:
        self._make = make
        self._name = name
        self._ttl = ttl
        """The ttl of the client, for locks that have none of their own."""

    @property
    def name(self) -> str:
        """The name of both locks."""
        return self._name

    def read(self, **options: Unpack[LockOptions]) -> ReadLock:
        """Return the lock that many may hold at once while there is no writer; ``options`` as for :meth:`Client.lock`."""
        checked = check_options("RWLock.read", options, ttl=self._ttl)
        return self._make(ReadLock, READ, self._name, checked)

    def write(self, **options: Unpack[LockOptions]) -> WriteLock:
        """Return the lock that excludes all others; ``options`` as for :meth:`Client.lock`.

        Its lease can be turned into one for reading: ``await lease.downgrade()``.
        """
        checked = check_options("RWLock.write", options, ttl=self._ttl)
        return self._make(WriteLock, WRITE, self._name, checked)


class _Side(Lock):
    """The part that both locks share: the blocks that the calling task is in."""

    __slots__ = ()

    def _writing(self) -> bool:
        """Test whether this task is in a block of the write lock."""
        holder = BLOCKS.of(self._runtime)[self.kind.family.value].get(self.name)
        return holder is not None and holder.task is self._task() and holder.waited_for()

    def _reading(self) -> Hold | None:
        """Return the hold of the outermost read block that this task is in; not one that was released inside of it."""
        hold = READING.of(self._runtime).get((self._task(), self.name))
        return hold if hold is not None and (hold.waited_for() or hold.lost()) else None

    def _enter(self, hold: Hold, *, cancel: bool) -> Lease:
        lease = super()._enter(hold, cancel=cancel)
        hold.begin_block()
        return lease

    def _leave(self, task: Task) -> Lease:
        lease = super()._leave(task)
        hold_of(lease).end_block()
        return lease


class ReadLock(_Side):
    """The lock that many may hold at once while there is no writer.

    Inside its own read block a task takes another level of the same hold, at once and without I/O: waiting behind a writer
    that waits for the outer block would never end. Inside its own write block it is refused with :class:`RuntimeError`
    (``try_acquire`` returns ``None``), for the same reason.
    """

    __slots__ = ()

    async def _try(self, timeout: float | None) -> Hold | None:
        self._guard()
        return level if (level := self._level()) is not None else await super()._try(timeout)

    def _owned(self, task: Task) -> bool:
        outer = READING.of(self._runtime).get((task, self.name))
        return outer is not None and outer.waited_for() and outer.certain()

    def _in_own_block(self) -> bool:
        self._guard()
        return self._writing()

    def _ask(self, timeout: float | None) -> Coroutine[Any, Any, Hold | None]:
        self._guard()
        if (level := self._level()) is not None:
            return at_once(level)
        if self._writing():
            raise RuntimeError(
                f"this task is inside its own write block of {shorten(self.name)} and would wait for itself for ever: "
                "turn that lease into one for reading with `await lease.downgrade()`"
            )
        return super()._ask(timeout)

    def _level(self) -> Hold | None:
        """Return another level of the hold of this task's own read block, if it is in one."""
        outer = self._reading()
        if outer is None:
            return None
        parent = outer.parent
        if not isinstance(parent, Levels):
            outer.parent = parent = Levels(outer, parent, None)
        return parent.again()


class WriteLock(_Side):
    """The lock that excludes all others; its lease can be turned into one for reading (:meth:`Lease.downgrade`).

    Inside this task's own block of the name, for reading or for writing, it is refused with :class:`RuntimeError`
    (``try_acquire`` returns ``None``): a reader that waits to write would wait for itself, and two of them for each
    other.
    """

    __slots__ = ()

    def _waits_to_write(self) -> bool:
        """Test whether this task is in a read block of the name that a writer has to wait for."""
        outer = self._reading()
        return outer is not None and outer.waited_for()

    def _in_own_block(self) -> bool:
        self._guard()
        return self._writing() or self._waits_to_write()

    def _ask(self, timeout: float | None) -> Coroutine[Any, Any, Hold | None]:
        self._guard()
        if self._waits_to_write():
            raise RuntimeError(
                f"this task is inside its own read block of {shorten(self.name)}, and a read lock cannot become a write "
                "lock: two readers that do so wait for each other for ever. Leave the read block and take write(); "
                "or take write() at once, and `await lease.downgrade()` when only reading is left"
            )
        if self._writing():
            raise RuntimeError(
                f"this task is inside its own write block of {shorten(self.name)} and would wait for itself for ever: "
                "pass the lease on"
            )
        return super()._ask(timeout)
