"""The MySQL and MariaDB backend: sessions, the schema, and one of three modes."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from aiolock.backends.callers import Callers
from aiolock.backends.experimental import warn_experimental
from aiolock.backends.mysql import schema
from aiolock.backends.mysql.caller import confirm
from aiolock.backends.mysql.connection import MySQLSession
from aiolock.backends.mysql.context import Context, Statements, quote
from aiolock.backends.mysql.diagnosis import (
    GALERA,
    capabilities,
    cluster,
    diagnose,
    experimental,
    processlist,
    refuse,
    refuse_product,
    variables,
)
from aiolock.backends.mysql.lease_mode import LeaseMode
from aiolock.backends.mysql.listener import presence
from aiolock.backends.mysql.pool import ServerFacts, Sessions
from aiolock.backends.mysql.protocol import Result
from aiolock.backends.mysql.register import MySQLRegister
from aiolock.backends.mysql.renewal import BATCH, RowClaim
from aiolock.backends.mysql.row_mode import RowMode
from aiolock.backends.mysql.session_mode import SessionMode, silence_of
from aiolock.backends.mysql.transaction_lock import CallerRowLock
from aiolock.backends.mysql.url import parameters
from aiolock.core.backend import Claim, Renewal, Request, Settings
from aiolock.core.capabilities import (
    Administration,
    CallerLock,
    Confirmation,
    Diagnosis,
    Purging,
    Register,
    RegisterStore,
    TransactionLocks,
)
from aiolock.errors import BackendRefused, BackendUnavailable, UnsupportedKind, forgets_arguments
from aiolock.types import Family, Finding, LockInfo, Mode
from aiolock.validation import check_idle

__all__ = ["MySQLBackend"]

MODES: dict[str, type[LeaseMode | SessionMode | RowMode]] = {
    "lease": LeaseMode,
    "session": SessionMode,
    "row": RowMode,
}
MOST = 16
"""The default of ``connections=``."""


class MySQLBackend(Administration, RegisterStore, TransactionLocks, Confirmation[Claim], Purging, Diagnosis):
    """One MySQL (8.0 or later) or MariaDB (10.6 or later) server.

    :param url: ``mysql://user:password@host:3306/database``; ``mariadb://`` is the same. The other options may also stand
        in its query.
    :param mode: ``lease`` (the default): rows with an expiry, durable tokens; ``session``: user locks; ``row``: row
        locks in open transactions.
    :param schema: ``auto`` creates the table where it is missing; ``manual`` leaves that to an administrator.
    :param table: the name of the table.
    :param connections: the number of connections that may wait at the server, or hold what they waited for.
    :param tls: ``off``, ``encrypt`` (any certificate), ``verify`` (authorities of the system or of ``tls_ca``), or an
        :class:`ssl.SSLContext`.
    :param tls_ca: a file with the authorities that certificates are verified with.
    :param unix_socket: a socket in the file system, instead of host and port.
    """

    name = "MySQL"
    _mode_name = "lease"
    concurrency = 32
    """Enough that the server is never idle, and so few that other requests do not wait for long behind them."""
    renewal_limit = BATCH

    sessions: Sessions
    mode: LeaseMode | SessionMode | RowMode

    @forgets_arguments
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
        options = {"mode": mode, "schema": schema, "table": table, "connections": connections}
        options |= {"tls": tls, "tls_ca": tls_ca, "unix_socket": unix_socket}
        self._address, given = parameters(url, options)
        self.address = self._address.text
        self._schema = given.get("schema", "auto")
        self._most = given.get("connections", MOST)
        self._mode_name = given.get("mode", self._mode_name)
        self.shows_tokens = self.keeps_values = self._mode_name == "lease"
        self._table = given.get("table", "aiolock")
        self._opened = False
        self._experimental = ""
        """The product, if locks are experimental there."""
        self.callers = Callers()
        """Connections of callers on which a statement of this client is under way."""

    def __repr__(self) -> str:
        return f"<MySQLBackend {self.address} {self._mode_name}>"

    # --- opening and closing

    def bind(self, settings: Settings) -> None:
        """Take the client's settings, and make the statements and sessions."""
        super().bind(settings)
        self._statements = Statements(self._table, self._address.database, settings.namespace)
        self._prepare(settings)

    def _prepare(self, settings: Settings) -> None:
        """Make the sessions, context and mode of one opening; a client that was refused at open may be opened again."""
        self.sessions = Sessions(
            self._session,
            self._check,
            self._enter,
            lambda session: self.mode.ended(session),
            most=self._most,
            timeout=settings.command_timeout,
            clock=settings.clock,
        )
        self._context = Context(
            self.address,
            self._mode_name,
            secrets.token_hex(16),
            settings,
            self._statements,
            self.sessions,
            self.events,
            settings.random,
            settings.clock,
            settings.command_timeout,
        )
        self.mode = MODES[self._mode_name](self._context)

    def _session(self, ended: Callable[[MySQLSession], None], silence: int) -> MySQLSession:
        settings, statements = self.settings, self._statements
        silence = silence or silence_of(settings.ttl)
        setup = statements(
            "setup",
            presence=quote(presence(self._context.client)),
            wait_timeout=silence,
            lock_wait_timeout=max(1, math.ceil(settings.command_timeout)),
        )

        def lost(session: MySQLSession) -> None:
            # Sessions that are neither used nor needed may be ended by the server.
            if settings.outages is not None and session.lost and (session.locks or not session.contended):
                why = (
                    f"the server {session.server} takes no writes any more"
                    if session.demoted
                    else "the session ended"
                )
                settings.outages.down(self, self.address, why)
            ended(session)

        lateness = settings.ttl if self._mode_name != "lease" else 0.0
        setup = f"{statements('settings')}; {setup}"
        session = MySQLSession(
            self._address,
            setup,
            settings.clock,
            settings.command_timeout,
            lost,
            lateness,
            lambda version: refuse_product(version, self.address),
        )
        session.silence = silence
        return session

    def _check(self, answers: list[Result]) -> ServerFacts:
        """Refuse a server on which locks would not exclude; return the facts that statements depend on."""
        facts = variables(answers)
        try:
            refuse(facts, self._mode_name, self.address)
        except BackendRefused as error:
            if error.retryable and self.sessions.facts is not None:
                # The address led to a server that takes writes, and will again.
                raise BackendUnavailable(str(error)) from error
            raise
        if self.settings.outages is not None:
            self.settings.outages.up(self, self.address)
        self.capabilities = capabilities(facts, self._mode_name)
        self._experimental = experimental(facts)
        _, moves, database, blind, _ = answers[-1].rows[0]
        # What servers have made up for themselves: one on MySQL, the other on newer MariaDBs.
        numbers = [f", @@{name}" for name in ("server_uuid", "server_uid") if name in facts]
        return ServerFacts(
            across=cluster(facts) != "",
            galera=cluster(facts) == GALERA,
            clock_stands=not int(moves),
            scope=(str(database), self._table.lower() if int(blind) else self._table),
            rolls_back=facts.get("innodb_rollback_on_timeout", "OFF").upper() in {"ON", "1"},
            processlist=processlist(facts),
            server=self._statements("server", numbers="".join(numbers)),
            fine_times="MariaDB" in facts.get("version", ""),
        )

    async def _enter(self, session: MySQLSession, main: bool) -> None:
        """Refuse clients of another data format, before the session can have locks."""
        if self._mode_name == "session":
            await self._context.within(schema.announce(self._context, session))
        elif main:
            await self._context.within(schema.check_tables(self._context, session))

    async def open(self) -> None:
        """Connect, check the server, and create the tables."""
        if self.sessions.closed:
            self._prepare(self.settings)
        self.callers.closed = False
        self._opened = True
        await self.sessions.main()
        if self._experimental:
            warn_experimental(
                f"locks on {self._experimental} are experimental: they were never run on it, and do not promise exclusion"
            )
        if self._mode_name != "session":
            await schema.ensure(self._context, create=self._schema == "auto")
        self.sessions.tasks.spawn(self._keep_alive(), "aiolock-mysql-keep-alive")

    async def purge(self, idle: float) -> int:
        """Delete the rows of this namespace that were not needed for ``idle`` seconds; return the number of locks.

        See :func:`aiolock.mysql.purge`, which is for programs.
        """
        seconds = self.check_purge(idle)
        if not self._opened:
            raise RuntimeError("the client of this backend is not open: enter it with `async with` first")
        return await schema.purge(self._context, round(seconds * 1_000_000))

    def check_purge(self, idle: object) -> float:
        """Return ``idle`` as seconds, if there may be rows to purge."""
        if self._mode_name == "session":
            advice = "use the mode that has made them"
            raise UnsupportedKind("rows to purge", f"{self.name} with ?mode=session", advice)
        return check_idle(idle)

    async def aclose(self) -> None:
        """Close every connection."""
        if self._opened:
            await self.callers.aclose(self.settings.command_timeout)
            await self.sessions.aclose()

    async def _keep_alive(self) -> None:
        """Ping sessions that are needed before the server ends them."""
        pause = self.settings.ttl / 6
        while True:
            await asyncio.sleep(pause)
            now = self.settings.clock()
            for session in self.sessions.used:
                if session.idle and now - session.used >= pause:
                    session.send(self._statements("ping"))

    # --- the contract

    def claim(self, request: Request) -> Claim:
        """Return a new claim of the mode."""
        mode = self.mode if request.kind.mode is Mode.MUTEX else self._lease_mode(request.kind.family.value)
        return mode.claim(request)

    def _lease_mode(self, what: str) -> LeaseMode:
        if not isinstance(self.mode, LeaseMode):
            raise UnsupportedKind(what, f"{self.name} with ?mode={self._mode_name}", "use ?mode=lease")
        return self.mode

    def renewal_group(self, claim: Claim) -> Hashable:
        """Return what the claims in one statement of the mode have in common."""
        return self.mode.renewal_group(claim)

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Prolong the holds of one group, in as few statements as the mode can."""
        return await self.mode.renew(claims)

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Return holders and waiters, as far as the server knows."""
        return await self._context.within(self.mode.inspect(name, family))

    async def force_release(self, name: str, family: Family, token: int | None = None) -> bool:
        """Take a lock from its holders, or from the one that has a token."""
        return await self._context.within(self.mode.force_release(name, family, token))

    def caller_lock(self, request: Request, connection: object) -> CallerLock:
        """Return a row lock in the caller's own transaction; in the row mode."""
        if not isinstance(self.mode, RowMode):
            raise UnsupportedKind(
                "lock inside a transaction", f"{self.name} with ?mode={self._mode_name}", "use ?mode=row"
            )
        return CallerRowLock(self._context, self.mode, self.callers, request, connection)

    async def confirm(self, claim: Claim, connection: object) -> bool:
        """Lock the row of a hold in the caller's own transaction, and return whether it is there; in the lease mode."""
        if not isinstance(claim, RowClaim):
            advice = "use connection=" if self._mode_name == "row" else "use ?mode=lease"
            raise UnsupportedKind(
                "confirm() inside a transaction", f"{self.name} with ?mode={self._mode_name}", advice
            )
        return await confirm(self._context, self.callers, claim, connection, self.mode.renew)

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Write the reason to the row, which the renewals of its holders read."""
        mode = self._lease_mode("request_release")
        return await self._context.within(mode.request_release(name, family, reason))

    async def set_limit(self, name: str, limit: int) -> None:
        """Give a semaphore another number of permits."""
        sharing = self._lease_mode(Family.SEMAPHORE.value).sharing
        await self._context.within(sharing.set_limit(name, limit))

    def register(self, name: str, family: Family) -> Register:
        """Return a row of the table of registers; in the lease mode."""
        listener = self._lease_mode(family.value).sharing.listener
        return MySQLRegister(self._context, listener, name, family)

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Return every lock of the namespace that is held or waited for; in the other modes the server does not know."""
        return await self._context.within(self._lease_mode("list of locks").names(pattern))

    async def empty(self) -> None:
        """Delete the rows of the namespace, also those that were to stay for years."""
        if self._mode_name != "session":
            await schema.purge(self._context, -(10**15))

    async def diagnose(self) -> list[Finding]:
        """Diagnose the server."""
        return await diagnose(self._address, self._statements, self.settings, self._mode_name)
