"""Notifications between clients: a client sleeps at the server, and a writer that has left it a note ends that sleep.

Each client has a connection of its own that sleeps in one statement, and a user lock there whose name others know: they find the
session by it, and KILL QUERY ends its statement. A note is a row that says which row has changed; it is written with that
change. A statement of the listening connection checks for notes before it sleeps, so none is slept through: a note that it
does not see was committed after it began, and the KILL QUERY behind that hits it. It may hit the next one as well, which is
sent again then.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from aiolock.backends.mysql.driver import MySQLDriver
from aiolock.backends.mysql.errors import INTERRUPTED, code, translate
from aiolock.backends.mysql.rows_schema import RowStatements, literal
from aiolock.backends.rows.pipeline import Pipeline
from aiolock.backends.rows.store import ALL, Listener
from aiolock.core.backend import Settings
from aiolock.core.tasks import Backoff, TaskSet, end
from aiolock.errors import BackendError, LockError

__all__ = ["Wake"]

SLEEP = 5.0
"""Most seconds of one sleep: the server may not notice before its end that the client is gone."""
CLOSE_WITHIN = 1.0
"""Seconds for which closing waits until the sleep was ended and the server has been notified."""
ACROSS = 0.05
"""The same where writers may be at other nodes of a cluster, which cannot end it."""
COMMIT = 0.002
"""Seconds after which it is looked again for a note that was not committed."""
OVERLAP = 200_000
"""Microseconds for which a note may be committed later than one whose tick is younger."""
REMEMBERED = 1_000
"""Notes that are remembered, so that each counts once."""
TIDY = 5_000_000
"""Microseconds after which a client deletes its notes."""


class Wake:
    """The listening connection of one client, and the statements by which it tells others."""

    def __init__(
        self,
        login: Callable[[], Awaitable[tuple[MySQLDriver, Mapping[str, str]]]],
        statements: RowStatements,
        settings: Settings,
        listener: Listener,
        address: str,
        channel: str,
    ) -> None:
        """Take the function that logs a connection in; all clients of one table and namespace have the same ``channel``."""
        self._login = login
        self._statements = statements
        self._settings = settings
        self._listener = listener
        self._address = address
        self._channel = channel
        self._mine = ", ".join(literal(self._channel + address) for address in (listener.address, ALL))
        self._tasks = TaskSet()
        self._driver: MySQLDriver | None = None
        self._seen: OrderedDict[tuple[int, str], None] = OrderedDict()
        self._last = self._tidied = 0
        """The newest tick of a note that was received, and that at which notes were deleted."""
        self._all_due = self._waking_all = False
        """True if all are to be woken, and while that is under way."""
        self._closed = False
        self._count = itertools.count(1)
        self._sleeping_for = ""
        """The name of the user lock for which the listening connection waits while it sleeps."""
        self.across = False
        """True if writers may be at other nodes of a cluster."""
        self.processlist = "information_schema.processlist"
        """The table with the server's sessions."""

    async def open(self) -> None:
        """Begin to listen. Raises errors of this library; cancelling it leaves nothing open."""
        task = self._tasks.spawn(self._try(), "aiolock-mysql-listen")
        try:
            await asyncio.wait([task])
        except BaseException:
            self._closed = True
            task.cancel()
            await asyncio.wait([task])
            raise
        if isinstance(result := task.result(), LockError):
            raise result
        self._tasks.spawn(self._listen(result), "aiolock-mysql-listen")

    async def _try(self) -> MySQLDriver | LockError:
        """Return the connection that :meth:`_begin` makes, or why there is none."""
        try:
            return await self._begin()
        except LockError as error:
            return error

    async def _begin(self) -> MySQLDriver:
        """Return a connection that others can find. Raises errors of this library; cancelling it leaves nothing open."""
        driver, _ = await self._login()
        try:
            async with asyncio.timeout(self._settings.command_timeout):
                [answer] = await driver.run(self._statements("clock"))
                # What was changed before is read by the engine, which has just connected.
                self._last = self._tidied = int(answer.rows[0][0])
                await driver.run(self._statements("mark", lock=self._lock(self._listener.address)))
        except BaseException as error:
            driver.terminate()
            if not isinstance(error, Exception):
                raise
            raise translate(error, self._address) from error
        self._driver = driver
        return driver

    def _lock(self, address: str) -> str:
        return literal(f"{self._channel}{address}")

    # --- telling others

    def note(self, key: str, addresses: Sequence[str]) -> str:
        """Return the statement that leaves a note for each address, if the one before it has changed a row."""
        to = " UNION ALL ".join(
            f"SELECT {literal(self._channel + address)} AS address" for address in addresses
        )
        return self._statements("note", key=literal(key), addresses=to)

    def ends(self, addresses: Collection[str]) -> list[str]:
        """Return the statements that end the sleep of clients at these addresses."""
        return [
            self._statements("wake", lock=self._lock(address))
            for address in sorted(addresses)
            if address != ALL
        ]

    def wake_all(self, reader: Pipeline[MySQLDriver]) -> None:
        """End the sleep of all clients of the channel; a plain function, whose work goes on."""
        self._all_due = True
        if not self._waking_all:
            self._waking_all = True
            self._tasks.spawn(self._wake_all(reader), "aiolock-mysql-wake")

    async def _wake_all(self, reader: Pipeline[MySQLDriver]) -> None:
        asleep = self._statements(
            "asleep", processlist=self.processlist, pattern=literal(f"%/*{self._channel}*/%")
        )
        try:
            while self._all_due and not self._closed:
                self._all_due = False
                [found] = await reader.fetch(asleep)
                kills = [self._statements("kill", number=int(number)) for (number,) in found.rows]
                if kills and not await self._killed(reader, "; ".join(kills)):
                    # One of them is gone, or of another account, and those behind it were dropped.
                    for kill in kills:
                        await self._killed(reader, kill)
        except LockError:
            # They poll as well.
            pass
        finally:
            self._waking_all = False

    @staticmethod
    async def _killed(reader: Pipeline[MySQLDriver], packet: str) -> bool:
        """Execute a packet; return whether the server has executed all of it. Cancelling it is cancelling :meth:`Pipeline.fetch`."""
        try:
            await reader.fetch(packet)
        except BackendError:
            if reader.over:
                raise
            return False
        return True

    # --- listening

    async def _listen(self, driver: MySQLDriver | None) -> None:
        """Sleep, and report the rows that notes name. Ends with the client; no statement is cancelled before that."""
        backoff = Backoff(self._settings.random)
        while not self._closed:
            try:
                driver = driver or await self._begin()
                seen = await self._sleep(driver)
                if not await self._receive(driver) and seen:
                    # It is about to be committed.
                    await asyncio.sleep(COMMIT)
                backoff.reset()
            except Exception as error:  # noqa: BLE001 - of any kind: it is a hint that is lost
                if code(error) in INTERRUPTED:
                    continue
                if driver is not None:
                    driver.terminate()
                driver = self._driver = None
                self._listener.changed(None)
                await backoff.pause()
        if driver is not None:
            try:
                await driver.quit(CLOSE_WITHIN)
            except Exception:  # noqa: BLE001 - it is closed then as well
                driver.terminate()

    async def _sleep(self, driver: MySQLDriver) -> bool:
        """Sleep until there may be a note; return whether one was seen, which may not be committed."""
        seconds = ACROSS if self.across else SLEEP
        lock = self._lock(self._sleeping_for)
        [answer] = await driver.run(
            self._statements(
                "sleep", addresses=self._mine, last=self._last, lock=lock, seconds=seconds, mark=self._channel
            )
        )
        came = int(answer.rows[0][0] or 0)
        if came == 1:
            # The connection that had it is lost, and the next one takes another.
            await driver.run(self._statements("let_go", lock=lock))
            await asyncio.sleep(ACROSS)
        return came == -1

    async def hold_sleep(self, writer: MySQLDriver) -> None:
        """Take a user lock on a new connection for writes, for which the listening one waits. Cancelling it is as for a driver."""
        # A name of its own: the server may not have noticed that the connection before was lost.
        name = f"{self._listener.address}:{next(self._count)}"
        await writer.run(self._statements("hold_sleep", lock=self._lock(name)))
        self._sleeping_for = name

    async def _receive(self, driver: MySQLDriver) -> bool:
        """Report the rows that new notes name, and delete old notes; return whether there was a new one."""
        [found] = await driver.run(self._statements("noted", addresses=self._mine, last=self._last - OVERLAP))
        changed: dict[str, None] = {}
        for tick, key in found.rows:
            note = int(tick), str(key, "ascii")
            if note not in self._seen:
                self._seen[note] = None
                changed[note[1]] = None
                self._last = max(self._last, note[0])
        while len(self._seen) > REMEMBERED and next(iter(self._seen))[0] < self._last - OVERLAP:
            self._seen.popitem(last=False)
        for key in changed:
            self._listener.changed(key)
        if self._last - self._tidied > TIDY:
            self._tidied = self._last
            await driver.run(self._statements("forget_notes", addresses=self._mine, last=self._last - TIDY))
        return bool(changed)

    async def aclose(self, reader: Pipeline[MySQLDriver] | None) -> None:
        """End the connection and every task; the sleep by a statement on another connection, if there is one.

        Cancelling it stops the waiting.
        """
        self._closed = True
        if (driver := self._driver) is not None and reader is not None:
            try:
                async with asyncio.timeout(CLOSE_WITHIN):
                    await reader.fetch(self._statements("kill", number=driver.thread_id()))
            except (LockError, TimeoutError):
                # It ends by itself.
                pass
            else:
                if self._tasks:
                    await asyncio.wait(list(self._tasks), timeout=CLOSE_WITHIN)
        if driver is not None:
            # The statement under way changes nothing.
            driver.terminate()
        for task in list(self._tasks):
            task.cancel()
        await end(self._tasks)
