"""The MySQL and MariaDB backend: sessions, the schema, and one of three modes."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

from aiolock.backends.mysql import tables
from aiolock.backends.mysql.address import Address, parameters
from aiolock.backends.mysql.asking import Asking
from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.crowded import Crowded
from aiolock.backends.mysql.doctor import diagnose
from aiolock.backends.mysql.document import MySQLDocument
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.guest import Guests
from aiolock.backends.mysql.lease import LeaseMode
from aiolock.backends.mysql.loan import RowLoan
from aiolock.backends.mysql.probe import GALERA, cluster, processlist, promises, refuse, variables
from aiolock.backends.mysql.row_claim import RowMode
from aiolock.backends.mysql.session_claim import SessionMode
from aiolock.backends.mysql.sessions import Sessions
from aiolock.backends.mysql.sharing import Sharing
from aiolock.backends.mysql.statements import Statements, quote
from aiolock.backends.mysql.turns import ALONE
from aiolock.contract import (
    Bid,
    Claim,
    Document,
    Family,
    Finding,
    Grant,
    Loan,
    LockInfo,
    Mode,
    Notice,
    Renewal,
    Settings,
)
from aiolock.errors import (
    ConfigError,
    UnsupportedKind,
    shorten,
)
from aiolock.names import digest
from aiolock.notices import Notices

__all__ = ["MySQLBackend"]

T = TypeVar("T")

MODES: dict[str, type[LeaseMode | SessionMode | RowMode]] = {
    "lease": LeaseMode,
    "session": SessionMode,
    "row": RowMode,
}
TABLE = re.compile(r"[A-Za-z0-9_]{1,48}")
MOST = 16
"""How many sessions wait, or hold what they waited for, unless `connections=` says otherwise."""


class MySQLBackend(Asking):
    """One MySQL (8.0 or later) or MariaDB (10.6 or later) server.

    :param url: ``mysql://user:password@host:3306/database``; ``mariadb://`` is the same. What follows may also stand
        in its query.
    :param mode: ``lease`` (the default): rows with an expiry, durable tokens; ``session``: user locks; ``row``: row
        locks in open transactions.
    :param schema: ``auto`` creates the table where it is missing; ``manual`` leaves that to an administrator.
    :param table: the name of the table.
    :param connections: how many connections may wait at the server, or hold what they waited for.
    :param tls: ``off``, ``encrypt`` (any certificate), ``verify`` (authorities of the system or of ``tls_ca``), or an
        :class:`ssl.SSLContext`.
    :param tls_ca: a file with the authorities that certificates are verified with.
    :param unix_socket: a socket in the file system, instead of host and port.
    """

    name = "MySQL"

    def __init__(
        self,
        url: str,
        *,
        mode: str | None = None,
        schema: str | None = None,
        table: str | None = None,
        connections: int | None = None,
        tls: Any = None,
        tls_ca: Any = None,
        unix_socket: str | None = None,
    ) -> None:
        options = {
            "mode": mode,
            "schema": schema,
            "table": table,
            "connections": connections,
            "tls": tls,
            "tls_ca": tls_ca,
            "unix_socket": unix_socket,
        }
        address, given = parameters(url, options, ("mode", "schema", "table", "connections"))
        self._address: Address = address
        self.address = address.text
        self._schema = _one_of("schema", given.get("schema", "auto"), ("auto", "manual"))
        self._most = _count(given.get("connections", MOST))
        chosen = _one_of("mode", given.get("mode", "lease"), tuple(MODES))
        if not isinstance(name := given.get("table", "aiolock"), str) or not TABLE.fullmatch(name):
            raise ConfigError(f"table must be 1 to 48 characters of A-Z a-z 0-9 _, not {shorten(name)}")
        self.statements = Statements(name, address.database)
        self.client = secrets.token_hex(16)
        """How other clients of the server find this one."""
        self.across = False
        """Whether the server is one of several that take locks, and user locks are each node's own."""
        self.galera = False
        """Whether a read must be told to wait for what other nodes have committed."""
        self.clock_stands = False
        """Whether SYSDATE is NOW here, and says when a statement began instead of what the time is."""
        self.scope: tuple[str, str] | None = None
        """The database and the table by the names that the server has for them, which all clients see alike."""
        self.rolls_back = False
        """Whether the server ends a whole transaction when one of its statements has waited for too long."""
        self.processlist = ""
        """The table with the sessions of the server and their statements."""
        self.fine_times = False
        """Whether that table says to less than a second how long statements have been running."""
        self.crowded = Crowded()
        self.guests = Guests()
        """Connections of callers on which something of ours is under way."""
        self.mode = MODES[chosen](self)
        self.notices = Notices()
        self.random = Random()

    def __repr__(self) -> str:
        return f"<MySQLBackend {self._address.text} {self.mode.name}>"

    # --- opening and closing

    def bind(self, settings: Settings) -> None:
        """Take over what the client decides."""
        super().bind(settings)
        # The server counts whole seconds.
        self.silence = max(1, math.ceil(settings.ttl))

    def _session(self, ended: Callable[[Session], None], silence: int) -> Session:
        silence = silence or self.silence
        words = {
            "presence": quote(Sharing.presence(self.client)),
            "wait_timeout": silence,
            "patience": max(1, math.ceil(self.settings.command_timeout)),
        }
        setup = f"{self.statements('settings')}; {self.statements('setup', **words)}"

        def lost(session: Session) -> None:
            outages = self.settings.outages
            # Those that are neither used nor needed may be ended by the server.
            if outages is not None and session.lost and (session.locks or not session.contended):
                outages.down(self, self.address, "the session ended")
            ended(session)

        patience = self.settings.ttl if self.mode.name != "lease" else 0.0
        session = Session(self._address, setup, self.settings.clock, lost, patience)
        session.silence = silence
        return session

    def _check(self, answers: list[Result]) -> None:
        if self.settings.outages is not None:
            self.settings.outages.up(self, self.address)
        facts = variables(answers)
        refuse(facts, self.mode.name, self._address.text)
        self.across = cluster(facts) != ""
        self.galera = cluster(facts) == GALERA
        _, moves, database, blind = answers[-1].rows[0]
        self.clock_stands = not int(moves)
        self.scope = (str(database), self.statements.table.lower() if int(blind) else self.statements.table)
        self.rolls_back = facts.get("innodb_rollback_on_timeout", "OFF").upper() in {"ON", "1"}
        self.processlist = processlist(facts)
        self.fine_times = "MariaDB" in facts.get("version", "")
        self.capabilities = promises(facts, self.mode.name)

    async def open(self) -> None:
        """Connect, look at the server, and see to the table."""
        self.sessions = Sessions(
            self._session,
            self._check,
            most=self._most,
            timeout=self.settings.command_timeout,
            ended=self.mode.ended,
            clock=self.settings.clock,
            enter=self.mode.enter,
        )
        await self.sessions.main()
        if self.mode.name != "session":
            await self.ensure_schema(create=self._schema == "auto")
        self.sessions.spawn(self._keep_talking(), "aiolock-mysql-pulse")

    async def ensure_schema(self, *, create: bool = True) -> None:
        """See that the tables are there and whole; create them if they are missing and ``create`` is true.

        Raises :class:`BackendRefused`, or :class:`UnsafeBackend` for tables that are there, with the statement that an
        administrator has to run.
        """
        await tables.ensure(self, create=create)

    async def purge(self, idle: float) -> int:
        """Delete the rows of this namespace that nobody has needed for ``idle`` seconds; how many locks they were.

        See :func:`aiolock.mysql.purge`, which is for programs.
        """
        microseconds = self.check_purge(idle)
        if not hasattr(self, "sessions"):
            raise RuntimeError("the client of this backend is not open: enter it with `async with` first")
        return await tables.purge(self, microseconds)

    def check_purge(self, idle: object) -> int:
        """The µs of ``idle``, if there may be rows to purge; raises what :meth:`purge` raises before any I/O."""
        if isinstance(self.mode, SessionMode):
            raise UnsupportedKind(
                "rows to purge", f"{self.name} with ?mode=session", "use the mode that has made them"
            )
        return tables.check_idle(idle)

    async def aclose(self) -> None:
        """Close every connection."""
        if hasattr(self, "sessions"):
            if isinstance(self.mode, SessionMode):
                self.mode.lookout.stop()
            await self.guests.aclose(self.settings.command_timeout)
            await self.sessions.aclose()

    async def _keep_talking(self) -> None:
        """Sessions that are needed say something in time, so that the server keeps them."""
        pause = self.settings.ttl / 3
        while True:
            await asyncio.sleep(pause / 2)
            now = self.settings.clock()
            for session in self.sessions.used:
                if session.idle and now - session.used >= pause / 2:
                    session.send(self.statements("ping"), self.settings.command_timeout)

    # --- for the modes

    def key(self, name: str, family: Family) -> str:
        """The name of a lock at the server: a digest, because names there are short, and blind to case on MySQL.

        It contains the database and the table, because user locks are those of the whole server.
        """
        if self.scope is None:
            raise RuntimeError("the client of this backend is not open: enter it with `async with` first")
        return digest("\0".join((self.mode.name, *self.scope, self.settings.namespace, family.value, name)))

    def granted(self, claim: Claim, token: int, count: int, sent: float) -> Grant:
        """The grant of a hold that the server has had for a full ttl since ``sent`` or later.

        Nobody tells a holder that others wait. So for a moment it is taken that nobody does, because passing the hold on
        inside the process is so much cheaper than passing it on between processes; then it is taken that somebody does.
        """
        if count > 1 and claim.demanded_at is None:
            claim.demanded_at = self.settings.clock() + ALONE
        return Grant(token, count, sent + claim.bid.certain, demand=False)

    # --- the contract

    def claim(self, bid: Bid) -> Claim:
        """A new claim of the mode."""
        if bid.kind.mode is not Mode.MUTEX and self.mode.name != "lease":
            raise self._unsupported(bid.kind.family.value)
        return self.mode.claim(bid)

    def _unsupported(self, what: str) -> UnsupportedKind:
        return UnsupportedKind(what, f"{self.name} with ?mode={self.mode.name}", "use ?mode=lease")

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Prolong holds, in as few statements as the mode can."""
        return await self.mode.renew(claims)

    async def notice(self) -> Notice:
        """The next thing that the end of a session means."""
        return await self.notices.get()

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Who holds and who waits."""
        return await self.within(self.mode.inspect(name, family))

    async def force_release(self, name: str, family: Family) -> bool:
        """Take a lock from its holder."""
        return await self.within(self.mode.force_release(name, family))

    def borrow(self, bid: Bid, connection: object) -> Loan:
        """A row lock in the caller's own transaction; in the row mode."""
        if not isinstance(self.mode, RowMode):
            return super().borrow(bid, connection)
        return RowLoan(self.mode, bid, connection)

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Leave a word for its holders, which their renewals read."""
        if not isinstance(self.mode, LeaseMode):
            raise self._unsupported("request_release")
        return await self.within(self.mode.request_release(name, family, reason))

    async def set_limit(self, name: str, limit: int) -> None:
        """Give a semaphore another number of permits."""
        if not isinstance(self.mode, LeaseMode):
            raise self._unsupported(Family.SEMAPHORE.value)
        await self.within(self.mode.sharing.set_limit(name, limit))

    def document(self, name: str, family: Family) -> Document:
        """A row of the table of documents; in the lease mode."""
        if not isinstance(self.mode, LeaseMode):
            raise self._unsupported(family.value)
        return MySQLDocument(self.mode.sharing, name, family)

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Every lock of the namespace that is held or waited for; in the other modes the server does not know."""
        if not isinstance(self.mode, LeaseMode):
            raise self._unsupported("list of locks")
        return await self.within(self.mode.names(pattern))

    async def diagnose(self) -> list[Finding]:
        """What the server is like, and what would be better."""
        return await diagnose(self._address, self.statements, self.settings, self.mode.name)


def _one_of(what: str, value: object, words: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in words:
        raise ConfigError(f"{what} must be one of {', '.join(words)}, not {shorten(value)}")
    return value


def _count(value: object) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10_000:
        raise ConfigError(f"connections must be a number from 1 to 10000, not {shorten(value)}")
    return int(text)
