"""Rows in one memcached server: items with CAS ids, which are the versions of rows.

A version names the connection that read it, because the CAS ids of a server that was started again begin anew. Tokens are
counted from the start of the server and the CAS ids since, so that they rise although an item was forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from urllib.parse import unquote_to_bytes

from aiolock.backends.memcached.connection import Connection, Reply, new_connection
from aiolock.backends.memcached.protocol import Response, delete, expiry, read, refusal, write
from aiolock.backends.rows.store import Edit, Listener, Row, RowStore
from aiolock.backends.urls import Host
from aiolock.core.backend import Settings
from aiolock.errors import BackendUnavailable

__all__ = ["MemcachedStore"]

PAGE = 500
ABSENT = Row(b"", "")
TOKENS = 32
"""Tokens for each write at the server, so that a client has some for hand-overs among its tasks. Across restarts tokens rise
if the server has made fewer than 31,250 writes a second in its life."""
BUSY = 0.05
"""Seconds between two tries to list keys while the server does so for another client."""


class MemcachedStore(RowStore):
    """The rows of one server."""

    capabilities = frozenset({"fifo", "keep"})
    poll = 0.002
    expires = True

    def __init__(self, host: Host) -> None:
        self._host = host
        self._connection: Connection | None = None

    async def open(self, settings: Settings, listener: Listener) -> None:
        """Connect, check the server, and mark the namespace."""
        self._settings = settings
        self._connection = Connection(
            self._host,
            settings.namespace,
            listener.interrupted,
            clock=settings.clock,
            command_timeout=settings.command_timeout,
            outages=settings.outages,
        )
        await self._connection.open()

    @property
    def _open(self) -> Connection:
        if self._connection is None:
            raise BackendUnavailable(f"memcached://{self._host}: the client is closed")
        return self._connection

    async def _ask(self, commands: Sequence[bytes], *, write: bool = False) -> list[Row | None]:
        """Send commands in one flight; return the row of each answer, or ``None`` if another version was there or none."""
        if not commands:
            return []
        reply = await self._open.ask(commands, write=write)
        for answer in reply.answers:
            if answer.code == b"ERROR":
                raise refusal(f"memcached://{self._host}", answer.value)
        return [_row(reply, answer) if answer.done else None for answer in reply.answers]

    async def get(self, keys: Sequence[str]) -> list[Row]:
        """Return rows."""
        return [row or ABSENT for row in await self._ask([read(key) for key in keys])]

    async def versions(self, keys: Sequence[str]) -> list[Row]:
        """Return rows without their values."""
        return [row or ABSENT for row in await self._ask([read(key, value=False) for key in keys])]

    async def compare_and_set(self, edits: Sequence[Edit]) -> list[Row | None]:
        """Send all edits in one flight; the server makes each on its own."""
        return await self._ask([self._command(edit) for edit in edits], write=True)

    def _command(self, edit: Edit) -> bytes:
        connection = self._open
        generation, _, cas = edit.expected.partition(".")
        if edit.expected and int(generation) != connection.generation:
            raise BackendUnavailable(
                f"{connection.address}: the connection was lost on which this version was read"
            )
        if edit.value is None:
            return delete(edit.key, cas)
        return write(edit.key, edit.value, cas, expiry(edit.ttl, connection.now))

    async def scan(self, prefix: str) -> AsyncIterator[tuple[str, Row]]:
        """Have the server list its keys, and yield the rows whose key begins with ``prefix``."""
        start, keys = b"key=" + prefix.encode(), []
        async with new_connection(self._host, self._settings.command_timeout) as connection:
            line = b"BUSY"
            while line.startswith(b"BUSY"):
                # By its hash table, because items move between the lists of their age meanwhile.
                connection.send(b"lru_crawler metadump hash\r\n")
                line = await connection.line()
                if line.startswith(b"BUSY"):
                    await asyncio.sleep(BUSY)
            while line != b"END":
                word = unquote_to_bytes(line.partition(b" ")[0])
                if word.startswith(start):
                    keys.append(word[4:].decode())
                elif b"ERROR" in word:
                    raise refusal(str(self._host), line)
                line = await connection.line()
        for first in range(0, len(keys), PAGE):
            page = keys[first : first + PAGE]
            for key, row in zip(page, await self.get(page), strict=True):
                if row.version:
                    yield key, row

    async def purge(self, prefix: str, idle: float, spared: Collection[str] = ()) -> int:
        """Leave it to the server, which deletes each row when its ttl has passed."""
        del prefix, idle, spared
        return 0

    async def aclose(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()


def _row(reply: Reply, answer: Response) -> Row:
    """Return the row that an answer shows; a deleted one has no CAS id."""
    if not answer.cas:
        return ABSENT
    tick = reply.started * 1_000_000 + TOKENS * int(answer.cas)
    return Row(answer.value, f"{reply.generation}.{answer.cas}", tick)
