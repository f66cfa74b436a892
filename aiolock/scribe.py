"""The task that works on one document for all of a client's tasks that want something of it.

What is wished is put into one write, by compare-and-set, again and again until a write was the first for its version; and
one watch serves all who wait. It ends when nobody wants anything any more.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from random import Random
from typing import Any

from aiolock.clock import Clock
from aiolock.document import MOST_BYTES, Document, Entry
from aiolock.errors import BackendError, BackendRefused
from aiolock.pen import Answers, Body, Pen, Step, carry_out, settle

__all__ = ["Look", "Scribe", "Wants"]

Look = Callable[[Body], Any]
"""``None`` to go on waiting, else the answer."""

PAUSE = 0.005
"""Seconds to wait at most after a lost race, doubled with each one more, up to 128 times as much."""


class Wants:
    """What tasks want of a document, each by a future."""

    def __init__(self) -> None:
        self.wishes: dict[asyncio.Future[Any], Step] = {}
        """In the order in which they came."""
        self.waits: dict[asyncio.Future[Any], Look] = {}
        self.seen: set[asyncio.Future[Any]] = set()
        """The waits that have looked once: they survive an outage."""

    def __bool__(self) -> bool:
        return bool(self.wishes or self.waits)

    def answer(self, answers: Answers) -> None:
        """Tell whoever wished it."""
        for wish, answer in answers.items():
            self.wishes.pop(wish, None)
            settle(wish, answer)

    def look(self, body: Body) -> None:
        """Ask everybody who waits whether it is over."""
        for wait, look in list(self.waits.items()):
            self.seen.add(wait)
            try:
                answer = look(body)
            except Exception as error:  # noqa: BLE001 - whatever a look says to this body, who waits hears of it
                settle(wait, error=error)
            else:
                if answer is not None:
                    settle(wait, answer)
            if wait.done():
                self.waits.pop(wait, None)

    def fail(self, error: Callable[[], Exception]) -> None:
        """Tell everybody that nothing will come of it."""
        for future in (*self.wishes, *self.waits):
            settle(future, error=error())
        self.wishes.clear()
        self.waits.clear()


class Scribe:
    """Reads and writes one document; ``what`` it is called in sentences."""

    def __init__(self, document: Document, what: str, keep: float, clock: Clock, random: Random) -> None:
        self.wants = Wants()
        self.pen = Pen()
        self.document = document
        self.trouble: BackendError | None = None
        """Why the server could not be asked; ``None`` if it could."""
        self.full = False
        """Whether it has ended because the document would be longer than a server keeps."""
        self.sent = math.inf
        """Since when the server has owed an answer, by the client's clock."""
        self._what = what
        self._keep = keep
        self._clock = clock
        self._random = random
        self._news: asyncio.Future[None] | None = None

    def hurry(self) -> None:
        """Somebody wants something new, or nothing more."""
        if self._news is not None:
            settle(self._news)

    async def serve(self) -> None:
        """Work until nobody wants anything. Raises what the server says that no other try can change.

        Cancelling it leaves open what came of the write that is under way.
        """
        races, sight, wants = 0, False, self.wants
        entry = Entry(b"", "")
        while wants:
            self._news = asyncio.get_running_loop().create_future()
            # A step that changes nothing is answered by what was read after it was wished, and by nothing older: others
            # may have written in between. One that changes something is checked by the server.
            asked = set() if sight else set(wants.wishes)
            try:
                if not sight:
                    self.sent = self._clock()
                    entry = await self.document.read()
                    self.trouble = None
                    wants.look(self._read(entry))
                written = await self._write(entry, asked) if wants.wishes else entry
            except BackendError as error:
                if not error.retryable:
                    raise
                self.trouble, written = error, None
            finally:
                self.sent = math.inf
            if written is None:
                sight, races = False, races + 1
                await asyncio.sleep(self._random.random() * PAUSE * 2 ** min(races, 7))
                continue
            races, sight, entry = 0, written is not entry, written
            if wants.wishes:
                # They came while we read or wrote: after a write what stands there is that, unless the next says otherwise.
                continue
            sight = False
            if wants.waits:
                await self._changed(entry.stamp)

    async def _changed(self, stamp: str) -> None:
        """Wait for a change of the document, or for somebody of ours who wants something else."""
        assert self._news is not None  # noqa: S101 - made at the beginning of each round
        watch = asyncio.ensure_future(self.document.changed(stamp))
        try:
            await asyncio.wait({watch, self._news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            await asyncio.wait({watch})
        if not watch.cancelled() and (error := watch.exception()) is not None:
            if not isinstance(error, BackendError) or not error.retryable:
                raise error
            self.trouble = error
            await asyncio.sleep(self._random.random() * PAUSE * 100)

    def _read(self, entry: Entry) -> Body:
        """What stands there; a write of ours that turns out to have counted is answered."""
        page = self.pen.read(entry)
        if page is None:
            raise BackendRefused(
                f"the document of {self._what} was not written by this version of the library"
            )
        body, answers = page
        self.wants.answer(answers)
        return body

    async def _write(self, entry: Entry, asked: set[asyncio.Future[Any]]) -> Entry | None:
        """Carry out what is wished: what stands there now, or ``None`` if somebody else was faster.

        What would change nothing, and was not ``asked`` before ``entry`` was read, waits for the next reading.
        """
        wants = self.wants
        body = self._read(entry)
        draft = carry_out(list(wants.wishes.items()), body)
        for wish, error in draft.failures.items():
            if wish in asked:
                wants.wishes.pop(wish, None)
                settle(wish, error=error)
        if draft.body is None:
            wants.answer({wish: answer for wish, answer in draft.answers.items() if wish in asked})
            # Who waits may have waited for that answer.
            wants.look(self._read(entry))
            return entry
        value = self.pen.write(draft.body, draft.answers)
        if len(value) > MOST_BYTES:
            self.full = True
            raise BackendRefused(
                f"{self._what} has too many users: its document would have {len(value)} bytes, and {MOST_BYTES} is the most"
            )
        self.sent = self._clock()
        stamp = await self.document.write(value, entry.stamp, self._keep)
        if stamp is None:
            # Usually a lost race; but a request that was sent twice fails as well, and its first copy may have counted.
            return None
        self.pen.counted()
        wants.answer(draft.answers)
        written = Entry(value, stamp)
        wants.look(self._read(written))
        return written
