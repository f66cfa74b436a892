"""Notifications between clients: a client sleeps at the server, and a writer that has left it a note ends that sleep.

Each client has a connection of its own that sleeps in one statement, and a user lock there whose name others know: they find the
session by it, and KILL QUERY ends its statement. A note is a row that says which row has changed; it is written with that
change. A statement of the listening connection checks for notes before it sleeps, so none is slept through: a note that it
does not see was committed after it began, and the KILL QUERY behind that hits it. It may hit the next one as well, which is
sent again then.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from aiolock.backends.mysql.driver import MySQLDriver
from aiolock.backends.mysql.errors import INTERRUPTED, code
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
OVERLAP = 200_000
"""Microseconds for which a note may be committed later than one whose tick is younger."""
REMEMBERED = 1_000
"""Notes that are remembered, so that each is heard once."""
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
        channel: str,
    ) -> None:
        """Take the function that logs a connection in; all clients of one table and namespace have the same ``channel``."""
        self._login = login
        self._statements = statements
        self._settings = settings
        self._listener = listener
        self._channel = channel
        self._mine = ", ".join(literal(self._channel + address) for address in (listener.address, ALL))
        self._tasks = TaskSet()
        self._driver: MySQLDriver | None = None
        self._heard: OrderedDict[tuple[int, str], None] = OrderedDict()
        self._last = self._tidied = 0
        """The newest tick of a note that was heard, and that at which notes were deleted."""
        self._closed = False
        self.across = False
        """True if writers may be at other nodes of a cluster."""
        self.processlist = "information_schema.processlist"
        """The table with the server's sessions."""

    async def open(self) -> None:
        """Begin to listen. Raises errors of this library; cancelling it leaves nothing open."""
        driver = await self._begin()
        self._tasks.spawn(self._listen(driver), "aiolock-mysql-listen")

    async def _begin(self) -> MySQLDriver:
        driver, _ = await self._login()
        try:
            [answer] = await driver.run(self._statements("clock"))
            # What was changed before is read by the engine, which has just connected.
            self._last = self._tidied = int(answer.rows[0][0])
            await driver.run(self._statements("mark", lock=self._lock(self._listener.address)))
        except BaseException:
            driver.terminate()
            raise
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
        self._tasks.spawn(self._wake_all(reader), "aiolock-mysql-wake")

    async def _wake_all(self, reader: Pipeline[MySQLDriver]) -> None:
        pattern = literal(f"%/*{self._channel}*/%")
        try:
            [found] = await reader.fetch(
                self._statements("asleep", processlist=self.processlist, pattern=pattern)
            )
            for (number,) in found.rows:
                try:
                    await reader.fetch(self._statements("kill", number=int(number)))
                except BackendError:
                    # It is awake, gone, or of another account.
                    if reader.over:
                        return
        except LockError:
            # They look again by themselves.
            return

    # --- listening

    async def _listen(self, driver: MySQLDriver | None) -> None:
        """Sleep, and report the rows that notes name. Ends with the client; no statement is cancelled before that."""
        backoff = Backoff(self._settings.random)
        while not self._closed:
            try:
                driver = driver or await self._begin()
                await self._sleep(driver)
                await self._hear(driver)
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

    async def _sleep(self, driver: MySQLDriver) -> None:
        seconds = ACROSS if self.across else SLEEP
        await driver.run(
            self._statements(
                "sleep", addresses=self._mine, last=self._last, seconds=seconds, mark=self._channel
            )
        )

    async def _hear(self, driver: MySQLDriver) -> None:
        """Report the rows that new notes name, and delete old ones."""
        [found] = await driver.run(self._statements("noted", addresses=self._mine, last=self._last - OVERLAP))
        changed: dict[str, None] = {}
        for tick, key in found.rows:
            note = int(tick), str(key, "ascii")
            if note not in self._heard:
                self._heard[note] = None
                changed[note[1]] = None
                self._last = max(self._last, note[0])
        while len(self._heard) > REMEMBERED and next(iter(self._heard))[0] < self._last - OVERLAP:
            self._heard.popitem(last=False)
        for key in changed:
            self._listener.changed(key)
        if self._last - self._tidied > TIDY:
            self._tidied = self._last
            await driver.run(self._statements("forget_notes", addresses=self._mine, last=self._last - TIDY))

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
