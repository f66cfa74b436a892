"""The context of one client: its settings, statements, sessions and events, and the execution of statements."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from aiolock.backends.mysql.connection import MySQLSession
from aiolock.backends.mysql.errors import NOT_NOW, code, hit, locked
from aiolock.backends.mysql.pool import ServerFacts, Sessions
from aiolock.backends.mysql.protocol import Result
from aiolock.backends.sql import read_schema, read_statements
from aiolock.clock import Clock
from aiolock.core.backend import Claim, EventQueue, Grant, Settings
from aiolock.errors import BackendUnavailable, DeadlockDetected
from aiolock.types import Family
from aiolock.validation import digest

__all__ = ["BLOCK", "FORMAT", "MEMORY", "RETRY", "UNDONE", "Context", "Statements", "hexed", "quote"]

T = TypeVar("T")

# --- statements


QUERIES = read_statements("mysql", "queries.sql", "sharing.sql", "registers.sql")
SCHEMA = read_schema("mysql")
FORMAT = int(re.findall(r"data format (\d+)", SCHEMA)[0])
"""The version of the data format: the columns, their meaning, and the names of user locks. The comments of the tables contain it."""

BLOCK = 64
"""Tokens for each microsecond of the server's clock; a grant that may be handed over in the process has them all."""

_WORD = re.compile(r"[A-Za-z0-9_.:-]*")


def quote(word: str) -> str:
    """Return a literal of a word that this library made: an id, a family, a namespace, the name of a user lock.

    Such a word has the same bytes in every character set, and nothing in it needs an escape in any `sql_mode`. Raises
    :class:`ValueError` for any other text.
    """
    if not _WORD.fullmatch(word):
        raise ValueError(f"{word!r} must be sent as hexadecimal digits")
    return f"'{word}'"


def hexed(text: str) -> str:
    """Return a literal of any text (name, label, reason, pattern) that every character set reads in the same way."""
    return f"_utf8mb4 X'{text.encode().hex()}'"


class Statements:
    """The statements of the ``.sql`` files, by name, for one namespace and one set of tables named after ``table``."""

    def __init__(self, table: str, database: str, namespace: str = "") -> None:
        named = database.replace("`", "``").replace("{", "{{").replace("}", "}}")
        self.format = FORMAT
        self.table = table
        self.ascii = named.isascii()
        """True if statements are the same bytes in every character set."""
        self._tables = {
            "{database}": f"`{named}`",
            "{whole}": f"`{named}`.`{table}`",
            "{whole_requests}": f"`{named}`.`{table}_requests`",
            "{table}": f"`{table}`",
            "{requests}": f"`{table}_requests`",
            "{registers}": f"`{table}_registers`",
            "{namespace}": quote(namespace),
        }
        # The tables are filled in once, not at every call.
        self._queries = {name: self._named(text) for name, text in QUERIES.items()}
        self.schema = self._named(SCHEMA)
        """The statements that create the tables, for people and for the server."""

    def _named(self, text: str) -> str:
        for word, table in self._tables.items():
            text = text.replace(word, table)
        return text

    def __call__(self, name: str, /, **values: Any) -> str:
        """Return the packet of that name with its values filled in."""
        return self._queries[name].format_map(values)


# --- the context

UNDONE = (0.001, 0.01)
"""Seconds before a statement is sent again that the server undid in favour of another."""
RETRY = (0.05, 0.15)
"""Seconds between tries where a row is locked, or where there is no session to wait on."""
MEMORY = 10.0
"""Seconds for which a lock with a locked row is remembered."""
ALONE = 0.005
"""Seconds after a grant for which no other client is expected to wait."""


@dataclass(frozen=True, slots=True)
class Context:
    """The context that the claims, modes and registers of one client share."""

    address: str
    """The address of the server, without the password."""
    mode: str
    client: str
    """The id by which other clients of the server find this one."""
    settings: Settings
    statements: Statements
    sessions: Sessions
    events: EventQueue
    random: Random
    clock: Clock
    """The local clock."""
    timeout: float
    """The command timeout, in seconds."""
    _crowded: dict[str, float] = field(default_factory=dict)
    """The locks of which a row was locked of late, and until when that is remembered; see :meth:`crowded`."""

    @property
    def facts(self) -> ServerFacts:
        """The facts about the server."""
        if self.sessions.facts is None:
            raise RuntimeError("the client of this backend is not open: enter it with `async with` first")
        return self.sessions.facts

    def key(self, name: str, family: Family) -> str:
        """Return the name of a lock at the server: a digest, because names there are short, and blind to case on MySQL.

        The database and the table go into it, because user locks are those of the whole server.
        """
        parts = (self.mode, *self.facts.scope, self.settings.namespace, family.value, name)
        return digest("\0".join(parts))

    def granted(self, claim: Claim, token: int, count: int, sent: float) -> Grant:
        """Return the grant of a hold that the server has had for a full ttl since ``sent`` or later.

        The server does not report that other clients wait. So for a moment none are expected, because a hand-over inside
        the process is so much cheaper than one between processes; after it, others are.
        """
        if count > 1:
            claim.note_waiters(self.clock() + ALONE)
        return Grant(token, count, sent + claim.request.valid_for, demand=False)

    # --- execution of statements

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` returns, if it ends within the command timeout; raise :class:`BackendUnavailable` if not.

        This is the one deadline of whatever is executed inside: opening connections and repetitions included. Commands
        under way are not interrupted, only the waiting for them is; nor are they by cancelling it.
        """
        try:
            async with asyncio.timeout(self.timeout):
                return await work
        except TimeoutError as error:
            raise BackendUnavailable(f"{self.address}: no answer within {self.timeout:g} s") from error

    async def execute(
        self,
        packet: str,
        session: MySQLSession | None = None,
        *,
        atomic: bool = False,
        urgent: bool = False,
        repeat: bool = True,
    ) -> list[Result]:
        """Execute a packet on ``session``, or on the main one; to be called inside of :meth:`within`.

        It is sent again for as long as the server undoes it: that is how two statements about one row end on two nodes of a
        cluster, and sometimes on one server. The statements before it in the packet must bear that. With
        ``repeat`` it is also sent again after KILL QUERY, and once after a main session was lost: such packets
        find their own effects. Cancelling it ends that; a packet that was sent is carried out.
        """
        again = False
        while True:
            chosen = session or await self.sessions.main()
            try:
                return await chosen.run(packet, atomic=atomic, urgent=urgent)
            except DeadlockDetected:
                pass
            except BackendUnavailable as error:
                if not repeat:
                    raise
                if not chosen.alive:
                    if session is not None or again:
                        raise
                    again = True
                    continue
                if not hit(error):
                    raise
            await self.pause(UNDONE)

    async def change(
        self, packet: str, session: MySQLSession | None = None, *, key: str = "", repeat: bool = True
    ) -> tuple[list[Result], float]:
        """Execute a packet that changes a row, again while that is locked; return the answers and when it was sent.

        With the ``key`` of a lock, a row that was locked of late is first asked for without waiting: other statements of this
        client are not to wait behind this one. Cancelling it is cancelling :meth:`execute`.
        """
        while True:
            probe = f"{self.statements('unlocked', id=quote(key))}; " if key and self.crowded(key) else ""
            sent = self.clock()
            try:
                return await self.execute(probe + packet, session, repeat=repeat), sent
            except (BackendUnavailable, asyncio.CancelledError) as error:
                if key:
                    self.failed(key, error, sent)
                if code(error.__cause__) not in NOT_NOW:
                    raise
            await self.pause(RETRY)

    async def ask(self, packet: str, *, urgent: bool = False) -> list[Result]:
        """Execute a packet within the command timeout; cancelling it is cancelling :meth:`execute`."""
        return await self.within(self.execute(packet, urgent=urgent))

    def failed(self, key: str, error: BaseException, sent: float) -> None:
        """Remember a lock as crowded if a statement about it, sent at ``sent``, failed because one of its rows is locked.

        A session does one thing at a time, so a statement that waits for a row delays all that is asked behind it. For
        :data:`MEMORY` seconds, statements about the lock go another way, or ask first without waiting.
        """
        now = self.clock()
        # The caller may have less time than the statement.
        slow = isinstance(error, asyncio.CancelledError) and now - sent >= self.timeout / 2
        if slow or locked(error):
            # Here, because this is rare: the dict must not grow.
            for other in [other for other, until in self._crowded.items() if until <= now]:
                del self._crowded[other]
            self._crowded[key] = now + MEMORY

    def crowded(self, key: str) -> bool:
        """Return whether a statement about this lock has waited in vain of late."""
        return bool(self._crowded) and self._crowded.get(key, 0.0) > self.clock()

    async def pause(self, seconds: tuple[float, float]) -> None:
        """Sleep for a random time between these, so that clients that met do not meet again; cancelling it ends the sleep."""
        # Not a Backoff: what is waited for is the end of another transaction, which longer pauses would only notice later.
        await asyncio.sleep(self.random.uniform(*seconds))
