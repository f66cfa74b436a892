"""Rows in a MongoDB collection: documents that are read linearizably and replaced by compare-and-set.

A write is one ``findAndModify`` whose condition is the version, which the writer has chosen; it is answered when a majority
of the members has it in their journals. A read names several documents, of which each is judged alone. Each read reads the document of the format as well, whose absence shows that the
collection was dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from aiolock.backends.mongodb.connection import Connection
from aiolock.backends.mongodb.errors import DUPLICATE, code
from aiolock.backends.mongodb.url import Address
from aiolock.backends.rows.store import Edit, Listener, Row, RowStore, StoreClock
from aiolock.core.backend import Settings
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, UnsafeBackend, shorten

__all__ = ["FORMAT", "MongoDBStore"]

FORMAT = 1
"""The version of the documents, in a document of its own."""
MARK = "aiolock"
"""The ``_id`` of that document; those of rows have a slash."""
TOGETHER = 100
"""Documents of one answer, which has at most 16 MiB."""
OLDEST = 9
"""The wire version of MongoDB 4.4."""

NOW = {"$toLong": "$$NOW"}
"""The server's clock in milliseconds."""
LINEARIZABLE = {"level": "linearizable"}
DURABLE = {"w": "majority", "j": True}


class MongoDBStore(RowStore):
    """The rows of one collection."""

    poll = 0.01
    # exclusion and survives-failover are promised when this has run on a real MongoDB.
    capabilities = frozenset({"fencing", "fifo", "keep", "no-eviction", "survives-restart"})

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: Connection | None = None

    async def open(self, settings: Settings, listener: Listener) -> None:
        """Connect, check the server, and mark the collection."""
        self._connection = Connection(self._address, settings, listener.interrupted)
        # In milliseconds, beyond which a majority of the members is waited for in vain.
        self._durable = {**DURABLE, "wtimeout": max(1, round(900 * settings.command_timeout))}
        try:
            self._check(await self._connection.ask({"hello": 1}))
            # It shows also whether this user may write.
            mark: dict[str, Any] | None = None
            while mark is None:
                # None: another client was about to insert it.
                insert = {"$setOnInsert": {"format": FORMAT}}
                mark, _ = await self._change({"_id": MARK}, update=insert, upsert=True, new=True)
            self._check_format(mark)
        except BaseException:
            await self._connection.aclose()
            raise

    def _check(self, hello: Mapping[str, Any]) -> None:
        """Refuse what is no primary of a replica set."""
        text = f"{self._address.text}: this server"
        if hello["maxWireVersion"] < OLDEST:
            raise BackendRefused(f"{text} is older than MongoDB 4.4")
        if hello.get("msg") == "isdbgrid":
            raise BackendRefused(f"{text} is a router of a sharded cluster: connect to a replica set")
        if "setName" not in hello or "operationTime" not in hello:
            raise BackendRefused(
                f"{text} is no member of a replica set, and confirms nothing by a majority: start it with --replSet, and call "
                "rs.initiate() once; a set of one member is enough"
            )
        if not hello["isWritablePrimary"]:
            raise BackendRefused(
                f"{text} is not the primary, and takes no writes: leave directConnection out, and name more members",
                retryable=True,
            )

    def _check_format(self, mark: Mapping[str, Any] | None) -> None:
        if mark is None:
            raise BackendRefused(
                f"{self._address.text}: the collection {self._address.collection} was dropped or emptied, and its locks are "
                "void; the next client that is opened makes it again"
            )
        if (found := mark.get("format")) != FORMAT:
            raise UnsafeBackend(
                f"{self._address.text}: the collection {self._address.collection} has the format {shorten(found)}, and this "
                f"library writes format {FORMAT}"
            )

    @property
    def _open(self) -> Connection:
        if self._connection is None:
            raise BackendUnavailable(f"{self._address.text}: the client is not open")
        return self._connection

    # --- reads

    async def get(self, keys: Sequence[str]) -> list[Row]:
        """Return rows."""
        return await self._read(keys, "v", "d")

    async def versions(self, keys: Sequence[str]) -> list[Row]:
        """Return rows without their values."""
        return await self._read(keys, "v")

    async def _read(self, keys: Sequence[str], *fields: str) -> list[Row]:
        parts = [keys[first : first + TOGETHER] for first in range(0, len(keys), TOGETHER)]
        found = await asyncio.gather(*(self._part(part, fields) for part in parts))
        return [row for rows in found for row in rows]

    async def _part(self, keys: Sequence[str], fields: Sequence[str]) -> list[Row]:
        documents, tick = await self._find({"_id": {"$in": [MARK, *keys]}}, "format", *fields)
        known = {document["_id"]: document for document in documents}
        self._check_format(mark := known.get(MARK))
        assert mark is not None  # noqa: S101 - it was checked
        clock = StoreClock(mark["now"] / 1000)
        return [_row(known.get(key, {}), tick, clock) for key in keys]

    async def _find(
        self, condition: Mapping[str, Any], *fields: str, limit: int = TOGETHER + 1
    ) -> tuple[list[dict[str, Any]], int]:
        """Return documents by their ``_id``, with the server's clock, and a tick."""
        steps: list[dict[str, Any]] = [
            {"$match": condition},
            {"$sort": {"_id": 1}},
            {"$limit": limit},
            {"$project": {**dict.fromkeys(fields, 1), "now": NOW}},
        ]
        answer = await self._open.ask(
            {
                "aggregate": self._address.collection,
                "pipeline": steps,
                "cursor": {"batchSize": limit + 1},
                "readConcern": LINEARIZABLE,
            }
        )
        return answer["cursor"]["firstBatch"], _tick(answer)

    # --- writes

    async def compare_and_set(self, edits: Sequence[Edit]) -> list[Row | None]:
        """Send each edit as a command of its own, all at once."""
        return list(await asyncio.gather(*map(self._edit, edits)))

    async def _edit(self, edit: Edit) -> Row | None:
        # No document has an empty version: one is inserted then, unless there is one with this _id.
        condition = {"_id": edit.key, "v": edit.expected}
        if edit.value is None:
            document, tick = await self._change(condition, remove=True)
            return None if document is None else Row(b"", "", tick)
        expires = None if edit.ttl is None else {"$add": [NOW, round(1000 * edit.ttl)]}
        changed = [{"$set": {"v": {"$literal": edit.version}, "d": edit.value, "e": expires}}]
        document, tick = await self._change(condition, update=changed, upsert=not edit.expected, new=True)
        return None if document is None else Row(b"", edit.version, tick)

    async def _change(self, condition: Mapping[str, Any], **change: Any) -> tuple[dict[str, Any] | None, int]:
        """Change one document; return it without its value, or ``None`` if none fulfils the condition, and a tick."""
        command = {
            "findAndModify": self._address.collection,
            "query": condition,
            **change,
            "fields": {"d": 0},
        }
        try:
            answer = await self._open.ask({**command, "writeConcern": self._durable}, write=True)
        except BackendError as error:
            if code(error.__cause__) == DUPLICATE:
                return None, 0
            raise
        return answer["value"], _tick(answer)

    # --- maintenance

    async def scan(self, prefix: str) -> AsyncIterator[tuple[str, Row]]:
        """Yield the rows whose key begins with ``prefix``, by key."""
        first, last = prefix, f"{prefix}\x7f"
        while True:
            condition = {"_id": {"$gte": first, "$lt": last}}
            documents, tick = await self._find(condition, "v", "d", limit=TOGETHER)
            for document in documents:
                yield document["_id"], _row(document, tick)
            if len(documents) < TOGETHER:
                return
            # Before all longer keys, which contain no space.
            first = f"{documents[-1]['_id']} "

    async def purge(self, prefix: str, idle: float, spared: Collection[str] = ()) -> int:
        """Delete the rows of a prefix whose ttl ended ``idle`` seconds ago or earlier, page by page."""
        due = {"e": {"$gt": 0}, "$expr": {"$lte": ["$e", {"$subtract": [NOW, round(1000 * idle)]}]}}
        gone, after = 0, prefix
        while True:
            page = {"_id": {"$gt": after, "$lt": f"{prefix}\x7f", "$nin": list(spared)}, **due}
            documents, _ = await self._find(page, limit=TOGETHER)
            if not documents:
                return gone
            keys = [document["_id"] for document in documents]
            delete = {"q": {"_id": {"$in": keys}, **due}, "limit": 0}
            command = {"delete": self._address.collection, "deletes": [delete], "writeConcern": self._durable}
            gone += (await self._open.ask(command, write=True))["n"]
            after = keys[-1]

    async def aclose(self) -> None:
        """Close all connections."""
        if self._connection is not None:
            await self._connection.aclose()


def _tick(answer: Mapping[str, Any]) -> int:
    """Return the time of the replica set after this command: a second, and the number of a write in it.

    Each write of the set raises it, also across changes of the primary and of clocks. Each gives 32 tokens, so that a client
    has some for hand-overs among its tasks.
    """
    time = answer["operationTime"]
    return int((time.time << 22) + min(32 * time.inc, (1 << 22) - 1))


def _row(document: Mapping[str, Any], tick: int, clock: StoreClock | None = None) -> Row:
    value = document.get("d", b"")
    # Another type is an unknown format of this row.
    return Row(
        value if isinstance(value, bytes) else repr(value).encode(), document.get("v", ""), tick, clock
    )
