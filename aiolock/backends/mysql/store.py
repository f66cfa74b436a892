"""Rows in a MySQL table: reads and compare-and-set in one packet each, and notes that tell other clients which rows have changed."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from aiolock.backends.experimental import UNTRIED
from aiolock.backends.mysql.diagnosis import (
    GALERA,
    capabilities,
    cluster,
    experimental,
    processlist,
    refuse,
    refuse_product,
)
from aiolock.backends.mysql.driver import MySQLDriver, StatementAnswer
from aiolock.backends.mysql.errors import DEADLOCK, INTERRUPTED, NOT_NOW, OUTDATED, code, deadly, translate
from aiolock.backends.mysql.rows_schema import RowStatements, ensure_tables, literal
from aiolock.backends.mysql.url import Address
from aiolock.backends.mysql.wake import Wake
from aiolock.backends.rows.pipeline import Connections
from aiolock.backends.rows.store import ALL, Edit, Listener, Row, RowStore, StoreClock
from aiolock.clock import Deadline
from aiolock.core.backend import Settings
from aiolock.errors import BackendUnavailable, LockError, UnsafeBackend

__all__ = ["MySQLStore"]

PAGE = 500
"""Rows of one statement of a scan or a purge."""
MOST_BYTES = 500_000
"""Bytes of the values in one packet, each of which takes two there; a server's limit is a megabyte or more."""
CROWDED = 10.0
"""Seconds for which it is remembered that a row was locked: writes do not wait for it meanwhile."""
LAST = "\x7f"
"""A character after all that keys are made of."""
NOTES_LAST = 60.0
"""Seconds after which notes of clients that are gone may be deleted."""
UNDONE = DEADLOCK | NOT_NOW | OUTDATED | INTERRUPTED
"""Errors after which a transaction can be sent again, once it was rolled back."""


class _RowToRead(NamedTuple):
    """A row to read, with or without its value."""

    key: str
    whole: bool


class MySQLStore(RowStore):
    """The rows of one table."""

    push = True
    reads_prove = False
    in_order = True

    def __init__(
        self,
        address: Address,
        table: str,
        *,
        create: bool,
        promises: Callable[[frozenset[str]], None] = lambda _: None,
    ) -> None:
        """Take where the rows are, and the function to call with the capabilities that the server deserves at each connection."""
        self._address = address
        self.statements = RowStatements(table, address.database)
        self._create, self._promises = create, promises
        self._connections: Connections[MySQLDriver] | None = None
        self._wake: Wake | None = None
        self._crowded: dict[str, float] = {}
        """The rows that were locked of late, and until when that is remembered."""
        self.galera = False
        """True for a node of Galera."""
        self.rolls_back = False
        """True if the server undoes a whole transaction in which a row was waited for in vain."""
        self.identity = ""
        """The expression for the identity of a server."""
        self.server = "", ""
        """The identity of the server, and its name."""
        self.product = ""
        """The product, if locks are experimental there."""

    async def open(self, settings: Settings, listener: Listener) -> None:
        """Connect, check the server, create or check the tables, and listen."""
        self._settings, self._listener, self.capabilities = settings, listener, frozenset()
        # Clients of other databases, namespaces and tables of the server have channels of their own.
        owner = "\0".join((self._address.database, self.statements.table, settings.namespace)).encode()
        channel = f"aiolock:{hashlib.sha256(owner).hexdigest()[:12]}:"
        self._wake = Wake(self._login, self.statements, settings, listener, self._address.text, channel)
        self._connections = Connections(
            self._address.text, settings, self._connect, self._read, self._write, listener.interrupted
        )
        await self._connections.open()
        await self._wake.open()

    # --- connections

    async def _login(self) -> tuple[MySQLDriver, Mapping[str, str]]:
        """Return a new connection with its settings, and the server's variables, within the command timeout.

        Raises errors of this library; nothing is left open if it does or is cancelled.
        """
        address, timeout = self._address, self._settings.command_timeout
        driver = MySQLDriver(**address.arguments)
        try:
            async with asyncio.timeout(timeout):
                await driver.login()
                # Before it is asked what it may not understand.
                refuse_product(driver.server_version, address.text)
                await driver.run(self.statements("settings"))
                limit = max(1, math.ceil(timeout))
                _, shown = await driver.run(self.statements("variables", lock_wait_timeout=limit))
                facts = {str(name): str(value) for name, value in shown.rows}
                [told] = await driver.run(self.statements("facts", server=self._identity(facts)))
                number, moves, *_, identity, where = told.rows[0]
                driver.server, driver.where = str(identity), str(where)
                driver.clock_stands = not int(moves)
                if cluster(facts) == GALERA:
                    await driver.run(self.statements("causal"))
                if int(number) != driver.thread_id():
                    raise UnsafeBackend(
                        f"{address.text}: a proxy that has its own connection numbers stands in between, and may swap the "
                        "session that settings and notifications live in: connect to the server itself"
                    )
        except BaseException as error:
            driver.terminate()
            if isinstance(error, LockError) or not isinstance(error, Exception):
                raise
            raise translate(error, address.text, plain=address.plain) from error
        return driver, facts

    async def _connect(self) -> tuple[MySQLDriver, MySQLDriver]:
        """Return two connections to one server, which was checked: for reads, and for writes. Raises and is cancelled as a login."""
        opened: list[MySQLDriver] = []
        facts: Mapping[str, str] = {}
        text = self._address.text
        try:
            for _ in range(2):
                driver, facts = await self._login()
                opened.append(driver)
                refuse(facts, "rows", text)
                if cluster(facts) not in ("", GALERA):
                    raise UnsafeBackend(
                        f"{text}: this server is part of {cluster(facts)}, where a read may not show what another node has "
                        "answered before: use a group with one primary"
                    )
            if opened[0].server != opened[1].server and cluster(facts) != GALERA:
                raise BackendUnavailable(
                    f"{text}: the connection for reads led to another server than the one for writes: the name is coming to mean "
                    "another server, or several stand behind it"
                )
            try:
                async with asyncio.timeout(self._settings.command_timeout):
                    await ensure_tables(opened[0], self.statements, text, create=self._create)
                    assert self._wake is not None  # noqa: S101 - it is made before
                    await self._wake.hold_sleep(opened[1])
            except LockError:
                raise
            except Exception as error:
                raise translate(error, text) from error
        except BaseException:
            for driver in opened:
                driver.terminate()
            raise
        self._take(facts, opened[0])
        return opened[0], opened[1]

    def _identity(self, facts: Mapping[str, str]) -> str:
        # What servers have made up for themselves: one on MySQL, the other on newer MariaDBs.
        numbers = [f", @@{name}" for name in ("server_uuid", "server_uid") if name in facts]
        return self.statements("server", numbers="".join(numbers))

    def _take(self, facts: Mapping[str, str], driver: MySQLDriver) -> None:
        """Note what the server promises: after a reconnect it may be another one, or have other settings."""
        self.galera = cluster(facts) == GALERA
        self.rolls_back = facts.get("innodb_rollback_on_timeout", "OFF").upper() in {"ON", "1"}
        self.identity, self.server = self._identity(facts), (driver.server, driver.where)
        self.product = experimental(facts)
        promised = capabilities(facts, "rows")
        self.capabilities = promised - UNTRIED if self.product else promised
        # Where a crash loses writes that were answered, no answer proves more than a read.
        self.reads_prove = "survives-restart" not in promised
        self._promises(self.capabilities)
        if self._wake is not None:
            self._wake.across = cluster(facts) != ""
            self._wake.processlist = processlist(facts)

    # --- reads

    async def get(self, keys: Sequence[str]) -> list[Row]:
        """Read rows with their values."""
        return await self._rows([_RowToRead(key, whole=True) for key in keys])

    async def versions(self, keys: Sequence[str]) -> list[Row]:
        """Read rows without their values."""
        return await self._rows([_RowToRead(key, whole=False) for key in keys])

    async def _rows(self, wanted: list[_RowToRead]) -> list[Row]:
        if not wanted:
            return []
        reader = await self._open().reader(self._deadline())
        return await reader.ask(wanted)

    async def _read(self, driver: MySQLDriver, wanted: Sequence[_RowToRead]) -> list[Row]:
        """Read rows by one packet, again if an administrator has ended it."""
        while True:
            try:
                return await self._ask(driver, wanted)
            except Exception as error:
                if code(error) not in INTERRUPTED:
                    raise

    async def _ask(self, driver: MySQLDriver, wanted: Sequence[_RowToRead]) -> list[Row]:
        if len(wanted) == 1 and not driver.clock_stands:
            [(key, whole)] = wanted
            what = "r.value" if whole else "NULL"
            [answer] = await driver.run(self.statements("row", what=what, key=literal(key)))
            [(value, version, tick)] = answer.rows
            return [_row(driver, value or b"", version or b"", tick)]
        asked = [
            (whole, keys)
            for whole in (True, False)
            if (keys := [one.key for one in wanted if one.whole is whole])
        ]
        packet = [
            self.statements("rows", what="value" if whole else "NULL", keys=", ".join(map(literal, keys)))
            for whole, keys in asked
        ]
        *answers, last = await driver.run("; ".join([*packet, self.statements("clock")]))
        tick = last.rows[0][0]
        found = {
            (str(key, "ascii"), whole): (value or b"", version)
            for (whole, _), answer in zip(asked, answers, strict=True)
            for key, value, version in answer.rows
        }
        return [_row(driver, *found.get(one, (b"", b"")), tick) for one in wanted]

    # --- writes

    async def compare_and_set(self, edits: Sequence[Edit]) -> list[Row | None]:
        """Make edits, perhaps in one transaction with those of other calls."""
        if not edits:
            return []
        return await self._open().writer().ask(edits, frozenset(edit.key for edit in edits))

    async def _write(self, driver: MySQLDriver, edits: Sequence[Edit]) -> list[Row | None]:
        """Make edits in as few transactions as there may be."""
        made: dict[str, Row | None] = {}
        # In the order of keys, so that two clients never wait for each other.
        for part in _parts(sorted(edits, key=lambda edit: edit.key), singly=self.galera):
            made |= await self._write_part(driver, part)
        if any(ALL in edit.notify and made[edit.key] is not None for edit in edits):
            assert self._wake is not None  # noqa: S101 - it is open
            self._wake.wake_all(await self._open().reader(self._deadline()))
        return [made[edit.key] for edit in edits]

    async def _write_part(self, driver: MySQLDriver, edits: Sequence[Edit]) -> dict[str, Row | None]:
        """Make edits in one transaction, or if the server undoes it each in one of its own."""
        now = asyncio.get_running_loop().time()
        locked = {edit.key for edit in edits if self._crowded.get(edit.key, 0.0) > now}
        try:
            return await self._make(driver, edits, locked)
        except Exception as error:  # noqa: BLE001 - raised again if it is none of these
            await self._roll_back(driver, error)
        made: dict[str, Row | None] = {}
        for edit in edits:
            # By now the first attempt may have counted: then the row has this version, and the engine recognises it.
            try:
                made |= await self._make(driver, [edit], {edit.key} if len(edits) > 1 else locked)
            except Exception as error:  # noqa: BLE001 - raised again if it is none of these
                await self._roll_back(driver, error)
                # Nearly always by another writer, whose version comes first.
                made[edit.key] = None
            if made[edit.key] is None:
                self._crowd(edit.key)
        return made

    async def _roll_back(self, driver: MySQLDriver, error: Exception) -> None:
        """End a transaction that has failed, a part of which may be open; raise ``error`` again if it can not be repeated."""
        if not deadly(error):
            await driver.run("ROLLBACK")
        if code(error) not in UNDONE:
            raise error

    def _crowd(self, key: str) -> None:
        now = asyncio.get_running_loop().time()
        for other in [other for other, until in self._crowded.items() if until <= now]:
            del self._crowded[other]
        self._crowded[key] = now + CROWDED

    async def _make(
        self, driver: MySQLDriver, edits: Sequence[Edit], locked: Collection[str]
    ) -> dict[str, Row | None]:
        """Make edits by one packet, a transaction if it has several statements; end the sleep of those whom they concern.

        :param locked: the keys of rows that are not to be waited for.
        """
        assert self._wake is not None  # noqa: S101 - it is open
        statements: list[str] = []
        positions: list[int] = []
        for edit in edits:
            positions.append(len(statements))
            statements.append(self._statement(edit, unlocked=edit.key in locked))
            if edit.notify:
                addresses = sorted(edit.notify)
                statements.append(self._wake.note(edit.key, addresses))
        # On Galera each statement is a transaction: a node may undo the first half of one silently.
        whole = len(statements) > 1 and not self.galera
        before = ["START TRANSACTION"] if whole else []
        after = ["COMMIT"] if whole else []
        clock = [self.statements("clock")] if driver.clock_stands else []
        packet = [*before, *statements, *after, *clock]
        ends = self._wake.ends({address for edit in edits for address in edit.notify})
        answers: list[StatementAnswer] = []
        try:
            await driver.run("; ".join([*packet, *ends]), answers)
        except Exception as error:
            noted = self.galera and len(answers) > positions[-1]
            if deadly(error) or (len(answers) < len(packet) and not noted):
                raise
            # The edits are made, and a client that is to be told is gone, or the note of one was not to be had.
            await self._end_sleeps(driver, ends[len(answers) - len(packet) + 1 :] if not noted else ends)
        tick = int(answers[len(packet) - 1].rows[0][0]) if clock and len(answers) >= len(packet) else 0
        made: dict[str, Row | None] = {}
        for edit, position in zip(edits, positions, strict=True):
            answer = answers[position + len(before)]
            version = "" if edit.value is None else edit.version
            made[edit.key] = (
                _row(driver, b"", version, tick or (0 if clock else answer.number))
                if answer.changed == 1
                else None
            )
        return made

    @staticmethod
    async def _end_sleeps(driver: MySQLDriver, ends: Sequence[str]) -> None:
        """End the sleep of others; of one that is gone or does not sleep, that is an error which ends the packet."""
        while ends:
            answers: list[StatementAnswer] = []
            try:
                await driver.run("; ".join(ends), answers)
            except Exception as error:
                if deadly(error):
                    raise
            ends = ends[len(answers) + 1 :]

    def _statement(self, edit: Edit, *, unlocked: bool) -> str:
        key, expected = literal(edit.key), literal(edit.expected)
        if edit.value is None:
            return self.statements("delete_unlocked" if unlocked else "delete", key=key, expected=expected)
        expires = "NULL" if edit.ttl is None else f"{self.statements('tick')} + {round(edit.ttl * 1_000_000)}"
        name = ("update_unlocked" if unlocked else "update") if edit.expected else "insert"
        return self.statements(
            name,
            key=key,
            expected=expected,
            version=literal(edit.version),
            value=literal(edit.value),
            expires=expires,
        )

    # --- other statements

    async def ask(self, packet: str) -> list[StatementAnswer]:
        """Execute a packet on the connection for reads; return its answers. Cancelling it changes nothing."""
        reader = await self._open().reader(self._deadline())
        return await reader.fetch(packet)

    async def check_writable(self) -> None:
        """Raise :class:`BackendUnavailable` if the server takes no writes any more. Cancelling it changes nothing."""
        [answer] = await self.ask(self.statements("writable"))
        if not int(answer.rows[0][0]):
            raise BackendUnavailable(
                f"{self._address.text}: the server {self.server[1]} takes no writes any more"
            )

    # --- maintenance

    async def scan(self, prefix: str) -> AsyncIterator[tuple[str, Row]]:
        """Yield each row whose key begins with ``prefix``, in the order of keys."""
        after, end = prefix, literal(prefix + LAST)
        while True:
            reader = await self._open().reader(self._deadline())
            page = self.statements("scan", after=literal(after), end=end, count=PAGE)
            [found, last] = await reader.fetch(f"{page}; {self.statements('clock')}")
            for key, value, version in found.rows:
                after = str(key, "ascii")
                yield after, _row(reader.driver, value, version, last.rows[0][0])
            if len(found.rows) < PAGE:
                return

    async def purge(self, prefix: str, idle: float, spared: Collection[str] = ()) -> int:
        """Delete the rows of a prefix whose ttl ended ``idle`` seconds ago or earlier, page by page; and old notes."""
        gone, after, micros = 0, prefix, round(idle * 1_000_000)
        end = literal(prefix + LAST)
        while True:
            reader = await self._open().reader(self._deadline())
            [found] = await reader.fetch(
                self.statements("aged", after=literal(after), end=end, idle=micros, count=PAGE)
            )
            keys = [str(key, "ascii") for (key,) in found.rows]
            if aged := [key for key in keys if key not in spared]:
                packet = self.statements(
                    "purge", keys=", ".join(map(literal, aged)), idle=micros, count=len(aged)
                )
                [deleted] = await self._open().writer().fetch(packet)
                gone += deleted.changed
            if len(keys) < PAGE:
                break
            after = keys[-1]
        last = f"{self.statements('tick')} - {round(NOTES_LAST * 1_000_000)}"
        await self._open().writer().fetch(self.statements("old_notes", last=last, count=10 * PAGE))
        return gone

    async def aclose(self) -> None:
        """Close all connections."""
        connections = self._connections
        if self._wake is not None:
            await self._wake.aclose(None if connections is None else connections.reader_now)
        if self._connections is not None:
            await self._connections.aclose()

    def _open(self) -> Connections[MySQLDriver]:
        if self._connections is None:
            raise BackendUnavailable(f"{self._address.text}: the client is not open")
        return self._connections

    def _deadline(self) -> Deadline:
        """Return when to give up waiting for a connection: earlier than the caller does, because this can say why there is none."""
        return Deadline.after(0.9 * self._settings.command_timeout, asyncio.get_running_loop().time)


def _parts(edits: Sequence[Edit], *, singly: bool) -> Iterator[list[Edit]]:
    """Yield the edits of each packet."""
    part: list[Edit] = []
    size = 0
    for edit in edits:
        more = len(edit.value or b"")
        if part and (singly or size + more > MOST_BYTES):
            yield part
            part, size = [], 0
        part.append(edit)
        size += more
    if part:
        yield part


def _row(driver: MySQLDriver, value: bytes, version: str | bytes, tick: int) -> Row:
    text = version if isinstance(version, str) else str(version, "ascii")
    return Row(
        value, text, int(tick), StoreClock(int(tick) / 1_000_000, zone=driver.server) if tick else None
    )
