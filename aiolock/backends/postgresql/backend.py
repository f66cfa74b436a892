"""The PostgreSQL backend: the engine over rows, on a table of the server."""

from __future__ import annotations

from typing import Any

from aiolock.backends.callers import Callers
from aiolock.backends.experimental import warn_experimental
from aiolock.backends.postgresql.confirmation import confirm
from aiolock.backends.postgresql.diagnosis import diagnose
from aiolock.backends.postgresql.schema import Statements
from aiolock.backends.postgresql.store import PostgreSQLStore
from aiolock.backends.postgresql.transaction_lock import CallerAdvisoryLock
from aiolock.backends.postgresql.url import parameters
from aiolock.backends.rows.backend import RowBackend
from aiolock.backends.rows.claim import RowClaim
from aiolock.core.backend import Request
from aiolock.core.capabilities import CallerLock, Confirmation, TransactionLocks
from aiolock.errors import forgets_arguments
from aiolock.types import Finding

__all__ = ["PostgreSQLBackend"]


class PostgreSQLBackend(RowBackend, TransactionLocks, Confirmation[RowClaim]):
    """One PostgreSQL (15 or later) server.

    :param url: ``postgresql://user:password@host:5432/database``; ``postgres://`` and ``postgresql+asyncpg://`` are the
        same. The other options may also stand in its query.
    :param schema: ``auto`` (the default) creates the table where it is missing; ``check`` leaves that to an administrator.
    :param table: the name of the table, or ``schema.table``; ``aiolock``, in the schema ``public``.
    :param tls: ``off``, ``encrypt`` (any certificate), ``verify`` (authorities of the system or of ``tls_ca``), or an
        :class:`ssl.SSLContext`.
    :param tls_ca: a file with the authorities that certificates are verified with.
    :param unix_socket: the folder of the server's socket, instead of a host; the port is a part of the socket's name.
    :param failover: ``furthest`` declares that of several standbys the one which has most is promoted, so that
        ``synchronous_standby_names`` need not list all of them for ``survives-failover``.
    """

    name = "PostgreSQL"

    store: PostgreSQLStore

    @forgets_arguments
    def __init__(
        self,
        url: str,
        *,
        schema: str | None = None,
        table: str | None = None,
        tls: Any = None,
        tls_ca: Any = None,
        unix_socket: str | None = None,
        failover: str | None = None,
    ) -> None:
        options = {
            "schema": schema,
            "table": table,
            "tls": tls,
            "tls_ca": tls_ca,
            "unix_socket": unix_socket,
            "failover": failover,
        }
        self._address, given = parameters(url, options)
        self.address = self._address.text
        self._create = given.get("schema", "auto") == "auto"
        self._table = given.get("table", "public.aiolock")
        self._furthest = "failover" in given
        self._statements = Statements(self._table)
        self._callers = Callers()

    def make_store(self) -> PostgreSQLStore:
        """Return the store of this opening."""
        return PostgreSQLStore(
            self._address,
            self._table,
            create=self._create,
            furthest=self._furthest,
            promises=self._promise,
        )

    def _promise(self, capabilities: frozenset[str]) -> None:
        self.capabilities = capabilities

    async def open(self) -> None:
        """Open the store."""
        self._callers.closed = False
        await super().open()
        if "exclusion" not in self.capabilities:
            warn_experimental(
                "locks on YugabyteDB are experimental: they were never run on it, and do not promise exclusion"
            )

    async def aclose(self) -> None:
        """Give callers their connections back, and end sessions, tasks and the store."""
        if hasattr(self, "settings"):
            await self._callers.aclose(self.settings.command_timeout)
        await super().aclose()

    def caller_lock(self, request: Request, connection: object) -> CallerLock:
        """Return an advisory lock in the caller's own transaction."""
        return CallerAdvisoryLock(self.store, self.address, self.settings, self._callers, request, connection)

    async def confirm(self, claim: RowClaim, connection: object) -> bool:
        """Lock the row of a hold in the caller's own transaction, and return whether it is there."""
        return await confirm(
            self.store,
            self._statements,
            self._callers,
            claim,
            connection,
            self.address,
            self.settings.command_timeout,
        )

    async def examine(self) -> list[Finding]:
        """Diagnose the server over a new connection."""
        return await diagnose(self._address, self._statements, self.settings, furthest=self._furthest)
