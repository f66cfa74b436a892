"""Rows in a PostgreSQL table: reads and compare-and-set in one statement each, and notifications."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from aiolock.backends.experimental import UNTRIED
from aiolock.backends.postgresql.connection import UNTRIED_VERSION, Driver, Facts, connect
from aiolock.backends.postgresql.errors import LOCKED, NO_ROOM_TO_NOTIFY, SWAPPED, sqlstate
from aiolock.backends.postgresql.replication import gap, synchronous
from aiolock.backends.postgresql.schema import Statements, ensure
from aiolock.backends.postgresql.url import Address
from aiolock.backends.rows.pipeline import Connections
from aiolock.backends.rows.store import ALL, Edit, Entry, Listener, Row, RowStore, StoreClock
from aiolock.clock import Deadline
from aiolock.core.backend import Settings
from aiolock.core.logs import Log, get_logger
from aiolock.errors import BackendUnavailable, UnsafeBackend

__all__ = ["PostgreSQLStore", "capabilities"]

log: Log = get_logger("aiolock")

PAGE = 500
"""Rows of one statement of a scan or a purge."""


class _Wanted(NamedTuple):
    """A row to read, with or without its value."""

    key: str
    what: str


def capabilities(facts: Facts, *, furthest: bool = False) -> frozenset[str]:
    """Return the capabilities of a server with these settings; for ``furthest`` see :func:`gap`."""
    capabilities = {"exclusion", "fencing", "fifo", "keep", "no-eviction", "push"}
    if facts.fsync == "on" and facts.full_page_writes == "on":
        capabilities.add("survives-restart")
        if not gap(facts.replication, furthest=furthest):
            capabilities.add("survives-failover")
    return frozenset(capabilities - UNTRIED if UNTRIED_VERSION in facts.version else capabilities)


class PostgreSQLStore(RowStore):
    """The rows of one table."""

    push = True

    def __init__(
        self,
        address: Address,
        table: str,
        *,
        create: bool,
        furthest: bool = False,
        promises: Callable[[frozenset[str]], None] = lambda _: None,
    ) -> None:
        """Take where the rows are, and the function to call with the capabilities that the server deserves at each connection."""
        self._address = address
        self._statements = Statements(table)
        self._create, self._furthest, self._promises = create, furthest, promises
        self._connections: Connections[Driver] | None = None

    async def open(self, settings: Settings, listener: Listener) -> None:
        """Connect, check the server, create or check the table, and listen."""
        self._settings, self._listener, self.capabilities = settings, listener, frozenset()
        # Clients of other namespaces and tables have channels of their own.
        owner = "\0".join((self._statements.table, settings.namespace)).encode()
        self._channel = f"aiolock_{hashlib.sha256(owner).hexdigest()[:16]}_"
        self._connections = Connections(
            self._address.text,
            settings,
            partial(connect, self._address, self._statements, settings, self._subscribe),
            self._read,
            self._write,
            listener.interrupted,
        )
        await self._connections.open()

    async def _subscribe(self, driver: Driver, facts: Facts) -> None:
        """Check the server and the table, and listen; first on the connection for reads, each time that it was opened."""
        self._promise(facts)
        await ensure(driver, self._statements, self._address.text, create=self._create)
        for address in (self._listener.address, ALL):
            await driver.add_listener(f"{self._channel}{address}", self._notified)

    def _promise(self, facts: Facts) -> None:
        """Note what the server promises: after a reconnect it may be another one, or have other settings.

        One that promises less than before is used nevertheless, because what is held has to be renewed there.
        """
        before, self.capabilities = self.capabilities, capabilities(facts, furthest=self._furthest)
        self._promises(self.capabilities)
        # With a synchronous standby a wait can be ended before it has the write, which others see then; else never.
        self.reads_prove = not synchronous(facts.replication.names)[1]
        if gone := before - self.capabilities:
            text = f"{self._address.text}: the server no longer promises {', '.join(sorted(gone))}"
            why = gap(facts.replication, furthest=self._furthest)
            log.warning("%s%s", text, f" (synchronous_standby_names: {why})" if why else "")

    def _notified(self, _driver: Any, _pid: int, _channel: str, key: Any) -> None:
        self._listener.changed(str(key))

    # --- reads

    async def get(self, keys: Sequence[str]) -> list[Row]:
        """Read rows with their values."""
        return await self._rows([_Wanted(key, "value") for key in keys])

    async def versions(self, keys: Sequence[str]) -> list[Row]:
        """Read rows without their values."""
        return await self._rows([_Wanted(key, "version") for key in keys])

    async def _rows(self, wanted: list[_Wanted]) -> list[Row]:
        if not wanted:
            return []
        reader = await self._open().reader(self._deadline())
        return await reader.ask(wanted)

    async def _read(self, driver: Driver, wanted: Sequence[_Wanted]) -> list[Row]:
        records = await driver.fetch(
            self._statements("get"), [one.key for one in wanted], [one.what for one in wanted]
        )
        if any(process != driver.process for *_, process in records):
            raise UnsafeBackend(f"{self._address.text}: {SWAPPED}")
        return [_row(driver, value or b"", version or "", tick) for value, version, tick, _ in records]

    # --- writes

    async def compare_and_set(self, edits: Sequence[Edit]) -> list[Row | None]:
        """Make edits, perhaps in one statement with those of other calls."""
        if not edits:
            return []
        writer = self._open().writer()
        return await writer.ask(edits, frozenset(edit.key for edit in edits))

    async def _write(self, driver: Driver, edits: Sequence[Edit]) -> list[Row | None]:
        skip = ""
        while True:
            try:
                return await self._make(driver, edits, skip)
            except Exception as error:
                # The statement was rolled back.
                code = sqlstate(error)
                if code == LOCKED and len(edits) == 1:
                    # Nearly always by another writer, whose version comes first.
                    return [None]
                if code == LOCKED and not skip:
                    # The other rows do not wait for this one.
                    skip = "SKIP LOCKED"
                elif code == NO_ROOM_TO_NOTIFY and any(edit.notify for edit in edits):
                    edits = [edit._replace(notify=frozenset()) for edit in edits]
                else:
                    raise

    async def _make(self, driver: Driver, edits: Sequence[Edit], skip: str) -> list[Row | None]:
        flush = "on" if any(edit.flush for edit in edits) else "off"
        first = edits[0]
        if len(edits) == 1 and first.value is not None and (first.expected or not first.notify):
            rest = (first.expected, _addresses(first), self._channel) if first.expected else ()
            statement = self._statements("update" if first.expected else "insert")
            record = await driver.fetchrow(
                statement, first.key, first.value, first.version, first.ttl, flush, *rest
            )
            return [None if record is None else _row(driver, b"", first.version, record["tick"])]
        records = await driver.fetch(
            self._statements("several").replace("{skip}", skip),
            [edit.key for edit in edits],
            [edit.expected for edit in edits],
            [edit.version for edit in edits],
            [None if edit.value is None else base64.b64encode(edit.value).decode() for edit in edits],
            [None if edit.ttl is None else repr(float(edit.ttl)) for edit in edits],
            [_addresses(edit) for edit in edits],
            flush,
            self._channel,
        )
        ticks = {str(record["key"]): int(record["tick"]) for record in records}
        return [
            _row(driver, b"", "" if edit.value is None else edit.version, ticks[edit.key])
            if edit.key in ticks
            else None
            for edit in edits
        ]

    @property
    def enters(self) -> bool:
        """True while nothing is written: writes that wait go out together, so that one flush is enough; entries do not."""
        return self._connections is not None and self._connections.idle

    async def enter(self, entry: Entry) -> tuple[Row, str]:
        """Read a row and enter if its lock is free, in one statement."""
        await self._open().reader(self._deadline())
        writer = self._open().writer()
        try:
            [[value, version, before, tick]] = await writer.fetch(self._statements("enter"), *entry)
        except BackendUnavailable as error:
            # Another client inserts the row and has not committed: the statement was rolled back.
            if sqlstate(error.__cause__) != LOCKED:
                raise
            [row] = await self.get([entry.key])
            return row, row.version
        return _row(writer.driver, value or b"", version or "", tick), before or ""

    # --- other statements

    async def ask(self, name: str, *arguments: Any) -> list[Any]:
        """Execute a statement on the connection for reads; return its records. Cancelling it changes nothing."""
        reader = await self._open().reader(self._deadline())
        return await reader.fetch(self._statements(name), *arguments)

    # --- maintenance

    async def scan(self, prefix: str) -> AsyncIterator[tuple[str, Row]]:
        """Yield each row whose key begins with ``prefix``, in the order of keys."""
        after = ""
        while True:
            reader = await self._open().reader(self._deadline())
            records = await reader.fetch(self._statements("scan"), prefix, after, PAGE)
            for key, value, version, tick in records:
                yield str(key), _row(reader.driver, value, version, tick)
            if len(records) < PAGE:
                return
            after = str(records[-1]["key"])

    async def purge(self, prefix: str, idle: float, spared: Collection[str] = ()) -> int:
        """Delete the rows of a prefix whose ttl ended ``idle`` seconds ago or earlier, page by page."""
        gone, after = 0, ""
        while True:
            # Rows that were not read: a reconnection in between does not matter.
            await self._open().reader(self._deadline())
            [page] = (
                await self._open()
                .writer()
                .fetch(self._statements("purge"), prefix, after, float(idle), PAGE, list(spared))
            )
            gone += int(page["gone"])
            if page["last"] is None:
                return gone
            after = str(page["last"])

    async def aclose(self) -> None:
        """Close both connections."""
        if self._connections is not None:
            await self._connections.aclose()

    def _open(self) -> Connections[Driver]:
        if self._connections is None:
            raise BackendUnavailable(f"{self._address.text}: the client is not open")
        return self._connections

    def _deadline(self) -> Deadline:
        """Return when to give up waiting for a connection: earlier than the caller does, because this can say why there is none."""
        return Deadline.after(0.9 * self._settings.command_timeout, asyncio.get_running_loop().time)


def _addresses(edit: Edit) -> str | None:
    return ",".join(sorted(edit.notify)) or None


def _row(driver: Driver, value: bytes, version: str, tick: int) -> Row:
    return Row(value, version, tick, StoreClock(tick / 1e6, zone=driver.timeline))
