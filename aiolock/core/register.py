"""Registers: change a small value at the server by compare-and-set, each change once, and wait for what it becomes.

A *change* is a pure function of the body of the register; it returns the new body and a result. One task reads, applies the
changes of all tasks of a client, writes once, and begins again after a lost race. Each write has a random id, which the
register keeps with those before it, so that a write whose answer was lost is found by the next read.

A *condition* is a function of the body that returns ``None`` to go on waiting. One watch serves all conditions.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final, Protocol, TypeVar

from aiolock.clock import Clock
from aiolock.core.capabilities import (
    MOST_BYTES,
    Content,
    Entry,
    Register,
    decode_register,
    encode_register,
)
from aiolock.core.inbox import Inbox, WakeReason, log_wake
from aiolock.core.tasks import Backoff, reject, settle, start
from aiolock.errors import (
    BackendError,
    BackendRefused,
    BackendUnavailable,
    UnsafeBackend,
    closed_error,
    copy_of,
    shorten,
)
from aiolock.types import Family, Kind, Mode

__all__ = ["LATE", "Body", "Change", "Condition", "Late", "RegisterFull", "SharedRegister"]

T = TypeVar("T")

Body = dict[str, Any]
"""The content of a register; empty if there is none."""
Change = Callable[[Body], tuple[Body | None, T]]
"""Returns the new body (``None``: leave it) and a result. May be called several times, for different bodies."""
Condition = Callable[[Body], T | None]
"""Returns ``None`` to go on waiting, otherwise the result of the wait."""
Results = dict[asyncio.Future[Any], Any]
"""The results of the changes in one write, by the futures of their callers."""

REMEMBERED = 256
"""Number of writes whose ids a register keeps."""
PAUSES = 0.005, 0.64
"""Most seconds to wait after an error: at first, and after many."""
SHORTEST_ROUND = 0.002
MOST_REST = 0.25
"""Seconds. After a lost race the next try waits for a random time of up to as long as this one took, and for up to twice as long after
each further one. A watch that finds a change in every round rests as well, for half as long at most: if each of a hundred
clients read each change of the others, there would be no time for the changes."""


class Late:
    """The result of a wait whose timeout passed."""


LATE: Final = Late()


class RegisterFull(BackendRefused):
    """The register would exceed the size that servers keep."""


class Services(Protocol):
    """The part of the client that its registers use."""

    clock: Clock
    random: Random
    command_timeout: float


class _Wait:
    """One task that waits for a condition."""

    __slots__ = ("condition", "ended", "error", "evaluated", "inbox", "last", "result")

    def __init__(self, condition: Condition[Any], inbox: Inbox[None], last: Change[Any] | None) -> None:
        self.condition = condition
        self.inbox = inbox
        self.last = last
        """Applied if the client is closed during the wait."""
        self.evaluated = False
        """True once the condition was evaluated: from then on the wait survives outages."""
        self.ended = False
        self.result: Any = None
        self.error: Exception | None = None

    def end(self, reason: WakeReason, result: Any = None, error: Exception | None = None) -> None:
        """Wake the task with a result or an error, unless it has one."""
        if not self.ended:
            self.ended, self.result, self.error = True, result, error
            self.inbox.wake(reason, error if reason is not WakeReason.CLOSED else None)

    def fail_with(self, change: asyncio.Future[Any]) -> None:
        """Wake the task with the error of a change, if it has one."""
        if not change.cancelled() and isinstance(error := change.exception(), Exception):
            self.end(WakeReason.FAILED, error=error)


class SharedRegister:
    """One register, for all tasks of a client that change it or wait for its value.

    :param name: the name of the latch or barrier, of ``family``, that the register belongs to.
    :param keep: seconds for which the server keeps the register after its last write.
    :param services: of the client; a change fails after its command timeout, and so does a wait for a register that could not
        be read once.

    :meth:`run` does the work, until no task has a request; a register that has ended is not used again.
    """

    def __init__(
        self, register: Register, name: str, family: Family, keep: float, services: Services
    ) -> None:
        self.register = register
        self.name = name
        self.clock: Clock = services.clock
        self.ended: bool = False
        self._kind = Kind(family, Mode.MUTEX)
        self._keep = keep
        self._services = services
        self._changes: dict[asyncio.Future[Any], Change[Any]] = {}
        """In the order in which they came."""
        self._waits: dict[_Wait, None] = {}
        self._doubts: dict[str, Results] = {}
        """The results of writes without an answer, by their ids."""
        self._base = "", 0
        """The stamp of the version that these are to replace, and its number of writes: while it stands, each may still arrive."""
        self._trouble: BackendError | None = None
        """The error of the last request; ``None`` if it was answered."""
        self._asked = math.inf
        """The time at which the pending request was sent; ``inf`` if there is none."""
        self._news: asyncio.Future[None] | None = None
        """Ends the watch when there is a new change, or no task waits any more."""

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for a condition."""
        return len(self._waits)

    # --- for tasks

    def change(self, change: Change[T], *, patient: bool = False) -> asyncio.Future[T]:
        """Apply a change; the future gets its result, what it raises, or a :class:`BackendError` after the command timeout.

        After such an error it is not known whether it counts, if it was sent. A ``patient`` one ends so only if the server
        does not answer: a race is lost to another change that has counted. Cancelling the future does not take
        the change back.
        """
        loop, timeout = asyncio.get_running_loop(), self._services.command_timeout
        future: asyncio.Future[T] = loop.create_future()
        if self.ended:
            future.set_exception(BackendUnavailable("the work on this register has ended"))
            future.exception()  # who gives up on it is not told
            return future
        timer = loop.call_later(timeout, self._expire, future, patient)

        def done(_: asyncio.Future[T]) -> None:
            # The timer of a cancelled future stays, so that its change is not tried for ever.
            if not future.cancelled():
                timer.cancel()
                future.exception()

        future.add_done_callback(done)
        self._changes[future] = change
        self._hurry()
        return future

    def withdraw(self, future: asyncio.Future[Any]) -> None:
        """Drop a change; it may count nevertheless if it was sent, unless a later change is answered before it arrives."""
        self._changes.pop(future, None)

    async def wait(
        self,
        condition: Condition[T],
        timeout: float | None,
        first: asyncio.Future[Any] | None = None,
        last: Change[Any] | None = None,
    ) -> T | Late:
        """Return the result of ``condition`` as soon as it has one, or :data:`LATE` after ``timeout`` seconds.

        Raises what ``condition`` raises, the error of the change ``first``, and :class:`BackendError` if the register cannot be
        read at first. The change ``last`` is applied if the client is closed meanwhile. Cancelling it leaves nothing behind.
        """
        if self.ended:
            raise BackendUnavailable("the work on this register has ended")
        loop = asyncio.get_running_loop()
        wait = _Wait(condition, Inbox(self.name, self._kind), last)
        self._waits[wait] = None
        timers = [loop.call_later(self._services.command_timeout, self._give_up, wait)]
        if timeout is not None:
            timers.append(loop.call_later(timeout, wait.end, WakeReason.TIMEOUT, LATE))
        if first is not None:
            first.add_done_callback(wait.fail_with)
        self._hurry()
        try:
            await wait.inbox.wait()
        except asyncio.CancelledError:
            log_wake(self.name, self._kind, WakeReason.CANCELLED, own=True)
            raise
        finally:
            for timer in timers:
                timer.cancel()
            wait.ended = True
            self._waits.pop(wait, None)
            self._hurry()
        if wait.error is not None:
            raise wait.error
        result: T | Late = wait.result
        return result

    def close(self) -> None:
        """End all waits because the client is closed; :meth:`run` ends after the changes under way."""
        for wait in self._waits:
            wait.end(WakeReason.CLOSED, error=closed_error())
            if wait.last is not None:
                self.change(wait.last)
        self._waits.clear()
        self._hurry()

    def end_without_loop(self) -> None:
        """Do nothing: a register holds nothing at the server."""

    def _hurry(self) -> None:
        if self._news is not None:
            settle(self._news, None)

    def _expire(self, future: asyncio.Future[Any], patient: bool) -> None:  # noqa: FBT001 - the loop passes no names
        if patient and self._answers() and future in self._changes and not future.done():
            asyncio.get_running_loop().call_later(
                self._services.command_timeout, self._expire, future, patient
            )
            return
        self._changes.pop(future, None)
        reject(future, self._late())
        self._hurry()

    def _give_up(self, wait: _Wait) -> None:
        if not wait.evaluated:
            wait.end(WakeReason.FAILED, error=self._late())

    def _answers(self) -> bool:
        """Test whether the server answers: to a client that loses races it does each time, and soon."""
        return self._trouble is None and self.clock() - self._asked <= self._services.command_timeout / 2

    def _late(self) -> BackendUnavailable:
        why = "too many change it at the same time" if self._answers() else "the server did not answer"
        error = BackendUnavailable(
            f"{self._title()} could not be reached or changed within the command timeout of "
            f"{self._services.command_timeout:g} s: {self._trouble or why}"
        )
        error.__cause__ = self._trouble
        return error

    def _title(self) -> str:
        return f"{self._kind.family.value} {shorten(self.name)}"

    # --- the work

    async def run(self) -> None:
        """Work until no task has a request, or until an error that no retry can change, which all tasks get.

        Cancelling it leaves it open whether the write under way counts; every task gets the error of a closed client.
        """
        try:
            try:
                await self._serve()
            except Exception as error:  # noqa: BLE001 - an error of any kind belongs to the tasks that wait
                failure = error
                self._fail(lambda: copy_of(failure))
            self.ended = True
            await self.register.aclose()
        except asyncio.CancelledError:
            self._fail(closed_error)
            raise
        finally:
            self.ended = True

    async def _serve(self) -> None:
        """Read, write and watch for as long as a task has a request. Cancelling it leaves open whether the write under way counts."""
        clock, random, failing = (
            self._services.clock,
            self._services.random,
            Backoff(self._services.random, *PAUSES),
        )
        lost, rest = 0, 0.0
        while self._changes or self._waits:
            self._news, begun = asyncio.get_running_loop().create_future(), clock()
            # What changes nothing is answered by what was read after it was asked: another client may have written in between.
            changes = list(self._changes.items())
            try:
                entry = await self._answered(self.register.read())
                content = self._take_in(entry)
                written = await self._write(entry, content, changes) if changes else entry
                if written is None:
                    pause = max(clock() - begun, SHORTEST_ROUND) * 2.0 ** min(lost, 7)
                    lost += 1
                    await asyncio.sleep(random.uniform(0.0, min(pause, self._services.command_timeout / 4)))
                    continue
                lost, took = 0, clock() - begun
                if self._waits and not self._changes:
                    if rest:
                        await asyncio.wait({self._news}, timeout=rest * random.random())
                    since = clock()
                    await self._watch(written.stamp)
                    rest = min(MOST_REST, max(2 * rest, took / 2)) if clock() - since < 2 * took else 0.0
            except BackendError as error:
                if not error.retryable:
                    raise
                self._trouble = error
                await failing.pause()
            else:
                failing.reset()

    async def _answered(self, request: Awaitable[T]) -> T:
        self._asked = self.clock()
        try:
            answer = await request
        finally:
            self._asked = math.inf
        self._trouble = None
        return answer

    def _take_in(self, entry: Entry) -> Content:
        """Return the content, settle the changes of a write that turned out to have counted, and evaluate the conditions.

        Raises :class:`UnsafeBackend` if the register has an unknown format.
        """
        content = decode_register(entry.value)
        if content is None:
            raise UnsafeBackend(
                f"the register of {self._title()} was not written by this version of the library"
            )
        for write in content.writes:
            self._settle(self._doubts.pop(write, {}))
        stamp, number = self._base
        if entry.stamp != stamp:
            # None of the others can replace that version any more, so they are made again, unless one may have counted.
            if content.number - number > REMEMBERED:
                for future in {future for results in self._doubts.values() for future in results}:
                    self._changes.pop(future, None)
                    reject(
                        future,
                        BackendUnavailable(f"{self._title()}: whether this change counted is not known"),
                    )
            self._doubts.clear()
        self._evaluate(content.body)
        return content

    async def _write(
        self, entry: Entry, content: Content, changes: list[tuple[asyncio.Future[Any], Change[Any]]]
    ) -> Entry | None:
        """Apply changes that came before ``entry`` was read; return what the register contains then, ``None`` after a lost race.

        Cancelling it leaves it open whether the write counts.
        """
        body, results = content.body, {}
        for future, change in changes:
            if future not in self._changes:
                # It was settled by that reading, or withdrawn.
                continue
            try:
                after, results[future] = change(body)
            except Exception as error:  # noqa: BLE001 - an error of any kind belongs to the caller of the change
                self._changes.pop(future, None)
                reject(future, error)
            else:
                body = body if after is None else after
        if body is content.body and not self._doubts:
            self._settle(results)
            return entry
        # If nothing changes, this write keeps those without an answer from counting for a task that has given up.
        write = secrets.token_hex(6)
        writes = [*content.writes[1 - REMEMBERED :], write]
        value = encode_register(Content(body, writes, content.number + 1))
        if len(value) > MOST_BYTES:
            raise RegisterFull(
                f"{self._title()} has too many users: its register would have {len(value)} bytes, and {MOST_BYTES} is the most"
            )
        self._base = entry.stamp, content.number
        self._doubts[write] = results
        stamp = await self._answered(self.register.write(value, entry.stamp, self._keep))
        if stamp is None:
            # A lost race, or a request that was sent twice and has counted: the next reading tells.
            return None
        self._doubts.clear()
        self._settle(results)
        self._evaluate(body)
        return Entry(value, stamp)

    async def _watch(self, stamp: str) -> None:
        """Wait for a change of the register, or for a new request of a task. Cancelling it ends the watch."""
        assert self._news is not None  # noqa: S101 - made at the beginning of each round
        watch = start(self.register.changed(stamp), "aiolock-watch")
        try:
            await asyncio.wait({watch, self._news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            await asyncio.wait({watch})
        if not watch.cancelled() and (error := watch.exception()) is not None:
            raise error

    def _settle(self, results: Results) -> None:
        for future, result in results.items():
            self._changes.pop(future, None)
            settle(future, result)

    def _evaluate(self, body: Body) -> None:
        """Evaluate all conditions."""
        for wait in [wait for wait in self._waits if not wait.ended]:
            wait.evaluated = True
            try:
                result = wait.condition(body)
            except Exception as error:  # noqa: BLE001 - an error of any kind belongs to the task that waits
                wait.end(WakeReason.NOTIFIED, error=error)
            else:
                if result is not None:
                    wait.end(WakeReason.NOTIFIED, result)
            if wait.ended:
                self._waits.pop(wait, None)

    def _fail(self, error: Callable[[], Exception]) -> None:
        for future in self._changes:
            reject(future, error())
        for wait in self._waits:
            wait.end(WakeReason.FAILED, error=error())
        self._changes.clear()
        self._waits.clear()
