"""Documents: a hash of its own for each, changed by compare-and-set, and the processes that want to be told.

The push is a hint, as it is for locks: whoever waits looks again every two seconds, ten times a second without pub/sub.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from aiolock.backends.redis.commands import Script
from aiolock.backends.redis.scripts import source
from aiolock.document import ABSENT, MOST_BYTES, Document, Entry
from aiolock.errors import BackendError, BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from aiolock.backends.redis.backend import RedisBackend

__all__ = ["WATCH", "WRITE", "Documents", "RedisDocument"]

WRITE, WATCH = Script(source("doc_write")), Script(source("doc_watch"))

LOOK = 2.0
"""Seconds between looks at a document that somebody waits for."""
ASKING = 0.1
"""The same while changes cannot be pushed to us."""
LIFE_MS = "6000"
"""For how many ms the server remembers that a process watches, unless it says so again."""


class Documents:
    """What one client looks at."""

    def __init__(self, backend: RedisBackend) -> None:
        self._backend = backend
        self._count = 0
        self._seen = 0
        self._waiting: dict[str, set[RedisDocument]] = {}

    def document(self, key: str) -> RedisDocument:
        """A view of the document under that key; no I/O."""
        return RedisDocument(self, key)

    # --- what the server says

    def heard(self, key: str) -> None:
        """A document has changed."""
        for document in tuple(self._waiting.get(key, ())):
            document.wake()

    def look(self) -> None:
        """Something may have been missed."""
        for documents in tuple(self._waiting.values()):
            for document in tuple(documents):
                document.look()

    # --- what documents send

    async def read(self, key: str) -> Entry:
        """The document and its stamp."""
        value, stamp = await self._backend.call("HMGET", key, "value", "stamp")
        return Entry(value, self._saw(stamp)) if stamp else ABSENT

    async def write(self, key: str, value: bytes, stamp: str, keep: float) -> str | None:
        """Compare and set; the number makes the stamp that of this write alone."""
        self._count += 1
        backend = self._backend
        request = f"{backend.process}{self._count:x}"
        words = (value, stamp, request, round(keep * 1000), self._seen)
        written = await backend.send(WRITE, (key,), words)
        return None if written is None else self._saw(written)

    async def watch(self, document: RedisDocument) -> str:
        """Have us told of changes from now on; the stamp."""
        if not self._backend.usable:
            raise BackendUnavailable("the client was closed while this document was watched", retryable=False)
        self._waiting.setdefault(document.key, set()).add(document)
        life = LIFE_MS if self._backend.wakeups.pushed else "0"
        return self._saw(await self._backend.send(WATCH, (document.key,), (self._backend.process, life)))

    def forget(self, document: RedisDocument) -> None:
        """Nobody waits for it through this view at the moment."""
        documents = self._waiting.get(document.key)
        if documents is not None:
            documents.discard(document)
            if not documents:
                del self._waiting[document.key]

    def unwatch(self, key: str) -> None:
        """Have us not told any more, unless somebody else here still waits; not waited for, and nothing if it is lost."""
        if key not in self._waiting and self._backend.usable:
            # In a forked child the connection is its parent's, and so is the watch.
            with contextlib.suppress(RuntimeError):
                self._backend.send(WATCH, (key,), (self._backend.process, "0"))

    @property
    def pause(self) -> float:
        """Seconds between looks."""
        return LOOK if self._backend.wakeups.pushed else ASKING

    def _saw(self, stamp: bytes) -> str:
        """Remember the highest time in a stamp; it travels with every write."""
        text = stamp.decode()
        if text:
            self._seen = max(self._seen, int(text.partition("-")[0]))
        return text


class RedisDocument(Document):
    """One view of one document."""

    def __init__(self, documents: Documents, key: str) -> None:
        self.key = key
        self._documents = documents
        self._woken: asyncio.Future[bool] | None = None
        self._watched = False
        """Whether the server may know that we want to be told."""

    async def read(self) -> Entry:
        """One round trip."""
        return await self._documents.read(self.key)

    async def write(self, value: bytes, stamp: str, keep: float) -> str | None:
        """One round trip; :class:`ConfigError` for a document that is too long."""
        if len(value) > MOST_BYTES:
            raise ConfigError(f"a document may have {MOST_BYTES} bytes, this one has {len(value)}")
        return await self._documents.write(self.key, value, stamp, keep)

    async def changed(self, stamp: str) -> None:
        """Wait for the push; look now and then whether one was missed. An outage is waited for as well."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                # Before the first byte is sent: the push may come before the answer.
                self._woken = loop.create_future()
                self._watched = True
                try:
                    if await self._documents.watch(self) != stamp:
                        return
                except BackendError as error:
                    if not error.retryable:
                        raise
                timer = loop.call_later(self._documents.pause, self.look)
                try:
                    if await self._woken:
                        return
                finally:
                    timer.cancel()
        finally:
            self._woken = None
            self._documents.forget(self)

    def wake(self) -> None:
        """It may have changed."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(True)

    def look(self) -> None:
        """Somebody has to ask whether it has changed."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(False)

    async def aclose(self) -> None:
        """Ends a wait that is under way, and tells the server without waiting for an answer."""
        self.wake()
        if self._watched:
            self._watched = False
            self._documents.forget(self)
            self._documents.unwatch(self.key)
