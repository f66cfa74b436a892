"""Rows in an etcd cluster: keys that are read and changed by transactions, with leases and watches.

The version of a row is the revision of its last change, which the cluster makes; it names the connection that read it, so
that none is used after a cluster was put back to an earlier state. Tokens are counted from the revision."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence

from aiolock.backends.etcd.connection import Call, Connection
from aiolock.backends.etcd.errors import LEASE_GONE, RpcError
from aiolock.backends.etcd.leases import SHORTEST, Leases, for_rows, for_session
from aiolock.backends.etcd.messages import (
    RANGE,
    TXN,
    KeyValue,
    delete,
    get,
    page,
    put,
    reading,
    scan,
    txn,
    unchanged,
    written,
)
from aiolock.backends.etcd.url import Address
from aiolock.backends.rows.store import ALL, Edit, Listener, Row, RowStore
from aiolock.core.backend import Settings
from aiolock.errors import BackendError, BackendUnavailable

__all__ = ["EtcdStore", "capabilities"]

TOGETHER = 100
"""Keys of one transaction; etcd admits 128 by default."""
PAGE = 100
"""Rows of one answer of a scan."""
TOKENS = 32
"""Tokens for each revision, so that a client has some for hand-overs among its tasks."""


def capabilities(members: int) -> frozenset[str]:
    """Return the capabilities of a cluster of so many members; ``survives-failover`` takes three."""
    return EtcdStore.capabilities | ({"survives-failover"} if members >= 3 else frozenset())


class EtcdStore(RowStore):
    """The rows of one namespace."""

    push = True
    expires = True
    capabilities = frozenset(
        {
            "exclusion",
            "fencing",
            "fifo",
            "keep",
            "no-eviction",
            "push",
            "survives-restart",
        }
    )

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: Connection | None = None

    async def open(self, settings: Settings, listener: Listener) -> None:
        """Connect, check the cluster, mark the namespace, and watch."""
        self._settings = settings
        self._sessions = f"{settings.namespace}/s/"
        self._notes = f"{settings.namespace}/n/"
        self._changed = listener.changed
        self._connection = connection = Connection(
            self._address,
            settings.namespace,
            [f"{self._notes}{listener.address}", f"{self._notes}{ALL}"],
            self._notified,
            listener.interrupted,
            clock=settings.clock,
            command_timeout=settings.command_timeout,
            outages=settings.outages,
            random=settings.random,
        )
        self._leases = Leases(self._write, settings.clock)
        await connection.open()
        self.capabilities = capabilities(connection.members or len(self._address.hosts))

    @property
    def _open(self) -> Connection:
        if self._connection is None:
            raise BackendUnavailable(f"{self._address.text}: the client is closed")
        return self._connection

    def _notified(self, key: bytes) -> None:
        self._changed(key.decode(errors="replace"))

    async def _write(self, path: str, request: bytes) -> bytes:
        [call] = self._open.ask(path, [request], write=True)
        return await call.future

    # --- reads

    async def get(self, keys: Sequence[str]) -> list[Row]:
        """Return rows."""
        return await self._read(keys, values=True)

    async def versions(self, keys: Sequence[str]) -> list[Row]:
        """Return rows without their values."""
        return await self._read(keys, values=False)

    async def _read(self, keys: Sequence[str], *, values: bool) -> list[Row]:
        parts = [keys[first : first + TOGETHER] for first in range(0, len(keys), TOGETHER)]
        calls = self._open.ask(TXN, [get(part, values=values) for part in parts])
        found = []
        for call, answer in zip(calls, await _answers(calls), strict=True):
            read = reading(answer)
            found += [_row(call.generation, rows, read.revision) for rows in read.rows]
        return found

    # --- writes

    async def compare_and_set(self, edits: Sequence[Edit]) -> list[Row | None]:
        """Send each edit as a transaction of its own, all in one flight."""
        generation = self._open.generation
        answers = await self._send(edits, generation)
        if gone := [number for number, answer in enumerate(answers) if _lease_gone(answer)]:
            # Leases were revoked. These transactions were refused as a whole, and are sent once more with others.
            self._leases.clear()
            others = await self._send([edits[number] for number in gone], generation)
            for number, answer in zip(gone, others, strict=True):
                answers[number] = answer
        return [_made(generation, edit, answer) for edit, answer in zip(edits, answers, strict=True)]

    async def _send(self, edits: Sequence[Edit], generation: int) -> list[bytes | BaseException]:
        """Send each edit on this connection, and return the answers or what came instead."""
        connection = self._open
        leases = [self._lease_at_hand(edit) for edit in edits]
        if None in leases:
            leases = list(await asyncio.gather(*map(self._lease, edits)))
        note = await self._lease_of_notes() if any(edit.notify for edit in edits) else 0
        requests = [
            self._request(edit, generation, lease or 0, note)
            for edit, lease in zip(edits, leases, strict=True)
        ]
        if connection.generation != generation:
            raise BackendUnavailable(
                f"{connection.address}: the connection was lost before the request was sent"
            )
        calls = connection.ask(TXN, requests, write=True) if requests else []
        return await asyncio.gather(*(call.future for call in calls), return_exceptions=True)

    def _lease_at_hand(self, edit: Edit) -> int | None:
        """Return the lease of an edit, 0 for one without, and ``None`` if the cluster has to be asked."""
        if edit.ttl is None or edit.value is None:
            return 0
        return self._leases.ready(self._length(edit.key, edit.ttl), edit.ttl) or None

    async def _lease(self, edit: Edit) -> int:
        if edit.ttl is None or edit.value is None:
            return 0
        return await self._leases.get(self._length(edit.key, edit.ttl), edit.ttl)

    def _length(self, key: str, ttl: float) -> int:
        return for_session(ttl) if key.startswith(self._sessions) else for_rows(ttl)

    async def _lease_of_notes(self) -> int:
        """Return the lease of the keys by which clients are notified; they are of no use soon afterwards."""
        seconds = for_rows(SHORTEST)
        return self._leases.ready(seconds, SHORTEST) or await self._leases.get(seconds, SHORTEST)

    def _request(self, edit: Edit, generation: int, lease: int, note: int) -> bytes:
        revision = 0
        if edit.expected:
            connected, _, number = edit.expected.partition(".")
            if int(connected) != generation:
                raise BackendUnavailable(
                    f"{self._address.text}: the connection was lost on which this version was read"
                )
            revision = int(number)
        change = delete(edit.key) if edit.value is None else put(edit.key, edit.value, lease)
        notified = edit.notify if len(edit.notify) < TOGETHER else {ALL}
        notes = [put(f"{self._notes}{each}", edit.key.encode(), note) for each in sorted(notified)]
        return txn([unchanged(edit.key, revision)], [change, *notes])

    # --- maintenance

    async def scan(self, prefix: str) -> AsyncIterator[tuple[str, Row]]:
        """Yield the rows whose key begins with ``prefix``, by key."""
        after = start = prefix.encode()
        while True:
            [call] = self._open.ask(RANGE, [scan(after, start, PAGE)])
            read = page(await call.future)
            [rows] = read.rows
            for row in rows:
                yield row.key.decode(errors="replace"), _row(call.generation, [row], read.revision)
            if not read.more or not rows:
                return
            after = rows[-1].key + b"\0"

    async def purge(self, prefix: str, idle: float, spared: Collection[str] = ()) -> int:
        """Leave it to the cluster, which deletes each row with its lease."""
        del prefix, idle, spared
        return 0

    async def aclose(self) -> None:
        """Close the connection; leases end by themselves."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()

    # --- fencing

    async def put_while_shown(self, key: str, value: bytes, row: str, revision: str) -> int | None:
        """Set a key of an application if a row has still the version ``revision``; return the new revision, or ``None``.

        Cancelling it leaves open whether the key was set.
        """
        condition = unchanged(row, int(revision.partition(".")[2]))
        done = written(await self._write(TXN, txn([condition], [put(key, value)])))
        return done.revision if done.made else None


async def _answers(calls: Sequence[Call]) -> list[bytes]:
    """Return the answers to calls under way, or raise the first error."""
    return await asyncio.gather(*(call.future for call in calls))


def _row(generation: int, found: Sequence[KeyValue], revision: int) -> Row:
    tick = TOKENS * revision
    if not found:
        return Row(b"", "", tick)
    return Row(found[0].value, f"{generation}.{found[0].revision}", tick)


def _lease_gone(answer: bytes | BaseException) -> bool:
    """Test whether a transaction was refused because its lease is not there any more."""
    cause = answer.__cause__ if isinstance(answer, BackendError) else None
    return isinstance(cause, RpcError) and LEASE_GONE in cause.text


def _made(generation: int, edit: Edit, result: bytes | BaseException) -> Row | None:
    if isinstance(result, BaseException):
        raise result
    answer = written(result)
    if not answer.made:
        return None
    version = "" if edit.value is None else f"{generation}.{answer.revision}"
    return Row(b"", version, TOKENS * answer.revision)
