"""Write a register by compare-and-set: each update of a writer counts exactly once, and conditions wait for a value.

An *update* is a pure function of the body of the register; it returns the new body and a result. The writer collects the
updates of all tasks of one client, applies them in order and writes once, and again after each lost race. Writes are
numbered, and the register remembers the last number of every writer, so that a writer whose answer was lost finds out by
the next read whether its write counted.

A *condition* is a function of the body that returns ``None`` to go on waiting. One watch serves all conditions.

One file, because updates and conditions rest on the same reading of the register."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Callable
from random import Random
from typing import Any, Final, TypeVar

from aiolock.clock import Clock
from aiolock.core.capabilities import ABSENT, MOST_BYTES, Entry, Register, decode_register
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

__all__ = ["LATE", "Body", "Condition", "Late", "RegisterWriter", "Update", "WriteLog"]

T = TypeVar("T")

Body = dict[str, Any]
"""The content of a register; empty if there is none."""
Update = Callable[[Body], tuple[Body | None, T]]
"""Returns the new body (``None``: leave it) and a result. May be called several times, for different bodies."""
Condition = Callable[[Body], T | None]
"""Returns ``None`` to go on waiting, otherwise the result of the wait."""
Results = dict[asyncio.Future[Any], Any]
"""The results of the updates in one write, by the futures of their callers."""

WRITERS = 256
"""Number of writers whose last write a register remembers; one matters only until its writer has read again."""

PAUSES = 0.005, 0.64
"""Most seconds to wait after an error: at first, and after many."""
SHORTEST_ROUND = 0.002
"""Seconds. After a lost race a writer pauses for a random time: up to as long as this attempt would take for each writer that is known to
be about to write (:attr:`RegisterWriter.rivals`), and where none is known up to half as long, and twice as long after each further one."""
FIRST_REST, MOST_REST = 1 / 8, 0.25
"""A writer whose conditions wait, and that finds the next change as soon as it has read one, rests before it reads again: at first for
this share of the time that the reading took, then for twice as long each time, up to so many seconds. If each of a hundred clients read
each change of the others, there would be no time for the changes."""


class Late:
    """The result of a wait whose timeout passed."""


LATE: Final = Late()


# --- write log


class WriteLog:
    """Number the writes of one writer to one register, and find out which of them counted."""

    def __init__(self) -> None:
        self.id: str = secrets.token_hex(8)
        """Identifies the writer in the register."""
        self._number = 0
        """Number of the last write."""
        self._unknown: dict[int, Results] = {}
        """Results of writes of which it is not known whether they counted, by their numbers."""
        self._base = ""
        """The version that these were to replace; while it stands, each of them may still arrive."""
        self._stamp = ""
        self._seen: dict[str, int] = {}
        """The last write of each writer, in the version that was read last."""

    def read(self, entry: Entry) -> tuple[Body, Results] | None:
        """Return the body, and the results of a write that turned out to have counted; ``None`` for an unknown format."""
        content = decode_register(entry.value)
        if content is None:
            return None
        body, self._seen = content
        self._stamp = entry.stamp
        counted = self._unknown.get(self._seen.get(self.id, 0))
        if counted is not None or entry.stamp != self._base:
            # A write of this client or of another replaced the base version: the others no longer can.
            self._unknown.clear()
        return body, counted or {}

    def write(self, body: Body, results: Results) -> bytes:
        """Return the value that replaces the version read last; the results are unknown until :meth:`counted`."""
        self._number += 1
        others = [(writer, number) for writer, number in self._seen.items() if writer != self.id]
        seen = {**dict(others[-WRITERS + 1 :]), self.id: self._number}
        if self._stamp != self._base:
            self._unknown, self._base = {}, self._stamp
        self._unknown[self._number] = results
        return json.dumps({"v": 1, "seen": seen, "body": body}, separators=(",", ":")).encode()

    def counted(self) -> None:
        """Record that the last write succeeded: none before it can any more."""
        self._unknown.clear()

    def in_doubt(self, future: asyncio.Future[Any]) -> bool:
        """Test whether an update was sent in a write that may still count, although its answer is missing."""
        return any(future in results for results in self._unknown.values())


# --- writer


class _Wait:
    """One task that waits for a condition."""

    __slots__ = ("checked", "condition", "ended", "error", "inbox", "result")

    def __init__(self, condition: Condition[Any], inbox: Inbox[None]) -> None:
        self.condition = condition
        self.inbox = inbox
        self.checked = False
        """True once the condition was evaluated: from then on the wait survives outages."""
        self.ended = False
        self.result: Any = None
        self.error: Exception | None = None

    def end(self, reason: WakeReason, result: Any = None, error: Exception | None = None) -> None:
        """Wake the task with a result or an error, unless it has one."""
        if not self.ended:
            self.ended, self.result, self.error = True, result, error
            self.inbox.wake(reason, error if reason is not WakeReason.CLOSED else None)


class RegisterWriter:
    """Apply updates to one register for all tasks of a client, and wait for conditions on it.

    :param name: the name of the latch, barrier or lock, of ``family``, that the register belongs to.
    :param keep: seconds for which the server keeps the register after its last write.
    :param timeout: seconds after which an update fails, or a condition that could not be evaluated once.

    :meth:`run` does the work, until no task has a request; a writer that has ended is not used again.
    """

    def __init__(
        self,
        register: Register,
        name: str,
        family: Family,
        *,
        keep: float,
        timeout: float,
        clock: Clock,
        random: Random,
    ) -> None:
        self.register = register
        self.name = name
        self._kind = Kind(family, Mode.MUTEX)
        self.clock = clock
        self.ended: bool = False
        self.full: bool = False
        """True if it has ended because the register would exceed the size that servers keep."""
        self.rivals: Callable[[Body], int] = lambda _: 0
        """Returns how many writers are about to write according to the body; 0 if it does not tell."""
        self.round: float = SHORTEST_ROUND
        """Seconds that the last attempt took that lost a race, with the reading before it."""
        self._title = f"{family.value} {shorten(name)}"
        self._keep = keep
        self._timeout = timeout
        self._random = random
        self._log = WriteLog()
        self._updates: dict[asyncio.Future[Any], Update[Any]] = {}
        """In the order in which they were submitted."""
        self._waits: dict[_Wait, None] = {}
        self._closing: Update[None] | None = None
        self._trouble: BackendError | None = None
        """The error of the last request; ``None`` if it was answered."""
        self._sent = math.inf
        """The time at which the pending request was sent; ``inf`` if there is none."""
        self._news: asyncio.Future[None] | None = None
        """Ends the watch when there is a new update, or no task waits any more."""
        self._rivals = 0

    @property
    def id(self) -> str:
        """Identifies the writer in the register."""
        return self._log.id

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for a condition."""
        return len(self._waits)

    # --- for tasks

    def submit(self, update: Update[T], *, patient: bool = False) -> asyncio.Future[T]:
        """Submit an update; the future gets its result, or an error after the timeout.

        A ``patient`` one ends so only if the server does not answer: who loses races goes on, because another writer has
        won each of them. Cancelling the future does not withdraw the update.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        timer = loop.call_later(self._timeout, lambda: expire())

        def expire() -> None:
            nonlocal timer
            if patient and not future.done() and self._answers():
                timer = loop.call_later(self._timeout / 2, expire)
            else:
                self._expire(future)

        def done(_: asyncio.Future[T]) -> None:
            # The timer of a future that was cancelled stays, so that its update is not tried for ever.
            if not future.cancelled():
                timer.cancel()
                future.exception()

        future.add_done_callback(done)
        if self.ended:
            future.set_exception(BackendUnavailable("the work on this register has ended"))
        else:
            self._updates[future] = update
            self._hurry()
        return future

    async def apply(self, update: Update[T]) -> T:
        """Apply an update and return its result.

        Raises what the update raises, and :class:`BackendError` if it could not be applied, or it is not known whether it
        was, within the timeout. Cancelling it ends the wait, not the update.
        """
        return await self.submit(update)

    async def wait(
        self, condition: Condition[T], timeout: float | None, first: asyncio.Future[Any] | None = None
    ) -> T | Late:
        """Return the result of ``condition`` as soon as it has one, or :data:`LATE` after ``timeout`` seconds.

        Raises what ``condition`` raises, the error of the update ``first``, and :class:`BackendError` if the register
        cannot be read at first. Cancelling it leaves nothing behind.
        """
        if self.ended:
            raise BackendUnavailable("the work on this register has ended")
        loop = asyncio.get_running_loop()
        wait = _Wait(condition, Inbox(self.name, self._kind))
        self._waits[wait] = None
        timers = [loop.call_later(self._timeout, self._give_up, wait)]
        if timeout is not None:
            timers.append(loop.call_later(timeout, wait.end, WakeReason.TIMEOUT, LATE))
        if first is not None:
            first.add_done_callback(lambda update: _fail_with(wait, update))
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

    def withdraw(self, future: asyncio.Future[Any]) -> None:
        """Drop an update that was not sent yet; one that was sent may still count."""
        self._updates.pop(future, None)

    def in_doubt(self, future: asyncio.Future[Any]) -> bool:
        """Test whether an update was sent in a write that may still count, although its answer is missing."""
        return self._log.in_doubt(future)

    def _hurry(self) -> None:
        if self._news is not None:
            settle(self._news, None)

    def _expire(self, future: asyncio.Future[Any]) -> None:
        self._updates.pop(future, None)
        if future.done():
            self._hurry()
        else:
            future.set_exception(self._timeout_error())

    def _give_up(self, wait: _Wait) -> None:
        if not wait.checked:
            wait.end(WakeReason.FAILED, error=self._timeout_error())

    def _answers(self) -> bool:
        """Test whether the server answers: to a writer that loses races it does each time, and soon."""
        return self._trouble is None and self.clock() - self._sent <= self._timeout / 2

    def _timeout_error(self) -> BackendUnavailable:
        why = "too many change it at the same time" if self._answers() else "the server did not answer"
        error = BackendUnavailable(
            f"{self._title} could not be reached or changed within the command timeout of {self._timeout:g} s: "
            f"{self._trouble or why}"
        )
        error.__cause__ = self._trouble
        return error

    # --- for the client that is closed

    def on_close(self, update: Update[None]) -> None:
        """Apply ``update`` if the client is closed while a task waits here."""
        self._closing = update

    def close(self) -> None:
        """Fail all waits; :meth:`run` ends after the updates under way."""
        for wait in self._waits:
            wait.end(WakeReason.CLOSED, error=closed_error())
        if self._waits and self._closing is not None:
            self.submit(self._closing)
        self._waits.clear()
        self._hurry()

    def end_without_loop(self) -> None:
        """Do nothing: a writer holds nothing at the server."""

    # --- work

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
        entry, own, failing, lost, rest = ABSENT, False, Backoff(self._random, *PAUSES), 0, 0.0
        while self._updates or self._waits:
            self._news = asyncio.get_running_loop().create_future()
            # An update that changes nothing is answered by an entry that was read after it was submitted, not by the last
            # write of this client: another client may have written in between. The server checks the others.
            readable = set() if own else set(self._updates)
            begun = self.clock()
            try:
                if not own:
                    self._sent = begun
                    entry = await self.register.read()
                    self._trouble = None
                    self._check(self._read(entry))
                after = await self._write(entry, readable) if self._updates else entry
            except BackendError as error:
                if not error.retryable:
                    raise
                self._trouble, own = error, False
                await failing.pause()
                continue
            finally:
                self._sent = math.inf
            took = self.clock() - begun
            if after is None:
                own, lost, self.round = False, lost + 1, max(took, SHORTEST_ROUND)
                # Not a Backoff: it depends on the length of a round and on the rivals, and spreads them from 0 on.
                pause = self.round * (self._rivals or 2.0 ** min(lost - 2, 10))
                await asyncio.sleep(self._random.uniform(0.0, min(pause, self._timeout / 4)))
                continue
            lost = 0
            # Updates that were submitted meanwhile are applied to the entry just written, without a read.
            own, entry = bool(self._updates) and after is not entry, after
            if not self._waits or self._updates:
                failing.reset()
                continue
            since = self.clock()
            if not await self._watch(entry.stamp):
                await failing.pause()
                continue
            failing.reset()
            if self._news.done():
                continue
            soon = self.clock() - since < 4 * max(rest, took)
            # Not a Backoff either: nothing has failed, and the rivals set the length.
            rest = self._rivals * self.round / 2 if self._rivals else max(2 * rest, FIRST_REST * took)
            rest = min(rest, max(MOST_REST, 8 * took), self._timeout / 2) if soon else 0.0
            if rest:
                await asyncio.wait({self._news}, timeout=rest * self._random.uniform(0.5, 1.0))

    async def _watch(self, stamp: str) -> bool:
        """Wait for a change of the register, or for a new request of a task; return False after an error.

        Cancelling it ends the watch.
        """
        assert self._news is not None  # noqa: S101 - made at the beginning of each round
        watch = start(self.register.changed(stamp), "aiolock-watch")
        try:
            await asyncio.wait({watch, self._news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            await asyncio.wait({watch})
        if not watch.cancelled() and (error := watch.exception()) is not None:
            if not isinstance(error, BackendError) or not error.retryable:
                raise error
            self._trouble = error
            return False
        return True

    def _read(self, entry: Entry) -> Body:
        """Return the body, settle the updates of a write that turned out to have counted, and note the number of rivals.

        Raises :class:`UnsafeBackend` if the register has an unknown format.
        """
        content = self._log.read(entry)
        if content is None:
            raise UnsafeBackend(
                f"the register of {self._title} was not written by this version of the library"
            )
        body, results = content
        self._rivals = self.rivals(body)
        self._settle(results)
        return body

    async def _write(self, entry: Entry, readable: set[asyncio.Future[Any]]) -> Entry | None:
        """Apply the updates and return what the register contains then; ``None`` if another writer was faster.

        Updates that change nothing are answered if they are ``readable``; the others wait for the next read. Cancelling it
        leaves open whether the write counts.
        """
        before = body = self._read(entry)
        results: Results = {}
        for future, update in list(self._updates.items()):
            try:
                after, results[future] = update(body)
            except Exception as error:  # noqa: BLE001 - an error of any kind belongs to the caller of the update
                if future in readable:
                    self._updates.pop(future, None)
                    reject(future, error)
            else:
                body = body if after is None else after
        if body is before:
            self._settle({future: result for future, result in results.items() if future in readable})
            # A condition may depend on the result of an update.
            self._check(self._read(entry))
            return entry
        value = self._log.write(body, results)
        if len(value) > MOST_BYTES:
            self.full = True
            raise BackendRefused(
                f"{self._title} has too many users: its register would have {len(value)} bytes, and {MOST_BYTES} is the most"
            )
        self._sent = self.clock()
        stamp = await self.register.write(value, entry.stamp, self._keep)
        if stamp is None:
            # Usually a lost race; but a request that was sent twice fails as well, and its first copy may have counted.
            return None
        self._log.counted()
        self._settle(results)
        written = Entry(value, stamp)
        self._check(self._read(written))
        return written

    def _settle(self, results: Results) -> None:
        for future, result in results.items():
            self._updates.pop(future, None)
            settle(future, result)

    def _check(self, body: Body) -> None:
        """Evaluate all conditions."""
        for wait in [wait for wait in self._waits if not wait.ended]:
            wait.checked = True
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
        for future in self._updates:
            reject(future, error())
        for wait in self._waits:
            wait.end(WakeReason.FAILED, error=error())
        self._updates.clear()
        self._waits.clear()


def _fail_with(wait: _Wait, update: asyncio.Future[Any]) -> None:
    if not update.cancelled() and isinstance(error := update.exception(), Exception):
        wait.end(WakeReason.FAILED, error=error)
