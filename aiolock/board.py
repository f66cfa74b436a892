"""One client's work on one document: what its tasks want is put into one write, and one watch serves all who wait.

A *step* is a pure function from what stands in the document to what shall stand there and an answer. Steps are carried
out by compare-and-set, again and again until a write was the first for its version. A write carries the number that it
has among those of this client, and the document remembers it: after a lost answer the next look tells whether it counted,
so every step counts once. A *look* is a function that says whether the wait is over.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Callable
from typing import Any, Final, TypeVar

from aiolock.clock import Clock
from aiolock.contract import Bid, Claim, Family, Grant, Kind, Mode
from aiolock.document import MOST_BYTES, Document, Entry
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, shorten
from aiolock.queue import closed_error, copy_of
from aiolock.runtime import Runtime

__all__ = ["LATE", "Board", "Body", "Late", "Look", "Step", "board"]

Body = dict[str, Any]
"""What stands in a document; empty if there is none."""
Step = Callable[[Body], tuple[Body | None, Any]]
"""What shall stand there instead (``None``: leave it), and the answer. May be called several times, for other bodies."""
Look = Callable[[Body], Any]
"""``None`` to go on waiting, else the answer."""

R = TypeVar("R")

CLIENTS = 256
"""How many clients a document remembers the last write of; one is asked for only while its client looks for its answer."""
PAUSE = 0.005
"""Seconds to wait at most after a lost race, doubled with each one more, up to 128 times as much."""


class Late:
    """The answer of a wait whose time was over."""


LATE: Final = Late()


def board(runtime: Runtime, name: str, family: Family, keep: float) -> Board:
    """The one that this client has for that document; made if there is none. ``keep`` is for the server, in seconds."""
    found: Board | None = runtime.boards.get((family.value, name))
    return Board(runtime, name, family, keep) if found is None else found


class Board:
    """The wishes and waits of one client concerning one document; gone when there are none."""

    def __init__(self, runtime: Runtime, name: str, family: Family, keep: float) -> None:
        self.name: str = name
        self.family: Family = family
        self.id: str = secrets.token_hex(8)
        """Who this is, in the document."""
        self._runtime = runtime
        self._keep = keep
        self._document: Document = runtime.backend.document(name, family)
        self._wishes: dict[asyncio.Future[Any], Step] = {}
        """In the order in which they came."""
        self._waits: dict[asyncio.Future[Any], Look] = {}
        self._seen: set[asyncio.Future[Any]] = set()
        """The waits that have looked once: they survive an outage."""
        self._writes = 0
        self._doubts: dict[int, dict[asyncio.Future[Any], Any]] = {}
        """The answers of writes of which it is not known whether they counted, by their numbers."""
        self._base = ""
        """The version that these were to replace; as long as it stands, each of them may still arrive."""
        self._trouble: BackendError | None = None
        self._sent = math.inf
        """Since when the server has owed an answer, by the client's clock."""
        self._news: asyncio.Future[None] | None = None
        self._idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._farewell: Step | None = None
        self.user: Any = None
        """What whoever uses this board keeps beside it."""
        runtime.boards[family.value, name] = self
        runtime.contenders[self] = None
        runtime.spawn(self._work(), f"aiolock-{family.value}")

    @property
    def clock(self) -> Clock:
        """The client's clock."""
        return self._runtime.clock

    @property
    def waiting(self) -> int:
        """How many tasks of this client wait here."""
        return len(self._waits)

    @property
    def over(self) -> bool:
        """Whether its work has ended: the next user makes a new one."""
        return self._idle.done()

    # --- what tasks do

    def wish(self, step: Step) -> asyncio.Future[Any]:
        """Have a step carried out; a future for its answer, which fails after the command timeout.

        Cancelling the future takes nothing back.
        """
        wish: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._limit(wish)
        if self.over:
            wish.set_exception(BackendUnavailable("the work on this document has ended"))
        else:
            self._wishes[wish] = step
            self._hurry()
        return wish

    async def change(self, step: Step) -> Any:
        """Have a step carried out, and return its answer.

        Raises what the step raises, and :class:`BackendError` if it could not be carried out, or nobody knows whether it
        was, within the command timeout. Cancelling it stops the waiting, not the step.
        """
        return await self.wish(step)

    async def wait(self, look: Look, timeout: float | None, first: asyncio.Future[Any] | None = None) -> Any:
        """The answer of ``look`` as soon as it has one, or :data:`LATE` after ``timeout`` seconds.

        Raises what ``look`` raises, what the wish ``first`` raises, and :class:`BackendError` if the server cannot be reached at first. Cancelling it
        leaves nothing behind.
        """
        loop = asyncio.get_running_loop()
        if self.over:
            raise BackendUnavailable("the work on this document has ended")
        wait: asyncio.Future[Any] = loop.create_future()
        self._waits[wait] = look
        self._limit(wait)
        if first is not None:
            first.add_done_callback(lambda _: None if first.cancelled() else _fail_with(wait, first))
        timer = None if timeout is None else loop.call_later(timeout, settle, wait, LATE)
        self._hurry()
        try:
            return await wait
        finally:
            if timer is not None:
                timer.cancel()
            wait.cancel()
            self._waits.pop(wait, None)
            self._seen.discard(wait)
            self._hurry()

    def take_back(self, wish: asyncio.Future[Any]) -> None:
        """Forget a step that was not carried out yet; one that is under way may still be."""
        self._wishes.pop(wish, None)

    def in_doubt(self, wish: asyncio.Future[Any]) -> bool:
        """Whether a step stood in a write that was sent, and that may still count although nobody heard so.

        It cannot any more once another write was the first for the version that it was to replace.
        """
        return any(wish in answers for answers in self._doubts.values())

    def farewell(self, step: Step) -> None:
        """What is to be carried out if the client is closed while somebody waits here."""
        self._farewell = step

    def close(self) -> Claim:
        """The client is being closed: tell everybody; what is returned finishes what is under way."""
        for wait in self._waits:
            if not wait.done():
                wait.set_exception(closed_error())
        if self._waits and self._farewell is not None:
            self.wish(self._farewell)
        self._waits.clear()
        self._hurry()
        bid = Bid(
            self.name,
            Kind(self.family, Mode.MUTEX),
            max(self._runtime.command_timeout, 0.1),
            self._runtime.label,
        )
        return _Rest(bid, self._idle)

    def _limit(self, future: asyncio.Future[Any]) -> None:
        timer = asyncio.get_running_loop().call_later(self._runtime.command_timeout, self._give_up, future)

        def done(_: asyncio.Future[Any]) -> None:
            # A wish that nobody waits for any more is carried out all the same, but not tried for ever.
            if not future.cancelled():
                timer.cancel()
                future.exception()

        future.add_done_callback(done)

    def _give_up(self, future: asyncio.Future[Any]) -> None:
        self._wishes.pop(future, None)
        if future.done() or future in self._seen:
            self._hurry()
            return
        limit = self._runtime.command_timeout
        # Who loses races gets his answers, each in a short time.
        silent = self.clock() - self._sent > limit / 2
        why = "the server did not answer" if silent else "too many change it at the same time"
        error = BackendUnavailable(
            f"{self.family.value} {shorten(self.name)} could not be reached or changed within the command timeout of "
            f"{limit:g} s: {self._trouble or why}"
        )
        error.__cause__ = self._trouble
        future.set_exception(error)

    def _hurry(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # --- the task

    async def _work(self) -> None:
        try:
            await self._serve()
        except asyncio.CancelledError:
            self._fail(closed_error)
            raise
        except Exception as error:  # noqa: BLE001 - whatever a backend raises, those who wait hear of it
            failure = error
            self._fail(lambda: copy_of(failure))
        finally:
            self._end()
            await self._document.aclose()

    async def _serve(self) -> None:
        races, sight = 0, False
        entry = Entry(b"", "")
        while self._wishes or self._waits:
            self._news = asyncio.get_running_loop().create_future()
            # A step that changes nothing is answered by what was read after it was wished, and by nothing older: others
            # may have written in between. One that changes something is checked by the server.
            asked = set() if sight else set(self._wishes)
            try:
                if not sight:
                    self._sent = self.clock()
                    entry = await self._document.read()
                    self._trouble = None
                    self._look(entry)
                written = await self._write(entry, asked) if self._wishes else entry
            except BackendError as error:
                if not error.retryable:
                    raise
                self._trouble, written = error, None
            finally:
                self._sent = math.inf
            if written is None:
                sight, races = False, races + 1
                await asyncio.sleep(self._runtime.random.random() * PAUSE * 2 ** min(races, 7))
                continue
            races, sight, entry = 0, written is not entry, written
            if self._wishes:
                # They came while we read or wrote: after a write what stands there is that, unless the next says otherwise.
                continue
            sight = False
            if self._waits:
                await self._changed(entry.stamp)

    async def _changed(self, stamp: str) -> None:
        """Wait for a change of the document, or for somebody of ours who wants something else."""
        assert self._news is not None  # noqa: S101 - made at the beginning of each round
        watch = asyncio.ensure_future(self._document.changed(stamp))
        try:
            await asyncio.wait({watch, self._news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            await asyncio.wait({watch})
        if not watch.cancelled() and (error := watch.exception()) is not None:
            if not isinstance(error, BackendError) or not error.retryable:
                raise error
            self._trouble = error
            await asyncio.sleep(self._runtime.random.random() * PAUSE * 100)

    async def _write(self, entry: Entry, asked: set[asyncio.Future[Any]]) -> Entry | None:
        """Carry out what is wished: what stands there now, or ``None`` if somebody else was faster.

        What would change nothing, and was not ``asked`` before ``entry`` was read, waits for the next reading.
        """
        body, seen = _decode(entry, self)
        steps = [(wish, step) for wish, step in self._wishes.items()]
        answers: dict[asyncio.Future[Any], Any] = {}
        new = body
        for wish, step in steps:
            try:
                after, answer = step(new)
            except Exception as error:  # noqa: BLE001 - whatever a step says to this body, who wished it hears of it
                if wish in asked:
                    self._wishes.pop(wish, None)
                    settle(wish, error=error)
                continue
            answers[wish] = answer
            new = new if after is None else after
        if new is body:
            self._answer({wish: answer for wish, answer in answers.items() if wish in asked})
            # Who waits may have waited for that answer.
            self._look(entry)
            return entry
        self._writes += 1
        seen.pop(self.id, None)
        seen = {**dict(list(seen.items())[-CLIENTS + 1 :]), self.id: self._writes}
        value = json.dumps({"v": 1, "seen": seen, "body": new}, separators=(",", ":")).encode()
        if len(value) > MOST_BYTES:
            raise BackendRefused(
                f"{self.family.value} {shorten(self.name)} has too many users: its document would have {len(value)} bytes, "
                f"and {MOST_BYTES} is the most"
            )
        if entry.stamp != self._base:
            self._doubts, self._base = {}, entry.stamp
        self._doubts[self._writes] = answers
        self._sent = self.clock()
        stamp = await self._document.write(value, entry.stamp, self._keep)
        if stamp is None:
            # Usually a lost race; but a request that was sent twice fails as well, and its first copy may have counted.
            return None
        self._doubts.clear()
        self._answer(answers)
        written = Entry(value, stamp)
        self._look(written)
        return written

    def _look(self, entry: Entry) -> None:
        """Learn what came of a write in doubt, and ask everybody who waits whether it is over."""
        body, seen = _decode(entry, self)
        if (counted := self._doubts.get(seen.get(self.id, 0))) is not None:
            self._answer(counted)
            self._doubts.clear()
        elif entry.stamp != self._base:
            # Another write was the first: none of them counts any more.
            self._doubts.clear()
        for wait, look in list(self._waits.items()):
            self._seen.add(wait)
            try:
                answer = look(body)
            except Exception as error:  # noqa: BLE001 - whatever a look says to this body, who waits hears of it
                settle(wait, error=error)
            else:
                if answer is not None:
                    settle(wait, answer)
            if wait.done():
                self._waits.pop(wait, None)

    def _answer(self, answers: dict[asyncio.Future[Any], Any]) -> None:
        for wish, answer in answers.items():
            self._wishes.pop(wish, None)
            settle(wish, answer)

    def _fail(self, error: Callable[[], Exception]) -> None:
        for future in (*self._wishes, *self._waits):
            if not future.done():
                future.set_exception(error())
        self._wishes.clear()
        self._waits.clear()

    def _end(self) -> None:
        runtime = self._runtime
        if runtime.boards.get((self.family.value, self.name)) is self:
            del runtime.boards[self.family.value, self.name]
        runtime.contenders.pop(self, None)
        settle(self._idle, None)


def settle(future: asyncio.Future[Any], answer: Any = None, error: Exception | None = None) -> None:
    """Answer, unless that was done before, or nobody waits any more."""
    if not future.done():
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)


def _fail_with(wait: asyncio.Future[Any], wish: asyncio.Future[Any]) -> None:
    if (error := wish.exception()) is not None and isinstance(error, Exception):
        settle(wait, error=error)


def _decode(entry: Entry, reader: Board) -> tuple[Body, dict[str, int]]:
    if not entry.value:
        return {}, {}
    try:
        whole = json.loads(entry.value)
        if whole["v"] == 1:
            return whole["body"], whole["seen"]
    except (ValueError, TypeError, KeyError):
        pass
    raise BackendRefused(
        f"the document of {reader.family.value} {shorten(reader.name)} was not written by this version of the library"
    )


class _Rest(Claim):
    """What is still to be written when a client is closed; not a hold, but finished like one."""

    __slots__ = ("_idle",)

    def __init__(self, bid: Bid, idle: asyncio.Future[None]) -> None:
        super().__init__(bid)
        self._idle = idle

    async def attempt(self, wait: bool) -> Grant | None:  # noqa: ARG002 - there is nothing to ask for
        """Never asked."""
        return None

    async def changed(self) -> None:
        """Never waited for."""

    async def release(self, keep: float = 0) -> None:  # noqa: ARG002 - there is nothing to keep
        """Wait until nothing is left to write."""
        await asyncio.shield(self._idle)
