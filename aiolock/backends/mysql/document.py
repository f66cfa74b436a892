"""One client's view of a document: a row with a version, changed by compare-and-set."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from aiolock.backends.mysql.failures import NOT_NOW, code
from aiolock.backends.mysql.statements import hexed, quote
from aiolock.contract import Document, Family
from aiolock.document import ABSENT, Entry
from aiolock.errors import BackendUnavailable, DeadlockDetected, LockError

if TYPE_CHECKING:
    from aiolock.backends.mysql.sharing import Sharing

__all__ = ["MySQLDocument"]

AGAIN = (0.001, 0.01)
"""Seconds before a write is tried again that met another one."""
LIFE = 10.0
"""Seconds that a watch lives without a word from its client."""


class MySQLDocument(Document):
    """A row; whoever changes it wakes the clients that watch it."""

    def __init__(self, sharing: Sharing, name: str, family: Family) -> None:
        self._sharing = sharing
        self._name = name
        self._family = family
        self.key = sharing.backend.key(f"{name}\0document", family)
        self.owner = secrets.token_hex(16)
        """Of our watch."""
        self.stamp = ""
        """What we know."""
        self.event = asyncio.Event()
        self._watched = False

    async def read(self) -> Entry:
        """The row as it is now."""
        backend = self._sharing.backend
        packet = backend.statements("read_document", id=quote(self.key))
        if backend.galera:
            # What another node has committed must have arrived first.
            packet = f"SET SESSION wsrep_sync_wait=1; {packet}; SET SESSION wsrep_sync_wait=0"
        answers = await backend.within(backend.ask(packet))
        for value, version in answers[1 if backend.galera else 0].rows:
            return Entry(bytes(value), str(version))
        return ABSENT

    async def write(self, value: bytes, stamp: str, keep: float) -> str | None:
        """Change the row if its version is still that one, and wake who watches."""
        return await self._sharing.backend.within(self._write(value, stamp, keep))

    async def _write(self, value: bytes, stamp: str, keep: float) -> str | None:
        backend = self._sharing.backend
        packet = backend.statements(
            "write_document" if stamp else "make_document",
            id=quote(self.key),
            namespace=quote(backend.settings.namespace),
            family=quote(self._family.value),
            name=hexed(self._name),
            value=f"_binary X'{value.hex()}'",
            version=int(stamp or 0),
            keep=round(keep * 1_000_000),
        )
        packet = f"{packet}; {backend.statements('told_document', id=quote(self.key))}"
        while True:
            try:
                # Not twice if the answer is lost: the second would say that somebody else was faster.
                written, version, watchers = await backend.ask(packet, repeat=False)
                break
            except (DeadlockDetected, BackendUnavailable) as error:
                # The caller's time is over at some point.
                if not isinstance(error, DeadlockDetected) and code(error.__cause__) not in NOT_NOW:
                    raise
            await backend.pause(AGAIN)
        if not written.changed:
            return None
        await self._sharing.ring({str(client) for (client,) in watchers.rows})
        return str(version.rows[0][0])

    async def changed(self, stamp: str) -> None:
        """Wait until a look finds another version; looks are hurried by whoever writes."""
        self.stamp = stamp
        self.event.clear()
        self._watched = True
        backend = self._sharing.backend
        packet = backend.statements(
            "watch",
            id=quote(self.key),
            owner=quote(self.owner),
            client=quote(self._sharing.client),
            ttl=round(LIFE * 1_000_000),
        )
        try:
            [*_, now] = await backend.within(backend.ask(packet))
            if [str(version) for (version,) in now.rows] == ([stamp] if stamp else []):
                self._sharing.listener.watch(self)
                await self.event.wait()
        finally:
            self._sharing.listener.forget(self)

    async def aclose(self) -> None:
        """The watch goes; one that is forgotten goes by itself."""
        self._sharing.listener.forget(self)
        if not self._watched:
            return
        backend = self._sharing.backend
        with suppress(LockError):
            await backend.within(backend.ask(backend.statements("depart", leaving=quote(self.owner))))
        self._watched = False
