"""Registers: a row with a version, changed by compare-and-set."""

from __future__ import annotations

import secrets
from contextlib import suppress

from aiolock.backends.mysql.context import Context, hexed, quote
from aiolock.backends.mysql.listener import Listener, Watch
from aiolock.core.capabilities import ABSENT, Entry, Register
from aiolock.errors import LockError
from aiolock.types import Family

__all__ = ["MySQLRegister"]

LIFE = 10.0
"""Seconds that a watch lives without being prolonged by its client."""


class MySQLRegister(Register):
    """A row; a client that changes it wakes the clients that watch it."""

    def __init__(self, context: Context, listener: Listener, name: str, family: Family) -> None:
        self._context = context
        self._listener = listener
        self._name = name
        self._family = family
        self._watch = Watch(name, context.key(f"{name}\0register", family), secrets.token_hex(16))
        self._watched = False

    async def read(self) -> Entry:
        """Return the row as it is now."""
        context = self._context
        packet = context.statements("read_register", id=quote(self._watch.key))
        if context.facts.galera:
            # The commits of other nodes must have arrived first.
            packet = f"SET SESSION wsrep_sync_wait=1; {packet}; SET SESSION wsrep_sync_wait=0"
        answers = await context.ask(packet)
        for value, version in answers[1 if context.facts.galera else 0].rows:
            return Entry(bytes(value), str(version))
        return ABSENT

    async def write(self, value: bytes, stamp: str, keep: float) -> str | None:
        """Change the row if its version is still that one, and wake the watches."""
        return await self._context.within(self._write(value, stamp, keep))

    async def _write(self, value: bytes, stamp: str, keep: float) -> str | None:
        context, key = self._context, quote(self._watch.key)
        packet = context.statements(
            "update_register" if stamp else "create_register",
            id=key,
            family=quote(self._family.value),
            name=hexed(self._name),
            value=f"_binary X'{value.hex()}'",
            version=int(stamp or 0),
            keep=round(keep * 1_000_000),
        )
        packet = f"{packet}; {context.statements('register_written', id=key)}"
        # Not twice if the answer is lost: the second would say that another client was faster.
        (written, version, watchers), _ = await context.change(packet, repeat=False)
        if not written.changed:
            return None
        if clients := {str(client) for (client,) in watchers.rows}:
            await self._listener.wake(clients)
        return str(version.rows[0][0])

    async def changed(self, stamp: str) -> None:
        """Wait until a poll finds another version; a write brings the poll forward."""
        context, watch = self._context, self._watch
        watch.version = stamp
        watch.inbox.take()
        self._watched = True
        packet = context.statements(
            "watch",
            id=quote(watch.key),
            owner=quote(watch.owner),
            client=quote(context.client),
            ttl=round(LIFE * 1_000_000),
        )
        try:
            [*_, now] = await context.ask(packet)
            if [str(version) for (version,) in now.rows] == ([stamp] if stamp else []):
                self._listener.watch(watch)
                await watch.inbox.wait()
        finally:
            self._listener.forget(watch)

    async def aclose(self) -> None:
        """End the watch; one that is forgotten ends by itself."""
        self._listener.forget(self._watch)
        if not self._watched:
            return
        with suppress(LockError):
            await self._context.ask(self._context.statements("depart", leaving=quote(self._watch.owner)))
        self._watched = False
